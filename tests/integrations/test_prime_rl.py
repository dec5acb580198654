"""prime-rl: its broadcasts become versions; the change to its trainer applies, and runs under its own code.

prime-rl is not on the package index. SPARSERL_PRIME_RL names a checkout of github.com/PrimeIntellect-ai/prime-rl; `make
test-prime-rl` runs all of this with it. It was read in commit 559b44772e471d1538537b8805cc77f3824a5e64 (21 August
2026). What vLLM's workers do is in real_vllm/test_vllm_prime_rl.py.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import sparserl
from sparserl.errors import CheckpointError, SessionError
from sparserl.integrations.prime_rl import BroadcastPublisher, main
from sparserl.sources import open_checkpoint
from tests.integrations.absent import leave_out
from tests.integrations.fleet import fleet
from tests.integrations.wheels import ROOT, definition, fields, parameters
from tests.session.ranks import ranks, results

PAGES = ROOT / "docs/how-to/integrations"
DIFF = PAGES / "diffs/prime-rl.diff"


def weights(version: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    tensors = {name: torch.randn(30, 20, dtype=torch.bfloat16) for name in ("a", "b")}
    tensors["b"].view(-1)[version::50] = version
    return tensors


def broadcast(run: Path, step: int, version: int | None = None) -> None:
    """A step as prime-rl's trainer writes it: the marker is touched last."""
    folder = run / "broadcasts" / f"step_{step}"
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights(step if version is None else version), folder / "model.safetensors")
    (folder / "NCCL_READY").touch()  # the orchestrator leaves it there
    (folder / "STABLE").touch()


def held(url: str, version: int | None = None) -> dict[str, torch.Tensor]:
    tensors = {name: torch.zeros_like(tensor) for name, tensor in weights(0).items()}
    sparserl.Subscriber(url, tensors).sync(version)
    return tensors


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_broadcasts_become_versions(tmp_path):
    """Each is published once, when it is whole, with its step; of those from before the start, the last two are."""
    url = f"file://{tmp_path}/store"
    for step in (1, 2, 3):
        broadcast(tmp_path, step)
    publisher = BroadcastPublisher(tmp_path, url)
    assert len(publisher.publish_new()) == 2
    assert publisher.publish_new() == []
    assert same(held(url), weights(3))
    (tmp_path / "broadcasts/step_4").mkdir()
    save_file(weights(4), tmp_path / "broadcasts/step_4/model.safetensors")
    assert publisher.publish_new() == []
    broadcast(tmp_path, 4)
    broadcast(tmp_path, 5)
    assert [report.version for report in publisher.publish_new()] == [2, 3]
    assert same(held(url, 2), weights(4))
    assert same(held(url), weights(5))
    publisher.close()
    steps = [step.step for step in publisher._publisher._committed.index.steps if step.base is not None]
    assert steps == [3, 4, 5]


def test_a_trainer_that_resumes_from_an_older_step(tmp_path):
    """It broadcasts that step again, and the next ones: these are published, though their steps were before."""
    url = f"file://{tmp_path}/store"
    publisher = BroadcastPublisher(tmp_path, url)
    for step in (10, 11, 12):
        broadcast(tmp_path, step)
        publisher.publish_new()
    for step in (11, 12):
        shutil.rmtree(tmp_path / f"broadcasts/step_{step}")
    broadcast(tmp_path, 10)
    assert [report.version for report in publisher.publish_new()] == [3]
    broadcast(tmp_path, 11, version=20)
    assert [report.version for report in publisher.publish_new()] == [4]
    assert same(held(url), weights(20))


