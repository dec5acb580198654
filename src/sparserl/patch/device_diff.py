"""Finding and encoding changes of weights that are on a device in both versions: only coded bytes leave it.

    old, new ──► bitmap ──► changes per part │ compacted on the device ──► `ulp`, `ctx`: coded there ──► bytes
                                                                      └──► few, heavy, `raw`, `gap`: to the CPU's coders

Buckets are cut by the number of changes alone. Four of them make a lot, which takes the profile with the fewest bits,
estimated as on a CPU: from a sample of its changes and, for `ctx`, a histogram of its old bits. What was compacted
stays on the device as long as a bucket may still be wanted in another profile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from .. import codec, plan
from ..bits import DType
from ..codec import Classes, Coded
from ..codec.coders import Stored
from ..codec.ctx import tiles, write_classes
from ..device import Run, Runs, fetch, fetch_apart, groups, pair, upload, working
from ..digest import Digest
from ..kernels import gpu, gpu_cells, gpu_streams
from ..pieces import Held
from ..plan import Changes, Draft
from ..plan.buckets import CHUNK_LOG, ENOUGH_CHANGES, ENOUGH_COVER_BYTES, tile_log
from ..plan.classes import decide, key_shift, sampling
from ..plan.estimate import index_bits
from ..plan.route import BUCKET_CHANGES, BUCKET_PAYLOAD_BYTES, may_be_dense
from ..wire import Entries, Head, Laid
from ..wire.cursor import CHECKSUM_BYTES

FEW_CHANGES = 1 << 18
"""Changes of a group below which the CPU codes them: launches and waits take a device as long, whatever the number.

