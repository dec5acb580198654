"""A store whose objects are kept in a folder as they are read, for later and for neighbours, to whom it is served.

Objects never change, so that one that is in the folder need not be asked for again. The head does: it is always read
from the store, and shown to neighbours when its version is held here.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import stat
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from ...errors import FormatError, InvalidField, LimitExceeded, NotFound, SessionError, StoreError, Truncated
from ...files import Folder
from .base import RANGE_BYTES, Store, StoredObject, has_named_hash, is_named_by_hash, is_served
from .deadline import current, within
from .folder import FolderStore
from .nearest import NearestStore

MOST_OBJECT_BYTES = 1 << 30  # of any object, as of a file that travels with the weights
_LARGE_BYTES = 1 << 27  # of an object that comes alone when a neighbour asks for it
_FILL_SECONDS = 600.0  # that an object may take that a neighbour asks for
_LOOK = 0.2  # seconds between looks at whether a wait is over
_MARK = ".mirror"  # a file that says what the folder is
_MOST_KNOWN = 1 << 16  # objects that were verified
_HEADS = 4  # that were read last: one of them is shown when its version is held
_log = logging.getLogger("sparserl.serve")


class MirrorStore(NearestStore):
    """A store, and the folder that keeps what is read from it. Objects are read as a whole, so that they are verified.

    Args:
        store: the store.
        neighbours: those who are asked for objects before it.
        folder: the folder. It may have objects from before; they are verified. One mirror at a time has it.
        head: the name of the object that changes.

    Raises:
        SessionError: the folder cannot be used, is in use, or is a store.
    """

    reads_whole = True

    def __init__(self, store: Store, neighbours: Sequence[Store], folder: str | os.PathLike[str], head: str) -> None:
        super().__init__(store, neighbours)
        self._lock = _own(Path(folder), store)
        self.folder = FolderStore(folder)
        self._head = head
        self._heads: dict[str, bytes] = {}  # the last ones, by tag
        self._shown: tuple[str, Callable[[], set[str]]] | None = None  # the tag of the head, and what it leads to
        self._led_to: tuple[str, set[str]] = ("", set())  # that, found out for the head with a tag
        self._finding = threading.Lock()
        self._intact: dict[str, tuple[int, int, int]] = {}  # files in the folder that were verified
        self._large = threading.Lock()  # one thread at a time fetches what is large for neighbours
        self._guard = threading.Lock()
        self._fetching: dict[str, threading.Lock] = {}  # one thread at a time fetches an object
        self._own_fetches: Counter[str] = Counter()  # objects that are on their way here, not for a neighbour
        self._is_full = False

    # -- the store -----------------------------------------------------------------------------------------------------

    def get(self, name: str, max_bytes: int) -> StoredObject:
        if not is_named_by_hash(name):
            stored = self.origin.get(name, max_bytes)
            if name == self._head:
                self._remember(stored)
            elif is_served(name):
                self._keep(name, stored.data)  # for neighbours; its name does not tell whether it is undamaged
            return stored
        data = self._bytes(name, max_bytes)
        return StoredObject(data, hashlib.sha256(data).hexdigest())

    def read(self, name: str, start: int, size: int) -> bytes:
        if not is_named_by_hash(name):
            return self.origin.read(name, start, size)
        data = self._bytes(name, MOST_OBJECT_BYTES)[start : start + size]
        if len(data) < size:
            raise Truncated(f"{name} ends {size - len(data)} bytes too early")
        return data

    def changed(self, name: str, tag: str | None, timeout: float) -> StoredObject | None:
        stored = self.origin.changed(name, tag, timeout)
        if stored is not None and name == self._head:
            self._remember(stored)
        return stored

    def close(self) -> None:
        super().close()
        self.folder.close()
        self._lock.close()

    # -- neighbours ----------------------------------------------------------------------------------------------------

    def show(self, tag: str, find_names: Callable[[], set[str]]) -> None:
        """Show neighbours the head that has a tag, and let them ask for the objects that it leads to."""
        if (data := self._heads.get(tag)) is not None:
            self._shown = (tag, find_names)
            if len(self._intact) > _MOST_KNOWN:  # most of them have left the folder
                self._intact.clear()
            try:
                self.folder.put(self._head, data)
            except StoreError as error:
                self._warn(error)

    def is_intact(self, name: str) -> bool:
        """Whether the folder has an object as it was verified; or one whose name cannot verify it, but no head."""
        stamp = self._stamp(name)
        return stamp is not None and (self._intact.get(name) == stamp if is_named_by_hash(name) else name != self._head)

    def verify(self, name: str) -> bool:
        """Whether the folder has an object that was not verified yet, or was changed, and it is undamaged."""
        if self.is_intact(name):
            return True
        stamp = self._stamp(name)
        if stamp is None or not is_named_by_hash(name):
            return False
        digest = hashlib.sha256()
        try:
            for start in range(0, stamp[0], RANGE_BYTES):
                digest.update(self.folder.read(name, start, min(RANGE_BYTES, stamp[0] - start)))
        except (NotFound, Truncated):
            return False
        if digest.hexdigest() != name.rpartition("/")[2]:
            _log.warning("%s in %s is damaged", name, self.folder.root)
            return False
        self._intact[name] = stamp
        return True

    def fill(self, name: str) -> bool:
        """Fetch an object that a neighbour asks for, if the head that is shown leads to it; whether the folder has it.

        Raises:
            StoreError: The store cannot be reached.
        """
        shown = self._shown
        if shown is None or not is_named_by_hash(name) or name in self._own_fetches:
            return False  # who has it may be asking this one
        tag, find_names = shown
        with within(_FILL_SECONDS):
            with self._finding:  # once for a head: what it does not lead to is not looked for in the store
                if self._led_to[0] != tag:
                    self._led_to = (tag, set())
                    with contextlib.suppress(NotFound, FormatError):
                        self._led_to = (tag, find_names())
            if name not in self._led_to[1]:
                return False
            with contextlib.suppress(NotFound, FormatError):
                self.asked(name, MOST_OBJECT_BYTES)
            if not self.is_intact(name):  # gone, damaged, or too much for the disk: not fetched again for this head
                self._led_to[1].discard(name)
            return self.is_intact(name)

    def asked(self, name: str, max_bytes: int) -> bytes:
        """An object that others need. Neighbours are not asked in turn, since they may be asking this one."""
        return self._bytes(name, max_bytes, is_asked=True)

    @property
    def kept(self) -> KeptObjects:
        """The objects in the folder, as a store."""
        return KeptObjects(self, self._head)

    def _stamp(self, name: str) -> tuple[int, int, int] | None:
        """The size of a file in the folder, its time and its number, which change with it; None where there is none."""
        above, _, last = name.rpartition("/")
        try:
            with Folder.open(self.folder.root, above) as folder:
                status = folder.status(last)
        except OSError:
            return None
        if status is None or not stat.S_ISREG(status.st_mode):
            return None
        return status.st_size, status.st_mtime_ns, status.st_ino

    # -- objects -------------------------------------------------------------------------------------------------------

    def _remember(self, head: StoredObject) -> None:
        self._heads.pop(head.tag, None)
        self._heads[head.tag] = head.data
        while len(self._heads) > _HEADS:
            del self._heads[next(iter(self._heads))]

    def _bytes(self, name: str, max_bytes: int, *, is_asked: bool = False) -> bytes:
        """An object from the folder or, if it is not there or damaged, from the store.

        is_asked: whether only others need it; see `asked`.
        """
        with self._guard:
            lock = self._fetching.setdefault(name, threading.Lock())
        while not lock.acquire(timeout=_LOOK):
            current().require(f"{self.url}: {name}")
        try:
            if is_asked:
                try:
                    return self._fetch(name, min(max_bytes, _LARGE_BYTES), self.origin.get)
                except LimitExceeded:
                    with self._large:
                        return self._fetch(name, max_bytes, self.origin.get)
            with self._guard:
                self._own_fetches[name] += 1
            try:
                return self._fetch(name, max_bytes, super().get)
            finally:
                with self._guard:
                    del self._own_fetches[name]
        finally:
            lock.release()
            with self._guard:
                self._fetching.pop(name, None)

    def _fetch(self, name: str, max_bytes: int, get: Callable[[str, int], StoredObject]) -> bytes:
        try:
            data = self.folder.get(name, max_bytes).data
            if has_named_hash(data, name):
                return data
            _log.warning("%s in %s is damaged: it is fetched again", name, self.folder.root)
        except (NotFound, LimitExceeded):
            pass
        data = get(name, max_bytes).data
        if not has_named_hash(data, name):
            raise InvalidField(f"{self.url}: {name} is damaged: its bytes have another hash")
        self._keep(name, data)
        return data

    def _keep(self, name: str, data: bytes) -> None:
        try:
            self.folder.put(name, data)
            self._is_full = False
            if is_named_by_hash(name) and (stamp := self._stamp(name)) is not None:
                self._intact[name] = stamp
        except StoreError as error:
            self._warn(error)

    def _warn(self, error: StoreError) -> None:
        """Neighbours must do without what the folder does not take; the weights here need not."""
        if not self._is_full:
            _log.warning("neighbours cannot be served with all that is fetched: %s", error)
        self._is_full = True


class KeptObjects(FolderStore):
    """The objects that the folder of a mirror has. One that it has not is read from the store."""

    def __init__(self, mirror: MirrorStore, head: str) -> None:
        super().__init__(mirror.folder.root)
        self._mirror = mirror
        self._head = head

    def get(self, name: str, max_bytes: int) -> StoredObject:
        if is_named_by_hash(name):
            return StoredObject(self._mirror.asked(name, max_bytes), name.rpartition("/")[2])
        return super().get(name, max_bytes) if name == self._head else self._mirror.get(name, max_bytes)


def _own(path: Path, store: Store) -> Folder:
    """The folder of a store's mirror, which nobody else may use meanwhile; it is made if it does not exist."""
    if isinstance(store, FolderStore) and store.root.resolve() == path.resolve():
        raise SessionError(f"{path} is the store itself; choose another folder for the mirror")
    try:
        folder = Folder.open(path, make=True)
        has_mark = folder.status(_MARK) is not None
        if not has_mark and any(not name.startswith(".") for name in folder.names()):
            folder.close()
            raise SessionError(f"{path} holds other files; choose an empty folder for the mirror")
        is_free = folder.lock()
        if is_free:
            _mark(folder, store.url)
    except OSError as error:
        raise SessionError(f"{path} cannot be the folder of a mirror: {error}") from error
    if not is_free:
        folder.close()
        raise SessionError(f"another receiver has its mirror in {path}; choose another folder")
    return folder


def _mark(folder: Folder, url: str) -> None:
    """Write down whose mirror it is. Of that of another store no head is shown any more."""
    mark = hashlib.sha256(url.encode()).hexdigest().encode()
    handle = folder.file(_MARK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        if os.pread(handle, 100, 0) != mark:
            for name in folder.names():
                if name == "head.json":
                    folder.unlink(name)
            os.ftruncate(handle, 0)
            os.pwrite(handle, mark, 0)
    finally:
        os.close(handle)
