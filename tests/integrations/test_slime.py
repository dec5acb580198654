"""The hooks for slime: what they are called with, and a trainer's checkpoints on a host that does not share its disk.

slime is not on the package index. SPARSERL_SLIME names a checkout of github.com/THUDM/slime, against which signatures
are then held; they were read in commit 624b824a898ab0ec1fcb4d373004c7f3852bf515 (21 August 2026).
"""

from __future__ import annotations

import ast
import inspect
import itertools
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sparserl.errors import SessionError
from sparserl.integrations import disk_sync, slime
from tests.integrations.wheels import calls, definition
from tests.session.ranks import ranks, results


def written(root: Path, version: int) -> Path:
    """A version as slime's trainer writes it: a whole checkpoint, in two shards."""
    out = root / f"weight_v{version:06d}"
    out.mkdir(parents=True)
    torch.manual_seed(0)
    weights = {name: torch.randn(30, 20, dtype=torch.bfloat16) for name in ("a", "b", "c")}
    weights["b"].view(-1)[version::50] = version
    save_file({"a": weights["a"]}, out / "model-00001-of-00002.safetensors")
    save_file({"b": weights["b"], "c": weights["c"]}, out / "model-00002-of-00002.safetensors")
    places = {"a": "model-00001-of-00002.safetensors"} | dict.fromkeys("bc", "model-00002-of-00002.safetensors")
    (out / "model.safetensors.index.json").write_text(f'{{"metadata": {{}}, "weight_map": {places}}}'.replace("'", '"'))
    (out / "config.json").write_text('{"model_type": "none"}')
    return out


def read(folder: Path) -> dict[str, bytes]:
    """Names and bits of a checkpoint."""
    found = {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}
    return {name: tensor.view(torch.uint8).numpy().tobytes() for name, tensor in found.items()}


@pytest.fixture(autouse=True)
def _environment(tmp_path, monkeypatch):
    disk_sync.publishers.clear()
    monkeypatch.setenv("SPARSERL_URL", f"file://{tmp_path}/store")


def test_from_a_trainer_to_a_host(tmp_path):
    """Every version lands bit for bit under the name that is asked for; slime may delete what it wrote at once."""
    host = tmp_path / "host"
    for version in (1, 2, 3):
        out = written(tmp_path / "trainer", version)
        wanted = read(out)
        slime.publish(None, str(out), [])
        shutil.rmtree(out)
        slime.fetch(str(host), version)
        there = host / f"weight_v{version:06d}"
        assert wanted == read(there)
        assert (there / "config.json").read_text() == '{"model_type": "none"}'
    assert sorted(p.name for p in host.glob("weight_v*")) == ["weight_v000002", "weight_v000003"]


def test_a_trainer_that_begins_anew(tmp_path):
    """Versions are counted anew after a restart: what lies under an old name is not taken for the new one."""
    for life in (0, 10):
        disk_sync.publishers.clear()
        out = written(tmp_path / f"trainer{life}", life + 1).rename(tmp_path / f"trainer{life}" / "weight_v000001")
        slime.publish(None, str(out), [])
        slime.fetch(str(tmp_path / "host"), 1)
        assert read(out) == read(tmp_path / "host" / "weight_v000001")


