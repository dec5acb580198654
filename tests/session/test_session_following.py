"""Subscribers that follow, wait and hold leases, and what a publisher keeps for them."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

import sparserl
import sparserl.patch
from sparserl import Publisher, Subscriber, targets
from sparserl.errors import (
    ChecksumMismatch,
    NotRetained,
    SessionError,
    SparserlError,
    StoreError,
    UnsupportedFormat,
    Untrusted,
    WrongBase,
)
from sparserl.session.store import routes, signing
from sparserl.session.store.records import HEAD
from sparserl.session.store.retention import collect, needed, read_head
from sparserl.session.store.signing import keygen
from sparserl.transport.stores.base import COMING
from sparserl.transport.stores.deadline import Deadline
from tests.session.policy import Policy, bits


def test_retention_and_leases(url):
    """Old anchors and what builds on them go, unless a live subscriber needs it; nothing else is left."""
    policy = Policy()
    now = itertools.count(int(time.time()) + 3600)  # what nothing refers to is older than that
    clock = lambda: float(next(now))  # noqa: E731
    kept = {"anchor_after": 0.05, "keep_anchors": 1, "grace": 0.0, "lease": 1e9, "ladder": None}
    publisher = Publisher(url, policy.weights, clock=clock, **kept)
    publisher.publish()
    slow = Subscriber(url, policy.empty(), name="slow", clock=clock)
    slow.sync()
    for _ in range(30):
        policy.step()
        publisher.publish()
    steps = publisher._committed.index.steps
    assert sum(s.base is None for s in steps) == 1
    assert {s.base for s in steps if s.base is not None} >= set(range(30)), "the lease of version 0 spares all patches"
    patches = [s for s in steps if s.base is not None]
    assert len(routes.route(patches, (0, slow._current.digest), 30)) == 30
    publisher._maintenance._options = replace(publisher._maintenance._options, lease=0.0)
    for _ in range(10):
        policy.step()
        publisher.publish()
    oldest = min(s.version for s in publisher._committed.index.steps)
    assert oldest > 25
    with pytest.raises(NotRetained):
        slow.goto(oldest - 1)
    head = read_head(publisher.store)[0]
    collect(publisher.store, -1e12)
    lease = f"runs/{publisher.run}/leases/slow"
    assert {item.name for item in publisher.store.list("")} == {*needed(publisher.store, head), lease, COMING}


def test_waiting_for_subscribers(url):
    """`wait` counts those that hold a version or a later one."""
    policy = Policy()
    publisher = Publisher(url, policy.weights)
    publisher.publish()
    subscribers = [Subscriber(url, policy.empty(), name=f"rank-{i}") for i in range(2)]
    assert publisher.wait(0, 2, timeout=0.05) == 0
    subscribers[0].sync()
    assert publisher.wait(0, 2, timeout=0.05) == 1
    late = threading.Timer(0.2, subscribers[1].sync)
    late.start()
    assert publisher.wait(0, 2, timeout=60) == 2
    assert publisher.wait(1, 1, timeout=0.05) == 0


def test_following(url):
    """Every version is committed soon after it is published, in threads or tasks, until it is told to stop."""
    policy = Policy()
    publisher = Publisher(url, policy.weights)
    publisher.publish()
    mine, seen = policy.empty(), []
    subscriber = Subscriber(url, mine)

    async def main():
        task = asyncio.create_task(subscriber.follow_async(on_commit=lambda r: seen.append(r.version)))
        for version in range(1, 4):
            await asyncio.to_thread(policy.step)
            await asyncio.to_thread(publisher.publish)
            for _ in range(500):
                if subscriber.version == version:
                    break
                await asyncio.sleep(0.02)
            assert bits(mine) == bits(policy.weights)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert seen[-1] == 3
    assert sorted(seen) == seen
    policy.step()
    publisher.publish()
    time.sleep(1.5)
    assert subscriber.version == 3
    assert asyncio.run(subscriber.stage_async()).version == 4
    assert asyncio.run(subscriber.commit_async()).version == 4
    assert asyncio.run(subscriber.sync_async()) is None


def test_following_waits_for_a_publisher(url):
    """A store without a head is waited for; `once` says that there is none."""
    policy = Policy()
    mine = policy.empty()
    subscriber = Subscriber(url, mine)
    with pytest.raises(StoreError, match=r"no head\.json"):
        subscriber.follow(once=True)
    late = threading.Timer(0.3, Publisher(url, policy.weights).publish)
    late.start()
    subscriber.follow(timeout=900, stop=lambda: subscriber.version == 0)
    assert bits(mine) == bits(policy.weights)


def test_what_was_needed_a_moment_ago_stays_for_the_grace_period(url):
    """A subscriber that has just planned with an index still finds what it leads to; garbage goes when that is over."""
    policy = Policy()
    publisher = Publisher(url, policy.weights, anchor_after=0.01, keep_anchors=1, grace=600, ladder=None)
    publisher.publish()
    old = read_head(publisher.store)[0]
    for _ in range(3):
        policy.step()
        publisher.publish()
    assert 0 not in {s.version for s in publisher._committed.index.steps}
    there = {item.name for item in publisher.store.list("")}
    assert needed(publisher.store, old) <= there
    later = collect(publisher.store, 600, clock=lambda: time.time() + 601)
    assert later
    head = read_head(publisher.store)[0]
    assert {i.name for i in publisher.store.list("")} == {*needed(publisher.store, head), COMING}


def test_upkeep_that_fails_is_told_and_tried_again(url, tmp_path, monkeypatch):
    """A disk that is full takes the ladder and the kept anchor, not the version; later they come back."""
    policy = Policy()
    publisher = Publisher(url, policy.weights, state=tmp_path / "state", ladder=(2, 4))
    full = lambda *_, **__: (_ for _ in ()).throw(OSError("no space"))  # noqa: E731
    monkeypatch.setattr(sparserl.Patch, "save", full)
    monkeypatch.setattr(sparserl.patch.Captured, "back", full)
    assert any("no space" in note for note in publisher.publish().notes)
    policy.step()
    report = publisher.publish()
    assert (report.version, len(report.notes)) == (1, 2)
    monkeypatch.undo()
    policy.step()
    assert publisher.publish().notes == ()
    publisher.close()
    again = Publisher(url, policy.weights, state=tmp_path / "state")
    assert (again.run, again.version) == (publisher.run, 2)


def test_nothing_is_left_open(url, tmp_path):
    """Closed sessions hold no files and no threads."""
    policy = Policy()
    before = len(list(Path("/proc/self/fd").iterdir())), threading.active_count()
    for i in range(20):
        with Publisher(url, policy.weights) as publisher:
            publisher.publish()
        with Subscriber(url, [policy.empty(), targets.folder(tmp_path / str(i))]) as subscriber:
            subscriber.sync()
    assert len(list(Path("/proc/self/fd").iterdir())) <= before[0] + 4
    assert threading.active_count() <= before[1] + 4


def test_a_store_that_goes_away_is_waited_for_and_told_of(tmp_path, url):
    """Following goes on when the store is back; meanwhile whoever asked is told what is the matter."""
    policy = Policy()
    publisher = Publisher(url, policy.weights)
    publisher.publish()
    mine = policy.empty()
    subscriber = Subscriber(url, mine)
    subscriber.sync()
    store, aside = tmp_path / "store", tmp_path / "aside"
    store.rename(aside)
    told = []

    def trouble(error):
        told.append(error)
        if len(told) == 2:
            aside.rename(store)
            policy.step()
            publisher.publish()

    subscriber.follow(timeout=900, stop=lambda: subscriber.version == 1, on_trouble=trouble)
    assert all(isinstance(error, StoreError) for error in told)
    assert len(told) >= 2
    assert bits(mine) == bits(policy.weights)


def damage_head(head, _keys, _mine):
    head.write_bytes(head.read_bytes()[:100])


def sign_head_with_another_key(head, keys, _mine):
    head.write_bytes(signing.seal(signing.unseal(head.read_bytes(), keys[1], HEAD), keygen()[0]))


def write_to_weights(_head, _keys, mine):
    for name in ("half", "router"):
        mine[name][:] = 7


@pytest.mark.parametrize(
    ("break_it", "error"),
    [
        (damage_head, SparserlError),
        (sign_head_with_another_key, Untrusted),
        (write_to_weights, (WrongBase, ChecksumMismatch)),
    ],
)
def test_following_goes_on_when_trouble_is_over(tmp_path, url, log, monkeypatch, break_it, error):
    """What is wrong in store or weights for a while is refused, told of, and looked at again, later each time."""
    policy, keys, pauses, told = Policy(), keygen(), [], []
    head = tmp_path / "store" / HEAD
    mine = policy.empty()
    with (
        Publisher(url, policy.weights, signing_key=keys[0]) as publisher,
        Subscriber(url, mine, trusted_keys=keys[1], audit_every=1) as subscriber,
    ):
        publisher.publish()
        subscriber.sync()
        policy.step()
        publisher.publish()
        newest = head.read_bytes()
        break_it(head, keys, mine)
        before = bits(mine)
        sleep = Deadline.sleep
        monkeypatch.setattr(Deadline, "sleep", lambda self, s: (pauses.append(s), sleep(self, min(s, 0.01))))

        def trouble(raised):
            told.append(raised)
            assert bits(mine) == before
            if len(told) == 3 or break_it is write_to_weights:
                head.write_bytes(newest)

        subscriber.follow(stop=lambda: subscriber.version == 1, on_trouble=trouble, timeout=900)
    assert bits(mine) == bits(policy.weights)
    assert all(isinstance(raised, error) for raised in told)
    if break_it is not write_to_weights:
        assert [pause for pause in pauses if pause >= 1][:3] == [1, 2, 4]
    assert len([line for line in log("WARNING") if ": waiting: " in line]) == 1
    assert "waits no more" in log("WARNING")[-1]


@pytest.mark.parametrize(
    "error",
    [StoreError("the server answered 401"), SessionError("another run"), UnsupportedFormat("of a newer release")],
)
def test_following_ends_where_waiting_is_no_use(url, monkeypatch, error):
    """An error that no later look at the store would mend is raised."""
    with Publisher(url, Policy().weights) as publisher, Subscriber(url, Policy().empty()) as subscriber:
        publisher.publish()
        subscriber.sync()

        def refuse(_name, _max_bytes):
            raise error

        monkeypatch.setattr(subscriber.store, "get", refuse)
        with pytest.raises(type(error), match=str(error)):
            subscriber.follow(timeout=900)


@pytest.mark.parametrize("break_it", [damage_head, sign_head_with_another_key])
def test_following_does_not_begin_with_trouble(tmp_path, url, break_it):
    """A wrong key, or what is no store, is a mistake that somebody is there to see."""
    keys = keygen()
    with Publisher(url, Policy().weights, signing_key=keys[0]) as publisher:
        publisher.publish()
    break_it(tmp_path / "store" / HEAD, keys, None)
    with Subscriber(url, Policy().empty(), trusted_keys=keys[1]) as subscriber, pytest.raises(SparserlError):
        subscriber.follow(timeout=900)


@pytest.mark.parametrize("is_async", [False, True])
def test_closing_ends_following(url, is_async):
    """From another thread, soon, whatever it waits for; what was committed stays."""
    policy = Policy()
    mine, committed = policy.empty(), threading.Event()
    with Publisher(url, policy.weights) as publisher:
        publisher.publish()
        subscriber = Subscriber(url, mine)
        on_commit = {"on_commit": lambda _: committed.set()}
        follow = (
            (lambda: asyncio.run(subscriber.follow_async(**on_commit)))
            if is_async
            else (lambda: subscriber.follow(**on_commit))
        )
        with ThreadPoolExecutor(1) as pool:
            following = pool.submit(follow)
            assert committed.wait(60)
            subscriber.close()
            following.result(timeout=60)
        policy.step()
        publisher.publish()
    assert subscriber.version == 0


def test_closing_ends_waiting_for_trouble_to_end(tmp_path, url):
    """And for a publisher that has published nothing yet."""
    for is_empty in (True, False):
        told = threading.Event()
        with Publisher(f"{url}{is_empty}", Policy().weights) as publisher:
            if not is_empty:
                publisher.publish()
            subscriber = Subscriber(f"{url}{is_empty}", Policy().empty())
            if not is_empty:
                subscriber.sync()
                damage_head(tmp_path / "storeFalse" / HEAD, None, None)
            with ThreadPoolExecutor(1) as pool:
                following = pool.submit(subscriber.follow, on_trouble=lambda _, told=told: told.set())
                assert told.wait(60)
                subscriber.close()
                following.result(timeout=60)
