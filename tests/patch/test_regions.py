"""Shards: encoded apart, merged without recoding, the same as the whole."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import sparserl
from sparserl import Digest, Part, Patch, Region, Shards
from sparserl.errors import ChainError, RegionOverlap, TensorMismatch, WrongBase
from sparserl.patch.contents import BucketList, Contents, Ends
from sparserl.weights.dtypes import DTYPES
from sparserl.weights.marks import Bitmap
from sparserl.weights.region import whole
from tests.boxed_shards import diff_shards
from tests.class_choice import always
from tests.effort import examples

PROFILES = ("auto", "raw", "gap", "ulp", "ctx")
each_profile = pytest.mark.parametrize("profile", PROFILES)


@pytest.fixture(autouse=True)
def classes(monkeypatch):
    """Small data, too, is told apart by magnitude where `ctx` is asked for."""
    monkeypatch.setattr("sparserl.plan.buckets.choose_classes", always)


def cut(shape, *counts):
    """A tensor's boxes when each dimension is cut into so many parts, uneven where it does not divide."""
    edges = []
    for size, count in zip(shape, counts, strict=True):
        parts = np.array_split(np.arange(size), count)
        edges.append([(int(p[0]), p.size) for p in parts if p.size])
    boxes = [((), ())]
    for axis in edges:
        boxes = [((*start, a), (*size, n)) for start, size in boxes for a, n in axis]
    return [Region(start, size) for start, size in boxes]


CUTS = {
    "rows": ((30, 17), (4, 1)),
    "columns": ((30, 17), (1, 4)),
    "blocks": ((30, 17), (3, 5)),
    "one column each": ((30, 17), (1, 17)),
    "blocks of three dimensions": ((7, 10, 9), (2, 3, 2)),
    "middle dimension": ((5, 12, 8), (1, 5, 1)),
    "single elements": ((3, 4), (3, 4)),
    "all of it": ((30, 17), (1, 1)),
    "a vector": ((101,), (7,)),
}


def versions(shape, density=0.1, seed=0, uint=np.uint16):
    """Old and new bits of one tensor."""
    rng = np.random.default_rng(seed)
    most = 2 ** (8 * np.dtype(uint).itemsize)
    old = rng.integers(0, most, shape, uint)
    new = np.where(rng.random(shape) < density, old + uint(1), old)
    return old, new


def shard(old, new, region, table, profile="auto", name="w", copy=True, **more):
    """The patch of one box of a tensor."""
    a, b = old[region.slices], new[region.slices]
    if copy:
        a, b = a.copy(), b.copy()
    return diff_shards({name: a}, {name: b}, profile=profile, table=table, regions={name: region}, **more)


def buckets(*patches):
    return [bytes(p.contents.bucket(i)) for p in patches for i in range(p.buckets)]


@each_profile
@pytest.mark.parametrize("kind", CUTS)
@pytest.mark.parametrize("density", [*(pytest.param(d, marks=pytest.mark.long) for d in (0.0, 1.0)), 0.1])
def test_merged_shards_are_the_whole(kind, profile, density):
    """Digests, count and weights of the undivided diff; every bucket byte for byte as its shard wrote it."""
    shape, counts = CUTS[kind]
    old, new = versions(shape, density)
    table = sparserl.tensor_table({"w": old})
    shards = [shard(old, new, r, table, profile) for r in cut(shape, *counts)]
    merged = sparserl.merge(*shards)
    undivided = sparserl.diff({"w": old}, {"w": new}, profile=profile)
    assert merged.complete
    assert (merged.base, merged.result, merged.changed) == (undivided.base, undivided.result, undivided.changed)
    assert buckets(merged) == buckets(*shards)
    weights = {"w": old.copy()}
    assert merged.apply(weights).changed == int((old != new).sum())
    assert (weights["w"] == new).all()
    merged.invert({"w": old}, profile=profile).apply(weights)
    assert (weights["w"] == old).all()


