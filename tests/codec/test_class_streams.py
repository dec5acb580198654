"""Streams of the profile that sorts positions into classes: their specification, and what is refused."""

from __future__ import annotations

import importlib
from dataclasses import replace

import numpy as np
import pytest

from sparserl import codec
from sparserl.codec import Classes, Reader, Stream
from sparserl.codec.coders import Stored, Zstd
from sparserl.errors import InvalidField, NeedsBase
from sparserl.kernels import reference
from sparserl.weights.dtypes import BY_NAME
from tests.codec.placed_changes import full, in_order, made, there_and_back
from tests.dtypes import long_if_rare


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Buffers that are to be filled start full of a pattern, so that whatever is forgotten shows."""
    for module in ("streams", "profile", "index", "numbers", "value", "ctx"):
        monkeypatch.setattr(importlib.import_module(f"sparserl.codec.{module}"), "empty", full)


# Magnitude classes.


@pytest.mark.parametrize("chunk_log", [8, 16])
@pytest.mark.parametrize(
    "name",
    [
        "bfloat16",
        *(
            pytest.param(name, marks=long_if_rare(name))
            for name in ("float8_e5m2", "int16", "uint32", "float64", "int64")
        ),
    ],
)
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
    written = codec.profile_by_name("ctx").encode(layout, [positions], [words])
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
        pytest.param("float64", classes_chunk(56, 256), marks=pytest.mark.long),
        pytest.param("float64", classes_chunk(64, 1), marks=pytest.mark.long),
        pytest.param("float64", classes_chunk(0, 1, 2, 3, 4, 5, 6, 7, 8), marks=pytest.mark.long),
    ],
)
def test_classes_that_make_no_sense_are_refused(name, chunk):
    """Unsorted, zero, past 511, out of the dtype's reach, of an even number of bytes, none, or too many."""
    layout, positions, words = made(6, BY_NAME[name], (300,), 0.2)
    layout = replace(layout, classes=Classes(0, (1, 9)))
    coded = codec.encode_streams(codec.profile_by_name("ctx").encode(layout, [positions], [words]))
    codec.profile_by_name("ctx").decode(layout, Reader(coded))
    with pytest.raises(InvalidField, match=r"classes|longer than 15"):
        codec.profile_by_name("ctx").decode(layout, Reader({**coded, Stream.CLASSES: (Stored(), [chunk])}))
    with pytest.raises(InvalidField, match="coded"):
        codec.profile_by_name("ctx").decode(
            layout, Reader({**coded, Stream.CLASSES: (Zstd(), [classes_chunk(0, 1, 9)])})
        )


@pytest.mark.parametrize(
    ("name", "classes"),
    [
        ("uint8", Classes(0, (255,))),
        pytest.param("int8", Classes(0, (1, 127, 128)), marks=pytest.mark.long),
        ("bool", Classes(0, (1,))),
        ("bfloat16", Classes(7, (1, 2, 3, 4, 5, 6, 511))),
        pytest.param("float64", Classes(55, (1, 511)), marks=pytest.mark.long),
        pytest.param("int64", Classes(55, (255, 256, 257)), marks=pytest.mark.long),
        pytest.param("uint64", Classes(63, (1,)), marks=pytest.mark.long),
    ],
)
def test_classes_at_the_edge_are_fine(name, classes):
    """The largest thresholds and shifts that a dtype can have."""
    layout, positions, words = made(7, BY_NAME[name], (3000, 64), 0.3)
    most = np.iinfo(layout.dtype.uint).max
    layout.bits[1][:] = np.resize(np.array([0, 1, most, most // 2, most // 2 + 1], layout.dtype.uint), 64)
    _, found = there_and_back(codec.profile_by_name("ctx"), replace(layout, classes=classes), positions, words)
    assert (found.positions == positions).all()
    assert (found.words == words).all()


def test_counts_of_classes_are_checked():
    """Counts by tile and class must add up to the entries, each and all, and their gaps must find members."""
    dtype = BY_NAME["uint16"]
    layout, positions, words = made(8, dtype, (3000, 50), 0.1)
    coded = codec.encode_streams(codec.profile_by_name("ctx").encode(layout, [positions], [words]))
    for count in (layout.count + np.array([1, 0]), layout.count - np.array([0, 1])):
        with pytest.raises(InvalidField, match="do not add up to those of the entries"):
            codec.profile_by_name("ctx").decode(replace(layout, count=count), Reader(coded))
    for count in (layout.count + np.array([1, -1]), layout.count + np.array([-1, 1])):
        with pytest.raises(InvalidField, match="sparse entry 0: tile counts do not add up"):
            codec.profile_by_name("ctx").decode(replace(layout, count=count), Reader(coded))
    last = int(positions[layout.count[0] - 1])
    with pytest.raises(InvalidField, match="sparse entry 0"):
        codec.profile_by_name("ctx").decode(replace(layout, numel=np.array([last, 50])), Reader(coded))


def test_other_old_bits_never_lead_out_of_a_region():
    """Whatever the old bits are, positions rise and stay inside, or the bucket is refused."""
    rng = np.random.default_rng(9)
    layout, positions, words = made(10, BY_NAME["bfloat16"], (3000, 50, 1024), 0.1)
    layout = replace(layout, classes=Classes(7, (100, 250)))
    coded = codec.encode_streams(codec.profile_by_name("ctx").encode(layout, [positions], [words]))
    refused = 0
    for flips in (1, 10, 1000):
        for _ in range(20):
            where = rng.integers(0, 3000, flips)
            saved = layout.bits[0].copy()
            layout.bits[0][where] ^= rng.integers(1, 1 << 16, flips).astype(np.uint16)
            try:
                found = in_order(layout, codec.profile_by_name("ctx").decode(layout, Reader(coded)))
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
    coded = codec.encode_streams(codec.profile_by_name("ctx").encode(layout, [positions], [words]))
    for lacking in ({"old_addresses": None}, {"classes": None}):
        with pytest.raises(NeedsBase):
            codec.profile_by_name("ctx").encode(replace(layout, **lacking), positions, words)
    with pytest.raises(NeedsBase, match="bucket is in profile ctx"):
        codec.profile_by_name("ctx").decode(replace(layout, old_addresses=None), Reader(coded))
