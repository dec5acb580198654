"""Diff and apply: bit-identical for every dtype, shape and kind of change, or refused with nothing touched."""

from __future__ import annotations

import math
import signal
import sys

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import sparserl
from sparserl import Digest, Patch, Region, TensorSpec, TensorTable
from sparserl.errors import FormatError, InvalidField, TensorMismatch, TiedConflict, UnsupportedFormat, WrongBase
from sparserl.kernels import reference
from sparserl.patch import apply
from sparserl.patch.assemble import rewrite
from sparserl.patch.decode import flatten
from sparserl.weights.dtypes import BY_NAME, DTYPES, Bits
from sparserl.weights.memory import memories
from tests.classes import always
from tests.shards import diff_shards

PROFILES = ("auto", "raw", "gap", "ulp", "ctx")
CHANGES = ("nothing", "one", "first", "last", "all", "few", "half", "signs", "payloads", "infinities", "tiny", "steps")
LAYOUTS = ("contiguous", "strided", "transposed", "reversed", "unaligned")
SHAPES = ((), (0,), (1,), (63,), (64,), (65,), (3, 0, 2), (7, 11), (2, 3, 5, 7), (1, 300), (257, 1))

each_profile = pytest.mark.parametrize("profile", PROFILES)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=repr)


@pytest.fixture(autouse=True)
def classes(monkeypatch):
    """Small data, too, is told apart by magnitude where `ctx` is asked for."""
    monkeypatch.setattr("sparserl.plan.buckets.choose", always)


def top(dtype):
    return dtype.uint.type(1 << (8 * dtype.width - 1))


def awkward(dtype):
    """Zeros of both signs, infinities and NaNs of every format of the width, subnormals, extremes."""
    bits = 8 * dtype.width
    runs = [((1 << n) - 1) << shift for n in range(1, bits + 1) for shift in (0, max(0, bits - 1 - n))]
    numbers = {0, 1, 2, *runs, *(r + 1 for r in runs)}
    return np.array(sorted({v % (1 << bits) for n in numbers for v in (n, n | 1 << (bits - 1))}), dtype.uint)


def random_bits(rng, dtype, shape):
    """Any bit pattern, the awkward ones often."""
    size = math.prod(shape)
    bits = rng.integers(0, 256, size * dtype.width, np.uint8).view(dtype.uint)
    return np.where(rng.random(size) < 0.4, rng.choice(awkward(dtype), size), bits).reshape(shape)


def change(rng, dtype, old, kind):
    """New bits that differ from the old ones in a named way."""
    new = old.copy()
    flat = new.reshape(-1)
    size = flat.size
    if kind == "nothing" or not size:
        return new
    where = {
        "one": rng.integers(0, size, 1),
        "first": np.array([0]),
        "last": np.array([size - 1]),
        "all": np.arange(size),
        "few": np.flatnonzero(rng.random(size) < 0.03),
    }.get(kind, np.flatnonzero(rng.random(size) < 0.5))
    some = flat[where]
    if kind == "signs":
        some = some ^ top(dtype)
    elif kind == "payloads":
        some = some ^ dtype.uint.type(1)
    elif kind == "infinities":
        some = rng.choice(awkward(dtype), some.size)
    elif kind == "tiny":
        some = rng.integers(0, 3, some.size).astype(dtype.uint) | (some & top(dtype))
    elif kind == "steps":
        some = reference.advance(some, rng.integers(1, 4, some.size).astype(dtype.uint), dtype.sign_magnitude)
    else:
        flips = rng.integers(0, 256, some.size * dtype.width, np.uint8).view(dtype.uint)
        some = some ^ np.where(flips == 0, dtype.uint.type(1), flips)
    flat[where] = some
    return new


def laid_out(bits, layout):
    """A copy of the patterns in memory of the given layout."""
    if not bits.ndim or not bits.size:
        return bits.copy()
    if layout == "strided":
        room = np.zeros(tuple(2 * n + 1 for n in bits.shape), bits.dtype)
        view = room[tuple(slice(1, None, 2) for _ in bits.shape)]
    elif layout == "transposed":
        view = np.zeros(bits.shape[::-1], bits.dtype).T
    elif layout == "reversed":
        view = np.zeros(bits.shape, bits.dtype)[tuple(slice(None, None, -1) for _ in bits.shape)]
    elif layout == "unaligned":
        view = np.ndarray(bits.shape, bits.dtype, np.zeros(bits.nbytes + 1, np.uint8), offset=1)
    else:
        view = np.zeros(bits.shape, bits.dtype)
    view[...] = bits
    return view


