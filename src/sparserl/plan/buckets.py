"""Cutting changes into buckets, choosing the profile of each, and encoding it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .. import codec
from ..codec import value
from ..codec.ctx import tiles
from ..codec.profile import Counts, Positions
from ..weights.batches import Batch
from ..weights.boxes import Boxes, boxes, select
from ..weights.dtypes import UIntArray
from ..weights.region import Region
from ..weights.shards import Place
from ..wire import LINK, EncodedStreams, Entries, Head, begin_bucket
from .changes import Changes, Dense, RestoredBase
from .classes import choose_classes
from .cost import Chooser
from .routing import BUCKET_CHANGES, BUCKET_PAYLOAD_BYTES

BUCKET_COVER_BYTES = 256 << 20
ENOUGH_COVER_BYTES = 128 << 20  # with so many bytes of weights and ...
ENOUGH_CHANGES = 1 << 17  # ... more changes than this, a larger bucket would save less than 1%
GPU_COVER_BYTES = 1 << 30  # four times what a CPU makes, since each bucket takes the host a while
_GPU_BUCKETS = 8  # at least so many: a receiver without a GPU decodes them on threads
CHUNK_LOG = 16
_TILE_CHANGES = 2048  # a tile holds about this many changes, enough to keep the directory small


class Capacity(NamedTuple):
    """How much goes into one bucket, by the weights it covers, its changes, and its estimated payload.

    Attributes:
        cover_bytes: Bytes of weights that a bucket may cover while it has few changes.
        enough_cover_bytes: Bytes that it may cover once it has many.
    """

    cover_bytes: int
    enough_cover_bytes: int

    @classmethod
    def of_cpu(cls) -> Capacity:
        """Buckets that the CPU encodes."""
        return cls(BUCKET_COVER_BYTES, ENOUGH_COVER_BYTES)

    @classmethod
    def of_gpu(cls, nbytes: int) -> Capacity:
        """Buckets that a GPU encodes, of so many bytes of weights in all."""
        return cls(GPU_COVER_BYTES, min(GPU_COVER_BYTES, max(ENOUGH_COVER_BYTES, nbytes // _GPU_BUCKETS)))

    def holds(self, covered: int, changes: int, payload: float) -> bool:
        """Whether a bucket may cover so many bytes of weights, with so many changes and bytes of payload."""
        limit = self.enough_cover_bytes if changes > ENOUGH_CHANGES else self.cover_bytes
        return covered <= limit and changes <= BUCKET_CHANGES and payload <= BUCKET_PAYLOAD_BYTES


def cut_runs(covered: Counts, changes: Counts, payload: npt.NDArray[np.float64], capacity: Capacity) -> Iterator[slice]:
    """Slices of runs that make one bucket each, in order. A run that is too large makes a bucket alone.

    Args:
        covered: Bytes of weights of each run.
        changes: Changes of each run.
        payload: Estimated bytes of each run.
        capacity: How much goes into a bucket.
    """
    covered_ends = np.cumsum(covered)
    changes_ends = np.cumsum(changes)
    begin = 0
    while begin < changes.size:
        covered_before = int(covered_ends[begin] - covered[begin])
        changes_before = int(changes_ends[begin] - changes[begin])
        end = min(
            _first_above(covered_ends, covered_before + capacity.cover_bytes),
            _first_above(changes_ends, changes_before + BUCKET_CHANGES),
            max(
                _first_above(covered_ends, covered_before + capacity.enough_cover_bytes),
                _first_above(changes_ends, changes_before + ENOUGH_CHANGES),
            ),
        )
        end = min(end, begin + _first_above(np.cumsum(payload[begin:end]), BUCKET_PAYLOAD_BYTES))
        end = max(end, begin + 1)
        yield slice(begin, end)
        begin = end


def _first_above(ends: npt.NDArray[Any], limit: int) -> int:
    """The index of the first of ascending numbers that is above a limit; how many there are if none is."""
    return int(np.searchsorted(ends, limit, "right"))


class Draft:
    """A bucket being filled."""

    is_on_gpu = False  # whether its parts come from a GPU when they are asked for

    def __init__(self) -> None:
        self.parts: list[Changes] = []
        self.covered = 0
        self.count = 0
        self.dense_bytes = 0
        self.costs: dict[str, float] = {}  # estimated bits, of the profiles that every part can be written in

    def add(self, part: Changes) -> None:
        """Add a part."""
        if part.count.size:
            common = part.cost.keys() & self.costs.keys() if self.count else part.cost.keys()
            self.costs = {n: self.costs.get(n, 0.0) + part.cost[n] for n in common}
        self.parts.append(part)
        self.covered += part.covered * part.dtype.width
        self.count += part.total
        self.dense_bytes += sum(d.bits.nbytes for d in part.dense)

    @property
    def changed(self) -> int:
        """How many elements change, in sparse and dense entries."""
        return self.count + sum(d.count for part in self.parts for d in part.dense)

    @property
    def width(self) -> int:
        """Bytes of an element."""
        return self.parts[0].dtype.width

    def is_coded(self, names: Sequence[str]) -> bool:  # noqa: ARG002  # for drafts that are coded elsewhere
        """Whether it is encoded already, in the profile of these that takes the fewest bits."""
        return False

    def coded(self, names: Sequence[str], chooser: Chooser | None) -> tuple[Head, codec.Coded, EncodedStreams | None]:
        """The head, without estimates, and the encoded streams; in `ulp` if `ctx` is picked but saves nothing."""
        return *_encode(self, names, chooser), None

    def payload(self) -> float:
        """Estimated bytes in the smallest profile."""
        return self.dense_bytes + min(self.costs.values(), default=0.0) / 8

    def takes(self, part: Changes) -> bool:
        """Whether a part may be added: some profile can write all parts, and the bucket stays within its capacity."""
        if not self.parts:
            return True
        if part.count.size and self.costs and not self.costs.keys() & part.cost.keys():
            return False
        covered = self.covered + part.covered * part.dtype.width
        count = self.count + part.total
        payload = self.payload() + sum(d.bits.nbytes for d in part.dense) + min(part.cost.values(), default=0.0) / 8
        return Capacity.of_cpu().holds(covered, count, payload)


class Boundary(Draft):
    """Stands among changes, where a bucket must not have some from before and some from behind. It is empty."""


def cut(parts: Iterable[Changes | Draft]) -> Iterator[Draft]:
    """Fill buckets, one at a time for each dtype, in the order of the parts. Drafts among them stay as they are."""
    drafts: dict[int, Draft] = {}
    for part in parts:
        if isinstance(part, Boundary):
            yield from drafts.values()
            drafts = {}
        if isinstance(part, Draft):
            yield part
            continue
        draft = drafts.setdefault(part.dtype.code, Draft())
        if not draft.takes(part):
            yield draft
            draft = drafts[part.dtype.code] = Draft()
        draft.add(part)
    yield from drafts.values()


EncodedBucket = tuple[bytes | memoryview, int] | None


def write(draft: Draft, names: Sequence[str], hash: bytes, chooser: Chooser | None = None) -> EncodedBucket:
    """The bytes of a bucket and its number of changes, or None if nothing changed.

    It takes the profile with the fewest estimated bits, or the one that the chooser picks for a link.
    """
    return begin(draft, names, hash, chooser)()


def begin(
    draft: Draft, names: Sequence[str], hash: bytes, chooser: Chooser | None = None
) -> Callable[[], EncodedBucket]:
    """`write` without the checksum. The function it returns adds it and gives the result, on any thread."""
    if not draft.changed:
        return lambda: None
    head, streams, more_streams = draft.coded(names, chooser)
    if len(names) > 1:
        estimates = [(codec.profile_by_name(n).id, round(b / 8)) for n, b in sorted(draft.costs.items())]
        if chooser is not None:
            estimates.append((LINK, min(round(chooser.link.bits_per_second), 1 << 62)))
        head = replace(head, estimates=tuple(estimates))
    bucket = begin_bucket(head, streams, hash, more_streams)
    return lambda: (bucket(), draft.changed)


def _encode(draft: Draft, names: Sequence[str], chooser: Chooser | None) -> tuple[Head, codec.Coded]:
    """Head and streams of a draft, in one of some profiles."""
    parts = draft.parts
    dense = [d for p in parts for d in p.dense]
    entries, order = _entries(parts, dense)
    head = Head(codec.profile_by_name("ulp"), parts[0].dtype, tile_log(entries), CHUNK_LOG, (), entries)
    layout = head.layout
    sparse_parts = [p for p in parts if p.count.size]
    streams: codec.Chunks = {}
    owners = None
    if "ctx" in names and sparse_parts and all(p.base is not None for p in sparse_parts):
        old, owners = _old_addresses(sparse_parts, order)
        classes, draft.costs["ctx"] = choose_classes(head.dtype, old, layout.numel, sparse_parts, tiles(layout))
        layout = replace(layout, old_addresses=old, classes=classes)
    if layout.classes is None:
        draft.costs.pop("ctx", None)
    name = pick(draft, names, chooser)
    if name != "ctx" or layout.classes is not None:
        head = replace(head, profile=codec.profile_by_name(name))
    profile = head.profile
    if sparse_parts:
        positions, words = _sort_changes(sparse_parts, [part.words(profile) for part in sparse_parts], order)
        if profile.conditional and any(isinstance(part.base, RestoredBase) for part in sparse_parts):
            layout = replace(layout, old_bits=_old_bits(sparse_parts, order))
        streams = profile.encode(layout, positions, words)
    del owners  # the copies of old bits were needed until here
    if dense:
        bits = dense[0].bits if len(dense) == 1 else np.concatenate([dense[i].bits for i in _dense_order(dense)])
        writer = value.write_planes if profile.planar else value.write_words
        streams |= writer(layout, bits, codec.Stream.DENSE_PLANE if profile.planar else codec.Stream.DENSE)
    return head, codec.encode_streams(streams)


def pick(draft: Draft, names: Sequence[str], chooser: Chooser | None) -> str:
    """The profile a bucket takes."""
    costs = {name: bits for name, bits in draft.costs.items() if name in names}
    if len(costs) < 2:
        return next(iter(costs), names[0])
    if chooser is None:
        return min(costs, key=lambda n: (costs[n], n))
    return chooser.pick(costs, draft.covered, draft.count)


def _old_addresses(parts: list[Changes], order: npt.NDArray[np.int64]) -> tuple[Counts, list[object]]:
    """Addresses of the old bits of the sparse entries in their order, and the objects that own that memory."""
    addresses = []
    owners: list[object] = []
    for part in parts:
        assert part.base is not None
        part_addresses, part_owners = part.base.read(Batch(part.dtype, part.tensor, part.region, part.numel))
        addresses.append(part_addresses)
        owners += part_owners
    return np.concatenate(addresses)[order], owners


def _sort_key(place: Place) -> tuple[int, tuple[int, ...]]:
    return place[0], () if place[1] is None else place[1].start


def _dense_order(dense: list[Dense]) -> list[int]:
    return sorted(range(len(dense)), key=lambda i: _sort_key(dense[i].place))


def _entries(parts: list[Changes], dense: list[Dense]) -> tuple[Entries, npt.NDArray[np.int64]]:
    """The entry table in order of tensor and region, and where its sparse entries were before."""
    counts = np.concatenate([*(p.count for p in parts), np.array([d.count for d in dense], np.int64)])
    numel = np.concatenate([*(p.numel for p in parts), np.array([d.bits.size for d in dense], np.int64)])
    tensors = np.concatenate([*(p.tensor for p in parts), np.array([d.place[0] for d in dense], np.int64)])
    regions = _join_regions([*(p.region for p in parts), [d.place[1] for d in dense]], tensors)
    order = np.arange(tensors.size)
    if (np.diff(tensors) <= 0).any():
        order = _order(tensors, regions)
        regions = select(regions, order)
    sparse = tensors.size - len(dense)
    return Entries(tensors[order], counts[order], order >= sparse, regions, numel[order]), order[order < sparse]


def _join_regions(parts: Sequence[Sequence[Region | None]], tensors: Counts) -> Sequence[Region | None]:
    """The regions of all parts, as `Boxes` if those of any part are."""
    table = next((part.table for part in parts if isinstance(part, Boxes)), None)
    return [r for part in parts for r in part] if table is None else boxes(table, tensors, parts)


def _order(tensors: Counts, regions: Sequence[Region | None]) -> npt.NDArray[np.int64]:
    """By tensor, and then by where the regions start."""
    if isinstance(regions, Boxes):
        return np.lexsort((regions.first, tensors))
    places: list[Place] = [*zip(tensors.tolist(), regions, strict=True)]
    return np.array(sorted(range(len(places)), key=lambda i: _sort_key(places[i])), np.int64)


def _old_bits(parts: list[Changes], order: npt.NDArray[np.int64]) -> list[UIntArray]:
    """The old bits of the changes in the order of the entry table, as `_sort_changes` gives the words."""
    return _sort_changes(parts, [part.before for part in parts if part.before is not None], order)[1]


def _sort_changes(
    parts: list[Changes], words: list[UIntArray], order: npt.NDArray[np.int64]
) -> tuple[list[Positions], list[UIntArray]]:
    """Positions and words in the order of the entry table: part by part, or all together where parts are mixed."""
    positions = [part.positions for part in parts]
    if (np.diff(order) > 0).all():
        return positions, words
    counts = np.concatenate([p.count for p in parts])
    cuts = np.cumsum(counts) - counts
    indices = np.concatenate([np.arange(cuts[i], cuts[i] + counts[i]) for i in order.tolist()])
    return [np.concatenate(positions)[indices]], [np.concatenate(words)[indices]]


def tile_log(entries: Entries) -> int:
    """Tiles of about 2048 changes, between 2^16 and 2^22 elements."""
    sparse = entries.sparse
    changes = int(entries.count[sparse].sum())
    elements = int(entries.numel[sparse].sum())
    if not changes:
        return 16
    log = round(math.log2(_TILE_CHANGES * elements / changes))
    return min(max(log, 16), 22)