@st.composite
def partitions(draw, region, depth=4):
    """Random boxes that together are a region."""
    axes = [d for d, n in enumerate(region.size) if n > 1]
    if not axes or depth == 0 or draw(st.integers(0, 4)) == 0:
        return [region]
    axis = draw(st.sampled_from(axes))
    at = draw(st.integers(1, region.size[axis] - 1))
    low, high, start = list(region.size), list(region.size), list(region.start)
    low[axis] = at
    high[axis] -= at
    start[axis] += at
    left, right = Region(region.start, tuple(low)), Region(tuple(start), tuple(high))
    return draw(partitions(left, depth - 1)) + draw(partitions(right, depth - 1))


@pytest.mark.long
@given(
    st.data(),
    st.lists(st.integers(1, 12), min_size=1, max_size=4).map(tuple),
    st.sampled_from([np.uint8, np.uint16, np.uint32, np.uint64]),
    st.sampled_from(PROFILES),
    st.sampled_from([16, 100, 1 << 20]),
)
@settings(deadline=None, max_examples=examples(60))
def test_any_partition_in_any_order(data, shape, uint, profile, piece):
    """Random boxes, merged in random order and in two stages, cut into pieces or not: the whole, exactly."""
    old, new = versions(shape, data.draw(st.sampled_from([0.05, 0.5, 1.0])), data.draw(st.integers(0, 2**32)), uint)
    table = sparserl.tensor_table({"w": old})
    parts = data.draw(st.permutations(data.draw(partitions(whole(shape)))))
    with pytest.MonkeyPatch.context() as patcher:
        patcher.setattr("sparserl.weights.batches.PIECE_BYTES", piece)
        shards = [shard(old, new, r, table, profile, copy=data.draw(st.booleans())) for r in parts]
        half = data.draw(st.integers(0, len(shards)))
        stages = [sparserl.merge(*some) for some in (shards[:half], shards[half:]) if some]
        merged = Patch.from_bytes(sparserl.merge(*stages).to_bytes())
        assert merged.complete
        assert (merged.base, merged.result) == (sparserl.digest({"w": old}), sparserl.digest({"w": new}))
        weights = {"w": old.copy()}
        merged.apply(weights)
    assert (weights["w"] == new).all()


def ranks():
    """Two versions of a small model, and what each of three ranks holds of it: boxes, whole tensors, nothing."""
    rng = np.random.default_rng(5)
    old = {
        "norm": rng.integers(0, 2**16, 13, np.uint16),
        "qkv": rng.integers(0, 2**16, (12, 8), np.uint16),
        "down": rng.integers(0, 2**32, (6, 9), np.uint32),
        "step": rng.integers(0, 100, (), np.int64),
        "none": np.zeros((0, 4), np.float32),
    }
    new = {n: np.where(rng.random(b.shape) < 0.3, b + b.dtype.type(1), b) for n, b in old.items()}
    new["step"] = np.array(old["step"] + 1)
    held = [
        {"qkv": Region((0, 0), (5, 8)), "down": Region((0, 0), (6, 4)), "norm": None, "none": None},
        {"qkv": Region((5, 0), (7, 8)), "down": Region((0, 4), (6, 5)), "step": None, "none": None},
        {},
    ]
    return old, new, held


def rank_patch(old, new, held, table, profile="auto"):
    regions = {n: r for n, r in held.items() if r is not None}

    def parts(weights):
        return {n: weights[n][regions[n].slices] if n in regions else weights[n] for n in held}

    return diff_shards(parts(old), parts(new), profile=profile, table=table, regions=regions)


