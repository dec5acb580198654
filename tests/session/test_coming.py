"""Buckets that are announced before the head moves are fetched ahead; nothing that is announced is believed."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import replace

import numpy as np
import pytest

from sparserl import Publisher, Subscriber
from sparserl.errors import Unavailable
from sparserl.session.store import coming
from sparserl.session.store.coming import NOTHING
from sparserl.session.store.manifests import Manifest
from sparserl.session.store.records import Blob
from sparserl.transport.stores.base import COMING
from sparserl.transport.stores.opening import open_store
from tests.session.policy import Policy, bits
from tests.session.test_streaming import SECONDS, WatchedStore


@contextlib.contextmanager
def following(store, weights):
    """A subscriber that follows on a thread of its own; gives the versions that it commits."""
    is_over = threading.Event()
    committed = threading.Semaphore(0)
    errors = []

    def follow():
        try:
            with Subscriber(store, weights) as subscriber:
                subscriber.follow(stop=is_over.is_set, on_commit=lambda _: committed.release())
        except Exception as error:  # noqa: BLE001  # raised on the thread of the test
            errors.append(error)
            committed.release()

    thread = threading.Thread(target=follow)
    thread.start()
    try:
        yield committed
    finally:
        is_over.set()
        thread.join(SECONDS)
    assert not errors


@pytest.mark.parametrize("kind", ["anchor", "patch"])
def test_announced_buckets_are_fetched_before_the_head_moves(url, monkeypatch, kind):
    """The manifest is written when a follower has all buckets of the last announcement; none is fetched twice."""
    monkeypatch.setattr(coming, "_PAUSE", 0.0)
    monkeypatch.setattr(coming, "_LATER", 0.01)
    policy = Policy()
    received = policy.empty()
    near, far = WatchedStore(open_store(url)), WatchedStore(open_store(url))
    is_read = threading.Event()
    ahead = []

    def hold_manifest(name):
        if "/manifests/" in name:
            announced = Manifest.parse(open_store(url).get(COMING, 1 << 20).data, COMING)
            while not is_read.is_set() and {announced.bucket(blob) for blob in announced.buckets} - far.reads.keys():
                is_read.wait(0.01)
            ahead.append(len(announced.buckets))

    with Publisher(near, policy.weights) as publisher, following(far, received) as committed:
        if kind == "patch":
            publisher.publish()
            assert committed.acquire(timeout=SECONDS)
            policy.step()
        far.reads.clear()
        near.before_put = hold_manifest
        timer = threading.Timer(SECONDS, is_read.set)
        timer.start()
        publisher.publish()
        assert not is_read.is_set()
        timer.cancel()
        assert committed.acquire(timeout=SECONDS)
    assert ahead[0] >= 2
    assert set(far.bucket_reads.values()) == {1}
    assert bits(received) == bits(policy.weights)


@pytest.mark.parametrize(("size", "is_announced"), [(60_000, True), (600, False)])
def test_a_lone_bucket_is_announced_unless_it_is_small(url, monkeypatch, size, is_announced):
    """Its fetch takes the place of two round trips, for index and manifest; a few bytes are not worth a write."""
    monkeypatch.setattr(coming, "_LATER", 0.01)
    rng = np.random.default_rng(1)
    weights = {"w": rng.integers(0, 2**32, size, np.uint32)}
    near, far = WatchedStore(open_store(url)), WatchedStore(open_store(url))
    is_read = threading.Event()
    far.before_read = lambda name: is_read.set() if "/buckets/" in name else None
    announced = []
    received = {"w": weights["w"] * 0}

    def before_put(name):
        announced.extend([name] * (name == COMING))
        assert "/manifests/" not in name or not is_announced or is_read.wait(SECONDS)

    with (
        Publisher(near, weights, threads=1, anchor_after=100.0) as publisher,
        following(far, received) as committed,
    ):
        publisher.publish()
        assert committed.acquire(timeout=SECONDS)
        weights["w"] ^= rng.integers(0, 2**32, size, np.uint32)
        is_read.clear()
        near.before_put = before_put
        publisher.publish()
        assert committed.acquire(timeout=SECONDS)
    assert len(announced) == is_announced
    assert set(far.bucket_reads.values()) == {1}
    assert (received["w"] == weights["w"]).all()


def announcements(policy, url):
    """What a hostile store may announce of the next version, by name."""
    with Publisher(url, policy.weights) as publisher:
        publisher.publish()
        head = publisher._committed.head
    missing = tuple(Blob(f"{i:064x}", 1000) for i in range(2))
    known = Manifest(head.run, "0" * 16, head.digest, head.digest, 1, missing)
    large = tuple(Blob(f"{i:064x}", 1 << 27) for i in range(9))
    record = known.to_bytes()
    return {
        "no JSON": b"\x00",
        "a bucket twice": record.replace(missing[1].hash.encode(), missing[0].hash.encode()),
        "too large": record.replace(b"1000", b"%d" % (1 << 60)),
        "buckets that do not exist": record,
        "too many bytes": replace(known, buckets=large).to_bytes(),
    }


@pytest.mark.parametrize(
    "kind", ["no JSON", "a bucket twice", "too large", "buckets that do not exist", "too many bytes"]
)
def test_a_false_announcement_changes_nothing(url, monkeypatch, kind):
    """Whatever is announced, the follower commits what the head names."""
    monkeypatch.setattr(coming, "_LATER", 0.01)
    policy = Policy()
    received = policy.empty()
    announcement = announcements(policy, url)[kind]
    store = WatchedStore(open_store(url))
    is_asked = threading.Event()
    store.before_read = lambda name: is_asked.set() if "0" * 60 in name else None
    with following(store, received) as committed:
        assert committed.acquire(timeout=SECONDS)
        open_store(url).put(COMING, announcement)
        if kind in ("buckets that do not exist", "too many bytes"):
            assert is_asked.wait(SECONDS)  # the announcement was read
        policy.step()
        with Publisher(url, policy.weights) as publisher:
            publisher.publish()
        assert committed.acquire(timeout=SECONDS)
    assert bits(received) == bits(policy.weights)


def test_no_more_is_fetched_ahead_than_memory_allows(url, monkeypatch):
    """A store that announces without end costs a bounded number of bytes."""
    policy = Policy()
    store = WatchedStore(open_store(url))
    with Publisher(url, policy.weights) as publisher:
        publisher.publish()
    steps = [item for item in open_store(url).list("runs/") if "/buckets/" in item.name]
    monkeypatch.setattr(coming, "AHEAD_BYTES", max(item.size for item in steps))
    _, run, _, place, _ = steps[0].name.split("/")
    blobs = tuple(Blob(item.name.rpartition("/")[2], item.size) for item in steps)
    open_store(url).put(COMING, Manifest(run, place, NOTHING, NOTHING, 1, blobs).to_bytes())
    ahead = coming.BucketsAhead(store)
    fetch = ahead._fetch
    fetched = threading.Event()

    def fetch_all(*announced):
        fetch(*announced)
        fetched.set()

    monkeypatch.setattr(ahead, "_fetch", fetch_all)
    with ahead.running(lambda manifest: manifest.buckets):
        assert fetched.wait(SECONDS)
    assert sum(item.size for item in steps if item.name in store.reads) <= coming.AHEAD_BYTES
    assert len(steps) > 1


def test_a_bucket_that_could_not_be_fetched_ahead_is_fetched_again(url):
    """An outage while buckets are fetched ahead is not one of the sync."""
    policy = Policy()
    store = WatchedStore(open_store(url))
    with Publisher(url, policy.weights) as publisher:
        publisher.publish()
        step = publisher._committed.index.steps[0]
        record = open_store(url).get(f"runs/{publisher.run}/manifests/{step.manifest}", 1 << 20).data
    manifest = Manifest.parse(record, "")
    open_store(url).put(COMING, record)

    def fail(_):
        raise Unavailable("the link is down")

    store.before_read = fail
    ahead = coming.BucketsAhead(store)
    is_tried = threading.Event()
    outcome = coming._outcome

    def tried(future):
        outcome(future)
        is_tried.set()

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(coming, "_outcome", tried)
        with ahead.running(lambda manifest: manifest.buckets):
            assert is_tried.wait(SECONDS)
            assert ahead.take(manifest, manifest.buckets[0]) is None


def test_what_was_announced_before_is_not_fetched_by_those_who_begin_later(url, monkeypatch):
    """An announcement of an anchor stays in the store; a follower that finds a head does not want it."""
    monkeypatch.setattr(coming, "_LATER", 0.01)
    policy = Policy()
    with Publisher(url, policy.weights) as publisher:
        publisher.publish()
        step = publisher._committed.index.steps[0]
        record = open_store(url).get(f"runs/{publisher.run}/manifests/{step.manifest}", 1 << 20).data
    anchor = Manifest.parse(record, "")
    open_store(url).put(COMING, replace(anchor, base=NOTHING).to_bytes())
    store = WatchedStore(open_store(url))
    is_asked = threading.Event()
    wanted = []

    def look(subscriber):
        def buckets(manifest):
            wanted.append(Subscriber._coming_buckets(subscriber, manifest))
            is_asked.set()
            return wanted[-1]

        return buckets

    with Subscriber(store, policy.weights) as subscriber, subscriber._ahead.running(look(subscriber)):
        assert is_asked.wait(SECONDS)
    assert wanted[0] == ()


def test_an_announcement_that_is_too_large_ends_nothing(url, monkeypatch):
    """It is passed over; the next one counts."""
    monkeypatch.setattr(coming, "_LATER", 0.01)
    store = open_store(url)
    store.put(COMING, bytes((1 << 20) + 1))
    is_read = threading.Event()
    ahead = coming.BucketsAhead(WatchedStore(store))
    with ahead.running(lambda _: is_read.set() or ()):
        assert not is_read.wait(0.2)
        blobs = (Blob("0" * 64, 1), Blob("1" * 64, 1))
        store.put(COMING, Manifest("0" * 16, "0" * 16, NOTHING, NOTHING, 1, blobs).to_bytes())
        assert is_read.wait(SECONDS)
