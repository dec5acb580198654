"""Tracked rows on a GPU: kernels there mark what steps change, and the host does not wait for them.

    step ──► new bits (of masters, or of the weights), old bits ──► differences of the digest sums, and marks

Marks and sums are copied to host memory when they are needed. A row can be tracked on its GPU if its elements are
contiguous in memory and in their tensor, and no other row shares them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..kernels import gpu
from ..weights import memory
from ..weights.gpu_copies import fetch

Pair = tuple[Any, Any]  # the new elements of a row, which may be wider, and its old bits, which become the new ones


def fits(new: Any, old: Any) -> bool:
    """Whether kernels can compare two tensors: on one GPU, contiguous, of one dtype or cast from fp32 to bf16."""
    return bool(
        (new.dtype is old.dtype or (new.dtype is torch.float32 and old.dtype is torch.bfloat16))
        and memory.is_on_gpu(new)
        and gpu.support.obstacle(new.device) is None
        and new.device == old.device
        and new.is_contiguous()
        and old.is_contiguous()
        and new.shape == old.shape
    )


def has_memory_for(tensors: Sequence[Any]) -> bool:
    """Whether the GPUs of some tensors have memory for copies of them, and for a quarter more."""
    needed: dict[Any, int] = {}
    for tensor in tensors:
        needed[tensor.device] = needed.get(tensor.device, 0) + tensor.nbytes
    return all(device.type != "cuda" or 1.25 * nbytes < _free_bytes(device) for device, nbytes in needed.items())


def _free_bytes(device: Any) -> int:
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + cached


def _on(device: Any) -> AbstractContextManager[Any]:
    """Kernels are launched on the current device, which need not be that of the rows."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


class GpuMarks:
    """Marks of some rows on one GPU, and how their digests have changed, since some moment.

    Args:
        rows: the numbers of the rows.
        old: the bits of one of them.
        numel: the elements of each.
        keys: the digest keys of their tensors.
        start: where each begins in its tensor.
    """

    def __init__(self, rows: list[int], old: Any, numel: list[int], keys: Any, start: list[int]) -> None:
        self._rows = rows
        self._blocks = gpu.changes.Blocks(old.element_size(), numel, old.device, keys, start)
        self._words = self._blocks.bitmap()
        self._counts = self._blocks.empty(self._blocks.count, torch.int32)
        self._sums = torch.zeros((len(rows), 2), dtype=torch.int64, device=old.device)

    def add(self, pairs: list[Pair]) -> None:
        """Add what a step has changed. The new bits are written over the old ones."""
        blocks = self._blocks
        sizes = blocks.sizes.tolist()
        tensors = [new.detach() for new, _ in pairs]
        new_blocks = (
            blocks if tensors[0].element_size() == blocks.width else gpu.changes.Blocks(4, sizes, blocks.device)
        )
        new = new_blocks.side(tensors)
        old = blocks.side([old.detach() for _, old in pairs])
        with _on(blocks.device):
            gpu.sums.digest_deltas(blocks, new, old, self._sums)
            gpu.changes.mark(blocks, new, old, self._words, self._counts)

    def settle(self, first: npt.NDArray[np.int64], words: npt.NDArray[np.uint64], moved: Any) -> None:
        """Add the marks and sums to those in host memory, where `first` is the first word of each row."""
        pending = (fetch(self._words), fetch(self._sums))
        gpu_words, sums = (wait().view(np.uint64) for wait in pending)
        words_per_block = self._blocks.block // 64
        for row, block, row_sums in zip(self._rows, self._blocks.first_block.tolist(), sums, strict=True):
            row_words = words[first[row] : first[row + 1]]
            start = block * words_per_block
            row_words |= gpu_words[start : start + row_words.size]
            moved[row] += row_sums


def grouped(pairs: Mapping[int, Pair]) -> dict[tuple[Any, ...], list[int]]:
    """Rows that kernels can take together, by device and dtypes."""
    groups: dict[tuple[Any, ...], list[int]] = {}
    for r, (new, old) in sorted(pairs.items()):
        groups.setdefault((old.device, old.dtype, new.dtype), []).append(r)
    return groups
