"""Object storage through obstore: S3, Google Cloud Storage, Azure, and plain HTTP to read.

obstore retries requests that failed on the way; what still fails is tried again here, with a new request. A conditional
write is never sent twice: whether it had worked is for the caller to find out.
"""

from __future__ import annotations

import functools
import hashlib
import os
import time
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any

from ..errors import LimitExceeded, NotFound, Refused, StoreError, Truncated, Unavailable
from .store import Found, Listed, Retry, require_name

_POLL = 0.2  # seconds between looks at a head where the store cannot tell when it changes
_TIMEOUT = timedelta(seconds=120)  # of a whole request: 8 MiB at 1 Mbit/s take half of it
_CONNECT = timedelta(seconds=5)
_HOLDS = (20, 5, 1)  # seconds that a server is asked to hold a request for the head: the most that there is time for
_KEYS = 1000  # deleted at a time


class ObjectStore:
    """A bucket, or the part of it below a path."""

    def __init__(self, url: str, *, token: str | None, retry: Retry, options: dict[str, Any]) -> None:
        try:
            import obstore
            from obstore import exceptions
            from obstore.store import HTTPStore, from_url
        except ImportError as error:
            raise StoreError(
                f"{url.split('://', maxsplit=1)[0]}:// needs obstore: pip install 'sparserl[store]'"
            ) from error
        self.url, self.retry = url, retry
        self._obstore, self._errors = obstore, exceptions
        self._is_http = url.startswith(("http://", "https://"))
        self.writable = not self._is_http
        client: Any = {"timeout": _TIMEOUT, "connect_timeout": _CONNECT, **(options.pop("client_options", None) or {})}
        headers = dict(client.pop("default_headers", {}))
        if token is not None:
            headers["Authorization"] = f"Bearer {token}"
        if url.startswith("http://") or os.environ.get("AWS_ALLOW_HTTP", "").lower() in ("1", "true"):
            client["allow_http"] = True  # obstore reads that variable only where it is given no client options
        retries: Any = {"max_retries": 0}
        try:
            if self._is_http:
                self._store: Any = HTTPStore(url, client_options=client | _with(headers), retry_config=retries)
                self._waiting: dict[int, Any] = {}
                for hold in _HOLDS:
                    held: Any = client | _with(headers | {"Prefer": f"wait={hold}"})
                    held["timeout"] = _TIMEOUT + timedelta(seconds=hold)
                    self._waiting[hold] = HTTPStore(url, client_options=held, retry_config=retries)
            else:
                opened: Any = from_url
                self._store = opened(url, client_options=client | _with(headers), retry_config=retries, **options)
        except (exceptions.BaseError, ValueError, TypeError) as error:
            raise StoreError(f"{url}: {_short(error)}") from error

    def get(self, name: str, most: int) -> Found:
        return self.retry.run(f"{self.url}: {name}", lambda: self._get(self._store, name, most, None))

    def read(self, name: str, start: int, size: int) -> bytes:
        def once() -> bytes:
            with _translated(self, name):
                data = bytes(self._obstore.get_range(self._store, require_name(name), start=start, length=size))
            if len(data) != size:
                raise Truncated(f"{name} ends {size - len(data)} bytes too early")
            return data

        return self.retry.run(f"{self.url}: {name}", once)

    def put(self, name: str, data: bytes | memoryview) -> None:
        self._require_writable()

        def once() -> None:
            with _translated(self, name):
                self._obstore.put(self._store, require_name(name), data)

        self.retry.run(f"{self.url}: {name}", once)

    def swap(self, name: str, data: bytes, tag: str | None) -> str:
        self._require_writable()
        mode: Any = "create" if tag is None else _version(tag)
        with _translated(self, name):
            result = self._obstore.put(self._store, require_name(name), data, mode=mode, use_multipart=False)
        if result["e_tag"] is None:
            raise StoreError(f"{self.url}: the store gives no tags; it cannot hold the head of a session")
        return _tag(result["e_tag"], result["version"])

    def changed(self, name: str, tag: str | None, timeout: float) -> Found | None:
        end = time.monotonic() + timeout
        while True:
            asked = time.monotonic()
            hold = next((h for h in _HOLDS if self._is_http and h <= end - asked + _POLL), 0)
            store = self._waiting[hold] if hold else self._store
            try:
                found = self.retry.run(f"{self.url}: {name}", functools.partial(self._get, store, name, 1 << 30, tag))
                if found.tag != tag:
                    return found
            except self._errors.NotModifiedError:
                pass
            except NotFound:
                if tag is not None:
                    raise
            left = end - time.monotonic()
            if left <= 0:
                return None
            if time.monotonic() - asked < hold or not hold:  # it does not hold requests, or there is no head yet
                time.sleep(min(_POLL, left))

    def list(self, prefix: str) -> Iterator[Listed]:
        self._require_writable()

        def once() -> list[Listed]:
            with _translated(self, prefix):
                pages = self._obstore.list(self._store, prefix=prefix.rpartition("/")[0] or None)
                items = (item for page in pages for item in page if item["path"].startswith(prefix))
                return [Listed(item["path"], item["size"], item["last_modified"].timestamp()) for item in items]

        return iter(self.retry.run(f"{self.url}: {prefix}", once))

    def delete(self, names: Iterable[str]) -> None:
        self._require_writable()
        wanted = [require_name(name) for name in names]
        for low in range(0, len(wanted), _KEYS):
            some = wanted[low : low + _KEYS]

            def once(some: list[str] = some) -> None:
                try:
                    with _translated(self, some[0]):
                        self._obstore.delete(self._store, some)
                except NotFound:
                    return

            self.retry.run(f"{self.url}: deleting {len(some)} objects", once)

    def close(self) -> None:
        """Nothing is held."""

    def _get(self, store: Any, name: str, most: int, tag: str | None) -> Found:
        with _translated(self, name):
            options: Any = None if tag is None else {"if_none_match": _version(tag)["e_tag"]}
            result = self._obstore.get(store, require_name(name), options=options)
            if result.meta["size"] > most:
                raise LimitExceeded(f"{name}: {result.meta['size']} bytes, at most {most} were expected")
            data = bytes(result.bytes())
        return Found(data, _tag(result.meta["e_tag"] or hashlib.sha256(data).hexdigest(), result.meta["version"]))

    def _require_writable(self) -> None:
        if not self.writable:
            raise StoreError(f"{self.url} can only be read")


