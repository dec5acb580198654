"""The weights that one process has in memory: whole tensors or shards, read by batch or by region."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import cache, cached_property
from typing import Any, TypeVar

import numpy as np

from ..errors import TensorMismatch
from ..kernels import gpu
from .batches import Batch
from .boxes import Boxes
from .columns import Columns, PlainMemories, find_gpus, look_at, owners
from .dtypes import UIntArray
from .geometry import Geometry, dot
from .known import KnownTensors, collector_paused, find_known, find_known_dict, remember
from .memory import Memory, Weights, tied_groups
from .objects import ObjectArray
from .region import Numbers, Region, all_whole, collapse, row_major, whole
from .shards import Place, Shards
from .staging import LazyBits, cast_origin, gpu_tensor
from .table import TensorTable
from .tensors import memories, name_order, require_mapping, require_writable, table_like, table_of

T = TypeVar("T")


class _Parts:
    """The parts of some weights, column by column. Several `LocalWeights` share it: nothing in it changes but `kept`.

    Attributes:
        table: The table of the whole weights.
        places: Each part's place in the weights, in table order.
        memories: Its memory.
        whole: The memory of each tensor that is here as a whole.
        address: Its address.
        contiguous: Whether it is contiguous in host memory.
        gpu_number: Which GPU with kernels it lies on, contiguous and not to be cast; -1 for none.
        devices: The GPUs that parts lie on, or are cast on.
        is_complete: Whether these are all tensors of the table, whole.
        is_plain: Whether none of them is odd: all are whole and contiguous, in host memory or on GPUs.
        kept: What was worked out from them, by name.
    """

    def __init__(
        self,
        table: TensorTable,
        places: list[Place],
        memories: Sequence[Memory],
        whole: Sequence[Memory | None],
        devices: list[Any],
    ) -> None:
        self.table = table
        self.places = places
        self.memories = memories
        self.whole = whole
        self.is_complete = places is table.places
        self.is_plain = isinstance(whole, PlainMemories)
        self.kept: dict[str, Any] = {}
        self.devices = devices
        if isinstance(whole, PlainMemories):
            has_kernels = np.array([*map(_runs_kernels, devices), False], bool)
            self.gpu_number = np.where(has_kernels[whole.gpus], whole.gpus, -1)
            self.address = whole.addresses
            self.contiguous = whole.gpus < 0
        else:
            self.gpu_number = np.full(len(table), -1, np.int64)
            self.address = np.array([0 if memory is None else memory.address for memory in whole], np.int64)
            self.contiguous = np.array([memory is not None and memory.strides is None for memory in whole], bool)
        self.all_contiguous = bool(self.contiguous.all())
        if not self.is_plain and not self.all_contiguous:
            self._find_gpus()

    @classmethod
    def located(cls, table: TensorTable, located: Iterable[tuple[Place, Memory]]) -> _Parts:
        """Parts at these places."""
        in_order = sorted(located, key=lambda part: part[0][0])
        whole: list[Memory | None] = [None] * len(table)
        for (tensor, region), memory in in_order:
            if region is None:
                whole[tensor] = memory
        is_complete = None not in whole and len(in_order) == len(whole)
        places = table.places if is_complete else [place for place, _ in in_order]
        return cls(table, places, [memory for _, memory in in_order], whole, [])

    def _find_gpus(self) -> None:
        numbers: dict[Any, int] = {}
        runs_kernels = cache(_runs_kernels)
        for (tensor, region), memory in zip(self.places, self.memories, strict=True):
            if memory.strides is not None and (on_gpu := gpu_tensor(memory)) is not None:
                number = numbers.setdefault(on_gpu.device, len(numbers))
                if region is None and on_gpu.is_contiguous() and runs_kernels(on_gpu.device):
                    self.gpu_number[tensor] = number
            elif (origin := cast_origin(memory)) is not None:
                numbers.setdefault(origin.device, len(numbers))
        self.devices = list(numbers)

    @cached_property
    def elements(self) -> int:
        if self.is_complete:
            return self.table.elements
        return sum(math.prod(memory.shape) for memory in self.memories)

    @cached_property
    def nbytes(self) -> int:
        if self.is_complete:
            return self.table.dense_bytes
        return sum(math.prod(memory.shape) * memory.dtype.width for memory in self.memories)

    @cached_property
    def tied(self) -> list[list[int]]:
        if self._lie_apart():
            return []
        named = self.named()
        number = {name: tensor for name, (tensor, _) in zip(named, self.places, strict=True)}
        return [[number[name] for name in group] for group in tied_groups(named)]

    def _lie_apart(self) -> bool:
        """Whether all tensors are whole and contiguous, and none begins before another one ends."""
        if not self.is_complete or not (self.contiguous | (self.gpu_number >= 0)).all():
            return False
        order = np.argsort(self.address, kind="stable")
        order = order[self.table.numel[order] > 0]
        end = self.address + self.table.numel * self.table.widths
        return bool((end[order][:-1] <= self.address[order][1:]).all())

    def named(self) -> dict[str, Memory]:
        """Every part's memory under a unique name: the tensor's, followed by the region if it is not whole."""
        specs = self.table.specs
        return {
            specs[tensor].name + ("" if region is None else str(region)): memory
            for (tensor, region), memory in zip(self.places, self.memories, strict=True)
        }

    @cached_property
    def parts_of(self) -> list[list[int]]:
        """The parts of each tensor, by their indices in `places`."""
        parts_of: list[list[int]] = [[] for _ in self.whole]
        for i, (tensor, _) in enumerate(self.places):
            parts_of[tensor].append(i)
        return parts_of


def _runs_kernels(device: Any) -> bool:
    return gpu.support.obstacle(device) is None


def _look(names: tuple[str, ...], tensors: ObjectArray, columns: Columns | None) -> _Parts | None:
    """The parts of weights whose names, tensors and columns are given in table order; None if one tensor is odd."""
    if columns is None or columns.strides is not None or not len(tensors):
        return None
    gpus = find_gpus(tensors, columns)
    if gpus is None:
        return None
    table = table_like(names, columns.forms)
    plain = PlainMemories(table.specs, columns, gpus[0], list(owners(tensors)))
    return _Parts(table, table.places, plain, plain, gpus[1])


def _look_at_each(weights: Weights) -> _Parts:
    """The parts of weights, some of which may be odd."""
    memory_by_name = memories(weights)
    table = table_of(memory_by_name)
    return _Parts.located(table, zip(table.places, map(memory_by_name.__getitem__, table.names), strict=True))


def _look_at_all(weights: Weights) -> tuple[_Parts, KnownTensors | None]:
    """The parts of weights, and what is to be kept so that they are known."""
    # Only of a dict it is certain that `values` are what it has, in this order. Others may change it meanwhile.
    snapshot = weights.copy() if type(weights) is dict else None
    names = tuple(weights if snapshot is None else snapshot)
    tensor_of = map(weights.get, names) if snapshot is None else snapshot.values()
    values = np.fromiter(tensor_of, object, len(names))
    known = find_known(names, values)
    if known is not None:
        return known.found, known
    in_order, order = name_order(names)
    tensors = values[order]
    columns = look_at(tensors)
    parts = _look(in_order, tensors, columns) or _look_at_each(dict(zip(names, values, strict=True)))
    return parts, remember(names, values, order, columns, parts)


class LocalWeights:
    """The parts of some weights that this process has, and where each of them lies.

    Attributes:
        table: The table of the whole weights.
        gpu_streams: The GPUs that parts lie on, each with the CUDA stream for work there (None without CUDA).
        known: Keeps what is known of the tensors, for the next time that they are looked at.
    """

    def __init__(self, table: TensorTable, parts: Iterable[tuple[Place, Memory]] | _Parts) -> None:
        self.table = table
        self.known: KnownTensors | None = None
        self._parts = parts if isinstance(parts, _Parts) else _Parts.located(table, parts)
        self.gpu_streams: dict[Any, Any] = dict.fromkeys(self._parts.devices)
        self.follow_current_streams()

    @classmethod
    def of(
        cls,
        weights: Weights | Shards | LocalWeights,
        table: TensorTable | None = None,
        table_label: str = "old",
        weights_label: str = "new",
    ) -> LocalWeights:
        """The weights or shards given; if a table is given, they must have exactly its tensors.

        The labels name the two sides in the error about a difference. Tensors of which some `LocalWeights` exist are
        only looked at again if they have moved; those of `LocalWeights` that are given are taken as they were.
        """
        if isinstance(weights, Shards | LocalWeights):
            if table is not None:
                table.require(weights.table, table_label, weights_label)
            parts = weights.located() if isinstance(weights, Shards) else weights._parts  # noqa: SLF001  # of this class
            return cls(weights.table, parts)
        require_mapping(weights)
        with collector_paused():
            known = find_known_dict(weights) if type(weights) is dict else None
            tensor_parts, known = _look_at_all(weights) if known is None else (known.found, known)
            if table is not None:
                table.require(tensor_parts.table, table_label, weights_label)
            local = cls(tensor_parts.table, tensor_parts)
            local.known = known
        return local

    @property
    def has_kernels(self) -> bool:
        """Whether there are GPUs among those that parts lie on which kernels run on."""
        return any(gpu.support.obstacle(device) is None for device in self.gpu_streams)

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
        return self._parts.places

    @property
    def parts(self) -> list[tuple[Place, Memory]]:
        """Each part's place in the weights and its memory, in table order."""
        return [*zip(self._parts.places, self._parts.memories, strict=True)]

    @property
    def complete(self) -> bool:
        """Whether every tensor of the table is here, whole."""
        return self._parts.is_complete

    @property
    def elements(self) -> int:
        """Elements of all parts."""
        return self._parts.elements

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return self._parts.nbytes

    @property
    def tied(self) -> list[list[int]]:
        """Groups of tensors that share memory, by their numbers.

        Raises:
            TiedConflict: Tensors share some of their memory without being the same.
        """
        return self._parts.tied

    def lies_where(self, other: LocalWeights) -> bool:
        """Whether these are the same parts as others, in the same memory, read in the same way."""
        mine = self._parts
        theirs = other._parts
        return mine is theirs or (
            mine.table == theirs.table
            and mine.places == theirs.places
            and [memory[:-1] for memory in mine.memories] == [memory[:-1] for memory in theirs.memories]
        )

    def require_writable(self, tensors: Collection[int] | None = None) -> None:
        """Refuse weights that a patch cannot be written to; with `tensors`, only these are looked at.

        Raises:
            UnsupportedTensor: A tensor is read-only, cast, or has elements that share an address.
        """
        memories = self._parts.memories
        if isinstance(memories, PlainMemories) and memories.are_writable:
            return
        require_writable(
            (self.table[tensor].name, memory)
            for (tensor, _), memory in zip(self.places, memories, strict=True)
            if tensors is None or tensor in tensors
        )

    def without_lazy_bits_of(self, other: LocalWeights, places: Sequence[Place]) -> Sequence[Place]:
        """Places but for those where both weights have the very same `LazyBits`, which need not be compared."""
        if self._parts.is_plain or other._parts.is_plain:
            return places  # there are none
        own = {id(memory.owner) for _, memory in self.parts if isinstance(memory.owner, LazyBits)}
        if own.isdisjoint(id(memory.owner) for _, memory in other.parts):
            return places
        return [place for place in places if self.locate(*place)[0].owner is not other.locate(*place)[0].owner]

    def kept(self, name: str, work_out: Callable[[], T]) -> T:
        """What depends on where the parts lie and on nothing else: it is worked out once for all weights like these."""
        results = self._parts.kept
        if name not in results:
            results[name] = work_out()
        result: T = results[name]
        return result

    def memory_by_name(self) -> dict[str, Memory]:
        """Every part's memory under a unique name: the tensor's, followed by the region if it is not whole."""
        return self._parts.named()

    def part_index(self, tensor: int, region: Region | None) -> int:
        """The index in `parts` of the part that contains a region of a tensor."""
        for i in self._parts.parts_of[tensor]:
            origin = self._parts.places[i][1]
            if origin is None or (region is not None and region.inside(origin)):
                return i
        where = "" if region is None else f", region {region},"
        raise TensorMismatch(f"tensor {self.table.specs[tensor].name!r}{where} is not among the weights in memory")

    def locate(self, tensor: int, region: Region | None) -> tuple[Memory, Region | None]:
        """The memory that contains a region of a tensor, and the region in that memory's coordinates (None: all)."""
        if (memory := self._parts.whole[tensor]) is not None:
            return memory, region
        index = self.part_index(tensor, region)
        origin = self._parts.places[index][1]
        memory = self._parts.memories[index]
        if origin is None or region is None:
            return memory, region
        if region == origin:
            return memory, None
        return memory, Region(tuple(a - o for a, o in zip(region.start, origin.start, strict=True)), region.size)

    def read(self, batch: Batch) -> tuple[Numbers, list[object]]:
        """Addresses of the bits of a batch's regions in row-major order, and the objects that keep them valid."""
        addresses = self._parts.address[batch.tensor]
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
        is_run = self._parts.contiguous[tensor] & (g.dims == 1) & (g.memory_strides[:, 0] == 1)
        addresses[is_run] = g.address[is_run]
        return np.flatnonzero(~is_run).tolist()

    def in_place(self, batch: Batch, addresses: Numbers) -> bool:
        """Whether the addresses that `read` gave are the weights' own memory, not copies."""
        g = self.geometry(batch.tensor, batch.region)
        return bool((g.dims == 1).all() and (g.memory_strides[:, 0] == 1).all() and (g.address == addresses).all())

    def gpu_addresses(self, tensor: Numbers, devices: list[Any]) -> tuple[Numbers, Numbers]:
        """Which of the GPUs each tensor lies on, whole and contiguous (-1: on none of them), and its address."""
        numbers = [devices.index(device) if device in devices else -1 for device in self.gpu_streams]
        return np.array([*numbers, -1], np.int64)[self._parts.gpu_number[tensor]], self._parts.address[tensor]

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
        geometry.address = self._parts.address[tensor]
        if isinstance(regions, Boxes) and tensor.size:
            geometry.set_boxes(regions, (regions.first >= 0) & self._parts.contiguous[tensor])
            geometry.address += self.table.specs[int(tensor[0])].dtype.width * geometry.start
        for row in self._irregular_rows(tensor, regions):
            self._set_row(geometry, row, int(tensor[row]), regions[row])
        return geometry

    def _irregular_rows(self, tensor: Numbers, regions: Sequence[Region | None]) -> list[int]:
        """Rows that are not simply all of a contiguous tensor."""
        if isinstance(regions, Boxes):
            return np.flatnonzero(~self._parts.contiguous[tensor]).tolist()
        if self._parts.all_contiguous:
            return [] if all_whole(regions) else [row for row, region in enumerate(regions) if region is not None]
        contiguous = self._parts.contiguous[tensor].tolist()
        return [row for row, region in enumerate(regions) if region is not None or not contiguous[row]]

    def _set_row(self, geometry: Geometry, row: int, tensor: int, region: Region | None) -> None:
        """Fill a row with a box, or with a tensor that is not contiguous."""
        spec = self.table.specs[tensor]
        if region is not None and self._parts.contiguous[tensor] and geometry.set_run(row, region, spec.shape):
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
