"""Receivers that help each other: what one has fetched it serves, and what it serves is verified as from the store."""

from __future__ import annotations

import hashlib
import shutil
import socket
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from sparserl import Publisher, Subscriber
from sparserl.errors import SessionError, SparserlError, StoreError, Unavailable
from sparserl.session.store import neighbours
from sparserl.transport.server import BackgroundServer
from sparserl.transport.stores import nearest
from sparserl.transport.stores.folder import FolderStore
from sparserl.transport.stores.mirror import MirrorStore
from tests.servers import free_ports

SIZE = 300_000


class Counting(FolderStore):
    """A store that counts what is read from it, and can be out of reach."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.reads: Counter[str] = Counter()
        self.is_away = False

    def get(self, name: str, max_bytes: int):
        if self.is_away:
            raise Unavailable("away")
        self.reads[name] += 1
        return super().get(name, max_bytes)

    @property
    def objects(self) -> Counter[str]:
        """Reads of what its name verifies."""
        return Counter({name: count for name, count in self.reads.items() if not name.endswith(".json")})


class Run:
    """A publisher, and the bits of its last version."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._rng = np.random.default_rng(1)
        self.bits = self._rng.integers(0, 2**16, SIZE, np.uint16)
        self._publisher = Publisher(path, lambda: {"w": self.bits}, anchor_after=100.0, ladder=None)
        self._publisher.publish()

    def step(self) -> None:
        self.bits = self.bits ^ (self._rng.random(SIZE) < 0.01).astype(np.uint16)
        self._publisher.publish()


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path / "store")


class Receiver:
    """A subscriber in memory."""

    def __init__(self, url: object, **options: object) -> None:
        self.weights = {"w": np.zeros(SIZE, np.uint16)}
        self.subscriber = Subscriber(url, self.weights, name=False, **options)

    def sync(self) -> np.ndarray:
        self.subscriber.sync()
        return self.weights["w"]


@pytest.fixture
def first(run: Run, tmp_path: Path) -> Iterator[Receiver]:
    """A receiver that reaches the store and serves its neighbours."""
    receiver = Receiver(Counting(run.path), serve="127.0.0.1:0", mirror=tmp_path / "mirror")
    yield receiver
    receiver.subscriber.close()


def test_neighbours_fetch_from_the_one_that_reaches_the_store(run: Run, first: Receiver) -> None:
    """Anchor and patches; every object is read from the store once, whoever needs it."""
    store = first.subscriber.store._store
    url = first.subscriber.served_url
    early = Receiver(url)
    with pytest.raises(StoreError):
        early.sync()  # the first one holds no version yet
    first.sync()
    assert (early.sync() == run.bits).all()
    for _ in range(3):
        run.step()
        first.sync()
        assert (early.sync() == run.bits).all()
        assert (first.weights["w"] == run.bits).all()
    late = Receiver(url)
    assert (late.sync() == run.bits).all()
    assert set(store.objects.values()) == {1}


def test_what_the_first_did_not_need_is_fetched_for_neighbours(run: Run, tmp_path: Path) -> None:
    """The first one begins at a later version, so that it never needed the patches that a neighbour asks for."""
    behind = Receiver(run.path)
    behind.sync()
    run.step()
    run.step()
    anchored = {"w": run.bits.copy()}
    subscriber = Subscriber(Counting(run.path), anchored, name=False, serve="127.0.0.1:0", mirror=tmp_path / "mirror")
    run.step()
    subscriber.sync()
    patient = Receiver(subscriber.served_url)
    patient.weights["w"][:] = behind.weights["w"]
    assert patient.subscriber.sync().kind == "patch"
    assert (patient.weights["w"] == run.bits).all()
    subscriber.close()


def test_a_restarted_receiver_has_its_own_mirror(run: Run, first: Receiver, tmp_path: Path) -> None:
    first.sync()
    first.subscriber.close()
    store = Counting(run.path)
    again = Receiver(store, mirror=tmp_path / "mirror")
    assert (again.sync() == run.bits).all()
    assert not store.objects


def test_a_served_mirror_helps_before_its_first_commit(run: Run, first: Receiver, tmp_path: Path) -> None:
    """After a restart it serves what it has, also while the store is out of reach."""
    first.sync()
    first.subscriber.close()
    store = Counting(run.path)
    store.is_away = True
    again = Receiver(store, serve="127.0.0.1:0", mirror=tmp_path / "mirror")
    assert (Receiver(again.subscriber.served_url).sync() == run.bits).all()
    again.subscriber.close()


