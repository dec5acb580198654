"""What tests of GPU kernels share: processes of their own, Triton's interpreter, and its compiler without a GPU."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
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
    """Have Triton interpret the same kernels in a third of the time, in a process that does nothing else.

    Sums wrap on purpose in these kernels: nothing looks for overflows. Triton exchanges the functions of its language
    at every call of a function in a kernel; here once for every module of kernels, and they stay exchanged. What Triton
    works out of the shape of every value is remembered. Threads take turns: it can interpret only one kernel at a time.
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
    _remember_shapes()
    _take_turns(interpreter.GridExecutor)


def _take_turns(executor) -> None:
    """Let one thread at a time run a kernel."""
    turn = threading.Lock()
    execute = executor.__call__

    def execute_alone(self, *arguments, **options):
        with turn:
            return execute(self, *arguments, **options)

    executor.__call__ = execute_alone


def _remember_shapes() -> None:
    """Work out what values say of their shapes once for each shape, and the type of a tuple when it is asked for."""
    from triton.language import core

    make_block_type, make_tuple = core.block_type.__init__, core.tuple.__init__
    block_types: dict[tuple[str, tuple[int, ...]], dict[str, object]] = {}
    shapes: dict[tuple[int, ...], dict[str, object]] = {}

    def block_type(self, element_ty, shape):
        sizes = tuple(size.value if isinstance(size, core.constexpr) else size for size in shape)
        known = block_types.get((element_ty.name, sizes))
        if known is None:
            make_block_type(self, element_ty, shape)  # which refuses some
            block_types[element_ty.name, sizes] = dict(vars(self))
        else:
            vars(self).update(known, element_ty=element_ty)

    def tensor(self, handle, type):
        sizes = tuple(type.shape.values) if type.is_block() else ()
        if sizes not in shapes:
            numel = core.constexpr(math.prod(sizes))
            shapes[sizes] = {"shape": core.tuple([core.constexpr(size) for size in sizes]), "numel": numel}
        vars(self).update(shapes[sizes], handle=handle, type=type, dtype=type.scalar)

    def tuple_of_values(self, args, type=None):
        if type is None:
            self.values = list(args)
        else:
            make_tuple(self, args, type)

    def type_of_tuple(self):
        known = vars(self).get("known_type")
        if known is None:
            known = self.known_type = core._type_for_tuple_values(self.values)
        return known

    core.block_type.__init__ = block_type
    core.tensor.__init__ = tensor
    core.tuple.__init__ = tuple_of_values
    core.tuple.type = property(type_of_tuple, lambda self, known: setattr(self, "known_type", known))


def only_compile(capability: int) -> set[str]:
    """From now on calls of kernels, on CPU tensors, compile them for a GPU and do nothing else.

    Returns the modules and names of those that were called, as they come.
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
        made.add(f"{self.__module__.rpartition('.')[2]}.{self.__name__}")
        return run(self, *args, grid=grid, warmup=True, **options)

    JITFunction.run = instead
    return made


class LaunchedVariants:
    """What Triton would compile of each kernel that its interpreter runs, were it for an H100 or H200: the name and
    what its code is specialized for. Inside this context, `variants` has those that were launched so far.
    """

    def __init__(self) -> None:
        self.variants: set[tuple[str, ...]] = set()
        self._binders: dict[object, object] = {}

    def __enter__(self) -> LaunchedVariants:
        from triton.runtime import interpreter

        self._run = run = interpreter.InterpretedFunction.run

        def noted_run(kernel, *arguments, grid, warmup, **options):
            self.variants.add(self._variant(kernel, arguments, options))
            return run(kernel, *arguments, grid=grid, warmup=warmup, **options)

        interpreter.InterpretedFunction.run = noted_run
        return self

    def __exit__(self, *_) -> None:
        from triton.runtime import interpreter

        interpreter.InterpretedFunction.run = self._run

    def _variant(self, kernel, arguments, options) -> tuple[str, ...]:
        from triton.backends.compiler import GPUTarget
        from triton.backends.nvidia.compiler import CUDABackend
        from triton.runtime.jit import JITFunction, create_function_from_signature

        if kernel.fn not in self._binders:
            alike = {name: value for name, value in kernel.kwargs.items() if name.startswith("do_not_specialize")}
            compiled = JITFunction(kernel.fn, **alike)
            backend = CUDABackend(GPUTarget("cuda", 90, 32))
            self._binders[kernel.fn] = create_function_from_signature(compiled.signature, compiled.params, backend)
        bound, specialization, rest = self._binders[kernel.fn](*arguments, **options)
        values = (f"{name}={value}" for name, value in zip(bound, specialization, strict=True))
        return (kernel.fn.__name__, *values, str(sorted(rest.items())))
