"""Rows whose weights are on a device: what steps change is marked there, and the host waits for nothing meanwhile.

    step ──► masters (or the weights themselves), the bits before it ──► how the sums move, then marks: both add up

Marks and sums come to the host when somebody asks for them. A row takes part if its elements follow each other in
memory and in their tensor, and no other row shares them: a tied weight is compared under each of its names first.
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

Pair = tuple[Any, Any]  # the new bits of a row, which may be wider, and its old ones, which become the new ones


def fits(new: Any, old: Any) -> bool:
    """Whether kernels can make new bits of old ones: on one device, contiguous, alike or cast from fp32 to bf16."""
    kinds = new.dtype, old.dtype
    return bool(
        (kinds[0] is kinds[1] or kinds == (torch.float32, torch.bfloat16))
        and memory.is_on_gpu(new)
        and new.device == old.device
        and new.is_contiguous()
        and old.is_contiguous()
        and new.shape == old.shape
    )


def room(tensors: Sequence[Any]) -> bool:
    """Whether their devices have room for copies of some tensors, and for a quarter more."""
    wanted: dict[Any, int] = {}
    for tensor in tensors:
        wanted[tensor.device] = wanted.get(tensor.device, 0) + tensor.nbytes
    return all(device.type != "cuda" or 1.25 * nbytes < _free(device) for device, nbytes in wanted.items())


def _free(device: Any) -> int:
    idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + idle


def _at(device: Any) -> AbstractContextManager[Any]:
    """Kernels are launched on the current device, which need not be that of the rows."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


class Marked:
    """Marks and moved sums of some rows on one device, since some moment."""

    def __init__(self, rows: list[int], old: Any, numel: list[int], keys: Any, start: list[int]) -> None:
        self._rows = rows
        self._blocks = gpu.changes.Blocks(old.element_size(), numel, old.device, keys, start)
        self._words = self._blocks.bitmap()
        self._counts = self._blocks.empty(self._blocks.count, torch.int32)
        self._sums = torch.zeros((len(rows), 2), dtype=torch.int64, device=old.device)

    def add(self, pairs: list[Pair]) -> None:
        """A step has made new bits of the old ones; these are then the new ones, too."""
        blocks = self._blocks
        sizes = blocks.sizes.tolist()
        news = [new.detach() for new, _ in pairs]
        wide = blocks if news[0].element_size() == blocks.width else gpu.changes.Blocks(4, sizes, blocks.device)
        new, old = wide.side(news), blocks.side([old.detach() for _, old in pairs])
        with _at(blocks.device):
            gpu.sums.digest_deltas(blocks, new, old, self._sums)
            gpu.changes.mark(blocks, new, old, self._words, self._counts)

    def settle(self, first: npt.NDArray[np.int64], words: npt.NDArray[np.uint64], moved: Any) -> None:
        """Add marks and sums to those of the host; `first` is the first word of each row there."""
        waits = fetch(self._words), fetch(self._sums)
        found, sums = (wait().view(np.uint64) for wait in waits)
        per = self._blocks.block // 64
        for row, block, both in zip(self._rows, self._blocks.first_block.tolist(), sums, strict=True):
            mine = words[first[row] : first[row + 1]]
            mine |= found[block * per : block * per + mine.size]
            moved[row] += both


def grouped(pairs: Mapping[int, Pair]) -> dict[tuple[Any, ...], list[int]]:
    """Rows that kernels take together, by what they have in common."""
    out: dict[tuple[Any, ...], list[int]] = {}
    for r, (new, old) in sorted(pairs.items()):
        out.setdefault((old.device, old.dtype, new.dtype), []).append(r)
    return out
