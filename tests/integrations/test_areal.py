"""AReaL: the diff that adds hooks to its disk weight update, and the patched functions, from a trainer to a host.

The files come from AReaL's wheel, or from the checkout of github.com/areal-project/AReaL that SPARSERL_AREAL names; the
diff was made against commit cbff54d645d2cd8ee1f1c358a82f3f473588433d (22 August 2026). Functions are run as they are
there; HTTP, and what they import beside it, have stand-ins here.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import importlib
import os
import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import pytest

from sparserl.integrations import areal, disk_sync
from sparserl.session.store.retention import read_head
from sparserl.transport.stores.opening import open_store
from tests.integrations.test_slime import read, written
from tests.integrations.upstream import patched, run_definitions
from tests.integrations.wheels import wheel

VERSION = "1.0.4"
SERVERS = {"sglang_remote": "/update_weights_from_disk", "vllm_remote": "/areal_update_weights"}


@pytest.fixture(name="text", scope="module", params=["wheel", "checkout"])
def _text(request):
    """A function that gives the text of a file of AReaL."""
    if request.param == "wheel":
        return wheel("areal", VERSION).text
    if "SPARSERL_AREAL" not in os.environ:
        pytest.skip("SPARSERL_AREAL names no checkout of AReaL")
    return lambda name: (Path(os.environ["SPARSERL_AREAL"]) / name).read_text()


@pytest.fixture(autouse=True)
def _environment(tmp_path, monkeypatch):
    disk_sync.publishers.clear()
    monkeypatch.setattr(areal, "_written", [])
    monkeypatch.setenv("SPARSERL_URL", f"file://{tmp_path}/store")


class NameResolve(dict):
    """AReaL's key-value service, in this process."""

    def add(self, name, value, **_options):
        self[name] = value

    def delete(self, name):
        del self[name]

    def wait(self, name, timeout):
        return self[name]


class Servers:
    """What AReaL posts to, on a host with a disk of its own: it loads the checkpoint at the path that it is told."""

    def __init__(self, trainer: Path, host: Path) -> None:
        self._trainer = trainer
        self._host = host
        self.endpoints = []
        self.loaded = {}

    def path(self, path: str) -> Path:
        """The path as it is on this host."""
        return self._host / Path(path).relative_to(self._trainer)

    async def post(self, *, endpoint, payload, **_options):
        self.endpoints.append(endpoint)
        self.loaded = read(Path(payload["model_path"]))


def _import_from_string(path):
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


