"""Where very many tensors lie, column by column: a mixture of experts has ten thousand of them.

A column takes one pass in C, and no Python function is called for a single tensor.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from operator import attrgetter, methodcaller
from typing import Any, NamedTuple, Protocol, overload

import numpy as np
import numpy.typing as npt

from . import dlpack
from . import memory as memory_module
from .dtypes import Bits, DType, dtype_of_numpy, dtype_of_torch
from .memory import Memory
from .objects import Objects, array_addresses, identities, types_of
from .region import Numbers, Shape, row_major
from .staging import StagedMemory
from .table import TensorSpec

COMPLEX = frozenset(("complex32", "complex64"))
Flags = npt.NDArray[np.bool_]
_C_CONTIGUOUS = 0x1  # the flags of NumPy's C interface
_WRITEABLE = 0x400


class TensorForms(Hashable, Protocol):
    """The dtypes and shapes of tensors, which are read for a table that is new."""

    @property
    def dtypes(self) -> tuple[DType, ...]:
        """The dtype of each tensor."""

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """The shape of each tensor."""


class ListedForms(NamedTuple):
    """The dtypes and shapes of tensors, one by one."""

    dtypes: tuple[DType, ...]
    shapes: tuple[Shape, ...]


@dataclass(frozen=True, eq=False)
class Columns:
    """Where tensors lie.

    Attributes:
        forms: Their dtypes and shapes.
        addresses: The address of each one's first element.
        strides: Its strides, as its library counts them, or None if it is contiguous; None if all are.
        writable: Whether it can be written to.
        devices: A number that stands for its device.
    """

    forms: TensorForms
    addresses: Numbers
    strides: list[Shape | None] | None
    writable: Flags
    devices: Numbers

    def equal(self, other: Columns) -> bool:
        """Whether these are equal to earlier columns of the same tensors: none of them has moved."""
        return (
            np.array_equal(self.addresses, other.addresses)
            and np.array_equal(self.writable, other.writable)
            and np.array_equal(self.devices, other.devices)
            and self.strides == other.strides
            and self.forms == other.forms
        )


class PlainMemories(Sequence[Memory]):
    """The memory of very many contiguous tensors; a `Memory` is created only when it is read.

    Attributes:
        addresses: The address of each.
        gpus: The number of the GPU that it lies on; -1 for host memory.
        are_writable: Whether all can be written to.
    """

    def __init__(self, specs: Sequence[TensorSpec], columns: Columns, gpus: Numbers, owners: Objects) -> None:
        self.addresses = columns.addresses
        self.gpus = gpus
        self.are_writable = bool(columns.writable.all())
        self._specs = specs
        self._writable = columns.writable
        self._owners = owners

    def __len__(self) -> int:
        return len(self._owners)

    @overload
    def __getitem__(self, index: int) -> Memory: ...

    @overload
    def __getitem__(self, index: slice) -> list[Memory]: ...

    def __getitem__(self, index: int | slice) -> Memory | list[Memory]:
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        _, dtype, shape = self._specs[index]
        address = int(self.addresses[index])
        if self.gpus[index] >= 0:
            return StagedMemory(dtype, shape, address, row_major(shape), True, self._owners[index])
        return Memory(dtype, shape, address, None, bool(self._writable[index]), self._owners[index])

    def __iter__(self) -> Iterator[Memory]:
        if (self.gpus >= 0).any():
            return map(self.__getitem__, range(len(self)))
        dtypes = map(attrgetter("dtype"), self._specs)
        shapes = map(attrgetter("shape"), self._specs)
        return map(Memory, dtypes, shapes, self.addresses.tolist(), repeat(None), self._writable.tolist(), self._owners)


def look_at(tensors: Objects, kinds: set[type] | None = None, pointers: Numbers | None = None) -> Columns | None:
    """Where tensors lie; None unless all are plain torch tensors, all NumPy arrays or all `Bits`, and none is odd.

    kinds: Their types, if they are known.
    pointers: The `id` of each, if it is known.
    """
    kinds = types_of(tensors) if kinds is None else kinds
    torch = sys.modules.get("torch")
    if torch is not None and kinds <= {torch.Tensor, torch.nn.Parameter}:
        return _look_at_torch(tensors, torch.Tensor, identities(tensors) if pointers is None else pointers)
    if kinds == {Bits}:
        return _look_at_bits(tensors)
    if kinds == {np.ndarray}:
        dtypes = _dtypes(list(map(attrgetter("dtype"), tensors)), dtype_of_numpy)
        return None if dtypes is None else _look_at_arrays(tensors, dtypes)
    return None


def owners(tensors: Objects) -> Objects:
    """The objects that own the memory of tensors that `look_at` has columns of."""
    return list(map(attrgetter("array"), tensors)) if len(tensors) and type(tensors[0]) is Bits else tensors


def find_gpus(tensors: Objects, columns: Columns) -> tuple[Numbers, list[Any]] | None:
    """The number of the GPU that each tensor lies on, -1 for host memory, and the GPUs.

    None if a tensor is odd in a way that columns do not show, or lies on neither.
    """
    if not are_plain(tensors):
        return None
    if not hasattr(tensors[0], "is_cpu"):
        return np.full(len(tensors), -1, np.int64), []
    numbers = []
    gpus: list[Any] = []
    device, example = _numbered(columns.devices)
    for tensor in map(tensors.__getitem__, example):
        if memory_module.is_on_gpu(tensor):
            numbers.append(len(gpus))
            gpus.append(tensor.device)
        elif tensor.is_cpu:
            numbers.append(-1)
        else:
            return None
    return np.array(numbers, np.int64)[device], gpus


def are_plain(tensors: Objects) -> bool:
    """Whether no tensor is odd in a way that columns do not show; torch is asked about each.

    A lazy negative view has other bits than those in memory, DLPack takes elements of less than a byte for bytes, and
    the storage of a tensor may have become too small for it.
    """
    if not len(tensors) or not hasattr(tensors[0], "is_cpu"):
        return True
    if None in map(dtype_of_torch, set(map(attrgetter("dtype"), tensors))):
        return False
    return not any(map(methodcaller("is_neg"), tensors)) and all(map(has_memory, tensors))


def has_memory(tensor: Any) -> bool:
    """Whether the storage of a torch tensor has all of its elements: it may have been freed, or made smaller."""
    if not tensor.numel():
        return True
    reach = tensor.numel()
    if not tensor.is_contiguous():
        reach = 1 + sum(stride * (size - 1) for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
    begin = tensor.storage_offset()
    if tensor.data_ptr() == begin * tensor.itemsize:  # all that is left of the address is the offset
        return False
    return bool((begin + reach) * tensor.itemsize <= tensor.untyped_storage().nbytes())


def _numbered(values: Numbers) -> tuple[Numbers, list[int]]:
    """A number for each of the values, equal for equal ones, and the first row of each number."""
    if (values == values[0]).all():
        return np.zeros(values.size, np.int64), [0]
    _, first, number = np.unique(values, return_index=True, return_inverse=True)
    return number, first.tolist()


def _dtypes(library_dtypes: list[Any], dtype_of: Callable[[Any], DType | None]) -> list[DType] | None:
    """The dtypes of which these are a library's; None if one is not supported."""
    dtypes: dict[Any, DType] = {}
    for library_dtype in set(library_dtypes):
        dtype = dtype_of(library_dtype)
        if dtype is None:
            return None
        dtypes[library_dtype] = dtype
    return list(map(dtypes.__getitem__, library_dtypes))


