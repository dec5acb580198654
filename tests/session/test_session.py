"""A publisher and its subscribers over a folder: what is promised, one by one."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import sparserl
from sparserl import Bits, Publisher, Subscriber, targets
from sparserl.errors import (
    CheckpointError,
    ChecksumMismatch,
    CommitFailed,
    Fenced,
    NotRetained,
    SessionError,
    SparserlError,
    StoreError,
    TensorMismatch,
    Unavailable,
)
from sparserl.session.store import routes, signing
from sparserl.session.store.retention import collect, faults, needed, read_head
from sparserl.session.store.squashing import squash_versions
from sparserl.transport import open_store
from sparserl.transport.stores.folder import FolderStore
from sparserl.weights.dtypes import BY_NAME
from tests.classes import always


class Policy:
    """Weights that change a little with every step: several dtypes, a tie, an empty tensor and a single number."""

    def __init__(self, seed=0, scale=1):
        self.rng = np.random.default_rng(seed)
        draw = lambda *shape: self.rng.normal(size=shape)  # noqa: E731
        bf16 = BY_NAME["bfloat16"]
        self.arrays = {
            "embed": (draw(60 * scale, 32).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16),
            "router": draw(32, 8).astype(np.float32),
            "half": draw(50 * scale, 7).astype(np.float16),
            "steps": np.array(0, np.int64),
            "none": np.zeros((0, 4), np.float32),
        }
        self.weights = {k: Bits(a, bf16) if k == "embed" else a for k, a in self.arrays.items()}
        self.weights["head"] = self.weights["embed"]

    def step(self, share=0.02):
        for name in ("embed", "router", "half"):
            flat = self.arrays[name].reshape(-1).view(f"u{self.arrays[name].itemsize}")
            where = self.rng.random(flat.size) < share
            flat[where] += self.rng.choice(np.array([1, -1]), int(where.sum())).astype(flat.dtype)
        self.arrays["steps"] += 1

    def copy(self):
        return {k: a.copy() for k, a in self.arrays.items()}

    def empty(self):
        """Weights like these, all zero; not tied."""
        return {
            k: Bits(np.zeros_like(w.array), w.dtype) if isinstance(w, Bits) else np.zeros_like(w)
            for k, w in self.weights.items()
        }


def bits(weights):
    return {k: np.array(w.array if isinstance(w, Bits) else w).tobytes() for k, w in weights.items()}


@pytest.fixture
def url(tmp_path):
    return f"file://{tmp_path}/store"


def test_every_version_arrives_bit_for_bit(url):
    """Live weights and a checkpoint folder follow; NaN payloads and flipped zeros count as changes."""
    policy = Policy()
    publisher = Publisher(url, policy.weights)
    mine = policy.empty()
    subscriber = Subscriber(url, mine)
    for version in range(6):
        if version:
            policy.step()
            policy.arrays["router"].reshape(-1)[version] = -0.0 if version % 2 else 0.0
            policy.arrays["router"].view(np.uint32).reshape(-1)[9] = 0x7FC00000 + version
        report = publisher.publish()
        assert (report.version, publisher.version) == (version, version)
        got = subscriber.sync()
        assert (got.version, subscriber.version, subscriber.run) == (version, version, publisher.run)
        assert got.kind == ("anchor" if version == 0 else "patch")
        assert bits(mine) == bits(policy.weights)
        assert got.digest == sparserl.digest(mine).hex == report.digest
        assert subscriber.sync() is None
    assert list(faults(publisher.store)) == []


def test_nothing_changes_before_the_commit(url):
    """Staging fetches and verifies; the weights are written by the commit alone, or never."""
    policy = Policy()
    publisher = Publisher(url, policy.weights)
    publisher.publish()
    mine = policy.empty()
    subscriber = Subscriber(url, mine)
    before = bits(mine)
    assert subscriber.stage().version == 0
    assert bits(mine) == before
    assert subscriber.version is None
    subscriber.discard()
    with pytest.raises(SessionError, match="stage"):
        subscriber.commit()
    assert bits(mine) == before
    subscriber.stage()
    subscriber.commit()
    assert bits(mine) == bits(policy.weights)


def test_an_unchanged_policy_is_a_version_too(url):
    """Publishing twice without a step in between makes two versions with the same bits."""
    policy = Policy()
    publisher = Publisher(url, policy.weights)
    publisher.publish()
    report = publisher.publish()
    assert (report.version, report.changed) == (1, 0)
    mine = policy.empty()
    assert Subscriber(url, mine).sync().version == 1
    assert bits(mine) == bits(policy.weights)


class Breaks:
    """A target that fails where it is told to."""

    profiles = None
    keeps_files = False

    def __init__(self, inner, where):
        self.inner, self.where = inner, where

    def attach(self, table):
        return self.inner.attach(table)

    def close(self):
        self.inner.close()

    def held(self):
        return self.inner.held()

    def prepare(self, change):
        if self.where == "prepare":
            raise OSError("no room")
        prepared = self.inner.prepare(change)
        if self.where == "commit":
            prepared.commit = self.fail
        return prepared

    def fail(self):
        raise OSError("torn off")


@pytest.mark.parametrize("where", ["prepare", "commit"])
def test_all_targets_or_none(url, tmp_path, where):
    """When one of several targets fails, the others are as they were: memory, folder and version."""
    policy = Policy()
    publisher = Publisher(url, policy.weights)
    publisher.publish()
    one, two = policy.empty(), policy.empty()
    folder = targets.folder(tmp_path / "out")
    last = Breaks(targets.module(two), None)
    calls = []
    subscriber = Subscriber(
        url, [one, folder, last], before=lambda: calls.append("pause"), after=lambda: calls.append("resume")
    )
    subscriber.sync()
    policy.step()
    publisher.publish()
    before, link = bits(one), folder.current.readlink()
    last.where = where
    with pytest.raises(OSError if where == "prepare" else CommitFailed, match=r"no room|nothing has changed: torn off"):
        subscriber.sync()
    assert bits(one) == bits(two) == before
    assert folder.current.readlink() == link
    assert subscriber.version == 0
    assert calls == ["pause", "resume"] * (1 if where == "prepare" else 2)
    last.where = None
    assert subscriber.sync().version == 1
    assert bits(one) == bits(two) == bits(policy.weights)


@pytest.mark.parametrize("how", ["after", "interrupt"])
def test_a_commit_that_ends_with_an_exception(url, monkeypatch, how):
    """What is held is known then, too: the next sync goes on from it."""
    policy = Policy()
    publisher = Publisher(url, policy.weights)
    publisher.publish()
    one, two = policy.empty(), policy.empty()
    fails = []

    def after():
        if fails:
            raise RuntimeError(fails.pop())

    subscriber = Subscriber(url, [one, two], after=after)
    subscriber.sync()
    policy.step()
    publisher.publish()
    subscriber.stage()
    if how == "after":
        fails.append("cannot resume")
        with pytest.raises(RuntimeError, match="cannot resume"):
            subscriber.commit()
    else:
        inner, seen = sparserl.patch.apply._swap, []

        def interrupted(*args):
            seen.append(args)
            if len(seen) == 4:  # while the second target is written
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.2)
            return inner(*args)

        monkeypatch.setattr("sparserl.patch.apply._swap", interrupted)
        with pytest.raises(KeyboardInterrupt):
            subscriber.commit()
    assert subscriber.version == 1
    assert bits(one) == bits(two) == bits(policy.weights)
    monkeypatch.undo()
    policy.step()
    publisher.publish()
    assert subscriber.sync().kind == "patch"
    assert bits(one) == bits(two) == bits(policy.weights)


def test_weights_that_others_wrote_to_are_not_committed_to(url):
    """The tracked digest sees a bit that changed between stage and commit; everything is put back."""
    policy = Policy()
    publisher = Publisher(url, policy.weights)
    publisher.publish()
    mine = policy.empty()
    subscriber = Subscriber(url, mine)
    subscriber.sync()
    policy.step(0.3)
    publisher.publish()
    subscriber.stage()
    where = int(
        np.flatnonzero(mine["half"].reshape(-1).view(np.uint16) != policy.arrays["half"].reshape(-1).view(np.uint16))[0]
    )
    mine["half"].reshape(-1).view(np.uint16)[where] ^= 4
    before = bits(mine)
    with pytest.raises(CommitFailed, match="changed after the patch was staged"):
        subscriber.commit()
    assert bits(mine) == before
    with pytest.raises(ChecksumMismatch, match="something else wrote to it"):
        subscriber.audit()
    assert subscriber.version is None
    assert subscriber.sync().kind == "anchor"
    assert bits(mine) == bits(policy.weights)


def test_tied_weights_change_once(url):
    """Names that share memory are written once, checked, and taken back together."""
    policy = Policy()
    publisher = Publisher(url, policy.weights)
    publisher.publish()
    mine = policy.empty()
    mine["head"] = mine["embed"]
    broken = Breaks(targets.module(policy.empty()), None)
    subscriber = Subscriber(url, [mine, broken])
    subscriber.sync()
    for fails in (True, False):
        policy.step()
        publisher.publish()
        before = bits(mine)
        broken.where = "commit" if fails else None
        if fails:
            with pytest.raises(CommitFailed):
                subscriber.sync()
            assert bits(mine) == before
        else:
            subscriber.sync()
    assert bits(mine) == bits(policy.weights)
    policy.step()
    publisher.publish()
    subscriber.stage()
    mine["embed"].array.reshape(-1)[:] ^= np.uint16(1)
    before = bits(mine)
    with pytest.raises(CommitFailed):
        subscriber.commit()
    assert bits(mine) == before


def test_to_any_version_and_back(url, tmp_path):
    """`goto` reaches whatever the store has, in any order, in memory and in a folder."""
    policy = Policy()
    publisher = Publisher(url, policy.weights, ladder=(2, 8))
    versions = []
    for _ in range(9):
        publisher.publish()
        versions.append(bits(policy.weights))
        policy.step()
    mine, folder = policy.empty(), targets.folder(tmp_path / "out")
    subscriber = Subscriber(url, [mine, folder])
    for version in (3, 8, 0, 7, 2, 2, 5):
        subscriber.goto(version)
        assert (subscriber.version, bits(mine)) == (version, versions[version])
        held = sparserl.sources.open_checkpoint(folder.current)
        assert bits(dict(held)) == versions[version]
    with pytest.raises(NotRetained, match="versions 0 to 8"):
        subscriber.goto(9)


def test_far_behind_is_cheaper_than_every_patch(url):
    """A subscriber a hundred versions behind takes squashed patches: fewer bytes than all the patches."""
    policy = Policy()
    publisher = Publisher(url, policy.weights, anchor_after=1e9)
    publisher.publish()
    mine = policy.empty()
    subscriber = Subscriber(url, mine)
    subscriber.sync()
    for _ in range(100):
        policy.step(0.01)
        publisher.publish()
    steps = [s for s in publisher._now.index.steps if s.base is not None]
    single = sum(s.bytes for s in steps if s.version == s.base + 1)
    assert {s.version - s.base for s in steps} >= {1, 8, 16, 32, 64}
    report = subscriber.sync()
    assert report.version == 100
    assert report.bytes < 0.6 * single
    assert bits(mine) == bits(policy.weights)


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
        context.setattr(sparserl.Patch, "apply", lambda *_, **__: (_ for _ in ()).throw(MemoryError()))
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
    """A publisher that starts fresh has a new run; equal version numbers are not equal weights."""
    first, second = Policy(1), Policy(2)
    Publisher(url, first.weights).publish()
    mine = first.empty()
    subscriber = Subscriber(url, mine)
    assert subscriber.sync().version == 0
    other = Publisher(url, second.weights)
    assert other.publish().version == 0
    report = subscriber.sync()
    assert (report.version, report.kind, report.run) == (0, "anchor", other.run)
    assert bits(mine) == bits(second.weights)


def test_a_clock_that_was_set_back(url):
    """A new run is later than the one before it, whatever the clock says."""
    first, second = Policy(1), Policy(2)
    Publisher(url, first.weights, clock=lambda: 2e9).publish()
    old = read_head(open_store(url))[0]
    Publisher(url, second.weights, clock=lambda: 1e9).publish()
    assert read_head(open_store(url))[0].created > old.created


def test_a_joining_target_that_holds_a_version_is_recognized(url):
    """Bits tell which version a target holds: it goes on with patches, also after a restart."""
    policy = Policy()
    publisher = Publisher(url, policy.weights)
    publisher.publish()
    mine = policy.empty()
    Subscriber(url, mine).sync()
    policy.step()
    publisher.publish()
    report = Subscriber(url, mine).sync()
    assert (report.kind, report.version) == ("patch", 1)
    assert bits(mine) == bits(policy.weights)
    assert Subscriber(url, mine).sync() is None


@pytest.mark.parametrize(
    ("takes", "kind"), [({"raw", "gap", "ulp"}, "anchor"), ({"raw", "gap", "ulp", "ctx"}, "patch")]
)
def test_profiles_that_a_target_cannot_take(url, monkeypatch, takes, kind):
    """It gets what it can take of what the store has: an anchor at worst."""
    monkeypatch.setattr("sparserl.plan.buckets.choose", always)
    policy = Policy()
    publisher = Publisher(url, policy.weights)
    publisher.publish()
    mine = policy.empty()
    target = targets.module(mine)
    subscriber = Subscriber(url, target)
    subscriber.sync()
    policy.step()
    publisher.publish()
    assert "ctx" in publisher._now.index.steps[-1].profiles
    target.profiles = frozenset(takes)
    if kind == "anchor":
        with pytest.raises(NotRetained):
            subscriber.sync()
        publisher._anchor_after = 0.0
        publisher.publish()
    assert subscriber.sync().kind == kind
    assert bits(mine) == bits(policy.weights)


def test_what_is_published_while_training_goes_on(url):
    """`wait=False` returns when the changes are captured; what the trainer does next is not in the version."""
    policy = Policy()
    publisher = Publisher(url, policy.weights)
    mine = policy.empty()
    subscriber = Subscriber(url, mine)
    for version in range(4):
        assert publisher.publish(wait=False) is None
        captured = bits(policy.weights)
        policy.step(0.5)
        assert publisher.settle().version == version
        subscriber.sync()
        assert bits(mine) == captured


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
        publisher.publish(wait=False)
        with pytest.raises(Unavailable):
            publisher.settle()
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
    """With its state it goes on with the run, from the committed version; without it begins anew."""
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
    assert Publisher(url, policy.weights).run is None
    assert Publisher(f"{url}-other", policy.weights, state=tmp_path / "state").run is None


def test_retention_and_leases(url):
    """Old anchors and what builds on them go, unless a live subscriber needs it; nothing else is left."""
    policy = Policy()
    now = itertools.count(1_000_000)
    clock = lambda: float(next(now))  # noqa: E731
    kept = {"anchor_after": 0.05, "keep_anchors": 1, "grace": -1e12, "lease": 1e9, "ladder": None}
    publisher = Publisher(url, policy.weights, clock=clock, **kept)
    publisher.publish()
    slow = Subscriber(url, policy.empty(), name="slow", clock=clock)
    slow.sync()
    for _ in range(30):
        policy.step()
        publisher.publish()
    steps = publisher._now.index.steps
    assert sum(s.base is None for s in steps) == 1
    assert {s.base for s in steps if s.base is not None} >= set(range(30)), "the lease of version 0 spares all patches"
    patches = [s for s in steps if s.base is not None]
    assert len(routes.route(patches, (0, slow._held.digest), 30)) == 30
    publisher._lease = -1.0
    for _ in range(10):
        policy.step()
        publisher.publish()
    oldest = min(s.version for s in publisher._now.index.steps)
    assert oldest > 25
    with pytest.raises(NotRetained):
        slow.goto(oldest - 1)
    head = read_head(publisher.store)[0]
    collect(publisher.store, -1e12)
    lease = f"runs/{publisher.run}/leases/slow"
    assert {item.name for item in publisher.store.list("")} == {*needed(publisher.store, head), lease}


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
    assert publisher.wait(0, 2, timeout=20) == 2
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
    subscriber.follow(timeout=30, stop=lambda: subscriber.version == 0)
    assert bits(mine) == bits(policy.weights)


def test_other_tensors_are_refused(url):
    """Neither side accepts weights of another shape, dtype or name."""
    policy = Policy()
    publisher = Publisher(url, policy.weights)
    publisher.publish()
    wrong = policy.empty()
    wrong["router"] = wrong["router"].astype(np.float16)
    with pytest.raises(TensorMismatch, match="router"):
        Subscriber(url, wrong).sync()
    del policy.weights["router"]
    with pytest.raises(TensorMismatch, match="router"):
        publisher.publish()


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


def test_files_travel_with_the_anchor(url, tmp_path):
    """Config and tokenizer are in every version's folder; old folders go."""
    policy = Policy()
    files = {"config.json": b'{"a": 1}', "sub/tokenizer.json": b"[]"}
    publisher = Publisher(url, policy.weights, files=files)
    publisher.publish()
    folder = targets.folder(tmp_path / "out", keep=2)
    subscriber = Subscriber(url, folder)
    for _ in range(5):
        subscriber.sync()
        assert {name: (folder.current / name).read_bytes() for name in files} == files
        policy.step()
        publisher.publish()
    assert len(list((tmp_path / "out" / "versions").iterdir())) == 2
    assert list(folder.building.iterdir()) == []


