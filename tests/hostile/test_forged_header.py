"""Headers and tensor tables that lie although every checksum holds."""

from __future__ import annotations

import pytest

from sparserl.errors import FormatError, InvalidField, LimitExceeded, TensorMismatch, Truncated, UnsupportedFormat
from tests.hostile import forged_patch
from tests.hostile.cases import ELEVEN, MOST, Cases, refuse
from tests.hostile.forged_patch import squeeze

cases = Cases()


@cases.forged(InvalidField, "not a sparserl patch", "gap")
def header_magic(p):
    p.header.magic = b"SRLPATCI"


@cases.each({"0": 0, "2": 2, "255": 255}, UnsupportedFormat, "format version", "gap")
def header_version(p, version):
    p.header.version = version


@cases.each({"low": 1, "high": 128, "all": 255}, UnsupportedFormat, "required features", "gap")
def header_features(p, features):
    p.header.features = features


@cases.each(
    {"limit": (1 << 26) + 1, "2^32": 1 << 32, "2^63": 1 << 63, "most": MOST}, LimitExceeded, "table length", "gap"
)
def header_table_length(p, size):
    p.header.size = size


@cases.each({"padded": b"\x80\x00", "long": b"\xff\xff\x80\x00", "eleven": ELEVEN}, InvalidField, "canonical", "gap")
def header_table_length_not_canonical(p, size):
    p.header.size = size


@cases.each({"limit": (1 << 26) + 1, "most": MOST}, LimitExceeded, "coded table length", "gap")
def header_coded_length(p, size):
    p.header.coded_size = size


@cases.forged(Truncated, "patch header", "gap")
def header_coded_length_past_the_end(p):
    p.header.coded_size = 1 << 20


@cases.each({"more": 1, "less": -1, "much more": 1 << 20}, InvalidField, "zstd chunk", "gap")
def header_table_of_another_length(p, by):
    p.header.size = len(p.header.table.encode()) + by


@cases.each(
    {"empty": b"", "zeros": bytes(40), "text": b"not a frame", "ones": b"\xff" * 40}, InvalidField, "zstd", "gap"
)
def header_table_is_no_frame(p, coded):
    p.header.coded = coded


@cases.forged(InvalidField, "zstd", "gap")
def header_table_is_followed_by_bytes(p):
    p.header.coded = squeeze(p.header.table.encode()) + b"\0"


@cases.forged(InvalidField, "leaves out", "gap")
def header_frame_says_its_content_size(p):
    p.header.coded = squeeze(p.header.table.encode(), write_content_size=True)


@cases.forged(InvalidField, "leaves out", "gap")
def header_frame_has_a_checksum(p):
    p.header.coded = squeeze(p.header.table.encode(), write_checksum=True)


@cases.forged(InvalidField, "leaves out", "gap")
def header_frame_sets_the_unused_bit(p):
    coded = bytearray(squeeze(p.header.table.encode()))
    coded[0] |= 0x10
    p.header.coded = bytes(coded)


@cases.each({"512K": 0x48, "2^41": 0xF8, "all": 0xFF}, InvalidField, "zstd", "gap")
def header_frame_wants_a_large_window(p, window):
    coded = bytearray(squeeze(p.header.table.encode()))
    coded[1] = window
    p.header.coded = bytes(coded)


@cases.forged(InvalidField, "not in strictly rising order", "gap")
def table_names_out_of_order(p):
    p.header.table.names[0] = b"zzzz"


@cases.forged(InvalidField, "not in strictly rising order", "gap")
def table_names_twice(p):
    p.header.table.names[1] = b"attn"


@cases.each(
    {"stray": b"at\xffn", "overlong": b"a\xc0\x80b", "surrogate": b"\xed\xa0\x80", "cut": b"at\xc3"},
    InvalidField,
    "UTF-8",
    "gap",
)
def table_names_not_utf8(p, name):
    p.header.table.names[0] = name


@cases.forged(InvalidField, "name lengths.* above 4096", "gap")
def table_name_too_long(p):
    p.header.table.names[-1] = b"o" * 4097


@cases.forged(Truncated, "name", "gap")
def table_name_lengths_past_the_end(p):
    p.header.table.lengths = [4000] * 6


@cases.each({"9": 9, "52": 52, "255": 255}, UnsupportedFormat, "unknown dtype", "gap")
def table_dtype(p, code):
    p.header.table.dtypes[0] = code


@cases.each({"33": 33, "255": 255}, LimitExceeded, "dimensions", "gap")
def table_rank(p, rank):
    p.header.table.ranks[0] = rank


@cases.each({"limit": (1 << 48) + 1, "2^63": 1 << 63, "most": MOST}, FormatError, "sizes", "gap")
def table_size(p, size):
    p.header.table.sizes[0] = size


@cases.each({"padded": b"\x94\x00", "eleven": ELEVEN}, InvalidField, "sizes", "gap")
def table_size_not_canonical(p, size):
    p.header.table.sizes[0] = size


@cases.each(
    {"2^49": (1 << 24, 1 << 25), "2^64": (1 << 32, 1 << 32), "2^96": (1 << 48, 1 << 48)}, LimitExceeded, "limits", "gap"
)
def table_shape_product(p, shape):
    p.header.table.sizes[:2] = shape


@cases.forged(LimitExceeded, "elements", "gap")
def table_elements_in_all(p):
    names = [b"n%05d" % i for i in range(257)]
    p.header.table = forged_patch.Table(names, [1] * 257, [1] * 257, [1 << 48] * 257)


@cases.forged(LimitExceeded, "dimensions in all", "gap")
def table_dimensions_in_all(p):
    n = (1 << 17) + 1
    p.header.table = forged_patch.Table([b"%06d" % i for i in range(n)], [1] * n, [32] * n, [b"\1" * 32 * n])


@cases.each({"one more": 7, "fewer": 5, "zero": 0}, FormatError, "tensor table", "gap")
def table_count(p, count):
    p.header.table.count = count


@cases.each({"limit": (1 << 20) + 1, "most": MOST}, LimitExceeded, "tensor count", "gap")
def table_count_huge(p, count):
    p.header.table.count = count


@cases.forged(InvalidField, "bytes too many", "gap")
def table_followed_by_bytes(p):
    p.header.table.after = b"\0"


@cases.forged(InvalidField, "another tensor table", "gap")
def table_is_not_the_buckets(p):
    p.header.table.names[0] = b"attm"


@cases.forged(TensorMismatch, "'attm'", "gap")
def table_of_other_names(p):
    p.header.table.names[0] = b"attm"
    p.rename()


@cases.forged(TensorMismatch, "'one'", "gap")
def table_of_other_dtypes(p):
    p.header.table.dtypes[5] = 18
    del p.buckets[0].columns.steps[2], p.buckets[0].columns.values[2]
    p.buckets = p.buckets[1:]
    p.footer.changed = sum(int(v) >> 2 for b in p.buckets for v in b.columns.values)
    p.rename()


@cases.forged(TensorMismatch, "'big'", "gap")
def table_of_other_shapes(p):
    p.header.table.sizes[2] = 2101
    p.rename()


@pytest.mark.parametrize(("profile", "change", "error", "match"), cases)
def test_a_header_that_lies_is_refused(profile, change, error, match):
    """Every checksum holds, yet the lie is named, the weights stay as they are, and it takes no time to speak of."""
    refuse(profile, change, error, match)
