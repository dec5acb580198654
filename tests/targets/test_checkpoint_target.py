"""Patches land on checkpoints whole or not at all, whatever happens on the way."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

import sparserl
from sparserl import Patch, TensorTable
from sparserl.errors import ChainError, CheckpointError, ChecksumMismatch, TensorMismatch, WrongBase
from sparserl.sources import open_checkpoint
from sparserl.targets import apply_to_checkpoint, swap
from sparserl.weights.dtypes import Bits
from tests.checkpoints import equal, random_weights, safetensors_bytes, stepped, tree, write_file, write_folder
from tests.shards import diff_shards

Write = Callable[[Path, Mapping[str, Bits]], Path]
BOTH = pytest.mark.parametrize("write", [write_file, write_folder], ids=["file", "folder"])
W = [random_weights()]
for seed in (1, 2, 3):
    W.append(stepped(W[-1], seed))
P = [sparserl.diff(a, b) for a, b in zip(W, W[1:], strict=False)]


@pytest.fixture
def base(tmp_path: Path, write: Write) -> Path:
    return write(tmp_path / "base", W[0])


def expected(tmp_path: Path, write: Write, weights: Mapping[str, Bits]) -> dict[str, bytes]:
    """The files of a checkpoint of these weights."""
    other = tmp_path / "expected"
    files = tree(write(other, weights))
    shutil.rmtree(other) if other.is_dir() else other.unlink()
    return files


@BOTH
def test_out_is_the_base_with_the_patch_in_it(base: Path, write: Write, tmp_path: Path) -> None:
    """Every file travels, the weights become the result bit for bit, metadata stays, and the base is untouched."""
    before = tree(base)
    landed = apply_to_checkpoint(base, [P[0]], tmp_path / "out")
    assert tree(tmp_path / "out") == expected(tmp_path, write, W[1])
    assert equal(open_checkpoint(tmp_path / "out"), W[1])
    assert tree(base) == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["base", "out"]
    assert (landed.path, landed.digest, landed.changed) == (tmp_path / "out", P[0].result, P[0].changed)
    assert (landed.applied, landed.already, landed.unreached) == (1, False, ())


@BOTH
def test_out_may_be_the_base(base: Path, write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In place, by any name for the place, the checkpoint becomes the result and nothing else is left."""
    monkeypatch.chdir(tmp_path)
    apply_to_checkpoint(base, [P[0]], "base")
    assert tree(base) == expected(tmp_path, write, W[1])
    apply_to_checkpoint("base", [P[1]], Path("../") / tmp_path.name / "base")
    assert tree(base) == expected(tmp_path, write, W[2])
    if base.is_dir():
        monkeypatch.chdir(base)
        apply_to_checkpoint(".", [P[2]], ".")
        assert tree(base) == expected(tmp_path, write, W[3])
    assert [p.name for p in tmp_path.iterdir()] == ["base"]


@BOTH
@pytest.mark.parametrize("start", range(4))
def test_a_chain_starts_where_the_base_is(start: int, write: Write, tmp_path: Path) -> None:
    """From any version of the chain the result is the last one; what the base has already is not applied again."""
    held = write(tmp_path / "held", W[start])
    landed = apply_to_checkpoint(held, P, tmp_path / "out")
    assert tree(tmp_path / "out") == expected(tmp_path, write, W[3])
    assert landed.applied == 3 - start
    assert landed.changed == sum(p.changed for p in P[start:])
    assert landed.already is (start == 3)


@BOTH
def test_a_retry_is_harmless(base: Path, write: Write, tmp_path: Path) -> None:
    """The same command again, in place, says `already` and does not even copy."""
    apply_to_checkpoint(base, P, base)
    inode = base.stat().st_ino
    assert apply_to_checkpoint(base, P, base).already
    assert base.stat().st_ino == inode
    assert tree(base) == expected(tmp_path, write, W[3])


@BOTH
def test_an_older_version_is_replaced(base: Path, write: Write, tmp_path: Path) -> None:
    """An output that is another version of the same weights, or an empty folder, gives way."""
    out = write(tmp_path / "out", W[3])
    apply_to_checkpoint(base, P[:1], out)
    assert tree(out) == expected(tmp_path, write, W[1])
    if base.is_dir():
        (tmp_path / "empty").mkdir()
        apply_to_checkpoint(base, P[:1], tmp_path / "empty")
        assert tree(tmp_path / "empty") == expected(tmp_path, write, W[1])


