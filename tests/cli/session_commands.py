"""Runs commands on stores, in this process and in processes of their own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import safetensors
from typer.testing import CliRunner

from sparserl.cli.app import app
from sparserl.sources import open_checkpoint
from sparserl.weights.dtypes import Bits
from tests.checkpoints import equal, successive_versions

W = successive_versions(3)
FILES = {"config.json": b'{"model_type": "tiny"}', "assets/vocab.txt": b"a\nb\n"}


def invoke(*args: object, **env: str) -> Any:
    return CliRunner().invoke(app, [str(a) for a in args], env={"COLUMNS": "300", **env})


def said(*args: object, code: int = 0, **env: str) -> str:
    """Run in this process; what it printed, once the exit code is the expected one."""
    result = invoke(*args, **env)
    assert result.exit_code == code, result.output
    return str(result.stdout)


def values(*args: object, code: int = 0) -> dict[str, Any]:
    found = json.loads(said(*args, "--json", code=code))
    assert isinstance(found, dict)
    return found


def failed(*args: object, **env: str) -> str:
    """Run in this process, expecting failure; its one line on stderr."""
    result = invoke(*args, **env)
    assert result.exit_code == 1, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("sparserl: error: ")
    assert result.stderr.count("\n") == 1
    return str(result.stderr)


def usage(*args: object) -> str:
    """Run in this process, expecting that it is refused as a command line."""
    result = invoke(*args)
    assert result.exit_code == 2, result.output
    return str(result.stderr)


URL = "file://store"


def same(folder: Path, weights: dict[str, Bits]) -> bool:
    """Whether a followed folder holds the weights bit for bit, as we and as safetensors read it."""
    current = folder / "current"
    held = safetensors.deserialize((current / "model.safetensors").read_bytes())
    theirs = {name: bytes(found["data"]) for name, found in held}
    ours = {name: bits.array.tobytes() for name, bits in weights.items()}
    return equal(open_checkpoint(current), weights) and theirs == ours
