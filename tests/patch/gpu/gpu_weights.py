"""Weights on a GPU, or on CPU tensors that pass for it in Triton's interpreter, and two versions of them."""

from __future__ import annotations

import os

import numpy as np
import pytest

from sparserl.kernels import gpu
from sparserl.patch import gpu_apply as device_apply
from sparserl.patch import gpu_compare, gpu_encode
from sparserl.plan import buckets
from sparserl.weights import memory
from sparserl.weights.dtypes import BY_NAME, Bits
from tests.class_choice import always
from tests.triton_runs import hasten_interpreter

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

CUDA = torch.cuda.is_available()
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
WITHOUT_KERNELS = os.environ.get("SPARSERL_GPU") == "off"
needs_gpu = pytest.mark.skipif(not CUDA and not INTERPRETED, reason="runs in the interpreter: make interpreted")
needs_kernels = pytest.mark.skipif(
    WITHOUT_KERNELS or (not CUDA and not INTERPRETED), reason="is about kernels, which do not run here"
)

DEVICE = torch.device("cuda", 0) if CUDA else torch.device("cpu")
if INTERPRETED and not CUDA:
    hasten_interpreter()

FEW = 10  # changes that are coded, of 9000 elements: the interpreter takes 10 ms for a symbol


def poisoned(_, size, dtype):
    """Whatever a kernel does not write is wrong, not zero by chance."""
    return torch.full((size * dtype.itemsize,), 0xA5, dtype=torch.uint8).view(dtype)


def pretend(monkeypatch):
    """Torch tensors are on a GPU, few changes are coded there too, and classes always pay."""
    if not CUDA:
        monkeypatch.setattr(memory, "is_on_gpu", lambda _: True)
        monkeypatch.setattr(gpu.changes.Blocks, "empty", poisoned)
    monkeypatch.setattr(gpu_compare, "FEW_CHANGES", 0)
    monkeypatch.setattr(device_apply, "FEW_BYTES", 0)
    monkeypatch.setattr(device_apply, "FEW_CHANGES", 0)
    monkeypatch.setattr(gpu_encode, "classes_from_histogram", always)
    monkeypatch.setattr(buckets, "choose_classes", always)


def gpu_tensor(bits):
    """Bits as a torch tensor on the device."""
    signed = bits.array.view(np.uint8 if bits.dtype.width == 1 else f"i{bits.dtype.width}").copy()
    return torch.from_numpy(signed).view(getattr(torch, bits.dtype.name)).to(DEVICE)


def host_bits(tensor):
    """A tensor on the device as bits in host memory."""
    if isinstance(tensor, Bits):
        return Bits(tensor.array.copy(), tensor.dtype)
    dtype = BY_NAME[str(tensor.dtype).removeprefix("torch.")]
    ints = tensor.detach().contiguous().view(gpu.ints.INTS[dtype.width]).cpu().numpy()
    return Bits(ints.view(dtype.uint).copy().reshape(tuple(tensor.shape)), dtype)


def on_gpu(weights):
    return {name: gpu_tensor(bits) for name, bits in weights.items()}


def on_host(weights):
    return {name: host_bits(bits) for name, bits in weights.items()}


def same_bits(a, b):
    a, b = on_host(a), on_host(b)
    return a.keys() == b.keys() and all(np.array_equal(a[name].array, b[name].array) for name in a)


def two_versions(name, shapes, changes=None, seed=0):
    """Two versions: small steps in as many elements as said, of each tensor some; one named `all` has other bits."""
    rng, dtype = np.random.default_rng(seed), BY_NAME[name]
    total = sum(int(np.prod(shape)) for n, shape in shapes.items() if n != "all")
    changes = FEW * max(1, total // 9000) if changes is None else changes
    old, new = {}, {}
    for tensor, shape in shapes.items():
        bits = rng.integers(0, 256, int(np.prod(shape)) * dtype.width, dtype=np.uint8).view(dtype.uint)
        other = bits.copy()
        where = rng.permutation(bits.size)[: -(-changes * bits.size // max(1, total))]
        other[where] += rng.integers(1, 4, where.size).astype(dtype.uint)
        if tensor == "all":
            other = rng.permutation(bits)
        old[tensor], new[tensor] = Bits(bits.reshape(shape), dtype), Bits(other.reshape(shape), dtype)
    return old, new


TWO = {"odd": (7, 41), "large": (3, 600_001 if CUDA else 2003)}


def profiles_of(patch):
    return {head.profile.name for head in patch.contents.heads}
