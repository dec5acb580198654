"""The reader fed with mutated patches: either it refuses them, or what it does is what a valid patch would have done.

`HYPOTHESIS_PROFILE=long` runs many thousands of examples.
"""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparserl import SparserlError
from tests.effort import examples
from tests.hostile import forged_patch
from tests.hostile.samples import ALL, sample

SETTINGS = settings(max_examples=examples(480))
SECONDS = 5.0
names = st.sampled_from(ALL)
interesting = st.one_of(
    st.integers(0, 40),
    st.integers(0, (1 << 64) - 1),
    st.builds(lambda log, by: max(0, (1 << log) + by), st.integers(0, 63), st.integers(-2, 2)),
    st.binary(min_size=1, max_size=12),
)
bytes_of_a_field = st.integers(0, 255)


def feed(name: str, data: bytes) -> None:
    """Only errors of ours come out; `run` itself compares what was applied with the truth."""
    started = time.process_time()
    try:
        sample(name).run(data)
    except SparserlError as error:
        assert str(error)  # noqa: PT017  # an error that says nothing helps nobody
    assert time.process_time() - started < SECONDS


@st.composite
def edits(draw: st.DrawFn, data: bytes) -> bytes:
    """Some bytes set, flipped, inserted, removed, repeated or copied from elsewhere."""
    out = bytearray(data)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(out)))
        size = draw(st.sampled_from((1, 1, 1, 2, 4, 8, 16, 40)))
        kind = draw(st.sampled_from(("flip", "set", "insert", "remove", "repeat", "splice")))
        if kind == "flip" and at < len(out):
            out[at] ^= 1 << draw(st.integers(0, 7))
        elif kind == "set":
            out[at : at + size] = draw(st.binary(min_size=size, max_size=size))
        elif kind == "insert":
            out[at:at] = draw(st.binary(min_size=1, max_size=size))
        elif kind == "remove":
            del out[at : at + size]
        elif kind == "repeat":
            out[at:at] = out[at : at + size]
        elif kind == "splice":
            source = sample(draw(names)).data
            start = draw(st.integers(0, len(source)))
            out[at : at + size] = source[start : start + size]
    return bytes(out)


@given(st.data(), names)
@SETTINGS
def test_fuzz_bytes(data, name):
    """Damage of any kind to the file: the checksums find it."""
    feed(name, data.draw(edits(sample(name).data)))


@pytest.mark.long
@given(st.data(), names)
@SETTINGS
def test_fuzz_sealed_parts(data, name):
    """Damage to header, buckets and footer under checksums that hold: the fields are checked for themselves."""
    parts = forged_patch.Patch.parse(sample(name).data)
    table, header = parts.header.encode(), parts.header.encode()
    buckets = [b.encode() for b in parts.buckets]
    target = data.draw(st.sampled_from(("header", "bucket", "bucket", "bucket", "footer")))
    if target == "header":
        header = forged_patch.seal(data.draw(edits(table[:-16])))
    elif target == "bucket":
        index = data.draw(st.integers(0, len(buckets) - 1))
        buckets[index] = forged_patch.seal(data.draw(edits(buckets[index][:-16])))
    footer = parts.footer.encode(header, buckets)
    if target == "footer":
        body = forged_patch.seal(data.draw(edits(footer[:-32])))
        footer = body + len(body).to_bytes(8, "little") + forged_patch.END
    feed(name, header + b"".join(buckets) + footer)


@pytest.mark.long
@given(st.data(), names)
@SETTINGS
def test_fuzz_fields(data, name):
    """Fields changed one by one, everything that depends on them made to fit."""
    parts = forged_patch.Patch.parse(sample(name).data)
    for _ in range(data.draw(st.integers(1, 3))):
        mutate(data.draw, parts)
    if data.draw(st.booleans()):
        parts.rename()
    if data.draw(st.booleans()):
        values = [v for b in parts.buckets for v in b.columns.values]
        parts.footer.changed = sum(v >> 2 for v in values if isinstance(v, int))
    feed(name, parts.encode())


def mutate(draw: st.DrawFn, parts: forged_patch.Patch) -> None:
    """One change to one field somewhere."""
    if not parts.buckets:
        return
    bucket = draw(st.sampled_from(parts.buckets))
    choice = draw(st.integers(0, 11))
    if choice <= 2:
        columns = draw(st.sampled_from((bucket.columns.steps, bucket.columns.values, bucket.columns.boxes)))
        change_a_number(draw, columns)
    elif choice <= 5 and bucket.streams:
        change_a_stream(draw, bucket)
    elif choice == 6:
        field = draw(st.sampled_from(("profile", "dtype", "tile_log", "chunk_log", "version", "features")))
        setattr(bucket, field, draw(st.one_of(st.integers(0, 60), bytes_of_a_field)))
    elif choice == 7:
        field = draw(st.sampled_from(("entry_count", "entry_bytes", "estimate_count", "stream_count")))
        setattr(bucket, field, draw(interesting))
    elif choice == 8:
        table = parts.header.table
        change_a_number(draw, draw(st.sampled_from((table.sizes, table.lengths or table.sizes))))
        index = draw(st.integers(0, len(table.names) - 1))
        table.names[index] = draw(edits(table.names[index]))
    elif choice == 9:
        parts.buckets = draw(st.permutations(parts.buckets + [bucket] * draw(st.integers(0, 1))))
    elif choice == 10:
        field = draw(st.sampled_from(("flags", "changed", "count", "covers_count")))
        setattr(parts.footer, field, draw(interesting))
    elif parts.footer.covers is not None:
        covers = parts.footer.covers
        change_a_number(draw, draw(st.sampled_from((covers.steps, covers.values, covers.boxes))))


def change_a_number(draw: st.DrawFn, column: list[forged_patch.Number]) -> None:
    if not column:
        return
    index = draw(st.integers(0, len(column) - 1))
    kind = draw(st.sampled_from(("nudge", "nudge", "any", "remove", "repeat")))
    value = column[index]
    if kind == "nudge" and isinstance(value, int):
        column[index] = max(0, value + draw(st.integers(-4, 4)))
    elif kind == "remove":
        del column[index]
    elif kind == "repeat":
        column.insert(index, value)
    else:
        column[index] = draw(interesting)


def change_a_stream(draw: st.DrawFn, bucket: forged_patch.Bucket) -> None:
    stream = draw(st.sampled_from(bucket.streams))
    kind = draw(st.sampled_from(("bytes", "bytes", "bytes", "bytes", "chunks", "coder", "id", "drop", "lengths")))
    if kind == "bytes" and stream.chunks:
        index = draw(st.integers(0, len(stream.chunks) - 1))
        stream.chunks[index] = draw(edits(stream.chunks[index]))
    elif kind == "chunks":
        stream.chunks.append(draw(st.binary(max_size=20)))
    elif kind == "coder":
        stream.coder, stream.as_it_is = draw(st.integers(0, 3)), True
    elif kind == "id":
        stream.id = draw(st.integers(0, 97))
        if draw(st.booleans()):
            bucket.streams.sort(key=lambda s: s.id)
    elif kind == "drop":
        bucket.streams.remove(stream)
    elif kind == "lengths":
        stream.lengths = [draw(interesting)]
