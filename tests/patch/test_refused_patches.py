"""A patch that does not fit its base, or does not hold, leaves the weights as they were."""

from __future__ import annotations

import operator
import signal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sparserl
import sparserl.patch.apply
from sparserl import Digest, Patch
from sparserl.errors import FormatError, InvalidField, WrongBase
from sparserl.patch import apply
from sparserl.patch.contents import BucketList, Contents, Ends
from sparserl.weights.dtypes import BY_NAME
from tests.class_choice import always
from tests.effort import examples
from tests.patch.changed_weights import (
    PROFILES,
    assert_same,
    common_or_all_dtypes,
    each_profile,
    family,
    hold,
    weights_pairs,
)


@pytest.fixture(autouse=True)
def classes(monkeypatch):
    """Small data, too, is told apart by magnitude where `ctx` is asked for."""
    monkeypatch.setattr("sparserl.plan.buckets.choose_classes", always)


@common_or_all_dtypes
@given(st.sampled_from(PROFILES), st.data())
@settings(deadline=None, max_examples=examples(150))
def test_a_wrong_base_is_refused_untouched(choices, profile, data):
    """One flipped bit anywhere in the weights, and the patch is refused before a bit is touched."""
    old, new, dtypes = data.draw(weights_pairs(choices).filter(lambda p: any(b.size for b in p[0].values())))
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
        buckets = [patch.contents.bucket(i) for i in range(patch.buckets)]
        for delta in (Digest(1, 0), Digest(0, 1)):
            lie = Patch(
                Contents(patch.table, Ends(patch.base, patch.result + delta, patch.changed), BucketList.of(buckets))
            )
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
    monkeypatch.setattr("sparserl.weights.batches.PIECE_BYTES", 2000)
    monkeypatch.setattr("sparserl.plan.buckets.BUCKET_CHANGES", 10)
    many = sparserl.diff(hold(old, dtypes), hold(new, dtypes), profile="raw")
    assert many.buckets > 3
    for patch, name, at in ((many, "apply.exchange", 3), (one, "staging._dense_moved", 1)):
        inner, seen = operator.attrgetter(name)(sparserl.patch), []

        def fail(*args, inner=inner, seen=seen, at=at):
            seen.append(args)
            if len(seen) == at:
                raise MemoryError
            return inner(*args)

        weights = hold(old, dtypes)
        with monkeypatch.context() as patched:
            patched.setattr(f"sparserl.patch.{name}", fail)
            with pytest.raises(MemoryError):
                patch.apply(weights, threads=threads)
        assert_same(old, weights)
        patch.apply(weights, threads=threads)
        assert_same(new, weights)


def test_memory_for_what_was_there_is_handed_out_once():
    """Each piece begins at a line of its own and overlaps no other; where no room is left, there is new memory."""
    memory = np.zeros(3 * 64, np.uint8)
    mine = apply._Arena(memory)
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