Measured on an H200 by `benchmarks.gpu` (`small`): `diff` in `ulp` of 64 MiB takes the CPU 5.7 ms with as many and 13.4
with four times as many, the device 5.5 to 6.8.
"""
_FEW_FOR_CTX = 1 << 10  # the same where `ctx` is wanted, which only the device can code: it saves half of the bytes
_SAMPLE = 1 << 13  # changes of a lot that estimates look at
_LOT = 4  # buckets, one behind the other, for which profile and classes are chosen together
_WORD_BITS = 8  # taken for a word where buckets are cut
COVER_BYTES = 512 << 20  # of a bucket: twice what a CPU makes, since each takes the host a while
_BUCKETS = 8  # at least, of a group: a receiver without a device decodes them on threads
_CODED = ("ctx", "ulp")  # profiles that are coded on the device
Numbers = npt.NDArray[np.int64]


def search(
    was: Held, now: Held, far: Sequence[Run], names: Sequence[str], digest_base: bool
) -> Iterator[tuple[list[Changes | Draft], Digest, Digest, int]]:
    """Changes of runs, element sums of the old bits (if wanted), how the changes move them, bytes covered.

    While the device compares a group, the host prepares the next.
    """
    ahead: Callable[[], tuple[list[Changes | Draft], Digest, Digest, int]] | None = None
    for runs in groups(far, was.table):
        found = _begun(was, now, runs, names, digest_base)
        if ahead is not None:
            yield ahead()
        ahead = found
    if ahead is not None:
        yield ahead()


def _begun(
    was: Held, now: Held, runs: Runs, names: Sequence[str], digest_base: bool
) -> Callable[[], tuple[list[Changes | Draft], Digest, Digest, int]]:
    """Begin to compare a group. What it returns finds and encodes its changes."""
    with working(was, runs.device):
        blocks, (old, new) = runs.blocks(was.table.keys)
        words, counts = gpu.diff(blocks, old, new)
        changes = blocks.fetch(gpu_streams.part_changes(blocks, counts))

    def rest() -> tuple[list[Changes | Draft], Digest, Digest, int]:
        with working(was, runs.device):
            routed, moved = _routed(_Compared(was, now, runs, blocks, old, new, words, counts, changes()), names)
            read = Digest(*pair(gpu.digest(blocks, old))) if digest_base else Digest()
        return routed, read, moved, runs.nbytes

    return rest


@dataclass(frozen=True)
class _Compared:
    """Runs in two versions, compared: a bitmap of the changes, and how many each run has."""

    was: Held
    now: Held
    runs: Runs
    blocks: gpu.Blocks
    old: gpu.Side
    new: gpu.Side
    words: torch.Tensor
    counts: torch.Tensor  # of each block
    changes: Numbers  # of each run

    def some(self, which: Numbers) -> _Compared:
        """Some of the runs."""
        if which.size == self.changes.size:
            return self
        runs = self.runs.some(which)
        blocks, (old, new) = runs.blocks(self.was.table.keys)
        mine = np.zeros(self.changes.size, bool)
        mine[which] = True
        take = self.blocks.put(np.flatnonzero(np.repeat(mine, -(-self.blocks.sizes // self.blocks.block))))
        words = self.words.view(self.blocks.count, -1)[take].view(-1)
        return _Compared(self.was, self.now, runs, blocks, old, new, words, self.counts[take], self.changes[which])

    def compacted(self) -> _Compacted:
        """The changes without the bitmap. Every run must have some."""
        total = int(self.changes.sum())
        positions, after, before, sums = gpu.compact(
            self.blocks, self.old, self.new, self.words, self.counts, total, keep_old=True
        )
        moved = self.blocks.fetch(gpu.total(sums))
        return _Compacted(self.was, self.now, self.runs, self.changes, positions, after, before, moved)


@dataclass(frozen=True)
class _Compacted:
    """Changes of runs on their device, one behind the other, and how the digest's sums move."""

    was: Held
    now: Held
    runs: Runs
    changes: Numbers  # of each run
    positions: torch.Tensor
    after: torch.Tensor
    before: torch.Tensor
    sums: Callable[[], Any]  # when they have come

    @cached_property
    def ends(self) -> Numbers:
        """Changes before each run, and of all."""
        return np.concatenate(([0], np.cumsum(self.changes)))

    @property
    def moved(self) -> Digest:
        return Digest(*self.sums().view(np.uint64).tolist())

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

    def changed(self, part: slice) -> Changes:
        """The changes of some runs in host memory. Without a base: the old bits stay where they are, so no `ctx`."""
        low, high = self.ends[part.start], self.ends[part.stop]
        with working(self.was, self.runs.device):
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

    def sampled(self, parts: Sequence[slice]) -> list[Changes]:
        """Some of the changes of each lot, for estimates."""
        low = np.array([self.ends[part.start] for part in parts])
        size = np.array([self.ends[part.stop] for part in parts]) - low
        every = np.maximum(1, size // _SAMPLE)
        many = -(-size // every)
        ends, device = np.cumsum(many), self.runs.device
        per, first, begin, step = upload(np.concatenate((many, ends - many, low, every)), device).view(4, -1)
        owner = torch.repeat_interleave(per, output_size=int(ends[-1]))
        at = begin[owner] + (torch.arange(int(ends[-1]), device=device) - first[owner]) * step[owner]
        waits = [fetch(column[at]) for column in (self.before, self.after)]
        olds, news = (wait().view(self.runs.dtype.uint) for wait in waits)
        out = []
        for part, end, n in zip(parts, ends.tolist(), many.tolist(), strict=True):
            x, y = olds[end - n : end], news[end - n : end]
            steps, none = plan.steps_between(self.runs.dtype, x, y), np.zeros(n, np.uint32)
            out.append(Changes(**self.columns(part), positions=none, after=y, steps=steps, before=x, base=self.was))
        return out


def _routed(found: _Compared, names: Sequence[str]) -> tuple[list[Changes | Draft], Digest]:
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
        for part in _cut(packed, names):
            out += plan.route(packed.changed(part), names, found.was.table)
        moved += packed.moved
    if (there := live[~alone]).size:
        mine = found.some(there)
        packed = mine.compacted()
        out += _drafts(mine, packed, [*_cut(packed, names)], names)
        moved += packed.moved
    return out, moved


def _cut(found: _Compacted, names: Sequence[str]) -> Iterator[slice]:
    """Runs that make a bucket each: larger ones than a CPU makes, since each takes the host a while."""
    width = found.runs.dtype.width
    bits = index_bits(found.runs.numel, found.changes) + _WORD_BITS * found.changes
    if set(names) == {"raw"}:
        bits = (32 + 8 * width) * found.changes.astype(np.float64)
    most = min(COVER_BYTES, max(ENOUGH_COVER_BYTES, found.runs.nbytes // _BUCKETS))
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
    """A bucket of changes that were compacted on a device, and may have been coded there."""

    def __init__(self, found: _Compacted, part: slice) -> None:
        super().__init__()
        self._found, self.part = found, part
        self.covered = int(found.runs.numel[part].sum()) * found.runs.dtype.width
        self.count = int(found.changes[part].sum())
        columns = found.columns(part)
        size = len(columns["region"])
        self.entries = Entries(
            columns["tensor"], columns["count"], np.zeros(size, bool), columns["region"], columns["numel"]
        )
        self.tile_log = tile_log(self.entries)
        self.classes: Classes | None = None
        self._given = False  # whether a bucket was written around its streams
        self.made: Callable[[], Laid] | None = None  # its streams in `ctx`, or in `ulp` where it has no classes

    @property
    def parts(self) -> list[Changes]:
        """The changes in host memory, for a profile that they were not coded in."""
        return [self._found.changed(self.part)]

    @parts.setter
    def parts(self, none: list[Changes]) -> None:
        """Parts are not added one by one."""

    @property
    def changed(self) -> int:
        return self.count

    @property
    def width(self) -> int:
        return self._found.runs.dtype.width

    def head(self, name: str) -> Head:
        return Head(codec.profile(name), self._found.runs.dtype, self.tile_log, CHUNK_LOG, (), self.entries)

    def coded(self, name: str) -> tuple[Head, Coded, Laid | None]:
        made = "ulp" if self.classes is None else "ctx"
        if self.made is not None and name in ("ctx", made):
            laid = self.made()
            given, self._given = self._given, True
            streams: Coded = {}
            if self.classes is not None:
                streams[codec.Stream.CLASSES] = Stored(), [write_classes(self.classes)]
            return self.head(made), streams, laid.bare if given else laid
        if name == "raw":
            return self.head(name), {}, self._raw()
        return super().coded(name)

    def _raw(self) -> Laid:
        """The streams of `raw`."""
        found, sizes = self._found, self.head("raw").layout.chunk_sizes(self.count)
        numbers = [codec.Stream.POSITIONS, Stored.id, len(sizes), *(4 * n for n in sizes)]
        numbers += [codec.Stream.WORDS, Stored.id, len(sizes), *(self.width * n for n in sizes)]
        low, high = found.ends[self.part.start], found.ends[self.part.stop]
        with working(found.was, found.runs.device):
            columns = found.positions[low:high], found.after[low:high]
            wait = fetch_apart([columns], [_room(self.entries, numbers)], CHECKSUM_BYTES)
        return _laid(wait, 0, 2, numbers)


class _Lot:
    """Buckets that are one behind the other, and what is estimated of them together."""

    def __init__(self, packed: _Compacted, parts: Sequence[slice]) -> None:
        self.part = slice(parts[0].start, parts[-1].stop)
        self.drafts = [_Draft(packed, part) for part in parts]
        self.count = sum(draft.count for draft in self.drafts)
        self.best = ""

    def estimated(self, costs: dict[str, float]) -> None:
        """Bits of all in each profile, which buckets share by their changes."""
        self.best = min(costs, key=lambda n: (costs[n], n))
        for draft in self.drafts:
            draft.costs = {name: bits * draft.count / self.count for name, bits in costs.items()}

    def choose(self, dtype: DType, shift: int, members: npt.NDArray[Any], sample: Changes) -> None:
        """Classes, and what `ctx` costs with them; none where telling elements apart does not pay."""
        elements, all_tiles = int(sample.numel.sum()), sum(tiles(draft.head("ctx").layout) for draft in self.drafts)
        classes, bits = decide(dtype, shift, members, elements, [sample], self.count, all_tiles)
        for draft in self.drafts:
            draft.classes, draft.costs["ctx"] = classes, bits * draft.count / self.count
            if classes is None:
                del draft.costs["ctx"]


def _drafts(found: _Compared, packed: _Compacted, parts: list[slice], names: Sequence[str]) -> list[_Draft]:
    """Buckets with estimates; those that would be smallest in `ulp` or `ctx` are coded."""
    if set(names) == {"raw"}:
        return [_Draft(packed, part) for part in parts]
    lots = [_Lot(packed, parts[i : i + _LOT]) for i in range(0, len(parts), _LOT)]
    samples = packed.sampled([lot.part for lot in lots])
    for lot, sample in zip(lots, samples, strict=True):
        lot.estimated(plan.estimate(sample, names, lot.count))
    _choose(found, [(lot, sample) for lot, sample in zip(lots, samples, strict=True) if lot.best == "ctx"])
    by_classes: dict[int, list[_Draft]] = {}
    for lot in lots:
        for draft in lot.drafts if lot.best in _CODED else ():
            by_classes.setdefault(0 if draft.classes is None else len(draft.classes.thresholds), []).append(draft)
    for drafts in by_classes.values():
        _encode(found, drafts)
    return [draft for lot in lots for draft in lot.drafts]


def _choose(found: _Compared, lots: list[tuple[_Lot, Changes]]) -> None:
    """Classes for lots in `ctx`."""
    if not lots:
        return
    dtype, mine = found.runs.dtype, found.some(_rows([lot.part for lot, _ in lots]))
    shift = np.array([key_shift(dtype, [sample]) for _, sample in lots])
    sizes = [lot.part.stop - lot.part.start for lot, _ in lots]
    every = np.array([sampling(found.runs.numel[lot.part]) for lot, _ in lots])
    kind = 0 if dtype.sign_magnitude else 1 if dtype.signed else 2
    row = np.repeat(np.arange(len(lots)), sizes)
    members = fetch(gpu_cells.key_histogram(mine.blocks, mine.old, kind, row, every, shift))()
    for (lot, sample), bits, seen in zip(lots, shift.tolist(), members, strict=True):
        lot.choose(dtype, bits, seen, sample)


def _rows(parts: Sequence[slice]) -> Numbers:
    return np.concatenate([np.arange(part.start, part.stop) for part in parts])


def _encode(found: _Compared, drafts: list[_Draft]) -> None:
    """Code buckets that have as many classes, together."""
    mine = found.some(_rows([draft.part for draft in drafts]))
    dtype, sizes = mine.runs.dtype, [len(draft.entries) for draft in drafts]
    limits = None
    if drafts[0].classes is not None:
        rows = [np.array(d.classes.thresholds, np.uint64) << np.uint64(d.classes.shift) for d in drafts if d.classes]
        limits = np.repeat(np.stack(rows), sizes, axis=0)
    logs = np.repeat([draft.tile_log for draft in drafts], sizes)
    order = {"sign_magnitude": dtype.sign_magnitude, "signed": dtype.signed}
    bucket = np.repeat(np.arange(len(drafts)), sizes)
    made = gpu_streams.Plan.of(mine.blocks, bucket, logs, limits, 1 << CHUNK_LOG, **order)
    encoded = gpu_streams.encode(made, mine.old, mine.new, (mine.words, mine.counts), mine.changes)
    directory = encoded.directory
    sizes = np.bincount(directory.bucket, directory.length, len(drafts)).astype(np.int64).tolist()
    told = [_numbers(directory.of(b)) for b in range(len(drafts))]
    room = [_room(draft.entries, numbers) for draft, (_, numbers) in zip(drafts, told, strict=True)]
    wait = fetch_apart([[body] for body in torch.split(encoded.data, sizes)], room, CHECKSUM_BYTES)
    for b, (draft, (streams, numbers)) in enumerate(zip(drafts, told, strict=True)):
        draft.made = partial(_laid, wait, b, streams, numbers)


def _numbers(rows: dict[int, tuple[int, list[tuple[int, int]]]]) -> tuple[int, list[int]]:
    """How many streams there are, and what the directory of a bucket says of them."""
    return len(rows), [n for id, (coder, its) in rows.items() for n in (id, coder, len(its), *(n for _, n in its))]


def _room(entries: Entries, numbers: list[int]) -> int:
    """Bytes that will do for what stands before the streams of a bucket, but for regions of many dimensions."""
    return 512 + 64 * len(entries) + 5 * len(numbers)


def _laid(wait: Callable[[], list[tuple[memoryview, int, int]]], b: int, streams: int, numbers: list[int]) -> Laid:
    return Laid(streams, numbers, *wait()[b])
