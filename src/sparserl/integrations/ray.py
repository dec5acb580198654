"""Ray: a store whose objects lie in Ray's object store, and publishers and subscribers as actors.

    publisher ──► keeper ──► object store of its node ──► of every other node, once ──► subscribers, from shared memory

The keeper is one small actor that knows names and tags, and swaps the head under its condition. It owns every object,
so that they outlive the publisher. What dies with the keeper is the store: a publisher then begins a new run. Whoever
holds a `RayStore` may hand it to any actor or task.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from ..errors import LimitExceeded, NotFound, Refused, StoreError, Truncated, Unavailable
from ..session import Publisher, Subscriber, SyncReport
from ..transport.stores.base import Found, Listed, require_name, watch

try:
    import ray
    from ray import exceptions
except ImportError as missing:
    raise ImportError("Ray is not installed: pip install 'sparserl[ray]'") from missing

_NAMESPACE = "sparserl"
_SMALL = 64 << 10  # bytes up to which an object lies with the keeper itself
_TIMEOUT = 120.0  # seconds for one request to the keeper, or for one object
_HOLD = 20.0  # seconds that one request for a change may be held


class _Keeper:
    """What is in a store: every object under its name, with its size, its time and its tag. Runs as an actor."""

    def __init__(self) -> None:
        self._objects: dict[str, tuple[Any, int, float, str]] = {}
        self._moved = asyncio.Condition()

    async def find(self, name: str) -> tuple[Any, int, str] | None:
        """The bytes of an object or a reference to them, its size and its tag."""
        found = self._objects.get(name)
        return None if found is None else (found[0], found[1], found[3])

    async def put(self, name: str, data: Any, tag: str) -> None:
        """Write an object: bytes if it is small, else an array in shared memory, of which an own copy is made there."""
        kept, size = (data, len(data)) if isinstance(data, bytes) else ([ray.put(data)], data.size)
        self._objects[name] = kept, size, time.time(), tag
        await self._tell()

    async def swap(self, name: str, data: Any, tag: str, before: str | None) -> bool:
        """Write an object if it has a tag; nothing comes in between."""
        there = self._objects.get(name)
        if (None if there is None else there[3]) != before:
            return False
        await self.put(name, data, tag)
        return True

    async def wait(self, name: str, tag: str | None, seconds: float) -> None:
        """Return when an object has another tag, or after a while."""

        def moved() -> bool:
            found = self._objects.get(name)
            return (None if found is None else found[3]) != tag

        async with self._moved:
            try:
                await asyncio.wait_for(self._moved.wait_for(moved), seconds)
            except asyncio.TimeoutError:
                return

    async def listed(self, prefix: str) -> list[tuple[str, int, float]]:
        return [(name, row[1], row[2]) for name, row in sorted(self._objects.items()) if name.startswith(prefix)]

    async def delete(self, names: list[str]) -> None:
        for name in names:
            self._objects.pop(name, None)
        await self._tell()

    async def _tell(self) -> None:
        async with self._moved:
            self._moved.notify_all()


class RayStore:
    """A store in a Ray cluster, known by its name.

    >>> store = RayStore("run-7")                                                                  # doctest: +SKIP
    >>> publisher = sparserl.Publisher(store, weights)                                             # doctest: +SKIP

    It is there as long as the cluster, or until `destroy`. Ray must have been started in this process.
    """

    writable = True

    def __init__(self, name: str) -> None:
        self.name, self.url = require_name(name), f"ray://{name}"
        with self._translated(name):
            self._keeper: Any = (
                ray.remote(_Keeper)
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

    def get(self, name: str, most: int) -> Found:
        data, size, tag = self._find(name)
        if size > most:
            raise LimitExceeded(f"{name}: {size} bytes, at most {most} were expected")
        return Found(self._bytes(name, data).tobytes(), tag)

    def read(self, name: str, start: int, size: int) -> bytes:
        data, whole, _ = self._find(name)
        if start + size > whole:
            raise Truncated(f"{name} ends {start + size - whole} bytes too early")
        return self._bytes(name, data)[start : start + size].tobytes()

    def put(self, name: str, data: bytes | memoryview) -> None:
        self._ask(name, "put", require_name(name), _carried(data), _tag(data))

    def swap(self, name: str, data: bytes, tag: str | None) -> str:
        if not self._ask(name, "swap", require_name(name), _carried(data), after := _tag(data), tag):
            raise Refused(f"{name} is not what it was; another writer was first")
        return after

    def changed(self, name: str, tag: str | None, timeout: float) -> Found | None:
        return watch(self, name, tag, timeout, lambda left: self._ask(name, "wait", name, tag, min(left, _HOLD)))

    def list(self, prefix: str) -> Iterator[Listed]:
        return iter([Listed(*row) for row in self._ask(prefix, "listed", prefix)])

    def delete(self, names: Iterable[str]) -> None:
        self._ask("deleting", "delete", [require_name(name) for name in names])

    def close(self) -> None:
        """Nothing is held."""

    def destroy(self) -> None:
        """End the store: all that is in it goes."""
        ray.kill(self._keeper)

    def _find(self, name: str) -> tuple[Any, int, str]:
        found: tuple[Any, int, str] | None = self._ask(name, "find", require_name(name))
        if found is None:
            raise NotFound(f"{self.url}: there is no {name}")
        return found

    def _bytes(self, name: str, data: Any) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """The bytes of an object, where they are in this node's shared memory."""
        if isinstance(data, bytes):
            return np.frombuffer(data, np.uint8)
        with self._translated(name):
            found: np.ndarray[Any, np.dtype[np.uint8]] = ray.get(data[0], timeout=_TIMEOUT)
        return found

    def _ask(self, about: str, method: str, *args: Any) -> Any:
        with self._translated(about):
            return ray.get(getattr(self._keeper, method).remote(*args), timeout=_TIMEOUT)

    @contextmanager
    def _translated(self, name: str) -> Iterator[None]:
        """Ray's errors as ours."""
        try:
            yield
        except (exceptions.ActorDiedError, exceptions.ActorUnschedulableError) as error:
            raise StoreError(f"{self.url} is gone: its keeper has died; begin a new one") from error
        except exceptions.RayError as error:
            raise Unavailable(f"{self.url}: {name}: {' '.join(str(error).split())[:300]}") from error


def _carried(data: bytes | memoryview) -> Any:
    """What is small travels with the request; anything else is an array, which Ray hands over by shared memory."""
    return bytes(data) if memoryview(data).nbytes <= _SMALL else np.frombuffer(data, np.uint8)


def _tag(data: bytes | memoryview) -> str:
    return hashlib.sha256(data).hexdigest()


class PublisherActor:
    """A publisher for `ray.remote`; what it publishes is made where it runs.

    make: called with nothing in the actor; returns the source, or the weights.
    """

    def __init__(self, store: str | RayStore, make: Callable[[], Any], **options: Any) -> None:
        self.source = make()
        self.publisher = Publisher(store, self.source, **options)

    def publish(self, **options: Any) -> SyncReport | None:
        return self.publisher.publish(**options)

    def call(self, work: Callable[..., Any], *args: Any) -> Any:
        """Do some work with the source: a training step, say."""
        return work(self.source, *args)


class SubscriberActor:
    """A subscriber for `ray.remote`. Started again by Ray (`max_restarts`), it finds its way back by the next sync.

    make: called with nothing in the actor; returns the target, or the weights.
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
        """Do some work with the target: generate with its model, say."""
        return work(self.target, *args)
