"""A store whose objects are kept in a folder as they are read, for later and for neighbours, to whom it is served.

Objects never change, so that one that is in the folder need not be asked for again. The head does: it is always read
from the store, and shown to neighbours when its version is held here.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

from ...errors import InvalidField, LimitExceeded, NotFound, SessionError, StoreError, Truncated, Unavailable
from ...files import Folder
from .base import ObjectInfo, Store, StoredObject, exists, has_named_hash
from .folder import FolderStore

_MOST_BYTES = 1 << 30  # of an object
_MOST_ASKED_BYTES = 1 << 27  # of an object that is fetched because a neighbour asks for it
_PATIENCE = 5.0  # seconds that a neighbour's request waits for an object that is being fetched
_MARK = ".mirror"  # a file that says what the folder is
_HEADS = 4  # that were read last: one of them is shown when its version is held
_log = logging.getLogger("sparserl.serve")


class MirrorStore:
    """A store, and the folder that keeps what is read from it.

    Args:
        store: the store.
        folder: the folder. It may have objects from before; they are verified. One mirror at a time has it.
        head: the name of the object that changes.

    Raises:
        SessionError: the folder cannot be used, is in use, or is a store.
    """

    def __init__(self, store: Store, folder: str | os.PathLike[str], head: str) -> None:
        self.url = store.url
        self.writable = store.writable
        self._lock = _own(Path(folder))
        self.folder = FolderStore(folder)
        self._store = store
        self._head = head
        self._heads: dict[str, bytes] = {}  # the last ones, by tag
        self._shown_prefix: str | None = None  # of the names that neighbours may ask for
        self._guard = threading.Lock()
        self._fetching: dict[str, threading.Lock] = {}  # one thread at a time fetches an object
        self._is_full = False

    # -- the store -----------------------------------------------------------------------------------------------------

    def get(self, name: str, max_bytes: int) -> StoredObject:
        if not self._is_kept(name):
            return self._remember(name, self._store.get(name, max_bytes))
        data = self._bytes(name, max_bytes)
        if len(data) > max_bytes:
            raise LimitExceeded(f"{name} has {len(data)} bytes; at most {max_bytes} were expected")
        return StoredObject(data, hashlib.sha256(data).hexdigest())

    def read(self, name: str, start: int, size: int) -> bytes:
        if not self._is_kept(name):
            return self._store.read(name, start, size)
        data = self._bytes(name, _MOST_BYTES)[start : start + size]
        if len(data) < size:
            raise Truncated(f"{name} ends {size - len(data)} bytes too early")
        return data

    def put(self, name: str, data: bytes | memoryview) -> None:
        self._store.put(name, data)

    def swap(self, name: str, data: bytes, tag: str | None) -> str:
        return self._store.swap(name, data, tag)

    def changed(self, name: str, tag: str | None, timeout: float) -> StoredObject | None:
        stored = self._store.changed(name, tag, timeout)
        return None if stored is None else self._remember(name, stored)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        return self._store.list(prefix)

    def delete(self, names: Iterable[str]) -> None:
        self._store.delete(names)

    def close(self) -> None:
        self._store.close()
        self.folder.close()
        self._lock.close()

    # -- neighbours ----------------------------------------------------------------------------------------------------

    def show(self, tag: str, prefix: str) -> None:
        """Show neighbours the head that has a tag, and let them ask for objects whose names have a prefix."""
        if (data := self._heads.get(tag)) is not None:
            self._shown_prefix = prefix
            try:
                self.folder.put(self._head, data)
            except StoreError as error:
                self._warn(error)

    def fill(self, name: str) -> bool:
        """See that the folder has an object that a neighbour asks for, undamaged; whether it has it.

        Raises:
            StoreError: The store has it, and cannot be reached.
        """
        is_shown = self._shown_prefix is not None and name.startswith(self._shown_prefix)
        if not self._is_kept(name) or not (is_shown or exists(self.folder, name)):
            return False
        try:
            self._bytes(name, _MOST_ASKED_BYTES, is_asked=True)
        except NotFound:
            return False
        return exists(self.folder, name)

    @property
    def kept(self) -> KeptObjects:
        """The objects in the folder, as a store."""
        return KeptObjects(self, self._head)

    def forget(self, names: Iterable[str]) -> None:
        """Delete objects from the folder."""
        self.folder.delete(names)

    # -- objects -------------------------------------------------------------------------------------------------------

    def _is_kept(self, name: str) -> bool:
        return name != self._head and "leases" not in name.split("/")

    def _remember(self, name: str, stored: StoredObject) -> StoredObject:
        if name == self._head:
            self._heads.pop(stored.tag, None)
            self._heads[stored.tag] = stored.data
            while len(self._heads) > _HEADS:
                del self._heads[next(iter(self._heads))]
        return stored

    def _bytes(self, name: str, max_bytes: int, *, is_asked: bool = False) -> bytes:
        """An object from the folder or, if it is not there or damaged, from the store.

        is_asked: whether a neighbour asks for it: it does not wait long, and other neighbours are not asked in turn,
            since they may be asking this one.
        """
        with self._guard:
            lock = self._fetching.setdefault(name, threading.Lock())
        if not lock.acquire(timeout=_PATIENCE if is_asked else -1):
            raise Unavailable(f"{name} is being fetched")
        store = getattr(self._store, "origin", self._store) if is_asked else self._store
        try:
            return self._fetch(name, max_bytes, store)
        finally:
            lock.release()
            with self._guard:
                self._fetching.pop(name, None)

    def _fetch(self, name: str, max_bytes: int, store: Store) -> bytes:
        try:
            data = self.folder.get(name, _MOST_BYTES).data
            if has_named_hash(data, name):
                return data
            _log.warning("%s in %s is damaged: it is fetched again", name, self.folder.root)
        except NotFound:
            pass
        data = store.get(name, max_bytes).data
        if not has_named_hash(data, name):
            raise InvalidField(f"{self.url}: {name} is damaged: its bytes have another hash")
        try:
            self.folder.put(name, data)
            self._is_full = False
        except StoreError as error:
            self._warn(error)
        return data

    def _warn(self, error: StoreError) -> None:
        """Neighbours must do without what the folder does not take; the weights here need not."""
        if not self._is_full:
            _log.warning("neighbours cannot be served with all that is fetched: %s", error)
        self._is_full = True


class KeptObjects:
    """The objects that the folder of a mirror has. One that it has not is read from the store."""

    writable = True

    def __init__(self, mirror: MirrorStore, head: str) -> None:
        self.url = mirror.folder.url
        self._mirror = mirror
        self._head = head

    def get(self, name: str, max_bytes: int) -> StoredObject:
        store: Store | MirrorStore = self._mirror.folder if name == self._head else self._mirror
        return store.get(name, max_bytes)

    def read(self, name: str, start: int, size: int) -> bytes:
        return self._mirror.read(name, start, size)

    def put(self, name: str, data: bytes | memoryview) -> None:
        self._mirror.folder.put(name, data)

    def swap(self, name: str, data: bytes, tag: str | None) -> str:
        return self._mirror.folder.swap(name, data, tag)

    def changed(self, name: str, tag: str | None, timeout: float) -> StoredObject | None:
        return self._mirror.folder.changed(name, tag, timeout)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        return self._mirror.folder.list(prefix)

    def delete(self, names: Iterable[str]) -> None:
        self._mirror.forget(names)

    def close(self) -> None:
        """The mirror closes the folder."""


def _own(path: Path) -> Folder:
    """The folder of a mirror, which nobody else may use meanwhile; it is made if it does not exist."""
    try:
        folder = Folder.open(path, make=True)
        if folder.status(_MARK) is None:
            if any(not name.startswith(".") for name in folder.names()):
                folder.close()
                raise SessionError(f"{path} holds other files; choose an empty folder for the mirror")
            os.close(folder.file(_MARK, os.O_RDWR | os.O_CREAT, 0o644))
        is_free = folder.lock()
    except OSError as error:
        raise SessionError(f"{path} cannot be the folder of a mirror: {error}") from error
    if not is_free:
        folder.close()
        raise SessionError(f"another receiver has its mirror in {path}; choose another folder")
    return folder
