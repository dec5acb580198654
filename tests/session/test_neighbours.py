"""Receivers that help each other: what one has fetched it serves, and what it serves is verified as from the store."""

from __future__ import annotations

import hashlib
import shutil
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path

import numpy as np
import pytest

from sparserl import Publisher, Subscriber
from sparserl.errors import SessionError, SparserlError, StoreError, Unavailable
from sparserl.session.store import neighbours
from sparserl.session.store.records import HOLDING, INDEX, MANIFEST, MOST_FILE
from sparserl.transport.server import BackgroundServer
from sparserl.transport.stores import mirror, nearest
from sparserl.transport.stores.base import is_named_by_hash
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
        self.gate = threading.Event()  # while it is closed, the store is slow
        self.gate.set()

    def get(self, name: str, max_bytes: int):
        self.gate.wait(60)
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
    store = first.subscriber.store.origin
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
    store = mirror.origin
    other = f"runs/0123456789abcdef/index/{hashlib.sha256(b'another run').hexdigest()}"
    store.put(other, b"another run")
    before = store.objects
    assert not mirror.fill(other)
    assert not mirror.fill("runs/leases/x")
    assert store.objects == before


def ask(receiver: Receiver, name: str, method: str = "GET", **headers: str) -> tuple[int, bytes]:
    """The status and the body of an answer of a receiver that serves its neighbours."""
    connection = HTTPConnection(str(receiver.subscriber.served_url).removeprefix("http://"), timeout=60)
    with closing(connection):
        connection.request(method, f"/{name}", headers={key.replace("_", "-"): value for key, value in headers.items()})
        answer = connection.getresponse()
        return answer.status, answer.read()


def nothings(receiver: Receiver, count: int) -> list[str]:
    """Names of objects of the run that do not exist."""
    hashes = [hashlib.sha256(str(number).encode()).hexdigest() for number in range(count)]
    return [f"runs/{receiver.subscriber.run}/buckets/{'0' * 16}/{hash}" for hash in hashes]


def served_objects(receiver: Receiver) -> list[str]:
    """What is in the mirror of a receiver and named by its hash, the largest last."""
    listed = receiver.subscriber.store.folder.list("runs/")
    return [item.name for item in sorted(listed, key=lambda item: item.size) if is_named_by_hash(item.name)]


@pytest.fixture
def late(run: Run, tmp_path: Path) -> Iterator[Receiver]:
    """A receiver that serves its neighbours, and began at the second version: it has needed one patch."""
    run.step()
    receiver = Receiver(Counting(run.path), serve="127.0.0.1:0", mirror=tmp_path / "late-mirror")
    receiver.weights["w"][:] = run.bits
    run.step()
    receiver.sync()
    yield receiver
    receiver.subscriber.close()


def unneeded(receiver: Receiver) -> list[str]:
    """Buckets that the head leads to and that a receiver has not fetched."""
    store = receiver.subscriber.store
    return sorted(
        {item.name for item in store.list("runs/") if "/buckets/" in item.name} - set(served_objects(receiver))
    )


def test_what_no_head_leads_to_is_not_looked_for(late: Receiver) -> None:
    """A hundred requests for objects that do not exist cost the store nothing, nor do two for one that is lost."""
    store = late.subscriber.store.origin
    names = nothings(late, 100)
    assert ask(late, names[0])[0] == 404  # finds out what the head leads to
    before = store.reads.copy()
    assert {ask(late, name)[0] for name in names} == {404}
    assert store.reads == before
    lost = unneeded(late)[0]
    store.delete([lost])
    assert [ask(late, lost)[0] for _ in range(3)] == [404] * 3
    assert store.reads[lost] == 1


def test_what_is_in_the_mirror_waits_for_nothing(late: Receiver) -> None:
    """While neighbours ask for what must be fetched from a store that hangs, the rest is served."""
    store = late.subscriber.store.origin
    held = served_objects(late)[-1]
    wanted = unneeded(late) + nothings(late, 20)
    late.subscriber.store._intact.clear()  # as after a restart: what is there has to be verified first
    store.gate.clear()
    with ThreadPoolExecutor(2 * len(wanted)) as pool:
        asked = [pool.submit(ask, late, name) for name in 2 * wanted]
        for _ in range(5):
            assert ask(late, held)[0] == 200
        assert not any(one.done() for one in asked)
        store.gate.set()
        answers = [one.result() for one in asked]
    for name, (status, data) in zip(2 * wanted, answers, strict=True):
        if store.reads[name]:
            assert (status, hashlib.sha256(data).hexdigest()) == (200, name.rpartition("/")[2])
            assert store.reads[name] == 1
        else:
            assert status == 404
    assert not unneeded(late)


@pytest.mark.parametrize("restarted", [False, True])
def test_what_is_in_the_mirror_is_read_once(
    run: Run, first: Receiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restarted: bool
) -> None:
    """To verify it, at most; then no more of it than is asked for. What is changed on the disk is verified anew."""
    first.sync()
    if restarted:
        first.subscriber.close()
        first = Receiver(Counting(run.path), serve="127.0.0.1:0", mirror=tmp_path / "mirror")
    name = served_objects(first)[-1]
    reads: Counter[str] = Counter()
    read = FolderStore.read

    def counted(store: FolderStore, name: str, start: int, size: int) -> bytes:
        reads[name] += 1
        return read(store, name, start, size)

    monkeypatch.setattr(FolderStore, "read", counted)
    for _ in range(3):
        assert ask(first, name, "HEAD") == (200, b"")
        assert ask(first, name, range="bytes=0-0")[0] == 206
        assert ask(first, name, if_none_match=f'"{name.rpartition("/")[2]}"') == (304, b"")
        assert hashlib.sha256(ask(first, name)[1]).hexdigest() == name.rpartition("/")[2]
    assert reads[name] == restarted
    damage(tmp_path / "mirror")
    damaged = "/buckets/" in name and not restarted  # the new one has shown no head, for which it could be mended
    assert ask(first, name)[0] == (200 if damaged else 404)
    first.subscriber.close()


def test_a_large_object_is_for_neighbours_too(late: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the protocol allows to be stored is served, and fetched for a neighbour: the larger, one at a time."""
    monkeypatch.setattr(mirror, "_LARGE_BYTES", 10)
    assert unneeded(late)
    for name in unneeded(late) + served_objects(late):
        assert hashlib.sha256(ask(late, name)[1]).hexdigest() == name.rpartition("/")[2]
    assert mirror.MOST_OBJECT_BYTES >= MOST_FILE
    assert max(INDEX.size, MANIFEST.size, HOLDING.size) <= mirror.MOST_OBJECT_BYTES


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
