"""What a patch consists of: buckets that arrive, in memory or on disk, and a file image only where a file is wanted."""

from __future__ import annotations

import os
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import sparserl
from sparserl import Digest, Patch
from sparserl.errors import LimitExceeded, SessionError, Truncated
from sparserl.patch import capture
from sparserl.patch.contents import BucketList, Contents, Ends
from sparserl.wire import limits, patchfile


def versions(seed=0, size=3000):
    """Two versions of some weights in three dtypes, which make a bucket each."""
    rng = np.random.default_rng(seed)
    old = {f"w{width}": rng.integers(0, 200, size, dtype=f"u{width}") for width in (1, 2, 4)}
    new = {name: bits + (rng.random(size) < 0.05).astype(bits.dtype) for name, bits in old.items()}
    return old, new


@given(st.lists(st.binary(max_size=40), max_size=6), st.sampled_from([None, 0, 30, 1000]))
def test_memory_and_disk_hold_the_same(buckets, memory_bytes):
    """Buckets are what was added, wherever they are kept, and those that fit stay in memory."""
    bucket_list = BucketList(memory_bytes=memory_bytes)
    for bucket in buckets:
        bucket_list.add(bucket)
    assert len(bucket_list) == len(buckets)
    assert [*bucket_list.arrivals()] == [*range(len(buckets))]
    assert [bytes(bucket_list.bucket(i)) for i in range(len(buckets))] == buckets
    assert bucket_list.sizes == [len(bucket) for bucket in buckets]
    assert bucket_list.in_memory == (memory_bytes is None or sum(map(len, buckets)) <= memory_bytes)


def test_a_bucket_on_disk_that_is_cut_short(monkeypatch):
    """Bytes that are missing in the temporary file are an error, not a shorter bucket."""
    bucket_list = BucketList(memory_bytes=0)
    bucket_list.add(b"a bucket")
    read = os.pread
    this_thread = threading.get_ident()

    def cut_short(file, size, at):
        return read(file, size, at)[: -1 if threading.get_ident() == this_thread else None]

    monkeypatch.setattr("os.pread", cut_short)
    with pytest.raises(Truncated, match="bucket 0: 7 of 8 bytes"):
        bucket_list.bucket(0)


def test_who_waits_gets_a_bucket_when_it_arrives():
    """Buckets can be waited for; once no more will arrive, waiting ends with an error."""
    bucket_list = BucketList(3)
    arrived = []
    waiting = threading.Thread(target=lambda: arrived.extend(bytes(bucket_list.bucket(i)) for i in range(2)))
    waiting.start()
    bucket_list.add(b"one")
    bucket_list.add(b"two")
    waiting.join()
    assert arrived == [b"one", b"two"]
    stopped = threading.Timer(0.05, bucket_list.stop)
    stopped.start()
    with pytest.raises(SessionError, match="bucket 2 of 3 never arrived"):
        bucket_list.bucket(2)
    stopped.join()


def test_a_source_is_asked_when_a_bucket_is_needed():
    """Buckets of a source are made once, in order, and not before; one that fails leaves an error for all."""
    made = []

    def source():
        for i in range(3):
            made.append(i)
            yield bytes([i])
        raise ValueError("cannot be encoded")

    bucket_list = BucketList(4, source=source())
    assert made == []
    assert (bytes(bucket_list.bucket(1)), made) == (b"\1", [0, 1])
    assert (bytes(bucket_list.bucket(0)), made) == (b"\0", [0, 1])
    with pytest.raises(ValueError, match="cannot be encoded"):
        bucket_list.bucket(3)
    assert bytes(bucket_list.bucket(2)) == b"\2"
    with pytest.raises(SessionError, match="bucket 3 of 4 never arrived"):
        bucket_list.bucket(3)


@pytest.mark.parametrize("memory_bytes", [None, 0, 2000])
def test_a_patch_saved_is_the_patch_written(tmp_path, memory_bytes):
    """A file has the same bytes whether it is written as it is encoded or saved later, and its size is known before."""
    old, new = versions()
    written = sparserl.diff(old, new, to=tmp_path / "patch")
    kept = capture(old, new).encode(to=BucketList(memory_bytes=memory_bytes))
    streamed = Patch(capture(old, new).stream())
    for patch in (written, kept, streamed):
        assert patch.to_bytes() == (tmp_path / "patch").read_bytes()
        assert patch.nbytes == (tmp_path / "patch").stat().st_size
        assert patch.table_nbytes == written.table_nbytes
        weights = {name: bits.copy() for name, bits in old.items()}
        patch.apply(weights)
        assert all(np.array_equal(weights[name], new[name]) for name in new)


def test_a_stream_knows_its_ends_before_it_is_encoded():
    """What is announced of a patch is what it turns out to be."""
    old, new = versions()
    stream = capture(old, new).stream()
    whole = sparserl.diff(old, new)
    assert (stream.base, stream.result, stream.changed) == (whole.base, whole.result, whole.changed)
    assert (len(stream), [*stream.arrivals()]) == (whole.buckets, [*range(whole.buckets)])


def test_more_than_a_patch_may_have(monkeypatch):
    """Changes and buckets beyond the limits are refused before a bucket is looked at, large buckets when they are."""
    old, new = versions()
    patch = sparserl.diff(old, new)
    buckets = [patch.contents.bucket(i) for i in range(patch.buckets)]
    elements = patch.table.elements

    def heads(changed=patch.changed):
        return Contents(patch.table, Ends(patch.base, patch.result, changed), BucketList.of(buckets)).heads

    assert len(heads()) == len(buckets)
    with pytest.raises(LimitExceeded, match=f"{elements + 1} changes, the limit is {elements}"):
        heads(elements + 1)
    with monkeypatch.context() as limited:
        limited.setattr(limits, "BUCKETS", len(buckets) - 1)
        with pytest.raises(LimitExceeded, match="buckets, the limit is"):
            heads()
    most = max(map(len, buckets)) - 1
    monkeypatch.setattr(limits, "BUCKET_BYTES", most)
    with pytest.raises(LimitExceeded, match=f"{most + 1} bytes, the limit is {most}"):
        heads()
    with pytest.raises(LimitExceeded, match=f"{most + 1} bytes, the limit is {most}"):
        sparserl.diff(old, new)


def test_no_file_image_without_a_file(monkeypatch, tmp_path):
    """Patches in memory are made, read, composed and applied without header or footer."""

    def refuse(*_args, **_options):
        raise AssertionError("a file image was built")

    monkeypatch.setattr(patchfile.PatchWriter, "__init__", refuse)
    monkeypatch.setattr(patchfile.PatchReader, "__init__", refuse)
    old, new = versions()
    patch = sparserl.diff(old, new, profile="ulp")
    assert sum(entry.changed for entry in patch) == patch.stats().changed == patch.changed
    weights = {name: bits.copy() for name, bits in old.items()}
    patch.apply(weights)
    patch.invert().apply(weights)
    sparserl.squash(patch, patch.invert(), patch).apply(weights)
    assert sparserl.digest(weights) == patch.result
    with pytest.raises(AssertionError, match="a file image was built"):
        patch.save(tmp_path / "patch")


def test_contents_of_nothing():
    """Weights that did not change make a patch without buckets, which can be saved and read."""
    old, _ = versions()
    patch = sparserl.diff(old, old)
    read = Patch.from_bytes(patch.to_bytes())
    assert (patch.buckets, patch.changed, len(patch.contents.heads)) == (0, 0, 0)
    assert (read.base, read.result, read.nbytes) == (patch.base, patch.result, patch.nbytes)
    assert patch.base == patch.result != Digest()
