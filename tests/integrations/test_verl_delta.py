"""Sparse flushes under verl's own classes, and into verl's own receiver: every sync bit for bit.

The code of verl is run from its wheel, as far as it needs nothing but torch. `make test-verl` runs the rest.
"""

from __future__ import annotations

import ast
import asyncio
import importlib
import json
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

from sparserl.errors import SessionError, UnsupportedTensor
from tests.integrations.test_verl import BASE, VERSION, classes
from tests.integrations.wheels import calls, definition, wheel

ENCODE = "verl.checkpoint_engine.delta_sync.encode"
LOADER = "verl.workers.rollout.sglang_rollout.delta_loader"
OURS = ("sparserl.integrations.verl", "sparserl.integrations.verl_delta")
SERVERS = {
    "vllm_rollout/vllm_async_server": "VERL_DELTA_WEIGHT_TRANSFER_BACKEND",
    "sglang_rollout/async_sglang_server": "LOADER_FQN",
}
SIZES = {"embed": (50, 16), "q": (24, 16), "k": (8, 16), "scale": (), "norm": (16,)}


def module_of(name: str) -> ModuleType:
    """A module of verl that needs nothing but torch, from its source."""
    module = sys.modules[name] = ModuleType(name)
    path = f"{name.replace('.', '/')}.py"
    exec(compile(wheel("verl", VERSION).text(path), path, "exec"), module.__dict__)
    return module


@pytest.fixture(name="verl")
def _verl(monkeypatch):
    """Our engine, registered with verl's registry, and verl's receiver for SGLang."""
    for name in (*OURS, ENCODE, LOADER):
        monkeypatch.delitem(sys.modules, name, raising=False)
    parents = ("verl", "verl.checkpoint_engine", "verl.checkpoint_engine.delta_sync")
    for name in parents:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    registry = classes(wheel("verl", VERSION).text(BASE))
    monkeypatch.setitem(sys.modules, "verl.checkpoint_engine", registry)
    module_of(ENCODE)
    loader = module_of(LOADER)
    importlib.import_module(OURS[1])
    yield SimpleNamespace(engine=registry.CheckpointEngineRegistry.get("delta_sharded"), apply=loader.apply_delta)
    for name in (*OURS, ENCODE, LOADER):
        sys.modules.pop(name, None)


class Rollout(torch.nn.Module):
    """An engine's model: q and k are rows of one parameter, and of the embedding it has one half."""

    def __init__(self) -> None:
        super().__init__()
        self.qk = torch.nn.Parameter(torch.zeros(32, 16, dtype=torch.bfloat16))
        self.embed = torch.nn.Parameter(torch.zeros(25, 16, dtype=torch.bfloat16))
        self.scale = torch.nn.Parameter(torch.zeros((), dtype=torch.bfloat16))
        self.norm = torch.nn.Parameter(torch.zeros(16, dtype=torch.bfloat16))
        self.register_buffer("count", torch.zeros(2, dtype=torch.int64))

    def load_weights(self, weights) -> None:
        places = {
            "q": self.qk.data[:24],
            "k": self.qk.data[24:],
            "embed": self.embed.data,
            "scale": self.scale.data,
            "norm": self.norm.data,
            "count": self.count,
        }
        for name, tensor in weights:
            places[name].copy_(tensor[25:] if name == "embed" else tensor)

    def bits(self) -> dict[str, bytes]:
        return {n: t.detach().reshape(-1).view(torch.uint8).numpy().tobytes() for n, t in self.state_dict().items()}


def weights_at(step: int) -> dict[str, torch.Tensor]:
    """The trainer's weights: some elements change at each step, and become -0.0, an infinity and a denormal number."""
    rng = np.random.default_rng(3)
    weights = {name: torch.from_numpy(np.asarray(rng.normal(size=shape), np.float32)) for name, shape in SIZES.items()}
    for i in range(1, step + 1):
        weights["q"].view(-1)[i :: 11 + i] *= -1.5
        weights["embed"].view(-1)[i::97] = -0.0
        weights["embed"].view(-1)[i + 1 :: 97] = float("inf")
        weights["norm"][i % 16] = 1e-39
    return weights | {"count": torch.tensor([7, 8])}


