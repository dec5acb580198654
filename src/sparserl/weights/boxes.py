"""Many regions of many tensors, two numbers each: boxes that are made when they are asked for.

The first and the last element of a box, counted in row-major order over its tensor, say which box it is. What is
before or behind what can be told of these numbers alone, for all boxes at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import overload

import numpy as np
import numpy.typing as npt

from .region import Numbers, Region, row_major
from .shards import Place
from .table import TensorTable

_AT_ONCE = 1 << 12  # boxes that are made together


class Boxes(Sequence["Region | None"]):
    """A region for each of some tensors, or None for all of one; see `Entries.region`."""

    def __init__(self, table: TensorTable, tensor: Numbers, first: Numbers, span: Numbers) -> None:
        """`first` is the position of a box's first element, `span` how far behind it the last one is.

        All of a tensor has a first of -1.
        """
        self.table, self.tensor, self.first, self.span = table, tensor, first, span

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
        for low in range(0, len(self), _AT_ONCE):
            some = slice(low, low + _AT_ONCE)
            yield from map(self._box, self.tensor[some].tolist(), self.first[some].tolist(), self.span[some].tolist())

    def select(self, which: slice | npt.NDArray[np.bool_] | Numbers) -> Boxes:
        """Those of them that are wanted."""
        return Boxes(self.table, self.tensor[which], self.first[which], self.span[which])

    @property
    def numbers(self) -> Numbers:
        """Where each box starts in every dimension and how far it goes, one box behind the other."""
        boxed = np.flatnonzero(self.first >= 0)
        rank, at, sizes = self.table.dimensions
        ranks = rank[self.tensor[boxed]]
        end = np.cumsum(2 * ranks)
        out = np.empty(int(end[-1]) if end.size else 0, np.int64)
        for r in np.unique(ranks).tolist():
            mine = np.flatnonzero(ranks == r)
            first, span = self.first[boxed[mine]], self.span[boxed[mine]]
            for d in reversed(range(r)):
                size = sizes[at[self.tensor[boxed[mine]]] + d]
                first, out[end[mine] - 2 * r + d] = np.divmod(first, size)
                span, last = np.divmod(span, size)
                out[end[mine] - r + d] = last + 1
        return out

    def _box(self, tensor: int, first: int, span: int) -> Region | None:
        if first < 0:
            return None
        start, size = [], []
        for stride in row_major(self.table.specs[tensor].shape):
            start.append(first // stride)
            size.append(span // stride + 1)
            first, span = first % stride, span % stride
        return Region(tuple(start), tuple(size))


class Places(Sequence[Place]):
    """Tensors and their regions."""

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
    """Tensors, and their regions."""
    if isinstance(places, Places):
        return places.regions.tensor, places.regions
    return np.array([tensor for tensor, _ in places], np.int64), [region for _, region in places]


def select(regions: Sequence[Region | None], which: npt.NDArray[np.bool_] | Numbers) -> Sequence[Region | None]:
    """Those of some regions that are wanted, by a flag for each or by their numbers."""
    if isinstance(regions, Boxes):
        return regions.select(which)
    numbers = np.flatnonzero(which) if which.dtype == bool else which
    return [regions[e] for e in numbers.tolist()]


def boxes(table: TensorTable, tensor: Numbers, parts: Sequence[Sequence[Region | None]]) -> Boxes:
    """Regions of tensors that come in several parts."""
    upto = np.cumsum([len(part) for part in parts])
    rows = [ends(table, its, part) for its, part in zip(np.split(tensor, upto[:-1]), parts, strict=True)]
    first, last = (np.concatenate(column) for column in zip(*rows, strict=True))
    return Boxes(table, tensor, np.where(last - first + 1 == table.numel[tensor], -1, first), last - first)


def ends(table: TensorTable, tensor: Numbers, regions: Sequence[Region | None]) -> tuple[Numbers, Numbers]:
    """The positions of the first and the last element of every region in its tensor; of no elements: 0 and -1."""
    if isinstance(regions, Boxes):
        everything = regions.first < 0
        if not everything.any():
            return regions.first, regions.first + regions.span
        first = np.where(everything, 0, regions.first)
        return first, np.where(everything, table.numel[tensor] - 1, first + regions.span)
    first, last = np.zeros(tensor.size, np.int64), table.numel[tensor] - 1
    for e, region in enumerate(regions):
        if region is not None:
            strides = row_major(table.specs[int(tensor[e])].shape)
            first[e] = low = sum(a * s for a, s in zip(region.start, strides, strict=True))
            last[e] = low + sum((n - 1) * s for n, s in zip(region.size, strides, strict=True))
    return first, last


def corners(table: TensorTable, tensor: Numbers, first: Numbers, last: Numbers) -> tuple[Numbers, Numbers]:
    """Where boxes start and stop, a row for each dimension of more than one element; as many for every tensor."""
    rank, at, sizes = table.wide
    dims = int(rank[tensor[0]]) if tensor.size else 0
    start, stop = np.empty((2, dims, tensor.size), np.int64)
    rest, span = first.copy(), last - first
    for d in reversed(range(dims)):
        size = sizes[at[tensor] + d]
        np.divmod(rest, size, out=(rest, start[d]))
        np.divmod(span, size, out=(span, stop[d]))
        stop[d] += start[d] + 1
    return start, stop


def elements(table: TensorTable, tensor: Numbers, first: Numbers, last: Numbers) -> Numbers:
    """How many elements boxes have."""
    out = last - first + 1
    ranks = table.wide.rank[tensor]
    for rank in np.unique(ranks[out > 0]).tolist():
        mine = np.flatnonzero((ranks == rank) & (out > 0))
        start, stop = corners(table, tensor[mine], first[mine], last[mine])
        out[mine] = (stop - start).prod(axis=0)
    return out