@each_profile
def test_a_model_over_several_ranks(profile):
    """Sharded and whole tensors, scalars, empty tensors that all ranks hold, and a rank that holds nothing."""
    old, new, held = ranks()
    table = sparserl.tensor_table(old)
    patches = [rank_patch(old, new, h, table, profile) for h in held]
    assert not any(p.complete for p in patches)
    merged = sparserl.merge(*patches)
    assert merged.complete
    assert (merged.base, merged.result) == (sparserl.digest(old), sparserl.digest(new))
    merged.apply(old)
    assert all((old[n] == new[n]).all() for n in new)


def test_a_rank_that_holds_everything_beside_one_that_holds_nothing():
    """Merging a complete patch with the patch of no region leaves it what it was."""
    old, new, _ = ranks()
    table = sparserl.tensor_table(old)
    everything = diff_shards(old, new, table=table)
    nothing = diff_shards({}, {}, table=table)
    an_empty_tensor = diff_shards({"none": old["none"]}, {"none": new["none"]}, table=table)
    assert everything.complete
    assert (nothing.base, nothing.result, nothing.changed, nothing.covers) == (Digest(), Digest(), 0, [])
    for patches in ((everything, nothing), (nothing, everything), (an_empty_tensor, everything, nothing)):
        merged = sparserl.merge(*patches)
        assert merged.complete
        assert (merged.base, merged.result) == (everything.base, everything.result)
        weights = {n: b.copy() for n, b in old.items()}
        merged.apply(weights)
        assert all((weights[n] == new[n]).all() for n in new)


def test_an_incomplete_merge_stays_partial():
    """It speaks for its regions alone: its digests cover them, and only they are written."""
    old, new = versions((30, 17), 0.3)
    table = sparserl.tensor_table({"w": old})
    regions = cut((30, 17), 3, 2)
    shards = [shard(old, new, r, table) for r in regions]
    some = sparserl.merge(*shards[1:4])
    assert not some.complete
    assert not some.stats().complete
    assert {r for _, r in some.covers} == set(regions[1:4])
    assert some.base == sum((s.base for s in shards[1:4]), Digest())
    assert some.result == sum((s.result for s in shards[1:4]), Digest())
    weights = {"w": old.copy()}
    weights["w"][regions[0].slices] = 7  # not covered: none of this patch's business
    expected = weights["w"].copy()
    for region in regions[1:4]:
        expected[region.slices] = new[region.slices]
    some.apply(weights)
    assert (weights["w"] == expected).all()
    assert some.apply(weights).already
    weights["w"][regions[2].slices][0, 0] ^= np.uint16(1)
    with pytest.raises(WrongBase):
        some.apply(weights)
    rest = sparserl.merge(some, *(shards[i] for i in (0, 4, 5)))
    assert rest.complete
    assert rest.result == sparserl.digest({"w": new})


@each_profile
@pytest.mark.parametrize("window", [16 << 20, 200, 30], ids=["one window", "some windows", "many windows"])
def test_partial_patches_squash_and_invert(profile, window, monkeypatch):
    """A chain of some shards' patches is squashed and undone inside their regions; other shards are no part of it."""
    monkeypatch.setattr("sparserl.patch.compose.PIECE_BYTES", window)
    first, second = versions((30, 17), 0.3)
    third = np.where(np.random.default_rng(1).random((30, 17)) < 0.2, second + np.uint16(2), second)
    table = sparserl.tensor_table({"w": first})
    *held, other = cut((30, 17), 1, 3)
    chain = [
        sparserl.merge(*(shard(a, b, region, table, profile) for region in held))
        for a, b in ((first, second), (second, third))
    ]
    bases = [{"w": first}] if profile in ("auto", "ctx") else [{"w": first}, None]
    for base in bases:
        patch = sparserl.squash(*chain, base=base)
        assert not patch.complete
        assert patch.covers == chain[0].covers
        assert all(any(e.region.inside(region) for region in held) for e in patch)
        weights = {"w": first.copy()}
        patch.apply(weights)
        for region in held:
            assert (weights["w"][region.slices] == third[region.slices]).all()
        assert (weights["w"][other.slices] == first[other.slices]).all()
        patch.invert({"w": first}).apply(weights)
        assert (weights["w"] == first).all()
    with pytest.raises(ChainError):
        sparserl.squash(chain[0], shard(second, third, other, table))


