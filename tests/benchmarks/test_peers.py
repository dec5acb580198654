"""The peers' formats are exact, and the traces they are measured on are what their descriptions say."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.peers import PEERS, Peer, size
from benchmarks.traces import Weights, describe, runs, syncs, synthetic

TRACE = Path(__file__).resolve().parents[1] / "data" / "trace"
SHAPES: tuple[tuple[int, ...], ...] = (
    (),
    (0,),
    (1,),
    (5,),
    (1031,),
    (0, 7),
    (7, 0),
    (1, 300),
    (300, 1),
    (33, 65),
    (2, 3, 4),
    (3, 70_000),
    (70_000, 3),
)
# -0.0, +0.0, the smallest subnormal, infinity, a quiet and a signalling NaN with payloads, a negative NaN.
AWKWARD = np.array([0x8000, 0x0000, 0x0001, 0x7F80, 0x7FC5, 0x7F81, 0xFFFF], np.uint16)

each_peer = pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name)


def random_weights(rng: np.random.Generator) -> Weights:
    """A tensor of every awkward shape, any bit pattern, the awkward ones often."""
    weights = {}
    for number, shape in enumerate(SHAPES):
        bits = rng.integers(0, 1 << 16, shape, np.uint16)
        weights[f"tensor.{number}"] = np.where(rng.random(shape) < 0.3, rng.choice(AWKWARD, shape), bits)
    return {name: np.asarray(bits, np.uint16) for name, bits in weights.items()}


def changed(weights: Weights, density: float, rng: np.random.Generator) -> Weights:
    """A copy in which each element differs with probability `density`."""
    fresh = {}
    for name, bits in weights.items():
        flips = rng.integers(1, 1 << 16, bits.shape, np.uint16)
        fresh[name] = np.asarray(np.where(rng.random(bits.shape) < density, bits ^ flips, bits), np.uint16)
    return fresh


def copied(weights: Weights) -> Weights:
    return {name: bits.copy() for name, bits in weights.items()}


def assert_round_trip(peer: Peer, old: Weights, new: Weights) -> None:
    before = copied(old), copied(new)
    weights = copied(old)
    peer.decode_apply(peer.encode(old, new), weights)
    assert_same(new, weights)
    assert_same(before[0], old)
    assert_same(before[1], new)


def assert_same(expected: Weights, actual: Weights) -> None:
    assert expected.keys() == actual.keys()
    for name, bits in expected.items():
        assert bits.shape == actual[name].shape, name
        assert np.array_equal(bits, actual[name]), name


@each_peer
@pytest.mark.parametrize("density", [0.0, 1e-4, 0.01, 0.5, 1.0])
@pytest.mark.parametrize("seed", range(3))
def test_round_trip_on_awkward_shapes(peer: Peer, density: float, seed: int) -> None:
    """Any bits of any shape come back exactly, from nothing changed to everything changed."""
    rng = np.random.default_rng(seed)
    old = random_weights(rng)
    assert_round_trip(peer, old, changed(old, density, rng))


@each_peer
def test_round_trip_of_awkward_values(peer: Peer) -> None:
    """Every change between two awkward values counts, also -0.0 to +0.0 and NaN to NaN."""
    old, new = (grid.copy() for grid in np.meshgrid(AWKWARD, AWKWARD))
    assert_round_trip(peer, {"weight": old}, {"weight": new})


@each_peer
@pytest.mark.parametrize("position", [0, 255, 256, 65_535, 65_536, 65_537, 199_999])
def test_round_trip_of_one_far_change(peer: Peer, position: int) -> None:
    """A gap is exact on both sides of every width that a format can choose."""
    for shape in [(200_000,), (200_000, 1), (2, 100_000), (100_000, 2)]:
        old = {"weight": np.zeros(shape, np.uint16)}
        new = copied(old)
        new["weight"].reshape(-1)[position] = 0x8000
        assert_round_trip(peer, old, new)


@each_peer
def test_round_trip_without_tensors(peer: Peer) -> None:
    """No tensors is a valid set of weights."""
    assert_round_trip(peer, {}, {})


@each_peer
def test_order_of_names_does_not_matter(peer: Peer) -> None:
    """The receiver may hold its tensors in another order than the sender."""
    rng = np.random.default_rng(0)
    old = random_weights(rng)
    new = changed(old, 0.1, rng)
    weights = dict(reversed(copied(old).items()))
    peer.decode_apply(peer.encode(old, new), weights)
    assert_same(new, weights)


@each_peer
@pytest.mark.parametrize("run", runs(TRACE))
def test_round_trip_on_the_trace(peer: Peer, run: str) -> None:
    """Real syncs come back exactly, and every sparse format is smaller than the dense one."""
    for old, new in syncs(TRACE, run):
        assert_round_trip(peer, old, new)
        if peer.name != "dense bf16":
            assert size(peer.encode(old, new)) < sum(bits.nbytes for bits in new.values()) / 4


@each_peer
def test_strided_weights_are_refused(peer: Peer) -> None:
    """Decoding into a view that cannot be flattened raises; it must not write to a lost copy."""
    old = {"weight": np.zeros((4, 6), np.uint16)}
    new = {"weight": np.ones((4, 6), np.uint16)}
    with pytest.raises(ValueError, match="not contiguous"):
        peer.decode_apply(peer.encode(old, new), {"weight": np.zeros((6, 4), np.uint16).T})


@pytest.mark.parametrize("run", runs(TRACE))
def test_syncs_have_the_described_counts(run: str) -> None:
    """Each sync changes exactly as many elements as the run's description says."""
    description = describe(TRACE, run)
    pairs = list(syncs(TRACE, run))
    counts = [sum(int((old[name] != new[name]).sum()) for name in old) for old, new in pairs]
    assert [sync["changed"] for sync in description["syncs"]] == counts
    assert {description["elements"]} == {sum(bits.size for bits in old.values()) for old, _ in pairs}


