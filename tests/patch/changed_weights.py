"""Weights of every dtype in every memory layout, and all kinds of changes to them."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from sparserl.kernels import reference
from sparserl.weights.dtypes import BY_NAME, DTYPES, Bits
from sparserl.weights.tensors import memories
from tests.dtypes import COMMON

COMMON_DTYPES = [BY_NAME[name] for name in COMMON]
common_or_all_dtypes = pytest.mark.parametrize(
    "choices", [COMMON_DTYPES, pytest.param(DTYPES, marks=pytest.mark.long)], ids=["common", "all"]
)

PROFILES = ("auto", "raw", "gap", "ulp", "ctx")
CHANGES = ("nothing", "one", "first", "last", "all", "few", "half", "signs", "payloads", "infinities", "tiny", "steps")
SHAPES = ((), (0,), (1,), (63,), (64,), (65,), (3, 0, 2), (7, 11), (2, 3, 5, 7), (1, 300), (257, 1))

each_profile = pytest.mark.parametrize("profile", PROFILES)


def top(dtype):
    return dtype.uint.type(1 << (8 * dtype.width - 1))


def awkward(dtype):
    """Zeros of both signs, infinities and NaNs of every format of the width, subnormals, extremes."""
    bits = 8 * dtype.width
    runs = [((1 << n) - 1) << shift for n in range(1, bits + 1) for shift in (0, max(0, bits - 1 - n))]
    numbers = {0, 1, 2, *runs, *(r + 1 for r in runs)}
    return np.array(sorted({v % (1 << bits) for n in numbers for v in (n, n | 1 << (bits - 1))}), dtype.uint)


def random_bits(rng, dtype, shape):
    """Any bit pattern, the awkward ones often."""
    size = math.prod(shape)
    bits = rng.integers(0, 256, size * dtype.width, np.uint8).view(dtype.uint)
    return np.where(rng.random(size) < 0.4, rng.choice(awkward(dtype), size), bits).reshape(shape)


def change(rng, dtype, old, kind):
    """New bits that differ from the old ones in a named way."""
    new = old.copy()
    flat = new.reshape(-1)
    size = flat.size
    if kind == "nothing" or not size:
        return new
    where = {
        "one": rng.integers(0, size, 1),
        "first": np.array([0]),
        "last": np.array([size - 1]),
        "all": np.arange(size),
        "few": np.flatnonzero(rng.random(size) < 0.03),
    }.get(kind, np.flatnonzero(rng.random(size) < 0.5))
    some = flat[where]
    if kind == "signs":
        some = some ^ top(dtype)
    elif kind == "payloads":
        some = some ^ dtype.uint.type(1)
    elif kind == "infinities":
        some = rng.choice(awkward(dtype), some.size)
    elif kind == "tiny":
        some = rng.integers(0, 3, some.size).astype(dtype.uint) | (some & top(dtype))
    elif kind == "steps":
        some = reference.advance(some, rng.integers(1, 4, some.size).astype(dtype.uint), dtype.sign_magnitude)
    else:
        flips = rng.integers(0, 256, some.size * dtype.width, np.uint8).view(dtype.uint)
        some = some ^ np.where(flips == 0, dtype.uint.type(1), flips)
    flat[where] = some
    return new


def laid_out(bits, layout):
    """A copy of the patterns in memory of the given layout."""
    if not bits.ndim or not bits.size:
        return bits.copy()
    if layout == "strided":
        room = np.zeros(tuple(2 * n + 1 for n in bits.shape), bits.dtype)
        view = room[tuple(slice(1, None, 2) for _ in bits.shape)]
    elif layout == "transposed":
        view = np.zeros(bits.shape[::-1], bits.dtype).T
    elif layout == "reversed":
        view = np.zeros(bits.shape, bits.dtype)[tuple(slice(None, None, -1) for _ in bits.shape)]
    elif layout == "unaligned":
        view = np.ndarray(bits.shape, bits.dtype, np.zeros(bits.nbytes + 1, np.uint8), offset=1)
    else:
        view = np.zeros(bits.shape, bits.dtype)
    view[...] = bits
    return view


def tensor(bits, dtype, holder="bits", layout="contiguous"):
    """The patterns as a `Bits`, a torch tensor or a NumPy array of their dtype (`Bits` where NumPy has none)."""
    if holder == "torch" and layout not in ("reversed", "unaligned"):
        return torch.from_numpy(laid_out(bits, layout)).view(getattr(torch, dtype.name))
    kind = getattr(ml_dtypes, dtype.name, None) or getattr(np, dtype.name, None)
    if holder == "numpy" and kind is not None and layout == "contiguous":
        return laid_out(bits, layout).view(kind)
    return Bits(laid_out(bits, layout), dtype)


def patterns(weights):
    """Copies of all bits, by name."""
    return {name: memory.view().copy() for name, memory in memories(weights).items()}


def assert_same(expected, weights):
    actual = patterns(weights)
    assert expected.keys() == actual.keys()
    for name, bits in expected.items():
        assert bits.shape == actual[name].shape, name
        assert bits.dtype == actual[name].dtype, name
        assert (bits == actual[name]).all(), name


def hold(bits, dtypes, holder="bits", layout="contiguous"):
    return {name: tensor(b, dtypes[name], holder, layout) for name, b in bits.items()}


def family(seed, dtype, kind, shapes=SHAPES):
    """Old and new bits of one dtype in many shapes, and the dtype by name."""
    rng = np.random.default_rng(seed)
    old = {f"t{i}": random_bits(rng, dtype, shape) for i, shape in enumerate(shapes)}
    new = {name: change(rng, dtype, bits, kind) for name, bits in old.items()}
    return old, new, dict.fromkeys(old, dtype)


@st.composite
def weights_pairs(draw, choices):
    """Two versions of some tensors of mixed dtypes, as patterns."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    old, new, dtypes = {}, {}, {}
    for i in range(draw(st.integers(0, 5))):
        dtype = draw(st.sampled_from(choices))
        shape = tuple(draw(st.lists(st.integers(0, 12), max_size=3)))
        name = draw(st.sampled_from(("w", "é", "model.layers.0", "", "a b"))) + str(i)
        dtypes[name] = dtype
        old[name] = random_bits(rng, dtype, shape)
        new[name] = change(rng, dtype, old[name], draw(st.sampled_from(CHANGES)))
    return old, new, dtypes


def strided(shape):
    return torch.zeros((*shape[:-1], 2 * shape[-1]))[..., ::2]