def test_a_broadcast_that_is_gone_or_damaged(tmp_path, caplog, monkeypatch):
    """One that the trainer has removed meanwhile is left out, with a warning; one that cannot be read is refused."""
    publisher = BroadcastPublisher(tmp_path, f"file://{tmp_path}/store")
    broadcast(tmp_path, 1)
    publisher.publish_new()
    broadcast(tmp_path, 2)
    touched = publisher._touched()
    shutil.rmtree(tmp_path / "broadcasts/step_2")
    with monkeypatch.context() as patch:
        patch.setattr(publisher, "_touched", lambda: touched)
        assert publisher.publish_new() == []
    assert "step_2 was removed before it could be published" in caplog.text
    broadcast(tmp_path, 3)
    (tmp_path / "broadcasts/step_3/model.safetensors").write_bytes(b"nothing")
    with pytest.raises(CheckpointError):
        publisher.publish_new()
    (tmp_path / "broadcasts/step_last").mkdir()
    (tmp_path / "broadcasts/step_last/STABLE").touch()
    with pytest.raises(SessionError, match="its name is not step_N"):
        publisher.publish_new()


def test_the_command(tmp_path):
    """It takes the folder of the run and the store, and publishes until it is ended."""
    broadcast(tmp_path, 7)
    command = [sys.executable, "-m", "sparserl.integrations.prime_rl", str(tmp_path), f"file://{tmp_path}/store"]
    environment = os.environ | {"SPARSERL_STATE": str(tmp_path / "state")}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert any("step 7:" in line for line in process.stderr)
        process.terminate()
    assert same(held(f"file://{tmp_path}/store"), weights(7))
    assert (tmp_path / "state").is_dir()
    for arguments in ([str(tmp_path)], [str(tmp_path), "nothing://here"], ["--url", "x", "y"]):
        with pytest.raises(SystemExit, match="2"):
            main(arguments)


def test_files_travel(tmp_path):
    """A followed folder is a whole checkpoint where the broadcast is one."""
    broadcast(tmp_path, 1)
    (tmp_path / "broadcasts/step_1/config.json").write_text('{"model_type": "llama"}')
    url = f"file://{tmp_path}/store"
    publisher = BroadcastPublisher(tmp_path, url)
    publisher.publish_new()
    publisher.close()
    target = sparserl.targets.folder(tmp_path / "model")
    sparserl.Subscriber(url, target).sync()
    assert (target.current / "config.json").read_text() == '{"model_type": "llama"}'


def test_the_version_of_a_training_step(tmp_path):
    """All ranks wait until a step is published; after a trainer went back, its older versions do not count."""
    with fleet(tmp_path, 2) as it:
        for step in (10, 11, 12):
            it.train(step, step=step)
        assert [report.version for report in it.all(lambda s: s.commit_step(11, 5))] == [2, 2]
        it.train(0, step=10)
        refusals = it.all(lambda s: s.commit_step(11, 0.1))
        assert all("step 11 was not published within 0.1 s" in str(error) for error in refusals)
        late = threading.Timer(0.3, it.train, (1,), {"step": 11})
        late.start()
        assert [report.version for report in it.all(lambda s: s.commit_step(11, 20))] == [5, 5]
        late.join()
        it.require_exact()


@pytest.fixture(name="source")
def _source() -> Path:
    if "SPARSERL_PRIME_RL" not in os.environ:
        pytest.skip("SPARSERL_PRIME_RL names no checkout of prime-rl, which is not on the package index")
    return Path(os.environ["SPARSERL_PRIME_RL"])


@pytest.fixture(name="patched")
def _patched(source, tmp_path) -> Path:
    """The checkout with the change of the page."""
    for folder in ("src", "packages/prime-rl-configs/src"):
        shutil.copytree(source / folder, tmp_path / "prime-rl" / folder)
    for options in (["--check"], []):
        subprocess.run(["git", "apply", *options, str(DIFF)], cwd=tmp_path / "prime-rl", check=True)
    return tmp_path / "prime-rl"


def test_the_page_names_the_commit():
    """The page and this file name the commit that the change is for."""
    assert re.findall(r"`([0-9a-f]{12})`", (PAGES / "prime-rl.md").read_text())[0] in __doc__


def test_the_orchestrator_asks_for_steps(source):
    """The worker is asked for a folder whose name has the step, once its marker is there."""
    inference = ast.parse((source / "src/prime_rl/inference/vllm/worker/filesystem.py").read_text())
    update = definition(inference, "FileSystemWeightUpdateWorker", "update_weights_from_path")
    assert len(parameters(update)) == 1
    assert 'f"step_{step}"' in (source / "src/prime_rl/utils/pathing.py").read_text()
    assert '"STABLE"' in (source / "src/prime_rl/orchestrator/watcher.py").read_text()


