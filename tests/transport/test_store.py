"""Stores keep their promises: folders and real servers pass the same tests, also when the way to them is bad."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from sparserl.errors import LimitExceeded, NotFound, Refused, StoreError, Truncated, Unavailable
from sparserl.testing import StoreConformance
from sparserl.transport.stores import folder
from sparserl.transport.stores.base import Retry, Store, exists
from sparserl.transport.stores.folder import FolderStore
from sparserl.transport.stores.opening import open_store
from tests.servers import QUICK, NoServer, Proxy, Server, running

HERE = Path(__file__).resolve().parents[2]
ENVIRONMENT = os.environ | {"PYTHONPATH": f"{HERE}{os.pathsep}{HERE / 'src'}"}


LONG = (pytest.param(name, marks=pytest.mark.long) for name in ("seaweedfs", "azurite"))


@pytest.fixture(scope="module", params=["folder", "moto", *LONG])
def every(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Store]]:
    """Opens the store at a path, as often as it is asked to."""
    if request.param == "folder":
        root = tmp_path_factory.mktemp("stores")
        yield lambda place: open_store(f"file://{root / place}")
        return
    with contextlib.ExitStack() as stack:
        try:
            found = stack.enter_context(running(request.param, tmp_path_factory.mktemp(request.param)))
        except NoServer as error:
            pytest.skip(str(error))
        yield found.store


@pytest.fixture
def place() -> str:
    return uuid.uuid4().hex


class TestStores(StoreConformance):
    """What every store does."""

    @pytest.fixture
    def opens(self, every: Callable[[str], Store]) -> Callable[[str], Store]:
        return every


def test_urls() -> None:
    """What is no URL, or a scheme that nobody knows, is said to be so."""
    for url in ("", "s3:x", "ftp://host/x", "s4://x"):
        with pytest.raises(StoreError):
            open_store(url)


# -- a bad way to the server -------------------------------------------------------------------------------------------

OPERATIONS: dict[str, Callable[[Store], object]] = {
    "get": lambda store: store.get("there", 10).data == b"1",
    "read": lambda store: store.read("there", 0, 1) == b"1",
    "put": lambda store: store.put("new", b"2"),
    "list": lambda store: [item.name for item in store.list("")] == ["there"],
    "delete": lambda store: store.delete(["gone"]),
    "changed": lambda store: store.changed("there", "x", 5),
}


@pytest.mark.parametrize("kind", ["reset", "503", "hang", "lost"])
def test_trouble_passes(server: Server, place: str, kind: str) -> None:
    """Whatever happens to the first two requests, the third one does it, or a later one if it is slow."""
    server.store(place).put("there", b"1")
    is_waited_for = kind in ("hang", "lost")
    timeout = timedelta(seconds=0.25 if is_waited_for else 60)
    for name, work in OPERATIONS.items():
        left = [kind] * 2
        with Proxy(server, lambda _line, left=left: left.pop() if left else "") as proxy:
            store = server.store(place, proxy.endpoint, timeout=timeout)
            assert work(store) is not False, name
            assert len(proxy.seen) == 3 or (is_waited_for and len(proxy.seen) > 3), (name, proxy.seen)
        server.store(place).delete(["new"])


@pytest.mark.parametrize("kind", ["reset", "503"])
def test_trouble_that_stays_is_told(server: Server, place: str, kind: str) -> None:
    """After so many attempts, and no more, with waits that grow but stay bounded."""
    waits: list[float] = []
    retry = Retry(attempts=4, first=0.1, longest=0.15, sleep=waits.append)
    for name, work in OPERATIONS.items():
        waits.clear()
        with Proxy(server, lambda _line: kind) as proxy:
            with pytest.raises(Unavailable, match="gave up after 4 attempts"):
                work(server.store(place, proxy.endpoint, retry))
            assert len(proxy.seen) == 4, name
        assert len(waits) == 3
        assert all(0 <= wait <= bound for wait, bound in zip(waits, (0.1, 0.15, 0.15), strict=True))


def test_nobody_is_there(tmp_path: Path) -> None:
    """A server that is down is an error after a bounded time."""
    store = Server("http://127.0.0.1:9").store("x")
    for work in (lambda: store.get("a", 1), lambda: store.swap("a", b"", None), lambda: list(store.list(""))):
        with pytest.raises(Unavailable):
            work()


@pytest.mark.parametrize("kind", ["reset", "503", "hang", "lost"])
def test_a_conditional_write_is_sent_once(server: Server, place: str, kind: str) -> None:
    """Trouble on the way leaves open whether it was written, so it is told and not sent again; nor is a refusal."""
    with Proxy(server, lambda _line: kind) as proxy:
        with pytest.raises(Unavailable):
            server.store(place, proxy.endpoint, timeout=timedelta(seconds=0.25)).swap("head", b"1", None)
        assert len(proxy.seen) == 1
    store = server.store(place)
    if kind == "lost":
        assert store.get("head", 10).data == b"1"
    else:
        assert not exists(store, "head")
        store.swap("head", b"1", None)
    with Proxy(server) as proxy:
        for tag in (None, '"0123"'):
            with pytest.raises(Refused):
                server.store(place, proxy.endpoint).swap("head", b"2", tag)
        assert len(proxy.seen) == 2


def test_what_is_final_is_not_tried_again(server: Server, place: str) -> None:
    """What is not there, too large or too short is told after one request."""
    server.store(place).put("a", b"12345")
    with Proxy(server) as proxy:
        store = server.store(place, proxy.endpoint)
        for n, (work, error) in enumerate(
            (
                (lambda: store.get("b", 9), NotFound),
                (lambda: store.read("b", 0, 1), NotFound),
                (lambda: store.get("a", 1), LimitExceeded),
                (lambda: store.read("a", 9, 9), Truncated),
            )
        ):
            with pytest.raises(error):
                work()
            assert len(proxy.seen) == n + 1


def test_no_retries_without_trouble() -> None:
    """Work that succeeds is done once, and errors other than trouble come out as they are."""
    done: list[int] = []
    assert QUICK.run("x", lambda: done.append(1)) is None
    assert done == [1]
    with pytest.raises(NotFound):
        QUICK.run("x", lambda: open_store("file:///nowhere").get("a", 1))


# -- folders -----------------------------------------------------------------------------------------------------------

# Writes again and again in forked children, the n-th of which is killed just before its n-th system call. Looks at the
# folder after each, then lets a write go through. Prints what it saw.
KILLS = """
import ctypes, json, os, shutil, signal, sys
from pathlib import Path

