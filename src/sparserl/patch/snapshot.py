"""All weights as a patch of nothing: every part is one dense entry, as it is or coded, and nothing is compared."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import numpy as np

from .. import plan
from ..parallel import Progress, ordered
from ..plan import Changes, Dense, Draft
from ..plan.routing import BUCKET_PAYLOAD_BYTES
from ..weights.batches import Batch, batches
from ..weights.digest import Digest, SumsFromZeros, digest, sums_from_zeros, table_digest
from ..weights.dtypes import Bits
from ..weights.holdings import Holdings
from ..weights.local import LocalWeights
from ..weights.memory import Memory, Weights
from ..weights.region import Numbers, whole
from ..weights.shards import Part, Shards
from ..weights.table import TensorTable
from ..wire import Head, HeadGatherer, encoded_table
from .apply import exchange
from .assemble import collect
from .contents import Bucket, BucketList, Contents, Ends
from .decode import sparse
from .matching import require_result
from .overlay import write_regions
from .slicing import PatchSlicer, write_slices
from .staging import entry_geometry, overlay, stage, stage_parts

if TYPE_CHECKING:
    from ..codec import Reader
    from .gpu_restoration import DenseBucket, DenseDecoder

W = TypeVar("W", bound="dict[str, Any] | Shards")
_AS_THEY_ARE = "raw"
_CODED = "gap"  # whose dense entries are coded, and which every receiver takes


class _Part(NamedTuple):
    """A part of the weights, encoded: its bucket, if any bit of it is set, and what it adds to the digests."""

    bucket: tuple[Bucket, int] | None
    sums: SumsFromZeros
    nbytes: int


def snapshot(
    weights: Weights | Shards,
    *,
    coded: bool = True,
    holdings: Holdings | None = None,
    to: BucketList | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
) -> Contents:
    """The patch that makes these weights of zeros. Of shards, it has the regions that are present.

    Args:
        weights: The weights, which must not change meanwhile.
        coded: Whether the bits are coded, which takes longer and gives a third less for bf16.
        holdings: The parts that receivers have: every bucket is for the same ones. None for whole tensors.
        to: A list for the buckets; None for memory.
        threads: How many threads to use.
        progress: Called with the number of bytes just encoded.
    """
    local = LocalWeights.of(weights)
    table = local.table
    names = (_CODED if coded else _AS_THEY_ARE,)
    table_hash = encoded_table(table).hash

    def encode(batch: Batch) -> _Part:
        addresses, owners = local.read(batch)
        sums = sums_from_zeros(table, batch, addresses)
        bucket = plan.write(_draft(batch, addresses, sums.counts), names, table_hash)
        del owners  # copies may go only now
        return _Part(bucket, sums, batch.elements * batch.dtype.width)

    terms = table_digest(table) if local.complete else Digest()
    totals = Ends(terms, terms, 0, None if local.complete else local.places)

    def buckets() -> Iterator[tuple[Bucket, int]]:
        nonlocal totals
        groups = [local.places] if holdings is None else holdings.cells(local.places)
        pieces = (batch for places in groups for batch in batches(table, places, BUCKET_PAYLOAD_BYTES))
        for part in ordered(encode, pieces, threads):
            totals = totals._replace(base=totals.base + part.sums.base, result=totals.result + part.sums.result)
            if part.bucket is not None:
                yield part.bucket
            if progress is not None:
                progress(part.nbytes)

    return collect(table, buckets(), lambda changed: totals._replace(changed=changed), to)


def _draft(batch: Batch, addresses: Numbers, counts: Numbers) -> Draft:
    """A bucket with all bits of a batch, which lie at the addresses; regions in which no element is set are left out.

    Args:
        batch: The regions.
        addresses: Where the bits of each lie.
        counts: How many elements of each are not zero.
    """
    dense = []
    columns = (batch.tensor.tolist(), batch.region, batch.numel.tolist(), addresses.tolist(), counts.tolist())
    for tensor, region, numel, address, count in zip(*columns, strict=True):
        if count:
            bits = Memory(batch.dtype, (numel,), address, None, False, None).view()
            dense.append(Dense((tensor, region), count, bits))
    none = np.empty(0, np.int64)
    draft = Draft()
    draft.add(
        Changes(batch.dtype, none, [], none, none, np.empty(0, np.uint32), None, None, batch.elements, dense=dense)
    )
    return draft


def restore(patch: Contents, weights: dict[str, Bits], threads: int | None = None) -> None:
    """Turn zeros, which nobody has seen yet, into the weights of a snapshot. If it fails, they must not be used."""
    Restoration(patch, weights).run(threads)


class Restoration(Generic[W]):
    """Turns zeros into the weights of a snapshot, bucket by bucket as they arrive, and releases these.

    Nothing is kept to undo it. The bits are summed up once, at the end. Dense entries on a GPU are decoded there.

    Args:
        patch: The snapshot, whose buckets may still be arriving.
        weights: Zeros, which nobody has seen yet. Shards get what the snapshot has of them; the caller must check
            their digest, if they are not just what it covers.
    """

    def __init__(self, patch: Contents, weights: W) -> None:
        self.weights = weights
        self._patch = patch
        self._local = LocalWeights.of(weights, patch.table)
        self._gatherer = HeadGatherer(patch.table)
        self._gathered = 0  # buckets whose heads the gatherer has
        self._heads: dict[int, Head] = {}  # of further buckets that are written
        self._slicer = None if self._local.complete else PatchSlicer(self._local)
        self._decoder = _gpu_decoder(self._local, self._slicer)
        self._staged: dict[int, DenseBucket] = {}  # buckets that the decoder will write

    def run(self, threads: int | None = None) -> None:
        """Write all buckets. Where these stop arriving it raises, and goes on from there when it is called again."""
        for index in ordered(self._write, islice(self._patch.arrivals(), self._gathered, None), threads):
            if self._decoder is not None and index in self._staged:
                self._decoder.add(self._staged[index])
                del self._staged[index]
            self._gatherer.add(self._heads.pop(index))
            self._gathered += 1
        if self._decoder is not None:
            self._decoder.finish()
        self._patch.accept_heads(self._gatherer)  # no entries overlap
        if set(self._local.places) == set(self._patch.covers):
            require_result(self._patch, digest(self.weights, threads=threads))

    def _write(self, index: int) -> int:
        if index not in self._heads:
            head, reader = self._patch.open_bucket(index)
            if self._slicer is not None and not self._slicer.touches(head):
                pass  # nothing of it is here
            elif self._stage_on_gpu(index, head, reader):
                pass  # it is written with others
            elif self._slicer is not None:
                self._write_slices(self._slicer, head, index)
            elif head.layout.changes and self._local.gpu_streams:
                for staged in stage_parts(self._local, self._patch.decode(index, self._local)):
                    staged.new.write(self._local)
            elif head.layout.changes:  # an earlier release compared weights with zeros
                deque(exchange(self._local, self._patch, index), maxlen=0)
            else:
                self._write_dense(index)
            self._heads[index] = head
            self._patch.release(index)
        return index

    def _stage_on_gpu(self, index: int, head: Head, reader: Reader) -> bool:
        """Copy a bucket for the GPU, if that can decode it; whether it can."""
        bucket = None if self._decoder is None else self._decoder.stage(index, head, reader)
        if bucket is not None:
            self._staged[index] = bucket
        return bucket is not None

    def _write_dense(self, index: int) -> None:
        for part in self._patch.decode(index, overwrite=True).parts():
            if part.positions.size and self._local.gpu_streams:
                stage(self._local, part).new.scatter()
            elif part.positions.size:  # very many small regions
                overlay(entry_geometry(self._local, part.head), part, part.words).scatter()
            write_regions(self._local, part.dense_bits)

    def _write_slices(self, slicer: PatchSlicer, head: Head, index: int) -> None:
        base = _zeros(self._patch.table, head) if head.profile.conditional and head.layout.changes else None
        write_slices(self._local, slicer, self._patch.decode(index, base))


def _gpu_decoder(weights: LocalWeights, slicer: PatchSlicer | None) -> DenseDecoder | None:
    """What decodes dense entries on GPUs; None where there are none that it runs on."""
    if not weights.gpu_streams:
        return None
    from .gpu_restoration import DenseDecoder

    return DenseDecoder.of(weights, slicer)


def _zeros(table: TensorTable, head: Head) -> LocalWeights:
    """Zeros in the place of the regions that a bucket changes; none of it takes memory until it is written to."""
    entries = sparse(head)
    parts = [
        Part(table[tensor].name, box, Bits(np.zeros(box.size, table[tensor].dtype.uint), table[tensor].dtype))
        for tensor, region in zip(entries.tensor.tolist(), entries.region, strict=True)
        for box in [region or whole(table[tensor].shape)]
    ]
    return LocalWeights.of(Shards(table, parts))
