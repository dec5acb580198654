"""Quantized parts on GPUs that have kernels for it: blocks are measured, quantized and compared in one read."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ..kernels import gpu
from ..weights import memory
from ..weights.region import Region
from .block_codes import BlockGrid
from .schemes import LIMITS, Blockwise

_RUN = 64  # elements that are measured at a time where one scale is for all


def fits(data: torch.Tensor, region: Region, grid: BlockGrid, scheme: Blockwise) -> bool:
    """Whether kernels can quantize a part: on a GPU that has them, contiguous, and of whole blocks.

    A stack is left to torch if there are scales for each of its matrices.
    """
    return bool(
        memory.is_on_gpu(data)
        and gpu.support.obstacle(data.device) is None
        and data.is_contiguous()
        and grid.is_aligned(region)
        and (data.dim() == 2 or (scheme.block != (None, None) and not scheme.has_global_scale))
    )


def magnitudes(data: torch.Tensor, region: Region, grid: BlockGrid) -> torch.Tensor:
    """The largest magnitude of each block of a part that fits, if blocks are runs, or the part is one block."""
    size = grid.touched(region).size
    with _on(data.device):
        if math.prod(size) == 1:
            return gpu.quantize.run_magnitudes(data, _RUN).amax().view(size)
        return gpu.quantize.run_magnitudes(data, grid.block[-1]).view(size)


def quantize(
    data: torch.Tensor,
    grid: BlockGrid,
    scheme: Blockwise,
    codes: torch.Tensor,
    scales: torch.Tensor,
    largest: torch.Tensor | None,
    global_scale: torch.Tensor | None,
    difference: torch.Tensor | None,
) -> int | None:
    """Write the codes and scales of a part that fits.

    Args:
        data: the part.
        grid: the blocks of its tensor.
        scheme: how it is quantized.
        codes: what becomes the quantized elements, as integers.
        scales: what becomes the scales of its blocks, as integers.
        largest: the largest magnitudes of its blocks, where they are known; they must be if it is one block.
        global_scale: the scale for its scales, if it has one.
        difference: what becomes the bits in which codes differ from those before, if these are compared.

    Returns:
        How many codes differ; None if they are not compared.
    """
    kind = gpu.quantize.Format(scheme.dtype, scheme.scale_dtype, LIMITS[scheme.dtype])
    height, width = grid.block[-2:]
    with _on(data.device):
        counts = gpu.quantize.quantize(data, codes, scales, kind, (height, width), largest, global_scale, difference)
        return None if counts is None else int(counts.sum())


def _on(device: Any) -> AbstractContextManager[Any]:
    """Kernels are launched on the current device, which need not be that of the part."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
