"""Tests of weights on a GPU where there is none: Triton's interpreter runs the kernels on CPU tensors.

That takes a process of its own, in which every torch tensor passes for one on a GPU; what is in host memory is then an
array. `python -m tests.patch.gpu.test_gpu_interpreter` runs the tests of this folder, on a GPU where there is one.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from tests.patch.gpu.gpu_weights import CUDA, INTERPRETED
from tests.triton_runs import only_compile, run

pytest.importorskip("triton")
torch = pytest.importorskip("torch")


outside = pytest.mark.skipif(CUDA or INTERPRETED, reason="starts a process of its own")


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
    if CUDA:
        return run(*command, TRITON_INTERPRET="0", **env)
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
@pytest.mark.parametrize("which", ["not long", pytest.param("long", marks=pytest.mark.long)])
def test_without_kernels(which):
    """The same where kernels do not run: plain operations of torch do what must be done on a GPU."""
    assert "passed" in run_all(which, SPARSERL_GPU="off")


@outside
def test_compiled():
    """The compiler takes the kernels that are used here alone, for an H200: the interpreter accepts what it rejects."""
    assert "compiled 9 kernels" in run(__file__, "compile", TRITON_INTERPRET="0")


def compile_all():
    """Hand every kernel to the compiler."""
    from sparserl.kernels import gpu

    made = only_compile(90)
    for width in (1, 2, 4, 8):
        blocks, bits = gpu.changes.Blocks(width, [9000], "cpu"), torch.zeros(9000, dtype=gpu.ints.INTS[width])
        side, where = blocks.side([bits]), torch.zeros(64, dtype=torch.int64)
        gpu.cells.scatter(bits, where, gpu.cells.gather(bits, where))
        found = gpu.classes.LocatedChanges(where, bits, bits, gpu.changes.new_sums("cpu"))
        bad = torch.zeros(1, dtype=torch.int32)
        gpu.cells.swap(side, found, bad)
        gpu.cells.locate(blocks, side, np.array([64]), torch.zeros(64, dtype=torch.int32), bits[:64], bad)
        tiles, log = gpu.classes.Tiles.of(blocks, 16), torch.full((1,), 16, dtype=torch.int32)
        layout = gpu.classes.ChangeLayout(torch.ones(1, dtype=torch.int32), where[:1], where[:1])
        numbers = gpu.classes.ChangeNumbers(layout, torch.zeros(1, dtype=torch.int32), bits[:1], 1)
        gpu.cells.tile_positions(blocks, side, tiles, log, numbers, bad, True)
        one = np.ones(1, np.int64)
        gpu.cells.sample(blocks, side, side, blocks.bitmap(), torch.zeros(2, dtype=torch.int32), where)
        for kind in (0, 1, 2):
            gpu.cells.key_histogram(blocks, side, kind, 0 * one, one, one)
        gpu.planes.join(blocks, side, where[:width], torch.zeros(64, dtype=torch.uint8), bad)
        sums = gpu.sums.digests(blocks, side)
        gpu.sums.digest_deltas(blocks, side, side, sums)
        if width == 2:
            gpu.sums.digest_deltas(blocks, gpu.changes.Blocks(4, [9000], "cpu").side([torch.zeros(9000)]), side, sums)
    assert made == {n for m in (gpu.cells, gpu.planes, gpu.sums) for n in vars(m) if n.endswith("_kernel")}
    print("compiled", len(made), "kernels")


if __name__ == "__main__":
    if sys.argv[1:] == ["compile"]:
        compile_all()
    else:
        print(run_all("long or not long")[-8000:])
