"""Kernels in Numba. Each is specified by the function of the same name in `kernels/reference.py`.

A module is loaded when it is first used, as in `cpu.changes.find(...)`: Numba takes a second to load.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...lazy import lister, loader

if TYPE_CHECKING:
    from . import changes, classes, directory, entropy, llvm, marks, objects, rans

__all__ = ["changes", "classes", "directory", "entropy", "llvm", "marks", "objects", "rans"]

if not TYPE_CHECKING:  # type checkers would take it for a promise that every name exists
    __getattr__ = loader(__name__, modules=__all__)
    __dir__ = lister(__name__, __all__)
