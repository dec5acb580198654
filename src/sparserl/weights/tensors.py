"""The memory and the table of weights, given as torch tensors, NumPy arrays, `Bits` or `LazyBits`."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import repeat
from typing import Any

import numpy as np

from ..errors import UnsupportedTensor
from . import memory as memory_module
from .columns import COMPLEX, PlainMemories, TensorForms, find_gpus, has_memory, look_at, owners
from .dtypes import BY_NAME, Bits, DType, dtype_of_torch, is_big_endian
from .memory import Memory, Weights, address_of
from .region import Numbers, Shape, row_major
from .staging import LazyBits, StagedMemory, gpu_tensor
from .table import TensorSpec, TensorTable


def memory_of(name: str, tensor: Any) -> Memory:
    """The memory of a torch tensor, NumPy array, `Bits` or `LazyBits`; `UnsupportedTensor` for anything else."""
    if isinstance(tensor, np.ndarray):
        dtype = BY_NAME.get(tensor.dtype.name)
        if dtype is None:
            raise UnsupportedTensor(f"tensor {name!r}: NumPy dtype {tensor.dtype} is not supported")
        return _of_array(name, tensor, dtype)
    if isinstance(tensor, Bits):
        if tensor.array.dtype != tensor.dtype.uint:
            wanted = f"bits of {tensor.dtype} must be an array of {tensor.dtype.uint}"
            raise UnsupportedTensor(f"tensor {name!r}: {wanted}, and have become one of {tensor.array.dtype}")
        return _of_array(name, tensor.array, tensor.dtype)
    if isinstance(tensor, LazyBits):
        if tensor.origin is not None:
            memory_of(name, tensor.origin)  # refuses what cannot be read
        return StagedMemory(tensor.dtype, tensor.shape, 0, row_major(tensor.shape), False, tensor)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(tensor, torch.Tensor):
        try:
            return _of_torch(name, tensor, torch)
        except (RuntimeError, ValueError, NotImplementedError) as error:
            raise UnsupportedTensor(f"tensor {name!r}, a {type(tensor).__name__}: {error}") from error
    kind = type(tensor).__name__
    raise UnsupportedTensor(f"tensor {name!r}: expected a torch tensor or a NumPy array, got {kind}")


def _of_array(name: str, array: np.ndarray[Any, Any], dtype: DType) -> Memory:
    if is_big_endian(array.dtype):
        raise UnsupportedTensor(f"tensor {name!r}: big-endian arrays are not supported")
    strides: Shape | None = None
    if not array.flags.c_contiguous:
        if any(s % dtype.width for s in array.strides):
            raise UnsupportedTensor(f"tensor {name!r}: strides {array.strides} are not multiples of the element size")
        strides = tuple(s // dtype.width for s in array.strides)
    return Memory(dtype, array.shape, address_of(array), strides, array.flags.writeable, array)


def _of_torch(name: str, tensor: Any, torch: Any) -> Memory:
    dtype = _supported_dtype(name, tensor, torch)
    if not has_memory(tensor):
        raise UnsupportedTensor(
            f"tensor {name!r}, a {type(tensor).__name__}, has no memory for its {tensor.numel()} elements: "
            "its storage was freed or made smaller, or never allocated"
        )
    if memory_module.is_on_gpu(tensor):
        return StagedMemory(dtype, tuple(tensor.shape), tensor.data_ptr(), tensor.stride(), True, tensor.detach())
    strides = None if tensor.is_contiguous() else tensor.stride()
    return Memory(dtype, tensor.shape, tensor.data_ptr(), strides, True, tensor)


def _supported_dtype(name: str, tensor: Any, torch: Any) -> DType:
    """The dtype of a torch tensor whose bits can be read; `UnsupportedTensor` if they cannot."""
    dtype = dtype_of_torch(tensor.dtype)
    if dtype is None:
        raise UnsupportedTensor(
            f"tensor {name!r}: {tensor.dtype} is not supported: an element must have 1, 2, 4 or 8 bytes"
        )
    if not (tensor.is_cpu or tensor.is_cuda) or tensor.layout is not torch.strided:
        raise UnsupportedTensor(
            f"tensor {name!r}: a {tensor.layout} tensor on {tensor.device}; a strided CPU or CUDA tensor is needed"
        )
    if type(tensor) is not torch.Tensor and hasattr(tensor, "device_mesh"):
        raise UnsupportedTensor(f"tensor {name!r} is a DTensor; publish sparserl.sources.fsdp(model) on every rank")
    if tensor.is_neg() or (dtype.name in COMPLEX and tensor.is_conj()):
        raise UnsupportedTensor(f"tensor {name!r} is a lazy conjugate or negative view; resolve it first")
    return dtype


def require_mapping(weights: object) -> None:
    """Refuse what is not a mapping from names to tensors."""
    if not isinstance(weights, Mapping):
        kind = type(weights).__name__
        raise UnsupportedTensor(f"weights must be a mapping from names to tensors, not a {kind}; pass its state_dict()")


def memories(weights: Weights) -> dict[str, Memory]:
    """The memory of every tensor, by name."""
    require_mapping(weights)
    named = dict(weights.items())
    usual: dict[int, Memory | None] = {}
    for tensors in _by_kind(named.values()):
        usual.update(zip(map(id, tensors), _usual_memories(tensors), strict=True))
    return {name: usual[id(tensor)] or memory_of(name, tensor) for name, tensor in named.items()}


def _by_kind(tensors: Iterable[Any]) -> Iterable[list[Any]]:
    """Tensors of each type, but parameters of torch among its tensors."""
    torch = sys.modules.get("torch")
    kinds: dict[type, list[Any]] = {}
    for tensor in tensors:
        kind = type(tensor)
        kinds.setdefault(torch.Tensor if torch is not None and kind is torch.nn.Parameter else kind, []).append(tensor)
    return kinds.values()


def _usual_memories(tensors: list[Any]) -> Sequence[Memory | None]:
    """The memory of contiguous tensors of one kind; None for those that are odd."""
    columns = look_at(tensors)
    gpus = None if columns is None else find_gpus(tensors, columns)
    if columns is None or gpus is None:
        return [None] * len(tensors)
    specs = [*map(TensorSpec, repeat(""), columns.forms.dtypes, columns.forms.shapes)]
    plain = PlainMemories(specs, columns, gpus[0], owners(tensors))
    if columns.strides is None:
        return plain
    return [memory if strides is None else None for memory, strides in zip(plain, columns.strides, strict=True)]


def tensor_table(weights: Weights) -> TensorTable:
    """The table of weights: their names, dtypes and shapes.

    Shards need the table of the whole weights; tensors on torch's meta device describe it without using memory.

    Args:
        weights: Tensors by name: torch tensors, NumPy arrays or `Bits`.

    Returns:
        The table, sorted by name.

    Raises:
        UnsupportedTensor: A tensor is of a kind or dtype that is not supported.

    Example:
        >>> import numpy as np
        >>> from sparserl import tensor_table
        >>> tensor_table({"w": np.zeros((4, 4), np.float32)})
        <TensorTable of 1 tensors, 16 elements>
    """
    torch = sys.modules.get("torch")
    specs = []
    for name, tensor in weights.items():
        if torch is not None and isinstance(tensor, torch.Tensor) and (dtype := dtype_of_torch(tensor.dtype)):
            specs.append(TensorSpec(name, dtype, tuple(tensor.shape)))
        else:
            memory = memory_of(name, tensor)
            specs.append(TensorSpec(name, memory.dtype, memory.shape))
    return TensorTable(specs)


def table_of(memory_by_name: Mapping[str, Memory]) -> TensorTable:
    """The table of weights whose tensors are whole. Equal tensors give the same object as the last time."""
    memories = memory_by_name.values()
    return table_with(tuple(memory_by_name), tuple([m.dtype for m in memories]), tuple([m.shape for m in memories]))


@lru_cache(maxsize=8)
def name_order(names: tuple[str, ...]) -> tuple[tuple[str, ...], Numbers]:
    """Names in the order of their table, and which of the names each of them is."""
    order = [*range(len(names))]
    with suppress(TypeError):  # some are not text, which the table refuses
        order.sort(key=names.__getitem__)
    return tuple(map(names.__getitem__, order)), np.array(order, np.int64)


@lru_cache(maxsize=8)
def table_with(names: tuple[str, ...], dtypes: tuple[DType, ...], shapes: tuple[Shape, ...]) -> TensorTable:
    """The table of tensors with these names, dtypes and shapes, in any order; the same object as the last time."""
    return TensorTable(map(TensorSpec, names, dtypes, map(tuple, shapes)))


@lru_cache(maxsize=8)
def table_like(names: tuple[str, ...], forms: TensorForms) -> TensorTable:
    """The table of tensors with these names and forms."""
    return table_with(names, forms.dtypes, forms.shapes)


def require_like(
    table: TensorTable, memory_by_name: Mapping[str, Memory], table_label: str = "old", weights_label: str = "new"
) -> None:
    """Raise `TensorMismatch` naming every difference, unless the memory is of exactly the table's tensors."""
    in_order = map(memory_by_name.get, table.index)
    if len(memory_by_name) != len(table) or any(
        memory is None or memory.shape != spec.shape or memory.dtype is not spec.dtype
        for memory, spec in zip(in_order, table.specs, strict=True)
    ):
        table.require(table_of(memory_by_name), table_label, weights_label)


def require_writable(named_memory: Iterable[tuple[str, Memory]]) -> None:
    """Refuse memory that a patch cannot be written to: read-only, or with elements that share an address."""
    for name, memory in named_memory:
        if isinstance(memory, StagedMemory) and not memory.writable:
            raise UnsupportedTensor(f"tensor {name!r} can only be read: it is cast")
        if not memory.writable:
            raise UnsupportedTensor(f"tensor {name!r} is read-only; a patch cannot be applied in place")
        if memory.strides is not None and not _is_contiguous(memory) and _overlaps_itself(memory.shape, memory.strides):
            raise UnsupportedTensor(f"tensor {name!r} is expanded or overlaps itself: elements share an address")


def _is_contiguous(memory: Memory) -> bool:
    """Whether torch says at once that a tensor on a GPU is contiguous."""
    return isinstance(memory, StagedMemory) and bool(gpu_tensor(memory).is_contiguous())


def _overlaps_itself(shape: Shape, strides: Shape) -> bool:
    """Whether elements may share an address: each dimension must step over everything the finer ones reach."""
    reach = 0
    for stride, size in sorted((abs(s), n) for s, n in zip(strides, shape, strict=True) if n > 1):
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False
