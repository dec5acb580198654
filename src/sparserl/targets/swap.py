"""Replacing a file or folder in one step: the new one is written beside it under a hidden name, then renamed.

    .OUT.sparserl-lock   locked while a process works on OUT
    .OUT.sparserl-new    the draft; after an exchange, the old OUT until it is deleted
    .OUT.sparserl-old    the old OUT, if the two could not be exchanged

A process that is killed at any moment leaves the old OUT or the new one. The next one removes what is left.

Only if the kernel or the filesystem cannot exchange two folders (`renameat2`, Linux 3.15 and most local filesystems)
are two renames needed. A process that is killed between them leaves no OUT; the old one is then complete under its
hidden name, and the next process puts it back first.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import CheckpointError
from ..files import Folder, lock, sync

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_CANNOT_EXCHANGE = frozenset((errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP))
_CANNOT_LOCK = frozenset((errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP))


class Swap:
    """The replacement of `out` by `draft`, by one process at a time."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.draft = out.with_name(f".{out.name}.sparserl-new")
        self.old = out.with_name(f".{out.name}.sparserl-old")

    def commit(self) -> None:
        """Give the draft the name of `out`. Everything in it must be on disk already."""
        if not os.path.lexists(self.out) or not self.draft.is_dir():
            self.draft.replace(self.out)
        elif not exchange(self.draft, self.out):
            self.out.replace(self.old)
            self.draft.replace(self.out)
        sync(self.out.parent)
        self.clear()

    def recover(self) -> None:
        """Put back an `out` that a killed process had renamed, and remove its drafts."""
        if os.path.lexists(self.old) and not os.path.lexists(self.out):
            self.old.replace(self.out)
            sync(self.out.parent)
        self.clear()

    def clear(self) -> None:
        """Remove the hidden names."""
        with Folder.open(self.out.parent) as folder:
            folder.remove(self.draft.name)
            folder.remove(self.old.name)


@contextmanager
def swapping(out: Path) -> Iterator[Swap]:
    """A `Swap` for `out`. If it is not committed, `out` is unchanged and nothing is left beside it."""
    swap = Swap(out)
    with _locked(out) as is_locked:
        if is_locked:
            swap.recover()
        elif os.path.lexists(swap.draft) or os.path.lexists(swap.old):
            raise CheckpointError(
                f"{swap.draft} or {swap.old.name} belongs to a process that was killed or is still running; this "
                f"filesystem has no locks to find out. If none is running: rename the latter to {out} if that is "
                "missing, and delete the rest"
            )
        try:
            yield swap
        except BaseException:
            swap.recover()
            raise


@contextmanager
def _locked(out: Path) -> Iterator[bool]:
    """Lock `out`; False if the filesystem has no locks. It is an error if another process has locked it."""
    path = out.with_name(f".{out.name}.sparserl-lock")
    while True:
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be opened to be locked: {error}") from error
        try:
            is_locked = lock(handle)
        except OSError as error:
            os.close(handle)
            path.unlink(missing_ok=True)
            if error.errno not in _CANNOT_LOCK:
                raise
            yield False
            return
        if not is_locked:
            os.close(handle)
            raise CheckpointError(f"another process is writing {out}: {path.name} is locked")
        if _names(path, handle):
            break
        os.close(handle)  # the process that had locked it removed it between our two calls
    try:
        yield True
    finally:
        path.unlink(missing_ok=True)
        os.close(handle)


def _names(path: Path, handle: int) -> bool:
    """Whether a path still names the open file."""
    try:
        return os.path.samestat(path.stat(), os.fstat(handle))
    except FileNotFoundError:
        return False


def exchange(a: Path, b: Path) -> bool:
    """Exchange two names in one step; False if the kernel, the C library or the filesystem cannot."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    if renameat2(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in _CANNOT_EXCHANGE:
        return False
    raise OSError(code, os.strerror(code), str(a), None, str(b))