@pytest.mark.parametrize("server", SERVERS)
def test_from_a_trainer_to_a_host(text, tmp_path, server):
    """Every version that AReaL's trainer writes is loaded by a server that does not share its disk, bit for bit."""
    files = patched("areal.diff", text, tmp_path / "areal")
    names = SimpleNamespace(update_weights_from_disk=lambda *parts: "/".join(map(str, parts)))
    name_resolve = NameResolve()
    servers = Servers(tmp_path / "trainer", tmp_path / "host")
    backend_class = {"sglang_remote": "SGLangBackend", "vllm_remote": "VLLMBackend"}[server]
    structs = {
        "HttpRequest": lambda **fields: SimpleNamespace(**{"method": "POST", "best_effort": False} | fields),
        "WeightUpdateRequests": SimpleNamespace,
    }
    method = f"{backend_class}.build_disk_weight_update_requests"
    backend = run_definitions(text(f"areal/engine/{server}.py"), [method], structs)
    rollout = run_definitions(
        (files / "areal/infra/remote_inf_engine.py").read_text(),
        ["_update_weights_from_disk"],
        {
            "names": names,
            "name_resolve": name_resolve,
            "datetime": datetime,
            "asyncio": asyncio,
            "uvloop": asyncio,
            "aiohttp": SimpleNamespace(
                ClientSession=lambda **_: contextlib.nullcontext(), ClientTimeout=lambda **_: None
            ),
            "get_default_connector": lambda: None,
            "arequest_with_retry": servers.post,
            "import_from_string": _import_from_string,
        },
    )
    trainer = run_definitions(
        (files / "areal/engine/fsdp_engine.py").read_text(),
        ["FSDPEngine._update_weights_from_disk"],
        {
            "Future": Future,
            "dist": SimpleNamespace(get_rank=lambda: 0, barrier=lambda group: None),
            "names": names,
            "name_resolve": name_resolve,
            "datetime": datetime,
            "current_platform": SimpleNamespace(synchronize=lambda: None),
            "import_from_string": _import_from_string,
        },
    )
    saved = {}

    def save(path, tokenizer, processor):
        version = int(path.rpartition("_v")[2])
        written(tmp_path / "trainer", version).rename(path)
        saved.update(read(Path(path)))

    def update(meta):
        """AReaL's rollout worker begins at once, and waits until the trainer has written."""
        there = copy.copy(meta)
        there.path = str(servers.path(meta.path))
        maker = SimpleNamespace(build_disk_weight_update_requests=lambda m: backend[method.rpartition(".")[2]](None, m))
        arguments = (maker, "e", "t", 0, ["host:1"], there, 3, 10.0, "sparserl.integrations.areal.fetch")
        return SimpleNamespace(result=lambda: rollout["_update_weights_from_disk"](*arguments))

    engine = SimpleNamespace(
        rollout_engine=SimpleNamespace(
            pause_generation=lambda: None, continue_generation=lambda: None, update_weights_from_disk=update
        ),
        config=SimpleNamespace(
            experiment_name="e", trial_name="t", weight_written_hook="sparserl.integrations.areal.publish"
        ),
        tokenizer=None,
        processor=None,
        cpu_group=None,
        get_version=lambda: 0,
        _save_model_to_hf=save,
    )
    for version in (1, 2, 3):
        path = tmp_path / "trainer" / f"weight_update_v{version}"
        meta = SimpleNamespace(type="disk", path=str(path), use_lora=False, version=version)
        trainer["_update_weights_from_disk"](engine, meta)
        assert saved == servers.loaded
        shutil.rmtree(servers.path(meta.path), ignore_errors=True)  # as AReaL does when servers have loaded it
    assert servers.endpoints == [SERVERS[server]] * 3
    assert [p.name for p in (tmp_path / "trainer").iterdir()] == ["weight_update_v3"]
    assert sorted(p.name for p in (tmp_path / "host").glob("weight*")) == ["weight_update_v2", "weight_update_v3"]


def test_megatron_has_the_hook_too(text, tmp_path):
    """Both engines of AReaL call it at the same place: after all ranks have written, before rollouts are told."""
    files = patched("areal.diff", text, tmp_path)
    for name in ("fsdp_engine", "megatron_engine"):
        method = (files / f"areal/engine/{name}.py").read_text().partition("def _update_weights_from_disk")[2]
        places = [
            method.index(part)
            for part in ("_save_model_to_hf(", "weight_written_hook)(meta.path)", "name_resolve.add(")
        ]
        assert places == sorted(places)


def test_a_shared_disk(tmp_path, monkeypatch):
    """Servers on the trainer's disk load what it wrote, and need no store."""
    out = written(tmp_path / "trainer", 1)
    monkeypatch.delenv("SPARSERL_URL")
    areal.fetch(str(out))
    assert out.is_dir()
    assert not out.is_symlink()


def test_a_restarted_trainer_and_a_late_host(tmp_path):
    """The run goes on, and a host that had nothing gets the newest version."""
    for version in (1, 2, 3):
        disk_sync.publishers.clear()
        out = written(tmp_path / "trainer", version)
        areal.publish(str(out))
        for host in ("host", "late host")[: 2 if version == 3 else 1]:
            path = tmp_path / host / f"weight_update_v{version}"
            areal.fetch(str(path))
            assert read(out) == read(path)
    assert read_head(open_store(f"file://{tmp_path}/store"))[0].version == 2


def test_several_workers_of_a_host(tmp_path):
    """Each worker of a host fetches for its own server, all at a time."""
    out = written(tmp_path / "trainer", 1)
    areal.publish(str(out))
    path = tmp_path / "host" / "weight_update_v1"
    with ThreadPoolExecutor(3) as pool:
        for done in [pool.submit(areal.fetch, str(path)) for _ in range(3)]:
            done.result(60)
    assert read(out) == read(path)
