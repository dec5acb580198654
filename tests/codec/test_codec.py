"""Profiles give back the changes that they were given, and refuse streams that make no sense."""

from __future__ import annotations

import importlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparserl import codec
from sparserl.codec import BucketLayout, Reader, Stream, numbers, value
from sparserl.codec.coders import CODERS
from sparserl.errors import InvalidField, Truncated, UnsupportedFormat
from sparserl.kernels import reference
from sparserl.weights.dtypes import BY_NAME, DTYPES
from tests.codec.placed_changes import full, made, there_and_back
from tests.effort import examples

each_profile = pytest.mark.parametrize("profile", codec.PROFILES.values(), ids=lambda p: p.name)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=repr)
COMMON = ("bfloat16", "float16", "float32", "float8_e4m3fn", "uint8")  # of the others, `ctx` is compiled anew
each_pair = pytest.mark.parametrize(
    ("profile", "dtype"),
    [
        pytest.param(
            profile,
            dtype,
            id=f"{dtype!r}-{profile.name}",
            marks=[] if dtype.name in COMMON or not profile.conditional else [pytest.mark.long],
        )
        for profile in codec.PROFILES.values()
        for dtype in DTYPES
    ],
)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Buffers that are to be filled start full of a pattern, so that whatever is forgotten shows."""
    for module in ("streams", "profile", "index", "numbers", "value", "ctx"):
        monkeypatch.setattr(importlib.import_module(f"sparserl.codec.{module}"), "empty", full)


def read_all(profile, layout, reader):
    profile.decode(layout, reader)
    reader.finish()


@each_pair
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
    whole = codec.encode_streams(profile.encode(layout, [positions], [words]))
    ends = np.cumsum(layout.count)
    for cuts in (ends[:-1], ends[[0, 2]], ends[[3]]):
        parts = codec.encode_streams(profile.encode(layout, np.split(positions, cuts), np.split(words, cuts)))
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
@settings(deadline=None, max_examples=examples(100))
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
    coded, _ = there_and_back(codec.profile_by_name(profile), layout, positions, words)
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
    layout = BucketLayout(BY_NAME["uint8"], np.array([10, 10]), np.array([2, 2]), 10, 8)
    words = np.arange(4, dtype=np.uint8)
    for positions, bad in (([0, 5, 3, 10], 1), ([5, 5, 0, 1], 0), ([5, 4, 0, 1], 0), ([0, 10, 0, 1], 0)):
        coded = codec.encode_streams(
            codec.profile_by_name("raw").encode(layout, [np.array(positions, np.uint32)], [words])
        )
        with pytest.raises(InvalidField, match=f"entry {bad}"):
            codec.profile_by_name("raw").decode(layout, Reader(coded))


def test_gaps_and_counts_out_of_range_are_refused():
    """Tile counts that do not add up to the entry's, and gaps past the end of a region, are found."""
    layout, positions, words = made(3, BY_NAME["uint8"], (3000, 50), 0.1)
    coded = codec.encode_streams(codec.profile_by_name("gap").encode(layout, [positions], [words]))
    for numel, count in (
        (layout.numel, layout.count + np.array([1, -1])),
        (layout.numel, layout.count + np.array([-1, 1])),
        (np.array([int(positions[layout.count[0] - 1]), 50]), layout.count),
    ):
        wrong = BucketLayout(layout.dtype, numel, count, layout.tile_log, layout.chunk_log)
        with pytest.raises(InvalidField, match="entry"):
            codec.profile_by_name("gap").decode(wrong, Reader(coded))


def test_steps_wider_than_the_element_are_refused():
    """A step must fit the width it is taken in."""
    layout = BucketLayout(BY_NAME["uint8"], np.array([10]), np.array([2]), 10, 8)
    wide = numbers.write(layout, np.array([3, 256], np.uint16), Stream.STEP_TOKENS, Stream.STEP_LOWS)
    gaps = codec.profile_by_name("ulp").encode(layout, [np.array([1, 2], np.uint32)], [np.array([3, 4], np.uint8)])
    with pytest.raises(InvalidField, match="number 1"):
        codec.profile_by_name("ulp").decode(layout, Reader(codec.encode_streams({**gaps, **wide})))


@each_dtype
def test_planes_are_those_of_the_specification(dtype):
    """One stream per byte of a word, all lowest bytes first."""
    words = np.arange(300, dtype=np.uint16).astype(dtype.uint) * dtype.uint.type(77)
    layout = BucketLayout(dtype, np.array([300]), np.array([300]), 10, 16)
    written = value.write_planes(layout, words, Stream.WORD_PLANE)
    planes = [b"".join(bytes(chunk) for chunk in written[Stream.WORD_PLANE + i]) for i in range(dtype.width)]
    assert planes == [plane.tobytes() for plane in reference.planes(words)]
    assert (value.read_planes(layout, Reader(codec.encode_streams(written)), 300, Stream.WORD_PLANE) == words).all()


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
    assert [id for id in range(256) if Stream.is_known(id)] == [*range(11), *range(16, 32), *range(64, 96)]
    assert [id for id in range(256) if Stream.is_dense(id)] == [10, *range(24, 32)]


@each_profile
def test_profiles_are_found_by_name_and_id(profile):
    """The registry gives back the one object; its repr says what it is."""
    assert codec.profile_by_name(profile.name) is profile
    assert codec.profile_by_id(profile.id) is profile
    assert repr(profile) == f"{type(profile).__name__}()"


@pytest.mark.parametrize("name", ["zip", "", "auto", "CTX", "RAW"])
def test_unknown_profiles_are_refused_by_name(name):
    """The error says which are known."""
    with pytest.raises(UnsupportedFormat, match=f"'{name}'; this release knows raw, gap, ulp, ctx"):
        codec.profile_by_name(name)


@pytest.mark.parametrize("id", [4, 5, 255])
def test_unknown_ids_are_refused(id):
    """What a newer release wrote is named as such: profiles and coders alike."""
    with pytest.raises(UnsupportedFormat, match=f"unknown profile id {id}; a newer sparserl"):
        codec.profile_by_id(id)
    with pytest.raises(UnsupportedFormat, match=f"unknown coder {id}; a newer sparserl"):
        codec.coder(id)
