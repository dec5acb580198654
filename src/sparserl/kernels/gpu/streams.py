"""The streams of many buckets at once on a GPU: from two versions of the weights to coded bytes, and back.

    old, new ──► diff, count ──► changes per part │ emit, sort ──► changes per class │ pack, encode ──► sizes │ copy
    bytes ──► tile counts ──► tokens, gaps, steps ──► locate ──► digest moved as promised? ──► land

A bar is a place where the host waits for a few numbers, for all buckets together. Profiles, streams and coders are
those of docs/reference/format.md. A bucket here is some consecutive parts; all buckets of a call have as many classes.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch

from . import cells, classes, rans
from .changes import INTS, Blocks, HostCopy, Side, compact, diff, sum_slots
from .classes import ChangeLayout, Classification, LocatedChanges, Tiles
from .rans import EncodedChunks, EncodedTokens, NumberChunks, PackedNumbers, chunk_spans

STORED, RANS = 0, 2
_TILES, _GAPS, _CLASSES = 4, 6, 64  # streams; low bits have the number behind that of the tokens
Column = np.ndarray[Any, Any]


@dataclass(frozen=True)
class ChunkDirectory:
    """The chunks of some buckets, by bucket, stream and place: which coder, how many bytes, and where they lie."""

    bucket: Column
    stream: Column
    coder: Column
    length: Column
    offset: Column

    def numbers(self) -> tuple[Column, Column, Column]:
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
class StreamPlan:
    """How the parts of some blocks go into buckets: the bucket of each part (rising), tiles, and classes for `ctx`."""

    blocks: Blocks
    bucket: Column
    tile_log: Column  # of each part
    tiles: Tiles
    classification: Classification | None
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
    ) -> StreamPlan:
        """limits: magnitudes at which classes begin, parts × K; None for `ulp`."""
        logs = np.broadcast_to(np.asarray(tile_log, np.int64), blocks.sizes.shape)
        classification = None
        if limits is not None:
            classification = Classification.of(blocks, limits, logs, sign_magnitude, signed)
        owner = np.asarray(bucket)
        heads = blocks.first_block[np.searchsorted(owner, np.arange(int(owner.max(initial=-1)) + 1))]
        return cls(
            *(blocks, owner, logs, Tiles.of(blocks, logs), classification, chunk),
            *(
                blocks.upload(heads),
                blocks.upload(logs, torch.int32) if classification is None else classification.tile_log,
                sign_magnitude,
            ),
        )

    @property
    def buckets(self) -> int:
        return int(self.bucket.max(initial=-1)) + 1

    @property
    def classes(self) -> int:
        return 1 if self.classification is None else self.classification.K + 1

    def told(self, changes: Column) -> tuple[Column, Column]:
        """Which tiles have counts in the streams, and how many counts each bucket has.

        They are those of parts that changed, and in `ulp` only of those with several.
        """
        parts = changes > 0
        if self.classification is None:
            parts &= self.tiles.of_part > 1
        return parts[self.tiles.owner], self.by_bucket(self.tiles.of_part * parts) * self.classes

    def by_bucket(self, numbers: Column) -> Column:
        """Numbers of the parts, added up."""
        out: Column = np.bincount(self.bucket, numbers, self.buckets).astype(np.int64)
        return out

    def class_streams(self) -> Column:
        """Bucket and number (as bucket × 256 + number) of the streams of gaps, by class and bucket."""
        first = _GAPS if self.classification is None else _CLASSES
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
class EncodedBuckets:
    """Chunks of all buckets as bytes on the device, by bucket and stream, with their directory."""

    data: torch.Tensor
    directory: ChunkDirectory
    changes: Column  # of each part
    digest_delta: torch.Tensor  # how the digest's sums move


def encode(
    plan: StreamPlan, old: Side, new: Side, found: tuple[torch.Tensor, torch.Tensor] | None = None
) -> EncodedBuckets:
    """Streams in `ctx`, or in `ulp` where the plan has no classes, of all changes between two versions.

    found: what `diff` says of the two, where it was asked already.
    """
    steps = encode_in_steps(plan, old, new, found)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            made: EncodedBuckets = end.value
            return made


def encode_in_steps(
    plan: StreamPlan,
    old: Side,
    new: Side,
    found: tuple[torch.Tensor, torch.Tensor] | None = None,
    changes: Column | None = None,
) -> Generator[HostCopy, None, EncodedBuckets]:
    """`encode` step by step: it pauses where it would wait for the device, and says for what it waits.

    changes: of each part, where they are known.
    """
    blocks = plan.blocks
    if plan.classification is None:
        words, counts = found or diff(blocks, old, new)
        del found  # of which nothing but this is needed, and bitmaps are large
        ends = _ends(counts)
        here = blocks.fetch(_between(blocks, ends))
        before = ends[:-1].to(torch.int32)
        rows = blocks.fetch(before[plan.heads])
        if changes is None:
            yield here
            changes = here()
        total = int(changes.sum())
        ranks, steps, _, sums = compact(
            *(blocks, old, new, words, counts, total),
            steps=True,
            sign_magnitude=plan.sign_magnitude,
            tile_log=plan.logs,
            ends=ends[1:],
        )
        del words
    else:
        if found:
            (words, counts), members = found, classes.class_ranks(blocks, plan.classification, old)
        else:
            words, counts, members = classes.diff_with_class_ranks(blocks, plan.classification, old, new)
        del found
        ends = _ends(counts)
        if changes is None:
            here = blocks.fetch(_between(blocks, ends))
            yield here
            changes = here()
        total = int(changes.sum())
        emitted = classes.classify_changes(blocks, plan.classification, old, new, words, ends[1:], members, total)
        del words, members  # the largest of all that is made here
        before, sums = emitted.before, emitted.sums
        rows = blocks.fetch(before.view(plan.classes, -1)[:, plan.heads].reshape(-1))
        ranks, steps = classes.sort_by_class(blocks, plan.classification, counts, emitted)
    # What the host prepares from here on it prepares while the device is at work.
    told, tile_sizes = plan.told(changes)
    tile_counts = plan.tiles.counts(before, total, plan.classes)
    if not told.all():
        tile_counts = tile_counts[blocks.upload(np.flatnonzero(told))]
    moved = sum_slots(sums)
    yield rows
    sizes, gaps = np.diff(np.append(rows(), total)), plan.class_streams()
    cuts, stream = NumberChunks.of_streams(blocks, np.concatenate((tile_sizes, sizes, sizes)), plan.chunk)
    keys = np.concatenate((np.arange(plan.buckets) * 256 + _TILES, gaps, gaps + 2))[stream]
    ends = np.searchsorted(stream, np.cumsum((tile_sizes.size, sizes.size, sizes.size))).tolist()
    packed = PackedNumbers.of(cuts, np.where(np.arange(cuts.count) < ends[1], 32, 8 * blocks.width))
    packed.pack(0, ends[0], tile_counts.view(-1))
    packed.pack(ends[0], ends[1], ranks, ranked=True)
    packed.pack(ends[1], ends[2], steps)
    data, directory = yield from _gathered(blocks, packed, rans.encode(packed), stream, keys)
    return EncodedBuckets(data, directory, changes, moved)


def _gathered(
    blocks: Blocks, packed: PackedNumbers, code: EncodedTokens, stream: Column, key: Column
) -> Generator[HostCopy, None, tuple[torch.Tensor, ChunkDirectory]]:
    """All chunks, coded or stored, and their low bits, in the order of buckets and streams."""
    n, size = packed.cuts.count, packed.cuts.host_size
    keys = np.concatenate((key, key + 1))
    order = np.argsort(keys, kind="stable")  # chunks stay in order
    place = np.empty(2 * n, np.int64)
    place[order] = np.arange(2 * n)
    source, runs = rans.lay_out(packed, code, stream, place)
    target = torch.cumsum(runs, 0) - runs
    summary = blocks.fetch(torch.stack((runs.sum(), runs.amax())) if n else runs.new_zeros(2))
    numbers = blocks.fetch(packed.numbers)
    lanes, most = 4 * rans.lanes(size), int(stream.max(initial=-1)) + 1
    yield numbers
    whole, longest = summary().tolist()
    data = blocks.empty(whole, torch.uint8)
    rans.copy(data, data, source, target, runs, longest, data.data_ptr())
    bits, table, made = numbers()[:, :n]
    # A stream that does not shrink is stored, and one of low bits without any is left out.
    coded = np.bincount(stream, size - table - lanes - 2 * made, minlength=most)[stream] > 0
    some = np.bincount(stream, bits, minlength=most)[stream] > 0
    order = order[np.concatenate((np.ones(n, bool), some))[order]]
    length = np.concatenate((np.where(coded, table + lanes + 2 * made, size), (bits + 7) >> 3))[order]
    coder = np.concatenate((np.where(coded, RANS, STORED), np.zeros(n, np.int64)))[order]
    return data, ChunkDirectory(keys[order] >> 8, keys[order] & 255, coder, length, np.cumsum(length) - length)


class ReceivedChunks(NamedTuple):
    """Coded chunks of some buckets on the device."""

    data: torch.Tensor
    directory: ChunkDirectory


@dataclass(frozen=True)
class _Incoming:
    """Coded chunks on the device, found by bucket and stream."""

    plan: StreamPlan
    data: torch.Tensor
    directory: ChunkDirectory
    bad: torch.Tensor

    @cached_property
    def keys(self) -> Column:
        """Bucket and stream of each chunk."""
        return self.directory.bucket * 256 + self.directory.stream

    @cached_property
    def many(self) -> Column:
        """How many chunks there are of each bucket and stream."""
        return np.bincount(self.keys, minlength=self.plan.buckets * 256)

    def require_lows(self, streams: Column) -> None:
        """Raise unless streams of low bits have as many chunks as those of their tokens; they may be left out."""
        lows = self.many[streams + 1]
        if ((lows != self.many[streams]) & (lows != 0)).any():
            raise ValueError("there are more chunks of low bits, or fewer, than there are of tokens")

    def rows(self, streams: Column) -> Column:
        """The rows of the directory with the chunks of some streams."""
        many = self.many[streams]
        inside = np.arange(int(many.sum())) - np.repeat(np.cumsum(many) - many, many)
        rows: Column = np.repeat(np.searchsorted(self.keys, streams), many) + inside
        return rows

    def places(self, streams: Column) -> tuple[Column, Column, Column, Column]:
        """Where the tokens of chunks lie and how many bytes they are, and the same of their low bits."""
        d, rows, lows = self.directory, self.rows(streams), np.repeat(self.many[streams + 1] > 0, self.many[streams])
        offset, length = np.zeros((2, rows.size), np.int64)
        if lows.any():
            there = self.rows(streams + 1)
            offset[lows], length[lows] = d.offset[there], d.length[there]
        return d.offset[rows], d.length[rows], offset, length

    def tokens(self, chunks: EncodedChunks, streams: Column, room: int) -> torch.Tensor:
        """Tokens of all chunks of some streams, coded or stored."""
        coder, tokens = self.directory.coder[self.rows(streams)], self.plan.blocks.empty(room, torch.uint8)
        is_coded = coder == RANS
        if not ((coder == STORED) | is_coded).all():
            raise ValueError("a chunk of tokens is neither coded with rans nor stored")
        if is_coded.all():
            rans.decode(self.plan.blocks, chunks, self.data, tokens, self.bad)
            return tokens
        coded, stored = (chunks.some(self.plan.blocks.upload(np.flatnonzero(some))) for some in (is_coded, ~is_coded))
        rans.decode(self.plan.blocks, coded, self.data, tokens, self.bad)
        self.bad.bitwise_or_((stored.size != stored.length).any().to(torch.int32))
        size = torch.minimum(stored.size, stored.length)
        rans.copy(self.data, tokens, stored.offset, stored.begin, size, self.plan.chunk)
        return tokens


@contextmanager
def urgent_stream(device: torch.device, after: torch.cuda.Event | None) -> Iterator[None]:
    """What is done inside goes first, on a stream of its own, behind an event alone.

    It has to be waited for before anything is let go that it reads.
    """
    if after is None:
        yield
        return
    stream = _urgent(device)
    stream.wait_event(after)
    with torch.cuda.stream(stream):
        yield


def _urgent(device: torch.device) -> torch.cuda.Stream:
    return _streams.get(device) or _streams.setdefault(device, torch.cuda.Stream(device, -1))


def _join(device: torch.device) -> None:
    """What comes next on the current stream comes behind what went first."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).wait_stream(_urgent(device))


