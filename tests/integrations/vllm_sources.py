"""vLLM as its source distributions have it, where it cannot be installed: what is in it, and a package to import.

In that package, vLLM's base classes and factories of weight transfer are vLLM's own files. Modules that these and the
integration import beside them are stand-ins; each has those of the imported names that vLLM's own module has.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

from tests.integrations.wheels import ROOT, sdist

PAGE = ROOT / "docs" / "how-to" / "integrations" / "vllm.md"
INTEGRATIONS = ROOT / "src" / "sparserl" / "integrations"
TRANSFER = "vllm/distributed/weight_transfer"
OWN = tuple(f"{TRANSFER}/{name}.py" for name in ("__init__", "base", "clients", "factory", "packed_tensor"))

STAND_IN = """
class {name}:
    def __init__(self, *arguments, **options):
        pass

    def __getattr__(self, name):
        return lambda *arguments, **options: None
"""


def window() -> tuple[int, int]:
    """The first and the last minor release that the page says is supported; nothing else says it to the tests."""
    match = re.search(r"vLLM 0\.(\d+) to 0\.(\d+)", PAGE.read_text())
    assert match is not None, f"{PAGE.name} does not say which releases of vLLM are supported"
    return int(match[1]), int(match[2])


Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
Used = dict[str, set[str]]  # names by the module that they are imported from


class Release:
    """One release of vLLM."""

    def __init__(self, version: str) -> None:
        self.version = version
        self._files = sdist("vllm", version)

    @functools.cached_property
    def paths(self) -> frozenset[str]:
        return frozenset(self._files.names())

    def path(self, module: str) -> str | None:
        """The file of a module."""
        stem = module.replace(".", "/")
        return next((path for path in (f"{stem}.py", f"{stem}/__init__.py") if path in self.paths), None)

    def text(self, path: str) -> str:
        return self._files.text(path)

    def tree(self, path: str) -> ast.Module:
        return self._files.tree(path)

    def names(self, module: str) -> dict[str, ast.AST]:
        """What a module defines or imports at its top level, and where."""
        path = self.path(module)
        found: dict[str, ast.AST] = {}
        for node in () if path is None else _top_level(self.tree(path).body):
            if isinstance(node, Definition):
                found[node.name] = node
            elif isinstance(node, ast.Import | ast.ImportFrom):
                found |= {alias.asname or alias.name.partition(".")[0]: node for alias in node.names}
            else:
                found |= {
                    n.id: node for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
                }
        return found

    def has(self, module: str, name: str) -> bool:
        return name in self.names(module) or self.path(f"{module}.{name}") is not None

    def definition(self, module: str, name: str) -> Definition | None:
        """A function or class, also where a module has it from another one."""
        node = self.names(module).get(name)
        if isinstance(node, Definition):
            return node
        if isinstance(node, ast.ImportFrom):
            package = module if (self.path(module) or "").endswith("/__init__.py") else module.rpartition(".")[0]
            for _ in range(node.level - 1):
                package = package.rpartition(".")[0]
            origin = ".".join(filter(None, (package if node.level else "", node.module)))
            (alias,) = (alias for alias in node.names if (alias.asname or alias.name) == name)
            return self.definition(origin, alias.name) if origin.startswith("vllm") else None
        return None

    @functools.cached_property
    def _classes(self) -> dict[str, list[str]]:
        """Where classes are defined, by their names."""
        found: dict[str, list[str]] = {}
        for path in sorted(self.paths):
            for name in re.findall(r"^class (\w+)", self.text(path), re.MULTILINE):
                found.setdefault(name, []).append(path)
        return found

    def class_body(self, name: str, path: str | None = None) -> Iterator[ast.AST]:
        """All that is in a class and in those that it is made from, by their names."""
        for at in [path] if path else self._classes.get(name, []):
            for node in self.tree(at).body:
                if isinstance(node, ast.ClassDef) and node.name == name:
                    yield from ast.walk(node)
                    for base in node.bases:
                        yield from self.class_body(getattr(base, "id", ""))

    @functools.cached_property
    def routes(self) -> dict[str, str]:
        """What a server answers, by path: the text of the function that does."""
        found = {}
        for path in self.paths:
            if path.startswith("vllm/entrypoints/") and "router." in (text := self.text(path)):
                for node in ast.walk(ast.parse(text)):
                    for call in getattr(node, "decorator_list", ()):
                        match = re.match(r"router\.(?:get|post)\('/([^']+)'", ast.unparse(call))
                        if match is not None:
                            found[match[1]] = ast.unparse(node)
        return found


def _top_level(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of a module, those in its conditions among them."""
    for node in body:
        if isinstance(node, ast.If | ast.Try | ast.With):
            for field in ("body", "orelse", "finalbody"):
                yield from _top_level(getattr(node, field, []))
        elif not isinstance(node, ast.Expr):
            yield node


