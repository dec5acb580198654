"""Names of the files that travel with weights: paths below a checkpoint, and nowhere else."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ..errors import InvalidField, LimitExceeded

_NAME = re.compile(r"[^/\0]+(/[^/\0]+)*")
_WEIGHTS = (".safetensors", ".safetensors.index.json")


def checked_file_name(name: Any) -> str:
    """A name, if a file may have it.

    Raises:
        ValueError: It leads out of the checkpoint, is too long, or is that of the weights.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(name)
    parts = name.split("/")
    if any(part in (".", "..") or len(part.encode()) > 255 for part in parts) or len(name.encode()) > 1000:
        raise ValueError(name)
    if parts[0].endswith(_WEIGHTS):  # where the weights go
        raise ValueError(name)
    return name


def require_files(sizes: Mapping[str, int], label: str, most: int, most_bytes: int) -> None:
    """Refuse files that are too many or too large, or of which one would lie inside another."""
    if len(sizes) > most or sum(sizes.values()) > most_bytes:
        raise LimitExceeded(
            f"{label}: {len(sizes)} files of {sum(sizes.values())} bytes in all, the limits are {most} files and "
            f"{most_bytes} bytes; the largest is {max(sizes, key=sizes.__getitem__)!r}"
        )
    for name in sizes:
        for end, letter in enumerate(name):
            if letter == "/" and name[:end] in sizes:
                raise InvalidField(f"{label}: file {name!r} would lie inside the file {name[:end]!r}")
