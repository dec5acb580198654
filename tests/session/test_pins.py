"""Versions that are pinned stay, whatever retention, garbage collection and new runs remove."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import pytest

import sparserl
from sparserl import Publisher, Subscriber
from sparserl.errors import NotFound, NotRetained, SessionError, Unavailable, Untrusted
from sparserl.session.receiver import RunVersion
from sparserl.session.store import pinning, routes, signing
from sparserl.session.store.pins import Pin, pin_path
from sparserl.session.store.retention import collect, faults, needed, read_head, read_index
from sparserl.session.store.squashing import squash_versions
from sparserl.session.store.stored_run import StoredRun
from sparserl.transport.stores.folder import FolderStore
from tests.session.policy import Policy, bits

SHORT = {"anchor_after": 0.2, "keep_anchors": 1, "grace": 0.0, "ladder": None, "lease": 0.0, "threads": 1}


class Run:
    """A run with an anchor at every third version, of which the store keeps one, and the weights of each version."""

    def __init__(self, url: str, **options) -> None:
        self.url = url
        self.policy = Policy()
        self.weights = []
        seconds = itertools.count(int(time.time()) + 3600)  # what nothing refers to is older than that
        clock = lambda: float(next(seconds))  # noqa: E731
        self.options = {"clock": clock, **SHORT, **options}
        self.publisher = Publisher(url, self.policy.weights, **self.options)

    def publish(self, times: int = 1) -> None:
        for _ in range(times):
            self.policy.step()
            self.publisher.publish()
            self.weights.append(bits(self.policy.weights))

    @property
    def store(self) -> FolderStore:
        return self.publisher.store

    @property
    def versions(self) -> set[int]:
        """The versions that the store has for those who hold none."""
        head, _ = read_head(self.store)
        return {version for version, _ in routes.reached(read_index(self.store, head).steps)}

    def fetched(self, version: int) -> dict[str, bytes]:
        """A version, as a subscriber gets it."""
        weights = self.policy.empty()
        with Subscriber(self.url, weights, name=False, threads=1) as subscriber:
            subscriber.sync(version)
        return bits(weights)


def pinned(url: str, name: str) -> dict[str, bytes]:
    """The weights of a pin, as `export --pin` reads them."""
    store = FolderStore(url.removeprefix("file://"))
    run = StoredRun.at_pin(store, name)
    weights = bits(run.weights(run.head.version))
    store.close()
    return weights


def test_a_pinned_version_stays_until_it_is_unpinned(url):
    """Retention drops versions around it; what leads to it is in the index and in the store, and no more."""
    run = Run(url)
    run.publish(3)
    pin = sparserl.pin(url, 1, name="best", note="reward 0.7")
    assert (pin.version, pin.run, pin.note) == (1, run.publisher.run, "reward 0.7")
    assert sparserl.pins(url) == [pin]
    run.publish(12)
    assert 1 in run.versions
    assert 5 not in run.versions
    assert run.fetched(1) == run.weights[1]
    assert pinned(url, "best") == run.weights[1]
    assert list(faults(run.store)) == []
    collect(run.store, -1e12)
    assert run.fetched(1) == run.weights[1]
    assert {i.name for i in run.store.list("runs/")} == needed(run.store, read_head(run.store)[0]) - {"head.json"}

    sparserl.unpin(url, "best")
    assert sparserl.pins(url) == []
    run.publish(6)
    assert 1 not in run.versions
    with pytest.raises(NotRetained):
        run.fetched(1)


def test_what_can_be_pinned(url):
    """A version that is there, under a name of its own; anything else is refused by name."""
    with pytest.raises(NotFound, match="nothing is published"):
        sparserl.pin(url, 0)
    run = Run(url)
    run.publish(2)
    assert sparserl.pin(url).name == "v1"
    with pytest.raises(NotRetained, match="version 7 cannot be pinned; the store has versions 0 to 1"):
        sparserl.pin(url, 7)
    for version in (1.0, True, "1", -1):
        with pytest.raises(SessionError, match=r"version is .*; it must be an integer, 0 or more"):
            sparserl.pin(url, version)
    with pytest.raises(SessionError, match="'a/b' cannot be the name of a pin"):
        sparserl.pin(url, 1, name="a/b")
    with pytest.raises(SessionError, match="note is"):
        sparserl.pin(url, 1, note="two\nlines")
    sparserl.pin(url, 0, name="best")
    with pytest.raises(SessionError, match="pin best is at version 0"):
        sparserl.pin(url, 1, name="best")
    sparserl.pin(url, 1, name="best", move=True)
    assert {pin.name: pin.version for pin in sparserl.pins(url)} == {"v1": 1, "best": 1}
    with pytest.raises(NotFound, match="there is no pin other"):
        sparserl.unpin(url, "other")


def test_a_new_run_keeps_what_was_pinned(url):
    """The pinned version of an earlier run is read through its pin, with its files; the rest of that run goes."""
    run = Run(url, files={"config.json": b"{}"})
    run.publish(3)
    first = run.publisher.run
    sparserl.pin(url, 2, name="old")
    run.publisher = Publisher(url, run.policy.weights, new_run=True, **run.options)
    run.publish(4)
    assert run.publisher.run != first
    collect(run.store, -1e12)
    assert pinned(url, "old") == run.weights[2]
    assert dict(StoredRun.at_pin(run.store, "old").files(2)) == {"config.json": b"{}"}
    assert list(faults(run.store)) == []

    sparserl.unpin(url, "old")
    collect(run.store, -1e12)
    assert not list(run.store.list(f"runs/{first}/"))


def test_a_pin_and_a_lease_that_lags(url):
    """Between a pinned version and the patches that a lease spares, every version can still be reached."""
    run = Run(url, lease=1e9)
    run.publish(3)
    sparserl.pin(url, 1)
    run.publish(6)
    slow = Subscriber(url, run.policy.empty(), name="slow", clock=run.options["clock"], threads=1)
    slow.sync()
    assert slow.version == 8
    run.publish(12)
    assert {1, 8, 20} <= run.versions
    assert list(faults(run.store)) == []
    assert slow.sync().kind == "patch"


def test_squashing_and_restarts_keep_pins(url, tmp_path):
    """A squashed patch is one more way; a publisher that is started again goes on keeping what is pinned."""
    run = Run(url, state=tmp_path / "state")
    run.publish(3)
    sparserl.pin(url, 1)
    squash_versions(run.store, 0, 2)
    run.publisher.close()
    run.publisher = Publisher(url, run.policy.weights, **run.options)
    run.publish(8)
    assert run.fetched(1) == run.weights[1]
    assert list(faults(run.store)) == []


class Meddler:
    """A store in which something happens before one of its calls."""

    def __init__(self, store: FolderStore, call: str, name: str, work, skip: int = 0) -> None:
        self._store = store
        self._call = call
        self._name = name
        self._work = work
        self._skip = skip

    def __getattr__(self, attribute: str):
        value = getattr(self._store, attribute)
        if attribute != self._call:
            return value

        def call(name, *args):
            if str(name).startswith(self._name) and self._skip:
                self._skip -= 1
            elif str(name).startswith(self._name) and self._work is not None:
                work = self._work
                self._work = None
                work()
            return value(name, *args)

        return call


def test_a_version_that_is_removed_while_it_is_being_pinned_is_refused(url):
    """Retention has moved the head before the pin was there: no pin is left, or the old one."""
    run = Run(url)
    run.publish(3)
    with pytest.raises(NotRetained, match="version 1 has just been removed by retention; nothing was pinned"):
        sparserl.pin(Meddler(run.store, "swap", "pins/", lambda: run.publish(8)), 1)
    assert sparserl.pins(url) == []
    sparserl.pin(url, name="kept")
    newest = run.publisher.version
    run.publish(1)
    with pytest.raises(NotRetained, match="just been removed"):
        sparserl.pin(Meddler(run.store, "swap", "pins/", lambda: run.publish(8)), name="kept", move=True)
    assert [pin.version for pin in sparserl.pins(url)] == [newest]
    new_run = lambda: Publisher(url, run.policy.weights, new_run=True, threads=1).publish()  # noqa: E731
    with pytest.raises(NotRetained, match="has just been replaced by run"):
        sparserl.pin(Meddler(run.store, "swap", "pins/", new_run), name="late")
    assert [pin.name for pin in sparserl.pins(url)] == ["kept"]


@pytest.mark.parametrize("moment", ["it looks", "its next life looks", "it is too late"])
def test_a_version_that_is_pinned_while_retention_removes_it_comes_back(url, moment):
    """Whoever pins it sees it in the store, then the head moves without it: the publisher, or its next life, sees.

    After the grace nothing is put back, so that no head leads to what is being deleted. The pin leads there.
    """
    run = Run(url, grace=600.0, clock=time.time)
    run.publish(3)
    oldest = min(run.versions)
    store = FolderStore(url.removeprefix("file://"))
    late = lambda: sparserl.pin(store, oldest, name="late")  # noqa: E731
    meddler = Meddler(run.store, "swap", "head.json", late, skip=1)  # the patch, and then the anchor
    run.publisher._run_writer._head._store = meddler
    if moment != "it looks":
        run.publisher._maintenance._add_pinned_if_due = lambda version: None  # as if it were killed
    run.publish()
    assert [pin.version for pin in sparserl.pins(url)] == [oldest]
    assert pinned(url, "late") == run.weights[oldest]
    if moment != "it looks":
        assert oldest not in run.versions
        collect(store, 0.0, clock=lambda: time.time() + 1e6)
        assert pinned(url, "late") == run.weights[oldest]
        later = 0 if moment == "its next life looks" else 601
        run.options["clock"] = lambda: time.time() + later
        run.publisher = Publisher(url, run.policy.weights, **run.options)
        run.publish()
    if moment == "it is too late":
        assert oldest not in run.versions
        assert pinned(url, "late") == run.weights[oldest]
    else:
        assert run.fetched(oldest) == run.weights[oldest]
    assert list(faults(store)) == []


def test_a_reply_that_is_lost(url, monkeypatch):
    """A pin that was written although the store did not say so is a pin; one that was not is an error."""
    run = Run(url)
    run.publish(1)
    store = FolderStore(url.removeprefix("file://"))
    swap = store.swap

    def lost(name, data, tag):
        swap(name, data, tag)
        raise Unavailable("the reply was lost")

    monkeypatch.setattr(store, "swap", lost)
    assert sparserl.pin(store, 0).version == 0
    monkeypatch.setattr(store, "swap", lambda *_: (_ for _ in ()).throw(Unavailable("no answer")))
    with pytest.raises(sparserl.errors.StoreError, match="pin other could not be written: no answer"):
        sparserl.pin(store, 0, name="other")


def test_a_signed_run_trusts_no_pin_that_was_not_signed(url, log):
    """Whoever can write to a store cannot have a publisher sign steps of a forged index."""
    secret, public = signing.keygen()
    run = Run(url, signing_key=secret)
    run.publish(2)
    sparserl.pin(url, 1, name="good", trusted_keys=public)
    pin = sparserl.pins(url)[0]
    forged = Pin("forged", pin.run, pin.version, pin.digest, 0.0, None, signing.seal(pin.head().body(), None))
    run.store.put(pin_path("forged"), forged.to_bytes())
    with pytest.raises(Untrusted, match="the head of pin forged is not signed"):
        StoredRun.at_pin(run.store, "forged", public)
    run.publish(8)
    assert 1 in run.versions
    [warning] = [line for line in log("WARNING") if "a pin is ignored" in line]
    assert "pin forged is not signed" in warning
    sparserl.unpin(url, "good")
    run.publish(8)
    assert 1 not in run.versions


def test_damaged_pins_and_lost_versions_are_told(url, log):
    """Publishers, collections and lists of pins go on without a damaged pin, and `fsck` names what is wrong."""
    run = Run(url)
    run.publish(2)
    sparserl.pin(url, 1, name="lost")
    run.store.put(pin_path("broken"), b"{}")
    for look in (lambda: collect(run.store, 0.0), lambda: sparserl.pins(url)):
        look()
        assert log("WARNING")[-1].startswith(f"{url}: pin broken is damaged, remove it with `sparserl unpin`")
    assert [pin.name for pin in sparserl.pins(url)] == ["lost"]
    run.publish(8)
    assert 1 in run.versions
    assert run.publisher.version == 9
    [fault] = faults(run.store)
    assert fault.startswith("pin broken is damaged")
    sparserl.unpin(url, "broken")

    pin = sparserl.pins(url)[0]
    run.store.delete([f"runs/{pin.run}/index/{pin.head().index}"])
    assert list(faults(run.store)) == [
        f"pin lost: version 1 of run {pin.run} is gone; remove the pin with `sparserl unpin`"
    ]
    with pytest.raises(NotRetained, match=f"pin lost: version 1 of run {pin.run} is gone"):
        StoredRun.at_pin(run.store, "lost")


def test_a_collection_with_another_grace(url):
    """The index that a pin keeps names steps that are gone: it does not stop a collection to which it is recent."""
    run = Run(url)
    run.publish(3)
    sparserl.pin(url, 1)
    run.publish(12)
    collect(run.store, -1e12)
    collect(run.store, 1e12)
    assert run.fetched(1) == run.weights[1]
    assert list(faults(run.store)) == []


def test_a_damaged_index_of_a_pin(url, log):
    """Publishers and collections go on, and say which pin it is. The index of the run still leads to the version."""
    run = Run(url)
    run.publish(2)
    pin = sparserl.pin(url, 0, name="bad")
    sparserl.pin(url, 1, name="good")
    run.publish(1)
    index = next(Path(url.removeprefix("file://")).glob(f"runs/{pin.run}/index/{pin.head().index}"))
    index.chmod(0o644)
    index.write_bytes(index.read_bytes()[:-1] + b"?")
    run.publish(8)
    assert any("the index of pin bad, good is damaged, remove it" in line for line in log("WARNING"))
    collect(run.store, -1e12)
    assert {0, 1} <= run.versions
    assert run.fetched(1) == run.weights[1]


def test_a_pin_that_could_not_be_written_is_tried_again(url, log, monkeypatch):
    """A follower's pin comes when the store answers again, and the trouble is logged once."""
    run = Run(url)
    run.publish(1)
    swaps = itertools.count()
    swap = FolderStore.swap

    def failing_at_first(store, name, data, tag):
        if name.startswith("pins/") and next(swaps) < 3:
            raise Unavailable("503")
        return swap(store, name, data, tag)

    monkeypatch.setattr(FolderStore, "swap", failing_at_first)
    own_pin = pinning.OwnPin(run.store, "eval", None)
    head, _ = read_head(run.store)
    held = RunVersion(head.run, 0.0, head.version, head.digest)
    for _ in range(4):
        own_pin.move(held)
    assert [(pin.name, pin.version) for pin in sparserl.pins(url)] == [("eval", 0)]
    assert len(log("WARNING")) == 1
    assert next(swaps) == 4


