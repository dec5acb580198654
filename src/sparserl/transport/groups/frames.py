"""Frames: memory for one bucket and its tail, in host memory and where the process group sends from."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import xxhash

Bucket = bytes | memoryview

TAIL = struct.Struct("<QQ")  # the length of the next frame, and a checksum of that length
END = (1 << 64) - 1  # instead of a length: the sender has stopped


class Frame:
    """A buffer that grows with the buckets it has to hold."""

    def __init__(self, device: str) -> None:
        import torch

        self._device = torch.device(device)
        self._pinned = device != "cpu" and torch.cuda.is_available()
        self._host: Any = None
        self._sent: Any = None  # what is broadcast: the host tensor, or its copy on the GPU
        self._bytes = np.empty(0, np.uint8)
        self._size = 0
        self.work: Any = None  # the broadcast under way

    @property
    def size(self) -> int:
        """Bytes of the bucket and its tail."""
        return self._size

    @size.setter
    def size(self, size: int) -> None:
        import torch

        self._size = size
        if size > self._bytes.size:
            self._host = torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned)
            self._sent = self._host if self._device.type == "cpu" else self._host.to(self._device)
            self._bytes = self._host.numpy()

    def fill(self, bucket: Bucket, next_length: int) -> None:
        """Copy a bucket into the frame, and write its tail."""
        self.size = len(bucket) + TAIL.size
        length = struct.pack("<Q", next_length)
        tail = length + struct.pack("<Q", xxhash.xxh64_intdigest(length))
        self._bytes[: len(bucket)] = np.frombuffer(bucket, np.uint8)
        self._bytes[len(bucket) : self.size] = np.frombuffer(tail, np.uint8)
        if self._sent is not self._host:
            self._sent[: self.size].copy_(self._host[: self.size])

    def tensor(self) -> Any:
        """The tensor to broadcast."""
        return self._sent[: self.size]

    def tail(self) -> bytes:
        """The tail of a frame that was received, which is copied to host memory first."""
        if self._sent is not self._host:
            self._host[: self.size].copy_(self._sent[: self.size])
        return self._bytes[self.size - TAIL.size : self.size].tobytes()

    def bucket(self) -> bytes:
        """The bucket of a frame whose tail was read."""
        return self._bytes[: self.size - TAIL.size].tobytes()


def read_tail(tail: bytes) -> int | None:
    """The length in a tail; None if its checksum is wrong."""
    length, checksum = TAIL.unpack(tail)
    return int(length) if xxhash.xxh64_intdigest(tail[:8]) == checksum else None
