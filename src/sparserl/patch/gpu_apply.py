"""Landing buckets on weights that are on a device: decoded there, from coded bytes to located changes.

    buckets ──► coded chunks, to the device ──► decode, many buckets at once ──► digest ──► swap old bits for new

A bucket is decoded here if its sparse entries are runs on one device, and the device can read its streams; tokens in
zstd are brought here first. Any other bucket is decoded on the CPU, as all in `gap` are. While a device is at work on
some buckets, the host reads the heads of the next. One that does not decode is handed to the CPU, which says why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

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
"""Weights of `ctx` buckets below which all are brought to the CPU and decoded there: launches take a device as long.

Measured on an H200 by `benchmarks.gpu` (`small`): `apply` in `ctx` takes the CPU 4.4 ms for 4 MiB and 7.9 for 16 MiB,
and the device 6.0 and 5.7.
"""
FEW_CHANGES = 1 << 15
"""Changes of other buckets, likewise: the CPU takes 4.1 ms for 2^14 in `ulp`, 5.4 for 2^16, the device 4.9 and 4.9."""
_Row = tuple[int, int, int, npt.NDArray[np.int64]]  # stream, coder, place in the body, and lengths of its chunks
_CHANGE_BYTES = 20  # of device memory that a change takes until it is written


@dataclass(frozen=True)
class GpuBucket:
    """A bucket that a device can decode: its entries there, the bytes of its streams, its dense entries on the host."""

    index: int
    head: Head
    classes: Classes | None
    runs: Runs
    reader: Reader  # of the streams of its sparse entries
    dense: list[Decoded]

    def of(self, stream: int) -> Buffer:
        """The chunks of a stream that was not coded, one behind the other."""
        _, _, at, lengths = next(row for row in self.reader.rows() if row[0] == stream)
        return self.reader.body[at : at + int(lengths.sum())]

    @property
    def kind(self) -> tuple[Any, ...]:
        """What buckets that are decoded together have in common."""
        aligned = bool(self.runs.aligned.all())
        many = 0 if self.classes is None else len(self.classes.thresholds)
        return self.runs.device, self.head.dtype, self.head.profile.name, many, self.head.chunk_log, aligned

    @property
    def nbytes(self) -> int:
        """Bytes of the weights it is about, and of what becomes of it."""
        return int(self.head.layout.numel.sum()) * self.head.dtype.width + _CHANGE_BYTES * self.head.layout.changes

    @property
    def share(self) -> float:
        """Of what is enough for a device to be worth while."""
        if self.classes is None:
            return self.head.layout.changes / max(FEW_CHANGES, 1)
        return self.nbytes / max(FEW_BYTES, 1)


@dataclass(frozen=True)
class GpuStaged:
    """Changes of some buckets, located on a device and ready to be written."""

    held: LocalWeights
    buckets: list[GpuBucket]
    side: gpu.changes.Side
    found: gpu.classes.LocatedChanges
    told: Callable[[], Any]  # how the digest's sums move, and whether anything was wrong

    @property
    def dense(self) -> Iterator[Decoded]:
        """The dense entries of the buckets."""
        return (dense for one in self.buckets for dense in one.dense)

    @property
    def right(self) -> bool:
        """Whether all decoded as it should; waits for it."""
        return not self.told()[2]

    @property
    def moved(self) -> Digest:
        return Digest(*self.told()[:2].view(np.uint64).tolist())

    def swap(self) -> Callable[[], Any]:
        """Begin to write the new bits, and to keep what was there; what it returns says if that was something else."""
        device = self.side.base.device
        with on_stream(self.held, device):
            other = torch.zeros(1, dtype=torch.int32, device=device)
            gpu.cells.swap(self.side, self.found, other)
            return fetch(other)

    def write(self, held: LocalWeights) -> None:
        """Put back what was there."""
        device = self.side.base.device
        with on_stream(held, device):
            right = torch.zeros(1, dtype=torch.int32, device=device)
            gpu.classes.write(self.side, self.found, self.found.old, right)
            int(right)  # waits until all is written


def swap_all(found: Iterable[GpuStaged]) -> None:
    """Write the new bits, and keep what was there; raises `WrongBase` where that was something else than before."""
    if any([int(other()[0]) for other in [part.swap() for part in found]]):  # noqa: C419  # all are waited for
        raise WrongBase(
            "the weights were changed after the patch was staged on them. They are as they were before the commit"
        )


def gpu_bucket(held: LocalWeights, index: int, head: Head, reader: Reader) -> GpuBucket | None:
    """A bucket for the device, or None where it is one for the CPU."""
    name = head.profile.name
    if name == "gap" or not head.layout.changes or (head.profile.tiled and 1 << head.tile_log < gpu.changes.BLOCK):
        return None
    if (runs := runs_of(sparse(head), held)) is None:
        return None
    classes = read_classes(head.dtype, reader) if head.profile.conditional else None
    dense = _dense(head, reader)
    return GpuBucket(index, head, classes, runs, reader, dense) if head.profile.tiled or _plain(head, reader) else None


def _told(one: GpuBucket) -> tuple[Buffer, list[_Row]]:
    """Bytes with the streams of a bucket as the device can read them, and where. `ValueError` if no bucket has them."""
    head, reader, many = one.head, one.reader, 1 if one.classes is None else len(one.classes.thresholds) + 1
    first = int(Stream.CLASS if head.profile.conditional else Stream.GAP_TOKENS)
    tokens = [int(Stream.TILE_TOKENS), *range(first, first + 4 * many, 2)]
    left, body, rows = reader.left(), reader.body, list[_Row]()
    for row in reader.rows():
        if (stream := row[0]) not in left:
            continue
        coder, coded = left[stream]
        if stream - stream % 2 not in tokens or (stream % 2 and coder.id != Stored.id):
            raise ValueError("there is a stream that no bucket has, or coded low bits")
        if coder.id == Zstd.id:
            sizes = head.layout.chunk_sizes(_numbers(one, many)[tokens.index(stream)])
            plain = b"".join(coder.decode(chunk, size) for chunk, size in zip(coded, sizes, strict=True))
            row = stream, Stored.id, len(body), np.array(sizes, np.int64)
            body = b"".join((body, plain))
        rows.append(row)
    return body, rows


def _numbers(one: GpuBucket, many: int) -> list[int]:
    """How many numbers there are in the streams of a bucket: counts of tiles, and gaps and steps of each class."""
    head, layout = one.head, one.head.layout
    names = Stream.TILE_TOKENS, Stream.TILE_LOWS
    due = gap_tiles(layout) if one.classes is None else many * tiles(layout)
    told = numbers.read(layout, one.reader.copy(), due, 1 << head.tile_log, np.uint32, *names)
    each = [layout.changes] if one.classes is None else told.reshape(-1, many).sum(0, np.int64).tolist()
    return [due, *(n for n in each for _ in range(2))]


def _plain(head: Head, reader: Reader) -> bool:
    """Whether positions and words of `raw` are as many as there are changes, cut as they should be, and not coded."""
    left, sizes = reader.left(), np.array(head.layout.chunk_sizes(head.layout.changes), np.int64)
    wanted = {int(Stream.POSITIONS): 4 * sizes, int(Stream.WORDS): head.dtype.width * sizes}
    rows = {stream: lengths for stream, coder, _, lengths in reader.rows() if stream in left and coder == Stored.id}
    return left.keys() == rows.keys() == wanted.keys() and all(np.array_equal(rows[s], wanted[s]) for s in wanted)


def _dense(head: Head, reader: Reader) -> list[Decoded]:
    """The dense entries, as those of a bucket that has no others."""
    if not head.dense_elements:
        return []
    if head.profile.planar:
        bits = value.read_planes(head.layout, reader, head.dense_elements, Stream.DENSE_PLANE)
    else:
        bits = value.read_words(head.layout, reader, head.dense_elements, Stream.DENSE)
    e, mine = head.entries, head.entries.dense
    entries = Entries(e.tensor[mine], e.count[mine], e.dense[mine], select(e.region, mine), e.numel[mine])
    alone = replace(head, entries=entries)
    return [Decoded(alone, np.empty(0, np.uint32), np.empty(0, head.dtype.uint), bits, None)]


class Groups:
    """Buckets that come one by one, put together with others of their kind, in groups that are about alike."""

    def __init__(self, patch: Contents) -> None:
        self._waiting: dict[tuple[Any, ...], list[GpuBucket]] = {}
        self._room: dict[tuple[Any, ...], int] = {}
        most = patch.table.dense_bytes + _CHANGE_BYTES * patch.changed
        self._share = most // max(1, -(-most // GROUP_BYTES))

    def add(self, one: GpuBucket) -> Iterator[list[GpuBucket]]:
        """The group that is full, if there is one."""
        kind, nbytes = one.kind, one.nbytes
        if self._room.get(kind, 0) < nbytes // 2:
            if kind in self._waiting:
                yield self._waiting[kind]
            self._waiting[kind], self._room[kind] = [], self._share
        self._waiting[kind].append(one)
        self._room[kind] -= nbytes

    @property
    def rest(self) -> list[list[GpuBucket]]:
        """Groups that are not full."""
        return [*self._waiting.values()]

    @property
    def indices(self) -> list[int]:
        """Their buckets, by their numbers."""
        return [one.index for group in self.rest for one in group]

    @property
    def few(self) -> bool:
        """Whether they are too little for a device to be worth while."""
        return sum(one.share for group in self.rest for one in group) < 1


def stage_group(patch: Contents, held: LocalWeights, group: list[GpuBucket]) -> GpuStaged:
    """The changes of some buckets, where they go. Nothing is written, and nothing waited for."""
    try:
        return _located(held, group)
    except (ValueError, IndexError):  # chunks that are missing, or counts that do not add up
        raise _refused(patch, held, group) from None


def require_decoded(patch: Contents, held: LocalWeights, found: Iterable[GpuStaged]) -> None:
    """Wait for the devices. Raises if anything did not decode."""
    for part in found:
        if not part.right:
            raise _refused(patch, held, part.buckets)


def _refused(patch: Contents, held: LocalWeights, group: list[GpuBucket]) -> InvalidField:
    """What the CPU says of buckets that a device does not decode."""
    for one in group:
        patch.decode(one.index, held)
    return InvalidField(f"buckets {[one.index for one in group]} do not decode on {group[0].runs.device}")


def _located(held: LocalWeights, group: list[GpuBucket]) -> GpuStaged:
    runs = Runs.concatenate([one.runs for one in group])
    counts = [one.head.layout.count for one in group]
    changes = np.concatenate(counts)
    with on_stream(held, runs.device):
        blocks, (side,) = runs.blocks(held.table.keys)
        bad = torch.zeros(1, dtype=torch.int32, device=runs.device)
        if group[0].head.profile.name == "raw":
            streams = Stream.POSITIONS, Stream.WORDS
            positions, words = (upload_parts([one.of(stream) for one in group], runs.device) for stream in streams)
            bits = words.view(gpu.changes.INTS[runs.dtype.width])
            found = gpu.cells.locate(blocks, side, changes, positions.view(torch.int32), bits, bad)
        else:
            plan = _plan(group, blocks, [count.size for count in counts])
            found = gpu.streams.decode(plan, side, changes, bad, lambda: _arrived(group, runs.device))
        return GpuStaged(held, group, side, found, blocks.fetch(torch.cat((gpu.changes.sum_slots(found.sums), bad))))


def _arrived(group: list[GpuBucket], device: Any) -> gpu.streams.ReceivedChunks:
    """What the streams of all buckets tell, on its way to the device."""
    bodies, rows = zip(*map(_told, group), strict=True)
    return gpu.streams.ReceivedChunks(upload_parts(bodies, device), _directory(bodies, rows))


def _plan(group: list[GpuBucket], blocks: gpu.changes.Blocks, sizes: list[int]) -> gpu.streams.StreamPlan:
    owner, head = np.repeat(np.arange(len(group)), sizes), group[0].head
    logs = np.array([one.head.tile_log for one in group])[owner]
    rows = [np.array(c.thresholds, np.uint64) << np.uint64(c.shift) for one in group if (c := one.classes)]
    limits = np.stack(rows)[owner] if rows else None
    order = {"sign_magnitude": head.dtype.sign_magnitude, "signed": head.dtype.signed}
    return gpu.streams.StreamPlan.of(blocks, owner, logs, limits, 1 << head.chunk_log, **order)


def _directory(bodies: Sequence[Buffer], rows: Sequence[list[_Row]]) -> gpu.streams.ChunkDirectory:
    """Where the chunks of all buckets are, whose bodies are one behind the other."""
    before = [0, *accumulate(map(len, bodies))]
    every = [
        (b, stream, coder, before[b] + at, lengths.size)
        for b, its in enumerate(rows)
        for stream, coder, at, lengths in its
    ]
    length = np.concatenate([lengths for its in rows for *_, lengths in its])
    bucket, stream, coder, place, many = np.array(every, np.int64).T
    ahead, first = np.cumsum(length) - length, np.cumsum(many) - many
    bucket, stream, coder, skipped = np.repeat((bucket, stream, coder, place - ahead[first]), many, axis=1)
    return gpu.streams.ChunkDirectory(bucket, stream, coder, length, ahead + skipped)
