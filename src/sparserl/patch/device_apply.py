"""Landing buckets on weights that are on a device: decoded there, from coded bytes to located changes.

    buckets ──► coded chunks, to the device ──► decode, many buckets at once ──► digest ──► swap old bits for new

A bucket is decoded here if its sparse entries are runs on one device, and the device can read its streams; tokens in
zstd are brought here first. Any other bucket is decoded on the CPU, as all in `gap` are. While a device is at work on
some buckets, the host reads the heads of the next. One that does not decode is handed to the CPU, which says why.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any

import numpy as np
import torch

from ..codec import Classes, Reader, Stream, value
from ..codec.coders import Buffer, Stored, Zstd
from ..codec.ctx import read_classes, tiles
from ..codec.index import tiles as gap_tiles
from ..device import GROUP_BYTES, Run, Runs, run, staging, working
from ..digest import Digest
from ..errors import InvalidField, WrongBase
from ..kernels import gpu, gpu_cells, gpu_classes, gpu_streams
from ..parallel import ordered
from ..pieces import Held
from ..wire import Entries, Head
from .decode import Decoded, sparse
from .patch import Patch

FEW_BYTES = 16 << 20
"""Weights of `ctx` buckets below which all are brought to the CPU and decoded there: launches take a device as long.

Measured on an H200 by `benchmarks.gpu` (`small`): `apply` in `ctx` takes the CPU 6.1 ms for 16 MiB and 14.9 for 64 MiB,
and the device 6.9 and 6.1.
"""
FEW_CHANGES = 1 << 15
"""Changes of other buckets, likewise: the CPU takes 3.7 ms for 2^14 in `ulp`, 5.7 for 2^16, the device 4.0 and 4.2."""
_LARGE = 16 << 20  # bytes that are copied on threads
_POSITIONS, _WORDS, _CLASS = int(Stream.POSITIONS), int(Stream.WORDS), int(Stream.CLASS)
_Chunk = tuple[int, int, int, int]  # stream, coder, length, place among the bytes of the bucket
_CHANGE_BYTES = 20  # of device memory that a change takes until it is written


@dataclass(frozen=True)
class Bucket:
    """A bucket that a device can decode: its entries there, the bytes of its streams, its dense entries on the host."""

    index: int
    head: Head
    classes: Classes | None
    runs: list[Run]
    body: Buffer
    chunks: list[_Chunk]  # those of the sparse entries, by stream
    dense: list[Decoded]

    def of(self, stream: int) -> Buffer:
        """The chunks of a stream that was not coded, one behind the other."""
        mine = [chunk for chunk in self.chunks if chunk[0] == stream]
        return self.body[mine[0][3] : mine[-1][3] + mine[-1][2]]

    @property
    def kind(self) -> tuple[Any, ...]:
        """What buckets that are decoded together have in common."""
        aligned = not any(one.address[0] % 16 for one in self.runs)
        many = 0 if self.classes is None else len(self.classes.thresholds)
        return self.runs[0].homes[0].device, self.head.dtype, self.head.profile.name, many, self.head.chunk_log, aligned

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
class Resident:
    """Changes of some buckets, located on a device and ready to be written."""

    held: Held
    buckets: list[Bucket]
    side: gpu.Side
    found: gpu_classes.Found
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

    def swap(self) -> None:
        """Write the new bits, and keep what was there; raises `WrongBase` where that was something else than before."""
        device = self.side.base.device
        with working(self.held, device):
            other = torch.zeros(1, dtype=torch.int32, device=device)
            gpu_cells.swap(self.side, self.found, other)
            if int(other):
                raise WrongBase(
                    "the weights were changed after the patch was staged on them. "
                    "They are as they were before the commit"
                )

    def write(self, held: Held) -> None:
        """Put back what was there."""
        device = self.side.base.device
        with working(held, device):
            right = torch.zeros(1, dtype=torch.int32, device=device)
            gpu_classes.land(self.side, self.found, self.found.old, right)
            int(right)  # waits until all is written


def bucket(held: Held, index: int, head: Head, reader: Reader) -> Bucket | None:
    """A bucket for the device, or None where it is one for the CPU."""
    name = head.profile.name
    if name == "gap" or not head.layout.changes or (head.profile.tiled and 1 << head.tile_log < gpu.BLOCK):
        return None
    batch = sparse(head)
    runs: list[Run] = []
    for place in zip(batch.tensor.tolist(), batch.region, strict=True):
        if (one := run(place, held)) is None or (runs and one.homes[0].device != runs[0].homes[0].device):
            return None
        runs.append(one)
    classes = read_classes(head.dtype, reader) if head.profile.conditional else None
    dense = _dense(head, reader)
    found = _readable(head, classes, reader)
    return None if found is None else Bucket(index, head, classes, runs, *found, dense)


def _readable(head: Head, classes: Classes | None, reader: Reader) -> tuple[Buffer, list[_Chunk]] | None:
    """Bytes with the streams of the sparse entries as the device can read them, and where; None if it cannot."""
    wanted, left = _wanted(head, classes), reader.left()
    if not left.keys() <= wanted.keys():
        return None
    body, chunks = reader.body, [chunk for chunk in reader.places() if chunk[0] in wanted]
    for stream, (coder, coded) in left.items():
        if coder.id == Zstd.id and wanted[stream]:
            sizes = head.layout.chunk_sizes(wanted[stream])
            if len(sizes) != len(coded):
                return None
            tokens = b"".join(coder.decode(chunk, size) for chunk, size in zip(coded, sizes, strict=True))
            chunks = [chunk for chunk in chunks if chunk[0] != stream]
            at = np.cumsum([len(body), *sizes[:-1]]).tolist()
            chunks += [(stream, Stored.id, n, place) for n, place in zip(sizes, at, strict=True)]
            body = b"".join((body, tokens))
        elif coder.id != Stored.id and (stream % 2 or not head.profile.tiled):
            return None
    return (body, sorted(chunks, key=itemgetter(0, 3))) if head.profile.tiled or _whole(head, chunks) else None


def _wanted(head: Head, classes: Classes | None) -> dict[int, int]:
    """The streams that the entries have, and how many tokens those have of which that is known; 0 for others."""
    layout = head.layout
    if not head.profile.tiled:
        return {Stream.POSITIONS: 0, Stream.WORDS: 0}
    out: dict[int, int] = {Stream.TILE_LOWS: 0}
    if classes is None:
        out |= {Stream.TILE_TOKENS: gap_tiles(layout), Stream.GAP_LOWS: 0, Stream.STEP_LOWS: 0}
        return out | {Stream.GAP_TOKENS: layout.changes, Stream.STEP_TOKENS: layout.changes}
    many = len(classes.thresholds) + 1
    return out | {Stream.TILE_TOKENS: many * tiles(layout)} | dict.fromkeys(range(_CLASS, _CLASS + 4 * many), 0)


def _whole(head: Head, chunks: list[_Chunk]) -> bool:
    """Whether positions and words of `raw` are as many as there are changes, cut as they should be."""
    sizes = head.layout.chunk_sizes(head.layout.changes)
    wanted = [(int(Stream.POSITIONS), 4 * size) for size in sizes]
    wanted += [(int(Stream.WORDS), head.dtype.width * size) for size in sizes]
    return [(stream, length) for stream, _, length, _ in chunks] == wanted


def _dense(head: Head, reader: Reader) -> list[Decoded]:
    """The dense entries, as those of a bucket that has no others."""
    if not head.dense_elements:
        return []
    if head.profile.planar:
        bits = value.read_planes(head.layout, reader, head.dense_elements, Stream.DENSE_PLANE)
    else:
        bits = value.read_words(head.layout, reader, head.dense_elements, Stream.DENSE)
    e, mine = head.entries, head.entries.dense
    regions = [region for region, dense in zip(e.region, mine.tolist(), strict=True) if dense]
    alone = replace(head, entries=Entries(e.tensor[mine], e.count[mine], e.dense[mine], regions, e.numel[mine]))
    return [Decoded(alone, np.empty(0, np.uint32), np.empty(0, head.dtype.uint), bits, None)]


class Groups:
    """Buckets that come one by one, put together with others of their kind."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[Any, ...], list[Bucket]] = {}
        self._room: dict[tuple[Any, ...], int] = {}

    def add(self, one: Bucket) -> Iterator[list[Bucket]]:
        """The group that is full, if there is one."""
        kind, nbytes = one.kind, one.nbytes
        if self._room.get(kind, 0) < nbytes:
            if kind in self._waiting:
                yield self._waiting[kind]
            self._waiting[kind], self._room[kind] = [], GROUP_BYTES
        self._waiting[kind].append(one)
        self._room[kind] -= nbytes

    @property
    def rest(self) -> list[list[Bucket]]:
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


