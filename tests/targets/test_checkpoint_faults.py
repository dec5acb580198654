"""Checkpoints on full disks, on file systems that lack calls, beside other runs, and killed at any moment."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sparserl.errors import CheckpointError
from sparserl.sources import open_checkpoint
from sparserl.targets import apply_to_checkpoint, swap
from tests.checkpoints import (
    equal,
    tree,
    write_file,
    write_folder,
)
from tests.targets.written_checkpoints import BOTH, P, W, Write, assert_refused, expected


@pytest.fixture
def base(tmp_path: Path, write: Write) -> Path:
    return write(tmp_path / "base", W[0])


@BOTH
def test_a_base_that_changes_meanwhile_is_refused(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was verified is what was copied, or there is no output."""
    original = os.copy_file_range
    victim = next(p for p in (base, *base.rglob("*.safetensors")) if p.is_file())

    def copy(*args: Any) -> int:
        os.utime(victim, ns=(1, 1))
        return original(*args)

    monkeypatch.setattr(os, "copy_file_range", copy)
    with pytest.raises(CheckpointError, match="changed while it was copied"):
        apply_to_checkpoint(base, P, tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["base"]


@BOTH
@pytest.mark.parametrize("how", ["absent", "refused", "short"])
def test_copies_without_the_kernels_help(
    how: str, base: Path, write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the kernel cannot copy between files, or stops short, the bytes are copied by other means."""

    def refuse(*_: Any) -> int:
        raise OSError(errno.EXDEV, "cross-device link")

    if how == "absent":
        monkeypatch.delattr(os, "copy_file_range")
    else:
        monkeypatch.setattr(os, "copy_file_range", refuse if how == "refused" else lambda *_: 0)
    apply_to_checkpoint(base, P, tmp_path / "out")
    assert tree(tmp_path / "out") == expected(tmp_path, write, W[3])


@BOTH
def test_a_full_disk_leaves_nothing(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of the system on the way comes out as it is, and the names are as before."""

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "no space left on device")

    before = tree(tmp_path)
    monkeypatch.setattr(os, "copy_file_range", full)
    with pytest.raises(OSError, match="no space left"):
        apply_to_checkpoint(base, P, base)
    assert tree(tmp_path) == before


@BOTH
def test_one_run_at_a_time(base: Path, tmp_path: Path) -> None:
    """A second run on the same output is refused while the first one lives; a lock of the dead does not count."""
    lock = tmp_path / ".out.sparserl-lock"
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(CheckpointError, match="another process is writing"):
            apply_to_checkpoint(base, P, tmp_path / "out")
    apply_to_checkpoint(base, P, tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["base", "out"]


def test_a_lock_that_was_just_removed_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between opening the lock and holding it, its last holder may remove it: then it protects nothing."""
    original, calls = fcntl.flock, []

    def flock(handle: int, how: int) -> None:
        original(handle, how)
        calls.append(handle)
        if len(calls) == 1:
            (tmp_path / ".out.sparserl-lock").unlink()

    monkeypatch.setattr(fcntl, "flock", flock)
    with swap.swapping(tmp_path / "out"):
        assert (tmp_path / ".out.sparserl-lock").exists()
    assert len(calls) == 2


def test_filesystems_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There we go on, but touch nothing that may belong to another run; other failures come out as they are."""
    base = write_file(tmp_path / "base", W[0])
    code = errno.ENOLCK

    def flock(*_: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", flock)
    apply_to_checkpoint(base, P[:1], base)
    assert equal(open_checkpoint(base), W[1])
    (tmp_path / ".base.sparserl-new").write_text("another run's")
    assert_refused(CheckpointError, "belongs to a process that was killed or is still running", tmp_path, base, P, base)
    code = errno.EIO
    assert_refused(OSError, os.strerror(code), tmp_path, base, P, base)


def test_folders_that_cannot_be_exchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two renames do it, and if the second fails, the first is undone."""
    base = write_folder(tmp_path / "base", W[0])
    monkeypatch.setattr(swap, "exchange", lambda *_: False)
    apply_to_checkpoint(base, P[:1], base)
    assert tree(base) == expected(tmp_path, write_folder, W[1])
    original = Path.replace

    def replace(path: Path, target: Path) -> Path:
        if path.name.endswith("-new"):
            raise OSError(errno.EIO, "broken disk")
        return original(path, target)

    monkeypatch.setattr(Path, "replace", replace)
    with pytest.raises(OSError, match="broken disk"):
        apply_to_checkpoint(base, P, base)
    assert tree(base) == expected(tmp_path, write_folder, W[1])
    assert [p.name for p in tmp_path.iterdir()] == ["base"]


def test_exchange_says_when_it_cannot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A system without the call, or a filesystem that refuses it, is False; any other failure is an error."""
    a, b = tmp_path / "a", tmp_path / "b"
    a.mkdir()
    b.write_text("b")
    if swap.exchange(a, b):
        assert (a.is_file(), b.is_dir()) == (True, True)
    with pytest.raises(FileNotFoundError):
        swap.exchange(a, tmp_path / "c")

    class Library:
        @staticmethod
        def renameat2(*_: Any) -> int:
            return -1

    monkeypatch.setattr(swap.ctypes, "CDLL", lambda *_, **__: Library)
    monkeypatch.setattr(swap.ctypes, "get_errno", lambda: errno.EINVAL)
    assert swap.exchange(a, b) is False
    monkeypatch.setattr(swap.ctypes, "CDLL", lambda *_, **__: object())
    assert swap.exchange(a, b) is False


# Runs `apply` again and again in forked children, the n-th of which kills itself just before its n-th call that can
# touch a file. Looks at the disk after each, then lets a run go through. Prints what it saw.
KILLS = """
import json, os, shutil, signal, sys
from pathlib import Path

import sparserl
from sparserl.sources import open_checkpoint
from sparserl.targets import apply_to_checkpoint, checkpoint, swap
from tests.checkpoints import tree

root, in_place, exchanges = Path(sys.argv[1]), sys.argv[2] == "in place", sys.argv[3] == "exchange"
every = int(sys.argv[4])
patches = [sparserl.Patch.open(root / name) for name in ("1.patch", "2.patch")]
new = tree(root / "new")
work = root / "work"
base = work / "base"
out = base if in_place else work / "out"
EVENTS = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.chmod", "mmap.__new__"}
checkpoint._COPY_BYTES = 4096
left = None


def count():
    global left
    if left is not None:
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)


def counted(function):
    def call(*args, **kwargs):
        count()
        return function(*args, **kwargs)
    return call


sys.addaudithook(lambda event, args: count() if event in EVENTS else None)
os.fsync, os.copy_file_range = counted(os.fsync), counted(os.copy_file_range)
sys.modules["sparserl.patch.apply"].exchange = counted(sys.modules["sparserl.patch.apply"].exchange)
swap.exchange = counted(swap.exchange if exchanges else lambda a, b: False)


def reset():
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    for name in ("base", "out"):
        source = root / "old"
        shutil.copytree(source, work / name) if source.is_dir() else shutil.copy(source, work / name)


def run():
    return apply_to_checkpoint(base, patches, out, threads=1)


reset()
run()
seen = {"old": 0, "new": 0, "moved aside": 0, "leftovers": 0}
for n in range(0, 10_000, every):
    reset()
    old = tree(out)
    child = os.fork()
    if child == 0:
        left = n
        run()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if not os.path.lexists(out):
        assert not exchanges and tree(work / f".{out.name}.sparserl-old") == old, n
        seen["moved aside"] += 1
    else:
        found = tree(out)
        assert found in (old, new), n
        seen["new" if found == new else "old"] += 1
    assert in_place or tree(base) == tree(root / "old"), n
    seen["leftovers"] += len(list(work.iterdir())) > 2
    run()
    assert tree(out) == new, n
    assert sorted(p.name for p in work.iterdir()) == ["base", "out"], n
    if os.WIFEXITED(status):
        assert os.WEXITSTATUS(status) == 0
        break
    assert os.WTERMSIG(status) == signal.SIGKILL
print(json.dumps({"kills": n, **seen}))
"""


@pytest.mark.parametrize(
    ("write", "place", "exchange", "every"),
    [
        (write_file, "in place", "exchange", 1),
        pytest.param(write_file, "beside", "exchange", 1, marks=pytest.mark.long),
        pytest.param(write_folder, "in place", "exchange", 3, marks=pytest.mark.long),
        pytest.param(write_folder, "beside", "exchange", 3, marks=pytest.mark.long),
        pytest.param(write_folder, "in place", "two renames", 1, marks=pytest.mark.long),
    ],
)
def test_a_kill_at_any_moment_leaves_the_old_or_the_new(
    write: Write, place: str, exchange: str, every: int, tmp_path: Path
) -> None:
    """Killed before its calls in turn, a run leaves one whole checkpoint, and the next run ends well.

    With `SPARSERL_KILLS=all` it is before every single call.
    """
    every = 1 if os.environ.get("SPARSERL_KILLS") == "all" else every
    write(tmp_path / "old", W[0])
    write(tmp_path / "new", W[2])
    P[0].save(tmp_path / "1.patch")
    P[1].save(tmp_path / "2.patch")
    here = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", KILLS, str(tmp_path), place, exchange, str(every)],
        env=os.environ | {"PYTHONPATH": f"{here}{os.pathsep}{here / 'src'}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    folder = write is write_folder
    assert seen["kills"] > (40 if folder else 15)
    assert seen["old"] * every > 10
    assert seen["leftovers"] * every > 5
    assert seen["new"] * every > (5 if folder else 1)
    assert seen["moved aside"] == (1 if folder and exchange == "two renames" else 0)
