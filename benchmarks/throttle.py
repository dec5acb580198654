"""A link between two sockets of this machine that lets through so many bits per second, each after a latency.

`throttled(port, link)` is a program of its own that stands in front of a port. All connections through it share the
link, one line in each direction.
"""

from __future__ import annotations

import contextlib
import mmap
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from queue import SimpleQueue
from threading import Lock, Thread
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the program starts without the library
    from sparserl.plan import Link

_CHUNK = 1 << 16
_COUNT = struct.Struct("<Q")
_SECONDS = struct.Struct("<d")


class Page:
    """What the program and those who use it tell each other, in a page of memory that they share."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory

    @classmethod
    def of(cls, link: Link, memory: mmap.mmap | None = None) -> Page:
        """The page of a link that begins with its rate; in memory of this process, if no other is given."""
        page = cls(mmap.mmap(-1, mmap.PAGESIZE) if memory is None else memory)
        page.bits_per_second = link.bits_per_second
        return page

    @property
    def moved(self) -> int:
        """Bytes that have come back through the link."""
        return int(_COUNT.unpack_from(self._memory, 0)[0])

    @moved.setter
    def moved(self, value: int) -> None:
        _COUNT.pack_into(self._memory, 0, value)

    @property
    def bits_per_second(self) -> float:
        return float(_SECONDS.unpack_from(self._memory, 8)[0])

    @bits_per_second.setter
    def bits_per_second(self, value: float) -> None:
        _SECONDS.pack_into(self._memory, 8, value)


@dataclass
class Line:
    """One direction of a link: it is free again when the last bit is through, and bits arrive after the latency.

    It keeps its own schedule, so that waking up late does not add up.
    """

    page: Page
    latency_s: float
    is_counted: bool = False  # whether the bytes that have passed are written down for others to see
    free: float = 0.0
    _lock: Lock = field(default_factory=Lock)

    def take(self, size: int, idle: bool) -> float:
        """Send so many bytes when those before are through; when that will be. `idle`: none were waiting."""
        with self._lock:
            if idle:
                self.free = max(self.free, time.monotonic())
            self.free += 8 * size / self.page.bits_per_second
            if self.is_counted:
                self.page.moved += size
            return self.free


def carry(near: socket.socket, far: socket.socket, line: Line) -> None:
    """Bring all that comes from one socket to the other, until there is no more."""
    way: SimpleQueue[tuple[float, bytes]] = SimpleQueue()
    out = Thread(target=_deliver, args=(way, far), daemon=True)
    out.start()
    idle = True
    while True:
        try:
            data = near.recv(_CHUNK, socket.MSG_DONTWAIT)
        except BlockingIOError:
            idle, data = True, _received(near)
        except OSError:
            data = b""
        free = line.take(len(data), idle)
        way.put((free + line.latency_s, data))
        if not data:
            break
        idle = False
        _sleep_until(free)
    out.join()


def _received(near: socket.socket) -> bytes:
    try:
        return near.recv(_CHUNK)
    except OSError:
        return b""


def _deliver(way: SimpleQueue[tuple[float, bytes]], far: socket.socket) -> None:
    with contextlib.suppress(OSError):  # who has left needs nothing more
        while True:
            due, data = way.get()
            _sleep_until(due)
            if not data:
                far.shutdown(socket.SHUT_WR)
                return
            far.sendall(data)


def _sleep_until(due: float) -> None:
    if (wait := due - time.monotonic()) > 0:
        time.sleep(wait)


class Throttled:
    """A link in front of a port: its own port, and the bytes that have come through it from there."""

    def __init__(self, port: int, page: Page) -> None:
        self.port = port
        self._page = page

    @property
    def moved(self) -> int:
        return self._page.moved


@contextlib.contextmanager
def throttled(port: int, link: Link) -> Iterator[Throttled]:
    """A link to a port of this machine, in a process of its own."""
    with tempfile.NamedTemporaryFile() as file:
        file.truncate(mmap.PAGESIZE)
        words = [str(port), str(link.latency_s), file.name]
        program = [sys.executable, "-m", "benchmarks.throttle", *words]
        with mmap.mmap(file.fileno(), mmap.PAGESIZE) as memory:
            page = Page.of(link, memory)
            with subprocess.Popen(program, stdout=subprocess.PIPE) as running:
                try:
                    assert running.stdout is not None
                    yield Throttled(int(running.stdout.readline()), page)
                finally:
                    running.kill()


def main(port: int, latency_s: float, path: str) -> None:
    """Stand in front of a port until killed."""
    with open(path, "r+b") as file, socket.create_server(("127.0.0.1", 0)) as server:  # noqa: PTH123  # it is a page
        page = Page(mmap.mmap(file.fileno(), mmap.PAGESIZE))
        there = Line(page, latency_s)
        back = Line(page, latency_s, is_counted=True)
        print(server.getsockname()[1], flush=True)
        while True:
            near, _ = server.accept()
            far = socket.create_connection(("127.0.0.1", port))
            for end in (near, far):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for way in ((near, far, there), (far, near, back)):
                Thread(target=carry, args=way, daemon=True).start()


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3])
