"""Estimated bits: the entropy of the index (which elements changed) and of the words, taken from a sample.

No constant is fitted to a data set.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt

from .. import codec
from ..codec.profile import Counts
from ..kernels import cpu
from ..weights.dtypes import UIntArray
from .changes import Changes

_SAMPLE = 1 << 12
_AUTO_PROFILES = ("ctx", "ulp", "gap", "raw")


def index_bits(numel: Counts, count: Counts) -> npt.NDArray[np.float64]:
    """Bits to encode which `count` of `numel` elements changed, if all choices are equally likely."""
    out = np.empty(numel.size, np.float64)
    cpu.entropy.index_bits(numel, count, out)
    return out


def number_bits(values: UIntArray) -> float:
    """Bits per number as tokens, estimated from a sample."""
    return float(cpu.entropy.number_bits(values, max(1, values.size // _SAMPLE)))


def plane_bits(words: UIntArray) -> float:
    """Bits per word in byte planes."""
    sample = np.ascontiguousarray(words[:: max(1, words.size // _SAMPLE)])
    if not sample.size:
        return 0.0
    table = sample.view(np.uint8).reshape(sample.size, -1)
    return sum(_entropy(table[:, plane]) for plane in range(table.shape[1]))


def _entropy(symbols: npt.NDArray[np.uint8]) -> float:
    """Bits per byte, with the Miller-Madow correction for small samples; never more than eight."""
    counts = np.bincount(symbols, minlength=256)
    shares = counts[counts > 0] / symbols.size
    correction = (shares.size - 1) / (2 * math.log(2) * symbols.size)
    return min(8.0, float(-(shares * np.log2(shares)).sum()) + correction)


def word_bits(changes: Changes, name: str, part: slice = slice(None)) -> float | None:
    """Bits per change for the word in a profile, or None if these changes cannot be written in it."""
    words = changes.after if codec.PROFILES[name].absolute else changes.steps
    if words is None:
        return None
    if name == "raw":
        return 8.0 * changes.dtype.width
    return plane_bits(words[part]) if name == "gap" else number_bits(words[part])


def estimate(changes: Changes, names: Sequence[str], total: int | None = None) -> dict[str, float]:
    """Bits of the sparse part in each profile that can write it; of `total` changes, if the words are a sample.

    For `ctx` this is the estimate of `ulp`. Its own is found with its classes, before a full bucket picks a profile.
    """
    total = changes.total if total is None else total
    gaps = float(index_bits(changes.numel, changes.count).sum())
    out = {}
    for name in names:
        if name == "ctx" and "ulp" in names:
            continue
        bits = word_bits(changes, name)
        if bits is not None:
            out[name] = (32.0 * total if name == "raw" else gaps) + bits * total
    if "ctx" in names and "ulp" in out and changes.base is not None:
        out["ctx"] = out["ulp"]
    return out


def candidates(name: str, allowed: Collection[str] | None = None) -> tuple[str, ...]:
    """The profiles to choose from: all for "auto", else the one of that name; of these, those that are allowed.

    A bucket in which `ctx` saves nothing is written in `ulp`, so `ctx` can be chosen only where both are allowed.

    allowed: those that receivers can take; None for all.
    """
    names = _AUTO_PROFILES if name == "auto" else (codec.profile_by_name(name).name,)
    if allowed is None:
        return names
    return tuple(name for name in names if name in allowed and (name != "ctx" or "ulp" in allowed))
