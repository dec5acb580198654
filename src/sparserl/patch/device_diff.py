"""Finding and encoding changes of weights that are on a device in both versions: only coded bytes leave it.

    old, new ──► bitmap ──► changes per part │ compacted on the device ──► `ulp`, `ctx`: coded there ──► bytes
                                                                      └──► few, heavy, `raw`, `gap`: to the CPU's coders

Buckets are cut by the number of changes alone. Each takes the profile with the fewest bits, estimated as on a CPU: from
a sample of its changes and, for `ctx`, a histogram of its old bits. What was compacted stays on the device as long as a
bucket may still be wanted in another profile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from .. import codec, plan
from ..codec import Classes, Coded
from ..codec.coders import CODERS, Stored
from ..codec.ctx import tiles, write_classes
from ..device import Runs, fetch, groups, pair, upload, working
from ..digest import Digest
from ..kernels import gpu, gpu_cells, gpu_streams
from ..pieces import Held
from ..plan import Changes, Draft
from ..plan.buckets import (
    BUCKET_COVER_BYTES,
    CHUNK_LOG,
    tile_log,
)
from ..plan.classes import decide, key_shift, sampling
from ..plan.estimate import index_bits
from ..plan.route import BUCKET_CHANGES, BUCKET_PAYLOAD_BYTES, may_be_dense
from ..shards import Place
from ..wire import Entries, Head

FEW_CHANGES = 1 << 18
"""Changes of a group below which the CPU codes them: launches and waits take a device as long, whatever the number.

