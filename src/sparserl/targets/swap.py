"""Giving a file or folder its name at once: built beside it under a hidden name, then renamed over it.

    .OUT.sparserl-lock   held while a run works on OUT; a killed run lets go of it by dying
    .OUT.sparserl-new    what is being built; after an exchange, the old OUT until it is deleted
    .OUT.sparserl-old    the old OUT, where the two could not be exchanged

A kill at any moment leaves OUT as it was or as it shall be. The next run on the same OUT clears away what is left.

Only where kernel or filesystem cannot exchange two folders (`renameat2`, Linux 3.15 and most local filesystems) are
two renames needed, and a kill just between them leaves no OUT: the old one is then complete under its hidden name,
and the next run puts it back first.
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
    """The right to replace `out`, held by one run at a time; `draft` is where its successor is built."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.draft = out.with_name(f".{out.name}.sparserl-new")
        self.old = out.with_name(f".{out.name}.sparserl-old")

    def commit(self) -> None:
        """Give the draft its name; everything in it must be on disk already."""
        if not os.path.lexists(self.out) or not self.draft.is_dir():
            self.draft.replace(self.out)
        elif not exchange(self.draft, self.out):
            self.out.replace(self.old)
            self.draft.replace(self.out)
        sync(self.out.parent)
        self.clear()

    def recover(self) -> None:
        """Put back an old `out` that a killed run had moved aside, and remove what else it left."""
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
    """A `Swap` for `out`; unless it is committed, `out` stays as it is and nothing is left beside it."""
    swap = Swap(out)
    with _alone(out) as alone:
        if alone:
            swap.recover()
        elif os.path.lexists(swap.draft) or os.path.lexists(swap.old):
            raise CheckpointError(
                f"{swap.draft} or {swap.old.name} is left from a run that was killed or still goes on, and this "
                f"filesystem has no locks to tell. If none goes on: move the latter to {out} if that is missing, "
                "and delete the rest"
            )
        try:
            yield swap
        except BaseException:
            swap.recover()
            raise


@contextmanager
def _alone(out: Path) -> Iterator[bool]:
    """Hold the lock of `out`; False where the filesystem has no locks. Another holder is an error."""
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
            raise CheckpointError(f"another run is writing {out}: {path.name} is locked")
        if _names(path, handle):
            break
        os.close(handle)  # its last holder removed it between our two calls
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
    """Exchange two names in one step; False where kernel, C library or filesystem cannot."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    if renameat2(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in _CANNOT_EXCHANGE:
        return False
    raise OSError(code, os.strerror(code), str(a), None, str(b))
