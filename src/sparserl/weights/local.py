"""The weights that one process has in memory: whole tensors or shards, read by batch or by region."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ..errors import TensorMismatch
from .batches import Batch
from .boxes import Boxes
from .dtypes import UIntArray
from .geometry import Geometry, dot
from .memory import Memory, Weights
from .region import Numbers, Region, collapse, row_major, whole
from .shards import Place, Shards
from .staging import gpu_tensor
from .table import TensorTable
from .tensors import memories, require_like, table_of


class LocalWeights:
    """The parts of some weights that this process has, and where each of them lies.

    Attributes:
        table: The table of the whole weights.
        parts: Each part's place in the weights and its memory, in table order.
        gpu_streams: The GPUs that parts lie on, each with the CUDA stream for work there (None without CUDA).
    """

    def __init__(self, table: TensorTable, parts: Iterable[tuple[Place, Memory]]) -> None:
        self.table = table
        self.parts = sorted(parts, key=lambda part: part[0][0])
        n = len(table)
        self._parts_of: list[list[int]] = [[] for _ in range(n)]
        self._whole: list[Memory | None] = [None] * n
        address = [0] * n
        contiguous = [False] * n
        gpu_number = [-1] * n
        numbers: dict[Any, int] = {}
        for i, ((tensor, region), memory) in enumerate(self.parts):
            self._parts_of[tensor].append(i)
            if memory.strides is not None and (on_gpu := gpu_tensor(memory)) is not None:
                number = numbers.setdefault(on_gpu.device, len(numbers))
                if region is None and on_gpu.is_contiguous():
                    gpu_number[tensor] = number
            if region is None:
                self._whole[tensor] = memory
                address[tensor] = memory.address
                contiguous[tensor] = memory.strides is None
        self.gpu_streams: dict[Any, Any] = dict.fromkeys(numbers)
        self._gpu_number = np.array(gpu_number, np.int64)  # of tensors that lie on a GPU, whole and contiguous
        self._address = np.array(address, np.int64)
        self._contiguous = np.array(contiguous, bool)  # tensors that are whole and contiguous in host memory
        self._all_contiguous = all(contiguous)
        self.follow_current_streams()

    @classmethod
    def of(
        cls,
        weights: Weights | Shards,
        table: TensorTable | None = None,
        table_label: str = "old",
        weights_label: str = "new",
    ) -> LocalWeights:
        """The weights or shards given; if a table is given, they must have exactly its tensors.

        The labels name the two sides in the error about a difference.
        """
        if isinstance(weights, Shards):
            if table is not None:
                table.require(weights.table, table_label, weights_label)
            return cls(weights.table, weights.located())
        memory = memories(weights)
        if table is None:
            table = table_of(memory)
        else:
            require_like(table, memory, table_label, weights_label)
        return cls(table, [((i, None), memory[spec.name]) for i, spec in enumerate(table.specs)])

    def follow_current_streams(self) -> None:
        """Order all later GPU work on these weights, by any thread, behind what this thread has launched so far."""
        for device in self.gpu_streams:
            if device.type == "cuda":
                import torch

                stream = torch.cuda.current_stream(device)
                stream.wait_stream(torch.cuda.default_stream(device))
                self.gpu_streams[device] = stream

    @property
    def places(self) -> list[Place]:
        """The place of every part, in table order."""
        return [place for place, _ in self.parts]

    @property
    def complete(self) -> bool:
        """Whether every tensor of the table is here, whole."""
        return len(self.parts) == len(self.table) and all(region is None for (_, region), _ in self.parts)

    @property
    def elements(self) -> int:
        """Elements of all parts."""
        return sum(math.prod(memory.shape) for _, memory in self.parts)

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(math.prod(memory.shape) * memory.dtype.width for _, memory in self.parts)

    def memory_by_name(self) -> dict[str, Memory]:
        """Every part's memory under a unique name: the tensor's, followed by the region if it is not whole."""
        specs = self.table.specs
        return {specs[t].name + ("" if region is None else str(region)): memory for (t, region), memory in self.parts}

    def part_index(self, tensor: int, region: Region | None) -> int:
        """The index in `parts` of the part that contains a region of a tensor."""
        for i in self._parts_of[tensor]:
            origin = self.parts[i][0][1]
            if origin is None or (region is not None and region.inside(origin)):
                return i
        where = "" if region is None else f", region {region},"
        raise TensorMismatch(f"tensor {self.table.specs[tensor].name!r}{where} is not among the weights in memory")

    def locate(self, tensor: int, region: Region | None) -> tuple[Memory, Region | None]:
        """The memory that contains a region of a tensor, and the region in that memory's coordinates (None: all)."""
        if (memory := self._whole[tensor]) is not None:
            return memory, region
        (_, origin), memory = self.parts[self.part_index(tensor, region)]
        if origin is None or region is None:
            return memory, region
        if region == origin:
            return memory, None
        return memory, Region(tuple(a - o for a, o in zip(region.start, origin.start, strict=True)), region.size)

    def read(self, batch: Batch) -> tuple[Numbers, list[object]]:
        """Addresses of the bits of a batch's regions in row-major order, and the objects that keep them valid."""
        addresses = self._address[batch.tensor]
        owners: list[object] = []
        for row in self._copied_rows(batch.tensor, batch.region, addresses):
            memory, local = self.locate(int(batch.tensor[row]), batch.region[row])
            addresses[row], owner = memory.read(local)
            owners.append(owner)
        return addresses, owners

    def _copied_rows(self, tensor: Numbers, regions: Sequence[Region | None], addresses: Numbers) -> list[int]:
        """Rows whose bits may have to be copied to be read; fills in the addresses of boxes that need no copy."""
        if not isinstance(regions, Boxes):
            return self._irregular_rows(tensor, regions)
        g = self.geometry(tensor, regions)
        is_run = self._contiguous[tensor] & (g.dims == 1) & (g.memory_strides[:, 0] == 1)
        addresses[is_run] = g.address[is_run]
        return np.flatnonzero(~is_run).tolist()

    def in_place(self, batch: Batch, addresses: Numbers) -> bool:
        """Whether the addresses that `read` gave are the weights' own memory, not copies."""
        g = self.geometry(batch.tensor, batch.region)
        return bool((g.dims == 1).all() and (g.memory_strides[:, 0] == 1).all() and (g.address == addresses).all())

    def gpu_addresses(self, tensor: Numbers, devices: list[Any]) -> tuple[Numbers, Numbers]:
        """Which of the GPUs each tensor lies on, whole and contiguous (-1: on none of them), and its address."""
        numbers = [devices.index(device) if device in devices else -1 for device in self.gpu_streams]
        return np.array([*numbers, -1], np.int64)[self._gpu_number[tensor]], self._address[tensor]

    def bits(self, tensor: int, region: Region | None) -> UIntArray:
        """The bits of a region in row-major order: a view of its memory where that is possible."""
        memory, local = self.locate(tensor, region)
        address, owner = memory.read(local)
        numel = math.prod(memory.shape) if local is None else local.numel
        return Memory(memory.dtype, (numel,), address, None, False, owner).view()

    def view(self, tensor: int, region: Region | None) -> UIntArray:
        """The bits of a region in their memory, in the region's shape."""
        memory, local = self.locate(tensor, region)
        return memory.view() if local is None else memory.view()[local.slices]

    def geometry(self, tensor: Numbers, regions: Sequence[Region | None]) -> Geometry:
        """Where the elements of regions lie, in memory and in their tensors."""
        geometry = Geometry.contiguous(self.table, tensor)
        geometry.address = self._address[tensor]
        if isinstance(regions, Boxes) and tensor.size:
            geometry.set_boxes(regions, (regions.first >= 0) & self._contiguous[tensor])
            geometry.address += self.table.specs[int(tensor[0])].dtype.width * geometry.start
        for row in self._irregular_rows(tensor, regions):
            self._set_row(geometry, row, int(tensor[row]), regions[row])
        return geometry

    def _irregular_rows(self, tensor: Numbers, regions: Sequence[Region | None]) -> list[int]:
        """Rows that are not simply all of a contiguous tensor."""
        if isinstance(regions, Boxes):
            return np.flatnonzero(~self._contiguous[tensor]).tolist()
        if self._all_contiguous:
            return [row for row, region in enumerate(regions) if region is not None]
        contiguous = self._contiguous[tensor].tolist()
        return [row for row, region in enumerate(regions) if region is not None or not contiguous[row]]

    def _set_row(self, geometry: Geometry, row: int, tensor: int, region: Region | None) -> None:
        """Fill a row with a box, or with a tensor that is not contiguous."""
        spec = self.table.specs[tensor]
        if region is not None and self._contiguous[tensor] and geometry.set_run(row, region, spec.shape):
            geometry.address[row] += spec.dtype.width * geometry.start[row]
            return
        region = region or whole(spec.shape)
        memory, local = self.locate(tensor, region)
        local = local or whole(memory.shape)
        tensor_strides = row_major(spec.shape)
        memory_strides = row_major(memory.shape) if memory.strides is None else memory.strides
        geometry.address[row] = memory.address + memory.dtype.width * dot(local.start, memory_strides)
        size, strides = collapse(region.size, memory_strides, tensor_strides)
        geometry.set_box(row, dot(region.start, tensor_strides), size, *strides)
