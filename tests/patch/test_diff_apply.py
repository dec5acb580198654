"""Whatever changed is found and applied bit for bit, for every profile, dtype and memory layout."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import sparserl
from sparserl import Patch
from sparserl.errors import FormatError, TensorMismatch, UnsupportedFormat
from sparserl.weights.dtypes import BY_NAME
from tests.class_choice import always
from tests.dtypes import each_dtype
from tests.effort import examples
from tests.patch.changed_weights import (
    CHANGES,
    PROFILES,
    assert_same,
    common_or_all_dtypes,
    each_profile,
    family,
    hold,
    patterns,
    weights_pairs,
)

LAYOUTS = ("contiguous", "strided", "transposed", "reversed", "unaligned")
every_dtype = pytest.mark.parametrize("dtype", each_dtype())


@pytest.fixture(autouse=True)
def classes(monkeypatch):
    """Small data, too, is told apart by magnitude where `ctx` is asked for."""
    monkeypatch.setattr("sparserl.plan.buckets.choose_classes", always)


@each_profile
@every_dtype
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


@common_or_all_dtypes
@given(
    st.data(),
    st.sampled_from(PROFILES),
    st.sampled_from(("bits", "numpy", "torch")),
    st.sampled_from(LAYOUTS),
    st.sampled_from(LAYOUTS),
    st.sampled_from((1, 2, 3)),
)
@settings(deadline=None, max_examples=examples(300))
def test_any_weights_in_any_memory(choices, data, profile, holder, layout, other, threads):
    """Mixed dtypes, held by torch or NumPy in any layout on either side: exact, and only in place."""
    old, new, dtypes = data.draw(weights_pairs(choices))
    patch = sparserl.diff(
        hold(old, dtypes, holder, layout), hold(new, dtypes, "bits", other), profile=profile, threads=threads
    )
    again = Patch.from_bytes(patch.to_bytes())
    weights = hold(old, dtypes, holder, layout)
    assert again.apply(weights, threads=threads).changed == sum(int((old[n] != new[n]).sum()) for n in old)
    assert_same(new, weights)
    again.invert(hold(old, dtypes, "bits", other), threads=threads).apply(weights, threads=threads)
    assert_same(old, weights)


@pytest.mark.parametrize("threads", [1, 3])
def test_heads_are_read_in_order_on_threads(monkeypatch, threads):
    """They are those of the buckets, in their order, and a damaged bucket is refused before a bit is written."""
    dtype = BY_NAME["float32"]
    old, new, dtypes = family(7, dtype, "few", ((300, 10), (70,), (90, 5)))
    monkeypatch.setattr("sparserl.weights.batches.PIECE_BYTES", 2000)
    monkeypatch.setattr("sparserl.plan.buckets.BUCKET_CHANGES", 10)
    monkeypatch.setattr("sparserl.patch.contents._LARGE_BUCKET", 0)
    data = sparserl.diff(hold(old, dtypes), hold(new, dtypes), profile="raw").to_bytes()
    patch = sparserl.Patch.from_bytes(data)
    assert patch.buckets > 3
    heads = patch.contents.read_heads(threads)
    for index, head in enumerate(heads):
        fresh = sparserl.Patch.from_bytes(data).contents.open_bucket(index)[0]
        assert (head.entries.tensor.tolist(), head.entries.region) == (
            fresh.entries.tensor.tolist(),
            fresh.entries.region,
        )
    assert patch.contents.heads is heads
    at = data.index(bytes(patch.contents.bucket(2))) + 40
    bad = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
    weights = hold(old, dtypes)
    with pytest.raises(FormatError, match="bucket 2"):
        sparserl.Patch.from_bytes(bad).apply(weights, threads=threads)
    assert_same(old, weights)


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


# Positions that are known.


@common_or_all_dtypes
@given(st.data(), st.sampled_from(PROFILES), st.integers(0, 2**32), st.sampled_from((0.0, 0.1, 1.0)))
@settings(deadline=None, max_examples=examples(150))
def test_known_positions_may_be_a_superset(choices, data, profile, seed, extra):
    """Any superset of the changes, in any order, with repeats, gives the very patch of a full comparison."""
    old, new, dtypes = data.draw(weights_pairs(choices))
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
    monkeypatch.setattr("sparserl.weights.batches.PIECE_BYTES", 128)
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