def test_damage_of_what_only_a_pin_keeps_is_found(url):
    """`fsck` reads the buckets of pinned versions of earlier runs, too."""
    run = Run(url)
    run.publish(2)
    pin = sparserl.pin(url, 1)
    Publisher(url, run.policy.weights, new_run=True, **run.options).publish()
    assert list(faults(run.store)) == []
    bucket = next(Path(url.removeprefix("file://")).glob(f"runs/{pin.run}/buckets/*/*"))
    bucket.write_bytes(bucket.read_bytes()[:-1] + b"?")
    assert [fault.partition(":")[0] for fault in faults(run.store)] == ["pin v1"]


def test_following_every_third_version(url):
    """A late follower begins with the newest multiple; then each follows in turn, though others came meanwhile."""
    run = Run(url, keep_anchors=20, lease=1e9)
    run.publish(5)
    weights, seen = run.policy.empty(), []
    subscriber = Subscriber(url, weights, name="eval", threads=1)
    subscriber.follow(once=True, every=3, on_commit=lambda report: seen.append(report.version))
    assert seen == [3]
    assert bits(weights) == run.weights[3]
    run.publish(8)
    subscriber.follow(once=True, every=3, on_commit=lambda report: seen.append(report.version))
    assert seen == [3, 6, 9, 12]
    assert bits(weights) == run.weights[12]
    subscriber.follow(once=True, every=3, on_commit=lambda report: seen.append(report.version))
    assert seen[4:] == []
    with pytest.raises(SessionError, match="every is 0"):
        subscriber.follow(every=0)


