"""`ctx`: smaller where magnitude tells who changes, never much larger, and lost without the very base."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sparserl
from sparserl import Patch, Region
from sparserl.errors import FormatError, NeedsBase, WrongBase
from sparserl.kernels import reference
from sparserl.weights.dtypes import BY_NAME, DTYPES, Bits
from tests.boxed_shards import diff_shards
from tests.class_choice import always
from tests.effort import examples

BF16 = BY_NAME["bfloat16"]
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=repr)


@pytest.fixture
def classes(monkeypatch):
    """Small data, too, is told apart by magnitude where `ctx` is asked for."""
    monkeypatch.setattr("sparserl.plan.buckets.choose_classes", always)


def normal(rng, *shape):
    """Normally distributed weights as bf16 patterns."""
    return (rng.standard_normal(shape).astype(np.float32).view(np.uint32) >> np.uint32(16)).astype(np.uint16)


def stepped(rng, bits, chance):
    """Steps of one or two where chance has it."""
    steps = rng.integers(1, 5, bits.shape).astype(bits.dtype)
    return np.where(rng.random(bits.shape) < chance, reference.advance(bits, steps, True), bits)


def trained(rng, bits):
    """What a small learning rate does: the smaller a weight, the likelier a step of it shows."""
    size = ((bits & np.uint16(0x7FFF)).astype(np.uint32) << np.uint32(16)).view(np.float32)
    return stepped(rng, bits, np.minimum(0.9, 0.002 / (size + 1e-4)))


def held(*bits):
    return {f"t{i}": Bits(b.copy(), BF16) for i, b in enumerate(bits)}


def same(weights, *bits):
    return all((weights[f"t{i}"].array == b).all() for i, b in enumerate(bits))


@pytest.fixture(scope="module")
def chain():
    """Four versions of two tensors, and the `ctx` patches between them."""
    rng = np.random.default_rng(1)
    versions = [(normal(rng, 300, 400), normal(rng, 50_000))]
    for _ in range(3):
        versions.append(tuple(trained(rng, bits) for bits in versions[-1]))
    pairs = zip(versions, versions[1:], strict=False)
    return versions, [sparserl.diff(held(*a), held(*b), profile="ctx") for a, b in pairs]


def test_it_pays_where_magnitude_tells_who_changes(chain):
    """Smaller than `ulp`, taken by `auto`, and the patch does the same."""
    versions, patches = chain
    assert {e.profile for p in patches for e in p} == {"ctx"}
    for old, new, patch in zip(versions, versions[1:], patches, strict=False):
        ulp = sparserl.diff(held(*old), held(*new), profile="ulp")
        assert patch.nbytes < 0.9 * ulp.nbytes
        assert (patch.base, patch.result, patch.changed) == (ulp.base, ulp.result, ulp.changed)
        auto = sparserl.diff(held(*old), held(*new))
        assert {e.profile for e in auto} == {"ctx"}
        for again in (patch, auto, Patch.from_bytes(patch.to_bytes())):
            weights = held(*old)
            assert again.apply(weights).changed == patch.changed
            assert same(weights, *new)


@pytest.mark.parametrize("density", [0.001, 0.01, 0.1])
def test_it_costs_nothing_where_magnitude_tells_nothing(density):
    """Changes that come by chance alone: the patch is `ulp`, by name and by size."""
    rng = np.random.default_rng(2)
    old = normal(rng, 600, 500)
    new = stepped(rng, old, density)
    ctx, ulp = (sparserl.diff(held(old), held(new), profile=profile) for profile in ("ctx", "ulp"))
    assert ctx.nbytes <= 1.01 * ulp.nbytes
    assert {e.profile for e in ctx} == {"ulp"}
    assert ctx.contents.decode(0).positions.size == ctx.changed  # no base is needed


@each_dtype
def test_unstructured_bits_of_every_dtype(dtype):
    """Never more than one percent above `ulp`, whatever the bits are; and exact."""
    rng = np.random.default_rng(3)
    old = rng.integers(0, 256, 40_000 * dtype.width, np.uint8).view(dtype.uint)
    if dtype.width == 8:  # the largest magnitudes have a test of their own
        old &= dtype.uint.type((1 << 62) - 1)
    flips = rng.integers(1, 256, old.nbytes, np.uint8).view(dtype.uint) & dtype.uint.type(
        (1 << (8 * dtype.width - 2)) - 1
    )
    new = np.where(rng.random(old.size) < 0.02, old ^ flips, old)
    ctx, ulp = (
        sparserl.diff({"w": Bits(old, dtype)}, {"w": Bits(new, dtype)}, profile=profile) for profile in ("ctx", "ulp")
    )
    assert ctx.nbytes <= 1.01 * ulp.nbytes + 64
    weights = {"w": Bits(old.copy(), dtype)}
    ctx.apply(weights)
    assert (weights["w"].array == new).all()


@given(st.integers(0, 4999), st.integers(0, 15), st.integers(0, 2**32))
@settings(deadline=None, max_examples=examples(150))
def test_a_vouched_wrong_base(at, bit, seed):
    """Refused with nothing touched; or, where the wrong bit makes no difference, the changes land where they belong."""
    rng = np.random.default_rng(seed % 7)
    old = normal(rng, 5000)
    new = trained(rng, old)
    with pytest.MonkeyPatch.context() as patcher:
        patcher.setattr("sparserl.plan.buckets.choose_classes", always)
        patch = sparserl.diff(held(old), held(new), profile="ctx")
    assert {e.profile for e in patch} == {"ctx"}
    wrong = old.copy()
    wrong[at] ^= np.uint16(1 << bit)
    weights = held(wrong)
    with pytest.raises(WrongBase):
        patch.apply(weights)
    assert same(weights, wrong)
    try:
        patch.apply(weights, digest=patch.base)
    except FormatError:
        assert same(weights, wrong)
    else:
        assert old[at] == new[at]
        expected = new.copy()
        expected[at] = wrong[at]
        assert same(weights, expected)


def test_a_vouched_base_of_another_version(chain):
    """All later versions in its place: refused, and nothing touched."""
    versions, patches = chain
    for i, patch in enumerate(patches):
        for j, version in enumerate(versions):
            if j == i:
                continue
            weights = held(*version)
            with pytest.raises(
                FormatError, match=r"the weights are as they were|the old bits may not be those of the base"
            ):
                patch.apply(weights, digest=patch.base)
            assert same(weights, *version)


@pytest.mark.parametrize("profile", ["auto", "raw", "gap", "ulp", "ctx"])
def test_chains_are_squashed_with_the_base(chain, profile):
    """What the squashed patch does is what the chain does in turn, whatever it becomes; the base is left alone."""
    versions, patches = chain
    base = held(*versions[0])
    squashed = sparserl.squash(*patches, base=base, profile=profile)
    assert same(base, *versions[0])
    assert (squashed.base, squashed.result) == (patches[0].base, patches[-1].result)
    assert squashed.changed == sum(int((a != b).sum()) for a, b in zip(versions[0], versions[-1], strict=True))
    assert {e.profile for e in squashed} == {"ctx" if profile == "auto" else profile}
    squashed.apply(base)
    assert same(base, *versions[-1])


def test_chains_need_the_base(chain):
    """Neither squashed nor undone without it, alone or among patches that would need none."""
    versions, patches = chain
    ulp = sparserl.diff(held(*versions[1]), held(*versions[2]), profile="ulp")
    for links in (patches, (patches[0], ulp), (ulp, patches[2]), patches[:1]):
        for profile in ("auto", "gap", "ulp", "ctx"):
            with pytest.raises(NeedsBase):
                sparserl.squash(*links, profile=profile)
    for profile in ("auto", "raw", "ulp", "ctx"):
        with pytest.raises(NeedsBase):
            patches[0].invert(profile=profile)


def test_a_chain_of_ctx_and_others(chain):
    """Steps, bits and classes in one chain."""
    versions, patches = chain
    gap = sparserl.diff(held(*versions[1]), held(*versions[2]), profile="gap")
    squashed = sparserl.squash(patches[0], gap, patches[2], base=held(*versions[0]))
    weights = held(*versions[0])
    squashed.apply(weights)
    assert same(weights, *versions[-1])
    with pytest.raises(WrongBase):
        sparserl.squash(*patches, base=held(*versions[1]))


@pytest.mark.parametrize("profile", ["auto", "raw", "gap", "ulp", "ctx"])
def test_it_is_undone_with_the_base(chain, profile):
    """The inverse leads back, in any profile but its own: the bits to tell apart by are those of the result."""
    versions, patches = chain
    undo = patches[0].invert(held(*versions[0]), profile=profile)
    assert "ctx" not in {e.profile for e in undo}
    weights = held(*versions[1])
    undo.apply(weights)
    assert same(weights, *versions[0])


def test_a_vouched_wrong_base_of_a_chain(chain):
    """Squash and invert look at the old bits, too: what does not lead to the result is refused."""
    versions, patches = chain
    wrong = [bits.copy() for bits in versions[0]]
    wrong[0][0, :50] ^= np.uint16(0x4000)
    with pytest.raises(FormatError):
        sparserl.squash(*patches, base=held(*wrong), digest=patches[0].base)
    with pytest.raises(FormatError):
        patches[0].invert(held(*wrong), digest=patches[0].base)


def test_shards_tell_apart_by_their_own_bits(classes):
    """Boxes of a tensor, each with classes of its own, merged without recoding: the whole."""
    rng = np.random.default_rng(4)
    old = normal(rng, 60, 70)
    new = trained(rng, old)
    table = sparserl.tensor_table(held(old))
    regions = [Region((0, 0), (60, 31)), Region((0, 31), (22, 39)), Region((22, 31), (38, 39))]
    shards = [
        diff_shards(held(old[r.slices]), held(new[r.slices]), table=table, regions={"t0": r}, profile="ctx")
        for r in regions
    ]
    merged = sparserl.merge(*shards)
    assert {e.profile for e in merged} == {"ctx"}
    weights = {"t0": Bits(np.asfortranarray(old), BF16)}
    assert merged.apply(weights).digest == sparserl.digest(held(new))
    assert (weights["t0"].array == new).all()
    part = {"t0": Bits(old.copy(), BF16)}
    shards[1].apply(part)
    expected = old.copy()
    expected[regions[1].slices] = new[regions[1].slices]
    assert same(part, expected)


def test_positions_may_be_a_superset(classes):
    """Positions where nothing changes are not sent, and the bytes are those of a full comparison."""
    rng = np.random.default_rng(5)
    old = normal(rng, 4000)
    new = trained(rng, old)
    where = np.flatnonzero(rng.random(4000) < 0.5)
    known = np.union1d(where, np.flatnonzero(old != new))
    full = sparserl.diff(held(old), held(new), profile="ctx")
    assert sparserl.diff(held(old), held(new), profile="ctx", positions={"t0": known}).to_bytes() == full.to_bytes()


def test_large_tiles_and_many_buckets(chain, monkeypatch):
    """Cut into pieces and buckets, on several threads, kept or decoded twice: the same weights."""
    versions, _ = chain
    monkeypatch.setattr("sparserl.weights.batches.PIECE_BYTES", 30_000)
    monkeypatch.setattr("sparserl.plan.buckets.choose_classes", always)
    monkeypatch.setattr("sparserl.plan.buckets.BUCKET_COVER_BYTES", 60_000)
    monkeypatch.setattr("sparserl.patch.apply.KEEP_BYTES", 10_000)
    patch = sparserl.diff(held(*versions[0]), held(*versions[1]), profile="ctx", threads=3)
    assert patch.buckets > 3
    weights = held(*versions[0])
    patch.apply(weights, threads=3)
    assert same(weights, *versions[1])
