"""Bounded reading and writing of the small fields around the streams."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from ..errors import ChecksumMismatch, InvalidField, LimitExceeded, Truncated
from ..kernels import cpu

CHECKSUM_BYTES = 16
_FEW_NUMBERS = 32  # up to so many, Python is faster than a kernel


class Cursor:
    """Reads a buffer from front to back. Every read names the field for errors, and gives the limit of its value."""

    def __init__(self, data: bytes | memoryview, label: str) -> None:
        self.data = memoryview(data)
        self.offset = 0
        self.label = label

    @property
    def bytes_left(self) -> int:
        return len(self.data) - self.offset

    def take(self, size: int, field: str) -> memoryview:
        if size > self.bytes_left:
            raise Truncated(f"{self.label}: {field} needs {size} bytes, {self.bytes_left} are left")
        self.offset += size
        return self.data[self.offset - size : self.offset]

    def byte(self, field: str) -> int:
        if self.offset == len(self.data):
            raise Truncated(f"{self.label}: {field} needs 1 byte, 0 are left")
        self.offset += 1
        return self.data[self.offset - 1]

    def varint(self, field: str, limit: int) -> int:
        value = shift = 0
        while True:
            byte = self.byte(field)
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                break
            if shift > 63:
                raise InvalidField(f"{self.label}: {field} is not a canonical number")
        if byte == 0 and shift > 7:
            raise InvalidField(f"{self.label}: {field} is not a canonical number")
        if value > limit:
            raise LimitExceeded(f"{self.label}: {field} is {value}, the limit is {limit}")
        return value

    def varints(self, count: int, field: str, limit: int) -> npt.NDArray[np.int64]:
        """A column of numbers. Each takes at least a byte, which bounds the count before memory is allocated."""
        if count > self.bytes_left:
            raise Truncated(f"{self.label}: {count} numbers of {field} do not fit in {self.bytes_left} bytes")
        out = np.empty(count, np.uint64)
        end = cpu.changes.read_varints(np.frombuffer(self.data, np.uint8), self.offset, np.uint64(limit), out)
        if end < 0:
            raise InvalidField(f"{self.label}: {field} ends too early, is not canonical, or is above {limit}")
        self.offset = end
        return out.astype(np.int64)

    def numbers(self, count: int, field: str, limit: int) -> list[int]:
        """`varints` as a list. Few numbers are read in Python, since calling a kernel would take longer."""
        if count > _FEW_NUMBERS or count > self.bytes_left:
            column: list[int] = self.varints(count, field, limit).tolist()
            return column
        out = []
        data = self.data
        offset = self.offset
        end = len(self.data)
        for _ in range(count):
            value = 0
            shift = 0
            byte = 128
            while byte >= 128 and offset < end and shift <= 63:
                byte = data[offset]
                value |= (byte & 127) << shift
                offset += 1
                shift += 7
            if byte >= 128 or value > limit or (byte == 0 and shift > 7):
                raise InvalidField(f"{self.label}: {field} ends too early, is not canonical, or is above {limit}")
            out.append(value)
        self.offset = offset
        return out

    def finish(self) -> None:
        if self.bytes_left:
            raise InvalidField(f"{self.label}: {self.bytes_left} bytes too many")


def varint(value: int) -> bytes:
    """A number in LEB128: seven bits a byte, the lowest first."""
    out = bytearray()
    while value >= 128:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def varints(values: npt.NDArray[Any]) -> bytes:
    """A column of numbers in LEB128."""
    out = np.empty(10 * values.size, np.uint8)
    return out[: cpu.changes.varints(values.astype(np.uint64), out)].tobytes()


def checksum(*parts: bytes | bytearray | memoryview) -> bytes:
    """xxh3-128 over the parts, one after the other."""
    state = xxhash.xxh3_128()
    for part in parts:
        state.update(part)
    return state.digest()


def strip_checksum(data: bytes | memoryview, label: str) -> memoryview:
    """The bytes before the checksum at the end of `data`, which must match."""
    view = memoryview(data)
    if len(view) < CHECKSUM_BYTES:
        raise Truncated(f"{label}: {len(view)} bytes are too few for a checksum")
    body = view[:-CHECKSUM_BYTES]
    if checksum(body) != bytes(view[-CHECKSUM_BYTES:]):
        raise ChecksumMismatch(f"{label}: checksum does not match; the bytes were altered")
    return body
