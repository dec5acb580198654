"""Tests of weights on a GPU where there is none: Triton's interpreter runs the kernels on CPU tensors.

That takes a process of its own, in which every torch tensor passes for one on a GPU; what is in host memory is then an
array.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.patch.gpu.gpu_weights import CUDA, INTERPRETED
from tests.triton_runs import run

pytest.importorskip("triton")
torch = pytest.importorskip("torch")


outside = pytest.mark.skipif(
    CUDA or INTERPRETED, reason="starts processes with these tests; `make device` does where there is a GPU"
)


def run_all(which, **env):
    command = (
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "-m",
        which,
        str(Path(__file__).parent),
    )
    return run(*command, TRITON_INTERPRET="1", SPARSERL_THREADS="1", **env)  # the interpreter takes one at a time


@outside
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "which",
    [
        pytest.param("not long", marks=pytest.mark.long(every_time=True)),  # only here CI runs the kernels for GPUs
        pytest.param("long", marks=pytest.mark.long),
    ],
)
def test_interpreted(which):
    """The tests of this folder pass in Triton's interpreter."""
    assert "passed" in run_all(which)


@outside
@pytest.mark.long
@pytest.mark.parametrize("which", ["not long", "long"])
def test_without_kernels(which):
    """The same where kernels do not run: plain operations of torch do what must be done on a GPU."""
    assert "passed" in run_all(which, SPARSERL_GPU="off")
