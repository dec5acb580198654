"""Folders that others can write to: links lead nowhere, locks of the stopped hold nobody up, odd notes are none."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import sparserl
from sparserl import Publisher, Subscriber, targets
from sparserl.errors import CheckpointError, CommitFailed, SparserlError, StoreError, Unavailable
from sparserl.files import Folder
from sparserl.session.store.retention import collect
from sparserl.sources import open_checkpoint
from sparserl.targets.checkpoint_folder import write_checkpoint
from sparserl.targets.swap import exchange
from sparserl.transport.stores.folder import FolderStore
from sparserl.weights.dtypes import BY_NAME, Bits
from tests.checkpoints import safetensors_header, tree

HERE = Path(__file__).resolve().parents[2]
ENVIRONMENT = os.environ | {"PYTHONPATH": f"{HERE}{os.pathsep}{HERE / 'src'}"}
LONG_AGO = time.time() - 30 * 86_400


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A folder that is nobody's business: files and folders under any name, some of which look like ours."""
    root = tmp_path / "victim"
    for name in ("thesis.txt", "1-abc/draft", "0" * 32 + "/a", "old-" + "1" * 32 + "/b", "a" * 16 + "-000000000001/c"):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("years of work")
        os.utime(path, (LONG_AGO, LONG_AGO))
    return root


@pytest.fixture
def weights() -> dict[str, np.ndarray]:
    return {"w": np.arange(100, dtype=np.float32)}


def moved_behind_a_link(path: Path, victim: Path) -> None:
    """What has a path is away, and a link to a foreign folder is in its place."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(victim)


# -- stores ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [".tmp", "runs", "runs/RUN", "runs/RUN/leases", "runs/RUN/buckets", "head.json"])
def test_links_in_a_store_lead_nowhere(name: str, victim: Path, weights: dict[str, np.ndarray], tmp_path: Path) -> None:
    """Whoever publishes, follows or collects leaves alone what a link in the store leads to."""
    root = tmp_path / "store"
    with Publisher(FolderStore(root), weights) as publisher:
        publisher.publish()
        run = publisher.run
    assert run is not None
    before = tree(victim)
    moved_behind_a_link(root / name.replace("RUN", run), victim)
    store = FolderStore(root)

    def publish() -> None:
        with Publisher(store, weights, grace=0.0, anchor_after=0.0) as again:
            again.publish()

    def follow() -> None:
        Subscriber(store, {"w": np.zeros(100, np.float32)}).sync()

    for work in (publish, follow, lambda: collect(store, 0.0), lambda: [*store.list("")]):
        with contextlib.suppress(SparserlError):
            work()
    assert tree(victim) == before


def test_a_link_in_the_way_is_named(victim: Path, tmp_path: Path) -> None:
    """The error says which path is a link; `list` takes none for an object, and `delete` removes the link alone."""
    store = FolderStore(tmp_path / "store")
    store.put("runs/a/b", b"1")
    (store.root / "runs" / "c").symlink_to(victim)
    (store.root / "runs" / "d").symlink_to(victim / "thesis.txt")
    for work in (
        lambda: store.get("runs/c/thesis.txt", 100),
        lambda: store.put("runs/c/new", b"1"),
        lambda: store.delete(["runs/c/thesis.txt"]),
        lambda: [*store.list("runs/c/")],
        lambda: store.get("runs/d", 100),
    ):
        with pytest.raises(StoreError, match=rf"symbolic link.*{re.escape(str(store.root))}/runs/[cd]'"):
            work()
    assert [item.name for item in store.list("")] == ["runs/a/b"]
    store.delete(["runs/d"])
    assert not os.path.lexists(store.root / "runs" / "d")
    assert (victim / "thesis.txt").read_text() == "years of work"


def test_the_root_may_be_a_link(tmp_path: Path) -> None:
    """Which folder it is, is the choice of who names it."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "store").symlink_to(tmp_path / "disk")
    FolderStore(tmp_path / "store").put("a/b", b"1")
    assert (tmp_path / "disk" / "a" / "b").read_bytes() == b"1"


