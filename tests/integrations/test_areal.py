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
import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sparserl.integrations import areal, disk_sync, environment
from sparserl.session.store.retention import read_head
from sparserl.transport.stores.opening import open_store
from tests.cli.session_commands import said
from tests.integrations import areal_options
from tests.integrations.test_slime import read, written
from tests.integrations.upstream import DIFFS, ROOT, commands, patched, run_definitions
from tests.integrations.wheels import installed, wheel

VERSION = "1.0.4"
SERVERS = {"sglang_remote": "/update_weights_from_disk", "vllm_remote": "/areal_update_weights"}
PARSER = ("hydra-core==1.4.0.dev1", "omegaconf==2.4.0.dev2")  # the versions that AReaL requires
RUN = {"experiment_name": "e", "trial_name": "t"}
CONFIG = {  # what AReaL requires
    **RUN,
    **dict.fromkeys(("saver", "evaluator", "stats_logger", "recover"), RUN | {"fileroot": "/files"}),
    "train_dataset": {"path": "data", "type": "rl", "batch_size": 1},
    "rollout": {"backend": "sglang:d1"},
}


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


def _import_from_string(text):
    """AReaL's own function, by which it finds hooks."""
    source = text("areal/utils/dynamic_import.py")
    return run_definitions(source, ["import_from_string"], {"importlib": importlib})["import_from_string"]


def _structs(text):
    """The class of AReaL's weight updates, and those of its requests."""
    names = ["HttpRequest", "WeightUpdateRequests", "WeightUpdateMeta"]
    scope = run_definitions(text("areal/api/io_struct.py"), names, {"dataclass": dataclass, "field": field, "Any": Any})
    return {name: scope[name] for name in names}


def _request_builder(text, server):
    """AReaL's own function that makes the requests to a server, for a weight update from disk."""
    backend_class = {"sglang_remote": "SGLangBackend", "vllm_remote": "VLLMBackend"}[server]
    method = "build_disk_weight_update_requests"
    scope = run_definitions(text(f"areal/engine/{server}.py"), [f"{backend_class}.{method}"], _structs(text))
    return lambda meta: scope[method](None, meta)


@pytest.mark.parametrize("server", SERVERS)
def test_from_a_trainer_to_a_host(text, tmp_path, server):
    """Every version that AReaL's trainer writes is loaded by a server that does not share its disk, bit for bit."""
    files = patched("areal.diff", text, tmp_path / "areal")
    names = SimpleNamespace(update_weights_from_disk=lambda *parts: "/".join(map(str, parts)))
    name_resolve = NameResolve()
    servers = Servers(tmp_path / "trainer", tmp_path / "host")
    import_from_string = _import_from_string(text)
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
            "import_from_string": import_from_string,
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
            "import_from_string": import_from_string,
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
        maker = SimpleNamespace(build_disk_weight_update_requests=_request_builder(text, server))
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


@pytest.mark.parametrize("given", [{}, {"weight_update_mode": "xccl"}], ids=["nothing", "a mode"])
def test_the_commands_of_the_page(text, tmp_path, monkeypatch, given):
    """AReaL with the page's diff takes the page's options, whatever a config has, and the hooks read its variable."""
    pytest.importorskip("yaml", reason="Hydra reads configs with it")
    page = commands("areal.md")
    assert Path(page["git"][-1]) == DIFFS / "areal.diff"
    files = patched("areal.diff", text, tmp_path / "areal")
    for name in set(areal_options.FILES) - {"areal/api/cli_args.py"}:
        (files / name).parent.mkdir(parents=True)
        (files / name).write_text(text(name))
    config = tmp_path / "config.yaml"
    config.write_text(json.dumps(CONFIG | {"actor": RUN | {"backend": "fsdp:d1"} | given}))  # JSON is YAML
    program = [sys.executable, "-m", "tests.integrations.areal_options", str(files)]
    options = [str(config) if word == "config.yaml" else word for word in page["python"][1:]]
    done = subprocess.run(
        [*program, *options],
        env=os.environ | {"PYTHONPATH": f"{installed(*PARSER)}:{ROOT}"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    mode, *hooks = json.loads(done.stdout)
    assert f'actor.weight_update_mode == "{mode}":' in text("areal/trainer/rl_trainer.py")
    publish, fetch = map(_import_from_string(text), hooks)
    variable, _, url = page["export"][1].partition("=")
    monkeypatch.delenv("SPARSERL_URL")
    monkeypatch.setenv(variable, url)
    assert environment.store_url() == url
    monkeypatch.setenv(variable, f"file://{tmp_path}/store")
    out = written(tmp_path / "trainer", 1)
    publish(str(out))
    fetch(str(tmp_path / "host" / out.name))
    assert read(out) == read(tmp_path / "host" / out.name)


@pytest.mark.parametrize("server", SERVERS)
def test_a_followed_folder_without_the_diff(text, tmp_path, server):
    """AReaL's own request names a followed folder, in which a server finds every version that was published."""
    meta = _structs(text)["WeightUpdateMeta"](type="disk", path=str(tmp_path / "model/current"))
    (request,) = _request_builder(text, server)(meta).requests
    assert request.endpoint == SERVERS[server]
    for version in (1, 2):
        out = written(tmp_path / "saved", version)
        said("publish", out, f"file://{tmp_path}/store")
        said("follow", f"file://{tmp_path}/store", "-o", tmp_path / "model", "--once")
        loaded = Path(request.payload["model_path"])
        assert read(out) == read(loaded)
        assert (loaded / "config.json").read_bytes() == (out / "config.json").read_bytes()


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