def damage(folder: Path) -> int:
    """Damage every bucket in a folder; how many there were."""
    count = 0
    for path in folder.rglob("buckets/*/*"):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
        count += 1
    return count


def test_damage_in_a_mirror_is_mended_from_the_store(run: Run, first: Receiver, tmp_path: Path) -> None:
    first.sync()
    first.subscriber.close()
    assert damage(tmp_path / "mirror")
    assert (Receiver(run.path, mirror=tmp_path / "mirror").sync() == run.bits).all()


def test_what_a_neighbour_damages_is_not_taken(run: Run, tmp_path: Path) -> None:
    """One that asks nobody else refuses it; one that can ask the store takes it from there."""
    bad = tmp_path / "bad"
    shutil.copytree(run.path, bad)
    assert damage(bad)
    server = BackgroundServer(bad, "127.0.0.1:0")
    alone = Receiver(server.url)
    with pytest.raises(SparserlError, match="name promises"):
        alone.sync()
    assert not alone.weights["w"].any()
    store = Counting(run.path)
    assert (Receiver(store, near=[server.url]).sync() == run.bits).all()
    assert any("/buckets/" in name for name in store.objects)
    server.close()


def test_near_neighbours_are_asked_first(run: Run, first: Receiver) -> None:
    first.sync()
    store = Counting(run.path)
    assert (Receiver(store, near=["http://127.0.0.1:9", first.subscriber.served_url]).sync() == run.bits).all()
    assert not store.objects
    first.subscriber.close()
    run.step()
    away = Receiver(store, near=[str(first.subscriber.served_url)])
    assert (away.sync() == run.bits).all()  # the neighbour is gone, the store is not


def test_neighbours_need_the_token(run: Run, tmp_path: Path) -> None:
    first = Receiver(run.path, serve="127.0.0.1:0", mirror=tmp_path / "mirror", token="secret")
    first.sync()
    with pytest.raises(StoreError):
        Receiver(first.subscriber.served_url).sync()
    assert (Receiver(first.subscriber.served_url, token="secret").sync() == run.bits).all()
    first.subscriber.close()


