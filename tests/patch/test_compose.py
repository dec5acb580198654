"""Patches from patches: a squashed chain does what its patches do in turn, and an inverse undoes."""

from __future__ import annotations

import importlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sparserl
from sparserl import Digest, Patch, Region
from sparserl.errors import ChainError, NeedsBase, TensorMismatch, WrongBase
from sparserl.kernels import reference
from sparserl.patch.compose import add_steps, negate_steps
from sparserl.weights.dtypes import BY_NAME, Bits
from sparserl.weights.tensors import memories
from tests.boxed_shards import diff_shards
from tests.class_choice import always
from tests.effort import examples

PROFILES = ("auto", "raw", "gap", "ulp", "ctx")
KINDS = {
    "a": ("bfloat16", (19, 23)),
    "b": ("float32", (11, 9)),
    "c": ("uint8", (101,)),
    "d": ("int64", ()),
    "e": ("bfloat16", (5, 0)),
}
SMALL = [
    ("sparserl.weights.batches", "PIECE_BYTES", 256),
    ("sparserl.patch.compose", "PIECE_BYTES", 200),
    ("sparserl.plan.routing", "BUCKET_PAYLOAD_BYTES", 96),
    ("sparserl.plan.buckets", "BUCKET_PAYLOAD_BYTES", 96),
    ("sparserl.plan.routing", "BUCKET_CHANGES", 40),
    ("sparserl.plan.buckets", "BUCKET_CHANGES", 40),
    ("sparserl.plan.buckets", "BUCKET_COVER_BYTES", 600),
]

each_profile = pytest.mark.parametrize("profile", PROFILES)


@pytest.fixture(autouse=True)
def classes(monkeypatch):
    """Small data, too, is told apart by magnitude where `ctx` is asked for."""
    monkeypatch.setattr("sparserl.plan.buckets.choose_classes", always)


def shrink(patcher):
    """Make pieces, windows and buckets so small that little data fills many."""
    for module, name, value in SMALL:
        patcher.setattr(importlib.import_module(module), name, value)


@pytest.fixture(params=[pytest.param("one piece", marks=pytest.mark.long), "many pieces"])
def size(request, monkeypatch):
    """As shipped, where the small tensors here are one piece each, and so small that they are many."""
    if request.param == "many pieces":
        shrink(monkeypatch)
    return request.param


def initial(rng):
    return {
        name: rng.integers(0, 256, int(np.prod(shape)) * BY_NAME[kind].width, np.uint8)
        .view(BY_NAME[kind].uint)
        .reshape(shape)
        for name, (kind, shape) in KINDS.items()
    }


def hold(bits):
    return {name: Bits(b, BY_NAME[KINDS[name][0]]) for name, b in bits.items()}


def copied(bits):
    return {name: b.copy() for name, b in bits.items()}


def later(rng, bits, density):
    """The next version: steps of one or two at some elements; at density 1, new bits everywhere."""
    out = {}
    for name, old in bits.items():
        dtype = BY_NAME[KINDS[name][0]]
        if density == 1.0:
            out[name] = rng.integers(0, 256, old.nbytes, np.uint8).view(dtype.uint).reshape(old.shape)
            continue
        stepped = reference.advance(old, rng.integers(1, 5, old.shape).astype(dtype.uint), dtype.sign_magnitude)
        out[name] = np.where(rng.random(old.shape) < density, stepped, old)
    return out


def chain(seed, profiles, densities):
    """Versions, and the patches from each to the next."""
    rng = np.random.default_rng(seed)
    versions = [initial(rng)]
    patches = []
    for profile, density in zip(profiles, densities, strict=True):
        versions.append(later(rng, versions[-1], density))
        patches.append(sparserl.diff(hold(versions[-2]), hold(versions[-1]), profile=profile))
    return versions, patches