_streams: dict[torch.device, torch.cuda.Stream] = {}


def decode(
    plan: StreamPlan, side: Side, changes: Column, bad: torch.Tensor, arrive: Callable[[], ReceivedChunks]
) -> LocatedChanges:
    """The changes of all buckets, located; nothing is written, or waited for. `bad` is set where streams are wrong.

    changes: of each part; none of a part that no bucket speaks of.
    arrive: brings the chunks, while the device is at work already.
    """
    blocks, classification = plan.blocks, plan.classification
    if classification is None:
        spread, gaps, steps = _numbers(plan, changes, bad, arrive())
        return cells.tile_positions(blocks, side, plan.tiles, plan.logs, spread, gaps, steps, bad, plan.sign_magnitude)
    before = blocks.event()
    ranks = classes.class_ranks(blocks, classification, side)
    try:
        with urgent_stream(
            blocks.device, before
        ):  # counting takes all of the device, and chunks take little of it but time
            spread, gaps, steps = _numbers(plan, changes, bad, arrive())
    finally:
        _join(blocks.device)
    for tensor in (*spread[:3], gaps, steps) if before is not None else ():
        tensor.record_stream(torch.cuda.current_stream(blocks.device))
    return classes.class_positions(blocks, classification, side, plan.tiles, ranks, spread, gaps, steps, bad)


