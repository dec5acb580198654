"""The doctor tells what works by trying it, and finds stores that do not keep their promises."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import sparserl
from sparserl.cli import checks as doctor
from sparserl.cli.app import app
from sparserl.cli.checks import Finding, examine, packages, store, trial, unmet
from sparserl.errors import StoreError
from sparserl.transport.stores.folder import FolderStore
from tests.servers import Server

ROOT = Path(__file__).resolve().parents[1]


def run(*args: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["doctor", *map(str, args)])
    return result.exit_code, result.stdout, result.stderr


def test_every_extra_is_known() -> None:
    """The packages that are looked for are those that the extras bring, each under the name it is imported by."""
    tomllib = pytest.importorskip("tomllib")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    del extras["dev"], extras["docs"]  # for those who change sparserl
    names = {extra: [re.split(r"[^\w-]", line)[0] for line in lines] for extra, lines in extras.items()}
    wanted = {extra: {n.replace("-", "_") for n in several} - {"sparserl"} for extra, several in names.items()}
    assert wanted == {extra: set(several) for extra, several in doctor.EXTRAS.items()}


def test_a_healthy_machine(tmp_path: Path) -> None:
    """Everything that can be tried here is, and soon; figures are figures, a store that is asked for comes last."""
    url = f"file://{tmp_path}/store"
    needs = [word for name in ("sparserl", "cpu", "folder") for word in ("--need", name)]
    doctor._kernels()  # from now on they are compiled
    before = os.times()
    command = [sys.executable, "-m", "sparserl", "doctor", url, "--json", *needs]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    after = os.times()
    assert (done.returncode, done.stderr) == (0, "")
    spent = after.children_user - before.children_user + after.children_system - before.children_system
    assert spent < 12, "seconds of a processor; on a machine with nothing else to do, it answers sooner than that"
    out = done.stdout
    found = json.loads(out)
    assert found["ok"] is True
    by_name = {row["name"]: row for row in found["findings"]}
    assert len(by_name) == len(found["findings"]), "every line has a name of its own"
    assert {row["state"] for row in by_name.values()} <= {"works", "installed", "missing", "broken"}
    assert by_name["sparserl"]["detail"].startswith(sparserl.__version__)
    assert by_name["cpu"]["state"] == by_name["folder"]["state"] == by_name["pytest"]["state"] == "works"
    assert found["findings"][-1]["name"] == url
    assert "conditional puts are honoured" in by_name[url]["detail"]
    for name in ("read", "copy"):
        assert float(by_name[name]["detail"].split()[0]) > 0.05
    assert not [path for path in (tmp_path / "store").rglob("*") if path.is_file() and path.name != "lock"]


class Careless(FolderStore):
    """A store that takes conditions for advice: all of them, or only those on what is there."""

    def __init__(self, root: Path, creates: bool) -> None:
        super().__init__(root)
        self.creates = creates

    def swap(self, name: str, data: bytes, tag: str | None) -> str:
        if tag is None and self.creates:
            return super().swap(name, data, None)
        self.put(name, data)
        return self.get(name, 1 << 20).tag


class Sticky(FolderStore):
    """A store that keeps what is to go."""

    def delete(self, names: Iterable[str]) -> None:
        """Nothing."""


def test_broken_promises_are_found(tmp_path: Path) -> None:
    """A store that ignores the condition of a write is told from one that honours it, and the trial is removed."""
    for creates, what in ((False, "creates an object that exists already"), (True, "the condition names an older one")):
        careless = Careless(tmp_path / str(creates), creates)
        with pytest.raises(StoreError, match=f"does not honour conditional puts: .*{what}"):
            trial(careless)
        assert list(careless.list("")) == []
    with pytest.raises(StoreError, match="still exists"):
        trial(Sticky(tmp_path / "sticky"))
    assert "honoured" in trial(FolderStore(tmp_path / "good"))


def test_a_real_object_store(server: Server) -> None:
    """One that honours conditions is said to, and nothing stays in it."""
    found = store("s3", lambda: closing(server.store("doctor-trial")))
    assert (found.state, found.detail.partition(";")[0]) == ("works", "conditional puts are honoured")
    assert list(server.store("doctor-trial").list("")) == []


def test_what_can_only_be_read_or_not_at_all(tmp_path: Path) -> None:
    """What is no store is broken, with a reason; a store that can only be read must have a head."""
    (tmp_path / "file").write_bytes(b"")
    for url, reason in (("s3:nowhere", "is not the URL of a store"), (f"file://{tmp_path}/file", "cannot be written")):
        found = store(url)
        assert (found.state, found.ok) == ("broken", False)
        assert reason in found.detail
    sparserl.Publisher(f"file://{tmp_path}/run", {"w": np.zeros(3, np.float32)}).publish()

    class ReadOnly(FolderStore):
        writable = False

    assert "can be read: run" in store("x", lambda: closing(ReadOnly(tmp_path / "run"))).detail
    assert store("x", lambda: closing(ReadOnly(tmp_path / "empty"))).state == "broken"


def test_missing_and_broken_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is missing comes with its extra, what is broken with its error; needed, each makes the exit code 1."""
    (tmp_path / "fine_one.py").write_text("")
    (tmp_path / "broken_one.py").write_text("raise RuntimeError('no such library')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(doctor, "EXTRAS", {"x": ("fine_one", "broken_one"), "y": ("no_such_package",)})
    monkeypatch.setattr(doctor, "ENGINES", ("no_such_engine",))
    monkeypatch.setattr(doctor, "_TORCH", "raise OSError('libcuda is a text file')")
    by_name = {found.name: found for found in packages()}
    assert by_name["fine_one"] == Finding("package", "fine_one", "works")
    assert (by_name["broken_one"].state, by_name["broken_one"].detail) == ("broken", "RuntimeError: no such library")
    assert by_name["no_such_package"] == Finding(
        "package", "no_such_package", "missing", remedy="pip install 'sparserl[y]'"
    )
    assert by_name["no_such_engine"].state == "missing"
    code, out, said = run("--need", "no_such_package", "--need", "fine_one", "--need", "broken_one")
    assert code == 1
    assert "pip install 'sparserl[y]'" in out
    assert said.splitlines() == [
        "sparserl: error: broken_one is broken: RuntimeError: no such library; pip install 'sparserl[x]'",
        "sparserl: error: no_such_package is missing: pip install 'sparserl[y]'",
    ]
    torch = [found for found in examine() if found.name == "torch"]
    assert torch == [Finding("package", "torch", "broken", "OSError: libcuda is a text file")]
    assert unmet(torch, []) == []
    assert unmet(torch, ["torch"]) == torch
    code, _, said = run("--need", "fine_on")
    assert code == 2
    assert "'fine_on' is not among" in " ".join(said.split())
