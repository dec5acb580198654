"""Heads and directories of buckets that lie although every checksum holds.

Buckets of the samples: 0 has two boxes of `attn` and the scalar `one` (bf16), 1 has `big` in three tiles (f32), 2 has a
sparse and a dense box of `f64`, 3 has all of `i8`, dense.
"""

from __future__ import annotations

import pytest

from sparserl.errors import FormatError, InvalidField, LimitExceeded, Truncated, UnsupportedFormat
from tests.hostile import forged_patch
from tests.hostile.cases import ELEVEN, MOST, Cases, refuse
from tests.hostile.forged_patch import Patch, Stream
from tests.hostile.samples import PROFILES, STORED, sample

cases = Cases()


@cases.forged(InvalidField, "bucket 1: not a bucket")
def bucket_magic(p):
    p.buckets[1].magic = b"SRLC"


@cases.each({"0": 0, "2": 2}, UnsupportedFormat, "bucket 1: format version", "gap")
def bucket_version(p, version):
    p.buckets[1].version = version


@cases.each({"4": 4, "5": 5, "255": 255}, UnsupportedFormat, "unknown profile", "gap")
def bucket_profile(p, profile):
    p.buckets[1].profile = profile


@cases.forged(FormatError, "bucket 1: ")
def bucket_of_another_profile(p):
    p.buckets[1].profile = (p.buckets[1].profile + 1) % 4


@cases.each({"9": 9, "255": 255}, UnsupportedFormat, "unknown dtype", "gap")
def bucket_dtype(p, code):
    p.buckets[1].dtype = code


@cases.each({"same width": 33, "narrower": 19, "wider": 50}, InvalidField, "an entry is for big")
def bucket_of_another_dtype(p, code):
    p.buckets[1].dtype = code


@cases.each({"low": 1, "high": 128}, UnsupportedFormat, "bucket 1: unknown required features", "gap")
def bucket_features(p, features):
    p.buckets[1].features = features


@cases.forged(InvalidField, "bucket 1: belongs to another tensor table", "gap")
def bucket_table_hash(p):
    p.buckets[1].hash = bytes(16)


@cases.forged(InvalidField, "no entries", "gap")
def bucket_without_entries(p):
    p.buckets[1].columns = forged_patch.Columns([], [], [])
    p.buckets[1].streams = []


@cases.forged(InvalidField, "no entries", "gap")
def bucket_entry_count_zero(p):
    p.buckets[1].entry_count = 0


@cases.each({"limit": (1 << 20) + 1, "2^63": 1 << 63, "most": MOST}, LimitExceeded, "entry count", "gap")
def bucket_entry_count_huge(p, count):
    p.buckets[1].entry_count = count


@cases.each(
    {"padded": b"\x81\x00", "long": b"\x81\x80\x80\x00", "eleven": ELEVEN}, InvalidField, "not a canonical", "gap"
)
def bucket_entry_count_not_canonical(p, count):
    p.buckets[1].entry_count = count


@cases.each({"one more": 4, "many more": 1 << 20}, FormatError, "bucket 0: entry table", "gap")
def bucket_entry_count_too_high(p, count):
    p.buckets[0].entry_count = count


@cases.each({"one less": 2, "two less": 1}, FormatError, "bucket 0: entry table", "gap")
def bucket_entry_count_too_low(p, count):
    p.buckets[0].entry_count = count


@cases.each({"limit": (1 << 23) + 1, "most": MOST}, LimitExceeded, "entry table length", "gap")
def bucket_entry_table_huge(p, size):
    p.buckets[1].entry_bytes = size


@cases.each({"more": 1, "less": -1}, InvalidField, "bucket 1: stream 0", "gap")
def bucket_entry_table_of_another_length(p, by):
    p.buckets[1].entry_bytes = len(p.buckets[1].columns.encode()) + by


@cases.each({"9": 9, "32": 32, "255": 255}, LimitExceeded, "tile size")
def bucket_tile_log(p, log):
    p.buckets[1].tile_log = log


@cases.each({"0": 0, "7": 7, "25": 25, "255": 255}, LimitExceeded, "chunk size")
def bucket_chunk_log(p, log):
    p.buckets[1].chunk_log = log


@cases.each({"17": 17, "most": MOST}, LimitExceeded, "estimate count", "gap")
def bucket_estimates_too_many(p, count):
    p.buckets[1].estimate_count = count


@cases.each({"2^62": (1 << 62) + 1, "most": MOST}, LimitExceeded, "estimate: bytes", "gap")
def bucket_estimate_overflows(p, cost):
    p.buckets[1].estimates = [(1, cost)]


@cases.forged(LimitExceeded, "estimate: profile", "gap")
def bucket_estimate_of_no_profile(p):
    p.buckets[1].estimates = [(256, 1)]


@cases.forged(FormatError, "bucket 1", "gap")
def bucket_estimates_left_out(p):
    p.buckets[1].estimate_count = 16


@cases.each({"65": 65, "most": MOST}, LimitExceeded, "stream count", "gap")
def streams_too_many(p, count):
    p.buckets[1].stream_count = count


@cases.forged(InvalidField, "bytes too many")
def streams_none(p):
    p.buckets[1].stream_count = 0


@cases.forged(FormatError, "bucket 1")
def streams_one_more(p):
    p.buckets[1].stream_count = 2 + len(p.buckets[1].streams)


@cases.each({"11": 11, "15": 15, "32": 32, "63": 63, "96": 96, "255": 255}, UnsupportedFormat, "unknown stream")
def stream_unknown(p, id):
    p.buckets[1].streams.append(Stream(id, [b"x"]))
    p.buckets[1].streams.sort(key=lambda s: s.id)


