"""The tensor table as bytes, which are canonical: equal tables have equal hashes."""

from __future__ import annotations

import math
import operator
from functools import cached_property, lru_cache
from itertools import islice

import numpy as np
import numpy.typing as npt

from ..codec.coders import Zstd
from ..errors import InvalidField, LimitExceeded, UnsupportedFormat
from ..weights.dtypes import BY_CODE
from ..weights.table import TensorSpec, TensorTable
from . import limits
from .cursor import Cursor, checksum, varint, varints


class EncodedTable:
    """A tensor table as bytes, with its hash and its compressed form, each made at most once."""

    def __init__(self, table: TensorTable) -> None:
        self.raw = encode_table(table)
        self.hash = table_hash(self.raw)

    @cached_property
    def compressed(self) -> bytes:
        return compress_table(self.raw)


@lru_cache(maxsize=8)
def encoded_table(table: TensorTable) -> EncodedTable:
    """The bytes of a table, cached for all patches, runs and sessions that use it."""
    return EncodedTable(table)


def encode_table(table: TensorTable) -> bytes:
    """Five columns: lengths of the names, the names, dtypes, ranks, and the sizes of all dimensions."""
    names = [spec.name.encode() for spec in table.specs]
    ranks = [len(spec.shape) for spec in table.specs]
    sizes = [size for spec in table.specs for size in spec.shape]
    raw = b"".join(
        (
            varint(len(table)),
            varints(np.array([len(name) for name in names], np.int64)),
            *names,
            table.codes.tobytes(),
            bytes([min(rank, 255) for rank in ranks]),
            varints(np.array(sizes, np.int64)),
        )
    )
    if (
        len(raw) > limits.TABLE_BYTES
        or len(table) > limits.TENSORS
        or max(map(len, names), default=0) > limits.NAME_BYTES
    ):
        raise LimitExceeded(f"a table of {len(table)} tensors in {len(raw)} bytes exceeds the limits of the format")
    if (
        table.elements > limits.TENSOR_ELEMENTS
        or max(ranks, default=0) > limits.RANK
        or sum(ranks) > limits.TABLE_DIMENSIONS
    ):
        _require_limits(table)
    return raw


def decode_table(raw: bytes | memoryview) -> TensorTable:
    """The table that `encode_table` wrote. Raises for bytes that it would not have written."""
    cursor = Cursor(raw, "tensor table")
    count = cursor.varint("tensor count", min(limits.TENSORS, len(raw)))
    lengths = cursor.varints(count, "name lengths", limits.NAME_BYTES)
    names = _decode_names(bytes(cursor.take(int(lengths.sum()), "names")), lengths)
    if any(map(operator.ge, names, islice(names, 1, None))):
        raise InvalidField("tensor table: names are not in strictly rising order")
    codes = bytes(cursor.take(count, "dtypes"))
    if unknown_codes := set(codes) - BY_CODE.keys():
        raise UnsupportedFormat(f"tensor table: unknown dtype {min(unknown_codes)}")
    dtypes = [BY_CODE[code] for code in codes]
    ranks = bytes(cursor.take(count, "ranks"))
    if max(ranks, default=0) > limits.RANK:
        raise LimitExceeded(f"tensor table: {max(ranks)} dimensions, the limit is {limits.RANK}")
    if sum(ranks) > limits.TABLE_DIMENSIONS:
        raise LimitExceeded(f"tensor table: {sum(ranks)} dimensions in all, the limit is {limits.TABLE_DIMENSIONS}")
    sizes = cursor.varints(sum(ranks), "sizes", limits.TENSOR_ELEMENTS)
    cursor.finish()
    size_list = sizes.tolist()
    begin = 0
    shapes = []
    for rank in ranks:
        shapes.append(tuple(size_list[begin : begin + rank]))
        begin += rank
    table = TensorTable(map(TensorSpec, names, dtypes, shapes))
    if not _clearly_within_limits(ranks, sizes):
        _require_limits(table)
    return table


def _clearly_within_limits(ranks: bytes, sizes: npt.NDArray[np.int64]) -> bool:
    """Whether all tensors are within the limits, computed fast in floats; products that floats round are above them."""
    rank = np.frombuffer(ranks, np.uint8).astype(np.int64)
    begin = (np.cumsum(rank) - rank)[rank > 0]
    if not begin.size:
        return True
    with np.errstate(all="ignore"):
        elements = np.multiply.reduceat(sizes.astype(np.float64), begin)
        total = elements.sum() + len(ranks)
        return bool((elements <= limits.TENSOR_ELEMENTS).all() and total < limits.TABLE_ELEMENTS / 2)


def _require_limits(table: TensorTable) -> None:
    dimensions = elements = 0
    for spec in table.specs:
        numel = math.prod(spec.shape)
        if len(spec.shape) > limits.RANK or numel > limits.TENSOR_ELEMENTS:
            raise LimitExceeded(f"tensor table: {spec} exceeds the limits of the format")
        dimensions += len(spec.shape)
        elements += numel
    if dimensions > limits.TABLE_DIMENSIONS or elements > limits.TABLE_ELEMENTS:
        raise LimitExceeded(
            f"tensor table: {elements} elements and {dimensions} dimensions in all, "
            f"the limits are {limits.TABLE_ELEMENTS} and {limits.TABLE_DIMENSIONS}"
        )


def _decode_names(names: bytes, lengths: npt.NDArray[np.int64]) -> list[str]:
    ends = np.cumsum(lengths)
    try:
        return [names[a:b].decode() for a, b in zip((ends - lengths).tolist(), ends.tolist(), strict=True)]
    except UnicodeDecodeError as error:
        raise InvalidField(f"tensor table: the name {error.object!r} is not UTF-8") from error


def table_hash(raw: bytes) -> bytes:
    """The hash that identifies a table: xxh3-128 of its canonical bytes."""
    return checksum(raw)


def compress_table(raw: bytes) -> bytes:
    return bytes(Zstd().encode(raw))


def decompress_table(coded: bytes | memoryview, size: int) -> bytes:
    return bytes(Zstd().decode(coded, size))
