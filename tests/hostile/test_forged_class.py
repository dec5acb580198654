"""Classes, counts, gaps and steps of `ctx`, and chunks of its coder, that lie although every checksum holds.

Buckets of the samples: 0 has two boxes of `attn` and the scalar `one` (bf16), 1 has `big` in three tiles (f32), 2 has a
sparse and a dense box of `f64`, 3 has all of `i8`, dense. Bucket 1 has three classes, with changes in each.
"""

from __future__ import annotations

import struct

import pytest

from sparserl import Patch as Read
from sparserl.errors import FormatError, InvalidField, NeedsBase, Truncated
from sparserl.kernels import reference
from tests.hostile import forged_patch
from tests.hostile.cases import TILE_TOKENS, Cases, numbers_of, refuse, replace_numbers, replace_stream
from tests.hostile.forged_patch import Patch, Stream
from tests.hostile.samples import sample

cases = Cases()
CLASSES, GAPS, STEPS = 3, (64, 68, 72), (66, 70, 74)
forged, each = (lambda *a: cases.forged(*a, "ctx")), (lambda *a: cases.each(*a, "ctx"))


def told(shift, *thresholds):
    return bytes((shift,)) + struct.pack(f"<{len(thresholds)}H", *thresholds)


def test_the_sample_has_what_is_attacked():
    """Three classes of one dtype, each with gaps and steps; counts for three tiles; a step of 64 bits."""
    bucket = Patch.parse(sample("ctx").data).buckets[1]
    assert {s.id for s in bucket.streams} >= {CLASSES, TILE_TOKENS, *GAPS, *STEPS}
    assert len(numbers_of(bucket, TILE_TOKENS)) == 9
    wide = Patch.parse(sample("ctx").data).buckets[2]
    assert max(n for id in (66, 70) for n in numbers_of(wide, id)) >= 1 << 60


def test_reading_it_needs_the_base():
    """No bucket with sparse entries is guessed at without the old bits."""
    patch = Read.from_bytes(sample("ctx").data)
    for index in range(3):
        with pytest.raises(NeedsBase, match=f"bucket {index} is in profile ctx"):
            patch.contents.decode(index)
    assert patch.contents.decode(3).dense.size == 30


@each(
    {
        "unsorted": told(22, 254, 251),
        "twice": told(22, 254, 254),
        "zero": told(22, 0, 254),
        "512": told(0, 251, 512),
        "65535": told(0, 65535),
        "far out": told(24, 251, 256),
        "shift 32": told(32, 1),
        "shift 255": told(255, 1),
        "no thresholds": told(22),
        "half a threshold": told(22, 251, 254)[:-1],
        "half a threshold more": told(22, 251, 254) + b"\0",
        "eight": told(22, *range(247, 255)),
        "many": told(0, *range(1, 500)),
    },
    InvalidField,
    "bucket 1: ",
)
def classes(p, chunk):
    replace_stream(p.buckets[1], CLASSES, chunk)


@forged(InvalidField, "0 bytes do not tell classes apart")
def classes_missing(p):
    replace_stream(p.buckets[1], CLASSES, b"")


@each({"zstd": 1, "rans": 2}, InvalidField, "stream 3: a chunk of low bits is coded")
def classes_coded(p, coder):
    p.buckets[1].stream(CLASSES).coder = coder


@forged(InvalidField, "stream 3 holds 1 chunk")
def classes_twice(p):
    p.buckets[1].stream(CLASSES).chunks.append(told(22, 251, 254))


@forged(InvalidField, "stream 3 holds 1 chunk")
def classes_of_dense_bits(p):
    p.buckets[3].streams.insert(0, Stream(CLASSES, [told(0, 5)]))


@each(
    {"moved": told(22, 250, 254), "finer": told(21, 251, 254), "fewer": told(22, 254), "more": told(22, 9, 251, 254)},
    FormatError,
    "bucket 1|lead to digest",
)
def classes_other_than_those_written(p, chunk):
    replace_stream(p.buckets[1], CLASSES, chunk)


def counted(p, *changes):
    """Other counts for the tiles and classes of `big`."""
    counts = numbers_of(p.buckets[1], TILE_TOKENS)
    for index, by in changes:
        counts[index] += by
    replace_numbers(p.buckets[1], TILE_TOKENS, counts)


@each({"more": 1, "fewer": -1}, InvalidField, "the changes of all tiles do not add up")
def counts_of_other_sum(p, by):
    counted(p, (1, by))


@forged(InvalidField, "the changes of all tiles do not add up")
def counts_of_nothing(p):
    replace_numbers(p.buckets[1], TILE_TOKENS, [0] * 9)


