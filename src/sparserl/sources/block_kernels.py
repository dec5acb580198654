"""Quantized parts on GPUs that have kernels for it: their blocks are measured, quantized and compared in one read."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ..kernels import gpu
from ..kernels.gpu.ints import INTS
from ..weights import memory
from ..weights.region import Region
from .block_codes import BlockGrid
from .schemes import LIMITS, Blockwise

_RUN = 64  # elements that are measured at a time where one scale is for all


def fits(data: torch.Tensor, region: Region, grid: BlockGrid) -> bool:
    """Whether kernels can quantize a part: on a GPU that has them, contiguous, and of whole blocks.

    Matrices of a stack are left to torch if each is one block.
    """
    return bool(
        memory.is_on_gpu(data)
        and gpu.support.obstacle(data.device) is None
        and data.is_contiguous()
        and grid.is_aligned(region)
        and (data.dim() == 2 or grid.block[-2:] != grid.spec.shape[-2:])
    )


def magnitudes(data: torch.Tensor, region: Region, grid: BlockGrid) -> torch.Tensor:
    """The largest magnitude of each block of a part that fits, if a block is a run or all of a matrix."""
    size = grid.touched(region).size
    with _on(data.device):
        if region.size[-2:] == grid.block[-2:]:
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
) -> None:
    """Write the codes and scales of a part that fits, where they are not yet what they must be."""
    kind = gpu.quantize.Format(scheme.dtype, scheme.scale_dtype, LIMITS[scheme.dtype])
    height, width = grid.block[-2:]
    with _on(data.device):
        gpu.quantize.quantize(
            data, _output(codes), _output(scales), kind, (height, width), largest, global_scale
        )


def _output(tensor: torch.Tensor) -> Any:
    bits = tensor.view(INTS[tensor.element_size()])
    return gpu.quantize.Output(bits, bits, bits, bits)


def _on(device: Any) -> AbstractContextManager[Any]:
    """Kernels are launched on the current device, which need not be that of the part."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