def test_a_full_disk_stops_no_sync(run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    receiver = Receiver(run.path, mirror=tmp_path / "mirror")

    def put(name: str, data: bytes) -> None:
        raise StoreError(f"no space left for {name}")

    receiver.subscriber.store.folder.put = put
    assert (receiver.sync() == run.bits).all()
    assert "neighbours cannot be served" in caplog.text


def test_a_folder_that_is_no_mirror_is_refused(run: Run, tmp_path: Path) -> None:
    """Another store most of all: its head would be replaced. Nor can two receivers have one mirror."""
    before = (run.path / "head.json").read_bytes()
    with pytest.raises(SessionError, match="the store itself"):
        Receiver(run.path, mirror=run.path)
    with pytest.raises(SessionError, match="holds other files"):
        Receiver(tmp_path / "elsewhere", mirror=run.path)
    assert (run.path / "head.json").read_bytes() == before
    (tmp_path / "file").write_bytes(b"in the way")
    with pytest.raises(SessionError, match="cannot be the folder of a mirror"):
        Receiver(run.path, mirror=tmp_path / "file")
    first = Receiver(run.path, mirror=tmp_path / "mirror")
    with pytest.raises(SessionError, match="another receiver"):
        Receiver(run.path, mirror=tmp_path / "mirror")
    first.subscriber.close()
    Receiver(run.path, mirror=tmp_path / "mirror").subscriber.close()


def test_the_mirror_of_another_store_shows_no_head(run: Run, first: Receiver, tmp_path: Path) -> None:
    """A job that moves to another store must not hand out the weights of the last one."""
    first.sync()
    first.subscriber.close()
    other = Run(tmp_path / "other")
    again = Receiver(other.path, serve="127.0.0.1:0", mirror=tmp_path / "mirror")
    with pytest.raises(StoreError):
        Receiver(again.subscriber.served_url).sync()
    assert (again.sync() == other.bits).all()
    assert (Receiver(again.subscriber.served_url).sync() == other.bits).all()
    again.subscriber.close()


def test_an_object_without_a_hash_in_its_name_is_the_stores_own(run: Run, first: Receiver, tmp_path: Path) -> None:
    """Neither a mirror nor a neighbour can lock a receiver out by it."""
    first.sync()
    for path in (tmp_path / "mirror").rglob("run.json"):
        path.write_bytes(b"{}")
    assert (Receiver(run.path, near=[first.subscriber.served_url]).sync() == run.bits).all()
    first.subscriber.close()
    assert (Receiver(run.path, mirror=tmp_path / "mirror").sync() == run.bits).all()


def test_a_mirror_that_is_damaged_while_it_is_served_mends_itself(run: Run, first: Receiver, tmp_path: Path) -> None:
    first.sync()
    assert (Receiver(first.subscriber.served_url).sync() == run.bits).all()
    assert damage(tmp_path / "mirror")
    assert (Receiver(first.subscriber.served_url).sync() == run.bits).all()
    for path in (tmp_path / "mirror").rglob("buckets/*/*"):
        path.unlink()
    assert (Receiver(first.subscriber.served_url).sync() == run.bits).all()


def test_neighbours_that_ask_each_other_wait_for_nobody(run: Run, tmp_path: Path) -> None:
    """Whoever is asked looks in the store, and does not ask on."""
    ports = free_ports(2)
    receivers = [
        Receiver(
            run.path,
            serve=f"127.0.0.1:{ports[i]}",
            near=[f"http://127.0.0.1:{ports[1 - i]}"],
            mirror=tmp_path / f"mirror-{i}",
        )
        for i in range(2)
    ]
    for _ in range(3):
        run.step()
        with ThreadPoolExecutor(2) as pool:
            for bits in pool.map(lambda receiver: receiver.sync(), receivers):
                assert (bits == run.bits).all()
    for receiver in receivers:
        receiver.subscriber.close()


def test_a_neighbour_that_hangs_is_not_waited_for(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nearest, "_PATIENCE", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        assert (Receiver(run.path, near=[url]).sync() == run.bits).all()


def test_neighbours_cannot_ask_for_anything_else(run: Run, first: Receiver, tmp_path: Path) -> None:
    """Only what the shown run consists of is fetched for them."""
    first.sync()
    mirror = first.subscriber.store
    assert isinstance(mirror, MirrorStore)
    store = mirror._store
    other = f"runs/0123456789abcdef/index/{hashlib.sha256(b'another run').hexdigest()}"
    store.put(other, b"another run")
    before = store.objects
    assert not mirror.fill(other)
    assert not mirror.fill("runs/leases/x")
    assert store.objects == before


def test_old_objects_leave_the_mirror(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the store does not refer to any more goes, after a while; what it has stays."""
    monkeypatch.setattr(neighbours, "_COLLECT_EVERY", 0.0)
    monkeypatch.setattr(neighbours, "_GRACE", -1.0)
    receiver = Receiver(run.path, mirror=tmp_path / "mirror")
    receiver.sync()
    old = set((tmp_path / "mirror").rglob("buckets/*/*"))
    with Publisher(run.path, {"w": run.bits}, new_run=True) as publisher:
        publisher.publish()
    receiver.sync()
    receiver.subscriber.close()
    kept = set((tmp_path / "mirror").rglob("buckets/*/*"))
    assert old
    assert not kept, "the weights are the same, so that nothing of the new run was needed"
    assert (Receiver(run.path, mirror=tmp_path / "mirror").sync() == run.bits).all()


def test_options_are_checked(run: Run) -> None:
    with pytest.raises(SessionError, match="mirror="):
        Receiver(run.path, serve="127.0.0.1:0")
    with pytest.raises(SessionError, match="list of URLs"):
        Receiver(run.path, near="http://127.0.0.1:9")
    with pytest.raises(StoreError, match="HOST:PORT"):
        Receiver(run.path, serve="nowhere", mirror=run.path.with_name("unused"))
    for options, words in (
        ({"near": ["127.0.0.1:9"]}, "http://neighbour"),
        ({"serve": 9000, "mirror": "unused"}, "HOST:PORT"),
        ({"serve": "127.0.0.1:0", "mirror": "unused", "token": ""}, "not empty"),
        ({"mirror": ""}, "path of a folder"),
        ({"mirror": "s3://bucket/mirror"}, "path of a folder"),
    ):
        with pytest.raises(SessionError, match=words):
            Receiver(run.path, **options)
