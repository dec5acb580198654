"""Errors of commands: one line on stderr that says what is wrong, and exit code 1."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec

import typer

from ..errors import NeedsBase, SparserlError
from . import show

P = ParamSpec("P")


def reporting(command: Callable[P, None]) -> Callable[P, None]:
    """A command whose errors, where a user can do something about them, are one line on stderr and exit code 1."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except BrokenPipeError:
            raise  # the reader of our output has closed it
        except NeedsBase as error:
            show.note(f"error: {error} (--base)")
        except SparserlError as error:
            show.note(f"error: {error}")
        except OSError as error:
            show.note(f"error: {_describe(error)}")
        else:
            return
        raise typer.Exit(1)

    return run


def _describe(error: OSError) -> str:
    """What went wrong with which files."""
    names = [str(name) for name in (error.filename, error.filename2) if name is not None]
    if not names:
        return str(error)
    return f"{' -> '.join(names)}: {error.strerror or error}"
