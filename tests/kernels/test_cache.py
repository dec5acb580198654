"""Compiled kernels on disk, where several processes begin at once."""

from __future__ import annotations

import gc
import sys
import threading
import time
from pathlib import Path

import numba
import pytest

from sparserl.kernels.cpu.compiling import kernel, without_garbage_collection


def add(a, b):
    return a + b


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Opens the cache of one kernel, as each of several processes does."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))

    def opened():
        found = kernel(add)._cache._cache_file
        Path(found._cache_path).mkdir(parents=True, exist_ok=True)
        return found

    return opened


def test_two_that_save_at_once_keep_both(cache) -> None:
    """Each is loaded under its own name afterwards, although both began before either had ended."""

    def save(key: str) -> None:
        slow = cache()
        write = slow._save_index
        slow._save_index = lambda rows: (time.sleep(0.3), write(rows))
        slow.save(key, f"kernel {key}")

    threads = [threading.Thread(target=save, args=(key,)) for key in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [cache().load(key) for key in "abcd"] == ["kernel a", "kernel b", "kernel c", None]


def test_a_cache_that_can_only_be_read_is_read(cache, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a lock, where none can be had; and a kernel that is not cached is compiled."""
    cache().save("a", "kernel a")

    def refuse(*_args, **_options):
        raise PermissionError("read-only")

    monkeypatch.setattr(Path, "open", refuse)
    assert cache().load("a") == "kernel a"
    assert kernel(add)(1, 2) == 3


class Renamed:
    """A type that an index names, and that another release does not have."""


@pytest.mark.parametrize("damage", ["renamed", "cut", "garbage"])
def test_an_index_that_cannot_be_read_is_replaced(cache, monkeypatch: pytest.MonkeyPatch, damage: str) -> None:
    """As an upgrade or a full disk leaves it behind: kernels are compiled and saved again."""
    before = cache()
    before.save(Renamed, "kernel")
    path = Path(before._index_path)
    if damage == "renamed":
        monkeypatch.delattr(sys.modules[__name__], "Renamed")
    else:
        path.write_bytes(path.read_bytes()[:-9] if damage == "cut" else b"garbage")
    compiled = kernel(add)
    assert compiled(1, 2) == 3
    assert kernel(add)(3, 4) == 7
    cache().save("b", "kernel b")
    assert cache().load("b") == "kernel b"


@pytest.mark.parametrize("collecting", [True, False])
def test_garbage_is_collected_as_before_once_a_kernel_is_compiled(cache, collecting: bool) -> None:
    """And meanwhile it is not."""
    seen = []

    def look(a):
        return a

    compiled = kernel(look)
    overload = compiled._compiler.compile
    compiled._compiler.compile = lambda *args: (seen.append(gc.isenabled()), overload(*args))[1]
    (gc.enable if collecting else gc.disable)()
    try:
        assert compiled(1) == 1
        assert gc.isenabled() == collecting
        assert seen == [False]
        with pytest.raises(numba.TypingError):
            kernel(lambda a: a.nothing)(1)
        assert gc.isenabled() == collecting
    finally:
        gc.enable()


def test_garbage_is_collected_after_many_threads_have_compiled() -> None:
    """However they interleave, none leaves behind what it found while another was at work."""
    work = without_garbage_collection(lambda: sum(range(30)))
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(10):
            threads = [threading.Thread(target=lambda: [work() for _ in range(1000)]) for _ in range(6)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert gc.isenabled()
    finally:
        sys.setswitchinterval(before)
        gc.enable()
