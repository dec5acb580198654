"""Kernels in Triton. A module has the name of its twin in `kernels/cpu` where there is one.

A module is loaded when it is first used, as in `gpu.changes.find(...)`: Triton and torch are optional.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from . import cells, changes, classes, ints, planes, quantize, rans, streams, sums, support, warmup

__all__ = ["cells", "changes", "classes", "ints", "planes", "quantize", "rans", "streams", "sums", "support", "warmup"]


def __getattr__(name: str) -> ModuleType:
    if name in __all__:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
