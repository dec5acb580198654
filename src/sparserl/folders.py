"""Folders by descriptor: what lies in one is reached name by name, and no link on the way is followed.

The folder that a caller names may be a link or lie behind one. Below it nothing may: whoever can write there could put
a link in the place of a folder, at any moment, and have us read, write or delete somewhere else. An open folder stays
the one that was opened, whatever its name leads to meanwhile.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import stat
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_FILE = os.O_CLOEXEC | os.O_NONBLOCK  # a pipe must not make us wait
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL
_DEPTH = 100  # folders in one another that are removed


class Folder:
    """An open folder. Errors of the system come out as `OSError`, with the path of what they are about.

    links: whether links below are followed: in a checkpoint that a user hands over, never in a folder of our own.
    """

    def __init__(self, handle: int, path: Path, links: bool = False) -> None:
        self.path = path
        self.links = links
        self._handle = handle
        self._close = weakref.finalize(self, os.close, handle)

    @classmethod
    def open(cls, root: Path, below: str = "", *, make: bool = False, links: bool = False) -> Folder:
        """The folder at a path, which may be a link, or one below it; `make` says to make those that are missing."""
        if make:
            _make(root)
        with cls(os.open(root, _FOLDER), root, links) as folder:
            return folder.below(below, make=make)

    def below(self, path: str, *, make: bool = False) -> Folder:
        """The folder at a path from here, which may be empty: this folder once more."""
        folder = Folder(os.dup(self._handle), self.path, self.links)
        for name in filter(None, path.split("/")):
            with folder:
                folder = folder.folder(name, make=make)
        return folder

    def folder(self, name: str, *, make: bool = False, mode: int = 0o777) -> Folder:
        """A folder in this one; `make` says to make it if it is missing."""
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
        """A descriptor of a file; where there is something else, such as a pipe, it is refused."""
        self._path(name)
        try:
            handle = os.open(name, flags | _FILE | self._no_link, mode, dir_fd=self._handle)
        except OSError as error:
            raise self._explained(name, error) from error
        return require_regular(handle, self.path / name)

    @contextlib.contextmanager
    def creating(self, name: str, mode: int = 0o666) -> Iterator[BinaryIO]:
        """A new file, which is on disk in the end."""
        with os.fdopen(self.file(name, _NEW, mode), "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())

    @contextlib.contextmanager
    def replacing(self, name: str) -> Iterator[BinaryIO]:
        """A file that takes its name when all of it is on disk, and leaves nothing behind otherwise."""
        draft = f".{name}.{secrets.token_hex(8)}"
        try:
            with self.creating(draft) as file:
                yield file
            self.rename(draft, self, name)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(draft, dir_fd=self._handle)
            raise
        self.sync()

    def names(self) -> list[str]:
        """What lies in it, sorted."""
        return sorted(os.listdir(self._handle))  # noqa: PTH208  # of a descriptor

    def status(self, name: str) -> os.stat_result | None:
        """What has a name; None for nothing."""
        try:
            return os.stat(name, dir_fd=self._handle, follow_symlinks=self.links)
        except FileNotFoundError:
            return None

    @property
    def identity(self) -> tuple[int, int]:
        """What is the same for all names of a folder."""
        status = os.fstat(self._handle)
        return status.st_dev, status.st_ino

    def rename(self, name: str, to: Folder, new: str) -> None:
        """Give something another name, in this folder or in another, in the place of what has it."""
        os.replace(name, new, src_dir_fd=self._handle, dst_dir_fd=to._handle)

    def link(self, name: str, to: str) -> None:
        """Make a link."""
        os.symlink(to, name, dir_fd=self._handle)

    def linked(self, name: str) -> str | None:
        """What a link says; None if there is nothing of that name, or no link."""
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

    def remove(self, name: str, depth: int = _DEPTH) -> None:
        """Remove whatever has a name, if anything: of a folder all that is in it, of a link the link alone."""
        try:
            status = os.stat(name, dir_fd=self._handle, follow_symlinks=False)
        except FileNotFoundError:
            return
        if not stat.S_ISDIR(status.st_mode):
            self.unlink(name)
            return
        if not depth:
            raise OSError(errno.ELOOP, f"more than {_DEPTH} folders lie in one another", str(self.path / name))
        with Folder(os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=self._handle), self.path / name) as folder:
            for below in folder.names():
                folder.remove(below, depth - 1)
        self.rmdir(name)

    def sync(self) -> None:
        """Make the names in it survive a power cut."""
        os.fsync(self._handle)

    def chmod(self, mode: int) -> None:
        os.fchmod(self._handle, mode)

    @property
    def mode(self) -> int:
        return stat.S_IMODE(os.fstat(self._handle).st_mode)

    @property
    def gone(self) -> bool:
        """Whether it was removed meanwhile."""
        try:
            return os.fstat(self._handle).st_nlink == 0
        except OSError:
            return True

    def lock(self) -> bool:
        """Hold the folder as long as it is open; False if somebody else does."""
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        _locked.add(self)
        return True

    def close(self) -> None:
        self._close()
        self._handle = -1  # its number may soon be that of something else

    def __enter__(self) -> Folder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _no_link(self) -> int:
        return 0 if self.links else os.O_NOFOLLOW

    def _path(self, name: str) -> Path:
        """Where something in this folder lies; its name must be one that leads nowhere else."""
        if name in ("", ".", "..") or "/" in name or "\0" in name:
            raise OSError(errno.EINVAL, "is not the name of something in a folder", name)
        return self.path / name

    def _explained(self, name: str, error: OSError) -> OSError:
        """The same error with its path; of a link, one that says so."""
        path = str(self.path / name)
        code = error.errno or errno.EIO
        if code in (errno.ELOOP, errno.ENOTDIR) and self.linked(name) is not None:
            return OSError(
                errno.ELOOP, "a symbolic link, and links in here are not followed; put there what it leads to", path
            )
        return OSError(code, os.strerror(code), path)


_locked: weakref.WeakSet[Folder] = weakref.WeakSet()


def _release_locks() -> None:
    """A process that was forked off may outlive the one that has the locks: it must not hold them, too."""
    for folder in list(_locked):
        folder.close()


os.register_at_fork(after_in_child=_release_locks)


def require_regular(handle: int, path: str | os.PathLike[str]) -> int:
    """The descriptor, if it is one of a regular file; else it is closed."""
    mode = os.fstat(handle).st_mode
    if stat.S_ISREG(mode):
        return handle
    os.close(handle)
    code = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
    raise OSError(code, "is not a regular file", os.fspath(path))


def _make(path: Path) -> None:
    """A folder with all its parents, each of which survives a power cut."""
    if path.is_dir():
        return
    _make(path.parent)
    try:
        path.mkdir()
    except FileExistsError:
        return
    with Folder(os.open(path.parent, _FOLDER), path.parent) as parent:
        parent.sync()