def test_a_chain_covers_one_set_of_regions():
    """Patches that speak for different parts are no chain, even where their sums follow one another."""
    table = sparserl.tensor_table({"none": np.zeros((0, 4), np.float32), "w": np.zeros(3, np.float32)})
    nothing = diff_shards({}, {}, table=table)
    an_empty_tensor = diff_shards(*[{"none": np.zeros((0, 4), np.float32)}] * 2, table=table)
    assert nothing.result == an_empty_tensor.base
    with pytest.raises(ChainError, match="cover different regions"):
        sparserl.squash(nothing, an_empty_tensor)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (Region((0, 0), (4, 6)), Region((3, 0), (2, 6))),
        (Region((0, 0), (8, 3)), Region((0, 2), (8, 1))),
        (Region((2, 2), (2, 2)), Region((3, 3), (1, 1))),
        (Region((0, 0), (8, 6)), Region((7, 5), (1, 1))),
        (Region((1, 1), (2, 2)), Region((1, 1), (2, 2))),
    ],
    ids=["rows", "columns", "corner", "whole and element", "twice the same"],
)
def test_overlapping_shards_are_refused(a, b):
    """Two patches that claim an element cannot be merged; the error names tensor and regions."""
    old, new = versions((8, 6), 1.0)
    table = sparserl.tensor_table({"w": old})
    with pytest.raises(RegionOverlap, match=r"'w'.*overlap"):
        sparserl.merge(shard(old, new, a, table), shard(old, new, b, table))
    same = shard(old, old, a, table), shard(old, old, b, table)
    with pytest.raises(RegionOverlap):
        sparserl.merge(*same)


def test_overlapping_buckets_are_refused_when_applied():
    """Entries that overlap across buckets are found although the footer does not say so; nothing is written."""
    old, new = versions((8, 6), 0.2)
    patch = sparserl.diff({"w": old}, {"w": new}, profile="raw")
    twice = Patch(
        Contents(patch.table, Ends(patch.base, patch.result, 2 * patch.changed), BucketList.of(buckets(patch, patch)))
    )
    weights = {"w": old.copy()}
    with pytest.raises(RegionOverlap, match="'w'"):
        twice.apply(weights)
    assert (weights["w"] == old).all()


def test_shards_of_different_tables_are_refused():
    """Patches of other tensors do not fit together."""
    old, new = versions((8, 6), 0.5)
    a = shard(old, new, Region((0, 0), (4, 6)), sparserl.tensor_table({"w": old}))
    b = shard(old, new, Region((4, 0), (4, 6)), sparserl.tensor_table({"w": old, "x": old}))
    with pytest.raises(TensorMismatch, match="'x'"):
        sparserl.merge(a, b)


