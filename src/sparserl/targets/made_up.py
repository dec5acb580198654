"""Made-up checkpoints, in little memory: an engine loads them so that it can be seen what goes where."""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from .numbering import mixed
from .pieces import CheckpointTensor, letters, patterns

_MOST_PAGES = (256 << 20) // mmap.PAGESIZE  # tensors begin at different ones, so that equal shapes have other numbers
_PERIOD = 1_000_003  # elements after which numbers are the same again; prime, so that no two rows are the same
_STEP = 389  # pages from one tensor to the next; odd, so that all are used


def _file_in_memory() -> int:
    """An empty file without a name, in memory where the system can do that."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("sparserl")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _mapped(file: int, nbytes: int, offset: int) -> Any:
    """A private view of a file's bytes. Unlike Python's own it needs no file descriptor for as long as it is in use."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    address = libc.mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE, file, offset)
    if address in (None, ctypes.c_void_p(-1).value):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), "memory for made-up weights")
    buffer = (ctypes.c_uint8 * nbytes).from_address(address)
    weakref.finalize(buffer, libc.munmap, address, nbytes).atexit = False
    return buffer


class MadeUp:
    """A made-up checkpoint. All tensors of a dtype are the same memory, mapped to addresses of their own."""

    def __init__(self, tensors: Iterable[CheckpointTensor]) -> None:
        self.tensors = [*tensors]
        pages = min(1 << len(self.tensors).bit_length(), _MOST_PAGES)
        self._pages = {tensor.name: index * _STEP % pages for index, tensor in enumerate(self.tensors)}
        self._files: dict[torch.dtype, int] = {}
        self._numbers: dict[torch.dtype, torch.Tensor] = {}
        for dtype in {tensor.dtype for tensor in self.tensors}:
            largest = max(tensor.numel for tensor in self.tensors if tensor.dtype == dtype)
            self._write(dtype, largest * dtype.itemsize + pages * mmap.PAGESIZE)

    def _write(self, dtype: torch.dtype, nbytes: int) -> None:
        nbytes += -nbytes % mmap.PAGESIZE
        self._files[dtype] = _file_in_memory()
        os.ftruncate(self._files[dtype], nbytes)
        numbers = torch.frombuffer(mmap.mmap(self._files[dtype], nbytes), dtype=dtype)
        alphabet = letters(8 if dtype.itemsize > 1 else 4, dtype)
        bits = patterns(numbers)
        period = alphabet[mixed(torch.arange(_PERIOD, device="cpu")) % alphabet.numel()]
        for low in range(0, bits.numel(), _PERIOD):
            part = bits[low : low + _PERIOD]
            part.copy_(period[: part.numel()])
        self._numbers[dtype] = numbers

    def __enter__(self) -> MadeUp:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            os.close(file)

    def load(self, register: Callable[[str, torch.Tensor], None]) -> Iterator[tuple[str, torch.Tensor]]:
        """All tensors; those with memory are registered as they are asked for."""
        for tensor in self.tensors:
            if nbytes := tensor.numel * tensor.dtype.itemsize:
                mapping = _mapped(self._files[tensor.dtype], nbytes, self._pages[tensor.name] * mmap.PAGESIZE)
                made_up = torch.frombuffer(mapping, dtype=tensor.dtype).view(tensor.shape)
                register(tensor.name, made_up)
            else:
                made_up = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
            yield tensor.name, made_up

    def on(self, device: torch.device) -> Callable[[CheckpointTensor], torch.Tensor]:
        """Tensors of it on a device."""
        numbers = {dtype: tensor.to(device) for dtype, tensor in self._numbers.items()}

        def tensor(wanted: CheckpointTensor) -> torch.Tensor:
            first = self._pages[wanted.name] * mmap.PAGESIZE // wanted.dtype.itemsize
            return numbers[wanted.dtype][first : first + wanted.numel].view(wanted.shape)

        return tensor
