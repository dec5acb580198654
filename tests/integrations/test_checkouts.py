"""Who has no checkout of a framework is told how to get it; pages name the commits that were tried."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.integrations.checkouts import CHECKOUTS, main

PAGES = Path(__file__).parents[2] / "docs/how-to/integrations"


@pytest.mark.parametrize("variable", CHECKOUTS)
def test_pages_name_commits(variable):
    checkout = CHECKOUTS[variable]
    page = (PAGES / checkout.page).read_text()
    assert f"`{checkout.commit[:12]}`" in page
    assert f"https://github.com/{checkout.repository})" in page


def test_no_checkout(monkeypatch, capsys, tmp_path):
    for folder in (None, "", tmp_path / "nothing"):
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
