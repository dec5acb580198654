"""Staging buckets on weights that are on a GPU: decoded there, from coded bytes to located changes.

    buckets ──► coded chunks, to the GPU ──► decode, many buckets at once ──► digest ──► swap old bits for new

A bucket is decoded here if its sparse entries are runs, or rows of a rank's columns, on one GPU, and the GPU can read
its streams; tokens in zstd are decompressed on the host first. Any other bucket is decoded on the CPU, as all in `gap`
are. While a GPU is at work on some buckets, the host reads the heads of the next. One that does not decode is handed to
the CPU, which says why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ..codec import Classes, Reader, Stream, numbers, value
from ..codec.coders import Buffer, Stored, Zstd
from ..codec.ctx import read_classes, tiles
from ..codec.index import tiles as gap_tiles
from ..errors import InvalidField, WrongBase
from ..kernels import gpu
from ..weights.boxes import select
from ..weights.digest import Digest
from ..weights.gpu_copies import fetch, upload_parts
from ..weights.local import LocalWeights
from ..weights.on_gpu import GROUP_BYTES, Runs, on_stream, runs_of
from ..wire import Entries, Head
from .contents import Contents
from .decode import Decoded, sparse

FEW_BYTES = 8 << 20
"""Weights of `ctx` buckets below which all are decoded on the CPU: launches take a GPU as long, whatever the size."""
FEW_CHANGES = 1 << 15
"""Changes of other buckets below which they are decoded on the CPU, likewise."""
_CHANGE_BYTES = 20  # of GPU memory that a change takes until it is written


class _StreamRow(NamedTuple):
    """One stream of a bucket: which it is, how it is coded, where it is in the body, and the lengths of its chunks."""

    stream: int
    coder: int
    at: int
    lengths: npt.NDArray[np.int64]


@dataclass(frozen=True)
class GpuBucket:
    """A bucket that a GPU can decode: its entries there, the bytes of its streams, its dense entries on the host."""

    index: int
    head: Head
    classes: Classes | None
    runs: Runs
    reader: Reader  # of the streams of its sparse entries
    dense: list[Decoded]

    def stored(self, stream: int) -> Buffer:
        """The chunks of a stream that was not coded, one after the other."""
        row = next(_StreamRow(*row) for row in self.reader.rows() if row[0] == stream)
        return self.reader.body[row.at : row.at + int(row.lengths.sum())]

    @property
    def class_count(self) -> int:
        """How many classes have streams of their own."""
        return 1 if self.classes is None else len(self.classes.thresholds) + 1

    @property
    def kind(self) -> tuple[Any, ...]:
        """What buckets that are decoded together have in common."""
        aligned = bool(self.runs.aligned.all())
        thresholds = 0 if self.classes is None else len(self.classes.thresholds)
        return self.runs.device, self.head.dtype, self.head.profile.name, thresholds, self.head.chunk_log, aligned

    @property
    def nbytes(self) -> int:
        """Bytes of the weights it is about, and of its decoded changes."""
        return int(self.head.layout.numel.sum()) * self.head.dtype.width + _CHANGE_BYTES * self.head.layout.changes

    @property
    def share(self) -> float:
        """Its share of what is enough for a GPU to be worth while."""
        if self.classes is None:
            return self.head.layout.changes / max(FEW_CHANGES, 1)
        return self.nbytes / max(FEW_BYTES, 1)


@dataclass(frozen=True)
class GpuStaged:
    """Changes of some buckets, located on a GPU and ready to be written.

    Attributes:
        weights: The weights they are written to.
        buckets: The buckets.
        side: Where the weights are.
        changes: Where the changes are, with old and new bits.
        outcome: Waits for how the digest's sums move, and whether anything was wrong.
    """

    weights: LocalWeights
    buckets: list[GpuBucket]
    side: gpu.changes.Side
    changes: gpu.classes.LocatedChanges
    outcome: Callable[[], Any]

    @property
    def dense(self) -> Iterator[Decoded]:
        """The dense entries of the buckets."""
        return (dense for bucket in self.buckets for dense in bucket.dense)

    @property
    def is_decoded(self) -> bool:
        """Whether everything decoded as it should; waits for it."""
        return not self.outcome()[2]

    @property
    def moved(self) -> Digest:
        """How the digest moves."""
        return Digest(*self.outcome()[:2].view(np.uint64).tolist())

    def swap(self) -> Callable[[], Any]:
        """Begin to write the new bits and to keep what was there; what it returns says if that was something else."""
        device = self.side.base.device
        with on_stream(self.weights, device):
            differs = torch.zeros(1, dtype=torch.int32, device=device)
            gpu.cells.swap(self.side, self.changes, differs)
            return fetch(differs)

    def write(self, weights: LocalWeights) -> None:
        """Put back what was there."""
        device = self.side.base.device
        with on_stream(weights, device):
            bad = torch.zeros(1, dtype=torch.int32, device=device)
            gpu.classes.write(self.side, self.changes, self.changes.old, bad)
            int(bad)  # waits until all is written


def swap_all(parts: Iterable[GpuStaged]) -> None:
    """Write the new bits, and keep what was there; raises `WrongBase` where that was something else than before."""
    if any([int(differs()[0]) for differs in [part.swap() for part in parts]]):  # noqa: C419  # all are waited for
        raise WrongBase(
            "the weights were changed after the patch was staged on them. They are as they were before the commit"
        )


def gpu_bucket(weights: LocalWeights, index: int, head: Head, reader: Reader) -> GpuBucket | None:
    """A bucket for the GPU, or None where it is one for the CPU."""
    small_tiles = head.profile.tiled and 1 << head.tile_log < gpu.changes.BLOCK
    if head.profile.name == "gap" or not head.layout.changes or small_tiles:
        return None
    runs = runs_of(sparse(head), weights, with_rows=True)
    if runs is None:
        return None
    classes = read_classes(head.dtype, reader) if head.profile.conditional else None
    dense = _dense(head, reader)
    if not head.profile.tiled and not _is_stored(head, reader):
        return None
    return GpuBucket(index, head, classes, runs, reader, dense)


def _gpu_streams(bucket: GpuBucket) -> tuple[Buffer, list[_StreamRow]]:
    """Bytes with the streams of a bucket as the GPU can read them, and where. `ValueError` if no bucket has them."""
    head = bucket.head
    first = int(Stream.CLASS if head.profile.conditional else Stream.GAP_TOKENS)
    tokens = [int(Stream.TILE_TOKENS), *range(first, first + 4 * bucket.class_count, 2)]
    left = bucket.reader.left()
    body = bucket.reader.body
    rows: list[_StreamRow] = []
    for row in (_StreamRow(*row) for row in bucket.reader.rows()):
        if row.stream not in left:
            continue
        coder, chunks = left[row.stream]
        if row.stream - row.stream % 2 not in tokens or (row.stream % 2 and coder.id != Stored.id):
            raise ValueError("there is a stream that no bucket has, or coded low bits")
        if coder.id == Zstd.id:
            sizes = head.layout.chunk_sizes(_stream_sizes(bucket)[tokens.index(row.stream)])
            plain = b"".join(coder.decode(chunk, size) for chunk, size in zip(chunks, sizes, strict=True))
            rows.append(_StreamRow(row.stream, Stored.id, len(body), np.array(sizes, np.int64)))
            body = b"".join((body, plain))
        else:
            rows.append(row)
    return body, rows


def _stream_sizes(bucket: GpuBucket) -> list[int]:
    """How many numbers there are in the streams of a bucket: counts of tiles, and gaps and steps of each class."""
    head = bucket.head
    layout = head.layout
    classes = bucket.class_count
    count = gap_tiles(layout) if bucket.classes is None else classes * tiles(layout)
    names = Stream.TILE_TOKENS, Stream.TILE_LOWS
    tile_counts = numbers.read(layout, bucket.reader.copy(), count, 1 << head.tile_log, np.uint32, *names)
    changes = [layout.changes]
    if bucket.classes is not None:
        changes = tile_counts.reshape(-1, classes).sum(0, np.int64).tolist()
    return [count, *(n for n in changes for _ in range(2))]


def _is_stored(head: Head, reader: Reader) -> bool:
    """Whether positions and words of `raw` are as many as there are changes, cut as they should be, and not coded."""
    left = reader.left()
    sizes = np.array(head.layout.chunk_sizes(head.layout.changes), np.int64)
    expected = {int(Stream.POSITIONS): 4 * sizes, int(Stream.WORDS): head.dtype.width * sizes}
    stored = {stream: lengths for stream, coder, _, lengths in reader.rows() if stream in left and coder == Stored.id}
    if not left.keys() == stored.keys() == expected.keys():
        return False
    return all(np.array_equal(stored[stream], expected[stream]) for stream in expected)


def _dense(head: Head, reader: Reader) -> list[Decoded]:
    """The dense entries, as those of a bucket that has no others."""
    if not head.dense_elements:
        return []
    if head.profile.planar:
        bits = value.read_planes(head.layout, reader, head.dense_elements, Stream.DENSE_PLANE)
    else:
        bits = value.read_words(head.layout, reader, head.dense_elements, Stream.DENSE)
    e = head.entries
    dense = e.dense
    entries = Entries(e.tensor[dense], e.count[dense], e.dense[dense], select(e.region, dense), e.numel[dense])
    alone = replace(head, entries=entries)
    return [Decoded(alone, np.empty(0, np.uint32), np.empty(0, head.dtype.uint), bits, None)]


class Groups:
    """Buckets that come one by one, put together with others of their kind, in groups of about the same size."""

    def __init__(self, patch: Contents) -> None:
        self._waiting: dict[tuple[Any, ...], list[GpuBucket]] = {}
        self._room: dict[tuple[Any, ...], int] = {}
        most = patch.table.dense_bytes + _CHANGE_BYTES * patch.changed
        self._group_bytes = most // max(1, -(-most // GROUP_BYTES))

    def add(self, bucket: GpuBucket) -> Iterator[list[GpuBucket]]:
        """Add a bucket; yields the group that is full, if there is one."""
        kind = bucket.kind
        if self._room.get(kind, 0) < bucket.nbytes // 2:
            if kind in self._waiting:
                yield self._waiting[kind]
            self._waiting[kind] = []
            self._room[kind] = self._group_bytes
        self._waiting[kind].append(bucket)
        self._room[kind] -= bucket.nbytes

    @property
    def rest(self) -> list[list[GpuBucket]]:
        """Groups that are not full."""
        return [*self._waiting.values()]

    @property
    def indices(self) -> list[int]:
        """Their buckets, by their numbers."""
        return [bucket.index for group in self.rest for bucket in group]

    @property
    def share(self) -> float:
        """The share that groups which are not full have of what is enough for a GPU to be worth while."""
        return sum(bucket.share for group in self.rest for bucket in group)


def stage_group(patch: Contents, weights: LocalWeights, group: list[GpuBucket]) -> GpuStaged:
    """Locate the changes of some buckets. Nothing is written, and nothing waited for."""
    try:
        return _locate(weights, group)
    except (ValueError, IndexError):  # chunks that are missing, or counts that do not add up
        raise _refusal(patch, weights, group) from None


def require_decoded(patch: Contents, weights: LocalWeights, parts: Iterable[GpuStaged]) -> None:
    """Wait for the GPUs. Raises if anything did not decode."""
    for part in parts:
        if not part.is_decoded:
            raise _refusal(patch, weights, part.buckets)


def _refusal(patch: Contents, weights: LocalWeights, group: list[GpuBucket]) -> InvalidField:
    """What the CPU says of buckets that a GPU does not decode."""
    for bucket in group:
        patch.decode(bucket.index, weights)
    return InvalidField(f"buckets {[bucket.index for bucket in group]} do not decode on {group[0].runs.device}")


def _locate(weights: LocalWeights, group: list[GpuBucket]) -> GpuStaged:
    """Decode buckets of one kind on their GPU, and find out where their changes go."""
    runs = Runs.concatenate([bucket.runs for bucket in group])
    counts = [bucket.head.layout.count for bucket in group]
    per_run = np.concatenate(counts)
    with on_stream(weights, runs.device):
        blocks, (side,) = runs.blocks()
        bad = torch.zeros(1, dtype=torch.int32, device=runs.device)
        if group[0].head.profile.name == "raw":
            positions = upload_parts([bucket.stored(Stream.POSITIONS) for bucket in group], runs.device)
            words = upload_parts([bucket.stored(Stream.WORDS) for bucket in group], runs.device)
            bits = words.view(gpu.ints.INTS[runs.dtype.width])
            changes = gpu.cells.locate(blocks, side, per_run, positions.view(torch.int32), bits, bad)
        else:
            plan = _stream_plan(group, blocks, [count.size for count in counts])
            changes = gpu.streams.decode(plan, side, per_run, bad, lambda: _send_chunks(group, runs.device))
        outcome = blocks.fetch(torch.cat((gpu.changes.sum_slots(changes.sums), bad)))
        return GpuStaged(weights, group, side, changes, outcome)


def _send_chunks(group: list[GpuBucket], device: Any) -> gpu.streams.ReceivedChunks:
    """The streams of all buckets, on their way to the GPU."""
    bodies, rows = zip(*map(_gpu_streams, group), strict=True)
    return gpu.streams.ReceivedChunks(upload_parts(bodies, device), _directory(bodies, rows))


def _stream_plan(group: list[GpuBucket], blocks: gpu.changes.Blocks, sizes: list[int]) -> gpu.streams.StreamPlan:
    """How the streams of buckets, with so many entries each, are cut into tiles, classes and chunks."""
    head = group[0].head
    owner = np.repeat(np.arange(len(group)), sizes)
    tile_logs = np.array([bucket.head.tile_log for bucket in group])[owner]
    rows = [np.array(c.thresholds, np.uint64) << np.uint64(c.shift) for c in (b.classes for b in group) if c]
    limits = np.stack(rows)[owner] if rows else None
    order = {"sign_magnitude": head.dtype.sign_magnitude, "signed": head.dtype.signed}
    return gpu.streams.StreamPlan.of(blocks, owner, tile_logs, limits, 1 << head.chunk_log, **order)


def _directory(bodies: Sequence[Buffer], rows: Sequence[list[_StreamRow]]) -> gpu.streams.ChunkDirectory:
    """Where the chunks of all buckets are, whose bodies are one after the other."""
    before = [0, *accumulate(map(len, bodies))]
    columns = [
        (b, row.stream, row.coder, before[b] + row.at, row.lengths.size)
        for b, bucket_rows in enumerate(rows)
        for row in bucket_rows
    ]
    length = np.concatenate([row.lengths for bucket_rows in rows for row in bucket_rows])
    bucket, stream, coder, start, chunks = np.array(columns, np.int64).T
    chunk_start = np.cumsum(length) - length
    first_chunk = np.cumsum(chunks) - chunks
    shift = start - chunk_start[first_chunk]
    bucket, stream, coder, shift = np.repeat((bucket, stream, coder, shift), chunks, axis=1)
    return gpu.streams.ChunkDirectory(bucket, stream, coder, length, chunk_start + shift)
