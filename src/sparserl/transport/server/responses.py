"""What requests ask for in their headers, and the responses to them."""

from __future__ import annotations

import asyncio
import io
import os
import re
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

MAX_WAIT = 30.0  # seconds that a request for the head is held
_CHUNK = 1 << 18  # bytes of an answer that are in memory until the client takes them
_LEAST_CHUNK = 1 << 13  # however many clients take nothing
_ROOM = 32 << 20  # bytes of chunks that are larger than that, of all clients together
_SHARES = 64  # chunks that the rest of the room is enough for
_HASH = re.compile(r"[0-9a-f]{64}")
_RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})")
_WAIT = re.compile(r"(?:^|[,;\s])wait\s*=\s*\"?(\d{1,9})(?![\d.])", re.IGNORECASE)


@dataclass(frozen=True)
class ByteRange:
    """The bytes of an object that a response has."""

    start: int
    size: int

    def status(self, total: int) -> int:
        """200 for all bytes of an object, 206 for some."""
        return 200 if self == ByteRange(0, total) else 206


class Room:
    """Memory for what clients have not taken yet. Chunks shrink with it: who takes nothing keeps nobody else out."""

    def __init__(self) -> None:
        self._held = 0

    @contextmanager
    def chunk(self, size: int) -> Iterator[int]:
        """Room for a chunk of at most so many bytes; how many it may have."""
        size = min(size, _CHUNK, max(_LEAST_CHUNK, (_ROOM - self._held) // _SHARES))
        self._held += size
        try:
            yield size
        finally:
            self._held -= size


class FileRange(Response):
    """Some bytes of a file, or all of them, sent in chunks until the client disconnects."""

    def __init__(
        self,
        file: io.FileIO,
        bytes_: ByteRange,
        status: int,
        headers: dict[str, str],
        disconnected: Callable[[], Awaitable[bool]],
        room: Room,
    ) -> None:
        super().__init__(None, status, headers)
        self._file = file
        self._range = bytes_
        self._room = room
        self._disconnected = disconnected

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002  # ASGI
        with self._file as file:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            start = self._range.start
            end = start + self._range.size
            while start < end and scope["method"] != "HEAD" and not await self._disconnected():
                with self._room.chunk(end - start) as size:
                    data = await asyncio.to_thread(os.pread, file.fileno(), size, start)
                    if not data:
                        raise OSError(f"{scope['path']} ends before its size")
                    start += len(data)
                    await send({"type": "http.response.body", "body": data, "more_body": True})
                    del data
                    await send({"type": "http.response.body", "more_body": True})  # waits until it is taken
            await send({"type": "http.response.body", "body": b""})


def target_of(request: Request) -> str:
    """The target of a request as it was written: nothing is unescaped, and a query belongs to the name."""
    raw: bytes = request.scope["raw_path"]
    query: bytes = request.scope["query_string"]
    return (raw + b"?" + query if query else raw).decode("latin-1")


def knows(request: Request, tag: str) -> bool:
    """Whether a client has the bytes with this tag."""
    tags = ",".join(request.headers.getlist("if-none-match")).split(",")
    return any(known.strip().removeprefix("W/") in (tag, "*") for known in tags)


def wait_seconds(request: Request) -> float:
    """How long a client wants its request to be held."""
    match = _WAIT.search(",".join(request.headers.getlist("prefer")))
    return 0.0 if match is None else min(MAX_WAIT, float(match[1]))


def requested_range(request: Request, size: int, tag: str) -> ByteRange | None:
    """The range that a request asks for; all bytes if it asks for none that we know; None if it is past the end."""
    everything = ByteRange(0, size)
    match = _RANGE.fullmatch(request.headers.get("range", ""))
    if match is None or request.method != "GET" or request.headers.get("if-range", tag) != tag:
        return everything
    first, last = match.groups()
    if not first:
        if not last:
            return everything
        suffix = min(int(last), size)
        return ByteRange(size - suffix, suffix) if suffix else None
    start = int(first)
    end = min(int(last) + 1 if last else size, size)
    if last and int(last) < start:
        return everything
    return ByteRange(start, end - start) if start < size else None


def object_tag(name: str, status: os.stat_result) -> str:
    """The hash that an object is named by, or else its size and time."""
    last = name.rpartition("/")[2]
    return f'"{last}"' if _HASH.fullmatch(last) else f'"{status.st_size:x}-{status.st_mtime_ns:x}"'


def content_headers(name: str, bytes_: ByteRange, total: int) -> dict[str, str]:
    """Headers that describe a body."""
    headers = {
        "Content-Type": "application/json" if name.endswith(".json") else "application/octet-stream",
        "Content-Length": str(bytes_.size),
        "Accept-Ranges": "bytes",
        "X-Content-Type-Options": "nosniff",
    }
    if bytes_.status(total) == 206:
        headers["Content-Range"] = f"bytes {bytes_.start}-{bytes_.start + bytes_.size - 1}/{total}"
    return headers


def refusal(status: int, headers: dict[str, str] | None = None) -> Response:
    """A response without a body, which no cache keeps."""
    return Response(status_code=status, headers={"Cache-Control": "no-store", **(headers or {})})


def range_refusal(total: int) -> Response:
    """The response to a range past the end of an object."""
    return refusal(416, {"Content-Range": f"bytes */{total}"})
