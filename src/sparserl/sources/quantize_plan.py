"""How the parts of one process are quantized: what is measured first, where results are written, who has which scale.

The process with the first element of a block publishes its scale; so it is with the global scale of a matrix.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from ..errors import UnsupportedTensor
from ..kernels.gpu.ints import INTS
from ..weights import memory
from ..weights.dtypes import BY_NAME
from ..weights.region import Region, Shape, whole
from ..weights.shards import Part, Shards
from ..weights.staging import LazyBits
from ..weights.table import TensorSpec, TensorTable
from .block_codes import BlockGrid, block_scales, global_scales, magnitudes, write_codes
from .quantized_changes import MOST_NOTED, NotedChanges, integers
from .schemes import Blockwise, fused_name


@dataclass(frozen=True)
class QuantizedPart:
    """A part that is quantized, and the memory that the results are written to at every publish.

    Attributes:
        number: its number among all parts of this process.
        tensor: the tensor that it is a part of.
        region: the region of the tensor.
        grid: the blocks of the tensor.
        codes: the quantized elements.
        scales: of the blocks that the part touches.
        global_scales: of the matrices that the part touches; None for schemes without.
        noted: what has changed of codes, scales and global scales, by the name of the tensor, where that is noted.
    """

    number: int
    tensor: str
    region: Region
    grid: BlockGrid
    codes: Any
    scales: torch.Tensor
    global_scales: torch.Tensor | None
    noted: dict[str, NotedChanges] = field(default_factory=dict)

    @property
    def is_aligned(self) -> bool:
        """Whether it consists of whole blocks."""
        return self.grid.is_aligned(self.region)

    @property
    def lead(self) -> Region:
        """Which matrices of the tensor it touches."""
        return Region(self.region.start[:-2], self.region.size[:-2])


class QuantizationPlan:
    """What is done with the parts of one process, as long as it has the same parts on the same devices.

    Args:
        scheme: how they are quantized.
        shards: the parts.
        track: whether changes are noted.

    Raises:
        UnsupportedTensor: a tensor or a part cannot be quantized by the scheme.
    """

    def __init__(self, scheme: Blockwise, shards: Shards, *, track: bool = False) -> None:
        self._scheme = scheme
        self._key = _key(shards)
        self.grids: dict[str, BlockGrid] = {}
        specs: list[TensorSpec] = []
        for spec in shards.table.specs:
            if not spec.numel or not scheme.names(spec):
                specs.append(spec)
                continue
            self.grids[spec.name] = BlockGrid(spec, scheme.block_of(spec))
            specs += self._quantized_specs(spec)
        self.table = TensorTable(specs)
        self._matrices = _number_matrices([grid.spec for grid in self.grids.values()])
        self.matrix_count = max((numbers.stop for numbers in self._matrices.values()), default=0)
        self._parts = [
            self._quantized_part(number, part) for number, part in enumerate(shards.parts) if part.tensor in self.grids
        ]
        self._magnitudes: dict[int, torch.Tensor] = {}
        for part in self._parts if track else ():
            for result in self.results(part):
                is_copy = result.tensor == scheme.scale_name(part.tensor) and not part.is_aligned
                if not is_copy and result.region.numel <= MOST_NOTED:
                    part.noted[result.tensor] = NotedChanges(integers(result.data))

    def fits(self, shards: Shards) -> bool:
        """Whether it is the plan for these parts."""
        return self._key == _key(shards)

    @property
    def signature(self) -> int:
        """A number that all processes have in common which quantize the same tensors."""
        return zlib.crc32(repr([(name, grid.spec.shape, grid.block) for name, grid in self.grids.items()]).encode())

    @property
    def cut(self) -> list[str]:
        """The tensors of which this process has a part that does not consist of whole blocks."""
        names = {part.tensor for part in self._parts if not part.is_aligned}
        return [name for name in self.grids if name in names]

    def incomplete_tensor(self) -> str | None:
        """A tensor of which this process has only some of the elements that have a scale together; None if none is."""
        if self._scheme.has_global_scale and (name := self._incomplete_matrix()) is not None:
            return name
        for name in self.cut:
            grid = self.grids[name]
            counts = np.zeros(grid.size, np.int64)
            for part in self._parts:
                if part.tensor == name:
                    counts[grid.touched(part.region).slices] += grid.counts(part.region)
            if ((counts > 0) & (counts < grid.counts(whole(grid.spec.shape)))).any():
                return name
        return None

    def _incomplete_matrix(self) -> str | None:
        """A tensor with a matrix, or one that engines fuse with it, of which this process has only some elements."""
        missing = np.zeros(self.matrix_count, np.int64)
        touched = np.zeros(self.matrix_count, bool)
        for name, grid in self.grids.items():
            missing[self._matrices[name]] += math.prod(grid.spec.shape[-2:])
        for part in self._parts:
            numbers = self._numbers(part).numpy()
            missing[numbers] -= math.prod(part.region.size[-2:])
            touched[numbers] = True
        for part in self._parts:
            if (touched & (missing > 0))[self._numbers(part).numpy()].any():
                return part.tensor
        return None

    def measure(self, parts: Sequence[Part]) -> torch.Tensor:
        """Measure what must be known before anything is quantized.

        Returns:
            For schemes with global scales, the largest magnitude of each matrix as far as this process has it.
        """
        measured: dict[torch.device, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        self._magnitudes = {}
        for part in self._parts:
            _require_torch(parts[part.number])
            if not self._is_measured_first(part):
                continue
            data = _tensor(parts[part.number])
            blocks = _measured(data, part, self._scheme)
            self._magnitudes[part.number] = blocks
            if part.global_scales is not None:
                intact = blocks.masked_fill(blocks.isinf(), 0.0).amax((-2, -1))
                measured.setdefault(data.device, []).append((self._numbers(part), intact.view(-1)))
        largest = torch.zeros(self.matrix_count)
        for matrices in measured.values():  # one copy to the host for each device
            numbers, values = (torch.cat(column) for column in zip(*matrices, strict=True))
            largest.scatter_reduce_(0, numbers, values.cpu(), "amax")
        return largest

    def _is_measured_first(self, part: QuantizedPart) -> bool:
        """Whether a part is measured before anything is quantized; others are measured when they are quantized."""
        return not part.is_aligned or part.global_scales is not None

    def cut_magnitudes(self, names: Sequence[str], device: torch.device) -> torch.Tensor:
        """The magnitudes of all blocks of some tensors, one tensor behind the other, as far as cut parts have them."""
        flat = torch.zeros(sum(int(np.prod(self.grids[name].size)) for name in names), device=device)
        cut_blocks = self._by_tensor(names, flat)
        for part in self._parts:
            if not part.is_aligned:
                blocks = cut_blocks[part.tensor][part.grid.touched(part.region).slices]
                blocks.copy_(blocks.maximum(self._magnitudes[part.number].to(device)))
        return flat

    def _by_tensor(self, names: Sequence[str], flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """Numbers for all blocks of some tensors, by tensor."""
        by_tensor = {}
        offset = 0
        for name in names:
            size = self.grids[name].size
            stop = offset + int(np.prod(size))
            by_tensor[name] = flat[offset:stop].view(size)
            offset = stop
        return by_tensor

    def quantize(
        self, parts: Sequence[Part], largest: torch.Tensor, names: Sequence[str], cut: torch.Tensor
    ) -> list[Part]:
        """Quantize the parts that were measured.

        Args:
            parts: all parts of this process.
            largest: of all processes, what `measure` gave.
            names: the tensors that are cut.
            cut: of all processes, what `cut_magnitudes` gave for them.

        Returns:
            The parts that are not quantized, and those of quantized elements and scales.
        """
        cut_blocks = self._by_tensor(names, cut)
        quantized = [part for part in parts if part.tensor not in self.grids]
        for part in self._parts:
            blocks = self._magnitudes.pop(part.number, None)
            if not part.is_aligned:
                blocks = cut_blocks[part.tensor][part.grid.touched(part.region).slices].to(part.codes.device)
            self._encode(part, _tensor(parts[part.number]), blocks, largest)
            quantized += [self._marked(part, result) for result in self.results(part)]
        return quantized

    def committed(self) -> None:
        """What was quantized last is a committed version: changes are noted from here."""
        for part in self._parts:
            for noted in part.noted.values():
                noted.clear()

    def _marked(self, part: QuantizedPart, result: Part) -> Part:
        """A part with the old bits of what has changed in it."""
        noted = part.noted.get(result.tensor)
        return result if noted is None else replace(result, marks=noted.old_bits)

    def _encode(
        self, part: QuantizedPart, data: torch.Tensor, blocks: torch.Tensor | None, largest: torch.Tensor
    ) -> None:
        """Write the elements and scales of a part, given the magnitudes of its blocks where they are known."""
        has_kernels = _has_kernels(data, part, self._scheme)
        codes_name = self._scheme.element_name(part.tensor)
        noted = {name: changes for name, changes in part.noted.items() if changes.is_open}
        written = noted.pop(codes_name, None) if has_kernels else None  # compared by the kernel that writes them
        old = {name: changes.bits.clone() for name, changes in noted.items()}
        if part.global_scales is not None:
            matrices = largest[self._numbers(part)].view(part.global_scales.shape)
            part.global_scales.copy_(global_scales(matrices))
        if has_kernels:
            if blocks is None and part.grid.touched(part.region).numel == 1:
                blocks = _measured(data, part, self._scheme)
            self._encode_with_kernels(part, data, blocks, written)
        else:
            self._encode_with_torch(part, data, _measured(data, part, self._scheme) if blocks is None else blocks)
        for name, changes in noted.items():
            changes.add(old[name].bitwise_xor_(changes.bits))

    def _encode_with_kernels(
        self, part: QuantizedPart, data: torch.Tensor, blocks: torch.Tensor | None, noted: NotedChanges | None
    ) -> None:
        """Write the elements and scales of a part, and note which elements have changed, where that is noted."""
        from . import block_kernels

        codes = integers(part.codes)
        difference = None if noted is None else torch.empty_like(codes)
        changed = block_kernels.quantize(
            data, part.grid, self._scheme, codes, integers(part.scales), blocks, part.global_scales, difference
        )
        if noted is not None and difference is not None:
            noted.add(difference, changed)

    def _encode_with_torch(self, part: QuantizedPart, data: torch.Tensor, blocks: torch.Tensor) -> None:
        per_matrix = None if part.global_scales is None else part.global_scales[..., None]
        scales = block_scales(blocks, self._scheme, per_matrix)
        part.scales.copy_(scales.stored)
        write_codes(data, part.region, part.grid, scales.divisor, self._scheme, part.codes)

    def results(self, part: QuantizedPart) -> list[Part]:
        """The parts that a part becomes: its elements, and what it has of scales."""
        scheme = self._scheme
        region = _packed(part.region) if scheme.is_packed else part.region
        results = [Part(scheme.element_name(part.tensor), region, part.codes)]
        touched = part.grid.touched(part.region)
        owned = part.grid.owned(part.region)
        if owned.numel:
            within = Region(tuple(a - b for a, b in zip(owned.start, touched.start, strict=True)), owned.size)
            scales = part.scales if owned == touched else part.scales[within.slices].contiguous()
            if len(self._scale_shape(part.grid)) == 1:
                owned = Region((0,), (1,))
            results.append(Part(scheme.scale_name(part.tensor), owned, scales.view(owned.size)))
        if part.global_scales is not None and part.region.start[-2:] == (0, 0):
            lead = part.lead
            matrices = Region((*lead.start, 0), (*lead.size, 1))
            results.append(Part(scheme.global_scale_name(part.tensor), matrices, part.global_scales))
        return results

    def _numbers(self, part: QuantizedPart) -> torch.Tensor:
        """The numbers of the matrices that a part touches."""
        numbers = self._matrices[part.tensor]
        all_numbers = torch.arange(numbers.start, numbers.stop).view(part.grid.size[:-2])
        return all_numbers[part.lead.slices].reshape(-1)

    def _scale_shape(self, grid: BlockGrid) -> Shape:
        return (1,) if self._scheme.block == (None, None) and len(grid.size) == 2 else grid.size

    def _quantized_specs(self, spec: TensorSpec) -> list[TensorSpec]:
        """The rows of the tensor table for a tensor: its elements and its scales."""
        scheme = self._scheme
        shape = _packed(whole(spec.shape)).size if scheme.is_packed else spec.shape
        scale_shape = self._scale_shape(self.grids[spec.name])
        specs = [
            TensorSpec(scheme.element_name(spec.name), BY_NAME[scheme.element_dtype], shape),
            TensorSpec(scheme.scale_name(spec.name), BY_NAME[scheme.stored_scale_dtype], scale_shape),
        ]
        if scheme.has_global_scale:
            name = scheme.global_scale_name(spec.name)
            specs.append(TensorSpec(name, BY_NAME["float32"], (*spec.shape[:-2], 1)))
        return specs

    def _quantized_part(self, number: int, part: Part) -> QuantizedPart:
        device = _require_torch(part).device
        scheme = self._scheme
        grid = self.grids[part.tensor]
        region = part.region
        if scheme.is_packed and (region.start[-1] % 2 or region.size[-1] % 2):
            raise UnsupportedTensor(
                f"{part.tensor!r}: region {region} begins or ends at an odd column, but a byte has two columns"
            )
        return QuantizedPart(
            number=number,
            tensor=part.tensor,
            region=region,
            grid=grid,
            codes=self._new_codes(self.code_shape(region), device),
            scales=_zeros(grid.touched(region).size, scheme.stored_scale_dtype, device),
            global_scales=torch.zeros((*region.size[:-2], 1), device=device) if scheme.has_global_scale else None,
        )

    def code_shape(self, region: Region) -> Shape:
        """The shape of the codes of a region."""
        return _packed(region).size if self._scheme.is_packed else region.size

    def _new_codes(self, shape: Shape, device: torch.device) -> torch.Tensor:
        """Memory for codes."""
        return _zeros(shape, self._scheme.element_dtype, device)


def _zeros(shape: Shape, dtype: str, device: torch.device) -> torch.Tensor:
    """Zeros of any dtype, made as integers."""
    torch_dtype = getattr(torch, dtype)
    return torch.zeros(shape, dtype=INTS[torch_dtype.itemsize], device=device).view(torch_dtype)


def _packed(region: Region) -> Region:
    """A region in a tensor of bytes that have two columns each."""
    return Region((*region.start[:-1], region.start[-1] // 2), (*region.size[:-1], region.size[-1] // 2))


def _key(shards: Shards) -> tuple[Any, ...]:
    """What a plan depends on."""
    places = [(part.tensor, part.region, _device(part)) for part in shards.parts]
    return shards.table, places


def _device(part: Part) -> Any:
    return getattr(_origin(part), "device", None)


def _origin(part: Part) -> Any:
    """The data of a part before it is cast."""
    return part.data.origin if isinstance(part.data, LazyBits) else part.data


def _require_torch(part: Part) -> torch.Tensor:
    """The tensor that a part is made of."""
    origin = _origin(part)
    if not isinstance(origin, torch.Tensor):
        kind = type(origin).__name__
        raise UnsupportedTensor(f"{part.tensor!r}: only torch tensors can be quantized, not a {kind}")
    return origin


def _tensor(part: Part) -> torch.Tensor:
    """The data of a part as a torch tensor."""
    data: torch.Tensor = part.data.tensor() if isinstance(part.data, LazyBits) else _require_torch(part)
    return data.detach()


def _has_kernels(data: torch.Tensor, part: QuantizedPart, scheme: Blockwise) -> bool:
    """Whether kernels quantize a part."""
    if not memory.is_on_gpu(data):
        return False  # Triton is not needed
    from . import block_kernels

    return block_kernels.fits(data, part.region, part.grid, scheme)


def _measured(data: torch.Tensor, part: QuantizedPart, scheme: Blockwise) -> torch.Tensor:
    """The largest magnitudes of the blocks that a part touches."""
    if not _has_kernels(data, part, scheme):
        return magnitudes(data, part.region, part.grid)
    from . import block_kernels

    return block_kernels.magnitudes(data, part.region, part.grid)


def _number_matrices(specs: Sequence[TensorSpec]) -> dict[str, slice]:
    """Numbers for the matrices of each tensor. Tensors that engines fuse have the same."""
    numbers: dict[str, slice] = {}
    by_tensor: dict[str, slice] = {}
    used = 0
    for spec in specs:
        count = int(np.prod(spec.shape[:-2], dtype=np.int64))
        name = fused_name(spec.name) if len(spec.shape) == 2 else spec.name
        if name not in numbers:
            numbers[name] = slice(used, used + count)
            used += count
        by_tensor[spec.name] = numbers[name]
    return by_tensor
