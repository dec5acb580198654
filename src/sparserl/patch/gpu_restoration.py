"""Decoding the buckets of a coded anchor on the GPU that its weights are built on.

    buckets ──► coded planes, page-locked ──► the GPU: decode, many buckets at once ──► join planes into elements

A bucket is decoded here if all its entries are dense, and what is wanted of them lies on one GPU; planes in zstd are
decompressed on the host first. Any other bucket is decoded by the CPU. What does not decode here is handed to the CPU,
which says why.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from ..codec import AdjacentChunks, Coder, Reader, Stream
from ..codec.coders import Rans, Stored, coder
from ..errors import InvalidField
from ..kernels import cpu, gpu
from ..weights.batches import Batch
from ..weights.boxes import select
from ..weights.geometry import dot
from ..weights.local import LocalWeights
from ..weights.on_gpu import on_stream, runs_of
from ..weights.region import Numbers, Region, collapse, row_major, whole
from ..weights.staging import gpu_tensor
from ..wire import Head
from . import gpu_apply
from .decode import decode
from .slicing import PatchSlicer, inside

LEAST_CHUNK_LOG = 14
"""Chunks of fewer symbols are decoded on the CPU: a GPU needs a table of 16 KiB for each, whatever its size."""
_GROUP_BYTES = 96 << 20  # of GPU memory that buckets which are decoded together take
_SHARE = 16  # of the weights' bytes, the most that a group of several buckets takes
_LEAST_ROW = 64  # elements: where rows of a part are shorter, the host writes them
_TABLE_BYTES = 17 << 10  # of GPU memory that a coded chunk takes beside its bytes
_RUN_BYTES = 128  # of GPU memory that a run takes beside its elements


class _Plane(NamedTuple):
    """A plane of a bucket: how it is coded, where its bytes begin among the bucket's, and the lengths of its chunks."""

    stream: int
    coder: Coder
    at: int
    lengths: Numbers


class _Runs(NamedTuple):
    """Where elements of a bucket go: the first of each run in the bucket, how many there are, and their address."""

    first: Numbers
    numel: Numbers
    address: Numbers
    device: Any


@dataclass(frozen=True)
class DenseBucket:
    """A bucket for the GPU: its coded planes in page-locked memory, and where its elements go."""

    index: int
    head: Head
    device: Any
    runs: _Runs
    planes: list[_Plane]
    coded: torch.Tensor

    @property
    def kind(self) -> tuple[Any, int]:
        """What buckets that are decoded together have in common."""
        return self.device, self.head.dtype.width

    @property
    def sizes(self) -> Numbers:
        """The elements of each chunk."""
        return np.array(self.head.layout.chunk_sizes(self.head.dense_elements), np.int64)

    @property
    def coded_planes(self) -> list[_Plane]:
        """The planes that the GPU decodes."""
        return [plane for plane in self.planes if plane.coder.id == Rans.id]

    @property
    def decoded_bytes(self) -> int:
        return len(self.coded_planes) * self.head.dense_elements

    @property
    def gpu_bytes(self) -> int:
        """GPU memory that it takes to decode it."""
        tables = _TABLE_BYTES * sum(plane.lengths.size for plane in self.coded_planes)
        return self.coded.numel() + self.decoded_bytes + tables + _RUN_BYTES * self.runs.numel.size

    def require_decodable(self) -> None:
        """Decode it on the CPU, which raises where something is wrong."""
        data = self.coded.numpy().data
        streams = {}
        for plane in self.planes:
            end = plane.at + int(plane.lengths.sum())
            streams[plane.stream] = plane.coder, AdjacentChunks(data[plane.at : end], plane.lengths)
        decode(self.head, Reader(streams, f"bucket {self.index}"))