def located(patch: Patch, held: Held, group: list[Bucket]) -> Resident:
    """The changes of some buckets, where they go. Nothing is written, and nothing waited for but counts of tiles."""
    try:
        return _located(held, group)
    except (ValueError, IndexError):  # chunks that are missing, or counts that do not add up
        raise _refused(patch, held, group) from None


def require_right(patch: Patch, held: Held, found: Iterable[Resident]) -> None:
    """Wait for the devices. Raises if anything did not decode."""
    for part in found:
        if not part.right:
            raise _refused(patch, held, part.buckets)


def _refused(patch: Patch, held: Held, group: list[Bucket]) -> InvalidField:
    """What the CPU says of buckets that a device does not decode."""
    for one in group:
        patch.decode(one.index, held)
    device = group[0].runs[0].homes[0].device
    return InvalidField(f"buckets {[one.index for one in group]} do not decode on {device}")


def _located(held: Held, group: list[Bucket]) -> Resident:
    runs = Runs.of([one for b in group for one in b.runs])
    counts = [one.head.layout.count for one in group]
    changes = np.concatenate(counts)
    with working(held, runs.device):
        blocks, (side,) = runs.blocks(held.table.keys)
        bad = torch.zeros(1, dtype=torch.int32, device=runs.device)
        if group[0].head.profile.name == "raw":
            positions, words = (_sent([one.of(s) for one in group], runs.device) for s in (_POSITIONS, _WORDS))
            bits = words.view(gpu.INTS[runs.dtype.width])
            found = gpu_cells.at_positions(blocks, side, changes, positions.view(torch.int32), bits, bad)
        else:
            plan = _plan(group, blocks, [count.size for count in counts])
            data = _sent([one.body for one in group], runs.device)
            found = gpu_streams.decode(plan, side, data, _directory(group), changes, bad)
        return Resident(held, group, side, found, blocks.fetch(torch.cat((gpu.total(found.sums), bad))))


