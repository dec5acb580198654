"""Every version of a run arrives bit for bit, by whatever way, and may be gone back to."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest

import sparserl
from sparserl import Publisher, Subscriber, targets
from sparserl.errors import (
    NotRetained,
    SessionError,
    SparserlError,
    TensorMismatch,
)
from sparserl.session.store import routes, signing
from sparserl.session.store.retention import faults
from sparserl.session.store.squashing import squash_versions
from tests.class_choice import always
from tests.session.policy import Policy, bits


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


@pytest.mark.long
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
    steps = [s for s in publisher._committed.index.steps if s.base is not None]
    single = sum(s.bytes for s in steps if s.version == s.base + 1)
    assert {s.version - s.base for s in steps} >= {1, 8, 16, 32, 64}
    report = subscriber.sync()
    assert report.version == 100
    assert report.bytes < 0.6 * single
    assert bits(mine) == bits(policy.weights)


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
    monkeypatch.setattr("sparserl.plan.buckets.choose_classes", always)
    policy = Policy()
    publisher = Publisher(url, policy.weights)
    publisher.publish()
    mine = policy.empty()
    target = targets.module(mine)
    subscriber = Subscriber(url, target)
    subscriber.sync()
    policy.step()
    publisher.publish()
    assert "ctx" in publisher._committed.index.steps[-1].profiles
    target.profiles = frozenset(takes)
    if kind == "anchor":
        with pytest.raises(NotRetained):
            subscriber.sync()
        publisher._maintenance._options = replace(publisher._maintenance._options, anchor_after=0.0)
        publisher.publish()
    assert subscriber.sync().kind == kind
    assert bits(mine) == bits(policy.weights)


def test_what_is_published_while_training_goes_on(url):
    """A background publish begins when the changes are captured; what the trainer does next is not in the version."""
    policy = Policy()
    publisher = Publisher(url, policy.weights)
    mine = policy.empty()
    subscriber = Subscriber(url, mine)
    for version in range(4):
        background = publisher.publish_in_background()
        captured = bits(policy.weights)
        policy.step(0.5)
        assert background.result().version == version
        subscriber.sync()
        assert bits(mine) == captured


def test_other_tensors_are_refused(url):
    """A receiver accepts no weights of another shape, dtype or name, a publisher none of another dtype."""
    policy = Policy()
    publisher = Publisher(url, policy.weights)
    publisher.publish()
    wrong = policy.empty()
    wrong["router"] = wrong["router"].astype(np.float16)
    with pytest.raises(TensorMismatch, match="router"):
        Subscriber(url, wrong).sync()
    policy.weights["router"] = policy.weights["router"].astype(np.float16)
    with pytest.raises(TensorMismatch, match="router"):
        publisher.publish()


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
    publisher = Publisher(url, policy.weights, signing_key=secret, ladder=None)
    publisher.publish()
    mine = policy.empty()
    subscriber = Subscriber(url, mine, trusted_keys=public)
    subscriber.sync()
    for _ in range(6):
        policy.step()
        publisher.publish()
    if signed:
        with pytest.raises(SessionError, match="secret key is needed"):
            squash_versions(publisher.store, 0, 6)
    step = squash_versions(publisher.store, 0, 6, signing_key=secret)
    assert (step.base, step.version) == (0, 6)
    with pytest.raises(SessionError, match="already"):
        squash_versions(publisher.store, 0, 6, signing_key=secret)
    with pytest.raises(NotRetained):
        squash_versions(publisher.store, 3, 9, signing_key=secret)
    assert subscriber.sync().bytes == step.bytes
    assert bits(mine) == bits(policy.weights)
    policy.step()
    assert publisher.publish().version == 7
    assert step in publisher._committed.index.steps
    subscriber.sync()
    assert bits(mine) == bits(policy.weights)
    assert list(faults(publisher.store)) == []


def test_files_that_would_lie_elsewhere(url):
    """Names that lead out of a checkpoint are refused before anything is published."""
    for name in ("../x", "/etc/passwd", "a//b", "a/../b", ""):
        with pytest.raises(SparserlError, match="name of a file"):
            Publisher(url, Policy().weights, files={name: b""})


def test_an_index_does_not_grow_for_ever(url, monkeypatch):
    """Patches that are tiny lead to an anchor in the end, too, and to a collection."""
    monkeypatch.setattr("sparserl.session.store.maintenance._STEPS", 10)
    policy = Policy()
    publisher = Publisher(url, policy.weights, grace=0.0, keep_anchors=1, ladder=None, clock=lambda: time.time() + 3600)
    for _ in range(40):
        publisher.publish()
    assert len(publisher._committed.index.steps) <= 10
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


def test_the_cheapest_way():
    """Routes are found through squashed patches and anchors, and only where digests meet."""
    digest = lambda v: sparserl.Digest(v, v)  # noqa: E731

    def step(base, version, size, profiles=("ulp",)):
        start = None if base is None else digest(base)
        return routes.RouteStep(base, version, start, digest(version), size, 1, profiles, "0" * 64, 0.0)

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
