"""Bitmaps of changes on a CPU, in Numba: one bit per element, 64 to a word, the first element lowest.

If bitmaps of many parts lie in one array, each begins with a word of its own.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .arguments import InTensor
from .changes import digest_delta
from .compiling import inline, kernel
from .llvm import copy_bytes, lowest, popcount

_ONE = np.uint64(1)
_ALL = np.uint64(0xFFFFFFFFFFFFFFFF)


@kernel
def mark(positions: Any, offset: Any, words: Any) -> None:
    """Set the bits at some positions, which are counted from `offset`."""
    for i in range(positions.size):
        p = np.int64(positions[i]) + offset
        words[p >> 6] |= _ONE << np.uint64(p & 63)


@kernel
def mark_parts(counts: Any, positions: Any, offset: Any, first: Any, words: Any) -> None:
    """`mark` for a batch of parts; `counts` has how many positions each has, `first` the first word of each."""
    k = 0
    for e in range(counts.size):
        for i in range(k, k + counts[e]):
            p = np.int64(positions[i]) + offset
            words[first[e] + (p >> 6)] |= _ONE << np.uint64(p & 63)
        k += counts[e]


@kernel
def digest_deltas(counts: Any, regions: InTensor, positions: Any, old: Any, new: Any, out: Any) -> None:
    """`digest_delta` of each entry of a batch by itself: one row of two sums per entry."""
    k = 0
    for e in range(counts.size):
        row = slice(e, e + 1)
        some = slice(k, k + counts[e])
        region = InTensor(
            regions.start[row], regions.dims[row], regions.size[row], regions.stride[row], regions.keys[row]
        )
        out[e, 0], out[e, 1] = digest_delta(counts[row], region, positions[some], old[some], new[some])
        k += counts[e]


@kernel
def collect(source: Any, nbytes: Any, target: Any) -> None:
    """Copy the bytes of a batch of parts to the address `target`, one part behind the other."""
    for e in range(source.size):
        copy_bytes(source[e], nbytes[e], target)
        target += nbytes[e]


@inline
def _clipped(words: Any, w: Any, low: Any, high: Any) -> Any:
    """A word without the bits before `low` or from `high` on."""
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
        total += popcount(_clipped(words, w, low, high))
    return total


@kernel
def list_marks(words: Any, low: Any, high: Any, out: Any) -> None:
    """Write down the bits that are set from `low` to `high`, counted from `low`."""
    k = 0
    for w in range(low >> 6, (high + 63) >> 6):
        mask = _clipped(words, w, low, high)
        base = (w << 6) - low
        while mask:
            out[k] = base + lowest(mask)
            k += 1
            mask &= mask - _ONE
