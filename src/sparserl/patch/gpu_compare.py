"""Finding and encoding changes of weights that are on a device in both versions: only coded bytes leave it.

    old, new ──► bitmap ──► changes per part │ compacted on the device ──► `ulp`, `ctx`: coded there ──► bytes
                                                                      └──► few, heavy, `raw`, `gap`: to the CPU's coders

Buckets are cut by the number of changes alone. Four of them make a lot, which takes the profile with the fewest bits,
estimated as on a CPU: from a sample of its changes and, for `ctx`, a histogram of its old bits. What was compacted
stays on the device as long as a bucket may still be wanted in another profile; if none can be, nothing is compacted.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from .. import codec, plan
from ..codec import Classes, Coded
from ..codec.coders import Stored
from ..codec.ctx import write_classes
from ..kernels import gpu
from ..parallel import Waiting, in_turn
from ..plan import Changes, Draft
from ..plan.buckets import CHUNK_LOG, ENOUGH_CHANGES, ENOUGH_COVER_BYTES, tile_log
from ..plan.classes import decide, key_shift, sampling
from ..plan.estimates import index_bits
from ..plan.routing import BUCKET_CHANGES, BUCKET_PAYLOAD_BYTES, may_be_dense
from ..weights.digest import Digest
from ..weights.dtypes import DType, UIntArray
from ..weights.gpu_copies import fetch, fetch_with_margins, upload
from ..weights.local import LocalWeights
from ..weights.on_gpu import Runs, groups, on_stream
from ..weights.region import Numbers
from ..wire import Entries, Head, Laid
from ..wire.cursor import CHECKSUM_BYTES
from .cpu_compare import Compared

FEW_CHANGES = 1 << 18
"""Changes of a group below which the CPU codes them: launches and waits take a device as long, whatever the number.

