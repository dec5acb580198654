"""The examples in the docstrings of patches do what they say."""

from __future__ import annotations

import doctest
import importlib

import numpy as np
import pytest

import sparserl


@pytest.mark.parametrize("module", ["apply", "compare", "patch", "stats"])
def test_examples(module):
    """Every example gives what stands behind it."""
    source = importlib.import_module(f"sparserl.patch.{module}")
    done = doctest.testmod(source, extraglobs={"np": np, "sparserl": sparserl})
    assert done.attempted
    assert not done.failed