def _look_at_torch(tensors: Objects, torch_tensor: Any, pointers: Numbers) -> Columns | None:
    described = dlpack.describe(pointers)
    if described is None:
        return _ask_each(tensors, torch_tensor)
    forms, addresses, contiguous, devices, _ = described
    strides = None if contiguous.all() else _strides(tensors, contiguous, torch_tensor.stride)
    return Columns(forms, addresses, strides, np.ones(len(tensors), bool), devices)


def _ask_each(tensors: Objects, torch_tensor: Any) -> Columns | None:
    """Where torch tensors lie, by calls of torch for each; None if one is odd."""
    dtypes = _dtypes(list(map(attrgetter("dtype"), tensors)), dtype_of_torch)
    if dtypes is None or not COMPLEX.isdisjoint(dtype.name for dtype in set(dtypes)):
        return None
    try:
        addresses = np.array([*map(torch_tensor.data_ptr, tensors)], np.int64)
        contiguous = np.array([*map(torch_tensor.is_contiguous, tensors)], bool)
        shapes = tuple(map(tuple, map(attrgetter("shape"), tensors)))
    except RuntimeError:  # of a sparse tensor, which has no address, or a nested one, which has no shape
        return None
    strides = None if contiguous.all() else _strides(tensors, contiguous, torch_tensor.stride)
    tensor_devices = list(map(attrgetter("device"), tensors))
    numbers = {device: number for number, device in enumerate(set(tensor_devices))}
    devices = np.array([*map(numbers.__getitem__, tensor_devices)], np.int64)
    forms = ListedForms(tuple(dtypes), shapes)
    return Columns(forms, addresses, strides, np.ones(len(tensors), bool), devices)


def _strides(tensors: Objects, contiguous: Flags, stride: Callable[[Any], Shape]) -> list[Shape | None]:
    """The strides of tensors that are not contiguous."""
    strides: list[Shape | None] = [None] * len(tensors)
    for i in np.flatnonzero(~contiguous).tolist():
        strides[i] = stride(tensors[i])
    return strides


def _look_at_bits(tensors: Objects) -> Columns | None:
    arrays = owners(tensors)
    dtypes = list(map(attrgetter("dtype"), tensors))
    widths = set(zip(map(attrgetter("dtype"), arrays), dtypes, strict=True))
    if any(array_dtype != dtype.uint for array_dtype, dtype in widths):  # an array's can be set
        return None
    return _look_at_arrays(arrays, dtypes)


def _look_at_arrays(arrays: Objects, dtypes: list[DType]) -> Columns:
    flags = np.fromiter(map(attrgetter("flags.num"), arrays), np.int64, len(arrays))
    contiguous = flags & _C_CONTIGUOUS != 0
    strides = None if contiguous.all() else _strides(arrays, contiguous, attrgetter("strides"))
    return Columns(
        ListedForms(tuple(dtypes), tuple(map(attrgetter("shape"), arrays))),
        array_addresses(arrays),
        strides,
        flags & _WRITEABLE != 0,
        np.zeros(len(arrays), np.int64),
    )
