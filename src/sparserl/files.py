"""Files and folders by descriptor: durable writes, locks, and folders in which no symbolic link is followed.

The folder that a caller names may be a link or lie behind one. Below it nothing may: someone who can write there could
replace a folder by a link at any moment and make us read, write or delete somewhere else. An open folder stays the one
that was opened, whatever its name refers to later.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import math
import os
import re
import secrets
import stat
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, cast
from urllib.parse import unquote_to_bytes

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_FILE = os.O_CLOEXEC | os.O_NONBLOCK  # opening a pipe must not block
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL
_FILE_URL = re.compile(r"file:(//|(?=/))", re.IGNORECASE)  # a `Path` of a URL has one slash where there were three
_LOCK_POLL = 0.05  # seconds between two attempts to take a lock


class Folder:
    """An open folder. Failures are `OSError` with the path that they are about.

    `links` says whether symbolic links below are followed: in a checkpoint that a user names, never in our own folders.
    """

    def __init__(self, handle: int, path: Path, links: bool = False) -> None:
        self.path = path
        self.links = links
        self._handle = handle
        self._close = weakref.finalize(self, os.close, handle)

    @classmethod
    def open(cls, root: Path, below: str = "", *, make: bool = False, links: bool = False) -> Folder:
        """The folder at a path, which may be a link, or one below it; `make` creates those that are missing."""
        try:
            if make:
                _make(root)
            handle = os.open(root, _FOLDER)
        except ValueError as error:
            raise OSError(errno.EINVAL, f"no path can be so: {error}", repr(root)) from None
        with cls(handle, root, links) as folder:
            return folder.below(below, make=make)

    def below(self, path: str, *, make: bool = False) -> Folder:
        """The folder at a path relative to this one; the empty path opens this folder once more."""
        folder = Folder(os.dup(self._handle), self.path, self.links)
        for name in filter(None, path.split("/")):
            with folder:
                folder = folder.folder(name, make=make)
        return folder

    def folder(self, name: str, *, make: bool = False, mode: int = 0o777) -> Folder:
        """A folder in this one; `make` creates it if it is missing."""
        path = self._path(name)
        if make and self.status(name) is None:
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, mode, dir_fd=self._handle)
                self.sync()
        try:
            handle = os.open(name, _FOLDER | self._no_link, dir_fd=self._handle)
        except OSError as error:
            raise self._explained(name, error) from error
        return Folder(handle, path, self.links)

    def file(self, name: str, flags: int = os.O_RDONLY, mode: int = 0o666) -> int:
        """A descriptor of a regular file; anything else, such as a pipe, is an error."""
        self._path(name)
        try:
            handle = os.open(name, flags | _FILE | self._no_link, mode, dir_fd=self._handle)
        except OSError as error:
            raise self._explained(name, error) from error
        return require_regular(handle, self.path / name)

    @contextlib.contextmanager
    def creating(self, name: str, mode: int = 0o666, finish: Callable[[], None] | None = None) -> Iterator[BinaryIO]:
        """A new file. Once its bytes are on disk, `finish` is called; after a failure the file is removed."""
        handle = self.file(name, _NEW, mode)
        try:
            with os.fdopen(handle, "wb") as file:
                yield file
                file.flush()
                os.fsync(handle)
            if finish is not None:
                finish()
        except BaseException:
            with contextlib.suppress(OSError):
                self.unlink(name)
            raise

    @contextlib.contextmanager
    def replacing(self, name: str) -> Iterator[BinaryIO]:
        """A file that takes its name when all of it is on disk; after a failure nothing is left of it."""
        draft = f".{name}.{secrets.token_hex(8)}"
        with self.creating(draft, finish=lambda: self.rename(draft, self, name)) as file:
            yield file
        self.sync()

    def names(self) -> list[str]:
        """The names in this folder, sorted."""
        return sorted(os.listdir(self._handle))  # noqa: PTH208  # of a descriptor

    def status(self, name: str) -> os.stat_result | None:
        """The status of a name; None if it does not exist."""
        try:
            return os.stat(name, dir_fd=self._handle, follow_symlinks=self.links)
        except FileNotFoundError:
            return None

    @property
    def identity(self) -> tuple[int, int]:
        """The device and inode number, which are the same under all names of the folder."""
        status = os.fstat(self._handle)
        return status.st_dev, status.st_ino

    def rename(self, name: str, to: Folder, new: str) -> None:
        """Rename something, within this folder or into another, replacing what has the new name."""
        os.replace(name, new, src_dir_fd=self._handle, dst_dir_fd=to._handle)

    def link(self, name: str, to: str) -> None:
        """Create a symbolic link."""
        os.symlink(to, name, dir_fd=self._handle)

    def linked(self, name: str) -> str | None:
        """What a symbolic link points to; None if the name does not exist or is not a link."""
        try:
            return os.readlink(name, dir_fd=self._handle)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.EINVAL):
                return None
            raise

    def unlink(self, name: str) -> None:
        """Remove a file or a link."""
        os.unlink(name, dir_fd=self._handle)

    def rmdir(self, name: str) -> None:
        """Remove an empty folder."""
        os.rmdir(name, dir_fd=self._handle)

    def remove(self, name: str) -> None:
        """Remove a name, if it exists: a folder with everything in it, however deep, of a link only the link."""
        try:
            status = os.stat(name, dir_fd=self._handle, follow_symlinks=False)
        except FileNotFoundError:
            return
        if not stat.S_ISDIR(status.st_mode):
            self.unlink(name)
            return
        with Folder(os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=self._handle), self.path / name) as folder:
            left = folder.names()
            while left:
                last = left.pop()
                below = folder.status(last)
                if below is None or not stat.S_ISDIR(below.st_mode):
                    folder.unlink(last)
                    continue
                with folder.folder(last) as inner:
                    for deeper in inner.names():  # moved up, so that no more than two folders are open
                        left.append(secrets.token_hex(16))
                        inner.rename(deeper, folder, left[-1])
                folder.rmdir(last)
        self.rmdir(name)

    def sync(self) -> None:
        """Make the names in this folder survive a power cut."""
        os.fsync(self._handle)

    def chmod(self, mode: int) -> None:
        os.fchmod(self._handle, mode)

    @property
    def mode(self) -> int:
        return stat.S_IMODE(os.fstat(self._handle).st_mode)

    @property
    def gone(self) -> bool:
        """Whether the folder was removed, or closed."""
        try:
            return os.fstat(self._handle).st_nlink == 0
        except OSError:
            return True

    def lock(self) -> bool:
        """Lock the folder for as long as it is open; False if another process has locked it."""
        if not lock(self._handle):
            return False
        _locked.add(self)
        return True

    def close(self) -> None:
        self._close()
        self._handle = -1  # the system may soon give its number to another file

    def __enter__(self) -> Folder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _no_link(self) -> int:
        return 0 if self.links else os.O_NOFOLLOW

    def _path(self, name: str) -> Path:
        """The path of a name in this folder; names that lead elsewhere are an error."""
        if name in ("", ".", "..") or "/" in name or "\0" in name:
            raise OSError(errno.EINVAL, "is not the name of something in a folder", name)
        return self.path / name

    def _explained(self, name: str, error: OSError) -> OSError:
        """The same error with its path; about a link, an error that says so."""
        path = str(self.path / name)
        code = error.errno or errno.EIO
        if code in (errno.ELOOP, errno.ENOTDIR) and self.linked(name) is not None:
            return OSError(
                errno.ELOOP, "a symbolic link, and links in here are not followed; replace it by what it links to", path
            )
        return OSError(code, os.strerror(code), path)


_locked: weakref.WeakSet[Folder] = weakref.WeakSet()


def _release_locks() -> None:
    """A forked child may outlive the process that took the locks, so it must not keep them."""
    for folder in list(_locked):
        folder.close()


os.register_at_fork(after_in_child=_release_locks)


def lock(handle: int, wait: float = 0.0, *, shared: bool = False) -> bool:
    """Lock an open file or folder against other processes, until `unlock` or until its last descriptor is closed.

    A forked child has the descriptor too. `unlock` releases the lock in both; `Folder.lock` closes it in the child.

    Args:
        handle: The descriptor.
        wait: How many seconds to wait for another process; `math.inf` waits as long as it takes.
        shared: Whether other processes may hold the lock too, if they also ask for a shared one.

    Returns:
        Whether the lock is held; False if another process still has it.

    Raises:
        OSError: The file system has no locks, or failed.
    """
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    if wait == math.inf:
        fcntl.flock(handle, kind)
        return True
    end = time.monotonic() + wait
    while True:
        try:
            fcntl.flock(handle, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= end:
                return False
            time.sleep(_LOCK_POLL)
        else:
            return True


def unlock(handle: int) -> None:
    """Release a lock now, even if a child that was forked meanwhile has the descriptor open, too."""
    with contextlib.suppress(OSError):
        fcntl.flock(handle, fcntl.LOCK_UN)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file that takes the name `path` when all of it is on disk; after a failure nothing is left of it."""
    if not path.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, "there is no such folder", str(path.parent))
    with Folder.open(path.parent) as folder, folder.replacing(path.name) as file:
        yield file


