"""A publisher that fails, restarts, loses a reply or meets another one loses nothing."""

from __future__ import annotations

import threading

import pytest

from sparserl import Publisher, Subscriber, targets
from sparserl.errors import (
    CheckpointError,
    Fenced,
    SessionError,
    Unavailable,
)
from sparserl.session.store.retention import read_head
from sparserl.transport import open_store
from sparserl.transport.stores.folder import FolderStore
from tests.session.policy import Policy, bits


def test_a_publisher_that_lost_its_baseline_begins_anew(url, monkeypatch):
    """A commit whose baseline could not follow is seen; the next version is the first of a new run."""
    policy = Policy()
    publisher = Publisher(url, policy.weights, ladder=(2, 4))
    mine = policy.empty()
    subscriber = Subscriber(url, mine)
    for _ in range(4):
        publisher.publish()
        policy.step()
    with monkeypatch.context() as context:
        context.setattr("sparserl.session.baseline.apply", lambda *_, **__: (_ for _ in ()).throw(MemoryError()))
        with pytest.raises(MemoryError):
            publisher.publish()
    subscriber.sync()
    assert (subscriber.version, bits(mine)) == (4, bits(policy.weights))
    first = subscriber.run
    for version in range(6):
        policy.step()
        report = publisher.publish()
        assert (report.version, report.notes) == (version, ())
        subscriber.sync()
        assert bits(mine) == bits(policy.weights)
    assert subscriber.run != first


def test_a_new_run_is_not_taken_for_the_old_one(url):
    """A publisher that is told to begins a new run; equal version numbers are not equal weights."""
    first, second = Policy(1), Policy(2)
    Publisher(url, first.weights).publish()
    mine = first.empty()
    subscriber = Subscriber(url, mine)
    assert subscriber.sync().version == 0
    other = Publisher(url, second.weights, new_run=True)
    assert other.publish().version == 0
    report = subscriber.sync()
    assert (report.version, report.kind, report.run) == (0, "anchor", other.run)
    assert bits(mine) == bits(second.weights)


def test_a_clock_that_was_set_back(url):
    """A new run is later than the one before it, whatever the clock says."""
    first, second = Policy(1), Policy(2)
    Publisher(url, first.weights, clock=lambda: 2e9).publish()
    old = read_head(open_store(url))[0]
    Publisher(url, second.weights, clock=lambda: 1e9, new_run=True).publish()
    assert read_head(open_store(url))[0].created > old.created


class Flaky(FolderStore):
    """A folder store that fails when it is told to."""

    def __init__(self, path):
        super().__init__(path)
        self.broken = set()

    def put(self, name, data):
        if "put" in self.broken:
            raise Unavailable("the store is away")
        super().put(name, data)

    def swap(self, name, data, tag):
        if "swap, unseen" in self.broken:
            self.broken.discard("swap, unseen")
            super().swap(name, data, tag)
            raise Unavailable("the reply was lost")
        if "swap, lost" in self.broken:
            self.broken.discard("swap, lost")
            raise Unavailable("the request was lost")
        return super().swap(name, data, tag)


@pytest.mark.parametrize("wait", [True, False])
def test_a_failed_publish_loses_nothing(tmp_path, wait):
    """The baseline is still the committed version: the next publish has the changes of both."""
    store, policy = Flaky(tmp_path), Policy()
    publisher = Publisher(store, policy.weights)
    publisher.publish()
    mine = policy.empty()
    subscriber = Subscriber(open_store(store.url), mine)
    subscriber.sync()
    policy.step()
    store.broken = {"put"}
    if wait:
        with pytest.raises(Unavailable):
            publisher.publish()
    else:
        background = publisher.publish_in_background()
        with pytest.raises(Unavailable):
            background.result()
    assert publisher.version == 0
    assert subscriber.sync() is None
    policy.step()
    store.broken = set()
    assert publisher.publish().version == 1
    subscriber.sync()
    assert bits(mine) == bits(policy.weights)


@pytest.mark.parametrize("how", ["swap, unseen", "swap, lost"])
def test_a_reply_that_was_lost(tmp_path, how):
    """Whether the swap had worked shows in the head; the version grows by one, once."""
    store, policy = Flaky(tmp_path), Policy()
    publisher = Publisher(store, policy.weights)
    for version in range(3):
        store.broken = {how}
        assert publisher.publish().version == version
        assert read_head(store)[0].version == version
        policy.step()


class Outage(FolderStore):
    """A folder store that goes away in the middle of a swap, for a while."""

    def __init__(self, path):
        super().__init__(path)
        self.works, self.late = None, None

    def get(self, name, most):
        if self.works is not None:
            raise Unavailable("the store is away")
        return super().get(name, most)

    def swap(self, name, data, tag):
        if self.late is not None:  # the request before this one arrives only now
            earlier, self.late = self.late, None
            super().swap(name, earlier, tag)
        if self.works is not None:
            how, self.works = self.works, None
            if how == "at once":
                super().swap(name, data, tag)
            elif how == "late":
                self.late = data
            self.works = how
            raise Unavailable("the store is away")
        return super().swap(name, data, tag)


