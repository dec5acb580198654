"""Profiles, streams and coders: what goes in comes out, what is not known or does not fit is refused."""

from __future__ import annotations

import ctypes
import importlib
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from sparserl import codec
from sparserl.codec import Classes, Found, Layout, Reader, Row, Stream, numbers, value
from sparserl.codec.coders import CODERS, Rans, Stored, Zstd, squeeze
from sparserl.errors import InvalidField, NeedsBase, Truncated, UnsupportedFormat
from sparserl.kernels import reference
from sparserl.weights.dtypes import BY_NAME, DTYPES

each_profile = pytest.mark.parametrize("profile", codec.PROFILES.values(), ids=lambda p: p.name)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=repr)


def full(count, dtype):
    """An array to be filled that is full of a pattern."""
    out = np.empty(count, dtype)
    out.view(np.uint8)[:] = 0xA5
    return out


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Buffers that are to be filled start full of a pattern, so that whatever is forgotten shows."""
    for module in ("streams", "profile", "index", "numbers", "value", "ctx"):
        monkeypatch.setattr(importlib.import_module(f"sparserl.codec.{module}"), "empty", full)


@dataclass(frozen=True)
class Placed(Layout):
    """A layout with the old bits that it names."""

    bits: list = field(default_factory=list)


def random_classes(rng, dtype):
    """One to seven thresholds that fit the dtype."""
    shift = int(rng.integers(0, 8 * dtype.width - 6))
    most = min(511, ((1 << (8 * dtype.width)) - 1) >> shift)
    picked = rng.choice(np.arange(1, most + 1), min(most, int(rng.integers(1, 8))), replace=False)
    return Classes(shift, tuple(sorted(picked.tolist())))


def made(seed, dtype, sizes, density, tile_log=10, chunk_log=8):
    """Random changes in regions of the given sizes, and the layout that both sides know."""
    rng = np.random.default_rng(seed)
    bits = [rng.integers(0, 256, n * dtype.width, np.uint8).view(dtype.uint) for n in sizes]
    old = np.array([b.ctypes.data for b in bits], np.int64)
    where = [np.flatnonzero(rng.random(n) < density) for n in sizes]
    where = [w if w.size else np.array([n - 1]) for w, n in zip(where, sizes, strict=True)]
    positions = np.concatenate(where).astype(np.uint32)
    words = rng.integers(0, 256, positions.size * dtype.width, np.uint8).view(dtype.uint)
    small = rng.integers(1, 5, positions.size).astype(dtype.uint)
    words = np.where(rng.random(positions.size) < 0.5, words, small)
    counts = np.array([w.size for w in where], np.int64)
    known = np.array(sizes, np.int64), counts, tile_log, chunk_log, old, random_classes(rng, dtype)
    return Placed(dtype, *known, room=full, bits=bits), positions, words


def there_and_back(profile, layout, positions, words):
    coded = codec.code(profile.encode(layout, [positions], [words]))
    coded = {id: (c, [bytes(chunk) for chunk in chunks]) for id, (c, chunks) in coded.items()}
    reader = Reader(coded)
    out = profile.decode(replace(layout, classes=None), reader)
    reader.finish()
    return coded, in_order(layout, out) if profile.conditional else out


def read_all(profile, layout, reader):
    profile.decode(layout, reader)
    reader.finish()


def in_order(layout, found):
    """The changes of each entry by position; `ctx` finds them in another order."""
    order = np.lexsort((found.positions, np.repeat(np.arange(layout.count.size), layout.count)))
    return Found(*(column[order] for column in found))


@each_profile
@each_dtype
def test_profiles_give_back_what_they_were_given(profile, dtype):
    """Positions and words of many regions, over several tiles and chunks, from almost none to all of the elements."""
    sizes = (1, 5, 1023, 1024, 1025, 4000, 2, 2048)
    for seed, density in enumerate((0.0, 0.01, 0.3, 1.0)):
        layout, positions, words = made(seed, dtype, sizes, density)
        _, found = there_and_back(profile, layout, positions, words)
        assert found.positions.dtype == np.uint32
        assert found.words.dtype == dtype.uint
        assert (found.positions == positions).all()
        assert (found.words == words).all()
        assert (found.old is not None) is profile.conditional
        if found.old is not None:
            owner = np.repeat(np.arange(len(sizes)), layout.count).tolist()
            expected = [layout.bits[e][p] for e, p in zip(owner, positions.tolist(), strict=True)]
            assert (found.old == np.array(expected, dtype.uint)).all()


@each_profile
def test_parts_are_written_as_if_they_were_joined(profile):
    """However the changes of some entries are put together, the streams are the same."""
    layout, positions, words = made(4, BY_NAME["bfloat16"], (3000, 5, 1024, 4000, 700, 1), 0.1)
    whole = codec.code(profile.encode(layout, [positions], [words]))
    ends = np.cumsum(layout.count)
    for cuts in (ends[:-1], ends[[0, 2]], ends[[3]]):
        parts = codec.code(profile.encode(layout, np.split(positions, cuts), np.split(words, cuts)))
        assert {id: [bytes(c) for c in chunks] for id, (_, chunks) in parts.items()} == {
            id: [bytes(c) for c in chunks] for id, (_, chunks) in whole.items()
        }


@given(
    st.sampled_from(list(codec.PROFILES.values())),
    st.sampled_from(DTYPES),
    st.integers(0, 2**32),
    st.lists(st.integers(1, 3000), min_size=1, max_size=8),
    st.floats(0, 1),
    st.integers(10, 13),
    st.integers(8, 12),
)
@settings(deadline=None, max_examples=100)
def test_profiles_under_any_layout(profile, dtype, seed, sizes, density, tile_log, chunk_log):
    """However streams are cut into tiles and chunks."""
    layout, positions, words = made(seed, dtype, sizes, density, tile_log, chunk_log)
    _, found = there_and_back(profile, layout, positions, words)
    assert (found.positions == positions).all()
    assert (found.words == words).all()


@pytest.mark.parametrize("profile", ["raw", "gap", "ulp"])
def test_chunks_are_cut_where_the_layout_says(profile):
    """Each stream is cut every 2^chunk_log things; without that the directory could not be checked."""
    layout, positions, words = made(1, BY_NAME["uint16"], (4000, 3000), 0.2)
    coded, _ = there_and_back(codec.profile(profile), layout, positions, words)
    whole, rest = divmod(positions.size, 1 << 8)
    for id, (_, chunks) in coded.items():
        if id not in (Stream.TILE_TOKENS, Stream.TILE_LOWS):
            assert len(chunks) == whole + bool(rest), id


@each_profile
def test_every_stream_is_needed(profile):
    """Without its last chunk, with a chunk too many, or with a byte too many a stream is refused, not guessed."""
    layout, positions, words = made(2, BY_NAME["float32"], (4000, 3000), 0.2)
    coded, _ = there_and_back(profile, layout, positions, words)
    for id, (coder, chunks) in coded.items():
        shorter = {**coded, id: (coder, chunks[:-1])}
        with pytest.raises((Truncated, InvalidField)):
            profile.decode(layout, Reader(shorter))
        longer = Reader({**coded, id: (coder, [*chunks, chunks[-1]])})
        with pytest.raises(InvalidField, match=f"stream {int(id)} holds 1 chunk"):
            read_all(profile, layout, longer)
        fatter = Reader({**coded, id: (coder, [chunks[0] + b"\0", *chunks[1:]])})
        with pytest.raises(InvalidField):
            profile.decode(layout, fatter)
        missing = Reader({k: v for k, v in coded.items() if k != id})
        with pytest.raises((Truncated, InvalidField)):
            profile.decode(layout, missing)


def test_positions_out_of_range_are_refused():
    """Positions that do not rise, or leave their region, name the entry at fault."""
    layout = Layout(BY_NAME["uint8"], np.array([10, 10]), np.array([2, 2]), 10, 8)
    words = np.arange(4, dtype=np.uint8)
    for positions, bad in (([0, 5, 3, 10], 1), ([5, 5, 0, 1], 0), ([5, 4, 0, 1], 0), ([0, 10, 0, 1], 0)):
        coded = codec.code(codec.profile("raw").encode(layout, [np.array(positions, np.uint32)], [words]))
        with pytest.raises(InvalidField, match=f"entry {bad}"):
            codec.profile("raw").decode(layout, Reader(coded))


def test_gaps_and_counts_out_of_range_are_refused():
    """Tile counts that do not add up to the entry's, and gaps past the end of a region, are found."""
    layout, positions, words = made(3, BY_NAME["uint8"], (3000, 50), 0.1)
    coded = codec.code(codec.profile("gap").encode(layout, [positions], [words]))
    for numel, count in (
        (layout.numel, layout.count + np.array([1, -1])),
        (layout.numel, layout.count + np.array([-1, 1])),
        (np.array([int(positions[layout.count[0] - 1]), 50]), layout.count),
    ):
        wrong = Layout(layout.dtype, numel, count, layout.tile_log, layout.chunk_log)
        with pytest.raises(InvalidField, match="entry"):
            codec.profile("gap").decode(wrong, Reader(coded))


