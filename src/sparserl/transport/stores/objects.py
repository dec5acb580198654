"""Object storage through obstore: S3, Google Cloud Storage and Azure.

Requests run on an event loop of their own, so that a deadline or a signal ends them; nothing is read past its limit,
whatever headers promise. What fails on the way is tried again here, with a new request. A conditional write is never
sent twice: whether it had worked is for the caller to find out.
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import hashlib
import os
import threading
import time
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeVar

from ...errors import LimitExceeded, NotFound, Refused, SparserlError, StoreError, Truncated, Unavailable
from .base import MOST_WATCHED, Found, Listed, Retry, require_name
from .deadline import current

R = TypeVar("R")
_POLL = 0.2  # seconds between looks at a head
_TIMEOUT = timedelta(seconds=120)  # of a whole request: 8 MiB at 1 Mbit/s take half of it
_CONNECT = timedelta(seconds=5)
_KEYS = 1000  # deleted at a time
_CHUNK = 8 << 20
_MOST_LISTED = 1 << 24  # objects: their names fit into memory


class ObjectStore:
    """A bucket, or the part of it below a path."""

    writable = True

    def __init__(self, url: str, *, retry: Retry, options: dict[str, Any]) -> None:
        try:
            import obstore
            from obstore import exceptions
            from obstore.store import from_url
        except ImportError as error:
            raise StoreError(
                f"{url.split('://', maxsplit=1)[0]}:// needs obstore: pip install 'sparserl[store]'"
            ) from error
        self.url = url
        self.retry = retry
        self._obstore = obstore
        self._errors = exceptions
        client: Any = {"timeout": _TIMEOUT, "connect_timeout": _CONNECT, **(options.pop("client_options", None) or {})}
        if os.environ.get("AWS_ALLOW_HTTP", "").lower() in ("1", "true"):
            client["allow_http"] = True  # obstore reads that variable only where it is given no client options
        opened: Any = from_url
        try:
            self._store: Any = opened(url, client_options=client, retry_config={"max_retries": 0}, **options)
        except Exception as error:
            raise StoreError(f"{url}: {_short(error)}") from error

    def get(self, name: str, most: int) -> Found:
        found = self.retry.run(f"{self.url}: {name}", functools.partial(self._get, name, most, None))
        assert found is not None
        return found

    def read(self, name: str, start: int, size: int) -> bytes:
        path = require_name(name)

        async def part() -> bytes:
            result = await _own(self._obstore.get_async(self._store, path, options={"range": (start, start + size)}))
            return await _body(result, size, name)

        def once() -> bytes:
            data = self._call(name, part)
            if len(data) != size:
                raise Truncated(f"{name} ends {size - len(data)} bytes too early")
            return data

        return self.retry.run(f"{self.url}: {name}", once)

    def put(self, name: str, data: bytes | memoryview) -> None:
        path = require_name(name)

        async def put() -> None:
            await _own(self._obstore.put_async(self._store, path, data))

        self.retry.run(f"{self.url}: {name}", lambda: self._call(name, put))

    def swap(self, name: str, data: bytes, tag: str | None) -> str:
        path = require_name(name)
        mode: Any = "create" if tag is None else _version(tag)

        async def put() -> Any:
            return await _own(self._obstore.put_async(self._store, path, data, mode=mode, use_multipart=False))

        result = self._call(name, put)
        if result["e_tag"] is None:
            raise StoreError(f"{self.url}: the store gives no tags; it cannot hold the head of a session")
        return _tag(result["e_tag"], result["version"])

    def changed(self, name: str, tag: str | None, timeout: float) -> Found | None:
        end = time.monotonic() + timeout
        while True:
            try:
                found = self.retry.run(f"{self.url}: {name}", functools.partial(self._get, name, MOST_WATCHED, tag))
                if found is not None and found.tag != tag:
                    return found
            except NotFound:
                if tag is not None:
                    raise
            left = min(end - time.monotonic(), current().left)
            if left <= 0:
                return None
            current().sleep(min(_POLL, left))

    def list(self, prefix: str) -> Iterator[Listed]:
        async def listed() -> list[Listed]:
            out: list[Listed] = []
            async for page in _each(self._obstore.list(self._store, prefix=prefix.rpartition("/")[0] or None)):
                items = (item for item in page if item["path"].startswith(prefix))
                out += [Listed(item["path"], item["size"], item["last_modified"].timestamp()) for item in items]
                if len(out) > _MOST_LISTED:
                    raise LimitExceeded(f"{self.url}: more than {_MOST_LISTED} objects below {prefix!r}")
            return out

        return iter(self.retry.run(f"{self.url}: {prefix}", lambda: self._call(prefix, listed)))

    def delete(self, names: Iterable[str]) -> None:
        wanted = [require_name(name) for name in names]
        for low in range(0, len(wanted), _KEYS):
            self._delete(wanted[low : low + _KEYS])

    def close(self) -> None:
        """Nothing is held."""

    def _delete(self, names: Sequence[str]) -> None:
        async def delete() -> None:
            await _own(self._obstore.delete_async(self._store, names))

        def once() -> None:
            try:
                self._call(names[0], delete)
            except NotFound:
                return

        self.retry.run(f"{self.url}: deleting {len(names)} objects", once)

    def _get(self, name: str, most: int, tag: str | None) -> Found | None:
        """An object; None if it has the tag that is known."""
        path = require_name(name)
        options: Any = None if tag is None else {"if_none_match": _version(tag)["e_tag"]}

        async def get() -> Found | None:
            try:
                result = await _own(self._obstore.get_async(self._store, path, options=options))
            except self._errors.NotModifiedError:
                if tag is None:
                    raise
                return None
            meta = result.meta
            if meta["size"] > most:
                raise LimitExceeded(f"{name}: {meta['size']} bytes, at most {most} were expected")
            data = await _body(result, most, name)
            return Found(data, _tag(meta["e_tag"] or hashlib.sha256(data).hexdigest(), meta["version"]))

        return self._call(name, get)

    def _call(self, name: str, work: Callable[[], Awaitable[R]]) -> R:
        """What a request gives, or an error of ours. Whoever stops waiting for it also ends it."""
        what = f"{self.url}: {name}"
        deadline = current()
        deadline.require(what)

        async def run() -> R:
            return await work()

        future = asyncio.run_coroutine_threadsafe(run(), _loop())
        try:
            return deadline.result(future, what)
        except SparserlError:
            raise
        except Exception as error:
            raise self._translated(error, what) from error
        finally:
            future.cancel()

    def _translated(self, error: Exception, what: str) -> StoreError | Truncated:
        """Errors of obstore as ours. What is not known to be final is taken to be transient."""
        known = self._errors
        if isinstance(error, (known.NotFoundError, FileNotFoundError)):
            return NotFound(f"{what} is not there")
        if isinstance(error, (known.AlreadyExistsError, known.PreconditionError)):
            return Refused(f"{what} is not what it was; another writer was first")
        final = (known.PermissionDeniedError, known.UnauthenticatedError, known.InvalidPathError)
        if isinstance(error, (*final, known.NotSupportedError, known.UnknownConfigurationKeyError, TypeError)):
            return StoreError(f"{what}: {_short(error)}")
        if "416 Range Not Satisfiable" in str(error):
            return Truncated(f"{what} ends before the part that is asked for")
        return Unavailable(f"{what}: {_short(error)}")


async def _body(result: Any, most: int, name: str) -> bytes:
    """All of a body, if that is no more than it may be."""
    parts: list[bytes] = []
    size = 0
    async for part in _each(result.stream(min_chunk_size=min(_CHUNK, most + 1))):
        parts.append(bytes(part))
        size += len(part)
        if size > most:
            raise LimitExceeded(f"{name}: more than the {most} bytes that were expected")
    return b"".join(parts)


_loops: dict[int, asyncio.AbstractEventLoop] = {}
_starting = threading.Lock()
_unfinished: weakref.WeakSet[Any] = weakref.WeakSet()  # futures that threads of obstore's have a hand on
_SETTLE = 0.5  # seconds


def _own(future: Awaitable[R]) -> Awaitable[R]:
    """A future of obstore's, to be waited for before Python ends."""
    _unfinished.add(future)
    return future


