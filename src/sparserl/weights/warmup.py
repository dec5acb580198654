"""Compiles what weights on GPUs need before the first sync does."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .dtypes import dtype_of_torch
from .local import LocalWeights

_FEW = 64  # elements of a tensor that stands for others


def warm_up(weights: LocalWeights, new: LocalWeights | None = None) -> None:
    """Compile the kernels that syncs of these weights launch, once for a process; on a CPU there is nothing to do.

    new: weights that they will be compared with; None for weights that are only written to.
    """
    if weights.has_kernels:
        from . import on_gpu

        on_gpu.warm_up(weights, new)


def warm_up_for(kinds: Iterable[tuple[Any, Any]]) -> None:
    """`warm_up` for weights of these dtypes of torch and on these devices, before the weights are known."""
    import torch

    examples = {
        str(kind): torch.zeros(_FEW, dtype=kind[0], device=kind[1]) for kind in kinds if dtype_of_torch(kind[0])
    }
    warm_up(LocalWeights.of(examples))