def test_no_version_is_a_multiple(url):
    """With `once` that is an error; without, it is waited for."""
    run = Run(url)
    run.publish(6)
    oldest = min(run.versions)
    assert oldest > 0
    subscriber = Subscriber(url, run.policy.empty(), threads=1)
    with pytest.raises(NotRetained, match=r"no version is a multiple of 100: it has versions \d+ to 5"):
        subscriber.follow(once=True, every=100)
    assert subscriber.version is None


def test_following_moves_a_pin(url, log):
    """The version that is held is pinned before `on_commit` is called, and the one before it is not any more."""
    run = Run(url)
    run.publish(1)
    held = []
    subscriber = Subscriber(url, run.policy.empty(), name="eval", threads=1)

    def committed(report):
        held.append((report.version, [(pin.name, pin.version) for pin in sparserl.pins(url)]))

    for _ in range(2):
        subscriber.follow(once=True, every=2, pin="eval", on_commit=committed)
        run.publish(2)
    assert held == [(0, [("eval", 0)]), (2, [("eval", 2)])]
    run.publish(8)
    assert run.fetched(2) == run.weights[2]
    again = Subscriber(url, run.policy.empty(), name="other", threads=1)
    again.sync(2)
    again.follow(once=True, pin="eval")
    assert [pin.version for pin in sparserl.pins(url)] == [again.version]
    assert log("WARNING") == []
    with pytest.raises(SessionError, match="cannot be the name of a pin"):
        again.follow(pin="")