class Trainer:
    """In the place of verl's training engine: the one method that is called without shards."""

    def __init__(self) -> None:
        self.weights = weights_at(0)

    def get_per_tensor_param(self):
        return iter(self.weights.items()), None


class Run:
    """A trainer and a rollout worker, with a sync between them in the order of verl's manager."""

    def __init__(self, verl, tmp_path, bucket_size=1 << 20) -> None:
        options = {"url": f"file://{tmp_path}/store", "timeout": 600.0, "device": "cpu"}
        self.verl = verl
        self.trainer = Trainer()
        self.sender = verl.engine(bucket_size, is_master=True, shards=False, **options)
        self.receiver = verl.engine(bucket_size, **options)
        self.model = Rollout()

    def sync(self) -> list[dict]:
        """One sync; what each flush says of itself."""
        sides = self.verl.engine.build_topology(1, 1, [self.sender.prepare(), self.receiver.prepare()])
        for engine, side in zip((self.sender, self.receiver), sides, strict=True):
            engine.init_process_group(**{name: values[0] for name, values in side.items()})
        asyncio.run(self.sender.send_weights(self.trainer))
        return [self._apply(*flush) for flush in self.receiver.receive_weights()]

    def _apply(self, named, is_last) -> dict:
        self.verl.apply(self.model, named)
        spec = json.loads(dict(named)["__delta_spec__"].numpy().tobytes())
        return spec | {"is_last": is_last, "names": [name for name, _ in named]}

    def expected(self) -> dict[str, bytes]:
        """The bits that the rollout's model must have, from the trainer's weights alone."""
        model = Rollout()
        model.load_weights(self.trainer.weights.items())
        return model.bits()


def test_what_verl_sees(verl):
    """It takes the place of verl's backend of this name, and says which kind of payload it yields."""
    assert verl.engine.__module__ == "sparserl.integrations.verl_delta"
    assert verl.engine.wire_format == "delta_flush"


def test_verl_still_gives_this_backend_what_it_needs():
    """The training engine, on all ranks; and receivers of flushes in vLLM and SGLang. The name alone decides."""
    wheel_of_verl = wheel("verl", VERSION)
    actor = definition(wheel_of_verl.tree("verl/workers/engine_workers.py"), "ActorRolloutRefWorker", "update_weights")
    branch = next(node for node in ast.walk(actor) if isinstance(node, ast.If) and names_backend(node.test))
    (sent,) = calls(branch.body[0], "send_weights")
    assert ast.unparse(sent.args[0]) == "self.actor.engine"
    for server, receiver in SERVERS.items():
        nodes = ast.walk(wheel_of_verl.tree(f"verl/workers/rollout/{server}.py"))
        branch = next(node for node in nodes if isinstance(node, ast.If) and names_backend(node.test))
        assert receiver in ast.unparse(branch)


def names_backend(test: ast.AST) -> bool:
    return any(isinstance(node, ast.Constant) and node.value == "delta_sharded" for node in ast.walk(test))


@pytest.mark.parametrize("bucket_size", [1 << 20, 64])
def test_a_dense_sync_and_sparse_ones(verl, tmp_path, bucket_size):
    """The first sync is dense, later ones have what changed, also in flushes of a few bytes; the last is marked."""
    run = Run(verl, tmp_path, bucket_size)
    for step in range(4):
        run.trainer.weights = weights_at(step)
        specs = run.sync()
        assert run.expected() == run.model.bits()
        assert {spec["encoding"] for spec in specs} == {"indices" if step else "dense"}
        assert [spec["is_last"] for spec in specs] == [False] * (len(specs) - 1) + [True]
        assert len(specs) >= 5 if bucket_size == 64 else len(specs) == (1 if step else 2)  # the counter apart
        sent = sum(param["val_end"] - param["val_start"] for spec in specs for param in spec["params"])
        assert sent < 200 if step else sent == sum(map(torch.Tensor.numel, run.trainer.weights.values()))


def test_nothing_changed(verl, tmp_path):
    """A version without changes has no flushes, and verl's adapters then load nothing."""
    run = Run(verl, tmp_path)
    run.sync()
    assert run.sync() == []
    run.trainer.weights = weights_at(1)
    assert [spec["encoding"] for spec in run.sync()] == ["indices"]
    assert run.expected() == run.model.bits()