def test_a_folder_that_becomes_a_link_at_any_moment(victim: Path, tmp_path: Path) -> None:
    """While a folder and a link are exchanged all the time, nothing is written or deleted behind the link."""
    store = FolderStore(tmp_path / "store")
    store.put("runs/keep", b"1")  # or the folder would go when it is empty
    (tmp_path / "link").symlink_to(victim)
    if not exchange(tmp_path / "link", store.root / "runs"):
        pytest.skip("two names cannot be exchanged here")
    before = tree(victim)
    end = threading.Event()

    def turn() -> None:
        while not end.is_set():
            exchange(tmp_path / "link", store.root / "runs")

    thread = threading.Thread(target=turn)
    thread.start()
    written = 0
    try:
        for i in range(300):
            with contextlib.suppress(StoreError):
                store.put(f"runs/a/{i}", b"1")
                written += 1
            with contextlib.suppress(StoreError):
                store.delete(["runs/thesis.txt", f"runs/a/{i}"])
            with contextlib.suppress(StoreError):
                assert "runs/thesis.txt" not in {item.name for item in store.list("runs/")}
    finally:
        end.set()
        thread.join()
    assert written
    assert tree(victim) == before


def test_only_drafts_are_swept(victim: Path, tmp_path: Path) -> None:
    """What is not named as a draft stays, whatever it is; of a link that is, nothing behind it goes."""
    first = FolderStore(tmp_path)
    first.put("a", b"1")
    first.close()
    (tmp_path / ".tmp" / "notes").mkdir()
    (tmp_path / ".tmp" / "notes" / "todo").write_text("buy milk")
    (tmp_path / ".tmp" / "12-abc").symlink_to(victim)
    (tmp_path / ".tmp" / "12-abd").mkdir()
    (tmp_path / ".tmp" / "12-abd" / "link").symlink_to(victim)
    before = tree(victim)
    FolderStore(tmp_path).put("b", b"1")
    assert (tmp_path / ".tmp" / "notes" / "todo").exists()
    assert not (tmp_path / ".tmp" / "12-abd").exists()
    assert tree(victim) == before