def _plan(group: list[Bucket], blocks: gpu.Blocks, sizes: list[int]) -> gpu_streams.Plan:
    owner, head = np.repeat(np.arange(len(group)), sizes), group[0].head
    logs = np.array([one.head.tile_log for one in group])[owner]
    rows = [np.array(c.thresholds, np.uint64) << np.uint64(c.shift) for one in group if (c := one.classes)]
    limits = np.stack(rows)[owner] if rows else None
    order = {"sign_magnitude": head.dtype.sign_magnitude, "signed": head.dtype.signed}
    return gpu_streams.Plan.of(blocks, owner, logs, limits, 1 << head.chunk_log, **order)


def _directory(group: list[Bucket]) -> gpu_streams.Directory:
    """Where the chunks of all buckets are, whose bodies are one behind the other."""
    stream, coder, length, place = np.concatenate([np.array(one.chunks, np.int64) for one in group]).T
    many, sizes = [len(one.chunks) for one in group], np.array([len(one.body) for one in group])
    owner = np.repeat(np.arange(len(group)), many)
    return gpu_streams.Directory(owner, stream, coder, length, place + (np.cumsum(sizes) - sizes)[owner])


def _sent(parts: list[Buffer], device: Any) -> torch.Tensor:
    """Bytes on the device, one part behind the other."""
    ends = np.cumsum([len(part) for part in parts]).tolist()
    host, send = staging(ends[-1], device)

    def fill(i: int) -> None:
        host[ends[i] - len(parts[i]) : ends[i]] = np.frombuffer(parts[i], np.uint8)

    deque(ordered(fill, range(len(parts)), None if host.size > _LARGE else 1), maxlen=0)
    return send()