def test_steps_wider_than_the_element_are_refused():
    """A step must fit the width it is taken in."""
    layout = Layout(BY_NAME["uint8"], np.array([10]), np.array([2]), 10, 8)
    wide = numbers.write(layout, np.array([3, 256], np.uint16), Stream.STEP_TOKENS, Stream.STEP_LOWS)
    gaps = codec.profile("ulp").encode(layout, [np.array([1, 2], np.uint32)], [np.array([3, 4], np.uint8)])
    with pytest.raises(InvalidField, match="number 1"):
        codec.profile("ulp").decode(layout, Reader(codec.code({**gaps, **wide})))


@each_dtype
def test_planes_are_those_of_the_specification(dtype):
    """One stream per byte of a word, all lowest bytes first."""
    words = np.arange(300, dtype=np.uint16).astype(dtype.uint) * dtype.uint.type(77)
    layout = Layout(dtype, np.array([300]), np.array([300]), 10, 16)
    written = value.write_planes(layout, words, Stream.WORD_PLANE)
    planes = [b"".join(bytes(chunk) for chunk in written[Stream.WORD_PLANE + i]) for i in range(dtype.width)]
    assert planes == [plane.tobytes() for plane in reference.planes(words)]
    assert (value.read_planes(layout, Reader(codec.code(written)), 300, Stream.WORD_PLANE) == words).all()


