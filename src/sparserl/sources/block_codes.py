"""Blocks of one part, quantized with operations of torch, on any device. They specify the kernels for GPUs.

    largest magnitude of each block ──► scale as it is stored, divisor ──► elements / divisor, rounded

Every step is one IEEE operation in float32, rounded to nearest, ties to even: equal bits give equal bits everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from ..weights.region import Region, Shape
from ..weights.table import TensorSpec
from .schemes import LIMITS, Blockwise

_BAND = 1 << 18  # elements that are processed at a time, so that they stay in the cache
_BAND_ON_GPU = 1 << 26  # the same on a GPU, where more launches would take longer
_MX_OFFSET = {"float8_e4m3fn": 8, "float4_e2m1": 2}  # the exponent of the format's largest number
_MX_NAN = 255
_E4M3_NAN = 0x7F
_LEAST_E4M3 = 0.125  # instead of a scale of zero
_GLOBAL_LIMIT = 448.0 * 6.0
_E2M1_STEPS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)  # between neighbours; every other one belongs to the upper


class BlockScales(NamedTuple):
    """The scales of some blocks: as they are stored, and what elements are divided by; NaN for broken blocks."""

    stored: torch.Tensor
    divisor: torch.Tensor


@dataclass(frozen=True)
class BlockGrid:
    """The blocks of one tensor."""

    spec: TensorSpec
    block: Shape

    @property
    def size(self) -> Shape:
        """How many blocks there are in every dimension."""
        return tuple(-(-d // n) for d, n in zip(self.spec.shape, self.block, strict=True))

    def touched(self, region: Region) -> Region:
        """The blocks that have elements of a region."""
        low = tuple(a // n for a, n in zip(region.start, self.block, strict=True))
        return Region(low, tuple(b - a for a, b in zip(low, self._stop(region), strict=True)))

    def owned(self, region: Region) -> Region:
        """The blocks whose first element is in a region."""
        low = tuple(-(-a // n) for a, n in zip(region.start, self.block, strict=True))
        return Region(low, tuple(max(0, b - a) for a, b in zip(low, self._stop(region), strict=True)))

    def is_aligned(self, region: Region) -> bool:
        """Whether a region consists of whole blocks."""
        return all(
            a % n == 0 and ((a + size) % n == 0 or a + size == d)
            for a, size, n, d in zip(region.start, region.size, self.block, self.spec.shape, strict=True)
        )

    def counts(self, region: Region) -> Any:
        """How many elements of a region are in each block that it touches."""
        counts = np.ones((), np.int64)
        for a, size, n in zip(region.start, region.size, self.block, strict=True):
            counts = np.multiply.outer(counts, np.bincount(np.arange(a, a + size) // n - a // n))
        return counts

    def _stop(self, region: Region) -> Shape:
        return tuple(-(-(a + s) // n) for a, s, n in zip(region.start, region.size, self.block, strict=True))


def magnitudes(data: torch.Tensor, region: Region, grid: BlockGrid) -> torch.Tensor:
    """The largest magnitude of the elements of a part in each block that they touch; infinity for NaN."""
    largest = torch.empty(grid.touched(region).size, dtype=torch.float32, device=data.device)
    top, left = region.start[-2:]
    rows, columns = region.size[-2:]
    height, width = grid.block[-2:]
    for matrix, cells in _matrices(region, data, largest):
        by_row = torch.empty((rows, cells.shape[1]), dtype=matrix.dtype, device=data.device)
        for band in _bands(rows, columns, data.device):
            by_row[band] = _largest(matrix[band].abs(), left % width, width)
        cells.copy_(_largest(by_row.T, top % height, height).T)
    return largest.nan_to_num_(nan=torch.inf, posinf=torch.inf)


def _largest(x: torch.Tensor, skip: int, n: int) -> torch.Tensor:
    """The largest number of each run of `n` columns, of which the first lacks `skip` columns."""
    runs = -(-(skip + x.shape[1]) // n)
    x = torch.nn.functional.pad(x, (skip, runs * n - skip - x.shape[1]))
    return x.reshape(x.shape[0], runs, n).amax(2)


def global_scales(largest: torch.Tensor) -> torch.Tensor:
    """The scales for scales of matrices, from the largest magnitudes of their blocks that are not broken."""
    least = torch.finfo(torch.float32).tiny
    scales = torch.ones_like(largest) / largest.clamp(min=least) * largest.new_full((1,), _GLOBAL_LIMIT)
    return scales.nan_to_num_(nan=1.0, posinf=1.0)


def block_scales(largest: torch.Tensor, scheme: Blockwise, global_scale: torch.Tensor | None = None) -> BlockScales:
    """The scales of blocks, from their largest magnitudes.

    global_scale: of the matrices that the blocks belong to, in the shape of the leading dimensions and (1, 1).
    """
    broken = largest.isinf()
    if scheme.scale_dtype == "float8_e8m0fnu":
        exponent = ((largest.view(torch.int32) + (1 << 21)) >> 23) - _MX_OFFSET[scheme.dtype]  # 1.75 rounds up
        exponent = exponent.clamp_(0, _MX_NAN - 1)
        divisor = torch.where(exponent > 0, exponent << 23, 1 << 22).view(torch.float32)
        divisor = divisor.masked_fill(broken, torch.nan)
        return BlockScales(exponent.masked_fill_(broken, _MX_NAN).to(torch.uint8), divisor)
    # Not by a scalar: some devices multiply by its reciprocal instead.
    scales = largest / largest.new_full((1,), LIMITS[scheme.dtype])
    if global_scale is not None:
        stored = (global_scale * scales).clamp_(max=448.0).to(torch.float8_e4m3fn)
        scales = stored.to(torch.float32)
        scales = scales.masked_fill_(scales == 0, _LEAST_E4M3)
        stored = scales.to(torch.float8_e4m3fn)
        stored.view(torch.uint8).masked_fill_(broken, _E4M3_NAN)
        return BlockScales(stored, (scales / global_scale).masked_fill_(broken, torch.nan))
    scales[scales < torch.finfo(torch.float32).tiny] = 1.0
    scales[broken] = torch.nan
    return BlockScales(scales, scales)


def write_codes(
    data: torch.Tensor, region: Region, grid: BlockGrid, divisor: torch.Tensor, scheme: Blockwise, codes: torch.Tensor
) -> None:
    """Write the quantized elements of a part to its codes, given the divisors of the blocks that it touches."""
    top, left = region.start[-2:]
    rows, columns = region.size[-2:]
    height, width = grid.block[-2:]
    block_row = torch.arange(top, top + rows, device=data.device) // height - top // height
    skip = left % width
    may_be_broken = data.is_cuda or bool(divisor.isnan().any())  # on a GPU that would take a wait to know
    for matrix, cells, out in _matrices(region, data, divisor, codes):
        for band in _bands(rows, columns, data.device):
            by = cells[block_row[band]]
            if by.shape[1] > 1:
                by = by.repeat_interleave(width, 1)[:, skip : skip + columns]
            x = matrix[band].to(torch.float32) / by
            if may_be_broken:
                x.masked_fill_(by.isnan(), 0.0)
            out[band] = _rounded(x, scheme)


def _rounded(x: torch.Tensor, scheme: Blockwise) -> torch.Tensor:
    if scheme.dtype == "int8":
        return x.clamp_(-128.0, 127.0).round_()
    if not scheme.is_packed:
        return x
    nibbles = torch.where(x < 0, 8, 0).to(torch.uint8)
    x = x.abs_()
    for i, step in enumerate(_E2M1_STEPS):
        nibbles += (x >= step) if i % 2 else (x > step)
    return nibbles[:, ::2] | (nibbles[:, 1::2] << 4)


def _matrices(region: Region, *tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """The corresponding matrices of tensors that are stacks of them."""
    for index in np.ndindex(*region.size[:-2]):
        yield tuple(tensor[index] for tensor in tensors)


def _bands(rows: int, columns: int, device: torch.device) -> Iterator[slice]:
    step = max(1, (_BAND if device.type == "cpu" else _BAND_ON_GPU) // columns)
    return (slice(i, min(i + step, rows)) for i in range(0, rows, step))