@each({"1025": 1025, "2^31": 1 << 31, "most": (1 << 64) - 1}, InvalidField, "stream 4: number 4 is past its limit")
def counts_above_the_tile(p, count):
    counts = numbers_of(p.buckets[1], TILE_TOKENS)
    counts[4] = count
    replace_numbers(p.buckets[1], TILE_TOKENS, counts)


@forged(InvalidField, "add up")
def counts_that_wrap(p):
    replace_numbers(p.buckets[1], TILE_TOKENS, [1024] * 9)


@each({"first": (0, 1), "last": (2, 1)}, FormatError, "bucket 1: stream")
def counts_of_another_class(p, pair):
    counted(p, (pair[0], -1), (pair[1], 1))


@each({"later": (1, 4), "earlier": (4, 1)}, InvalidField, "bucket 1|lead to digest")
def counts_of_another_tile(p, pair):
    counted(p, (pair[0], -1), (pair[1], 1))


@each({"one": 8, "none": 0}, FormatError, "stream 4")
def counts_missing(p, left):
    replace_numbers(p.buckets[1], TILE_TOKENS, numbers_of(p.buckets[1], TILE_TOKENS)[:left])


@forged(InvalidField, "stream 4")
def counts_too_many(p):
    replace_numbers(p.buckets[1], TILE_TOKENS, [*numbers_of(p.buckets[1], TILE_TOKENS), 0])


@forged(InvalidField, "sparse entry 0: tile counts do not add up")
def counts_of_another_entry(p):
    counts = numbers_of(p.buckets[0], TILE_TOKENS)
    column = next(c for c in range(3) if counts[c])
    counts[column] -= 1
    counts[3 + column] += 1
    replace_numbers(p.buckets[0], TILE_TOKENS, counts)


def changed(p, id, change, bucket=1):
    values = numbers_of(p.buckets[bucket], id)
    change(values)
    replace_numbers(p.buckets[bucket], id, values)


@each({str(id): id for id in GAPS}, InvalidField, "a gap leaves its tile")
def gap_leaves_its_tile(p, id):
    changed(p, id, lambda gaps: gaps.__setitem__(-1, 1023))


@each({str(id): id for id in GAPS}, InvalidField, "a gap leaves its tile")
def gap_leaves_its_tile_at_once(p, id):
    changed(p, id, lambda gaps: gaps.__setitem__(0, 1023))


@forged(InvalidField, "sparse entry 2: tile counts do not add up, or a gap leaves its tile")
def gap_leaves_a_scalar(p):
    changed(p, 68, lambda gaps: gaps.__setitem__(-1, 1), bucket=0)


@each(
    {"1024": 1 << 10, "2^31": 1 << 31, "2^32": 1 << 32, "most": (1 << 64) - 1},
    InvalidField,
    "stream 68: number 0 is past its limit",
)
def gap_above_the_tile(p, gap):
    changed(p, GAPS[1], lambda gaps: gaps.__setitem__(0, gap))


@each({str(id): id for id in GAPS}, InvalidField, "the changes lead to digest|a gap leaves its tile")
def gap_to_another_member(p, id):
    changed(p, id, lambda gaps: gaps.__setitem__(0, gaps[0] + 1))


@each({"2^32": 1 << 32, "most": (1 << 64) - 1}, InvalidField, "stream 70: number 0 is past its limit")
def step_wider_than_the_dtype(p, step):
    changed(p, STEPS[1], lambda steps: steps.__setitem__(0, step))


@each({str(id): id for id in STEPS}, InvalidField, "the changes lead to digest")
def step_of_another_size(p, id):
    changed(p, id, lambda steps: steps.__setitem__(-1, steps[-1] + 2))


@each({"gaps": (1, 65), "wide steps": (2, 67)}, InvalidField, "low bits do not match")
def lows_missing(p, where):
    replace_stream(p.buckets[where[0]], where[1], b"")


@each({"zero": b"\0", "many": bytes(99)}, InvalidField, "low bits")
def lows_long(p, extra):
    replace_stream(p.buckets[1], 69, p.buckets[1].stream(69).chunks[0] + extra)


@each({"zstd": 1, "rans": 2}, InvalidField, "low bits is coded")
def lows_coded(p, coder):
    p.buckets[1].stream(69).coder = coder


@each({str(id): id for id in (*GAPS, *STEPS)}, Truncated, "ends before")
def stream_of_a_class_missing(p, id):
    replace_stream(p.buckets[1], id, b"")


@each({"one more": 76, "the last": 92, "without classes": 6, "steps": 8}, InvalidField, "too many")
def stream_of_a_class_too_many(p, id):
    replace_stream(p.buckets[1], id, b"\0")


@forged(InvalidField, "bucket 1|lead to digest")
def streams_of_two_classes_changed_places(p):
    a, b = p.buckets[1].stream(64), p.buckets[1].stream(68)
    a.chunks, b.chunks = b.chunks, a.chunks