def assert_leads(patch, start, end):
    """The patch turns `start` into `end`, bit by bit, and says so in its digests."""
    assert patch.base == sparserl.digest(hold(start))
    assert patch.result == sparserl.digest(hold(end))
    weights = hold(copied(start))
    done = patch.apply(weights)
    assert done.digest == patch.result
    for name, memory in memories(weights).items():
        assert (memory.view() == end[name]).all(), name


def differing(start, end):
    return sum(int((start[n] != end[n]).sum()) for n in start)


@given(
    st.integers(0, 2**32),
    st.lists(st.tuples(st.sampled_from(PROFILES), st.sampled_from((0.0, 0.01, 0.2, 1.0))), min_size=2, max_size=5),
    st.sampled_from(PROFILES),
    st.booleans(),
)
@settings(deadline=None, max_examples=examples(50))
def test_squash_with_the_base_equals_applying_in_turn(seed, links, profile, many):
    """Any chain, any mix of profiles, to any profile: the last version exactly, and only what really differs."""
    with pytest.MonkeyPatch.context() as patcher:
        if many:
            shrink(patcher)
        versions, patches = chain(seed, *zip(*links, strict=True))
        base = hold(copied(versions[0]))
        squashed = sparserl.squash(*patches, base=base, profile=profile)
        assert squashed.changed == differing(versions[0], versions[-1])
        assert_leads(Patch.from_bytes(squashed.to_bytes()), versions[0], versions[-1])
        assert all((m.view() == versions[0][n]).all() for n, m in memories(base).items())
        weights = hold(copied(versions[0]))
        for patch in patches:
            patch.apply(weights)
        assert sparserl.digest(weights) == squashed.result


@pytest.mark.parametrize("length", [2, 3, 5])
@pytest.mark.parametrize("profiles", [("raw",), ("gap",), ("raw", "gap"), ("ulp",)], ids="+".join)
def test_squash_without_the_base(profiles, length, size):
    """Bits win over bits and steps add to steps: chains of one kind need no base."""
    mix = [profiles[i % len(profiles)] for i in range(length)]
    versions, patches = chain(length, mix, [0.05] * length)
    squashed = sparserl.squash(*patches)
    assert_leads(squashed, versions[0], versions[-1])
    assert {e.profile for e in squashed} <= ({"ulp"} if profiles == ("ulp",) else {"raw", "gap"})
    if profiles == ("ulp",):
        assert squashed.changed == differing(versions[0], versions[-1])
        assert_leads(sparserl.squash(*patches, profile="ulp"), versions[0], versions[-1])
    else:
        assert_leads(sparserl.squash(*patches, profile="raw"), versions[0], versions[-1])
        assert_leads(sparserl.squash(*patches, profile="gap"), versions[0], versions[-1])
    assert (sum(e.tensor == "a" for e in squashed) > 1) is (size == "many pieces")


def one(values, old, profile, dtype=np.uint16):
    """A patch that sets some elements of a vector of 400, and the vector after it."""
    new = old.copy()
    for at, value in values.items():
        new[at] = value
    return sparserl.diff({"w": old}, {"w": new}, profile=profile), new


START = np.arange(400, dtype=np.uint16)


@pytest.mark.parametrize(
    ("first", "second", "needs"),
    [
        (("raw", {5: 9}), ("ulp", {5: 10}), False),
        (("raw", {5: 9}), ("ulp", {6: 10}), True),
        (("ulp", {5: 9}), ("gap", {5: 10}), False),
        (("ulp", {5: 9}), ("gap", {6: 10}), True),
        (("ulp", {5: 9}), ("gap", {5: 10, 6: 11}), False),
        (("ulp", {5: 9, 7: 9}), ("gap", {5: 10, 6: 11}), True),
    ],
)
def test_bits_and_steps_in_one_tensor(first, second, needs):
    """Without the base they go together only where bits cover the steps; with it, always."""
    a, middle = one(first[1], START, first[0])
    b, end = one(second[1], middle, second[0])
    if needs:
        with pytest.raises(NeedsBase, match="'w'"):
            sparserl.squash(a, b)
    else:
        weights = {"w": START.copy()}
        sparserl.squash(a, b).apply(weights)
        assert (weights["w"] == end).all()
    weights = {"w": START.copy()}
    sparserl.squash(a, b, base={"w": START}).apply(weights)
    assert (weights["w"] == end).all()


