"""Bitmaps of changes: one bit per element, 64 to a word, the first element lowest."""

from __future__ import annotations

from typing import Any

import numpy as np

from .llvm import inline, kernel, lowest, popcount

_ONE, _ALL = np.uint64(1), np.uint64(0xFFFFFFFFFFFFFFFF)


@kernel
def mark(positions: Any, offset: Any, words: Any) -> None:
    """Set the bits at `offset` and the positions from there."""
    for i in range(positions.size):
        p = np.int64(positions[i]) + offset
        words[p >> 6] |= _ONE << np.uint64(p & 63)


@inline
def _inside(words: Any, w: Any, low: Any, high: Any) -> Any:
    """A word without the bits that stand before `low` or from `high` on."""
    mask = words[w]
    if w == low >> 6:
        mask &= _ALL << np.uint64(low & 63)
    if w == high >> 6:
        mask &= (_ONE << np.uint64(high & 63)) - _ONE
    return mask


@kernel
def count_marks(words: Any, low: Any, high: Any) -> Any:
    """How many bits are set from `low` to `high`."""
    total = 0
    for w in range(low >> 6, (high + 63) >> 6):
        total += popcount(_inside(words, w, low, high))
    return total


@kernel
def list_marks(words: Any, low: Any, high: Any, out: Any) -> None:
    """Write down the bits that are set from `low` to `high`, counted from `low`."""
    k = 0
    for w in range(low >> 6, (high + 63) >> 6):
        mask = _inside(words, w, low, high)
        base = (w << 6) - low
        while mask:
            out[k] = base + lowest(mask)
            k += 1
            mask &= mask - _ONE
