"""Copies between host memory and GPUs, through page-locked memory and beside other work on the GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from ..kernels.gpu.ints import INTS
from .dtypes import BY_NAME
from .memory import Memory

_SMALL_BYTES = 1 << 20  # copies of less than this are not worth a stream of their own
_copy_streams: dict[Any, torch.cuda.Stream] = {}


def upload(array: np.ndarray[Any, Any], device: Any) -> torch.Tensor:
    """Copy an array to a GPU through page-locked memory; elements of several bytes become signed integers."""
    host = torch.empty(array.nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")  # torch reuses this memory
    host.numpy()[...] = array.reshape(-1).view(np.uint8)
    return host.to(device, non_blocking=True).view(INTS[array.itemsize])


def upload_parts(parts: Sequence[bytes | memoryview], device: Any) -> torch.Tensor:
    """Begin to copy bytes to a GPU, one part behind the other. They must not change until the copy is done.

    Parts in page-locked memory are copied from there, others through the driver's own buffers.
    """
    out = torch.empty(sum(map(len, parts)), dtype=torch.uint8, device=device)
    offset = 0
    for part in parts:
        if len(part):
            out[offset : offset + len(part)].copy_(as_tensor(part), non_blocking=True)
        offset += len(part)
    return out


def as_tensor(buffer: bytes | memoryview) -> torch.Tensor:
    """A buffer as a tensor. It is called writable even if it is not, because torch warns otherwise."""
    array = np.frombuffer(buffer, np.uint8)
    return torch.from_numpy(Memory(BY_NAME["uint8"], array.shape, array.ctypes.data, None, True, buffer).view())


def fetch(tensor: torch.Tensor) -> Callable[[], np.ndarray[Any, Any]]:
    """Begin to copy a tensor to page-locked memory. The function it returns waits for the copy and gives it."""
    if tensor.device.type != "cuda":
        return tensor.numpy
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    wait = _begin_copy(tensor.device, [tensor], lambda: host.copy_(tensor, non_blocking=True))

    def result() -> np.ndarray[Any, Any]:
        wait()
        array: np.ndarray[Any, Any] = host.numpy()
        return array

    return result


def fetch_with_margins(
    bodies: Sequence[Sequence[torch.Tensor]], before: Sequence[int], behind: int
) -> Callable[[], list[tuple[memoryview, int, int]]]:
    """Begin to copy bodies, each of several tensors, to page-locked memory with free bytes before and behind each.

    The function it returns waits for all copies and gives, for each body, its memory and where the body begins and
    ends in it.
    """
    tensors = [tensor for body in bodies for tensor in body]
    ends = np.cumsum([n + sum(t.nbytes for t in body) + behind for n, body in zip(before, bodies, strict=True)])
    device = tensors[0].device
    host = torch.empty(int(ends[-1]), dtype=torch.uint8, pin_memory=device.type == "cuda")
    spans = list[tuple[memoryview, int, int]]()

    def copy() -> None:
        view = host.numpy().data
        offset = 0
        for margin, body, end in zip(before, bodies, ends.tolist(), strict=True):
            body_end = offset + margin
            for tensor in body:
                host[body_end : body_end + tensor.nbytes].copy_(tensor.view(torch.uint8), non_blocking=True)
                body_end += tensor.nbytes
            spans.append((view[offset:end], margin, body_end - offset))
            offset = end

    wait = _begin_copy(device, tensors, copy)

    def result() -> list[tuple[memoryview, int, int]]:
        wait()
        return spans

    return result


def _begin_copy(device: Any, tensors: Sequence[torch.Tensor], copy: Callable[[], object]) -> Callable[[], object]:
    """Begin to copy tensors. The function it returns waits for the copy.

    Large tensors are copied on a stream of their own, beside whatever is launched next.
    """
    if device.type != "cuda":
        copy()
        return lambda: None
    current = torch.cuda.current_stream(device)
    stream = current
    if sum(tensor.nbytes for tensor in tensors) >= _SMALL_BYTES:
        stream = _copy_streams.get(device) or _copy_streams.setdefault(device, torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
        stream.wait_stream(current)
    with torch.cuda.stream(stream):
        copy()
        done: torch.cuda.Event = stream.record_event()
    for tensor in tensors if stream is not current else ():
        tensor.record_stream(stream)
    return lambda: done.synchronize()  # noqa: PLW0108  # its type is not known
