"""The complete examples in the documentation run, in processes of their own."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1"}


def blocks(page: str) -> list[str]:
    """What a page has of Python."""
    return re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / page).read_text(), re.MULTILINE | re.DOTALL)


def run(*command: str, folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.long
@pytest.mark.parametrize("package", ["transformers", "peft", "trl", "ray"])
def test_examples_of_integrations(package: str, tmp_path: Path) -> None:
    """The longest block of a page is a program, which checks what it shows."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    (tmp_path / "example.py").write_text(max(blocks(f"how-to/integrations/{package}.md"), key=len))
    run("example.py", folder=tmp_path)


@pytest.mark.long
def test_examples_of_suites(tmp_path: Path) -> None:
    """A store, a source and a target of one's own pass the suites."""
    (tmp_path / "test_mine.py").write_text("\n\n".join(blocks("how-to/testing.md")))
    run("-m", "pytest", "-q", "-p", "no:cacheprovider", "test_mine.py", folder=tmp_path)
