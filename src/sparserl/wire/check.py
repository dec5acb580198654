"""What must hold between the buckets of a patch, and between them and the footer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import overload

import numpy as np

from ..errors import InvalidField, LimitExceeded
from ..weights.boxes import Boxes, columns, corners, ends
from ..weights.region import Effort, Numbers, Region, cut_groups, first_overlapping_boxes, refuse_overlap, whole
from ..weights.shards import Place
from ..weights.table import TensorTable
from . import limits
from .bucket import Head

_BUCKETS_AT_ONCE = 1 << 10  # buckets whose places are joined at a time
_BOXES_AT_ONCE = 1 << 16  # boxes whose corners are in memory at a time
# the steps that looking for overlaps may take
_EFFORT = 1 << 22
_EFFORT_PER_BYTE = 8
# heads of more buckets than this, or with more entries in all, are read again when they are needed
_CACHED_HEADS = 1 << 14
_CACHED_ENTRIES = 1 << 20


class Heads(Sequence[Head]):
    """The heads of all buckets of a patch: the first ones from memory, the others read again when needed."""

    def __init__(self, cached: list[Head], count: int, read: Callable[[int], Head]) -> None:
        self._cached = cached
        self._count = count
        self._read = read

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Head: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Head]: ...

    def __getitem__(self, index: int | slice) -> Head | Sequence[Head]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self._count))]
        index = range(self._count)[index]
        return self._cached[index] if index < len(self._cached) else self._read(index)


class _Columns:
    """The places of many buckets, joined into few arrays."""

    def __init__(self, table: TensorTable) -> None:
        self._table = table
        self._rows: list[tuple[Numbers, Numbers, Numbers]] = []
        self._tensors: list[Numbers] = []
        self._regions: list[Region | None] = []

    def add(self, tensor: Numbers, regions: Sequence[Region | None]) -> None:
        if isinstance(regions, Boxes):
            self._rows.append((tensor, *ends(self._table, tensor, regions)))
            return
        self._tensors.append(tensor)
        self._regions += regions
        if len(self._tensors) > _BUCKETS_AT_ONCE:
            self._rows.append(self._row_of_lists())

    def join(self) -> tuple[Numbers, Numbers, Numbers]:
        """Tensors, and the positions of the first and the last element of their regions."""
        tensor, first, last = zip(*self._rows, self._row_of_lists(), strict=True)
        return np.concatenate(tensor), np.concatenate(first), np.concatenate(last)

    def _row_of_lists(self) -> tuple[Numbers, Numbers, Numbers]:
        """One row for the regions that came in lists since the last such row."""
        tensor = np.concatenate([np.empty(0, np.int64), *self._tensors])
        row = tensor, *ends(self._table, tensor, self._regions)
        self._tensors = []
        self._regions = []
        return row


class HeadGatherer:
    """The heads of a patch as its buckets come, one by one; they are then checked against one another.

    Heads are counted as they come, so that many small buckets cannot claim more entries than a patch may have.
    """

    def __init__(self, table: TensorTable) -> None:
        self._table = table
        self._cached: list[Head] = []
        self._rows = _Columns(table)
        self._count = 0
        self._entries = 0
        self._changes = 0

    def add(self, head: Head) -> None:
        """The head of the next bucket."""
        self._entries += len(head.entries)
        self._changes += int(head.entries.count.sum())
        if self._entries > limits.PATCH_ENTRIES:
            raise LimitExceeded(
                f"bucket {self._count}: {self._entries} entries in the patch so far, the limit is "
                f"{limits.PATCH_ENTRIES}"
            )
        self._rows.add(head.entries.tensor, head.entries.region)
        is_cached = self._entries <= _CACHED_ENTRIES or not self._count
        if len(self._cached) == self._count < _CACHED_HEADS and is_cached:
            self._cached.append(head)
        self._count += 1

    def finish(
        self, changed: int | None, covers: Sequence[Place] | None, size: int, read: Callable[[int], Head]
    ) -> Sequence[Head]:
        """All heads, checked against one another and against the footer.

        Args:
            changed: The number of changes in the footer; None where some buckets are left out.
            covers: The places that the patch covers; None for the whole table.
            size: The bytes of the patch.
            read: Reads a head again, by its number.
        """
        if changed is not None and self._changes != changed:
            raise InvalidField(f"the footer says {changed} changes, the buckets have {self._changes}")
        places = self._rows.join()
        if covers is not None:
            _require_covered(self._table, places, place_columns(self._table, covers))
        refuse_overlapping_places(self._table, *places, size)
        cached = self._cached
        return tuple(cached) if len(cached) == self._count else Heads(cached, self._count, read)


def place_columns(table: TensorTable, places: Sequence[Place]) -> tuple[Numbers, Numbers, Numbers]:
    """Tensors, and the positions of the first and the last element of their regions."""
    tensor, regions = columns(places)
    return tensor, *ends(table, tensor, regions)


def _require_covered(
    table: TensorTable, places: tuple[Numbers, Numbers, Numbers], covers: tuple[Numbers, Numbers, Numbers]
) -> None:
    """Every entry lies in one of the regions that the patch covers; the digests are over those alone."""
    # covers are in the order of their tensors
    (tensor, first, last) = places
    (owner, low, high) = covers
    covers_per_tensor = np.bincount(owner, minlength=len(table))
    pairs = covers_per_tensor[tensor]  # each entry is compared with all covers of its tensor
    if int(pairs.sum()) > limits.COMPARISONS:
        raise LimitExceeded("the patch has too many covered regions and entries to check that it covers its entries")
    entry = np.repeat(np.arange(tensor.size), pairs)
    begin = (np.cumsum(covers_per_tensor) - covers_per_tensor)[tensor] - (np.cumsum(pairs) - pairs)
    cover = np.arange(entry.size) + np.repeat(begin, pairs)
    between = (low[cover] <= first[entry]) & (last[entry] <= high[cover])
    entry = entry[between]
    cover = cover[between]
    covered = np.zeros(tensor.size, bool)
    same = (low[cover] == first[entry]) & (high[cover] == last[entry])
    covered[entry[same | (high[cover] - low[cover] + 1 == table.numel[owner[cover]])]] = True
    unsure = np.flatnonzero(~covered[entry])
    for batch in _batches_of_one_rank(table, tensor[entry[unsure]], None):
        e = entry[unsure[batch]]
        c = cover[unsure[batch]]
        start, stop = corners(table, tensor[e], first[e], last[e])
        outer_start, outer_stop = corners(table, owner[c], low[c], high[c])
        covered[e[((start >= outer_start) & (stop <= outer_stop)).all(axis=0)]] = True
    if not covered.all():
        t, region = _place(table, int(covered.argmin()), *places)
        raise InvalidField(f"tensor {table[t].name!r}: the patch has an entry for {region}, but does not cover it")


def refuse_overlapping_places(table: TensorTable, tensor: Numbers, first: Numbers, last: Numbers, size: int) -> None:
    """Raise `RegionOverlap` if places overlap: shared elements would be applied, or count in the digest, twice.

    Args:
        table: The tensor table.
        tensor: The tensor of each place.
        first: The position of its first element in the tensor.
        last: The position of its last element.
        size: The bytes that the places were read from; they bound the time that the search takes.
    """
    counts = np.bincount(tensor, minlength=len(table))
    if counts.max(initial=0) < 2:
        return
    if (too_many := counts > limits.REGIONS_PER_TENSOR).any():
        t = int(too_many.argmax())
        raise LimitExceeded(
            f"tensor {table[t].name!r} has {counts[t]} regions, the limit is {limits.REGIONS_PER_TENSOR}"
        )
    effort = Effort(_EFFORT + _EFFORT_PER_BYTE * size)
    places = np.flatnonzero((counts[tensor] > 1) & (last >= first))
    # the parts of a large tensor often lie one behind the other, which positions alone show
    places, groups, _ = cut_groups(places, tensor[places], first, last + 1)
    for batch in _batches_of_one_rank(table, tensor[places], groups):
        p = places[batch]
        pair = first_overlapping_boxes(groups[batch], *corners(table, tensor[p], first[p], last[p]), effort)
        if pair is not None:
            t, a = _place(table, int(p[pair[0]]), tensor, first, last)
            _, b = _place(table, int(p[pair[1]]), tensor, first, last)
            refuse_overlap(table[t].name, [a, b])


def _batches_of_one_rank(table: TensorTable, tensor: Numbers, groups: Numbers | None) -> Iterator[Numbers]:
    """Indices of places whose tensors have equally many dimensions, some at a time; a group is never divided.

    The numbers of the groups rise.
    """
    rank = table.wide.rank[tensor] if tensor.size else tensor
    for r in np.unique(rank).tolist():
        indices = np.flatnonzero(rank == r)
        low = 0
        while low < indices.size:
            high = min(indices.size, low + _BOXES_AT_ONCE)
            if groups is not None and high < indices.size:
                rank_groups = groups[indices]
                begin = int(np.searchsorted(rank_groups, rank_groups[high]))
                high = begin if begin > low else int(np.searchsorted(rank_groups, rank_groups[high], side="right"))
            yield indices[low:high]
            low = high


def _place(table: TensorTable, index: int, tensor: Numbers, first: Numbers, last: Numbers) -> tuple[int, Region]:
    """The tensor of a place, and its region."""
    row = slice(index, index + 1)
    t = int(tensor[index])
    region = Boxes(table, tensor[row], first[row], (last - first)[row])[0]
    return t, region or whole(table[t].shape)
