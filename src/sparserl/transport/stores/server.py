"""A folder store shown to the world over HTTP, to read: `sparserl serve`.

Objects never change and may be cached for ever; only the head is looked at anew each time. A request for it that names
the tag it knows (`If-None-Match`) and says how long it would wait (`Prefer: wait=20`) is held until there is another
one. Needs starlette and uvicorn: pip install 'sparserl[serve]'.

What bounds a client: the headers of a request must be there within ten seconds and in 16 KiB, an answer must not stand
still for thirty seconds, and who has no token is not heard twice on one connection. There are at most 4096 connections:
for another one, that goes which has been silent longest.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import hashlib
import hmac
import io
import json
import logging
import os
import re
import resource
import socket
import stat
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import uvicorn
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from ...errors import InvalidField, StoreError
from .base import require_name
from .guard import ADMIT, MOST_CONNECTIONS, MOST_HEADERS, Guarded, Loop, Room

HEAD = "head.json"
MOST_WAIT = 30.0  # seconds that a request for the head is held
_POLL = 0.05  # seconds between looks at the head while someone waits for it
_GLANCE = 2.0  # seconds between looks at whether a client that waits is still there
_CHUNK = 1 << 18
_MOST_HEAD = 1 << 20
_MOST_TARGET = 2048
_IDLE_SECONDS = 30
_END_SECONDS = 5  # that answers under way get when the server ends

_EXPOSITION = "text/plain; version=0.0.4; charset=utf-8"
_FOREVER = "public, max-age=31536000, immutable"
_HASH = re.compile(r"[0-9a-f]{64}")
_RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})")
_WAIT = re.compile(r"(?:^|[,;\s])wait\s*=\s*\"?(\d{1,9})(?![\d.])", re.IGNORECASE)
_BEARER = re.compile(r"bearer +(\S+) *", re.IGNORECASE)
_TOKEN = re.compile(r"[!-~]+")
_GONE = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.ENXIO}

_log = logging.getLogger("sparserl.serve")


class Head(NamedTuple):
    """The head's bytes and its tag."""

    data: bytes
    tag: str

    @property
    def version(self) -> int | None:
        """The version it names; None where it is no head of ours."""
        try:
            return int(json.loads(json.loads(self.data)["body"])["version"])
        except (ValueError, KeyError, TypeError):
            return None


@dataclass(frozen=True)
class Span:
    """A part of an object that was asked for."""

    start: int
    size: int


class Meter:
    """What the server has done so far, in the text format of Prometheus. It has no labels but the status."""

    def __init__(self) -> None:
        self.answers: Counter[int] = Counter()
        self.sent = 0

    def text(self, head: Head | None, waiting: int) -> str:
        """All metrics; see docs/how-to/metrics.md."""
        answers = {f'{{status="{status}"}}': count for status, count in sorted(self.answers.items())}
        rows = [
            ("requests_total", "counter", "Requests answered, by status.", answers),
            ("sent_bytes_total", "counter", "Bytes of answers, without their headers.", {"": self.sent}),
            ("waiting", "gauge", "Subscribers that wait for another head.", {"": waiting}),
        ]
        if head is not None and (version := head.version) is not None:
            rows.append(("version", "gauge", "The version that the head names.", {"": version}))
        lines = []
        for name, kind, help, samples in rows:
            name = f"sparserl_serve_{name}"
            lines += [f"# HELP {name} {help}", f"# TYPE {name} {kind}"]
            lines += [f"{name}{labels} {value}" for labels, value in samples.items()]
        return "\n".join(lines) + "\n"