def _paths(checkout: str) -> None:
    """Import prime-rl without the kernels, and without what has no part in it."""
    sys.path[:0] = [f"{checkout}/src", f"{checkout}/packages/prime-rl-configs/src"]
    leave_out("datasets", "fla", "ring_flash_attn", "torchdata", "torchtitan", "wandb")
    leave_out("prime_rl.transports.weights.nccl", "prime_rl.transports.weights.nixl")


def _train(rank, group, pipe, checkout: str, out: str, url: str) -> list[int]:
    """Two ranks of FSDP2: prime-rl's own broadcast of a step writes what the other one has published."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}
    _paths(checkout)
    import transformers
    from prime_rl.configs.trainer import FileSystemWeightBroadcastConfig
    from prime_rl.transports.weights import setup_weight_broadcast
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=50, num_hidden_layers=3, **sizes))
    for layer in (*model.model.layers, model):
        fully_shard(layer, mesh=init_device_mesh("cpu", (2,)))
    path = "sparserl.integrations.prime_rl_trainer.SparserlWeightBroadcast"
    config = FileSystemWeightBroadcastConfig(import_path=path, kwargs={"url": url})
    ours = setup_weight_broadcast(Path(out) / "ours", config, None)
    theirs = setup_weight_broadcast(Path(out) / "theirs", FileSystemWeightBroadcastConfig(), None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    for step in (4, 5, 6):
        tokens = torch.arange(1, 9).reshape(1, 8) + step
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        for one in (theirs, ours):
            one.broadcast_weights(model, step)
        assert rank > 0 or ours.is_stable(step)
    return [ours._publisher._committed.head.version]


def test_the_trainer_publishes(patched, tmp_path):
    """With the change, the config names the class, and prime-rl's trainer publishes the bits that it would write."""
    pytest.importorskip("pydantic_config")
    url = f"file://{tmp_path}/store"
    with ranks(2, _train, str(patched), str(tmp_path), url) as started:
        assert results(started) == [[2], [2]]
    for version, step in enumerate((4, 5, 6)):
        written = open_checkpoint(tmp_path / f"theirs/broadcasts/step_{step}")
        sparserl.Subscriber(url, sparserl.targets.folder(tmp_path / f"held{version}")).sync(version)
        published = open_checkpoint(tmp_path / f"held{version}/current")
        assert sparserl.digest(published) == sparserl.digest(written)
        assert [path.name for path in (tmp_path / f"ours/broadcasts/step_{step}").iterdir()] == ["STABLE"]


def _configure(rank, group, pipe, checkout: str, config: dict) -> list[object]:
    _paths(checkout)
    from prime_rl.configs.inference import InferenceConfig
    from prime_rl.configs.trainer import FileSystemWeightBroadcastConfig

    inference = InferenceConfig.model_validate(config["inference"])
    trainer = FileSystemWeightBroadcastConfig.model_validate(config["weight_broadcast"])
    return [inference.to_namespace().weight_transfer_config, inference.env_vars, trainer.kwargs]


def test_configs(patched):
    """The config of the page is one of prime-rl's, vLLM gets the backend, and both sides the same store."""
    pytest.importorskip("pydantic_config")
    tomllib = pytest.importorskip("tomllib")
    (toml,) = re.findall(r"^```toml\n(.*?)^```", (PAGES / "prime-rl.md").read_text(), re.MULTILINE | re.DOTALL)
    with ranks(1, _configure, str(patched), tomllib.loads(toml)) as started:
        ((backend, environment, options),) = results(started)
    assert backend == {"backend": "sparserl"}
    assert options == {"url": environment["SPARSERL_URL"]}
    shared = ast.parse((patched / "packages/prime-rl-configs/src/prime_rl/configs/rl.py").read_text())
    assert {"import_path", "kwargs"} <= fields(definition(shared, "SharedFileSystemWeightBroadcastConfig"))
