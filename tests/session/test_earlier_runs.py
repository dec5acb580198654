"""What a publisher may replace and delete: no run without being told to, and nothing before the grace has passed."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import numpy as np
import pytest

import sparserl
from sparserl import Publisher, Subscriber
from sparserl.errors import Fenced, SessionError, StoreError, UnsupportedFormat, WeightsError
from sparserl.plan import routing
from sparserl.session.store import signing
from sparserl.session.store.fields import sha256
from sparserl.session.store.pins import pin_path
from sparserl.session.store.records import HEAD, HeadRecord, Index, path
from sparserl.session.store.retention import collect, faults, needed, read_head, read_index
from sparserl.session.store.stored_run import StoredRun
from sparserl.transport.stores.folder import FolderStore
from tests.session.policy import Policy, bits

HOURS = 2 * 3600.0
SECRET, PUBLIC = signing.keygen()
OFTEN = {"anchor_after": 0.0, "keep_anchors": 1, "ladder": None, "threads": 1}


class Archive:
    """A run of three versions, written two hours ago, and a copy of its head."""

    def __init__(self, root: Path, key: str | None = None) -> None:
        self.root = root
        self.policy = Policy()
        with Publisher(root, self.policy.weights, keep_anchors=None, signing_key=key, threads=1) as publisher:
            for _ in range(3):
                publisher.publish()
                self.policy.step()
        self.run = publisher.run
        self.head = self.root / HEAD
        self.copy = self.head.read_bytes()
        self.age()
        self.objects = self.names()

    def age(self) -> None:
        """Let all objects be two hours old."""
        then = time.time() - HOURS
        for file in self.root.rglob("*"):
            os.utime(file, (then, then))

    def names(self) -> set[str]:
        """The objects of all runs, without those that receivers write."""
        store = FolderStore(self.root)
        return {item.name for item in store.list("runs/") if "/leases/" not in item.name}

    def publish(self, publisher: Publisher) -> int:
        self.policy.step()
        return publisher.publish().version


@pytest.fixture
def archive(tmp_path: Path) -> Archive:
    return Archive(tmp_path / "store")


# -- runs without a head -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", [None, b"", b'{"half": ', b" " * 70_000], ids=["gone", "empty", "cut", "too large"])
@pytest.mark.parametrize("key", [None, SECRET], ids=["unsigned", "signed"])
def test_a_run_whose_head_is_lost_is_not_replaced(tmp_path, damage, key):
    """Whoever starts then is told of the run, and what to do; a copy of the head continues it."""
    archive = Archive(tmp_path / "store", key)
    archive.head.unlink()
    if damage is not None:
        archive.head.write_bytes(damage)
    words = rf"To go on with run {archive.run}, put back a copy of head\.json\. To begin a new run, pass new_run=True"
    with pytest.raises(SessionError, match=words):
        Publisher(archive.root, archive.policy.weights, signing_key=key)
    assert archive.names() == archive.objects
    archive.head.write_bytes(archive.copy)
    with Publisher(archive.root, archive.policy.weights, signing_key=key) as publisher:
        assert (publisher.run, archive.publish(publisher)) == (archive.run, 3)


def test_what_a_new_run_replaces_stays_for_the_grace(archive):
    """However old it is: it was in use until now. The publish that begins the run deletes nothing, by any grace."""
    archive.head.unlink()
    with Publisher(archive.root, archive.policy.weights, new_run=True, grace=0.0, **OFTEN) as publisher:
        publisher.publish()
        assert archive.objects <= archive.names()
    later = [0.0]
    options = {"grace": 600.0, "clock": lambda: time.time() + later[0], **OFTEN}
    with Publisher(archive.root, archive.policy.weights, **options) as publisher:
        for later[0] in (0.0, 300.0):
            assert archive.publish(publisher) > 0
            assert archive.objects <= archive.names()
        later[0] = 1200.0
        archive.publish(publisher)
    assert not any(archive.run in name for name in archive.names())


def test_who_keeps_all_versions_keeps_those_of_earlier_runs(archive):
    """Only `gc`, or a publisher that keeps fewer, deletes them."""
    clock = lambda: time.time() + 30 * 86400  # noqa: E731
    kept = {**OFTEN, "keep_anchors": None}
    archive.head.unlink()
    with Publisher(archive.root, archive.policy.weights, new_run=True, grace=0.0, clock=clock, **kept) as publisher:
        for _ in range(3):
            archive.publish(publisher)
    assert archive.objects <= archive.names()
    store = FolderStore(archive.root)
    collect(store, 600.0)
    assert archive.objects <= archive.names()
    collect(store, 600.0, clock)
    assert not archive.objects & archive.names()
    assert list(faults(store)) == []


class Broken(FolderStore):
    """A folder store that refuses to write some objects, or in which something happens when it is listed."""

    refused: str | None = None
    meanwhile = None

    def put(self, name, data):
        if self.refused is not None and self.refused in name:
            raise StoreError("the store is away")
        super().put(name, data)

    def swap(self, name, data, tag):
        if name == self.refused:
            raise StoreError("the store is away")
        return super().swap(name, data, tag)

    def list(self, prefix):
        if prefix == "runs/" and self.meanwhile is not None:
            work, self.meanwhile = self.meanwhile, None
            work()
        return super().list(prefix)


@pytest.mark.parametrize("last", ["/manifests/", "/index/", HEAD])
def test_what_a_first_publish_left_behind(tmp_path, last):
    """Before it wrote an index, it was no run. After that nobody can tell whether it was seen: it must be given up."""
    store = Broken(tmp_path)
    store.refused = last
    policy = Policy()
    with Publisher(store, policy.weights) as publisher, pytest.raises(StoreError):
        publisher.publish()
    store.refused = None
    if last == HEAD:
        with pytest.raises(SessionError, match=r"has no head\.json.*new_run=True"):
            Publisher(store, policy.weights)
    with Publisher(store, policy.weights, new_run=last == HEAD) as publisher:
        assert publisher.publish().version == 0


def test_a_head_that_another_publisher_is_just_moving(tmp_path):
    """Two that begin at the same time: the run of the one is no run without a head to the other."""
    policy, other = Policy(1), Policy(2)
    store = Broken(tmp_path)
    first = Publisher(tmp_path, policy.weights)
    store.meanwhile = first.publish
    with Publisher(store, other.weights) as second:
        assert (second.run, second.version) == (first.run, 0)
        second.publish()
    policy.step()
    with pytest.raises(Fenced):
        first.publish()


def test_garbage_does_not_stop_a_publisher_that_runs(archive):
    """It knows what it has published, with and without a key. One that has published nothing has no run to defend."""
    waiting = Publisher(archive.root, archive.policy.weights, new_run=True)
    with Publisher(archive.root, archive.policy.weights) as publisher:
        for version in (3, 4):
            archive.head.write_bytes(b"garbage")
            assert archive.publish(publisher) == version
    archive.head.write_bytes(b"garbage")
    with pytest.raises(Fenced):
        waiting.publish()


# -- heads that were put back ------------------------------------------------------------------------------------------


def test_versions_after_an_older_head_stay_for_the_grace(archive):
    """A copy of an older head was put back: until then the newer versions were in use, however old they are."""
    with Publisher(archive.root, archive.policy.weights) as publisher:
        archive.publish(publisher)
    archive.age()
    archive.head.write_bytes(archive.copy)
    store = FolderStore(archive.root)
    assert collect(store, 600.0) == []
    assert collect(store, 600.0, lambda: time.time() + 601)
    assert archive.names() == needed(store, read_head(store)[0]) - {HEAD}
    assert list(faults(store)) == []


def test_a_new_run_that_was_taken_back_stays_for_the_grace(archive):
    """It was in use until the head of the run before it was put back, and is no later than that collected."""
    with Publisher(archive.root, archive.policy.weights, new_run=True) as mistaken:
        mistaken.publish()
    archive.age()
    archive.head.write_bytes(archive.copy)
    store = FolderStore(archive.root)
    assert collect(store, 600.0) == []
    with Publisher(archive.root, archive.policy.weights, **OFTEN) as publisher:
        archive.publish(publisher)
        archive.publish(publisher)
    assert any(mistaken.run in name for name in archive.names())
    assert collect(store, 600.0, lambda: time.time() + 601)
    assert not any(mistaken.run in name for name in archive.names())


@pytest.mark.parametrize("of", ["this run", "an earlier run"])
@pytest.mark.parametrize("key", [None, SECRET], ids=["unsigned", "signed"])
def test_a_publisher_that_restarts_on_an_old_head(tmp_path, key, of):
    """With its state it knows that it has published more, and has a copy of the head to go on from."""
    archive = Archive(tmp_path / "store", key)
    options = {"state": tmp_path / "state", "signing_key": key, "ladder": None}
    with Publisher(archive.root, archive.policy.weights, new_run=of == "an earlier run", **options) as publisher:
        archive.publish(publisher)
        newest = archive.publish(publisher)
    run = publisher.run
    archive.head.write_bytes(archive.copy)
    told = f"has an old head, of run {archive.run} at version 2; .* published run {run} up to version {newest}"
    with pytest.raises(SessionError, match=told):
        Publisher(archive.root, archive.policy.weights, **options)
    [copy] = (tmp_path / "state").glob("head-*.json")
    archive.head.write_bytes(copy.read_bytes())
    with Publisher(archive.root, archive.policy.weights, **options) as publisher:
        assert (publisher.run, archive.publish(publisher)) == (run, newest + 1)
    archive.head.write_bytes(archive.copy)
    with Publisher(archive.root, archive.policy.weights, new_run=True, **options) as publisher:
        assert archive.publish(publisher) == 0
    with Publisher(archive.root, archive.policy.weights, **options) as again:
        assert again.run == publisher.run


# -- weights, indices and pins -----------------------------------------------------------------------------------------


def test_weights_that_change_while_they_are_published(url, monkeypatch):
    """It is said, nothing is published, and the run goes on."""
    generator = np.random.default_rng(0)
    weights = {"w": generator.standard_normal(10_000).astype(np.float32)}
    compare = routing._compare
    with Publisher(url, weights, threads=1) as publisher:
        run = publisher.publish().run
        weights["w"] += 1

        def written_to(*args):
            weights["w"][77] = -5  # as another thread may at this moment
            return compare(*args)

        monkeypatch.setattr(routing, "_compare", written_to)
        with pytest.raises(WeightsError, match="the weights changed while they were published"):
            publisher.publish()
        monkeypatch.undo()
        assert publisher.version == 0
        report = publisher.publish()
        assert (report.run, report.version, report.kind) == (run, 1, "patch")
        mine = {"w": np.zeros_like(weights["w"])}
        Subscriber(url, mine).sync()
        assert bits(mine) == bits(weights)


def test_first_weights_that_change_while_they_are_published(url, monkeypatch):
    """A source that tracks changes is read twice: its anchor must be of what the next patch starts from."""
    torch = pytest.importorskip("torch")
    model = torch.nn.Linear(40, 40)
    source = sparserl.sources.track(torch.optim.SGD(model.parameters(), lr=1.0), model)
    anchor_now = Publisher._anchor_now

    def written_to(publisher, weights, watch):
        with torch.no_grad():
            model.bias += 1  # as another thread may at this moment
        return anchor_now(publisher, weights, watch)

    with Publisher(url, source) as publisher:
        monkeypatch.setattr(Publisher, "_anchor_now", written_to)
        with pytest.raises(WeightsError, match="the weights changed while they were published"):
            publisher.publish()
        monkeypatch.undo()
        run = publisher.publish().run
        with torch.no_grad():
            model.bias += 1
        assert publisher.publish().run == run


def test_an_index_without_an_anchor(tmp_path):
    """A publisher that goes on from its own state writes one: late subscribers need it."""
    weights = {"w": np.zeros(500, np.float32)}
    options = {"state": tmp_path / "state", "ladder": None, "threads": 1}
    store = FolderStore(tmp_path / "store")
    with Publisher(store, weights, **options) as publisher:
        publisher.publish()
        weights["w"][0] = 1
        publisher.publish()
    head, tag = read_head(store)
    patches = tuple(step for step in read_index(store, head).steps if step.base is not None)
    data = Index(head.run, patches).to_bytes()
    store.put(path(head.run, "index", sha256(data)), data)
    store.swap(HEAD, signing.seal(HeadRecord(**{**vars(head), "index": sha256(data)}).body(), None), tag)
    with Publisher(store, weights, **options) as publisher:
        weights["w"][1] = 1
        report = publisher.publish()
    assert (report.run, report.version, report.notes) == (head.run, 2, ())
    mine = {"w": np.ones(500, np.float32)}
    assert Subscriber(store, mine).sync().kind == "anchor"
    assert bits(mine) == bits(weights)


def test_storage_is_bounded_beside_damaged_pins(url, log):
    """Whatever of a pin is damaged, collections go on, say so each time, and keep what other pins need."""
    policy = Policy()
    now = time.time() + 3600
    publisher = Publisher(url, policy.weights, grace=0.0, clock=lambda: now, **OFTEN)
    root = Path(url.removeprefix("file://"))
    weights = []
    for version in range(6):
        publisher.publish()
        weights.append(bits(policy.weights))
        policy.step()
        sparserl.pin(url, version)
    run = publisher.run
    pins = {pin.name: pin for pin in sparserl.pins(url)}
    index = read_index(publisher.store, pins["v1"].head())
    manifest = next(step.manifest for step in index.steps if step.version == 1)
    publisher.close()
    publisher = Publisher(url, policy.weights, new_run=True, grace=0.0, clock=lambda: now, **OFTEN)
    publisher.publish()
    damaged = [
        root / "pins" / "v0",
        root / path(run, "manifests", manifest),
        root / path(run, "index", pins["v2"].head().index),
    ]
    for file in damaged:
        file.chmod(0o644)
        file.write_bytes(b"")
    found = "\n".join(faults(publisher.store))
    assert all(words in found for words in ("pin v0 is damaged", "pin v1: ", "the index of pin v2 is damaged"))
    counts = []
    publisher.publish()
    policy.step()
    for _ in range(6):
        before = len(log("WARNING"))
        assert publisher.publish().notes == ()
        policy.step()
        counts.append(len(list(publisher.store.list("runs/"))))
        told = "\n".join(log("WARNING")[before:])
        assert all(f"{url}: {words}" in told for words in ("pin v0 is damaged", "pin v1: ", "pin v2: "))
    assert counts[1] == counts[-1]
    assert (root / "pins" / "v0").exists()
    for name in ("v3", "v4", "v5"):
        pinned = StoredRun.at_pin(publisher.store, name)
        assert bits(pinned.weights(pinned.head.version)) == weights[pinned.head.version]
    assert [pin.name for pin in sparserl.pins(url)] == ["v1", "v2", "v3", "v4", "v5"]


def test_a_pin_of_a_newer_release_stops_collections(archive):
    """What it keeps is not known here, and it is not damaged."""
    sparserl.pin(archive.root, 0)
    file = archive.root / pin_path("v0")
    pin = json.loads(file.read_bytes())
    pin["head"] = json.dumps({**json.loads(pin["head"]), "format": 2})
    file.write_text(json.dumps(pin))
    store = FolderStore(archive.root)
    for look in (lambda: collect(store, 0.0), lambda: sparserl.pins(archive.root)):
        with pytest.raises(UnsupportedFormat, match=r"pins/v0.* format 2; this release reads 1"):
            look()