def _tile_counts(incoming: _Incoming, changes: Column) -> torch.Tensor:
    """Changes by tile and class, from the streams that tell them."""
    plan, blocks = incoming.plan, incoming.plan.blocks
    told, sizes = plan.told(changes)
    streams = np.arange(plan.buckets) * 256 + _TILES
    if (incoming.many[streams] != -(-sizes // plan.chunk)).any():
        raise ValueError("there are more chunks, or fewer, than there are counts of tiles")
    incoming.require_lows(streams)
    begin, size, _ = chunk_spans(sizes, plan.chunk)
    table = blocks.upload_columns(begin, size, *incoming.places(streams))
    tokens = incoming.tokens(EncodedChunks(*table[:4]), streams, int(sizes.sum()))
    counts = blocks.empty(tokens.numel(), torch.int32)
    most = min(1 << int(plan.tile_log.max(initial=0)), (1 << 31) - 1)  # those that add up to the changes are not above
    rans.unpack(EncodedChunks(*table[:2], *table[4:]), tokens, incoming.data, counts, most, incoming.bad)
    if told.all():
        return counts
    # Where counts are not told, a part without classes has one tile, and any other no changes.
    alone = plan.tiles.of_part == 1 if plan.classification is None else np.zeros(changes.size, bool)
    out = blocks.upload(np.repeat(changes * alone, plan.tiles.of_part), torch.int32)
    out = out.repeat(plan.classes, 1).t().contiguous()
    out[blocks.upload(np.flatnonzero(told))] = counts.view(-1, plan.classes)
    return out


def _numbers(
    plan: StreamPlan, changes: Column, bad: torch.Tensor, arrived: ReceivedChunks
) -> tuple[ChangeLayout, torch.Tensor, torch.Tensor]:
    """How changes lie, and all gaps and steps.

    How many numbers a stream has is known to the device alone, but for what its chunks and its bucket have room for.
    """
    blocks, incoming = plan.blocks, _Incoming(plan, *arrived, bad)
    counts = _tile_counts(incoming, changes)
    gaps, bucket_changes = plan.class_streams(), np.tile(plan.by_bucket(changes), plan.classes)
    streams, many = np.concatenate((gaps, gaps + 2)), incoming.many[gaps]
    incoming.require_lows(streams)
    room = np.minimum(many * plan.chunk, bucket_changes)
    if (many != incoming.many[gaps + 2]).any() or (room <= (many - 1) * plan.chunk).any():
        raise ValueError("there are more chunks of gaps or steps, or fewer, than there are changes for")
    begin, _, _ = chunk_spans(room, plan.chunk)
    n, total = begin.size, -(-int(room.sum()) // 16) * 16
    offset, length, low_offset, low_length = incoming.places(streams)
    halves = low_offset[:n], low_length[:n], low_offset[n:], low_length[n:]
    at, *tokens_at, gap_at, gap_length, step_at, step_length = blocks.upload_columns(
        np.concatenate((begin, begin + total)), offset, length, *halves
    )
    spread, size = classes.change_layout(
        *(blocks, plan.tiles, counts.view(-1), plan.bucket, changes, np.cumsum(room) - room, many, plan.chunk, bad)
    )
    tokens, width = incoming.tokens(EncodedChunks(at, size, *tokens_at), streams, 2 * total), blocks.width
    ranks, steps = blocks.empty(total, torch.int32), blocks.empty(total, INTS[width])
    widest, largest = (1 << 8 * width) - 1, (1 << int(plan.tile_log.max(initial=0))) - 1
    at, size = at[:n], size[:n]
    rans.unpack(EncodedChunks(at, size, gap_at, gap_length), tokens, incoming.data, ranks, largest, bad)
    rans.unpack(EncodedChunks(at, size, step_at, step_length), tokens[total:], incoming.data, steps, widest, bad)
    return spread, ranks, steps