def imported(tree: ast.Module) -> Used:
    """What a file imports of vLLM, by module."""
    used: Used = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm") and not node.level:
            used.setdefault(node.module, set()).update(alias.name for alias in node.names)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("vllm"):
                    used.setdefault(alias.name, set())
    return used


def integrations() -> dict[str, ast.Module]:
    """The files of this package that import vLLM."""
    trees = {path.name: ast.parse(path.read_text()) for path in sorted(INTEGRATIONS.glob("*.py"))}
    return {name: tree for name, tree in trees.items() if imported(tree)}


def missing_names(release: Release) -> list[str]:
    """Names that this package imports of vLLM, or reads in a module of it, and that a release does not have."""
    missing = []
    for file, tree in integrations().items():
        modules = _modules(release, tree)
        for module, names in imported(tree).items():
            missing += [f"{file}: {module}.{name}" for name in names if not release.has(module, name)]
            if release.path(module) is None:
                missing.append(f"{file}: {module}")
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
                module = modules[node.value.id]
                if not node.attr.startswith("__") and not release.has(module, node.attr):
                    missing.append(f"{file}: {module}.{node.attr}")
    return missing


def wrong_calls(release: Release) -> list[str]:
    """Calls of vLLM's functions in this package that a release would not take."""
    wrong = []
    for file, tree in integrations().items():
        modules = _modules(release, tree)
        origins = {name: module for module, names in imported(tree).items() for name in names}
        for call in ast.walk(tree):
            if not isinstance(call, ast.Call):
                continue
            function = call.func
            if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
                definition = release.definition(modules.get(function.value.id, ""), function.attr)
            elif isinstance(function, ast.Name) and function.id in origins:
                definition = release.definition(origins[function.id], function.id)
            else:
                definition = None
            if isinstance(definition, ast.FunctionDef) and not takes(definition, call):
                wrong.append(f"{file}: {ast.unparse(call)}")
    return wrong


def _modules(release: Release, tree: ast.Module) -> dict[str, str]:
    """The names under which a file has modules of vLLM."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm"):
            paths = {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name: module for name, module in paths.items() if release.path(module) is not None}
    return {name: module for name, module in found.items() if module.startswith("vllm")}


def takes(function: ast.AST, call: ast.Call) -> bool:
    """Whether a function can be called so. What stands behind `*` and `**` in the call is not known."""
    assert isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
    arguments = function.args
    positional = [a.arg for a in (*arguments.posonlyargs, *arguments.args) if a.arg not in ("self", "cls")]
    if any(isinstance(a, ast.Starred) for a in call.args) or any(k.arg is None for k in call.keywords):
        return True
    if len(call.args) > len(positional) and arguments.vararg is None:
        return False
    keywords = {k.arg for k in call.keywords}
    by_name = {*positional[len(call.args) :], *(a.arg for a in arguments.kwonlyargs)}
    needed = {*positional[len(call.args) : len(positional) - len(arguments.defaults)]}
    needed |= {a.arg for a, d in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if d is None}
    return needed <= keywords and (keywords <= by_name or arguments.kwarg is not None)


def write_package(release: Release, folder: Path) -> None:
    """Make a package `vllm` to import, in a folder."""
    used: Used = {}
    for tree in [*integrations().values(), *(release.tree(path) for path in OWN)]:
        for module, names in imported(tree).items():
            used.setdefault(module, set()).update(names)
    files = {path: release.text(path) for path in OWN}
    for module, names in used.items():
        path = release.path(module)
        if path is not None and path not in files:
            there = [name for name in sorted(names) if name in release.names(module)]
            files[path] = "".join(STAND_IN.format(name=name) for name in there)
        for name in names:
            part = release.path(f"{module}.{name}")
            if part is not None:
                files.setdefault(part, "")
    for path, text in files.items():
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        for parent in file.relative_to(folder).parents:
            if parent.name:
                (folder / parent / "__init__.py").touch()
        file.write_text(text)