async def _each(stream: Any) -> AsyncIterator[Any]:
    iterator = aiter(stream)
    while True:
        try:
            item = await _own(anext(iterator))
        except StopAsyncIteration:
            return
        yield item


def _settle() -> None:
    """Let obstore's threads finish with what was cancelled: if they call Python after its end, the process aborts."""
    end = time.monotonic() + _SETTLE
    while _unfinished and time.monotonic() < end:
        time.sleep(0.005)


def _loop() -> asyncio.AbstractEventLoop:
    """The event loop of this process, which runs on a thread of its own."""
    with _starting:
        loop = _loops.get(os.getpid())
        if loop is None:
            loop = _loops[os.getpid()] = asyncio.new_event_loop()
            threading.Thread(target=loop.run_forever, name="sparserl-objects", daemon=True).start()
            atexit.register(_settle)
        return loop


def _tag(e_tag: str, version: str | None) -> str:
    """Some stores compare ETags, some versions of an object: a tag is both."""
    return e_tag if version is None else f"{e_tag}\n{version}"


def _version(tag: str) -> dict[str, str]:
    e_tag, _, version = tag.partition("\n")
    return {"e_tag": e_tag, "version": version} if version else {"e_tag": e_tag}


def _short(error: BaseException) -> str:
    return " ".join(str(error).partition("Debug source:")[0].split())[:300]