def _tag(e_tag: str, version: str | None) -> str:
    """Some stores compare ETags, some versions of an object: a tag is both."""
    return e_tag if version is None else f"{e_tag}\n{version}"


def _version(tag: str) -> dict[str, str]:
    e_tag, _, version = tag.partition("\n")
    return {"e_tag": e_tag, "version": version} if version else {"e_tag": e_tag}


def _with(headers: dict[str, str]) -> dict[str, Any]:
    return {"default_headers": headers} if headers else {}


class _translated:  # noqa: N801  # reads as a statement
    """obstore's errors as ours. What is not known to be final is taken to be transient."""

    def __init__(self, store: ObjectStore, name: str) -> None:
        self.store, self.name = store, name

    def __enter__(self) -> None:
        """Nothing to do."""

    def __exit__(self, kind: Any, error: BaseException | None, _trace: object) -> None:
        known = self.store._errors  # noqa: SLF001  # two halves of one thing
        if error is None or not isinstance(error, (known.BaseError, OSError)):
            return
        what = f"{self.store.url}: {self.name}"
        if isinstance(error, known.NotModifiedError):
            return
        if isinstance(error, (known.NotFoundError, FileNotFoundError)):
            raise NotFound(f"{what} is not there") from error
        if isinstance(error, (known.AlreadyExistsError, known.PreconditionError)):
            raise Refused(f"{what} is not what it was; another writer was first") from error
        final = (known.PermissionDeniedError, known.UnauthenticatedError, known.InvalidPathError)
        if isinstance(error, (*final, known.NotSupportedError, known.UnknownConfigurationKeyError)):
            raise StoreError(f"{what}: {_short(error)}") from error
        if "416 Range Not Satisfiable" in str(error):
            raise Truncated(f"{what} ends before the part that is asked for") from error
        raise Unavailable(f"{what}: {_short(error)}") from error


def _short(error: BaseException) -> str:
    return " ".join(str(error).partition("Debug source:")[0].split())[:300]
