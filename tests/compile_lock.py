"""Processes of tests begin together and need the same kernels: one compiles each, and the others load what it saved."""

from __future__ import annotations

import contextlib
import fcntl
from pathlib import Path

from numba.core.compiler_lock import global_compiler_lock
from numba.core.dispatcher import Dispatcher


def serialize_compiling() -> None:
    """From now on in this process, a kernel is compiled by nobody else meanwhile."""
    work, held = Dispatcher.compile, set()

    def compile(self, sig):
        folder, code = getattr(self._cache, "cache_path", None), self.py_func.__code__
        name = f"{self.py_func.__module__}.{self.py_func.__qualname__}.{code.co_firstlineno}.turn"
        if folder is None or name in held:  # kernels that call themselves
            return work(self, sig)
        with global_compiler_lock, contextlib.ExitStack() as stack:
            with contextlib.suppress(OSError):
                fcntl.flock(stack.enter_context((Path(folder) / name).open("a")), fcntl.LOCK_EX)
            held.add(name)
            stack.callback(held.discard, name)
            return work(self, sig)

    Dispatcher.compile = compile
