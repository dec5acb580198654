"""Made-up checkpoints, in little memory: an engine loads them so that it can be seen what goes where."""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch

from .numbering import mixed
from .pieces import CheckpointTensor, letters, patterns

_MOST_PAGES = (256 << 20) // mmap.PAGESIZE  # tensors begin at different ones, so that equal shapes have other numbers
_PERIOD = 1_000_003  # elements after which numbers are the same again; prime, so that no two rows are the same
_AWKWARD = 1 << 16  # so many bits of a wide dtype
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


class Alphabet(NamedTuple):
    """Bits of which made-up tensors consist."""

    letters: torch.Tensor
    first: torch.Tensor  # what tensors begin with, in turns: small ones would else have few that matter


def numbers(dtype: torch.dtype) -> Alphabet:
    """Numbers by which elements can be told apart."""
    own = letters(8 if dtype.itemsize > 1 else 4, dtype)
    return Alphabet(own, own[:0])


def zeros(dtype: torch.dtype) -> Alphabet:
    """Zeros only."""
    zero = patterns(torch.zeros(1, dtype=dtype, device="cpu"))
    return Alphabet(zero, zero)


def awkward(dtype: torch.dtype) -> Alphabet:
    """Bits that only a plain copy leaves alone: of every size, zeros of both signs, the smallest and the largest.

    All are finite; of wide dtypes they are a choice.
    """
    if dtype == torch.bool:
        both = torch.tensor([0, 1], dtype=torch.uint8, device="cpu")
        return Alphabet(both, both)
    if dtype.itemsize <= 2:
        few = torch.arange(1 << 8 * dtype.itemsize, device="cpu")
        bits = few.to(torch.int16) if dtype.itemsize == 2 else few.to(torch.uint8)
    else:
        generator = torch.Generator("cpu").manual_seed(1)
        size = torch.int32 if dtype.itemsize == 4 else torch.int64
        ends = torch.iinfo(size)
        bits = torch.randint(ends.min, ends.max, (_AWKWARD,), dtype=size, generator=generator, device="cpu")
    first = _finite(patterns(_edges(dtype).to(dtype)), dtype)
    return Alphabet(torch.cat((_finite(bits, dtype), first)), first)


def _finite(bits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Those of a dtype that stand for finite numbers."""
    return bits[bits.view(dtype).double().isfinite()] if dtype.is_floating_point else bits


def _edges(dtype: torch.dtype) -> torch.Tensor:
    """Numbers where a dtype ends, at both sides of zero and far from it: small tensors have the first few."""
    if not dtype.is_floating_point:
        ends = torch.iinfo(dtype)
        return torch.tensor([min(ends.max, (1 << 63) - 1), ends.min, 0, 1], dtype=torch.int64, device="cpu")
    info = torch.finfo(dtype)
    smallest = info.tiny * info.eps
    sizes = [smallest, info.max, -0.0, -smallest, info.min, 1 / 3, info.tiny, 0.0, -info.tiny, 1 + info.eps]
    return torch.tensor(sizes, dtype=torch.float64, device="cpu")


class MadeUp:
    """A made-up checkpoint. All tensors of a dtype are the same memory, mapped to addresses of their own."""

    def __init__(
        self, tensors: Iterable[CheckpointTensor], alphabet: Callable[[torch.dtype], Alphabet] = numbers
    ) -> None:
        self.tensors = [*tensors]
        self._alphabet = alphabet
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
        self._numbers[dtype] = torch.frombuffer(mmap.mmap(self._files[dtype], nbytes), dtype=dtype)
        alphabet, first = self._alphabet(dtype)
        bits = patterns(self._numbers[dtype])
        period = alphabet[mixed(torch.arange(_PERIOD, device="cpu")) % alphabet.numel()]
        for low in range(0, bits.numel(), _PERIOD):
            part = bits[low : low + _PERIOD]
            part.copy_(period[: part.numel()])
        if number := first.numel():
            pages = bits.view(-1, mmap.PAGESIZE // dtype.itemsize)[:_MOST_PAGES]
            turns = torch.arange(pages.shape[0], device="cpu")[:, None] + torch.arange(number, device="cpu")
            pages[:, :number] = first[turns % number]

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
