"""ROLL: checkpoints that its workers save are published, and a run can be loaded as a model.

ROLL is not on the package index. SPARSERL_ROLL names a checkout of github.com/alibaba/ROLL, to which the diff is then
applied, and whose uploader, checkpoint manager and model download are then run; they were read in commit
8eb27cc2dc34c4d1310b169d9b86d339004d811a (18 August 2026). Without it, a stand-in has the signature of ROLL's uploader.
"""

from __future__ import annotations

import ast
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
from types import ModuleType, SimpleNamespace

import pytest

from sparserl.errors import NotFound
from sparserl.integrations import disk_sync
from tests.cli.session_commands import said
from tests.integrations.test_slime import read, written
from tests.integrations.upstream import DIFFS, PAGES, commands, patched, run_definitions
from tests.integrations.wheels import definition, fields

PAGE = (PAGES / "roll.md").read_text()


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


def _documented(folder: Path) -> dict:
    """The configuration of the page, with a store and a copy in a folder."""
    yaml = pytest.importorskip("yaml")
    (block,) = re.findall(r"^```yaml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    config = yaml.safe_load(block)
    places = {"url": f"file://{folder}/store", "output_dir": str(folder / "out")}
    assert places.keys() < config["checkpoint_config"].keys()
    config["checkpoint_config"] |= places
    return config


def _follow(url: str, output: Path) -> Path:
    """The page's command, once; the folder that it says is the newest checkpoint."""
    command = [{"s3://bucket/run": url, "model/": output}.get(word, word) for word in commands("roll.md")["sparserl"]]
    assert {url, output} < set(command)
    said(*command[1:], "--once")
    assert "model/current is the newest checkpoint" in PAGE
    return output / "current"


def _checkout(name: str) -> str:
    """The text of a file of ROLL."""
    if "SPARSERL_ROLL" not in os.environ:
        pytest.skip("SPARSERL_ROLL names no checkout of ROLL, which is not on the package index")
    return (Path(os.environ["SPARSERL_ROLL"]) / name).read_text()


def test_the_configuration_of_the_page(tmp_path, monkeypatch):
    """The adapter takes it, less the type, as ROLL gives it; the page's command follows what is published then."""
    roll = _roll_with(monkeypatch, FileSystemUploader=StandIn)
    config = _documented(tmp_path)["checkpoint_config"]
    assert f'uploader_registry["{config.pop("type")}"] = StoreUploader' in (DIFFS / "roll.diff").read_text()
    uploader = roll.StoreUploader(**config)
    for step in (10, 20):
        out = _saved(tmp_path / "actor_train-0", step)
        uploader.upload(ckpt_id=out.name, local_state_path=str(out))
        assert read(out) == read(_follow(config["url"], tmp_path / "model"))
        assert read(out) == read(Path(config["output_dir"], out.name))


def test_a_followed_folder_without_the_diff(tmp_path):
    """ROLL's own model download takes it for a model, and a loader finds there what was published."""
    config = _checkout("roll/configs/base_config.py")
    assert "self.actor_train.model_args.model_name_or_path = self.pretrain\n" in config  # and that is downloaded
    stored = {}
    storage = SimpleNamespace(  # an actor of Ray
        get=SimpleNamespace(remote=lambda *, key: stored.get(key)),
        put=SimpleNamespace(remote=lambda *, key, data: stored.update({key: data})),
    )
    download = run_definitions(
        _checkout("roll/utils/checkpoint_manager.py"),
        ["model_path_cache", "download_model"],
        {
            "os": os,
            "ray": SimpleNamespace(get=lambda value: value),
            "get_node_ip": lambda: "127.0.0.1",
            "shared_storage": storage,
            "model_path_cache": None,  # that of ROLL comes in its place
            "model_download_registry": {},
        },
    )["download_model"]
    url = f"file://{tmp_path}/store"
    for step in (10, 20):
        out = _saved(tmp_path / "saved", step)
        said("publish", out, url)
        pretrain = _follow(url, tmp_path / "model")
        model = Path(download(str(pretrain)))
        assert read(out) == read(model)
        assert (model / "config.json").read_bytes() == (out / "config.json").read_bytes()
    assert list(stored.values()) == [str(pretrain)]


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
    base = definition(ast.parse(_checkout("roll/configs/base_config.py")), "BaseConfig")
    config = _documented(tmp_path)
    assert config.keys() | {"model_download_type"} <= fields(base)
    diff = Path(commands("roll.md")["git"][-1])
    assert diff == DIFFS / "roll.diff"
    files = patched(diff.name, _checkout, tmp_path / "roll")
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
    (download_type,) = re.findall(r"`model_download_type: (\w+)`", PAGE)
    monkeypatch.setenv("MODEL_DOWNLOAD_TYPE", download_type)  # as ROLL's config does
    settings = config["checkpoint_config"]
    checkpoints = manager["CheckpointManager"](settings)
    for step in (10, 20):
        out = _saved(tmp_path / "actor_train-0", step)
        wanted = read(out)
        keep = settings["keep_local_file"]
        checkpoints.upload(ckpt_id=out.name, local_state_path=str(out), keep_local_file=keep)
        assert out.exists() == keep
        assert wanted == read(Path(manager["download_model"](settings["url"])))
        assert wanted == read(_follow(settings["url"], tmp_path / "model"))
    assert (tmp_path / "out/checkpoint-20/optimizer.pt").read_bytes() == b"state"
