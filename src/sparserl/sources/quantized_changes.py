"""What has changed of quantized codes and scales since the last committed version: where, and the bits there before.

The memory that codes are written to still has those of the last time. Kernels compare codes as they write them; others
are compared with a copy, tensor by tensor. Both give the bits in which new and old differ: the old are new ^ these.
"""

from __future__ import annotations

import numpy as np
import torch

from ..kernels.gpu.ints import INTS
from ..weights.dtypes import UIntArray
from ..weights.gpu_copies import fetch
from ..weights.old_bits import POSITION_BYTES, OldBits, OldPiece, Positions

MOST_NOTED = 1 << 32  # elements of a part, which positions can tell apart


class NotedChanges:
    """The changes of one part's codes or scales; the first old bits of each element are kept, in host memory.

    Nothing is noted before the first version is committed. Where a list of changes would take more than all old bits
    do, these are kept instead.

    Args:
        bits: the memory of the codes or scales, as integers.
    """

    def __init__(self, bits: torch.Tensor) -> None:
        self.bits = bits
        self._piece: OldPiece | None = None

    def clear(self) -> None:
        """A version is committed: forget all changes."""
        self._piece = self._piece_of(np.empty(0, np.uint32), np.empty(0, f"u{self.bits.element_size()}"))

    @property
    def is_open(self) -> bool:
        """Whether changes are noted: some version is committed, and not all old bits are kept already."""
        return self._piece is not None and self._piece.positions is not None

    def add(self, difference: torch.Tensor, changed: int | None = None) -> None:
        """Note where the memory differs from what it was.

        Args:
            difference: The bits that differ.
            changed: How many elements differ, if that is known.
        """
        piece = self._piece
        if piece is None or piece.positions is None or changed == 0:
            return
        bits = self.bits.reshape(-1)
        difference = difference.reshape(-1)
        width = self.bits.element_size()
        most = self.bits.numel() * width // (POSITION_BYTES + width) - piece.positions.size
        positions = difference.nonzero().view(-1) if changed is None or changed <= most else None
        if positions is None or positions.numel() > most:
            later = self._piece_of(None, fetch(bits ^ difference)().view(piece.bits.dtype))
        else:
            pending = (fetch(positions), fetch(bits[positions] ^ difference[positions]))
            where, old = (wait() for wait in pending)
            later = self._piece_of(where.astype(np.uint32), old.view(piece.bits.dtype))
        self._piece = piece.under(later)

    @property
    def old_bits(self) -> OldBits | None:
        """What a publisher needs instead of a baseline; None if nothing is known."""
        return None if self._piece is None else OldBits(self.bits.numel(), [self._piece])

    def _piece_of(self, positions: Positions | None, bits: UIntArray) -> OldPiece:
        return OldPiece(0, self.bits.numel(), positions, bits)


def integers(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of a tensor as integers, in the same memory."""
    return tensor.view(INTS[tensor.element_size()])
