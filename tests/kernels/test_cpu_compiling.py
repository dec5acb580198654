"""Compiling is announced, and what is compiled runs on any processor."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

COMPILES_ONE = """
import sys
{log}
import numpy as np
from sparserl.kernels import cpu
where = np.array([3], np.uint32)
cpu.changes.ascending(np.array([1]), np.array([9]), where.ctypes.data)
"""


@pytest.mark.parametrize(("log", "says"), [("import logging; logging.basicConfig()", "compiles its kernels"), ("", "")])
def test_compiling_is_announced_to_people_and_stays_out_of_pipes(log, says, tmp_path):
    env = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    code = COMPILES_ONE.format(log=log)
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert says in done.stderr
    assert bool(says) == bool(done.stderr)


@pytest.mark.long
def test_kernels_run_on_the_plainest_processor(tmp_path):
    """Without AVX, BMI2 and all that: Numba is told to compile for a generic one, and patches come out the same."""
    code = """
import numpy as np, sparserl, sparserl.weights.dtypes, hashlib
rng = np.random.default_rng(0)
bf16 = sparserl.weights.dtypes.BY_NAME["bfloat16"]
old = (rng.normal(0, 0.02, 200_000).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
new = old.copy()
new[rng.random(old.size) < np.where((old & 0x7FFF) < 0x3B00, 0.3, 0.002)] += 1
weights = {"w": sparserl.Bits(old.copy(), bf16)}
patch = sparserl.diff(weights, {"w": sparserl.Bits(new, bf16)}, profile="ctx", threads=1)
patch.apply(weights, threads=1)
assert (weights["w"].array == new).all()
print(patch.stats().profile, hashlib.sha256(patch.to_bytes()).hexdigest())
"""
    out = []
    for there in ({}, {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": "", "NUMBA_CACHE_DIR": str(tmp_path)}):
        env = {**os.environ, **there, "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        out.append(done.stdout)
    assert out[0] == out[1]
    assert out[0].startswith("ctx ")
