"""After some commits, CI has run all slow checks."""

from __future__ import annotations

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


@pytest.fixture
def commits(monkeypatch):
    """Sets how many commits there are."""

    def set_count(count):
        done = subprocess.CompletedProcess([], 0, stdout=f"{count}\n")
        monkeypatch.setattr(turns.subprocess, "run", lambda *_, **__: done)

    return set_count


@pytest.mark.parametrize("one_in", [1, 3, 9])
def test_as_many_commits_run_all_checks(commits, one_in):
    chosen = []
    for count in range(41, 41 + one_in):
        commits(count)
        chosen += turns.in_turn(range(100), one_in)
    assert sorted(chosen) == [*range(100)]


def test_checks_without_a_history(monkeypatch, tmp_path):
    """As in an unpacked archive of the sources."""
    monkeypatch.setattr(turns, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert turns.in_turn(range(9), 3) == [0, 3, 6]


@pytest.mark.parametrize(
    ("options", "numbers"), [((), range(6)), (("--one-in", "3"), [1, 4])], ids=["all", "one in three"]
)
def test_long_tests_take_turns(pytester, commits, options, numbers):
    """Tests that are not long, and those for every time, always run."""
    commits(31)
    pytester.makeini("[pytest]\nmarkers = long(every_time): slow")
    pytester.makeconftest("from tests.conftest import pytest_addoption, pytest_collection_modifyitems")
    pytester.makepyfile(LONG_TESTS)
    result = pytester.inline_run("-p", "no:cacheprovider", *options)
    names = [report.nodeid.split("::")[1] for report in result.getreports() if getattr(report, "when", "") == "call"]
    assert names == ["test_short", *(f"test_long[{number}]" for number in numbers), "test_every_time"]
