"""What tests of GPU kernels share: processes of their own, Triton's interpreter, and its compiler without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run(*command, **env):
    """What Python prints, in a process that finds this code, with some variables of its environment."""
    path = os.pathsep.join((str(ROOT / "src"), str(ROOT)))
    env = {**os.environ, "PYTHONPATH": path, **env}
    done = subprocess.run([sys.executable, *command], env=env, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-4000:]
    return done.stdout


def streams_of(directory, bucket):
    """Coder, and offset and length of each chunk, by stream."""
    out = {}
    columns = directory.bucket, directory.stream, directory.coder, directory.offset, directory.length
    for b, stream, coder, at, size in zip(*(column.tolist() for column in columns), strict=True):
        if b == bucket:
            out.setdefault(stream, (coder, []))[1].append((at, size))
    return out


def hasten_interpreter() -> None:
    """Have Triton interpret the same kernels in half the time, in a process that does nothing else.

    Sums wrap on purpose in these kernels: nothing looks for overflows. Triton exchanges the functions of its language
    at every call of a function in a kernel; here once for every module of kernels, and they stay exchanged.
    """
    import torch
    from triton.runtime import interpreter

    exchange = interpreter._patch_lang
    exchanged = set()
    np_dtype = interpreter._get_np_dtype
    np_dtypes = {}

    def exchange_once(function):
        if function.__module__ not in exchanged:
            exchange(function)
            exchanged.add(function.__module__)
        return interpreter._LangPatchScope()  # in which nothing is to be restored

    def remembered_np_dtype(dtype):
        if dtype.scalar.name not in np_dtypes:
            np_dtypes[dtype.scalar.name] = np_dtype(dtype)
        return np_dtypes[dtype.scalar.name]

    torch.set_num_threads(1)
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)
    interpreter._patch_lang = exchange_once
    interpreter._get_np_dtype = remembered_np_dtype


def only_compile(capability: int) -> set[str]:
    """From now on calls of kernels, on CPU tensors, compile them for a GPU and do nothing else.

    Returns the names of those that were called, as they come.
    """
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    class Compiler:
        def get_current_target(self):
            return GPUTarget("cuda", capability, 32)

        def get_current_device(self):
            return 0

        def get_current_stream(self, device=None):
            return 0

    driver.set_active(Compiler())
    run, made = JITFunction.run, set()

    def instead(self, *args, grid, warmup, **options):
        made.add(self.__name__)
        return run(self, *args, grid=grid, warmup=True, **options)

    JITFunction.run = instead
    return made
