"""Safetensors files, coded small: numbers in byte planes, positions as differences, through xz.

The codec knows nothing of what is measured. `unpack(pack(data))` is `data`, byte for byte.
"""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

_DTYPES = {"BF16": np.dtype("<u2"), "I32": np.dtype("<i4")}  # positions are I32, and ascend
_XZ = {"format": lzma.FORMAT_XZ, "check": lzma.CHECK_SHA256, "preset": 6}


def pack(data: bytes) -> bytes:
    """Code the bytes of a safetensors file."""
    begin, tensors = _tensors(data)
    parts = [data[:begin]]
    for dtype, start, end in tensors:
        numbers = np.frombuffer(data[start:end], dtype)
        coded = np.diff(numbers, prepend=dtype.type(0)) if dtype.kind == "i" else numbers
        parts.append(_bytes(coded).reshape(-1, dtype.itemsize).T.tobytes())
    return lzma.compress(b"".join(parts), **_XZ)


def unpack(data: bytes) -> bytes:
    """The bytes of a safetensors file that was coded."""
    data = lzma.decompress(data)
    begin, tensors = _tensors(data)
    parts = [data[:begin]]
    for dtype, start, end in tensors:
        planes = np.frombuffer(data[start:end], np.uint8).reshape(dtype.itemsize, -1)
        numbers = np.ascontiguousarray(planes.T).view(dtype)
        parts.append((np.cumsum(numbers, dtype=dtype) if dtype.kind == "i" else numbers).tobytes())
    return b"".join(parts)


def _bytes(numbers: NDArray[np.generic]) -> NDArray[np.uint8]:
    return np.ascontiguousarray(numbers).view(np.uint8)


def _tensors(data: bytes) -> tuple[int, Iterator[tuple[np.dtype[np.generic], int, int]]]:
    """Where the tensors begin; and dtype, start and end of each, in the order of the file."""
    begin = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:begin])
    header.pop("__metadata__", None)
    rows = sorted((*row["data_offsets"], row["dtype"]) for row in header.values())
    return begin, ((_DTYPES[dtype], begin + start, begin + end) for start, end, dtype in rows)
