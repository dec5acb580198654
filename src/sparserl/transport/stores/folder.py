"""A folder as a store.

A file has its name only when all of it is on disk. It is written below `.tmp/` first, in a folder that its writer keeps
locked: the next writer removes the drafts of processes that were killed. A lock on `.tmp/lock` makes `swap` atomic.
`swap` does not wait for that lock for ever, since the process that holds it may be stopped.

No symbolic link below the folder is followed; a link is an error.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import stat
import threading
import time
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path

from ...errors import LimitExceeded, NotFound, Refused, StoreError, Truncated, Unavailable
from ...files import Folder, lock, unlock
from .base import MAX_NAME, MAX_WATCHED_BYTES, ObjectInfo, StoredObject, poll, require_name

_POLL = 0.05  # seconds between looks at a head that others may swap, or at a lock
_MAX_SWAPPED_BYTES = 1 << 26  # of an object that is replaced under a condition
_DRAFT_FOLDER = re.compile(r"\d+-[0-9a-f]+")
_MISSING = (FileNotFoundError, NotADirectoryError, IsADirectoryError)


class FolderStore:
    """A folder of the local (or a shared) file system.

    Args:
        path: the folder. It is created by the first write.
        wait: seconds that `swap` waits for the lock. After a wait in vain, the next `swap` does not wait again.
    """

    writable = True
    announces = True

    def __init__(self, path: str | os.PathLike[str], wait: float = 10.0) -> None:
        self.root = Path(path).absolute()
        self.url = self.root.as_uri()
        self._wait = wait
        self._timed_out = False  # whether the last wait for the lock was in vain
        self._drafts: tuple[str, Folder] | None = None  # the name and the folder of our drafts, which is locked
        self._guard = threading.Lock()

    def get(self, name: str, max_bytes: int) -> StoredObject:
        with self._open(name) as handle:
            size = os.fstat(handle).st_size
            if size > max_bytes:
                raise LimitExceeded(f"{name} has {size} bytes; at most {max_bytes} were expected")
            data = _read(handle, 0, size, name)
        return StoredObject(data, _tag(data))

    def read(self, name: str, start: int, size: int) -> bytes:
        with self._open(name) as handle:
            return _read(handle, start, size, name)

    def put(self, name: str, data: bytes | memoryview) -> None:
        self._write(require_name(name), data, self._draft_folder())

    def swap(self, name: str, data: bytes, tag: str | None) -> str:
        require_name(name)
        drafts = self._draft_folder()
        with self._locked():
            try:
                current_tag = self.get(name, _MAX_SWAPPED_BYTES).tag
            except NotFound:
                current_tag = None
            if current_tag != tag:
                raise Refused(f"{name} was changed by another writer")
            self._write(name, data, drafts)
        return _tag(data)

    def changed(self, name: str, tag: str | None, timeout: float) -> StoredObject | None:
        return poll(
            lambda _left: self.get(name, MAX_WATCHED_BYTES), tag, timeout, lambda left: time.sleep(min(_POLL, left))
        )

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        above = prefix[: prefix.rfind("/") + 1]
        try:
            with Folder.open(self.root, above) as folder:
                yield from _objects(folder, above, prefix)
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            raise StoreError(f"{self.url}: cannot list {above or 'the folder'}: {error}") from error

    def delete(self, names: Iterable[str]) -> None:
        for name in names:
            above, _, last = require_name(name).rpartition("/")
            try:
                with Folder.open(self.root, above) as folder:
                    folder.unlink(last)
            except (FileNotFoundError, NotADirectoryError):
                pass
            except OSError as error:
                raise StoreError(f"{self.url}: {name} cannot be deleted: {error}") from error
            self._remove_empty(above)

    def close(self) -> None:
        """Remove the folder for drafts."""
        with self._guard:
            if self._drafts is None:
                return
            name, drafts = self._drafts
            self._drafts = None
            if drafts.gone:  # or this process was forked, and the folder is its parent's
                return
            with contextlib.suppress(OSError), drafts, Folder.open(self.root, ".tmp") as temporary:
                temporary.remove(name)

    def _remove_empty(self, name: str) -> None:
        """Remove a folder, and its parents, as far as they are empty."""
        with contextlib.suppress(OSError):
            while name:
                name, _, last = name.rpartition("/")
                with Folder.open(self.root, name) as folder:
                    folder.rmdir(last)

    @contextlib.contextmanager
    def _open(self, name: str) -> Iterator[int]:
        above, _, last = require_name(name).rpartition("/")
        try:
            with Folder.open(self.root, above) as folder:
                handle = folder.file(last)
        except _MISSING as error:
            raise NotFound(f"{self.url}: there is no {name}") from error
        except OSError as error:
            raise StoreError(f"{self.url}: {name} cannot be read: {error}") from error
        try:
            yield handle
        finally:
            os.close(handle)

    def _write(self, name: str, data: bytes | memoryview, drafts: Folder) -> None:
        """Write all of the bytes to disk, then give the file its name, then write the name to disk."""
        draft = uuid.uuid4().hex
        try:
            with drafts.creating(draft, 0o644, lambda: self._rename(drafts, draft, name)) as file:
                file.write(data)
        except OSError as error:
            raise StoreError(f"{self.url}: {name} cannot be written: {error}") from error

    def _rename(self, drafts: Folder, draft: str, name: str) -> None:
        above, _, last = name.rpartition("/")
        for _ in range(100):
            try:
                with Folder.open(self.root, above, make=True) as folder:
                    drafts.rename(draft, folder, last)
                    folder.sync()
            except FileNotFoundError:
                continue  # another process removed the folder while it was empty
            return
        raise OSError(errno.ENOENT, "another process removes its folder again and again")

    def _draft_folder(self) -> Folder:
        """A folder for drafts that no other process uses while this one lives."""
        with self._guard:
            if self._drafts is None or self._drafts[1].gone:
                try:
                    self._drafts = self._new_draft_folder()
                except OSError as error:
                    raise StoreError(f"{self.url} cannot be written to: {error}") from error
            return self._drafts[1]

    def _new_draft_folder(self) -> tuple[str, Folder]:
        with Folder.open(self.root, ".tmp", make=True) as temporary:
            # The first swap needs this file. It is not locked here.
            os.close(temporary.file("lock", os.O_RDWR | os.O_CREAT, 0o644))
            _remove_abandoned(temporary)
            while True:
                name = f"{os.getpid()}-{uuid.uuid4().hex[:12]}"
                with contextlib.suppress(FileNotFoundError):
                    drafts = temporary.folder(name, make=True)
                    if drafts.lock() and not drafts.gone:
                        return name, drafts
                # Another writer saw the folder before it was locked, and removed it.

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            with Folder.open(self.root, ".tmp", make=True) as temporary:
                handle = temporary.file("lock", os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise StoreError(f"{self.url} cannot be locked: {error}") from error
        try:
            self._take_lock(handle)
            yield
        finally:
            unlock(handle)
            os.close(handle)

    def _take_lock(self, handle: int) -> None:
        try:
            is_locked = lock(handle, 0.0 if self._timed_out else self._wait)
        except OSError as error:
            raise StoreError(f"{self.url} cannot be locked: {error}") from error
        self._timed_out = not is_locked
        if not is_locked:
            raise Unavailable(
                f"{self.root / '.tmp' / 'lock'} has been held by another writer for more than "
                f"{self._wait:g} s; it may be stopped or hang: resume it, or end it"
            )


def _remove_abandoned(temporary: Folder) -> None:
    """Remove the drafts of writers that have ended, and nothing else."""
    for name in temporary.names():
        if not _DRAFT_FOLDER.fullmatch(name):
            continue
        with contextlib.suppress(OSError), temporary.folder(name) as drafts:
            if drafts.lock():
                temporary.remove(name)


def _objects(folder: Folder, above: str, prefix: str) -> Iterator[ObjectInfo]:
    """The objects below a folder whose names begin with a prefix. Links are skipped."""
    for last in folder.names():
        name = above + last
        status = None if last.startswith(".") or len(name) > MAX_NAME else folder.status(last)
        if status is None:
            continue  # not an object, or deleted meanwhile
        if stat.S_ISDIR(status.st_mode) and f"{name}/".startswith(prefix[: len(name) + 1]):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError), folder.folder(last) as below:
                yield from _objects(below, f"{name}/", prefix)
        elif stat.S_ISREG(status.st_mode) and name.startswith(prefix):
            yield ObjectInfo(name, status.st_size, status.st_mtime)


def _read(handle: int, start: int, size: int, name: str) -> bytes:
    chunks = []
    while size:
        chunk = os.pread(handle, size, start)
        if not chunk:
            raise Truncated(f"{name} ends {size} bytes too early")
        chunks.append(chunk)
        start += len(chunk)
        size -= len(chunk)
    return b"".join(chunks)


def _tag(data: bytes | memoryview) -> str:
    return hashlib.sha256(data).hexdigest()