Measured on an H200 by `benchmarks.gpu` (`small`): `diff` in `ulp` of 64 MiB takes the CPU 6.5 ms with as many and 14.4
with four times as many, the device 7.6 and 6.5.
"""
_FEW_FOR_CTX = 1 << 10  # the same where `ctx` is wanted, which only the device can code: it saves half of the bytes
_SAMPLE = 1 << 13  # changes of a lot that estimates look at
_LOT = 4  # buckets, one behind the other, for which profile and classes are chosen together
_WORD_BITS = 2  # taken for a word where buckets are cut, which is what steps take
COVER_BYTES = 1 << 30  # of a bucket: four times what a CPU makes, since each takes the host a while
_BUCKETS = 8  # at least: a receiver without a device decodes them on threads
_CODED = ("ctx", "ulp")  # profiles that are coded on the device
R = TypeVar("R")


def compare(
    was: LocalWeights, now: LocalWeights, far: Sequence[Runs], names: Sequence[str], digest_base: bool, keep: bool
) -> Iterator[Compared]:
    """Changes of runs, element sums of the old bits (if wanted), how the changes move them, bytes covered.

    keep: whether buckets may be wanted in another profile than the one with the fewest bits, or later.
    Where one group waits for the device, the next takes a step.
    """
    nbytes = sum(runs.nbytes for runs in far)
    most = min(COVER_BYTES, max(ENOUGH_COVER_BYTES, nbytes // _BUCKETS))
    jobs = ((runs, _searched(was, now, runs, names, most, digest_base, keep)) for runs in groups(far, was.table))
    return in_turn(_on_device(was, runs, job) for runs, job in jobs)


def _on_device(held: LocalWeights, runs: Runs, job: Generator[Waiting, None, R]) -> Generator[Waiting, None, R]:
    """A job whose steps are for the device that some runs are on, and for nobody else in between."""
    while True:
        with on_stream(held, runs.device):
            try:
                pause = next(job)
            except StopIteration as end:
                made: R = end.value
                return made
        yield pause


def _searched(
    was: LocalWeights, now: LocalWeights, runs: Runs, names: Sequence[str], most: int, digest_base: bool, keep: bool
) -> Generator[Waiting, None, Compared]:
    """Find and encode the changes of a group."""
    blocks, (old, new) = runs.blocks(was.table.keys)
    words, counts = gpu.changes.diff(blocks, old, new)
    changes, done = blocks.fetch(gpu.streams.part_changes(blocks, counts)), blocks.event()
    base = blocks.fetch(gpu.changes.digest(blocks, old)) if digest_base else None
    yield changes
    rest = _routed(_Compared(was, now, runs, changes(), blocks, old, new, words, counts, done), names, most, keep)
    del words  # a bitmap is large, and not needed to the end: who comes next has it
    routed, moved = yield from rest
    return Compared(routed, Digest() if base is None else _digest(base), moved, runs.nbytes)


def _digest(sums: Callable[[], Any]) -> Digest:
    return Digest(*sums().view(np.uint64).tolist())


@dataclass(frozen=True)
class _Found:
    """Runs in two versions, and how many changes each has."""

    was: LocalWeights
    now: LocalWeights
    runs: Runs
    changes: Numbers

    @cached_property
    def ends(self) -> Numbers:
        """Changes before each run, and of all."""
        return np.concatenate(([0], np.cumsum(self.changes)))

    def columns(self, part: slice) -> dict[str, Any]:
        """The entries of some runs."""
        return {
            "dtype": self.runs.dtype,
            "tensor": self.runs.tensor[part],
            "region": [region for _, region in self.runs.places[part]],
            "numel": self.runs.numel[part],
            "count": self.changes[part],
            "covered": int(self.runs.numel[part].sum()),
        }


@dataclass(frozen=True)
class _Compared(_Found):
    """Runs that were compared: a bitmap of the changes."""

    blocks: gpu.changes.Blocks
    old: gpu.changes.Side
    new: gpu.changes.Side
    words: torch.Tensor
    counts: torch.Tensor  # of each block
    done: torch.cuda.Event | None

    @property
    def bare(self) -> _Found:
        """The same without the bitmap, which is large."""
        return _Found(self.was, self.now, self.runs, self.changes)

    def some(self, which: Numbers) -> _Compared:
        """Some of the runs."""
        if which.size == self.changes.size:
            return self
        runs = self.runs.select(which)
        blocks, (old, new) = runs.blocks(self.was.table.keys)
        mine = np.zeros(self.changes.size, bool)
        mine[which] = True
        take = self.blocks.upload(np.flatnonzero(np.repeat(mine, -(-self.blocks.sizes // self.blocks.block))))
        words, counts = self.words.view(self.blocks.count, -1)[take].view(-1), self.counts[take]
        columns = self.changes[which], blocks, old, new, words, counts, blocks.event()
        return _Compared(self.was, self.now, runs, *columns)

    def compacted(self) -> _Compacted:
        """The changes without the bitmap. Every run must have some."""
        total = int(self.changes.sum())
        positions, after, before, sums = gpu.changes.compact(
            self.blocks, self.old, self.new, self.words, self.counts, total, keep_old=True
        )
        moved = self.blocks.fetch(gpu.changes.sum_slots(sums))
        return _Compacted(self.was, self.now, self.runs, self.changes, positions, after, before, moved)

    def sampled(self, parts: Sequence[slice]) -> tuple[Waiting, Callable[[], list[Changes]]]:
        """Begin to bring some of the changes of each lot to the host, for estimates."""
        rows = [(int(self.ends[part.start]), int(self.ends[part.stop])) for part in parts]
        at = [np.arange(low, high, max(1, (high - low) // _SAMPLE)) for low, high in rows]
        there = upload(np.concatenate(at), self.runs.device)
        both = self.blocks.fetch(gpu.cells.sample(self.blocks, self.old, self.new, self.words, self.counts, there))

        def found() -> list[Changes]:
            split = np.cumsum([some.size for some in at])[:-1]
            olds, news = (np.split(side.view(self.runs.dtype.uint), split) for side in both())
            return [self._sample(part, x, y) for part, x, y in zip(parts, olds, news, strict=True)]

        return both, found

    def _sample(self, part: slice, before: UIntArray, after: UIntArray) -> Changes:
        steps, none = plan.steps_between(self.runs.dtype, before, after), np.zeros(before.size, np.uint32)
        return Changes(**self.columns(part), positions=none, after=after, steps=steps, before=before, base=self.was)


@dataclass(frozen=True)
class _Compacted(_Found):
    """Changes of runs on their device, one behind the other, and how the digest's sums move."""

    positions: torch.Tensor
    after: torch.Tensor
    before: torch.Tensor
    sums: Callable[[], Any]  # when they have come

    @property
    def moved(self) -> Digest:
        return _digest(self.sums)

    def changed(self, part: slice) -> Changes:
        """The changes of some runs in host memory. Without a base: the old bits stay where they are, so no `ctx`."""
        low, high = self.ends[part.start], self.ends[part.stop]
        with on_stream(self.was, self.runs.device):
            waits = [fetch(column[low:high]) for column in (self.positions, self.after, self.before)]
        positions, after, before = (wait() for wait in waits)
        after, before = after.view(self.runs.dtype.uint), before.view(self.runs.dtype.uint)
        places = self.runs.places[part]
        return Changes(
            **self.columns(part),
            positions=positions.view(np.uint32),
            after=after,
            steps=plan.steps_between(self.runs.dtype, before, after),
            bits=lambda entry: self.now.bits(*places[entry]),
            before=before,
        )


