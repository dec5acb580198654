"""Tracked rows on a GPU: they are compared there, and what changed is copied to host memory, where old bits are kept.

    step ──► old bits, new bits (of the weights, of masters or of wider parameters, cast) ──► positions and old bits

A GPU takes a cut of at most 512 MiB of rows at a time. The host waits for the number of its changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from ..kernels import gpu
from ..weights import memory
from ..weights.gpu_copies import fetch
from .tracked_rows import Cut, RowChanges


def fits(new: Any, old: Any) -> bool:
    """Whether kernels can compare two flat tensors, the first of which may have to be cast."""
    return bool(
        memory.is_on_gpu(new)
        and gpu.support.obstacle(new.device) is None
        and new.device == old.device
        and new.shape == old.shape
    )


def has_memory_for(tensors: Sequence[Any], width: int | None = None) -> bool:
    """Whether the GPUs of some tensors have memory for copies of them, and for a quarter more.

    width: bytes of an element of the copies, if these are cast.
    """
    needed: dict[Any, int] = {}
    for tensor in tensors:
        nbytes = tensor.numel() * (width or tensor.element_size())
        needed[tensor.device] = needed.get(tensor.device, 0) + nbytes
    return all(device.type != "cuda" or 1.25 * nbytes < _free_bytes(device) for device, nbytes in needed.items())


def _free_bytes(device: Any) -> int:
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + cached


def _on(device: Any) -> AbstractContextManager[Any]:
    """Kernels are launched on the current device, which need not be that of the rows."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def copy(tensors: Sequence[Any], dtype: Any) -> list[Any]:
    """Copies of flat tensors, cast to a dtype. (Which NaN a NaN is cast to is what torch does on their GPU.)"""
    with torch.no_grad():
        return [tensor.detach().to(dtype, copy=True) for tensor in tensors]


def compare(cut: Cut, some: np.ndarray[Any, Any], old: Sequence[Any], new: Sequence[Any]) -> RowChanges:
    """What differs in some rows of a cut: flat tensors on one GPU, the new ones perhaps wider."""
    uint = cut.batch.dtype.uint
    device = old[0].device
    with _on(device), torch.no_grad():
        blocks = gpu.changes.Blocks(old[0].element_size(), [tensor.numel() for tensor in old], device)
        sides = [blocks.side([tensor.detach().to(old[0].dtype) for tensor in tensors]) for tensors in (old, new)]
        aligned = all(side.aligned for side in sides)  # or neither: kernels are compiled for versions alike
        old_side, new_side = (replace(side, aligned=aligned) for side in sides)
        bitmap, block_counts = gpu.changes.diff(blocks, old_side, new_side)
        counts = fetch(gpu.streams.part_changes(blocks, block_counts))().astype(np.int64)
        changes = gpu.changes.compact(
            blocks, old_side, new_side, bitmap, block_counts, int(counts.sum()), keep_old=True
        )
        del bitmap  # it is large
        copies = [fetch(column) for column in (changes.positions, changes.old, changes.new)]
        positions, old_bits, new_bits = (wait() for wait in copies)
    return RowChanges(cut, some, counts, positions.view(np.uint32), old_bits.view(uint), new_bits.view(uint))


def write(weights: Sequence[Any], masters: Sequence[Any]) -> None:
    """Copy masters to their weights, cast."""
    with torch.no_grad():
        torch._foreach_copy_([weight.detach() for weight in weights], [master.detach() for master in masters])
