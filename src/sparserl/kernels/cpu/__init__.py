"""Kernels in Numba. Each is specified by the function of the same name in `kernels/reference.py`.

A module is loaded when it is first used, as in `cpu.changes.find(...)`: Numba takes a second to load.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from . import changes, classes, directory, entropy, llvm, marks, objects, rans

__all__ = ["changes", "classes", "directory", "entropy", "llvm", "marks", "objects", "rans"]


def __getattr__(name: str) -> ModuleType:
    if name in __all__:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
