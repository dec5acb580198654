"""Baselines: bits or sums of the last committed version, chosen by a budget; weights that are streamed into memory."""

from __future__ import annotations

import threading
from collections import defaultdict

import numpy as np
import pytest

import sparserl
from sparserl import Part, Region, Shards, errors
from sparserl.session.baseline import HostBaseline, NoBaseline, choose_baseline
from sparserl.session.options import BaselineOptions
from sparserl.weights import batches, staging
from sparserl.weights.dtypes import BY_NAME
from sparserl.weights.staging import LazyBits, lazy_bits
from sparserl.weights.tensors import memory_of


def weights(rng, n=5000):
    return {"a": rng.integers(0, 1 << 16, (n // 50, 50), np.uint16), "b": np.zeros(3, np.float32)}


def sharded(held):
    """Two parts of one tensor, of which some rows are another process's."""
    table = sparserl.tensor_table(held)
    boxes = [Region((10, 0), (30, 20)), Region((10, 20), (30, 30))]
    return Shards(table, [Part("a", box, held["a"][box.slices]) for box in boxes])


@pytest.mark.parametrize("kind", [HostBaseline, NoBaseline])
@pytest.mark.parametrize("seen", [dict, sharded])
def test_versions_follow_one_another(kind, seen):
    """Every patch leads from the last committed version to the next, whatever failed in between."""
    rng = np.random.default_rng(0)
    held = weights(rng)
    baseline = kind(seen(held))
    there = {name: array.copy() for name, array in held.items()}
    assert baseline.digest == sparserl.digest(seen(held))
    for round in range(4):
        held["a"].reshape(-1)[rng.integers(0, 5000, 100)] ^= 3
        if round % 2:
            baseline.capture(seen(held)).encode()  # is never committed
            held["a"][12, 3] ^= 1
        found = baseline.capture(seen(held))
        result = sparserl.digest(seen(held))
        held["a"][13, 4] ^= 1  # the trainer goes on
        patch = found.encode()
        assert (patch.base, patch.result) == (baseline.digest, result)
        patch.apply(seen(there))
        baseline.advance(patch, found)
        assert baseline.digest == sparserl.digest(seen(there)) == result
        if baseline.weights is not None:
            assert sparserl.digest(baseline.weights) == result


def test_own_bits():
    """A baseline is a copy, unless it is told that the bits are its own; a known digest is not read again."""
    held = weights(np.random.default_rng(1))
    before = sparserl.digest(held)
    copy, own = HostBaseline(held, before), HostBaseline(held, before, copy=False)
    held["a"][0, 0] ^= 1
    assert sparserl.digest(copy.weights) == before
    assert own.weights is held


def test_sums_follow_only_what_was_captured():
    """Without bits, another patch than the one that was captured last cannot be taken over."""
    held = weights(np.random.default_rng(2))
    baseline = NoBaseline(held)
    held["a"][1, 1] ^= 1
    early = baseline.capture(held)
    held["a"][2, 2] ^= 1
    late = baseline.capture(held)
    with pytest.raises(errors.SessionError):
        baseline.advance(early.encode(), late)
    baseline.advance(early.encode(), early)
    assert baseline.digest == early.result != late.result
    with pytest.raises(errors.TensorMismatch):
        baseline.capture({"a": held["a"].view(np.int16)})


def choose(weights, memory=None, kind="auto", **options):
    """A baseline as a publisher chooses it."""
    return choose_baseline(weights, BaselineOptions(kind, memory), **options)


def test_the_budget_chooses():
    """No copy where the source tracks, but for an observer if it fits; the words say which, and what it costs."""
    held = {"a": np.zeros(500_000, np.float32)}
    for options in ({}, {"kind": "host"}, {"kind": "device"}, {"memory": 2_000_000}):
        found, words = choose(held, **options)
        assert isinstance(found, HostBaseline)
        assert words == "baseline: 2 MB in host memory"
    found, words = choose(held, 2_000_000, tracked=True, observed=True)
    assert isinstance(found, HostBaseline)
    assert words == "baseline: 2 MB in host memory"
    for options in ({}, {"memory": 1_999_999, "observed": True}, {"kind": "none"}):
        found, words = choose(held, tracked=True, **options)
        assert isinstance(found, NoBaseline)
        assert found.weights is None
        assert "one full digest read per publish" in words
    with pytest.raises(errors.SessionError, match="tracks"):
        choose(held, kind="none")
    with pytest.raises(errors.SessionError, match=r"2 MB would not fit 1 MB.*tracks"):
        choose(held, 1_000_000)
    with pytest.raises(errors.SessionError, match="budget is 1 MB"):
        choose(held, 1_000_000, "host", tracked=True)
    with pytest.raises(errors.SessionError, match="moon"):
        choose(held, kind="moon")


def test_streaming(monkeypatch):
    """Bits that are elsewhere come in pieces: the next one while this one is in use, in few buffers again and again."""
    monkeypatch.setattr(batches, "PIECE_BYTES", 1 << 20)
    there = np.random.default_rng(3).integers(0, 256, (48, 1 << 19), np.uint8)
    made, sizes, second = [], [], threading.Event()
    allocate = staging._allocate
    monkeypatch.setattr(staging, "_allocate", lambda *kind: made.append(kind) or allocate(*kind))
    monkeypatch.setattr(staging, "_idle", defaultdict(list))

    def fill(region, out):
        if copying:
            out[...] = there[region.slices]
            return
        sizes.append(out.nbytes)
        if len(sizes) == 2:
            second.set()
        assert second.wait(120), "a piece must be on its way while another one is"
        out[...] = there[region.slices]

    far = {"w": LazyBits(BY_NAME["uint8"], there.shape, fill, None)}
    copying = True
    baseline = HostBaseline(far, sparserl.digest({"w": there}))
    copying = False
    assert baseline.digest == sparserl.digest({"w": there})
    there[5, 77] ^= 1
    there[40] ^= 255
    found = baseline.capture(far, threads=2)
    patch = found.encode()
    assert patch.result == sparserl.digest({"w": there})
    assert patch.changed == 1 + (1 << 19)
    assert len(sizes) >= 24
    assert max(sizes) <= 1 << 20
    assert 2 <= len(made) <= 4
    baseline.advance(patch, found)
    assert (baseline.weights["w"].array == there).all()


def test_foreign_bits_can_only_be_read():
    """Casts are read as torch makes them, whole and in regions; nothing can be applied to them; meta is refused."""
    torch = pytest.importorskip("torch")
    wide = torch.randn(37, 23)
    wide[3, 4], wide[5, 6] = float("nan"), -0.0
    cast = {"w": lazy_bits(wide.t(), torch.bfloat16)}
    plain = {"w": wide.t().to(torch.bfloat16).contiguous()}
    assert sparserl.digest(cast) == sparserl.digest(plain)
    zeros = {"w": torch.zeros(23, 37, dtype=torch.bfloat16)}
    patch = sparserl.diff(zeros, cast)
    assert patch.result == sparserl.digest(plain)
    region = Region((2, 3), (20, 30))
    table = sparserl.tensor_table(plain)
    box = Shards(table, [Part("w", region, lazy_bits(wide.t()[region.slices], torch.bfloat16))])
    assert sparserl.digest(box) == sparserl.digest(Shards(table, [Part("w", region, plain["w"][region.slices])]))
    with pytest.raises(errors.UnsupportedTensor, match="only be read"):
        sparserl.diff(cast, zeros).apply(cast)
    with pytest.raises(errors.UnsupportedTensor, match="meta"):
        memory_of("w", torch.empty(3, device="meta"))
