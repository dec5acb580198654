"""A folder as a store. What has a name is whole and on disk; a lock stands in for the conditional put.

Files are written under `.tmp/` first, in a folder of their writer's own that is locked as long as the writer lives:
what a killed process left behind is swept by the next one that writes.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
import stat
import threading
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..errors import LimitExceeded, NotFound, Refused, StoreError, Truncated
from ..files import sync
from .store import Found, Listed, require_name, watch

_POLL = 0.05  # seconds between looks at a head that others may swap


class FolderStore:
    """A folder of the local (or a shared) file system."""

    writable = True

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.root = Path(path).absolute()
        self.url = f"file://{self.root}"
        self._scratch: Path | None = None
        self._lock: int | None = None
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
        self._write(self._path(name), data, self._place())

    def swap(self, name: str, data: bytes, tag: str | None) -> str:
        path, place = self._path(name), self._place()  # which takes the lock, so it comes first
        with self._locked():
            try:
                there = self.get(name, 1 << 30).tag
            except NotFound:
                there = None
            if there != tag:
                raise Refused(f"{name} is not what it was; another writer was first")
            self._write(path, data, place)
        return _tag(data)

    def changed(self, name: str, tag: str | None, timeout: float) -> Found | None:
        return watch(self, name, tag, timeout, lambda left: time.sleep(min(_POLL, left)))

    def list(self, prefix: str) -> Iterator[Listed]:
        start = self.root / prefix
        folder = start if prefix.endswith("/") or not prefix else start.parent
        for where, folders, files in os.walk(folder):
            folders[:] = sorted(f for f in folders if not f.startswith("."))
            for file in sorted(files):
                path = Path(where) / file
                name = path.relative_to(self.root).as_posix()
                if file.startswith(".") or not name.startswith(prefix):
                    continue
                try:
                    status = path.stat()
                except FileNotFoundError:
                    continue  # deleted meanwhile
                yield Listed(name, status.st_size, status.st_mtime)

    def delete(self, names: Iterable[str]) -> None:
        for name in names:
            path = self._path(name)
            try:
                path.unlink(missing_ok=True)
            except NotADirectoryError:
                continue
            except OSError as error:
                raise StoreError(f"{self.url}: {name} cannot be deleted: {error}") from error
            for folder in path.relative_to(self.root).parents:
                try:
                    (self.root / folder).rmdir() if folder.name else None
                except OSError:
                    break  # there is something else in it, or it is gone

    def close(self) -> None:
        """Give back the place where files are written."""
        with self._guard:
            if self._scratch is not None and self._lock is not None:
                shutil.rmtree(self._scratch, ignore_errors=True)
                os.close(self._lock)
                self._scratch = self._lock = None

    def _path(self, name: str) -> Path:
        return self.root / require_name(name)

    @contextmanager
    def _open(self, name: str) -> Iterator[int]:
        try:
            handle = os.open(self._path(name), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise NotFound(f"{self.url}: there is no {name}") from error
        except OSError as error:
            raise StoreError(f"{self.url}: {name} cannot be read: {error}") from error
        try:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                raise NotFound(f"{self.url}: {name} is not a file")
            yield handle
        finally:
            os.close(handle)

    def _write(self, path: Path, data: bytes | memoryview, place: Path) -> None:
        """All of the bytes on disk, then the name, then the name on disk."""
        draft = place / uuid.uuid4().hex
        try:
            handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            try:
                left = memoryview(data)
                while left:
                    left = left[os.write(handle, left) :]
                os.fsync(handle)
            finally:
                os.close(handle)
            self._name(draft, path)
        except OSError as error:
            draft.unlink(missing_ok=True)
            raise StoreError(f"{self.url}: {path.name} cannot be written: {error}") from error

    def _name(self, draft: Path, path: Path) -> None:
        for _ in range(100):
            try:
                _make(path.parent)
                draft.replace(path)
            except FileNotFoundError:
                continue  # the folder was empty, and swept meanwhile
            with suppress(FileNotFoundError):  # deleted again, and its folder with it
                sync(path.parent)
            return
        raise OSError(errno.ENOENT, "its folder keeps vanishing")

    def _place(self) -> Path:
        """A folder for drafts, ours as long as this process lives."""
        with self._guard:
            if self._scratch is None or not self._scratch.is_dir():
                try:
                    self._scratch = self._claim()
                except OSError as error:
                    raise StoreError(f"{self.url} cannot be written to: {error}") from error
            return self._scratch

    def _claim(self) -> Path:
        _make(self.root / ".tmp")
        with self._locked():
            self._sweep()
            scratch = self.root / ".tmp" / f"{os.getpid()}-{uuid.uuid4().hex[:12]}"
            scratch.mkdir()
            self._lock = os.open(scratch, os.O_RDONLY | os.O_CLOEXEC)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            return scratch

    def _sweep(self) -> None:
        """Drafts of writers that are gone."""
        for folder in (self.root / ".tmp").iterdir():
            if not folder.is_dir():
                continue
            handle = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                continue
            else:
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(handle)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        handle = os.open(self.root / ".tmp" / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)


def _make(folder: Path) -> None:
    """A folder with all its parents, each of which survives a power cut."""
    if folder.is_dir():
        return
    _make(folder.parent)
    try:
        folder.mkdir()
    except FileExistsError:
        return
    sync(folder.parent)


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
