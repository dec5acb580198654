"""Decoding a bucket: positions and words, not yet located in any weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ..codec import DecodedChanges, Reader, Stream, profile_by_name, value
from ..codec.profile import Allocator, Counts, Positions, empty
from ..kernels import cpu
from ..weights.batches import Batch
from ..weights.boxes import select
from ..weights.dtypes import UIntArray
from ..weights.geometry import tensor_geometry
from ..weights.local import LocalWeights
from ..weights.region import Region
from ..weights.shards import Place
from ..weights.table import TensorTable
from ..wire import Entries, Head

_FEW_DENSE = 1 << 10  # entries of a bucket
_SMALL_DENSE = 256  # elements of an entry, on average


@dataclass(frozen=True)
class Decoded:
    """The changes of a bucket.

    Attributes:
        head: Its head.
        positions: Positions of the sparse changes, entry by entry.
        words: New bits where the profile is absolute, else zigzag steps.
        dense: The bits of the dense entries, one after the other.
        old: The old bits at the changed positions, if decoding had to read them.
        overwritten: Whether the sparse changes are written already: `words` are the new bits, `old` what was there.
    """

    head: Head
    positions: Positions
    words: UIntArray
    dense: UIntArray
    old: UIntArray | None
    overwritten: bool = False

    @property
    def sparse_tensor(self) -> Counts:
        return self.head.entries.tensor[self.head.entries.sparse]

    @property
    def sparse_count(self) -> Counts:
        return self.head.layout.count

    @property
    def sparse_places(self) -> list[Place]:
        return self._places(dense=False)

    def in_order(self) -> Decoded:
        """The same with the positions of each entry rising, which `conditional` profiles do not promise."""
        if not self.head.profile.conditional:
            return self
        key = np.repeat(np.arange(self.sparse_count.size) << 32, self.sparse_count)
        key |= self.positions
        order = np.argsort(key, kind="stable")
        del key
        old = None if self.old is None else self.old[order]
        return replace(self, positions=self.positions[order], words=self.words[order], old=old)

    def dense_entries(self) -> Iterator[tuple[Place, int, UIntArray]]:
        """Place, count and bits of every dense entry."""
        counts = self.head.entries.count[self.head.entries.dense].tolist()
        sizes = self.head.entries.numel[self.head.entries.dense].tolist()
        offset = 0
        for place, count, size in zip(self._places(dense=True), counts, sizes, strict=True):
            yield place, count, self.dense[offset : offset + size]
            offset += size

    @property
    def dense_bits(self) -> list[tuple[Place, UIntArray]]:
        """Place and bits of every dense entry."""
        return [(place, bits) for place, _, bits in self.dense_entries()]

    def parts(self) -> list[Decoded]:
        """The same, in two where there are very many small dense entries: these as changes of all their elements."""
        entries = self.head.entries
        dense_count = int(entries.dense.sum())
        if dense_count <= _FEW_DENSE or self.dense.size > _SMALL_DENSE * dense_count:
            return [self]
        return self.without_dense()

    def without_dense(self) -> list[Decoded]:
        """The same without dense entries, in two where there are some: these as changes of all their elements."""
        entries = self.head.entries
        if not entries.dense.any():
            return [self]
        as_changes = self._dense_as_changes()
        if entries.dense.all():
            return [as_changes]
        sparse = entries.sparse
        regions = select(entries.region, sparse)
        columns = entries.tensor[sparse], entries.count[sparse], entries.dense[sparse], regions, entries.numel[sparse]
        head = replace(self.head, entries=Entries(*columns), dense_bytes=0)
        return [replace(self, head=head, dense=np.empty(0, self.dense.dtype)), as_changes]

    def _dense_as_changes(self) -> Decoded:
        """The dense entries as changes of all their elements."""
        entries = self.head.entries
        dense = entries.dense
        counts = entries.numel[dense]
        regions = select(entries.region, dense)
        columns = Entries(entries.tensor[dense], counts, np.zeros(counts.size, bool), regions, counts)
        head = replace(self.head, profile=profile_by_name("raw"), entries=columns, dense_bytes=0)
        return Decoded(head, counted(counts), self.dense, np.empty(0, self.dense.dtype), None)

    def _places(self, dense: bool) -> list[Place]:
        entries = self.head.entries
        chosen = entries.dense if dense else entries.sparse
        return [*zip(entries.tensor[chosen].tolist(), select(entries.region, chosen), strict=True)]


def decode(
    head: Head,
    reader: Reader,
    base: LocalWeights | None = None,
    *,
    overwrite: bool = False,
    lend: bool = False,
    allocate: Allocator = empty,
) -> Decoded:
    """Decode all streams of a bucket; every position is inside its region afterwards, or an error was raised.

    Args:
        head: The head of the bucket.
        reader: A reader of its streams.
        base: The weights that the patch applies to; `conditional` profiles cannot be read without them.
        overwrite: Whether such a profile may write its changes over the old bits while it reads them. It raises and
            leaves them unchanged if anything is wrong.
        lend: Whether positions and words may lie in the bucket itself, unaligned and read-only.
        allocate: Makes arrays for those that do not.
    """
    layout = replace(head.layout, lend=lend, allocate=allocate)
    if head.profile.planar:
        dense = value.read_planes(layout, reader, head.dense_elements, Stream.DENSE_PLANE)
    else:
        dense = value.read_words(layout, reader, head.dense_elements, Stream.DENSE)
    changes = DecodedChanges(np.empty(0, np.uint32), np.empty(0, head.dtype.uint))
    if layout.changes:
        owners: list[object] = []
        if base is not None and head.profile.conditional:
            addresses, owners = base.read(sparse(head))
            in_place = overwrite and base.in_place(sparse(head), addresses)
            layout = replace(layout, old_addresses=addresses, overwrite=in_place)
        changes = head.profile.decode(layout, reader)
        del owners  # copies of old bits may go only now
    reader.finish()
    return Decoded(head, changes.positions, changes.words, dense, changes.old, layout.overwrite)


def sparse(head: Head) -> Batch:
    """The sparse entries."""
    entries = head.entries
    sparse = entries.sparse
    return Batch(head.dtype, entries.tensor[sparse], select(entries.region, sparse), entries.numel[sparse])


def counted(count: Counts) -> Positions:
    """All positions of regions of so many elements, one after the other."""
    return (np.arange(int(count.sum())) - np.repeat(np.cumsum(count) - count, count)).astype(np.uint32)


def flatten(table: TensorTable, place: Place, positions: Positions) -> npt.NDArray[np.int64]:
    """Positions of a region as positions in its tensor, which may need more than 32 bits."""
    tensor, region = place
    if region is None:
        return positions.astype(np.int64)
    count = np.array([positions.size], np.int64)
    return flatten_all(table, np.array([tensor], np.int64), [region], count, positions)


def flatten_all(
    table: TensorTable, tensor: Counts, regions: Sequence[Region | None], count: Counts, positions: Positions
) -> npt.NDArray[np.int64]:
    """Positions of regions, so many of each, as positions in their tensors."""
    g = tensor_geometry(table, tensor, regions)
    out = np.empty(positions.size, np.int64)
    cpu.changes.locate(count, g.in_tensor, positions, out)
    return out
