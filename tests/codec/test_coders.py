"""Coders give back the bytes of a stream, and low bits their numbers."""

from __future__ import annotations

import ctypes
import importlib

import numpy as np
import pytest
import zstandard

from sparserl import codec
from sparserl.codec import AdjacentChunks, Reader, Stream
from sparserl.codec.coders import CODERS, Rans, Stored, Zstd, encode_smallest
from sparserl.errors import InvalidField, Truncated
from tests.codec.placed_changes import full


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Buffers that are to be filled start full of a pattern, so that whatever is forgotten shows."""
    for module in ("streams", "profile", "index", "numbers", "value", "ctx"):
        monkeypatch.setattr(importlib.import_module(f"sparserl.codec.{module}"), "empty", full)


SAMPLES = [b"", b"\0", b"abc", bytes(1000), bytes(range(256)) * 40, np.random.default_rng(0).bytes(70_000)]


@pytest.mark.parametrize("coder", CODERS.values(), ids=lambda c: c.name)
@pytest.mark.parametrize("raw", SAMPLES, ids=len)
def test_coders_give_back_exactly_the_bytes(coder, raw):
    """Bytes and views alike; any other size than the true one is an error."""
    for given_as in (raw, memoryview(raw)):
        coded = bytes(coder.encode(given_as))
        assert bytes(coder.decode(coded, len(raw))) == raw
        assert bytes(coder.decode(memoryview(coded), len(raw))) == raw
    for size in (len(raw) - 1, len(raw) + 1, 0, 2 * len(raw) + 7):
        if size < 0 or size == len(raw):
            continue
        if coder == Rans() and len(set(raw)) < 2:  # a symbol that is certain takes no bits, however often it comes
            assert bytes(coder.decode(coded, size)) == (raw[:1] or b"\0") * size
            continue
        with pytest.raises(InvalidField):
            coder.decode(coded, size)


def test_zstd_takes_only_bare_frames():
    """No size, checksum or dictionary in the frame, nothing behind it, no second one, nothing cut off."""
    raw = b"sparse" * 500
    coded = bytes(Zstd().encode(raw))
    assert bytes(Zstd().decode(coded, len(raw))) == raw
    plain = zstandard.ZstdCompressor().compress(raw)
    for bad in (b"", plain, coded[:-1], coded + b"\0", coded + coded, b"\xff" + coded[1:]):
        with pytest.raises(InvalidField):
            Zstd().decode(bad, len(raw))


def test_the_coder_is_the_one_that_makes_a_stream_smaller():
    """Skewed symbols take rans, repeated strings zstd; bytes that do not shrink are stored as they are."""
    rng = np.random.default_rng(1)
    noise, skewed, repeated = rng.bytes(5000), rng.geometric(0.9, 5000).astype(np.uint8).tobytes(), rng.bytes(100) * 50
    assert encode_smallest([noise]) == (Stored(), [noise])
    for raw, best in ((skewed, Rans()), (bytes(5000), Rans()), (repeated, Zstd())):
        coder, chunks = encode_smallest([raw, raw])
        assert coder == best
        assert [bytes(coder.decode(chunk, 5000)) for chunk in chunks] == [raw, raw]
        assert sum(map(len, chunks)) < 2000
    assert encode_smallest([b""])[0] == Stored()


def test_code_leaves_out_empty_streams():
    """A stream without bytes is not written, and reads as empty."""
    coded = codec.encode_streams({Stream.TILE_TOKENS: [b"", b""], Stream.GAP_TOKENS: [b"abc"], Stream.WORDS: []})
    assert set(coded) == {Stream.GAP_TOKENS}
    reader = Reader(coded)
    assert reader.take(Stream.TILE_TOKENS, 0) == b""
    assert reader.take_stored(Stream.TILE_LOWS, 100) == b""
    with pytest.raises(Truncated, match="stream 4"):
        reader.take(Stream.TILE_TOKENS, 1)
    assert bytes(reader.take(Stream.GAP_TOKENS, 3)) == b"abc"
    with pytest.raises(Truncated, match="stream 6"):
        reader.take(Stream.GAP_TOKENS, 3)
    reader.finish()


def test_low_bits_are_stored_and_bounded():
    """A chunk of low bits speaks for its own length, so it may be neither coded nor longer than can be."""
    reader = Reader({Stream.GAP_LOWS: (Stored(), [b"1234"]), Stream.STEP_LOWS: (Zstd(), [b"1234"])})
    with pytest.raises(InvalidField, match="longer than 3"):
        reader.take_stored(Stream.GAP_LOWS, 3)
    with pytest.raises(InvalidField, match="coded"):
        reader.take_stored(Stream.STEP_LOWS, 100)


def laid(coded, body=bytes):
    """A reader of chunks that lie one behind the other, as those of a bucket do."""
    whole = memoryview(body(b"?" + b"".join(bytes(c) for _, chunks in coded.values() for c in chunks)))[1:]
    at, placed = 0, {}
    for stream, (coder, chunks) in coded.items():
        sizes = np.array([len(chunk) for chunk in chunks])
        placed[stream] = coder, AdjacentChunks(whole[at : at + sizes.sum()], sizes)
        at += sizes.sum()
    return Reader(placed), whole


@pytest.mark.parametrize("body", [bytes, bytearray])
@pytest.mark.parametrize("lend", [False, True])
def test_items_are_lent_where_nobody_can_change_them(body, lend):
    """Positions that were checked must stay what they were: only of bytes that cannot change are they no copy."""
    items = np.arange(5, dtype="<u4") * 7
    coded = {
        Stream.ENTRIES: (Stored(), [b"abc"]),
        Stream.POSITIONS: (Stored(), [items[:4].tobytes(), items[4:].tobytes()]),
    }
    reader, whole = laid(coded, body)
    found = reader.take_items(Stream.POSITIONS, np.dtype("<u4"), [4, 1], lend)
    assert found.tolist() == items.tolist()
    assert np.shares_memory(found, np.frombuffer(whole, np.uint8)) == (lend and body is bytes)
    with pytest.raises(InvalidField, match="stream 1"):
        laid(coded, body)[0].take_items(Stream.POSITIONS, np.dtype("<u4"), [5], lend)
    squeezed = {Stream.WORDS: (Zstd(), [Zstd().encode(items.tobytes())])}
    assert laid(squeezed, body)[0].take_items(Stream.WORDS, items.dtype, [5], lend).tolist() == items.tolist()


def test_what_was_decoded_ahead_is_what_is_taken():
    """Chunks of several streams decoded in one go: the same bytes, and the same errors from the same chunks."""
    rng = np.random.default_rng(3)
    sizes = {Stream.GAP_TOKENS: [65536, 40000, 9], Stream.STEP_TOKENS: [33000, 70001], Stream.TILE_TOKENS: [77]}
    raw = {s: [rng.integers(0, 9, n, np.uint8).tobytes() for n in each] for s, each in sizes.items()}
    coders = {Stream.GAP_TOKENS: Rans(), Stream.STEP_TOKENS: Rans(), Stream.TILE_TOKENS: Zstd()}
    coded = {s: (coders[s], [bytes(coders[s].encode(r)) for r in each]) for s, each in raw.items()}
    reader = Reader(coded)
    reader.decode_ahead({**sizes, Stream.GAP_LOWS: [5]})
    for stream, each in raw.items():
        assert reader.take_all(stream, sizes[stream]).tobytes() == b"".join(each)
    reader.finish()
    broken = bytearray(coded[Stream.STEP_TOKENS][1][1])
    broken[-5] ^= 4
    coded[Stream.STEP_TOKENS][1][1] = bytes(broken)
    reader = Reader(coded)
    reader.decode_ahead(sizes)
    with pytest.raises(InvalidField, match="stream 8: a rans chunk"):
        reader.take_all(Stream.STEP_TOKENS, sizes[Stream.STEP_TOKENS])
    reader = Reader(coded)
    reader.decode_ahead({Stream.GAP_TOKENS: sizes[Stream.GAP_TOKENS]})
    with pytest.raises(InvalidField, match="stream 6"):
        reader.take_all(Stream.GAP_TOKENS, [65535, 40000, 9])
    reader = Reader(coded)
    reader.decode_ahead({Stream.GAP_TOKENS: sizes[Stream.GAP_TOKENS][:2]})  # as if there were no third chunk
    assert reader.take_all(Stream.GAP_TOKENS, sizes[Stream.GAP_TOKENS][:2]).size == 105_536
    with pytest.raises(InvalidField, match="1 chunk"):
        reader.finish()


@pytest.mark.parametrize("row", [False, True])
def test_low_bits_of_many_chunks_at_once(row):
    """Where they lie, and the same errors as one by one."""

    def reader(coder):
        parts = [b"1234", b"", b"56"]
        chunks = AdjacentChunks(memoryview(b"".join(parts)), np.array([4, 0, 2])) if row else parts
        return Reader({Stream.GAP_LOWS: (coder, chunks)})

    found = reader(Stored()).take_all_stored(Stream.GAP_LOWS, [4, 4, 4])
    assert found.length.tolist() == [4, 0, 2]
    assert [ctypes.string_at(a, n) for a, n in zip(found.address.tolist(), found.length.tolist(), strict=True)] == [
        b"1234",
        b"",
        b"56",
    ]
    assert reader(Stored()).take_all_stored(Stream.STEP_LOWS, [4, 4]).length.tolist() == [0, 0]
    with pytest.raises(InvalidField, match="longer than 3"):
        reader(Stored()).take_all_stored(Stream.GAP_LOWS, [3, 4, 4])
    with pytest.raises(InvalidField, match="coded"):
        reader(Zstd()).take_all_stored(Stream.GAP_LOWS, [4, 4, 4])
    with pytest.raises(Truncated, match="ends before"):
        reader(Stored()).take_all_stored(Stream.GAP_LOWS, [4, 4, 4, 4])
    some = reader(Stored())
    some.take_all_stored(Stream.GAP_LOWS, [4, 4])
    with pytest.raises(InvalidField, match="1 chunk"):
        some.finish()
