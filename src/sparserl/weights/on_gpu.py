"""Weights on GPUs, as the kernels there read and write them.

A run is a place whose elements are consecutive both in memory and in their tensor. Kernels read runs where they lie,
and cast fp32 to bf16 as they read it. Those that decode changes also take what is consecutive in memory alone, such as
the columns that a rank has of a tensor: rows, with gaps between them in their tensor. Other places on a GPU are summed
up there (see `gpu_grids`); else they are read through host memory, and written element by element.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ..kernels import gpu
from ..kernels.gpu.ints import INTS
from .batches import Batch
from .dtypes import DType, UIntArray
from .gpu_copies import upload
from .local import LocalWeights
from .memory import Memory
from .region import Numbers, Region, Rows, Shape, run_start, whole
from .shards import Place
from .staging import cast_origin, gpu_tensor
from .table import TensorTable

LARGE_BYTES = 128 << 20  # of a piece: kernels look at all pieces in one launch, but each costs host time
_warm = set[tuple[DType, Any, bool, bool, bool]]()  # dtypes, GPUs, alignments, casts and rows: their kernels are there
_warming = threading.Lock()
GROUP_BYTES = 8 << 30  # of weights that kernels look at together; their results take up to a fifth of that


@contextmanager
def on_stream(weights: LocalWeights, device: Any) -> Iterator[None]:
    """Launch what happens inside on the weights' stream of this GPU."""
    stream = weights.gpu_streams[device]
    if stream is None:
        yield
        return
    with torch.cuda.stream(stream):
        stream.query()  # the first call of the runtime gives a thread its CUDA context, which Triton needs
        yield


@dataclass(frozen=True)
class Runs:
    """Runs of one dtype on one GPU, column by column, with their addresses in one or more versions."""

    table: TensorTable
    dtype: DType
    device: Any
    places: list[Place]
    tensor: Numbers
    numel: Numbers
    start: Numbers  # position of each run's first element in its tensor
    columns: Numbers  # elements of each row of a run
    gap: Numbers  # elements of its tensor between two rows; zero for proper runs
    address: Numbers  # versions × runs
    widths: tuple[int, ...]  # of an element in each version, in bytes
    owners: Sequence[LocalWeights]

    @property
    def nbytes(self) -> int:
        return int(self.numel.sum()) * self.dtype.width

    @property
    def is_cast(self) -> bool:
        """Whether the last version is fp32, which kernels cast where they read it."""
        return self.widths[-1] != self.dtype.width

    @property
    def has_rows(self) -> bool:
        """Whether some have gaps between their rows in their tensors."""
        return bool(self.gap.any())

    @property
    def aligned(self) -> npt.NDArray[np.bool_]:
        """Which runs begin at a 16-byte boundary in all versions."""
        aligned: npt.NDArray[np.bool_] = (self.address & 15 == 0).all(0)
        return aligned

    def select(self, which: Numbers) -> Runs:
        """The runs with these indices, in this order."""
        if which.size == self.numel.size and np.array_equal(which, np.arange(which.size)):
            return self
        return replace(
            self,
            places=[self.places[i] for i in which.tolist()],
            tensor=self.tensor[which],
            numel=self.numel[which],
            start=self.start[which],
            columns=self.columns[which],
            gap=self.gap[which],
            address=self.address[:, which],
        )

    @classmethod
    def concatenate(cls, parts: Sequence[Runs]) -> Runs:
        """Runs of the same dtype, GPU and versions, one behind the other."""
        return replace(
            parts[0],
            places=[place for part in parts for place in part.places],
            tensor=np.concatenate([part.tensor for part in parts]),
            numel=np.concatenate([part.numel for part in parts]),
            start=np.concatenate([part.start for part in parts]),
            columns=np.concatenate([part.columns for part in parts]),
            gap=np.concatenate([part.gap for part in parts]),
            address=np.concatenate([part.address for part in parts], axis=-1),
        )

    def pieces(self, most: int) -> Runs:
        """The same runs in order of tensor and region, cut into consecutive pieces of at most `most` elements."""
        return self._in_order()._cut(most)  # noqa: SLF001  # of this class

    def _in_order(self) -> Runs:
        """The runs in order of tensor and region."""
        if (np.diff(self.tensor) > 0).all():
            return self
        keys = [(tensor, () if region is None else region.start) for tensor, region in self.places]
        order = sorted(range(len(keys)), key=keys.__getitem__)
        return self if order == [*range(len(keys))] else self.select(np.array(order, np.int64))

    def _cut(self, most: int) -> Runs:
        """Large runs in pieces of at most `most` elements; empty runs are left out."""
        if ((self.numel > 0) & (self.numel <= most)).all():
            return self
        pieces_of: dict[int, list[Region]] = {}
        for i in np.flatnonzero(self.numel > most).tolist():
            tensor, region = self.places[i]
            pieces_of[i] = [*(region or whole(self.table.specs[tensor].shape)).split(most)]
        count = (self.numel > 0).astype(np.int64)
        count[[*pieces_of]] = [*map(len, pieces_of.values())]
        run = np.repeat(np.arange(count.size), count)  # of each piece
        end = np.cumsum(count)  # of each run's pieces
        cut = self.select(run)
        numel = cut.numel
        for i, regions in pieces_of.items():
            its_pieces = slice(int(end[i]) - len(regions), int(end[i]))
            cut.places[its_pieces] = [(self.places[i][0], region) for region in regions]
            numel[its_pieces] = [region.numel for region in regions]
        before = np.cumsum(numel) - numel
        offset = before - before[(end - count)[run]]  # elements of its run that precede a piece
        cut = replace(cut, start=cut.start + offset, address=cut.address + offset * np.array(self.widths)[:, None])
        for i in np.flatnonzero(cut.gap * offset).tolist():
            cut._set_rows(i)  # noqa: SLF001  # of this class
        return cut

    def _set_rows(self, piece: int) -> None:
        """Find out how a piece that was cut from rows with gaps lies in its tensor."""
        tensor, region = self.places[piece]
        rows = None if region is None else Rows.of(region, self.table.specs[tensor].shape)
        assert rows is not None  # a piece of rows is rows, or in one of them
        self.start[piece] = rows.start
        self.columns[piece] = rows.columns
        self.gap[piece] = rows.gap

    def blocks(self) -> tuple[gpu.changes.Blocks, list[gpu.changes.Side]]:
        """The blocks that kernels work on, and one side per version."""
        arrays = self.numel, self.start, self.table.keys[self.tensor]
        columns = _BlockColumns(*arrays, *((self.columns, self.gap) if self.has_rows else ()))
        blocks = _blocks(self.dtype.width, self.device, stream_of(self.device), columns)
        versions = zip(self.address, self.widths, strict=True)
        aligned = bool(self.aligned.all())
        return blocks, [blocks.side_at(at, width, self.owners, aligned=aligned) for at, width in versions]


