"""Compiling kernels: once on a machine, by the process that needs one first, and kept where all processes find them."""

# ruff: noqa: SLF001  # Numba has no public names for its cache

from __future__ import annotations

import contextlib
import gc
import logging
import os
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar, cast

from numba import njit
from numba.core import config, event
from numba.core.compiler_lock import global_compiler_lock

from ...files import lock, unlock

F = TypeVar("F", bound=Callable[..., Any])

_LOG = logging.getLogger("sparserl")
_WAIT = 120.0  # seconds for another process that compiles the same kernel; after that, it is compiled here too


def kernel(function: F, nogil: bool = True) -> F:
    """Compile for the CPU, cached on disk where a folder for it can be written; it runs without the GIL by default."""
    compiled = _with_cache(function, nogil)
    if hasattr(compiled, "compile"):  # it is plain Python where NUMBA_DISABLE_JIT is set
        _compile_once(compiled)
        compiled.compile = without_garbage_collection(compiled.compile)
    return cast("F", compiled)


def inline(function: F) -> F:
    """For small functions that kernels call: LLVM inlines them, so they are cached with the kernels.

    Python cannot call those with a private name: that would crash. They are compiled without what it takes.
    """
    private = function.__name__.startswith("_")
    return cast("F", njit(nogil=True, no_cpython_wrapper=private, no_cfunc_wrapper=True)(function))


def _with_cache(function: Callable[..., Any], nogil: bool) -> Any:
    options = {"nogil": nogil, "no_cfunc_wrapper": True}
    with contextlib.suppress(RuntimeError):  # Numba has no folder that it can write to
        return njit(cache=True, **options)(function)
    configured = config.CACHE_DIR
    try:
        config.CACHE_DIR = _fallback_folder()
        return njit(cache=True, **options)(function)
    except (RuntimeError, OSError):  # nothing can be written at all
        return njit(**options)(function)
    finally:
        config.CACHE_DIR = configured


class _Fallback:
    """The folder for kernels where neither the environment nor the home directory can be written."""

    folder = ""


def _fallback_folder() -> str:
    if not _Fallback.folder:
        _Fallback.folder = _private_folder(Path(tempfile.gettempdir()) / f"sparserl-kernels-{os.getuid()}")
        _LOG.warning(
            "sparserl keeps its compiled kernels in %s, since neither its own folder nor the home directory can be "
            "written; set NUMBA_CACHE_DIR to keep them elsewhere",
            _Fallback.folder,
        )
    return _Fallback.folder


def _private_folder(path: Path) -> str:
    """A folder that nobody else can write to, since what lies in it is run; a new one if this is not ours alone."""
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    status = path.lstat()
    if stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022:
        return str(path)
    return tempfile.mkdtemp(prefix="sparserl-kernels-")


def without_garbage_collection(work: Callable[..., Any]) -> Callable[..., Any]:
    """Switch the garbage collector off while Numba compiles or loads a kernel: nearly all it allocates stays."""

    def run(*args: Any) -> Any:
        with global_compiler_lock:  # Numba's own: two threads must not switch the collector at the same time
            collecting = gc.isenabled()
            try:
                gc.disable()
                return work(*args)
            finally:
                if collecting:
                    gc.enable()

    return run


def _compile_once(compiled: Any) -> None:
    """Let one process at a time compile a kernel, so that others which need it then load what it has saved.

    Saving and loading take the lock, too. Numba numbers what it saves: two processes that save at the same time may use
    the same number for different types, and whoever loads one of them later gets the other.
    """
    cache = compiled._cache
    cache_file = getattr(cache, "_cache_file", None)
    if cache_file is None:
        return
    cache_lock = _CacheLock(Path(cache_file._index_path).with_suffix(".lock"))
    compile = compiled.compile
    save = cache_file.save
    load = cache_file.load
    load_index = cache_file._load_index

    def load_readable_index() -> Any:
        try:
            return load_index()
        except Exception:  # noqa: BLE001  # it is damaged, or names types of another release: what was saved is lost
            return {}

    def is_cached(signature: Any) -> bool:
        return cache._index_key(signature, compiled.targetctx.codegen()) in cache_file._load_index()

    def compile_once(signature: Any) -> Any:
        if is_cached(signature):
            return compile(signature)
        with cache_lock.hold(shared=False):
            return compile(signature)

    def save_locked(*args: Any) -> None:
        with cache_lock.hold(shared=False) as held:
            if held:
                save(*args)

    def load_locked(*args: Any) -> Any:
        with cache_lock.hold(shared=True) as held:
            return load(*args) if held else None

    compiled.compile = compile_once
    cache_file._load_index = load_readable_index
    cache_file.save = save_locked
    cache_file.load = load_locked


class _CacheLock(threading.local):
    """The lock on one kernel's files in Numba's cache. A thread that has it may take it again."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._is_held = False

    @contextlib.contextmanager
    def hold(self, shared: bool) -> Iterator[bool]:
        """Take the lock. Gives False if another process has not released it in time.

        Where it cannot be had at all, since the folder is read-only or has no locks, nothing is locked.
        """
        if self._is_held:
            yield True
            return
        with contextlib.ExitStack() as stack:
            held = True
            with contextlib.suppress(OSError):
                handle = stack.enter_context(self._path.open("a")).fileno()
                held = lock(handle, _WAIT, shared=shared)
                if held:
                    stack.callback(unlock, handle)  # a forked child may have the descriptor, too
            self._is_held = held
            try:
                yield held
            finally:
                self._is_held = False


class _Notice(event.Listener):  # type: ignore[misc]  # Numba has no types
    """Announces once that kernels are being compiled, so that nobody thinks the first call hangs."""

    announced = False

    def on_start(self, event: Any) -> None:
        if not self.announced and event.data["dispatcher"].py_func.__module__.startswith(__package__):
            announced()
            _LOG.warning(
                "sparserl compiles its kernels for this processor: once for every dtype, up to half a minute for the "
                "first. Later runs load them; `sparserl warmup --dtype …` compiles them beforehand"
            )

    def on_end(self, event: Any) -> None:
        """Nothing to announce."""


event.register("numba:compile", _Notice())


def announced() -> None:
    """Say that someone knows already: nothing is announced in this process."""
    _Notice.announced = True
