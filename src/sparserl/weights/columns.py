"""Where very many tensors lie, column by column: a mixture of experts has ten thousand of them.

A column takes one pass in C, and no Python function is called for a single tensor.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from typing import Any, NamedTuple, overload

import numpy as np

from ..kernels import cpu
from . import memory as memory_module
from .dtypes import Bits, DType, dtype_of_numpy, dtype_of_torch
from .memory import Memory, address_of
from .region import Shape

COMPLEX = frozenset(("complex32", "complex64"))
_LOW_ADDRESS = 1 << 40  # of a tensor without memory, only its offset in the storage is left: a small number
_C_CONTIGUOUS = 0x1  # the flags of NumPy's C interface
_WRITEABLE = 0x400


class Columns(NamedTuple):
    """Where tensors lie. If the columns of the same tensors are equal to earlier ones, none of them has moved.

    Attributes:
        dtypes: The dtype of each tensor.
        shapes: Its shape.
        addresses: The address of its first element.
        strides: Its strides, as its library counts them; None if it is contiguous.
        writable: Whether it can be written to.
    """

    dtypes: list[DType]
    shapes: list[Shape]
    addresses: list[int]
    strides: list[Shape | None]
    writable: list[bool]

    @property
    def is_contiguous(self) -> bool:
        """Whether all tensors are contiguous."""
        return self.strides.count(None) == len(self.strides)


class ContiguousMemories(Sequence[Memory]):
    """The memory of very many contiguous tensors in host memory; a `Memory` is created only when it is read.

    Attributes:
        addresses: The address of each.
        are_writable: Whether all can be written to.
    """

    def __init__(self, columns: Columns, owners: list[Any]) -> None:
        self._columns: tuple[list[Any], ...] = (*columns, owners)
        self.addresses = np.array(columns.addresses, np.int64)
        self.are_writable = False not in columns.writable

    def __len__(self) -> int:
        return int(self.addresses.size)

    @overload
    def __getitem__(self, index: int) -> Memory: ...

    @overload
    def __getitem__(self, index: slice) -> list[Memory]: ...

    def __getitem__(self, index: int | slice) -> Memory | list[Memory]:
        if isinstance(index, slice):
            return [*map(Memory, *(column[index] for column in self._columns))]
        return Memory(*(column[index] for column in self._columns))

    def __iter__(self) -> Iterator[Memory]:
        return map(Memory, *self._columns)


def look_at(tensors: list[Any]) -> Columns | None:
    """Where tensors lie; None unless all are plain torch tensors, all NumPy arrays or all `Bits`, and none is odd."""
    kinds = set(map(type, tensors))
    torch = sys.modules.get("torch")
    if torch is not None and kinds <= {torch.Tensor, torch.nn.Parameter}:
        return _look_at_torch(tensors, torch.Tensor)
    if kinds == {Bits}:
        return _look_at_arrays(owners(tensors), list(map(attrgetter("dtype"), tensors)))
    if kinds == {np.ndarray}:
        dtypes = _dtypes(tensors, dtype_of_numpy)
        return None if dtypes is None else _look_at_arrays(tensors, dtypes)
    return None


def owners(tensors: list[Any]) -> list[Any]:
    """The objects that own the memory of tensors that `look_at` has columns of."""
    return list(map(attrgetter("array"), tensors)) if tensors and type(tensors[0]) is Bits else tensors


def in_host_memory(tensors: list[Any]) -> bool:
    """Whether all tensors that `look_at` has columns of lie in host memory."""
    if not tensors or not hasattr(tensors[0], "is_cpu"):
        return True
    return False not in map(attrgetter("is_cpu"), tensors) and True not in map(memory_module.is_on_gpu, tensors)


def _dtypes(tensors: list[Any], dtype_of: Callable[[Any], DType | None]) -> list[DType] | None:
    """The dtype of each tensor, of which `dtype_of` gives that of a library; None if one is not supported."""
    of_library = list(map(attrgetter("dtype"), tensors))
    dtypes: dict[Any, DType] = {}
    for library_dtype in set(of_library):
        dtype = dtype_of(library_dtype)
        if dtype is None:
            return None
        dtypes[library_dtype] = dtype
    return list(map(dtypes.__getitem__, of_library))


def _look_at_torch(tensors: list[Any], torch_tensor: Any) -> Columns | None:
    dtypes = _dtypes(tensors, dtype_of_torch)
    if dtypes is None or not COMPLEX.isdisjoint(dtype.name for dtype in set(dtypes)):
        return None
    try:
        addresses = list(map(torch_tensor.data_ptr, tensors))
        is_contiguous = list(map(torch_tensor.is_contiguous, tensors))
        shapes = list(map(attrgetter("shape"), tensors))
    except RuntimeError:  # of a sparse tensor, which has no address, or a nested one, which has no shape
        return None
    if min(addresses, default=_LOW_ADDRESS) < _LOW_ADDRESS and any(
        address < _LOW_ADDRESS and tensor.numel() for address, tensor in zip(addresses, tensors, strict=True)
    ):
        return None
    if True in map(torch_tensor.is_neg, tensors):
        return None
    strides: list[Shape | None] = [None] * len(tensors)
    if False in is_contiguous:
        strides = [None if plain else tensor.stride() for plain, tensor in zip(is_contiguous, tensors, strict=True)]
    return Columns(dtypes, shapes, addresses, strides, [True] * len(tensors))


def _look_at_arrays(arrays: list[Any], dtypes: list[DType]) -> Columns:
    flags = np.fromiter(map(attrgetter("flags.num"), arrays), np.int64, len(arrays))
    strides: list[Shape | None] = [None] * len(arrays)
    for i in np.flatnonzero(flags & _C_CONTIGUOUS == 0).tolist():
        strides[i] = arrays[i].strides
    writable = (flags & _WRITEABLE != 0).tolist()
    return Columns(dtypes, list(map(attrgetter("shape"), arrays)), array_addresses(arrays), strides, writable)


def array_addresses(arrays: list[Any]) -> list[int]:
    """The address of the first element of every array; they must be of no subclass.

    NumPy takes microseconds to tell one. Its C interface, for which all extension modules are compiled, says where an
    array keeps it: in its first field.
    """
    fields = np.fromiter(map(id, arrays), np.int64, len(arrays)) + object.__basicsize__
    addresses = np.empty_like(fields)
    cpu.objects.read_words(fields, addresses)
    if addresses[0] != address_of(arrays[0]):  # another interface
        return list(map(address_of, arrays))
    known: list[int] = addresses.tolist()
    return known
