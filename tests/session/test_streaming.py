"""The stages of a sync overlap, and a transfer that fails in the middle goes on where it was."""

from __future__ import annotations

import _thread
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import sparserl
from sparserl import Bits, Publisher, Subscriber, targets
from sparserl.errors import InvalidField, Unavailable
from sparserl.patch import snapshot
from sparserl.patch.contents import Contents
from sparserl.session.store.manifests import Manifest
from sparserl.session.store.records import get_named
from sparserl.transport.stores.deadline import current
from sparserl.transport.stores.opening import open_store
from sparserl.weights.dtypes import BY_NAME
from tests.session.policy import Policy, bits

SECONDS = 60  # that one stage waits for another, which must be at work by then


class WatchedStore:
    """A store that counts what is read, and calls functions before an object is read or written."""

    def __init__(self, store, *, before_put=lambda _: None, before_read=lambda _: None):
        self._store = store
        self.before_put = before_put
        self.before_read = before_read
        self.reads = Counter()

    def __getattr__(self, name):
        return getattr(self._store, name)

    def put(self, name, data):
        self.before_put(name)
        self._store.put(name, data)

    def get(self, name, max_bytes):
        self.before_read(name)
        stored = self._store.get(name, max_bytes)
        self.reads[name] += 1
        return stored

    def read(self, name, start, size):
        self.before_read(name)
        data = self._store.read(name, start, size)
        self.reads[name, start] += 1
        return data

    @property
    def bucket_reads(self):
        return {name: count for name, count in self.reads.items() if "/buckets/" in str(name)}


class Outage:
    """Lets some buckets be read, and none after that until it is over."""

    def __init__(self, buckets):
        self.left = buckets
        self._lock = threading.Lock()

    def __call__(self, name):
        if "/buckets/" not in name:
            return
        with self._lock:
            self.left -= 1
            if self.left < 0:
                raise Unavailable("the link is down")


def large_weights():
    """Weights that are compared in four pieces, and take more than one bucket."""
    rng = np.random.default_rng(5)
    names = [f"layer{i}" for i in range(4)]
    return {name: Bits(rng.integers(15000, 16500, 32 << 20, np.uint16), BY_NAME["bfloat16"]) for name in names}


def test_buckets_are_sent_while_others_are_compared(url):
    """The last weights are not compared before a bucket is on its way."""
    weights = large_weights()
    is_sent = threading.Event()
    compared = []

    def progress(nbytes):
        compared.append(nbytes)
        if len(compared) == 4:
            assert is_sent.wait(SECONDS)

    store = WatchedStore(open_store(url))
    with Publisher(store, weights, threads=1) as publisher:
        publisher.publish()
        for w in weights.values():
            w.array[::150] ^= 1
        store.before_put = lambda _: is_sent.set()
        publisher._encoding = sparserl.session.options.EncodingOptions("auto", None, 1, progress)
        report = publisher.publish()
    assert len(compared) == 4
    assert {"find", "encode", "upload"} <= report.seconds.keys()
    received = {name: Bits(np.zeros_like(w.array), w.dtype) for name, w in weights.items()}
    with Subscriber(url, received) as subscriber:
        subscriber.sync()
    assert bits(received) == bits(weights)


def test_what_is_published_in_the_background_is_captured_first(url):
    """The trainer may write as soon as it has the publish in its hands."""
    policy = Policy()
    received = policy.empty()
    is_written = threading.Event()
    store = WatchedStore(open_store(url))
    with Publisher(store, policy.weights) as publisher, Subscriber(url, received) as subscriber:
        publisher.publish()
        policy.step()
        expected = bits(policy.weights)
        store.before_put = lambda _: is_written.wait(SECONDS)
        publish = publisher.publish_in_background()
        policy.step()
        is_written.set()
        publish.result()
        subscriber.sync()
        assert bits(received) == expected


@pytest.mark.parametrize("kind", ["anchor", "patch"])
def test_buckets_are_used_while_others_are_fetched(url, monkeypatch, kind):
    """The last bucket is not fetched before another one is decoded."""
    policy = Policy()
    received = policy.empty()
    is_decoded = threading.Event()
    store = WatchedStore(open_store(url))
    with Publisher(url, policy.weights) as publisher, Subscriber(store, received, threads=1) as subscriber:
        publisher.publish()
        if kind == "patch":
            subscriber.sync()
            policy.step()
            publisher.publish()
        decode = Contents.decode
        outage = Outage(2)

        def decoding(*args, **options):
            is_decoded.set()
            return decode(*args, **options)

        def wait_for_decoding(name):
            if "/buckets/" in name and not outage.left:
                assert is_decoded.wait(SECONDS)
            elif "/buckets/" in name:
                outage(name)

        monkeypatch.setattr(Contents, "decode", decoding)
        store.before_read = wait_for_decoding
        assert subscriber.sync().kind == kind
    assert bits(received) == bits(policy.weights)


