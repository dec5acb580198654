"""The parts of the weights that receivers have, and how a publisher cuts its weights along them.

A rank of an engine has a holding: some places of some tensors. Cut along all holdings, weights become cells, each of
which a receiver has all of, or nothing. Buckets of cells that the same receivers have are then for these alone.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from .region import Numbers, Region, whole
from .shards import Place
from .table import TensorTable

MOST_NAMES = 64  # of holdings, in a manifest
MOST_HOLDINGS = 2 * MOST_NAMES  # that weights are cut along: two can share a name
MOST_PLACES = 1 << 19  # of all holdings together
_MOST_BOXES = 512  # of a tensor: one that has more is not cut
_MOST_CELLS = 256  # of a place
_MOST_ENTRIES = 1 << 19  # cells of all places
_SPARE_GROUPS = 8  # there may be twice as many groups of cells as holdings, and so many more
_KEPT_PLACES = _MOST_ENTRIES  # of which it is remembered which holdings they are in
SHARED_DIGITS = 8  # of each of two names that share one


def number_of(name: str | None, names: Sequence[str]) -> int | None:
    """Which of the names of a manifest stands for a holding; None if it is not known there."""
    if name is None or name in names:
        return None if name is None else names.index(name)
    if len(names) < MOST_NAMES:
        return None
    digits = name[:SHARED_DIGITS]
    shared = (number for number, other in enumerate(names) if digits in (other[:SHARED_DIGITS], other[SHARED_DIGITS:]))
    return next(shared, None)


class Touched(NamedTuple):
    """Which holdings a region is in, and of which it is only partly in: a bit for each name, in their order."""

    holdings: int
    partly: int

    def __or__(self, other: object) -> Touched:
        assert isinstance(other, Touched)
        return Touched(self.holdings | other.holdings, self.partly | other.partly)


class _Boxes(NamedTuple):
    """The parts of one tensor that receivers have."""

    start: Numbers
    stop: Numbers
    owner: Numbers  # the number of the holding of each

    def touched(self, box: Region) -> Touched:
        """The holdings that have a part of a region, and those that do not have all of it in one part."""
        start = np.array(box.start, np.int64)
        stop = start + np.array(box.size, np.int64)
        overlaps = ((start < self.stop) & (self.start < stop)).all(-1)
        inside = ((start >= self.start) & (stop <= self.stop)).all(-1)
        owners = {*self.owner[overlaps].tolist()}
        return Touched(_bits(owners), _bits(owners - {*self.owner[inside].tolist()}))


def _bits(owners: Iterable[int]) -> int:
    return sum(1 << number for number in {owner % MOST_NAMES for owner in owners})


class Holdings:
    """The holdings of several receivers.

    Args:
        table: The tensor table of the weights.
        places: The places of every holding, by its name. If there are more than a manifest can name, no two names begin
            with the same eight digits.
        is_every: Whether no receiver has other parts.

    Attributes:
        names: Of the holdings, in a manifest. If it cannot name each, every name is made of the first digits of two.
        are_cut: Whether no receiver has a part of a cell, so that all take any profile. Where it would take too many
            cells, or the names of two are one, some may not.
    """

    def __init__(self, table: TensorTable, places: Mapping[str, Sequence[Place]], *, is_every: bool = True) -> None:
        self.table = table
        self.names = tuple(places)
        has_names = len(places) <= MOST_NAMES
        if not has_names:
            others = self.names[MOST_NAMES:] + self.names[len(places) - MOST_NAMES : MOST_NAMES]
            self.names = tuple(a[:SHARED_DIGITS] + b[:SHARED_DIGITS] for a, b in zip(self.names, others, strict=False))
        self._boxes = self._collect(places)
        self._touched: dict[Place, Touched] = {}
        self._cells: dict[Place, list[Place]] = {}  # of places that were cut, as every publish cuts them
        is_whole = not any(self._touched_by(cell).partly for cells in self.cells(table.places) for cell in cells)
        self.are_cut = is_every and has_names and is_whole

    def touched(self, places: Iterable[Place]) -> Touched:
        """Which holdings some places are in."""
        touched = Touched(0, 0)
        for place in places:
            touched |= self._touched_by(place)
        return touched

    def cells(self, places: Sequence[Place]) -> list[list[Place]]:
        """Places cut along the holdings, those that are in the same holdings together, in the order of the places.

        If there would be too many cells or groups, the places are returned as they are.
        """
        groups: dict[int, list[Place]] = {}
        count = 0
        for place in places:
            cells = self._cells.get(place)
            if cells is None:
                cells = self._cells[place] = self._cells_of(place)
            count += len(cells)
            for cell in cells:
                groups.setdefault(self._touched_by(cell).holdings, []).append(cell)
            if count > max(_MOST_ENTRIES, len(places)) or len(groups) > 2 * len(self.names) + _SPARE_GROUPS:
                return [[*places]]
        return [groups[key] for key in sorted(groups)]

    def _collect(self, places: Mapping[str, Sequence[Place]]) -> dict[int, _Boxes]:
        rows: dict[int, list[tuple[Region, int]]] = {}
        for number, holding in enumerate(places.values()):
            for tensor, region in holding:
                rows.setdefault(tensor, []).append((region or whole(self.table[tensor].shape), number))
        boxes = {}
        for tensor, own in rows.items():
            start = np.array([box.start for box, _ in own], np.int64)
            owner = np.array([number for _, number in own], np.int64)
            boxes[tensor] = _Boxes(start, start + np.array([box.size for box, _ in own], np.int64), owner)
        return boxes

    def _touched_by(self, place: Place) -> Touched:
        touched = self._touched.get(place)
        if touched is not None:
            return touched
        box = self._box(place)
        boxes = self._boxes.get(place[0])
        touched = Touched(0, 0) if boxes is None or not box.numel else boxes.touched(box)
        if len(self._touched) >= _KEPT_PLACES:
            self._touched.clear()
        self._touched[place] = touched
        return touched

    def _cells_of(self, place: Place) -> list[Place]:
        tensor, _ = place
        if not self._touched_by(place).partly:
            return [place]
        box = self._box(place)
        boxes = self._boxes[tensor]
        start = np.array(box.start, np.int64)
        stop = start + np.array(box.size, np.int64)
        overlaps = ((boxes.start < stop) & (start < boxes.stop)).all(-1)
        if int(overlaps.sum()) > _MOST_BOXES:
            return [place]  # receivers slice it
        firsts = np.maximum(boxes.start[overlaps], start)
        lasts = np.minimum(boxes.stop[overlaps], stop)
        spans = []
        for axis in range(start.size):
            edges = np.unique(np.concatenate([firsts[:, axis], lasts[:, axis], [start[axis], stop[axis]]])).tolist()
            spans.append([*itertools.pairwise(edges)])
        if math.prod(map(len, spans)) > _MOST_CELLS:
            return [place]
        return [
            (tensor, Region(tuple(a for a, _ in cell), tuple(b - a for a, b in cell)))
            for cell in itertools.product(*spans)
        ]

    def _box(self, place: Place) -> Region:
        return place[1] or whole(self.table[place[0]].shape)
