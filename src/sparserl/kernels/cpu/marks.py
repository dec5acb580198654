"""Where changes are, on a CPU, in Numba: bitmaps, and lists of positions with the old bits there.

A bitmap has one bit per element, 64 to a word, the first element lowest.
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
def merge_old(first: Any, first_bits: Any, then: Any, then_bits: Any, positions: Any, bits: Any) -> Any:
    """Join two rising lists of positions with the old bits there; of a position in both, the first bits count.

    Returns how many there are.
    """
    i = np.int64(0)
    j = np.int64(0)
    n = np.int64(0)
    while i < first.size or j < then.size:
        if i < first.size and (j >= then.size or first[i] <= then[j]):
            if j < then.size and first[i] == then[j]:
                j += 1
            positions[n] = first[i]
            bits[n] = first_bits[i]
            i += 1
        else:
            positions[n] = then[j]
            bits[n] = then_bits[j]
            j += 1
        n += 1
    return n


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