@pytest.mark.parametrize(("profile", "wanted"), [("raw", "ulp"), ("gap", "ulp"), ("ulp", "raw"), ("ulp", "gap")])
def test_another_kind_of_profile_needs_the_base(profile, wanted):
    """Bits cannot become steps, nor steps bits, without the bits they start from."""
    versions, patches = chain(1, [profile] * 2, [0.05] * 2)
    with pytest.raises(NeedsBase, match=wanted):
        sparserl.squash(*patches, profile=wanted)
    squashed = sparserl.squash(*patches, profile=wanted, base=hold(versions[0]))
    assert {e.profile for e in squashed if not e.dense} == {wanted}
    assert_leads(squashed, versions[0], versions[-1])


def test_tensors_of_different_kinds_in_one_chain():
    """One tensor changed by bits, another by steps: each keeps its kind, and no base is needed."""
    start = {n: START.copy() for n in "abcd"}
    versions, patches = [start], []
    for i, (name, profile) in enumerate([("a", "raw"), ("b", "ulp"), ("c", "gap"), ("d", "ulp"), ("b", "ulp")]):
        new = copied(versions[-1])
        new[name][i : i + 20] += np.uint16(3)
        patches.append(sparserl.diff(versions[-1], new, profile=profile))
        versions.append(new)
    squashed = sparserl.squash(*patches)
    assert {e.tensor for e in squashed if e.profile == "ulp"} == {"b", "d"}
    assert squashed.result == sparserl.digest(versions[-1])
    squashed.apply(start)
    assert all((start[n] == versions[-1][n]).all() for n in start)


def test_dense_entries_in_between(size):
    """A version in which everything changed hides what came before, and takes steps after it."""
    for profiles in (("ulp", "auto", "ulp"), ("gap", "auto", "gap"), ("raw", "raw", "ulp")):
        versions, patches = chain(4, profiles, (0.05, 1.0, 0.05))
        assert any(e.dense for e in patches[1])
        assert_leads(sparserl.squash(*patches, base=hold(versions[0])), versions[0], versions[-1])
        assert_leads(sparserl.squash(*patches[:2], base=hold(versions[0])), versions[0], versions[2])
        assert_leads(sparserl.squash(*patches[1:], base=hold(versions[1])), versions[1], versions[-1])
    old, new = np.zeros(500, np.uint16), np.random.default_rng(0).integers(1, 2**16, 500, np.uint16)
    dense = sparserl.diff({"w": old}, {"w": new}, profile="raw")
    assert all(e.dense for e in dense)
    stepped = new.copy()
    stepped[7] += np.uint16(1)
    steps = sparserl.diff({"w": new}, {"w": stepped}, profile="ulp")
    squashed = sparserl.squash(dense, steps)
    squashed.apply({"w": old})
    assert (old == stepped).all()


def test_dense_entries_stay_dense_without_a_base():
    """Bits for all elements of a tensor go dense again: squashing does not blow them up."""
    rng = np.random.default_rng(2)
    versions = [(rng.standard_normal(20_000) + i).astype(np.float32) for i in range(3)]
    patches = [sparserl.diff({"w": versions[i]}, {"w": versions[i + 1]}) for i in range(2)]
    squashed = sparserl.squash(*patches)
    assert all(e.dense for e in squashed)
    assert squashed.nbytes <= 80_000 * 1.01 + 1024
    squashed.apply({"w": versions[0]})
    assert (versions[0] == versions[-1]).all()


