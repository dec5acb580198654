"""Very many regions as columns of numbers; a `Region` is created only when it is read.

The positions of a box's first and last element in its tensor, in row-major order, identify the box. They also give the
order of boxes, so that all boxes are compared at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import overload

import numpy as np
import numpy.typing as npt

from .region import Numbers, Region, all_whole, row_major
from .shards import Place
from .table import TensorTable

_TOGETHER = 1 << 12  # boxes that are created together


class Boxes(Sequence["Region | None"]):
    """A sequence of regions, each of one tensor; None is a whole tensor. See `Entries.region`."""

    def __init__(self, table: TensorTable, tensor: Numbers, first: Numbers, span: Numbers) -> None:
        """`first` is the position of a box's first element (-1 for a whole tensor), `span` the distance to its last."""
        self.table = table
        self.tensor = tensor
        self.first = first
        self.span = span

    def __len__(self) -> int:
        return int(self.tensor.size)

    @overload
    def __getitem__(self, index: int) -> Region | None: ...

    @overload
    def __getitem__(self, index: slice) -> Boxes: ...

    def __getitem__(self, index: int | slice) -> Region | Boxes | None:
        if isinstance(index, slice):
            return self.select(index)
        return self._box(int(self.tensor[index]), int(self.first[index]), int(self.span[index]))

    def __iter__(self) -> Iterator[Region | None]:
        for low in range(0, len(self), _TOGETHER):
            rows = slice(low, low + _TOGETHER)
            yield from map(self._box, self.tensor[rows].tolist(), self.first[rows].tolist(), self.span[rows].tolist())

    def select(self, which: slice | npt.NDArray[np.bool_] | Numbers) -> Boxes:
        """The boxes of a slice, of flags, or of indices."""
        return Boxes(self.table, self.tensor[which], self.first[which], self.span[which])

    @property
    def numbers(self) -> Numbers:
        """Start and size of every box in every dimension, one box behind the other; whole tensors are left out."""
        boxed = np.flatnonzero(self.first >= 0)
        rank, offset, sizes = self.table.dimensions
        ranks = rank[self.tensor[boxed]]
        end = np.cumsum(2 * ranks)
        out = np.empty(int(end[-1]) if end.size else 0, np.int64)
        for r in np.unique(ranks).tolist():
            rows = np.flatnonzero(ranks == r)
            first = self.first[boxed[rows]]
            span = self.span[boxed[rows]]
            for d in reversed(range(r)):
                size = sizes[offset[self.tensor[boxed[rows]]] + d]
                first, out[end[rows] - 2 * r + d] = np.divmod(first, size)
                span, last = np.divmod(span, size)
                out[end[rows] - r + d] = last + 1
        return out

    def _box(self, tensor: int, first: int, span: int) -> Region | None:
        if first < 0:
            return None
        start = []
        size = []
        for stride in row_major(self.table.specs[tensor].shape):
            start.append(first // stride)
            size.append(span // stride + 1)
            first %= stride
            span %= stride
        return Region(tuple(start), tuple(size))


class Places(Sequence[Place]):
    """A sequence of places (tensor, region), stored as `Boxes`."""

    def __init__(self, regions: Boxes) -> None:
        self.regions = regions

    def __len__(self) -> int:
        return len(self.regions)

    @overload
    def __getitem__(self, index: int) -> Place: ...

    @overload
    def __getitem__(self, index: slice) -> Places: ...

    def __getitem__(self, index: int | slice) -> Place | Places:
        if isinstance(index, slice):
            return Places(self.regions[index])
        return int(self.regions.tensor[index]), self.regions[index]

    def __iter__(self) -> Iterator[Place]:
        return zip(map(int, self.regions.tensor), self.regions, strict=True)


def columns(places: Sequence[Place]) -> tuple[Numbers, Sequence[Region | None]]:
    """The tensors of places, and their regions."""
    if isinstance(places, Places):
        return places.regions.tensor, places.regions
    return np.array([tensor for tensor, _ in places], np.int64), [region for _, region in places]


def select(regions: Sequence[Region | None], which: npt.NDArray[np.bool_] | Numbers) -> Sequence[Region | None]:
    """The regions of flags or of indices."""
    if isinstance(regions, Boxes):
        return regions.select(which)
    numbers = np.flatnonzero(which) if which.dtype == bool else which
    return [regions[e] for e in numbers.tolist()]


def boxes(table: TensorTable, tensor: Numbers, parts: Sequence[Sequence[Region | None]]) -> Boxes:
    """Several sequences of regions as one; `tensor` has the tensors of all of them."""
    part_ends = np.cumsum([len(part) for part in parts])
    tensors = np.split(tensor, part_ends[:-1])
    rows = [ends(table, its, part) for its, part in zip(tensors, parts, strict=True)]
    first, last = (np.concatenate(column) for column in zip(*rows, strict=True))
    return Boxes(table, tensor, np.where(last - first + 1 == table.numel[tensor], -1, first), last - first)


def ends(table: TensorTable, tensor: Numbers, regions: Sequence[Region | None]) -> tuple[Numbers, Numbers]:
    """The positions of the first and the last element of every region in its tensor; 0 and -1 if it has none."""
    if isinstance(regions, Boxes):
        is_whole = regions.first < 0
        if not is_whole.any():
            return regions.first, regions.first + regions.span
        first = np.where(is_whole, 0, regions.first)
        return first, np.where(is_whole, table.numel[tensor] - 1, first + regions.span)
    first = np.zeros(tensor.size, np.int64)
    last = table.numel[tensor] - 1
    if all_whole(regions):
        return first, last
    for e, region in enumerate(regions):
        if region is not None:
            strides = row_major(table.specs[int(tensor[e])].shape)
            first[e] = low = sum(a * s for a, s in zip(region.start, strides, strict=True))
            last[e] = low + sum((n - 1) * s for n, s in zip(region.size, strides, strict=True))
    return first, last


def corners(table: TensorTable, tensor: Numbers, first: Numbers, last: Numbers) -> tuple[Numbers, Numbers]:
    """Start and stop of boxes, a row for each dimension of more than one index; all tensors must have as many."""
    rank, offset, sizes = table.wide
    dims = int(rank[tensor[0]]) if tensor.size else 0
    start, stop = np.empty((2, dims, tensor.size), np.int64)
    rest = first.copy()
    span = last - first
    for d in reversed(range(dims)):
        size = sizes[offset[tensor] + d]
        np.divmod(rest, size, out=(rest, start[d]))
        np.divmod(span, size, out=(span, stop[d]))
        stop[d] += start[d] + 1
    return start, stop


def elements(table: TensorTable, tensor: Numbers, first: Numbers, last: Numbers) -> Numbers:
    """The number of elements of each box."""
    out = last - first + 1
    ranks = table.wide.rank[tensor]
    for rank in np.unique(ranks[out > 0]).tolist():
        rows = np.flatnonzero((ranks == rank) & (out > 0))
        start, stop = corners(table, tensor[rows], first[rows], last[rows])
        out[rows] = (stop - start).prod(axis=0)
    return out
