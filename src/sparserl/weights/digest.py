"""The digest, which identifies one version of the weights.

It is two 64-bit sums, over all elements, of a strong mix of (tensor, position in the tensor, bits), plus one term per
tensor for its name, dtype and shape. Sums have no order: shards add up, and a patch updates them in O(changed).
docs/reference/format.md says what the digest protects against, and what not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from ..kernels import cpu
from ..parallel import Progress, ordered
from .batches import Batch, batches
from .geometry import tensor_geometry
from .local import LocalWeights
from .memory import Weights
from .region import Numbers, all_whole
from .shards import Place, Shards
from .table import TensorTable

_ALL = (1 << 64) - 1


@dataclass(frozen=True, order=True)
class Digest:
    """The digest of weights or of a part of them. Digests of disjoint parts can be added.

    Attributes:
        first: The first 64-bit sum.
        second: The second 64-bit sum.

    Example:
        >>> Digest(1, 2) + Digest(3, 4) == Digest(4, 6)
        True
        >>> Digest.from_hex(Digest(1, 2).hex) == Digest(1, 2)
        True
    """

    first: int = 0
    second: int = 0

    def __add__(self, other: Digest) -> Digest:
        return Digest((self.first + other.first) & _ALL, (self.second + other.second) & _ALL)

    def __sub__(self, other: Digest) -> Digest:
        return Digest((self.first - other.first) & _ALL, (self.second - other.second) & _ALL)

    def to_bytes(self) -> bytes:
        """Sixteen bytes, big-endian."""
        return self.first.to_bytes(8, "big") + self.second.to_bytes(8, "big")

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> Digest:
        """The digest of `to_bytes`."""
        return cls(int.from_bytes(data[:8], "big"), int.from_bytes(data[8:16], "big"))

    @classmethod
    def from_hex(cls, text: str) -> Digest:
        """The digest that prints as `text`.

        Raises:
            ValueError: The text is not 32 hexadecimal digits.
        """
        data = bytes.fromhex(text)
        if len(data) != 16:
            raise ValueError(f"a digest has 32 hexadecimal digits, not {len(text)}")
        return cls.from_bytes(data)

    @property
    def hex(self) -> str:
        """Thirty-two hexadecimal digits."""
        return self.to_bytes().hex()

    def __str__(self) -> str:
        return self.hex


@lru_cache(maxsize=8)
def table_digest(table: TensorTable) -> Digest:
    """The terms of names, dtypes and shapes: for each tensor the mix of a zero at a position that no element has."""
    zero = np.zeros(1, np.uint16)  # of any width: this kernel is compiled for bf16 anyway
    n = len(table)
    address = np.full(n, zero.ctypes.data, np.int64)
    size = np.ones(n, np.int64)
    start = np.full(n, -1, np.int64)
    first, second = cpu.changes.digest(zero, address, size, start, table.keys)
    return Digest(int(first), int(second))


def sums(table: TensorTable, batch: Batch, addresses: Numbers) -> Digest:
    """The element sums of a batch whose bits lie, in row-major order, at the addresses."""
    width_tag = np.empty(0, batch.dtype.uint)  # tells the kernel how wide elements are
    keys = table.keys[batch.tensor]
    if not all_whole(batch.region):
        boxes = tensor_geometry(table, batch.tensor, batch.region).in_tensor
        first, second = cpu.changes.digest_boxes(width_tag, addresses, boxes)
    else:
        start = np.zeros(len(batch), np.int64)
        first, second = cpu.changes.digest(width_tag, addresses, batch.numel, start, keys)
    return Digest(int(first), int(second))


class SumsFromZeros(NamedTuple):
    """What a batch adds to a digest, what zeros in its place would add, and how many elements of each place are set."""

    base: Digest
    result: Digest
    counts: Numbers


def sums_from_zeros(table: TensorTable, batch: Batch, addresses: Numbers) -> SumsFromZeros:
    """The element sums of a batch, as `sums`, and of zeros, from which an anchor makes it: in one pass."""
    width_tag = np.empty(0, batch.dtype.uint)
    boxes = tensor_geometry(table, batch.tensor, batch.region).in_tensor
    counts = np.empty(len(batch), np.int64)
    *result, zero_first, zero_second = cpu.changes.digest_boxes_and_zeros(width_tag, addresses, boxes, counts)
    return SumsFromZeros(Digest(int(zero_first), int(zero_second)), Digest(*map(int, result)), counts)


def element_sums(
    weights: LocalWeights, places: Iterable[Place], threads: int | None = None, progress: Progress | None = None
) -> Digest:
    """The sums over the elements at these places, without the terms of the table."""
    total = Digest()
    all_places = places if isinstance(places, list) else [*places]  # a copy of the table's would be read one by one
    for part, nbytes in _partial_sums(weights, all_places, threads):
        total += part
        if progress is not None:
            progress(nbytes)
    return total


def place_sums(weights: LocalWeights, threads: int | None = None) -> dict[Place, Digest]:
    """The sums over the elements of every place."""
    places = [*weights.places]
    sums: dict[Place, Digest] = {}
    if weights.has_kernels:
        from . import gpu_grids, gpu_sums, on_gpu

        places, all_runs = on_gpu.split_by_gpu(places, weights)
        for runs in all_runs:
            sums |= {place: Digest(first, second) for place, first, second, _ in gpu_sums.run_sums(weights, runs)}
        places, all_grids = gpu_grids.split_grids(places, weights)
        for grids in all_grids:
            with on_gpu.on_stream(weights, grids.device):
                sums |= {place: Digest(*pair) for place, pair in zip(grids.places, grids.place_sums(), strict=True)}
    rest = ordered(lambda place: element_sums(weights, [place], 1), places, threads)
    return sums | dict(zip(places, rest, strict=True))


def _partial_sums(weights: LocalWeights, places: list[Place], threads: int | None) -> Iterator[tuple[Digest, int]]:
    """Sums that add up to those of all places, each with the bytes that were read."""

    def batch_sums(batch: Batch) -> tuple[Digest, int]:
        addresses, owners = weights.read(batch)
        part = sums(weights.table, batch, addresses)
        del owners  # the addresses may point to copies, which must live until here
        return part, batch.elements * batch.dtype.width

    if weights.has_kernels:
        from . import gpu_sums

        places, groups = gpu_sums.summed_groups(weights, places)
        for first, second, nbytes in gpu_sums.group_sums(weights, groups):
            yield Digest(first, second), nbytes
    yield from ordered(batch_sums, batches(weights.table, places), threads)


def digest(weights: Weights | Shards, *, threads: int | None = None, progress: Progress | None = None) -> Digest:
    """The digest of weights. It reads every element once.

    The digests of shards add up: their sum, plus `table_digest` once for the names, is the digest of the whole.

    Args:
        weights: Tensors by name, or the shards of this process.
        threads: How many threads read; by default as many as the machine has cores, or SPARSERL_THREADS.
        progress: Is called with the number of bytes read since the last call.

    Returns:
        The digest. For shards that are not the whole weights, it lacks the terms of the table.

    Raises:
        UnsupportedTensor: A tensor is of a kind or dtype that is not supported.
        TensorMismatch: A part of the shards does not fit the table.

    Example:
        >>> digest({"w": np.zeros(2, np.float32)}) == digest({"w": np.array([0.0, -0.0], np.float32)})
        False
    """
    return local_digest(LocalWeights.of(weights), threads, progress)


def local_digest(local: LocalWeights, threads: int | None = None, progress: Progress | None = None) -> Digest:
    """The digest of weights that were looked at already."""
    total = element_sums(local, local.places, threads, progress)
    return total + table_digest(local.table) if local.complete else total