class Site:
    """The application. `root` is the folder; without tokens everyone may read."""

    def __init__(self, root: Path, tokens: tuple[str, ...] = (), record: Callable[[str], object] | None = None) -> None:
        self.root, self._record = root, record
        self._tokens = [token.encode() for token in tokens]
        self.news, self.meter = News(root), Meter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        status = size = 0

        async def counted(message: Message) -> None:
            nonlocal status, size
            await send(message)
            status = message.get("status", status)
            size += len(message.get("body", b"")) if request.method != "HEAD" else 0

        try:
            try:
                response = await self._answer(request)
            except OSError as error:
                _log.error("%s cannot be read: %s", _target(request), error)
                response = _refusal(503)
            await response(scope, receive, counted)
        finally:
            self.meter.answers[status] += 1
            self.meter.sent += size
            if self._record is not None:
                self._record(f"{request.method} {_target(request)} {status} {size}\n")

    async def _answer(self, request: Request) -> Response:
        target = _target(request)
        if sum(len(name) + len(value) for name, value in request.headers.raw) > MOST_HEADERS:
            return _refusal(431)
        if len(target) > _MOST_TARGET:
            return _refusal(414)
        if not self._admits(request):
            return _refusal(401, {"WWW-Authenticate": 'Bearer realm="sparserl"', "Connection": "close"})
        request.scope.get(ADMIT, _nothing)()
        if target == "/auth":
            return Response(status_code=204, headers={"Cache-Control": "no-store"})
        if request.method not in ("GET", "HEAD"):
            return _refusal(405, {"Allow": "GET, HEAD"})
        if target == "/metrics":
            text = self.meter.text(await asyncio.to_thread(self.news.read), self.news.waiting)
            return Response(text, headers={"Cache-Control": "no-store", "Content-Type": _EXPOSITION})
        try:
            name = require_name(target.removeprefix("/"))
        except InvalidField:
            return _refusal(404)
        if "leases" in name.split("/"):
            return _refusal(404)
        return await (self._head(request) if name == HEAD else self._object(request, name))

    def _admits(self, request: Request) -> bool:
        if not self._tokens:
            return True
        given = _BEARER.fullmatch(request.headers.get("authorization", ""))
        token = b"" if given is None else given[1].encode("latin-1")
        return any([hmac.compare_digest(token, one) for one in self._tokens])  # noqa: C419  # all take their time

    async def _head(self, request: Request) -> Response:
        wait = _wait(request) if request.method == "GET" else 0.0
        found = await self.news.other(lambda tag: _knows(request, tag), wait, request.is_disconnected)
        if found is None:
            return _refusal(404)
        headers = {"ETag": found.tag, "Cache-Control": "no-cache"}
        if _knows(request, found.tag):
            return Response(status_code=304, headers=headers)
        span = _span(request, len(found.data), found.tag)
        if span is None:
            return _beyond(len(found.data))
        headers |= _describe(HEAD, span, len(found.data))
        return Response(found.data[span.start :][: span.size], _status(span, len(found.data)), headers)

    async def _object(self, request: Request, name: str) -> Response:
        file = await asyncio.to_thread(open_inside, self.root, name)
        if file is None:
            return _refusal(404)
        status = os.fstat(file.fileno())
        tag = _tag(name, status)
        headers = {"ETag": tag, "Cache-Control": _FOREVER}
        span = _span(request, status.st_size, tag)
        if span is None or _knows(request, tag):
            file.close()
            return Response(status_code=304, headers=headers) if _knows(request, tag) else _beyond(status.st_size)
        headers |= _describe(name, span, status.st_size)
        return Part(file, span, _status(span, status.st_size), headers, request.is_disconnected)


class Part(Response):
    """A part of a file, or all of it, sent in chunks."""

    def __init__(
        self, file: io.FileIO, span: Span, status: int, headers: dict[str, str], left: Callable[[], Any]
    ) -> None:
        super().__init__(None, status, headers)
        self._file, self._span, self._left = file, span, left

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002  # ASGI
        with self._file as file:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            at, end = self._span.start, self._span.start + self._span.size
            while at < end and scope["method"] != "HEAD" and not await self._left():
                data = await asyncio.to_thread(os.pread, file.fileno(), min(_CHUNK, end - at), at)
                if not data:
                    raise OSError(f"{scope['path']} ends before its size")
                at += len(data)
                await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b""})


