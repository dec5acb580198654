"""Weights cut into the pieces that threads work on, and where the elements of a region lie."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import TensorMismatch
from .boxes import Boxes, corners
from .dtypes import DType, UIntArray
from .memory import Memory, Weights, far_tensor, leading, memories, require_like, table_of
from .region import Region, Shape, collapse, row_major, whole
from .shards import Place, Shards
from .table import TensorTable

PIECE_BYTES = 64 << 20  # large enough to amortize Python, small enough to balance threads
Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Batch:
    """Parts of tensors of one dtype that one thread handles at a time, column by column.

    `offset` counts the elements of a part's place that stand before it, where a place was cut into several parts.
    """

    dtype: DType
    tensor: Numbers
    region: Sequence[Region | None]
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
    """Weights at hand: whole tensors, or boxes of them where they are shards."""

    def __init__(self, table: TensorTable, parts: Iterable[tuple[Place, Memory]]) -> None:
        self.table = table
        self.parts = sorted(parts, key=lambda part: part[0][0])
        self._of: list[list[int]] = [[] for _ in table.specs]
        self._whole: list[Memory | None] = [None] * len(table)
        address, plain, home = [0] * len(table), [False] * len(table), [-1] * len(table)
        number: dict[Any, int] = {}
        for i, ((tensor, region), memory) in enumerate(self.parts):
            self._of[tensor].append(i)
            if memory.strides is not None and (there := far_tensor(memory)) is not None:
                its = number.setdefault(there.device, len(number))
                if region is None and there.is_contiguous():
                    home[tensor] = its
            if region is None:
                self._whole[tensor] = memory
                address[tensor], plain[tensor] = memory.address, memory.strides is None
        self.devices: dict[Any, Any] = dict.fromkeys(number)  # where parts are, and the stream for what is done there
        self._home = np.array(home, np.int64)  # the device that a tensor lies on, whole and contiguous, by its number
        self._address = np.array(address, np.int64)
        self._plain = np.array(plain, bool)  # whole and contiguous: it can be read where it lies
        self._all_plain = all(plain)
        self.begin()

    @classmethod
    def of(
        cls, weights: Weights | Shards, table: TensorTable | None = None, ours: str = "old", theirs: str = "new"
    ) -> Held:
        """Weights or shards, which must be of just the tensors of `table` where one is given."""
        if isinstance(weights, Shards):
            if table is not None:
                table.require(weights.table, ours, theirs)
            return cls(weights.table, weights.located())
        memory = memories(weights)
        if table is None:
            table = table_of(memory)
        else:
            require_like(table, memory, ours, theirs)
        return cls(table, [((i, None), memory[spec.name]) for i, spec in enumerate(table.specs)])

    def begin(self) -> None:
        """From now on, what any thread does with parts on devices comes behind what this thread gave them to do."""
        for device in self.devices:
            if device.type == "cuda":
                import torch

                self.devices[device] = torch.cuda.current_stream(device)
                self.devices[device].wait_stream(torch.cuda.default_stream(device))

    @property
    def places(self) -> list[Place]:
        """What is at hand, in table order."""
        return [place for place, _ in self.parts]

    @property
    def complete(self) -> bool:
        """Whether every tensor is there as a whole."""
        return len(self.parts) == len(self.table) and all(region is None for (_, region), _ in self.parts)

    def named(self) -> dict[str, Memory]:
        """Every part, under a name of its own: the tensor's, with the region if it is not all of it."""
        specs = self.table.specs
        return {specs[t].name + ("" if region is None else str(region)): memory for (t, region), memory in self.parts}

    def part(self, tensor: int, region: Region | None) -> int:
        """The part that has a region of a tensor in it, by its number."""
        for i in self._of[tensor]:
            origin = self.parts[i][0][1]
            if origin is None or (region is not None and region.inside(origin)):
                return i
        where = "" if region is None else f", region {region},"
        raise TensorMismatch(f"tensor {self.table.specs[tensor].name!r}{where} is not among the weights at hand")

    def read(self, batch: Batch) -> tuple[Numbers, list[object]]:
        """Numbers of the parts' bits in row-major order, and what must be kept alive while they are in use."""
        addresses = self._address[batch.tensor]
        alive: list[object] = []
        for i in self._apart(batch.tensor, batch.region, addresses):
            tensor = int(batch.tensor[i])
            memory, local = self.local(tensor, batch.region[i])
            addresses[i], owner = memory.read(local)
            alive.append(owner)
        return addresses, alive

    def _apart(self, tensor: Numbers, regions: Sequence[Region | None], addresses: Numbers) -> list[int]:
        """Entries whose bits do not lie in one run; the addresses of many that do are found together."""
        if not isinstance(regions, Boxes):
            return self._special(tensor, regions)
        g = self.geometry(tensor, regions)
        runs = self._plain[tensor] & (g.dims == 1) & (g.inside[:, 0] == 1)
        addresses[runs] = g.first[runs]
        return np.flatnonzero(~runs).tolist()

    def in_place(self, batch: Batch, addresses: Numbers) -> bool:
        """Whether what `read` gave is the parts' own memory, not copies."""
        g = self.geometry(batch.tensor, batch.region)
        return bool((g.dims == 1).all() and (g.inside[:, 0] == 1).all() and (g.first == addresses).all())

    def on_devices(self, tensor: Numbers, devices: list[Any]) -> tuple[Numbers, Numbers]:
        """Which of the devices tensors lie on, whole and contiguous, -1 where it is none of them; their addresses."""
        number = [devices.index(device) if device in devices else -1 for device in self.devices]
        return np.array([*number, -1], np.int64)[self._home[tensor]], self._address[tensor]

    def bits(self, tensor: int, region: Region | None) -> UIntArray:
        """The bits of one part in row-major order: a view of its memory where that is possible."""
        memory, local = self.local(tensor, region)
        address, owner = memory.read(local)
        numel = math.prod(memory.shape) if local is None else local.numel
        return Memory(memory.dtype, (numel,), address, None, False, owner).view()

    def view(self, tensor: int, region: Region | None) -> UIntArray:
        """The bits of one part where they lie, in its shape."""
        memory, local = self.local(tensor, region)
        return memory.view() if local is None else memory.view()[local.slices]

    def geometry(self, tensor: Numbers, regions: Sequence[Region | None]) -> Geometry:
        """Where the elements of the entries' regions lie, in memory and in their tensors."""
        geometry = Geometry.plain(self.table, tensor)
        geometry.first = self._address[tensor]
        if isinstance(regions, Boxes) and tensor.size:
            geometry.boxes(regions, (regions.first >= 0) & self._plain[tensor])
            geometry.first += self.table.specs[int(tensor[0])].dtype.width * geometry.start
        for e in self._special(tensor, regions):
            self._place(geometry, e, int(tensor[e]), regions[e])
        return geometry

    def _special(self, tensor: Numbers, regions: Sequence[Region | None]) -> list[int]:
        """Entries that are not simply all of a contiguous tensor."""
        if isinstance(regions, Boxes):
            return np.flatnonzero(~self._plain[tensor]).tolist()
        if self._all_plain:
            return [e for e, region in enumerate(regions) if region is not None]
        plain = self._plain[tensor].tolist()
        return [e for e, region in enumerate(regions) if region is not None or not plain[e]]

    def _place(self, geometry: Geometry, e: int, tensor: int, region: Region | None) -> None:
        """Geometry of a box, or of a tensor that is not contiguous."""
        shape = self.table.specs[tensor].shape
        if region is not None and self._plain[tensor] and geometry.run(e, region, shape):
            geometry.first[e] += self.table.specs[tensor].dtype.width * geometry.start[e]
            return
        region = region or whole(shape)
        memory, local = self.local(tensor, region)
        local = local or whole(memory.shape)
        outer = row_major(shape)
        inner = row_major(memory.shape) if memory.strides is None else memory.strides
        geometry.first[e] = memory.address + memory.dtype.width * _dot(local.start, inner)
        geometry.box(e, _dot(region.start, outer), *collapse(region.size, inner, outer))

    def local(self, tensor: int, region: Region | None) -> tuple[Memory, Region | None]:
        """The memory that a region of a tensor is in, and the region in its coordinates; None is all of it."""
        if (there := self._whole[tensor]) is not None:
            return there, region
        (_, origin), memory = self.parts[self.part(tensor, region)]
        if origin is None or region is None:
            return memory, region
        if region == origin:
            return memory, None
        return memory, Region(tuple(a - o for a, o in zip(region.start, origin.start, strict=True)), region.size)


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

    def run(self, e: int, region: Region, shape: Shape) -> bool:
        """Put a region into row `e` that is one run of a contiguous tensor; False where it is not."""
        if (lead := leading(region, shape)) is None:
            return False
        self.start[e], self.size[e, 0] = lead, region.numel
        return True

    def boxes(self, regions: Boxes, which: npt.NDArray[np.bool_]) -> None:
        """Put those of many boxes that are wanted into their rows, as they lie in contiguous tensors."""
        ranks = regions.table.wide.rank[regions.tensor]
        for rank in np.unique(ranks[which]).tolist():
            e = np.flatnonzero(which & (ranks == rank))
            tensor, first, span = regions.tensor[e], regions.first[e], regions.span[e]
            start, stop = corners(regions.table, tensor, first, first + span)
            size = (stop - start).T
            run = size.prod(axis=1) == span + 1
            self.start[e], self.size[e, 0] = first, span + 1
            if run.all():
                continue
            e, size, tensor = e[~run], size[~run], tensor[~run]
            strides = np.ones_like(size)
            for d in reversed(range(rank - 1)):
                strides[:, d] = strides[:, d + 1] * regions.table.wide.sizes[regions.table.wide.at[tensor] + d + 1]
            order = np.argsort(size == 1, axis=1, kind="stable")  # those of one element last: they tell nothing
            self.dims[e] = dims = np.count_nonzero(size > 1, axis=1)
            most = int(dims.max())
            self._widen(most)
            columns = order[:, :most]
            self.size[e, :most] = np.take_along_axis(size, columns, 1)
            self.inside[e, :most] = self.outside[e, :most] = np.take_along_axis(strides, columns, 1)

    def _widen(self, dims: int) -> None:
        """Have room for so many dimensions."""
        missing = dims - self.size.shape[1]
        if missing > 0:
            pad = ((0, 0), (0, missing))
            self.size, self.inside, self.outside = (
                np.pad(a, pad, constant_values=1) for a in (self.size, self.inside, self.outside)
            )

    def box(self, e: int, start: int, size: Shape, strides: tuple[Shape, ...]) -> None:
        """Put a collapsed box with its strides in memory and in the tensor into row `e`."""
        self._widen(len(size))
        self.start[e], self.dims[e] = start, max(1, len(size))
        for column, values in zip((self.size, self.inside, self.outside), (size or (1,), *strides), strict=True):
            column[e, : len(values)] = values


def outline(table: TensorTable, tensor: Numbers, regions: Sequence[Region | None]) -> Geometry:
    """Where the elements of regions lie in their tensors, for bits that were brought into row-major order."""
    geometry = Geometry.plain(table, tensor)
    if isinstance(regions, Boxes):
        geometry.boxes(regions, regions.first >= 0)
        return geometry
    for e, region in enumerate(regions):
        shape = table.specs[int(tensor[e])].shape
        if region is not None and not geometry.run(e, region, shape):
            strides = row_major(shape)
            size, (outside,) = collapse(region.size, strides)
            geometry.box(e, _dot(region.start, strides), size, (outside, outside))
    return geometry


def _dot(a: Sequence[int], b: Sequence[int]) -> int:
    return sum(x * y for x, y in zip(a, b, strict=True))
