"""Profiles in a process group: patches keep to what all ranks take, or are refused with the option that helps."""

from __future__ import annotations

import numpy as np
import pytest

import sparserl
from sparserl.errors import SessionError, SparserlError
from sparserl.targets.modules import ModuleTarget
from tests.session.ranks import policy, ranks, results, seal, step, tensors

pytest.importorskip("torch")

from tests.session.group_faults import LIMIT

SYNCS = 2


class Noting(ModuleTarget):
    """A target that takes some profiles, and notes those of the patches that it gets."""

    def __init__(self, weights, profiles):
        super().__init__(weights)
        self.profiles = profiles and frozenset(profiles)
        self.used = set()

    def prepare(self, change):
        self.used |= {head.profile.name for patch in change.patches for head in patch.contents.heads}
        return super().prepare(change)


def sync(rank, group, pipe, options, takes):
    """Rank 0 publishes; the others take what they are told."""
    bits = policy(1)
    if rank == 0:
        return publish(group, bits, options)
    target = Noting(tensors(bits), takes[rank - 1])
    subscriber = sparserl.GroupSubscriber(group, target, timeout=LIMIT)
    seals = []
    subscriber.follow(on_commit=lambda _: seals.append(seal(bits)))
    subscriber.close()
    return seals, target.used


def publish(group, bits, options):
    """The seal of each version, or why it was refused."""
    rng = np.random.default_rng(1)
    source = tensors(bits)
    if options.get("baseline") == "none":
        source = Unseen(source)
    publisher = sparserl.GroupPublisher(group, source, timeout=LIMIT, **options)
    out = []
    for _ in range(1 + SYNCS):
        try:
            publisher.publish()
        except SessionError as error:
            out.append(str(error))
        else:
            out.append(seal(bits))
        step(bits, rng)
    publisher.close()
    return out


class Unseen:
    """A source that says it tracks changes, and keeps no old bits."""

    def __init__(self, tensors):
        self.tensors = tensors

    def weights(self):
        return self.tensors

    def committed(self):
        """Nothing was kept."""


@pytest.mark.parametrize(
    ("takes", "used"),
    [
        ([("raw", "gap"), ("gap", "ulp")], {"gap"}),
        pytest.param([("raw",)], {"raw"}, marks=pytest.mark.long),
        pytest.param([("ctx", "raw"), None], {"raw"}, marks=pytest.mark.long),
    ],
)
def test_patches_are_in_what_all_ranks_take(takes, used):
    """Whatever `auto` would choose."""
    with ranks(1 + len(takes), sync, {}, takes) as started:
        versions, *receivers = results(started)
    assert len(set(versions)) == 1 + SYNCS
    for seals, noted in receivers:
        assert seals == versions
        assert noted == used


@pytest.mark.parametrize(
    ("options", "takes", "refusal"),
    [
        (
            {"profile": "ctx"},
            [("raw", "gap", "ulp"), None],
            "the next version is in profile ctx, but only gap, raw, ulp can be taken: publish with profile='ulp'",
        ),
        pytest.param(
            {"baseline": "none"},
            [("raw",), None],
            (
                "the next version is in profile ulp, but only raw can be taken: publish with profile='raw', "
                "or with baseline='host', which keeps what is needed to encode it for all receivers"
            ),
            marks=pytest.mark.long,
        ),
        pytest.param(
            {},
            [("raw",), ("ulp", "ctx")],
            (
                "the receivers have no profile in common: rank 1 takes only raw, rank 2 takes only ctx, ulp: "
                "give all receivers targets whose `profiles` have one in common, such as 'raw'"
            ),
            marks=pytest.mark.long,
        ),
    ],
)
def test_what_a_rank_cannot_take_is_refused(options, takes, refusal):
    """By the profile, and the option to set; nobody commits it, and the next version is refused like it."""
    with ranks(1 + len(takes), sync, options, takes) as started:
        (first, *refused), *receivers = results(started)
    assert refused == [refusal] * SYNCS
    for seals, noted in receivers:
        assert (seals, noted) == ([first], set())


def behind_relay(rank, group, pipe, url):
    """Rank 0 hands on what a store has; rank 1 takes `gap` only. What became of each sync."""
    bits = policy(10 + rank)
    if rank == 0:
        session = sparserl.Relay(url, group, name="relay", timeout=LIMIT)
    else:
        session = sparserl.GroupSubscriber(group, Noting(tensors(bits), ("gap",)), timeout=LIMIT)
    out = []
    while pipe.recv() != "end":
        try:
            session.sync()
        except SparserlError as error:
            out.append(type(error).__name__)
        else:
            out.append(seal(bits))
        pipe.send(None)
    session.close()
    return out


@pytest.mark.long
def test_a_publisher_hears_what_ranks_behind_a_relay_take(tmp_path):
    """What one of them refuses is told to the publisher, which keeps to it: then all go on by patches."""
    url = f"file://{tmp_path}/store"
    rng = np.random.default_rng(1)
    bits = policy(1)
    expected = []
    with ranks(2, behind_relay, url) as started, sparserl.Publisher(url, tensors(bits), profile="ulp") as publisher:
        for _ in range(5):
            publisher.publish()
            expected.append(seal(bits))
            step(bits, rng)
            for _, pipe in started:
                pipe.send("sync")
            for _, pipe in started:
                assert pipe.poll(120)
                pipe.recv()
            publisher._maintenance.receivers.look()
        for _, pipe in started:
            pipe.send("end")
        _, received = results(started)
        steps = publisher._committed.index.steps
    assert received[0] == expected[0]
    assert received[-2:] == expected[-2:]
    assert [step.profiles for step in steps if step.base is not None][-1] == ("gap",)
