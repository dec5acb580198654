"""Where the bits of a tensor lie in memory: torch tensors, NumPy arrays and `Bits` seen alike.

Kernels work on addresses, so that ten thousand small tensors cost no more than one large one. A `Memory` keeps
its owner alive for as long as the address is in use.
"""

from __future__ import annotations

import math
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np

from ..errors import TiedConflict, UnsupportedTensor
from .dtypes import BY_NAME, Bits, DType, UIntArray
from .region import Region, Shape, row_major, whole
from .table import TensorSpec, TensorTable

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
        """Address of the region's bits in row-major order, and what keeps it alive: a copy only where one is due."""
        if self.strides is None:
            if region is None:
                return self.address, self.owner
            lead = leading(region, self.shape)
            if lead is not None:
                return self.address + lead * self.dtype.width, self.owner
        part = self.view() if region is None else self.view()[region.slices]
        copy = np.ascontiguousarray(part)
        return _address(copy), copy

    def copied(self) -> UIntArray:
        """The bits of the tensor, row-major, in memory that nobody else writes to."""
        return np.array(self.view(), copy=True, order="C")


@dataclass(frozen=True, eq=False)
class Foreign:
    """Bits that are brought into memory when they are read, piece by piece: from a device, or by a cast.

    fill: is given a region and an array of its size, and writes the bits there. It is called from several threads, so
        that one piece is on its way while others are in use.
    origin: the torch tensor that the bits are made of.
    pinned: whether pieces are to lie in page-locked memory, from which devices copy faster.
    """

    dtype: DType
    shape: Shape
    fill: Callable[[Region, UIntArray], None]
    origin: Any
    pinned: bool = False

    def tensor(self) -> Any:
        """All bits, as a torch tensor of its own."""
        import torch

        with torch.no_grad():
            return self.origin.contiguous().to(getattr(torch, self.dtype.name))


class _ForeignMemory(Memory):
    """Memory that kernels on a CPU cannot see, on a device, or that is not there: every reading is a copy.

    Copies lie in buffers that are used again. A tensor on a device with kernels is its own owner, the address is the
    device's, and `strides` are never None. `Foreign` bits have the address 0 and cannot be written.
    """

    __slots__ = ()

    def view(self) -> UIntArray:
        out, found = np.empty(self.shape, self.dtype.uint), self._foreign
        for region in whole(self.shape).split(_AT_ONCE):
            found.fill(region, out[region.slices])
        out.flags.writeable = False
        return out

    def read(self, region: Region | None) -> tuple[int, object]:
        region = region or whole(self.shape)
        found = self._foreign
        lent = _Lent(region.numel * self.dtype.width, found.pinned)
        found.fill(region, lent.array.view(self.dtype.uint).reshape(region.size))
        return _address(lent.array), lent

    def copied(self) -> UIntArray:
        out = self.view()
        out.flags.writeable = True
        return out

    @property
    def _foreign(self) -> Foreign:
        return self.owner if isinstance(self.owner, Foreign) else foreign(self.owner)


def on_device(tensor: Any) -> bool:
    """Whether a torch tensor is on a device that the kernels in `kernels/gpu/changes.py` run on."""
    return bool(tensor.is_cuda) and _runs_kernels(tensor.device)


@lru_cache
def _runs_kernels(device: Any) -> bool:
    """They are compiled by Triton, and have instructions that NVIDIA's GPUs have from Hopper on.

    SPARSERL_GPU=off is for machines on which they cannot be compiled: weights are then read through host memory.
    """
    import torch

    if torch.version.hip is not None or find_spec("triton") is None or os.environ.get("SPARSERL_GPU") == "off":
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


def far_tensor(memory: Memory) -> Any:
    """The torch tensor on a device with kernels that some memory is, or None where it is no such memory."""
    return memory.owner if isinstance(memory, _ForeignMemory) and memory.writable else None


_AT_ONCE = 1 << 22  # elements that are brought here together, where all are wanted
_REUSED = 1 << 20  # bytes: smaller buffers are not worth keeping
_idle: dict[tuple[int, bool], list[Any]] = defaultdict(list)


class _Lent:
    """A staging buffer on loan: it goes back to the idle ones when nobody holds on to it any more."""

    def __init__(self, nbytes: int, pinned: bool) -> None:
        self._kind = (1 << max(0, nbytes - 1).bit_length(), pinned) if nbytes >= _REUSED else (nbytes, False)
        try:
            self._whole = _idle[self._kind].pop()
        except IndexError:
            self._whole = _staging(*self._kind)
        self.array = self._whole[:nbytes]

    def __del__(self) -> None:
        if self._kind[0] >= _REUSED:
            _idle[self._kind].append(self._whole)