@each_profile
def test_there_and_back_again(profile, size):
    """A → B → A: with the base nothing is left to send; without it, applying is harmless."""
    versions, patches = chain(6, [profile], [0.05])
    back = sparserl.diff(hold(versions[1]), hold(versions[0]), profile=profile)
    with_base = sparserl.squash(patches[0], back, base=hold(versions[0]))
    assert (with_base.changed, with_base.buckets) == (0, 0)
    assert with_base.base == with_base.result == patches[0].base
    round_trip = sparserl.squash(patches[0], back, base=hold(versions[0]) if profile in ("auto", "ctx") else None)
    weights = hold(copied(versions[0]))
    assert round_trip.apply(weights).already
    assert all((m.view() == versions[0][n]).all() for n, m in memories(weights).items())
    if profile == "ulp":
        assert round_trip.changed == 0
    longer = sparserl.squash(patches[0], back, patches[0], base=hold(versions[0]))
    assert_leads(longer, versions[0], versions[1])


@pytest.mark.parametrize("with_base", [True, False])
def test_a_chain_that_does_not_hold_together(with_base):
    """Patches out of order, with a gap, or of other weights are refused, naming the link."""
    versions, patches = chain(7, ["ulp"] * 3, [0.05] * 3)
    base = hold(versions[0]) if with_base else None
    for broken in ((patches[0], patches[2]), (patches[0], patches[0]), (patches[0], patches[1], patches[0])):
        with pytest.raises(ChainError, match=r"patch \d leads to .* patch \d starts from"):
            sparserl.squash(*broken, base=base)
    other = sparserl.diff({"x": START}, {"x": START})
    with pytest.raises(TensorMismatch, match="'x'"):
        sparserl.squash(patches[0], other, base=base)


def test_the_base_must_be_the_base():
    """One wrong bit in what is handed over as the base is found; `digest` vouches for it."""
    versions, patches = chain(8, ["raw", "ulp"], [0.05] * 2)
    wrong = copied(versions[0])
    wrong["a"][3, 3] ^= np.uint16(1)
    for call in (
        lambda **more: sparserl.squash(*patches, base=hold(wrong), **more),
        lambda **more: patches[0].invert(hold(wrong), **more),
    ):
        with pytest.raises(WrongBase):
            call()
        with pytest.raises(WrongBase):
            call(digest=Digest(1, 1))
    vouched = sparserl.squash(*patches, base=hold(versions[0]), digest=patches[0].base)
    assert_leads(vouched, versions[0], versions[-1])


def test_one_patch_can_be_squashed_into_another_profile():
    """A chain of one is a change of profile: with the base, from any to any."""
    for source in PROFILES:
        versions, (patch,) = chain(9, [source], [0.05])
        for wanted in PROFILES:
            other = sparserl.squash(patch, base=hold(versions[0]), profile=wanted)
            assert wanted == "auto" or {e.profile for e in other if not e.dense} == {wanted}
            assert_leads(other, versions[0], versions[1])


def test_a_squash_can_be_written_to_disk(tmp_path, size):
    """The same bytes in a file as in memory."""
    versions, patches = chain(10, ["ulp", "gap"], [0.1] * 2)
    base = hold(versions[0])
    squashed = sparserl.squash(*patches, base=base, to=tmp_path / "squashed.srl")
    undo = squashed.invert(base, to=tmp_path / "undo.srl")
    assert (tmp_path / "squashed.srl").read_bytes() == sparserl.squash(*patches, base=base).to_bytes()
    assert (tmp_path / "undo.srl").read_bytes() == squashed.invert(base).to_bytes()
    assert_leads(squashed, versions[0], versions[-1])
    assert_leads(undo, versions[-1], versions[0])


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("cuts", ["rows", "columns", "mixed"])
def test_chains_of_merged_shards(cuts, seed, size):
    """Entries that are boxes, and different boxes from patch to patch, cross windows in every way."""
    rng = np.random.default_rng(seed)
    shape = (17, 19)
    rows = [Region((0, 0), (5, 19)), Region((5, 0), (12, 19))]
    columns = [Region((0, 0), (17, 1)), Region((0, 1), (17, 13)), Region((0, 14), (17, 5))]
    splits = {"rows": [rows], "columns": [columns], "mixed": [rows, columns]}[cuts]
    versions = [rng.integers(0, 2**16, shape, np.uint16)]
    table = sparserl.tensor_table({"w": versions[0]})
    patches = {"raw": [], "ulp": [], "ctx": [], "auto": []}
    for i in range(3):
        old = versions[-1]
        new = np.where(rng.random(shape) < (0.1, 1.0, 0.1)[i], old + np.uint16(3 * i + 1), old)
        versions.append(new)
        for profile, made in patches.items():
            shards = [
                diff_shards({"w": old[r.slices]}, {"w": new[r.slices]}, table=table, regions={"w": r}, profile=profile)
                for r in splits[i % len(splits)]
            ]
            made.append(sparserl.merge(*shards))
    for profile, made in patches.items():
        for base in (None, {"w": versions[0]}):
            if base is None and profile in ("auto", "ctx"):
                continue
            if base is None and profile == "ulp" and any(e.dense for p in made for e in p):
                continue
            squashed = sparserl.squash(*made, base=base)
            weights = {"w": versions[0].copy()}
            squashed.apply(weights)
            assert (weights["w"] == versions[-1]).all()
            squashed.invert({"w": versions[0]}).apply(weights)
            assert (weights["w"] == versions[0]).all()


