"""Weights cut into the pieces that threads work on, and where the elements of a region lie."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .errors import TensorMismatch
from .memory import Memory
from .region import Region, collapse, row_major, whole
from .table import TensorTable

PIECE_BYTES = 16 << 20  # large enough to amortize Python, small enough to balance threads
Place = tuple[int, Region | None]  # a tensor by its index in the table, and a region of it or all of it
Addresses = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a place that one thread handles at a time; `offset` counts the elements of the place before it."""

    tensor: int
    region: Region | None
    numel: int
    offset: int = 0


def pieces(table: TensorTable, places: Iterable[Place], limit: int = PIECE_BYTES) -> Iterator[list[Piece]]:
    """Batches of one dtype: large tensors in parts of at most `limit` bytes, small ones together, in order."""
    open_batches: dict[int, tuple[list[Piece], int]] = {}
    for tensor, region in places:
        spec = table.specs[tensor]
        numel = int(table.numel[tensor]) if region is None else region.numel
        if not numel:
            continue
        most = limit // spec.dtype.width
        if numel > most:
            offset = 0
            for part in (region or whole(spec.shape)).split(most):
                yield [Piece(tensor, part, part.numel, offset)]
                offset += part.numel
            continue
        batch, held = open_batches.get(spec.dtype.code, ([], 0))
        if held + numel > most:
            yield batch
            batch, held = [], 0
        batch.append(Piece(tensor, region, numel))
        open_batches[spec.dtype.code] = batch, held + numel
    yield from (batch for batch, _ in open_batches.values() if batch)


class Held:
    """Weights at hand, by table index: whole tensors, or one region of each (`origin`) where they are shards."""

    def __init__(
        self, table: TensorTable, memory: Mapping[str, Memory], origin: Mapping[str, Region] | None = None
    ) -> None:
        self.table = table
        self.memory = [memory.get(s.name) for s in table.specs]
        self.origin = [None if origin is None else origin.get(s.name) for s in table.specs]

    def places(self) -> list[Place]:
        """What is at hand, in table order."""
        return [(i, self.origin[i]) for i, m in enumerate(self.memory) if m is not None]

    def read(self, piece: Piece) -> tuple[int, object]:
        """Address of a piece's bits in row-major order, and what keeps it alive."""
        return self._memory(piece.tensor).read(self._local(piece.tensor, piece.region))

    def geometry(self, tensor: Addresses, regions: Sequence[Region | None]) -> Geometry:
        """Where the elements of the entries' regions lie, in memory and in their tensors."""
        n = len(regions)
        geometry = Geometry(
            keys=self.table.keys[tensor],
            first=np.zeros(n, np.int64),
            start=np.zeros(n, np.int64),
            dims=np.ones(n, np.int64),
            size=self.table.numel[tensor].reshape(n, 1),
            inside=np.ones((n, 1), np.int64),
            outside=np.ones((n, 1), np.int64),
        )
        for e, (t, region) in enumerate(zip(tensor.tolist(), regions, strict=True)):
            memory = self._memory(t)
            if region is None and memory.strides is None:
                geometry.first[e] = memory.address
            else:
                self._place(geometry, e, t, region)
        return geometry

    def _place(self, geometry: Geometry, e: int, tensor: int, region: Region | None) -> None:
        """Geometry of a box, or of a tensor that is not contiguous."""
        memory, shape = self._memory(tensor), self.table.specs[tensor].shape
        region = region or whole(shape)
        local = self._local(tensor, region) or whole(memory.shape)
        outer = row_major(shape)
        inner = row_major(memory.shape) if memory.strides is None else memory.strides
        size, (inside, outside) = collapse(region.size, inner, outer)
        geometry.widen(len(size))
        geometry.first[e] = memory.address + memory.dtype.width * _dot(local.start, inner)
        geometry.start[e] = _dot(region.start, outer)
        geometry.dims[e] = max(1, len(size))
        geometry.size[e, : len(size)] = size
        geometry.inside[e, : len(size)] = inside
        geometry.outside[e, : len(size)] = outside

    def _memory(self, tensor: int) -> Memory:
        memory = self.memory[tensor]
        if memory is None:
            raise TensorMismatch(f"tensor {self.table.specs[tensor].name!r} is not among the weights at hand")
        return memory

    def _local(self, tensor: int, region: Region | None) -> Region | None:
        """A region of the tensor in the coordinates of the part at hand; None is all of that part."""
        origin = self.origin[tensor]
        if origin is None or region is None:
            return region
        if region == origin:
            return None
        return Region(tuple(a - o for a, o in zip(region.start, origin.start, strict=True)), region.size)


@dataclass
class Geometry:
    """One row per entry: the address of its first element, its place in the tensor, and the strides of both."""

    keys: npt.NDArray[np.uint64]
    first: Addresses
    start: Addresses
    dims: Addresses
    size: Addresses
    inside: Addresses  # strides in memory, in elements
    outside: Addresses  # strides in the tensor, in elements

    def widen(self, dims: int) -> None:
        """Make room for entries of more dimensions."""
        missing = dims - self.size.shape[1]
        if missing > 0:
            pad = ((0, 0), (0, missing))
            self.size, self.inside, self.outside = (
                np.pad(a, pad, constant_values=1) for a in (self.size, self.inside, self.outside)
            )


def _dot(a: Sequence[int], b: Sequence[int]) -> int:
    return sum(x * y for x, y in zip(a, b, strict=True))
