"""The verl engine under verl's own registry and base class: its signatures, and syncs between real processes."""

from __future__ import annotations
import __future__

import ast
import asyncio
import inspect
import sys
from abc import ABC, abstractmethod
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from sparserl.errors import PeerLost, SessionError
from sparserl.session.store.retention import read_head, read_index
from sparserl.session.store.routes import version_of_step
from sparserl.transport.stores.opening import open_store
from tests.integrations.wheels import calls, definition, fields, parameters, wheel
from tests.session.ranks import ranks

VERSION = "0.9.1"
BASE = "verl/checkpoint_engine/base.py"
SHAPES = {"embed": (50, 16), "up": (40, 16), "gate": (), "norm": (16,), "none": (0, 4)}


def classes(base: str) -> ModuleType:
    """The registry and the base class of verl, run from its source: all of it that our engine stands on."""
    tree = ast.parse(base)
    wanted = ("CheckpointEngineRegistry", "CheckpointEngine")
    tree.body = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name in wanted]
    module = ModuleType("verl.checkpoint_engine")
    module.__dict__.update(ABC=ABC, abstractmethod=abstractmethod, Any=Any)
    exec(compile(tree, BASE, "exec", __future__.annotations.compiler_flag), module.__dict__)
    return module


def engine_class(base: str) -> Any:
    """Our engine, registered with verl's registry, as verl makes it."""
    sys.modules["verl"], sys.modules["verl.checkpoint_engine"] = ModuleType("verl"), classes(base)
    sys.modules.pop("sparserl.integrations.verl", None)
    import sparserl.integrations.verl  # noqa: F401

    return sys.modules["verl.checkpoint_engine"].CheckpointEngineRegistry.get("sparserl")


@pytest.fixture(name="engine")
def _engine() -> Any:
    kept = {name: sys.modules.get(name) for name in ("verl", "verl.checkpoint_engine", "sparserl.integrations.verl")}
    yield engine_class(wheel("verl", VERSION).text(BASE))
    for name, module in kept.items():
        sys.modules.pop(name)
        if module is not None:
            sys.modules[name] = module


def test_every_method_takes_what_the_base_class_says(engine):
    """What verl declares abstract is there, under verl's names."""
    base = definition(wheel("verl", VERSION).tree(BASE), "CheckpointEngine")
    for name in ("prepare", "build_topology", "finalize", "send_weights", "receive_weights"):
        mine = [p for p in inspect.signature(getattr(engine, name)).parameters if p != "self"]
        assert parameters(definition(base, name)) == mine
    assert not inspect.isabstract(engine)
    assert engine.wire_format == "named_tensors"
    assert inspect.iscoroutinefunction(engine.send_weights)
    assert inspect.isasyncgenfunction(engine.receive_weights)


def test_verl_still_makes_engines_so():
    """The module is imported where the config names it; engines get a bucket size, trainers whether they are rank 0."""
    verl = wheel("verl", VERSION)
    assert {"backend", "engine_kwargs", "custom_backend_module"} <= fields(
        definition(verl.tree("verl/workers/config/rollout.py"), "CheckpointEngineConfig")
    )
    trainer, rollout = (
        verl.tree("verl/workers/engine_workers.py"),
        definition(verl.tree(BASE), "CheckpointEngineWorker"),
    )
    for tree, said in ((trainer, {"is_master", "bucket_size", None}), (rollout, {"bucket_size", None})):
        assert len(calls(tree, "import_external_libs")) >= 1
        assert said in [{k.arg for k in call.keywords} for call in calls(tree, "new")]
    manager = definition(verl.tree(BASE), "CheckpointEngineManager", "build_process_group")
    assert len(calls(manager, "build_topology")[0].args) == 3


def test_without_verl_it_says_so(monkeypatch):
    """Asked for and missing is an error that says what is missing."""
    monkeypatch.setitem(sys.modules, "verl", None)
    monkeypatch.delitem(sys.modules, "sparserl.integrations.verl", raising=False)
    with pytest.raises(SessionError, match="verl is not installed"):
        import sparserl.integrations.verl  # noqa: F401


# -- syncs -------------------------------------------------------------------------------------------------------------


def trained(step: int) -> dict[str, torch.Tensor]:
    """What the trainer has after a step: float32, and counters that are no floats."""
    rng = np.random.default_rng(1)
    out = {name: torch.from_numpy(np.asarray(rng.normal(size=shape), np.float32)) for name, shape in SHAPES.items()}
    for at in range(step):
        for tensor in out.values():
            tensor.view(-1)[at :: 7 + at] *= 1.01
    return out | {"count": torch.tensor([step, 7])}


def expected(step: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, bytes]:
    """What rollouts must then hold."""
    rounded = {n: t.to(dtype) if t.is_floating_point() else t for n, t in trained(step).items()}
    return {name: tensor.reshape(-1).view(torch.uint8).numpy().tobytes() for name, tensor in rounded.items()}


def worker(rank, _group, pipe, base, options):
    """One of verl's workers: it has an engine, and does what the manager says."""
    made = engine_class(base)
    engine = None

    for method, args in iter(pipe.recv, None):
        try:
            if method == "begin":
                engine, said = made(bucket_size=1 << 20, **({"is_master": rank == 0} | options)), None
            elif method == "send":
                said = asyncio.run(engine.send_weights(iter(trained(args).items()), global_steps=args))
            elif method == "receive":
                said = asyncio.run(received(engine))
            else:
                said = getattr(engine, method)(**args)
            pipe.send((True, said))
        except Exception as error:  # noqa: BLE001  # the test raises it
            pipe.send((False, error))


