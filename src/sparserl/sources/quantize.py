"""Weights quantized as the rollout holds them: changes are found in the quantized bits, scales included.

A tensor is cut into blocks. The scale of a block is its largest magnitude, divided by the largest number of the
quantized format; every element is divided by the scale of its block and rounded to nearest, ties to even. All of it is
done in float32, one IEEE operation per step, so that equal bits always give equal bits.

- A block of zeros, or of numbers so small that their scale would not be a normal float32, has the scale 1.
- A block with a NaN or an infinity has the scale NaN and zeros, so that it is NaN again after dequantizing.

Every process quantizes its own shards. If blocks are cut between processes, these agree on the largest magnitudes by an
all_reduce and compute the same scales; the process with the first element of a block publishes its scale. A small
all_reduce before it tells each process whether all have come so far, so that none waits for one that failed.
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
from .modules import Source, module, weights_of

Function = Callable[[str, Any], Mapping[str, Any]]

_BAND = 1 << 18  # elements that are processed at a time, so that they stay in the cache
_FLOATS = frozenset(("bfloat16", "float16", "float32"))
_LARGEST = {"float8_e4m3fn": 448.0, "int8": 127.0}


def linear_weights(spec: TensorSpec) -> bool:
    """Whether a tensor is the weight of a linear layer, by its name and shape.

    Embeddings, norms, the output layer and routers of experts are not: quantized checkpoints keep them as they are.

    Args:
        spec: a row of the tensor table.

    Returns:
        Whether `fp8_blockwise` and `int8` quantize the tensor by default.
    """
    *_, layer, last = ("", *spec.name.split("."))
    excluded = layer in ("lm_head", "wte", "wpe", "shared", "score", "classifier")
    excluded = excluded or layer.endswith(("gate", "router")) or "embed" in layer or "norm" in layer
    return last == "weight" and len(spec.shape) == 2 and spec.dtype.name in _FLOATS and not excluded


@dataclass(frozen=True)
class Blockwise:
    """A scheme: blocks of the last two dimensions, with one scale each. See `fp8_blockwise` and `int8`.

    Args:
        dtype: the dtype of the quantized elements: `float8_e4m3fn` or `int8`.
        block: rows and columns of a block; None for all rows or all columns.
        suffix: appended to the name of a tensor to name its scales.
        names: which tensors are quantized.

    Raises:
        ValueError: a block has no elements.
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
    """`float8_e4m3fn` in blocks, as DeepSeek-V3 has it, with float32 scales called `<name>_scale_inv` to multiply by.

    Args:
        block: rows and columns of a block.
        names: which tensors are quantized; by default the weights of linear layers.

    Returns:
        A scheme for `quantized`.
    """
    return Blockwise("float8_e4m3fn", block, "_scale_inv", names)


def int8(per_channel: bool = True, names: Callable[[TensorSpec], bool] = linear_weights) -> Blockwise:
    """Symmetric `int8` with float32 scales called `<name>_scale`.

    Args:
        per_channel: whether each row has a scale; else the whole tensor has one.
        names: which tensors are quantized; by default the weights of linear layers.

    Returns:
        A scheme for `quantized`.
    """
    return Blockwise("int8", (1 if per_channel else None, None), "_scale", names)


