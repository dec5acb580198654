"""What turns weights on a GPU into another version on the same GPU, staged there: no change leaves it.

weights, new version ──► bitmap ──► changes, compacted ──► located in the weights, with old bits and digest
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from ..errors import InvalidField
from ..kernels import gpu
from ..weights.digest import Digest
from ..weights.local import LocalWeights
from ..weights.on_gpu import Runs, groups, on_stream, split_by_gpu
from .application import Application
from .gpu_apply import GpuStaged
from .gpu_changes import ComparedRuns


def stage_difference(
    weights: LocalWeights, new: LocalWeights, base: Digest, result: Digest | None = None
) -> Application | None:
    """Stage the difference between two versions on the first of them. Nothing is written.

    Args:
        weights: The version now.
        new: The version afterwards, of these parts and perhaps others; it is not needed any more when this returns.
        base: The digest of the version now.
        result: The digest of the version afterwards, which the changes must lead to. None for parts of weights: then
            the caller must compare what they lead to.

    Returns:
        The changes, ready to be written. None if some weights do not lie on a GPU in both versions, as runs or rows, or
        if tensors share memory.

    Raises:
        InvalidField: The changes lead to another digest.
        torch.cuda.OutOfMemoryError: The changes do not fit the GPU.
    """
    elsewhere, all_runs = split_by_gpu(weights.places, weights, new, with_rows=True)
    if elsewhere or weights.tied:
        return None
    parts = [part for runs in groups(all_runs) for part in _stage_runs(weights, new, runs)]
    if not all(part.is_decoded for part in parts):
        raise InvalidField("a GPU found changes that do not lie in the weights; nothing was touched")
    digest = sum((part.moved for part in parts), base)
    if result is not None and digest != result:
        raise InvalidField(f"the changes lead to digest {digest}, not to {result}; the weights are as they were")
    changed = sum(part.changes.addresses.numel() for part in parts)
    return Application(weights, base, digest, tuple(parts), tied=False, changed=changed)


def _stage_runs(weights: LocalWeights, new: LocalWeights, runs: Runs) -> Sequence[GpuStaged]:
    """The changes of some runs; none if they have none."""
    with on_stream(weights, runs.device):
        blocks, (old_side, new_side) = runs.blocks()
        bitmap, block_counts = gpu.changes.diff(blocks, old_side, new_side)
        counts = blocks.fetch(gpu.streams.part_changes(blocks, block_counts))()
        if not counts.any():
            return []
        compared = ComparedRuns(
            *(weights, new, runs, counts, blocks, old_side, new_side, bitmap, block_counts, None)
        ).select(np.flatnonzero(counts))
        packed = compared.compacted()
        # What is staged must not keep the new version alive.
        alone = replace(
            compared.runs, address=compared.runs.address[:1], widths=compared.runs.widths[:1], owners=(weights,)
        )
        live_blocks, (side,) = alone.blocks()
        bad = torch.zeros(1, dtype=torch.int32, device=runs.device)
        changes = gpu.cells.locate(live_blocks, side, compared.changes, packed.positions, packed.after, bad)
        outcome = live_blocks.fetch(torch.cat((gpu.changes.sum_slots(changes.sums), bad)))
        return [GpuStaged(weights, [], side, changes, outcome)]