@each_profile
@pytest.mark.parametrize("density", [0.0, 0.05, 1.0])
def test_invert_with_the_base(profile, density, size):
    """The inverse turns the result back into the base, in any profile; inverting twice is the patch again."""
    versions, (patch,) = chain(11, [profile], [density])
    for wanted in PROFILES:
        undo = patch.invert(hold(versions[0]), profile=wanted)
        assert_leads(undo, versions[1], versions[0])
        assert undo.changed == patch.changed
        assert_leads(undo.invert(hold(versions[1]), profile=wanted), versions[0], versions[1])


def test_invert_without_the_base(size):
    """Steps turn round; whatever overwrote bits needs the base to find them."""
    versions, (steps,) = chain(12, ["ulp"], [0.05])
    assert not any(e.dense for e in steps)
    for wanted in ("auto", "ulp"):
        undo = steps.invert(profile=wanted)
        assert_leads(undo, versions[1], versions[0])
        assert undo.changed == steps.changed
        assert_leads(undo.invert(), versions[0], versions[1])
    for wanted in ("raw", "gap"):
        with pytest.raises(NeedsBase):
            steps.invert(profile=wanted)
    for profile in ("raw", "gap"):
        _, (patch,) = chain(12, [profile], [0.05])
        with pytest.raises(NeedsBase, match="base"):
            patch.invert()
    _, (dense,) = chain(12, ["ulp"], [1.0])
    assert any(e.dense for e in dense)
    with pytest.raises(NeedsBase):
        dense.invert()


@pytest.mark.parametrize("uint", [np.uint8, np.uint16, np.uint32, np.uint64])
def test_steps_add_up_and_turn_round(uint):
    """The sum of two zigzag steps leads where both lead in turn; the opposite step leads back. All of it wraps."""
    rng = np.random.default_rng(13)
    size = 1 << 16
    if uint is np.uint8:
        a, b = (x.ravel().astype(uint) for x in np.meshgrid(np.arange(256), np.arange(256)))
    else:
        a, b = (rng.integers(0, 256, size * np.dtype(uint).itemsize, np.uint8).view(uint) for _ in range(2))
    most = np.iinfo(uint).max
    a[:4], b[:4] = [0, most, most - 1, most], [0, most, most, 1]
    old = rng.integers(0, 256, size * np.dtype(uint).itemsize, np.uint8).view(uint)
    for sign_magnitude in (True, False):
        middle = reference.advance(old, a, sign_magnitude)
        end = reference.advance(middle, b, sign_magnitude)
        assert (reference.advance(old, add_steps(a, b), sign_magnitude) == end).all()
        assert (reference.advance(middle, negate_steps(a), sign_magnitude) == old).all()
    assert (add_steps(a, negate_steps(a)) == 0).all()
