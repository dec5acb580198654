"""A server that says what it likes: raw sockets, and a rule that answers each request."""

from __future__ import annotations

import contextlib
import hashlib
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Asked:
    """A request as it came; names of headers in lower case."""

    method: str
    path: str
    headers: dict[str, str]


@dataclass
class Liar:
    """Listens on a port of its own. `rule` gets a connection and a request; what it returns is sent.

    None ends the connection. `silent` is for rules that never answer: it waits until the test is over.
    """

    rule: Callable[[Liar, socket.socket, Asked], bytes | None]
    asked: list[Asked] = field(default_factory=list)
    connections: int = 0
    sent: int = 0

    def __enter__(self) -> Liar:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._end = threading.Event()
        self._open: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        for one in (self._listener, *self._open):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        for thread in self._threads:
            thread.join(120)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def silent(self) -> None:
        """Say nothing for as long as the test takes."""
        self._end.wait(300)

    def pour(self, connection: socket.socket, start: bytes, piece: bytes, most: int = 1 << 31) -> None:
        """Send a start, and then the same piece again and again, as long as anybody takes it."""
        connection.sendall(start)
        while self.sent < most and not self._end.is_set():
            connection.sendall(piece)
            self.sent += len(piece)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            self._open.append(client)
            thread = threading.Thread(target=self._serve, args=(client,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, client: socket.socket) -> None:
        data = b""
        with client, contextlib.suppress(OSError):
            while True:
                while b"\r\n\r\n" not in data:
                    part = client.recv(1 << 16)
                    if not part:
                        return
                    data += part
                head, _, data = data.partition(b"\r\n\r\n")
                first, *lines = head.decode("latin-1").split("\r\n")
                method, path, _ = first.split(" ", 2)
                headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
                size = int(headers.get("content-length", 0))
                while len(data) < size:
                    part = client.recv(1 << 16)
                    if not part:
                        return
                    data += part
                data = data[size:]
                asked = Asked(method, path, headers)
                self.asked.append(asked)
                answer = self.rule(self, client, asked)
                if answer is None:
                    return
                client.sendall(answer)


def answer(body: bytes, status: str = "200 OK", **headers: str) -> bytes:
    """An honest answer; `content_range=…` sends Content-Range."""
    given = {"Content-Length": str(len(body)), **{name.replace("_", "-"): value for name, value in headers.items()}}
    lines = [f"HTTP/1.1 {status}", *(f"{name}: {value}" for name, value in given.items()), "", ""]
    return "\r\n".join(lines).encode("latin-1") + body


def from_folder(root: Path, asked: Asked) -> bytes:
    """What an honest server would answer that serves a folder."""
    try:
        data = (root / asked.path.lstrip("/")).read_bytes()
    except OSError:
        return answer(b"", "404 Not Found")
    tag = f'"{hashlib.sha256(data).hexdigest()}"'
    if asked.headers.get("if-none-match") == tag:
        return answer(b"", "304 Not Modified", etag=tag)
    if (part := asked.headers.get("range")) is not None:
        start, last = map(int, part.removeprefix("bytes=").split("-"))
        data, whole = data[start : last + 1], len(data)
        place = f"bytes {start}-{start + len(data) - 1}/{whole}"
        return answer(data, "206 Partial Content", etag=tag, content_range=place)
    return answer(data, etag=tag)