@dataclass(frozen=True)
class _Blocks:
    """The blocks of one tensor, and the index of their first scale among those of all tensors."""

    spec: TensorSpec
    block: Shape
    grid: Shape
    first: int

    @classmethod
    def of(cls, spec: TensorSpec, scheme: Blockwise, first: int) -> _Blocks:
        if len(spec.shape) < 2 or spec.dtype.name not in _FLOATS:
            raise UnsupportedTensor(
                f"{spec} cannot be quantized in blocks: it must have two dimensions or more, and floats"
            )
        sizes = (n or d for n, d in zip(scheme.block, spec.shape[-2:], strict=True))
        block = (*(1 for _ in spec.shape[:-2]), *sizes)
        return cls(spec, block, tuple(-(-d // n) for d, n in zip(spec.shape, block, strict=True)), first)

    def view(self, flat: Any) -> Any:
        """The numbers of these blocks in a flat tensor that has one for every block of all tensors."""
        return flat[self.first : self.first + int(np.prod(self.grid))].view(self.grid)

    def touched(self, region: Region) -> Region:
        """The blocks that have elements of a region."""
        low = tuple(a // n for a, n in zip(region.start, self.block, strict=True))
        return Region(low, tuple(b - a for a, b in zip(low, self._stop(region), strict=True)))

    def owned(self, region: Region) -> Region:
        """The blocks whose first element is in a region."""
        low = tuple(-(-a // n) for a, n in zip(region.start, self.block, strict=True))
        return Region(low, tuple(b - a for a, b in zip(low, self._stop(region), strict=True)))

    def counts(self, region: Region) -> Any:
        """How many elements of a region are in each block that it touches."""
        counts = np.ones((), np.int64)
        for a, size, n in zip(region.start, region.size, self.block, strict=True):
            counts = np.multiply.outer(counts, np.bincount(np.arange(a, a + size) // n - a // n))
        return counts

    def _stop(self, region: Region) -> Shape:
        return tuple(-(-(a + s) // n) for a, s, n in zip(region.start, region.size, self.block, strict=True))


class _Plan:
    """How the parts of this process are quantized, and memory for it: a quantized copy of them, and all scales."""

    def __init__(self, scheme: Blockwise, table: TensorTable, regions: list[tuple[str, Region]]) -> None:
        import torch

        self.source = table
        self.regions = regions
        self.blocks: dict[str, _Blocks] = {}
        self._limit = _LARGEST[scheme.dtype]
        specs = []
        total = 0
        for spec in table.specs:
            if not spec.numel or not scheme.names(spec):
                specs.append(spec)
                continue
            blocks = _Blocks.of(spec, scheme, total)
            self.blocks[spec.name] = blocks
            total += int(np.prod(blocks.grid))
            shape = (1,) if scheme.block == (None, None) and len(spec.shape) == 2 else blocks.grid
            specs.append(TensorSpec(spec.name, BY_NAME[scheme.dtype], spec.shape))
            specs.append(TensorSpec(spec.name + scheme.suffix, BY_NAME["float32"], shape))
        self.table = TensorTable(specs)
        self._suffix = scheme.suffix
        self._scales = torch.empty(total, dtype=torch.float32)
        self._copies = {
            place: torch.empty(place[1].size, dtype=getattr(torch, scheme.dtype))
            for place in regions
            if place[0] in self.blocks
        }

    def cut_tensor(self) -> str | None:
        """A tensor with a block of which this process has only some elements; None if there is none."""
        counts_by_name = {name: np.zeros(self.blocks[name].grid, np.int64) for name, _ in self._copies}
        for name, region in self._copies:
            blocks = self.blocks[name]
            counts_by_name[name][blocks.touched(region).slices] += blocks.counts(region)
        for name, counts in counts_by_name.items():
            full = self.blocks[name].counts(whole(self.blocks[name].spec.shape))
            if ((counts > 0) & (counts < full)).any():
                return name
        return None

    def measure(self, parts: tuple[Part, ...]) -> Any:
        """The largest magnitude of the parts in every block. If blocks are cut, those of all processes count."""
        self._scales.zero_()
        for part, blocks in self._quantized(parts):
            largest = blocks.view(self._scales)[blocks.touched(part.region).slices]
            largest.copy_(largest.maximum(_magnitudes(part, blocks)))
        return self._scales

    def quantize(self, parts: tuple[Part, ...]) -> list[Part]:
        """Quantize the parts that were measured, and add the parts of their scales."""
        _to_scales(self._scales, self._limit)
        quantized = [part for part in parts if part.tensor not in self.blocks]
        for part, blocks in self._quantized(parts):
            scales = blocks.view(self._scales)
            copy = self._copies[part.tensor, part.region]
            _divide(part, blocks, scales[blocks.touched(part.region).slices], copy)
            quantized.append(Part(part.tensor, part.region, copy))
            owned = blocks.owned(part.region)
            if owned.numel:
                quantized.append(self._scale_part(part.tensor, owned, scales[owned.slices]))
        return quantized

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


def _matrices(part: Part, *others: Any) -> Iterator[tuple[Any, ...]]:
    """The matrices that a part is a stack of, with the corresponding matrices of other tensors."""
    for index in np.ndindex(*part.region.size[:-2]):
        yield (part.data[index], *(other[index] for other in others))


def _bands(rows: int, columns: int) -> Iterator[slice]:
    step = max(1, _BAND // columns)
    return (slice(i, min(i + step, rows)) for i in range(0, rows, step))


def _magnitudes(part: Part, blocks: _Blocks) -> Any:
    """The largest magnitude of the elements of a part in each block that they touch; infinity for NaN."""
    import torch

    magnitudes = torch.empty(blocks.touched(part.region).size, dtype=torch.float32)
    top, left = part.region.start[-2:]
    rows, columns = part.region.size[-2:]
    height, width = blocks.block[-2:]
    for matrix, cells in _matrices(part, magnitudes):
        by_row = torch.empty((rows, cells.shape[1]), dtype=matrix.dtype)
        for band in _bands(rows, columns):
            by_row[band] = _largest(matrix[band].abs(), left % width, width)
        cells.copy_(_largest(by_row.T, top % height, height).T)
    return magnitudes.nan_to_num_(nan=torch.inf, posinf=torch.inf)


def _largest(x: Any, skip: int, n: int) -> Any:
    """The largest number of each run of `n` columns, of which the first lacks `skip` columns."""
    import torch

    runs = -(-(skip + x.shape[1]) // n)
    x = torch.nn.functional.pad(x, (skip, runs * n - skip - x.shape[1]))
    return x.reshape(x.shape[0], runs, n).amax(2)


def _to_scales(largest: Any, limit: float) -> None:
    """Turn largest magnitudes into scales, in place."""
    import torch

    largest /= largest.new_full((1,), limit)  # not a scalar: some devices multiply by its reciprocal instead
    largest[largest < torch.finfo(torch.float32).tiny] = 1.0
    largest[largest.isinf()] = torch.nan


def _divide(part: Part, blocks: _Blocks, scales: Any, copy: Any) -> None:
    """Write the quantized elements of a part to its copy."""
    import torch

    top, left = part.region.start[-2:]
    rows, columns = part.region.size[-2:]
    height, width = blocks.block[-2:]
    block_row = torch.arange(top, top + rows) // height - top // height
    skip = left % width
    has_nan = bool(scales.isnan().any())
    for matrix, cells, quantized in _matrices(part, scales, copy):
        for band in _bands(rows, columns):
            divisor = cells[block_row[band]]
            if divisor.shape[1] > 1:
                divisor = divisor.repeat_interleave(width, 1)[:, skip : skip + columns]
            x = matrix[band].to(torch.float32) / divisor
            if has_nan:
                x.nan_to_num_(0.0)  # elements of blocks whose scale is NaN
            quantized[band] = x.round_() if quantized.dtype is torch.int8 else x


class QuantizedSource:
    """The weights of another source, quantized at every call of `weights`. Made by `quantized`.

    One quantized copy is kept, and overwritten by the next call. Results of a function are not kept.
    """

    def __init__(self, source: Source | Weights, scheme: Blockwise | Function, process_group: Any = None) -> None:
        self._source = source
        self._scheme = scheme
        self._group = process_group
        self._plan: _Plan | None = None
        self._sharded = process_group is not None  # until the source was asked

    def weights(self) -> Weights | Shards:
        """The quantized weights, or shards of them."""
        if not isinstance(self._scheme, Blockwise):
            return _by_function(self._scheme, weights_of(self._source))
        try:
            weights = weights_of(self._source)
            self._sharded = isinstance(weights, Shards)
            shards = weights if isinstance(weights, Shards) else Shards.of(tensor_table(weights), weights)
            plan = self._plan_for(self._scheme, shards)
            largest = plan.measure(shards.parts)
        except BaseException:
            if self._sharded and self._has_peers():
                with contextlib.suppress(RuntimeError):  # the first error is raised
                    _agree(None, self._group)
            raise
        if self._sharded and self._has_peers():
            _agree(largest, self._group)
        elif self._sharded and (name := plan.cut_tensor()) is not None:
            raise TensorMismatch(
                f"{name!r}: other processes have the rest of some blocks; give their process group as `process_group`"
            )
        parts = plan.quantize(shards.parts)
        return Shards(plan.table, parts) if self._sharded else {part.tensor: part.data for part in parts}

    def _plan_for(self, scheme: Blockwise, shards: Shards) -> _Plan:
        """The plan for these shards: the last one, if it still fits."""
        for _ in shards.located():
            pass  # which checks that the shards have the shapes of their regions
        regions = [(part.tensor, part.region) for part in shards.parts]
        if self._plan is None or self._plan.source != shards.table or self._plan.regions != regions:
            self._plan = _Plan(scheme, shards.table, regions)
        return self._plan

    def _has_peers(self) -> bool:
        """Whether there are other processes to agree with."""
        import torch.distributed as dist

        return self._group is not None or (dist.is_available() and dist.is_initialized())


def _agree(largest: Any | None, group: Any) -> None:
    """Replace magnitudes by the largest that any process has; with None, tell the others that this one has failed.

    If a process has failed, or has other tensors, all raise, and none waits.
    """
    import torch
    import torch.distributed as dist

    count = 0 if largest is None else largest.numel()
    failed = dist.get_rank(group) + 1 if largest is None else 0
    message = torch.tensor([failed, count, -count])
    dist.all_reduce(message, dist.ReduceOp.MAX, group=group)
    failed, most, minus_least = message.tolist()
    if largest is None:
        return
    if failed:
        raise WeightsError(
            f"rank {failed - 1} could not quantize its parts; its own error says why. Nothing was quantized"
        )
    if most != -minus_least:
        raise TensorMismatch(
            f"the processes do not quantize the same tensors: one has {-minus_least} blocks, another {most}"
        )
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)


def _by_function(function: Function, weights: Weights | Shards) -> Weights:
    if isinstance(weights, Shards):
        raise UnsupportedTensor("a function quantizes whole tensors; use fp8_blockwise() or int8() for shards")
    quantized: dict[str, Any] = {}
    for name, tensor in weights.items():
        tensors = function(name, tensor)
        if duplicates := quantized.keys() & tensors.keys():
            raise TensorMismatch(
                f"the function returned {min(duplicates)!r} for {name!r} and for another tensor before it"
            )
        quantized.update(tensors)
    return quantized


def quantized(source: Any, scheme: Blockwise | Function, process_group: Any = None) -> QuantizedSource:
    """The weights of a source as a quantized rollout holds them.

    Args:
        source: a source, a torch module, or a mapping from names to torch tensors.
        scheme: `fp8_blockwise()`, `int8()`, or a function from a name and a tensor to a mapping of named tensors, which
            must give equal bits for equal bits.
        process_group: for shards, the processes that have them; all must publish at the same time. By default all
            processes of torch.distributed.

    Returns:
        A source of quantized weights and their scales.

    Raises:
        UnsupportedTensor: the source is none of these.

    >>> import torch, sparserl
    >>> source = sparserl.sources.quantized({"q.weight": torch.ones(2, 4)}, sparserl.sources.int8())
    >>> {name: tensor.dtype for name, tensor in source.weights().items()}
    {'q.weight': torch.int8, 'q.weight_scale': torch.float32}
    """
    if not isinstance(source, Source | Mapping):
        source = module(source)
    return QuantizedSource(source, scheme, process_group)
