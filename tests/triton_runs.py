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
    """Sums wrap on purpose in these kernels, and looking for overflows takes a third of the interpreter's time."""
    import torch
    from triton.runtime.interpreter import interpreter_builder

    torch.set_num_threads(1)
    interpreter_builder.options = replace(interpreter_builder.options, sanitize_overflow=False)


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
