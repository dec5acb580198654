"""What a publisher says of a version: its training step, a note, and the files that travel with it."""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import NamedTuple

from ...errors import SessionError
from ..options import require_number
from . import side_files
from .fields import MOST_VERSION
from .records import MOST_NOTE, RouteStep


class Label(NamedTuple):
    """What a publisher says of a version, and the files that travel with it."""

    step: int | None
    note: str | None
    files: side_files.Captured | None = None

    @classmethod
    def of(cls, step: int | None, note: str | None) -> Label:
        """What the caller of `publish` says, checked."""
        if step is not None:
            try:
                step = operator.index(step)
            except TypeError as error:
                raise SessionError(f"step is {step!r}; it must be an integer") from error
            require_number("step", step, 0, MOST_VERSION)
        if note is not None and (not isinstance(note, str) or not 0 < len(note) <= MOST_NOTE or not note.isprintable()):
            raise SessionError(f"note is {note!r}; it must be one line of text, up to {MOST_NOTE} characters")
        return cls(step, note)

    def on(self, step: RouteStep) -> RouteStep:
        """A step of the index with what is said of it."""
        return replace(step, step=self.step, note=self.note)
