"""Weights that are quantized when they are read, region by region: of quantized tensors only scales are kept.

    weights ──► largest magnitudes ──► scales, kept ──► a region is read: its elements / scales, in a staging buffer

Two views with the same scales, over equal bits, give the same codes. So a publisher that has the unquantized bits of a
version needs no quantized copy of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..weights.dtypes import BY_NAME, UIntArray
from ..weights.memory import Weights
from ..weights.region import Region, Shape, whole
from ..weights.shards import Part, Shards
from ..weights.staging import LazyBits
from ..weights.tensors import memory_of, tensor_table
from .block_codes import BlockGrid, BlockScales, block_scales, global_scales, write_codes
from .quantize_plan import QuantizationPlan, QuantizedPart
from .quantized_changes import integers
from .schemes import Blockwise

PartKey = tuple[str, Region]  # a part by its tensor and its region
_COMPARED = 1 << 18  # elements that are compared at a time, to find out whether a part has changed at all


@dataclass(frozen=True)
class ViewedPart:
    """A part that is quantized when it is read.

    Attributes:
        part: the part, with its scales; its codes are `LazyBits`.
        data: what is quantized: a torch tensor, or `LazyBits` of one.
        divisor: what elements are divided by, for each block that the part touches.
    """

    part: QuantizedPart
    data: Any
    divisor: torch.Tensor

    @property
    def key(self) -> PartKey:
        """Which part it is."""
        return self.part.tensor, self.part.region

    def has_data(self, data: Any) -> bool:
        """Whether other data have the same bits."""
        if data is self.data:
            return True
        boxes = whole(self.part.region.size).split(_COMPARED)
        return all(_equal(_read(self.data, box), _read(data, box)) for box in boxes)

    def has_scales(self, scales: BlockScales, per_matrix: torch.Tensor | None) -> bool:
        """Whether other scales have the same bits."""
        if self.part.global_scales is not None and not _equal(self.part.global_scales, per_matrix):
            return False
        return _equal(self.part.scales, scales.stored) and _equal(self.divisor, scales.divisor)


class QuantizedView:
    """Some weights, quantized when they are read.

    Attributes:
        weights: all of them by name, or shards: codes, scales, and the tensors that are not quantized as they are.
    """

    def __init__(self, plan: ViewPlan, viewed: Sequence[ViewedPart], shards: Shards, *, sharded: bool) -> None:
        self._plan = plan
        self._sharded = sharded
        self.viewed = {viewed_part.key: viewed_part for viewed_part in viewed}
        parts = [part for part in shards.parts if part.tensor not in plan.grids]
        for viewed_part in viewed:
            parts += plan.results(viewed_part.part)
        self.weights: Weights | Shards = (
            Shards(plan.table, parts) if sharded else {part.tensor: part.data for part in parts}
        )

    def over(self, weights: Weights | Shards) -> QuantizedView:
        """The same view of other memory, which has the bits of the weights that this one was made of."""
        shards = as_shards(weights)
        pairs = [(self.viewed.get((part.tensor, part.region)), part.data) for part in shards.parts]
        viewed = [self._plan.viewed(before.part, data, before.divisor) for before, data in pairs if before is not None]
        return QuantizedView(self._plan, viewed, shards, sharded=self._sharded)


class ViewPlan(QuantizationPlan):
    """How the parts of one process are quantized when they are read: everything is measured, and nothing is written.

    Args:
        scheme: how they are quantized.
        shards: the parts.
    """

    def __init__(self, scheme: Blockwise, shards: Shards) -> None:
        super().__init__(scheme, shards)
        self._unchanged: dict[PartKey, ViewedPart] = {}

    def compare(self, parts: Sequence[Part], base: QuantizedView | None) -> None:
        """Find the parts that have the bits which they have in another view: these are not quantized anew."""
        viewed = {} if base is None else base.viewed
        keys = ((part.tensor, part.region) for part in parts)
        pairs = [(viewed[key], part.data) for key, part in zip(keys, parts, strict=True) if key in viewed]
        self._unchanged = {before.key: before for before, data in pairs if before.has_data(data)}

    def view(
        self, shards: Shards, largest: torch.Tensor, names: Sequence[str], cut: torch.Tensor, *, sharded: bool
    ) -> QuantizedView:
        """What `quantize` would write, which has the same arguments."""
        cut_blocks = self._by_tensor(names, cut)
        viewed = []
        for part in self._parts:
            blocks = self._magnitudes.pop(part.number, None)
            if not part.is_aligned:
                blocks = cut_blocks[part.tensor][part.grid.touched(part.region).slices]
            viewed.append(self._viewed_part(part, shards.parts[part.number].data, blocks, largest))
        self._unchanged = {}
        return QuantizedView(self, viewed, shards, sharded=sharded)

    def viewed(self, part: QuantizedPart, data: Any, divisor: torch.Tensor) -> ViewedPart:
        """A part whose elements are quantized when they are read."""
        divisor = divisor.to(_device_of(data))
        shape = self.code_shape(part.region)
        fill = _Codes(data, part.region, part.grid, divisor, self._scheme)
        lazy = LazyBits(BY_NAME[self._scheme.element_dtype], shape, fill, None, pinned=divisor.is_cuda)
        return ViewedPart(replace(part, codes=lazy), data, divisor)

    def _viewed_part(
        self, part: QuantizedPart, data: Any, blocks: torch.Tensor | None, largest: torch.Tensor
    ) -> ViewedPart:
        before = self._unchanged.get((part.tensor, part.region))
        if blocks is None:
            assert before is not None  # all others are measured
            return before
        per_matrix = None
        if part.global_scales is not None:
            per_matrix = global_scales(largest[self._numbers(part)].view(part.global_scales.shape)).to(blocks.device)
        scales = block_scales(blocks, self._scheme, None if per_matrix is None else per_matrix[..., None])
        if before is not None and before.has_scales(scales, per_matrix):
            return before
        scaled = replace(part, scales=scales.stored, global_scales=per_matrix)
        return self.viewed(scaled, data, scales.divisor)

    def _is_measured_first(self, part: QuantizedPart) -> bool:
        has_own_scales = part.is_aligned and part.global_scales is None
        return not (has_own_scales and (part.tensor, part.region) in self._unchanged)

    def _new_codes(self, shape: Shape, device: torch.device) -> torch.Tensor:  # noqa: ARG002  # none are kept
        return torch.empty(0, dtype=torch.uint8, device=device)


@dataclass(frozen=True)
class _Codes:
    """Writes the codes of a region of a part, as `LazyBits` ask for them."""

    data: Any
    region: Region
    grid: BlockGrid
    divisor: torch.Tensor
    scheme: Blockwise

    def __call__(self, box: Region, out: UIntArray) -> None:
        if self.scheme.is_packed:
            box = Region((*box.start[:-1], box.start[-1] * 2), (*box.size[:-1], box.size[-1] * 2))
        start = tuple(a + b for a, b in zip(self.region.start, box.start, strict=True))
        region = Region(start, box.size)
        touched = self.grid.touched(region)
        first = self.grid.touched(self.region).start
        blocks = Region(tuple(a - b for a, b in zip(touched.start, first, strict=True)), touched.size)
        codes = torch.from_numpy(out.view("i1")).view(getattr(torch, self.scheme.element_dtype))
        with torch.no_grad():
            x = _read(self.data, box)
            on_device = codes if x.device == codes.device else torch.empty_like(codes, device=x.device)
            write_codes(x, region, self.grid, self.divisor[blocks.slices], self.scheme, on_device)
            if on_device is not codes:
                codes.copy_(on_device)


def as_shards(weights: Weights | Shards) -> Shards:
    """Weights as shards whose data are torch tensors, or `LazyBits`, in the same memory."""
    shards = weights if isinstance(weights, Shards) else Shards.of(tensor_table(weights), weights)
    return Shards(shards.table, [replace(part, data=_as_torch(part), marks=None) for part in shards.parts])


def _as_torch(part: Part) -> Any:
    if isinstance(part.data, torch.Tensor | LazyBits):
        return part.data
    memory = memory_of(part.tensor, part.data)._replace(writable=True)  # torch warns of others, though none is written
    signed = memory.view().view(f"i{memory.dtype.width}")
    return torch.from_numpy(signed).view(getattr(torch, memory.dtype.name))


def _read(data: Any, box: Region) -> torch.Tensor:
    """A region of a torch tensor, or of the one that `LazyBits` are cast from, on its device."""
    tensor = data.origin if isinstance(data, LazyBits) else data
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)  # this thread has another stream than whoever wrote the tensor
    part: torch.Tensor = tensor.detach()[box.slices]
    return part.contiguous().to(getattr(torch, data.dtype.name)) if isinstance(data, LazyBits) else part


def _device_of(data: Any) -> torch.device:
    device: torch.device = (data.origin if isinstance(data, LazyBits) else data).device
    return device


def _equal(a: torch.Tensor, b: torch.Tensor | None) -> bool:
    """Whether two tensors of the same shape have the same bits."""
    return b is not None and torch.equal(integers(a), integers(b.to(a.device)))