def test_a_pin_of_another_run_is_not_taken_for_this_one(url):
    """A number alone does not say which version is meant."""
    run = Run(url)
    run.publish(1)
    subscriber = Subscriber(url, run.policy.empty(), threads=1)
    subscriber.sync()
    held = subscriber._current
    run.policy.step()
    Publisher(url, run.policy.weights, new_run=True, **run.options).publish()
    with pytest.raises(NotRetained, match=f"version 0 of run {held.run} is not in the store any more"):
        pinning.pin_version(run.store, 0, name="eval", expected=held)
    assert sparserl.pins(url) == []


@pytest.mark.long
def test_pins_in_object_storage(server):
    """S3 keeps a pinned version as a folder does: while others go, for those who follow, and until it is unpinned."""
    store = server.store("pins")
    run = Run(store)
    run.publish(3)
    pin = sparserl.pin(store, 1, name="best")
    run.publish(9)
    assert sparserl.pins(store) == [pin]
    assert run.fetched(1) == run.weights[1]
    assert 2 not in run.versions
    collect(run.store, -1e12)
    assert list(faults(run.store)) == []
    assert run.fetched(1) == run.weights[1]
    with pytest.raises(SessionError, match="best"):
        sparserl.pin(store, 11, name="best")
    sparserl.unpin(store, "best")
    run.publish(6)
    assert 1 not in run.versions
    run.publisher.close()
