"""Packages that load a name when it is first used, so that importing them costs next to nothing."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence


def loader(
    package: str, names: Mapping[str, Iterable[str]] | None = None, modules: Iterable[str] = ()
) -> Callable[[str], object]:
    """The `__getattr__` of a package.

    Args:
        package: The full name of the package.
        names: What it offers, by the module in the package that defines it.
        modules: Modules in the package that it offers themselves.

    Example:
        >>> load = loader("importlib", {"util": ["find_spec"]}, modules=["abc"])
        >>> load("find_spec").__name__, load("abc").__name__
        ('find_spec', 'importlib.abc')
    """
    module_of = {name: module for module, own in (names or {}).items() for name in own}
    offered_modules = frozenset(modules)

    def load(name: str) -> object:
        if name in offered_modules:
            return importlib.import_module(f"{package}.{name}")
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f"{package}.{module_of[name]}"), name)
        setattr(sys.modules[package], name, value)
        return value

    return load


def lister(package: str, names: Iterable[str]) -> Callable[[], Sequence[str]]:
    """The `__dir__` of such a package: what it has loaded, and these names."""
    return lambda: sorted({*vars(sys.modules[package]), *names})