class DenseDecoder:
    """Decodes buckets of dense entries on the GPUs that they belong to, in groups, and writes their elements.

    Args:
        weights: The weights to write to, which nobody uses yet.
        slicer: Cuts entries along the parts of the weights; None for whole tensors.
    """

    def __init__(self, weights: LocalWeights, slicer: PatchSlicer | None = None) -> None:
        self._weights = weights
        self._slicer = slicer
        self._most = min(_GROUP_BYTES, weights.nbytes // _SHARE)
        self._waiting: list[DenseBucket] = []
        self._waiting_bytes = 0
        self._launched: list[tuple[list[DenseBucket], gpu.changes.HostCopy]] = []

    @classmethod
    def of(cls, weights: LocalWeights, slicer: PatchSlicer | None = None) -> DenseDecoder | None:
        """A decoder; None where it is not worth while, or no kernels run on the GPUs."""
        return cls(weights, slicer) if weights.has_kernels and weights.nbytes >= gpu_apply.FEW_BYTES else None

    def stage(self, index: int, head: Head, reader: Reader) -> DenseBucket | None:
        """Copy a bucket to page-locked memory, on any thread; None where it is one for the CPU."""
        if head.layout.changes or not head.profile.planar or head.chunk_log < LEAST_CHUNK_LOG:
            return None
        batch = _dense(head)
        runs = _runs(self._weights, batch) if self._slicer is None else _row_runs(self._weights, self._slicer, batch)
        if runs is None:
            return None
        planes = _planes(head, reader)
        if planes is None:
            return None
        total = sum(int(plane.lengths.sum()) for plane, _ in planes)
        device = runs.device
        coded = torch.empty(total, dtype=torch.uint8, pin_memory=device.type == "cuda")
        for plane, data in planes:
            coded.numpy()[plane.at : plane.at + len(data)] = data
        return DenseBucket(index, head, device, runs, [plane for plane, _ in planes], coded)

    def add(self, bucket: DenseBucket) -> None:
        """Decode a bucket together with others. Raises if one of those that were added before did not decode."""
        if self._waiting and self._waiting_bytes + bucket.gpu_bytes > self._most:
            self._launch()
        self._waiting.append(bucket)
        self._waiting_bytes += bucket.gpu_bytes

    def finish(self) -> None:
        """Return when all elements are written. Raises if a bucket did not decode; nothing of its group is written."""
        self._launch()
        self._confirm(len(self._launched))

    def _launch(self) -> None:
        """Give the GPUs what waits, and wait for what they were given before."""
        earlier = len(self._launched)
        groups: dict[tuple[Any, int], list[DenseBucket]] = {}
        for bucket in self._waiting:
            groups.setdefault(bucket.kind, []).append(bucket)
        self._launched += [(group, _decode(self._weights, group)) for group in groups.values()]
        self._waiting = []
        self._waiting_bytes = 0
        self._confirm(earlier)

    def _confirm(self, count: int) -> None:
        """Wait until so many groups are written. One that did not decode stays, and is refused again."""
        for group, bad in self._launched[:count]:
            if bad()[0]:
                raise _refusal(group)
        del self._launched[:count]


def _dense(head: Head) -> Batch:
    """The dense entries of a bucket."""
    entries = head.entries
    dense = entries.dense
    return Batch(head.dtype, entries.tensor[dense], select(entries.region, dense), entries.numel[dense])


def _row_runs(weights: LocalWeights, slicer: PatchSlicer, batch: Batch) -> _Runs | None:
    """Where the entries of a bucket go in parts of tensors; None if these are not on one GPU, or have short rows."""
    columns = [np.empty((3, 0), np.int64)]
    devices = set[Any]()
    firsts = (np.cumsum(batch.numel) - batch.numel).tolist()
    for entry_first, tensor, region in zip(firsts, batch.tensor.tolist(), batch.region, strict=True):
        outer = region or whole(weights.table[tensor].shape)
        for common in slicer.common_regions(tensor, region):
            memory, local = weights.locate(tensor, common)
            on_gpu = gpu_tensor(memory)
            if on_gpu is None or gpu.support.obstacle(on_gpu.device) is not None:
                return None
            devices.add(on_gpu.device)
            source = inside(common, outer)
            row = _rows(source, row_major(outer.size), local or whole(memory.shape), on_gpu.stride())
            if row is None:
                return None
            first, address, length = row
            begin = on_gpu.data_ptr() + address * batch.dtype.width
            columns.append(np.stack((entry_first + first, np.full_like(first, length), begin)))
    runs = np.concatenate(columns, axis=1)
    if len(devices) != 1:
        return None
    return _Runs(runs[0], runs[1], runs[2], devices.pop())


def _rows(
    source: Region, source_strides: Sequence[int], target: Region, target_strides: Sequence[int]
) -> tuple[Numbers, Numbers, int] | None:
    """The rows that a box consists of in two memories: where each begins in both, and how long all are.

    None if elements of a row are not next to each other, or if it would take too many rows.
    """
    size, (from_strides, to_strides) = collapse(source.size, tuple(source_strides), tuple(target_strides))
    begin = np.array([[dot(source.start, source_strides)], [dot(target.start, target_strides)]], np.int64)
    if not size:
        return begin[0], begin[1], 1
    is_short = len(size) > 1 and size[-1] < _LEAST_ROW
    if from_strides[-1] != 1 or to_strides[-1] != 1 or is_short:
        return None
    for n, a, b in zip(size[:-1], from_strides, to_strides, strict=False):
        steps = np.arange(n) * np.array([[[a]], [[b]]])
        begin = (begin[:, :, None] + steps).reshape(2, -1)
    return begin[0], begin[1], size[-1]


def _runs(weights: LocalWeights, batch: Batch) -> _Runs | None:
    """Where the entries of a bucket go; None if they are not all runs on one GPU."""
    runs = runs_of(batch, weights)
    if runs is None:
        return None
    return _Runs(np.cumsum(runs.numel) - runs.numel, runs.numel, runs.address[0], runs.device)


def _planes(head: Head, reader: Reader) -> list[tuple[_Plane, Any]] | None:
    """The planes of a bucket and their bytes, coded or as they are; None if they are not what a bucket has."""
    sizes = head.layout.chunk_sizes(head.dense_elements)
    streams = range(Stream.DENSE_PLANE, Stream.DENSE_PLANE + head.dtype.width)
    left = reader.left()
    if left.keys() != set(streams):
        return None
    planes = []
    at = 0
    for stream, coder_id, offset, lengths in [*reader.rows()]:
        if stream not in streams:
            continue
        if not _is_plausible(coder_id, lengths, sizes):
            return None
        if coder_id in (Rans.id, Stored.id):
            plane = _Plane(stream, coder(coder_id), at, lengths)
            data = np.frombuffer(reader.body, np.uint8)[offset : offset + int(lengths.sum())]
        else:
            plane = _Plane(stream, coder(Stored.id), at, np.array(sizes, np.int64))
            data = reader.take_all(stream, sizes)
        planes.append((plane, data))
        at += data.size
    return planes


def _is_plausible(coder_id: int, lengths: Numbers, sizes: list[int]) -> bool:
    """Whether a plane has as many chunks as it should, and none that is too long."""
    if lengths.size != len(sizes):
        return False
    if coder_id == Rans.id:
        return bool((lengths <= cpu.rans.largest_encoding(np.array(sizes, np.int64))).all())
    return coder_id != Stored.id or lengths.tolist() == sizes


def _refusal(group: list[DenseBucket]) -> InvalidField:
    """What the CPU says of buckets that a GPU does not decode."""
    for bucket in group:
        bucket.require_decodable()
    return InvalidField(f"buckets {[bucket.index for bucket in group]} do not decode on {group[0].device}")


def _decode(weights: LocalWeights, group: list[DenseBucket]) -> gpu.changes.HostCopy:
    """Decode buckets of one kind and write their elements, waiting for nothing. Returns whether something is wrong."""
    device, width = group[0].kind
    runs = [bucket.runs for bucket in group]
    with on_stream(weights, device):
        blocks = gpu.changes.Blocks(width, np.concatenate([run.numel for run in runs]), device)
        side = blocks.side_at(np.concatenate([run.address for run in runs]), width, [weights])
        data = blocks.empty(sum(bucket.coded.numel() + bucket.decoded_bytes for bucket in group), torch.uint8)
        chunks, planes = zip(*_laid_out(group), strict=True)
        for bucket, offset in zip(group, _offsets(group), strict=True):
            data[offset : offset + bucket.coded.numel()].copy_(bucket.coded, non_blocking=True)
        bad = torch.zeros(1, dtype=torch.int32, device=device)
        coded = gpu.rans.EncodedChunks(*blocks.upload_columns(*np.concatenate(chunks, axis=1)))
        gpu.rans.decode(blocks, coded, data, data, bad)
        gpu.planes.join(blocks, side, blocks.upload(np.concatenate(planes)), data, bad)
        return blocks.fetch(bad)


def _offsets(group: list[DenseBucket]) -> list[int]:
    """Where the coded bytes of each bucket begin; its decoded planes lie behind them."""
    sizes = np.array([bucket.coded.numel() + bucket.decoded_bytes for bucket in group])
    offsets: list[int] = (np.cumsum(sizes) - sizes).tolist()
    return offsets


def _laid_out(group: list[DenseBucket]) -> Iterator[tuple[Numbers, Numbers]]:
    """For each bucket two tables of places in the GPU's memory.

    The chunks to be decoded (where its symbols go, how many, where its bytes are, how many), as columns; and where each
    plane of every run begins, as rows.
    """
    for bucket, offset in zip(group, _offsets(group), strict=True):
        sizes = bucket.sizes
        symbols_at = offset + bucket.coded.numel()
        chunks = [np.empty((4, 0), np.int64)]
        begins = []
        for plane in bucket.planes:
            coded_at = offset + plane.at
            if plane.coder.id != Rans.id:
                begins.append(coded_at)
                continue
            begins.append(symbols_at)
            lengths = plane.lengths
            begin = symbols_at + np.cumsum(sizes) - sizes
            chunks.append(np.stack((begin, sizes, coded_at + np.cumsum(lengths) - lengths, lengths)))
            symbols_at += bucket.head.dense_elements
        yield np.concatenate(chunks, axis=1), bucket.runs.first[:, None] + np.array(begins, np.int64)