@pytest.mark.parametrize("signed", [False, True])
def test_squashed_after_the_fact(url, signed):
    """A tool adds a patch over several versions; subscribers take it, and the publisher goes on with the new index."""
    policy = Policy()
    secret, public = signing.keygen() if signed else (None, None)
    publisher = Publisher(url, policy.weights, key=secret, ladder=None)
    publisher.publish()
    mine = policy.empty()
    subscriber = Subscriber(url, mine, key=public)
    subscriber.sync()
    for _ in range(6):
        policy.step()
        publisher.publish()
    if signed:
        with pytest.raises(SessionError, match="secret key is needed"):
            squash_versions(publisher.store, 0, 6)
    step = squash_versions(publisher.store, 0, 6, key=secret)
    assert (step.base, step.version) == (0, 6)
    with pytest.raises(SessionError, match="already"):
        squash_versions(publisher.store, 0, 6, key=secret)
    with pytest.raises(NotRetained):
        squash_versions(publisher.store, 3, 9, key=secret)
    assert subscriber.sync().bytes == step.bytes
    assert bits(mine) == bits(policy.weights)
    policy.step()
    assert publisher.publish().version == 7
    assert step in publisher._now.index.steps
    subscriber.sync()
    assert bits(mine) == bits(policy.weights)
    assert list(faults(publisher.store)) == []