def told(workers, *orders):
    """Say one thing to each worker, all at a time; what they answer."""
    for (_, pipe), order in zip(workers, orders, strict=True):
        pipe.send(order)
    answers = []
    for _, pipe in workers:
        assert pipe.poll(600)
        answers.append(pipe.recv())
    return answers


def synced(engine, trainers, rollouts, step):
    """One sync, in the order in which verl's manager does it: metrics of the trainers, and what rollouts then have."""
    workers, count = [*trainers, *rollouts], len(trainers)
    said = [answer for _, answer in told(workers, *[("prepare", {})] * len(workers))]
    rows = []
    for side in engine.build_topology(count, len(rollouts), said):
        rows += [dict(zip(side, row, strict=True)) for row in zip(*side.values(), strict=True)]
    told(workers, *[("init_process_group", row) for row in rows])
    answers = told(workers, *[("send", step)] * count, *[("receive", None)] * len(rollouts))
    told(workers, *[("finalize", {})] * len(workers))
    for ok, answer in answers:
        if not ok:
            raise answer
    return [answer for _, answer in answers[:count]], [answer for _, answer in answers[count:]]


@pytest.mark.long
def test_ranks_publish_and_a_node_follows(engine, tmp_path):
    """Two ranks publish a share each, two workers of a node use one folder: bit for bit, also after a restart."""
    common = {"url": f"file://{tmp_path}/store", "timeout": 120.0, "device": "cpu"}
    base = wheel("verl", VERSION).text(BASE)
    receiving = ranks(2, worker, base, common | {"is_master": False, "folder": str(tmp_path / "node")})
    with (
        ranks(2, worker, base, common | {"spread": True, "options": {"new_run": True}}) as trainers,
        receiving as followers,
    ):
        told(followers, *[("begin", None)] * 2)
        for life in (range(2), range(2, 4)):
            told(trainers, *[("begin", None)] * 2)
            for version, step in enumerate(life):
                (first, second), seen = synced(engine, trainers, followers, step)
                assert [expected(step)] * 2 == seen
                assert (version, {}) == (first["sparserl/version"], second)
                assert (first["sparserl/density"] < 0.5) == (version > 0)


async def received(rollout) -> dict[str, bytes]:
    """The bits that a rollout gets."""
    return {name: t.reshape(-1).view(torch.uint8).numpy().tobytes() async for name, t in rollout.receive_weights()}


def synced_here(engine, trainers, rollouts, step):
    """One sync between engines of this process: the metrics of the trainers, then what rollouts have."""
    workers = [*trainers, *rollouts]
    sides = engine.build_topology(len(trainers), len(rollouts), [one.prepare() for one in workers])
    for i, one in enumerate(workers):
        one.init_process_group(**{name: (sides[0][name] + sides[1][name])[i] for name in sides[0]})

    async def send_and_receive():
        sends = [one.send_weights(iter(trained(step).items()), global_steps=step) for one in trainers]
        return await asyncio.gather(*sends, *map(received, rollouts))

    return asyncio.run(send_and_receive())


def test_rank_0_publishes_and_workers_follow(engine, tmp_path):
    """By default rank 0 publishes everything and workers have copies: also one that missed a sync, and other dtypes."""
    options = {"url": f"file://{tmp_path}/store", "timeout": 120.0, "device": "cpu"}
    store = open_store(options["url"])
    rollouts = [engine(1 << 20, **options) for _ in range(2)]
    followers = set()
    for steps, dtype in (((0, 1, 2), "bfloat16"), ((3, 4), None)):
        trainers = [
            engine(1 << 20, is_master=rank == 0, rollout_dtype=dtype, options={"new_run": True}, **options)
            for rank in range(2)
        ]
        for version, step in enumerate(steps):
            workers = rollouts[: 1 if step == 1 else 2]
            first, second, *seen = synced_here(engine, trainers, workers, step)
            assert [expected(step, getattr(torch, dtype or "float32"))] * len(workers) == seen
            assert (version, {}) == (first["sparserl/version"], second)
            followers.add(rollouts[1]._receiver._subscriber)
            head, _ = read_head(store)
            assert version_of_step(read_index(store, head).steps, step) == version
    assert len(followers) == 1  # who forgets what it holds would fetch everything anew


def test_another_worker_leads(engine, tmp_path):
    """Who led on a node lets go of the folder before the sync in which another worker writes it."""
    options = {"url": f"file://{tmp_path}/store", "timeout": 30.0, "device": "cpu"}
    trainer = engine(1 << 20, is_master=True, **options)
    rollouts = [engine(1 << 20, folder=str(tmp_path / "node"), **options) for _ in range(2)]
    for step in range(3):
        _, *seen = synced_here(engine, [trainer], rollouts, step)
        assert [expected(step)] * 2 == seen
        rollouts.reverse()


def test_nothing_new_is_told(engine, tmp_path):
    """A rollout for which nothing comes says so, and what the store was at."""
    late = engine(1 << 20, url=f"file://{tmp_path}", timeout=0.3)
    late.init_process_group(None, True)
    with pytest.raises(PeerLost, match="was at no version, and nothing newer"):
        asyncio.run(anext(late.receive_weights()))


@pytest.mark.parametrize(
    ("wrong", "refusal"),
    [
        ({"options": {"stat": "/scratch"}}, "options has 'stat'; it may have"),
        ({"options": {"timeout": 3}}, "options has 'timeout'"),
        ({"rollout_dtype": "bf16"}, "rollout_dtype is 'bf16'; it must be a floating-point dtype"),
        ({"timeout": -1.0}, "timeout"),
    ],
)
def test_options_are_checked_where_they_are_given(engine, tmp_path, wrong, refusal):
    """Before a trainer has trained for an hour."""
    with pytest.raises(SessionError, match=refusal):
        engine(1 << 20, is_master=True, url=f"file://{tmp_path}/store", **wrong)
