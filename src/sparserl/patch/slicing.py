"""The changes of a patch that are in the parts of one rank.

A bucket is decoded once, and its entries are cut along the parts. Steps stay steps, so that old bits are not needed;
but `ctx`, which depends on all old bits of an entry, can only be decoded where the parts contain all of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from ..codec.profile import Positions
from ..weights.dtypes import UIntArray
from ..weights.local import LocalWeights
from ..weights.region import Region, Shape, intersection, whole
from ..weights.shards import Place
from ..wire import Entries, Head
from .decode import Decoded, flatten
from .overlay import write_regions
from .staging import entry_geometry, overlay, stage

_MOST_ELEMENTS = 1 << 31  # of a part: positions in it are of 32 bits
PROFILES = frozenset(("raw", "gap", "ulp"))  # profiles whose patches can be sliced


class PatchSlicer:
    """Cuts patches along the parts of one rank."""

    def __init__(self, weights: LocalWeights) -> None:
        self._table = weights.table
        self._parts: dict[int, list[Region | None]] = {}
        for tensor, region in weights.places:
            parts = self._parts.setdefault(tensor, [])
            box = region or whole(self._shape(tensor))
            if box.numel > _MOST_ELEMENTS:
                parts.extend(box.split(_MOST_ELEMENTS))
            else:
                parts.append(region)

    def touches(self, head: Head) -> bool:
        """Whether a bucket changes anything in the parts."""
        return any(
            intersection(region or whole(self._shape(tensor)), part or whole(self._shape(tensor))) is not None
            for tensor, region in head.entries.places()
            for part in self._parts.get(tensor, ())
        )

    def slice(self, decoded: Decoded) -> Decoded:
        """A bucket with only the changes that are in the parts."""
        rows: list[tuple[Place, int, int, bool]] = []
        positions = list[Positions]()
        words = list[UIntArray]()
        dense = list[UIntArray]()
        offset = 0
        for place, count in zip(decoded.sparse_places, decoded.sparse_count.tolist(), strict=True):
            flat = flatten(self._table, place, decoded.positions[offset : offset + count])
            entry_words = decoded.words[offset : offset + count]
            offset += count
            for region in self._parts.get(place[0], ()):
                inside, local = positions_within(flat, self._shape(place[0]), region)
                if local.size:
                    rows.append(((place[0], region), local.size, self._numel(place[0], region), False))
                    positions.append(local)
                    words.append(entry_words[inside])
        for (tensor, region), bits in decoded.dense_bits:
            for common, part in self._common(tensor, region, bits):
                rows.append(((tensor, common), part.size, part.size, True))
                dense.append(part)
        return replace(
            decoded,
            head=replace(decoded.head, entries=_entries(rows)),
            positions=np.concatenate([np.empty(0, np.uint32), *positions]),
            words=np.concatenate([decoded.words[:0], *words]),
            dense=np.concatenate([decoded.dense[:0], *dense]),
            old=None,
        )

    def _shape(self, tensor: int) -> Shape:
        return self._table[tensor].shape

    def _numel(self, tensor: int, region: Region | None) -> int:
        return self._table[tensor].numel if region is None else region.numel

    def _common(self, tensor: int, region: Region | None, bits: UIntArray) -> Iterator[tuple[Region | None, UIntArray]]:
        """The intersection of a region with each part of its tensor, and the bits of the region in it."""
        whole_tensor = whole(self._shape(tensor))
        outer = region or whole_tensor
        for common in self.common_regions(tensor, region):
            share = bits.reshape(outer.size)[inside(common, outer).slices].reshape(-1)
            yield (None if common == whole_tensor else common), share

    def common_regions(self, tensor: int, region: Region | None) -> Iterator[Region]:
        """The intersection of a region with each part of its tensor."""
        whole_tensor = whole(self._shape(tensor))
        for part in self._parts.get(tensor, ()):
            if (common := intersection(region or whole_tensor, part or whole_tensor)) is not None:
                yield common


def inside(region: Region, outer: Region) -> Region:
    """A region in the coordinates of one that contains it."""
    return Region(tuple(a - b for a, b in zip(region.start, outer.start, strict=True)), region.size)


def _entries(rows: list[tuple[Place, int, int, bool]]) -> Entries:
    tensors = [place[0] for place, *_ in rows]
    regions = [place[1] for place, *_ in rows]
    count, numel = (np.array([row[i] for row in rows], np.int64) for i in (1, 2))
    return Entries(np.array(tensors, np.int64), count, np.array([row[3] for row in rows], bool), regions, numel)


def positions_within(
    flat: np.ndarray[tuple[int], np.dtype[np.int64]], shape: Shape, region: Region | None
) -> tuple[slice | np.ndarray, Positions]:
    """Which positions in a tensor are in a region of it, and their positions in the region."""
    if region is None:
        return slice(None), flat.astype(np.uint32)
    coordinates = np.unravel_index(flat, shape)
    inside = np.ones(flat.size, bool)
    for c, a, n in zip(coordinates, region.start, region.size, strict=True):
        inside &= (c >= a) & (c < a + n)
    local = [c[inside] - a for c, a in zip(coordinates, region.start, strict=True)]
    return inside, np.ravel_multi_index(local, region.size).astype(np.uint32)


def write_slices(weights: LocalWeights, slicer: PatchSlicer, decoded: Decoded) -> None:
    """Write the changes of a bucket that are in the parts. Nothing is kept to undo it."""
    for part in decoded.parts():
        sliced = slicer.slice(part)
        if not sliced.head.profile.absolute or (weights.gpu_streams and sliced.positions.size):
            stage(weights, sliced).new.write(weights)
            continue
        if sliced.positions.size:
            overlay(entry_geometry(weights, sliced.head), sliced, sliced.words).scatter()
        write_regions(weights, sliced.dense_bits)