@BOTH
def test_the_base_is_read_once(base: Path, tmp_path: Path) -> None:
    """However many patches: one read to verify, one copy, one write, and progress that adds up to each."""
    stages: dict[str, list[int]] = {}

    def stage(name: str, total: int) -> Callable[[int], None]:
        stages[name] = [total, 0]

        def done(count: int) -> None:
            stages[name][1] += count

        return done

    apply_to_checkpoint(base, P, tmp_path / "out", stage)
    size = sum(len(b) for b in tree(base).values())
    weights = open_checkpoint(base).nbytes
    assert stages == {"verify": [weights, weights], "copy": [size, size], "write": [size, size]}


def _refused(error: type[Exception], says: str, root: Path, base: Path, patches: list[Patch], out: Path) -> None:
    """The call fails with this error, and not one byte below `root` has changed."""
    before = tree(root)
    with pytest.raises(error, match=says):
        apply_to_checkpoint(base, patches, out)
    assert tree(root) == before


@BOTH
def test_a_wrong_base_is_refused(base: Path, write: Write, tmp_path: Path) -> None:
    """Weights that no patch of the chain knows stay as they are, and there is no output."""
    _refused(WrongBase, "Nothing was written", tmp_path, base, P[1:], tmp_path / "out")
    _refused(WrongBase, "Nothing was written", tmp_path, base, P[1:], base)
    other = write(tmp_path / "other", W[0] | {"router": W[0]["embed.weight"]})
    _refused(TensorMismatch, "'router' is float32", tmp_path, other, P, tmp_path / "out")


@BOTH
def test_a_broken_chain_is_refused(base: Path, tmp_path: Path) -> None:
    """Patches that do not follow one another are refused before the base is read."""
    _refused(ChainError, "patch 1 leads to", tmp_path, base, [P[0], P[2]], base)
    _refused(ChainError, "no patch", tmp_path, base, [], base)
    strange = sparserl.diff({"x": W[0]["router"]}, {"x": W[1]["router"]})
    _refused(TensorMismatch, "in patch 1 but not in patch 2", tmp_path, base, [P[0], strange], base)


@BOTH
def test_a_corrupted_patch_is_refused(base: Path, tmp_path: Path) -> None:
    """A flipped bit in the last patch of a chain is noticed before anything is written."""
    data = bytearray(P[1].to_bytes())
    data[len(data) // 2] ^= 1
    _refused(ChecksumMismatch, "checksum", tmp_path, base, [P[0], Patch.from_bytes(bytes(data))], base)


def test_patches_of_shards_land_too(tmp_path: Path) -> None:
    """A patch that speaks for some tensors changes those; two with different regions are no chain."""
    table: TensorTable = sparserl.tensor_table(W[0])

    def part(name: str) -> Patch:
        return diff_shards({name: W[0][name]}, {name: W[1][name]}, table=table)

    base = write_file(tmp_path / "base", W[0])
    landed = apply_to_checkpoint(base, [part("router")], tmp_path / "out")
    assert landed.applied == 1
    assert equal(open_checkpoint(tmp_path / "out"), W[0] | {"router": W[1]["router"]})
    empty = {"x": W[0]["empty"], "y": W[0]["empty"]}
    nothing = [diff_shards({n: b}, {n: b}, table=sparserl.tensor_table(empty)) for n, b in empty.items()]
    assert nothing[0].result == nothing[1].base
    _refused(ChainError, "cover different regions", tmp_path, base, nothing, tmp_path / "out")


def test_what_is_unrelated_is_not_replaced(tmp_path: Path) -> None:
    """An output that exists must be the base, a version of it, or an empty folder; all else is refused."""
    file = write_file(tmp_path / "base.safetensors", W[0])
    folder = write_folder(tmp_path / "base", W[0])
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "todo.txt").write_text("buy milk")
    (tmp_path / "text").write_text("not weights")
    write_file(tmp_path / "strange.safetensors", {"x": W[0]["router"]})
    shutil.copytree(folder, tmp_path / "richer")
    (tmp_path / "richer" / "optimizer.pt").write_text("state")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for base, out, says in (
        (folder, "base.safetensors", "the base is a folder, but .* is a file"),
        (folder, "notes", "is no version of the base"),
        (folder, "richer", "would lose 'optimizer.pt'"),
        (folder, "base/out", "lie in one another"),
        (folder / "assets" / "..", "base/assets", "lie in one another"),
        (file, "base", "the base is a file, but .* is a folder"),
        (file, "notes", "the base is a file, but .* is a folder"),
        (file, "text", "is no version of the base"),
        (file, "strange.safetensors", "is no version of the base.*'x' is in"),
        (file, "dangling", "is no version of the base"),
        (file, "no/such/folder", "is not a folder, make it first"),
        (tmp_path / "nowhere", "out", "no such file or folder"),
        (tmp_path / "notes", "out", "is not a checkpoint"),
    ):
        _refused(CheckpointError, says, tmp_path, base, P, tmp_path / out)
    _refused(CheckpointError, "cannot be written", tmp_path, file, P, Path("/"))
    inner = write_folder(tmp_path / "outer" / "inner", W[0])
    _refused(CheckpointError, "lie in one another", tmp_path, inner, P, tmp_path / "outer")


