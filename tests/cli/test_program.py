"""The program around the commands: how it starts, what it loads, and how it ends when it is interrupted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import sparserl

ROOT = Path(__file__).resolve().parents[2]
ENV = os.environ | {"PYTHONPATH": str(ROOT / "src"), "COLUMNS": "300"}
RUN = "import sys\nsys.argv = ['sparserl', *{args!r}]\nfrom sparserl.cli import main\n{before}\n{call}"
LOADED = """
import atexit, json
atexit.register(lambda: print(json.dumps(list(sys.modules)), file=sys.stderr))
"""
INTERRUPTS = """
class Interrupts:
    def find_spec(name, path, target=None):
        if name == {module!r}:
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupts)
"""


def python(*args: str, before: str = "") -> subprocess.CompletedProcess[str]:
    """Run the program in a fresh interpreter, which first runs some code of ours."""
    code = RUN.format(args=args, before=before, call="main()")
    return subprocess.run([sys.executable, "-c", code], env=ENV, capture_output=True, text=True, check=False)


def test_version_loads_next_to_nothing() -> None:
    """`--version` loads neither a dependency nor a command."""
    process = python("--version", before=LOADED)
    assert process.stdout == f"sparserl {sparserl.__version__}\n"
    modules = json.loads(process.stderr)
    assert {name for name in modules if name.startswith("sparserl")} == {"sparserl", "sparserl.cli", "sparserl.lazy"}
    assert not {"typer", "rich", "numpy", "numba"} & set(modules)


@pytest.mark.parametrize("args", [("--help",), ("diff", "--help"), ("follow", "--help"), ("plan", "--help")])
def test_help_loads_no_kernels(args: tuple[str, ...]) -> None:
    """Help loads typer and the commands; neither NumPy nor Numba, torch or a store."""
    process = python(*args, before=LOADED)
    assert process.returncode == 0
    assert "Usage: sparserl" in process.stdout
    modules = set(json.loads(process.stderr))
    assert not {"numpy", "numba", "llvmlite", "torch", "obstore", "cryptography", "zstandard", "asyncio"} & modules


@pytest.mark.parametrize("module", ["typer", "sparserl.cli.patches", "sparserl.sources.checkpoint", "numpy"])
def test_ctrl_c_while_modules_load(module: str, tmp_path: Path) -> None:
    """Ctrl-C ends the program with 130 and without a traceback, whatever it was loading."""
    process = python("digest", str(tmp_path), before=INTERRUPTS.format(module=module))
    assert process.returncode == 130
    assert "Traceback" not in process.stderr
    assert process.stdout == ""