def _routed(
    found: _Compared, names: Sequence[str], most: int, keep: bool
) -> Generator[Waiting, None, tuple[list[Changes | Draft], Digest]]:
    """Buckets that are coded on the device, and the changes that are left to the CPU; how the digest moves."""
    live = np.flatnonzero(found.changes)
    count = found.changes[live]
    alone = may_be_dense(found.runs.dtype, found.runs.numel[live], count) | (count > BUCKET_CHANGES)
    if int(count.sum()) < (min(FEW_CHANGES, _FEW_FOR_CTX) if "ctx" in names else FEW_CHANGES) or set(names) == {"gap"}:
        alone[:] = True
    out: list[Changes | Draft] = []
    moved = Digest()
    if (here := live[alone]).size:
        packed = found.some(here).compacted()
        for part in _cut(packed, names, most):
            out += plan.route(packed.changed(part), names, found.was.table)
        moved += packed.moved
    if (there := live[~alone]).size:
        found = found.some(there)
        rest = _drafts(found, [*_cut(found, names, most)], names, keep)
        del found
        drafts, way = yield from rest
        out += drafts
        moved += way
    return out, moved


def _cut(found: _Found, names: Sequence[str], most: int) -> Iterator[slice]:
    """Runs that make a bucket each, of so many bytes of weights."""
    width = found.runs.dtype.width
    bits = index_bits(found.runs.numel, found.changes) + _WORD_BITS * found.changes
    if set(names) == {"raw"}:
        bits = (32 + 8 * width) * found.changes.astype(np.float64)
    begin, covered, count, payload = 0, 0, 0, 0.0
    rows = zip((found.runs.numel * width).tolist(), found.changes.tolist(), (bits / 8).tolist(), strict=True)
    for i, (nbytes, changes, cost) in enumerate(rows):
        covered, count, payload = covered + nbytes, count + changes, payload + cost
        full = covered > (most if count > ENOUGH_CHANGES else COVER_BYTES)
        if i > begin and (full or count > BUCKET_CHANGES or payload > BUCKET_PAYLOAD_BYTES):
            yield slice(begin, i)
            begin, covered, count, payload = i, nbytes, changes, cost
    yield slice(begin, found.changes.size)


class _Draft(Draft):
    """A bucket of changes that are on a device: coded there, or compacted, or both."""

    def __init__(self, found: _Found, part: slice) -> None:
        super().__init__()
        self.found, self.part = found, part
        self.covered = int(found.runs.numel[part].sum()) * found.runs.dtype.width
        self.count = int(found.changes[part].sum())
        columns = found.columns(part)
        size = len(columns["region"])
        self.entries = Entries(
            columns["tensor"], columns["count"], np.zeros(size, bool), columns["region"], columns["numel"]
        )
        self.entries.coded  # noqa: B018  # while the device is at work
        self.tile_log = tile_log(self.entries)
        self.classes: Classes | None = None
        self.packed: _Compacted | None = None
        self._given = False  # whether a bucket was written around its streams
        self.made: Callable[[], Laid] | None = None  # its streams, when they have come to the host
        self.profile = ""  # which they are in

    @property
    def parts(self) -> list[Changes]:
        """The changes in host memory, for a profile that they were not coded in."""
        assert self.packed is not None
        return [self.packed.changed(self.part)]

    @parts.setter
    def parts(self, none: list[Changes]) -> None:
        """Parts are not added one by one."""

    @property
    def changed(self) -> int:
        return self.count

    @property
    def width(self) -> int:
        return self.found.runs.dtype.width

    def is_coded(self, names: Sequence[str]) -> bool:
        return self.made is not None and self.profile in _CODED and self.profile in names

    @property
    def settled(self) -> bool:
        """Whether the profile with the fewest bits is the one that the device codes."""
        made = "ulp" if self.classes is None else "ctx"
        return min(self.costs, key=lambda n: (self.costs[n], n), default=made) == made

    def head(self, name: str) -> Head:
        return Head(codec.profile(name), self.found.runs.dtype, self.tile_log, CHUNK_LOG, (), self.entries)

    def coded(self, name: str) -> tuple[Head, Coded, Laid | None]:
        made, profile = self.made, self.profile
        if name == "raw" and (made is None or profile != "raw"):
            assert self.packed is not None
            return self.head(name), {}, _stored(self.packed, [self])[0]()
        if made is None or (name != profile and (name, profile) != ("ctx", "ulp")):
            return super().coded(name)
        given, self._given = self._given, True
        streams: Coded = {}
        if profile == "ctx" and self.classes is not None:
            streams[codec.Stream.CLASSES] = Stored(), [write_classes(self.classes)]
        return self.head(profile), streams, made().bare if given else made()