@contextlib.contextmanager
def creating(path: Path, mode: int = 0o666) -> Iterator[BinaryIO]:
    """A new file, on disk at the end of the block; after a failure it is removed. A file that exists is an error."""
    with Folder.open(path.parent) as folder, folder.creating(path.name, mode, folder.sync) as file:
        yield file


@contextlib.contextmanager
def unnamed() -> Iterator[BinaryIO]:
    """A temporary file without a name: it vanishes when the last process that has it open closes it."""
    with tempfile.TemporaryFile(prefix="sparserl-") as file:
        yield cast("BinaryIO", file)


def path_of(url: str | os.PathLike[str]) -> Path:
    """The path that is meant by a `file://` URL, as `Path.as_uri()` writes it, or by a path, which is not decoded."""
    text = os.fspath(url)
    scheme = _FILE_URL.match(text)
    return Path(os.fsdecode(unquote_to_bytes(os.fsencode(text[scheme.end() :]))) if scheme else text)


def open_regular(path: str | os.PathLike[str], flags: int = os.O_RDONLY) -> int:
    """A descriptor of the regular file at a path; anything else, such as a pipe, is an error."""
    return require_regular(os.open(path, flags | _FILE), path)


def require_regular(handle: int, path: str | os.PathLike[str]) -> int:
    """The descriptor, if it is of a regular file; otherwise it is closed and an `OSError` raised."""
    mode = os.fstat(handle).st_mode
    if stat.S_ISREG(mode):
        return handle
    os.close(handle)
    code = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
    raise OSError(code, "is not a regular file", os.fspath(path))


def sync(path: Path) -> None:
    """Make the bytes of a file, or the names in a folder, survive a power cut."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _make(path: Path) -> None:
    """Create a folder with all its parents, each of which survives a power cut."""
    if path.is_dir():
        return
    _make(path.parent)
    try:
        path.mkdir()
    except FileExistsError:
        return
    with Folder(os.open(path.parent, _FOLDER), path.parent) as parent:
        parent.sync()
