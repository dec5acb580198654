"""Compiling is announced, and what is compiled runs on any processor."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import sparserl
from sparserl.kernels.cpu.compiling import _private_folder

COMPILES_ONE = """
from numba.core import event
with event.install_recorder("numba:compile") as recorder:
    import numpy as np
    from sparserl.kernels import cpu
    where = np.array([3], np.uint32)
    cpu.changes.ascending(np.array([1]), np.array([9]), where.ctypes.data)
print(sum(row.is_start and row.data["dispatcher"].py_func.__name__ == "ascending" for _, row in recorder.buffer))
"""


def start(code: str, **environment: str) -> subprocess.Popen[str]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment}
    return subprocess.Popen(
        [sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finish(process: subprocess.Popen[str]) -> tuple[str, str]:
    """What a process printed, and what it said on stderr."""
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    return out, err


def test_compiling_is_announced(tmp_path):
    """Once, to whoever reads stderr, be it a terminal or not; and not where nothing is compiled."""
    for says in (1, 0):
        out, err = finish(start(COMPILES_ONE, NUMBA_CACHE_DIR=str(tmp_path)))
        assert int(out) == says
        assert err.count("compiles its kernels") == says


@pytest.mark.long
def test_ranks_that_start_together_compile_once(tmp_path):
    """One of them compiles a kernel; the others wait, and load what it has saved."""
    ranks = [start(COMPILES_ONE, NUMBA_CACHE_DIR=str(tmp_path)) for _ in range(3)]
    assert sorted(int(finish(rank)[0]) for rank in ranks) == [0, 0, 1]


@pytest.mark.long
def test_a_read_only_environment_has_a_folder_for_kernels(tmp_path):
    """Where neither the package nor the home directory can be written, a folder of our own is used, and named."""
    package = tmp_path / "site" / "sparserl"
    shutil.copytree(Path(sparserl.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    (package / "kernels/cpu/__pycache__").write_text("in the way")
    environment = {
        "PYTHONPATH": os.pathsep.join([str(package.parent), *sys.path]),
        "PYTHONDONTWRITEBYTECODE": "1",
        "HOME": "/dev/null",
        "XDG_CACHE_HOME": "/dev/null",
        "TMPDIR": str(tmp_path),
    }
    for compiled in (1, 0):
        out, err = finish(start(COMPILES_ONE, **environment))
        assert int(out) == compiled
        assert f"keeps its compiled kernels in {tmp_path}/sparserl-kernels-{os.getuid()}" in err
    assert (tmp_path / f"sparserl-kernels-{os.getuid()}").stat().st_mode & 0o077 == 0
    nowhere = f"import tempfile; tempfile.tempdir = '/proc/nowhere'\n{COMPILES_ONE}"
    assert int(finish(start(nowhere, **environment))[0]) == 1  # compiled, and not kept


def test_a_folder_that_others_can_write_is_not_used(tmp_path):
    """What lies in it is run: someone else could have put it there."""
    ours = tmp_path / "kernels"
    assert _private_folder(ours) == _private_folder(ours) == str(ours)
    ours.chmod(0o777)
    other = _private_folder(ours)
    assert other != str(ours)
    assert Path(other).stat().st_mode & 0o077 == 0
    link = tmp_path / "link"
    link.symlink_to(other)
    assert _private_folder(link) not in (str(link), other)


SESSIONS = """
from numba.core import event
with event.install_recorder("numba:compile") as recorder:
    import tempfile
    import numpy as np, sparserl
    from sparserl.codec import PROFILES
    from sparserl.patch.measuring import synthetic
    from sparserl.weights.dtypes import BY_NAME
    dtype = BY_NAME["bfloat16"]
    old, new = synthetic(3_000_000, 0.02, 1)
    for profile in ("auto", *PROFILES):
        weights = {"a": sparserl.Bits(old.copy(), dtype), "b": sparserl.Bits(old[:999].copy(), dtype)}
        mine = {name: sparserl.Bits(np.zeros_like(bits.array), dtype) for name, bits in weights.items()}
        with (
            tempfile.TemporaryDirectory() as folder,
            sparserl.Publisher(folder, weights, profile=profile, ladder=(2, 4), anchor_after=0.01) as publisher,
            sparserl.Subscriber(folder, mine, audit_every=1) as subscriber,
        ):
            for bits in (old, new, old, new):
                weights["a"].array[:] = bits
                publisher.publish()
                subscriber.sync()
            assert (mine["a"].array == new).all()
print([row.data["dispatcher"].py_func.__name__ for _, row in recorder.buffer if row.is_start])
"""


@pytest.mark.long
def test_after_a_warmup_nothing_is_compiled(tmp_path):
    """By sessions in any profile, whatever they do."""
    kernels = {"NUMBA_CACHE_DIR": str(tmp_path)}
    warmup = "from sparserl.cli.app import app; app(['warmup', '--json', '--no-gpu', '--dtype', 'bfloat16'])"
    first = json.loads(finish(start(warmup, **kernels))[0])
    assert first["functions"] > 40
    assert first["folder"].startswith(str(tmp_path))
    again = json.loads(finish(start(warmup, **kernels))[0])
    assert again["functions"] == 0
    assert finish(start(SESSIONS, **kernels)) == ("[]\n", "")


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