from sparserl.transport.stores.folder import FolderStore

root, how = Path(sys.argv[1]), sys.argv[2]
OLD, NEW = b"old" * 1000, b"new" * 2000
TRACEME, SYSCALL = 0, 24
trace = ctypes.CDLL(None, use_errno=True).ptrace
trace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]


def look():
    store = FolderStore(root)
    found = store.get("runs/a/head", 10_000) if (root / "runs/a/head").exists() else None
    return (None, None) if found is None else (found.data, found.tag)


def write(data):
    store = FolderStore(root)
    if how == "put":
        store.put("runs/a/head", data)
    else:
        store.swap("runs/a/head", data, look()[1])
    return store


def killed(n):
    child = os.fork()
    if child == 0:
        if trace(TRACEME, 0, None, None):
            os._exit(77)
        os.kill(os.getpid(), signal.SIGSTOP)
        write(NEW)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    for _ in range(2 * n + 1):  # a system call stops twice: before it, and when it is done
        if not os.WIFSTOPPED(status):
            break
        assert trace(SYSCALL, child, None, None) == 0, os.strerror(ctypes.get_errno())
        _, status = os.waitpid(child, 0)
    if os.WIFSTOPPED(status):
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return True
    if os.WEXITSTATUS(status) == 77:
        sys.exit("NoTrace")
    assert os.WEXITSTATUS(status) == 0
    return False


seen = {"nothing": 0, "old": 0, "new": 0, "drafts": 0, "kills": 0}
for fresh in (True, False):
    for n in range(10_000):
        shutil.rmtree(root, ignore_errors=True)
        if not fresh:
            write(OLD).close()
        again = killed(n)
        found = look()[0]
        assert found in ((None, NEW) if fresh else (OLD, NEW)), n
        seen["nothing" if found is None else "new" if found == NEW else "old"] += 1
        seen["drafts"] += any(p.is_file() and p.name != "lock" for p in root.glob(".tmp/**/*"))
        store = write(OLD + NEW)
        assert store.get("runs/a/head", 10_000).data == OLD + NEW
        store.close()
        names = sorted(p.relative_to(root).as_posix() for p in root.rglob("*"))
        assert names == [".tmp", ".tmp/lock", "runs", "runs/a", "runs/a/head"], n
        if not again:
            break
        seen["kills"] += 1
print(json.dumps(seen))
"""


@pytest.mark.parametrize("how", [pytest.param("put", marks=pytest.mark.long), "swap"])
def test_a_kill_at_any_moment_leaves_the_old_or_the_new(how: str, tmp_path: Path) -> None:
    """Killed before each system call in turn, a writer leaves whole objects, and the next one sweeps what is left."""
    done = subprocess.run(
        [sys.executable, "-c", KILLS, str(tmp_path / "store"), how],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )
    if "NoTrace" in done.stderr:
        pytest.skip("processes cannot be traced here")
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["kills"] > 60
    assert min(seen["nothing"], seen["old"]) > 10
    assert seen["new"] >= 4
    assert seen["drafts"] >= 4


def test_bytes_are_on_disk_before_their_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is synced, then renamed, then its folder is synced; so are the folders above it that are new."""
    calls: list[str] = []
    fsync, replace = os.fsync, os.replace

    def note_fsync(handle: int) -> None:
        calls.append(f"sync {Path(f'/proc/self/fd/{handle}').readlink().name}")
        fsync(handle)

    def note_replace(name: str, new: str, **folders: int) -> None:
        calls.append(f"{name} becomes {new}")
        replace(name, new, **folders)

    store = FolderStore(tmp_path / "store")
    store.put("x", b"1")
    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "replace", note_replace)
    monkeypatch.setattr(folder.uuid, "uuid4", lambda: uuid.UUID(int=7))
    draft = uuid.UUID(int=7).hex
    store.put("runs/a", b"1")
    assert calls == [f"sync {draft}", "sync store", f"{draft} becomes a", "sync runs"]
    calls.clear()
    store.swap("head", b"1", None)
    assert calls == [f"sync {draft}", f"{draft} becomes head", "sync store"]


