"""How the source reads: one statement a line, and a class name that means one thing."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import pytest

import sparserl

ROOT = Path(sparserl.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
USERS_NAMES = {"SparserlEngine"}  # frameworks look for a class of this name in a module of its own for each


def parallel(node):
    """Whether a statement assigns several values that have nothing to do with each other."""
    if not (isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple)):
        return False
    target = node.targets[0]
    if not isinstance(target, ast.Tuple) or any(isinstance(part, ast.Starred) for part in target.elts):
        return False
    names = {ast.unparse(part) for part in target.elts}
    used = {
        ast.unparse(part) for part in ast.walk(node.value) if isinstance(part, ast.Name | ast.Attribute | ast.Subscript)
    }
    return not names & used


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        ("a, b = 1, 2", True),
        ("a, b = b, a", False),
        ("a, b = b, a % b", False),
        ("a, b = pair()", False),
        ("*_, a, b = '', *parts", False),
    ],
)
def test_what_is_a_parallel_assignment(statement, expected):
    """Swaps and unpacking are none."""
    assert parallel(ast.parse(statement).body[0]) == expected


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_one_statement_a_line(path):
    """No line assigns several things at once, unless it swaps or unpacks them."""
    tree = ast.parse(path.read_text())
    assert [node.lineno for node in ast.walk(tree) if parallel(node)] == []


def test_a_class_name_means_one_thing():
    """No two modules define a class of the same name."""
    modules = defaultdict(list)
    for path in FILES:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and node.name not in USERS_NAMES:
                modules[node.name].append(str(path.relative_to(ROOT)))
    assert {name: paths for name, paths in modules.items() if len(paths) > 1} == {}
