"""The tensor table as bytes: literal, canonical, bounded."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparserl import TensorSpec, TensorTable
from sparserl.errors import FormatError, InvalidField, LimitExceeded, Truncated, UnsupportedFormat
from sparserl.weights.dtypes import BY_NAME, DTYPES
from sparserl.wire import limits
from sparserl.wire.table import compress_table, decode_table, decompress_table, encode_table, table_hash

F32, BF16 = BY_NAME["float32"], BY_NAME["bfloat16"]

names = st.text(max_size=20).filter(lambda s: not any(0xD800 <= ord(c) < 0xE000 for c in s))
shapes = st.lists(st.integers(0, 300), max_size=5).map(tuple)
specs = st.builds(TensorSpec, names, st.sampled_from(DTYPES), shapes)
tables = st.lists(specs, max_size=12, unique_by=lambda s: s.name).map(TensorTable)

EXAMPLES = {
    "no tensors": ([], b"\x00"),
    "a scalar": ([TensorSpec("s", F32, ())], b"\x01\x01s\x22\x00"),
    "an empty name": ([TensorSpec("", F32, (1,))], b"\x01\x00\x22\x01\x01"),
    "two": (
        [TensorSpec("w", BF16, (2, 300)), TensorSpec("b.é", F32, (0,))],
        b"\x02" + b"\x04\x01" + "b.éw".encode() + b"\x22\x13" + b"\x01\x02" + b"\x00\x02\xac\x02",
    ),
}


@pytest.mark.parametrize(("rows", "raw"), EXAMPLES.values(), ids=EXAMPLES)
def test_tables_are_these_bytes(rows, raw):
    """The bytes of a table never change: its hash names it."""
    table = TensorTable(rows)
    assert encode_table(table) == raw
    assert decode_table(raw) == table


def test_the_hash_is_over_the_canonical_bytes():
    """Equal tables have equal hashes, in whatever order their rows came; any other table has another."""
    rows = [TensorSpec("a", F32, (2,)), TensorSpec("b", BF16, (2,))]
    one = table_hash(encode_table(TensorTable(rows)))
    assert one == table_hash(encode_table(TensorTable(rows[::-1])))
    assert one.hex() == "4c7e5484f0995f5850e67e73a5084b95"
    for other in (TensorSpec("c", BF16, (2,)), TensorSpec("b", F32, (2,)), TensorSpec("b", BF16, (1, 2))):
        assert table_hash(encode_table(TensorTable([rows[0], other]))) != one


@given(tables)
def test_tables_round_trip(table):
    """Every table comes back, raw and through its frame."""
    raw = encode_table(table)
    assert decode_table(raw) == table
    assert decompress_table(compress_table(raw), len(raw)) == raw


@given(tables, st.data())
def test_every_other_encoding_is_refused(table, data):
    """Whatever is read as a table is what that table is written as: there is one encoding."""
    raw = bytearray(encode_table(table))
    at = data.draw(st.integers(0, len(raw) - 1))
    raw[at] = data.draw(st.integers(0, 255))
    try:
        read = decode_table(bytes(raw))
    except FormatError:
        return
    assert encode_table(read) == bytes(raw)


@pytest.mark.parametrize(
    ("raw", "error", "match"),
    [
        (b"", Truncated, "tensor count"),
        (b"\x01", Truncated, "name lengths"),
        (b"\x01\x01", Truncated, "names"),
        (b"\x01\x01s", Truncated, "dtypes"),
        (b"\x01\x01s\x22", Truncated, "ranks"),
        (b"\x01\x01s\x22\x01", Truncated, "sizes"),
        (b"\x01\x01s\x22\x01\x80", InvalidField, "sizes"),
        (b"\x01\x01s\x22\x01\x05\x00", InvalidField, "1 bytes too many"),
        (b"\x01\x01s\xff\x00", UnsupportedFormat, "unknown dtype 255"),
        (b"\x01\x01s\x22\x21" + b"\x01" * 33, LimitExceeded, "33 dimensions, the limit is 32"),
        (b"\x01\x01\xff\x22\x00", InvalidField, r"the name b'\\xff' is not UTF-8"),
        (b"\x02\x01\x01ba\x22\x22\x00\x00", InvalidField, "not in strictly rising order"),
        (b"\x02\x01\x01aa\x22\x22\x00\x00", InvalidField, "not in strictly rising order"),
        (b"\x02\x00\x00\x22\x22\x00\x00", InvalidField, "not in strictly rising order"),
    ],
)
def test_what_is_refused_and_why(raw, error, match):
    """One error for each way a table can be wrong."""
    with pytest.raises(error, match=match):
        decode_table(raw)


@pytest.mark.parametrize(
    "spec",
    [
        TensorSpec("n" * (limits.NAME_BYTES + 1), F32, ()),
        TensorSpec("w", F32, (1,) * (limits.RANK + 1)),
        TensorSpec("w", F32, (limits.TENSOR_ELEMENTS + 1,)),
        TensorSpec("w", F32, (1 << 25, 1 << 24)),
    ],
    ids=["name", "rank", "size", "product"],
)
def test_what_no_reader_takes_is_not_written(spec):
    """A table past the limits is refused when it is written, not when it is needed."""
    with pytest.raises(LimitExceeded):
        encode_table(TensorTable([spec]))


def test_sums_over_a_table_stay_in_64_bits():
    """Many tensors, each within its limits, may be too many elements together."""
    most = limits.TABLE_ELEMENTS // limits.TENSOR_ELEMENTS
    rows = [TensorSpec(f"{i:04}", F32, (limits.TENSOR_ELEMENTS,)) for i in range(most + 1)]
    assert decode_table(encode_table(TensorTable(rows[:most]))).elements == limits.TABLE_ELEMENTS
    with pytest.raises(LimitExceeded, match="elements"):
        encode_table(TensorTable(rows))


def test_tables_at_the_limits():
    """The longest name, the highest rank and the largest tensor are written and read."""
    rows = [
        TensorSpec("n" * limits.NAME_BYTES, F32, ()),
        TensorSpec("r", F32, (1,) * limits.RANK),
        TensorSpec("w", F32, (limits.TENSOR_ELEMENTS,)),
    ]
    assert decode_table(encode_table(TensorTable(rows))) == TensorTable(rows)
