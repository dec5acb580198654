"""Changes found by kept old bits and sums, without a copy of the version before."""

from __future__ import annotations

import numpy as np
import pytest

import sparserl
from sparserl import Part, Region, Shards, errors
from sparserl.patch import capture_tracked
from sparserl.patch import tracked as marked
from sparserl.weights.digest import Digest
from sparserl.weights.local import LocalWeights
from sparserl.weights.old_bits import OldBits, OldPiece
from sparserl.weights.region import whole

TABLE = sparserl.tensor_table(
    {"a": np.zeros((40, 50), np.uint16), "b": np.zeros(7, np.float32), "c": np.zeros((6, 1000), np.uint8)}
)


def shards(bits, marks=None):
    """Whole `a` and `b`, the middle of `c`."""
    regions = {"a": whole((40, 50)), "b": whole((7,)), "c": Region((1, 10), (4, 900))}
    marks = marks or {}
    return Shards(TABLE, [Part(name, r, bits[name][r.slices], marks.get(name)) for name, r in regions.items()])


def some_bits(rng):
    return {
        "a": rng.integers(0, 1 << 16, (40, 50), np.uint16),
        "b": rng.integers(0, 1 << 32, 7, np.uint32).view(np.float32),
        "c": rng.integers(0, 256, (6, 1000), np.uint8),
    }


def copies(bits):
    return {name: array.copy() for name, array in bits.items()}


def sums(weights):
    return marked.part_sums(LocalWeights.of(weights))


def kept(old, positions):
    """The old bits of a contiguous part at some positions."""
    positions = np.unique(positions).astype(np.uint32)
    return OldBits(old.size, [OldPiece(0, old.size, positions, old.reshape(-1)[positions])])


def told(old, new, more=0):
    """The old bits of all changes, and of a few elements that did not change."""
    marks = {}
    for part, is_now in zip(shards(old).parts, shards(new).parts, strict=True):
        width = f"u{part.data.dtype.itemsize}"
        was = part.data.copy().view(width)
        differ = np.flatnonzero(was != is_now.data.copy().view(width))
        marks[part.tensor] = kept(was, np.concatenate((differ, np.arange(more))))
    return marks


def lands(found, old, new):
    """The patch leads from old to new, bit by bit."""
    patch = found.encode()
    assert patch.base == sparserl.digest(shards(old))
    assert patch.result == found.result == sparserl.digest(shards(new))
    there = shards(copies(old))
    patch.apply(there)
    for part, wanted in zip(there.parts, shards(new).parts, strict=True):
        assert part.data.tobytes() == wanted.data.tobytes()
    return patch


@pytest.mark.parametrize("profile", ["auto", "gap", "raw", "ulp", "ctx"])
@pytest.mark.parametrize("more", [0, 5])
def test_changes_are_those_of_a_full_comparison(profile, more):
    """The same patch, byte for byte, also where more old bits are kept than there are changes."""
    rng = np.random.default_rng(more)
    old = some_bits(rng)
    new = copies(old)
    new["a"][3, 4:9] ^= 1
    new["b"].view(np.uint32)[2] = 0x7FC00123  # a NaN
    new["c"][2, rng.integers(10, 900, 30)] ^= 255
    marks = told(old, new, more)
    found = capture_tracked(shards(new, marks), sums(shards(old)), profile=profile)
    patch = lands(found, old, new)
    assert not any(entry.dense for entry in patch if entry.tensor != "b")
    full = sparserl.diff(shards(old), shards(new), profile=profile)
    assert patch.to_bytes() == full.to_bytes()


@pytest.mark.parametrize("profile", ["auto", "gap"])
def test_new_bits_are_captured(profile):
    """What the trainer writes afterwards does not get into the patch, be it sparse or dense."""
    rng = np.random.default_rng(0)
    old = some_bits(rng)
    new = copies(old)
    new["a"][0, 0] ^= 1
    new["b"].view(np.uint32)[1] ^= 1
    new["c"][2, 500] ^= 1
    marks = told(old, new)
    del marks["b"], marks["c"]  # one lies in one piece, the other does not
    going_on = copies(new)
    found = capture_tracked(shards(going_on, marks), sums(shards(old)), profile=profile).detach()
    for array in going_on.values():
        array.view(np.uint8)[...] ^= 77
    lands(found, old, new)


def test_a_write_without_a_mark_makes_the_part_dense():
    """Sums that the marks do not explain: all bits of that part are sent, and of no other."""
    rng = np.random.default_rng(1)
    old = some_bits(rng)
    new = copies(old)
    new["a"][5, 5] ^= 1
    new["c"][3, 300] ^= 1
    marks = told(old, new)
    new["a"][9, 9] ^= 1
    patch = lands(capture_tracked(shards(new, marks), sums(shards(old))), old, new)
    assert {entry.tensor: entry.dense for entry in patch} == {"a": True, "c": False}


def test_without_marks_a_part_is_dense_or_not_there():
    """Of parts that nobody marks, those whose sums are the same are not sent."""
    rng = np.random.default_rng(2)
    old = some_bits(rng)
    new = copies(old)
    new["b"].view(np.uint32)[3] ^= 1 << 31  # the sign of a number, be it zero
    patch = lands(capture_tracked(shards(new), sums(shards(old))), old, new)
    assert [(entry.tensor, entry.dense) for entry in patch] == [("b", True)]
    assert capture_tracked(shards(new), sums(shards(new))).encode().changed == 0


def test_changes_that_were_undone_are_not_sent():
    """Marks, but the bits of before: the sum is the same, and nothing is sent."""
    old = some_bits(np.random.default_rng(3))
    marks = {"a": kept(old["a"], np.arange(2000))}
    assert capture_tracked(shards(old, marks), sums(shards(old))).encode().nbytes < 500


def test_whole_weights_and_large_tensors():
    """Of whole weights the patch is complete; parts larger than a piece or a bucket are cut and summed up."""
    rng = np.random.default_rng(4)
    old = {"w": rng.integers(0, 1 << 16, (3000, 4000), np.uint16), "v": np.zeros((), np.float32)}
    new = copies(old)
    where = rng.choice(12_000_000, 50_000, replace=False)
    new["w"].reshape(-1)[where] ^= 1
    table = sparserl.tensor_table(old)
    before = sums(old)
    parts = [Part("w", whole((3000, 4000)), new["w"], kept(old["w"], where)), Part("v", whole(()), new["v"])]
    patch = capture_tracked(Shards(table, parts), before).encode(link="10Gbit")
    assert patch.complete
    assert patch.changed == 50_000
    dense = capture_tracked(new, before).encode()
    assert dense.buckets > 1
    for made in (patch, dense):
        there = copies(old)
        made.apply(there)
        assert made.result == sparserl.digest(new)
        assert there["w"].tobytes() == new["w"].tobytes()


def test_what_is_refused():
    """Profiles that no receiver can take, other parts than those whose sums are known, bits of other elements."""
    old = some_bits(np.random.default_rng(5))
    known = sums(shards(old))
    for profile in ("ulp", "ctx"):
        with pytest.raises(errors.TensorMismatch, match=rf"'{profile}' cannot be written with \['gap', 'raw'\] alone"):
            capture_tracked(shards(old), known, profile=profile, profiles=("raw", "gap"))
    with pytest.raises(errors.TensorMismatch):
        capture_tracked(shards(old), known | {(0, Region((0, 0), (1, 1))): Digest()})
    with pytest.raises(errors.TensorMismatch, match="old bits for 7 elements, the region has 2000"):
        capture_tracked(shards(old, {"a": kept(np.zeros(7, np.uint16), [1])}), known)