class News:
    """The head. While anybody waits for another one, a single task looks for all of them."""

    def __init__(self, root: Path) -> None:
        self.closing = False
        self._root = root
        self.waiting = 0
        self._found: Head | None = None
        self._change: asyncio.Event | None = None
        self._watcher: asyncio.Task[None] | None = None

    async def other(
        self, known: Callable[[str], bool], seconds: float, left: Callable[[], Any] | None = None
    ) -> Head | None:
        """The head; if its tag is known, after a while in which it might have become another one."""
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        change = self._change = self._change or asyncio.Event()
        found = await asyncio.to_thread(self.read)
        self.waiting += 1
        try:
            while found is not None and known(found.tag) and not self.closing and loop.time() < end:
                if self._watcher is None:
                    self._watcher = loop.create_task(self._watch())
                try:
                    await asyncio.wait_for(change.wait(), min(_GLANCE, end - loop.time()))
                except asyncio.TimeoutError:
                    if left is not None and await left():
                        break
                else:
                    change, found = self._change, self._found
        finally:
            self.waiting -= 1
        return found

    async def _watch(self) -> None:
        """Look as long as somebody waits. The first look counts as a change: it may have come before it."""
        seen: Head | None = None
        while self.waiting:
            try:
                found = await asyncio.to_thread(self.read)
            except OSError as error:
                _log.error("%s cannot be read: %s", HEAD, error)
                found = seen
            if found != seen or self.closing:
                seen = self._found = found
                change, self._change = self._change, asyncio.Event()
                if change is not None:
                    change.set()
            await asyncio.sleep(_POLL)
        self._watcher = None

    def read(self) -> Head | None:
        """The head as it is now; None where there is none."""
        file = open_inside(self._root, HEAD)
        if file is None:
            return None
        with file:
            size = os.fstat(file.fileno()).st_size
            if size > _MOST_HEAD:
                raise OSError(f"it has {size} bytes, at most {_MOST_HEAD} are served")
            data = os.pread(file.fileno(), size, 0)
        return Head(data, f'"{hashlib.sha256(data).hexdigest()}"')


def open_inside(root: Path, name: str) -> io.FileIO | None:
    """A regular file below the root, reached by folders alone: no symbolic link is followed."""
    *folders, last = name.split("/")
    flags = os.O_RDONLY | os.O_CLOEXEC
    try:
        at = os.open(root, flags | os.O_DIRECTORY)
        try:
            for folder in folders:
                above, at = at, os.open(folder, flags | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=at)
                os.close(above)
            handle = os.open(last, flags | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=at)
        finally:
            os.close(at)
    except OSError as error:
        if error.errno in _GONE:
            return None
        raise
    if stat.S_ISREG(os.fstat(handle).st_mode):
        return io.FileIO(handle)
    os.close(handle)
    return None


def _target(request: Request) -> str:
    """What was asked for, as it was written: nothing is unescaped, and a query makes it another name."""
    raw: bytes = request.scope["raw_path"]
    query: bytes = request.scope["query_string"]
    return (raw + b"?" + query if query else raw).decode("latin-1")


def _tag(name: str, status: os.stat_result) -> str:
    """The hash that an object is named by; size and time for those that are not."""
    last = name.rpartition("/")[2]
    return f'"{last}"' if _HASH.fullmatch(last) else f'"{status.st_size:x}-{status.st_mtime_ns:x}"'


def _knows(request: Request, tag: str) -> bool:
    known = ",".join(request.headers.getlist("if-none-match")).split(",")
    return any(one.strip().removeprefix("W/") in (tag, "*") for one in known)


def _wait(request: Request) -> float:
    found = _WAIT.search(",".join(request.headers.getlist("prefer")))
    return 0.0 if found is None else min(MOST_WAIT, float(found[1]))


def _span(request: Request, size: int, tag: str) -> Span | None:
    """The part that was asked for; all of it where the range is none we know; None if it lies beyond the end."""
    whole = Span(0, size)
    found = _RANGE.fullmatch(request.headers.get("range", ""))
    if found is None or request.method != "GET" or request.headers.get("if-range", tag) != tag:
        return whole
    first, last = found.groups()
    if not first:
        if not last:
            return whole
        tail = min(int(last), size)
        return Span(size - tail, tail) if tail else None
    start, end = int(first), min(int(last) + 1 if last else size, size)
    if last and int(last) < int(first):
        return whole
    return Span(start, end - start) if start < size else None


def _status(span: Span, size: int) -> int:
    return 200 if span == Span(0, size) else 206


