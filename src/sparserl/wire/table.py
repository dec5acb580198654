"""The tensor table as bytes: canonical, so that its hash names it."""

from __future__ import annotations

import math

from ..bits import BY_CODE, DType
from ..codec.coders import Zstd
from ..errors import InvalidField, LimitExceeded, UnsupportedFormat
from ..table import TensorSpec, TensorTable
from . import limits
from .cursor import Cursor, checksum, varint


def encode_table(table: TensorTable) -> bytes:
    """Names in order, each as what it shares with the one before and what it adds; then dtype and shape."""
    out = bytearray(varint(len(table)))
    last = b""
    for spec in table.specs:
        name = spec.name.encode()
        shared = _shared(last, name)
        out += varint(shared) + varint(len(name) - shared) + name[shared:]
        out += bytes((spec.dtype.code, len(spec.shape)))
        for size in spec.shape:
            out += varint(size)
        last = name
    if len(table) > limits.TENSORS or len(out) > limits.TABLE_BYTES:
        raise LimitExceeded(f"a table of {len(table)} tensors in {len(out)} bytes is past the limits of the format")
    return bytes(out)


def decode_table(raw: bytes | memoryview) -> TensorTable:
    """The table of `encode_table`, refusing anything that `encode_table` would not have written."""
    cursor = Cursor(raw, "tensor table")
    specs = []
    last = b""
    for i in range(cursor.varint("tensor count", min(limits.TENSORS, len(raw)))):
        shared = cursor.varint(f"tensor {i}: shared prefix", len(last))
        added = cursor.varint(f"tensor {i}: name length", limits.NAME_BYTES - shared)
        name = last[:shared] + bytes(cursor.take(added, f"tensor {i}: name"))
        if shared != _shared(last, name) or (i and name <= last):
            raise InvalidField(f"tensor table: tensor {i} is out of order or not canonical")
        specs.append(TensorSpec(_text(name, i), *_format(cursor, i)))
        last = name
    cursor.finish()
    return TensorTable(specs)


def _format(cursor: Cursor, i: int) -> tuple[DType, tuple[int, ...]]:
    code = cursor.byte(f"tensor {i}: dtype")
    if (dtype := BY_CODE.get(code)) is None:
        raise UnsupportedFormat(f"tensor table: tensor {i} has unknown dtype {code}")
    rank = cursor.byte(f"tensor {i}: rank")
    if rank > limits.RANK:
        raise LimitExceeded(f"tensor table: tensor {i} has {rank} dimensions, the limit is {limits.RANK}")
    shape = tuple(cursor.varint(f"tensor {i}: size", limits.TENSOR_ELEMENTS) for _ in range(rank))
    if math.prod(shape) > limits.TENSOR_ELEMENTS:
        raise LimitExceeded(f"tensor table: tensor {i} has {math.prod(shape)} elements")
    return dtype, shape


def _text(name: bytes, i: int) -> str:
    try:
        return name.decode()
    except UnicodeDecodeError as error:
        raise InvalidField(f"tensor table: the name of tensor {i} is not UTF-8") from error


def _shared(a: bytes, b: bytes) -> int:
    n = min(len(a), len(b))
    if a[:n] == b[:n]:
        return n
    return next(i for i in range(n) if a[i] != b[i])


def table_hash(raw: bytes) -> bytes:
    """The name of a table: xxh3-128 of its canonical bytes."""
    return checksum(raw)


def compress_table(raw: bytes) -> bytes:
    return bytes(Zstd().encode(raw))


def decompress_table(coded: bytes | memoryview, size: int) -> bytes:
    return bytes(Zstd().decode(coded, size))
