"""What has changed of quantized codes and scales since the last committed version: where, and the bits there before.

The memory that codes are written to still has those of the last time. They are compared with a copy, tensor by tensor.
"""

from __future__ import annotations

import numpy as np
import torch

from ..kernels.gpu.ints import INTS
from ..weights.gpu_copies import fetch
from ..weights.old_bits import OldBits, OldPiece, Positions, merge_old

MOST_NOTED = 1 << 32  # elements of a part, which positions can tell apart


class NotedChanges:
    """The changes of one part's codes or scales; the first old bits of each element are kept, in host memory.

    Args:
        bits: the memory of the codes or scales, as integers.
    """

    def __init__(self, bits: torch.Tensor) -> None:
        self.bits = bits
        self._positions: Positions
        self.clear()

    def clear(self) -> None:
        """Forget all changes."""
        self._positions = np.empty(0, np.uint32)
        self._old = np.empty(0, f"u{self.bits.element_size()}")

    def add(self, before: torch.Tensor) -> None:
        """Note where the memory differs from what it was."""
        changed = (before.reshape(-1) != self.bits.reshape(-1)).nonzero().view(-1)
        pending = (fetch(changed), fetch(before.reshape(-1)[changed]))
        positions, old = (wait() for wait in pending)
        merged = merge_old(self._positions, self._old, positions.astype(np.uint32), old.view(self._old.dtype))
        self._positions, self._old = merged

    @property
    def old_bits(self) -> OldBits:
        """What a publisher needs instead of a baseline."""
        numel = self.bits.numel()
        return OldBits(numel, [OldPiece(0, numel, self._positions, self._old)])


def integers(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of a tensor as integers, in the same memory."""
    return tensor.view(INTS[tensor.element_size()])
