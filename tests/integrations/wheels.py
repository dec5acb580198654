"""Packages of the frameworks that adapters are written for: fetched once, without their dependencies, and only read.

And the entry points by which frameworks find the adapters.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import html
import io
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path
from typing import NoReturn
from urllib.parse import urljoin
from urllib.request import Request, urlopen

import pytest

ROOT = Path(__file__).resolve().parents[2]
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sparserl-tests"


class Wheel:
    """The Python files of one package."""

    def __init__(self, path: Path) -> None:
        self._zip = zipfile.ZipFile(path)

    def names(self) -> list[str]:
        return self._zip.namelist()

    def text(self, name: str) -> str:
        return self._zip.read(name).decode()

    @functools.cache  # noqa: B019  # there are few of them
    def tree(self, name: str) -> ast.Module:
        return ast.parse(self.text(name))


@functools.cache
def wheel(project: str, version: str, *platform: str) -> Wheel:
    """A wheel from the package index, or from an earlier run; the test is skipped where there is no index.

    platform: options of pip, for a wheel that need not fit this machine.
    """
    pattern = f"{project}-{version}-*.whl"
    if not (found := sorted(CACHE.glob(pattern))):
        CACHE.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"]
        command += ["--ignore-requires-python", "-d", str(CACHE), f"{project}=={version}", *platform]
        try:
            said = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900).stderr
        except subprocess.TimeoutExpired:
            said = "it took too long"
        if not (found := sorted(CACHE.glob(pattern))):
            _do_without(f"no wheel of {project} {version} to be had: {_last_line(said)}")
    return Wheel(found[0])


@functools.cache
def sdist(project: str, version: str) -> Wheel:
    """The Python files of a source distribution, of which nothing is built: of packages that cannot be installed here.

    The test is skipped where there is no index.
    """
    path = CACHE / f"{project}-{version}.zip"
    if not path.exists():
        link = next((link for link in _links(project) if f"/{project}-{version}.tar.gz" in link), None)
        if link is None:
            _do_without(f"the package index has no source distribution of {project} {version}")
        try:
            with urlopen(link, timeout=300) as answer:
                data = answer.read()
        except OSError as error:
            _do_without(f"no source distribution of {project} {version} to be had: {error}")
        _, _, digest = link.partition("#sha256=")
        assert digest in ("", hashlib.sha256(data).hexdigest()), f"{link} has other bytes than the index says"
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=CACHE) as made:
            with (
                tarfile.open(fileobj=io.BytesIO(data)) as files,
                zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as out,
            ):
                for member in files:
                    name = member.name.partition("/")[2]
                    if name.startswith(f"{project}/") and name.endswith(".py"):
                        out.writestr(name, files.extractfile(member).read())  # type: ignore[union-attr]
            with contextlib.suppress(FileExistsError):  # another process was first
                os.link(made.name, path)
    return Wheel(path)


def releases(project: str) -> list[str]:
    """The versions that the package index has source distributions of, oldest first; without pre-releases."""
    names = {link.partition("#")[0].rpartition("/")[2] for link in _links(project)}
    found = {match[1] for name in names if (match := re.fullmatch(rf"{project}-([\d.]+)\.tar\.gz", name))}
    return sorted(found, key=lambda version: [int(part) for part in version.split(".")])


@functools.cache
def _links(project: str) -> list[str]:
    """Where the package index that pip uses has the files of a project."""
    asking = [sys.executable, "-m", "pip", "config", "list"]
    configured = subprocess.run(asking, capture_output=True, text=True, check=False).stdout
    urls = re.findall(r"\.index-url='([^']+)'", configured)
    index = os.environ.get("PIP_INDEX_URL") or (urls or ["https://pypi.org/simple"])[-1]
    url = f"{index.rstrip('/')}/{project}/"
    try:
        with urlopen(Request(url, headers={"Accept": "text/html"}), timeout=60) as answer:
            page = answer.read().decode()
    except OSError as error:
        _do_without(f"the package index does not tell what it has of {project}: {error}")
    return [urljoin(url, html.unescape(link)) for link in re.findall(r'href="([^"]+)"', page)]


@functools.cache
def installed(*requirements: str) -> Path:
    """A folder to import packages from, without their dependencies; the test is skipped where there is no index."""
    folder = CACHE / "_".join(requirements)
    if not folder.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as made:
            command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", f"{made}/packages"]
            done = subprocess.run([*command, *requirements], capture_output=True, text=True, check=False, timeout=900)
            if done.returncode:
                _do_without(f"{requirements} cannot be installed: {_last_line(done.stderr)}")
            with contextlib.suppress(OSError):  # another process was first
                Path(made, "packages").rename(folder)
    return folder


def _do_without(reason: str) -> NoReturn:
    """Skip the test, or let it fail in CI, where there is an index."""
    if os.environ.get("SPARSERL_WHEELS") == "required":
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["nothing came"])[-1]


def definition(tree: ast.AST, *names: str) -> ast.AST:
    """A class or function by its name, or one inside another."""
    for name in names:
        found = [n for n in ast.walk(tree) if isinstance(n, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)]
        matches = [n for n in found if n.name == name and n is not tree]
        assert matches, f"there is no {name} any more"
        tree = matches[0]
    return tree


def parameters(function: ast.AST) -> list[str]:
    """The names of a function's parameters, without `self` and `cls`."""
    assert isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
    names = [a.arg for a in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)]
    return [name for name in names if name not in ("self", "cls")]


def fields(class_: ast.AST) -> set[str]:
    """The annotated fields of a class."""
    assert isinstance(class_, ast.ClassDef)
    return {n.target.id for n in class_.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}


def calls(tree: ast.AST, name: str) -> list[ast.Call]:
    """Calls of a function or method by its last name."""
    found = [n for n in ast.walk(tree) if isinstance(n, ast.Call)]
    return [c for c in found if getattr(c.func, "attr", getattr(c.func, "id", None)) == name]


def entry_point(group: str) -> str:
    """The function that this package names in a group of entry points."""
    section = (ROOT / "pyproject.toml").read_text().partition(f'[project.entry-points."{group}"]')[2]
    match = re.match(r'\s*sparserl = "([^"]+)"', section)
    assert match is not None
    return match[1]
