"""Room for new weights on the GPUs that the old ones lie on, and copies there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ..kernels.gpu.ints import INTS
from .memory import Memory, Weights
from .shards import Part, Shards
from .staging import gpu_tensor
from .tensors import memories, memory_of

_SPARE = 2  # times the bytes of a copy that a GPU must have free: others work there, too


def zeros_like(weights: Mapping[str, Any]) -> dict[str, torch.Tensor] | None:
    """Zeros beside weights that all lie on GPUs; None if they do not, or where that would take too much room there."""
    named = memories(weights)
    zeros = _zeros_beside(map(gpu_tensor, named.values()))
    return None if zeros is None else dict(zip(named, zeros, strict=True))


def zero_parts_like(shards: Shards) -> Shards | None:
    """The same for parts of weights."""
    zeros = _zeros_beside(gpu_tensor(memory_of(part.tensor, part.data)) for part in shards.parts)
    if zeros is None:
        return None
    rows = zip(shards.parts, zeros, strict=True)
    return Shards(shards.table, [Part(part.tensor, part.region, tensor) for part, tensor in rows])


def copies_like(weights: Weights | Shards) -> Any:
    """Copies of weights, or of parts, beside them, in row-major order; None where there would be no zeros either."""
    if isinstance(weights, Shards):
        copies = zero_parts_like(weights)
        pairs = [] if copies is None else [*zip(weights.parts, copies.parts, strict=True)]
        for part, copied in pairs:
            _copy(copied.data, memory_of(part.tensor, part.data))
        return copies
    zeros = zeros_like(weights)
    for name, copy in {} if zeros is None else zeros.items():
        _copy(copy, memory_of(name, weights[name]))
    return zeros


def _copy(copy: torch.Tensor, memory: Memory) -> None:
    ints = INTS[copy.element_size()]
    copy.view(ints).copy_(gpu_tensor(memory).detach().view(ints))


def _zeros_beside(gpu_tensors: Iterable[Any]) -> list[torch.Tensor] | None:
    tensors = [*gpu_tensors]
    if any(tensor is None for tensor in tensors):
        return None
    needed: dict[Any, int] = {}
    for tensor in tensors:
        needed[tensor.device] = needed.get(tensor.device, 0) + tensor.nbytes
    for device, nbytes in needed.items():
        if device.type == "cuda" and torch.cuda.mem_get_info(device)[0] < _SPARE * nbytes:
            return None
    try:
        return [_zeros_like(tensor) for tensor in tensors]
    except torch.cuda.OutOfMemoryError:
        return None


def _zeros_like(tensor: torch.Tensor) -> torch.Tensor:
    """Zeros in memory of their own, in row-major order; for every dtype, since they are made as integers."""
    bits = torch.zeros(tensor.shape, dtype=INTS[tensor.element_size()], device=tensor.device)
    return bits.view(tensor.dtype)
