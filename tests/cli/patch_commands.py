"""Runs commands on patches, and makes the checkpoints for them."""

from __future__ import annotations

from typer.testing import CliRunner

from sparserl.cli.app import app
from tests.checkpoints import successive_versions

W = successive_versions(3)


def run_command(*args: object, code: int = 0) -> str:
    """Run in this process; what it printed, once the exit code is the expected one and errors are one line."""
    result = CliRunner().invoke(app, [str(a) for a in args])
    assert result.exit_code == code, result.output
    if code == 0:
        assert result.stderr == ""
    return result.stdout
