"""Dtypes as bit patterns: names and codes that are part of the format, and the order of each kind of number."""

from __future__ import annotations

import copy
import pickle

import ml_dtypes
import numpy as np
import pytest
import torch

from sparserl.kernels import reference
from sparserl.weights.dtypes import BY_CODE, BY_NAME, BY_SAFETENSORS, DTYPES, Bits

CODES = {
    "bool": 0,
    "uint8": 1,
    "int8": 2,
    "float8_e4m3fn": 3,
    "float8_e5m2": 4,
    "float8_e4m3fnuz": 5,
    "float8_e5m2fnuz": 6,
    "float8_e8m0fnu": 7,
    "float4_e2m1fn_x2": 8,
    "uint16": 16,
    "int16": 17,
    "float16": 18,
    "bfloat16": 19,
    "uint32": 32,
    "int32": 33,
    "float32": 34,
    "complex32": 35,
    "uint64": 48,
    "int64": 49,
    "float64": 50,
    "complex64": 51,
}

each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=repr)


def test_codes_are_those_of_the_format():
    """Names and codes are on the wire for ever; none is used twice."""
    assert {d.name: d.code for d in DTYPES} == CODES
    assert len(BY_NAME) == len(BY_CODE) == len(DTYPES)
    assert len(BY_SAFETENSORS) == sum(d.safetensors is not None for d in DTYPES)


@each_dtype
def test_the_patterns_have_the_width_of_the_element(dtype):
    """The unsigned view is as wide as torch's and NumPy's element, and little-endian."""
    assert dtype.uint.kind == "u"
    assert dtype.uint.itemsize == dtype.width
    assert dtype.uint.str in ("|u1", "<u2", "<u4", "<u8")
    if (theirs := getattr(torch, dtype.name, None)) is not None:
        assert theirs.itemsize == dtype.width
    if hasattr(ml_dtypes, dtype.name):
        assert np.dtype(getattr(ml_dtypes, dtype.name)).itemsize == dtype.width


@each_dtype
def test_a_dtype_is_one_object(dtype):
    """Looked up, copied or sent to another process, it stays the same object, so identity tells dtypes apart."""
    assert BY_NAME[dtype.name] is dtype
    assert BY_CODE[dtype.code] is dtype
    assert pickle.loads(pickle.dumps(dtype)) is dtype
    assert copy.deepcopy(dtype) is dtype
    assert repr(dtype) == dtype.name


NARROW = [d for d in DTYPES if d.width <= 2 and d.name not in ("bool", "float4_e2m1fn_x2")]


@pytest.mark.parametrize("dtype", NARROW, ids=repr)
def test_the_order_of_patterns_is_the_order_of_values(dtype):
    """Sorted by their monotonic integer, all finite values of a narrow format are sorted; -0.0 comes before +0.0."""
    bits = np.arange(1 << (8 * dtype.width), dtype=dtype.uint)
    signed = not dtype.sign_magnitude and dtype.name.startswith("int")
    kind = np.dtype(getattr(ml_dtypes, dtype.name, dtype.name))
    with np.errstate(invalid="ignore"):
        values = bits.view(kind).astype(np.float64)
    rank = reference.order(bits, dtype.sign_magnitude)
    if signed:
        rank = rank + dtype.uint.type(1 << (8 * dtype.width - 1))
    assert np.unique(rank).size == bits.size
    order = np.argsort(rank)
    ordered = values[order]
    ordered = ordered[np.isfinite(ordered)]
    assert (ordered[:-1] <= ordered[1:]).all()
    assert ((ordered[:-1] < ordered[1:]) | ((ordered[:-1] == 0) & np.signbit(ordered[:-1]))).all()
    assert (reference.unorder(reference.order(bits, dtype.sign_magnitude), dtype.sign_magnitude) == bits).all()


@each_dtype
def test_bits_refuses_an_array_of_another_kind(dtype):
    """Patterns are held in the unsigned integer of the width, and in nothing else."""
    assert Bits(np.zeros(3, dtype.uint), dtype).dtype is dtype
    for other in (np.int8, np.float16, np.float32, np.float64, *(f"u{w}" for w in (1, 2, 4, 8) if w != dtype.width)):
        with pytest.raises(ValueError, match=dtype.name):
            Bits(np.zeros(3, other), dtype)
    if dtype.width > 1:
        with pytest.raises(ValueError, match=dtype.name):
            Bits(np.zeros(3, dtype.uint.newbyteorder(">")), dtype)
