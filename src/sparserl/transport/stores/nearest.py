"""A store, some of whose objects neighbours have too: they are asked first."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from ...errors import InvalidField, NotFound, SparserlError
from .base import ObjectInfo, Store, StoredObject, has_named_hash, is_named_by_hash
from .deadline import current, within

_PATIENCE = 5.0  # seconds that neighbours together have for an object: the store has it, too
_LONGEST_REST = 600.0
_REST = 30.0  # seconds in which a neighbour that failed is not asked; twice as long after every further failure
_log = logging.getLogger("sparserl.session")


class NearestStore:
    """A store, and neighbours that may have its objects. What cannot be verified, such as the head, is the store's own.

    Args:
        store: the store.
        neighbours: those who are asked for objects first, in this order.
    """

    def __init__(self, store: Store, neighbours: Sequence[Store]) -> None:
        self.url = store.url
        self.writable = store.writable
        self.announces = getattr(store, "announces", False)
        self.origin = store
        self._neighbours = neighbours
        self._failures: Counter[str] = Counter()  # in a row, by the URL of a neighbour
        self._rest_until: dict[str, float] = {}  # by the URL of a neighbour

    def get(self, name: str, max_bytes: int) -> StoredObject:
        if is_named_by_hash(name):
            with within(_PATIENCE):
                for neighbour in self._neighbours:
                    stored = self._ask(neighbour, name, max_bytes)
                    if stored is not None:
                        return stored
        return self.origin.get(name, max_bytes)

    def read(self, name: str, start: int, size: int) -> bytes:
        return self.origin.read(name, start, size)  # some bytes of an object cannot be verified

    def put(self, name: str, data: bytes | memoryview) -> None:
        self.origin.put(name, data)

    def swap(self, name: str, data: bytes, tag: str | None) -> str:
        return self.origin.swap(name, data, tag)

    def changed(self, name: str, tag: str | None, timeout: float) -> StoredObject | None:
        return self.origin.changed(name, tag, timeout)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        return self.origin.list(prefix)

    def delete(self, names: Iterable[str]) -> None:
        self.origin.delete(names)

    def close(self) -> None:
        for store in (self.origin, *self._neighbours):
            store.close()

    def _ask(self, neighbour: Store, name: str, max_bytes: int) -> StoredObject | None:
        """An object as a neighbour has it; None if it cannot help."""
        if time.monotonic() < self._rest_until.get(neighbour.url, 0.0) or current().over:
            return None
        try:
            stored = neighbour.get(name, max_bytes)
            if not has_named_hash(stored.data, name):
                raise InvalidField(f"{name} is damaged")
        except NotFound:
            return None
        except SparserlError as error:
            self._failures[neighbour.url] += 1
            rest = min(_LONGEST_REST, _REST * 2 ** min(10, self._failures[neighbour.url] - 1))
            self._rest_until[neighbour.url] = time.monotonic() + rest
            _log.warning("%s cannot help, and is not asked for %g s: %s", neighbour.url, rest, error)
            return None
        self._failures[neighbour.url] = 0
        return stored
