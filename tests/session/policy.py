"""A small policy whose weights change with every step, for tests of sessions."""

from __future__ import annotations

import numpy as np

from sparserl import Bits
from sparserl.weights.dtypes import BY_NAME


class Policy:
    """Weights that change a little with every step: several dtypes, a tie, an empty tensor and a single number."""

    def __init__(self, seed=0, scale=1):
        self.rng = np.random.default_rng(seed)
        draw = lambda *shape: self.rng.normal(size=shape)  # noqa: E731
        bf16 = BY_NAME["bfloat16"]
        self.arrays = {
            "embed": (draw(60 * scale, 32).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16),
            "router": draw(32, 8).astype(np.float32),
            "half": draw(50 * scale, 7).astype(np.float16),
            "steps": np.array(0, np.int64),
            "none": np.zeros((0, 4), np.float32),
        }
        self.weights = {k: Bits(a, bf16) if k == "embed" else a for k, a in self.arrays.items()}
        self.weights["head"] = self.weights["embed"]

    def step(self, share=0.02):
        for name in ("embed", "router", "half"):
            flat = self.arrays[name].reshape(-1).view(f"u{self.arrays[name].itemsize}")
            where = self.rng.random(flat.size) < share
            flat[where] += self.rng.choice(np.array([1, -1]), int(where.sum())).astype(flat.dtype)
        self.arrays["steps"] += 1

    def copy(self):
        return {k: a.copy() for k, a in self.arrays.items()}

    def empty(self):
        """Weights like these, all zero; not tied."""
        return {
            k: Bits(np.zeros_like(w.array), w.dtype) if isinstance(w, Bits) else np.zeros_like(w)
            for k, w in self.weights.items()
        }


def bits(weights):
    return {k: np.array(w.array if isinstance(w, Bits) else w).tobytes() for k, w in weights.items()}
