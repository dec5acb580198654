"""One bit for each element of a tensor: where changes can be."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..kernels import cpu


class Bitmap:
    """Marks for the elements of a region, counted in row-major order.

    >>> bitmap = Bitmap(1000)
    >>> bitmap.add(np.array([3, 700, 3], np.uint32))
    >>> bitmap.between(0, 1000).tolist()
    [3, 700]
    """

    def __init__(self, numel: int) -> None:
        self.numel = numel
        self.words: npt.NDArray[np.uint64] = np.zeros(-(-numel // 64), np.uint64)

    def add(self, positions: npt.NDArray[np.uint32], offset: int = 0) -> None:
        """Mark the elements at `offset` and these positions from there."""
        cpu.marks.mark(positions, offset, self.words)

    def fill(self) -> None:
        """Mark every element."""
        self.words[:] = ~np.uint64(0)
        if self.numel % 64:
            self.words[-1] = (1 << self.numel % 64) - 1

    def clear(self) -> None:
        self.words[:] = 0

    def take(self) -> Bitmap:
        """The marks so far, as another bitmap; this one has none then."""
        taken = Bitmap(0)
        taken.numel, taken.words, self.words = self.numel, self.words, np.zeros_like(self.words)
        return taken

    def unite(self, other: Bitmap) -> None:
        """Add the marks of another bitmap of as many elements."""
        self.words |= other.words

    @property
    def count(self) -> int:
        """How many elements are marked."""
        return int(cpu.marks.count_marks(self.words, 0, self.numel))

    def between(self, low: int, high: int) -> npt.NDArray[np.uint32]:
        """The marked elements from `low` to `high`, counted from `low`, in rising order."""
        out = np.empty(int(cpu.marks.count_marks(self.words, low, high)), np.uint32)
        cpu.marks.list_marks(self.words, low, high, out)
        return out
