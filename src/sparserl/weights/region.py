"""Regions (boxes) of a tensor: splitting, strides and overlap."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import LimitExceeded, RegionOverlap

Shape = tuple[int, ...]
Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, order=True, slots=True)
class Region:
    """A box of a tensor. Positions inside a region count its elements in row-major order.

    Attributes:
        start: The first index in every dimension.
        size: The number of indices in every dimension.

    Raises:
        ValueError: `start` and `size` differ in length.

    Example:
        >>> region = Region((0, 2), (4, 2))
        >>> str(region), region.numel
        ('[0:4, 2:4]', 8)
    """

    start: Shape
    size: Shape

    def __post_init__(self) -> None:
        if len(self.start) != len(self.size):
            raise ValueError(f"start has {len(self.start)} dimensions, size has {len(self.size)}; they must agree")

    @property
    def numel(self) -> int:
        """How many elements it has."""
        return math.prod(self.size)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The slices that select the region from an array."""
        return tuple(slice(a, a + n) for a, n in zip(self.start, self.size, strict=True))

    def fits(self, shape: Shape) -> bool:
        """Whether the region lies inside a tensor of this shape and holds at least one element."""
        return len(self.start) == len(shape) and all(
            a >= 0 and n >= 1 and a + n <= d for a, n, d in zip(self.start, self.size, shape, strict=True)
        )

    def inside(self, other: Region) -> bool:
        """Whether every element of this region belongs to the other."""
        return all(
            a >= b and a + n <= b + m for a, n, b, m in zip(self.start, self.size, other.start, other.size, strict=True)
        )

    def split(self, limit: int) -> Iterator[Region]:
        """Boxes of at most `limit` elements, in order; each is a run of consecutive positions of this region."""
        axis, step, _ = self._cut(limit)
        if axis < 0:
            yield self
            return
        for head in np.ndindex(*self.size[:axis]):
            for i in range(0, self.size[axis], step):
                yield self._piece(axis, head, i, step)

    def pieces_of(self, limit: int, positions: Numbers) -> Numbers:
        """Which of the boxes that `split` makes each position is in, counted from 0."""
        axis, step, inner = self._cut(limit)
        if axis < 0:
            return np.zeros_like(positions)
        row, rest = np.divmod(positions, inner * self.size[axis])
        numbers: Numbers = row * -(-self.size[axis] // step) + rest // (inner * step)
        return numbers

    def piece(self, limit: int, number: int) -> tuple[Region, int]:
        """One of the boxes that `split` makes, and the position at which it starts."""
        axis, step, inner = self._cut(limit)
        if axis < 0:
            return self, 0
        row, i = divmod(number, -(-self.size[axis] // step))
        head = tuple(int(k) for k in np.unravel_index(row, self.size[:axis])) if axis else ()
        return self._piece(axis, head, i * step, step), (row * self.size[axis] + i * step) * inner

    def _cut(self, limit: int) -> tuple[int, int, int]:
        """The dimension to cut (-1: none), how many of its indices one box takes, and the elements of one index."""
        axis = 0
        inner = self.numel
        while axis < len(self.size) and inner > limit:
            inner //= self.size[axis]
            axis += 1
        return axis - 1, max(1, limit // max(1, inner)), inner

    def _piece(self, axis: int, head: Shape, i: int, step: int) -> Region:
        lead = tuple(a + k for a, k in zip(self.start, head, strict=False))
        return Region(
            (*lead, self.start[axis] + i, *self.start[axis + 1 :]),
            ((1,) * axis + (min(step, self.size[axis] - i),) + self.size[axis + 1 :]),
        )

    def __str__(self) -> str:
        return "[" + ", ".join(f"{a}:{a + n}" for a, n in zip(self.start, self.size, strict=True)) + "]"


def whole(shape: Shape) -> Region:
    """The region that is all of a tensor."""
    return Region((0,) * len(shape), shape)


def all_whole(regions: Sequence[Region | None]) -> bool:
    """Whether a list of regions has whole tensors alone, found in one pass in C."""
    return isinstance(regions, list) and regions.count(None) == len(regions)


def intersection(a: Region, b: Region) -> Region | None:
    """What two regions of one tensor have in common; None if that is no element."""
    start = tuple(map(max, a.start, b.start))
    size = tuple(min(p + m, q + n) - s for p, m, q, n, s in zip(a.start, a.size, b.start, b.size, start, strict=True))
    return Region(start, size) if all(n > 0 for n in size) else None


def bounding(a: Region, b: Region) -> Region:
    """The smallest region that contains two."""
    start = tuple(map(min, a.start, b.start))
    size = tuple(max(p + m, q + n) - s for p, m, q, n, s in zip(a.start, a.size, b.start, b.size, start, strict=True))
    return Region(start, size)


def row_major(shape: Shape) -> Shape:
    """Strides, in elements, of a contiguous tensor."""
    strides = [1] * len(shape)
    for d in range(len(shape) - 2, -1, -1):
        strides[d] = strides[d + 1] * shape[d + 1]
    return tuple(strides)


def collapse(size: Shape, *strides: Shape) -> tuple[Shape, tuple[Shape, ...]]:
    """The same box with as few dimensions as possible: neighbours are merged where all strides allow it."""
    out: list[int] = []
    rows: list[list[int]] = [[] for _ in strides]
    for d in range(len(size)):
        if size[d] == 1:
            continue
        if out and all(row[-1] == s[d] * size[d] for row, s in zip(rows, strides, strict=True)):
            out[-1] *= size[d]
            for row, s in zip(rows, strides, strict=True):
                row[-1] = s[d]
            continue
        out.append(size[d])
        for row, s in zip(rows, strides, strict=True):
            row.append(s[d])
    return tuple(out), tuple(tuple(row) for row in rows)


def run_start(region: Region, shape: Shape) -> int | None:
    """Position of the region's first element, if the region is one contiguous run of a row-major tensor; else None."""
    partial = False
    for d in range(len(shape) - 1, -1, -1):
        if partial and region.size[d] != 1:
            return None
        partial = partial or region.size[d] != shape[d]
    return sum(a * s for a, s in zip(region.start, row_major(shape), strict=True))


class Rows(NamedTuple):
    """How a box lies in a row-major tensor: its first position, the elements of a row, and those between two rows."""

    start: int
    columns: int
    gap: int

    @classmethod
    def of(cls, region: Region, shape: Shape) -> Rows | None:
        """The rows of a region; None if they do not all have the same distance. A run has one row, or no gaps."""
        strides = row_major(shape)
        size, (steps, _) = collapse(region.size, strides, row_major(region.size))
        start = sum(a * s for a, s in zip(region.start, strides, strict=True))
        if steps and steps[-1] != 1:  # rows of one element
            size = (*size, 1)
            steps = (*steps, 1)
        if len(size) > 2:
            return None
        columns = size[-1] if size else 1
        return cls(start, columns, steps[0] - columns if len(size) == 2 else 0)


class Effort:
    """The work that may still be spent on finding overlaps, in steps of about a tenth of a microsecond."""

    def __init__(self, steps: int = 1 << 23) -> None:
        self._left = steps

    def spend(self, steps: int, regions: int) -> None:
        self._left -= steps
        if self._left < 0:
            raise LimitExceeded(
                f"{regions} regions of a tensor are interleaved so closely that it takes too long to check for overlap"
            )


def first_overlap(regions: Sequence[Region]) -> tuple[int, int] | None:
    """Two indices whose regions share an element, or None."""
    if len(regions) < 2:
        return None
    start = np.array([r.start for r in regions], np.int64).T
    stop = start + np.array([r.size for r in regions], np.int64).T
    return first_overlapping_boxes(np.zeros(len(regions), np.int64), start, stop, Effort())


def first_overlapping_boxes(owner: Numbers, start: Numbers, stop: Numbers, effort: Effort) -> tuple[int, int] | None:
    """Two indices of boxes of one owner that share an element, or None.

    `start` and `stop` have a row for each dimension. Dimension by dimension, each group of boxes is cut where no box
    lies. Such cuts separate all boxes that sharding and splitting make. Only boxes that no cut separates are compared
    with one another.
    """
    boxes = np.arange(owner.size)
    groups = owner
    rounds_without_cut = 0
    axis = 0
    if not len(start):
        boxes, groups, _ = cut_groups(boxes, groups, np.zeros_like(owner), np.ones_like(owner), effort)
    while boxes.size and rounds_without_cut < len(start):
        effort.spend(boxes.size, owner.size)
        boxes, groups, was_cut = cut_groups(boxes, groups, start[axis], stop[axis], effort)
        rounds_without_cut = 0 if was_cut else rounds_without_cut + 1
        axis = (axis + 1) % len(start)
    return _first_pair(boxes, groups, start, stop, effort) if boxes.size else None


def cut_groups(
    boxes: Numbers, groups: Numbers, start: Numbers, stop: Numbers, effort: Effort | None = None
) -> tuple[Numbers, Numbers, bool]:
    """Cut groups of boxes, in one dimension, wherever no box of the group lies.

    Args:
        boxes: The indices of the boxes to look at.
        groups: The number of the group of each of them.
        start: The first index of every box in this dimension.
        stop: The index after its last.
        effort: The steps that sorting may take; None for any number.

    Returns:
        The boxes that still share a group with others, the numbers of their groups, and whether any group was cut.
    """
    if not boxes.size:
        return boxes, groups, False
    low = start[boxes]
    high = stop[boxes]
    if not bool(((groups[1:] > groups[:-1]) | ((groups[1:] == groups[:-1]) & (low[1:] >= low[:-1]))).all()):
        if effort is not None:
            effort.spend(4 * boxes.size, boxes.size)
        order = np.lexsort((low, groups))
        boxes = boxes[order]
        groups = groups[order]
        low = low[order]
        high = high[order]
    old_begins = _begins(groups[1:] != groups[:-1])
    begins = old_begins.copy()
    number = np.cumsum(old_begins)
    span = max(1, int(high.max()))
    groups_at_once = max(1, (1 << 62) // span)  # their indices, one group after another, must fit in 63 bits
    for first in range(1, int(number[-1]) + 1, groups_at_once):
        a, b = np.searchsorted(number, [first, first + groups_at_once])
        shift = (number[a:b] - first) * span
        reach = np.maximum.accumulate(high[a:b] + shift)
        begins[a + 1 : b] |= low[a + 1 : b] + shift[1:] >= reach[:-1]
    ids: Numbers = np.cumsum(begins, dtype=np.int64)
    has_others = np.bincount(ids)[ids] > 1
    return boxes[has_others], ids[has_others], bool((begins != old_begins).any())


def _begins(differs: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    return np.concatenate((np.ones(1, bool), differs))


def _first_pair(
    boxes: Numbers, groups: Numbers, start: Numbers, stop: Numbers, effort: Effort
) -> tuple[int, int] | None:
    """Compare the boxes of each group with one another, in the order of the dimension in which they are shortest."""
    if not len(start):
        return int(boxes[0]), int(boxes[1])
    shares = [(stop[d][boxes] - start[d][boxes]).sum() / max(1, int(stop[d][boxes].max())) for d in range(len(start))]
    axis = int(np.argmin(shares))
    order = np.lexsort((start[axis][boxes], groups))
    boxes = boxes[order]
    groups = groups[order]
    low = start[axis][boxes]
    high = stop[axis][boxes]
    index = np.arange(boxes.size)
    step = 0
    while index.size:
        step += 1
        index = index[index < boxes.size - step]
        other = index + step
        # boxes are sorted by `low`: if one starts behind the end of another, so do all after it
        index = index[(groups[other] == groups[index]) & (low[other] < high[index])]
        effort.spend((index.size + 256) * len(start) // 2, boxes.size)
        a = boxes[index]
        b = boxes[index + step]
        overlaps = np.ones(index.size, bool)
        for d in range(len(start)):
            overlaps &= (start[d][a] < stop[d][b]) & (start[d][b] < stop[d][a])
        if overlaps.any():
            return int(a[overlaps.argmax()]), int(b[overlaps.argmax()])
    return None


def refuse_overlap(name: str, regions: Sequence[Region]) -> None:
    """Raise `RegionOverlap` naming the tensor and the two regions, if any two share an element."""
    if (pair := first_overlap(regions)) is not None:
        a = regions[pair[0]]
        b = regions[pair[1]]
        raise RegionOverlap(f"tensor {name!r}: regions {a} and {b} overlap; entries must not share elements")
