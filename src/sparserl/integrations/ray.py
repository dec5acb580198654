"""Ray: a store in Ray's object store, and publishers and subscribers as actors.

    publisher ──► catalog ──► object store of its node ──► of every other node, once ──► subscribers, by shared memory

The catalog is one small actor that knows names and tags and makes `swap` atomic. It owns every object, so that they
outlive the publisher. When the catalog dies the store is lost, and a publisher begins a new run. A `RayStore` can be
passed to any actor or task.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from ..errors import LimitExceeded, NotFound, Refused, StoreError, Truncated, Unavailable
from ..session import Publisher, Subscriber, SyncReport
from ..transport.stores.base import MAX_WATCHED_BYTES, ObjectInfo, StoredObject, poll, require_name

try:
    import ray
    from ray import exceptions
except ImportError as missing:
    raise ImportError("Ray is not installed: pip install 'sparserl[ray]'") from missing

_NAMESPACE = "sparserl"
_SMALL_BYTES = 64 << 10  # objects up to this size are kept by the catalog itself
_TIMEOUT = 120.0  # seconds for one request to the catalog, or for one object
_MAX_HOLD = 20.0  # seconds that one request for a change may be held


class _Row(NamedTuple):
    """An object: its bytes, or a list with a reference to them."""

    data: Any
    size: int
    time: float
    tag: str


class _Catalog:
    """The names of all objects of a store, and where they are. Runs as an actor."""

    def __init__(self) -> None:
        self._objects: dict[str, _Row] = {}
        self._changed = asyncio.Condition()

    async def find(self, name: str) -> tuple[Any, int, str] | None:
        """The bytes of an object or a reference to them, its size and its tag."""
        row = self._objects.get(name)
        return None if row is None else (row.data, row.size, row.tag)

    async def put(self, name: str, data: Any, tag: str) -> None:
        """Write an object: bytes if it is small, else an array, which is copied to shared memory of the catalog."""
        if isinstance(data, bytes):
            self._objects[name] = _Row(data, len(data), time.time(), tag)
        else:
            self._objects[name] = _Row([ray.put(data)], data.size, time.time(), tag)
        await self._notify()

    async def swap(self, name: str, data: Any, tag: str, old_tag: str | None) -> bool:
        """Replace an object if it still has its old tag."""
        if self._tag(name) != old_tag:
            return False
        await self.put(name, data, tag)
        return True

    async def wait(self, name: str, tag: str | None, seconds: float) -> None:
        """Return when an object has another tag, or after some seconds."""
        async with self._changed:
            try:
                await asyncio.wait_for(self._changed.wait_for(lambda: self._tag(name) != tag), seconds)
            except asyncio.TimeoutError:
                return

    async def listed(self, prefix: str) -> list[tuple[str, int, float]]:
        """Names, sizes and times of the objects whose names begin with a prefix."""
        return [(name, row.size, row.time) for name, row in sorted(self._objects.items()) if name.startswith(prefix)]

    async def delete(self, names: list[str]) -> None:
        """Delete objects; those that do not exist are skipped."""
        for name in names:
            self._objects.pop(name, None)
        await self._notify()

    def _tag(self, name: str) -> str | None:
        row = self._objects.get(name)
        return None if row is None else row.tag

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()


class RayStore:
    """A store in a Ray cluster, identified by its name.

    It lives as long as the cluster, or until `destroy`. Ray must have been started in this process.

    Args:
        name: of the store; every process that gives the same one has the same store.

    Raises:
        InvalidField: the name has characters other than letters, digits, `.`, `_`, `-` and `/`.
        StoreError: Ray cannot start the actor that holds the store.

    >>> store = RayStore("run-7")                                                                  # doctest: +SKIP
    >>> publisher = sparserl.Publisher(store, weights)                                             # doctest: +SKIP
    """

    writable = True

    def __init__(self, name: str) -> None:
        self.name = require_name(name)
        self.url = f"ray://{name}"
        with self._translated(name):
            self._catalog: Any = (
                ray.remote(_Catalog)
                .options(
                    name=name.replace("/", ":"),
                    namespace=_NAMESPACE,
                    lifetime="detached",
                    get_if_exists=True,
                    num_cpus=0,
                )
                .remote()
            )

    def __reduce__(self) -> tuple[Any, ...]:
        return RayStore, (self.name,)

    def get(self, name: str, max_bytes: int) -> StoredObject:
        data, size, tag = self._find(name)
        if size > max_bytes:
            raise LimitExceeded(f"{name} has {size} bytes; at most {max_bytes} were expected")
        return StoredObject(self._bytes(name, data).tobytes(), tag)

    def read(self, name: str, start: int, size: int) -> bytes:
        data, total, _ = self._find(name)
        if start + size > total:
            raise Truncated(f"{name} ends {start + size - total} bytes too early")
        return self._bytes(name, data)[start : start + size].tobytes()

    def put(self, name: str, data: bytes | memoryview) -> None:
        self._call(name, "put", require_name(name), _sendable(data), _tag(data))

    def swap(self, name: str, data: bytes, tag: str | None) -> str:
        new_tag = _tag(data)
        if not self._call(name, "swap", require_name(name), _sendable(data), new_tag, tag):
            raise Refused(f"{name} was changed by another writer")
        return new_tag

    def changed(self, name: str, tag: str | None, timeout: float) -> StoredObject | None:
        return poll(
            lambda _left: self.get(name, MAX_WATCHED_BYTES),
            tag,
            timeout,
            lambda left: self._call(name, "wait", name, tag, min(left, _MAX_HOLD)),
        )

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        return iter([ObjectInfo(*row) for row in self._call(prefix, "listed", prefix)])

    def delete(self, names: Iterable[str]) -> None:
        self._call("deleting", "delete", [require_name(name) for name in names])

    def close(self) -> None:
        """Nothing is held open."""

    def destroy(self) -> None:
        """Delete the store and everything in it. It is gone when this returns.

        Raises:
            Unavailable: Ray does not say that it is.
        """
        ray.kill(self._catalog)  # which Ray does a moment later
        deadline = time.monotonic() + _TIMEOUT
        while time.monotonic() < deadline:
            try:
                self._call("the catalog", "find", "head.json")
            except Unavailable:
                pass  # it may be dying
            except StoreError:
                return
            time.sleep(0.02)
        raise Unavailable(f"{self.url} is still there {_TIMEOUT:g} s after it was deleted")

    def _find(self, name: str) -> tuple[Any, int, str]:
        row: tuple[Any, int, str] | None = self._call(name, "find", require_name(name))
        if row is None:
            raise NotFound(f"{self.url}: there is no {name}")
        return row

    def _bytes(self, name: str, data: Any) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """The bytes of an object, in the shared memory of this node if they are not small."""
        if isinstance(data, bytes):
            return np.frombuffer(data, np.uint8)
        with self._translated(name):
            array: np.ndarray[Any, np.dtype[np.uint8]] = ray.get(data[0], timeout=_TIMEOUT)
        return array

    def _call(self, about: str, method: str, *args: Any) -> Any:
        with self._translated(about):
            return ray.get(getattr(self._catalog, method).remote(*args), timeout=_TIMEOUT)

    @contextmanager
    def _translated(self, name: str) -> Iterator[None]:
        """Turn errors of Ray into ours."""
        try:
            yield
        except (exceptions.ActorDiedError, exceptions.ActorUnschedulableError) as error:
            raise StoreError(f"{self.url} is lost: the actor that held it has died; begin a new store") from error
        except exceptions.RayError as error:
            raise Unavailable(f"{self.url}: {name}: {' '.join(str(error).split())[:300]}") from error


def _sendable(data: bytes | memoryview) -> Any:
    """Small data is sent with the request; anything else as an array, which Ray passes by shared memory."""
    return bytes(data) if memoryview(data).nbytes <= _SMALL_BYTES else np.frombuffer(data, np.uint8)


def _tag(data: bytes | memoryview) -> str:
    return hashlib.sha256(data).hexdigest()


class PublisherActor:
    """A publisher for `ray.remote`. Its source is made in the actor.

    Args:
        store: a URL or a store.
        make: called in the actor without arguments; returns the source, or the weights.
        options: those of `sparserl.Publisher`.
    """

    def __init__(self, store: str | RayStore, make: Callable[[], Any], **options: Any) -> None:
        self.source = make()
        self.publisher = Publisher(store, self.source, **options)

    def publish(self, **options: Any) -> SyncReport:
        return self.publisher.publish(**options)

    def call(self, work: Callable[..., Any], *args: Any) -> Any:
        """Call `work` with the source: for a training step, say."""
        return work(self.source, *args)


class SubscriberActor:
    """A subscriber for `ray.remote`. After Ray has restarted it (`max_restarts`), its next `sync` brings it up to date.

    Args:
        store: a URL or a store.
        make: called in the actor without arguments; returns the target, or the weights.
        options: those of `sparserl.Subscriber`.
    """

    def __init__(self, store: str | RayStore, make: Callable[[], Any], **options: Any) -> None:
        self.target = make()
        self.subscriber = Subscriber(store, self.target, **options)

    def stage(self, version: int | None = None) -> SyncReport | None:
        return self.subscriber.stage(version)

    def commit(self) -> SyncReport:
        return self.subscriber.commit()

    def sync(self, version: int | None = None) -> SyncReport | None:
        return self.subscriber.sync(version)

    def version(self) -> int | None:
        return self.subscriber.version

    def call(self, work: Callable[..., Any], *args: Any) -> Any:
        """Call `work` with the target: to generate with its model, say."""
        return work(self.target, *args)
