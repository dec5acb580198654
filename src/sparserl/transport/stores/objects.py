"""Object storage through obstore: S3, Google Cloud Storage and Azure.

Requests run on an event loop of their own, so that a deadline or a signal ends them. No body is read past its limit,
whatever its headers say. Retries are made here, with a new request. A conditional write is never sent twice: the caller
has to find out whether it was done.
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import hashlib
import os
import re
import threading
import time
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeVar

from ...errors import LimitExceeded, NotFound, Refused, SparserlError, StoreError, Truncated, Unavailable
from ...humanize import switch
from .base import MAX_WATCHED_BYTES, ObjectInfo, Retry, StoredObject, poll, require_name, untrusted_certificate
from .deadline import current

R = TypeVar("R")
_POLL = 0.2  # seconds between looks at a head
_TIMEOUT = timedelta(seconds=120)  # of a whole request: 8 MiB at 1 Mbit/s take half of it
_CONNECT_TIMEOUT = timedelta(seconds=5)
_DELETED_AT_ONCE = 256  # objects: as many as one request to Azure takes
_CHUNK = 8 << 20
_MAX_LISTED = 1 << 24  # objects: their names fit into memory
_YES = ("true", "1", "yes", "on", "y")  # as obstore reads them
_NO = ("false", "0", "no", "off", "n")
_METADATA_HOST = "169.254.169.254"  # of cloud machines
_NO_CREDENTIALS = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or the variables of your cloud"


class ObjectStore:
    """A bucket, or the objects of it below a path."""

    writable = True

    def __init__(self, url: str, *, retry: Retry, options: dict[str, Any]) -> None:
        try:
            import obstore
            from obstore import exceptions
            from obstore.store import from_url
        except ImportError as error:
            scheme = url.split("://", maxsplit=1)[0]
            raise StoreError(f"{scheme}:// needs obstore: pip install 'sparserl[store]'") from error
        self.url = url
        self.retry = retry
        self._obstore = obstore
        self._errors = exceptions
        self._has_answered = False
        client: Any = {
            "timeout": _TIMEOUT,
            "connect_timeout": _CONNECT_TIMEOUT,
            **(options.pop("client_options", None) or {}),
        }
        is_plain = str(options.get("endpoint")).lower().startswith("http://")
        if switch("AWS_ALLOW_HTTP", *_YES, *_NO) in _YES or is_plain:
            client.setdefault("allow_http", True)  # obstore reads the variable only if it is given no client options
        untyped_from_url: Any = from_url
        try:
            self._store: Any = untyped_from_url(url, client_options=client, retry_config={"max_retries": 0}, **options)
        except Exception as error:  # noqa: BLE001  # its dump is left out
            raise StoreError(f"{url}: {_short(error)}") from None

    def get(self, name: str, max_bytes: int) -> StoredObject:
        stored = self._get(name, max_bytes, None)
        assert stored is not None
        return stored

    def read(self, name: str, start: int, size: int) -> bytes:
        path = require_name(name)

        async def request() -> bytes:
            result = await _own(self._obstore.get_async(self._store, path, options={"range": (start, start + size)}))
            return await _body(result, size, name)

        def read_once() -> bytes:
            data = self._call(name, request)
            if len(data) != size:
                raise Truncated(f"{name} ends {size - len(data)} bytes too early")
            return data

        return self.retry.run(f"{self.url}: {name}", read_once)

    def put(self, name: str, data: bytes | memoryview) -> None:
        path = require_name(name)

        async def request() -> None:
            await _own(self._obstore.put_async(self._store, path, data))

        self.retry.run(f"{self.url}: {name}", lambda: self._call(name, request))

    def swap(self, name: str, data: bytes, tag: str | None) -> str:
        path = require_name(name)
        mode: Any = "create" if tag is None else _version(tag)

        async def request() -> Any:
            return await _own(self._obstore.put_async(self._store, path, data, mode=mode, use_multipart=False))

        result = self._call(name, request)
        if result["e_tag"] is None:
            raise StoreError(f"{self.url}: the store gives no tags; it cannot hold the head of a session")
        return _tag(result["e_tag"], result["version"])

    def changed(self, name: str, tag: str | None, timeout: float) -> StoredObject | None:
        return poll(
            lambda _left: self._get(name, MAX_WATCHED_BYTES, tag),
            tag,
            timeout,
            lambda left: current().sleep(min(_POLL, left)),
        )

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        async def request() -> list[ObjectInfo]:
            objects: list[ObjectInfo] = []
            async for page in _each(self._obstore.list(self._store, prefix=prefix.rpartition("/")[0] or None)):
                items = (item for item in page if item["path"].startswith(prefix))
                objects += [ObjectInfo(item["path"], item["size"], item["last_modified"].timestamp()) for item in items]
                if len(objects) > _MAX_LISTED:
                    raise LimitExceeded(f"{self.url}: more than {_MAX_LISTED} objects below {prefix!r}")
            return objects

        return iter(self.retry.run(f"{self.url}: {prefix}", lambda: self._call(prefix, request)))

    def delete(self, names: Iterable[str]) -> None:
        paths = [require_name(name) for name in names]
        for low in range(0, len(paths), _DELETED_AT_ONCE):
            self._delete(paths[low : low + _DELETED_AT_ONCE])

    def close(self) -> None:
        """Nothing is held open."""

    def _delete(self, paths: Sequence[str]) -> None:
        label = f"{self.url}: deleting {len(paths)} objects"

        async def delete(what: str | Sequence[str]) -> bool:
            """Whether nothing was found to be gone already."""
            try:
                await _own(self._obstore.delete_async(self._store, what))
            except Exception as error:
                if not isinstance(self._translated(error, label), NotFound):
                    raise
                return False
            return True

        async def delete_all() -> None:
            if not await delete(paths):
                # Azure says no more than that one object is gone, perhaps because this request is a repeated one.
                await asyncio.gather(*map(delete, paths))

        self.retry.run(label, lambda: self._call(paths[0], delete_all))

    def _get(self, name: str, max_bytes: int, tag: str | None) -> StoredObject | None:
        """An object; None if it still has this tag."""
        request = functools.partial(self._request_object, require_name(name), max_bytes, tag)
        return self.retry.run(f"{self.url}: {name}", lambda: self._call(name, request))

    async def _request_object(self, name: str, max_bytes: int, tag: str | None) -> StoredObject | None:
        options: Any = None if tag is None else {"if_none_match": _version(tag)["e_tag"]}
        try:
            result = await _own(self._obstore.get_async(self._store, name, options=options))
        except self._errors.NotModifiedError:
            if tag is None:
                raise
            return None
        meta = result.meta
        if meta["size"] > max_bytes:
            raise LimitExceeded(f"{name} has {meta['size']} bytes; at most {max_bytes} were expected")
        data = await _body(result, max_bytes, name)
        return StoredObject(data, _tag(meta["e_tag"] or hashlib.sha256(data).hexdigest(), meta["version"]))

    def _call(self, name: str, request: Callable[[], Awaitable[R]]) -> R:
        """The result of a request, or an error of ours. A caller that stops waiting for the request ends it."""
        label = f"{self.url}: {name}"
        deadline = current()
        deadline.require(label)

        async def run() -> R:
            return await request()

        future = asyncio.run_coroutine_threadsafe(run(), _loop())
        try:
            answer = deadline.result(future, label)
        except SparserlError:
            raise
        except Exception as error:  # noqa: BLE001  # its dump is left out
            raise self._translated(error, label) from None
        finally:
            future.cancel()
        self._has_answered = True
        return answer

    def _translated(self, error: Exception, label: str) -> StoreError | Truncated:
        """An error of obstore as one of ours. What is not known to be final may be transient."""
        errors = self._errors
        text = str(error)
        if "NoSuchBucket" in text or "The specified bucket does not exist" in text or "ContainerNotFound" in text:
            return StoreError(
                f"{self.url}: the bucket does not exist; make it first, or check its name and the endpoint"
            )
        if isinstance(error, (errors.NotFoundError, FileNotFoundError)):
            return NotFound(f"{label} does not exist")
        if isinstance(error, (errors.AlreadyExistsError, errors.PreconditionError)):
            return Refused(f"{label} was changed by another writer")
        final = (errors.PermissionDeniedError, errors.UnauthenticatedError, errors.InvalidPathError)
        if isinstance(error, (*final, errors.NotSupportedError, errors.UnknownConfigurationKeyError, TypeError)):
            return StoreError(f"{label}: {_short(error)}")
        if "416 Range Not Satisfiable" in text:
            return Truncated(f"{label} ends before the requested range")
        if "InvalidCertificate(" in text:
            reason = re.search(r"\b(UnknownIssuer|Expired|NotValidForName|[A-Z][A-Za-z]+EndEntity)", text)
            return untrusted_certificate(self.url, reason[0] if reason else "it is invalid")
        if "BadScheme" in text or "URL scheme is not allowed" in text:
            return StoreError(
                f"{self.url}: the endpoint is plain http, which sends keys and weights unencrypted. If that is meant: "
                "give the endpoint itself (endpoint=, --endpoint), or set AWS_ALLOW_HTTP=true"
            )
        if (
            _METADATA_HOST in text and not self._has_answered
        ):  # obstore asks it where the environment has no credentials
            return StoreError(f"{self.url}: there are no credentials: {_NO_CREDENTIALS}")
        return Unavailable(f"{label}: {_short(error)}")


async def _body(result: Any, max_bytes: int, name: str) -> bytes:
    """The whole body, if it is not longer than it may be."""
    chunks: list[bytes] = []
    size = 0
    async for chunk in _each(result.stream(min_chunk_size=min(_CHUNK, max_bytes + 1))):
        chunks.append(bytes(chunk))
        size += len(chunk)
        if size > max_bytes:
            raise LimitExceeded(f"{name} has more than the {max_bytes} bytes that were expected")
    return b"".join(chunks)


_loops: dict[int, asyncio.AbstractEventLoop] = {}
_starting = threading.Lock()
_unfinished: weakref.WeakSet[Any] = weakref.WeakSet()  # futures that threads of obstore may still complete
_SETTLE_SECONDS = 0.5


def _own(future: Awaitable[R]) -> Awaitable[R]:
    """Remember a future of obstore, to wait for it before Python ends."""
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
    """Wait for obstore's threads to finish: one that calls Python after its end aborts the process."""
    end = time.monotonic() + _SETTLE_SECONDS
    while _unfinished and time.monotonic() < end:
        time.sleep(0.005)


def _loop() -> asyncio.AbstractEventLoop:
    """The event loop of this process, which runs on a thread of its own."""
    with _starting:
        loop = _loops.get(os.getpid())
        if loop is None:
            loop = asyncio.new_event_loop()
            _loops[os.getpid()] = loop
            threading.Thread(target=loop.run_forever, name="sparserl-objects", daemon=True).start()
            atexit.register(_settle)
        return loop


def _tag(e_tag: str, version: str | None) -> str:
    """Some stores compare ETags, others versions of an object: a tag has both."""
    return e_tag if version is None else f"{e_tag}\n{version}"


def _version(tag: str) -> dict[str, str]:
    e_tag, _, version = tag.partition("\n")
    return {"e_tag": e_tag, "version": version} if version else {"e_tag": e_tag}


def _short(error: BaseException) -> str:
    """The words of an error of obstore, and of the innermost reason in the dump that follows them."""
    text, _, dump = str(error).partition("Debug source:")
    reasons = re.findall(r'\b(?:message|error): "([^"\\]+)"', dump)[-1:]
    return ": ".join(" ".join(part.split())[:300] for part in (text, *reasons))