BAD = {
    "too long": ({"w": Region((5, 0), (4, 6))}, (4, 6), r"\[5:9, 0:6\].*uint16\[8, 6\]"),
    "negative": ({"w": Region((-1, 0), (4, 6))}, (4, 6), "does not lie in"),
    "other rank": ({"w": Region((0,), (4,))}, (4,), "does not lie in"),
    "empty": ({"w": Region((0, 0), (0, 6))}, (0, 6), "does not lie in"),
    "other shape": ({"w": Region((0, 0), (4, 6))}, (6, 4), r"cannot be uint16\[6, 4\]"),
    "not said": ({}, (4, 6), r"cannot be uint16\[4, 6\]"),
    "stranger": ({"w": Region((0, 0), (4, 6)), "x": Region((0,), (1,))}, (4, 6), "'x'"),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_regions_are_refused(kind):
    """Regions outside their tensor, of another shape than what is held, or of tensors not held."""
    regions, shape, words = BAD[kind]
    table = sparserl.tensor_table({"w": np.zeros((8, 6), np.uint16)})
    part = np.zeros(shape, np.uint16)
    with pytest.raises(TensorMismatch, match=words):
        diff_shards({"w": part}, {"w": part}, table=table, regions=regions)


def test_parts_have_the_dtype_of_their_tensor():
    """And a name that is in the table; both sides are the same parts."""
    part, region = np.zeros((4, 6), np.uint16), Region((0, 0), (4, 6))
    table = sparserl.tensor_table({"w": np.zeros((8, 6), np.int16)})
    with pytest.raises(TensorMismatch, match=r"int16\[8, 6\].*uint16"):
        diff_shards({"w": part}, {"w": part}, table=table, regions={"w": region})
    with pytest.raises(TensorMismatch, match="'v' is not in the tensor table"):
        diff_shards({"v": part}, {"v": part}, table=table)
    with pytest.raises(TensorMismatch, match="'w'"):
        diff_shards({"w": part}, {"v": part}, table=table, regions={"w": region})


@pytest.mark.parametrize("shape", [(), (1,), (4, 5), (0, 3)])
def test_a_region_that_is_all_of_its_tensor(shape):
    """It is the same as naming none, also for scalars and empty tensors."""
    old, new = np.zeros(shape, np.uint16), np.ones(shape, np.uint16)
    table = sparserl.tensor_table({"w": old})
    said = diff_shards({"w": old}, {"w": new}, table=table, regions={"w": whole(shape)})
    assert said.to_bytes() == sparserl.diff({"w": old}, {"w": new}).to_bytes()


@pytest.mark.parametrize("dtype", DTYPES, ids=repr)
def test_shards_of_every_dtype_from_torch(dtype):
    """Strided torch shards of any dtype; the table comes from the tensors or from their likeness."""
    rng = np.random.default_rng(6)
    bits = rng.integers(0, 256, (6, 10 * dtype.width), np.uint8).view(dtype.uint)
    flips = rng.integers(0, 256, bits.nbytes, np.uint8).view(dtype.uint).reshape(bits.shape)
    old = torch.from_numpy(bits.copy()).view(getattr(torch, dtype.name))
    new = torch.from_numpy(np.where(rng.random(bits.shape) < 0.4, flips, bits)).view(old.dtype)
    table = sparserl.tensor_table({"w": old})
    shards = [shard(old, new, r, table, copy=False) for r in cut((6, 10), 2, 3)]
    merged = sparserl.merge(*shards)
    assert merged.result == sparserl.digest({"w": new})
    merged.apply({"w": old})
    assert sparserl.digest({"w": old}) == merged.result


def marked(old, new, region, table, where):
    """The patch of one box, looked for at marked positions only."""
    marks = Bitmap(region.numel)
    marks.add(np.asarray(where, np.uint32))
    before, after = (Shards(table, [Part("w", region, w[region.slices], marks)]) for w in (old, new))
    return sparserl.diff(before, after)


def test_marks_count_inside_the_region():
    """What is marked is compared, and nothing else; marks at elements that did not change are harmless."""
    old, new = versions((30, 17), 0.05)
    table = sparserl.tensor_table({"w": old})
    shards = []
    for region in cut((30, 17), 2, 3):
        where = np.flatnonzero(old[region.slices].ravel() != new[region.slices].ravel())
        shards.append(marked(old, new, region, table, [*where.tolist(), 0]))
    merged = sparserl.merge(*shards)
    assert merged.result == sparserl.digest({"w": new})
    assert merged.changed == int((old != new).sum())
    box = Region((0, 0), (30, 17))
    assert marked(old, new, box, table, []).changed == 0
    with pytest.raises(TensorMismatch, match="marks for 5 elements, the region has 510"):
        sparserl.diff(*(Shards(table, [Part("w", box, w, Bitmap(5))]) for w in (old, new)))


@pytest.mark.parametrize("profile", ["raw", "gap", "ulp", "ctx", "auto"])
def test_several_parts_of_one_tensor(profile):
    """A rank may hold many boxes of a tensor, each in other memory: views into a fused parameter, say."""
    rng = np.random.default_rng(3)
    groups, wide, width = 6, 5, 33  # of rows: three for one tensor, then one each for two others
    fused = [rng.integers(0, 2**16, (groups * wide, width), np.uint16)]
    fused.append(np.where(rng.random(fused[0].shape) < 0.1, fused[0] ^ 1, fused[0]))

    def tensors(rows):
        rows = rows.reshape(groups, wide, width)
        return {n: np.ascontiguousarray(rows[:, a:b]).reshape(-1, width) for n, a, b in SLICES}

    def rank(rows, which):
        rows, parts = rows.reshape(groups, wide, width), []
        for g in which:
            for name, a, b in SLICES:
                parts.append(Part(name, Region((g * (b - a), 0), (b - a, width)), rows[g, a:b]))
        return Shards(sparserl.tensor_table(tensors(fused[0])), parts)

    ranks = [(0, 1, 5), (2, 3, 4)]
    patches = [sparserl.diff(*(rank(rows, which) for rows in fused), profile=profile) for which in ranks]
    merged = sparserl.merge(*patches)
    old, new = map(tensors, fused)
    assert (merged.base, merged.result) == (sparserl.digest(old), sparserl.digest(new))
    merged.apply(old)
    assert all((old[name] == new[name]).all() for name in new)
    live = fused[0].copy()  # and each rank's patch lands in its own shards
    for patch, which in zip(patches, ranks, strict=True):
        shards = rank(live, which)
        assert patch.apply(shards).digest == sparserl.digest(rank(fused[1], which))
        with pytest.raises(TensorMismatch, match="covers other regions"):
            patch.apply(rank(live, (0,)))
    assert (live == fused[1]).all()
    undone = [patch.invert(rank(fused[0], which)) for patch, which in zip(patches, ranks, strict=True)]
    again = [sparserl.squash(p, u, p, base=rank(fused[0], w)) for p, u, w in zip(patches, undone, ranks, strict=True)]
    assert sparserl.merge(*again).result == merged.result


SLICES = (("q", 0, 3), ("k", 3, 4), ("v", 4, 5))


def test_parts_of_one_rank_must_not_overlap():
    table = sparserl.tensor_table({"w": np.zeros((8, 6), np.uint16)})
    part = np.zeros((4, 6), np.uint16)
    with pytest.raises(RegionOverlap, match="'w'"):
        Shards(table, [Part("w", Region((0, 0), (4, 6)), part), Part("w", Region((3, 0), (4, 6)), part)])


def test_a_merge_can_be_written_to_disk(tmp_path):
    """The same bytes in a file as in memory."""
    old, new = versions((30, 17), 0.3)
    table = sparserl.tensor_table({"w": old})
    shards = [shard(old, new, r, table, to=tmp_path / f"{i}.srl") for i, r in enumerate(cut((30, 17), 3, 1))]
    merged = sparserl.merge(*shards, to=tmp_path / "merged.srl")
    assert (tmp_path / "merged.srl").read_bytes() == sparserl.merge(*shards).to_bytes() == merged.to_bytes()
    assert sparserl.merge(merged).to_bytes() == merged.to_bytes()


def test_merging_one_patch_to_disk(tmp_path):
    """A patch alone is merged too: the same patch, where it was asked for."""
    old, new = {"w": np.zeros(9, np.float32)}, {"w": np.ones(9, np.float32)}
    patch = sparserl.diff(old, new)
    merged = sparserl.merge(patch, to=tmp_path / "one.patch")
    assert merged.to_bytes() == patch.to_bytes() == (tmp_path / "one.patch").read_bytes()
