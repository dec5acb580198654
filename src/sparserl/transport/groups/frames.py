"""Frames: memory for one bucket and its tail, where the process group sends from and receives to.

On a GPU, a bucket that was coded there comes from page-locked memory, where it got its checksum, and one that is
received goes to such memory, where its checksum is verified: no other copy is made of it on the host.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import xxhash

from ...errors import SessionError

Bucket = bytes | memoryview

TAIL = struct.Struct("<QQ")  # the length of the next frame, and a checksum of that length
END = (1 << 64) - 1  # instead of a length: the sender has stopped


def frame_device(group: Any, device: str | None) -> Any:
    """The torch device that frames of a group are on: the one that is named, or where its backend sends from.

    Raises:
        SessionError: It is no device that frames can be on, or there is none.
    """
    import torch
    import torch.distributed as dist

    if device is None:
        device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise SessionError(f"device is {device!r}; it must be 'cpu', or 'cuda' for NCCL: {error}") from error
    if chosen.type not in ("cpu", "cuda"):
        raise SessionError(f"device is {device!r}; it must be 'cpu', or 'cuda' for NCCL")
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise SessionError(f"device is {device!r}, but torch finds no GPU here")
    if chosen.type == "cuda" and chosen.index is None:
        return torch.device("cuda", torch.cuda.current_device())  # threads have a current device of their own
    return chosen


class Frame:
    """A buffer that grows with the buckets it has to hold, in host memory.

    Attributes:
        size: Bytes of the bucket and its tail.
        work: The broadcast under way.
    """

    def __init__(self, device: Any) -> None:
        self._device = device
        self._tensor: Any = None
        self._room = 0
        self.size = 0
        self.work: Any = None

    def fill(self, bucket: Bucket, next_length: int) -> None:
        """Copy a bucket into the frame, and write its tail."""
        self.size = len(bucket) + TAIL.size
        length = struct.pack("<Q", next_length)
        tail = length + struct.pack("<Q", xxhash.xxh64_intdigest(length))
        self._write(bucket, tail)

    def tensor(self) -> Any:
        """The tensor to broadcast."""
        import torch

        if self.size > self._room:
            self._tensor = torch.empty(self.size, dtype=torch.uint8, device=self._device)
            self._room = self.size
        return self._tensor[: self.size]

    def tail(self) -> bytes:
        """The tail of a frame that was received."""
        return self._bytes()[-TAIL.size :].tobytes()

    def bucket(self) -> Bucket:
        """The bucket of a frame whose tail was read."""
        return self._bytes()[: -TAIL.size].tobytes()

    def _write(self, bucket: Bucket, tail: bytes) -> None:
        out = self._bytes()
        out[: len(bucket)] = np.frombuffer(bucket, np.uint8)
        out[len(bucket) :] = np.frombuffer(tail, np.uint8)

    def _bytes(self) -> np.ndarray[Any, Any]:
        array: np.ndarray[Any, Any] = self.tensor().numpy()
        return array


class GpuFrame(Frame):
    """A frame on a GPU. What is received is copied to page-locked memory of its own, which becomes the bucket."""

    def __init__(self, device: Any) -> None:
        super().__init__(device)
        self._received = np.empty(0, np.uint8)
        self._sending: list[Any] = []  # what is copied to the GPU until the broadcast is done

    def tail(self) -> bytes:
        """The tail of a frame that was received, which is copied to host memory first."""
        host = self._host(self.size)
        host.copy_(self.tensor())
        self._received = host.numpy()
        return self._received[-TAIL.size :].tobytes()

    def bucket(self) -> Bucket:
        """The bucket of a frame whose tail was read."""
        return self._received[: -TAIL.size].data.toreadonly()

    def _write(self, bucket: Bucket, tail: bytes) -> None:
        from ...weights.gpu_copies import as_tensor

        end = self._host(TAIL.size)
        end.numpy()[:] = np.frombuffer(tail, np.uint8)
        out = self.tensor()
        if len(bucket):
            out[: len(bucket)].copy_(as_tensor(bucket), non_blocking=True)
        out[len(bucket) :].copy_(end, non_blocking=True)
        self._sending = [bucket, end]

    def _host(self, size: int) -> Any:
        """Page-locked memory; torch uses it again when nobody does."""
        import torch

        return torch.empty(size, dtype=torch.uint8, pin_memory=self._device.type == "cuda")


def frame_on(device: Any) -> Frame:
    """An empty frame on a device."""
    return Frame(device) if device.type == "cpu" else GpuFrame(device)


def read_tail(tail: bytes) -> int | None:
    """The length in a tail; None if its checksum is wrong."""
    length, checksum = TAIL.unpack(tail)
    return int(length) if xxhash.xxh64_intdigest(tail[:8]) == checksum else None
