"""What a session needs of a store: named objects that are written once, and one, the head, that is replaced.

Every operation ends. Requests have timeouts, transient failures are retried a bounded number of times, and the deadline
of the caller (`deadline`) ends all of it. An error names the object. A write whose condition does not hold is never
retried.
"""

from __future__ import annotations

import hashlib
import random
import re
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

from ...errors import InvalidField, LimitExceeded, NotFound, StoreError, Unavailable
from .deadline import current

R = TypeVar("R")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)*")
_HASH = re.compile(r"[0-9a-f]{64}")
MAX_NAME = 400
COMING = "coming.json"  # what is announced of the next version
RANGE_BYTES = 8 << 20  # larger objects are read in ranges of this size, several at once
MAX_WATCHED_BYTES = 1 << 20  # of an object whose changes are awaited: it is read each time


class StoredObject(NamedTuple):
    """The bytes of an object, and a tag that changes when they do."""

    data: bytes
    tag: str


class ObjectInfo(NamedTuple):
    """An object in a listing: its name, its size in bytes, and when it was written (seconds since 1970)."""

    name: str
    size: int
    time: float


class Store(Protocol):
    """Named objects. `FolderStore`, `ObjectStore` and `WebStore` have these methods, and others may.

    `sparserl.testing` has a suite of tests that every store passes. A store in which waiting for a change costs next to
    nothing may say so by `announces = True`: then publishers announce there what is coming.
    """

    url: str
    writable: bool

    def get(self, name: str, max_bytes: int) -> StoredObject:
        """Read an object.

        Raises:
            NotFound: there is no object of that name.
            LimitExceeded: it is larger than `max_bytes`.
        """
        ...

    def read(self, name: str, start: int, size: int) -> bytes:
        """Read `size` bytes of an object, from `start` on.

        Raises:
            NotFound: there is no object of that name.
            Truncated: it ends before that.
        """
        ...

    def put(self, name: str, data: bytes | memoryview) -> None:
        """Write an object whose name depends on its contents, so that writing it twice does no harm."""
        ...

    def swap(self, name: str, data: bytes, tag: str | None) -> str:
        """Replace an object that still has a tag; where the tag is None, create one that does not exist yet.

        Returns:
            The new tag.

        Raises:
            Refused: the object has another tag. Nothing was written.
            Unavailable: it is not known whether the object was written.
        """
        ...

    def changed(self, name: str, tag: str | None, timeout: float) -> StoredObject | None:
        """Wait until an object has another tag than this one, and read it; None after `timeout` seconds."""
        ...

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """List the objects whose names begin with a prefix."""
        ...

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects. Those that do not exist are skipped."""
        ...

    def close(self) -> None:
        """Release open files and connections. The store can still be used."""
        ...


def require_name(name: str) -> str:
    """Check that a name means the same in every store: no leading dots, no parent folders, nothing to escape."""
    if len(name) > MAX_NAME or not _NAME.fullmatch(name):
        raise InvalidField(f"{name[:80]!r} is not the name of an object")
    return name


def is_served(name: str) -> bool:
    """Whether readers may have an object: not leases and pins, which change and are for publishers."""
    return not {"leases", "pins"} & set(name.split("/"))


def is_named_by_hash(name: str) -> bool:
    """Whether the name of an object ends with a SHA-256."""
    return _HASH.fullmatch(name.rpartition("/")[2]) is not None


def has_named_hash(data: bytes, name: str) -> bool:
    """Whether an object has the SHA-256 that its name ends with."""
    return hashlib.sha256(data).hexdigest() == name.rpartition("/")[2]


def _sleep(seconds: float) -> None:
    current().sleep(seconds)


def untrusted_certificate(host: str, reason: str) -> StoreError:
    """What is said of a server whose certificate cannot be trusted; no second attempt would change that."""
    return StoreError(
        f"the certificate of {host} is not trusted: {reason}. If an authority of your own has signed it, name the file "
        "with that authority's certificate: --ca FILE, sparserl.transport.open_store(url, ca=FILE), or the variable "
        "SSL_CERT_FILE"
    )


@dataclass(frozen=True)
class Retry:
    """How often an operation is tried, and how long it waits in between: a random time below a bound that doubles."""

    attempts: int = 6
    first: float = 0.1
    longest: float = 5.0
    sleep: Callable[[float], None] = _sleep

    def run(self, label: str, work: Callable[[], R]) -> R:
        """Call `work` until it succeeds, fails for good, was tried often enough, or there is no time left."""
        for attempt in range(self.attempts):
            try:
                return work()
            except Unavailable as error:
                if current().over:
                    raise
                if attempt + 1 == self.attempts:
                    raise Unavailable(
                        f"{label}: gave up after {self.attempts} attempts; the last error was: {error}"
                    ) from None
                bound = min(self.longest, self.first * 2**attempt)
                self.sleep(random.uniform(0, bound))  # noqa: S311  # jitter, not a secret
        raise AssertionError("unreachable")


def fetch(store: Store, name: str, size: int, pool: ThreadPoolExecutor | None = None) -> bytes:
    """Read an object of known size: at once, or, on the threads of a pool, in several ranges at the same time."""
    current().require(f"{store.url}: {name}")
    if pool is None or size <= RANGE_BYTES or getattr(store, "reads_whole", False):
        data = store.get(name, size).data
    else:
        data = b"".join(_read_ranges(store, name, size, pool))
    if len(data) != size:
        raise LimitExceeded(f"{name} has {len(data)} bytes; {size} were expected")
    return data


def _read_ranges(store: Store, name: str, size: int, pool: ThreadPoolExecutor) -> Iterator[bytes]:
    def read(start: int) -> bytes:
        return store.read(name, start, min(RANGE_BYTES, size - start))

    deadline = current()
    ranges = [pool.submit(deadline.run, read, start) for start in range(0, size, RANGE_BYTES)]
    try:
        for future in ranges:
            yield deadline.result(future, f"{store.url}: {name}")
    finally:
        for future in ranges:
            future.cancel()


def exists(store: Store, name: str) -> bool:
    """Whether there is an object of this name."""
    try:
        store.read(name, 0, 1)
    except NotFound:
        return False
    return True


def poll(
    look: Callable[[float], StoredObject | None], tag: str | None, timeout: float, pause: Callable[[float], object]
) -> StoredObject | None:
    """`Store.changed` for stores that have to look again and again.

    Args:
        look: reads the object, or returns None if its tag is still `tag`. It is given the seconds that are left.
        tag: the tag that is known; None if the object did not exist.
        timeout: seconds after which None is returned.
        pause: called between two looks with the seconds that are left; it may take fewer.
    """
    end = time.monotonic() + timeout
    while True:
        try:
            stored = look(end - time.monotonic())
            if stored is not None and stored.tag != tag:
                return stored
        except NotFound:
            if tag is not None:
                raise
        left = min(end - time.monotonic(), current().left)
        if left <= 0:
            return None
        pause(left)
