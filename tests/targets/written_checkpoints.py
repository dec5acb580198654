"""Checkpoints of three versions, the patches between them, and how they are written."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

import sparserl
from sparserl import Patch
from sparserl.targets import apply_to_checkpoint
from sparserl.weights.dtypes import Bits
from tests.checkpoints import (
    successive_versions,
    tree,
    write_file,
    write_folder,
)

Write = Callable[[Path, Mapping[str, Bits]], Path]
BOTH = pytest.mark.parametrize("write", [write_file, write_folder], ids=["file", "folder"])
W = successive_versions(4)
P = [sparserl.diff(a, b) for a, b in zip(W, W[1:], strict=False)]


def expected(tmp_path: Path, write: Write, weights: Mapping[str, Bits]) -> dict[str, bytes]:
    """The files of a checkpoint of these weights."""
    other = tmp_path / "expected"
    files = tree(write(other, weights))
    shutil.rmtree(other) if other.is_dir() else other.unlink()
    return files


def assert_refused(error: type[Exception], says: str, root: Path, base: Path, patches: list[Patch], out: Path) -> None:
    """The call fails with this error, and not one byte below `root` has changed."""
    before = tree(root)
    with pytest.raises(error, match=says):
        apply_to_checkpoint(base, patches, out)
    assert tree(root) == before
