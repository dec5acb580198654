"""Once a receiver is attached, no sync of any size makes Triton compile anything."""

from __future__ import annotations

import gc
import inspect
import math
from contextlib import contextmanager, nullcontext

import numpy as np
import pytest

import sparserl
from sparserl.integrations.ranks import EngineSubscriber
from sparserl.kernels import gpu
from sparserl.plan.classes import _MAX_CLASSES
from sparserl.targets.engine import EngineTarget
from sparserl.targets.first_load import FirstLoad, load_kernel
from sparserl.targets.pieces import Piece
from sparserl.weights import on_gpu
from sparserl.weights.region import whole
from sparserl.weights.staging import lazy_bits
from tests.patch.gpu.gpu_weights import CUDA, DEVICE, INTERPRETED, WITHOUT_KERNELS, needs_kernels, on_host, same_bits
from tests.patch.gpu.rank_weights import Ranks, versions
from tests.targets.test_engine_kernels import ready_kernels
from tests.triton_runs import LaunchedVariants

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

compiling = pytest.mark.skipif(not CUDA or WITHOUT_KERNELS, reason="Triton compiles for a GPU that has kernels")
interpreted = pytest.mark.skipif(
    CUDA or WITHOUT_KERNELS or not INTERPRETED, reason="is about kernels, in the interpreter: make interpreted"
)
SHAPES = {"a": (1000, 1024), "b": (4096, 4096), "c": (4097,), "d": (333, 77), "e": (2, 3, 500)}
SHARES = (0.002, 0.002, 0.004, 0.006, 0.012, 0.00001, 0.05, 0.2, 0.0005)


def step(weights, share, seed):
    """Change a share of all elements by one bit."""
    generator = torch.Generator("cuda").manual_seed(seed)
    for tensor in weights.values():
        is_wide = tensor.dtype == torch.float32
        bits = tensor.view(-1).view(torch.int32 if is_wide else torch.int16)
        bits ^= (torch.rand(bits.shape, generator=generator, device="cuda") < share).to(bits.dtype) << 16 * is_wide