def tensor(bits, dtype, holder="bits", layout="contiguous"):
    """The patterns as a `Bits`, a torch tensor or a NumPy array of their dtype (`Bits` where NumPy has none)."""
    if holder == "torch" and layout not in ("reversed", "unaligned"):
        return torch.from_numpy(laid_out(bits, layout)).view(getattr(torch, dtype.name))
    kind = getattr(ml_dtypes, dtype.name, None) or getattr(np, dtype.name, None)
    if holder == "numpy" and kind is not None and layout == "contiguous":
        return laid_out(bits, layout).view(kind)
    return Bits(laid_out(bits, layout), dtype)


def patterns(weights):
    """Copies of all bits, by name."""
    return {name: memory.view().copy() for name, memory in memories(weights).items()}


def assert_same(expected, weights):
    actual = patterns(weights)
    assert expected.keys() == actual.keys()
    for name, bits in expected.items():
        assert bits.shape == actual[name].shape, name
        assert bits.dtype == actual[name].dtype, name
        assert (bits == actual[name]).all(), name


def hold(bits, dtypes, holder="bits", layout="contiguous"):
    return {name: tensor(b, dtypes[name], holder, layout) for name, b in bits.items()}


def family(seed, dtype, kind, shapes=SHAPES):
    """Old and new bits of one dtype in many shapes, and the dtype by name."""
    rng = np.random.default_rng(seed)
    old = {f"t{i}": random_bits(rng, dtype, shape) for i, shape in enumerate(shapes)}
    new = {name: change(rng, dtype, bits, kind) for name, bits in old.items()}
    return old, new, dict.fromkeys(old, dtype)


@each_profile
@each_dtype
def test_every_kind_of_change(dtype, profile):
    """Applying gives the new bits exactly; again is `already`; the inverse gives the old bits back."""
    for seed, kind in enumerate(CHANGES):
        old, new, dtypes = family(seed, dtype, kind)
        patch = sparserl.diff(hold(old, dtypes), hold(new, dtypes), profile=profile, threads=1)
        count = sum(int((old[n] != new[n]).sum()) for n in old)
        assert patch.changed == count
        assert patch.complete
        assert patch.base == sparserl.digest(hold(old, dtypes), threads=1)
        assert patch.result == sparserl.digest(hold(new, dtypes), threads=1)
        weights = hold(old, dtypes)
        done = patch.apply(weights, threads=1)
        assert_same(new, weights)
        assert (done.changed, done.already, done.digest) == (count, count == 0, patch.result)
        again = patch.apply(weights, threads=1)
        assert (again.changed, again.already, again.digest) == (0, True, patch.result)
        assert_same(new, weights)
        undo = patch.invert(hold(old, dtypes), profile=profile, threads=1)
        assert (undo.base, undo.result, undo.changed) == (patch.result, patch.base, count)
        undo.apply(weights, threads=1)
        assert_same(old, weights)


