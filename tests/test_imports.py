"""What importing brings in, what the root offers, and which way imports point."""

from __future__ import annotations

import ast
import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

import sparserl

ROOT = Path(sparserl.__file__).parent
FOREIGN = (
    *("torch", "matplotlib", "typer", "rich", "vllm", "sglang", "transformers", "ray"),
    *("safetensors", "ml_dtypes", "obstore", "cryptography", "starlette", "uvicorn"),
    *("prometheus_client", "tensorboard", "wandb"),
)

# A room imports from rows above its own, and from itself. A new room takes a row here.
ROWS: tuple[tuple[str, ...], ...] = (
    ("errors", "folders", "humanize", "kernels"),
    ("parallel", "files"),
    ("weights",),
    ("codec",),
    ("wire",),
    ("plan",),
    ("patch",),
    ("sources",),
    ("targets", "transport"),
    ("session",),
    ("record", "metrics"),
    ("__init__",),
    ("integrations", "testing"),
    ("cli",),
    ("__main__",),
)
RANK = {room: row for row, rooms in enumerate(ROWS) for room in rooms}


def run(code):
    """A fresh interpreter that sees the same sparserl as this one."""
    env = {**os.environ, "PYTHONPATH": str(ROOT.parent)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_is_light():
    """Neither torch nor any engine, plot library or command-line package comes with `import sparserl`."""
    assert run(f"import sys, sparserl; print([m for m in {FOREIGN!r} if m in sys.modules])") == "[]"


def test_working_without_torch():
    """NumPy weights are diffed and applied without torch being imported, or there."""
    code = """
import sys
sys.modules["torch"] = None
import numpy as np, sparserl
old, new = {"w": np.zeros(9, np.float32)}, {"w": np.ones(9, np.float32)}
sparserl.diff(old, new).apply(old)
print(bool((old["w"] == new["w"]).all()))
"""
    assert run(code) == "True"


def test_the_public_names():
    """These and no others, in order; each is there."""
    assert sparserl.__all__ == [
        "Applied",
        "Bits",
        "DType",
        "Digest",
        "Entry",
        "Part",
        "Patch",
        "Publisher",
        "Region",
        "Shards",
        "SparserlError",
        "Stats",
        "Subscriber",
        "SyncReport",
        "TensorSpec",
        "TensorTable",
        "diff",
        "digest",
        "errors",
        "merge",
        "sources",
        "squash",
        "targets",
        "tensor_table",
    ]
    assert sparserl.__all__ == sorted(sparserl.__all__)
    assert all(hasattr(sparserl, name) for name in sparserl.__all__)
    assert callable(sparserl.digest)
    assert callable(sparserl.diff)


@pytest.mark.parametrize("path", sorted(ROOT.rglob("__init__.py")), ids=lambda p: p.parent.name)
def test_every_room_offers_what_is_there(path):
    """`__all__` of every package is true."""
    module = importlib.import_module(".".join(["sparserl", *path.parent.relative_to(ROOT).parts]))
    assert [name for name in getattr(module, "__all__", []) if not hasattr(module, name)] == []


def room(path):
    """The room a file belongs to."""
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported(path):
    """The rooms that a file imports from, at any depth, also inside functions."""
    inside = path.relative_to(ROOT).parts[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "sparserl":
                    yield node.lineno, (*alias.name.split(".")[1:], "__init__")[0]
        elif isinstance(node, ast.ImportFrom):
            if node.level == 0 and (node.module or "").split(".")[0] != "sparserl":
                continue
            start = inside[: len(inside) - node.level + 1] if node.level else ()
            parts = [*start, *(p for p in (node.module or "").split(".") if p and p != "sparserl")]
            if parts:
                yield node.lineno, parts[0]
            else:
                for alias in node.names:
                    yield node.lineno, alias.name if alias.name in RANK else "__init__"


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_one_way(path):
    """Nothing imports what stands above it, nor a neighbour in its row."""
    mine = room(path)
    assert mine in RANK, f"{mine} has no row in the table of rooms"
    for line, theirs in imported(path):
        assert theirs in RANK, f"{path}:{line} imports {theirs}, which has no row in the table of rooms"
        assert theirs == mine or RANK[theirs] < RANK[mine], f"{path}:{line}: {mine} imports {theirs}"


def test_the_table_has_no_empty_rooms():
    """Every room in the table exists."""
    there = {room(p) for p in ROOT.rglob("*.py")}
    assert set(RANK) == there