def stream_of(device: Any) -> int:
    """A number of the current stream."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


class _BlockColumns:
    """What blocks are made of, to look them up by: very many numbers are hashed by their sums."""

    def __init__(self, numel: Numbers, start: Numbers, keys: np.ndarray[Any, Any], *rows: Numbers) -> None:
        copies = [array.copy() for array in (numel, start, *rows)]  # nobody changes them later
        self.arrays = (*copies[:2], keys, *copies[2:])
        self._hash = hash((numel.size, int(numel.sum()), int(start.sum()), int(keys.sum())))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _BlockColumns) or len(self.arrays) != len(other.arrays):
            return False
        return all(map(np.array_equal, self.arrays, other.arrays))


@lru_cache(maxsize=8)
def _blocks(width: int, device: Any, _stream: int, columns: _BlockColumns) -> gpu.changes.Blocks:
    """The blocks of the last sync, if they are the same, on the stream that made them.

    They depend on these arguments alone: they contain no addresses and keep no tensor alive.
    """
    numel, start, keys, *rows = columns.arrays
    return gpu.changes.Blocks(width, numel, device, keys, start, rows=(rows[0], rows[1]) if rows else None)


def split_by_gpu(
    places: Iterable[Place], *versions: LocalWeights, with_rows: bool = False
) -> tuple[list[Place], list[Runs]]:
    """Split places into those for the CPU, and those that are runs on the same GPU in all versions.

    In versions after the first, runs may have to be cast. They are grouped by dtype and GPU, and casts apart.

    Args:
        places: The places.
        versions: The weights, in one version or several.
        with_rows: Whether rows with gaps between them in their tensors pass for runs. Few kernels know of such gaps;
            the others refuse them.
    """
    all_places = places if isinstance(places, list) else [*places]
    devices = [*versions[0].gpu_streams]
    if not all_places or not all(weights.gpu_streams for weights in versions):
        return all_places, []
    table = versions[0].table
    if all_places is table.places:  # very many, perhaps: they are not looked at one by one
        tensor = np.arange(len(all_places))
        partial = np.zeros(tensor.size, bool)
    else:
        tensor = np.array([tensor for tensor, _ in all_places], np.int64)
        partial = np.array([region is not None for _, region in all_places])
    start, columns, gap = np.zeros((3, tensor.size), np.int64)
    columns += 1
    numel = table.numel[tensor]
    is_cast = np.zeros(tensor.size, bool)
    gpu_number, address = map(
        np.stack, zip(*(weights.gpu_addresses(tensor, devices) for weights in versions), strict=True)
    )
    for i in np.flatnonzero((gpu_number != gpu_number[0]).any(0) | (gpu_number[0] < 0) | partial).tolist():
        run = _run(all_places[i], versions, with_rows=with_rows)
        gpu_number[:, i] = -1
        if run is not None and run.device in devices:
            gpu_number[:, i] = devices.index(run.device)
            numel[i] = run.numel
            start[i], columns[i], gap[i] = run.rows
            address[:, i] = run.addresses
            is_cast[i] = run.is_cast
    kind = np.where(gpu_number[0] < 0, -1, (2 * gpu_number[0] + is_cast) * 256 + table.codes[tensor])
    by_kind = []
    for code in np.flatnonzero(np.bincount(kind[kind >= 0])).tolist():  # `unique` would sort them
        rows = np.flatnonzero(kind == code)
        first = int(rows[np.argmax(numel[rows] > 0)])  # an empty tensor has no address
        runs = Runs(
            table=table,
            dtype=table.specs[int(tensor[first])].dtype,
            device=devices[code >> 9],
            places=all_places if rows.size == tensor.size else [all_places[i] for i in rows.tolist()],
            tensor=tensor[rows],
            numel=numel[rows],
            start=start[rows],
            columns=columns[rows],
            gap=gap[rows],
            address=address[:, rows],
            widths=tuple(_width_to_read(weights.locate(*all_places[first])[0]) for weights in versions),
            owners=versions,
        )
        by_kind.append(runs)
    return [all_places[i] for i in np.flatnonzero(kind < 0).tolist()], by_kind


def runs_of(batch: Batch, weights: LocalWeights, *, with_rows: bool = False) -> Runs | None:
    """The regions of a batch as runs on one GPU; None if they are not. `with_rows`: see `split_by_gpu`."""
    devices = [*weights.gpu_streams]
    gpu_number, address = weights.gpu_addresses(batch.tensor, devices)
    places = [*zip(batch.tensor.tolist(), batch.region, strict=True)]
    if (gpu_number != gpu_number[0]).any() or gpu_number[0] < 0 or batch.region.count(None) < len(places):
        on_host, by_kind = split_by_gpu(places, weights, with_rows=with_rows)
        return by_kind[0] if not on_host and len(by_kind) == 1 else None
    return Runs(
        table=weights.table,
        dtype=batch.dtype,
        device=devices[int(gpu_number[0])],
        places=places,
        tensor=batch.tensor,
        numel=batch.numel,
        start=np.zeros(gpu_number.size, np.int64),
        columns=np.ones(gpu_number.size, np.int64),
        gap=np.zeros(gpu_number.size, np.int64),
        address=address[None],
        widths=(batch.dtype.width,),
        owners=(weights,),
    )


class _Run(NamedTuple):
    """A place that is a run on the same GPU in all versions."""

    device: Any
    numel: int
    rows: Rows
    addresses: list[int]
    is_cast: bool


def _width_to_read(memory: Memory) -> int:
    """The bytes of an element on a GPU that kernels read for these bits, as they are or with a cast."""
    return memory.dtype.width if gpu_tensor(memory) is not None else int(cast_origin(memory).element_size())


def _run(place: Place, versions: Sequence[LocalWeights], *, with_rows: bool) -> _Run | None:
    """A place as a run on one GPU, or as rows; None if it is not one in all versions."""
    tensor, region = place
    spec = versions[0].table.specs[tensor]
    rows = _rows_in_tensor(region, spec.shape, with_rows=with_rows)
    devices = set[Any]()
    addresses = list[int]()
    is_cast = False
    for weights in versions:
        memory, local = weights.locate(tensor, region)
        is_cast = weights is not versions[0] and cast_origin(memory) is not None
        on_gpu = cast_origin(memory) if is_cast else gpu_tensor(memory)
        local_start = 0 if local is None else run_start(local, memory.shape)
        if on_gpu is None or rows is None or local_start is None or not on_gpu.is_contiguous():
            return None
        if gpu.support.obstacle(on_gpu.device) is not None:
            return None
        devices.add(on_gpu.device)
        addresses.append(on_gpu.data_ptr() + local_start * on_gpu.element_size())
    if len(devices) > 1 or rows is None:
        return None
    return _Run(devices.pop(), spec.numel if region is None else region.numel, rows, addresses, is_cast)


def _rows_in_tensor(region: Region | None, shape: Shape, *, with_rows: bool) -> Rows | None:
    """How a region lies in its tensor; None if it is no run there and, if these will do, no rows either."""
    start = 0 if region is None else run_start(region, shape)
    if start is not None:
        return Rows(start, 1, 0)
    return Rows.of(region, shape) if with_rows and region is not None else None


def groups(all_runs: Iterable[Runs], piece_bytes: int | None = None) -> Iterator[Runs]:
    """Runs cut into pieces, in even groups of about 8 GiB at most, in order of tensor and region.

    Pieces that do not begin at a 16-byte boundary form groups of their own, because kernels are faster without them.
    """
    most = LARGE_BYTES if piece_bytes is None else piece_bytes
    for runs in all_runs:
        pieces = runs.pieces(most // runs.dtype.width)
        aligned = pieces.aligned
        for selected in (aligned, ~aligned):
            which = np.flatnonzero(selected)
            if not which.size:
                continue
            size = pieces.numel[which] * pieces.dtype.width
            total = int(size.sum())
            share = (np.cumsum(size) - size) * -(-total // GROUP_BYTES) // max(total, 1)
            for group in np.split(which, np.flatnonzero(np.diff(share)) + 1):
                yield pieces.select(group)


@contextmanager
def warming() -> Iterator[None]:
    """Compile kernels inside on one thread at a time, and unseen by whoever watches Triton for it."""
    with _warming, gpu.warmup.unwatched():
        yield


def warm_up(weights: LocalWeights, new: LocalWeights | None = None) -> None:
    """Compile the kernels that syncs of weights on GPUs need, and comparisons of them with new ones.

    Copies of the weights, which are aligned, are written and compared, too: by a publisher whose baseline goes on, and
    by receivers that are several versions behind.
    """
    own = split_by_gpu(weights.places, weights, with_rows=True)[1]
    compared = [] if new is None else split_by_gpu(weights.places, weights, new)[1]
    kinds = {
        (runs.dtype, runs.device, aligned, runs.is_cast, runs.has_rows)
        for runs in (*own, *compared)
        for aligned in {*runs.aligned.tolist(), True}
    }
    if not kinds or gpu.changes.INTERPRETED:
        return
    with warming():
        for dtype, device, aligned, is_cast, has_rows in kinds - _warm:
            order = {"sign_magnitude": dtype.sign_magnitude, "signed": dtype.signed, "has_rows": has_rows}
            with on_stream(weights, device):
                gpu.warmup.warm_up(dtype.width, device, aligned=aligned, is_cast=is_cast, **order)
                if device.type == "cuda":
                    torch.cuda.current_stream(device).synchronize()
            _warm.add((dtype, device, aligned, is_cast, has_rows))


def write(weights: LocalWeights, place: Place, bits: UIntArray) -> bool:
    """Write all bits of a place on a GPU; False if it does not lie on one."""
    destination = _bits_on_gpu(weights, place)
    if destination is None:
        return False
    with on_stream(weights, destination.device), torch.no_grad():
        destination.copy_(upload(bits, destination.device).view(destination.shape))
        if (stream := weights.gpu_streams[destination.device]) is not None:
            stream.synchronize()
    return True


def swap(weights: LocalWeights, others: LocalWeights, place: Place) -> bool:
    """Exchange the bits that two sets of weights have at a place; False if they do not lie on one GPU.

    What is launched is in order with other work on the stream of the weights; it may not be done yet.
    """
    ends = [_bits_on_gpu(local, place) for local in (weights, others)]
    first, second = ends
    if first is None or second is None or first.device != second.device:
        return False
    with on_stream(weights, first.device), torch.no_grad():
        old = first.clone()
        first.copy_(second)
        second.copy_(old)
    return True


def _bits_on_gpu(weights: LocalWeights, place: Place) -> torch.Tensor | None:
    """The bits of a place as integers, in their own memory; None if they do not lie on a GPU."""
    memory, local = weights.locate(*place)
    tensor = gpu_tensor(memory)
    if tensor is None:
        return None
    bits: torch.Tensor = tensor.detach().view(INTS[memory.dtype.width])
    return bits if local is None else bits[local.slices]


def finish(weights: LocalWeights) -> None:
    """Wait until every stream can see what was written to the weights."""
    for stream in weights.gpu_streams.values():
        if stream is not None:
            stream.synchronize()
