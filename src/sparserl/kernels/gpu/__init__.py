"""Kernels in Triton. A module has the name of its twin in `kernels/cpu` where there is one.

A module is loaded when it is first used, as in `gpu.changes.find(...)`: Triton and torch are optional.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...lazy import lister, loader

if TYPE_CHECKING:
    from . import cells, changes, classes, ints, planes, quantize, rans, streams, sums, support, trial, warmup

__all__ = [
    "cells",
    "changes",
    "classes",
    "ints",
    "planes",
    "quantize",
    "rans",
    "streams",
    "sums",
    "support",
    "trial",
    "warmup",
]

if not TYPE_CHECKING:  # type checkers would take it for a promise that every name exists
    __getattr__ = loader(__name__, modules=__all__)
    __dir__ = lister(__name__, __all__)