@contextlib.contextmanager
def a_stopped_writer(root: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that was stopped in the middle of a swap."""
    code = f"""
import os, signal
from sparserl.transport.stores.folder import FolderStore
store = FolderStore({str(root)!r})
def write(*_):
    print("inside", flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)
store._write = write
store.swap("head", b"2", store.get("head", 100).tag)
"""
    with subprocess.Popen([sys.executable, "-c", code], env=ENVIRONMENT, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "inside\n"
        try:
            yield child
        finally:
            child.kill()


def test_a_writer_that_is_stopped_holds_nobody_up(tmp_path: Path) -> None:
    """A swap gives up after its time and says whose lock it is; all else needs no lock; then the next swap works."""
    store = FolderStore(tmp_path, wait=0.3)
    tag = store.swap("head", b"1", None)
    with a_stopped_writer(tmp_path) as child:
        started = time.monotonic()
        with pytest.raises(Unavailable, match=r"/\.tmp/lock has been held by another writer.*stopped"):
            store.swap("head", b"3", tag)
        assert time.monotonic() - started >= 0.3
        other = FolderStore(tmp_path, wait=3600)
        other.put("runs/a", b"1")
        assert other.get("runs/a", 1).data == b"1"
        assert [item.name for item in other.list("")] == ["head", "runs/a"]
        other.delete(["runs/a"])
        other.close()
        interrupt = threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT))
        interrupt.start()
        with pytest.raises(KeyboardInterrupt):
            other.swap("head", b"3", tag)
        child.kill()
        child.wait()
        store.swap("head", b"3", tag)
    assert store.get("head", 10).data == b"3"


def test_a_lock_that_was_stuck_is_not_waited_for_again(tmp_path: Path) -> None:
    """Retries after a swap that waited in vain end at once, until the lock has been free."""
    store = FolderStore(tmp_path, wait=1.0)
    tag = store.swap("head", b"1", None)
    with a_stopped_writer(tmp_path):
        waits = []
        for _ in range(3):
            started = time.monotonic()
            with pytest.raises(Unavailable):
                store.swap("head", b"3", tag)
            waits.append(time.monotonic() - started)
    assert waits[0] >= 1.0
    assert min(waits[1:]) < 1.0
    assert store.swap("head", b"3", tag)


# -- targets -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def url(weights: dict[str, np.ndarray], tmp_path: Path) -> str:
    """A store with one version."""
    with Publisher(f"file://{tmp_path / 'store'}", weights) as publisher:
        publisher.publish()
    return f"file://{tmp_path / 'store'}"


@pytest.mark.parametrize("name", [".sparserl", "versions", "current", "versions/NAME", "held.json"])
def test_links_in_a_target_lead_nowhere(name: str, victim: Path, url: str, tmp_path: Path) -> None:
    """Neither a first sync nor a later one touches what a link in the folder leads to."""
    before = tree(victim)
    for synced in (False, True):
        root = tmp_path / f"out-{synced}"
        if synced:
            with Subscriber(url, targets.folder(root)) as subscriber:
                subscriber.sync()
        version = (root / "current").readlink().name if synced else "0" * 16 + "-000000000000"
        moved_behind_a_link(root / name.replace("NAME", version), victim)
        fine = name == "held.json" or (name == "versions/NAME" and not synced)
        expected = contextlib.nullcontext() if fine else pytest.raises(CheckpointError, match="link")
        with Subscriber(url, targets.folder(root)) as subscriber, expected:
            subscriber.sync()
        assert tree(victim) == before


def test_a_target_goes_on_in_the_folder_that_it_holds(
    victim: Path, url: str, weights: dict[str, np.ndarray], tmp_path: Path
) -> None:
    """A link that takes the place of a folder between attaching and building leads nobody away."""
    before = tree(victim)
    root = tmp_path / "out"
    with Subscriber(url, targets.folder(root)) as subscriber, Publisher(url, weights) as publisher:
        subscriber.sync()
        for name in (".sparserl", "versions"):
            (root / name).rename(root / f"{name}-away")
            (root / name).symlink_to(victim)
        weights["w"][3] += 1
        publisher.publish()
        with contextlib.suppress(SparserlError):
            subscriber.sync()
        assert tree(victim) == before


def test_only_what_is_ours_is_cleared(url: str, tmp_path: Path) -> None:
    """Of what lies in the folders of a target, drafts and versions go; the rest stays."""
    root = tmp_path / "out"
    strange = [".sparserl/notes.txt", ".sparserl/mine/a", "versions/mine/a", "versions/notes.txt", "other/a"]
    drafts = [f".sparserl/{'0' * 32}/a", f".sparserl/old-{'1' * 32}/b", f".sparserl/link-{'2' * 32}"]
    for name in (*strange, *drafts):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("x")
    with Subscriber(url, targets.folder(root)) as subscriber:
        subscriber.sync()
    assert all((root / name).exists() for name in strange)
    assert not any((root / name).exists() for name in drafts)


@pytest.fixture
def nest(tmp_path: Path) -> Iterator[Callable[[Path], None]]:
    """Makes folders one in the other, more than Python nests calls; pytest could not remove them, so `rm` does."""

    def make(folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY)
        for _ in range(1200):
            os.mkdir("d", dir_fd=handle)
            inner = os.open("d", os.O_RDONLY, dir_fd=handle)
            os.close(handle)
            handle = inner
        os.close(handle)

    yield make
    subprocess.run(["rm", "-rf", tmp_path / "out"], check=True)


@pytest.mark.parametrize(
    "where", [f".sparserl/{'0' * 32}", f".sparserl/old-{'1' * 32}", f"versions/{'2' * 16}-{7:012d}"]
)
def test_folders_are_removed_however_deep_they_are(
    where: str, url: str, tmp_path: Path, nest: Callable[[Path], None]
) -> None:
    """A target opens and prunes, whatever lies in its folders."""
    root = tmp_path / "out"
    nest(root / where)
    with Subscriber(url, targets.folder(root, keep=1)) as subscriber:
        assert subscriber.sync().version == 0
    assert not (root / where).exists()
    assert not any((root / ".sparserl").iterdir())


@pytest.mark.parametrize("keep", [1, 3])
def test_old_versions_are_pruned(keep: int, weights: dict[str, np.ndarray], tmp_path: Path) -> None:
    """At each commit all but the newest few go, never the current one; what a killed process left goes at the start."""
    versions = tmp_path / "out" / "versions"
    target = targets.folder(tmp_path / "out", keep=keep)
    with (
        Publisher(tmp_path / "store", weights) as publisher,
        Subscriber(publisher.store, target) as subscriber,
    ):
        for version in range(5):
            weights["w"][version] += 1
            publisher.publish()
            subscriber.sync()
            kept = [f"{publisher.run}-{number:012d}" for number in range(max(0, version + 1 - keep), version + 1)]
            assert sorted(path.name for path in versions.iterdir()) == kept
            assert target.current.resolve().name == kept[-1]
    for number in range(4):
        shutil.copytree(versions / kept[-1], versions / f"{kept[0]}.{number:08x}")
    os.utime(versions / kept[-1], (0, 0))  # the current one is not the newest on disk
    with Subscriber(tmp_path / "store", target) as subscriber:
        assert subscriber.sync() is None
        assert subscriber.version == 4
    assert len([*versions.iterdir()]) == keep
    assert (target.current / "model.safetensors").exists()


def test_folders_that_are_too_deep_are_not_copied(
    url: str, weights: dict[str, np.ndarray], tmp_path: Path, nest: Callable[[Path], None]
) -> None:
    """Somebody has put them into the current version, from which the next one is made."""
    with (
        Subscriber(url, targets.folder(tmp_path / "out")) as subscriber,
        Publisher(url, weights, files={"config.json": b"{}"}, anchor_after=100) as publisher,
    ):
        subscriber.sync()
        nest(tmp_path / "out" / "current")
        weights["w"].reshape(-1)[0] += 1
        publisher.publish()
        with pytest.raises(CheckpointError, match="folders lie one in the other"):
            subscriber.sync()


def test_what_cannot_be_removed_stops_nobody(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft that stays because the disk or somebody else keeps it is no reason not to open."""
    (tmp_path / "out" / ".sparserl" / ("0" * 32)).mkdir(parents=True)

    def keep(_: object, name: str) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted", name)

    monkeypatch.setattr(Folder, "rmdir", keep)
    with Subscriber(url, targets.folder(tmp_path / "out")) as subscriber:
        assert subscriber.sync().version == 0


HELD = {
    "an endless version": '{"run":"x","created":1,"version":1e999}',
    "an endless beginning": '{"run":"x","created":1e999,"version":1}',
    "not a number": '{"run":"x","created":NaN,"version":1}',
    "deep": "[" * 100_000,
    "long": '{"run":"x","created":1,"version":1,"more":"' + "x" * 1_000_000 + '"}',
    "digits": '{"run":"x","created":1,"version":' + "9" * 3000 + "}",
    "text": '{"run":1,"created":1,"version":"7"}',
    "no object": "null",
    "no text": "\ud800",
    "nothing": "",
}


@pytest.mark.parametrize("kind", HELD)
def test_a_note_that_nobody_can_read_is_none(kind: str, url: str, tmp_path: Path) -> None:
    """A target whose held.json is damaged remembers nothing, and goes on by its bits."""
    target = targets.folder(tmp_path / "out")
    with Subscriber(url, target) as subscriber:
        subscriber.sync()
    (tmp_path / "out" / "held.json").write_bytes(HELD[kind].encode("utf-8", "surrogatepass"))
    assert target.remembered_version() is None
    with Subscriber(url, target) as subscriber:
        assert subscriber.sync() is None
        assert subscriber.version == 0


def test_a_folder_that_appears_as_current_stays(url: str, tmp_path: Path) -> None:
    """What somebody puts in the place of the link, after the target has looked, is not removed."""
    target = targets.folder(tmp_path / "out")
    with Subscriber(url, target) as subscriber:
        subscriber.stage()
        (target.current / "deep").mkdir(parents=True)
        (target.current / "deep" / "thesis.txt").write_text("years of work")
        with pytest.raises(CommitFailed):
            subscriber.commit()
        assert (target.current / "deep" / "thesis.txt").read_text() == "years of work"


def test_pipes_in_a_target_and_a_store(url: str, tmp_path: Path) -> None:
    """Nor is one waited for where held.json, the head or the lock should be."""
    (tmp_path / "out").mkdir()
    os.mkfifo(tmp_path / "out" / "held.json")
    assert targets.folder(tmp_path / "out").remembered_version() is None
    store = FolderStore(url.removeprefix("file://"))
    (store.root / "head.json").unlink()
    os.mkfifo(store.root / "head.json")
    with pytest.raises(StoreError, match="not a regular file"):
        store.get("head.json", 100)
    (store.root / ".tmp" / "lock").unlink()
    os.mkfifo(store.root / ".tmp" / "lock")
    with pytest.raises(StoreError, match="not a regular file"):
        store.swap("head.json", b"", None)


def test_tensors_that_no_file_can_hold_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    """A folder refuses them when it attaches; in memory they are followed as any others."""
    half = Bits(np.zeros(4, np.uint32), BY_NAME["complex32"])
    pair = Bits(np.zeros((), np.uint8), BY_NAME["float4_e2m1fn_x2"])
    for place, (name, bits) in enumerate({"__metadata__": half, "half": half, "pair": pair}.items()):
        weights = {name: bits, "w": np.ones(4, np.float32)}
        url = f"file://{tmp_path / str(place)}"
        with Publisher(url, weights) as publisher:
            publisher.publish()
        mine = {name: Bits(np.ones_like(bits.array), bits.dtype), "w": np.zeros(4, np.float32)}
        with Subscriber(url, mine) as subscriber:
            subscriber.sync()
        assert sparserl.digest(mine) == sparserl.digest(weights)
        out = tmp_path / f"out-{place}"
        with Subscriber(url, targets.folder(out)) as subscriber, pytest.raises(CheckpointError, match=name):
            subscriber.sync()
        assert not out.exists()
        with pytest.raises(CheckpointError, match=name):
            write_checkpoint(out, weights, {})


def test_pairs_of_numbers_in_a_byte_are_followed(tmp_path: Path) -> None:
    """What was published from a file of F4 tensors arrives as one, with the shape that files give them."""
    header = safetensors_header({"w": {"dtype": "F4", "shape": [4, 8], "data_offsets": [0, 16]}})
    (tmp_path / "w.safetensors").write_bytes(header + bytes(range(16)))
    weights = open_checkpoint(tmp_path / "w.safetensors")
    url = f"file://{tmp_path / 'store'}"
    with Publisher(url, weights) as publisher, Subscriber(url, targets.folder(tmp_path / "out")) as subscriber:
        publisher.publish()
        subscriber.sync()
        subscriber.audit()
    written = tmp_path / "out" / "current" / "model.safetensors"
    assert sparserl.digest(open_checkpoint(written)) == sparserl.digest(weights)
    raw = written.read_bytes()
    said = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    assert said["w"]["dtype"] == "F4"
    assert said["w"]["shape"] == [4, 8]
