"""What tests of frameworks need: who lacks a checkout is told how to get it; pages name the commits that were tried."""

from __future__ import annotations

import hashlib
import io
import subprocess
import tarfile
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


def test_a_source_distribution(monkeypatch, tmp_path):
    """It is looked for where pip looks, has the bytes that the index says, and is kept; its Python files are read."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as files:
        for name in ("frame-1.10.0/setup.py", "frame-1.10.0/frame/a.py", "frame-1.10.0/frame/data.bin"):
            files.addfile(tarfile.TarInfo(name))
    digest = hashlib.sha256(packed.getvalue()).hexdigest()
    links = [f"../files/frame-{version}.tar.gz#sha256={digest}" for version in ("1.10.0", "1.9.0", "2.0.0rc1")]
    answers = {"frame/": "".join(f'<a href="{link}">a file</a>' for link in links).encode()}
    answers |= {"files/frame-1.10.0.tar.gz": packed.getvalue(), "files/frame-1.9.0.tar.gz": b"damaged"}

    def urlopen(asked, **_):
        url = getattr(asked, "full_url", asked)
        return io.BytesIO(answers[url.removeprefix("http://index/").partition("#")[0]])

    monkeypatch.setattr(wheels, "CACHE", tmp_path)
    monkeypatch.setattr(wheels, "urlopen", urlopen)
    monkeypatch.setenv("PIP_INDEX_URL", "http://index")
    assert wheels.releases("frame") == ["1.9.0", "1.10.0"]
    with pytest.raises(AssertionError, match="other bytes than the index says"):
        wheels.sdist("frame", "1.9.0")
    assert wheels.sdist("frame", "1.10.0").names() == ["frame/a.py"]
    answers.clear()
    wheels.sdist.cache_clear()
    assert wheels.sdist("frame", "1.10.0").names() == ["frame/a.py"]


@pytest.mark.parametrize(("setting", "outcome"), [("", pytest.skip.Exception), ("required", pytest.fail.Exception)])
def test_a_wheel_that_is_not_to_be_had(monkeypatch, tmp_path, setting, outcome):
    """CI fails, instead of leaving out a framework that it should test."""
    monkeypatch.setattr(wheels, "CACHE", tmp_path)
    monkeypatch.setenv("SPARSERL_WHEELS", setting)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:1")
    for find in (wheels.wheel, wheels.sdist, lambda *_: wheels.installed("no-such-framework==1")):
        with pytest.raises(outcome):
            find("no-such-framework", "1")