@pytest.mark.parametrize("works", ["at once", "late", "never"])
@pytest.mark.parametrize("first", [True, False])
def test_an_outage_in_the_middle_of_a_swap(tmp_path, works, first):
    """Whether the swap had worked cannot be found out then; the next publish does, and nothing is lost or doubled."""
    store, policy = Outage(tmp_path), Policy()
    publisher = Publisher(store, policy.weights)
    if not first:
        publisher.publish()
    policy.step()
    store.works = works
    with pytest.raises(Unavailable, match="away"):
        publisher.publish()
    captured = bits(policy.weights)
    store.works = None
    mine = policy.empty()
    subscriber = Subscriber(FolderStore(tmp_path), mine)
    policy.step()
    if works == "late":
        with pytest.raises(Unavailable, match="publish again"):
            publisher.publish()
    if works in ("at once", "late"):
        assert subscriber.sync().version == 1 - first
        assert bits(mine) == captured
    report = publisher.publish()
    assert report.version == (0 if first else 1) + (works != "never")
    subscriber.sync()
    assert bits(mine) == bits(policy.weights)
    policy.step()
    publisher.publish()
    assert subscriber.sync().kind == "patch"
    assert bits(mine) == bits(policy.weights)


def test_two_publishers(url):
    """The second one fences the first off, whoever began earlier."""
    policy, other = Policy(1), Policy(2)
    first = Publisher(url, policy.weights)
    first.publish()
    second = Publisher(url, other.weights)
    second.publish()
    policy.step()
    with pytest.raises(Fenced):
        first.publish()
    mine = policy.empty()
    Subscriber(url, mine).sync()
    assert bits(mine) == bits(other.weights)


def test_publishers_racing_for_an_empty_store(url):
    """Of several that start at once exactly one is seen; the others are fenced."""
    policies = [Policy(seed) for seed in range(4)]
    publishers = [Publisher(url, p.weights) for p in policies]
    done, fenced = [], []

    def go(i):
        try:
            publishers[i].publish()
            done.append(i)
        except Fenced:
            fenced.append(i)

    threads = [threading.Thread(target=go, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(done), len(fenced)) == (1, 3)
    mine = policies[0].empty()
    Subscriber(url, mine).sync()
    assert bits(mine) == bits(policies[done[0]].weights)


def test_a_restarted_publisher_goes_on(url, tmp_path):
    """It goes on with the run, from the committed version: by its state, or without one by what the store has."""
    policy = Policy()
    publisher = Publisher(url, policy.weights, state=tmp_path / "state")
    publisher.publish()
    for _ in range(3):
        policy.step()
        publisher.publish()
    mine = policy.empty()
    subscriber = Subscriber(url, mine)
    subscriber.sync()
    policy.step()
    publisher.close()
    again = Publisher(url, policy.weights, state=tmp_path / "state")
    assert (again.run, again.version) == (publisher.run, 3)
    report = again.publish()
    assert (report.version, report.kind) == (4, "patch")
    assert subscriber.sync().kind == "patch"
    assert bits(mine) == bits(policy.weights)
    again.close()
    policy.step()
    with Publisher(url, policy.weights) as without_state:
        report = without_state.publish()
    assert (report.run, report.version, report.kind) == (publisher.run, 5, "patch")
    assert subscriber.sync().kind == "patch"
    assert bits(mine) == bits(policy.weights)
    assert Publisher(f"{url}-other", policy.weights, state=tmp_path / "state").run is None


def test_a_folder_that_something_else_is_in(url, tmp_path):
    """A real folder named `current` is not replaced, and two processes do not follow into one folder."""
    policy = Policy()
    Publisher(url, policy.weights).publish()
    (tmp_path / "mine" / "current").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="not a link"):
        Subscriber(url, targets.folder(tmp_path / "mine")).sync()
    one, two = (Subscriber(url, targets.folder(tmp_path / "out")) for _ in range(2))
    one.sync()
    with pytest.raises(CheckpointError, match="another process"):
        two.sync()
    one.targets[0].close()
    assert two.sync() is None


@pytest.mark.parametrize("where", ["kept anchor", "run", "bucket"])
def test_what_cannot_be_resumed_is_not_replaced(tmp_path, url, where):
    """A kept anchor that was damaged is fetched; where the store has lost something, a new run must be asked for."""
    policy = Policy()
    state = tmp_path / "state"
    with Publisher(url, policy.weights, state=state) as first:
        first.publish()
        policy.step()
        first.publish()
        run = first.run
    if where == "kept anchor":
        [anchor] = state.glob("anchor-*")
        data = bytearray(anchor.read_bytes())
        data[len(data) // 2] ^= 1
        anchor.write_bytes(data)
    else:
        lost = {"run": "runs/*/run.json", "bucket": "runs/*/buckets/*/*"}[where]
        for path in (tmp_path / "store").glob(lost):
            path.unlink()
    if where == "kept anchor":
        with Publisher(url, policy.weights, state=state) as second:
            report = second.publish()
        assert (report.run, report.kind, report.version) == (run, "patch", 2)
    else:
        with pytest.raises(SessionError, match=f"has run {run} at version 1, whose weights cannot be rebuilt.*new_run"):
            Publisher(url, policy.weights, state=state)
        with Publisher(url, policy.weights, state=state, new_run=True) as second:
            report = second.publish()
        assert (report.kind, report.version) == ("anchor", 0)
        assert report.run != run
    mine = policy.empty()
    Subscriber(url, mine).sync()
    assert bits(mine) == bits(policy.weights)
