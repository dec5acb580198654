"""Files and folders: what is written is whole or not there, and a lock keeps other processes out."""

from __future__ import annotations

import math
import os
import stat
import threading
import time
from pathlib import Path

import pytest

from sparserl.files import Folder, creating, lock, replacing, unlock


def opened(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT)


@pytest.mark.parametrize("write", [replacing, creating])
def test_a_failed_write_leaves_nothing(write, tmp_path: Path) -> None:
    """The file is there with all its bytes after the block, and not at all if the block failed."""
    with pytest.raises(ZeroDivisionError), write(tmp_path / "file") as file:  # noqa: PT012
        file.write(b"half")
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []
    with write(tmp_path / "file") as file:
        file.write(b"whole")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_bytes() == b"whole"


def test_an_existing_file_is_replaced_or_an_error(tmp_path: Path) -> None:
    """`replacing` keeps the old bytes until the new ones are complete; `creating` never touches an existing file."""
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with pytest.raises(FileExistsError), creating(path):
        pass
    assert path.read_bytes() == b"old"
    with replacing(path) as file:
        file.write(b"new")
        file.flush()
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"


def test_a_file_is_named_only_when_it_is_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes are synced before `finish`; where `finish` fails, the file is removed."""
    events: list[str] = []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda handle: events.append("sync") or fsync(handle))

    def finish() -> None:
        events.append("finish")
        raise OSError

    with pytest.raises(OSError), Folder.open(tmp_path) as folder, folder.creating("file", finish=finish) as file:  # noqa: PT011
        file.write(b"bytes")
    assert events == ["sync", "finish"]
    assert list(tmp_path.iterdir()) == []


def test_mode(tmp_path: Path) -> None:
    """A new file gets the mode that is asked for."""
    with creating(tmp_path / "secret", 0o600):
        pass
    assert stat.S_IMODE((tmp_path / "secret").stat().st_mode) == 0o600


def test_one_holder_at_a_time(tmp_path: Path) -> None:
    """A second descriptor does not get the lock, without waiting or after the time it may wait, until it is free."""
    first = opened(tmp_path / "lock")
    second = opened(tmp_path / "lock")
    assert lock(first)
    assert not lock(second)
    started = time.monotonic()
    assert not lock(second, 0.2)
    assert time.monotonic() - started >= 0.2
    assert not lock(second, shared=True)
    unlock(first)
    assert lock(second)
    os.close(second)
    assert lock(first)
    os.close(first)


@pytest.mark.parametrize("wait", [60.0, math.inf])
def test_waiting_for_a_lock(wait: float, tmp_path: Path) -> None:
    """One that waits gets the lock when its holder releases it."""
    first = opened(tmp_path / "lock")
    second = opened(tmp_path / "lock")
    assert lock(first)
    threading.Timer(0.1, unlock, [first]).start()
    assert lock(second, wait)
    os.close(first)
    os.close(second)


def test_shared_locks(tmp_path: Path) -> None:
    """Several may hold a shared lock, and then nobody an exclusive one."""
    handles = [opened(tmp_path / "lock") for _ in range(3)]
    assert lock(handles[0], shared=True)
    assert lock(handles[1], shared=True)
    assert not lock(handles[2])
    for handle in handles:
        os.close(handle)


def test_a_forked_child_keeps_no_folder_locked(tmp_path: Path) -> None:
    """The lock of a folder ends with the process that took it, even while a child that it forked lives on."""
    ready, go = os.pipe()
    with Folder.open(tmp_path) as folder, Folder.open(tmp_path) as other:
        assert folder.lock()
        child = os.fork()
        if not child:
            os.close(go)
            os.read(ready, 1)
            os._exit(0)
        try:
            assert not other.lock()
            folder.close()
            end = time.monotonic() + 60  # the child may not have run yet
            while not other.lock():
                assert time.monotonic() < end, "the child keeps the lock"
                time.sleep(0.01)
        finally:
            os.close(go)
            os.close(ready)
            os.waitpid(child, 0)