def _staging(nbytes: int, pinned: bool) -> np.ndarray[Any, Any]:
    if not pinned:
        return np.empty(nbytes, np.uint8)
    import torch

    array: np.ndarray[Any, Any] = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy()
    return array


def foreign(tensor: Any, dtype: Any = None) -> Foreign:
    """The bits of a torch tensor in another dtype, or of one that is on a device.

    Which NaN a NaN is cast to depends on the memory layout, in torch; so what is cast is contiguous, always.
    """
    import torch

    wanted = _torch_dtype(dtype or tensor.dtype)
    if wanted is None:
        raise UnsupportedTensor(f"{dtype or tensor.dtype} is not supported (1, 2, 4 or 8 bytes per element)")

    def fill(region: Region, out: UIntArray) -> None:
        there = torch.from_numpy(out.reshape(-1).view(np.uint8)).view(dtype or tensor.dtype).view(out.shape)
        if tensor.is_cuda:
            torch.cuda.synchronize(tensor.device)  # this thread has another stream than whoever wrote the tensor
        with torch.no_grad():
            there.copy_(tensor[region.slices].contiguous())

    return Foreign(wanted, tuple(tensor.shape), fill, tensor, pinned=tensor.is_cuda)


class _Interface:
    """What NumPy needs to see foreign memory, holding on to whoever owns it."""

    def __init__(self, interface: dict[str, Any], owner: object) -> None:
        self.__array_interface__ = interface
        self.owner = owner


def leading(region: Region, shape: Shape) -> int | None:
    """Offset of the region's first element, if the region is one contiguous run of a row-major tensor."""
    inner = False
    for d in range(len(shape) - 1, -1, -1):
        if inner and region.size[d] != 1:
            return None
        inner = inner or region.size[d] != shape[d]
    return sum(a * s for a, s in zip(region.start, row_major(shape), strict=True))


def _address(array: np.ndarray[Any, Any]) -> int:
    return int(array.__array_interface__["data"][0])


def memory_of(name: str, tensor: Any) -> Memory:
    """The memory of a torch tensor, NumPy array or `Bits`; `UnsupportedTensor` says what is wrong with any other."""
    if isinstance(tensor, np.ndarray):
        dtype = BY_NAME.get(tensor.dtype.name)
        if dtype is None:
            raise UnsupportedTensor(f"tensor {name!r}: NumPy dtype {tensor.dtype} is not supported")
        return _of_array(name, tensor, dtype)
    if isinstance(tensor, Bits):
        return _of_array(name, tensor.array, tensor.dtype)
    if isinstance(tensor, Foreign):
        return _ForeignMemory(tensor.dtype, tensor.shape, 0, row_major(tensor.shape), False, tensor)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(tensor, torch.Tensor):
        try:
            return _of_torch(name, tensor, torch)
        except (RuntimeError, ValueError, NotImplementedError) as error:
            raise UnsupportedTensor(f"tensor {name!r}, a {type(tensor).__name__}: {error}") from error
    kind = type(tensor).__name__
    raise UnsupportedTensor(f"tensor {name!r}: expected a torch tensor or a NumPy array, got {kind}")


