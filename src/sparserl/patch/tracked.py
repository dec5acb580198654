"""Finding changes without the bits of the version before: by marks, and by a digest of every part.

    every part ──► one read: its sum now ──► as before? nothing changed
                                         ──► as the marks say? the marked elements, with the bits they have now
                                         ──► anything else? all of it

The sums tell whether marks speak for every change. Where something wrote to a part without marking it, or nobody marks
it, the part is sent dense. A marked element whose bits are what they were is sent too: that does no harm.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from .. import codec, plan
from ..codec.profile import Positions
from ..errors import NeedsBase, TensorMismatch
from ..parallel import Progress, ordered
from ..plan import Changes, Dense, Link
from ..plan.routing import BUCKET_PAYLOAD_BYTES
from ..weights.batches import Batch, batches
from ..weights.digest import Digest, sums, table_digest
from ..weights.dtypes import UIntArray
from ..weights.local import LocalWeights
from ..weights.memory import Weights
from ..weights.region import Numbers, whole
from ..weights.shards import Place, Shards
from ..weights.staging import gpu_tensor
from ..weights.table import TensorTable
from .assemble import Encoding, PatchPath, chooser_for, collect
from .candidates import Candidates, from_marks
from .contents import BucketList, Ends
from .cpu_compare import candidate_positions, gather
from .patch import Patch


class TrackedChanges:
    """All changes since sums were taken, found but not encoded; the weights are not read any more.

    Attributes:
        sums: The sums of every part now.
        base: The digest of the version before.
        result: The digest of the version now.
    """

    def __init__(
        self, weights: LocalWeights, changes: list[Changes], profile: str, old: Digest, new: dict[Place, Digest]
    ) -> None:
        self._table = weights.table
        self._covers = None if weights.complete else weights.places
        self._changes = changes
        self._names = plan.candidates(profile)
        table_terms = table_digest(weights.table) if weights.complete else Digest()
        self.sums = new
        self.base = old + table_terms
        self.result = sum(new.values(), table_terms)

    def encode(
        self,
        *,
        link: Link | str | None = None,
        to: PatchPath | BucketList | None = None,
        threads: int | None = None,
    ) -> Patch:
        """Encode the patch."""
        chooser = None if link is None else chooser_for(link, threads)
        buckets = Encoding(self._names, chooser, threads).buckets(self._table, plan.cut(self._changes))
        return Patch(collect(self._table, buckets, self._ends, to))

    def _ends(self, changed: int) -> Ends:
        return Ends(self.base, self.result, changed, self._covers)


def capture_tracked(
    new: Weights | Shards,
    old_sums: Mapping[Place, Digest],
    *,
    table: TensorTable | None = None,
    profile: str = "auto",
    threads: int | None = None,
    progress: Progress | None = None,
) -> TrackedChanges:
    """Find what changed since the parts had other sums: one read of everything, and a copy of what changed.

    Of a dense entry all elements count as changed.

    Args:
        new: The weights now; the parts of shards may carry marks.
        old_sums: The sums that every part had.
        table: The tensor table they had.
        profile: `raw`, `gap`, or `auto`, which takes the better of the two: others need the bits of the version before.
        threads: How many threads to use; None for as many as there are cores.
        progress: Called with the number of bytes just read.
    """
    names = _absolute(profile)
    weights = LocalWeights.of(new, table, "the last version", "the weights now")
    if set(weights.places) != old_sums.keys():
        raise TensorMismatch("these are not the parts whose sums are known")
    new_sums = part_sums(weights, threads, progress)
    marks = from_marks(weights, new) if isinstance(new, Shards) else {}
    moved = _moved(weights, new) if isinstance(new, Shards) else {}
    sparse: list[Place] = []
    dense: list[Place] = []
    for part, place in enumerate(weights.places):
        if new_sums[place] != old_sums[place]:
            marked = part in marks and part in moved and old_sums[place] + moved[part] == new_sums[place]
            (sparse if marked else dense).append(place)
    changes = list(_marked_changes(weights, marks, sparse, names, threads))
    for place in dense:
        changes += _whole(weights, place)
    return TrackedChanges(weights, changes, profile, sum(old_sums.values(), Digest()), new_sums)


def part_sums(
    weights: LocalWeights, threads: int | None = None, progress: Progress | None = None
) -> dict[Place, Digest]:
    """The element sums of every part: one read of all bits."""
    totals = dict.fromkeys(weights.places, Digest())
    in_memory = weights.places
    if weights.has_kernels:
        from ..weights import on_gpu

        in_memory, runs = on_gpu.split_by_gpu(in_memory, weights)
        for place, first, second, nbytes in on_gpu.piece_sums(weights, runs):
            totals[weights.parts[weights.part_index(*place)][0]] += Digest(first, second)
            if progress is not None:
                progress(nbytes)
    for batch, digests in ordered(
        lambda batch: _batch_sums(weights, batch), batches(weights.table, in_memory), threads
    ):
        for tensor, region, digest in zip(batch.tensor.tolist(), batch.region, digests, strict=True):
            totals[weights.parts[weights.part_index(tensor, region)][0]] += digest
        if progress is not None:
            progress(batch.elements * batch.dtype.width)
    return totals


def _batch_sums(weights: LocalWeights, batch: Batch) -> tuple[Batch, list[Digest]]:
    """A batch, and the element sums of each of its regions."""
    addresses, owners = weights.read(batch)
    digests = []
    for e, tensor in enumerate(batch.tensor.tolist()):
        row = Batch.of(weights.table, tensor, batch.region[e])
        digests.append(sums(weights.table, row, addresses[e : e + 1]))
    del owners  # copies may go only now
    return batch, digests


def _absolute(profile: str) -> tuple[str, ...]:
    """The profiles that a request allows and that need no bits of the version before."""
    names = tuple(name for name in plan.candidates(profile) if codec.PROFILES[name].absolute)
    if not names:
        raise NeedsBase(f"profile {profile!r} needs the bits of the version before; use 'gap', 'raw' or 'auto'")
    return names


def _moved(weights: LocalWeights, shards: Shards) -> dict[int, Digest]:
    """How the marked changes moved the sums, by the number of the part."""
    index = shards.table.index
    return {
        weights.part_index(index[part.tensor], part.region): Digest(*part.moved)
        for part in shards.parts
        if part.moved is not None
    }


def _marked_changes(
    weights: LocalWeights, marks: Candidates, places: list[Place], names: Sequence[str], threads: int | None
) -> Iterator[Changes]:
    """The marked elements of parts, routed; those in host memory first, since a batch is read in one place."""
    on_gpu = {place for place, memory in weights.parts if gpu_tensor(memory) is not None}
    for side in ([p for p in places if p not in on_gpu], [p for p in places if p in on_gpu]):
        found = ordered(lambda b: _marked_batch(weights, marks, b, names), batches(weights.table, side), threads)
        for routed in found:
            yield from routed


def _marked_batch(weights: LocalWeights, marks: Candidates, batch: Batch, names: Sequence[str]) -> list[Changes]:
    """The marked elements of a batch and their bits, routed."""
    counts, positions = candidate_positions(weights, marks, batch)
    live = np.flatnonzero(counts)
    tensors = batch.tensor[live]
    regions = [batch.region[i] for i in live.tolist()]
    marked = replace(batch, tensor=tensors, region=regions, numel=batch.numel[live])
    changes = Changes(
        batch.dtype,
        tensors,
        regions,
        batch.numel[live],
        counts[live],
        positions,
        _bits_at(weights, marked, counts[live], positions),
        None,
        batch.elements,
        lambda entry: weights.bits(int(tensors[entry]), regions[entry]),
    )
    return list(plan.route(changes, names, weights.table))


def _bits_at(weights: LocalWeights, batch: Batch, counts: Numbers, positions: Positions) -> UIntArray:
    """The bits at positions of some parts."""
    places = zip(batch.tensor.tolist(), batch.region, strict=True)
    gpu_tensors = [gpu_tensor(weights.locate(*place)[0]) for place in places]
    if gpu_tensors and all(tensor is not None for tensor in gpu_tensors):
        from ..weights.on_gpu import GpuElements

        bits: UIntArray = np.empty(positions.size, batch.dtype.uint)
        geometry = weights.geometry(batch.tensor, batch.region)
        GpuElements(weights, gpu_tensors, geometry, counts, positions).read(bits)
        return bits
    addresses, owners = weights.read(batch)
    bits = gather(np.empty(0, batch.dtype.uint), addresses, counts, positions)
    del owners  # copies may go only now
    return bits


def _whole(weights: LocalWeights, place: Place) -> Iterator[Changes]:
    """All bits of a part, in entries that fit a bucket."""
    tensor, region = place
    spec = weights.table.specs[tensor]
    most = BUCKET_PAYLOAD_BYTES // spec.dtype.width
    numel = spec.numel if region is None else region.numel
    none = np.empty(0, np.int64)
    words = np.empty(0, spec.dtype.uint)
    for box in [region] if numel <= most else (region or whole(spec.shape)).split(most):
        bits = weights.bits(tensor, box).copy()
        entry = Dense((tensor, box), bits.size, bits)
        yield Changes(spec.dtype, none, [], none, none, none.astype(np.uint32), words, None, bits.size, dense=[entry])
