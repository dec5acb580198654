"""What importing loads, what the root offers, which way imports point, and how long files are."""

from __future__ import annotations

import ast
import importlib
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import sparserl
from tests.import_graph import Import, circles, imports, modules

ROOT = Path(sparserl.__file__).parent
TESTS = Path(__file__).parent
FILES = modules(ROOT)


@cache
def all_imports() -> list[Import]:
    return imports(ROOT)


@cache
def all_arrows() -> set[tuple[str, str]]:
    return {(module, imported) for module, _, imported in all_imports()}


# A room imports from the rows above its own, and from itself. A new room takes a row here.
# `session/__init__` and the like are doors: they offer what the rooms behind them have.
ROWS: tuple[tuple[str, ...], ...] = (
    ("lazy", "errors"),
    ("files", "humanize", "kernels"),
    ("parallel", "kernels.cpu", "kernels.gpu"),
    ("weights",),
    ("codec",),
    ("wire",),
    ("plan",),
    ("patch",),
    ("sources",),
    ("targets", "transport.stores", "transport.groups"),
    ("transport/__init__", "transport.server", "session"),
    ("session.store",),
    ("session.group",),
    ("session/__init__",),
    ("record", "metrics"),
    ("__init__",),
    ("integrations", "testing"),
    ("cli",),
    ("__main__",),
)
RANK = {room: row for row, rooms in enumerate(ROWS) for room in rooms}

# What is still to be mended: these lists may only become shorter.
KNOWN_UPWARD: set[tuple[str, str]] = set()
MOST_LINES = 500

# Neither `import sparserl` nor `sparserl --help` needs any of these; a session or a kernel loads its own.
HEAVY = (
    *("numba", "llvmlite", "triton", "torch", "matplotlib", "vllm", "sglang", "transformers", "ray"),
    *("safetensors", "ml_dtypes", "obstore", "cryptography", "starlette", "uvicorn", "zstandard", "asyncio", "http"),
    *("prometheus_client", "tensorboard", "wandb"),
)


def run(code):
    """What a fresh interpreter prints that sees the same sparserl as this one."""
    env = {**os.environ, "PYTHONPATH": str(ROOT.parent)}
    process = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    return process.stdout.strip()


def loaded(statement):
    """The modules that a statement loads in a fresh interpreter."""
    return set(json.loads(run(f"import json, sys\n{statement}\nprint(json.dumps(list(sys.modules)))")))


def test_import_loads_the_root_alone():
    """`import sparserl` loads the file that loads others, no dependency, and fewer modules than NumPy has."""
    names = loaded("import sparserl")
    assert {name for name in names if name.partition(".")[0] == "sparserl"} == {"sparserl", "sparserl.lazy"}
    assert names.isdisjoint({*HEAVY, "numpy", "typer", "rich"})
    assert len(names) < len(loaded("import numpy"))


def test_all_public_names_load_without_kernels_or_torch():
    """Every public name can be looked at, and subclassed, before a kernel is compiled or torch is there."""
    names = loaded("import sparserl\nfor name in sparserl.__all__: getattr(sparserl, name)")
    assert names.isdisjoint({"numba", "llvmlite", "triton", "torch", "transformers", "obstore", "typer", "rich"})


