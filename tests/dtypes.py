"""Which dtypes the short tests use: each further one has kernels of its own, which take seconds to compile."""

from __future__ import annotations

import re

import pytest

from sparserl.weights.dtypes import DTYPES

COMMON = ("bfloat16", "float32", "uint8")
_NAMES = [dtype.name for dtype in DTYPES]


def each_dtype() -> list[object]:
    """All dtypes as parameters; those that are not common are left to `make long`."""
    return [pytest.param(dtype, marks=long_if_rare(dtype.name), id=dtype.name) for dtype in DTYPES]


def long_if_rare(label: str) -> list[pytest.MarkDecorator]:
    """The mark of a test whose label names a dtype that is not common."""
    names = set(re.split(r"[^A-Za-z0-9_]", label)).intersection(_NAMES)
    return [pytest.mark.long] if names.difference(COMMON) else []
