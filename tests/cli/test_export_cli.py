"""`export`, `apply` from a store, and `-` for pipes: versions leave a store without following it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import sparserl
from sparserl.cli.app import app
from sparserl.cli.stores import is_store
from sparserl.sources import open_checkpoint
from sparserl.transport.stores.versioned import split_version
from tests.checkpoints import equal, tree
from tests.cli.session_commands import FILES, URL, W, failed, said, usage, values

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("version", [0, 1, 2])
def test_any_version_is_a_checkpoint(here: Path, version: int) -> None:
    """With its files, without the secret key, and without touching the store."""
    before = tree(here / "store")
    text = said("export", f"{URL}@{version}", "-o", "out", "--trusted-key", "key.pub")
    assert f"version {version} of run" in text
    assert equal(open_checkpoint(here / "out"), W[version])
    assert set(tree(here / "out")) == {"model.safetensors", *FILES}
    assert tree(here / "store") == before
    assert not [path for path in here.iterdir() if path.name.startswith(".out")]


def test_the_newest_version_is_the_default(here: Path) -> None:
    out = values("export", "store", "-o", "out")
    assert out["version"] == 2
    assert out["digest"] == sparserl.digest(W[2]).hex
    assert equal(open_checkpoint(here / "out"), W[2])


def test_a_folder_is_not_written_over(here: Path) -> None:
    """Nor is anything else; and what the store does not have is named."""
    assert "exists already" in failed("export", "store@1", "-o", "0")
    assert "versions" not in failed("export", "nowhere@1", "-o", "out")
    assert "version 9 is not among those that are kept: 0 to 2" in failed("export", "store@9", "-o", "out")
    assert "version 7 is not among" in failed("export", "store@2", "--from", 7, "-o", "x.patch")
    assert not (here / "out").exists()


@pytest.mark.parametrize(("first", "last"), [(0, 1), (0, 2), (1, 2), (2, 0), (1, 1)])
def test_a_patch_between_any_two_versions(here: Path, first: int, last: int) -> None:
    """Of the store, or made of both; files come with it."""
    said("export", f"store@{last}", "--from", first, "-o", "some.patch")
    patch = sparserl.Patch.open("some.patch")
    assert (patch.base, patch.result) == (sparserl.digest(W[first]), sparserl.digest(W[last]))
    said("export", f"store@{first}", "-o", "base")
    said("apply", "base", "some.patch", "-o", "out")
    said("export", f"store@{last}", "-o", "wanted")
    assert equal(open_checkpoint(here / "out"), W[last])
    others = [{n: d for n, d in tree(here / f).items() if not n.endswith("safetensors")} for f in ("out", "wanted")]
    assert others[0] == others[1]
    assert {*FILES} <= others[0].keys()


def test_apply_from_a_store(here: Path) -> None:
    """The patches from the version that the checkpoint is; `store` means the newest."""
    out = values("apply", "0", f"{URL}@1", "-o", "one", "--trusted-key", "key.pub")
    assert out["applied"] == 1
    assert equal(open_checkpoint(here / "one"), W[1])
    said("apply", "one", "store", "-o", "one")
    assert equal(open_checkpoint(here / "one"), W[2])
    assert values("apply", "one", "store@2", "-o", "one")["already"]
    said("apply", "one", "store@0", "-o", "zero")
    assert equal(open_checkpoint(here / "zero"), W[0])


def test_apply_from_a_store_that_does_not_fit(here: Path) -> None:
    assert "which no version has that store keeps" in failed("apply", _unknown(here), "store@1", "-o", "out")
    assert "version 8 is not among those that are kept: 0 to 2" in failed("apply", "0", "store@8", "-o", "out")
    assert not (here / "out").exists()


def _unknown(folder: Path) -> Path:
    """A checkpoint with the tensors of the run, of which no version has the bits."""
    said("apply", "0", "store@1", "-o", "changed")
    file = next((folder / "changed").glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 0x55
    file.write_bytes(data)
    return folder / "changed"


def piped(*commands: list[object], stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    """Run commands, the output of each being the input of the next."""
    env = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    done = None
    for command in commands:
        argv = [sys.executable, "-m", "sparserl.cli", *map(str, command)]
        done = subprocess.run(argv, env=env, input=stdin, capture_output=True, check=False, timeout=900)
        assert done.returncode == 0, done.stderr
        stdin = done.stdout
    assert done is not None
    return done


@pytest.mark.long
def test_patches_go_through_pipes(files: Path) -> None:
    """`-` writes a patch to stdout, says the rest on stderr, and reads one from stdin."""
    done = piped(["diff", "0", "1", "-o", "-"])
    assert done.stdout == (files / "01.patch").read_bytes()
    assert b"-: " in done.stderr
    done = piped(["diff", "0", "1", "-o", "-", "--json"], ["apply", "0", "-", "-o", "out"])
    assert equal(open_checkpoint(files / "out"), W[1])
    assert not (files / "-").exists()


def test_every_command_takes_a_patch_from_stdin(files: Path) -> None:
    patch = (files / "01.patch").read_bytes()

    def given(*args: str) -> bytes:
        done = CliRunner().invoke(app, args, input=patch)
        assert done.exit_code == 0, done.output
        return done.stdout_bytes

    assert given("verify", "0", "-") == b"base\n"
    assert b"digest" in given("inspect", "-", "--json")
    undone = given("invert", "-", "--base", "0", "-o", "-")
    assert sparserl.Patch.from_bytes(undone).result == sparserl.digest(W[0])
    squashed = given("squash", "-", "12.patch", "--base", "0", "-o", "-")
    assert sparserl.Patch.from_bytes(squashed).result == sparserl.digest(W[2])


def test_an_empty_pipe_is_an_error(files: Path) -> None:
    env = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    argv = [sys.executable, "-m", "sparserl.cli", "inspect", "-"]
    done = subprocess.run(argv, env=env, input=b"", capture_output=True, check=False, timeout=900)
    assert done.returncode == 1
    assert b"there is no patch on stdin" in done.stderr


def test_publish_says_what_stays(here: Path) -> None:
    """Retention, step and note, as the constructor and `publish` take them."""
    options = ["--signing-key", "key", "--keep-anchors", 1, "--anchor-after", 0, "--grace", "0s", "--lease", "1m"]
    out = values("publish", "0", "store", *options, "--step", 300, "--note", "warm-up ends")
    assert out["version"] == 3
    assert "300  warm-up ends" in said("log", "store")
    steps = values("log", "store")["steps"]
    assert [step["version"] for step in steps if step["kind"] == "anchor"] == [3]
    assert "--grace" in usage("publish", "0", "store", "--grace", "soon")


def test_files_that_change_come_along(here: Path) -> None:
    """In a patch that is exported, and where a store is applied."""
    (here / "0" / "config.json").write_text("{}")
    (here / "0" / "assets" / "vocab.txt").unlink()
    said("publish", "0", "store", "--signing-key", "key")
    said("export", "store@1", "-o", "base")
    said("export", "store@3", "--from", 1, "-o", "some.patch")
    for given, out in (("some.patch", "patched"), ("store@3", "applied")):
        said("apply", "base", given, "-o", out)
        assert equal(open_checkpoint(here / out), W[0])
        assert (here / out / "config.json").read_text() == "{}"
        assert not (here / out / "assets" / "vocab.txt").exists()


def test_a_version_with_other_files_alone(here: Path) -> None:
    """Versions with the same weights differ in files: those of the version that is asked for are written."""
    shutil.copytree(here / "0", here / "base")
    (here / "0" / "config.json").write_text("{}")
    said("publish", "0", "store", "--signing-key", "key")
    said("publish", "0", "store", "--signing-key", "key")
    out = values("apply", "base", "store@4", "-o", "out")
    assert out["files"] == ["config.json"]
    assert (here / "out" / "config.json").read_text() == "{}"


def test_a_checkpoint_does_not_go_to_stdout(here: Path) -> None:
    assert "--from" in usage("export", "store@1", "-o", "-")
    (here / "-").mkdir()
    assert split_version("-") == ("-", None)
    assert not is_store("-")


def test_names_that_look_like_versions(here: Path) -> None:
    """A folder whose own name ends like that is meant as it is."""
    shutil.copytree(here / "store", here / "run@1")
    for source, version in (("run@1", 2), (f"file://{here}/run@1", 2), ("run@1@0", 0)):
        assert values("export", source, "-o", f"out{version}{len(source)}")["version"] == version
