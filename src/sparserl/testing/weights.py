"""Weights for the suites, and what their bits are."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..weights.dtypes import Bits
from ..weights.memory import Weights
from ..weights.table import TensorTable
from ..weights.tensors import memories

_SHAPES: dict[str, tuple[int, ...]] = {
    "embed.weight": (60, 32),
    "layers.0.up.weight": (48, 32),
    "norm.weight": (32,),
    "router.weight": (8, 32),
}


def versions(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Weights after each of some steps: float32 and float16, with NaNs and zeros that only their bits tell apart."""
    rng = np.random.default_rng(seed)
    now: dict[str, Any] = {
        name: rng.normal(size=shape).astype(np.float16 if "up" in name else np.float32)
        for name, shape in _SHAPES.items()
    }
    out = []
    for version in range(count):
        for array in now.values():
            words = array.reshape(-1).view(f"u{array.itemsize}")
            words[rng.random(words.size) < (0.02 if version else 0)] ^= 1
        now["norm.weight"][3] = -0.0 if version % 2 else 0.0
        now["norm.weight"].view(np.uint32)[5] = 0x7FC00000 + version
        out.append({name: array.copy() for name, array in now.items()})
    return out


def blank(table: TensorTable) -> dict[str, Bits]:
    """Weights of a tensor table, with no bit set."""
    return {spec.name: Bits(np.zeros(spec.shape, spec.dtype.uint), spec.dtype) for spec in table.specs}


def bits(weights: Weights) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Names, dtypes, shapes and every bit, to be compared."""
    return {
        name: (memory.dtype.name, tuple(memory.shape), memory.copied().tobytes())
        for name, memory in memories(weights).items()
    }
