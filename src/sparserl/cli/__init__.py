"""The command line: `sparserl …`. What a command needs is imported when it runs, so that `--help` does not wait."""

from __future__ import annotations

import sys

__all__ = ["main"]

_INTERRUPTED = 130  # what shells report for a program that Ctrl-C ended


def main() -> None:
    """Run the command line and leave with its exit code."""
    try:
        if sys.argv[1:] == ["--version"]:  # without typer, which takes most of the time
            from .. import __version__

            sys.stdout.write(f"sparserl {__version__}\n")
            return
        from .app import app

        app(prog_name="sparserl")
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)
