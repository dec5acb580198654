"""Coded anchors of weights on a GPU are decoded there."""

from __future__ import annotations

import numpy as np
import pytest

from sparserl.kernels import gpu, reference
from sparserl.patch import gpu_restoration
from sparserl.patch.contents import Contents
from sparserl.patch.snapshot import restore, snapshot
from sparserl.plan import buckets
from sparserl.weights.dtypes import BY_NAME, Bits
from sparserl.weights.on_gpu import zeros_like
from tests.dtypes import long_if_rare
from tests.patch.gpu.gpu_weights import CUDA, DEVICE, needs_kernels, on_gpu, same_bits

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

SHAPES = {"large": (3, 500_001 if CUDA else 17), "odd": (2, 9), "one": ()}


def some_weights(name, shapes=SHAPES, seed=0):
    """Weights whose highest bytes are few, as those of floats are, and whose lowest are any."""
    rng, dtype = np.random.default_rng(seed), BY_NAME[name]
    weights = {}
    for tensor, shape in shapes.items():
        table = rng.integers(0, 256, (int(np.prod(shape)), dtype.width), np.uint8)
        table[:, -1] = rng.choice([7, 8, 9, 200], table.shape[0], p=[0.6, 0.3, 0.05, 0.05])
        weights[tensor] = Bits(table.reshape(-1).view(dtype.uint).reshape(shape), dtype)
    return weights


@pytest.fixture
def only_on_gpu(monkeypatch):
    """No bucket is decoded on the CPU."""
    monkeypatch.setattr(Contents, "decode", None)
    monkeypatch.setattr(gpu_restoration, "LEAST_CHUNK_LOG", 0)


@needs_kernels
@pytest.mark.parametrize("dtype", [pytest.param(name, marks=long_if_rare(name)) for name in BY_NAME])
def test_every_dtype(dtype, only_on_gpu):
    weights = some_weights(dtype)
    fresh = zeros_like(on_gpu(weights))
    restore(snapshot(weights), fresh, 1)
    assert same_bits(fresh, weights)
