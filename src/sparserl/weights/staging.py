"""Bits that host kernels cannot see, on a GPU or not yet cast: they are copied to staging buffers to be read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import UnsupportedTensor
from . import memory as memory_module
from .dtypes import DType, UIntArray, dtype_of_torch
from .memory import Memory, address_of
from .region import Region, Shape, whole

_COPY_ELEMENTS = 1 << 22  # copied at a time, where all elements are read
_REUSED_BYTES = 1 << 20  # smaller buffers are not worth keeping
_idle: dict[tuple[int, bool], list[Any]] = defaultdict(list)


@dataclass(frozen=True, eq=False)
class LazyBits:
    """Bits that are copied into host memory when they are read, region by region: from a GPU, or by a cast.

    Attributes:
        dtype: The dtype of the bits.
        shape: The shape of the tensor.
        fill: Is called with a region and an array of its size, and writes the bits there. Several threads call it, so
            that one region is copied while others are in use.
        origin: The torch tensor that the bits are made from.
        pinned: Whether to copy into page-locked memory, which GPUs reach faster.
    """

    dtype: DType
    shape: Shape
    fill: Callable[[Region, UIntArray], None]
    origin: Any
    pinned: bool = False

    def tensor(self) -> Any:
        """All bits, as a torch tensor of their own."""
        import torch

        with torch.no_grad():
            return self.origin.contiguous().to(getattr(torch, self.dtype.name))


def lazy_bits(tensor: Any, dtype: Any = None) -> LazyBits:
    """The bits of a torch tensor cast to another dtype, or of one on a GPU.

    Which NaN a NaN becomes depends, in torch, on the memory layout; so the bits to cast are always made contiguous.
    """
    import torch

    torch_dtype = dtype or tensor.dtype
    bits_dtype = dtype_of_torch(torch_dtype)
    if bits_dtype is None:
        raise UnsupportedTensor(f"{torch_dtype} is not supported: an element must have 1, 2, 4 or 8 bytes")

    def fill(region: Region, out: UIntArray) -> None:
        destination = torch.from_numpy(out.reshape(-1).view(np.uint8)).view(torch_dtype).view(out.shape)
        if tensor.is_cuda:
            torch.cuda.synchronize(tensor.device)  # this thread has another stream than whoever wrote the tensor
        with torch.no_grad():
            source = tensor[region.slices].contiguous()
            # A GPU casts before it sends: fewer bytes are copied, and a NaN becomes the one that its kernels make.
            destination.copy_(source.to(torch_dtype) if tensor.is_cuda else source)

    return LazyBits(bits_dtype, tuple(tensor.shape), fill, tensor, pinned=tensor.is_cuda)


class StagedMemory(Memory):
    """Memory that host kernels cannot read: on a GPU, or of `LazyBits`. Every read is a copy to a staging buffer.

    A tensor on a GPU is its own owner, its address is the GPU's, and `strides` are never None. `LazyBits` have the
    address 0 and cannot be written.
    """

    __slots__ = ()

    def view(self) -> UIntArray:
        out = np.empty(self.shape, self.dtype.uint)
        lazy = self._lazy
        for region in whole(self.shape).split(_COPY_ELEMENTS):
            lazy.fill(region, out[region.slices] if self.shape else out)  # indexing a number would copy it
        out.flags.writeable = False
        return out

    def read(self, region: Region | None) -> tuple[int, object]:
        region = region or whole(self.shape)
        lazy = self._lazy
        buffer = StagingBuffer(region.numel * self.dtype.width, lazy.pinned)
        lazy.fill(region, buffer.array.view(self.dtype.uint).reshape(region.size))
        return address_of(buffer.array), buffer

    def copied(self) -> UIntArray:
        out = self.view()
        out.flags.writeable = True
        return out

    @property
    def _lazy(self) -> LazyBits:
        return self.owner if isinstance(self.owner, LazyBits) else lazy_bits(self.owner)


def gpu_tensor(memory: Memory) -> Any:
    """The torch tensor on a GPU that this memory belongs to; None for other memory."""
    return memory.owner if isinstance(memory, StagedMemory) and memory.writable else None


def cast_origin(memory: Memory) -> Any:
    """The fp32 tensor on a GPU whose elements kernels can cast to these bits, which are bf16; None for other memory."""
    lazy = memory.owner
    if not isinstance(lazy, LazyBits) or lazy.dtype.name != "bfloat16" or lazy.origin is None:
        return None
    is_wide = str(lazy.origin.dtype) == "torch.float32"
    return lazy.origin if is_wide and memory_module.is_on_gpu(lazy.origin) else None


class StagingBuffer:
    """A buffer on loan: it becomes idle, and is lent again, when nobody refers to it any more."""

    def __init__(self, nbytes: int, pinned: bool) -> None:
        self._kind = (1 << max(0, nbytes - 1).bit_length(), pinned) if nbytes >= _REUSED_BYTES else (nbytes, False)
        try:
            self._buffer = _idle[self._kind].pop()
        except IndexError:
            self._buffer = _allocate(*self._kind)
        self.array = self._buffer[:nbytes]

    def __del__(self) -> None:
        if self._kind[0] >= _REUSED_BYTES:
            _idle[self._kind].append(self._buffer)


def _allocate(nbytes: int, pinned: bool) -> np.ndarray[Any, Any]:
    if not pinned:
        return np.empty(nbytes, np.uint8)
    import torch

    array: np.ndarray[Any, Any] = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy()
    return array