def test_drafts_of_the_living_stay(tmp_path: Path) -> None:
    """A writer sweeps what the dead left, and nothing of those that are still at work."""
    first = FolderStore(tmp_path)
    first.put("a", b"1")
    (scratch,) = [p for p in (tmp_path / ".tmp").iterdir() if p.is_dir()]
    (scratch / "draft").write_bytes(b"half")
    dead = tmp_path / ".tmp" / "1-dead"
    dead.mkdir()
    (dead / "draft").write_bytes(b"half")
    second = FolderStore(tmp_path)
    second.put("b", b"2")
    assert (scratch / "draft").exists()
    assert not dead.exists()
    first.close()
    second.close()
    assert [p.name for p in (tmp_path / ".tmp").iterdir()] == ["lock"]
    first.put("c", b"3")
    assert first.get("c", 1).data == b"3"


def test_emptied_folders_go_and_come_back(tmp_path: Path) -> None:
    """While one writer makes folders and another deletes them, every put succeeds."""
    writer, sweeper = FolderStore(tmp_path), FolderStore(tmp_path)
    end = threading.Event()

    def sweep() -> None:
        while not end.is_set():
            sweeper.delete(item.name for item in sweeper.list("runs/"))

    thread = threading.Thread(target=sweep)
    thread.start()
    try:
        for i in range(100):
            writer.put(f"runs/a/b/c/{i}", b"1")
    finally:
        end.set()
        thread.join()
    sweeper.delete(item.name for item in sweeper.list(""))
    assert not (tmp_path / "runs").exists()


@contextlib.contextmanager
def _small_disk(path: Path) -> Iterator[None]:
    """A disk of 256 KiB; where we may not mount one, a limit on the size of files."""
    path.mkdir()
    mounted = os.geteuid() == 0 and not subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(path)], capture_output=True, check=False
    ).returncode  # fmt: skip
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if not mounted:
        resource.setrlimit(resource.RLIMIT_FSIZE, (128 << 10, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        if mounted:
            subprocess.run(["umount", "--lazy", str(path)], check=True)


@pytest.mark.skipif(shutil.which("mount") is None, reason="no mount")
def test_a_full_disk_leaves_nothing_behind(tmp_path: Path) -> None:
    """What does not fit is an error of the store; what was there is as it was, and what fits can still be written."""
    with _small_disk(tmp_path / "disk"):
        store = FolderStore(tmp_path / "disk")
        tag = store.swap("head", b"1", None)
        store.put("runs/a", b"2" * 50_000)
        for work in (
            lambda: store.put("runs/b", b"3" * 300_000),
            lambda: store.put("runs/a", b"3" * 300_000),
            lambda: store.swap("head", b"3" * 300_000, tag),
        ):
            with pytest.raises(StoreError, match="cannot be written"):
                work()
            names = sorted(item.name for item in store.list(""))
            assert names == ["head", "runs/a"]
            assert not [p for p in (tmp_path / "disk" / ".tmp").rglob("*") if p.is_file() and p.name != "lock"]
        assert store.get("head", 10) == (b"1", tag)
        assert store.get("runs/a", 50_000).data == b"2" * 50_000
        store.put("runs/b", b"3" * 50_000)
        store.close()


@pytest.mark.long
def test_trouble_with_the_folder_is_an_error_of_the_store(tmp_path: Path) -> None:
    """A file in the way, of the folder or of an object, is told as what it is."""
    (tmp_path / "file").write_bytes(b"")
    store = FolderStore(tmp_path / "file")
    for work in (lambda: store.put("a", b"1"), lambda: store.swap("a", b"1", None)):
        with pytest.raises(StoreError):
            work()
    store = FolderStore(tmp_path / "store")
    store.put("a", b"1")
    with pytest.raises(StoreError):
        store.put("a/b", b"1")
    store.put("b/c", b"1")
    with pytest.raises(StoreError):
        store.put("b", b"1")
    with pytest.raises(StoreError):
        store.delete(["b"])
    store.delete(["a/b"])
    assert sorted(item.name for item in store.list("")) == ["a", "b/c"]
    assert not [p for p in (tmp_path / "store" / ".tmp").rglob("*") if p.is_file() and p.name != "lock"]
