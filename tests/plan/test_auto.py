"""`auto` takes the smallest profile: over real changes, checkpoints of a run, and changes anywhere."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import sparserl
from sparserl.weights.dtypes import BY_NAME, Bits

TRACE = Path(__file__).parents[1] / "data" / "trace"
NEAR = 1.02
BF16 = BY_NAME["bfloat16"]
STEPS = 100  # between two checkpoints
CHECKPOINTS = 11


def assert_smallest(old, new):
    """Within 2% of the smallest of all profiles."""
    pair = [{name: Bits(bits, BF16) for name, bits in weights.items()} for weights in (old, new)]
    sizes = {name: sparserl.diff(*pair, profile=name).nbytes for name in ("auto", "raw", "gap", "ulp", "ctx")}
    assert sizes["auto"] <= NEAR * min(sizes.values()), sizes


def rounded(floats):
    """Floats as the nearest bf16, ties to even."""
    bits = floats.astype(np.float32).view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)


def widened(bits):
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def initial(rng):
    """An embedding of which a tenth of the rows is in use, three matrices, a norm."""
    shapes = {"embed": (4096, 48), "q": (128, 256), "up": (256, 128), "down": (128, 256), "norm": (512,)}
    weights = {name: rng.normal(0, 0.02, shape).astype(np.float32) for name, shape in shapes.items()}
    weights["norm"] = np.ones(shapes["norm"], np.float32)
    moving = {name: np.ones(shape, bool) for name, shape in shapes.items()}
    moving["embed"] = np.broadcast_to(rng.random((4096, 1)) < 0.1, shapes["embed"])
    return weights, moving


def run(master_in_bf16, rate=1e-5):
    """Checkpoints of a run with Adam's moves, up to the rate each, that becomes slower.

    With masters in bf16, only moves of half a spacing and more change a weight: small ones walk, also through zero.
    """
    rng = np.random.default_rng(7)
    weights, moving = initial(rng)
    yield {name: rounded(w) for name, w in weights.items()}
    for checkpoint in range(CHECKPOINTS - 1):
        step = rate * (1 - checkpoint / CHECKPOINTS)
        for name, w in weights.items():
            if master_in_bf16:
                walk = step * STEPS * rng.uniform(-1, 1, w.shape)
                takes = np.abs(w) < 256 * step
                weights[name] = widened(rounded(np.where(moving[name] & takes, w + walk, w)))
            else:
                weights[name] = w + np.where(moving[name], step * STEPS * rng.uniform(-1, 1, w.shape), 0)
        yield {name: rounded(w) for name, w in weights.items()}


@pytest.mark.parametrize("name", ["grpo_lr1e-6", "grpo_lr3e-6_T4"])
def test_of_real_runs(name):
    """Changes that reinforcement learning made."""
    from benchmarks import traces  # mutants are tested without it

    for old, new in traces.syncs(TRACE, name):
        assert_smallest(old, new)


@pytest.mark.parametrize("master_in_bf16", [False, True], ids=["fp32", "bf16"])
def test_of_checkpoints(master_in_bf16):
    """Changes of a hundred steps at once, many of which are large, and in some rows of an embedding only."""
    versions = [*run(master_in_bf16)]
    for old, new in zip(versions, versions[1:], strict=False):
        assert_smallest(old, new)


@pytest.mark.parametrize("small", [0.0005, 0.001, 0.0025, 0.005])
@pytest.mark.parametrize("move", [0.0004, 0.002, 0.01])
def test_of_small_weights(small, move):
    """All that are small move, and many through zero: their steps are large, and so is `ulp`, but `ctx` is not."""
    rng = np.random.default_rng(1)
    old = rounded(rng.normal(0, 0.02, 200_000))
    floats = widened(old)
    new = rounded(np.where(np.abs(floats) < small, floats + rng.normal(0, move, old.size), floats))
    assert_smallest({"w": old}, {"w": new})


@pytest.mark.parametrize("density", [0.0001, 0.001, 0.01, 0.05, 0.2])
@pytest.mark.parametrize("kind", ["fresh", "step", "sum"])
def test_of_changes_anywhere(kind, density):
    """To other bits, by one step, by adding as much to each."""
    rng = np.random.default_rng(2)
    old = rounded(rng.normal(0, 0.02, max(150_000, round(200 / density))))
    where = np.flatnonzero(rng.random(old.size) < density)
    new = old.copy()
    if kind == "fresh":
        new[where] = rounded(rng.normal(0, 0.02, where.size))
    elif kind == "step":
        new[where] += rng.choice(np.array([1, 0xFFFF], np.uint16), where.size)
    else:
        new[where] = rounded(widened(old[where]) + rng.normal(0, 0.001, where.size))
    assert_smallest({"w": old}, {"w": new})


def test_over_a_link():
    """Over a slow one it is the smallest, too, by the estimates of these changes and not of usual ones."""
    rng = np.random.default_rng(3)
    old = rounded(rng.normal(0, 0.02, 200_000))
    new = rounded(np.where(np.abs(widened(old)) < 0.001, rng.normal(0, 0.01, old.size), widened(old)))
    patch = sparserl.diff({"w": Bits(old, BF16)}, {"w": Bits(new, BF16)}, link="1kbit")
    (head,) = patch.contents.heads
    assert head.profile.name == "ctx"
    costs = dict(head.estimates)
    assert costs[head.profile.id] == pytest.approx(patch.nbytes, rel=0.1)
