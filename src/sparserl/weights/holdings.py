"""The parts of the weights that receivers have, and how a publisher cuts its weights along them.

A rank of an engine has a holding: some places of some tensors. Cut along all holdings, weights become cells, each of
which a receiver has all of, or nothing. Buckets of cells that the same receivers have are then for these alone.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from .region import Region, intersection, whole
from .shards import Place
from .table import TensorTable

MOST_HOLDINGS = 64  # that weights are cut along
_MOST_CELLS = 1 << 12  # of a place


class Touched(NamedTuple):
    """Which holdings a region is in, and of which it is only partly in: a bit for each, in their order."""

    holdings: int
    partly: int

    def __or__(self, other: object) -> Touched:
        assert isinstance(other, Touched)
        return Touched(self.holdings | other.holdings, self.partly | other.partly)


class Holdings:
    """The holdings of several receivers.

    Args:
        table: The tensor table of the weights.
        places: The places of every holding, by its name.
    """

    def __init__(self, table: TensorTable, places: Mapping[str, Sequence[Place]]) -> None:
        self.table = table
        self.names = tuple(places)
        self._boxes: dict[int, list[tuple[int, Region]]] = {}  # of every tensor, with the number of their holding
        for number, holding in enumerate(places.values()):
            for tensor, region in holding:
                self._boxes.setdefault(tensor, []).append((number, region or whole(table[tensor].shape)))
        self._touched: dict[Place, Touched] = {}

    def touched(self, places: Iterable[Place]) -> Touched:
        """Which holdings some places are in."""
        touched = Touched(0, 0)
        for place in places:
            touched |= self._touched_by(place)
        return touched

    def cells(self, places: Iterable[Place]) -> list[list[Place]]:
        """Places cut along the holdings, those that are in the same holdings together, in the order of the places."""
        groups: dict[int, list[Place]] = {}
        for place in places:
            for cell in self._cells_of(place):
                groups.setdefault(self._touched_by(cell).holdings, []).append(cell)
        return [groups[key] for key in sorted(groups)]

    def _touched_by(self, place: Place) -> Touched:
        touched = self._touched.get(place)
        if touched is None:
            box = self._box(place)
            holdings = 0
            inside = 0
            for number, other in self._boxes.get(place[0], ()):
                if intersection(box, other) is not None:
                    holdings |= 1 << number
                    inside |= box.inside(other) << number
            touched = self._touched[place] = Touched(holdings, holdings & ~inside)
        return touched

    def _cells_of(self, place: Place) -> Iterator[Place]:
        tensor, _ = place
        box = self._box(place)
        if not box.numel or not self._touched_by(place).partly:
            yield place
            return
        spans = [[*itertools.pairwise(sorted(edges))] for edges in self._edges(tensor, box)]
        if math.prod(map(len, spans)) > _MOST_CELLS:
            yield place  # receivers slice it
            return
        for cell in itertools.product(*spans):
            yield tensor, Region(tuple(start for start, _ in cell), tuple(stop - start for start, stop in cell))

    def _edges(self, tensor: int, box: Region) -> list[set[int]]:
        """Where a box is cut, axis by axis: at its own ends, and at those of holdings in it."""
        edges = [{start, start + size} for start, size in zip(box.start, box.size, strict=True)]
        for _, other in self._boxes[tensor]:
            common = intersection(box, other)
            if common is not None:
                for cuts, start, size in zip(edges, common.start, common.size, strict=True):
                    cuts.update((start, start + size))
        return edges

    def _box(self, place: Place) -> Region:
        return place[1] or whole(self.table[place[0]].shape)
