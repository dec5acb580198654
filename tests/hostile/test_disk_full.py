"""A disk that is full: targets say so, keep what they have, and go on when there is room again."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from sparserl import Publisher, Subscriber, targets
from sparserl.errors import CheckpointError, CommitFailed, SessionError, SparserlError
from sparserl.session import anchors
from sparserl.session.options import EncodingOptions
from sparserl.sources import open_checkpoint

pytestmark = pytest.mark.skipif(os.geteuid() != 0 or shutil.which("mount") is None, reason="disks cannot be mounted")
SIZE = 400_000  # bytes of the weights


class Disk:
    """A small disk of its own."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def free(self) -> int:
        status = os.statvfs(self.path)
        return status.f_bavail * status.f_frsize

    def fill(self, leave: int = 0) -> None:
        """Leave so much room and no more."""
        with contextlib.suppress(OSError), (self.path / "fill").open("wb", buffering=0) as file:
            while self.free > leave:
                file.write(bytes(4096))

    def use_up_names(self) -> None:
        """Leave no room for another file, however small."""
        (self.path / "names").mkdir()
        with contextlib.suppress(OSError):
            for i in range(1000):
                (self.path / "names" / str(i)).touch()

    def clear(self) -> None:
        """Make room again."""
        (self.path / "fill").unlink(missing_ok=True)
        shutil.rmtree(self.path / "names", ignore_errors=True)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    path = tmp_path / "disk"
    path.mkdir()
    options = f"size={4 * SIZE},nr_inodes=64"
    mount = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("disks cannot be mounted")
    try:
        yield Disk(path)
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


class Run:
    """A publisher, and a subscriber whose folder is on the small disk."""

    def __init__(self, disk: Disk, store: Path) -> None:
        self.weights = {"w": np.random.default_rng(0).integers(0, 1 << 32, SIZE // 4, np.uint32)}
        self.publisher = Publisher(f"file://{store}", self.weights)
        self.target = targets.folder(disk.path / "model")
        self.subscriber = Subscriber(f"file://{store}", self.target)

    def publish(self) -> None:
        self.weights["w"][::1000] += 1
        self.publisher.publish()

    def holds(self, version: int) -> None:
        """The version is held, the engine sees it and nothing else is left in the folder."""
        held = self.target.remembered_version()
        assert held is not None
        assert (self.subscriber.version, held[2]) == (version, version)
        assert f"-{version:012d}" in self.target.current.readlink().name
        assert list(self.target.building.iterdir()) == []
        assert len(list((self.target.root / "versions").iterdir())) <= 2
        self.subscriber.audit()

    def close(self) -> None:
        self.publisher.close()
        self.subscriber.close()


@pytest.fixture
def run(disk: Disk, tmp_path: Path) -> Iterator[Run]:
    """A run whose first version is held, and whose second is published."""
    run = Run(disk, tmp_path / "store")
    run.publish()
    run.subscriber.sync()
    run.publish()
    yield run
    run.close()


def test_a_version_that_does_not_fit(run: Run, disk: Disk) -> None:
    """It is refused, what is held stays, no draft is left, and with room again it is taken."""
    disk.fill(leave=SIZE // 2)
    free = disk.free
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"version 1: .*No space left"):
            run.subscriber.sync()
        run.holds(0)
        assert disk.free == free
    disk.clear()
    run.subscriber.sync()
    run.holds(1)


def test_an_anchor_that_does_not_fit(run: Run, disk: Disk, tmp_path: Path) -> None:
    """The same for a folder that has nothing yet."""
    disk.fill(leave=SIZE // 2)
    target = targets.folder(disk.path / "new")
    with Subscriber(f"file://{tmp_path / 'store'}", target) as subscriber:
        with pytest.raises(CheckpointError, match="No space left"):
            subscriber.sync()
        assert list(target.building.iterdir()) == []
        assert target.remembered_version() is None
        disk.clear()
        subscriber.sync()
        assert open_checkpoint(target.current)["w"].array.tolist() == run.weights["w"].tolist()


def test_a_commit_takes_no_room(run: Run, disk: Disk) -> None:
    """A disk that fills up after staging makes no difference to the commit, nor to the versions after it."""
    run.subscriber.stage()
    disk.fill()
    assert disk.free == 0
    run.subscriber.commit()
    run.holds(1)
    assert run.subscriber.sync() is None
    disk.clear()
    for version in (2, 3, 4):
        run.publish()
        run.subscriber.sync()
        run.holds(version)


def test_a_commit_that_cannot_make_its_links(run: Run, disk: Disk) -> None:
    """It is undone and told so; where there are names again the version is taken."""
    run.subscriber.stage()
    disk.use_up_names()
    with pytest.raises(CommitFailed, match="version 1 was not committed"):
        run.subscriber.commit()
    disk.clear()
    assert run.target.current.readlink().name.endswith("-000000000000")
    run.subscriber.sync()
    run.holds(1)


class FillsTheDisk:
    """A target that holds nothing, and whose commit uses up a disk and fails."""

    profiles: frozenset[str] | None = None
    keeps_files = False
    changed = 0

    def __init__(self, disk: Disk) -> None:
        self._disk = disk

    def attach(self, table: object) -> None:
        return None

    def remembered_version(self) -> None:
        return None

    def prepare(self, change: object) -> FillsTheDisk:
        return self

    def commit(self) -> object:
        self._disk.fill()
        self._disk.use_up_names()
        raise OSError(errno.ENOSPC, "no room")

    def discard(self) -> None:
        pass

    def close(self) -> None:
        pass


def test_taking_back_takes_no_room(run: Run, disk: Disk) -> None:
    """Where another target fails on a full disk, a folder that has committed goes back to the version before."""
    before = run.target.current.readlink()
    with Subscriber(run.publisher.store, [run.target, FillsTheDisk(disk)], name=False) as both:
        with pytest.raises(CommitFailed, match="nothing has changed"):
            both.sync()
        assert run.target.current.readlink() == before
        assert list(run.target.building.iterdir()) == []
    disk.clear()
    run.subscriber.sync()
    run.holds(1)


def test_a_temporary_folder_without_room(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    """A patch that is too large for it is an error that says where room is needed."""
    monkeypatch.setattr("tempfile.tempdir", str(disk.path))
    monkeypatch.setattr(anchors, "SPOOL_BYTES", 0)
    weights = {"w": np.random.default_rng(0).integers(0, 1 << 32, 2 * SIZE, np.uint32)}
    with pytest.raises(SessionError, match=f"room in {disk.path}"):
        anchors.anchor_of(weights, EncodingOptions("auto", None, None, None))
    assert list(disk.path.iterdir()) == []


def test_following_waits_for_room(run: Run, disk: Disk) -> None:
    """It is told of the full disk, the folder stays as it was, and the next look at the store tries again."""
    told: list[SparserlError] = []

    def make_room(error: SparserlError) -> None:
        told.append(error)
        run.holds(0)
        disk.clear()

    disk.fill()
    run.subscriber.follow(stop=lambda: run.subscriber.version == 1, on_trouble=make_room, timeout=900)
    assert [type(error) for error in told] == [CheckpointError]
    run.holds(1)


def test_a_folder_that_something_else_changed(run: Run) -> None:
    """Without the link to its version it starts from an anchor, at the next sync."""
    run.target.current.unlink()
    with pytest.raises(CheckpointError, match="the next sync starts from an anchor"):
        run.subscriber.sync()
    report = run.subscriber.sync()
    assert report is not None
    assert report.kind == "anchor"
    run.holds(1)
