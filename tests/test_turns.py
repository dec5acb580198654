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

@pytest.mark.long(every_time=True)
def test_every_time():
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


@pytest.mark.parametrize("is_all", [True, False], ids=["all", "one in three"])
def test_long_tests_take_turns(pytester, monkeypatch, is_all):
    """Tests that are not long, and those for every time, always run."""
    monkeypatch.setattr(turns, "turn", lambda: 31)
    pytester.makeini("[pytest]\nmarkers = long(every_time): slow")
    hooks = "pytest_addoption, pytest_collection_modifyitems, pytest_report_header"
    pytester.makeconftest(f"from tests.conftest import {hooks}")
    pytester.makepyfile(LONG_TESTS)
    result = pytester.inline_run("-p", "no:cacheprovider", *(() if is_all else ("--one-in", "3")))
    nodes = [report.nodeid for report in result.getreports() if getattr(report, "when", "") == "call"]
    long = [f"{nodes[0].split('::')[0]}::test_long[{number}]" for number in range(6)]
    in_turn = [node for node in long if is_all or turns.has_turn(node, 3, 31)]
    assert [node.split("::")[1] for node in nodes] == [
        "test_short",
        *(n.split("::")[1] for n in in_turn),
        "test_every_time",
    ]
    assert 0 < len(in_turn) < 6 or is_all