@pytest.mark.parametrize("run", runs(TRACE))
def test_syncs_follow_on_and_share_nothing(run: str) -> None:
    """A pair starts where the last one ended, and spoiling one pair leaves all others as they were."""
    (old, new), (next_old, _) = list(syncs(TRACE, run))[:2]
    assert_same(new, next_old)
    spoiling = syncs(TRACE, run)
    for weights in next(spoiling):
        for bits in weights.values():
            bits[...] = 0
    assert_same(next_old, next(spoiling)[0])
    assert_same(old, next(syncs(TRACE, run))[0])


@pytest.mark.parametrize("density", [0.002, 0.012, 0.05])
@pytest.mark.parametrize("seed", [0, 1])
def test_synthetic_hits_its_density(monkeypatch: pytest.MonkeyPatch, density: float, seed: int) -> None:
    """The share of changed elements is what was asked for, within 5%, and every result is finite."""
    monkeypatch.setattr("benchmarks.traces.find_traces", lambda: TRACE)
    old, new = synthetic(6 << 20, density, seed)
    assert (6 << 20) == old.nbytes == new.nbytes
    assert abs(np.count_nonzero(old != new) / old.size / density - 1) < 0.05
    assert not np.any((new >> 7) & 0xFF == 0xFF)


def test_synthetic_repeats_with_its_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """One seed gives one pair; another gives another."""
    monkeypatch.setattr("benchmarks.traces.find_traces", lambda: TRACE)
    first, again, other = (synthetic(1 << 20, 0.01, seed) for seed in (3, 3, 4))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not np.array_equal(first[1], other[1])


def test_synthetic_refuses_what_the_trace_cannot_give(monkeypatch: pytest.MonkeyPatch) -> None:
    """A density above the share of weights that ever change is an error, not a silent lower one."""
    monkeypatch.setattr("benchmarks.traces.find_traces", lambda: TRACE)
    with pytest.raises(ValueError, match="density"):
        synthetic(1 << 20, 1.0, 0)
