"""Finding changes without a copy of the version before: by the old bits that a source kept, and a digest of every part.

    every part ──► one read: its sum now ──► as the old bits say? the elements that differ from these
                                         ──► anything else? all of it

The sums tell whether old bits were kept of every change. Where something wrote to a part unseen, or nobody tracks it,
the part is sent dense. Patches of all other parts are those that a comparison with a full copy gives, byte for byte.
To encode `ctx`, weights that have changes are read once more, with old bits put back in a copy of 8192 elements.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .. import codec, plan
from ..errors import TensorMismatch
from ..kernels import cpu
from ..parallel import Progress, ordered
from ..plan import Boundary, Changes, Dense, Draft, Link, RestoredBase
from ..plan.routing import BUCKET_PAYLOAD_BYTES
from ..weights.batches import Batch, batches
from ..weights.digest import Digest, sums, table_digest
from ..weights.dtypes import UIntArray
from ..weights.holdings import Holdings
from ..weights.local import LocalWeights
from ..weights.memory import Weights
from ..weights.old_bits import OldBits, OldPiece, Positions
from ..weights.region import Numbers, Region, whole
from ..weights.shards import Place, Shards
from ..weights.staging import gpu_tensor
from ..weights.table import TensorTable
from .assemble import Encoding, PatchPath, chooser_for, collect, profile_names
from .compare import Timed
from .contents import Bucket, BucketList, Ends
from .cpu_compare import BatchChanges, changes_of, gather
from .patch import Patch


class TrackedChanges:
    """All changes since sums were taken, found but perhaps not encoded. Made by `capture_tracked`.

    Attributes:
        sums: The sums of every part now.
        base: The digest of the version before.
        result: The digest of the version now.
    """

    def __init__(
        self,
        weights: LocalWeights,
        changes: Iterator[Changes | Draft],
        names: Sequence[str],
        old: Digest,
        new: dict[Place, Digest],
    ) -> None:
        self._table = weights.table
        self._covers = None if weights.complete else weights.places
        self._changes: list[Changes | Draft] = []  # those that were routed
        self._coming = changes
        self._names = names
        self._buckets: list[tuple[Bucket, int]] | None = None  # where they are encoded already
        table_terms = table_digest(weights.table) if weights.complete else Digest()
        self.sums = new
        self.base = old + table_terms
        self.result = sum(new.values(), table_terms)

    def detach(self, link: Link | str | None = None, threads: int | None = None) -> TrackedChanges:
        """Take all that is needed of the weights, which may change then; where `ctx` may be used, that is encoding."""
        self._changes.extend(self._coming)
        if any(codec.PROFILES[name].conditional for name in self._names):
            self._buckets = [*self._encoded(link, threads)]
            self._changes = []
        return self

    def encode(
        self,
        *,
        link: Link | str | None = None,
        to: PatchPath | BucketList | None = None,
        threads: int | None = None,
    ) -> Patch:
        """Encode the patch. If it is not detached, the weights must still be as they were."""
        buckets = self._encoded(link, threads) if self._buckets is None else self._buckets
        return Patch(collect(self._table, buckets, self._ends, to))

    def _encoded(self, link: Link | str | None, threads: int | None) -> Iterator[tuple[Bucket, int]]:
        chooser = None if link is None else chooser_for(link, threads)
        return Encoding(self._names, chooser, threads).buckets(self._table, plan.cut(self._routed()))

    def _routed(self) -> Iterator[Changes | Draft]:
        """All changes: those that were routed, and those that are routed meanwhile."""
        yield from self._changes
        for change in self._coming:
            self._changes.append(change)
            yield change

    def _ends(self, changed: int) -> Ends:
        return Ends(self.base, self.result, changed, self._covers)


def capture_tracked(
    new: Weights | Shards,
    old_sums: Mapping[Place, Digest],
    *,
    table: TensorTable | None = None,
    profile: str = "auto",
    profiles: Collection[str] | None = None,
    holdings: Holdings | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
    timed: Timed | None = None,
) -> TrackedChanges:
    """Find what changed since the parts had other sums: one read of everything.

    Of a part whose old bits are not known, all elements count as changed.

    Args:
        new: The weights now; the marks of parts may be `OldBits`.
        old_sums: The sums that every part had.
        table: The tensor table they had.
        profile: As for `diff`.
        profiles: Those to choose among, which are what receivers can take; None for all.
        holdings: The parts that receivers have, along which buckets are cut.
        threads: How many threads to use; None for as many as there are cores.
        progress: Called with the number of bytes just read.
        timed: What changes come through that are routed while others are encoded.

    Returns:
        The changes. They read the weights until they are encoded or detached.
    """
    names = profile_names(profile, profiles)
    weights = LocalWeights.of(new, table, "the last version", "the weights now")
    if set(weights.places) != old_sums.keys():
        raise TensorMismatch("these are not the parts whose sums are known")
    finder = _Finder(weights, _old_bits(weights, new) if isinstance(new, Shards) else {}, progress)
    on_gpu = [] if holdings is not None else [place for place in weights.places if finder.is_on_gpu(place)]
    found_on_gpu = [*finder.find(on_gpu, threads)]
    groups = holdings.cells(weights.places) if holdings is not None else [finder.without(on_gpu)]
    found = [[*finder.find(places, threads)] for places in groups]
    explained = {place for place, now in finder.sums.items() if old_sums[place] + finder.moved[place] == now}
    router = _Router(weights, names, explained)
    changes: Iterator[Changes | Draft] = router.route_on_gpu(on_gpu, found_on_gpu)
    changes = chain(changes, router.route(groups, found, is_cut=holdings is not None))
    if timed is not None:
        changes = timed(changes)
    return TrackedChanges(weights, changes, names, sum(old_sums.values(), Digest()), finder.sums)


def part_sums(
    weights: LocalWeights, threads: int | None = None, progress: Progress | None = None
) -> dict[Place, Digest]:
    """The element sums of every part: one read of all bits."""
    finder = _Finder(weights, {}, progress)
    for _ in finder.find(weights.places, threads):
        pass
    return finder.sums


def _old_bits(weights: LocalWeights, shards: Shards) -> dict[Place, OldBits]:
    """The old bits that some parts of shards carry."""
    old = {}
    for part in shards.parts:
        if isinstance(part.marks, OldBits):
            if part.marks.numel != part.region.numel:
                raise TensorMismatch(
                    f"{part.tensor!r}: old bits for {part.marks.numel} elements, the region has {part.region.numel}"
                )
            place, _ = weights.parts[weights.part_index(weights.table.index[part.tensor], part.region)]
            old[place] = part.marks
    return old


class _Found(NamedTuple):
    """What differs from the old bits in a batch, and how that moves the sums of its parts."""

    batch: Batch
    parts: list[Place]  # that each region is of
    changes: BatchChanges
    sums: dict[int, Digest]  # of regions; those of parts on a GPU are summed up there
    moved: npt.NDArray[np.uint64]  # both sums of each region


class _Finder:
    """Sums up parts, and finds the elements that differ from the old bits. Each place is looked at once.

    Attributes:
        sums: The sums of every part.
        moved: How the changes that were found have moved them.
    """

    def __init__(self, weights: LocalWeights, old: Mapping[Place, OldBits], progress: Progress | None) -> None:
        self._weights = weights
        self._old = old
        self._progress = progress
        self.sums = dict.fromkeys(weights.places, Digest())
        self.moved = dict.fromkeys(weights.places, Digest())
        self._on_gpu = set[Place]()  # parts that a GPU sums up
        if weights.has_kernels:
            self._sum_on_gpu()

    def _sum_on_gpu(self) -> None:
        from ..weights import gpu_sums, on_gpu

        on_host, runs = on_gpu.split_by_gpu(self._weights.places, self._weights)
        self._on_gpu = {*self._weights.places} - {*on_host}
        for place, first, second, nbytes in gpu_sums.piece_sums(self._weights, runs):
            self.sums[self._part(*place)] += Digest(first, second)
            self._report(nbytes)

    def is_on_gpu(self, part: Place) -> bool:
        """Whether a part lies on a GPU as kernels read it."""
        return part in self._on_gpu

    def without(self, parts: Sequence[Place]) -> list[Place]:
        """All parts but some."""
        left_out = {*parts}
        return [place for place in self._weights.places if place not in left_out]

    def _report(self, nbytes: int) -> None:
        if self._progress is not None and nbytes:
            self._progress(nbytes)

    def _part(self, tensor: int, region: Region | None) -> Place:
        """The part that contains a region of a tensor."""
        return self._weights.parts[self._weights.part_index(tensor, region)][0]

    def find(self, places: Sequence[Place], threads: int | None) -> Iterator[_Found]:
        """Look at places, batch by batch."""
        for found in ordered(self._look, batches(self._weights.table, places), threads):
            for part, (first, second) in zip(found.parts, found.moved.tolist(), strict=True):
                self.moved[part] += Digest(first, second)
            for row, digest in found.sums.items():
                self.sums[found.parts[row]] += digest
            self._report(int(found.batch.numel[[*found.sums]].sum()) * found.batch.dtype.width)
            yield found

    def _look(self, batch: Batch) -> _Found:
        """Sum up the regions of a batch, and compare elements with their old bits."""
        parts = [self._part(*place) for place in zip(batch.tensor.tolist(), batch.region, strict=True)]
        slices = [self._before(part, region) for part, region in zip(parts, batch.region, strict=True)]
        counts = np.array([positions.size for positions, _ in slices], np.int64)
        tag = np.empty(0, batch.dtype.uint)
        positions = np.concatenate([positions for positions, _ in slices])
        before = np.concatenate([bits if bits.size else tag for _, bits in slices])
        on_host = np.array([part not in self._on_gpu for part in parts])
        after, digests = self._read(batch, on_host, counts, positions)
        differs = before != after
        if not differs.all():
            owner = np.repeat(np.arange(counts.size), counts)[differs]
            counts = np.bincount(owner, minlength=counts.size)
            positions, before, after = positions[differs], before[differs], after[differs]
        moved = np.empty((counts.size, 2), np.uint64)
        geometry = self._weights.geometry(batch.tensor, batch.region)
        cpu.marks.digest_deltas(counts, geometry.in_tensor, positions, before, after, moved)
        return _Found(batch, parts, BatchChanges(positions, before, after, counts), digests, moved)

    def _before(self, part: Place, region: Region | None) -> tuple[Positions, UIntArray]:
        """Where elements of a region may have changed, and their old bits."""
        old = self._old.get(part)
        if old is None:
            return np.empty(0, np.uint32), np.empty(0, np.uint8)
        origin = part[1] or whole(self._weights.table.specs[part[0]].shape)
        if region is None or region == origin:
            return old.run(0, old.numel)
        start = tuple(a - o for a, o in zip(region.start, origin.start, strict=True))
        return old.box(origin.size, Region(start, region.size))

    def _read(
        self, batch: Batch, on_host: npt.NDArray[np.bool_], counts: Numbers, positions: Positions
    ) -> tuple[UIntArray, dict[int, Digest]]:
        """The bits at positions of the regions, and the sums of those regions that no GPU sums up."""
        bits: UIntArray = np.empty(positions.size, batch.dtype.uint)
        is_on_host = np.repeat(on_host, counts)
        gpu_rows = np.flatnonzero(~on_host & (counts > 0))
        if gpu_rows.size:
            from ..weights.gpu_elements import GpuElements

            rows = _rows(batch, gpu_rows)
            places = zip(rows.tensor.tolist(), rows.region, strict=True)
            tensors = [gpu_tensor(self._weights.locate(*place)[0]) for place in places]
            geometry = self._weights.geometry(rows.tensor, rows.region)
            gpu_bits = np.empty(int(counts[gpu_rows].sum()), batch.dtype.uint)
            GpuElements(self._weights, tensors, geometry, counts[gpu_rows], positions[~is_on_host]).read(gpu_bits)
            bits[~is_on_host] = gpu_bits
        host_rows = np.flatnonzero(on_host)
        if not host_rows.size:
            return bits, {}
        rows = _rows(batch, host_rows)
        addresses, owners = self._weights.read(rows)
        bits[is_on_host] = gather(np.empty(0, batch.dtype.uint), addresses, counts[host_rows], positions[is_on_host])
        digests = {}
        for i, row in enumerate(host_rows.tolist()):
            one = Batch.of(self._weights.table, int(batch.tensor[row]), batch.region[row])
            digests[row] = sums(self._weights.table, one, addresses[i : i + 1])
        del owners  # copies may go only now
        return bits, digests


def _rows(batch: Batch, which: Numbers) -> Batch:
    """Some of the regions of a batch."""
    if which.size == len(batch):
        return batch
    regions = [batch.region[i] for i in which.tolist()]
    return replace(batch, tensor=batch.tensor[which], region=regions, numel=batch.numel[which])


class _Router:
    """Routes changes, dense or sparse, as they were found.

    Args:
        weights: The weights now.
        names: The profiles that may be used.
        explained: The parts of which all changes were found. Others are sent dense.
    """

    def __init__(self, weights: LocalWeights, names: Sequence[str], explained: set[Place]) -> None:
        self._weights = weights
        self._names = names
        self._explained = explained

    def route_on_gpu(self, places: Sequence[Place], found: Sequence[_Found]) -> Iterator[Changes | Draft]:
        """The changes of parts on GPUs, encoded there."""
        if not places:
            return
        from ..weights.on_gpu import split_by_gpu
        from . import gpu_tracked

        pieces: dict[Place, list[tuple[OldPiece, OldPiece]]] = {}
        for one in found:
            ends = np.cumsum(one.changes.counts)
            for i, part in enumerate(one.parts):
                if part in self._explained:
                    inside = slice(ends[i] - one.changes.counts[i], ends[i])
                    positions = one.changes.positions[inside]
                    span = (one.batch.offset, one.batch.offset + int(one.batch.numel[i]), positions)
                    sides = (one.changes.before[inside], one.changes.after[inside])
                    pieces.setdefault(part, []).append((OldPiece(*span, sides[0]), OldPiece(*span, sides[1])))
        changes = {}
        for part, both in pieces.items():
            old, new = zip(*both, strict=True)
            changes[part] = gpu_tracked.FoundBits(OldBits(old[-1].end, old), OldBits(new[-1].end, new))
        _, runs = split_by_gpu(places, self._weights)
        yield from gpu_tracked.route(self._weights, runs, changes, self._names)
        for place in places:
            if place not in self._explained:
                yield from self._whole(*place)

    def route(
        self, groups: Sequence[Sequence[Place]], found: Sequence[Sequence[_Found]], *, is_cut: bool
    ) -> Iterator[Changes | Draft]:
        """The changes of all groups of places; with a boundary behind each, if they are for different receivers."""
        for places, batches_found in zip(groups, found, strict=True):
            for one in batches_found:
                yield from plan.route(self._changes(one), self._names, self._weights.table)
            for tensor, region in places:
                part, _ = self._weights.parts[self._weights.part_index(tensor, region)]
                if part not in self._explained:
                    yield from self._whole(tensor, region)
            if is_cut:
                yield Boundary()

    def _changes(self, found: _Found) -> Changes:
        columns = found.changes
        known = np.array([part in self._explained for part in found.parts])
        if not known.all():
            selected = np.repeat(known, columns.counts)
            columns = BatchChanges(
                columns.positions[selected],
                columns.before[selected],
                columns.after[selected],
                np.where(known, columns.counts, 0),
            )
        return changes_of(found.batch, columns, self._weights, RestoredBase(self._weights))

    def _whole(self, tensor: int, region: Region | None) -> Iterator[Changes]:
        """All bits of a place, in entries that fit a bucket."""
        spec = self._weights.table.specs[tensor]
        most = BUCKET_PAYLOAD_BYTES // spec.dtype.width
        numel = spec.numel if region is None else region.numel
        none = np.empty(0, np.int64)
        words = np.empty(0, spec.dtype.uint)
        for box in [region] if numel <= most else (region or whole(spec.shape)).split(most):
            bits = self._weights.bits(tensor, box).copy()
            entry = Dense((tensor, box), bits.size, bits)
            yield Changes(
                spec.dtype, none, [], none, none, none.astype(np.uint32), words, None, bits.size, dense=[entry]
            )
