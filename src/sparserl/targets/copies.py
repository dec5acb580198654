"""Copies between strided places, followed from one to the next.

    checkpoint ──copy──► a tensor on the way ──copy──► the engine's tensor        `through`: both copies as one

A place is an offset and, for every dimension, a stride, in elements of one memory. Two places of one memory are
compared in a frame of strides that both have, in which each stride is a multiple of the next: there both are boxes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ..weights.region import Region, Shape, row_major


class Untraceable(Exception):
    """A copy cannot be followed, since its places do not fit into one frame."""


class Dimension(NamedTuple):
    """So many elements, and the distances from one to the next in the destination and in the source."""

    size: int
    at: int
    source: int


class ElementCopy(NamedTuple):
    """Elements that come from a source: the offsets of the first one, and the dimensions with more than one."""

    at: int
    source: int
    dimensions: tuple[Dimension, ...]

    @classmethod
    def of(cls, shape: Shape, at: int, at_strides: Shape, source: int, source_strides: Shape) -> ElementCopy:
        """The copy of an array of this shape, which is not empty.

        Raises:
            Untraceable: an element is copied to several places.
        """
        rows = zip(shape, at_strides, source_strides, strict=True)
        dimensions = tuple(Dimension(*row) for row in rows if row[0] > 1)
        if any(dimension.source == 0 or dimension.at == 0 for dimension in dimensions):
            raise Untraceable
        return cls(at, source, _merged(dimensions))

    @property
    def end(self) -> int:
        """The offset behind the last element in the destination."""
        return self.at + sum((dimension.size - 1) * dimension.at for dimension in self.dimensions) + 1

    @property
    def source_end(self) -> int:
        """The offset behind the last element in the source."""
        return self.source + sum((dimension.size - 1) * dimension.source for dimension in self.dimensions) + 1

    def at_source(self) -> ElementCopy:
        """Its elements in the source, wherever they are copied to."""
        return ElementCopy(0, self.source, tuple(dimension._replace(at=0) for dimension in self.dimensions))

    def through(self, earlier: ElementCopy) -> ElementCopy | None:
        """What this copy takes of the elements that an earlier one has brought into its source; None for nothing.

        Example:
            >>> rows = ElementCopy.of((2, 3), 6, (3, 1), 0, (3, 1))  # two rows of a tensor, behind two others
            >>> turned = ElementCopy.of((3, 4), 0, (4, 1), 0, (1, 3))  # all of it, with its axes exchanged
            >>> [*map(tuple, turned.through(rows).dimensions)]  # sizes, and strides in both
            [(2, 1, 3), (3, 4, 1)]
        """
        frame = _frame([d.source for d in self.dimensions], [d.at for d in earlier.dimensions])
        mine = _in_frame(frame, self.source, [(d.size, d.source, d.at) for d in self.dimensions])
        theirs = _in_frame(frame, earlier.at, [(d.size, d.at, d.source) for d in earlier.dimensions])
        at = self.at
        source = earlier.source
        dimensions = []
        for own, other in zip(mine, theirs, strict=True):
            first = max(own.start, other.start)
            size = min(own.end, other.end) - first
            if size <= 0:
                return None
            at += (first - own.start) * own.distance
            source += (first - other.start) * other.distance
            if size > 1:
                dimensions.append(Dimension(size, own.distance, other.distance))
        return ElementCopy(at, source, _merged(dimensions))

    def overwrites(self, earlier: ElementCopy) -> bool:
        """Whether this copy takes the place of an earlier one to the same memory; False where it leaves it alone.

        Raises:
            Untraceable: it takes the place of some of its elements.
        """
        frame = _frame([d.at for d in self.dimensions], [d.at for d in earlier.dimensions])
        mine = _in_frame(frame, self.at, [(d.size, d.at, 0) for d in self.dimensions])
        theirs = _in_frame(frame, earlier.at, [(d.size, d.at, 0) for d in earlier.dimensions])
        pairs = [*zip(mine, theirs, strict=True)]
        if any(own.end <= other.start or other.end <= own.start for own, other in pairs):
            return False
        if all(own.start <= other.start and other.end <= own.end for own, other in pairs):
            return True
        raise Untraceable

    def region(self, shape: Shape) -> tuple[Region, Shape]:
        """The elements as a region of the source, an array of this shape in row-major order; their strides at the
        destination.
        """
        axes = {stride: axis for axis, stride in enumerate(row_major(shape)) if shape[axis] > 1}
        frame = _frame([*axes], [d.source for d in self.dimensions])
        start = [0] * len(shape)
        size = [1] * len(shape)
        strides = [0] * len(shape)
        spans = _in_frame(frame, self.source, [(d.size, d.source, d.at) for d in self.dimensions])
        for stride, span in zip(frame, spans, strict=True):
            axis = axes.get(stride)
            if axis is None:
                if span.start or span.size > 1:
                    raise Untraceable
                continue
            start[axis] = span.start
            size[axis] = span.size
            strides[axis] = span.distance if span.size > 1 else 0
        return Region(tuple(start), tuple(size)), tuple(strides)


def _merged(dimensions: Iterable[Dimension]) -> tuple[Dimension, ...]:
    """Dimensions, of which those that are one run in both memories are made one."""
    merged: list[Dimension] = []
    for outer in sorted(dimensions, key=lambda dimension: dimension.source):
        if merged:
            size, at, source = merged[-1]
            if outer.at == at * size and outer.source == source * size:
                merged[-1] = Dimension(outer.size * size, at, source)
                continue
        merged.append(outer)
    return tuple(merged[::-1])


class _Span(NamedTuple):
    """Where a place is along one stride of a frame, and the distance of its elements in the other memory."""

    start: int
    size: int
    distance: int

    @property
    def end(self) -> int:
        return self.start + self.size


def _frame(*strides: Iterable[int]) -> list[int]:
    """All these strides, from the largest to 1."""
    frame = sorted({1}.union(*strides), reverse=True)
    if any(larger % smaller for larger, smaller in zip(frame, frame[1:], strict=False)):
        raise Untraceable
    return frame


def _in_frame(frame: Sequence[int], offset: int, dimensions: Iterable[tuple[int, int, int]]) -> list[_Span]:
    """A place as a box in a frame; its dimensions are sizes, strides in this memory and in the other."""
    starts = []
    for stride in frame:
        start, offset = divmod(offset, stride)
        starts.append(start)
    by_stride: dict[int, tuple[int, int]] = {}
    for size, stride, distance in dimensions:
        if stride in by_stride:
            raise Untraceable
        by_stride[stride] = size, distance
    spans = []
    for index in range(len(frame) - 1, -1, -1):
        size, distance = by_stride.get(frame[index], (1, 0))
        start = starts[index]
        if index and start + size > (extent := frame[index - 1] // frame[index]):
            if start or size % extent or frame[index - 1] in by_stride:
                raise Untraceable
            by_stride[frame[index - 1]] = size // extent, distance * extent
            size = extent
        spans.append(_Span(start, size, distance))
    return spans[::-1]