def _describe(name: str, span: Span, size: int) -> dict[str, str]:
    headers = {
        "Content-Type": "application/json" if name.endswith(".json") else "application/octet-stream",
        "Content-Length": str(span.size),
        "Accept-Ranges": "bytes",
        "X-Content-Type-Options": "nosniff",
    }
    if _status(span, size) == 206:
        headers["Content-Range"] = f"bytes {span.start}-{span.start + span.size - 1}/{size}"
    return headers


def _nothing() -> None:
    """For requests that come from elsewhere than a socket."""


def _refusal(status: int, headers: dict[str, str] | None = None) -> Response:
    """An answer that says no more than its number."""
    return Response(status_code=status, headers={"Cache-Control": "no-store", **(headers or {})})


def _beyond(size: int) -> Response:
    return _refusal(416, {"Content-Range": f"bytes */{size}"})


class _Server(uvicorn.Server):
    """Ends at the first signal, with requests that are held answered at once; at the second without a word."""

    def __init__(self, config: uvicorn.Config, site: Site) -> None:
        super().__init__(config)
        self._site = site

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002  # as uvicorn calls it
        self.force_exit = self.should_exit
        self.should_exit = self._site.news.closing = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let answers under way have some seconds, and no more."""
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        asyncio.get_running_loop().call_later(_END_SECONDS, self._abort)
        await super().shutdown(sockets)

    def _abort(self) -> None:
        for connection in list(self.server_state.connections):
            connection.transport.abort()


def read_tokens(path: Path) -> tuple[str, ...]:
    """Tokens, one per line; empty lines and lines that begin with # are none."""
    lines = [line.strip() for line in path.read_text().splitlines()]
    tokens = tuple(line for line in lines if line and not line.startswith("#"))
    if not tokens:
        raise StoreError(f"{path}: there is no token in it")
    for number, line in enumerate(lines, 1):
        if line in tokens and not _TOKEN.fullmatch(line):
            raise StoreError(f"{path}: line {number} is not a token; write visible ASCII without spaces")
    return tokens


def listen(address: str) -> socket.socket:
    """A socket on HOST:PORT; port 0 is one that is free."""
    host, colon, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise StoreError(f"{address!r} is not an address to listen on; write HOST:PORT, as 127.0.0.1:8000")
    try:
        family, _, _, _, place = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)[0]
        found = socket.create_server(place[:2], family=family, backlog=2048)
    except OSError as error:
        raise StoreError(f"cannot listen on {address}: {error.strerror or error}") from error
    found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # or a body waits 40 ms until its headers are confirmed
    return found


def serve(
    folder: Path,
    address: str,
    *,
    tokens: tuple[str, ...] = (),
    tls: tuple[Path, Path] | None = None,
    access_log: Path | None = None,
    started: Callable[[str], object] = lambda _url: None,
) -> None:
    """Serve a folder until a signal ends it.

    tls: certificate and key. access_log: a file that gets a line per request: method, path, status, bytes.
    started: called with the URL when requests can come.
    """
    if not folder.is_dir():
        raise StoreError(f"{folder} is not a folder")
    record = None if access_log is None else access_log.open("a", buffering=1)
    site = Site(folder.absolute(), tokens, None if record is None else record.write)
    config = uvicorn.Config(
        site,
        http=functools.partial(Guarded, room=Room()),  # type: ignore[arg-type]
        loop="asyncio",
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=_IDLE_SECONDS,
        timeout_graceful_shutdown=_END_SECONDS + 2,
        ssl_certfile=None if tls is None else tls[0],
        ssl_keyfile=None if tls is None else tls[1],
    )
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    try:
        config.load()
    except OSError as error:
        raise StoreError(f"the certificate or its key cannot be used: {error}") from error
    _raise_limit()
    with listen(address) as place:
        host, port = place.getsockname()[:2]
        shown = f"[{host}]" if place.family == socket.AF_INET6 else host
        started(f"{'http' if tls is None else 'https'}://{shown}:{port}")
        loop = Loop()
        try:
            loop.run_until_complete(_Server(config, site).serve(sockets=[place]))
        finally:
            loop.close()
            if record is not None:
                record.close()


def _raise_limit() -> None:
    """As many open files as connections need, where the system lets us."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * MOST_CONNECTIONS + 256
    if soft != resource.RLIM_INFINITY and soft < wanted:
        best = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (best, hard))