def test_state_and_keys(tmp_path, monkeypatch):
    """With a state folder a restarted trainer goes on with its run; rollouts believe no other key."""
    from sparserl.session.store.retention import read_head
    from sparserl.session.store.signing import keygen
    from sparserl.transport.stores.opening import open_store

    secret, public = keygen()
    (tmp_path / "key").write_text(secret + "\n")
    monkeypatch.setenv("SPARSERL_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("SPARSERL_SIGNING_KEY_FILE", str(tmp_path / "key"))
    monkeypatch.setenv("SPARSERL_TRUSTED_KEYS", f"{keygen()[1]},{public}")
    for version in (1, 2):
        disk_sync.publishers.clear()
        out = written(tmp_path / "trainer", version)
        slime.publish(None, str(out), [])
        slime.fetch(str(tmp_path / "host"), version)
        assert read(out) == read(tmp_path / "host" / f"weight_v{version:06d}")
    assert read_head(open_store(f"file://{tmp_path}/store"))[0].version == 1
    monkeypatch.setenv("SPARSERL_TRUSTED_KEYS", keygen()[1])
    with pytest.raises(SessionError, match="signed by another key"):
        slime.fetch(str(tmp_path / "host"), 3)


def test_files_of_the_trainer_are_left_alone(tmp_path, monkeypatch):
    """On a shared disk there is nothing to fetch, and no store is needed."""
    out = written(tmp_path / "trainer", 1)
    monkeypatch.delenv("SPARSERL_URL")
    slime.fetch(str(tmp_path / "trainer"), 1)
    assert out.is_dir()
    assert not out.is_symlink()
    with pytest.raises(SessionError, match="SPARSERL_URL is not set"):
        slime.fetch(str(tmp_path / "trainer"), 2)


def test_all_ranks_of_a_host_at_once(tmp_path):
    """Engines call the hook on every rank, all at a time: all find the version whole."""
    out = written(tmp_path / "trainer", 1)
    slime.publish(None, str(out), [])
    with ThreadPoolExecutor(3) as pool:
        for done in [pool.submit(slime.fetch, str(tmp_path / "host"), 1) for _ in range(3)]:
            done.result(60)
    assert read(out) == read(tmp_path / "host" / "weight_v000001")


def _publish_as(rank, _group, _pipe, environment: dict[str, str], folder: str) -> int:
    os.environ.update(environment)
    slime.publish(None, folder, [])
    return len(disk_sync.publishers)


def test_rank_0_publishes(tmp_path):
    """The hook is called on every rank of the trainer."""
    out = written(tmp_path / "trainer", 1)
    with ranks(2, _publish_as, {"SPARSERL_URL": os.environ["SPARSERL_URL"]}, str(out)) as started:
        assert results(started) == [1, 0]
    slime.fetch(str(tmp_path / "host"), 1)
    assert read(out) == read(tmp_path / "host" / "weight_v000001")


@pytest.fixture(name="source")
def _source() -> Path:
    if "SPARSERL_SLIME" not in os.environ:
        pytest.skip("SPARSERL_SLIME names no checkout of slime, which is not on the package index")
    return Path(os.environ["SPARSERL_SLIME"])


def test_the_trainer_calls_the_hook_so(source):
    """With the arguments, the version's folder and the engines, after all ranks have written."""
    tree = ast.parse((source / "slime/backends/megatron_utils/update_weight/update_weight_from_disk.py").read_text())
    update = definition(tree, "UpdateWeightFromDisk", "update_weights")
    assert len(calls(update, "_post_write_hook")[0].args) == len(inspect.signature(slime.publish).parameters)
    assert "weight_v{self.weight_version:06d}" in ast.unparse(update)
    options = (source / "slime/utils/arguments.py").read_text()
    for name in (
        "custom-update-weight-post-write-path",
        "update-weight-local-checkpoint-dir",
        "update-weight-disk-dir",
    ):
        assert f'"--{name}"' in options


def test_an_engine_pulls(source, tmp_path):
    """What slime adds to SGLang calls the hook by its path, and then has the version in the engine's own folder."""
    patch = (source / "docker/patch/latest/sglang-pull_weights.patch").read_text()
    (_, added) = patch.split("+++ b/python/sglang/srt/weight_sync/local_checkpoint.py\n")
    lines = itertools.takewhile(lambda line: not line.startswith("diff "), added.splitlines()[1:])
    engine = {"__name__": "local_checkpoint"}
    exec("\n".join(line.removeprefix("+") for line in lines), engine)
    for version in (1, 2):
        out = written(tmp_path / "trainer", version)
        slime.publish(None, str(out), [])
        local, hook = tmp_path / "engine", "sparserl.integrations.slime.fetch"
        engine["pull"](str(local), "no base", str(tmp_path / "host"), version, pre_read_hook=hook)
        assert read(out) == read(local)