def on_and_off_boundaries():
    """Zeros in one tensor; each but the first begins at a 16-byte boundary or, by turns, an element behind one."""
    begin = 1
    begins = {}
    for i, (name, shape) in enumerate(SHAPES.items()):
        begins[name] = begin
        begin += -(-math.prod(shape) // 8) * 8 + (7 if i % 2 == 0 else 1)
    memory = torch.zeros(begin, dtype=torch.bfloat16, device="cuda")
    return {name: memory[begins[name] :][: math.prod(shape)].view(shape) for name, shape in SHAPES.items()}


@compiling
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("profile", ["auto", "ulp", "ctx", "gap", "raw"])
def test_nothing_is_compiled_after_attaching(tmp_path, monkeypatch, profile, dtype):
    """Patches of few and of many changes, several behind, and an audit, in every profile; of casts, too."""
    from triton import knobs

    compiled = []
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", lambda **facts: compiled.append(facts["fn"].name))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    weights = {name: torch.randn(shape, device="cuda").to(dtype) for name, shape in SHAPES.items()}
    received = on_and_off_boundaries()
    wide = dtype == torch.float32

    def published():
        return {name: lazy_bits(tensor, torch.bfloat16) if wide else tensor for name, tensor in weights.items()}

    options = {"profile": profile, "baseline": "device", "ladder": None, "anchor_after": 1e9}
    with (
        sparserl.Publisher(str(tmp_path / "run"), published, **options) as publisher,
        sparserl.Subscriber(str(tmp_path / "run"), received) as subscriber,
    ):
        publisher.publish()
        subscriber.sync()
        compiled.clear()
        for seed, share in enumerate(SHARES):
            step(weights, share, seed)
            publisher.publish()
            if seed != 3:
                subscriber.sync()
        subscriber.audit()
    assert compiled == []
    new = {name: tensor.bfloat16() for name, tensor in weights.items()}
    assert all(torch.equal(received[name].view(torch.int16), new[name].view(torch.int16)) for name in new)


@compiling
def test_engines_see_nothing_of_what_is_compiled(tmp_path, monkeypatch):
    """All kernels are compiled as a run is attached, and the engine, which may watch for that, is not told."""
    from triton import knobs

    compiled = []
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", lambda **facts: compiled.append(facts["fn"].name))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setattr("sparserl.weights.on_gpu._warm", set())
    _forget_compiled()
    weights = {"q": torch.randn(64, 96, device="cuda").bfloat16(), "k": torch.randn(32, 96, device="cuda").bfloat16()}
    fused = torch.cat([*weights.values()])
    pieces = [
        Piece("q", whole((64, 96)), "qkv", 0, (96, 1)),
        Piece("k", whole((32, 96)), "qkv", 64 * 96, (96, 1)),
    ]
    target = EngineTarget(pieces, lambda: {"qkv": fused})
    host = {name: tensor.cpu() for name, tensor in weights.items()}  # the publisher needs no kernels of its own
    with (
        sparserl.Publisher(str(tmp_path / "run"), host) as publisher,
        EngineSubscriber(str(tmp_path / "run"), target, 0, lambda value: [value]) as subscriber,
    ):
        publisher.publish()
        subscriber.refresh()
        assert any((tmp_path / "triton").iterdir())
        for tensor in host.values():
            tensor.view(torch.int16).view(-1)[::17] ^= 1
        version = publisher.publish().version
        subscriber.commit_version(version)
    assert compiled == []
    assert torch.equal(fused.cpu().view(torch.int16), torch.cat([*host.values()]).view(torch.int16))


@needs_kernels
@pytest.mark.parametrize(
    ("role", "profile"),
    [
        ("subscriber", "ctx"),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in [
                ("subscriber", "gap"),
                ("subscriber", "raw"),
                ("publisher", "ctx"),
                ("publisher", "gap"),
                ("tracked", "ctx"),
                ("resumed", "ctx"),
            ]
        ),
    ],
)
def test_all_kernels_are_there_with_the_first_version(tmp_path, monkeypatch, role, profile):
    """No later one needs more: of a subscriber alone, of a publisher with its baseline on the GPU, of one that has none
    since its source tracks changes, and of such a one that goes on after a restart.

    The subscriber takes one patch, undoes it, is several versions behind, goes back by an anchor, and is audited.
    """
    if not CUDA:
        small_blocks(monkeypatch, 1024)  # sums are wrong in smaller ones
    folder = str(tmp_path)
    tensors = off_boundaries({"w": (30, 41), "v": (700,)}, seed=1)
    module = torch.nn.Module()
    for name, tensor in tensors.items():
        module.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))
    params = [*module.parameters()]
    tracked = sparserl.sources.track(None, module, params=params) if role in ("tracked", "resumed") else None
    source = tracked or (module if role == "publisher" else lambda: on_host(tensors))
    baseline = {"publisher": "device", "subscriber": "host"}.get(role, "none")
    received = off_boundaries({"w": (30, 41), "v": (700,)}, seed=2) if role == "subscriber" else on_host(tensors)
    options = {"profile": profile, "baseline": baseline, "ladder": None, "anchor_after": 1e9, "keep_anchors": None}
    if role == "resumed":
        with sparserl.Publisher(folder, source, **options) as publisher:
            publisher.publish()
        change(params, 0.02, 9, tracked)
    monkeypatch.setattr(gpu.changes, "INTERPRETED", False)
    monkeypatch.setattr(on_gpu, "_warm", set())
    with (
        new_kernels(monkeypatch) as new,
        sparserl.Publisher(folder, source, **options) as publisher,
        sparserl.Subscriber(folder, received) as subscriber,
    ):
        publisher.publish()
        if role == "subscriber":
            subscriber.stage()
        assert len(new()) > 10
        for seed, share in enumerate((0.02, 0.02, 0.3) if CUDA else (0.02, 0.02)):
            change(params, share, seed, tracked)
            publisher.publish()
        if role == "subscriber":
            subscriber.commit()
            subscriber.goto(1)
            subscriber.stage(2)
            subscriber._staged.prepared[0].commit()()
            subscriber.commit()
            subscriber.goto(0)
            subscriber.audit()
            subscriber.sync()
        assert new() == []
        subscriber.sync()
    assert same_bits(received, tensors)


def off_boundaries(shapes, seed):
    """Random tensors, none of which begins at a 16-byte boundary."""
    rng = np.random.default_rng(seed)
    memories = (rng.integers(0, 1 << 14, math.prod(shape) + 1, np.int16) for shape in shapes.values())
    flat = (torch.from_numpy(memory).to(DEVICE).view(torch.bfloat16)[1:] for memory in memories)
    return {name: tensor.view(shape) for (name, shape), tensor in zip(shapes.items(), flat, strict=True)}


