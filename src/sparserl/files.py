"""Files that take their name when they are whole, files that have none, and bytes that survive a power cut."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

from .folders import Folder, require_regular


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file that takes the name `path` when all of it is on disk, and leaves nothing behind otherwise."""
    if not path.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, "there is no such folder", str(path.parent))
    with Folder.open(path.parent) as folder, folder.replacing(path.name) as file:
        yield file


@contextmanager
def unnamed() -> Iterator[BinaryIO]:
    """A file in the temporary folder that never has a name there: it goes with the last process that has it open."""
    with tempfile.TemporaryFile(prefix="sparserl-") as file:
        yield cast("BinaryIO", file)


def open_regular(path: str | os.PathLike[str], flags: int = os.O_RDONLY) -> int:
    """A descriptor of the file at a path; where there is something else, such as a pipe, it is refused."""
    return require_regular(os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK), path)


def sync(path: Path) -> None:
    """Make the bytes of a file, or the names in a folder, survive a power cut."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
