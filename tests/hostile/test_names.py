"""Names that speak to a terminal: whatever a command prints of a patch, a store or a checkpoint can only be read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from typer.testing import CliRunner

import sparserl
from sparserl.cli import show
from sparserl.cli.app import app

NAME = "w\x1b]0;owned\x07\x1b[2J\x9b31m\u202egnp.\u2066\u2028\r\n\x7f\x85x"
SEEN = r"w\x1b]0;owned\x07\x1b[2J\x9b31m\u202egnp.\u2066\u2028\r\n\x7f\x85x"


def spoken(text: str) -> list[str]:
    """What in a text is neither to be seen nor the end of a line."""
    return [c for c in text.replace("\n", "") if not c.isprintable()]


def invoke(*args: object) -> Any:
    done = CliRunner().invoke(app, [str(arg) for arg in args], env={"COLUMNS": "400"})
    assert not spoken(done.stdout), args
    assert not spoken(done.stderr), args
    return done


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Checkpoints, a patch and a store, all with such a name."""
    monkeypatch.chdir(tmp_path)
    weights = {NAME: np.zeros(90, np.float32)}
    for step in range(2):
        weights[NAME][step] = 1
        save_file(weights, f"{step}.safetensors")
    save_file({"other" + NAME: np.zeros(9, np.float32)}, "other.safetensors")
    assert invoke("diff", "0.safetensors", "1.safetensors", "-o", "a.patch").exit_code == 0
    with sparserl.Publisher("file://store", weights, files={"config.json": b"{}"}) as publisher:
        publisher.publish()
    return tmp_path


def test_names_are_written_out(here: Path) -> None:
    """In tables, in lines of result and in errors, on stdout and on stderr; JSON says the same name."""
    shown = invoke("inspect", "a.patch", "--tensors")
    assert SEEN in shown.stdout
    values = json.loads(invoke("inspect", "a.patch", "--json").stdout)
    assert values["tensors"][0]["name"] == NAME
    for args in (
        ("verify", "other.safetensors", "a.patch"),
        ("diff", "0.safetensors", "other.safetensors", "-o", "b.patch"),
        ("apply", "other.safetensors", "a.patch", "-o", "c.safetensors"),
    ):
        failed = invoke(*args)
        assert failed.exit_code == 1
        assert "\\x1b]0;owned" in failed.stderr
        assert failed.stderr.count("\n") == 1
    for args in (("log", "file://store"), ("fsck", "file://store"), ("digest", "0.safetensors")):
        assert invoke(*args).exit_code == 0


def test_names_of_files_and_objects_too(here: Path) -> None:
    """What lies in a store under such a name, and a path that was given, is told as visibly."""
    stray = here / "store" / "runs" / NAME
    stray.write_bytes(b"x")
    invoke("gc", "file://store", "--grace", "0s", "--dry-run")
    invoke("fsck", "file://store")
    for args, seen in (
        (("inspect", NAME), "\\x1b]0;owned"),
        (("log", f"file://{NAME}"), "%1B%5D0%3Bowned"),
        (("doctor", f"file://{here}/0.safetensors/{NAME}"), "%1B%5D0%3Bowned"),
    ):
        failed = invoke(*args)
        assert failed.exit_code == 1
        assert seen in failed.stderr


def test_pages_hold_no_markup_of_others(here: Path) -> None:
    """A report names tensors as text."""
    name = "<script>x</script>&\x1b"
    for step in range(2):
        save_file({name: np.full(90, step, np.float32)}, f"m{step}.safetensors")
    assert invoke("record", "m0.safetensors", "m1.safetensors", "-o", "r.jsonl", "--model", name).exit_code == 0
    assert invoke("report", "r.jsonl", "-o", "r.html").exit_code == 0
    assert "<script" not in (here / "r.html").read_text()


def test_what_shows_is_left_alone() -> None:
    """Letters of any script, signs and spaces are printed as they are."""
    for text in ("model.layers.0 weight", "größe × π → ∞", "重み", "", "a\\x1b"):
        assert show.visible(text) == text
    assert show.visible("a\u00a0\ud800\t") == "a\\xa0\\ud800\\t"
