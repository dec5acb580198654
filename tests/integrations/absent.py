"""Modules of frameworks that need a GPU, or have no part in a test: they can be imported, and do nothing."""

from __future__ import annotations

import importlib.machinery
import sys
import types
from importlib.abc import Loader, MetaPathFinder


def leave_out(*names: str) -> None:
    """Let modules with these names, and those below them, be empty ones; for a process of its own."""
    sys.meta_path.insert(0, _Finder(names))


class _Finder(MetaPathFinder, Loader):
    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = names

    def find_spec(self, name, path=None, target=None):
        if any(f"{name}.".startswith(f"{one}.") for one in self._names):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return _Empty(spec.name)

    def exec_module(self, module):
        pass


class _Empty(types.ModuleType):
    """Has a class under every name that is imported of it; with its objects, anything can be decorated."""

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"__init__": _ignore, "__call__": lambda self, decorated: decorated})


def _ignore(self, *args, **options):
    pass