def test_files_that_would_lie_elsewhere(url):
    """Names that lead out of a checkpoint are refused before anything is published."""
    for name in ("../x", "/etc/passwd", "a//b", "a/../b", ""):
        with pytest.raises(SparserlError, match="name of a file"):
            Publisher(url, Policy().weights, files={name: b""})


def test_a_module_whose_parameters_were_replaced(url):
    """They are looked up anew; if it happens between stage and commit, nothing is written."""
    torch = pytest.importorskip("torch")
    mine = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5))
    theirs = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5))
    publisher = Publisher(url, sparserl.sources.module(theirs))
    publisher.publish()
    subscriber = Subscriber(url, mine)
    subscriber.sync()

    def same():
        return all(
            torch.equal(a, b) for a, b in zip(mine.state_dict().values(), theirs.state_dict().values(), strict=True)
        )

    def train():
        with torch.no_grad():
            theirs[0].weight += 0.1
            theirs[1].running_mean += 1
        publisher.publish()

    assert same()
    mine[0].weight.data = mine[0].weight.data.clone()
    train()
    subscriber.sync()
    assert same()
    train()
    subscriber.stage()
    mine[0].weight = torch.nn.Parameter(mine[0].weight.detach().clone())
    with pytest.raises(CommitFailed, match="lie elsewhere"):
        subscriber.commit()
    subscriber.sync()
    assert same()


