"""The streams of many buckets at once on a GPU: from two versions of the weights to coded bytes, and back.

    old, new ──► diff, class ranks ──► changes per part │ classify, sort ──► changes per class │ pack, encode │ copy
    bytes ──► tile counts ──► tokens, gaps, steps ──► positions ──► digest as promised? ──► write

A bar is a place where the host waits for a few numbers, for all buckets together. Profiles, streams and coders are
those of the format. A bucket here is some consecutive parts; all buckets of a call have equally many classes.
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
from .changes import Blocks, HostCopy, Side, compact, diff, sum_slots
from .classes import ChangeNumbers, Classification, LocatedChanges, Tiles
from .ints import INTS
from .rans import EncodedChunks, EncodedTokens, NumberChunks, PackedNumbers, chunk_spans

STORED = 0
RANS = 2
# stream numbers of tokens; those of their low bits are one higher
_TILES = 4
_GAPS = 6
_CLASSES = 64
Column = np.ndarray[Any, Any]


@dataclass(frozen=True)
class ChunkDirectory:
    """The chunks of some buckets, by bucket, stream and place: coder, number of bytes, and where these are."""

    bucket: Column
    stream: Column
    coder: Column
    length: Column
    offset: Column

    def numbers(self) -> tuple[Column, Column, Column]:
        """The directories of all buckets as numbers: for each stream its id, coder, chunks, and their lengths.

        Returns the numbers of all buckets in order, the bucket of each number, and the streams of each bucket.
        """
        keys = self.bucket * 256 + self.stream
        first = np.flatnonzero(np.append(True, keys[1:] != keys[:-1])) if keys.size else keys
        chunks = np.diff(np.append(first, keys.size))
        heads = np.stack((self.stream[first], self.coder[first], chunks), axis=1).ravel()
        at = np.repeat(first, 3)
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
    gpu_tile_log: torch.Tensor
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
        if limits is None:
            classification = None
            gpu_logs = blocks.upload(logs, torch.int32)
        else:
            classification = Classification.of(blocks, limits, logs, sign_magnitude, signed)
            gpu_logs = classification.tile_log
        buckets = np.asarray(bucket)
        first_part = np.searchsorted(buckets, np.arange(int(buckets.max(initial=-1)) + 1))
        heads = blocks.upload(blocks.first_block[first_part])
        tiles = Tiles.of(blocks, logs)
        return cls(blocks, buckets, logs, tiles, classification, chunk, heads, gpu_logs, sign_magnitude)

    @property
    def buckets(self) -> int:
        return int(self.bucket.max(initial=-1)) + 1

    @property
    def classes(self) -> int:
        return 1 if self.classification is None else self.classification.K + 1

    def counted_tiles(self, changes: Column) -> tuple[Column, Column]:
        """Which tiles have counts in the streams, and how many counts each bucket has.

        They are the tiles of parts that changed, and in `ulp` only of parts with several tiles.
        """
        parts = changes > 0
        if self.classification is None:
            parts &= self.tiles.per_part > 1
        return parts[self.tiles.part], self.by_bucket(self.tiles.per_part * parts) * self.classes

    def by_bucket(self, numbers: Column) -> Column:
        """Numbers of the parts, added up for each bucket."""
        out: Column = np.bincount(self.bucket, numbers, self.buckets).astype(np.int64)
        return out

    def tile_streams(self) -> Column:
        """Bucket and number (as bucket × 256 + number) of the streams of tile counts."""
        return np.arange(self.buckets) * 256 + _TILES

    def class_streams(self) -> Column:
        """Bucket and number of the streams of gaps, by class and bucket; those of steps are two higher."""
        first = _GAPS if self.classification is None else _CLASSES
        keys: Column = (np.arange(self.buckets) * 256 + first + 4 * np.arange(self.classes)[:, None]).ravel()
        return keys


def part_changes(blocks: Blocks, counts: torch.Tensor) -> torch.Tensor:
    """Changes of each part, from those of its blocks."""
    return _per_part(blocks, _ends(counts))


def _ends(counts: torch.Tensor) -> torch.Tensor:
    """The changes up to the beginning of each block, and up to the end of the last."""
    return torch.cat((counts.new_zeros(1, dtype=torch.int64), torch.cumsum(counts, 0, dtype=torch.int64)))


def _per_part(blocks: Blocks, ends: torch.Tensor) -> torch.Tensor:
    """Changes of each part, from what `_ends` returns."""
    first = blocks.table.first
    return ends[first + blocks.per_part] - ends[first]


@dataclass(frozen=True)
class EncodedBuckets:
    """Chunks of all buckets as bytes on the GPU, by bucket and stream, with their directory."""

    data: torch.Tensor
    directory: ChunkDirectory
    changes: Column  # of each part
    digest_delta: torch.Tensor


class _StreamNumbers(NamedTuple):
    """The changes of all buckets as numbers, before they are packed.

    before: the changes before each block, by class. ranks: by class, flagged where a tile begins.
    rows: where the changes of each class and bucket begin.
    """

    changes: Column  # of each part
    before: torch.Tensor
    ranks: torch.Tensor
    steps: torch.Tensor
    sums: torch.Tensor
    rows: HostCopy


Difference = tuple[torch.Tensor, torch.Tensor]  # what `diff` returns: a bitmap, and the changes of each block


def encode(plan: StreamPlan, old: Side, new: Side, difference: Difference | None = None) -> EncodedBuckets:
    """Streams in `ctx`, or in `ulp` if the plan has no classes, of all changes between two versions.

    difference: what `diff` says about the two, if that is known.
    """
    pauses = encode_in_steps(plan, old, new, difference)
    while True:
        try:
            next(pauses)
        except StopIteration as end:
            encoded: EncodedBuckets = end.value
            return encoded


def encode_in_steps(
    plan: StreamPlan,
    old: Side,
    new: Side,
    difference: Difference | None = None,
    changes: Column | None = None,
) -> Generator[HostCopy, None, EncodedBuckets]:
    """`encode` step by step: where it would wait for the GPU it pauses, and yields what it waits for.

    changes: of each part, if they are known.
    """
    blocks = plan.blocks
    if plan.classification is None:
        search = _ulp_numbers(plan, old, new, difference, changes)
    else:
        search = _ctx_numbers(plan, plan.classification, old, new, difference, changes)
    del difference  # bitmaps are large, and the search frees them as soon as it can
    numbers = yield from search
    # What follows the host does while the GPU is at work.
    total = int(numbers.changes.sum())
    counted, tile_sizes = plan.counted_tiles(numbers.changes)
    tile_counts = plan.tiles.counts(numbers.before, total, plan.classes)
    if not counted.all():
        tile_counts = tile_counts[blocks.upload(np.flatnonzero(counted))]
    digest_delta = sum_slots(numbers.sums)
    yield numbers.rows
    sizes = np.diff(np.append(numbers.rows(), total))
    gaps = plan.class_streams()
    chunks, stream = NumberChunks.of_streams(blocks, np.concatenate((tile_sizes, sizes, sizes)), plan.chunk)
    keys = np.concatenate((plan.tile_streams(), gaps, gaps + 2))[stream]
    ends = np.searchsorted(stream, np.cumsum((tile_sizes.size, sizes.size, sizes.size))).tolist()
    packed = PackedNumbers.of(chunks, np.where(np.arange(chunks.count) < ends[1], 32, 8 * blocks.width))
    packed.pack(0, ends[0], tile_counts.view(-1))
    packed.pack(ends[0], ends[1], numbers.ranks, ranked=True)
    packed.pack(ends[1], ends[2], numbers.steps)
    data, directory = yield from _gather_chunks(blocks, packed, rans.encode(packed), stream, keys)
    return EncodedBuckets(data, directory, numbers.changes, digest_delta)


def _ulp_numbers(
    plan: StreamPlan, old: Side, new: Side, difference: Difference | None, changes: Column | None
) -> Generator[HostCopy, None, _StreamNumbers]:
    """Ranks are positions in tiles: there is one class."""
    blocks = plan.blocks
    words, counts = difference or diff(blocks, old, new)
    del difference
    ends = _ends(counts)
    per_part = blocks.fetch(_per_part(blocks, ends))
    before = ends[:-1].to(torch.int32)
    rows = blocks.fetch(before[plan.heads])
    if changes is None:
        yield per_part
        changes = per_part()
    compacted = compact(
        *(blocks, old, new, words, counts, int(changes.sum())),
        steps=True,
        sign_magnitude=plan.sign_magnitude,
        tile_log=plan.gpu_tile_log,
        ends=ends[1:],
    )
    return _StreamNumbers(changes, before, compacted.positions, compacted.new, compacted.sums, rows)


def _ctx_numbers(
    plan: StreamPlan,
    classification: Classification,
    old: Side,
    new: Side,
    difference: Difference | None,
    changes: Column | None,
) -> Generator[HostCopy, None, _StreamNumbers]:
    """Ranks are among the elements of the same magnitude class."""
    blocks = plan.blocks
    if difference:
        words, counts = difference
        ranks = classes.class_ranks(blocks, classification, old)
    else:
        words, counts, ranks = classes.diff_with_class_ranks(blocks, classification, old, new)
    del difference
    ends = _ends(counts)
    if changes is None:
        per_part = blocks.fetch(_per_part(blocks, ends))
        yield per_part
        changes = per_part()
    classified = classes.classify_changes(blocks, classification, old, new, words, ends[1:], ranks, int(changes.sum()))
    del words, ranks  # the largest arrays here
    before = classified.before
    rows = blocks.fetch(before.view(plan.classes, -1)[:, plan.heads].reshape(-1))
    sorted_ranks, steps = classes.sort_by_class(blocks, classification, counts, classified)
    return _StreamNumbers(changes, before, sorted_ranks, steps, classified.sums, rows)


def _gather_chunks(
    blocks: Blocks, packed: PackedNumbers, tokens: EncodedTokens, stream: Column, key: Column
) -> Generator[HostCopy, None, tuple[torch.Tensor, ChunkDirectory]]:
    """The bytes of all chunks, coded or stored, and of their low bits, in the order of buckets and streams."""
    n = packed.chunks.count
    size = packed.chunks.host_size
    keys = np.concatenate((key, key + 1))
    order = np.argsort(keys, kind="stable")  # chunks of a stream stay in order
    place = np.empty(2 * n, np.int64)
    place[order] = np.arange(2 * n)
    source, runs = rans.lay_out(packed, tokens, stream, place)
    target = torch.cumsum(runs, 0) - runs
    summary = blocks.fetch(torch.stack((runs.sum(), runs.amax())) if n else runs.new_zeros(2))
    numbers = blocks.fetch(packed.numbers)
    yield numbers
    whole, longest = summary().tolist()
    data = blocks.empty(whole, torch.uint8)
    rans.copy(data, data, source, target, runs, longest, data.data_ptr())
    low_bits, table, words = numbers()[:, :n]
    coded = table + 4 * rans.lanes(size) + 2 * words
    # A stream that does not shrink is stored, and a stream of low bits that has none is left out.
    streams = int(stream.max(initial=-1)) + 1
    is_coded = np.bincount(stream, size - coded, minlength=streams)[stream] > 0
    has_lows = np.bincount(stream, low_bits, minlength=streams)[stream] > 0
    order = order[np.concatenate((np.ones(n, bool), has_lows))[order]]
    length = np.concatenate((np.where(is_coded, coded, size), (low_bits + 7) >> 3))[order]
    coder = np.concatenate((np.where(is_coded, RANS, STORED), np.zeros(n, np.int64)))[order]
    return data, ChunkDirectory(keys[order] >> 8, keys[order] & 255, coder, length, np.cumsum(length) - length)


class ReceivedChunks(NamedTuple):
    """Coded chunks of some buckets on the GPU."""

    data: torch.Tensor
    directory: ChunkDirectory


class _ChunkPlaces(NamedTuple):
    """Where the bytes of chunks lie: of their tokens, and of their low bits (no bytes if there are none)."""

    offset: Column
    length: Column
    low_offset: Column
    low_length: Column


@dataclass(frozen=True)
class _ChunkReader:
    """Coded chunks on the GPU, found by bucket and stream."""

    plan: StreamPlan
    data: torch.Tensor
    directory: ChunkDirectory
    bad: torch.Tensor

    @cached_property
    def keys(self) -> Column:
        """Bucket and stream of each chunk."""
        return self.directory.bucket * 256 + self.directory.stream

    @cached_property
    def counts(self) -> Column:
        """How many chunks there are of each bucket and stream."""
        return np.bincount(self.keys, minlength=self.plan.buckets * 256)

    def require_lows(self, streams: Column) -> None:
        """Raise unless streams of low bits have as many chunks as those of their tokens; they may be left out."""
        lows = self.counts[streams + 1]
        if ((lows != self.counts[streams]) & (lows != 0)).any():
            raise ValueError("streams of low bits and of tokens must have equally many chunks")

    def rows(self, streams: Column) -> Column:
        """The rows of the directory with the chunks of some streams."""
        counts = self.counts[streams]
        inside = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        rows: Column = np.repeat(np.searchsorted(self.keys, streams), counts) + inside
        return rows

    def places(self, streams: Column) -> _ChunkPlaces:
        """Where the chunks of some streams lie."""
        directory = self.directory
        rows = self.rows(streams)
        has_lows = np.repeat(self.counts[streams + 1] > 0, self.counts[streams])
        low_offset, low_length = np.zeros((2, rows.size), np.int64)
        if has_lows.any():
            low_rows = self.rows(streams + 1)
            low_offset[has_lows] = directory.offset[low_rows]
            low_length[has_lows] = directory.length[low_rows]
        return _ChunkPlaces(directory.offset[rows], directory.length[rows], low_offset, low_length)

    def tokens(self, chunks: EncodedChunks, streams: Column, size: int) -> torch.Tensor:
        """Tokens of all chunks of some streams, coded or stored."""
        blocks = self.plan.blocks
        coder = self.directory.coder[self.rows(streams)]
        tokens = blocks.empty(size, torch.uint8)
        is_coded = coder == RANS
        if not ((coder == STORED) | is_coded).all():
            raise ValueError("a chunk of tokens is neither coded with rans nor stored")
        if is_coded.all():
            rans.decode(blocks, chunks, self.data, tokens, self.bad)
            return tokens
        rans.decode(blocks, chunks.some(blocks.upload(np.flatnonzero(is_coded))), self.data, tokens, self.bad)
        stored = chunks.some(blocks.upload(np.flatnonzero(~is_coded)))
        self.bad.bitwise_or_((stored.size != stored.length).any().to(torch.int32))
        sizes = torch.minimum(stored.size, stored.length)
        rans.copy(self.data, tokens, stored.offset, stored.begin, sizes, self.plan.chunk)
        return tokens


@contextmanager
def urgent_stream(device: torch.device, after: torch.cuda.Event | None) -> Iterator[None]:
    """Run what is inside on a stream of its own with priority, behind an event alone.

    Wait for it before anything that it reads is freed.
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
    """Have the current stream wait for the urgent one."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).wait_stream(_urgent(device))


_streams: dict[torch.device, torch.cuda.Stream] = {}


def decode(
    plan: StreamPlan, side: Side, changes: Column, bad: torch.Tensor, receive: Callable[[], ReceivedChunks]
) -> LocatedChanges:
    """Locate the changes of all buckets, writing nothing and waiting for nothing. `bad` is set if streams are wrong.

    changes: of each part; zero for a part that is in no bucket.
    receive: brings the chunks, while the GPU is at work already.
    """
    blocks = plan.blocks
    classification = plan.classification
    if classification is None:
        numbers = _numbers(plan, changes, bad, receive())
        return cells.tile_positions(blocks, side, plan.tiles, plan.gpu_tile_log, numbers, bad, plan.sign_magnitude)
    before = blocks.event()
    ranks = classes.class_ranks(blocks, classification, side)
    try:
        # Counting takes the whole GPU, while chunks take little of it, but long.
        with urgent_stream(blocks.device, before):
            numbers = _numbers(plan, changes, bad, receive())
    finally:
        _join(blocks.device)
    if before is not None:
        for tensor in (*numbers.layout, numbers.gaps, numbers.steps):
            tensor.record_stream(torch.cuda.current_stream(blocks.device))
    return classes.class_positions(blocks, classification, side, plan.tiles, ranks, numbers, bad)


def _tile_counts(reader: _ChunkReader, changes: Column) -> torch.Tensor:
    """Changes by tile and class, from their streams."""
    plan = reader.plan
    blocks = plan.blocks
    counted, sizes = plan.counted_tiles(changes)
    streams = plan.tile_streams()
    if (reader.counts[streams] != -(-sizes // plan.chunk)).any():
        raise ValueError("the number of chunks does not fit the number of tiles")
    reader.require_lows(streams)
    begin, size, _ = chunk_spans(sizes, plan.chunk)
    table = blocks.upload_columns(begin, size, *reader.places(streams))
    tokens = reader.tokens(EncodedChunks(*table[:4]), streams, int(sizes.sum()))
    counts = blocks.empty(tokens.numel(), torch.int32)
    most = min(1 << int(plan.tile_log.max(initial=0)), (1 << 31) - 1)  # counts that add up to the changes are lower
    rans.unpack(EncodedChunks(*table[:2], *table[4:]), tokens, reader.data, counts, most, reader.bad)
    if counted.all():
        return counts
    # Of the parts without counts, those with one tile have all their changes there, and others have no changes.
    single = plan.tiles.per_part == 1 if plan.classification is None else np.zeros(changes.size, bool)
    out = blocks.upload(np.repeat(changes * single, plan.tiles.per_part), torch.int32)
    out = out.repeat(plan.classes, 1).t().contiguous()
    out[blocks.upload(np.flatnonzero(counted))] = counts.view(-1, plan.classes)
    return out


def _numbers(plan: StreamPlan, changes: Column, bad: torch.Tensor, received: ReceivedChunks) -> ChangeNumbers:
    """The gaps and steps of all changes.

    Only the GPU knows how many numbers a stream has. Here are known the limits that its chunks and its bucket set.
    """
    blocks = plan.blocks
    reader = _ChunkReader(plan, *received, bad)
    counts = _tile_counts(reader, changes)
    gap_streams = plan.class_streams()
    streams = np.concatenate((gap_streams, gap_streams + 2))
    chunks = reader.counts[gap_streams]
    reader.require_lows(streams)
    limit = np.minimum(chunks * plan.chunk, np.tile(plan.by_bucket(changes), plan.classes))
    if (chunks != reader.counts[gap_streams + 2]).any() or (limit <= (chunks - 1) * plan.chunk).any():
        raise ValueError("the number of chunks of gaps or steps does not fit the number of changes")
    begin, _, _ = chunk_spans(limit, plan.chunk)
    n = begin.size
    total = -(-int(limit.sum()) // 16) * 16
    places = reader.places(streams)
    at, *tokens_at, gap_at, gap_length, step_at, step_length = blocks.upload_columns(
        *(np.concatenate((begin, begin + total)), places.offset, places.length),
        *(places.low_offset[:n], places.low_length[:n], places.low_offset[n:], places.low_length[n:]),
    )
    stream_begin = np.cumsum(limit) - limit
    layout, size = classes.change_layout(
        *(blocks, plan.tiles, counts.view(-1), plan.bucket, changes, stream_begin, chunks, plan.chunk, bad)
    )
    tokens = reader.tokens(EncodedChunks(at, size, *tokens_at), streams, 2 * total)
    gaps = blocks.empty(total, torch.int32)
    steps = blocks.empty(total, INTS[blocks.width])
    most_gap = (1 << int(plan.tile_log.max(initial=0))) - 1
    most_step = (1 << 8 * blocks.width) - 1
    at = at[:n]
    size = size[:n]
    rans.unpack(EncodedChunks(at, size, gap_at, gap_length), tokens, reader.data, gaps, most_gap, bad)
    rans.unpack(EncodedChunks(at, size, step_at, step_length), tokens[total:], reader.data, steps, most_step, bad)
    return ChangeNumbers(layout, gaps, steps, int(changes.sum()))