def change(params, share, seed, tracked=None):
    """Change a share of all elements by one bit, in a step that is tracked."""
    rng = np.random.default_rng(seed)
    with tracked.step() if tracked else nullcontext():
        for param in params:
            where = torch.from_numpy((rng.random(tuple(param.shape)) < share).astype(np.int16)).to(DEVICE)
            param.detach().view(torch.int16).bitwise_xor_(where)


@contextmanager
def new_kernels(monkeypatch):
    """Returns the kernels that were loaded or compiled since the last call: Triton's and, for the CPU, Numba's."""
    known = set()

    def new(found):
        fresh = sorted(found - known, key=str)
        known.update(fresh)
        return fresh

    if not CUDA:
        with LaunchedVariants() as launched:
            yield lambda: new(launched.variants | ready_kernels())
        return
    from triton import knobs

    loaded = set()
    monkeypatch.setattr(gpu.warmup, "unwatched", nullcontext)
    monkeypatch.setattr(
        knobs.runtime, "jit_post_compile_hook", lambda **facts: loaded.add((facts["fn"].name, str(facts["key"])))
    )
    _forget_compiled()
    yield lambda: new(loaded | ready_kernels())


def small_blocks(monkeypatch, few):
    """Programs of kernels take so few elements: the interpreter takes long."""
    parameters = [*inspect.signature(gpu.changes.Blocks).parameters]
    defaults = [*gpu.changes.Blocks.__init__.__defaults__]
    defaults[parameters.index("block") - len(parameters)] = few
    monkeypatch.setattr(gpu.changes.Blocks.__init__, "__defaults__", tuple(defaults))
    monkeypatch.setitem(gpu.warmup.warm_up.__kwdefaults__, "block", few)


@interpreted
@pytest.mark.parametrize(
    ("ranks", "profile"),
    [
        (2, "ctx"),
        *(pytest.param(*case, marks=pytest.mark.long) for case in [(1, "ctx"), (2, "ulp"), (1, "ulp"), (2, "raw")]),
    ],
)
def test_attaching_warms_what_ranks_launch(monkeypatch, ranks, profile):
    """Columns, turned parts and parts at odd addresses: one version, several behind, an anchor, an audit."""
    small_blocks(monkeypatch, 256)
    monkeypatch.setattr(on_gpu, "_warm", set())
    old, middle, new = versions(3)
    with LaunchedVariants() as launched:
        with monkeypatch.context() as attaching:
            attaching.setattr(gpu.changes, "INTERPRETED", False)
            engine = Ranks(old, ranks, turned=("o", "up") if ranks > 1 else ())
        warm = {*launched.variants}
        first, second = engine.patch(old, middle, profile), engine.patch(middle, new, profile)
        launched.variants.clear()
        engine.commit(engine.prepare(middle, [first]), old, middle)
        engine.commit(engine.prepare(new, [first, second]), old, new)
        if ranks > 1:
            fresh = [rank.fresh(middle) for rank in engine.ranks]
            engine.commit(engine.prepare(middle, [], fresh_parts=fresh, owns_fresh=[True] * ranks), old, middle)
        for rank in engine.ranks:
            rank.target.sums()
    assert len(launched.variants) > 10
    assert sorted(launched.variants - warm) == []


@compiling
def test_a_load_compiles_nothing_if_its_kernel_is_loaded(tmp_path, monkeypatch):
    """That is done on a thread, before the first tensor comes."""
    from triton import knobs

    compiled = []
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", lambda **facts: compiled.append(facts["fn"].name))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    _forget_compiled()
    load_kernel(torch.device("cuda", 0)).result()
    assert compiled == ["_digests_kernel"]
    live = {"w": torch.zeros(300, 400, dtype=torch.bfloat16, device="cuda")}
    with FirstLoad({}) as load:
        for name, tensor in load.watched([("w", torch.randn(300, 400).bfloat16())]):
            live[name].copy_(tensor)
    load.ended_with(live)
    assert [piece.tensor for piece in load.find_pieces(live, {})] == ["w"]
    assert compiled == ["_digests_kernel"]


def _forget_compiled():
    """Forget what other tests of this process have compiled."""
    from triton.runtime.jit import JITFunction

    for function in gc.get_objects():
        if issubclass(type(function), JITFunction):  # `isinstance` asks some objects, which then warn
            function.device_caches.clear()


def test_every_number_of_classes_is_warm():
    """What publishers choose at most is what is compiled beforehand."""
    assert gpu.warmup.MOST_THRESHOLDS + 1 == _MAX_CLASSES