def test_what_was_needed_a_moment_ago_stays_for_the_grace_period(url):
    """A subscriber that has just planned with an index still finds what it leads to; garbage goes when that is over."""
    policy = Policy()
    publisher = Publisher(url, policy.weights, anchor_after=0.01, keep_anchors=1, grace=600, ladder=None)
    publisher.publish()
    old = read_head(publisher.store)[0]
    for _ in range(3):
        policy.step()
        publisher.publish()
    assert 0 not in {s.version for s in publisher._now.index.steps}
    there = {item.name for item in publisher.store.list("")}
    assert needed(publisher.store, old) <= there
    later = collect(publisher.store, 600, clock=lambda: time.time() + 601)
    assert later
    assert {i.name for i in publisher.store.list("")} == needed(publisher.store, read_head(publisher.store)[0])


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


def test_an_index_does_not_grow_for_ever(url, monkeypatch):
    """Patches that are tiny lead to an anchor in the end, too, and to a collection."""
    monkeypatch.setattr("sparserl.session.store.publisher._STEPS", 10)
    policy = Policy()
    publisher = Publisher(url, policy.weights, grace=-1e12, keep_anchors=1, ladder=None)
    for _ in range(40):
        publisher.publish()
    assert len(publisher._now.index.steps) <= 10
    assert len(list(publisher.store.list("runs/"))) < 60