@pytest.mark.parametrize("target", ["memory", "folder"])
@pytest.mark.parametrize("kind", ["anchor", "patches"])
@pytest.mark.parametrize("buckets", [0, 1, 3])
def test_a_fetch_that_failed_goes_on_where_it_was(url, tmp_path, kind, target, buckets):
    """Nothing has changed meanwhile, and nothing that was verified is fetched again."""
    policy = Policy()
    received = policy.empty() if target == "memory" else targets.folder(tmp_path / "target")
    store = WatchedStore(open_store(url))
    with Publisher(url, policy.weights) as publisher, Subscriber(store, received, threads=1) as subscriber:
        publisher.publish()
        if kind == "patches":
            subscriber.sync()
            store.reads.clear()
        for _ in range(2):
            policy.step()
            publisher.publish()
        before = bits(received) if target == "memory" else None
        outage = Outage(buckets)
        store.before_read = outage
        for _ in range(2):
            with pytest.raises(Unavailable, match="the link is down"):
                subscriber.stage()
            assert before is None or bits(received) == before
        assert len(store.bucket_reads) == buckets
        outage.left = 1 << 30
        subscriber.sync()
        assert set(store.bucket_reads.values()) == {1}
        assert len(store.bucket_reads) > buckets
        subscriber.audit()
        policy.step()
        publisher.publish()
        subscriber.sync()
        subscriber.audit()


def test_what_was_fetched_is_used_on_another_way(url):
    """The run has gone on during an outage: the way is longer now, and begins as before."""
    policy = Policy()
    received = policy.empty()
    store = WatchedStore(open_store(url))
    with Publisher(url, policy.weights) as publisher, Subscriber(store, received) as subscriber:
        publisher.publish()
        subscriber.sync()
        store.reads.clear()
        outage = Outage(2)
        store.before_read = outage
        policy.step()
        publisher.publish()
        with pytest.raises(Unavailable):
            subscriber.stage()
        policy.step()
        publisher.publish()
        outage.left = 1 << 30
        assert subscriber.sync().version == 2
        assert set(store.bucket_reads.values()) == {1}
        assert bits(received) == bits(policy.weights)


def test_an_anchor_that_was_patched_during_an_outage_serves_its_own_way_alone(url):
    """Weights that an anchor and a patch have become are no start for another way from the same anchor."""
    policy = Policy()
    received = policy.empty()
    store = WatchedStore(open_store(url))
    with Publisher(url, policy.weights) as publisher, Subscriber(store, received, threads=1) as subscriber:
        publisher.publish()
        versions = [bits(policy.weights)]
        for _ in range(2):
            policy.step()
            publisher.publish()
            versions.append(bits(policy.weights))
        store.before_read = Outage(sum(bucket_counts(store, publisher)[:2]))
        with pytest.raises(Unavailable):
            subscriber.stage()
        store.before_read = lambda _: None
        assert subscriber.sync(0).version == 0
        assert bits(received) == versions[0]
        assert subscriber.sync(2).version == 2
        assert bits(received) == versions[2]


def bucket_counts(store, publisher):
    """How many buckets each step of the run has, in the order of versions."""
    run = publisher.run
    steps = sorted(publisher._committed.index.steps, key=lambda step: step.version)
    manifests = [Manifest.parse(get_named(store, run, "manifests", step.manifest), "") for step in steps]
    return [len(manifest.buckets) for manifest in manifests]


def test_damaged_weights_are_not_kept(url, monkeypatch):
    """Where an anchor does not lead to its digest, all of it is fetched again."""
    policy = Policy()
    received = policy.empty()
    store = WatchedStore(open_store(url))
    with Publisher(url, policy.weights) as publisher, Subscriber(store, received) as subscriber:
        publisher.publish()
        with monkeypatch.context() as patched:
            patched.setattr(snapshot, "digest", lambda *_args, **_options: sparserl.Digest())
            with pytest.raises(InvalidField, match="lead to digest"):
                subscriber.stage()
        assert bits(received) == bits(policy.empty())
        subscriber.sync()
        assert set(store.bucket_reads.values()) == {2}
        assert bits(received) == bits(policy.weights)


def test_an_interrupt_while_weights_are_built_ends_that_first(url, monkeypatch):
    """Nobody works on weights that the next attempt goes on with."""
    policy = Policy()
    received = policy.empty()
    write = snapshot.Restoration._write
    is_interrupted = threading.Event()

    def slow(self, index):
        _thread.interrupt_main()
        is_interrupted.wait(0.5)
        return write(self, index)

    with Publisher(url, policy.weights) as publisher, Subscriber(url, received, threads=1) as subscriber:
        for _ in range(3):
            publisher.publish()
            policy.step()
        publisher.publish()
        with monkeypatch.context() as patched:
            patched.setattr(snapshot.Restoration, "_write", slow)
            with pytest.raises(KeyboardInterrupt):
                subscriber.stage()
        assert not [thread for thread in threading.enumerate() if thread.name == "sparserl-arrival"]
        subscriber.sync()
        assert bits(received) == bits(policy.weights)


