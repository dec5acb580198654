"""The command line: `sparserl …`, on checkpoints and patch files."""

from __future__ import annotations

from .commands import app
from .doctor import doctor  # noqa: F401  # registers the command
from .plan import plan  # noqa: F401  # registers the command
from .report import report  # noqa: F401
from .serve import serve  # noqa: F401
from .session import publish  # noqa: F401  # registers the commands of sessions

__all__ = ["app", "main"]


def main() -> None:
    """Run the command line and leave with its exit code."""
    app(prog_name="sparserl")
