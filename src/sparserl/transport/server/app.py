"""The ASGI application of `sparserl serve`: the objects of a folder, the head, `/auth` and `/metrics`.

Objects never change, so that caches may keep them for ever; only the head and what is announced are revalidated. A
request for one of these that names the tag it knows (`If-None-Match`) and how long it would wait (`Prefer: wait=20`) is
held until there is another.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from ...errors import InvalidField, SparserlError
from ..stores.base import COMING, is_served, require_name
from ..stores.mirror import MirrorStore
from .connections import ADMIT, MAX_HEADER_BYTES
from .head import HeadWatcher, ServedHead, open_object
from .responses import (
    FileRange,
    Room,
    content_headers,
    knows,
    object_tag,
    range_refusal,
    refusal,
    requested_range,
    target_of,
    wait_seconds,
)

_MAX_TARGET = 2048
_FILLERS = 4  # objects that are fetched for clients at a time
_EXPOSITION = "text/plain; version=0.0.4; charset=utf-8"
_FOREVER = "public, max-age=31536000, immutable"
_BEARER = re.compile(r"bearer +(\S+) *", re.IGNORECASE)

_log = logging.getLogger("sparserl.serve")


class ServerMetrics:
    """Counters of a server, in the text format of Prometheus. They have no labels but the status."""

    def __init__(self) -> None:
        self.responses: Counter[int] = Counter()
        self.sent_bytes = 0

    def text(self, head: ServedHead | None, waiting: int) -> str:
        """All metrics; docs/how-to/metrics.md describes them."""
        responses = {f'{{status="{status}"}}': count for status, count in sorted(self.responses.items())}
        rows = [
            ("requests_total", "counter", "Requests answered, by status.", responses),
            ("sent_bytes_total", "counter", "Bytes of answers, without their headers.", {"": self.sent_bytes}),
            ("waiting", "gauge", "Subscribers that wait for another head.", {"": waiting}),
        ]
        if head is not None and (version := head.version) is not None:
            rows.append(("version", "gauge", "The version that the head names.", {"": version}))
        lines = []
        for suffix, kind, description, samples in rows:
            name = f"sparserl_serve_{suffix}"
            lines.append(f"# HELP {name} {description}")
            lines.append(f"# TYPE {name} {kind}")
            lines += [f"{name}{labels} {value}" for labels, value in samples.items()]
        return "\n".join(lines) + "\n"


class App:
    """The application.

    Args:
        root: the folder to serve.
        tokens: a request must have one of them; without tokens everyone may read. Each has a name, which may be empty.
        record: called with a line of text for each request.
        mirror: whose folder it is, if it is one: only what it has verified is served, and it may fetch what is missing.
    """

    def __init__(
        self,
        root: Path,
        tokens: Mapping[str, str] | None = None,
        record: Callable[[str], object] | None = None,
        mirror: MirrorStore | None = None,
    ) -> None:
        self.root = root
        self.head = HeadWatcher(root)
        self.coming = HeadWatcher(root, COMING, missing=b"{}")
        self.metrics = ServerMetrics()
        self.tokens = tokens or {}
        self._record = record
        self._mirror = mirror
        self._verifier = ThreadPoolExecutor(1, thread_name_prefix="sparserl-verify")
        self._fillers = ThreadPoolExecutor(_FILLERS, thread_name_prefix="sparserl-fill")
        self._filling: dict[str, asyncio.Future[bool]] = {}
        self._room = Room()

    def begin_closing(self) -> None:
        """Answer requests that wait, and let no more wait."""
        self.head.closing = True
        self.coming.closing = True

    def close(self) -> None:
        """Begin nothing more."""
        for pool in (self._verifier, self._fillers):
            pool.shutdown(wait=False, cancel_futures=True)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        reader = self._reader(request)
        status = 0
        size = 0

        async def send_and_count(message: Message) -> None:
            nonlocal status, size
            await send(message)
            status = message.get("status", status)
            size += len(message.get("body", b"")) if request.method != "HEAD" else 0

        try:
            try:
                response = await self._respond(request, reader is not None)
            except (OSError, SparserlError) as error:
                _log.error("%s cannot be read: %s", target_of(request), error)
                response = refusal(503)
            await response(scope, receive, send_and_count)
        finally:
            self.metrics.responses[status] += 1
            self.metrics.sent_bytes += size
            if self._record is not None:
                self._record(f"{request.method} {target_of(request)} {status} {size}{f' {reader}' if reader else ''}\n")

    async def _respond(self, request: Request, may_read: bool) -> Response:
        target = target_of(request)
        if sum(len(name) + len(value) for name, value in request.headers.raw) > MAX_HEADER_BYTES:
            return refusal(431)
        if len(target) > _MAX_TARGET:
            return refusal(414)
        if not may_read:
            return refusal(401, {"WWW-Authenticate": 'Bearer realm="sparserl"', "Connection": "close"})
        if target != f"/{COMING}":  # a hint must not take a connection from somebody who waits for the head
            request.scope.get(ADMIT, lambda: None)()  # requests that do not come from a socket have none
        if target == "/auth":
            return Response(status_code=204, headers={"Cache-Control": "no-store"})
        if request.method not in ("GET", "HEAD"):
            return refusal(405, {"Allow": "GET, HEAD"})
        if target == "/metrics":
            return await self._respond_metrics()
        try:
            name = require_name(target.removeprefix("/"))
        except InvalidField:
            return refusal(404)
        if not is_served(name):
            return refusal(404)
        for watcher in (self.head, self.coming):
            if name == watcher.name:
                return await self._respond_watched(request, watcher)
        return await self._respond_object(request, name)

    def _reader(self, request: Request) -> str | None:
        """The name of the token of a request; None if it has none that is accepted."""
        if not self.tokens:
            return ""
        match = _BEARER.fullmatch(request.headers.get("authorization", ""))
        token = b"" if match is None else match[1].encode("latin-1")
        # Every comparison is made, so that the time tells nothing.
        names = [name for allowed, name in self.tokens.items() if hmac.compare_digest(token, allowed.encode())]
        return names[0] if names else None

    async def _respond_metrics(self) -> Response:
        text = self.metrics.text(await asyncio.to_thread(self.head.read), self.head.waiting)
        return Response(text, headers={"Cache-Control": "no-store", "Content-Type": _EXPOSITION})

    async def _respond_watched(self, request: Request, watcher: HeadWatcher) -> Response:
        wait = wait_seconds(request) if request.method == "GET" else 0.0
        head = await watcher.wait_while(lambda tag: knows(request, tag), wait, request.is_disconnected)
        if head is None:
            return refusal(404)
        headers = {"ETag": head.tag, "Cache-Control": "no-cache"}
        if knows(request, head.tag):
            return Response(status_code=304, headers=headers)
        total = len(head.data)
        bytes_ = requested_range(request, total, head.tag)
        if bytes_ is None:
            return range_refusal(total)
        headers |= content_headers(watcher.name, bytes_, total)
        return Response(head.data[bytes_.start :][: bytes_.size], bytes_.status(total), headers)

    async def _respond_object(self, request: Request, name: str) -> Response:
        if self._mirror is not None and not await self._has_object(self._mirror, name):
            return refusal(404)
        file = await asyncio.to_thread(open_object, self.root, name)
        if file is None:
            return refusal(404)
        status = os.fstat(file.fileno())
        total = status.st_size
        tag = object_tag(name, status)
        headers = {"ETag": tag, "Cache-Control": _FOREVER}
        if knows(request, tag):
            file.close()
            return Response(status_code=304, headers=headers)
        bytes_ = requested_range(request, total, tag)
        if bytes_ is None:
            file.close()
            return range_refusal(total)
        headers |= content_headers(name, bytes_, total)
        return FileRange(file, bytes_, bytes_.status(total), headers, request.is_disconnected, self._room)

    async def _has_object(self, mirror: MirrorStore, name: str) -> bool:
        """Whether a mirror has an object, undamaged. What it has waits for nothing that has to be fetched."""
        if await asyncio.to_thread(mirror.is_intact, name):
            return True
        loop = asyncio.get_running_loop()
        if await loop.run_in_executor(self._verifier, mirror.verify, name):
            return True
        if (filling := self._filling.get(name)) is None:  # once for all who ask
            filling = self._filling[name] = loop.run_in_executor(self._fillers, mirror.fill, name)
            filling.add_done_callback(lambda _: self._filling.pop(name))
        return await asyncio.shield(filling)