def test_those_who_hold_it_already_say_so(url):
    """A subscriber that finds itself at the newest version counts."""
    policy = Policy()
    publisher = Publisher(url, policy.weights)
    publisher.publish()
    mine = policy.empty()
    Subscriber(url, mine, name=False).sync()
    assert publisher.wait(0, 1, timeout=0.05) == 0
    assert Subscriber(url, mine, name="joined").sync() is None
    assert publisher.wait(0, 1, timeout=0.05) == 1


def test_other_writers_are_found_out(url):
    """Bits that something else wrote make one sync fail; the next one reads them and starts from an anchor."""
    policy = Policy()
    publisher = Publisher(url, policy.weights)
    publisher.publish()
    mine = policy.empty()
    subscriber = Subscriber(url, mine)
    subscriber.sync()
    mine["half"][:] = 7
    mine["embed"].array[:] = 7
    policy.step(0.5)
    publisher.publish()
    with pytest.raises(SparserlError):
        subscriber.sync()
    assert subscriber.sync().kind == "anchor"
    assert bits(mine) == bits(policy.weights)


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


def test_the_cheapest_way():
    """Routes are found through squashed patches and anchors, and only where digests meet."""
    digest = lambda v: sparserl.Digest(v, v)  # noqa: E731

    def step(base, version, size, profiles=("ulp",)):
        start = None if base is None else digest(base)
        return routes.Step(base, version, start, digest(version), size, 1, profiles, "0" * 64, 0.0)

    steps = [
        step(None, 0, 1000),
        *(step(i, i + 1, 10) for i in range(8)),
        step(0, 4, 25),
        step(4, 8, 50),
        step(None, 6, 30),
    ]
    ways = lambda have, want: [(s.base, s.version) for s in routes.route(steps, have, want)]  # noqa: E731
    assert ways((0, digest(0)), 8) == [(None, 6), (6, 7), (7, 8)]
    assert ways((0, digest(0)), 5) == [(0, 4), (4, 5)]
    assert ways((3, digest(3)), 5) == [(3, 4), (4, 5)]
    assert ways((3, digest(99)), 5) == [(None, 0), (0, 4), (4, 5)], "version 3 of another history"
    assert ways((5, digest(5)), 5) == []
    assert ways(None, 6) == [(None, 6)]
    with pytest.raises(NotRetained):
        routes.route(steps, None, 9)
    with pytest.raises(NotRetained):
        routes.route(steps, None, 8, {"raw"})


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

    subscriber.follow(timeout=20, stop=lambda: subscriber.version == 1, on_trouble=trouble)
    assert all(isinstance(error, StoreError) for error in told)
    assert len(told) >= 2
    assert bits(mine) == bits(policy.weights)


@pytest.mark.parametrize("where", ["kept anchor", "run", "bucket"])
def test_what_cannot_be_resumed_is_begun_anew(tmp_path, url, where):
    """A kept anchor that was damaged, or a store that has lost something: a new run, and no error at the start."""
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
    with Publisher(url, policy.weights, state=state) as second:
        report = second.publish()
    assert (report.kind, report.version) == ("anchor", 0)
    assert report.run != run
    mine = policy.empty()
    Subscriber(url, mine).sync()
    assert bits(mine) == bits(policy.weights)
