"""After some commits, CI has run all slow checks."""

from __future__ import annotations

import itertools
import subprocess

import pytest

from tests import turns

pytest_plugins = ["pytester"]
LONG_TESTS = """
import pytest

def test_short():
    pass

@pytest.mark.long
@pytest.mark.parametrize("number", range(6))
def test_long(number):
    pass

def test_another():
    pass
"""


@pytest.mark.parametrize("one_in", [1, 3, 10])
def test_every_turn_has_its_own_checks(one_in):
    names = [f"check {number}" for number in range(100)]
    chosen = [[name for name in names if turns.has_turn(name, one_in, turn)] for turn in range(one_in)]
    assert sorted(itertools.chain(*chosen)) == sorted(names)
    assert all(chosen)


def test_each_commit_has_its_turn(monkeypatch, tmp_path):
    monkeypatch.setattr(turns, "ROOT", tmp_path)
    git = ["git", "-C", tmp_path, "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
    seen = set()
    for number in range(3):
        subprocess.run([*git, "commit", "--quiet", "--allow-empty", "--message", str(number)], check=True)
        seen.add(turns.turn())
    assert len(seen) == 3


@pytest.mark.parametrize("has_git", [True, False])
def test_checks_without_a_history(monkeypatch, tmp_path, has_git):
    """As in an unpacked archive of the sources."""
    monkeypatch.setattr(turns, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    if not has_git:
        monkeypatch.setenv("PATH", str(tmp_path))
    assert turns.turn() == 0


@pytest.mark.parametrize("text", ["0", "-3", "many"])
def test_a_number_that_makes_no_sense(text):
    with pytest.raises(ValueError, match=text):
        turns.one_in(text)


@pytest.mark.parametrize("options", [(), ("--one-in", "3"), ("--one-in-all", "3")], ids=["all", "long ones", "any"])
def test_tests_take_turns(pytester, monkeypatch, options):
    """Of long tests, or of all, some run."""
    monkeypatch.setattr(turns, "turn", lambda: 31)
    pytester.makeini("[pytest]\nmarkers = long: slow")
    hooks = "pytest_addoption, pytest_collection_modifyitems, pytest_report_header"
    pytester.makeconftest(f"from tests.conftest import {hooks}")
    module = pytester.makepyfile(LONG_TESTS).name
    result = pytester.inline_run("-p", "no:cacheprovider", *options)
    nodes = [report.nodeid for report in result.getreports() if getattr(report, "when", "") == "call"]
    short = [f"{module}::test_short", f"{module}::test_another"]
    long = [f"{module}::test_long[{number}]" for number in range(6)]
    taking_turns = {(): [], ("--one-in", "3"): long, ("--one-in-all", "3"): short + long}[options]
    left_out = [node for node in taking_turns if not turns.has_turn(node, 3, 31)]
    assert sorted(nodes) == sorted({*short, *long} - {*left_out})
    assert bool(left_out) == bool(options)
    assert nodes
