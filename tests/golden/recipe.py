"""Weights out of nothing but integer arithmetic: the same bits on any machine, with any NumPy, for ever.

Never change what a recipe gives: golden patches apply to these bits and to no others.
"""

from __future__ import annotations

import hashlib
import math
from typing import Any

import numpy as np

from sparserl.weights.dtypes import BY_NAME, Bits

Tensor = tuple[str, str, list[int], str, int]  # name, dtype, shape, kind, seed


def noise(seed: int, size: int) -> Any:
    """64 bits for each index: SplitMix64, counted from the seed."""
    z = (np.arange(1, size + 1, dtype=np.uint64) + np.uint64(seed << 32)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def bits(dtype: str, size: int, kind: str, seed: int) -> Any:
    """Patterns of a dtype: `any` at all, `small` magnitudes more often than large ones, or `edges`."""
    uint, width = BY_NAME[dtype].uint, 8 * BY_NAME[dtype].width
    z = noise(seed, size)
    if dtype == "bool":
        return (z & np.uint64(1)).astype(uint)
    if kind == "any":
        return (z >> np.uint64(64 - width)).astype(uint)
    if kind == "small":
        shift = z % np.uint64(width)
        reach = (z >> np.uint64(64 - width)) >> shift
        return reach.astype(uint) ^ ((z >> np.uint64(7) & np.uint64(1)) << np.uint64(width - 1)).astype(uint)
    assert kind == "edges"
    top = 1 << (width - 1)
    runs = [((1 << n) - 1) << at for n in range(1, width) for at in (0, width - 1 - n)]
    values = sorted({v % (2 * top) for r in (0, top - 1, *runs) for v in (r, r + 1, r | top, (r + 1) | top)})
    return np.array(values, np.uint64)[(z % np.uint64(len(values))).astype(np.int64)].astype(uint)


def weights(tensors: list[Tensor]) -> dict[str, Bits]:
    """The base of a golden patch."""
    out = {}
    for name, dtype, shape, kind, seed in tensors:
        made = bits(dtype, math.prod(shape), kind, seed).reshape(shape)
        out[name] = Bits(np.ascontiguousarray(made), BY_NAME[dtype])
    return out


def fingerprint(held: dict[str, Bits]) -> str:
    """SHA-256 of all bits, tensor by tensor in the order of names."""
    sums = hashlib.sha256()
    for name in sorted(held):
        sums.update(name.encode() + b"\0" + np.ascontiguousarray(held[name].array).tobytes())
    return sums.hexdigest()