class _Lot:
    """Buckets that are one behind the other, and what is estimated of them together."""

    def __init__(self, found: _Found, parts: Sequence[slice]) -> None:
        self.drafts = [_Draft(found, part) for part in parts]
        self.count = sum(draft.count for draft in self.drafts)
        self.best = ""

    def estimated(self, costs: dict[str, float]) -> None:
        """Bits of all in each profile, which buckets share by their changes."""
        self.best = min(costs, key=lambda n: (costs[n], n))
        for draft in self.drafts:
            draft.costs = {name: bits * draft.count / self.count for name, bits in costs.items()}

    def choose(self, dtype: DType, shift: int, members: npt.NDArray[Any], sample: Changes) -> None:
        """Classes, and what `ctx` costs with them; none where telling elements apart does not pay."""
        tiles = sum(int((((draft.entries.numel - 1) >> draft.tile_log) + 1).sum()) for draft in self.drafts)
        classes, bits = decide(dtype, shift, members, int(sample.numel.sum()), [sample], self.count, tiles)
        for draft in self.drafts:
            draft.classes, draft.costs["ctx"] = classes, bits * draft.count / self.count
            if classes is None:
                del draft.costs["ctx"]


def _drafts(
    found: _Compared, parts: list[slice], names: Sequence[str], keep: bool
) -> Generator[Waiting, None, tuple[list[_Draft], Digest]]:
    """Buckets with estimates, and how the digest moves; those that would be smallest in `ulp` or `ctx` are coded."""
    if set(names) == {"raw"}:
        every, plain = found.compacted(), [_Draft(found.bare, part) for part in parts]
        for draft, made in zip(plain, _stored(every, plain), strict=True):
            draft.packed, draft.made, draft.profile = every, made, "raw"
        return plain, every.moved
    cuts = [parts[i : i + _LOT] for i in range(0, len(parts), _LOT)]
    spans = [slice(some[0].start, some[-1].stop) for some in cuts]
    dtype, by_classes = found.runs.dtype, dict[int, list[_Draft]]()
    shifts = [key_shift(dtype, ())] * len(spans)  # of integers it depends on the changes
    with gpu.streams.urgent_stream(found.runs.device, found.done):
        pause, samples = found.sampled(spans)
        members = _members(found, spans, shifts) if "ctx" in names and dtype.sign_magnitude else None
    yield members or pause
    lots = [_Lot(found.bare, some) for some in cuts]
    drafts, seen = [draft for lot in lots for draft in lot.drafts], samples()
    if "ctx" in names and members is None:
        shifts = [key_shift(dtype, [sample]) for sample in seen]
        members = _members(found, spans, shifts)
        yield members
    for i, (lot, sample) in enumerate(zip(lots, seen, strict=True)):
        lot.estimated(plan.estimate(sample, names, lot.count))
        if lot.best == "ctx" and members is not None:
            lot.choose(dtype, shifts[i], members()[i], sample)
        for draft in lot.drafts if lot.best in _CODED else ():
            by_classes.setdefault(0 if draft.classes is None else len(draft.classes.thresholds), []).append(draft)
    packed = None if not keep and all(draft.settled for draft in drafts) else found.compacted()
    jobs = [_encode(found, some) for some in by_classes.values()]
    del found
    moved = []
    while jobs:
        moved.append((yield from jobs.pop()))
    for draft in drafts:
        draft.packed = packed
    return drafts, sum(map(_digest, moved), Digest()) if packed is None else packed.moved


