"""Boxes of a tensor: splitting, geometry, overlap and coverage."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .errors import LimitExceeded, RegionOverlap

Shape = tuple[int, ...]
Order = npt.NDArray[np.intp]
_PAIRS = 1 << 27  # of regions to compare, a second or two; far above what any sharding or splitting makes


@dataclass(frozen=True, order=True, slots=True)
class Region:
    """A box of a tensor: where it starts and how far it goes, in every dimension.

    Positions inside a region count its elements in row-major order.
    """

    start: Shape
    size: Shape

    def __post_init__(self) -> None:
        if len(self.start) != len(self.size):
            raise ValueError(f"region starts in {len(self.start)} dimensions and extends in {len(self.size)}")

    @property
    def numel(self) -> int:
        return math.prod(self.size)

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(a, a + n) for a, n in zip(self.start, self.size, strict=True))

    def fits(self, shape: Shape) -> bool:
        """Whether the region lies inside a tensor of this shape and holds at least one element."""
        return len(self.start) == len(shape) and all(
            a >= 0 and n >= 1 and a + n <= d for a, n, d in zip(self.start, self.size, shape, strict=True)
        )

    def inside(self, other: Region) -> bool:
        """Whether every element of this region is one of the other's."""
        return all(
            a >= b and a + n <= b + m for a, n, b, m in zip(self.start, self.size, other.start, other.size, strict=True)
        )

    def split(self, limit: int) -> Iterator[Region]:
        """Boxes of at most `limit` elements, in order: each is a run of consecutive positions of this one."""
        axis = 0
        inner = self.numel
        while axis < len(self.size) and inner > limit:
            inner //= self.size[axis]
            axis += 1
        if axis == 0:
            yield self
            return
        axis -= 1
        step = max(1, limit // inner)
        for head in np.ndindex(*self.size[:axis]):
            lead = tuple(a + i for a, i in zip(self.start, head, strict=False))
            for i in range(0, self.size[axis], step):
                size = min(step, self.size[axis] - i)
                yield Region(
                    (*lead, self.start[axis] + i, *self.start[axis + 1 :]),
                    ((1,) * axis + (size,) + self.size[axis + 1 :]),
                )

    def __str__(self) -> str:
        return "[" + ", ".join(f"{a}:{a + n}" for a, n in zip(self.start, self.size, strict=True)) + "]"


def whole(shape: Shape) -> Region:
    """The region that is all of a tensor."""
    return Region((0,) * len(shape), shape)


def row_major(shape: Shape) -> Shape:
    """Strides, in elements, of a contiguous tensor."""
    strides = [1] * len(shape)
    for d in range(len(shape) - 2, -1, -1):
        strides[d] = strides[d + 1] * shape[d + 1]
    return tuple(strides)


def collapse(size: Shape, *strides: Shape) -> tuple[Shape, tuple[Shape, ...]]:
    """The same box with as few dimensions as possible: neighbours merge where every stride list allows it."""
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


def first_overlap(regions: Sequence[Region]) -> tuple[int, int] | None:
    """Two indices whose regions share an element, or None. Sweeps along the dimension that tells most apart."""
    if len(regions) < 2:
        return None
    if not regions[0].size:
        return (0, 1)
    start = np.array([r.start for r in regions], np.int64)
    stop = start + np.array([r.size for r in regions], np.int64)
    pairs, order, reach = min((_sweep(a, b) for a, b in zip(start.T, stop.T, strict=True)), key=lambda s: s[0])
    if pairs > _PAIRS:
        raise LimitExceeded(f"{len(regions)} regions of a tensor are too entangled to tell whether they overlap")
    start, stop = start[order], stop[order]
    for i in np.flatnonzero(reach > np.arange(1, len(regions) + 1)):
        rivals = slice(i + 1, reach[i])
        hit = ((start[rivals] < stop[i]) & (start[i] < stop[rivals])).all(axis=1)
        if hit.any():
            return int(order[i]), int(order[i + 1 + int(hit.argmax())])
    return None


def _sweep(start: npt.NDArray[np.int64], stop: npt.NDArray[np.int64]) -> tuple[int, Order, Order]:
    """Along one dimension: how many pairs it leaves to compare, the order, and how far each reaches in it."""
    order = np.argsort(start, kind="stable")
    reach = np.searchsorted(start[order], stop[order], side="left")
    return int((reach - np.arange(1, start.size + 1)).sum()), order, reach


def refuse_overlap(name: str, regions: Sequence[Region]) -> None:
    """Raise `RegionOverlap` naming the tensor and the two regions, if any two share an element."""
    if (pair := first_overlap(regions)) is not None:
        a, b = regions[pair[0]], regions[pair[1]]
        raise RegionOverlap(f"tensor {name!r}: regions {a} and {b} overlap; entries must not share elements")
