"""A folder as a store. What has a name is whole and on disk; a lock stands in for the conditional put.

Files are written under `.tmp/` first, in a folder of their writer's own that is locked as long as the writer lives:
what a killed process left behind is swept by the next one that writes. Only the conditional put waits for others, and
not for ever: whoever holds its lock may have been stopped.

No link below the folder is followed: where one is found, it is an error.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
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
from ...folders import Folder
from .base import MOST_NAME, Found, Listed, require_name, watch

_POLL = 0.05  # seconds between looks at a head that others may swap, or at a lock
_MOST_SWAPPED = 1 << 26  # bytes of an object that is replaced under a condition
_DRAFTS = re.compile(r"\d+-[0-9a-f]+")  # folders for drafts in `.tmp`
_GONE = (FileNotFoundError, NotADirectoryError, IsADirectoryError)


class FolderStore:
    """A folder of the local (or a shared) file system.

    wait: seconds that a conditional put waits for its lock. Where it was in vain, the next one does not wait again.
    """

    writable = True

    def __init__(self, path: str | os.PathLike[str], wait: float = 10.0) -> None:
        self.root = Path(path).absolute()
        self.url = f"file://{self.root}"
        self._wait = wait
        self._stuck = False  # whether the last wait was in vain
        self._scratch: tuple[str, Folder] | None = None  # the name and the folder of our drafts, which is locked
        self._guard = threading.Lock()

    def get(self, name: str, most: int) -> Found:
        with self._open(name) as handle:
            size = os.fstat(handle).st_size
            if size > most:
                raise LimitExceeded(f"{name}: {size} bytes, at most {most} were expected")
            data = _read(handle, 0, size, name)
        return Found(data, _tag(data))

    def read(self, name: str, start: int, size: int) -> bytes:
        with self._open(name) as handle:
            return _read(handle, start, size, name)

    def put(self, name: str, data: bytes | memoryview) -> None:
        self._write(require_name(name), data, self._place())

    def swap(self, name: str, data: bytes, tag: str | None) -> str:
        require_name(name)
        place = self._place()
        with self._locked():
            try:
                there = self.get(name, _MOST_SWAPPED).tag
            except NotFound:
                there = None
            if there != tag:
                raise Refused(f"{name} is not what it was; another writer was first")
            self._write(name, data, place)
        return _tag(data)

    def changed(self, name: str, tag: str | None, timeout: float) -> Found | None:
        return watch(self, name, tag, timeout, lambda left: time.sleep(min(_POLL, left)))

    def list(self, prefix: str) -> Iterator[Listed]:
        above = prefix[: prefix.rfind("/") + 1]
        try:
            with Folder.open(self.root, above) as folder:
                yield from _objects(folder, above, prefix)
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            raise StoreError(f"{self.url}: what is in {above or 'it'} cannot be listed: {error}") from error

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
            self._drop_empty(above)

    def close(self) -> None:
        """Give back the place where files are written."""
        with self._guard:
            if self._scratch is None:
                return
            name, place = self._scratch
            self._scratch = None
            if place.gone:  # or we were forked off, and it is not ours
                return
            with contextlib.suppress(OSError), place, Folder.open(self.root, ".tmp") as drafts:
                drafts.remove(name)

    def _drop_empty(self, name: str) -> None:
        """Remove a folder, and those that it lies in, as far as nothing else is in them."""
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
        except _GONE as error:
            raise NotFound(f"{self.url}: there is no {name}") from error
        except OSError as error:
            raise StoreError(f"{self.url}: {name} cannot be read: {error}") from error
        try:
            yield handle
        finally:
            os.close(handle)

    def _write(self, name: str, data: bytes | memoryview, place: Folder) -> None:
        """All of the bytes on disk, then the name, then the name on disk."""
        draft = uuid.uuid4().hex
        try:
            with place.creating(draft, 0o644) as file:
                file.write(data)
            self._name(place, draft, name)
        except BaseException as error:
            with contextlib.suppress(OSError):
                place.unlink(draft)
            if isinstance(error, OSError):
                raise StoreError(f"{self.url}: {name} cannot be written: {error}") from error
            raise

    def _name(self, place: Folder, draft: str, name: str) -> None:
        above, _, last = name.rpartition("/")
        for _ in range(100):
            try:
                with Folder.open(self.root, above, make=True) as folder:
                    place.rename(draft, folder, last)
                    folder.sync()
            except FileNotFoundError:
                continue  # the folder was empty, and swept meanwhile
            return
        raise OSError(errno.ENOENT, "its folder keeps vanishing")

    def _place(self) -> Folder:
        """A folder for drafts, ours as long as this process lives."""
        with self._guard:
            if self._scratch is None or self._scratch[1].gone:
                try:
                    self._scratch = self._claim()
                except OSError as error:
                    raise StoreError(f"{self.url} cannot be written to: {error}") from error
            return self._scratch[1]

    def _claim(self) -> tuple[str, Folder]:
        with Folder.open(self.root, ".tmp", make=True) as drafts:
            os.close(drafts.file("lock", os.O_RDWR | os.O_CREAT, 0o644))  # for the first swap; it is not locked here
            _sweep(drafts)
            while True:
                name = f"{os.getpid()}-{uuid.uuid4().hex[:12]}"
                with contextlib.suppress(FileNotFoundError):
                    place = drafts.folder(name, make=True)
                    if place.lock() and not place.gone:
                        return name, place
                # another writer has found it before it was locked, and swept it

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            with Folder.open(self.root, ".tmp", make=True) as drafts:
                handle = drafts.file("lock", os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise StoreError(f"{self.url} cannot be locked: {error}") from error
        try:
            self._await(handle)
            yield
        finally:
            with contextlib.suppress(OSError):
                fcntl.flock(handle, fcntl.LOCK_UN)  # a process that was forked off meanwhile has the lock open, too
            os.close(handle)

    def _await(self, handle: int) -> None:
        """Take the lock, soon."""
        end = time.monotonic() + (0 if self._stuck else self._wait)
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                if time.monotonic() >= end:
                    self._stuck = True
                    raise Unavailable(
                        f"{self.root / '.tmp' / 'lock'} is held by another writer, for {self._wait:g} s and more; it "
                        "may be stopped or hang: let it go on, or end it"
                    ) from error
                time.sleep(_POLL)
            except OSError as error:
                raise StoreError(f"{self.url} cannot be locked: {error}") from error
            else:
                self._stuck = False
                return


def _sweep(drafts: Folder) -> None:
    """Remove the drafts of writers that are gone, and nothing else."""
    for name in drafts.names():
        if not _DRAFTS.fullmatch(name):
            continue
        with contextlib.suppress(OSError), drafts.folder(name) as place:
            if place.lock():
                drafts.remove(name)


def _objects(folder: Folder, above: str, prefix: str) -> Iterator[Listed]:
    """The objects below a folder whose names begin with a prefix; links are none."""
    for last in folder.names():
        name = above + last
        status = None if last.startswith(".") or len(name) > MOST_NAME else folder.status(last)
        if status is None:
            continue  # no object, or deleted meanwhile
        if stat.S_ISDIR(status.st_mode) and f"{name}/".startswith(prefix[: len(name) + 1]):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError), folder.folder(last) as below:
                yield from _objects(below, f"{name}/", prefix)
        elif stat.S_ISREG(status.st_mode) and name.startswith(prefix):
            yield Listed(name, status.st_size, status.st_mtime)


def _read(handle: int, start: int, size: int, name: str) -> bytes:
    parts = []
    while size:
        part = os.pread(handle, size, start)
        if not part:
            raise Truncated(f"{name} ends {size} bytes too early")
        parts.append(part)
        start += len(part)
        size -= len(part)
    return b"".join(parts)


def _tag(data: bytes | memoryview) -> str:
    return hashlib.sha256(data).hexdigest()