def _members(found: _Compared, parts: list[slice], shifts: list[int]) -> gpu.changes.HostCopy:
    """Begin to count the magnitudes of old bits, of each lot some."""
    dtype, row = found.runs.dtype, np.repeat(np.arange(len(parts)), [part.stop - part.start for part in parts])
    every = np.array([sampling(found.runs.numel[part]) for part in parts])
    kind = 0 if dtype.sign_magnitude else 1 if dtype.signed else 2
    return found.blocks.fetch(gpu.cells.key_histogram(found.blocks, found.old, kind, row, every, np.array(shifts)))


def _encode(found: _Compared, drafts: list[_Draft]) -> Generator[Waiting, None, Callable[[], Any]]:
    """Code buckets that have as many classes, together. Returns how they move the digest, when that has come."""
    mine = found.some(np.concatenate([np.arange(draft.part.start, draft.part.stop) for draft in drafts]))
    del found
    dtype, sizes = mine.runs.dtype, [len(draft.entries) for draft in drafts]
    limits = None
    if drafts[0].classes is not None:
        rows = [np.array(d.classes.thresholds, np.uint64) << np.uint64(d.classes.shift) for d in drafts if d.classes]
        limits = np.repeat(np.stack(rows), sizes, axis=0)
    logs = np.repeat([draft.tile_log for draft in drafts], sizes)
    order = {"sign_magnitude": dtype.sign_magnitude, "signed": dtype.signed}
    bucket = np.repeat(np.arange(len(drafts)), sizes)
    made = gpu.streams.StreamPlan.of(mine.blocks, bucket, logs, limits, 1 << CHUNK_LOG, **order)
    rest = gpu.streams.encode_in_steps(made, mine.old, mine.new, (mine.words, mine.counts), mine.changes)
    fetched = mine.blocks.fetch
    del mine
    encoded = yield from rest
    moved = fetched(encoded.digest_delta)
    numbers, owner, streams = encoded.directory.numbers()
    told = np.split(numbers, np.searchsorted(owner, np.arange(1, len(drafts))))
    sizes = np.bincount(encoded.directory.bucket, encoded.directory.length, len(drafts)).astype(np.int64).tolist()
    room = [_room(draft.entries, its) for draft, its in zip(drafts, told, strict=True)]
    wait = fetch_with_margins([[body] for body in torch.split(encoded.data, sizes)], room, CHECKSUM_BYTES)
    for b, draft in enumerate(drafts):
        draft.made = partial(_laid, wait, b, int(streams[b]), told[b])
        draft.profile = "ulp" if draft.classes is None else "ctx"
    return moved


def _stored(found: _Compacted, drafts: list[_Draft]) -> list[Callable[[], Laid]]:
    """The streams of `raw`, on their way to the host."""
    told, bodies = list[Numbers](), list[list[torch.Tensor]]()
    for draft in drafts:
        sizes = np.array(draft.head("raw").layout.chunk_sizes(draft.count))
        rows = (codec.Stream.POSITIONS, 4 * sizes), (codec.Stream.WORDS, draft.width * sizes)
        told.append(np.concatenate([(stream, Stored.id, sizes.size, *lengths) for stream, lengths in rows]))
        mine = slice(found.ends[draft.part.start], found.ends[draft.part.stop])
        bodies.append([found.positions[mine], found.after[mine]])
    room = [_room(draft.entries, its) for draft, its in zip(drafts, told, strict=True)]
    with on_stream(found.was, found.runs.device):
        wait = fetch_with_margins(bodies, room, CHECKSUM_BYTES)
    return [partial(_laid, wait, b, 2, its) for b, its in enumerate(told)]


def _room(entries: Entries, numbers: Numbers) -> int:
    """Bytes that will do for what stands before the streams of a bucket, but for regions of many dimensions."""
    return 512 + 64 * len(entries) + 5 * numbers.size


def _laid(wait: Callable[[], list[tuple[memoryview, int, int]]], b: int, streams: int, numbers: Numbers) -> Laid:
    return Laid(streams, numbers, *wait()[b])
