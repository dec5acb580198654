"""Comparing two versions of weights in host memory, batch by batch, on threads."""

from __future__ import annotations

import operator
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .. import plan
from ..kernels import cpu
from ..plan import Changes, Draft, RestoredBase
from ..weights.batches import Batch, batches
from ..weights.digest import Digest, sums
from ..weights.dtypes import UIntArray
from ..weights.geometry import runs_at
from ..weights.local import LocalWeights
from ..weights.region import Region
from ..weights.shards import Place
from .candidates import Candidates

_HUGE_PAGE_BYTES = 1 << 22  # arrays as large as this are asked to lie in huge pages
_KEPT_CHANGES = 1 << 19  # changes whose buffers a thread keeps, at most 10 MiB


class Compared(NamedTuple):
    """What comparing a part of the weights gives."""

    routed: list[Changes | Draft]
    old_sums: Digest  # element sums of the old bits, if they are wanted
    moved: Digest  # how the changes move the digest
    nbytes: int  # of weights that were compared


class BatchChanges(NamedTuple):
    """The changes of a batch: positions in each region, old bits, new bits, and how many changes each region has."""

    positions: npt.NDArray[np.uint32]
    before: UIntArray
    after: UIntArray
    counts: npt.NDArray[np.int64]


@dataclass(frozen=True)
class Comparer:
    """Compares batches of two versions and routes their changes; one object serves many threads.

    Attributes:
        old: The version before.
        new: The version now.
        candidates: Where parts may have changed; parts that are not in it are compared in full.
        names: The profiles that may be used.
        digest_base: Whether the element sums of the old bits are wanted.
    """

    old: LocalWeights
    new: LocalWeights
    candidates: Candidates
    names: Sequence[str]
    digest_base: bool

    def batches(self, places: Sequence[Place]) -> Iterator[Batch]:
        """Batches to compare in full, then batches in which only candidates are compared."""
        hinted = [self._has_candidates(*place) for place in places] if self.candidates else [False] * len(places)
        yield from batches(self.old.table, compress(places, map(operator.not_, hinted)))
        yield from batches(self.old.table, compress(places, hinted))

    def compare(self, batch: Batch) -> Compared:
        """Find the changes of a batch, and route them."""
        old_addresses, old_owners = self.old.read(batch)
        new_addresses, new_owners = self.new.read(batch)
        batch_changes = self._find(batch, old_addresses, new_addresses)
        old_sums = sums(self.old.table, batch, old_addresses) if self.digest_base else Digest()
        changes = changes_of(batch, batch_changes, self.new, self.old)
        moved = self._moved(changes, batch_changes.before)
        routed: list[Changes | Draft] = list(plan.route(changes, self.names, self.old.table))
        del old_owners, new_owners  # copies may go only now
        return Compared(routed, old_sums, moved, batch.elements * batch.dtype.width)

    def _has_candidates(self, tensor: int, region: Region | None) -> bool:
        """Whether only candidates are compared in a region."""
        return bool(self.candidates) and self.new.part_index(tensor, region) in self.candidates

    def _find(self, batch: Batch, old: Any, new: Any) -> BatchChanges:
        tag = np.empty(0, batch.dtype.uint)
        if self._has_candidates(int(batch.tensor[0]), batch.region[0]):
            return self._find_among_candidates(tag, old, new, batch)
        return scan(tag, old, new, batch.numel)

    def _find_among_candidates(self, tag: Any, old: Any, new: Any, batch: Batch) -> BatchChanges:
        """Compare only where changes can be."""
        counts, positions = candidate_positions(self.new, self.candidates, batch)
        before = gather(tag, old, counts, positions)
        after = gather(tag, new, counts, positions)
        differs = before != after
        owner = np.repeat(np.arange(counts.size), counts)[differs]
        real_counts = np.bincount(owner, minlength=counts.size)
        return BatchChanges(positions[differs], before[differs], after[differs], real_counts)

    def _moved(self, changes: Changes, before: UIntArray) -> Digest:
        regions = self.old.geometry(changes.tensor, changes.region).in_tensor
        first, second = cpu.changes.digest_delta(changes.count, regions, changes.positions, before, changes.after)
        return Digest(int(first), int(second))


def changes_of(batch: Batch, columns: BatchChanges, new: LocalWeights, base: LocalWeights | RestoredBase) -> Changes:
    """The changes of those regions of a batch that have some."""
    live = np.flatnonzero(columns.counts)
    tensor = batch.tensor[live]
    region = [batch.region[i] for i in live.tolist()]
    return Changes(
        batch.dtype,
        tensor,
        region,
        batch.numel[live],
        columns.counts[live],
        columns.positions,
        columns.after,
        plan.steps_between(batch.dtype, columns.before, columns.after),
        batch.elements,
        lambda entry: new.bits(int(tensor[entry]), region[entry]),
        before=columns.before,
        base=base,
    )


def candidate_positions(
    weights: LocalWeights, candidates: Candidates, batch: Batch
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint32]]:
    """How many candidates each region of a batch has, and their positions in it."""
    slices = []
    for tensor, region, numel in zip(batch.tensor.tolist(), batch.region, batch.numel.tolist(), strict=True):
        positions = candidates[weights.part_index(tensor, region)]
        slices.append(positions.between(batch.offset, batch.offset + numel))
    return np.array([s.size for s in slices], np.int64), np.concatenate(slices)


def gather(tag: Any, addresses: Any, counts: Any, positions: Any) -> UIntArray:
    """The bits at positions of runs in memory, so many of each."""
    bits: UIntArray = np.empty(positions.size, tag.dtype)
    cpu.changes.gather(tag, counts, runs_at(addresses), positions, bits)
    return bits


def scan(tag: Any, old: Any, new: Any, size: Any) -> BatchChanges:
    """Run the comparing kernel with room for few changes, and once more where there are many.

    A thread keeps the buffers that a few changes took: to have new memory mapped for every batch costs more than a
    copy. While they are in use nobody else has them, not even a signal handler that comes in between.

    Args:
        tag: An empty array of the unsigned integers that bits are read as.
        old: Addresses of the old bits of each region.
        new: Addresses of the new bits.
        size: Elements of each region.
    """
    counts = np.empty(size.size, np.int64)
    columns = _buffers.by_dtype.pop(tag.dtype, None)
    if columns is None:
        columns = _columns(_HUGE_PAGE_BYTES // max(4, tag.itemsize) - 1, tag.dtype)
    n = cpu.changes.diff(tag, old, new, size, *columns, counts)
    if 0 <= n <= _KEPT_CHANGES:
        positions, before, after = (column[:n].copy() for column in columns)
        _buffers.by_dtype[tag.dtype] = columns
        return BatchChanges(positions, before, after, counts)
    if n < 0:
        columns = _columns(int(size.sum()), tag.dtype)
        n = cpu.changes.diff(tag, old, new, size, *columns, counts)
    for column in columns:
        column.resize(n, refcheck=False)  # gives back what was not needed, without a copy
    return BatchChanges(*columns, counts)


_Columns = tuple[npt.NDArray[np.uint32], UIntArray, UIntArray]


def _columns(capacity: int, dtype: Any) -> _Columns:
    """Buffers for positions, old bits and new bits.

    What is not written to costs nothing, as long as NumPy does not ask for huge pages, which come zeroed.
    """
    return np.empty(capacity, np.uint32), np.empty(capacity, dtype), np.empty(capacity, dtype)


class _Buffers(threading.local):
    """Buffers that a thread keeps, by the dtype of bits."""

    def __init__(self) -> None:
        self.by_dtype: dict[Any, _Columns] = {}


_buffers = _Buffers()
