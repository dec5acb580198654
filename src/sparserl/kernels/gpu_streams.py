"""The streams of many buckets at once on a GPU: from two versions of the weights to coded bytes, and back.

    old, new ──► diff, count ──► changes per part │ emit, sort ──► changes per class │ pack, encode ──► sizes │ copy
    bytes ──► tile counts │ tokens, gaps, steps ──► locate ──► digest moved as promised? ──► land

A bar is a place where the host waits for a few numbers, for all buckets together. Profiles, streams and coders are
those of docs/format.md. A bucket here is some consecutive parts; all buckets of a call have as many classes.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import torch

from . import gpu, gpu_cells, gpu_classes, gpu_coding
from .gpu import Blocks, Side
from .gpu_classes import Classing, Found, Spread, Tiles
from .gpu_coding import Coded, Cuts, Packed

STORED, RANS = 0, 2
_TILES, _GAPS, _CLASSES = 4, 6, 64  # streams; low bits have the number behind that of the tokens
Column = np.ndarray[Any, Any]
T = TypeVar("T")


@dataclass(frozen=True)
class Directory:
    """The chunks of some buckets, by bucket, stream and place: which coder, how many bytes, and where they lie."""

    bucket: Column
    stream: Column
    coder: Column
    length: Column
    offset: Column

    def told(self) -> tuple[Column, Column, Column]:
        """What buckets say of their streams: for each its number, coder, how many chunks it has, and their lengths.

        Those of all buckets one behind the other; the bucket of each number, and how many streams each bucket has.
        """
        keys = self.bucket * 256 + self.stream
        first = np.flatnonzero(np.append(True, keys[1:] != keys[:-1])) if keys.size else keys
        many = np.diff(np.append(first, keys.size))
        heads, at = np.stack((self.stream[first], self.coder[first], many), axis=1).ravel(), np.repeat(first, 3)
        streams = np.bincount(self.bucket[first], minlength=int(self.bucket.max(initial=-1)) + 1)
        return np.insert(self.length, at, heads), np.insert(self.bucket, at, self.bucket[at]), streams


@dataclass(frozen=True)
class Plan:
    """How the parts of some blocks go into buckets: the bucket of each part (rising), tiles, and classes for `ctx`."""

    blocks: Blocks
    bucket: Column
    tile_log: Column  # of each part
    tiles: Tiles
    classing: Classing | None
    chunk: int
    heads: torch.Tensor  # the first block of each bucket
    logs: torch.Tensor  # tile_log, on the device
    sign_magnitude: bool = True

    @classmethod
    def of(
        cls,
        blocks: Blocks,
        bucket: Any,
        tile_log: Any,
        limits: Any = None,
        chunk: int = 1 << 16,
        sign_magnitude: bool = True,
        signed: bool = False,
    ) -> Plan:
        """limits: magnitudes at which classes begin, parts × K; None for `ulp`."""
        logs = np.broadcast_to(np.asarray(tile_log, np.int64), blocks.sizes.shape)
        classing = None
        if limits is not None:
            classing = Classing.of(blocks, limits, logs, sign_magnitude, signed)
        owner = np.asarray(bucket)
        heads = blocks.first_block[np.searchsorted(owner, np.arange(int(owner.max(initial=-1)) + 1))]
        return cls(
            *(blocks, owner, logs, Tiles.of(blocks, logs), classing, chunk),
            *(
                blocks.put(heads),
                blocks.put(logs, torch.int32) if classing is None else classing.tile_log,
                sign_magnitude,
            ),
        )

    @property
    def buckets(self) -> int:
        return int(self.bucket.max(initial=-1)) + 1

    @property
    def classes(self) -> int:
        return 1 if self.classing is None else self.classing.K + 1

    def told(self, changes: Column) -> tuple[Column, Column]:
        """Which tiles have counts in the streams, and how many counts each bucket has.

        They are those of parts that changed, and in `ulp` only of those with several.
        """
        parts = changes > 0
        if self.classing is None:
            parts &= self.tiles.of_part > 1
        return parts[self.tiles.owner], self.by_bucket(self.tiles.of_part * parts) * self.classes

    def by_bucket(self, numbers: Column) -> Column:
        """Numbers of the parts, added up."""
        out: Column = np.bincount(self.bucket, numbers, self.buckets).astype(np.int64)
        return out

    def class_streams(self) -> Column:
        """Bucket and number (as bucket × 256 + number) of the streams of gaps, by class and bucket."""
        first = _GAPS if self.classing is None else _CLASSES
        keys: Column = (np.arange(self.buckets) * 256 + first + 4 * np.arange(self.classes)[:, None]).ravel()
        return keys


def part_changes(blocks: Blocks, counts: torch.Tensor) -> torch.Tensor:
    """Changes of each part, from those of its blocks."""
    return _between(blocks, _ends(counts))


def _ends(counts: torch.Tensor) -> torch.Tensor:
    """The changes up to the beginning of each block, and up to the end of the last."""
    return torch.cat((counts.new_zeros(1, dtype=torch.int64), torch.cumsum(counts, 0, dtype=torch.int64)))


def _between(blocks: Blocks, ends: torch.Tensor) -> torch.Tensor:
    return ends[blocks.first + blocks.blocks_of] - ends[blocks.first]


@dataclass(frozen=True)
class Encoded:
    """Chunks of all buckets as bytes on the device, by bucket and stream, with their directory."""

    data: torch.Tensor
    directory: Directory
    changes: Column  # of each part
    moved: torch.Tensor  # how the digest's sums move


def encode(plan: Plan, old: Side, new: Side, found: tuple[torch.Tensor, torch.Tensor] | None = None) -> Encoded:
    """Streams in `ctx`, or in `ulp` where the plan has no classes, of all changes between two versions.

    found: what `diff` says of the two, where it was asked already.
    """
    steps = encoding(plan, old, new, found)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            made: Encoded = end.value
            return made


def encoding(
    plan: Plan,
    old: Side,
    new: Side,
    found: tuple[torch.Tensor, torch.Tensor] | None = None,
    changes: Column | None = None,
) -> Generator[None, None, Encoded]:
    """`encode` step by step: it pauses where it would wait for the device, so that something else can be done.

    changes: of each part, where they are known.
    """
    blocks = plan.blocks
    if plan.classing is None:
        words, counts = found or gpu.diff(blocks, old, new)
        del found  # of which nothing but this is needed, and bitmaps are large
        ends = _ends(counts)
        before = ends[:-1].to(torch.int32)
        rows = blocks.fetch(before[plan.heads])
        if changes is None:
            here = blocks.fetch(_between(blocks, ends))
            yield
            changes = here()
        total = int(changes.sum())
        ranks, steps, _, sums = gpu.compact(
            *(blocks, old, new, words, counts, total),
            steps=True,
            sign_magnitude=plan.sign_magnitude,
            tile_log=plan.logs,
            ends=ends[1:],
        )
        del words
    else:
        if found:
            (words, counts), members = found, gpu_classes.count(blocks, plan.classing, old)
        else:
            words, counts, members = gpu_classes.diff_and_count(blocks, plan.classing, old, new)
        del found
        ends = _ends(counts)
        if changes is None:
            here = blocks.fetch(_between(blocks, ends))
            yield
            changes = here()
        total = int(changes.sum())
        emitted = gpu_classes.emit(blocks, plan.classing, old, new, words, ends[1:], members, total)
        del words, members  # the largest of all that is made here
        before, sums = emitted.before, emitted.sums
        rows = blocks.fetch(before.view(plan.classes, -1)[:, plan.heads].reshape(-1))
        ranks, steps = gpu_classes.sort(blocks, plan.classing, counts, emitted)
    # What the host prepares from here on it prepares while the device is at work.
    told, tile_sizes = plan.told(changes)
    tile_counts = plan.tiles.counts(before, total, plan.classes)
    if not told.all():
        tile_counts = tile_counts[blocks.put(np.flatnonzero(told))]
    moved = gpu.total(sums)
    yield
    sizes, gaps = np.diff(np.append(rows(), total)), plan.class_streams()
    cuts, stream = Cuts.of_streams(blocks, np.concatenate((tile_sizes, sizes, sizes)), plan.chunk)
    keys = np.concatenate((np.arange(plan.buckets) * 256 + _TILES, gaps, gaps + 2))[stream]
    ends = np.searchsorted(stream, np.cumsum((tile_sizes.size, sizes.size, sizes.size))).tolist()
    packed = Packed.of(cuts, np.where(np.arange(cuts.count) < ends[1], 32, 8 * blocks.width))
    packed.pack(0, ends[0], tile_counts.view(-1))
    packed.pack(ends[0], ends[1], ranks, ranked=True)
    packed.pack(ends[1], ends[2], steps)
    data, directory = yield from _gathered(blocks, packed, gpu_coding.encode(packed), stream, keys)
    return Encoded(data, directory, changes, moved)


def _gathered(
    blocks: Blocks, packed: Packed, code: Coded, stream: Column, key: Column
) -> Generator[None, None, tuple[torch.Tensor, Directory]]:
    """All chunks, coded or stored, and their low bits, in the order of buckets and streams."""
    n, size = packed.cuts.count, packed.cuts.host_size
    keys = np.concatenate((key, key + 1))
    order = np.argsort(keys, kind="stable")  # chunks stay in order
    place = np.empty(2 * n, np.int64)
    place[order] = np.arange(2 * n)
    source, runs = gpu_coding.lay_out(packed, code, stream, place)
    target = torch.cumsum(runs, 0) - runs
    summary = blocks.fetch(torch.stack((runs.sum(), runs.amax())) if n else runs.new_zeros(2))
    numbers = blocks.fetch(packed.numbers)
    lanes, most = 4 * gpu_coding.lanes(size), int(stream.max(initial=-1)) + 1
    yield
    whole, longest = summary().tolist()
    data = blocks.empty(whole, torch.uint8)
    gpu_coding.copy(data, data, source, target, runs, longest, data.data_ptr())
    bits, table, made = numbers()
    # A stream that does not shrink is stored, and one of low bits without any is left out.
    rans = np.bincount(stream, size - table - lanes - 2 * made, minlength=most)[stream] > 0
    some = np.bincount(stream, bits, minlength=most)[stream] > 0
    order = order[np.concatenate((np.ones(n, bool), some))[order]]
    length = np.concatenate((np.where(rans, table + lanes + 2 * made, size), (bits + 7) >> 3))[order]
    coder = np.concatenate((np.where(rans, RANS, STORED), np.zeros(n, np.int64)))[order]
    return data, Directory(keys[order] >> 8, keys[order] & 255, coder, length, np.cumsum(length) - length)


@dataclass(frozen=True)
class _Incoming:
    """Coded chunks on the device, found by bucket and stream."""

    blocks: Blocks
    data: torch.Tensor
    directory: Directory
    bad: torch.Tensor

    @cached_property
    def keys(self) -> Column:
        """Bucket and stream of each chunk."""
        return self.directory.bucket * 256 + self.directory.stream

    def rows(self, wanted: Column) -> tuple[Column, Column]:
        """The rows of the directory for chunks wanted by bucket and stream; which are there."""
        keys = self.keys
        first = np.searchsorted(keys, wanted)
        change = np.flatnonzero(np.append(True, wanted[1:] != wanted[:-1])) if wanted.size else np.empty(0, np.int64)
        inside = np.arange(wanted.size) - np.repeat(change, np.diff(np.append(change, wanted.size)))
        rows = np.minimum(first + inside, max(keys.size - 1, 0))
        return rows, keys[rows] == wanted if keys.size else np.zeros(wanted.size, bool)

    def require_chunks(self, plan: Plan, streams: Column, sizes: Column) -> None:
        """Raise unless streams of tokens have as many chunks as there are numbers for; low bits may be left out."""
        there = np.bincount(self.keys, minlength=plan.buckets * 256)
        due, lows = -(-sizes // plan.chunk), there[streams + 1]
        if ((there[streams] != due) | ((lows != due) & (lows != 0))).any():
            raise ValueError("there are more chunks, or fewer, than there are numbers for")

    def tokens(self, cuts: Cuts, wanted: Column) -> torch.Tensor:
        """Tokens of chunks, coded or stored."""
        rows, there = self.rows(wanted)
        if not there.all():
            raise ValueError("chunks of tokens are missing")
        coder, length, offset = (c[rows] for c in (self.directory.coder, self.directory.length, self.directory.offset))
        rans = coder == RANS
        if not ((coder == STORED) | rans).all() or (length[~rans] != cuts.host_size[~rans]).any():
            raise ValueError("a chunk of tokens is neither coded with rans nor stored whole")
        tokens = self.blocks.empty(int(cuts.host_size.sum()), torch.uint8)
        some = cuts if rans.all() else Cuts.of(self.blocks, cuts.host_begin[rans], cuts.host_size[rans])
        where = self.blocks.put(np.stack((offset[rans], length[rans])))
        gpu_coding.decode(some, self.data, where[0], where[1], tokens, self.bad)
        if not rans.all():
            stored = self.blocks.put(np.stack((offset, cuts.host_begin, cuts.host_size))[:, ~rans])
            gpu_coding.copy(self.data, tokens, stored[0], stored[1], stored[2], int(cuts.host_size.max()))
        return tokens

    def numbers(self, cuts: Cuts, wanted: Column, tokens: torch.Tensor, dtype: torch.dtype, limit: int) -> torch.Tensor:
        """Numbers from tokens and the low bits of the streams behind those of the tokens."""
        rows, there = self.rows(wanted + 1)
        none = np.zeros(wanted.size, np.int64)
        offset = np.where(there, self.directory.offset[rows], none)
        where = self.blocks.put(np.stack((offset, np.where(there, self.directory.length[rows], none))))
        values = self.blocks.empty(tokens.numel(), dtype)
        gpu_coding.unpack(cuts, tokens, self.data, where[0], where[1], values, limit, self.bad)
        return values


def _beside(
    blocks: Blocks, long: Callable[[], T], urgent: Callable[[], tuple[Spread, torch.Tensor, torch.Tensor]]
) -> Any:
    """Long work, and urgent work that is in its way as little as in that of the host: on a stream that goes first."""
    if blocks.device.type != "cuda":
        return long(), urgent()
    here = torch.cuda.current_stream(blocks.device)
    first = _streams.get(blocks.device) or _streams.setdefault(blocks.device, torch.cuda.Stream(blocks.device, -1))
    first.wait_stream(here)
    done = long()
    try:
        with torch.cuda.stream(first):
            made = urgent()
    finally:
        here.wait_stream(first)
    for tensor in (*made[0], *made[1:]):
        tensor.record_stream(here)
    return done, made


_streams: dict[torch.device, torch.cuda.Stream] = {}


def decode(
    plan: Plan,
    side: Side,
    data: torch.Tensor,
    directory: Directory,
    changes: Column,
    bad: torch.Tensor,
    counts: Column | None = None,
) -> Found:
    """The changes of all buckets, located; nothing is written. `bad` is set where streams are wrong.

    changes: of each part; none of a part that no bucket speaks of.
    counts: of each tile and class, where they are known; else the device is waited for.
    """
    blocks, incoming = plan.blocks, _Incoming(plan.blocks, data, directory, bad)
    if (classing := plan.classing) is None:
        spread, gaps, steps = _numbers(plan, incoming, changes, counts)
        return gpu_cells.follow_gaps(blocks, side, plan.tiles, plan.logs, spread, gaps, steps, bad, plan.sign_magnitude)
    ranks, (spread, gaps, steps) = _beside(
        blocks,
        lambda: gpu_classes.count(blocks, classing, side),
        lambda: _numbers(plan, incoming, changes, counts),
    )
    return gpu_classes.select(blocks, classing, side, plan.tiles, ranks, spread, gaps, steps, bad)


def _tile_counts(plan: Plan, incoming: _Incoming, changes: Column) -> tuple[torch.Tensor, Column]:
    """Changes by tile and class, from the streams that tell them, and by part and class; waits for the device."""
    blocks, many = plan.blocks, plan.classes
    told, sizes = plan.told(changes)
    cuts, owner = Cuts.of_streams(blocks, sizes, plan.chunk)
    incoming.require_chunks(plan, np.arange(plan.buckets) * 256 + _TILES, sizes)
    wanted = owner * 256 + _TILES
    most = min(1 << int(plan.tile_log.max(initial=0)), (1 << 31) - 1)  # those that add up to the changes are not above
    counts = incoming.numbers(cuts, wanted, incoming.tokens(cuts, wanted), torch.int32, most).view(-1, many)
    if not told.all():
        # Where counts are not told, a part without classes has one tile, and any other no changes.
        alone = plan.tiles.of_part == 1 if plan.classing is None else np.zeros(changes.size, bool)
        spread = blocks.put(changes * alone, torch.int32)[plan.tiles.part].repeat(many, 1).t().contiguous()
        spread[blocks.put(np.flatnonzero(told))] = counts
        counts = spread
    sums = torch.zeros((blocks.sizes.size, many), dtype=torch.int64, device=blocks.device)
    sums.index_add_(0, plan.tiles.part, counts.to(torch.int64))
    return counts, blocks.fetch(sums)()


def _numbers(
    plan: Plan, incoming: _Incoming, changes: Column, counts: Column | None
) -> tuple[Spread, torch.Tensor, torch.Tensor]:
    """Changes by tile and class, and all gaps and steps."""
    if counts is None:
        there, by_part = _tile_counts(plan, incoming, changes)
    else:
        there, by_part = plan.blocks.put(counts, torch.int32), plan.tiles.by_part(counts)
    if (by_part.sum(1) != changes).any():
        raise ValueError("tile counts do not add up to the changes of the parts")
    sizes, gaps = np.concatenate([*map(plan.by_bucket, by_part.T)]), plan.class_streams()
    streams, total = np.concatenate((gaps, gaps + 2)), int(sizes.sum())
    incoming.require_chunks(plan, streams, np.tile(sizes, 2))
    both, stream = Cuts.of_streams(plan.blocks, np.tile(sizes, 2), plan.chunk)
    wanted = streams[stream]
    tokens, spread = incoming.tokens(both, wanted), Spread.of(there)
    half, width = both.count // 2, plan.blocks.width
    cuts, largest = both.part(0, half), 1 << int(plan.tile_log.max(initial=0))
    values = incoming.numbers(cuts, wanted[:half], tokens[:total], torch.int32, largest - 1)
    steps = incoming.numbers(cuts, wanted[half:], tokens[total:], gpu.INTS[width], (1 << 8 * width) - 1)
    return spread, values, steps