def test_ids_are_those_of_the_format():
    """Profiles, coders and streams keep their ids for ever."""
    assert {p.name: p.id for p in codec.PROFILES.values()} == {"raw": 0, "gap": 1, "ulp": 2, "ctx": 3}
    assert {c.name: c.id for c in CODERS.values()} == {"stored": 0, "zstd": 1, "rans": 2}
    assert {s.name: int(s) for s in Stream} == {
        "ENTRIES": 0,
        "POSITIONS": 1,
        "WORDS": 2,
        "CLASSES": 3,
        "TILE_TOKENS": 4,
        "TILE_LOWS": 5,
        "GAP_TOKENS": 6,
        "GAP_LOWS": 7,
        "STEP_TOKENS": 8,
        "STEP_LOWS": 9,
        "DENSE": 10,
        "WORD_PLANE": 16,
        "DENSE_PLANE": 24,
        "CLASS": 64,
    }
    assert [id for id in range(256) if Stream.known(id)] == [*range(11), *range(16, 32), *range(64, 96)]
    assert [id for id in range(256) if Stream.is_dense(id)] == [10, *range(24, 32)]


@each_profile
def test_profiles_are_found_by_name_and_id(profile):
    """The registry gives back the one object; its repr says what it is."""
    assert codec.profile(profile.name) is profile
    assert codec.profile_by_id(profile.id) is profile
    assert repr(profile) == f"{type(profile).__name__}()"


@pytest.mark.parametrize("name", ["zip", "", "auto", "CTX", "RAW"])
def test_unknown_profiles_are_refused_by_name(name):
    """The error says which are known."""
    with pytest.raises(UnsupportedFormat, match=f"'{name}'; this release knows raw, gap, ulp, ctx"):
        codec.profile(name)


@pytest.mark.parametrize("id", [4, 5, 255])
def test_unknown_ids_are_refused(id):
    """What a newer release wrote is named as such: profiles and coders alike."""
    with pytest.raises(UnsupportedFormat, match=f"unknown profile id {id}; a newer sparserl"):
        codec.profile_by_id(id)
    with pytest.raises(UnsupportedFormat, match=f"unknown coder {id}; a newer sparserl"):
        codec.coder(id)


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
    assert squeeze([noise]) == (Stored(), [noise])
    for raw, best in ((skewed, Rans()), (bytes(5000), Rans()), (repeated, Zstd())):
        coder, chunks = squeeze([raw, raw])
        assert coder == best
        assert [bytes(coder.decode(chunk, 5000)) for chunk in chunks] == [raw, raw]
        assert sum(map(len, chunks)) < 2000
    assert squeeze([b""])[0] == Stored()