@cases.each({"3": 3, "255": 255}, UnsupportedFormat, "unknown coder")
def stream_coder_unknown(p, coder):
    p.buckets[1].streams[0].coder = coder


@cases.forged(InvalidField, "out of order")
def stream_out_of_order(p):
    p.buckets[1].streams.reverse()


@cases.forged(InvalidField, "out of order")
def stream_twice(p):
    p.buckets[1].streams.insert(0, p.buckets[1].streams[0])


@cases.forged(InvalidField, "out of order")
def stream_of_entries_twice(p):
    p.buckets[1].streams.insert(0, Stream(0, [p.buckets[1].columns.encode()]))


@cases.forged(FormatError, "bucket 1: ")
def stream_missing_first(p):
    del p.buckets[1].streams[0]


@cases.forged(FormatError, "bucket 1: stream")
def stream_missing_last(p):
    del p.buckets[1].streams[-1]


@cases.forged(Truncated, "stream 0 ends", "gap")
def stream_of_entries_missing(p):
    p.buckets[1].entry_stream = Stream(1, [b"x"])


@cases.each(
    {
        "raw": 1,
        "words": 2,
        "classes": 3,
        "steps": 8,
        "dense": 10,
        "plane": 23,
        "dense plane": 24,
        "a class": 64,
        "95": 95,
    },
    InvalidField,
    "too many",
    "gap",
)
def stream_of_another_profile(p, id):
    p.buckets[1].streams.append(Stream(id, [b"x"]))
    p.buckets[1].streams.sort(key=lambda s: s.id)


@cases.forged(InvalidField, r"chunk\(s\) too many")
def chunk_too_many(p):
    p.buckets[1].streams[-1].chunks.append(b"x")


@cases.forged(InvalidField, "stream 0 holds 1", "gap")
def chunk_of_entries_too_many(p):
    p.buckets[1].entry_stream = Stream(0, [p.buckets[1].columns.encode(), b"x"])


@cases.forged(InvalidField, r"chunk\(s\) too many")
def chunk_empty_too_many(p):
    p.buckets[1].streams[0].chunks.append(b"")


@cases.forged(InvalidField, "is empty")
def stream_of_no_chunks(p):
    p.buckets[1].streams.append(Stream(95, []))


@cases.forged(InvalidField, "is empty")
def stream_of_empty_chunks(p):
    p.buckets[1].streams.append(Stream(95, [b"", b""]))


@cases.forged(FormatError, "bucket 1")
def chunk_cut_in_two(p):
    chunk = p.buckets[1].streams[0].chunks[0]
    p.buckets[1].streams[0].chunks = [chunk[:1], chunk[1:]]


@cases.forged(InvalidField, "instead of")
def chunk_short(p):
    p.buckets[1].streams[-1].chunks[0] = p.buckets[1].streams[-1].chunks[0][:-1]


@cases.forged(InvalidField, "instead of")
def chunk_long(p):
    p.buckets[1].streams[-1].chunks[0] += b"\0"


@cases.each({"limit": (1 << 16) + 1, "2^32": 1 << 32, "most": MOST}, LimitExceeded, "chunk count")
def chunk_count_huge(p, count):
    p.buckets[1].streams[0].count = count


@cases.forged(Truncated, "chunk lengths")
def chunk_count_past_the_end(p):
    p.buckets[1].streams[-1].count = 60_000


@cases.forged(Truncated, "a chunk of stream")
def chunk_length_past_the_end(p):
    stream = p.buckets[1].streams[-1]
    stream.lengths = [len(stream.chunks[0]) + 1]


@cases.each({"2^32": 1 << 32, "most": MOST}, InvalidField, "chunk lengths")
def chunk_length_huge(p, length):
    p.buckets[1].streams[-1].lengths = [length]


@cases.forged(InvalidField, "chunk lengths")
def chunk_length_not_canonical(p):
    p.buckets[1].streams[-1].lengths = [b"\x81\x00"]


@cases.forged(InvalidField, "bytes too many")
def bucket_followed_by_bytes(p):
    p.buckets[1].after = b"\0"


@pytest.mark.parametrize(("profile", "change", "error", "match"), cases)
def test_a_bucket_that_lies_is_refused(profile, change, error, match):
    """Every checksum holds, yet the lie is named, the weights stay as they are, and it takes no time to speak of."""
    refuse(profile, change, error, match)


@pytest.mark.parametrize("profile", PROFILES)
def test_any_order_of_buckets_is_the_same_patch(profile):
    """Entries do not overlap, so buckets may come in any order as long as the footer says so."""
    it = sample(profile)
    parts = Patch.parse(it.data)
    parts.buckets.reverse()
    assert it.run(parts.encode()).changed == parts.footer.changed


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("coder", [1, 2], ids=["zstd", "rans"])
def test_every_stream_but_low_bits_may_take_any_coder(profile, coder):
    """The coder of a stream is the writer's choice; only classes and low bits are always stored."""
    it = sample(profile)
    parts = Patch.parse(it.data)
    for bucket in parts.buckets:
        bucket.entry_stream = Stream(0, [bucket.columns.encode()], coder=coder)
        for stream in bucket.streams:
            stream.coder = 0 if stream.id in STORED else coder
    assert it.run(parts.encode()).changed == parts.footer.changed


@pytest.mark.parametrize("profile", PROFILES)
def test_estimates_say_nothing_about_the_changes(profile):
    """Estimates are there for people: any number in them, or none, leaves the result alone."""
    it = sample(profile)
    parts = Patch.parse(it.data)
    for bucket, estimates in zip(parts.buckets, ([], [(255, 1 << 62)], [(0, 0)] * 16, [(1, 1), (1, 2)]), strict=True):
        bucket.estimates = estimates
    assert it.run(parts.encode()).changed == parts.footer.changed