@pytest.mark.parametrize("package", ["sources", "targets", "session"])
def test_packages_load_a_name_when_it_is_used(package):
    """A package loads none of its files, and lists and loads what it offers; type checkers see the same."""
    name = f"sparserl.{package}"
    assert run(f"import {name} as package; print({{*package.__all__}} <= {{*dir(package)}})") == "True"
    assert {other for other in loaded(f"import {name}") if other.startswith(f"{name}.")} == set()
    offered = importlib.import_module(name)
    names = [each for own in offered._NAMES.values() for each in own]
    assert sorted(names) == offered.__all__
    tree = ast.parse(Path(offered.__file__).read_text())
    (typed,) = (node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    by_module = {each.module: tuple(alias.name for alias in each.names) for each in typed.body}
    assert by_module == offered._NAMES


@pytest.mark.long
def test_no_module_is_hidden_behind_another_name():
    """`import sparserl.a.b as b` gives the module, in every package: no function or class there has its name."""
    code = """
import importlib, json, pkgutil, sparserl
from types import ModuleType

def hidden(package):
    offered = {*vars(package), *getattr(package, "__all__", ())}
    for info in pkgutil.iter_modules(package.__path__):
        name = f"{package.__name__}.{info.name}"
        if info.name in offered and not isinstance(getattr(package, info.name), ModuleType):
            yield name
        if info.ispkg:
            yield from hidden(importlib.import_module(name))

print(json.dumps(list(hidden(sparserl))))
"""
    assert {name.removeprefix("sparserl.") for name in json.loads(run(code))} == set()


def test_working_without_torch():
    """NumPy weights are diffed and applied without torch being imported, or there."""
    code = """
import sys
sys.modules["torch"] = None
import numpy as np, sparserl
old, new = {"w": np.zeros(9, np.float32)}, {"w": np.ones(9, np.float32)}
sparserl.diff(old, new).apply(old)
print(bool((old["w"] == new["w"]).all()))
"""
    assert run(code) == "True"


def test_the_public_names():
    """These and no others, in order; each is there."""
    assert sparserl.__all__ == [
        "Applied",
        "BackgroundPublish",
        "Bits",
        "DType",
        "Digest",
        "Entry",
        "GroupPublisher",
        "GroupSubscriber",
        "Part",
        "Patch",
        "Pin",
        "Publisher",
        "Region",
        "Relay",
        "Shards",
        "SparserlError",
        "Stats",
        "Subscriber",
        "SyncReport",
        "TensorSpec",
        "TensorTable",
        "diff",
        "digest",
        "errors",
        "merge",
        "metrics",
        "pin",
        "pins",
        "sources",
        "squash",
        "targets",
        "tensor_table",
        "unpin",
    ]
    assert sparserl.__all__ == sorted(sparserl.__all__)
    assert set(sparserl.__all__) <= set(dir(sparserl))
    assert callable(sparserl.digest)
    assert callable(sparserl.diff)
    with pytest.raises(AttributeError, match="no attribute 'patches'"):
        sparserl.patches  # noqa: B018


def test_each_public_name_is_loaded_alone():
    """Whichever name is looked up first, it is there, and the same object as ever."""
    code = "import sparserl; assert sparserl.{0} is sparserl.{0}; from sparserl import {0}; assert {0} is sparserl.{0}"
    for name in ("digest", "Patch", "errors", "sources", "targets", "testing"):
        run(code.format(name))


@pytest.mark.parametrize("name", ["errors", "metrics", "sources", "targets", "testing"])
def test_public_modules(name):
    """Public modules are found as modules, by import and as attributes."""
    module = importlib.import_module(f"sparserl.{name}")
    assert getattr(sparserl, name) is module
    assert module.__name__ == f"sparserl.{name}"


@pytest.mark.parametrize("module", sorted(m for m, path in FILES.items() if path.name == "__init__.py"))
def test_every_package_offers_what_is_there(module):
    """`__all__` of every package is true."""
    package = importlib.import_module("sparserl" if module == "__init__" else f"sparserl.{module}")
    assert [name for name in getattr(package, "__all__", []) if not hasattr(package, name)] == []


def room(module):
    """The room a file belongs to: its package; a file of the root is a room of its own."""
    if FILES[module].name != "__init__.py":
        return module.rpartition(".")[0] or module
    return f"{module}/__init__" if f"{module}/__init__" in RANK else module


@pytest.mark.parametrize("module", sorted(FILES))
def test_imports_point_one_way(module):
    """No file imports what stands below its room in the table, nor a neighbour in its row."""
    importer = room(module)
    for _, line, imported in (item for item in all_imports() if item.module == module):
        provider = room(imported)
        assert {importer, provider} <= RANK.keys(), f"{module}:{line}: a room has no row in the table of rooms"
        if (module, imported) not in KNOWN_UPWARD:
            allowed = provider == importer or RANK[provider] < RANK[importer]
            assert allowed, f"{module}:{line}: {importer} imports {provider}"


def test_exceptions_still_exist():
    """An import that is allowed against its direction is there."""
    assert all_arrows() >= KNOWN_UPWARD


def test_no_circles():
    """No files import one another in a circle, at module level or inside functions."""
    assert circles(all_arrows()) == []


def test_circles_are_found(tmp_path):
    """A circle through a function, a package and a lazily loaded name is seen; one for type checkers alone is none."""
    package = tmp_path / "house"
    (package / "room").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "room" / "__init__.py").write_text(
        "if TYPE_CHECKING:\n    from .a import x\ndef __getattr__(name): ...\n"
    )
    (package / "room" / "a.py").write_text("def f():\n    from house import room\n    return room.x\n")
    (package / "b.py").write_text("if TYPE_CHECKING:\n    from . import c\nelse:\n    import house.room.a\n")
    (package / "c.py").write_text("from .b import y\n")
    arrows = {(module, imported) for module, _, imported in imports(package)}
    assert arrows == {("room", "room.a"), ("room.a", "room"), ("b", "room.a"), ("c", "b")}
    assert circles(arrows) == [["room", "room.a"]]


def test_the_table_has_no_empty_rooms():
    """Every room in the table exists."""
    assert set(RANK) <= {room(module) for module in FILES}


def test_the_root_is_small():
    """At most seven loose modules stand in the root, `__main__` apart."""
    loose = {path.stem for path in ROOT.glob("*.py")} - {"__main__"}
    assert len(loose) <= 7, loose


def test_files_are_short():
    """Files have at most 500 lines, kernels apart; those of tests, too."""
    assert {name for name in long_files(ROOT) if not name.startswith("kernels/")} == set()
    assert long_files(TESTS) == set()


def long_files(folder):
    """The Python files of a folder that are longer than they may be."""
    paths = {str(path.relative_to(folder)): path for path in folder.rglob("*.py")}
    return {name for name, path in paths.items() if len(path.read_text().splitlines()) > MOST_LINES}
