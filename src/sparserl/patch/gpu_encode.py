"""Encoding buckets of changes on the GPU that they are on: only coded bytes leave it.

Four buckets make a lot, which takes the profile with the fewest bits, estimated as on a CPU: from a sample of its
changes and, for `ctx`, a histogram of its old bits. What was compacted stays on the GPU as long as a bucket may still
be wanted in another profile; if none can be, nothing is compacted.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from .. import codec, plan
from ..codec import Classes, Coded
from ..codec.coders import Stored
from ..codec.ctx import write_classes
from ..kernels import gpu
from ..parallel import Waiting
from ..plan import Changes, Chooser, Draft
from ..plan.buckets import CHUNK_LOG, pick, tile_log
from ..plan.classes import classes_from_histogram, key_shift, sampling_interval
from ..weights.digest import Digest
from ..weights.gpu_copies import fetch_with_margins
from ..weights.on_gpu import on_stream
from ..weights.region import Numbers
from ..wire import EncodedStreams, Entries, Head
from ..wire.cursor import CHECKSUM_BYTES
from .gpu_changes import CompactedChanges, ComparedRuns, CountedRuns, fetched_digest

LOT_BUCKETS = 4  # one after the other, for which profile and classes are chosen together
_GPU_PROFILES = ("ctx", "ulp")  # those that are coded on the GPU


class GpuDraft(Draft):
    """A bucket of changes that are on a GPU: coded there, or compacted, or both."""

    is_on_gpu = True

    def __init__(self, compared: CountedRuns, part: slice) -> None:
        super().__init__()
        self.part = part
        self.dtype = compared.runs.dtype
        self.covered = int(compared.runs.numel[part].sum()) * self.dtype.width
        self.count = int(compared.changes[part].sum())
        columns = compared.columns(part)
        sparse = np.zeros(len(columns["region"]), bool)
        self.entries = Entries(columns["tensor"], columns["count"], sparse, columns["region"], columns["numel"])
        self.entries.coded  # noqa: B018  # while the GPU is at work
        self.tile_log = tile_log(self.entries)
        self.classes: Classes | None = None
        self.packed: CompactedChanges | None = None
        self.streams: Callable[[], EncodedStreams] | None = None  # the coded streams; waits until they are on the host
        self.profile = ""  # which they are in
        self._written = False  # whether a bucket was written around its streams

    @property
    def parts(self) -> list[Changes]:
        """The changes in host memory, for a profile that they were not coded in."""
        assert self.packed is not None
        return [self.packed.on_host(self.part)]

    @parts.setter
    def parts(self, none: list[Changes]) -> None:
        """Parts are not added one by one."""

    @property
    def changed(self) -> int:
        return self.count

    @property
    def width(self) -> int:
        return self.dtype.width

    def is_coded(self, names: Sequence[str]) -> bool:
        return self.streams is not None and self.profile in _GPU_PROFILES and self.profile in names

    @property
    def settled(self) -> bool:
        """Whether the profile with the fewest bits is the one that the GPU codes."""
        coded = "ulp" if self.classes is None else "ctx"
        return min(self.costs, key=lambda name: (self.costs[name], name), default=coded) == coded

    def head(self, name: str) -> Head:
        return Head(codec.profile_by_name(name), self.dtype, self.tile_log, CHUNK_LOG, (), self.entries)

    def coded(self, names: Sequence[str], chooser: Chooser | None) -> tuple[Head, Coded, EncodedStreams | None]:
        name = pick(self, names, chooser)
        if name == "raw" and (self.streams is None or self.profile != "raw"):
            assert self.packed is not None
            return self.head(name), {}, _raw_streams(self.packed, [self])[0]()
        if self.streams is None or (name != self.profile and (name, self.profile) != ("ctx", "ulp")):
            return super().coded((name,), None)
        classes: Coded = {}
        if self.profile == "ctx" and self.classes is not None:
            classes[codec.Stream.CLASSES] = Stored(), [write_classes(self.classes)]
        written = self._written
        self._written = True
        streams = self.streams()
        return self.head(self.profile), classes, streams.without_margins if written else streams


class _Lot:
    """Buckets that are one after the other, and what is estimated of them together."""

    def __init__(self, compared: CountedRuns, parts: Sequence[slice]) -> None:
        self.drafts = [GpuDraft(compared, part) for part in parts]
        self.count = sum(draft.count for draft in self.drafts)
        self.best = ""

    def set_costs(self, costs: dict[str, float], classes: Classes | None) -> None:
        """Bits of all in each profile, which buckets share by their changes, and the classes for `ctx`."""
        self.best = min(costs, key=lambda name: (costs[name], name), default="ulp")
        for draft in self.drafts:
            draft.costs = {name: bits * draft.count / self.count for name, bits in costs.items()}
            draft.classes = classes if self.best == "ctx" else None


def encode(
    compared: ComparedRuns, parts: list[slice], names: Sequence[str], keep: bool
) -> Generator[Waiting, None, tuple[list[GpuDraft], Digest]]:
    """Make buckets with estimates; those that would be smallest in `ulp` or `ctx` are coded.

    Args:
        compared: The changes, which are let go of as soon as possible: their bitmap is large.
        parts: The runs that make a bucket each.
        names: The profiles that may be used.
        keep: Whether buckets may be wanted in another profile than the smallest, or later.

    Returns:
        The buckets, and how the digest moves.
    """
    if set(names) == {"raw"}:
        return _raw_drafts(compared, parts)
    lots = yield from _estimated_lots(compared, parts, names)
    drafts = [draft for lot in lots for draft in lot.drafts]
    packed = compared.compacted() if keep or not all(draft.settled for draft in drafts) else None
    jobs = [_encode_together(compared, group) for group in _by_class_count(lots)]
    del compared
    moved = []
    while jobs:
        moved.append((yield from jobs.pop()))
    for draft in drafts:
        draft.packed = packed
    return drafts, sum(map(fetched_digest, moved), Digest()) if packed is None else packed.moved


def _raw_drafts(compared: ComparedRuns, parts: list[slice]) -> tuple[list[GpuDraft], Digest]:
    """Buckets in `raw`, whose streams are the compacted changes themselves."""
    packed = compared.compacted()
    drafts = [GpuDraft(compared.without_bitmap, part) for part in parts]
    for draft, streams in zip(drafts, _raw_streams(packed, drafts), strict=True):
        draft.packed = packed
        draft.streams = streams
        draft.profile = "raw"
    return drafts, packed.moved


def _estimated_lots(
    compared: ComparedRuns, parts: list[slice], names: Sequence[str]
) -> Generator[Waiting, None, list[_Lot]]:
    """Lots of buckets, with what they cost in each profile, and with classes where `ctx` is the smallest."""
    buckets = [parts[i : i + LOT_BUCKETS] for i in range(0, len(parts), LOT_BUCKETS)]
    spans = [slice(lot[0].start, lot[-1].stop) for lot in buckets]
    dtype = compared.runs.dtype
    shifts = [key_shift(dtype, ())] * len(spans)  # of integers it depends on the changes
    histograms = None
    with gpu.streams.urgent_stream(compared.runs.device, compared.done):
        copies, samples = compared.sample(spans)
        if "ctx" in names and dtype.sign_magnitude:
            histograms = _magnitudes(compared, spans, shifts)
    yield histograms or copies
    lots = [_Lot(compared.without_bitmap, lot) for lot in buckets]
    sampled = samples()
    if "ctx" in names and histograms is None:
        shifts = [key_shift(dtype, [sample]) for sample in sampled]
        histograms = _magnitudes(compared, spans, shifts)
        yield histograms
    for i, (lot, sample) in enumerate(zip(lots, sampled, strict=True)):
        costs = plan.estimate(sample, names, lot.count)
        classes = None
        if histograms is not None:
            tiles = sum(int((((draft.entries.numel - 1) >> draft.tile_log) + 1).sum()) for draft in lot.drafts)
            classes, costs["ctx"] = classes_from_histogram(
                dtype, shifts[i], histograms()[i], int(sample.numel.sum()), [sample], lot.count, tiles
            )
        if classes is None:
            costs.pop("ctx", None)
        lot.set_costs(costs, classes)
    return lots


def _by_class_count(lots: list[_Lot]) -> list[list[GpuDraft]]:
    """The buckets that the GPU codes, those with as many classes together."""
    groups: dict[int, list[GpuDraft]] = {}
    for lot in lots:
        if lot.best not in _GPU_PROFILES:
            continue
        for draft in lot.drafts:
            count = 0 if draft.classes is None else len(draft.classes.thresholds)
            groups.setdefault(count, []).append(draft)
    return [*groups.values()]


def _magnitudes(compared: ComparedRuns, lots: list[slice], shifts: list[int]) -> gpu.changes.HostCopy:
    """Begin to count the magnitudes of old bits, of some of each lot."""
    dtype = compared.runs.dtype
    owner = np.repeat(np.arange(len(lots)), [lot.stop - lot.start for lot in lots])
    every = np.array([sampling_interval(compared.runs.numel[lot]) for lot in lots])
    kind = 0 if dtype.sign_magnitude else 1 if dtype.signed else 2
    return compared.blocks.fetch(
        gpu.cells.key_histogram(compared.blocks, compared.old, kind, owner, every, np.array(shifts))
    )


def _encode_together(compared: ComparedRuns, drafts: list[GpuDraft]) -> Generator[Waiting, None, Callable[[], Any]]:
    """Code buckets that have as many classes. Returns how they move the digest, when that has arrived."""
    chosen = compared.select(np.concatenate([np.arange(draft.part.start, draft.part.stop) for draft in drafts]))
    del compared
    steps = gpu.streams.encode_in_steps(
        _stream_plan(chosen, drafts), chosen.old, chosen.new, (chosen.bitmap, chosen.block_counts), chosen.changes
    )
    fetch = chosen.blocks.fetch
    del chosen
    encoded = yield from steps
    moved = fetch(encoded.digest_delta)
    numbers, owner, streams = encoded.directory.numbers()
    directories = np.split(numbers, np.searchsorted(owner, np.arange(1, len(drafts))))
    lengths = np.bincount(encoded.directory.bucket, encoded.directory.length, len(drafts)).astype(np.int64).tolist()
    bodies = [[body] for body in torch.split(encoded.data, lengths)]
    copies = fetch_with_margins(bodies, _head_room(drafts, directories), CHECKSUM_BYTES)
    for b, draft in enumerate(drafts):
        draft.streams = partial(_encoded_streams, copies, b, int(streams[b]), directories[b])
        draft.profile = "ulp" if draft.classes is None else "ctx"
    return moved


def _stream_plan(compared: ComparedRuns, drafts: list[GpuDraft]) -> gpu.streams.StreamPlan:
    """How the streams of buckets are cut into tiles, classes and chunks."""
    dtype = compared.runs.dtype
    sizes = [len(draft.entries) for draft in drafts]
    limits = None
    if drafts[0].classes is not None:
        classes = [draft.classes for draft in drafts if draft.classes]
        rows = [np.array(c.thresholds, np.uint64) << np.uint64(c.shift) for c in classes]
        limits = np.repeat(np.stack(rows), sizes, axis=0)
    tile_logs = np.repeat([draft.tile_log for draft in drafts], sizes)
    bucket = np.repeat(np.arange(len(drafts)), sizes)
    order = {"sign_magnitude": dtype.sign_magnitude, "signed": dtype.signed}
    return gpu.streams.StreamPlan.of(compared.blocks, bucket, tile_logs, limits, 1 << CHUNK_LOG, **order)


def _raw_streams(packed: CompactedChanges, drafts: list[GpuDraft]) -> list[Callable[[], EncodedStreams]]:
    """The streams of `raw`, on their way to the host."""
    directories: list[Numbers] = []
    bodies: list[list[torch.Tensor]] = []
    for draft in drafts:
        sizes = np.array(draft.head("raw").layout.chunk_sizes(draft.count))
        rows = (codec.Stream.POSITIONS, 4 * sizes), (codec.Stream.WORDS, draft.width * sizes)
        directories.append(np.concatenate([(stream, Stored.id, sizes.size, *lengths) for stream, lengths in rows]))
        inside = slice(packed.ends[draft.part.start], packed.ends[draft.part.stop])
        bodies.append([packed.positions[inside], packed.after[inside]])
    with on_stream(packed.old_weights, packed.runs.device):
        copies = fetch_with_margins(bodies, _head_room(drafts, directories), CHECKSUM_BYTES)
    return [partial(_encoded_streams, copies, b, 2, directory) for b, directory in enumerate(directories)]


def _head_room(drafts: Sequence[GpuDraft], directories: Sequence[Numbers]) -> list[int]:
    """Bytes that suffice for what comes before the streams of buckets, but for regions of many dimensions."""
    pairs = zip(drafts, directories, strict=True)
    return [512 + 64 * len(draft.entries) + 5 * directory.size for draft, directory in pairs]


def _encoded_streams(
    copies: Callable[[], list[tuple[memoryview, int, int]]], b: int, streams: int, directory: Numbers
) -> EncodedStreams:
    return EncodedStreams(streams, directory, *copies()[b])
