"""Checkpoints and a store for tests of commands."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import sparserl
from sparserl.targets.checkpoint_folder import write_checkpoint
from tests.checkpoints import write_file, write_folder
from tests.cli.session_commands import FILES, W, said


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder, which becomes the current one, with three versions as files and two as folders."""
    monkeypatch.chdir(tmp_path)
    for i, weights in enumerate(W):
        write_file(tmp_path / f"{i}.safetensors", weights)
    write_folder(tmp_path / "0", W[0], shards=3)
    write_folder(tmp_path / "1", W[1], shards=2)
    for i in (0, 1):
        sparserl.diff(W[i], W[i + 1]).save(tmp_path / f"{i}{i + 1}.patch")
    return tmp_path


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three checkpoints, a key, and a signed run with all three as versions."""
    root = tmp_path_factory.mktemp("made")
    write_folder(root / "0", W[0], shards=3)
    write_checkpoint(root / "1", W[1], FILES)
    write_file(root / "2.safetensors", W[2])
    (root / "key.pub").write_text(said("keygen", root / "key"))
    for name in ("0", "1", "2.safetensors"):
        said("publish", root / name, f"file://{root}/store", "--state", root / "state", "--signing-key", root / "key")
    return root


@pytest.fixture
def here(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, which becomes the current folder; the store is at file://store."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path
