"""A bucket is the one that the signed head leads to, or refused: whatever else is right about it, and however it comes.

The buckets of the store are exchanged for others with the same bits, the same size and a right checksum. All digests
are right then: nothing but the hash of a bucket tells that it is not the one that was signed.
"""

from __future__ import annotations

import threading

import pytest

import sparserl
from sparserl import Publisher, Subscriber
from sparserl.errors import FormatError, SparserlError
from sparserl.session.store import coming, signing
from sparserl.session.store.manifests import Manifest
from sparserl.session.store.records import HEAD, get_named
from sparserl.session.store.retention import faults
from sparserl.session.store.squashing import squash_versions
from sparserl.session.store.stored_run import StoredRun
from sparserl.transport.stores import base, mirror
from sparserl.transport.stores.base import COMING
from sparserl.transport.stores.folder import FolderStore
from tests.hostile.forged_store import twin
from tests.session.policy import Policy, bits

SECRET, PUBLIC = signing.keygen()
WAYS = ["in memory", "in a folder", "in ranges", "by patches", "ahead", "from a mirror"]


class Scene:
    """A signed run of three versions, whose buckets can be exchanged."""

    def __init__(self, tmp_path):
        self.path = tmp_path
        self.policy = Policy()
        self.store = FolderStore(tmp_path / "store")
        self.publisher = self.publisher_with(tmp_path / "state")
        self.publisher.publish()
        self.versions = [bits(self.policy.weights)]
        self.mine = self.policy.empty()
        self.subscriber = Subscriber(self.store, self.mine, trusted_keys=PUBLIC)
        self.subscriber.sync()
        for _ in range(2):
            self.policy.step()
            self.publisher.publish()
            self.versions.append(bits(self.policy.weights))

    def publisher_with(self, state):
        options = {"signing_key": SECRET, "anchor_after": 1000, "ladder": None, "state": state}
        return Publisher(self.store, self.policy.weights, **options)

    def exchange_buckets(self):
        for item in [*self.store.list("runs/")]:
            if "/buckets/" in item.name:
                self.store.put(item.name, twin(self.store.get(item.name, 1 << 30).data))

    def last_manifest(self):
        committed = self.publisher._committed
        hash = committed.index.steps[-1].manifest
        return Manifest.parse(get_named(self.store, committed.run.run, "manifests", hash), "it")


@pytest.fixture
def scene(tmp_path):
    return Scene(tmp_path)


def fetched_ahead(scene):
    """Weights that take the buckets of the last version as they were announced."""
    scene.subscriber.goto(1)
    manifest = scene.last_manifest()
    scene.exchange_buckets()
    scene.store.put(COMING, manifest.to_bytes())
    is_fetched = threading.Event()
    ahead = scene.subscriber._ahead
    fetch = ahead._fetch

    def fetch_all(*announced):
        fetch(*announced)
        is_fetched.set()

    ahead._fetch = fetch_all
    with ahead.running(lambda manifest: manifest.buckets):
        assert is_fetched.wait(60)
        scene.subscriber.sync()
    return scene.mine


def followed(scene, way, monkeypatch):
    """The weights that a follower has in the end, if it takes the buckets."""
    if way == "ahead":
        return fetched_ahead(scene)
    options = {"trusted_keys": PUBLIC, "name": False}
    if way == "from a mirror":
        with Subscriber(scene.store, scene.policy.empty(), mirror=scene.path / "mirror", **options) as subscriber:
            subscriber.sync()
        kept = FolderStore(scene.path / "mirror")
        for item in [*kept.list("runs/")]:
            if "/buckets/" in item.name:
                kept.put(item.name, twin(kept.get(item.name, 1 << 30).data))
        kept.close()
        options["mirror"] = scene.path / "mirror"
    scene.exchange_buckets()
    if way == "by patches":
        scene.subscriber.sync()
        return scene.mine
    if way == "in a folder":
        with Subscriber(scene.store, sparserl.targets.folder(scene.path / "out"), **options) as subscriber:
            subscriber.sync()
        return {**scene.policy.empty(), **sparserl.sources.open_checkpoint(scene.path / "out" / "current")}
    if way == "in ranges":
        monkeypatch.setattr(base, "RANGE_BYTES", 50)
    weights = scene.policy.empty()
    with Subscriber(scene.store, weights, **options) as subscriber:
        subscriber.sync()
    return weights


@pytest.mark.parametrize("way", WAYS)
def test_a_follower_refuses_them(scene, monkeypatch, way):
    """It keeps what it holds. With the hash not compared it would take them: nothing else is wrong."""
    with pytest.raises(FormatError, match=r"not those that its name promises|have another hash"):
        followed(scene, way, monkeypatch)
    assert scene.subscriber.version < 2
    assert bits(scene.mine) == scene.versions[scene.subscriber.version]


@pytest.mark.parametrize("way", WAYS)
def test_nothing_else_is_wrong(scene, monkeypatch, way):
    """With hashes not compared, the buckets are taken for those of the run, and lead to its bits."""
    monkeypatch.setattr(coming, "require_hash", lambda *_: None)
    monkeypatch.setattr(mirror, "has_named_hash", lambda *_: True)
    assert bits(followed(scene, way, monkeypatch)) == bits(scene.policy.weights)


@pytest.mark.parametrize("state", ["none", "kept"])
def test_a_publisher_does_not_continue_from_them(scene, state):
    """Neither from the anchor of the store, nor from its own and the patches since."""
    scene.publisher.close()
    head = scene.store.get(HEAD, 1 << 16)
    scene.exchange_buckets()
    with (
        pytest.raises(SparserlError, match="not those that its name promises"),
        scene.publisher_with(None if state == "none" else scene.path / "state") as publisher,
    ):
        publisher.publish()
    assert scene.store.get(HEAD, 1 << 16) == head


def test_nor_does_anything_else_use_them(scene):
    """Squashing, an export and fsck name the bucket."""
    scene.exchange_buckets()
    with pytest.raises(FormatError, match="not those that its name promises"):
        squash_versions(scene.store, 0, 2, signing_key=SECRET)
    stored = StoredRun.read(scene.store)
    with pytest.raises(FormatError, match="not those that its name promises"):
        stored.build(stored.steps(None, 2), 2)
    found = [*faults(scene.store, PUBLIC)]
    assert len(found) == len([item for item in scene.store.list("runs/") if "/buckets/" in item.name])
