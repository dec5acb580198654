"""Positions, gaps, steps and bits that lie although every checksum holds.

Buckets of the samples: 0 has two boxes of `attn` and the scalar `one` (bf16), 1 has `big` in three tiles (f32), 2 has a
sparse and a dense box of `f64`, 3 has all of `i8`, dense.
"""

from __future__ import annotations

import pytest

from sparserl.errors import InvalidField, Truncated
from tests.hostile.cases import (
    GAP_LOWS,
    GAP_TOKENS,
    STEP_LOWS,
    STEP_TOKENS,
    TILE_LOWS,
    TILE_TOKENS,
    Cases,
    refuse,
    replace_stream,
)
from tests.hostile.forged_patch import Patch, Stream, squeeze

cases = Cases()
FIRST = {0: 1, 1: GAP_TOKENS, 2: GAP_TOKENS, 3: 64}  # where a profile says where its changes are


@cases.each(
    {
        "unsorted": [5, 4],
        "twice": [5, 5],
        "outside": [5, 2100],
        "far outside": [5, (1 << 32) - 1],
    },
    InvalidField,
    "bucket 1: sparse entry 0: positions",
    "raw",
)
def positions(p, last):
    stream = p.buckets[1].stream(1)
    stream.chunks[0] = stream.chunks[0][:-8] + b"".join(n.to_bytes(4, "little") for n in last)


@cases.forged(InvalidField, "sparse entry 0", "raw")
def positions_of_the_next_entry(p):
    stream = p.buckets[0].stream(1)
    stream.chunks[0] = stream.chunks[0][4:] + stream.chunks[0][:4]


@cases.forged(InvalidField, "sparse entry 1", "raw")
def positions_past_a_region(p):
    stream = p.buckets[0].stream(1)
    count = int(p.buckets[0].columns.values[0]) >> 2
    stream.chunks[0] = stream.chunks[0][: 4 * count] + b"\xff" * 4 + stream.chunks[0][4 * count + 4 :]


@cases.forged(InvalidField, "tile counts do not add up, or a gap leaves its tile", "gap", "ulp")
def gap_leaves_its_tile(p):
    tiles(p, [16, 0, 0])


@cases.forged(InvalidField, "leaves its tile", "gap", "ulp")
def gap_leaves_its_region(p):
    tokens = p.buckets[0].stream(GAP_TOKENS)
    tokens.chunks[0] = tokens.chunks[0][:-1] + b"\x01"


@cases.each(
    {"too many": [17, 17, 17], "too few": [1, 1, 1], "none": [0, 0, 0]}, InvalidField, "tile counts", "gap", "ulp"
)
def tile_counts(p, counts):
    tiles(p, counts)


@cases.forged(InvalidField, "bucket 1: stream 4: number 1 is past its limit", "gap", "ulp")
def tile_count_above_the_tile(p):
    p.buckets[1].stream(TILE_TOKENS).chunks[0] = bytes((1, 16 + 4 * 7, 1))  # 2048, in a tile of 1024
    replace_stream(p.buckets[1], TILE_LOWS, bytes(2))


@cases.each({"1024": 16 + 4 * 6, "2^31": 16 + 4 * 27, "2^63": 255}, InvalidField, "stream 6: number 0", "gap", "ulp")
def gap_above_the_tile(p, token):
    tokens = p.buckets[1].stream(GAP_TOKENS)
    tokens.chunks[0] = bytes((token,)) + tokens.chunks[0][1:]
    replace_stream(p.buckets[1], GAP_LOWS, bytes(100))


