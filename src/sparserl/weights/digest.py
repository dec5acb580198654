"""The digest: what tells one version of the weights from another.

Two 64-bit sums, over all elements, of a strong mix of (tensor, position in the tensor, bits), plus one term per
tensor for its name, dtype and shape. A sum has no order: shards add up, and a patch moves it in O(changed).
docs/reference/format.md says what it protects against, and what not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from ..kernels import cpu
from ..parallel import Progress, ordered
from .memory import Weights
from .pieces import Batch, Held, Numbers, batches, outline
from .shards import Place, Shards
from .table import TensorTable

_ALL = (1 << 64) - 1


@dataclass(frozen=True, order=True)
class Digest:
    """A pair of sums. Digests of disjoint parts add; `hex` is how people see one."""

    first: int = 0
    second: int = 0

    def __add__(self, other: Digest) -> Digest:
        return Digest((self.first + other.first) & _ALL, (self.second + other.second) & _ALL)

    def __sub__(self, other: Digest) -> Digest:
        return Digest((self.first - other.first) & _ALL, (self.second - other.second) & _ALL)

    def to_bytes(self) -> bytes:
        return self.first.to_bytes(8, "big") + self.second.to_bytes(8, "big")

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> Digest:
        return cls(int.from_bytes(data[:8], "big"), int.from_bytes(data[8:16], "big"))

    @classmethod
    def from_hex(cls, text: str) -> Digest:
        """The digest that prints as `text`."""
        data = bytes.fromhex(text)
        if len(data) != 16:
            raise ValueError(f"a digest has 32 hexadecimal digits, not {len(text)}")
        return cls.from_bytes(data)

    @property
    def hex(self) -> str:
        return self.to_bytes().hex()

    def __str__(self) -> str:
        return self.hex


def table_digest(table: TensorTable) -> Digest:
    """What names, dtypes and shapes add: each tensor, once, the mix of a zero at a position no element can have."""
    zero = np.zeros(1, np.uint8)
    n = len(table)
    address, size, start = np.full(n, zero.ctypes.data, np.int64), np.ones(n, np.int64), np.full(n, -1, np.int64)
    first, second = cpu.changes.digest(zero, address, size, start, table.keys)
    return Digest(int(first), int(second))


def sums(table: TensorTable, batch: Batch, addresses: Numbers) -> Digest:
    """The element sums of a batch whose bits lie, in row-major order, at the addresses."""
    tag, keys = np.empty(0, batch.dtype.uint), table.keys[batch.tensor]
    if any(region is not None for region in batch.region):
        g = outline(table, batch.tensor, batch.region)
        first, second = cpu.changes.digest_boxes(tag, addresses, g.start, g.dims, g.size, g.outside, keys)
    else:
        first, second = cpu.changes.digest(tag, addresses, batch.numel, np.zeros(len(batch), np.int64), keys)
    return Digest(int(first), int(second))


def element_sums(
    held: Held, places: Iterable[Place], threads: int | None = None, progress: Progress | None = None
) -> Digest:
    """The sums over the elements at the given places, without the terms of the table."""

    def one(batch: Batch) -> tuple[Digest, int]:
        addresses, alive = held.read(batch)
        part = sums(held.table, batch, addresses)
        del alive  # copies may go only now
        return part, batch.elements * batch.dtype.width

    def found() -> Iterator[tuple[Digest, int]]:
        near = [*places]
        if held.devices:
            from . import on_gpu as device

            near, far = device.near_and_far(near, held)
            for first, second, done in device.sums(held, far):
                yield Digest(first, second), done
        yield from ordered(one, batches(held.table, near), threads)

    total = Digest()
    for part, done in found():
        total += part
        if progress is not None:
            progress(done)
    return total


def digest(weights: Weights | Shards, *, threads: int | None = None, progress: Progress | None = None) -> Digest:
    """The digest of weights: one read of every element.

    The digests of shards add up: those of all, and `table_digest` once for the names, are the digest of the whole.

    >>> digest({"w": np.zeros(2, np.float32)}) == digest({"w": np.array([0.0, -0.0], np.float32)})
    False
    """
    held = Held.of(weights)
    read = element_sums(held, held.places, threads, progress)
    return read + table_digest(held.table) if held.complete else read
