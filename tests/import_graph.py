"""The imports between the files of a package, read from its source."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple


class Import(NamedTuple):
    """One file imports another; both are named as modules inside the package."""

    module: str
    line: int
    imported: str


def modules(root: Path) -> dict[str, Path]:
    """Every file of a package by its dotted name inside it; the package's own file is `__init__`."""
    return {_name(path.relative_to(root)): path for path in sorted(root.rglob("*.py"))}


def imports(root: Path) -> list[Import]:
    """All imports between files of a package, at module level and inside functions.

    What only type checkers see does not count, except in packages that load their names on first use: there it is the
    list of what they load.
    """
    files = modules(root)
    return [
        Import(module, line, imported)
        for module, path in files.items()
        for line, imported in _imported(root.name, files, module, ast.parse(path.read_text()))
        if imported != module
    ]


def circles(arrows: Iterable[tuple[str, str]]) -> list[list[str]]:
    """Groups of nodes that can all be reached from one another."""
    targets: dict[str, set[str]] = {}
    for start, end in arrows:
        targets.setdefault(start, set()).add(end)
        targets.setdefault(end, set())
    reach = {node: _reachable(node, targets) for node in targets}
    groups = {tuple(sorted(other for other in reach[node] if node in reach[other])) for node in targets}
    return sorted(list(group) for group in groups if len(group) > 1)


def _reachable(start: str, targets: Mapping[str, set[str]]) -> set[str]:
    """All nodes that can be reached from one."""
    seen: set[str] = set()
    waiting = [start]
    while waiting:
        for node in targets[waiting.pop()] - seen:
            seen.add(node)
            waiting.append(node)
    return seen


def _name(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def _imported(package: str, files: Mapping[str, Path], module: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and module of everything that a file imports from its own package."""
    inside = () if module == "__init__" else tuple(module.split("."))
    if files[module].name != "__init__.py":
        inside = inside[:-1]
    for node in _counted(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                first, *rest = alias.name.split(".")
                if first == package:
                    yield node.lineno, _nearest(files, rest)
        elif isinstance(node, ast.ImportFrom):
            start = _start(package, inside, node)
            if start is not None:
                for alias in node.names:
                    yield node.lineno, _nearest(files, [*start, alias.name])


def _start(package: str, inside: tuple[str, ...], node: ast.ImportFrom) -> list[str] | None:
    """Where `from X` starts inside the package; None for another package."""
    parts = node.module.split(".") if node.module else []
    if node.level:
        return [*inside[: len(inside) - node.level + 1], *parts]
    return parts[1:] if parts[:1] == [package] else None


def _nearest(files: Mapping[str, Path], parts: list[str]) -> str:
    """The file that has a name: a module, or the module that the name is defined in."""
    while parts and ".".join(parts) not in files:
        parts = parts[:-1]
    return ".".join(parts) or "__init__"


def _counted(tree: ast.Module) -> Iterator[ast.AST]:
    """All nodes that run, or whose names are loaded on first use."""
    lazy = any(_is_named(node, "__getattr__") for node in ast.walk(tree))
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        children = list(ast.iter_child_nodes(node))
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING" and not lazy:
            children = list(node.orelse)
        waiting.extend(children)


def _is_named(node: ast.AST, name: str) -> bool:
    """Whether a node makes a function of this name."""
    if isinstance(node, ast.Assign):
        return any(isinstance(target, ast.Name) and target.id == name for target in node.targets)
    return isinstance(node, ast.FunctionDef) and node.name == name
