"""Landing `ctx` buckets on weights that are on a device: decoded there, from coded bytes to located changes.

    buckets ──► coded chunks, to the device ──► decode, many buckets at once ──► digest ──► swap old bits for new

A bucket is decoded here if its sparse entries are runs on one device, and the device can read its streams; tile counts
in zstd are brought to tokens first. Any other bucket is decoded on the CPU, as all in `raw`, `gap` and `ulp` are: these
take work for their changes alone. A bucket that does not decode is handed to the CPU, which says what is wrong with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..codec import Classes, Coded, Reader, Stream, value
from ..codec.coders import Stored, Zstd
from ..codec.ctx import read_classes, tiles
from ..device import GROUP_BYTES, fetch, pair, run, upload, working
from ..digest import Digest
from ..errors import InvalidField, WrongBase
from ..kernels import gpu, gpu_cells, gpu_classes, gpu_streams
from ..pieces import Held, Numbers
from ..wire import Entries, Head
from .decode import Decoded, sparse
from .patch import Patch

FEW_BYTES = 12 << 20
"""Weights of all buckets below which these are brought to the CPU and decoded there: launches take a device as long.

Measured on an H200 by `benchmarks.gpu` (`small`): `apply` in `ctx` takes the CPU 4.4 ms for 4 MiB and 7.7 for 16 MiB,
and the device 6.5 to 6.8 for either.
"""


@dataclass(frozen=True)
class Bucket:
    """A bucket that a device can decode: its entries there, its coded streams, its dense entries on the host."""

    index: int
    head: Head
    classes: Classes
    bits: list[torch.Tensor]
    start: list[int]
    streams: Coded
    dense: list[Decoded]

    @property
    def kind(self) -> tuple[Any, ...]:
        """What buckets that are decoded together have in common."""
        aligned = not any(bits.data_ptr() % 16 for bits in self.bits)
        return self.bits[0].device, self.head.dtype, len(self.classes.thresholds), self.head.chunk_log, aligned

    @property
    def nbytes(self) -> int:
        return sum(bits.nbytes for bits in self.bits)


@dataclass(frozen=True)
class Resident:
    """Changes of some buckets, located on a device and ready to be written."""

    held: Held
    side: gpu.Side
    found: gpu_classes.Found
    moved: Digest

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
    if not head.profile.conditional or not head.layout.changes or 1 << head.tile_log < gpu.BLOCK:
        return None
    batch = sparse(head)
    found = [run(held, place) for place in zip(batch.tensor.tolist(), batch.region, strict=True)]
    there = [run for run in found if run is not None]
    if len(there) < len(found) or len({bits.device for bits, _ in there}) > 1:
        return None
    classes = read_classes(head.dtype, reader)
    if (streams := _readable(head, classes, reader)) is None:
        return None
    dense = _dense(head, reader)
    if any(map(Stream.is_dense, reader.left())):  # more than there are dense entries for
        return None
    bits, start = zip(*there, strict=True)
    return Bucket(index, head, classes, list(bits), list(start), streams, dense)


def _readable(head: Head, classes: Classes, reader: Reader) -> Coded | None:
    """The streams of the sparse entries as the device can read them; None if it cannot."""
    many = len(classes.thresholds) + 1
    out: Coded = {}
    for stream, (coder, chunks) in reader.left().items():
        if Stream.is_dense(stream):
            continue
        if stream not in (Stream.TILE_TOKENS, Stream.TILE_LOWS) and not 0 <= stream - Stream.CLASS < 4 * many:
            return None
        if coder.id == Zstd.id:
            sizes = head.layout.chunk_sizes(many * tiles(head.layout))
            if stream != Stream.TILE_TOKENS or len(sizes) != len(chunks):
                return None
            chunks = [coder.decode(chunk, size) for chunk, size in zip(chunks, sizes, strict=True)]
            coder = Stored()
        if stream % 2 and coder.id != Stored.id:
            return None
        out[stream] = coder, chunks
    return out


def _dense(head: Head, reader: Reader) -> list[Decoded]:
    """The dense entries, as those of a bucket that has no others."""
    if not head.dense_elements:
        return []
    bits = value.read_planes(head.layout, reader, head.dense_elements, Stream.DENSE_PLANE)
    e, mine = head.entries, head.entries.dense
    regions = [region for region, dense in zip(e.region, mine.tolist(), strict=True) if dense]
    alone = replace(head, entries=Entries(e.tensor[mine], e.count[mine], e.dense[mine], regions, e.numel[mine]))
    return [Decoded(alone, np.empty(0, np.uint32), np.empty(0, head.dtype.uint), bits, None)]


def located(patch: Patch, held: Held, buckets: Sequence[Bucket]) -> Iterator[tuple[Resident, list[Decoded]]]:
    """The changes of buckets, where they go; and their dense entries. Nothing is written."""
    kinds: dict[tuple[Any, ...], list[Bucket]] = {}
    room: dict[tuple[Any, ...], int] = {}
    for one in buckets:
        if room.get(one.kind, 0) < one.nbytes:
            if one.kind in kinds:
                yield _located(patch, held, kinds[one.kind])
            kinds[one.kind], room[one.kind] = [], GROUP_BYTES
        kinds[one.kind].append(one)
        room[one.kind] -= one.nbytes
    for group in kinds.values():
        yield _located(patch, held, group)


def _located(patch: Patch, held: Held, group: list[Bucket]) -> tuple[Resident, list[Decoded]]:
    device, dtype, _, chunk_log, _ = group[0].kind
    entries = [sparse(one.head) for one in group]
    sizes = [len(e) for e in entries]
    owner = np.repeat(np.arange(len(group)), sizes)
    limits = [np.array(one.classes.thresholds, np.uint64) << np.uint64(one.classes.shift) for one in group]
    order = {"sign_magnitude": dtype.sign_magnitude, "signed": dtype.signed}
    with working(held, device):
        numel, start = np.concatenate([e.numel for e in entries]), [s for one in group for s in one.start]
        keys = held.table.keys[np.concatenate([e.tensor for e in entries])]
        blocks = gpu.Blocks(dtype.width, numel.tolist(), device, keys, start)
        side = blocks.side([bits for one in group for bits in one.bits])
        logs = np.array([one.head.tile_log for one in group])[owner]
        plan = gpu_streams.Plan.of(blocks, owner, logs, np.stack(limits)[owner], 1 << chunk_log, **order)
        data, directory = _gathered(group)
        changes = np.concatenate([one.head.layout.count for one in group])
        bad = torch.zeros(1, dtype=torch.int32, device=device)
        try:
            found = gpu_streams.decode(plan, side, upload(data, device), directory, changes, bad)
            moved = Digest(*pair(gpu.total(found.sums)))
            right = not int(bad) and _exact(plan, found, owner, directory)
        except (ValueError, IndexError):  # chunks that are missing, or counts that do not add up
            right = False
    if not right:
        for one in group:
            patch.decode(one.index, held)
        raise InvalidField(f"buckets {[one.index for one in group]} do not decode on {device}")
    return Resident(held, side, found, moved), [dense for one in group for dense in one.dense]


def _gathered(group: list[Bucket]) -> tuple[npt.NDArray[np.uint8], gpu_streams.Directory]:
    """The chunks of all buckets, one behind the other, and where each is."""
    chunks = [
        (b, stream, coder.id, chunk)
        for b, one in enumerate(group)
        for stream, (coder, its) in sorted(one.streams.items())
        for chunk in its
    ]
    columns = np.array([(b, stream, coder, len(chunk)) for b, stream, coder, chunk in chunks], np.int64)
    owner, stream, coder, length = columns.reshape(-1, 4).T
    data = np.frombuffer(b"".join(chunk for *_, chunk in chunks), np.uint8)
    return data, gpu_streams.Directory(owner, stream, coder, length, np.cumsum(length) - length)


def _exact(plan: gpu_streams.Plan, found: gpu_classes.Found, owner: Numbers, directory: gpu_streams.Directory) -> bool:
    """Whether there are as many chunks of every stream as its bucket calls for; low bits may be left out."""
    many = plan.classes
    sums = torch.zeros((plan.buckets, many), dtype=torch.int64, device=found.counts.device)
    of_tile = plan.blocks.put(owner)[plan.tiles.part]
    by_class: Any = fetch(sums.index_add_(0, of_tile, found.counts.to(torch.int64)))()
    due = np.zeros((plan.buckets, 256), np.int64)
    due[:, Stream.TILE_TOKENS] = np.bincount(plan.bucket[plan.tiles.owner], minlength=plan.buckets) * many
    for c in range(many):
        due[:, Stream.CLASS + 4 * c] = due[:, Stream.CLASS + 4 * c + 2] = by_class[:, c]
    due = -(-due // plan.chunk)
    there = np.bincount(directory.bucket * 256 + directory.stream, minlength=due.size).reshape(due.shape)
    lows = np.roll(due, 1, axis=1)  # behind the tokens
    return bool(((there == due) | ((there == lows) & (due == 0))).all())
