"""Quantize first, then find changes: what is sent are changes of the bits that the rollout holds, scales included.

A tensor is cut into blocks. The scale of a block is the largest magnitude in it, divided by the largest number that
the quantized format has; every element is divided by the scale of its block and rounded to nearest, ties to even.
All of it is done in float32, one IEEE operation per step, so that the same bits always give the same bits.

- A block of zeros, or of numbers so small that their scale would not be a normal float32, has the scale 1.
- A block with a NaN or an infinity in it has the scale NaN and zeros: what is broken stays so after dequantizing.

Of shards, every process quantizes its own. Where blocks are cut, the processes agree on the largest magnitudes by an
all_reduce, and compute the same scales; the scale of a block belongs to the process that has its first element. Before
it, by one of a few numbers, each learns whether all have got so far: a process that failed is not waited for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..errors import TensorMismatch, UnsupportedTensor, WeightsError
from ..weights.dtypes import BY_NAME
from ..weights.memory import Weights
from ..weights.region import Region, Shape, whole
from ..weights.shards import Part, Shards
from ..weights.staging import LazyBits
from ..weights.table import TensorSpec, TensorTable
from ..weights.tensors import tensor_table
from .modules import Source, module

Function = Callable[[str, Any], Mapping[str, Any]]

_BAND = 1 << 18  # elements that are worked on at a time, so that they stay in the cache
_FLOATS = frozenset(("bfloat16", "float16", "float32"))
_LARGEST = {"float8_e4m3fn": 448.0, "int8": 127.0}


def linear_weights(spec: TensorSpec) -> bool:
    """Whether a tensor is the weight of a linear layer, by its name and shape.

    Embeddings, norms, the output layer and what routes tokens to experts are not: checkpoints with quantized weights
    leave them as they are.
    """
    *_, owner, last = ("", *spec.name.split("."))
    kept = owner in ("lm_head", "wte", "wpe", "shared", "score", "classifier") or owner.endswith(("gate", "router"))
    kept = kept or "embed" in owner or "norm" in owner
    return last == "weight" and len(spec.shape) == 2 and spec.dtype.name in _FLOATS and not kept


@dataclass(frozen=True)
class Blockwise:
    """A scheme: blocks of the last two dimensions, with one scale each. See `fp8_blockwise` and `int8`.

    dtype: of the quantized elements.
    block: rows and columns of a block; None for as many as there are.
    suffix: what the name of a tensor gets to be that of its scales.
    names: which tensors are quantized.
    """

    dtype: str
    block: tuple[int | None, int | None]
    suffix: str
    names: Callable[[TensorSpec], bool] = linear_weights

    def __post_init__(self) -> None:
        if any(n is not None and n < 1 for n in self.block):
            raise ValueError(f"a block of {self.block} has no elements")


def fp8_blockwise(
    block: tuple[int, int] = (128, 128), names: Callable[[TensorSpec], bool] = linear_weights
) -> Blockwise:
    """`float8_e4m3fn` in blocks, as DeepSeek-V3 has it: float32 scales, called `<name>_scale_inv`, to multiply with."""
    return Blockwise("float8_e4m3fn", block, "_scale_inv", names)


def int8(per_channel: bool = True, names: Callable[[TensorSpec], bool] = linear_weights) -> Blockwise:
    """Symmetric `int8` with a float32 scale for each row, or for the whole tensor, called `<name>_scale`."""
    return Blockwise("int8", (1 if per_channel else None, None), "_scale", names)


@dataclass(frozen=True)
class _Blocks:
    """The blocks of one tensor, and where their scales stand among those of all tensors."""

    spec: TensorSpec
    block: Shape
    grid: Shape
    first: int

    @classmethod
    def of(cls, spec: TensorSpec, scheme: Blockwise, first: int) -> _Blocks:
        if len(spec.shape) < 2 or spec.dtype.name not in _FLOATS:
            raise UnsupportedTensor(f"{spec} cannot be quantized in blocks: it must have rows, columns and floats")
        sizes = (n or d for n, d in zip(scheme.block, spec.shape[-2:], strict=True))
        block = (*(1 for _ in spec.shape[:-2]), *sizes)
        return cls(spec, block, tuple(-(-d // n) for d, n in zip(spec.shape, block, strict=True)), first)

    def view(self, flat: Any) -> Any:
        """What a flat tensor, with a number for every block of all tensors, has for these."""
        return flat[self.first : self.first + int(np.prod(self.grid))].view(self.grid)

    def touched(self, region: Region) -> Region:
        """Blocks of which a region has elements."""
        low = tuple(a // n for a, n in zip(region.start, self.block, strict=True))
        return Region(low, tuple(b - a for a, b in zip(low, self._stop(region), strict=True)))

    def owned(self, region: Region) -> Region:
        """Blocks of which a region has the first element."""
        low = tuple(-(-a // n) for a, n in zip(region.start, self.block, strict=True))
        return Region(low, tuple(b - a for a, b in zip(low, self._stop(region), strict=True)))

    def counts(self, region: Region) -> Any:
        """How many elements of the region stand in each block that it touches."""
        out = np.ones((), np.int64)
        for a, size, n in zip(region.start, region.size, self.block, strict=True):
            out = np.multiply.outer(out, np.bincount(np.arange(a, a + size) // n - a // n))
        return out

    def _stop(self, region: Region) -> Shape:
        return tuple(-(-(a + s) // n) for a, s, n in zip(region.start, region.size, self.block, strict=True))


class _Plan:
    """How the parts at hand are quantized, and the memory for it: one quantized copy of them, and all scales."""

    def __init__(self, scheme: Blockwise, table: TensorTable, regions: list[tuple[str, Region]]) -> None:
        import torch

        self.source, self.regions, self._limit = table, regions, _LARGEST[scheme.dtype]
        self.blocks: dict[str, _Blocks] = {}
        specs, total = [], 0
        for spec in table.specs:
            if not spec.numel or not scheme.names(spec):
                specs.append(spec)
                continue
            blocks = self.blocks[spec.name] = _Blocks.of(spec, scheme, total)
            total += int(np.prod(blocks.grid))
            shape = (1,) if scheme.block == (None, None) and len(spec.shape) == 2 else blocks.grid
            specs.append(TensorSpec(spec.name, BY_NAME[scheme.dtype], spec.shape))
            specs.append(TensorSpec(spec.name + scheme.suffix, BY_NAME["float32"], shape))
        self.table = TensorTable(specs)
        self._suffix, self._scales = scheme.suffix, torch.empty(total, dtype=torch.float32)
        self._kept = {
            place: torch.empty(place[1].size, dtype=getattr(torch, scheme.dtype))
            for place in regions
            if place[0] in self.blocks
        }

    def cut(self) -> str | None:
        """A tensor with a block of which only some elements are at hand, if there is any."""
        here = {name: np.zeros(self.blocks[name].grid, np.int64) for name, _ in self._kept}
        for name, region in self._kept:
            blocks = self.blocks[name]
            here[name][blocks.touched(region).slices] += blocks.counts(region)
        for name, counts in here.items():
            full = self.blocks[name].counts(whole(self.blocks[name].spec.shape))
            if ((counts > 0) & (counts < full)).any():
                return name
        return None

    def measure(self, parts: tuple[Part, ...]) -> Any:
        """The largest magnitudes of the parts, for every block; where blocks are cut, those of all processes count."""
        self._scales.zero_()
        for part, blocks in self._quantized(parts):
            there = blocks.view(self._scales)[blocks.touched(part.region).slices]
            there.copy_(there.maximum(_magnitudes(part, blocks)))
        return self._scales

    def fill(self, parts: tuple[Part, ...]) -> list[Part]:
        """The parts that were measured, quantized."""
        _to_scales(self._scales, self._limit)
        out = [part for part in parts if part.tensor not in self.blocks]
        for part, blocks in self._quantized(parts):
            scales = blocks.view(self._scales)
            kept = self._kept[part.tensor, part.region]
            _divide(part, blocks, scales[blocks.touched(part.region).slices], kept)
            out.append(Part(part.tensor, part.region, kept))
            owned = blocks.owned(part.region)
            if owned.numel:
                out.append(self._scale_part(part.tensor, owned, scales[owned.slices]))
        return out

    def _scale_part(self, name: str, owned: Region, scales: Any) -> Part:
        spec = self.table.specs[self.table.index[name + self._suffix]]
        if len(spec.shape) == 1:
            return Part(spec.name, Region((0,), (1,)), scales.view(1))
        return Part(spec.name, owned, scales)

    def _quantized(self, parts: tuple[Part, ...]) -> Iterator[tuple[Part, _Blocks]]:
        for part in parts:
            if (blocks := self.blocks.get(part.tensor)) is not None:
                data = part.data.tensor() if isinstance(part.data, LazyBits) else part.data
                if not hasattr(data, "detach"):
                    kind = type(data).__name__
                    raise UnsupportedTensor(f"{part.tensor!r}: only torch tensors can be quantized, not a {kind}")
                yield replace(part, data=data.detach()), blocks


def _slabs(part: Part, *others: Any) -> Iterator[tuple[Any, ...]]:
    """The matrices that a part is a stack of, with the matrices of other tensors that go with them."""
    for index in np.ndindex(*part.region.size[:-2]):
        yield (part.data[index], *(other[index] for other in others))


def _bands(rows: int, columns: int) -> Iterator[slice]:
    step = max(1, _BAND // columns)
    return (slice(i, min(i + step, rows)) for i in range(0, rows, step))


def _magnitudes(part: Part, blocks: _Blocks) -> Any:
    """The largest magnitude of the elements at hand, for each block that they touch; infinity for NaN."""
    import torch

    out = torch.empty(blocks.touched(part.region).size, dtype=torch.float32)
    (top, left), (rows, columns) = part.region.start[-2:], part.region.size[-2:]
    height, width = blocks.block[-2:]
    for slab, cells in _slabs(part, out):
        wide = torch.empty((rows, cells.shape[1]), dtype=slab.dtype)
        for band in _bands(rows, columns):
            wide[band] = _largest(slab[band].abs(), left % width, width)
        tall = _largest(wide.T, top % height, height).T
        cells.copy_(tall)
    return out.nan_to_num_(nan=torch.inf, posinf=torch.inf)


def _largest(x: Any, skip: int, n: int) -> Any:
    """The largest number of each run of `n` columns, of which the first lacks `skip` columns."""
    import torch

    runs = -(-(skip + x.shape[1]) // n)
    x = torch.nn.functional.pad(x, (skip, runs * n - skip - x.shape[1]))
    return x.reshape(x.shape[0], runs, n).amax(2)


def _to_scales(largest: Any, limit: float) -> None:
    """Make scales of largest magnitudes, in place."""
    import torch

    largest /= largest.new_full((1,), limit)  # no scalar: some devices multiply by its reciprocal instead
    largest[largest < torch.finfo(torch.float32).tiny] = 1.0
    largest[largest.isinf()] = torch.nan


def _divide(part: Part, blocks: _Blocks, scales: Any, out: Any) -> None:
    """Write the quantized elements of a part."""
    import torch

    (top, left), (rows, columns) = part.region.start[-2:], part.region.size[-2:]
    height, width = blocks.block[-2:]
    row = torch.arange(top, top + rows) // height - top // height
    skip, broken = left % width, bool(scales.isnan().any())
    for slab, cells, to in _slabs(part, scales, out):
        for band in _bands(rows, columns):
            divisor = cells[row[band]]
            if divisor.shape[1] > 1:
                divisor = divisor.repeat_interleave(width, 1)[:, skip : skip + columns]
            x = slab[band].to(torch.float32) / divisor
            if broken:
                x.nan_to_num_(0.0)  # what was divided by a NaN
            to[band] = x.round_() if to.dtype is torch.int8 else x


class QuantizedSource:
    """The weights of another source, quantized by a scheme whenever they are asked for.

    One quantized copy is kept, and overwritten by the next call. Results of a function are not kept.
    """

    def __init__(self, source: Source | Weights, scheme: Blockwise | Function, process_group: Any = None) -> None:
        self._source, self._scheme, self._group = source, scheme, process_group
        self._plan: _Plan | None = None
        self._sharded = process_group is not None  # as far as is known before the source has been asked

    def weights(self) -> Weights | Shards:
        if not isinstance(self._scheme, Blockwise):
            return _by_function(self._scheme, self._given())
        try:
            weights = self._given()
            self._sharded = isinstance(weights, Shards)
            shards = weights if isinstance(weights, Shards) else Shards.of(tensor_table(weights), weights)
            plan = self._planned(self._scheme, shards)
            largest = plan.measure(shards.parts)
        except BaseException:
            if self._sharded and self._together():
                with contextlib.suppress(RuntimeError):  # what went wrong before is what is raised
                    _agree(None, self._group)
            raise
        if self._sharded and self._together():
            _agree(largest, self._group)
        elif self._sharded and (name := plan.cut()) is not None:
            raise TensorMismatch(
                f"{name!r}: blocks are cut, and other processes have the rest; hand over their process group"
            )
        parts = plan.fill(shards.parts)
        return Shards(plan.table, parts) if self._sharded else {part.tensor: part.data for part in parts}

    def _given(self) -> Any:
        return self._source.weights() if isinstance(self._source, Source) else self._source

    def _planned(self, scheme: Blockwise, shards: Shards) -> _Plan:
        """The plan for these shards, which are what they claim to be; it is the last one, if that still fits."""
        for _ in shards.located():
            pass
        regions = [(part.tensor, part.region) for part in shards.parts]
        if self._plan is None or self._plan.source != shards.table or self._plan.regions != regions:
            self._plan = _Plan(scheme, shards.table, regions)
        return self._plan

    def _together(self) -> bool:
        """Whether there are other processes to agree with."""
        import torch.distributed as dist

        return self._group is not None or (dist.is_available() and dist.is_initialized())


def _agree(largest: Any | None, group: Any) -> None:
    """Make numbers the largest that any process has; with None, tell the others that this one has failed.

    Nobody waits for a process that has failed, or has other tensors: all raise.
    """
    import torch
    import torch.distributed as dist

    failed, count = (dist.get_rank(group) + 1, 0) if largest is None else (0, largest.numel())
    word = torch.tensor([failed, count, -count])
    dist.all_reduce(word, dist.ReduceOp.MAX, group=group)
    failed, most, least = word.tolist()
    if largest is None:
        return
    if failed:
        raise WeightsError(f"rank {failed - 1} could not quantize its parts, and says why; nothing is quantized here")
    if most != -least:
        raise TensorMismatch(f"the processes do not quantize the same tensors: {-least} blocks there, {most} elsewhere")
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)


def _by_function(function: Function, weights: Weights | Shards) -> Weights:
    if isinstance(weights, Shards):
        raise UnsupportedTensor("a function quantizes whole tensors; shards need a scheme that knows blocks")
    out: dict[str, Any] = {}
    for name, tensor in weights.items():
        made = function(name, tensor)
        if twice := out.keys() & made.keys():
            raise TensorMismatch(f"the function made {min(twice)!r} of {name!r}, and of another tensor before")
        out.update(made)
    return out


def quantized(source: Any, scheme: Blockwise | Function, process_group: Any = None) -> QuantizedSource:
    """The weights of a source as a quantized rollout holds them.

    source: a source, a torch module, or a mapping from names to torch tensors.
    scheme: `fp8_blockwise()`, `int8()`, or a function that makes named tensors of a name and a tensor; it must give
        the same bits for the same bits.
    process_group: for shards, the processes that have them, all of which must ask for their weights. By default all
        processes of torch.distributed.
    """
    if not isinstance(source, Source | Mapping):
        source = module(source)
    return QuantizedSource(source, scheme, process_group)
