"""What tests of frameworks need: who lacks a checkout is told how to get it; pages name the commits that were tried."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.integrations import wheels
from tests.integrations.checkouts import CHECKOUTS, main

PAGES = Path(__file__).parents[2] / "docs/how-to/integrations"


@pytest.mark.parametrize("variable", CHECKOUTS)
def test_pages_name_commits(variable):
    checkout = CHECKOUTS[variable]
    page = (PAGES / checkout.page).read_text()
    assert f"`{checkout.commit[:12]}`" in page
    assert f"https://github.com/{checkout.repository})" in page


def test_no_checkout(monkeypatch, capsys, tmp_path):
    for folder in (None, "", tmp_path, tmp_path / "nothing", Path(__file__).parent):
        monkeypatch.delenv("SPARSERL_ROLL", raising=False)
        if folder is not None:
            monkeypatch.setenv("SPARSERL_ROLL", str(folder))
        assert main(["SPARSERL_ROLL"]) == 2
        assert "git clone https://github.com/alibaba/ROLL" in capsys.readouterr().err


def test_another_commit(monkeypatch, capsys, tmp_path):
    """It may work as well: this is only said."""
    git = ["git", "-C", tmp_path, "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
    subprocess.run([*git, "commit", "--quiet", "--allow-empty", "--message", "another"], check=True)
    monkeypatch.setenv("SPARSERL_ROLL", str(tmp_path))
    assert main(["SPARSERL_ROLL"]) == 0
    assert f"{CHECKOUTS['SPARSERL_ROLL'].commit} was tried" in capsys.readouterr().err


@pytest.mark.parametrize(("setting", "outcome"), [("", pytest.skip.Exception), ("required", pytest.fail.Exception)])
def test_a_wheel_that_is_not_to_be_had(monkeypatch, tmp_path, setting, outcome):
    """CI fails, instead of leaving out a framework that it should test."""
    monkeypatch.setattr(wheels, "CACHE", tmp_path)
    monkeypatch.setenv("SPARSERL_WHEELS", setting)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    for find in (wheels.wheel, lambda *_: wheels.installed("no-such-framework==1")):
        with pytest.raises(outcome):
            find("no-such-framework", "1")
