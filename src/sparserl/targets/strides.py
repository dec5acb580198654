"""Scattered elements of a tensor, joined into boxes with strides.

    elements in the order of memory ──► runs along one axis ──► runs of equal runs along another ──► … ──► boxes

A run is joined to the next where that is one step further along an axis of the tensor, and all steps of the run are
equally far in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..weights.region import Region, Shape, row_major

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class StridedBoxes:
    """Boxes of one tensor in the order of memory: where each begins in the tensor and in memory, its size and strides.

    >>> at, index = np.arange(6), np.array([1, 2, 4, 5, 7, 8])
    >>> [(str(region), *place) for region, *place in join_all(StridedBoxes.of(at, index, (3, 3))).each()]
    [('[0:3, 1:3]', 0, (2, 1))]
    """

    shape: Shape
    index: Numbers
    at: Numbers
    size: Numbers
    stride: Numbers

    @classmethod
    def of(cls, at: Numbers, index: Numbers, shape: Shape, width: int = 1) -> StridedBoxes:
        """Every element on its own; with a width, so many in a row along the last axis."""
        form = (index.size, len(shape))
        size = np.ones(form, np.int64)
        stride = np.zeros(form, np.int64)
        if width > 1:
            size[:, -1] = width
            stride[:, -1] = 1
        return cls(shape, index, at, size, stride)

    @classmethod
    def concatenate(cls, several: Sequence[StridedBoxes]) -> StridedBoxes:
        """Boxes of one tensor, one after the other."""
        columns = (np.concatenate([getattr(b, c) for b in several]) for c in ("index", "at", "size", "stride"))
        return cls(several[0].shape, *columns)

    def each(self) -> Iterator[tuple[Region, int, Shape]]:
        """Region, where its first element lies, and how far apart its elements are along each axis."""
        starts = np.unravel_index(self.index, self.shape) if self.shape else ()
        rows = (
            zip(zip(*(s.tolist() for s in starts), strict=True), self.size.tolist(), strict=True)
            if starts
            else [((), ())]
        )
        for (start, size), at, stride in zip(rows, self.at.tolist(), self.stride.tolist(), strict=True):
            yield Region(tuple(start), tuple(size)), at, tuple(stride)

    def joined(self) -> StridedBoxes:
        """The same elements, with neighbours made one box where they can be."""
        axis, apart = self._links()
        kept = _kept(axis, apart)
        starts = np.flatnonzero(np.concatenate([[True], ~kept]))
        count = np.diff(np.append(starts, self.index.size))
        size = self.size[starts]
        stride = self.stride[starts]
        some = np.flatnonzero(count > 1)
        size[some, axis[starts[some]]] = count[some]
        stride[some, axis[starts[some]]] = apart[starts[some]]
        return StridedBoxes(self.shape, self.index[starts], self.at[starts], size, stride)

    def _links(self) -> tuple[Numbers, Numbers]:
        """The axis along which each box is followed by the next, -1 where by none; and how far apart they lie."""
        here = self.index[:-1]
        further = np.diff(self.index)
        alike = (self.size[1:] == self.size[:-1]).all(1) & (self.stride[1:] == self.stride[:-1]).all(1)
        axis = np.full(here.size, -1, np.int64)
        for k, step in enumerate(row_major(self.shape)):
            if (extent := self.shape[k]) > 1:
                next_one = alike & (further == step) & (self.size[:-1, k] == 1)
                axis[next_one & ((here // step) % extent + 1 < extent)] = k
        return axis, np.diff(self.at)


def _kept(axis: Numbers, apart: Numbers) -> npt.NDArray[np.bool_]:
    """Which links hold: along a chain all go the same way, and one that goes another way begins the next chain.

    A link that differs from the one before is cut, if that one holds; of several in a row, every other one is.
    """
    there = axis >= 0
    same = np.zeros(axis.size, bool)
    same[1:] = there[1:] & there[:-1] & (axis[1:] == axis[:-1]) & (apart[1:] == apart[:-1])
    new = there & ~same
    first = new & ~np.concatenate([[False], new[:-1]])
    begun = np.maximum.accumulate(np.where(first, np.arange(axis.size), 0))
    held_before = np.concatenate([[False], same[:-1]])[begun]
    odd = ((np.arange(axis.size) - begun) % 2 == 1) ^ held_before
    kept: npt.NDArray[np.bool_] = there & (same | ~odd)
    return kept


def join_all(boxes: StridedBoxes) -> StridedBoxes:
    """Join boxes until no two of them can be joined."""
    while (fewer := boxes.joined()).index.size < boxes.index.size:
        boxes = fewer
    return boxes
