"""What must hold between the buckets of a patch, and between them and the footer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import overload

import numpy as np

from ..errors import InvalidField, LimitExceeded
from ..weights.boxes import Boxes, columns, corners, ends
from ..weights.region import Effort, Numbers, Region, first_shared, parted, refuse_overlap, whole
from ..weights.shards import Place
from ..weights.table import TensorTable
from . import limits
from .bucket import Head

_AT_ONCE = 1 << 10  # buckets whose places are put together
_TOGETHER = 1 << 16  # boxes whose corners are held at a time
# steps to find out whether boxes overlap
_EFFORT = 1 << 22
_EFFORT_PER_BYTE = 8
# those of more buckets, or with more entries, are read again
_KEPT_HEADS = 1 << 14
_KEPT_ENTRIES = 1 << 20


class Heads(Sequence[Head]):
    """The heads of all buckets of a patch. So many are kept as memory should be spent on; others are read again."""

    def __init__(self, kept: list[Head], count: int, read: Callable[[int], Head]) -> None:
        self._kept = kept
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
        return self._kept[index] if index < len(self._kept) else self._read(index)


class _Columns:
    """Places of many buckets, in few arrays."""

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
        if len(self._tensors) > _AT_ONCE:
            self._rows.append(self._few())

    def joined(self) -> tuple[Numbers, Numbers, Numbers]:
        """Tensors, and the positions of the first and the last element of their regions."""
        tensor, first, last = zip(*self._rows, self._few(), strict=True)
        return np.concatenate(tensor), np.concatenate(first), np.concatenate(last)

    def _few(self) -> tuple[Numbers, Numbers, Numbers]:
        tensor = np.concatenate([np.empty(0, np.int64), *self._tensors])
        row = tensor, *ends(self._table, tensor, self._regions)
        self._tensors = []
        self._regions = []
        return row


def gather_heads(
    heads: Iterable[Head],
    table: TensorTable,
    changed: int,
    covers: Sequence[Place] | None,
    size: Callable[[], int],
    read: Callable[[int], Head],
) -> Sequence[Head]:
    """All heads of a patch, once they agree with one another and with what the footer says.

    The heads come one by one and are counted as they come, so that many small buckets cannot claim more entries
    than a patch may have. `size` gives the bytes of the patch, once all have come; `read` reads a head again.
    """
    kept: list[Head] = []
    rows = _Columns(table)
    count = entries = counted = 0
    for head in heads:
        entries += len(head.entries)
        counted += int(head.entries.count.sum())
        if entries > limits.PATCH_ENTRIES:
            raise LimitExceeded(f"bucket {count}: entry {entries} of the patch, the limit is {limits.PATCH_ENTRIES}")
        rows.add(head.entries.tensor, head.entries.region)
        if len(kept) == count < _KEPT_HEADS and (entries <= _KEPT_ENTRIES or not count):
            kept.append(head)
        count += 1
    if counted != changed:
        raise InvalidField(f"the footer promises {changed} changes, the buckets hold {counted}")
    places = rows.joined()
    if covers is not None:
        _require_covered(table, places, place_columns(table, covers))
    refuse_shared(table, *places, size())
    return tuple(kept) if len(kept) == count else Heads(kept, count, read)


def place_columns(table: TensorTable, places: Sequence[Place]) -> tuple[Numbers, Numbers, Numbers]:
    """Tensors, and the positions of the first and the last element of their regions."""
    tensor, regions = columns(places)
    return tensor, *ends(table, tensor, regions)


def _require_covered(
    table: TensorTable, places: tuple[Numbers, Numbers, Numbers], covers: tuple[Numbers, Numbers, Numbers]
) -> None:
    """Every entry lies in one of the regions that the patch speaks for; the digests are over those alone."""
    # covers are in the order of their tensors
    (tensor, first, last) = places
    (owner, low, high) = covers
    rivals = np.bincount(owner, minlength=len(table))
    if int(rivals[tensor].sum()) > limits.COMPARISONS:
        raise LimitExceeded("the patch has too many regions and entries to tell whether they fit together")
    many = rivals[tensor]
    entry = np.repeat(np.arange(tensor.size), many)
    begin = (np.cumsum(rivals) - rivals)[tensor] - (np.cumsum(many) - many)
    cover = np.arange(entry.size) + np.repeat(begin, many)
    near = (low[cover] <= first[entry]) & (last[entry] <= high[cover])
    entry = entry[near]
    cover = cover[near]
    covered = np.zeros(tensor.size, bool)
    same = (low[cover] == first[entry]) & (high[cover] == last[entry])
    covered[entry[same | (high[cover] - low[cover] + 1 == table.numel[owner[cover]])]] = True
    rest = np.flatnonzero(~covered[entry])
    for some in _of_one_rank(table, tensor[entry[rest]], None):
        e = entry[rest[some]]
        c = cover[rest[some]]
        start, stop = corners(table, tensor[e], first[e], last[e])
        outer_start, outer_stop = corners(table, owner[c], low[c], high[c])
        covered[e[((start >= outer_start) & (stop <= outer_stop)).all(axis=0)]] = True
    if not covered.all():
        t, region = _place(table, int(covered.argmin()), *places)
        raise InvalidField(f"tensor {table[t].name!r}: the patch has an entry for {region}, but does not cover it")


def refuse_shared(table: TensorTable, tensor: Numbers, first: Numbers, last: Numbers, size: int) -> None:
    """Places never overlap: entries would be applied twice, covered regions would count twice in the digest.

    tensor, first, last: of the regions, with the positions of their first and last elements in their tensors.
    size: bytes that they were read from; what is done to tell them apart is bounded by that.
    """
    counts = np.bincount(tensor, minlength=len(table))
    if counts.max(initial=0) < 2:
        return
    if (many := counts > limits.REGIONS_PER_TENSOR).any():
        t = int(many.argmax())
        raise LimitExceeded(
            f"tensor {table[t].name!r} has {counts[t]} regions, the limit is {limits.REGIONS_PER_TENSOR}"
        )
    effort = Effort(_EFFORT + _EFFORT_PER_BYTE * size)
    mine = np.flatnonzero((counts[tensor] > 1) & (last >= first))
    left, group, _ = parted(mine, tensor[mine], first, last + 1)  # one behind the other, as a large tensor is cut
    for some in _of_one_rank(table, tensor[left], group):
        e = left[some]
        pair = first_shared(group[some], *corners(table, tensor[e], first[e], last[e]), effort)
        if pair is not None:
            t, a = _place(table, int(e[pair[0]]), tensor, first, last)
            refuse_overlap(table[t].name, [a, _place(table, int(e[pair[1]]), tensor, first, last)[1]])


def _of_one_rank(table: TensorTable, tensor: Numbers, group: Numbers | None) -> Iterator[Numbers]:
    """Indices of some places at a time, of tensors that have as many dimensions; groups, which rise, stay together."""
    rank = table.wide.rank[tensor] if tensor.size else tensor
    for r in np.unique(rank).tolist():
        every = np.flatnonzero(rank == r)
        low = 0
        while low < every.size:
            high = min(every.size, low + _TOGETHER)
            if group is not None and high < every.size:
                its = group[every]
                begin = int(np.searchsorted(its, its[high]))
                high = begin if begin > low else int(np.searchsorted(its, its[high], side="right"))
            yield every[low:high]
            low = high


def _place(table: TensorTable, index: int, tensor: Numbers, first: Numbers, last: Numbers) -> tuple[int, Region]:
    """One of the places, as a region."""
    some = slice(index, index + 1)
    t = int(tensor[index])
    region = Boxes(table, tensor[some], first[some], (last - first)[some])[0]
    return t, region or whole(table[t].shape)
