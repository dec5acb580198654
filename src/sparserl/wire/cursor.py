"""Bounded reading and writing of the small fields around the streams."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from ..errors import ChecksumMismatch, InvalidField, LimitExceeded, Truncated
from ..kernels import cpu

CHECKSUM_BYTES = 16
_FEW = 32  # numbers


class Cursor:
    """Reads forward through a buffer; every read says what it is reading and how large it may be."""

    def __init__(self, data: bytes | memoryview, what: str) -> None:
        self.data = memoryview(data)
        self.at = 0
        self.what = what

    @property
    def left(self) -> int:
        return len(self.data) - self.at

    def take(self, size: int, field: str) -> memoryview:
        if size > self.left:
            raise Truncated(f"{self.what}: {field} needs {size} bytes, {self.left} are left")
        self.at += size
        return self.data[self.at - size : self.at]

    def byte(self, field: str) -> int:
        if self.at == len(self.data):
            raise Truncated(f"{self.what}: {field} needs 1 bytes, 0 are left")
        self.at += 1
        return self.data[self.at - 1]

    def varint(self, field: str, most: int) -> int:
        value = shift = 0
        while True:
            byte = self.byte(field)
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                break
            if shift > 63:
                raise InvalidField(f"{self.what}: {field} is not a canonical number")
        if byte == 0 and shift > 7:
            raise InvalidField(f"{self.what}: {field} is not a canonical number")
        if value > most:
            raise LimitExceeded(f"{self.what}: {field} is {value}, the limit is {most}")
        return value

    def varints(self, count: int, field: str, most: int) -> npt.NDArray[np.int64]:
        """A column of numbers. Each takes at least a byte, which bounds the count before memory is taken."""
        if count > self.left:
            raise Truncated(f"{self.what}: {count} numbers of {field} cannot stand in {self.left} bytes")
        out = np.empty(count, np.uint64)
        end = cpu.changes.read_varints(np.frombuffer(self.data, np.uint8), self.at, np.uint64(most), out)
        if end < 0:
            raise InvalidField(f"{self.what}: {field} ends too early, is not canonical, or is above {most}")
        self.at = end
        return out.astype(np.int64)

    def numbers(self, count: int, field: str, most: int) -> list[int]:
        """`varints` as a list: if there are few, kernels would take longer to begin than to read them."""
        if count > _FEW or count > self.left:
            found: list[int] = self.varints(count, field, most).tolist()
            return found
        out = []
        data = self.data
        at = self.at
        end = len(self.data)
        for _ in range(count):
            value = 0
            shift = 0
            byte = 128
            while byte >= 128 and at < end and shift <= 63:
                byte = data[at]
                value |= (byte & 127) << shift
                at = at + 1
                shift = shift + 7
            if byte >= 128 or value > most or (byte == 0 and shift > 7):
                raise InvalidField(f"{self.what}: {field} ends too early, is not canonical, or is above {most}")
            out.append(value)
        self.at = at
        return out

    def finish(self) -> None:
        if self.left:
            raise InvalidField(f"{self.what}: {self.left} bytes too many")


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


def sealed(data: bytes | memoryview, what: str) -> memoryview:
    """What stands before the checksum at the end of `data`, once that checksum holds."""
    view = memoryview(data)
    if len(view) < CHECKSUM_BYTES:
        raise Truncated(f"{what}: {len(view)} bytes cannot hold a checksum")
    body = view[:-CHECKSUM_BYTES]
    if checksum(body) != bytes(view[-CHECKSUM_BYTES:]):
        raise ChecksumMismatch(f"{what}: checksum does not match; the bytes were altered")
    return body