def test_stop_is_heard_while_targets_read_from_the_store(url, tmp_path):
    """Files are read by the thread that stages; only the caller's thread can ask whether to go on."""
    store = WatchedStore(open_store(url))
    started = threading.Event()

    def stall(name):
        while "/files/" in name:
            started.set()
            current().require(name)
            current().sleep(0.05)

    store.before_read = stall
    with Publisher(url, Policy().weights, files={"config.json": b"{}"}) as publisher:
        publisher.publish()
        with Subscriber(store, targets.folder(tmp_path / "target")) as subscriber:
            subscriber.follow(stop=started.is_set)
            assert subscriber.version is None


class Pair(targets.modules.ModuleTarget):
    """A target that hands every change to two others."""

    def __init__(self, first, second):
        super().__init__(first)
        self.second = targets.module(second)

    def prepare(self, change):
        pair = [super().prepare(change), self.second.prepare(change)]
        return PreparedPair(pair)


class PreparedPair:
    def __init__(self, pair):
        self.pair = pair
        self.changed = pair[0].changed

    def commit(self):
        undos = [prepared.commit() for prepared in self.pair]
        return lambda: [undo() for undo in undos]

    def finish(self):
        pass

    discard = finish


def test_a_target_may_use_a_change_twice(url):
    """Weights of an anchor are exchanged with those of a target only where nobody else can want them."""
    policy = Policy()
    first, second = policy.empty(), policy.empty()
    with Publisher(url, policy.weights) as publisher, Subscriber(url, Pair(first, second)) as subscriber:
        publisher.publish()
        subscriber.sync()
    assert bits(first) == bits(second) == bits(policy.weights)


def test_a_head_that_another_thread_has_passed_is_not_used(url, monkeypatch):
    """One thread follows and another one syncs: the head that the first has waited for is old by then."""
    policy = Policy()
    is_awaited, go_on = threading.Event(), threading.Event()
    with Publisher(url, policy.weights) as publisher, Subscriber(url, policy.empty()) as subscriber:
        publisher.publish()
        subscriber.sync()
        wait_for_change = subscriber._wait_for_change

        def wait(seconds):
            head = wait_for_change(seconds)
            if head is not None and not is_awaited.is_set():
                is_awaited.set()
                assert go_on.wait(SECONDS)
            return head

        monkeypatch.setattr(subscriber, "_wait_for_change", wait)
        follower = ThreadPoolExecutor(1).submit(subscriber.follow, stop=lambda: subscriber.version == 3)
        policy.step()
        publisher.publish()
        assert is_awaited.wait(SECONDS)
        policy.step()
        publisher.publish()
        assert subscriber.sync().version == 2
        go_on.set()
        policy.step()
        publisher.publish()
        follower.result(SECONDS)
        assert subscriber.version == 3


def test_what_was_fetched_is_dropped_when_nothing_is_to_be_fetched(url):
    policy = Policy()
    received = policy.empty()
    store = WatchedStore(open_store(url))
    with Publisher(url, policy.weights) as publisher, Subscriber(store, received) as subscriber:
        publisher.publish()
        store.before_read = Outage(1)
        with pytest.raises(Unavailable):
            subscriber.sync()
        assert subscriber._unfinished is not None
        store.before_read = lambda _: None
        for name, tensor in received.items():
            source = policy.weights[name]
            mine, theirs = (t.array if isinstance(t, Bits) else t for t in (tensor, source))
            mine[...] = theirs
        subscriber._is_uncertain = True
        assert subscriber.sync() is None
        assert subscriber._unfinished is None


def test_following_goes_on_soon_after_trouble(url, monkeypatch):
    """A fetch that failed is tried again although the head stays what it was."""
    policy = Policy()
    received = policy.empty()
    store = WatchedStore(open_store(url))
    outage = Outage(1)
    waits = []
    with Publisher(url, policy.weights) as publisher, Subscriber(store, received) as subscriber:
        publisher.publish()
        store.before_read = outage

        def wait(seconds):
            waits.append(seconds)
            outage.left = 1 << 30

        monkeypatch.setattr(subscriber, "_wait_for_change", wait)
        with pytest.raises(LookupError):
            subscriber.follow(on_commit=lambda _: {}["the end"])
    assert waits == [1.0]
    assert bits(received) == bits(policy.weights)
