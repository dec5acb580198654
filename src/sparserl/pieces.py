"""Weights cut into the pieces that threads work on, and where the elements of a region lie."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .bits import DType, UIntArray
from .errors import TensorMismatch
from .memory import Memory
from .region import Region, Shape, collapse, row_major, whole
from .table import TensorTable

PIECE_BYTES = 16 << 20  # large enough to amortize Python, small enough to balance threads
Place = tuple[int, Region | None]  # a tensor by its index in the table, and a region of it or all of it
Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Batch:
    """Parts of tensors of one dtype that one thread handles at a time, column by column.

    `offset` counts the elements of a part's place that stand before it, where a place was cut into several parts.
    """

    dtype: DType
    tensor: Numbers
    region: list[Region | None]
    numel: Numbers
    offset: int = 0

    def __len__(self) -> int:
        return len(self.region)

    @property
    def elements(self) -> int:
        return int(self.numel.sum())

    @classmethod
    def of(cls, table: TensorTable, tensor: int, region: Region | None, offset: int = 0) -> Batch:
        """A single part."""
        spec = table.specs[tensor]
        numel = spec.numel if region is None else region.numel
        return cls(spec.dtype, np.array([tensor], np.int64), [region], np.array([numel], np.int64), offset)


def batches(table: TensorTable, places: Iterable[Place], limit: int | None = None) -> Iterator[Batch]:
    """Large tensors in parts of at most `limit` bytes, small ones of one dtype together, in order."""
    limit = PIECE_BYTES if limit is None else limit
    numels = table.numel.tolist()
    drafts: dict[DType, tuple[list[int], list[Region | None], list[int]]] = {}
    room: dict[DType, int] = {}
    for tensor, region in places:
        numel = numels[tensor] if region is None else region.numel
        dtype = table.specs[tensor].dtype
        most = limit // dtype.width
        if not numel:
            continue
        if numel > most:
            offset = 0
            for part in (region or whole(table.specs[tensor].shape)).split(most):
                yield Batch.of(table, tensor, part, offset)
                offset += part.numel
            continue
        if room.get(dtype, 0) < numel:
            if dtype in drafts:
                yield _batch(dtype, *drafts[dtype])
            drafts[dtype], room[dtype] = ([], [], []), most
        tensors, regions, sizes = drafts[dtype]
        tensors.append(tensor)
        regions.append(region)
        sizes.append(numel)
        room[dtype] -= numel
    for dtype, draft in drafts.items():
        yield _batch(dtype, *draft)


def _batch(dtype: DType, tensors: list[int], regions: list[Region | None], sizes: list[int]) -> Batch:
    return Batch(dtype, np.array(tensors, np.int64), regions, np.array(sizes, np.int64))


class Held:
    """Weights at hand, by table index: whole tensors, or one region of each (`origin`) where they are shards."""

    def __init__(
        self, table: TensorTable, memory: Mapping[str, Memory], origin: Mapping[str, Region] | None = None
    ) -> None:
        self.table = table
        self.memory = [memory.get(s.name) for s in table.specs]
        self.origin = [None if origin is None else origin.get(s.name) for s in table.specs]
        self._address = np.array([0 if m is None else m.address for m in self.memory], np.int64)
        plain = [m is not None and m.strides is None for m in self.memory]
        self._plain = np.array(plain, bool)  # contiguous: a whole part can be read where it lies
        self._all_plain = all(plain)

    def places(self) -> list[Place]:
        """What is at hand, in table order."""
        return [(i, self.origin[i]) for i, m in enumerate(self.memory) if m is not None]

    def read(self, batch: Batch) -> tuple[Numbers, list[object]]:
        """Numbers of the parts' bits in row-major order, and what must be kept alive while they are in use."""
        addresses = self._address[batch.tensor]
        alive: list[object] = []
        for i in self._special(batch.tensor, batch.region):
            tensor = int(batch.tensor[i])
            addresses[i], owner = self._memory(tensor).read(self._local(tensor, batch.region[i]))
            alive.append(owner)
        return addresses, alive

    def in_place(self, batch: Batch, addresses: Numbers) -> bool:
        """Whether what `read` gave is the parts' own memory, not copies."""
        g = self.geometry(batch.tensor, batch.region)
        return bool((g.dims == 1).all() and (g.inside[:, 0] == 1).all() and (g.first == addresses).all())

    def bits(self, tensor: int, region: Region | None) -> UIntArray:
        """The bits of one part in row-major order: a view of its memory where that is possible."""
        memory = self._memory(tensor)
        local = self._local(tensor, region)
        address, owner = memory.read(local)
        numel = math.prod(memory.shape) if local is None else local.numel
        return Memory(memory.dtype, (numel,), address, None, False, owner).view()

    def geometry(self, tensor: Numbers, regions: Sequence[Region | None]) -> Geometry:
        """Where the elements of the entries' regions lie, in memory and in their tensors."""
        geometry = Geometry.plain(self.table, tensor)
        geometry.first = self._address[tensor]
        for e in self._special(tensor, regions):
            self._place(geometry, e, int(tensor[e]), regions[e])
        return geometry

    def _special(self, tensor: Numbers, regions: Sequence[Region | None]) -> list[int]:
        """Entries that are not simply all of a contiguous tensor."""
        if self._all_plain:
            return [e for e, region in enumerate(regions) if region is not None]
        plain = self._plain[tensor].tolist()
        return [e for e, region in enumerate(regions) if region is not None or not plain[e]]

    def _place(self, geometry: Geometry, e: int, tensor: int, region: Region | None) -> None:
        """Geometry of a box, or of a tensor that is not contiguous."""
        memory, shape = self._memory(tensor), self.table.specs[tensor].shape
        region = region or whole(shape)
        local = self._local(tensor, region) or whole(memory.shape)
        outer = row_major(shape)
        inner = row_major(memory.shape) if memory.strides is None else memory.strides
        geometry.first[e] = memory.address + memory.dtype.width * _dot(local.start, inner)
        geometry.box(e, _dot(region.start, outer), *collapse(region.size, inner, outer))

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
    first: Numbers
    start: Numbers
    dims: Numbers
    size: Numbers
    inside: Numbers  # strides in memory, in elements
    outside: Numbers  # strides in the tensor, in elements

    @classmethod
    def plain(cls, table: TensorTable, tensor: Numbers) -> Geometry:
        """Of whole, contiguous tensors, wherever they lie."""
        zeros, ones = np.zeros((2, tensor.size), np.int64), np.ones((3, tensor.size), np.int64)
        size = table.numel[tensor].reshape(-1, 1)
        return cls(
            table.keys[tensor], zeros[0], zeros[1], ones[0], size, ones[1].reshape(-1, 1), ones[2].reshape(-1, 1)
        )

    def box(self, e: int, start: int, size: Shape, strides: tuple[Shape, ...]) -> None:
        """Put a collapsed box with its strides in memory and in the tensor into row `e`."""
        missing = len(size) - self.size.shape[1]
        if missing > 0:
            pad = ((0, 0), (0, missing))
            self.size, self.inside, self.outside = (
                np.pad(a, pad, constant_values=1) for a in (self.size, self.inside, self.outside)
            )
        self.start[e], self.dims[e] = start, max(1, len(size))
        for column, values in zip((self.size, self.inside, self.outside), (size or (1,), *strides), strict=True):
            column[e, : len(values)] = values


def outline(table: TensorTable, tensor: Numbers, regions: Sequence[Region | None]) -> Geometry:
    """Where the elements of regions lie in their tensors, for bits that were brought into row-major order."""
    geometry = Geometry.plain(table, tensor)
    for e, region in enumerate(regions):
        if region is not None:
            strides = row_major(table.specs[int(tensor[e])].shape)
            size, (outside,) = collapse(region.size, strides)
            geometry.box(e, _dot(region.start, strides), size, (outside, outside))
    return geometry


def _dot(a: Sequence[int], b: Sequence[int]) -> int:
    return sum(x * y for x, y in zip(a, b, strict=True))