def tiles(p: Patch, counts: list[int]) -> None:
    """Other tile counts for `big`."""
    tokens = [forge_token(c) for c in counts]
    p.buckets[1].stream(TILE_TOKENS).chunks[0] = bytes(t for t, _, _ in tokens)
    string = length = 0
    for _, low, width in tokens:
        string |= low << length
        length += width
    replace_stream(p.buckets[1], TILE_LOWS, string.to_bytes((length + 7) // 8, "little"))


def forge_token(value: int) -> tuple[int, int, int]:
    if value < 16:
        return value, 0, 0
    exponent = value.bit_length() - 1
    return 16 + 4 * (exponent - 4) + (value >> (exponent - 2) & 3), value & ((1 << exponent - 2) - 1), exponent - 2


@cases.forged(InvalidField, "low bits do not match", "gap", "ulp")
def lows_missing(p):
    replace_stream(p.buckets[1], GAP_LOWS, b"")


@cases.forged(InvalidField, "low bits do not match", "gap", "ulp")
def lows_short(p):
    replace_stream(p.buckets[1], GAP_LOWS, p.buckets[1].stream(GAP_LOWS).chunks[0][:-1])


@cases.each({"zero": b"\0", "one": b"\x01", "many": bytes(32)}, InvalidField, "low bits", "gap", "ulp")
def lows_long(p, extra):
    replace_stream(p.buckets[1], GAP_LOWS, p.buckets[1].stream(GAP_LOWS).chunks[0] + extra)


@cases.forged(InvalidField, "low bits", "gap", "ulp")
def lows_longer_than_any_tokens(p):
    replace_stream(p.buckets[1], GAP_LOWS, bytes(1 << 16))


@cases.forged(InvalidField, "low bits do not match", "gap", "ulp")
def lows_padding_not_zero(p):
    lows = bytearray(p.buckets[1].stream(GAP_LOWS).chunks[0])
    bits = sum(max(0, (t - 16) // 4 + 2) for t in p.buckets[1].stream(GAP_TOKENS).chunks[0] if t >= 16)
    assert bits % 8, "the sample has no padding to attack"
    lows[-1] |= 0x80
    replace_stream(p.buckets[1], GAP_LOWS, bytes(lows))


@cases.forged(InvalidField, "low bits is coded", "gap", "ulp")
def lows_coded(p):
    p.buckets[1].stream(GAP_LOWS).coder = 1


@cases.forged(InvalidField, "low bits do not match", "gap", "ulp")
def lows_where_no_token_has_any(p):
    p.buckets[0].streams = [s for s in p.buckets[0].streams if s.id != GAP_LOWS]
    tokens = p.buckets[0].stream(GAP_TOKENS)
    tokens.chunks[0] = bytes(len(tokens.chunks[0]))
    p.buckets[0].streams.append(Stream(GAP_LOWS, [b"\0"]))
    p.buckets[0].streams.sort(key=lambda s: s.id)


@cases.each({"17 bits": 16 + 4 * 12, "33 bits": 16 + 4 * 28, "64 bits": 255}, InvalidField, "stream 8: number 0", "ulp")
def step_wider_than_the_dtype(p, token):
    tokens = p.buckets[0].stream(STEP_TOKENS)
    tokens.chunks[0] = bytes((token,)) + tokens.chunks[0][1:]
    p.buckets[0].streams.append(Stream(STEP_LOWS, [bytes(((token - 16) // 4 + 2 + 7) // 8)]))


@cases.forged(InvalidField, "stream 8", "ulp")
def step_lows_missing(p):
    p.buckets[2].streams = [s for s in p.buckets[2].streams if s.id != STEP_LOWS]


@cases.forged(Truncated, "stream 17", "gap")
def plane_missing(p):
    p.buckets[0].streams = [s for s in p.buckets[0].streams if s.id != 17]


@cases.forged(InvalidField, "stream 18 holds 1", "gap")
def plane_of_a_wider_dtype(p):
    p.buckets[0].streams.append(Stream(18, [p.buckets[0].stream(17).chunks[0]]))


@cases.each({"short": -1, "long": 1}, InvalidField, "instead of 30")
def dense_of_another_length(p, by):
    stream = p.buckets[3].streams[0]
    stream.chunks[0] = (stream.chunks[0] + b"\0")[: len(stream.chunks[0]) + by]


@cases.forged(Truncated, "bucket 3")
def dense_missing(p):
    p.buckets[3].streams = []


@cases.forged(InvalidField, "the changes lead to digest")
def dense_of_other_bits(p):
    chunk = bytearray(p.buckets[3].streams[0].chunks[0])
    chunk[7] ^= 1
    p.buckets[3].streams[0].chunks[0] = bytes(chunk)


@cases.forged(InvalidField, "the changes lead to digest")
def words_of_other_bits(p):
    chunk = bytearray(p.buckets[1].streams[-1].chunks[0])
    chunk[3] ^= 2
    p.buckets[1].streams[-1].chunks[0] = bytes(chunk)


@cases.forged(InvalidField, "the changes lead to digest", "raw")
def positions_of_other_elements(p):
    stream = p.buckets[1].stream(1)
    stream.chunks[0] = stream.chunks[0][:-4] + (2098).to_bytes(4, "little")


@cases.forged(InvalidField, "the changes lead to digest")
def region_moved(p):
    p.buckets[0].columns.boxes[5] += 1


@cases.each({"garbage": b"garbage", "zeros": bytes(12), "empty": b""}, InvalidField, "bucket 1: stream")
def zstd_chunk_is_no_frame(p, coded):
    bucket = p.buckets[1]
    stream = bucket.stream(FIRST[bucket.profile])
    pad = b"" if coded else b"\0"  # an empty stream would be refused before
    stream.coder, stream.coded = 1, lambda: [coded, pad] if pad else [coded]


@cases.each({"more": b"\0", "less": None}, InvalidField, "zstd chunk")
def zstd_chunk_of_another_length(p, extra):
    bucket = p.buckets[1]
    stream = bucket.stream(FIRST[bucket.profile])
    raw = stream.chunks[0][:-1] if extra is None else stream.chunks[0] + extra
    stream.coder, stream.chunks = 1, [raw]


@cases.each(
    {"content size": {"write_content_size": True}, "checksum": {"write_checksum": True}}, InvalidField, "leaves out"
)
def zstd_frame_with(p, parameters):
    bucket = p.buckets[1]
    stream = bucket.stream(FIRST[bucket.profile])
    coded = squeeze(stream.chunks[0], **parameters)
    stream.coder, stream.coded = 1, lambda: [coded]


@pytest.mark.parametrize(("profile", "change", "error", "match"), cases)
def test_a_change_that_lies_is_refused(profile, change, error, match):
    """Every checksum holds, yet the lie is named, the weights stay as they are, and it takes no time to speak of."""
    refuse(profile, change, error, match)
