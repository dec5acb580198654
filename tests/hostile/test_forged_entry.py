"""Entry tables that lie although every checksum holds.

Buckets of the samples: 0 has two boxes of `attn` and the scalar `one` (bf16), 1 has `big` in three tiles (f32), 2 has a
sparse and a dense box of `f64`, 3 has all of `i8`, dense.
"""

from __future__ import annotations

import pytest

from sparserl.errors import FormatError, InvalidField, LimitExceeded, RegionOverlap, Truncated
from tests.hostile import forged_patch
from tests.hostile.cases import ELEVEN, MOST, Cases, refuse
from tests.hostile.forged_patch import Patch
from tests.hostile.samples import sample

cases = Cases()


@cases.forged(LimitExceeded, "tensor 6, the table has 6")
def entry_of_no_tensor(p):
    p.buckets[1].columns.steps[0] = 6


@cases.each({"2^20": 1 << 20, "2^63": 1 << 63, "most": MOST}, InvalidField, "tensor steps")
def entry_of_a_tensor_far_out(p, step):
    p.buckets[1].columns.steps[0] = step


@cases.each({"padded": b"\x81\x00", "eleven": ELEVEN}, InvalidField, "tensor steps")
def entry_step_not_canonical(p, step):
    p.buckets[1].columns.steps[0] = step


@cases.forged(LimitExceeded, "claims 4 changes in 0 elements")
def entry_of_an_empty_tensor(p):
    p.buckets[1].columns.steps[0] = 4
    p.buckets[1].columns.values[0] = 4 << 2


@cases.forged(InvalidField, "an entry is for one bfloat16")
def entry_of_another_dtype(p):
    p.buckets[1].columns.steps[0] = 5


@cases.forged(LimitExceeded, "claims 0 changes")
def entry_of_no_changes(p):
    p.buckets[1].columns.values[0] = 0


@cases.forged(LimitExceeded, "claims 0 changes")
def entry_dense_of_no_changes(p):
    p.buckets[3].columns.values[0] = 2


@cases.forged(LimitExceeded, "claims 2101 changes in 2100")
def entry_of_more_than_the_region(p):
    p.buckets[1].columns.values[0] = 2101 << 2


@cases.forged(LimitExceeded, "claims 31 changes in 30")
def entry_dense_of_more_than_the_region(p):
    p.buckets[3].columns.values[0] = 31 << 2 | 2


@cases.each({"2^34": 1 << 34, "2^63": 1 << 63, "most": MOST}, InvalidField, "values")
def entry_of_a_huge_count(p, value):
    p.buckets[1].columns.values[0] = value


@cases.each({"more": 1, "fewer": -1}, FormatError, "bucket 1")
def entry_count_off_by_one(p, by):
    p.buckets[1].columns.values[0] += by << 2
    p.footer.changed += by


@cases.each({"more": 1, "fewer": -1}, FormatError, "bucket 0")
def entry_counts_that_make_up_for_each_other(p, by):
    p.buckets[0].columns.values[0] += by << 2
    p.buckets[0].columns.values[2] -= by << 2


@cases.forged(FormatError, "bucket 1")
def entry_sparse_called_dense(p):
    p.buckets[1].columns.values[0] |= 2


@cases.forged(FormatError, "bucket 3")
def entry_dense_called_sparse(p):
    p.buckets[3].columns.values[0] &= ~2


@cases.forged(Truncated, "bucket 1: entry table: 2 numbers of boxes")
def entry_box_left_out(p):
    p.buckets[1].columns.values[0] |= 1


@cases.forged(InvalidField, "bytes too many")
def entry_box_too_many(p):
    p.buckets[1].columns.boxes += [0, 5]


@cases.forged(InvalidField, "not a proper part of one")
def entry_box_of_a_scalar(p):
    p.buckets[0].columns.values[2] |= 1


@cases.forged(InvalidField, "not a proper part")
def entry_box_is_the_whole(p):
    p.buckets[1].columns.values[0] |= 1
    p.buckets[1].columns.boxes = [0, 2100]


@cases.each(
    {
        "past the end": [0, 0, 25, 20],
        "beyond": [24, 0, 1, 20],
        "sideways": [0, 1, 10, 20],
        "no rows": [0, 0, 0, 20],
        "no columns": [0, 0, 10, 0],
        "start far out": [1 << 48, 0, 1, 1],
        "far out": [1 << 47, 0, 1 << 47, 1],
    },
    InvalidField,
    "not a proper part of attn",
)
def entry_box(p, box):
    p.buckets[0].columns.boxes[:4] = box


@cases.each({"2^49": 1 << 49, "wraps": MOST - 9, "most": MOST}, InvalidField, "boxes")
def entry_box_number(p, number):
    p.buckets[0].columns.boxes[0] = number


@cases.each({"padded": b"\x80\x00", "eleven": ELEVEN}, InvalidField, "boxes")
def entry_box_number_not_canonical(p, number):
    p.buckets[0].columns.boxes[0] = number


@cases.each({"same": [0, 0, 10, 20], "one element": [9, 19, 14, 1], "all but": [0, 0, 23, 20]}, RegionOverlap, "'attn'")
def entry_overlaps_in_its_bucket(p, box):
    p.buckets[0].columns.boxes[4:] = box


@cases.forged(RegionOverlap, "'one'")
def entry_twice(p):
    columns = p.buckets[0].columns
    columns.steps.append(0)
    columns.values.append(columns.values[2])
    p.footer.changed += int(columns.values[2]) >> 2


@cases.forged(RegionOverlap, "'f64'")
def entry_overlaps_in_another_bucket(p):
    p.buckets.append(Patch.parse(sample("gap").data).buckets[2])
    p.buckets[-1].columns = forged_patch.Columns([2], [1 << 2 | 1], [1, 2, 3, 1, 1, 1])
    p.footer.changed += 1


@cases.forged(LimitExceeded, "changes, the limit is")
def bucket_of_too_many_changes(p):
    whole_table_of_bytes(p, 1 << 25)
    p.buckets[0].columns = forged_patch.Columns([0], [(1 << 25) << 2], [])


@cases.forged(LimitExceeded, "dense bytes, the limit is")
def bucket_of_too_many_dense_bytes(p):
    whole_table_of_bytes(p, 1 << 25)
    p.buckets[0].columns = forged_patch.Columns([0], [1 << 2 | 2], [])


@cases.forged(LimitExceeded, "tiles, the limit is", "gap", "ulp")
def bucket_of_too_many_tiles(p):
    whole_table_of_bytes(p, 1 << 31)
    p.buckets[0].columns = forged_patch.Columns([0], [1 << 2], [])


@cases.forged(LimitExceeded, "claims 1 changes in 2147483649")
def entry_of_a_region_past_31_bits(p):
    whole_table_of_bytes(p, (1 << 31) + 1)
    p.buckets[0].columns = forged_patch.Columns([0], [1 << 2], [])


def whole_table_of_bytes(p: Patch, size: int) -> None:
    """One tensor of one-byte elements and one bucket for it."""
    p.header.table = forged_patch.Table([b"w"], [1], [1], [size])
    p.buckets = p.buckets[3:]
    p.buckets[0].dtype = 1
    p.footer.changed = 1
    p.rename()


@pytest.mark.parametrize(("profile", "change", "error", "match"), cases)
def test_a_entry_that_lies_is_refused(profile, change, error, match):
    """Every checksum holds, yet the lie is named, the weights stay as they are, and it takes no time to speak of."""
    refuse(profile, change, error, match)