@each({"short": -1, "long": 1}, InvalidField, "stream 66")
def steps_of_another_number(p, by):
    chunk = p.buckets[1].stream(66).chunks[0]
    replace_stream(p.buckets[1], 66, (chunk + b"\0")[: len(chunk) + by])


# The coder. Whatever stands in a chunk, as many symbols come out as are due, or it is refused.


def recoded(p, change, id=68):
    """A stream through the coder, its chunk changed."""
    stream = p.buckets[1].stream(id)
    raw = stream.chunks[0]
    freq = forged_patch.frequencies(raw)
    states, words = reference.rans_encode(raw, freq)
    chunk = change(raw, freq, states, words)
    stream.coder, stream.chunks, stream.as_it_is = 2, [chunk], True


def chunk_of(table, states, words):
    return table + struct.pack(f"<{len(states)}I", *states) + struct.pack(f"<{len(words)}H", *words)


@each(
    {
        "empty": b"\0",
        "short": b"\0\1",
        "past 255": b"\xff\1\0",
        "no such symbol": b"\0\1\2",
        "never ends": b"\0\xff\0" + b"\xff" * 2000,
        "exponent 13": b"\0\1\0\xff\3" + bytes(8),
        "more than 4096": b"\0\2\0\xff\xde\x03" + bytes(8),
        "4096 without rest": b"\0\2\0\xff\0\0" + bytes(8),
    },
    InvalidField,
    "stream 68: a rans chunk has no valid table",
)
def rans_table(p, table):
    recoded(p, lambda *_: table)


@each({"one": 1, "all": 1 << 20}, InvalidField, "stream 68: a rans chunk")
def rans_bytes_missing(p, count):
    recoded(p, lambda raw, freq, states, words: forged_patch.rans(raw, freq)[:-count] or b"\0")


@each({"a byte": b"\0", "a word": b"\0\0", "words": bytes(64)}, InvalidField, "stream 68: a rans chunk")
def rans_bytes_too_many(p, more):
    recoded(p, lambda raw, freq, states, words: forged_patch.rans(raw, freq) + more)


@each(
    {"0": 0, "1": 1, "below": 0xFFFF, "begin": 1 << 16, "most": (1 << 32) - 1},
    InvalidField,
    "does not end where it should",
)
def rans_state(p, state):
    recoded(p, lambda raw, freq, states, words: chunk_of(forged_patch.rans_table(freq), [state], words))


@forged(InvalidField, "does not end where it should|the changes lead to digest|leaves its tile|stream 68")
def rans_state_of_other_symbols(p):
    recoded(p, lambda raw, freq, states, words: chunk_of(forged_patch.rans_table(freq), [states[0] ^ 1], words))


@forged(InvalidField, "a rans chunk")
def rans_states_too_many(p):
    recoded(p, lambda raw, freq, states, words: chunk_of(forged_patch.rans_table(freq), states * 2, words))


@each({"fewer": -1, "more": 1}, InvalidField, "does not end where it should")
def rans_of_other_length(p, by):
    recoded(p, lambda raw, freq, states, words: forged_patch.rans((raw + raw[:1])[: len(raw) + by], freq))


@forged(InvalidField, "bucket 1|lead to digest")
def rans_of_one_symbol(p):
    recoded(p, lambda raw, freq, states, words: forged_patch.rans(raw[:1] * 3))


@forged(InvalidField, "bucket 1: stream 0: a rans chunk")
def rans_entries(p):
    p.buckets[1].entry_stream = Stream(0, [b"garbage"], coder=2, as_it_is=True)


@forged(InvalidField, "the changes lead to digest")
def rans_of_other_symbols(p):
    raw = p.buckets[1].stream(66).chunks[0]
    p.buckets[1].stream(66).chunks, p.buckets[1].stream(66).coder = [raw[::-1]], 2
    assert raw != raw[::-1]


@pytest.mark.parametrize(("profile", "change", "error", "match"), cases)
def test_a_class_that_lies_is_refused(profile, change, error, match):
    """Every checksum holds, yet the lie is named, the weights stay as they are, and it takes no time to speak of."""
    refuse(profile, change, error, match)


@pytest.mark.parametrize("id", [TILE_TOKENS, *GAPS, *STEPS])
def test_a_chunk_recoded_is_the_same_patch(id):
    """The coder written from the specification alone is understood: what is attacked above was valid before."""
    it = sample("ctx")
    parts = Patch.parse(it.data)
    recoded(parts, lambda raw, freq, states, words: chunk_of(forged_patch.rans_table(freq), states, words), id)
    assert it.run(parts.encode()).changed == parts.footer.changed
