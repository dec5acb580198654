"""Numbers, checksums and bounded reads, byte by byte."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparserl.errors import ChecksumMismatch, FormatError, InvalidField, LimitExceeded, Truncated
from sparserl.wire.cursor import Cursor, checksum, strip_checksum, varint, varints

MOST = (1 << 64) - 1
NUMBERS = {
    0: b"\x00",
    1: b"\x01",
    127: b"\x7f",
    128: b"\x80\x01",
    300: b"\xac\x02",
    16383: b"\xff\x7f",
    16384: b"\x80\x80\x01",
    (1 << 63) - 1: b"\xff" * 8 + b"\x7f",
    1 << 63: b"\x80" * 9 + b"\x01",
    MOST: b"\xff" * 9 + b"\x01",
}
NOT_NUMBERS = {
    "zero in two bytes": b"\x80\x00",
    "one in two bytes": b"\x81\x00",
    "one in ten bytes": b"\x81" + b"\x80" * 8 + b"\x00",
    "2^64": b"\x80" * 9 + b"\x02",
    "past 64 bits": b"\xff" * 9 + b"\x7f",
    "eleven bytes": b"\xff" * 10 + b"\x01",
    "no end": b"\xff" * 40,
}


@pytest.mark.parametrize(("value", "coded"), NUMBERS.items())
def test_numbers_are_these_bytes(value, coded):
    """The bytes of a number never change; reading them gives it back and stops behind them."""
    assert varint(value) == coded
    assert varints(np.array([value], np.uint64)) == coded
    cursor = Cursor(coded + b"rest", "here")
    assert cursor.varint("n", MOST) == value
    assert cursor.bytes_left == 4


@pytest.mark.parametrize("value", [v for v in NUMBERS if v < 1 << 63])
def test_columns_are_their_numbers(value):
    """A column is its numbers one after the other."""
    cursor = Cursor(NUMBERS[value] * 3 + b"rest", "here")
    assert cursor.varints(3, "column", (1 << 63) - 1).tolist() == [value] * 3
    assert cursor.bytes_left == 4


@pytest.mark.parametrize("coded", NOT_NUMBERS.values(), ids=NOT_NUMBERS)
def test_numbers_in_any_other_form_are_refused(coded):
    """There is one way to write a number, alone and in a column."""
    with pytest.raises(FormatError):
        Cursor(coded, "here").varint("n", MOST)
    for read in (Cursor.varints, Cursor.numbers):
        with pytest.raises(InvalidField, match="here: n ends too early, is not canonical, or is above"):
            read(Cursor(coded, "here"), 1, "n", MOST)


@given(st.lists(st.integers(0, (1 << 63) - 1), max_size=50))
def test_columns_round_trip(values):
    """Any numbers come back, one by one and as a column."""
    data = varints(np.array(values, np.uint64))
    assert data == b"".join(map(varint, values))
    for read in (Cursor.varints, Cursor.numbers):
        cursor = Cursor(data, "here")
        assert [*read(cursor, len(values), "column", MOST >> 1)] == values
        cursor.finish()


@given(st.binary(max_size=30), st.integers(0, MOST >> 1))
def test_one_reader_and_the_other_agree(data, most):
    """Reading a number alone and reading a column of one accept the same bytes."""
    alone, column, listed = (Cursor(data, "here") for _ in range(3))
    try:
        expected = alone.varint("n", most)
    except FormatError:
        for cursor, read in ((column, column.varints), (listed, listed.numbers)):
            with pytest.raises(FormatError):
                read(1, "n", most)
            assert cursor.offset == 0
        return
    assert column.varints(1, "n", most).tolist() == listed.numbers(1, "n", most) == [expected]
    assert column.offset == listed.offset == alone.offset


def test_bounds_are_inclusive():
    """A number at its bound is read, one above is refused with field, value and bound."""
    assert Cursor(b"\x05", "here").varint("n", 5) == 5
    assert Cursor(b"\x80\x01", "here").varint("n", 128) == 128
    with pytest.raises(LimitExceeded, match="here: n is 6, the limit is 5"):
        Cursor(b"\x06", "here").varint("n", 5)
    with pytest.raises(LimitExceeded, match="here: n is 128, the limit is 127"):
        Cursor(b"\x80\x01", "here").varint("n", 127)
    with pytest.raises(InvalidField, match="above 5"):
        Cursor(b"\x05\x06", "here").varints(2, "n", 5)


def test_reads_past_the_end():
    """What is not there is `Truncated`, with what was being read and how much is left."""
    cursor = Cursor(b"abc", "here")
    assert bytes(cursor.take(2, "start")) == b"ab"
    with pytest.raises(Truncated, match="here: rest needs 2 bytes, 1 are left"):
        cursor.take(2, "rest")
    with pytest.raises(Truncated, match="here: n needs 1 byte, 0 are left"):
        Cursor(b"\x80", "here").varint("n", MOST)
    with pytest.raises(Truncated, match="4 numbers of column do not fit in 3 bytes"):
        Cursor(b"abc", "here").varints(4, "column", MOST)
    with pytest.raises(InvalidField, match="ends too early"):
        Cursor(b"\x80\x80", "here").varints(1, "column", MOST)


def test_a_column_of_nothing():
    """No numbers take no bytes, even at the end."""
    assert Cursor(b"", "here").varints(0, "column", 5).tolist() == []


def test_left_over_bytes():
    """Bytes that nobody asked for are an error."""
    cursor = Cursor(b"ab", "here")
    cursor.byte("one")
    with pytest.raises(InvalidField, match="here: 1 bytes too many"):
        cursor.finish()


def test_the_checksum_is_xxh3_128():
    """The checksum of nothing and of three bytes, as published, the high half first."""
    assert checksum(b"").hex() == "99aa06d3014798d86001c324468d497f"
    assert checksum(b"abc").hex() == "06b05ab6733a618578af5f94892f3950"
    assert checksum(b"a", b"b", b"c") == checksum(b"abc")


def test_sealed():
    """A sealed body comes back without its checksum; any change to either is noticed."""
    data = b"body" + checksum(b"body")
    assert bytes(strip_checksum(data, "here")) == b"body"
    assert bytes(strip_checksum(checksum(b""), "here")) == b""
    for i in range(len(data)):
        broken = bytearray(data)
        broken[i] ^= 1
        with pytest.raises(ChecksumMismatch, match="here: checksum"):
            strip_checksum(bytes(broken), "here")
    with pytest.raises(Truncated, match="here: 15 bytes"):
        strip_checksum(bytes(15), "here")