def _of_array(name: str, array: np.ndarray[Any, Any], dtype: DType) -> Memory:
    if array.dtype.byteorder == ">" or (array.dtype.byteorder == "=" and sys.byteorder == "big"):
        raise UnsupportedTensor(f"tensor {name!r}: big-endian arrays are not supported")
    strides: Shape | None = None
    if not array.flags.c_contiguous:
        if any(s % dtype.width for s in array.strides):
            raise UnsupportedTensor(f"tensor {name!r}: strides {array.strides} are not multiples of the element size")
        strides = tuple(s // dtype.width for s in array.strides)
    return Memory(dtype, array.shape, _address(array), strides, array.flags.writeable, array)


_COMPLEX = frozenset(("complex32", "complex64"))
_TORCH_NAMES: dict[Any, DType | None] = {}


def _torch_dtype(dtype: Any) -> DType | None:
    if dtype not in _TORCH_NAMES:
        _TORCH_NAMES[dtype] = BY_NAME.get(str(dtype).removeprefix("torch."))
    return _TORCH_NAMES[dtype]


def _of_torch(name: str, tensor: Any, torch: Any) -> Memory:
    dtype = _TORCH_NAMES.get(tensor.dtype) or _torch_dtype(tensor.dtype)
    if dtype is None:
        raise UnsupportedTensor(f"tensor {name!r}: {tensor.dtype} is not supported (1, 2, 4 or 8 bytes per element)")
    if not (tensor.is_cpu or tensor.is_cuda) or tensor.layout is not torch.strided:
        raise UnsupportedTensor(
            f"tensor {name!r}: a {tensor.layout} tensor on {tensor.device}; a strided CPU or CUDA tensor is needed"
        )
    if type(tensor) is not torch.Tensor and hasattr(tensor, "device_mesh"):
        raise UnsupportedTensor(f"tensor {name!r} is a DTensor; hand over its local shard with its region")
    if tensor.is_neg() or (dtype.name in _COMPLEX and tensor.is_conj()):
        raise UnsupportedTensor(f"tensor {name!r} is a lazy conjugate or negative view; resolve it first")
    if on_device(tensor):
        if tensor.numel() and _freed(tensor):
            raise _without_memory(name, tensor)
        return _ForeignMemory(dtype, tuple(tensor.shape), tensor.data_ptr(), tensor.stride(), True, tensor.detach())
    if tensor.is_cuda:
        return memory_of(name, foreign(tensor))
    memory = Memory(
        dtype, tensor.shape, tensor.data_ptr(), None if tensor.is_contiguous() else tensor.stride(), True, tensor
    )
    storage = tensor.untyped_storage()
    low, high = _span(memory)
    if tensor.numel() and not storage.data_ptr() <= low < high <= storage.data_ptr() + storage.nbytes():
        raise _without_memory(name, tensor)
    return memory


def _freed(tensor: Any) -> bool:
    """Whether the storage is nowhere: what is left of an address is then how far into the storage it was."""
    return bool(tensor.data_ptr() == tensor.storage_offset() * tensor.itemsize)


def _without_memory(name: str, tensor: Any) -> UnsupportedTensor:
    return UnsupportedTensor(
        f"tensor {name!r}, a {type(tensor).__name__}, has no memory for its {tensor.numel()} elements: "
        "its storage was freed, or never was there"
    )


def memories(weights: Weights) -> dict[str, Memory]:
    """The memory of every tensor, by name."""
    if not isinstance(weights, Mapping):
        kind = type(weights).__name__
        raise UnsupportedTensor(f"weights are a mapping from names to tensors, not a {kind}; take its state_dict()")
    torch = sys.modules.get("torch")
    if torch is None:
        return {name: memory_of(name, tensor) for name, tensor in weights.items()}
    # Ten thousand tensors are common: what most of them are is seen with as few calls as possible.
    kinds, strided, known = (torch.Tensor, torch.nn.Parameter), torch.strided, _TORCH_NAMES
    out: dict[str, Memory] = {}
    for name, tensor in weights.items():
        if (
            type(tensor) in kinds
            and (dtype := known.get(tensor.dtype)) is not None
            and ((far := on_device(tensor)) or tensor.is_cpu)
            and tensor.layout is strided
            and tensor.is_contiguous()
            and not tensor.is_neg()
            and dtype.name not in _COMPLEX
        ):
            strides, address = tensor.stride() if far else None, tensor.data_ptr()
            columns = (dtype, tensor.shape, address, strides, True, tensor)
            out[name] = tuple.__new__(_ForeignMemory if far else Memory, columns)
            if address == tensor.storage_offset() * dtype.width and tensor.numel():
                raise _without_memory(name, tensor)
        else:
            out[name] = memory_of(name, tensor)
    return out


def table_of(held: Mapping[str, Memory]) -> TensorTable:
    """The tensor table of weights whose tensors are whole: the same one as the last time, if they are the same."""
    return _table(tuple([(name, m.dtype.name, tuple(m.shape)) for name, m in held.items()]))


@lru_cache(maxsize=8)
def _table(rows: tuple[tuple[str, str, Shape], ...]) -> TensorTable:
    return TensorTable([TensorSpec(name, BY_NAME[dtype], shape) for name, dtype, shape in rows])


def require_like(table: TensorTable, held: Mapping[str, Memory], ours: str = "old", theirs: str = "new") -> None:
    """Raise `TensorMismatch` naming every difference, unless the memory is of just the table's tensors."""
    found = map(held.get, table.index)
    if len(held) != len(table) or any(
        m is None or m.shape != spec.shape or m.dtype is not spec.dtype
        for m, spec in zip(found, table.specs, strict=True)
    ):
        table.require(table_of(held), ours, theirs)


def tensor_table(weights: Weights) -> TensorTable:
    """The tensor table of weights: their names, dtypes and shapes.

    Shards need the table of the whole; tensors on torch's meta device describe it without holding it.
    """
    torch = sys.modules.get("torch")
    specs = []
    for name, tensor in weights.items():
        if torch is not None and isinstance(tensor, torch.Tensor) and (dtype := _torch_dtype(tensor.dtype)):
            specs.append(TensorSpec(name, dtype, tuple(tensor.shape)))
        else:
            memory = memory_of(name, tensor)
            specs.append(TensorSpec(name, memory.dtype, memory.shape))
    return TensorTable(specs)


def require_writable(held: Iterable[tuple[str, Memory]]) -> None:
    """Refuse memory that a patch cannot be written into: read-only, or with elements that share an address."""
    for name, m in held:
        if isinstance(m, _ForeignMemory) and not m.writable:
            raise UnsupportedTensor(f"tensor {name!r} can only be read: it is cast, or on a device without kernels")
        if not m.writable:
            raise UnsupportedTensor(f"tensor {name!r} is read-only; a patch cannot be applied in place")
        if m.strides is not None and not _plain(m) and _folds(m.shape, m.strides):
            raise UnsupportedTensor(f"tensor {name!r} is expanded or overlaps itself: elements share an address")


def _plain(m: Memory) -> bool:
    """Whether it is known at once that a tensor is contiguous."""
    return isinstance(m, _ForeignMemory) and bool(far_tensor(m).is_contiguous())


def _folds(shape: Shape, strides: Shape) -> bool:
    """Whether elements may share an address: each dimension must step over all that the finer ones reach."""
    reach = 0
    for stride, size in sorted((abs(s), n) for s, n in zip(strides, shape, strict=True) if n > 1):
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def tied_groups(held: Mapping[str, Memory]) -> list[list[str]]:
    """Groups of names that are the very same memory; tensors that share only some elements are refused."""
    names = [name for name, m in held.items() if 0 not in m.shape]
    spans = np.array([_span(held[name]) for name in names], np.int64).reshape(-1, 2)
    order = np.argsort(spans[:, 0], kind="stable")
    low, high = spans[order].T
    near = np.flatnonzero(low[1:] < np.maximum.accumulate(high)[:-1]) + 1  # begin before an earlier one has ended
    groups: list[list[str]] = []
    cluster: list[list[str]] = []
    last = -1
    for i in near.tolist():
        if i != last + 1:
            groups += cluster
            cluster = []
            _join(cluster, names[order[i - 1]], held)
        _join(cluster, names[order[i]], held)
        last = i
    return [g for g in groups + cluster if len(g) > 1]


def _join(cluster: list[list[str]], name: str, held: Mapping[str, Memory]) -> None:
    """Put a name into the group that is the same memory; interleaved but disjoint views stay apart."""
    for group in cluster:
        if _same(held[name], held[group[0]]):
            group.append(name)
            return
        if _share(held[name], held[group[0]]):
            raise TiedConflict(
                f"tensors {group[0]!r} and {name!r} share some of their memory without being the same tensor; "
                "apply the patch to separate copies"
            )
    cluster.append([name])


def _share(a: Memory, b: Memory) -> bool:
    try:
        # Addresses are compared and nothing is read, so memory on a device will do.
        return bool(_shares_memory(Memory.view(a), Memory.view(b), max_work=1_000_000))
    except np.exceptions.TooHardError:
        return True


def _same(a: Memory, b: Memory) -> bool:
    return (a.address, a.dtype, a.shape, a.strides) == (b.address, b.dtype, b.shape, b.strides)


def _span(m: Memory) -> tuple[int, int]:
    if m.strides is None:
        return m.address, m.address + math.prod(m.shape) * m.dtype.width
    low, high = 0, 1
    for stride, size in zip(m.strides, m.shape, strict=True):
        if stride < 0:
            low += stride * (size - 1)
        else:
            high += stride * (size - 1)
    return m.address + low * m.dtype.width, m.address + high * m.dtype.width