def test_a_snapshot_of_links_becomes_real_files(tmp_path: Path) -> None:
    """Links are followed and left alone; in place, the links give way and the blobs stay what they are."""
    blobs = write_folder(tmp_path / "blobs", W[0])
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for path in blobs.iterdir():
        (snapshot / path.name).symlink_to(path)
    before = tree(blobs)
    apply_to_checkpoint(snapshot, P[:1], tmp_path / "out")
    apply_to_checkpoint(snapshot, P[:1], snapshot)
    for out in (tmp_path / "out", snapshot):
        assert tree(out) == expected(tmp_path, write_folder, W[1])
        assert not any(p.is_symlink() for p in out.rglob("*"))
    assert tree(blobs) == before


@BOTH
def test_a_link_gives_way_to_what_it_pointed_to(base: Path, write: Write, tmp_path: Path) -> None:
    """Where the output is a link, the link is replaced and its target left alone."""
    before = tree(base)
    link = tmp_path / "link"
    link.symlink_to(base)
    apply_to_checkpoint(link, P[:1], link)
    assert not link.is_symlink()
    assert tree(link) == expected(tmp_path, write, W[1])
    assert tree(base) == before


def test_links_that_lead_nowhere_are_refused(tmp_path: Path) -> None:
    """A broken link, a loop of links or a pipe in the folder is an error, not a hole in the copy."""
    base = write_folder(tmp_path / "base", W[0])
    for make, says in (
        (lambda p: p.symlink_to("nowhere"), "broken link"),
        (lambda p: p.symlink_to(base), "a link to a folder that contains it"),
        (os.mkfifo, "not a regular file"),
    ):
        make(base / "odd")
        with pytest.raises(CheckpointError, match=says):
            apply_to_checkpoint(base, P, tmp_path / "out")
        (base / "odd").unlink()
    assert [p.name for p in tmp_path.iterdir()] == ["base"]


def test_modes_stay(tmp_path: Path) -> None:
    """Private files stay private, read-only ones read-only."""
    base = write_folder(tmp_path / "base", W[0])
    modes = {"config.json": 0o400, "assets": 0o750, "model-00001-of-00003.safetensors": 0o440, ".": 0o700}
    for name, mode in modes.items():
        (base / name).chmod(mode)
    apply_to_checkpoint(base, P, base)
    assert {name: (base / name).stat().st_mode & 0o7777 for name in modes} == modes
    assert tree(base) == expected(tmp_path, write_folder, W[3])


def test_other_weights_in_the_folder_are_reported(tmp_path: Path) -> None:
    """A second copy of the weights that the index does not name travels as it is, and the caller is told."""
    base = write_folder(tmp_path / "base", W[0])
    write_file(base / "consolidated.safetensors", W[0])
    landed = apply_to_checkpoint(base, P, tmp_path / "out")
    assert landed.unreached == ("consolidated.safetensors",)
    assert (tmp_path / "out" / "consolidated.safetensors").read_bytes() == safetensors_bytes(W[0])


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
        with pytest.raises(CheckpointError, match="another run is writing"):
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
    _refused(CheckpointError, "left from a run", tmp_path, base, P, base)
    code = errno.EIO
    _refused(OSError, os.strerror(code), tmp_path, base, P, base)


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
for n in range(10_000):
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
    ("write", "place", "exchange"),
    [
        (write_file, "in place", "exchange"),
        pytest.param(write_file, "beside", "exchange", marks=pytest.mark.long),
        (write_folder, "in place", "exchange"),
        pytest.param(write_folder, "beside", "exchange", marks=pytest.mark.long),
        pytest.param(write_folder, "in place", "two renames", marks=pytest.mark.long),
    ],
)
def test_a_kill_at_any_moment_leaves_the_old_or_the_new(
    write: Write, place: str, exchange: str, tmp_path: Path
) -> None:
    """Killed before each of its calls in turn, a run leaves one whole checkpoint, and the next run ends well."""
    write(tmp_path / "old", W[0])
    write(tmp_path / "new", W[2])
    P[0].save(tmp_path / "1.patch")
    P[1].save(tmp_path / "2.patch")
    here = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", KILLS, str(tmp_path), place, exchange],
        env=os.environ | {"PYTHONPATH": f"{here}{os.pathsep}{here / 'src'}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    folder = write is write_folder
    assert seen["kills"] > (40 if folder else 15)
    assert seen["old"] > 10
    assert seen["leftovers"] > 5
    assert seen["new"] > (5 if folder else 1)
    assert seen["moved aside"] == (1 if folder and exchange == "two renames" else 0)