@pytest.mark.parametrize("reason", ["nan", "integers", "replaced"])
def test_what_cannot_be_sparse_is_dense(verl, tmp_path, reason):
    """A NaN, an integer, or weights that are mostly new, where receivers know no other way; then sparse again."""
    run = Run(verl, tmp_path)
    run.sync()
    run.trainer.weights = weights_at(1)
    if reason == "nan":
        run.trainer.weights["k"][3, 5] = float("nan")
    elif reason == "integers":
        run.trainer.weights["count"][0] += 1
    else:
        run.trainer.weights = {name: tensor * 3 + 1 for name, tensor in run.trainer.weights.items()}
        run.sender._options["new_run"] = True
        run.sender._sender = None
    assert {spec["encoding"] for spec in run.sync()} == {"dense"}
    assert run.expected() == run.model.bits()
    run.trainer.weights = {name: tensor.clone() for name, tensor in run.trainer.weights.items()}
    run.trainer.weights["q"][0, 0] = 5
    assert {spec["encoding"] for spec in run.sync()} == {"indices"}
    assert run.expected() == run.model.bits()


def test_after_a_load_that_failed(verl, tmp_path, monkeypatch):
    """An adapter that raises may have loaded a part: the next sync is dense."""
    run = Run(verl, tmp_path, bucket_size=64)
    run.sync()
    run.trainer.weights = weights_at(1)
    with monkeypatch.context() as patch:
        patch.setattr(verl, "apply", lambda *_: (_ for _ in ()).throw(RuntimeError("no memory")))
        with pytest.raises(RuntimeError, match="no memory"):
            run.sync()
    run.trainer.weights = weights_at(2)
    assert {spec["encoding"] for spec in run.sync()} == {"dense"}
    assert run.expected() == run.model.bits()


def test_two_versions_in_one_sync(verl, tmp_path):
    """A worker that missed a sync gets each position once, with its newest value."""
    run = Run(verl, tmp_path)
    run.sync()
    for step in (1, 2):
        run.trainer.weights = weights_at(step)
        asyncio.run(run.sender.send_weights(run.trainer))
    run.trainer.weights = weights_at(3)
    run.trainer.weights["q"].view(-1)[1] = 42
    (spec,) = run.sync()
    assert spec["names"] == ["__delta_spec__", "__positions__", "__values__"]
    assert run.expected() == run.model.bits()


def test_the_receiver_notices_damage(verl, tmp_path):
    """The checksum is over positions and values; a flush whose values were changed on the way is refused."""
    run = Run(verl, tmp_path)
    run.sync()
    run.trainer.weights = weights_at(1)
    apply = verl.apply

    def damaged(model, named):
        tensors = dict(named)
        tensors["__values__"][0] += 1
        apply(model, tensors.items())

    verl.apply = damaged
    with pytest.raises(RuntimeError, match="checksum mismatch"):
        run.sync()


def test_options_that_exclude_each_other(verl, tmp_path):
    """They are refused where they are given."""
    url = f"file://{tmp_path}"
    with pytest.raises(SessionError, match="folder= is for dense loads"):
        verl.engine(1 << 20, url=url, folder="node")
    with pytest.raises(SessionError, match="with shards=False"):
        verl.engine(1 << 20, url=url, spread=True)


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ({"engine_config": SimpleNamespace(strategy="veomni")}, "strategy is 'veomni'"),
        ({"peft_cls": object()}, "has adapters"),
        ({"_qat_enabled": True}, "quantization"),
    ],
)
def test_engines_without_shards_to_read(verl, tmp_path, engine, message):
    """They are refused by name, with what to do instead."""
    sender = verl.engine(1 << 20, is_master=True, url=f"file://{tmp_path}")
    parts = {"engine_config": SimpleNamespace(strategy="fsdp2"), "module": torch.nn.Linear(2, 2)} | engine
    with pytest.raises(UnsupportedTensor, match=f"{message}.*shards=False"):
        asyncio.run(sender.send_weights(SimpleNamespace(**parts)))
