"""Marks of quantized parts: which codes and scales changed since the last committed version, and how the digest moved.

The memory that codes are written to still has those of the last time, so that no other copy is needed to find changes.
Kernels note changes while they quantize; elsewhere the codes are compared with a copy, tensor by tensor.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ..kernels.gpu.ints import INTS
from ..weights.gpu_copies import fetch
from ..weights.marks import Bitmap
from ..weights.region import Region, row_major, run_start
from ..weights.table import TensorTable

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)  # as int64
_LOW = 0xFFFFFFFF


class QuantizedMarks:
    """The changes of one quantized tensor's part since the last committed version, on its device.

    Args:
        table: the table of the quantized weights.
        name: the tensor.
        region: the region that the part is.
        bits: the memory of the part, as integers.
    """

    def __init__(self, table: TensorTable, name: str, region: Region, bits: torch.Tensor) -> None:
        number = table.index[name]
        shape = table.specs[number].shape
        self._strides = row_major(shape)
        self._region = region
        self.bits = bits
        self.run_start = run_start(region, shape)
        self.words = torch.zeros(-(-bits.numel() // 64), dtype=torch.int64, device=bits.device)
        self.sums = torch.zeros((1, 2), dtype=torch.int64, device=bits.device)
        keys = table.keys[number].view(np.int64).tolist()
        self.place = torch.tensor([*keys, self.run_start or 0], device=bits.device)

    def clear(self) -> None:
        """Forget all changes."""
        self.words.zero_()
        self.sums.zero_()

    def note(self, old: torch.Tensor) -> None:
        """Note where the memory differs from what it was."""
        positions = (old.reshape(-1) != self.bits.reshape(-1)).nonzero().view(-1)
        words = torch.zeros_like(self.words)
        self.words |= words.index_add_(0, positions >> 6, torch.ones_like(positions) << (positions & 63))
        weyl = self.place[0] + self._in_tensor(positions) * _GOLDEN
        before = _mixed(weyl, self.place[1], old.reshape(-1)[positions])
        after = _mixed(weyl, self.place[1], self.bits.reshape(-1)[positions])
        self.sums[0, 0] += (after - before).sum()
        self.sums[0, 1] += (_turn(after) - _turn(before)).sum()

    def published(self) -> tuple[Bitmap, tuple[int, int]]:
        """The marks, and by how much the digest moved, in host memory."""
        bitmap = Bitmap(self.bits.numel())
        pending = (fetch(self.words), fetch(self.sums))
        words, sums = (wait().view(np.uint64) for wait in pending)
        bitmap.words[:] = words
        first, second = sums[0].tolist()
        return bitmap, (first, second)

    def _in_tensor(self, positions: torch.Tensor) -> torch.Tensor:
        """Where positions in the region are in the tensor."""
        if self.run_start is not None:
            return positions + self.run_start
        places = torch.zeros_like(positions)
        for start, size, inner, stride in zip(
            self._region.start, self._region.size, row_major(self._region.size), self._strides, strict=True
        ):
            places += (positions // inner % size + start) * stride
        return places


def integers(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of a tensor as integers, in the same memory."""
    return tensor.view(INTS[tensor.element_size()])


def _turn(z: torch.Tensor) -> torch.Tensor:
    """A round of the digest's mixing, modulo 2^64 in int64."""
    return (z & _LOW) * ((z >> 32) & _LOW) + ((z << 41) | ((z >> 23) & ((1 << 41) - 1)))


def _mixed(weyl: torch.Tensor, key: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """What elements add to the first sum of the digest."""
    unsigned: Any = bits.to(torch.int64) & ((1 << (8 * bits.element_size())) - 1)
    return _turn(_turn(_turn(weyl ^ unsigned) + key))
