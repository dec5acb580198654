"""Where the bits of a tensor lie in memory, and which tensors share memory.

Kernels work on addresses, so that ten thousand small tensors cost no more than one large one. A `Memory` keeps its
owner alive for as long as the address is in use.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from ..errors import TiedConflict
from .dtypes import DType, UIntArray
from .region import Region, Shape, row_major, run_start

Weights = Mapping[str, Any]
_shares_memory: Any = np.shares_memory  # its stub leaves out the numbers that max_work may be


class Memory(NamedTuple):
    """The memory of one tensor. `strides` count elements; None means contiguous, row-major."""

    dtype: DType
    shape: Shape
    address: int
    strides: Shape | None
    writable: bool
    owner: object

    def view(self) -> UIntArray:
        """The tensor as an array of unsigned integers that shares its memory."""
        if 0 in self.shape:  # PyTorch says that it lies at address 0, which NumPy before 2.4 refuses
            return np.empty(self.shape, self.dtype.uint)
        width = self.dtype.width
        strides = row_major(self.shape) if self.strides is None else self.strides
        interface = {
            "version": 3,
            "typestr": self.dtype.uint.str,
            "shape": self.shape,
            "strides": tuple(s * width for s in strides),
            "data": (self.address, not self.writable),
        }
        return np.asarray(_Interface(interface, self.owner))

    def read(self, region: Region | None) -> tuple[int, object]:
        """The address of the region's bits in row-major order, copied only if needed, and the object that owns them."""
        if self.strides is None:
            if region is None:
                return self.address, self.owner
            start = run_start(region, self.shape)
            if start is not None:
                return self.address + start * self.dtype.width, self.owner
        part = self.view() if region is None else self.view()[region.slices]
        copy = np.ascontiguousarray(part)
        return address_of(copy), copy

    def copied(self) -> UIntArray:
        """The bits of the tensor, row-major, in memory that nobody else writes to."""
        return np.array(self.view(), copy=True, order="C")

    def span(self) -> tuple[int, int]:
        """The lowest address of the tensor's bytes, and the first address behind them."""
        if self.strides is None:
            return self.address, self.address + math.prod(self.shape) * self.dtype.width
        low = 0
        high = 1
        for stride, size in zip(self.strides, self.shape, strict=True):
            if stride < 0:
                low += stride * (size - 1)
            else:
                high += stride * (size - 1)
        return self.address + low * self.dtype.width, self.address + high * self.dtype.width


class _Interface:
    """What NumPy needs to see memory that it did not allocate, with a reference to its owner."""

    def __init__(self, interface: dict[str, Any], owner: object) -> None:
        self.__array_interface__ = interface
        self.owner = owner


def address_of(array: np.ndarray[Any, Any]) -> int:
    """The address of an array's first element."""
    return int(array.__array_interface__["data"][0])


is_on_gpu: Callable[[Any], bool] = attrgetter("is_cuda")
"""Whether a torch tensor lies on a GPU."""


def tied_groups(memory_by_name: Mapping[str, Memory]) -> list[list[str]]:
    """Groups of names that are the very same memory; tensors that share only some elements are an error."""
    names = [name for name, memory in memory_by_name.items() if 0 not in memory.shape]
    spans = np.array([memory_by_name[name].span() for name in names], np.int64).reshape(-1, 2)
    order = np.argsort(spans[:, 0], kind="stable")
    low, high = spans[order].T
    overlapping = np.flatnonzero(low[1:] < np.maximum.accumulate(high)[:-1]) + 1  # begin before an earlier one ends
    groups: list[list[str]] = []
    cluster: list[list[str]] = []
    last = -1
    for i in overlapping.tolist():
        if i != last + 1:
            groups += cluster
            cluster = []
            _join(cluster, names[order[i - 1]], memory_by_name)
        _join(cluster, names[order[i]], memory_by_name)
        last = i
    return [group for group in groups + cluster if len(group) > 1]


def _join(cluster: list[list[str]], name: str, memory_by_name: Mapping[str, Memory]) -> None:
    """Put a name into the group of the same memory; interleaved but disjoint views stay apart."""
    memory = memory_by_name[name]
    for group in cluster:
        other = memory_by_name[group[0]]
        if _same(memory, other):
            group.append(name)
            return
        if _share(memory, other):
            raise TiedConflict(
                f"tensors {group[0]!r} and {name!r} share some of their memory without being the same tensor; "
                "apply the patch to separate copies"
            )
    cluster.append([name])


def _share(a: Memory, b: Memory) -> bool:
    try:
        # Only addresses are compared and nothing is read, so this works for memory on a GPU too.
        return bool(_shares_memory(Memory.view(a), Memory.view(b), max_work=1_000_000))
    except np.exceptions.TooHardError:
        return True


def _same(a: Memory, b: Memory) -> bool:
    return (a.address, a.dtype, a.shape, a.strides) == (b.address, b.dtype, b.shape, b.strides)
