"""Marks: one bit for each element of a region, set where a change may be."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..kernels import cpu


class Bitmap:
    """Marks for the elements of a region, in row-major order.

    >>> bitmap = Bitmap(1000)
    >>> bitmap.add(np.array([3, 700, 3], np.uint32))
    >>> bitmap.between(0, 1000).tolist()
    [3, 700]
    """

    def __init__(self, numel: int) -> None:
        self.numel = numel
        self.words: npt.NDArray[np.uint64] = np.zeros(-(-numel // 64), np.uint64)

    def add(self, positions: npt.NDArray[np.uint32], offset: int = 0) -> None:
        """Mark the elements at these positions, counted from `offset`."""
        cpu.marks.mark(positions, offset, self.words)

    def fill(self) -> None:
        """Mark every element."""
        self.words[:] = ~np.uint64(0)
        if self.numel % 64:
            self.words[-1] = (1 << self.numel % 64) - 1

    def clear(self) -> None:
        self.words[:] = 0

    def take(self) -> Bitmap:
        """Move the marks to another bitmap, and clear this one."""
        moved = Bitmap(0)
        moved.numel = self.numel
        moved.words = self.words
        self.words = np.zeros_like(self.words)
        return moved

    def unite(self, other: Bitmap) -> None:
        """Add the marks of another bitmap of the same size."""
        self.words |= other.words

    @property
    def count(self) -> int:
        """How many elements are marked."""
        return int(cpu.marks.count_marks(self.words, 0, self.numel))

    def between(self, low: int, high: int) -> npt.NDArray[np.uint32]:
        """The positions of the marked elements from `low` to `high`, counted from `low`, in rising order."""
        out = np.empty(int(cpu.marks.count_marks(self.words, low, high)), np.uint32)
        cpu.marks.list_marks(self.words, low, high, out)
        return out
