"""Scattered elements of a tensor, joined into boxes with strides.

    elements in the order of memory ──► runs along one axis ──► runs of equal runs along another ──► … ──► boxes

A run is joined to the next where that is one step further along an axis of the tensor, and all steps of the run are
equally long in memory.
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
    """Boxes of one tensor in the order of memory: where each begins in the tensor (`index`) and in memory (`at`).

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
        """A box for every element; with a width, for every `width` elements along the last axis."""
        form = (index.size, len(shape))
        size = np.ones(form, np.int64)
        stride = np.zeros(form, np.int64)
        if width > 1:
            size[:, -1] = width
            stride[:, -1] = 1
        return cls(shape, index, at, size, stride)

    @classmethod
    def concatenate(cls, boxes: Sequence[StridedBoxes]) -> StridedBoxes:
        """Boxes of one tensor, one after the other."""
        columns = (np.concatenate([getattr(b, c) for b in boxes]) for c in ("index", "at", "size", "stride"))
        return cls(boxes[0].shape, *columns)

    def each(self) -> Iterator[tuple[Region, int, Shape]]:
        """Each region, the place of its first element in memory, and its strides."""
        starts = np.unravel_index(self.index, self.shape) if self.shape else ()
        rows = (
            zip(zip(*(s.tolist() for s in starts), strict=True), self.size.tolist(), strict=True)
            if starts
            else [((), ())] * self.index.size  # an element that is there several times
        )
        for (start, size), at, stride in zip(rows, self.at.tolist(), self.stride.tolist(), strict=True):
            yield Region(tuple(start), tuple(size)), at, tuple(stride)

    def joined(self) -> StridedBoxes:
        """The same elements, with neighbours joined into larger boxes where possible."""
        axis, distance = self._links()
        links = _valid_links(axis, distance)
        starts = np.flatnonzero(np.concatenate([[True], ~links]))
        count = np.diff(np.append(starts, self.index.size))
        size = self.size[starts]
        stride = self.stride[starts]
        long = np.flatnonzero(count > 1)
        size[long, axis[starts[long]]] = count[long]
        stride[long, axis[starts[long]]] = distance[starts[long]]
        return StridedBoxes(self.shape, self.index[starts], self.at[starts], size, stride)

    def _links(self) -> tuple[Numbers, Numbers]:
        """The axis along which each box is followed by the next, or -1; and their distance in memory."""
        index = self.index[:-1]
        difference = np.diff(self.index)
        same_form = (self.size[1:] == self.size[:-1]).all(1) & (self.stride[1:] == self.stride[:-1]).all(1)
        axis = np.full(index.size, -1, np.int64)
        for k, step in enumerate(row_major(self.shape)):
            if (extent := self.shape[k]) > 1:
                follows = same_form & (difference == step) & (self.size[:-1, k] == 1)
                axis[follows & ((index // step) % extent + 1 < extent)] = k
        return axis, np.diff(self.at)


def _valid_links(axis: Numbers, distance: Numbers) -> npt.NDArray[np.bool_]:
    """Which links can be used together: all links of a chain have the same axis and distance.

    A link that differs from the link before it is dropped if that link is used, so that the next chain can begin. Of
    several differing links in a row, every second is dropped.
    """
    exists = axis >= 0
    same = np.zeros(axis.size, bool)
    same[1:] = exists[1:] & exists[:-1] & (axis[1:] == axis[:-1]) & (distance[1:] == distance[:-1])
    new = exists & ~same
    first = new & ~np.concatenate([[False], new[:-1]])
    start = np.maximum.accumulate(np.where(first, np.arange(axis.size), 0))
    used_before = np.concatenate([[False], same[:-1]])[start]
    odd = ((np.arange(axis.size) - start) % 2 == 1) ^ used_before
    valid: npt.NDArray[np.bool_] = exists & (same | ~odd)
    return valid


def join_all(boxes: StridedBoxes) -> StridedBoxes:
    """Join boxes until no two of them can be joined."""
    while (fewer := boxes.joined()).index.size < boxes.index.size:
        boxes = fewer
    return boxes
