"""The streams of many buckets at once on a GPU: from two versions of the weights to coded bytes, and back.

    old, new ──► diff ──► changes per part │ emit, sort ──► changes per class │ pack, encode ──► sizes │ gather
    bytes ──► tile counts │ tokens, gaps, steps ──► select ──► digest moved as promised? ──► land

A bar is a place where the host waits for a few numbers, for all buckets together. Profiles, streams and coders are
those of docs/format.md. A bucket here is some consecutive parts; all buckets of a call have as many classes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from . import gpu, gpu_classes, gpu_coding
from .gpu import Blocks, Side
from .gpu_classes import Classing, Found, Ranks, Tiles
from .gpu_coding import Cuts

STORED, RANS = 0, 2
_TILES, _GAPS, _CLASSES = 4, 6, 64  # streams; low bits have the number behind that of the tokens
Column = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Directory:
    """The chunks of some buckets, by bucket, stream and place: which coder, how many bytes, and where they lie."""

    bucket: Column
    stream: Column
    coder: Column
    length: Column
    offset: Column

    def of(self, bucket: int) -> dict[int, tuple[int, list[tuple[int, int]]]]:
        """Coder, and offset and length of each chunk, by stream."""
        out: dict[int, tuple[int, list[tuple[int, int]]]] = {}
        for i in np.flatnonzero(self.bucket == bucket).tolist():
            row = out.setdefault(int(self.stream[i]), (int(self.coder[i]), []))
            row[1].append((int(self.offset[i]), int(self.length[i])))
        return out


@dataclass(frozen=True)
class Plan:
    """How the parts of some blocks go into buckets: the bucket of each part (rising), tiles, and classes for `ctx`."""

    blocks: Blocks
    bucket: Column
    tile_log: Column  # of each part
    tiles: Tiles
    classing: Classing | None
    chunk: int
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
        return cls(blocks, np.asarray(bucket), logs, Tiles.of(blocks, logs), classing, chunk, sign_magnitude)

    @property
    def buckets(self) -> int:
        return int(self.bucket.max(initial=-1)) + 1

    @property
    def classes(self) -> int:
        return 1 if self.classing is None else self.classing.K + 1

    @property
    def head_blocks(self) -> Column:
        """The first block of each bucket."""
        heads: Column = self.blocks.first_block[np.searchsorted(self.bucket, np.arange(self.buckets))]
        return heads

    def told_tiles(self, changes: Column) -> Column:
        """Which tiles have counts in the streams: those of parts that changed, in `ulp` if there are several."""
        told = changes > 0
        if self.classing is None:
            told &= np.bincount(self.tiles.owner, minlength=told.size) > 1
        out: Column = told[self.tiles.owner]
        return out

    def class_cuts(self, sizes: Column) -> tuple[Cuts, Column, Column]:
        """Chunks of the changes by class and bucket; the bucket of each chunk, and the first stream of its class."""
        cuts, stream = Cuts.of_streams(self.blocks, sizes, self.chunk)
        first = _GAPS if self.classing is None else _CLASSES
        return cuts, stream % self.buckets, first + 4 * (stream // self.buckets)


def part_changes(blocks: Blocks, counts: torch.Tensor) -> torch.Tensor:
    """Changes of each part, from those of its blocks."""
    ends = torch.cat((counts.new_zeros(1, dtype=torch.int64), torch.cumsum(counts, 0, dtype=torch.int64)))
    return ends[blocks.first + blocks.blocks_of] - ends[blocks.first]


@dataclass(frozen=True)
class Encoded:
    """Chunks of all buckets as bytes on the device, by bucket and stream, with their directory."""

    data: torch.Tensor
    directory: Directory
    changes: Column  # of each part
    moved: torch.Tensor  # how the digest's sums move


def encode(plan: Plan, old: Side, new: Side) -> Encoded:
    """Streams in `ctx`, or in `ulp` where the plan has no classes, of all changes between two versions."""
    blocks, many = plan.blocks, plan.classes
    words, counts = gpu.diff(blocks, old, new)
    changes = blocks.fetch(part_changes(blocks, counts))()
    total = int(changes.sum())
    heads = blocks.put(plan.head_blocks)
    if plan.classing is None:
        before = gpu_classes.exclusive(counts)
        rows = blocks.fetch(before[heads])
        logs = blocks.put(plan.tile_log, torch.int32)
        ranks, steps, _, sums = gpu.compact(
            blocks, old, new, words, counts, total, steps=True, sign_magnitude=plan.sign_magnitude, tile_log=logs
        )
    else:
        emitted = gpu_classes.emit(blocks, plan.classing, old, new, words, counts, total)
        before, sums = emitted.before, emitted.sums
        rows = blocks.fetch(before.view(many, -1)[:, heads].reshape(-1))
        ranks, steps = gpu_classes.sort(blocks, plan.classing, counts, emitted)
    # What only needs the changes of the parts is prepared while the device is at work.
    told = plan.told_tiles(changes)
    tile_counts = plan.tiles.counts(before, total, many)
    if not told.all():
        tile_counts = tile_counts[blocks.put(np.flatnonzero(told))]
    tile_sizes = np.bincount(plan.bucket[plan.tiles.owner[told]], minlength=plan.buckets) * many
    tile_cuts, tile_stream = Cuts.of_streams(blocks, tile_sizes, plan.chunk)
    n = int(tile_sizes.sum())
    tokens = blocks.empty(n + 2 * total, torch.uint8)
    tiles = gpu_coding.pack(tile_cuts, tile_counts.view(-1), tokens=tokens[:n])
    cuts, owner, ids = plan.class_cuts(np.diff(np.append(rows(), total)))
    parts = [
        (tiles, tile_stream, np.full(tile_stream.size, _TILES)),
        (gpu_coding.pack(cuts, ranks, ranked=True, tokens=tokens[n : n + total]), owner, ids),
        (gpu_coding.pack(cuts, steps, tokens=tokens[n + total :]), owner, ids + 2),
    ]
    data, directory = _coded(blocks, parts, tokens)
    return Encoded(data, directory, changes, gpu.total(sums))


def _coded(
    blocks: Blocks, parts: list[tuple[gpu_coding.Packed, Column, Column]], tokens: torch.Tensor
) -> tuple[torch.Tensor, Directory]:
    """Code all chunks of tokens, and bring tokens and low bits into the order of buckets."""
    packed = [p for p, _, _ in parts]
    offset = [p.tokens.data_ptr() - tokens.data_ptr() for p in packed]
    begin = np.concatenate([p.cuts.host_begin + at for p, at in zip(packed, offset, strict=True)])
    size = np.concatenate([p.cuts.host_size for p in packed])
    cuts = Cuts.of(blocks, begin, size)
    code = gpu_coding.encode(cuts, tokens, torch.cat([p.counts for p in packed]))
    numbers = blocks.fetch(torch.cat((code.lengths, code.made, *(p.bits for p in packed))))
    key = np.concatenate([bucket * 256 + stream for _, bucket, stream in parts])
    low_at = np.concatenate([p.lows.data_ptr() + 4 * p.low_at for p in packed])
    lanes, most = 4 * gpu_coding.lanes(size), int(key.max(initial=0)) + 1
    order = np.argsort(np.concatenate((key, key + 1)), kind="stable")  # chunks stay in order
    n = size.size
    told = numbers()
    length, made, lows = told[:n], 2 * told[n : 2 * n], (told[2 * n :] + 7) >> 3
    # A stream that does not shrink is stored, and one of low bits without any is left out.
    rans = np.bincount(key, size - length - lanes - made, minlength=most)[key] > 0
    some = np.bincount(key, lows, minlength=most)[key] > 0
    index = np.arange(n)
    first = np.where(rans, code.tables.data_ptr() + 1024 * index, tokens.data_ptr() + begin)
    address = np.stack((first, code.states.data_ptr() + 128 * index, code.words.data_ptr() + 2 * (begin + size) - made))
    sizes = np.stack((np.where(rans, length, size), np.where(rans, lanes, 0), np.where(rans, made, 0)))
    address = np.concatenate((address, np.stack((low_at,) * 3)), 1)
    sizes = np.concatenate((sizes, np.stack((lows, 0 * lows, 0 * lows))), 1)
    order = order[np.concatenate((np.ones(n, bool), some))[order]]
    keys, coder = np.concatenate((key, key + 1))[order], np.concatenate((np.where(rans, RANS, STORED), 0 * key))[order]
    runs, at = sizes[:, order].T.ravel(), address[:, order].T.ravel()
    data = gpu_coding.gather(blocks, at[runs > 0], runs[runs > 0])
    whole = sizes[:, order].sum(0)
    return data, Directory(keys >> 8, keys & 255, coder, whole, np.cumsum(whole) - whole)


@dataclass(frozen=True)
class _Incoming:
    """Coded chunks on the device, found by bucket and stream."""

    blocks: Blocks
    data: torch.Tensor
    directory: Directory
    bad: torch.Tensor

    def rows(self, wanted: Column) -> tuple[Column, Column]:
        """The rows of the directory for chunks wanted by bucket and stream; which are there."""
        keys = self.directory.bucket * 256 + self.directory.stream
        first = np.searchsorted(keys, wanted)
        change = np.flatnonzero(np.append(True, wanted[1:] != wanted[:-1])) if wanted.size else np.empty(0, np.int64)
        inside = np.arange(wanted.size) - np.repeat(change, np.diff(np.append(change, wanted.size)))
        rows = np.minimum(first + inside, max(keys.size - 1, 0))
        return rows, keys[rows] == wanted if keys.size else np.zeros(wanted.size, bool)

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
            stored = offset[~rans], cuts.host_begin[~rans], cuts.host_size[~rans]
            gpu_coding.copy(self.blocks, self.data, tokens, *stored)
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


def _aside(blocks: Blocks, work: Callable[[], Ranks]) -> Callable[[], Ranks]:
    """Begin work on a stream of its own. What it returns makes the current stream wait for it."""
    if blocks.device.type != "cuda":
        done = work()
        return lambda: done
    here, aside = torch.cuda.current_stream(), _streams.setdefault(blocks.device, torch.cuda.Stream(blocks.device))
    aside.wait_stream(here)
    with torch.cuda.stream(aside):
        ranks = work()

    def join() -> Ranks:
        here.wait_stream(aside)
        for tensor in (ranks.members, ranks.before, ranks.low, ranks.high):
            tensor.record_stream(here)
        return ranks

    return join


_streams: dict[torch.device, torch.cuda.Stream] = {}


def decode(
    plan: Plan, side: Side, data: torch.Tensor, directory: Directory, changes: Column, bad: torch.Tensor
) -> Found:
    """The changes of all buckets in `ctx`, located; nothing is written. `bad` is set where streams are wrong.

    changes: of each part; none of a part that no bucket speaks of.
    """
    if (classing := plan.classing) is None:
        raise ValueError("positions of ulp are landed by `exchange`")
    blocks, many, buckets = plan.blocks, plan.classes, plan.buckets
    counted = _aside(blocks, lambda: gpu_classes.count(blocks, classing, side))
    incoming = _Incoming(blocks, data, directory, bad)
    told = plan.told_tiles(changes)
    largest = 1 << int(plan.tile_log.max(initial=0))
    tile_sizes = np.bincount(plan.bucket[plan.tiles.owner[told]], minlength=buckets) * many
    cuts, owner = Cuts.of_streams(blocks, tile_sizes, plan.chunk)
    wanted = owner * 256 + _TILES
    counts = incoming.numbers(cuts, wanted, incoming.tokens(cuts, wanted), torch.int32, largest).view(-1, many)
    if not told.all():
        spread = torch.zeros((plan.tiles.count, many), dtype=torch.int32, device=blocks.device)
        spread[blocks.put(np.flatnonzero(told))] = counts
        counts = spread
    sums = torch.zeros((blocks.sizes.size, many), dtype=torch.int64, device=blocks.device)
    by_part = blocks.fetch(sums.index_add_(0, plan.tiles.part, counts.to(torch.int64)))
    if (by_part().sum(1) != changes).any():
        raise ValueError("tile counts do not add up to the changes of the parts")
    sizes = np.zeros((buckets, many), np.int64)
    np.add.at(sizes, plan.bucket, by_part())
    cuts, owner, ids = plan.class_cuts(sizes.T)
    total = int(sizes.sum())
    wanted = np.concatenate((owner * 256 + ids, owner * 256 + ids + 2))
    both = Cuts.of(blocks, np.append(cuts.host_begin, cuts.host_begin + total), np.tile(cuts.host_size, 2))
    tokens = incoming.tokens(both, wanted)
    gaps = incoming.numbers(cuts, wanted[: cuts.count], tokens[:total], torch.int32, largest - 1)
    widest = (1 << (8 * blocks.width)) - 1
    steps = incoming.numbers(cuts, wanted[cuts.count :], tokens[total:], gpu.INTS[blocks.width], widest)
    return gpu_classes.select(blocks, classing, side, plan.tiles, counted(), counts, gaps, steps, bad)
