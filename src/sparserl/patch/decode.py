"""A bucket decoded: positions and words, not yet located in anyone's memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ..codec import DecodedChanges, Reader, Stream, profile, value
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

_FEW_DENSE, _SMALL_DENSE = 1 << 10, 256  # entries of a bucket; elements of each, on average


@dataclass(frozen=True)
class Decoded:
    """What a bucket says. `words` are new bits where the profile is absolute, else zigzag steps."""

    head: Head
    positions: Positions
    words: UIntArray
    dense: UIntArray
    old: UIntArray | None  # at the changed positions, where decoding had to look
    overwritten: bool = False  # sparse changes are in place already: `words` are the new bits, `old` what was there

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
        at = 0
        for place, count, size in zip(self._places(dense=True), counts, sizes, strict=True):
            yield place, count, self.dense[at : at + size]
            at += size

    @property
    def dense_bits(self) -> list[tuple[Place, UIntArray]]:
        """Place and bits of every dense entry."""
        return [(place, bits) for place, _, bits in self.dense_entries()]

    def parts(self) -> list[Decoded]:
        """The same, in two where there are very many small dense entries: these as changes of all their elements."""
        entries, mine = self.head.entries, self.head.entries.dense
        many = int(mine.sum())
        if many <= _FEW_DENSE or self.dense.size > _SMALL_DENSE * many:
            return [self]
        regions, counts = select(entries.region, mine), entries.numel[mine]
        dense = Entries(entries.tensor[mine], counts, np.zeros(many, bool), regions, counts)
        no_words = np.empty(0, self.dense.dtype)
        head = replace(self.head, profile=profile("raw"), entries=dense, dense_bytes=0)
        rest = Decoded(head, counted(counts), self.dense, no_words, None)
        if many == len(entries):
            return [rest]
        sparse = entries.sparse
        others = select(entries.region, sparse)
        columns = entries.tensor[sparse], entries.count[sparse], entries.dense[sparse], others, entries.numel[sparse]
        head = replace(self.head, entries=Entries(*columns), dense_bytes=0)
        return [replace(self, head=head, dense=no_words), rest]

    def _places(self, dense: bool) -> list[Place]:
        entries = self.head.entries
        mine = entries.dense if dense else entries.sparse
        return [*zip(entries.tensor[mine].tolist(), select(entries.region, mine), strict=True)]


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

    `base` has the weights that the patch applies to; `conditional` profiles cannot be read without them. With
    `overwrite`, such a profile writes its changes over the old bits while it reads them, or raises and leaves them
    unchanged. With `lend`, positions and words may lie in the bucket itself, unaligned and read-only. Others are put
    into arrays that `allocate` makes.
    """
    layout = replace(head.layout, lend=lend, allocate=allocate)
    if head.profile.planar:
        dense = value.read_planes(layout, reader, head.dense_elements, Stream.DENSE_PLANE)
    else:
        dense = value.read_words(layout, reader, head.dense_elements, Stream.DENSE)
    found = DecodedChanges(np.empty(0, np.uint32), np.empty(0, head.dtype.uint))
    if layout.changes:
        alive: list[object] = []
        if base is not None and head.profile.conditional:
            old, alive = base.read(sparse(head))
            layout = replace(layout, old_addresses=old, overwrite=overwrite and base.in_place(sparse(head), old))
        found = head.profile.decode(layout, reader)
        del alive  # copies of old bits may go only now
    reader.finish()
    return Decoded(head, found.positions, found.words, dense, found.old, layout.overwrite)


def sparse(head: Head) -> Batch:
    """The sparse entries."""
    entries, sparse = head.entries, head.entries.sparse
    return Batch(head.dtype, entries.tensor[sparse], select(entries.region, sparse), entries.numel[sparse])


def counted(count: Counts) -> Positions:
    """All positions of regions of so many elements, one behind the other."""
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
    cpu.changes.locate(count, g.start, g.dims, g.size, g.tensor_strides, positions, out)
    return out
