"""`-` where a command takes or writes a patch file: stdin and stdout."""

from __future__ import annotations

import contextlib
import errno
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import typer

from ..errors import SessionError

_PIPE = Path("-")


def is_pipe(path: Path) -> bool:
    """Whether stdin or stdout is meant."""
    return path == _PIPE


def read_stdin() -> bytes:
    """All of stdin, which can be read once."""
    if sys.stdin.isatty():
        raise SessionError("- stands for a patch on stdin, but stdin is a terminal")
    data = sys.stdin.buffer.read()
    if not data:
        raise SessionError("there is no patch on stdin: it is empty, or was read already")
    return data


@contextlib.contextmanager
def patch_path(output: Path) -> Iterator[Path]:
    """Where to write a patch: its own place, or a temporary file, which goes to stdout at the end."""
    if not is_pipe(output):
        _require_patch_name(output)
        yield output
        return
    if sys.stdout.isatty():
        raise typer.BadParameter("- writes the patch to stdout, which is a terminal", param_hint="--output")
    with tempfile.TemporaryDirectory(prefix="sparserl-") as folder:
        draft = Path(folder) / "patch"
        yield draft
        with draft.open("rb") as file:
            shutil.copyfileobj(file, sys.stdout.buffer)
        sys.stdout.buffer.flush()


def _require_patch_name(output: Path) -> None:
    """Raise `OSError` where writing a patch would replace anything but a patch: the name may be a mistake."""
    from ..wire.patchfile import MAGIC

    if output.parent.exists() and not output.parent.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "is not a folder", str(output.parent))
    if output.is_dir():
        raise IsADirectoryError(errno.EISDIR, "is a folder; a patch is a file", str(output))
    if output.exists():
        if not output.is_file():
            raise FileExistsError(errno.EEXIST, "exists and is not a regular file", str(output))
        with output.open("rb") as file:
            if file.read(len(MAGIC)) not in (b"", MAGIC):
                raise FileExistsError(errno.EEXIST, "exists and is not a patch; choose another name", str(output))