def test_code_leaves_out_empty_streams():
    """A stream without bytes is not written, and reads as empty."""
    coded = codec.code({Stream.TILE_TOKENS: [b"", b""], Stream.GAP_TOKENS: [b"abc"], Stream.WORDS: []})
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
        placed[stream] = coder, Row(whole[at : at + sizes.sum()], sizes)
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
        chunks = Row(memoryview(b"".join(parts)), np.array([4, 0, 2])) if row else parts
        return Reader({Stream.GAP_LOWS: (coder, chunks)})

    found = reader(Stored()).take_all_stored(Stream.GAP_LOWS, [4, 4, 4])
    assert found.length.tolist() == [4, 0, 2]
    assert [ctypes.string_at(a, n) for a, n in zip(found.at.tolist(), found.length.tolist(), strict=True)] == [
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


# Magnitude classes.


@pytest.mark.parametrize("chunk_log", [8, 16])
@pytest.mark.parametrize("name", ["float8_e5m2", "bfloat16", "int16", "uint32", "float64", "int64"])
def test_class_streams_are_those_of_the_specification(name, chunk_log):
    """Tile counts by class, gaps by class and steps by class, cut into chunks class by class."""
    dtype = BY_NAME[name]
    layout, positions, words = made(5, dtype, (4000, 700, 1024), 0.3, chunk_log=chunk_log)
    kind = "float" if dtype.sign_magnitude else "signed" if name.startswith("int") else "plain"
    thresholds = np.array(layout.classes.thresholds, np.uint64) << np.uint64(layout.classes.shift)
    counts, gaps, steps, at = [], [[] for _ in range(thresholds.size + 1)], [[] for _ in range(thresholds.size + 1)], 0
    for bits, count in zip(layout.bits, layout.count.tolist(), strict=True):
        sizes = reference.magnitude(bits, kind).astype(np.uint64)
        its_counts, its_gaps, owner = reference.class_gaps(sizes, positions[at : at + count], thresholds, 1024)
        counts += [n for tile in its_counts for n in tile]
        for c, more in enumerate(its_gaps):
            gaps[c] += more
        for c, word in zip(owner, words[at : at + count].tolist(), strict=True):
            steps[c].append(word)
        at += count
    written = codec.profile("ctx").encode(layout, [positions], [words])
    expected = {Stream.TILE_TOKENS: counts}
    for c in range(thresholds.size + 1):
        expected |= {Stream.CLASS + 4 * c: gaps[c], Stream.CLASS + 4 * c + 2: steps[c]}
    told = bytes(written.pop(Stream.CLASSES)[0])
    assert told == bytes((layout.classes.shift,)) + np.array(layout.classes.thresholds, "<u2").tobytes()
    assert written.keys() == {id + more for id in expected for more in (0, 1)}
    for id, values in expected.items():
        cuts = range(0, len(values), 1 << chunk_log)
        chunks = [reference.pack(np.array(values[i : i + (1 << chunk_log)], np.uint64)) for i in cuts]
        assert [bytes(c) for c in written[id]] == [tokens for tokens, _ in chunks]
        assert [bytes(c) for c in written[id + 1]] == [lows for _, lows in chunks]


def classes_chunk(shift, *thresholds):
    return bytes((shift,)) + np.array(thresholds, "<u2").tobytes()


@pytest.mark.parametrize(
    ("name", "chunk"),
    [
        ("bfloat16", b""),
        ("bfloat16", b"\0"),
        ("bfloat16", classes_chunk(0, 5) + b"\0"),
        ("bfloat16", classes_chunk(0, 5, 6)[:-1]),
        ("bfloat16", classes_chunk(0, 0)),
        ("bfloat16", classes_chunk(0, 0, 5)),
        ("bfloat16", classes_chunk(0, 5, 5)),
        ("bfloat16", classes_chunk(0, 6, 5)),
        ("bfloat16", classes_chunk(0, 1, 7, 3, 9)),
        ("bfloat16", classes_chunk(0, 512)),
        ("bfloat16", classes_chunk(0, 65535)),
        ("bfloat16", classes_chunk(8, 256)),
        ("bfloat16", classes_chunk(16, 1)),
        ("bfloat16", classes_chunk(255, 1)),
        ("uint8", classes_chunk(0, 256)),
        ("uint8", classes_chunk(1, 128)),
        ("float64", classes_chunk(56, 256)),
        ("float64", classes_chunk(64, 1)),
        ("float64", classes_chunk(0, 1, 2, 3, 4, 5, 6, 7, 8)),
    ],
)
def test_classes_that_make_no_sense_are_refused(name, chunk):
    """Unsorted, zero, past 511, out of the dtype's reach, of an even number of bytes, none, or too many."""
    layout, positions, words = made(6, BY_NAME[name], (300,), 0.2)
    layout = replace(layout, classes=Classes(0, (1, 9)))
    coded = codec.code(codec.profile("ctx").encode(layout, [positions], [words]))
    codec.profile("ctx").decode(layout, Reader(coded))
    with pytest.raises(InvalidField, match=r"classes|longer than 15"):
        codec.profile("ctx").decode(layout, Reader({**coded, Stream.CLASSES: (Stored(), [chunk])}))
    with pytest.raises(InvalidField, match="coded"):
        codec.profile("ctx").decode(layout, Reader({**coded, Stream.CLASSES: (Zstd(), [classes_chunk(0, 1, 9)])}))


@pytest.mark.parametrize(
    ("name", "classes"),
    [
        ("uint8", Classes(0, (255,))),
        ("int8", Classes(0, (1, 127, 128))),
        ("bool", Classes(0, (1,))),
        ("bfloat16", Classes(7, (1, 2, 3, 4, 5, 6, 511))),
        ("float64", Classes(55, (1, 511))),
        ("int64", Classes(55, (255, 256, 257))),
        ("uint64", Classes(63, (1,))),
    ],
)
def test_classes_at_the_edge_are_fine(name, classes):
    """The largest thresholds and shifts that a dtype can have."""
    layout, positions, words = made(7, BY_NAME[name], (3000, 64), 0.3)
    most = np.iinfo(layout.dtype.uint).max
    layout.bits[1][:] = np.resize(np.array([0, 1, most, most // 2, most // 2 + 1], layout.dtype.uint), 64)
    _, found = there_and_back(codec.profile("ctx"), replace(layout, classes=classes), positions, words)
    assert (found.positions == positions).all()
    assert (found.words == words).all()


def test_counts_of_classes_are_checked():
    """Counts by tile and class must add up to the entries, each and all, and their gaps must find members."""
    dtype = BY_NAME["uint16"]
    layout, positions, words = made(8, dtype, (3000, 50), 0.1)
    coded = codec.code(codec.profile("ctx").encode(layout, [positions], [words]))
    for count in (layout.count + np.array([1, 0]), layout.count - np.array([0, 1])):
        with pytest.raises(InvalidField, match="do not add up to those of the entries"):
            codec.profile("ctx").decode(replace(layout, count=count), Reader(coded))
    for count in (layout.count + np.array([1, -1]), layout.count + np.array([-1, 1])):
        with pytest.raises(InvalidField, match="sparse entry 0: tile counts do not add up"):
            codec.profile("ctx").decode(replace(layout, count=count), Reader(coded))
    last = int(positions[layout.count[0] - 1])
    with pytest.raises(InvalidField, match="sparse entry 0"):
        codec.profile("ctx").decode(replace(layout, numel=np.array([last, 50])), Reader(coded))


def test_other_old_bits_never_lead_out_of_a_region():
    """Whatever the old bits are, positions rise and stay inside, or the bucket is refused."""
    rng = np.random.default_rng(9)
    layout, positions, words = made(10, BY_NAME["bfloat16"], (3000, 50, 1024), 0.1)
    layout = replace(layout, classes=Classes(7, (100, 250)))
    coded = codec.code(codec.profile("ctx").encode(layout, [positions], [words]))
    refused = 0
    for flips in (1, 10, 1000):
        for _ in range(20):
            where = rng.integers(0, 3000, flips)
            saved = layout.bits[0].copy()
            layout.bits[0][where] ^= rng.integers(1, 1 << 16, flips).astype(np.uint16)
            try:
                found = in_order(layout, codec.profile("ctx").decode(layout, Reader(coded)))
            except InvalidField:
                refused += 1
            else:
                ends = np.cumsum(layout.count)
                for part, numel in zip(np.split(found.positions.astype(int), ends[:-1]), (3000, 50, 1024), strict=True):
                    assert (np.diff(part, prepend=-1) > 0).all()
                    assert part[-1] < numel
            layout.bits[0][:] = saved
    assert 0 < refused < 60


def test_ctx_needs_the_old_bits():
    """Neither written nor read without them."""
    layout, positions, words = made(11, BY_NAME["bfloat16"], (300,), 0.1)
    coded = codec.code(codec.profile("ctx").encode(layout, [positions], [words]))
    for lacking in ({"old": None}, {"classes": None}):
        with pytest.raises(NeedsBase):
            codec.profile("ctx").encode(replace(layout, **lacking), positions, words)
    with pytest.raises(NeedsBase, match="bucket is in profile ctx"):
        codec.profile("ctx").decode(replace(layout, old=None), Reader(coded))