@st.composite
def weights_pairs(draw):
    """Two versions of some tensors of mixed dtypes, as patterns."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    old, new, dtypes = {}, {}, {}
    for i in range(draw(st.integers(0, 5))):
        dtype = draw(st.sampled_from(DTYPES))
        shape = tuple(draw(st.lists(st.integers(0, 12), max_size=3)))
        name = draw(st.sampled_from(("w", "é", "model.layers.0", "", "a b"))) + str(i)
        dtypes[name] = dtype
        old[name] = random_bits(rng, dtype, shape)
        new[name] = change(rng, dtype, old[name], draw(st.sampled_from(CHANGES)))
    return old, new, dtypes


@given(
    weights_pairs(),
    st.sampled_from(PROFILES),
    st.sampled_from(("bits", "numpy", "torch")),
    st.sampled_from(LAYOUTS),
    st.sampled_from(LAYOUTS),
    st.sampled_from((1, 2, 3)),
)
@settings(deadline=None, max_examples=300)
def test_any_weights_in_any_memory(pair, profile, holder, layout, other, threads):
    """Mixed dtypes, held by torch or NumPy in any layout on either side: exact, and only in place."""
    old, new, dtypes = pair
    patch = sparserl.diff(
        hold(old, dtypes, holder, layout), hold(new, dtypes, "bits", other), profile=profile, threads=threads
    )
    again = Patch.from_bytes(patch.to_bytes())
    weights = hold(old, dtypes, holder, layout)
    assert again.apply(weights, threads=threads).changed == sum(int((old[n] != new[n]).sum()) for n in old)
    assert_same(new, weights)
    again.invert(hold(old, dtypes, "bits", other), threads=threads).apply(weights, threads=threads)
    assert_same(old, weights)


@given(weights_pairs().filter(lambda p: any(b.size for b in p[0].values())), st.sampled_from(PROFILES), st.data())
@settings(deadline=None, max_examples=150)
def test_a_wrong_base_is_refused_untouched(pair, profile, data):
    """One flipped bit anywhere in the weights, and the patch is refused before a bit is touched."""
    old, new, dtypes = pair
    patch = sparserl.diff(hold(old, dtypes), hold(new, dtypes), profile=profile)
    name = data.draw(st.sampled_from([n for n in old if old[n].size]))
    wrong = {n: b.copy() for n, b in old.items()}
    at = data.draw(st.integers(0, wrong[name].size - 1))
    bit = data.draw(st.integers(0, 8 * dtypes[name].width - 1))
    wrong[name].reshape(-1)[at] ^= dtypes[name].uint.type(1 << bit)
    if all((wrong[n] == new[n]).all() for n in new):
        return  # that bit was the whole change
    weights = hold(wrong, dtypes)
    with pytest.raises(WrongBase, match=r"Nothing was touched"):
        patch.apply(weights)
    assert_same(wrong, weights)


@pytest.fixture(params=["exchange", "stage"])
def landing(request, monkeypatch):
    """Both ways a patch lands: old bits swapped for new ones, or everything staged first."""
    if request.param == "stage":
        monkeypatch.setattr("sparserl.patch.apply.KEEP_BYTES", -1)
    return request.param


@each_profile
def test_vouching_saves_the_read_but_not_the_check(profile, landing):
    """With `digest` the weights are not read in full, yet bits that do not lead to the result are not written."""
    dtype = BY_NAME["bfloat16"]
    old, new, dtypes = family(3, dtype, "few", ((40, 50),))
    patch = sparserl.diff(hold(old, dtypes), hold(new, dtypes), profile=profile)
    weights = hold(old, dtypes)
    reported = []
    assert patch.apply(weights, digest=patch.base, progress=reported.append).changed == patch.changed
    assert reported == []
    assert_same(new, weights)
    wrong = {n: b.copy() for n, b in old.items()}
    wrong["t0"].reshape(-1)[np.flatnonzero(old["t0"] != new["t0"])[0]] ^= np.uint16(4)
    weights = hold(wrong, dtypes)
    with pytest.raises(InvalidField, match=r"the weights are as they were"):
        patch.apply(weights, digest=patch.base)
    assert_same(wrong, weights)
    with pytest.raises(WrongBase):
        patch.apply(weights, digest=Digest(1, 2))
    assert patch.apply(weights, digest=patch.result).already
    assert_same(wrong, weights)


@each_profile
def test_a_result_that_does_not_hold_is_refused_untouched(profile, landing):
    """Buckets that lead elsewhere than the footer says are not written, sparse or dense."""
    dtype = BY_NAME["float32"]
    for kind in ("few", "all"):
        old, new, dtypes = family(4, dtype, kind, ((300, 10),))
        patch = sparserl.diff(hold(old, dtypes), hold(new, dtypes), profile=profile)
        buckets = [patch.bucket(i) for i in range(patch.buckets)]
        for delta in (Digest(1, 0), Digest(0, 1)):
            lie = Patch(rewrite(patch.table, buckets, patch.base, patch.result + delta, patch.changed, None))
            with pytest.raises(InvalidField, match=r"the changes lead to"):
                lie.invert(hold(old, dtypes))
            weights = hold(old, dtypes)
            with pytest.raises(InvalidField, match=r"the weights are as they were"):
                lie.apply(weights)
            assert_same(old, weights)


@pytest.mark.parametrize("threads", [1, 2])
def test_what_landed_before_an_error_is_put_back(monkeypatch, threads):
    """A bucket that fails, in whatever way, takes those back that were written before it, sparse and dense."""
    dtype = BY_NAME["float32"]
    old, new, dtypes = family(6, dtype, "few", ((300, 10), (70,), (90, 5)))
    new["t1"] = new["t1"] ^ np.uint32(1)
    one = sparserl.diff(hold(old, dtypes), hold(new, dtypes), profile="raw")
    assert (one.buckets, {entry.dense for entry in one}) == (1, {True, False})
    monkeypatch.setattr("sparserl.weights.pieces.PIECE_BYTES", 2000)
    monkeypatch.setattr("sparserl.plan.buckets.BUCKET_CHANGES", 10)
    many = sparserl.diff(hold(old, dtypes), hold(new, dtypes), profile="raw")
    assert many.buckets > 3
    for patch, name, at in ((many, "exchange", 3), (one, "_dense_moved", 1)):
        inner, seen = getattr(sparserl.patch.apply, name), []

        def fail(*args, inner=inner, seen=seen, at=at):
            seen.append(args)
            if len(seen) == at:
                raise MemoryError
            return inner(*args)

        weights = hold(old, dtypes)
        with monkeypatch.context() as patched:
            patched.setattr(f"sparserl.patch.apply.{name}", fail)
            with pytest.raises(MemoryError):
                patch.apply(weights, threads=threads)
        assert_same(old, weights)
        patch.apply(weights, threads=threads)
        assert_same(new, weights)


def test_memory_for_what_was_there_is_handed_out_once():
    """Each piece begins at a line of its own and overlaps no other; where no room is left, there is new memory."""
    memory = np.zeros(3 * 64, np.uint8)
    mine = apply._Memory(memory)
    first, none, second = mine.take(5, np.uint32), mine.take(0, np.uint16), mine.take(40, np.uint16)
    assert (first.size, none.size, second.size) == (5, 0, 40)
    assert second.ctypes.data - first.ctypes.data == 64
    assert np.shares_memory(first, memory)
    assert np.shares_memory(second, memory)
    beyond = mine.take(1, np.uint8)
    assert beyond.size == 1
    assert not np.shares_memory(beyond, memory)


def test_a_signal_handler_may_compare_too():
    """One that runs while changes are being copied finds its own, and the others stay what they are."""
    rng = np.random.default_rng(0)
    old = {"w": rng.integers(0, 1 << 16, 1_000_000).astype(np.uint16)}
    new = {"w": np.where(rng.random(1_000_000) < 0.05, old["w"] + np.uint16(1), old["w"])}
    other = {"v": np.zeros(300_000, np.uint16)}, {"v": np.tile(np.arange(2, dtype=np.uint16), 150_000)}
    wanted, seen = sparserl.diff(old, new, profile="gap", threads=1).to_bytes(), []
    before = signal.signal(signal.SIGALRM, lambda *_: seen.append(sparserl.diff(*other, profile="gap", threads=1)))
    try:
        for _ in range(60):
            signal.setitimer(signal.ITIMER_REAL, float(rng.uniform(1e-4, 2e-3)))
            assert sparserl.diff(old, new, profile="gap", threads=1).to_bytes() == wanted
            signal.setitimer(signal.ITIMER_REAL, 0)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert len({patch.to_bytes() for patch in seen}) == 1


@pytest.mark.parametrize("threads", [1, 3])
def test_heads_are_read_in_order_on_threads(monkeypatch, threads):
    """They are those of the buckets, in their order, and a damaged bucket is refused before a bit is written."""
    dtype = BY_NAME["float32"]
    old, new, dtypes = family(7, dtype, "few", ((300, 10), (70,), (90, 5)))
    monkeypatch.setattr("sparserl.weights.pieces.PIECE_BYTES", 2000)
    monkeypatch.setattr("sparserl.plan.buckets.BUCKET_CHANGES", 10)
    monkeypatch.setattr("sparserl.patch.patch._LARGE", 0)
    data = sparserl.diff(hold(old, dtypes), hold(new, dtypes), profile="raw").to_bytes()
    patch = sparserl.Patch.from_bytes(data)
    assert patch.buckets > 3
    heads = patch.read_heads(threads)
    for index, head in enumerate(heads):
        fresh = sparserl.Patch.from_bytes(data).opened(index)[0]
        assert (head.entries.tensor.tolist(), head.entries.region) == (
            fresh.entries.tensor.tolist(),
            fresh.entries.region,
        )
    assert patch.heads is heads
    at = data.index(bytes(patch.bucket(2))) + 40
    bad = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
    weights = hold(old, dtypes)
    with pytest.raises(FormatError, match="bucket 2"):
        sparserl.Patch.from_bytes(bad).apply(weights, threads=threads)
    assert_same(old, weights)


@each_profile
def test_each_flipped_bit_of_a_patch_is_refused(profile):
    """Every bit of a patch's bytes is under some checksum; whichever is flipped, nothing is applied."""
    dtype = BY_NAME["bfloat16"]
    old, new, dtypes = family(5, dtype, "few", ((11,), (2, 80)))
    data = sparserl.diff(hold(old, dtypes), hold(new, dtypes), profile=profile).to_bytes()
    weights = hold(old, dtypes)
    for bit in range(8 * len(data)):
        bad = bytearray(data)
        bad[bit // 8] ^= 1 << (bit % 8)
        with pytest.raises(FormatError):
            Patch.from_bytes(bytes(bad)).apply(weights, threads=1)
    for size in range(len(data)):
        with pytest.raises(FormatError):
            Patch.from_bytes(data[:size]).apply(weights, threads=1)
    assert_same(old, weights)
    Patch.from_bytes(data).apply(weights)
    assert_same(new, weights)


@each_profile
def test_on_disk_and_in_memory_alike(profile, tmp_path):
    """Written bucket by bucket, saved, opened or passed as bytes, a patch is the same bytes and does the same."""
    dtype = BY_NAME["float16"]
    old, new, dtypes = family(6, dtype, "half")
    before, after = hold(old, dtypes), hold(new, dtypes)
    patch = sparserl.diff(before, after, profile=profile)
    data = patch.to_bytes()
    assert len(data) == patch.nbytes
    written = sparserl.diff(before, after, profile=profile, to=tmp_path / "written.srl")
    patch.save(tmp_path / "saved.srl")
    assert (tmp_path / "written.srl").read_bytes() == data
    assert (tmp_path / "saved.srl").read_bytes() == data
    for same in (
        written,
        Patch.open(tmp_path / "saved.srl"),
        Patch.from_bytes(data),
        Patch.from_bytes(memoryview(data)),
    ):
        assert same.to_bytes() == data
        assert (same.base, same.result, same.changed) == (patch.base, patch.result, patch.changed)
        weights = hold(old, dtypes)
        same.apply(weights)
        assert_same(new, weights)


def test_a_broken_write_leaves_nothing_behind(tmp_path):
    """Where a diff fails half-way, neither the file nor a piece of it is left, and an older file stays."""
    path = tmp_path / "patch.srl"
    path.write_bytes(b"older")

    def fail(_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sparserl.diff({"w": np.zeros(9)}, {"w": np.ones(9)}, to=path, progress=fail)
    assert path.read_bytes() == b"older"
    assert [p.name for p in tmp_path.iterdir()] == ["patch.srl"]


@each_profile
def test_progress_counts_all_bytes(profile):
    """Diff and apply report the dense bytes they went through, once each."""
    old, new, dtypes = family(7, BY_NAME["float32"], "few")
    seen = []
    patch = sparserl.diff(hold(old, dtypes), hold(new, dtypes), profile=profile, progress=seen.append)
    assert sum(seen) == patch.table.dense_bytes
    seen.clear()
    patch.apply(hold(old, dtypes), progress=seen.append)
    assert sum(seen) == patch.table.dense_bytes


def test_what_a_patch_prints_as():
    """Both digests, the changes and the size at a glance."""
    patch = sparserl.diff({"w": np.zeros(9)}, {"w": np.ones(9)})
    assert repr(patch) == f"<Patch {patch.base.hex[:8]}→{patch.result.hex[:8]}: 9 changed, {patch.nbytes} bytes>"


def test_an_unknown_profile_is_refused():
    """The error names the profiles there are."""
    with pytest.raises(UnsupportedFormat, match=r"'zip'.*raw, gap, ulp, ctx"):
        sparserl.diff({}, {}, profile="zip")


# Holes seen elsewhere: each has a test of its own, whatever the property tests above may cover.


@each_profile
def test_zero_signs_and_nans_arrive(profile):
    """A flipped zero sign is a change, a NaN payload is delivered, an unchanged NaN is not sent."""
    old = np.array([0.0, -0.0, 1.0, np.nan, np.nan, np.inf], np.float32)
    new = np.array([-0.0, 0.0, 1.0, np.nan, 0.0, -np.inf], np.float32)
    new.view(np.uint32)[3] ^= 1
    old[4:5] = new[4:5] = np.nan
    patch = sparserl.diff({"w": old}, {"w": new}, profile=profile)
    assert patch.changed == 4
    patch.apply({"w": old})
    assert (old.view(np.uint32) == new.view(np.uint32)).all()


@each_profile
def test_an_fp32_router_among_bf16_experts_stays_fp32(profile):
    """Each tensor keeps its own dtype: a step of one fp32 ulp arrives although bf16 could not tell it."""
    router = torch.full((4, 4), 1.0)
    old = {"expert": torch.ones(64, 64, dtype=torch.bfloat16), "router": router}
    new = {"expert": old["expert"].clone(), "router": torch.nextafter(router, torch.tensor(2.0))}
    new["expert"][5, 6] = 1.0078125
    sparserl.diff(old, new, profile=profile).apply(old)
    assert torch.equal(old["router"].view(torch.int32), new["router"].view(torch.int32))
    assert torch.equal(old["expert"].view(torch.int16), new["expert"].view(torch.int16))


# Tied weights.


def tied(make, rows=40):
    """Two names for one memory, and a third tensor."""
    table = make((rows, 8))
    return {"embed": table, "head": table, "other": make((5,))}


def strided(shape):
    return torch.zeros((*shape[:-1], 2 * shape[-1]))[..., ::2]


makers = pytest.mark.parametrize(
    "make", [lambda shape: np.zeros(shape, np.float32), torch.zeros, strided], ids=["numpy", "torch", "torch strided"]
)


@makers
@each_profile
@pytest.mark.parametrize("density", [0.05, 1.0], ids=["sparse", "dense"])
def test_tied_tensors_are_patched_once(make, profile, density):
    """Names that share memory and change alike end at the new bits, not one step further."""
    weights = tied(make)
    rng = np.random.default_rng(8)
    old = {n: np.zeros(tuple(t.shape), np.float32) for n, t in weights.items()}
    new = {n: b.copy() for n, b in old.items()}
    new["embed"][rng.random((40, 8)) < density] = rng.random()
    if density == 1.0:
        new["embed"] = rng.random((40, 8)).astype(np.float32)
    new["head"] = new["embed"].copy()
    new["other"][2] = 1
    patch = sparserl.diff(old, new, profile=profile)
    assert patch.apply(weights).digest == patch.result
    assert_same({n: b.view(np.uint32) for n, b in new.items()}, weights)
    assert patch.apply(weights).already


@makers
@each_profile
@pytest.mark.parametrize("conflict", ["only one", "other bits", "other place"])
def test_tied_tensors_that_should_differ_are_refused(make, profile, conflict):
    """A patch that would have one memory hold two things raises `TiedConflict`, and nothing is touched."""
    weights = tied(make)
    old = {n: np.zeros(tuple(t.shape), np.float32) for n, t in weights.items()}
    new = {n: b.copy() for n, b in old.items()}
    new["other"][2] = 1
    new["embed"][3, 4] = 1
    if conflict == "other bits":
        new["head"][3, 4] = 2
    if conflict == "other place":
        new["head"][3, 5] = 1
    patch = sparserl.diff(old, new, profile=profile)
    with pytest.raises(TiedConflict, match=r"'embed'.*'head'|'head'.*'embed'"):
        patch.apply(weights)
    assert_same({n: b.view(np.uint32) for n, b in old.items()}, weights)


def test_tied_tensors_may_be_told_differently():
    """One name by a dense entry, the other by rows of which some are untouched: what counts is what changes."""
    rng = np.random.default_rng(9)
    old = {n: np.zeros((400, 16), np.uint8) for n in ("embed", "head")}
    new = {n: b.copy() for n, b in old.items()}
    new["embed"][:200] = rng.integers(1, 256, (200, 16), np.uint8)
    new["head"][:] = new["embed"]
    table = sparserl.tensor_table(old)
    top_half, low_half = Region((0, 0), (200, 16)), Region((200, 0), (200, 16))
    parts = [diff_shards({"embed": old["embed"]}, {"embed": new["embed"]}, table=table, profile="raw")]
    for region in (top_half, low_half):
        a, b = ({"head": w["head"][region.slices]} for w in (old, new))
        parts.append(diff_shards(a, b, table=table, regions={"head": region}, profile="raw"))
    patch = sparserl.merge(*parts)
    assert {e.tensor for e in patch if e.dense} == {"embed", "head"}
    assert sum(e.elements for e in patch if e.tensor == "embed") != sum(e.elements for e in patch if e.tensor == "head")
    shared = np.zeros((400, 16), np.uint8)
    patch.apply({"embed": shared, "head": shared})
    assert (shared == new["head"]).all()


# Tables that do not match.


def renamed(weights):
    return {("y" if n == "w" else n): t for n, t in weights.items()}


MISMATCHES = {
    "new": (lambda w: {**w, "extra": np.zeros(2, np.float32)}, ["extra"]),
    "missing": (lambda w: {n: t for n, t in w.items() if n != "w"}, ["'w'"]),
    "renamed": (renamed, ["'w'", "'y'"]),
    "reshaped": (lambda w: {**w, "w": w["w"].reshape(6, 4)}, ["'w'", "float32[4, 6]", "float32[6, 4]"]),
    "retyped": (lambda w: {**w, "w": w["w"].view(np.int32)}, ["'w'", "float32[4, 6]", "int32[4, 6]"]),
    "several": (
        lambda w: {"v": w["v"].reshape(1, 3), "x": w["w"]},
        ["'v'", "float32[3]", "float32[1, 3]", "'w'", "'x'"],
    ),
    "everything gone": (lambda w: {}, ["'v'", "'w'"]),
}


@pytest.mark.parametrize("kind", MISMATCHES)
def test_mismatched_tables_are_refused_by_name(kind):
    """Diff and apply name every tensor that is new, missing, reshaped or retyped; nothing is touched."""
    old = {"v": np.zeros(3, np.float32), "w": np.zeros((4, 6), np.float32)}
    new = {"v": np.ones(3, np.float32), "w": np.ones((4, 6), np.float32)}
    patch = sparserl.diff(old, new)
    alter, words = MISMATCHES[kind]
    for call in (
        lambda: sparserl.diff(old, alter(new)),
        lambda: sparserl.diff(alter(old), new),
        lambda: patch.apply(alter(old)),
        lambda: patch.invert(alter(old)),
        lambda: sparserl.squash(patch, base=alter(old)),
    ):
        with pytest.raises(TensorMismatch) as caught:
            call()
        assert all(word in str(caught.value) for word in words)
    assert all((t == 0).all() for t in old.values())


def test_a_long_list_of_mismatches_is_cut():
    """The first ten are named, the rest is counted."""
    old = {f"t{i:02}": np.zeros(1, np.float32) for i in range(15)}
    with pytest.raises(TensorMismatch, match=r"15 tensor\(s\) differ.*t09.*and 5 more"):
        sparserl.diff(old, {})


# Positions that are known.


@given(weights_pairs(), st.sampled_from(PROFILES), st.integers(0, 2**32), st.sampled_from((0.0, 0.1, 1.0)))
@settings(deadline=None, max_examples=150)
def test_known_positions_may_be_a_superset(pair, profile, seed, extra):
    """Any superset of the changes, in any order, with repeats, gives the very patch of a full comparison."""
    old, new, dtypes = pair
    rng = np.random.default_rng(seed)
    known = {}
    for i, name in enumerate(old):
        if i % 3 == 2:
            continue  # compared in full
        must = np.flatnonzero(old[name].ravel() != new[name].ravel())
        more = np.flatnonzero(rng.random(old[name].size) < extra)
        known[name] = rng.permutation(np.concatenate([must, more, must[:3]])).astype((np.int64, np.uint32)[i % 2])
    patch = sparserl.diff(hold(old, dtypes), hold(new, dtypes), profile=profile, positions=known)
    full = sparserl.diff(hold(old, dtypes), hold(new, dtypes), profile=profile)
    assert (patch.base, patch.result, patch.changed) == (full.base, full.result, full.changed)
    weights = hold(old, dtypes)
    patch.apply(weights)
    assert_same(new, weights)


@pytest.mark.parametrize("threads", [1, 3])
def test_known_positions_across_pieces(threads, monkeypatch):
    """Positions find their piece of a tensor that is cut into many."""
    monkeypatch.setattr("sparserl.weights.pieces.PIECE_BYTES", 128)
    rng = np.random.default_rng(10)
    old = {"a": rng.integers(0, 2**16, (30, 41), np.uint16), "b": rng.integers(0, 2**16, 9, np.uint16)}
    new = {n: b.copy() for n, b in old.items()}
    where = np.flatnonzero(rng.random(30 * 41) < 0.05)
    new["a"].reshape(-1)[where] += np.uint16(1)
    new["b"][8] += np.uint16(1)
    patch = sparserl.diff(old, new, positions={"a": torch.from_numpy(where), "b": [8]}, threads=threads)
    assert patch.result == sparserl.digest(new)
    patch.apply(old)
    assert_same(patterns(new), old)


@pytest.mark.parametrize(
    ("positions", "words"),
    [
        ({"w": [10]}, "outside its 10 elements"),
        ({"w": [-1]}, "outside its 10 elements"),
        ({"w": np.array([2**64 - 1], np.uint64)}, "outside its 10 elements"),
        ({"x": [1]}, "'x'"),
        ({"w": [1.0]}, "integers"),
        ({"w": np.ones(10, bool)}, "integers"),
    ],
    ids=["past the end", "negative", "wrapped", "unknown name", "floats", "a mask"],
)
def test_bad_positions_are_refused(positions, words):
    """Positions outside their tensor, of no tensor, or that are no integers (a mask, say) are errors, not guesses."""
    old, new = {"w": np.zeros(10, np.uint8)}, {"w": np.ones(10, np.uint8)}
    with pytest.raises(TensorMismatch, match=words):
        sparserl.diff(old, new, positions=positions)
    assert sparserl.diff(old, old, positions={"w": []}).changed == 0


# Tensors past 2^31 elements, of which only the touched pages exist.


@pytest.mark.parametrize("profile", ["auto", "raw"])
def test_a_tensor_past_two_to_the_31_elements(profile):
    """Compared in full: changes on both sides of 2^31, and in the last element, land where they belong."""
    shape = (5, 1 << 29)
    old, new = np.zeros(shape, np.uint8), np.zeros(shape, np.uint8)
    where = [0, 2**31 - 1, 2**31, 2**31 + 1, new.size - 1]
    new.reshape(-1)[where] = [1, 2, 3, 4, 5]
    patch = sparserl.diff({"w": old}, {"w": new}, profile=profile, base_digest=Digest(7, 7))
    assert patch.changed == 5
    patch.apply({"w": old}, digest=Digest(7, 7))
    assert old.reshape(-1)[where].tolist() == [1, 2, 3, 4, 5]
    assert [int(row[1:-1].any()) for row in (old[1], old[2])] == [0, 0]
    key = patch.table.keys[0]
    moved = Digest(7, 7)
    for at, value in zip(where, (1, 2, 3, 4, 5), strict=True):
        for bits, sign in ((value, 1), (0, -1)):
            one = Digest(*reference.digest(key, at, np.array([bits], np.uint8)))
            moved = moved + one if sign > 0 else moved - one
    assert patch.result == moved


@pytest.mark.parametrize("dtype", ["uint8", "bfloat16"])
def test_positions_past_two_to_the_32_on_disk(dtype, tmp_path):
    """A file of more than 2^32 elements, almost all of it holes: changes are found, applied, squashed, undone."""
    dtype = BY_NAME[dtype]
    size = (1 << 32) + 100_000
    where = np.array([1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**32 + 77_777, size - 1])

    def sparse_file(name, values):
        path = tmp_path / name
        with path.open("wb") as file:
            file.truncate(size * dtype.width)
        array = np.memmap(path, dtype.uint, "r+", shape=(2, size // 2))
        array.reshape(-1)[where] = values
        return path, array

    _, first = sparse_file("first", np.arange(7))
    _, second = sparse_file("second", np.arange(7) + 1)
    _, third = sparse_file("third", np.arange(7) * 5)
    target_path, target = sparse_file("target", np.arange(7))
    chain, base = [], Digest(3, 4)
    for old, new in ((first, second), (second, third)):
        known = {"w": np.concatenate([where, [5, 2**32 + 1]])}
        patch = sparserl.diff(
            {"w": Bits(old, dtype)}, {"w": Bits(new, dtype)}, positions=known, base_digest=base, profile="ulp"
        )
        chain.append(patch)
        base = patch.result
    weights = {"w": Bits(target, dtype)}
    chain[0].apply(weights, digest=chain[0].base)
    assert target.reshape(-1)[where].tolist() == list(range(1, 8))
    chain[0].invert().apply(weights, digest=chain[0].result)
    assert target.reshape(-1)[where].tolist() == list(range(7))
    sparserl.squash(*chain).apply(weights, digest=chain[0].base)
    assert target.reshape(-1)[where].tolist() == [5 * i for i in range(7)]
    assert target.reshape(-1)[[0, 2, 2**31 + 1, 2**32 + 1, size - 2]].tolist() == [0] * 5
    target.flush()
    assert target_path.stat().st_blocks * 512 < 1 << 20


def test_a_shard_of_a_tensor_of_two_to_the_44_elements():
    """Index arithmetic alone: a box far out in a tensor that no one holds is coded, decoded and summed right."""
    shape = (1 << 20, 1 << 24)
    table = TensorTable([TensorSpec("w", BY_NAME["uint16"], shape)])
    region = Region((1 << 19, (1 << 23) + 5), (3, 100))
    old, new = np.zeros(region.size, np.uint16), np.zeros(region.size, np.uint16)
    new[[0, 1, 2, 2], [0, 50, 3, 99]] = [1, 2, 3, 4]
    patch = diff_shards({"w": old}, {"w": new}, table=table, regions={"w": region}, profile="gap")
    assert [(e.region, e.changed) for e in patch] == [(region, 4)]
    decoded = patch.decode(0)
    flat = flatten(table, decoded.sparse_places[0], decoded.positions)
    expected = [(region.start[0] + r) * shape[1] + region.start[1] + c for r, c in ((0, 0), (1, 50), (2, 3), (2, 99))]
    assert flat.tolist() == expected
    assert min(expected) > 2**42
    sums = Digest()
    for r, c in np.ndindex(*region.size):
        at = (region.start[0] + r) * shape[1] + region.start[1] + c
        sums += Digest(*reference.digest(table.keys[0], at, new[r : r + 1, c]))
    assert patch.result == sums


@pytest.mark.parametrize("profile", ["raw", "gap", "ulp", "ctx"])
@pytest.mark.parametrize("keep", [0, 3000, 1 << 30])
def test_what_is_not_kept_is_decoded_again(monkeypatch, profile, keep):
    """However few decoded changes may be held, the result is the same; a refused patch still touches nothing."""
    monkeypatch.setattr("sparserl.patch.apply.KEEP_BYTES", keep)
    for module in ("route", "buckets"):
        monkeypatch.setattr(sys.modules[f"sparserl.plan.{module}"], "BUCKET_CHANGES", 100)
    rng = np.random.default_rng(11)
    old = {"a": rng.standard_normal(4000).astype(np.float32), "b": rng.standard_normal((30, 40)).astype(np.float16)}
    new = {name: np.where(rng.random(w.shape) < 0.2, w * w.dtype.type(1.25), w) for name, w in old.items()}
    patch = sparserl.diff(old, new, profile=profile)
    assert patch.buckets > 5
    weights = {name: w.copy() for name, w in old.items()}
    assert patch.apply(weights).changed == patch.changed
    for name, w in new.items():
        assert weights[name].tobytes() == w.tobytes()
    before = {name: w.copy() for name, w in old.items()}
    before["a"][0] += 1
    data = {name: w.tobytes() for name, w in before.items()}
    with pytest.raises(WrongBase):
        patch.apply(before)
    assert data == {name: w.tobytes() for name, w in before.items()}
