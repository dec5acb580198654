"""The catalogue of mutants fits the code, and code is found whatever its layout is."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.mutants.catalogue import MUTANTS, PACKAGE, ROOT, lost
from tests.mutants.tokens import places_of, replaced, tokens_of

CODE = """
def f(a, b):
    if a:  # a comment
        return g(
            a,
            b,
        )
    return a
"""


def test_every_mutant_has_one_place():
    """After a rename, `python -m tests.mutants reanchor --write` finds most of them again."""
    assert lost(MUTANTS) == {}


def test_every_mutant_changes_something():
    for mutant in MUTANTS:
        assert [t.text for t in tokens_of(mutant.old)] != [t.text for t in tokens_of(mutant.new)], mutant.name
        assert (ROOT / "tests" / mutant.tests.file).exists(), mutant.name


def test_mutants_use_names_that_exist(tmp_path):
    """A mutant that fails for want of a name would be noticed by any test."""
    for number, mutant in enumerate(MUTANTS):
        broken = replaced((PACKAGE / mutant.file).read_text(), mutant.old, mutant.new)
        (tmp_path / f"{number}.py").write_text(f"# {mutant.name}\n{broken}")
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F821", "--quiet", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_names_tell_mutants_apart():
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)


@pytest.mark.parametrize(
    ("fragment", "count"),
    [("return g(a, b)", 1), ("return  g(\n  a, b,)", 1), ("return a", 1), ("return", 2), ("return g(b, a)", 0)],
)
def test_layout_does_not_matter(fragment, count):
    """White space, line breaks, comments and the comma that formatters add are not compared; all else is."""
    assert len(places_of(fragment, tokens_of(CODE))) == count


def test_what_is_put_in_is_indented_as_what_it_replaces():
    new = replaced(CODE, "return g(a, b)", "b += 1\nif b:\n    return b")
    assert "        b += 1\n        if b:\n            return b\n    return a\n" in new
    compile(new, "code", "exec")


def test_what_stands_twice_is_not_replaced():
    with pytest.raises(ValueError, match="stands 2 times"):
        replaced(CODE, "return", "pass")
