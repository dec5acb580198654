"""Footers that lie although every checksum holds."""

from __future__ import annotations

import pytest

from sparserl.errors import FormatError, InvalidField, LimitExceeded, RegionOverlap, Truncated, WrongBase
from tests.hostile import forged_patch
from tests.hostile.cases import ELEVEN, MOST, Cases, refuse

cases = Cases()


@cases.forged(InvalidField, "belongs to another header", "gap")
def footer_seal(p):
    p.footer.seal = bytes(16)


@cases.forged(WrongBase, "Nothing was touched")
def footer_base(p):
    p.footer.base = bytes(16)


@cases.forged(InvalidField, "the changes lead to digest")
def footer_result(p):
    p.footer.result = bytes(16)


@cases.forged(WrongBase, "Nothing was touched")
def footer_digests_halved(p):
    p.footer.base = p.footer.base[8:] + p.footer.base[:8]


@cases.each({"2": 2, "3": 3, "most": MOST}, LimitExceeded, "flags", "gap")
def footer_flags(p, flags):
    p.footer.flags = flags


@cases.forged(Truncated, "covered regions", "gap")
def footer_partial_without_regions(p):
    p.footer.flags = 0


@cases.each({"one more": 1, "one less": -1}, InvalidField, "the footer says")
def footer_changed(p, by):
    p.footer.changed += by


@cases.forged(InvalidField, "the footer says 0", "gap")
def footer_changed_zero(p):
    p.footer.changed = 0


@cases.each({"elements": 1 << 20, "2^63": 1 << 63, "most": MOST}, LimitExceeded, "changed", "gap")
def footer_changed_huge(p, changed):
    p.footer.changed = changed


@cases.each({"padded": b"\x80\x00", "eleven": ELEVEN}, InvalidField, "canonical", "gap")
def footer_changed_not_canonical(p, changed):
    p.footer.changed = changed


@cases.each({"limit": (1 << 20) + 1, "2^63": 1 << 63, "most": MOST}, LimitExceeded, "bucket count", "gap")
def footer_bucket_count_huge(p, count):
    p.footer.count = count


@cases.each({"more": 5, "fewer": 3, "none": 0, "many": 1000}, FormatError, "patch footer", "gap")
def footer_bucket_count(p, count):
    p.footer.count = count


@cases.each({"first": 0, "last": 3}, InvalidField, "bytes in all", "gap")
def footer_sizes_do_not_add_up(p, index):
    sizes = [len(b.encode()) for b in p.buckets]
    sizes[index] += 1
    p.footer.sizes = sizes


@cases.forged(FormatError, "bucket 0", "gap")
def footer_sizes_make_up_for_each_other(p):
    sizes = [len(b.encode()) for b in p.buckets]
    sizes[0] += 1
    sizes[1] -= 1
    p.footer.sizes = sizes


@cases.forged(FormatError, "bucket 0", "gap")
def footer_sizes_of_zero(p):
    p.footer.sizes = [0, 0, 0, sum(len(b.encode()) for b in p.buckets)]


@cases.each({"limit": (1 << 28) + 1, "most": MOST}, InvalidField, "bucket lengths", "gap")
def footer_sizes_huge(p, size):
    p.footer.sizes = [size] * 4


@cases.forged(InvalidField, "bucket 2 is not the bucket that the footer lists", "gap")
def footer_checksums(p):
    sums = [b.encode()[-16:] for b in p.buckets]
    p.footer.checksums = [*sums[:2], bytes(16), sums[3]]


@cases.forged(InvalidField, "bytes too many", "gap")
def footer_followed_by_bytes(p):
    p.footer.after = b"\0"


@cases.each({"zero": 0, "short": 40, "one less": -1}, FormatError, "footer", "gap")
def footer_length_short(p, length):
    header = p.header.encode()
    whole_length = len(p.footer.encode(header, [b.encode() for b in p.buckets])) - 16
    p.footer.length = whole_length + length if length < 0 else length


@cases.each({"2^20": 1 << 20, "2^63": 1 << 63, "most": MOST}, LimitExceeded, "footer", "gap")
def footer_length_huge(p, length):
    p.footer.length = length


@cases.forged(Truncated, "end mark", "gap")
def footer_end_mark(p):
    p.footer.end = b"SRLPEND\0"


@cases.each({"limit": (1 << 20) + 1, "most": MOST}, LimitExceeded, "covered regions", "part")
def covers_count_huge(p, count):
    p.footer.covers_count = count


@cases.each({"more": 3, "fewer": 1, "many": 1 << 20}, FormatError, "patch footer", "part")
def covers_count(p, count):
    p.footer.covers_count = count


@cases.forged(RegionOverlap, "'i8'", "part")
def covers_twice(p):
    p.footer.covers.steps.append(0)
    p.footer.covers.values.append(0)


@cases.forged(RegionOverlap, "'attn'", "part")
def covers_overlap(p):
    covers = p.footer.covers
    p.footer.covers = forged_patch.Columns([0, 0, 3], [1, 1, 0], [*covers.boxes, 9, 0, 2, 20])


@cases.each({"2": 2, "most": MOST}, InvalidField, "values", "part")
def covers_values(p, value):
    p.footer.covers.values[0] = value


@cases.each(
    {"outside": [20, 0, 10, 20], "empty": [0, 0, 0, 20], "whole": [0, 0, 24, 20]}, InvalidField, "proper part", "part"
)
def covers_box(p, box):
    p.footer.covers.boxes = box


@cases.forged(LimitExceeded, "tensor 6", "part")
def covers_no_tensor(p):
    p.footer.covers.steps[1] = 6


@cases.forged(InvalidField, "'i8': the patch has an entry for .*, but does not cover it", "part")
def covers_not_what_it_changes(p):
    p.footer.covers.steps.pop()
    p.footer.covers.values.pop()


@cases.forged(InvalidField, "'attn': the patch has an entry for .*, but does not cover it", "part")
def covers_less(p):
    p.footer.covers.boxes = [0, 0, 9, 20]


@cases.forged(WrongBase, "Nothing was touched", "part")
def covers_all_it_says(p):
    p.footer.covers, p.footer.flags = None, 1


@pytest.mark.parametrize(("profile", "change", "error", "match"), cases)
def test_a_footer_that_lies_is_refused(profile, change, error, match):
    """Every checksum holds, yet the lie is named, the weights stay as they are, and it takes no time to speak of."""
    refuse(profile, change, error, match)
