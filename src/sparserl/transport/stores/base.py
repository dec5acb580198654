"""Stores: objects under names, all written once but for the head, which is swapped under a condition.

    file:///path, s3://bucket/path, gs://bucket/path, az://container/path     to read and to write
    http(s)://host/path                                                       to read, as `sparserl serve` offers it

Every operation ends: requests have timeouts, transient trouble is met with a bounded number of retries, and a deadline
of the caller's own (`transport.deadline`) ends all of it. What cannot be done is an error that says which object was
meant. A refused condition is an answer, never retried.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

from ...errors import InvalidField, LimitExceeded, NotFound, StoreError, Unavailable
from .deadline import current

R = TypeVar("R")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)*")
MOST_NAME = 400
RANGE_BYTES = 8 << 20  # larger objects are read in ranges of this size, several at once
MOST_WATCHED = 1 << 20  # bytes of an object whose changes are waited for: it is read each time


class Found(NamedTuple):
    """An object's bytes, and a tag that changes when they do."""

    data: bytes
    tag: str


class Listed(NamedTuple):
    """An object that is there: its name, its bytes, and when it was written (seconds since 1970)."""

    name: str
    size: int
    time: float


class Store(Protocol):
    """What a session needs of a store. `transport.folder`, `transport.objects` and `transport.web` have it."""

    url: str
    writable: bool

    def get(self, name: str, most: int) -> Found:
        """An object of at most so many bytes; `NotFound` where there is none."""
        ...

    def read(self, name: str, start: int, size: int) -> bytes:
        """A part of an object."""
        ...

    def put(self, name: str, data: bytes | memoryview) -> None:
        """Write an object whose name says what is in it, so that writing it twice does no harm."""
        ...

    def swap(self, name: str, data: bytes, tag: str | None) -> str:
        """Write an object if it still has a tag (None: if it is not there), else raise `Refused`. Returns its new tag.

        `Unavailable` leaves open whether it was written.
        """
        ...

    def changed(self, name: str, tag: str | None, timeout: float) -> Found | None:
        """The object once its tag is another one; None if it stayed the same for so many seconds."""
        ...

    def list(self, prefix: str) -> Iterator[Listed]:
        """The objects whose names begin with a prefix."""
        ...

    def delete(self, names: Iterable[str]) -> None:
        """Objects that need not be there any more."""
        ...

    def close(self) -> None:
        """Give back what is held open. The store can still be used."""
        ...


def open_store(url: str, *, token: str | None = None, retry: Retry | None = None, **options: Any) -> Store:
    """The store at a URL. Options are those of obstore's stores: `endpoint`, `region`, `client_options` and so on.

    token: sent as `Authorization: Bearer …` to an http(s) store, which of the options has a few of `client_options`.
    """
    scheme, _, rest = url.partition("://")
    if not rest:
        raise StoreError(f"{url!r} is not a URL; write file:///path, s3://bucket/path or https://host/path")
    if scheme == "file":
        from .folder import FolderStore

        return FolderStore(rest)
    if scheme in ("http", "https"):
        from .web import WebStore

        return WebStore(url, token=token, retry=retry or Retry(), options=options)
    from .objects import ObjectStore

    return ObjectStore(url, retry=retry or Retry(), options=options)


def require_name(name: str) -> str:
    """A name that means the same in every store: no dots in front, no way up, nothing to be escaped."""
    if len(name) > MOST_NAME or not _NAME.fullmatch(name):
        raise InvalidField(f"{name[:80]!r} is not the name of an object")
    return name


def _sleep(seconds: float) -> None:
    current().sleep(seconds)


@dataclass(frozen=True)
class Retry:
    """How often and how long transient trouble is met: each wait is drawn between nothing and a doubling bound."""

    attempts: int = 6
    first: float = 0.1
    longest: float = 5.0
    sleep: Callable[[float], None] = _sleep

    def run(self, what: str, work: Callable[[], R]) -> R:
        """Do the work until it succeeds, fails for good, was tried often enough, or there is no time left for it."""
        for attempt in range(self.attempts):
            try:
                return work()
            except Unavailable as error:
                if current().over:
                    raise
                if attempt + 1 == self.attempts:
                    raise Unavailable(
                        f"{what}: gave up after {self.attempts} attempts; the last said: {error}"
                    ) from error
                bound = min(self.longest, self.first * 2**attempt)
                self.sleep(random.uniform(0, bound))  # noqa: S311  # jitter, not a secret
        raise AssertionError("unreachable")


def fetch(store: Store, name: str, size: int, pool: ThreadPoolExecutor | None = None) -> bytes:
    """An object whose size is known: in one piece, or in ranges that are read at the same time."""
    current().require(f"{store.url}: {name}")
    if pool is None or size <= RANGE_BYTES:
        data = store.get(name, size).data
    else:
        data = b"".join(_ranges(store, name, size, pool))
    if len(data) != size:
        raise LimitExceeded(f"{name}: {len(data)} bytes are there, {size} were announced")
    return data


def _ranges(store: Store, name: str, size: int, pool: ThreadPoolExecutor) -> Iterator[bytes]:
    def read(start: int) -> bytes:
        return store.read(name, start, min(RANGE_BYTES, size - start))

    deadline = current()
    flight = [pool.submit(deadline.run, read, start) for start in range(0, size, RANGE_BYTES)]
    try:
        for part in flight:
            yield deadline.result(part, f"{store.url}: {name}")
    finally:
        for part in flight:
            part.cancel()


def exists(store: Store, name: str) -> bool:
    """Whether an object is there."""
    try:
        store.read(name, 0, 1)
    except NotFound:
        return False
    return True


def watch(store: Store, name: str, tag: str | None, timeout: float, wait: Callable[[float], object]) -> Found | None:
    """`Store.changed` by looking again and again; `wait` is told how many seconds are left, and may take fewer."""
    end = time.monotonic() + timeout
    while True:
        try:
            found = store.get(name, MOST_WATCHED)
        except NotFound:
            if tag is not None:
                raise
        else:
            if found.tag != tag:
                return found
        left = min(end - time.monotonic(), current().left)
        if left <= 0:
            return None
        wait(left)
