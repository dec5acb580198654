"""A commit reaches all targets or none, whatever interrupts it or writes to the weights."""

from __future__ import annotations

import contextlib
import os
import signal
import time

import numpy as np
import pytest

import sparserl
import sparserl.patch.apply
from sparserl import Publisher, Subscriber, targets
from sparserl.errors import (
    ChecksumMismatch,
    CommitFailed,
    SessionError,
    SparserlError,
    TensorMismatch,
)
from tests.session.policy import Policy, bits


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

    def remembered_version(self):
        return self.inner.remembered_version()

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
        inner, seen = sparserl.patch.application.swap, []

        def interrupted(*args):
            seen.append(args)
            if len(seen) == 4:  # while the second target is written
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.2)
            return inner(*args)

        monkeypatch.setattr("sparserl.patch.application.swap", interrupted)
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


def test_a_tie_that_was_broken_is_refused(url):
    """A tensor that the run has under another name alone would keep its old bits."""
    source = {"embed": np.zeros(4, np.float32)}
    publisher = Publisher(url, source)
    publisher.publish()
    mine = {"embed": np.ones(4, np.float32)}
    mine["lm_head"] = mine["embed"]
    subscriber = Subscriber(url, mine)
    subscriber.sync()
    mine["lm_head"] = mine["embed"].copy()
    source["embed"][0] = 7
    publisher.publish()
    with pytest.raises(TensorMismatch, match="'lm_head' was tied"):
        subscriber.sync()
    assert mine["embed"].tolist() == [0, 0, 0, 0]
    mine["lm_head"] = mine["embed"]
    subscriber.sync()
    assert mine["lm_head"].tolist() == [7, 0, 0, 0]


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
    with pytest.raises(CommitFailed, match="have moved since"):
        subscriber.commit()
    subscriber.sync()
    assert same()


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


def test_foreign_writes_are_found_after_so_many_versions(url):
    """Beside all changes, too: when the next version is staged, not in a commit; the sync after that mends them."""
    weights = {"w": np.zeros(100, np.float32)}
    mine = {"w": np.ones(100, np.float32)}
    with Publisher(url, weights) as publisher, Subscriber(url, mine, audit_every=3) as subscriber:
        for version in range(4):
            weights["w"][version] += 1
            publisher.publish()
            if version < 3:
                subscriber.sync()
            mine["w"][50] = 7
        for _ in range(2):  # sooner or later than so many commits nothing is read
            with pytest.raises(ChecksumMismatch, match="something else wrote to it"):
                subscriber.stage()
            assert subscriber.sync().kind == "anchor"
            assert bits(mine) == bits(weights)
            for version in range(2):
                weights["w"][version] += 1
                publisher.publish()
                assert subscriber.sync().kind == "patch"
            mine["w"][50] = 7
            weights["w"][0] += 1
            publisher.publish()


def one_behind(url, **hooks):
    """A policy, a subscriber that holds the version before its newest, and the weights of this subscriber."""
    policy = Policy()
    publisher = Publisher(url, policy.weights)
    publisher.publish()
    mine = policy.empty()
    subscriber = Subscriber(url, mine, **hooks)
    subscriber.sync()
    policy.step()
    publisher.publish()
    return policy, subscriber, mine


@pytest.mark.parametrize("is_found_by", ["audit", "identity"])
def test_what_was_staged_on_bits_that_others_wrote_to(url, is_found_by):
    """It would change right elements of wrong weights: who looks at the bits before the commit forgets it."""
    policy, subscriber, mine = one_behind(url)
    subscriber.stage()
    mine["router"][0, 0] += 1
    if is_found_by == "audit":
        with pytest.raises(ChecksumMismatch, match="its bits are others"):
            subscriber.audit()
    else:
        subscriber._is_uncertain = True
        subscriber._choose_version(None)
    with pytest.raises(SessionError, match="nothing is staged"):
        subscriber.commit()
    assert subscriber.version is None
    assert subscriber.sync().kind == "anchor"
    assert bits(mine) == bits(policy.weights)


@pytest.mark.parametrize("hook", ["audit", "discard", "stage"])
def test_a_hook_that_forgets_what_was_staged(url, hook):
    """It is not committed then; the engine goes on, and the next commit is right."""
    calls = []

    def before():
        calls.append("before")
        if len(calls) == 3:
            with contextlib.suppress(ChecksumMismatch):
                getattr(subscriber, hook)()

    policy, subscriber, mine = one_behind(url, before=before, after=lambda: calls.append("after"))
    subscriber.stage()
    mine["router"][0, 0] += 1 if hook == "audit" else 0
    with pytest.raises(SessionError, match="what was staged is forgotten"):
        subscriber.commit()
    assert calls == ["before", "after"] * 2
    assert subscriber.sync().kind == ("anchor" if hook == "audit" else "patch")
    assert bits(mine) == bits(policy.weights)


def test_what_was_staged_on_the_bits_that_are_there(url):
    """Looking at them changes nothing."""
    policy, subscriber, mine = one_behind(url)
    subscriber.stage()
    subscriber.audit()
    subscriber._is_uncertain = True
    subscriber._choose_version(None)
    assert subscriber.commit().kind == "patch"
    assert bits(mine) == bits(policy.weights)
