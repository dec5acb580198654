"""Buckets as bytes: a literal one, and round trips of everything a head can say."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparserl import Region, TensorSpec, TensorTable, codec
from sparserl.codec import Stream, value
from sparserl.errors import ChecksumMismatch, InvalidField, LimitExceeded, UnsupportedFormat
from sparserl.patch.decode import decode
from sparserl.weights.dtypes import BY_NAME
from sparserl.weights.local import LocalWeights
from sparserl.wire import EncodedStreams, Entries, Head, decode_bucket, encode_bucket, limits
from sparserl.wire.cursor import checksum
from sparserl.wire.table import encode_table, table_hash

U8 = BY_NAME["uint8"]
TABLE = TensorTable([TensorSpec("a", U8, (4, 5)), TensorSpec("b", U8, (3000,)), TensorSpec("c", U8, ())])
HASH = table_hash(encode_table(TABLE))
WEIGHTS = {s.name: np.random.default_rng(1).integers(0, 256, s.shape, np.uint8) for s in TABLE.specs}
BASE = LocalWeights.of({name: np.asarray(bits, np.uint8) for name, bits in WEIGHTS.items()}, TABLE)

LITERAL = (
    b"SRLB\x01\x00\x01\x00"
    + HASH
    + b"\x02\x08\x10\x10"  # two entries in eight bytes, tiles of 2^16, chunks of 2^16
    + b"\x01\x02\x83\x01"  # one estimate: profile 2, 131 bytes
    + b"\x04"
    + b"\x00\x00\x01\x08"
    + b"\x01\x00\x01\x08"
    + b"\x02\x00\x01\x02"
    + b"\x0a\x00\x01\x01"
    + b"\x00\x02\x09\x06"  # tensor 0, then 2; two sparse changes in a box, one dense change
    + b"\x01\x00\x02\x05"  # the box
    + b"\x00\x00\x00\x00\x09\x00\x00\x00"
    + b"\x11\x22"
    + b"\x33"
)


def entries(*rows):
    """Rows of (tensor, region, count, dense) as columns."""
    numel = [TABLE[t].numel if r is None else r.numel for t, r, _, _ in rows]
    return Entries(
        np.array([r[0] for r in rows], np.int64),
        np.array([r[2] for r in rows], np.int64),
        np.array([r[3] for r in rows], bool),
        [r[1] for r in rows],
        np.array(numel, np.int64),
    )


def bucket(profile, rows, positions, words, dense, tile_log=16, chunk_log=16, estimates=()):
    """A bucket of uint8 changes, as bytes."""
    head = Head(codec.profile_by_name(profile), U8, tile_log, chunk_log, estimates, entries(*rows))
    sparse = [(tensor, region) for tensor, region, _, dense in rows if not dense]
    bits = [BASE.bits(*place).copy() for place in sparse]
    old = np.array([b.ctypes.data for b in bits], np.int64)
    layout = replace(head.layout, old_addresses=old, classes=codec.Classes(2, (9, 40)))
    streams = head.profile.encode(layout, [positions], [words]) if len(positions) else {}
    if len(dense):
        writer = value.write_planes if head.profile.planar else value.write_words
        streams |= writer(head.layout, dense, Stream.DENSE_PLANE if head.profile.planar else Stream.DENSE)
    return encode_bucket(head, codec.encode_streams(streams), HASH)


def test_a_bucket_is_these_bytes():
    """Written by hand, field by field: the same bytes come out, and say the same."""
    data = bucket(
        "raw",
        [(0, Region((1, 0), (2, 5)), 2, False), (2, None, 1, True)],
        np.array([0, 9], np.uint32),
        np.array([0x11, 0x22], np.uint8),
        np.array([0x33], np.uint8),
        estimates=((2, 131),),
    )
    assert data == LITERAL + checksum(LITERAL)
    head, reader = decode_bucket(data, TABLE, HASH, "bucket 7")
    assert (head.profile.name, head.dtype, head.tile_log, head.chunk_log) == ("raw", U8, 16, 16)
    assert head.estimates == ((2, 131),)
    assert head.entries.region == [Region((1, 0), (2, 5)), None]
    assert head.entries.tensor.tolist() == [0, 2]
    assert head.entries.count.tolist() == [2, 1]
    assert head.entries.dense.tolist() == [False, True]
    assert head.entries.numel.tolist() == [10, 1]
    assert (head.dense_bytes, head.dense_elements) == (1, 1)
    decoded = decode(head, reader)
    assert (decoded.positions.tolist(), decoded.words.tolist(), decoded.dense.tolist()) == (
        [0, 9],
        [0x11, 0x22],
        [0x33],
    )


regions = {
    0: st.sampled_from([None, Region((0, 0), (4, 4)), Region((2, 1), (1, 3)), Region((3, 0), (1, 5))]),
    1: st.sampled_from([None, Region((0,), (1,)), Region((1000,), (2000,)), Region((7,), (1025,))]),
    2: st.none(),
}


@st.composite
def contents(draw):
    """Entries for one to three tensors with their changes."""
    rows, positions, words, dense = [], [], [], []
    for tensor in sorted(draw(st.sets(st.integers(0, 2), min_size=1))):
        region = draw(regions[tensor])
        numel = TABLE[tensor].numel if region is None else region.numel
        where = sorted(draw(st.sets(st.integers(0, numel - 1), min_size=1, max_size=30)))
        is_dense = draw(st.booleans())
        rows.append((tensor, region, len(where), is_dense))
        random = np.random.default_rng(draw(st.integers(0, 99)))
        bits = random.integers(0, 256, numel if is_dense else len(where), np.uint8)
        if is_dense:
            dense.append(bits)
        else:
            positions.append(np.array(where, np.uint32))
            words.append(bits)
    nothing = np.empty(0, np.uint8)
    return (
        rows,
        np.concatenate([np.empty(0, np.uint32), *positions]),
        np.concatenate([nothing, *words]),
        np.concatenate([nothing, *dense]),
    )


@given(
    contents(),
    st.sampled_from(sorted(codec.PROFILES)),
    st.integers(limits.MIN_TILE_LOG, limits.MAX_TILE_LOG),
    st.sampled_from([limits.MIN_CHUNK_LOG, 9, limits.MAX_CHUNK_LOG]),
    st.lists(st.tuples(st.integers(0, 255), st.integers(0, 1 << 62)), max_size=16).map(tuple),
)
def test_buckets_round_trip(content, profile, tile_log, chunk_log, estimates):
    """Whatever goes into a bucket comes out of it, in every profile, tile and chunk size."""
    rows, positions, words, dense = content
    data = bucket(profile, *content, tile_log, chunk_log, estimates)
    head, reader = decode_bucket(data, TABLE, HASH, "bucket 0")
    assert head.estimates == estimates
    found = head.entries
    columns = (found.tensor.tolist(), found.region, found.count.tolist(), found.dense.tolist())
    assert list(zip(*columns, strict=True)) == rows
    decoded = decode(head, reader, BASE).in_order()
    assert decoded.positions.tolist() == positions.tolist()
    assert decoded.words.tolist() == words.tolist()
    assert decoded.dense.tolist() == dense.tolist()


def whole_of_b(**changes):
    """A bucket of one change, some of whose bytes are then replaced and sealed anew."""
    data = bytearray(bucket("gap", [(1, None, 1, False)], np.array([5], np.uint32), np.array([9], np.uint8), []))[:-16]
    for at, byte in changes.items():
        data[int(at[1:])] = byte
    return bytes(data) + checksum(data)


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"_0": 0}, InvalidField, "bucket 3: not a bucket"),
        ({"_4": 2}, UnsupportedFormat, "bucket 3: format version 2; this release reads 1"),
        ({"_5": 4}, UnsupportedFormat, "unknown profile id 4"),
        ({"_6": 99}, UnsupportedFormat, "bucket 3: unknown dtype 99"),
        ({"_7": 4}, UnsupportedFormat, "bucket 3: unknown required features 0b00000100"),
        ({"_8": 0}, InvalidField, "bucket 3: belongs to another tensor table"),
        ({"_24": 0}, InvalidField, "bucket 3: no entries"),
        ({"_26": 32}, LimitExceeded, r"bucket 3: tile size 2\^32 is not between 2\^10 and 2\^31"),
        ({"_27": 3}, LimitExceeded, r"bucket 3: chunk size 2\^3 is not between 2\^8 and 2\^24"),
    ],
)
def test_what_is_refused_and_why(changes, error, match):
    """One error for each field of the head, saying which bucket and what is wrong."""
    with pytest.raises(error, match=match):
        decode_bucket(whole_of_b(**changes), TABLE, HASH, "bucket 3")


def test_the_checksum_comes_first():
    """Nothing of a bucket is believed before its checksum holds."""
    with pytest.raises(ChecksumMismatch, match="bucket 3"):
        decode_bucket(b"nonsense" + bytes(30), TABLE, HASH, "bucket 3")


def test_buckets_past_the_limit_are_not_even_summed():
    """A bucket that is too long is refused by its length."""
    with pytest.raises(LimitExceeded, match="bucket 3: 268435457 bytes, the limit is 268435456"):
        decode_bucket(bytes(limits.BUCKET_BYTES + 1), TABLE, HASH, "bucket 3")


@pytest.mark.parametrize(("before", "behind"), [(200, 16), (200, 15), (9, 16), (0, 0)])
def test_streams_that_lie_together(before, behind):
    """Encoded streams make the same bucket, in their own memory if its margins are large enough."""
    head = Head(codec.profile_by_name("raw"), U8, 16, 16, (), entries((0, None, 3, False), (1, None, 2, False)))
    positions, words = np.array([0, 5, 9, 7, 8], np.uint32), np.arange(5, dtype=np.uint8)
    streams = codec.encode_streams(head.profile.encode(head.layout, [positions], [words]))
    expected = encode_bucket(head, streams, HASH)
    body = b"".join(chunk for _, chunks in streams.values() for chunk in chunks)
    numbers = [n for id, (coder, its) in sorted(streams.items()) for n in (id, coder.id, len(its), *map(len, its))]
    room = np.full(before + len(body) + behind, 0xA5, np.uint8)
    room[before : before + len(body)] = np.frombuffer(body, np.uint8)
    encoded = EncodedStreams(2, numbers, room.data, before, before + len(body))
    made = encode_bucket(head, {}, HASH, encoded)
    assert bytes(made) == expected
    assert np.shares_memory(np.frombuffer(made, np.uint8), room) == ((before, behind) == (200, 16))
    assert bytes(encode_bucket(head, {}, HASH, encoded.without_margins)) == expected