Measured on an H200 by `benchmarks.gpu` (`small`): `diff` in `ulp` of 64 MiB takes 7.0 ms with as many, either way.
"""
_FEW_FOR_CTX = 1 << 10  # the same where `ctx` is wanted, which only the device can code: it saves half of the bytes
_SAMPLE = 1 << 13  # changes of a bucket that estimates look at
_WORD_BITS = 8  # taken for a word where buckets are cut
_CODED = ("ctx", "ulp")  # profiles that are coded on the device
Numbers = npt.NDArray[np.int64]


def search(
    was: Held, now: Held, places: Sequence[Place], names: Sequence[str], digest_base: bool
) -> Iterator[tuple[list[Changes | Draft], Digest, Digest, int]]:
    """Changes of runs, element sums of the old bits (if wanted), how the changes move them, bytes covered."""
    for runs in groups(places, was, now):
        with working(was, runs.device):
            blocks, (old, new) = runs.blocks(was.table.keys)
            words, counts = gpu.diff(blocks, old, new)
            changes = blocks.fetch(gpu_streams.part_changes(blocks, counts))()
            found = _Compared(was, now, runs, blocks, old, new, words, counts, changes)
            routed, moved = _routed(found, names)
            read = Digest(*pair(gpu.digest(blocks, old))) if digest_base else Digest()
        yield routed, read, moved, runs.nbytes


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
        runs = self.runs.some(which.tolist())
        blocks, (old, new) = runs.blocks(self.was.table.keys)
        mine = np.zeros(self.changes.size, bool)
        mine[which] = True
        take = self.blocks.put(np.flatnonzero(np.repeat(mine, -(-self.blocks.sizes // self.blocks.block))))
        words = self.words.view(self.blocks.count, -1)[take].view(-1)
        return _Compared(self.was, self.now, runs, blocks, old, new, words, self.counts[take], self.changes[which])

    def compacted(self) -> _Compacted:
        """The changes without the bitmap. Every run must have some."""
        total = int(self.changes.sum())
        found = gpu.compact(self.blocks, self.old, self.new, self.words, self.counts, total, keep_old=True)
        return _Compacted(self.was, self.now, self.runs, self.changes, *found)


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
    sums: torch.Tensor

    @cached_property
    def ends(self) -> Numbers:
        """Changes before each run, and of all."""
        return np.concatenate(([0], np.cumsum(self.changes)))

    @property
    def moved(self) -> Digest:
        return Digest(*pair(gpu.total(self.sums)))

    def columns(self, part: slice) -> dict[str, Any]:
        """The entries of some runs."""
        places = self.runs.places[part]
        return {
            "dtype": self.runs.dtype,
            "tensor": np.array([t for t, _ in places], np.int64),
            "region": [region for _, region in places],
            "numel": self.runs.numel[part],
            "count": self.changes[part],
            "covered": int(self.runs.numel[part].sum()),
        }

    def fetched(self, part: slice, *columns: torch.Tensor) -> list[Any]:
        """Positions and some other columns of the changes of some runs, in host memory."""
        low, high = self.ends[part.start], self.ends[part.stop]
        with working(self.was, self.runs.device):
            waits = [fetch(column[low:high]) for column in (self.positions, *columns)]
        positions, *words = (wait() for wait in waits)
        return [positions.view(np.uint32), *(w.view(self.runs.dtype.uint) for w in words)]

    def changed(self, part: slice) -> Changes:
        """The changes of some runs in host memory. Without a base: the old bits stay where they are, so no `ctx`."""
        positions, after, before = self.fetched(part, self.after, self.before)
        places = self.runs.places[part]
        return Changes(
            **self.columns(part),
            positions=positions,
            after=after,
            steps=plan.steps_between(self.runs.dtype, before, after),
            bits=lambda entry: self.now.bits(*places[entry]),
            before=before,
        )

    def sampled(self, parts: Sequence[slice]) -> list[Changes]:
        """Some of the changes of each bucket, for estimates."""
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
    begin, covered, count, payload = 0, 0, 0, 0.0
    rows = zip((found.runs.numel * width).tolist(), found.changes.tolist(), (bits / 8).tolist(), strict=True)
    for i, (nbytes, changes, cost) in enumerate(rows):
        covered, count, payload = covered + nbytes, count + changes, payload + cost
        if i > begin and (covered > BUCKET_COVER_BYTES or count > BUCKET_CHANGES or payload > BUCKET_PAYLOAD_BYTES):
            yield slice(begin, i)
            begin, covered, count, payload = i, nbytes, changes, cost
    yield slice(begin, found.changes.size)


class _Draft(Draft):
    """A bucket of changes that were compacted on a device, and may have been coded there."""

    def __init__(self, found: _Compacted, part: slice, costs: dict[str, float]) -> None:
        super().__init__()
        self._found, self._part, self.costs = found, part, costs
        self.covered = int(found.runs.numel[part].sum()) * found.runs.dtype.width
        self.count = int(found.changes[part].sum())
        columns = found.columns(part)
        size = len(columns["region"])
        self.entries = Entries(
            columns["tensor"], columns["count"], np.zeros(size, bool), columns["region"], columns["numel"]
        )
        self.classes: Classes | None = None
        self.made: Callable[[], Coded] | None = None  # its streams in `ctx`, or in `ulp` where it has no classes

    @property
    def parts(self) -> list[Changes]:
        """The changes in host memory, for a profile that they were not coded in."""
        return [self._found.changed(self._part)]

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
        return Head(codec.profile(name), self._found.runs.dtype, tile_log(self.entries), CHUNK_LOG, (), self.entries)

    def coded(self, name: str) -> tuple[Head, Coded]:
        made = "ulp" if self.classes is None else "ctx"
        if self.made is not None and name in ("ctx", made):
            return self.head(made), self.made()
        if name == "raw":
            head, (positions, words) = self.head(name), self._found.fetched(self._part, self._found.after)
            return head, codec.code(head.profile.encode(head.layout, positions, words))
        return super().coded(name)


def _drafts(found: _Compared, packed: _Compacted, parts: list[slice], names: Sequence[str]) -> list[_Draft]:
    """Buckets with estimates; those that would be smallest in `ulp` or `ctx` are coded."""
    samples = packed.sampled(parts)
    out = [
        _Draft(packed, part, plan.estimate(sample, names, int(found.changes[part].sum())))
        for part, sample in zip(parts, samples, strict=True)
    ]
    best = [min(draft.costs, key=lambda n: (draft.costs[n], n)) for draft in out]
    wanted = [b for b, name in enumerate(best) if name == "ctx"]
    _choose(found, [parts[b] for b in wanted], [out[b] for b in wanted], [samples[b] for b in wanted])
    by_classes: dict[int, list[int]] = {}
    for b, (name, draft) in enumerate(zip(best, out, strict=True)):
        if name in _CODED:
            by_classes.setdefault(0 if draft.classes is None else len(draft.classes.thresholds), []).append(b)
    for buckets in by_classes.values():
        _encode(found, [parts[b] for b in buckets], [out[b] for b in buckets])
    return out


def _choose(found: _Compared, parts: list[slice], drafts: list[_Draft], samples: list[Changes]) -> None:
    """Classes for buckets in `ctx`, and what they cost; none where telling elements apart does not pay."""
    if not drafts:
        return
    dtype, mine = found.runs.dtype, found.some(np.concatenate([np.arange(p.start, p.stop) for p in parts]))
    shift = np.array([key_shift(dtype, [sample]) for sample in samples])
    every = np.array([sampling(draft.entries.numel) for draft in drafts])
    row = np.repeat(np.arange(len(parts)), [p.stop - p.start for p in parts])
    kind = 0 if dtype.sign_magnitude else 1 if dtype.signed else 2
    members = fetch(gpu_cells.key_histogram(mine.blocks, mine.old, kind, row, every, shift))()
    for b, (draft, sample) in enumerate(zip(drafts, samples, strict=True)):
        layout = draft.head("ctx").layout
        elements = int(layout.numel.sum())
        draft.classes, bits = decide(dtype, int(shift[b]), members[b], elements, [sample], draft.count, tiles(layout))
        draft.costs["ctx"] = bits
        if draft.classes is None:
            del draft.costs["ctx"]


def _encode(found: _Compared, parts: list[slice], drafts: list[_Draft]) -> None:
    """Code buckets that have as many classes, together."""
    mine = found.some(np.concatenate([np.arange(p.start, p.stop) for p in parts]))
    dtype, sizes = mine.runs.dtype, [p.stop - p.start for p in parts]
    limits = None
    if drafts[0].classes is not None:
        rows = [np.array(d.classes.thresholds, np.uint64) << np.uint64(d.classes.shift) for d in drafts if d.classes]
        limits = np.repeat(np.stack(rows), sizes, axis=0)
    logs = np.repeat([draft.head("ulp").tile_log for draft in drafts], sizes)
    order = {"sign_magnitude": dtype.sign_magnitude, "signed": dtype.signed}
    bucket = np.repeat(np.arange(len(parts)), sizes)
    made = gpu_streams.Plan.of(mine.blocks, bucket, logs, limits, 1 << CHUNK_LOG, **order)
    encoded = gpu_streams.encode(made, mine.old, mine.new, (mine.words, mine.counts))
    wait = fetch(encoded.data)
    for b, draft in enumerate(drafts):
        draft.made = _streams(wait, encoded.directory, b, draft.classes)


def _streams(
    wait: Callable[[], Any], directory: gpu_streams.Directory, b: int, classes: Classes | None
) -> Callable[[], Coded]:
    """What waits for the bytes of all buckets, and has the streams of one."""

    def made() -> Coded:
        data = memoryview(wait())
        out: Coded = {} if classes is None else {codec.Stream.CLASSES: (Stored(), [write_classes(classes)])}
        for stream, (coder, chunks) in directory.of(b).items():
            out[stream] = CODERS[coder], [data[at : at + n] for at, n in chunks]
        return out

    return made
