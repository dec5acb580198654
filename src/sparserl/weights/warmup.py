"""Compiles what weights on GPUs need before the first sync does."""

from __future__ import annotations

from .local import LocalWeights


def warm_up(weights: LocalWeights, new: LocalWeights | None = None) -> None:
    """Compile the kernels that syncs of these weights launch, once for a process; on a CPU there is nothing to do.

    new: weights that they will be compared with; None for weights that are only written to.
    """
    if weights.has_kernels:
        from . import gpu_grids, on_gpu

        on_gpu.warm_up(weights, new)
        if new is None:
            gpu_grids.warm_up(weights)
