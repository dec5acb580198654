"""The example of evaluators: each takes every tenth version while training goes on, and leaves no pin behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import sparserl
from sparserl.session.store.retention import faults
from sparserl.transport import open_store

HOME = Path(__file__).resolve().parents[2]


@pytest.mark.long
def test_two_evaluators_take_every_tenth_version(tmp_path: Path) -> None:
    """Both see versions 0, 10, 20 and 30, with the same weights; the error falls."""
    store = str(tmp_path / "store")
    command = [sys.executable, "examples/evaluators.py", "--store", store]
    environment = {**os.environ, "PYTHONPATH": f"{HOME / 'src'}{os.pathsep}{HOME}"}
    done = subprocess.run(command, cwd=HOME, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    lines = [line.split(": version ") for line in done.stdout.splitlines()]
    assert [name for name, _ in lines] == ["eval-1"] * 4 + ["eval-2"] * 4
    rows = [row.split(", error ") for _, row in lines]
    assert [int(version) for version, _ in rows] == [0, 10, 20, 30] * 2
    errors = [float(error) for _, error in rows]
    assert errors[:4] == errors[4:]
    assert errors[3] < errors[0]
    assert sparserl.pins(store) == []
    assert list(faults(open_store(store))) == []
