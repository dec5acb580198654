"""ROLL: checkpoints that its workers save are published, and a run can be loaded as a model.

ROLL is not on the package index. SPARSERL_ROLL names a checkout of github.com/alibaba/ROLL, to which the diff is then
applied, and whose uploader, checkpoint manager and model download are then run; they were read in commit
8eb27cc2dc34c4d1310b169d9b86d339004d811a (18 August 2026). Without it, a stand-in has the signature of ROLL's uploader.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import logging
import os
import re
import shutil
import sys
import traceback
from pathlib import Path
from types import ModuleType

import pytest

from sparserl.errors import NotFound
from sparserl.integrations import disk_sync
from tests.integrations.test_slime import read, written
from tests.integrations.upstream import patched, run_definitions


class StandIn:
    """The constructor and the method of ROLL's FileSystemUploader."""

    def __init__(self, output_dir, *_args, **_options):
        self.output_dir = output_dir

    def upload(self, ckpt_id, local_state_path, **_options):
        shutil.copytree(local_state_path, Path(self.output_dir) / ckpt_id, dirs_exist_ok=True)


@pytest.fixture(autouse=True)
def _environment(tmp_path, monkeypatch):
    disk_sync.publishers.clear()
    monkeypatch.delenv("SPARSERL_URL", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def _roll_with(monkeypatch, **names) -> ModuleType:
    """The adapter, imported with these names in ROLL's module of uploaders."""
    uploads = ModuleType("roll.utils.upload_utils")
    vars(uploads).update(names)
    for name, module in {"roll": ModuleType("roll"), "roll.utils": ModuleType("roll.utils")}.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "roll.utils.upload_utils", uploads)
    monkeypatch.delitem(sys.modules, "sparserl.integrations.roll", raising=False)
    return importlib.import_module("sparserl.integrations.roll")


def _saved(root: Path, step: int) -> Path:
    """What the first rank of ROLL's actor has saved: a checkpoint, and the state of its optimizer."""
    out = written(root, step).rename(root / f"checkpoint-{step}")
    (out / "optimizer.pt").write_bytes(b"state")
    return out


def test_an_upload_is_a_version(tmp_path, monkeypatch):
    """Weights are published, everything is copied, and a follower has them after ROLL has deleted its folder."""
    roll = _roll_with(monkeypatch, FileSystemUploader=StandIn)
    url = f"file://{tmp_path}/store"
    uploader = roll.StoreUploader(url=url, output_dir=str(tmp_path / "out"), async_upload=False)
    for step in (10, 20):
        out = _saved(tmp_path / "actor_train-0", step)
        wanted = read(out)
        uploader.upload(ckpt_id=out.name, local_state_path=str(out))
        shutil.rmtree(out)
        assert (tmp_path / "out" / out.name / "optimizer.pt").read_bytes() == b"state"
        assert wanted == read(Path(roll.download(url)))
    assert Path(roll.download(url, str(tmp_path / "mine"))).is_relative_to(tmp_path / "mine")


def test_workers_without_weights(tmp_path, monkeypatch):
    """Other ranks, and a critic in a folder of its own, are copied and not published."""
    roll = _roll_with(monkeypatch, FileSystemUploader=StandIn)
    url = f"file://{tmp_path}/store"
    uploader = roll.StoreUploader(url=url, output_dir=str(tmp_path / "out"))
    worker = tmp_path / "critic-0" / "checkpoint-10"
    written(worker, 10).rename(worker / "critic")
    uploader.upload(ckpt_id="checkpoint-10", local_state_path=str(worker))
    assert (tmp_path / "out/checkpoint-10/critic/config.json").is_file()
    with pytest.raises(NotFound):
        roll.download(url)


def test_rolls_own_code(tmp_path, monkeypatch):
    """The patched files register both; ROLL's checkpoint manager uploads, and its model download finds the version."""
    if "SPARSERL_ROLL" not in os.environ:
        pytest.skip("SPARSERL_ROLL names no checkout of ROLL, which is not on the package index")
    files = patched("roll.diff", lambda name: (Path(os.environ["SPARSERL_ROLL"]) / name).read_text(), tmp_path / "roll")
    logger = logging.getLogger("roll")
    uploads = ModuleType("roll.utils.upload_utils")
    for name in ("roll", "roll.utils", "roll.utils.logging"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["roll.utils.logging"].get_logger = lambda: logger
    monkeypatch.setitem(sys.modules, "roll.utils.upload_utils", uploads)
    monkeypatch.delitem(sys.modules, "sparserl.integrations.roll", raising=False)
    exec((files / "roll/utils/upload_utils.py").read_text(), vars(uploads))
    text = (files / "roll/utils/checkpoint_manager.py").read_text()
    registry = {}
    (registration,) = re.findall(r"^try:\n    from sparserl.*?pass$", text, re.MULTILINE | re.DOTALL)
    exec(registration, {"model_download_registry": registry})
    manager = run_definitions(
        text,
        ["CheckpointManager", "download_model"],
        {
            "copy": copy,
            "os": os,
            "shutil": shutil,
            "traceback": traceback,
            "logger": logger,
            "uploader_registry": uploads.uploader_registry,
            "model_download_registry": registry,
            "model_path_cache": lambda function: function,  # it asks Ray for the path
            "file_lock_context": lambda _path: contextlib.nullcontext(),
        },
    )
    url = f"file://{tmp_path}/store"
    monkeypatch.setenv("MODEL_DOWNLOAD_TYPE", "SPARSERL")
    checkpoints = manager["CheckpointManager"]({"type": "sparserl", "url": url, "output_dir": str(tmp_path / "out")})
    for step in (10, 20):
        out = _saved(tmp_path / "actor_train-0", step)
        wanted = read(out)
        checkpoints.upload(ckpt_id=out.name, local_state_path=str(out))
        assert not out.exists()
        assert wanted == read(Path(manager["download_model"](url)))
    assert (tmp_path / "out/checkpoint-20/optimizer.pt").read_bytes() == b"state"
