"""Ranks of a process group that die, hang, stay away or are interrupted: the others learn who, and go on."""

from __future__ import annotations

import os
import signal
import time

import numpy as np
import pytest

from sparserl import Part, Region, Shards, tensor_table
from sparserl.errors import (
    PeerLost,
    RegionOverlap,
    SessionError,
    TensorMismatch,
)
from tests.session.ranks import policy, ranks, results, seal, step, tensors

pytest.importorskip("torch")

from sparserl.session.group.publisher import GroupPublisher
from sparserl.session.group.subscriber import GroupSubscriber
from tests.session.group_faults import LIMIT, PATIENCE, Faulty, Hand, at, go, press, quick

WIDE = {"w": ("u2", (3 << 20,)), "b": ("u4", (100,))}  # an anchor of it takes several frames


def struck(rank, group, pipe, writer, victim, blow):
    """One sync that works, and one in the middle of which a rank is killed or stopped."""
    bits = policy(4, WIDE)
    if rank == writer:
        session = GroupPublisher(group, tensors(bits), writers=(writer,), timeout=LIMIT)
        turn = session.publish
    else:
        bits = policy(5, WIDE)
        session = GroupSubscriber(group, tensors(bits), writers=(writer,), timeout=LIMIT)
        turn = session.sync
    turn()
    session._line.timeout = 8.0
    first = seal(bits)
    if rank == writer:
        step(bits, np.random.default_rng(6), 0.9)
    pipe.send(("seal", seal(bits)))
    if rank == victim:
        post, count = session._line._post, 0

        def strike(*args):
            nonlocal count
            count += 1
            if count == 2:
                os.kill(os.getpid(), blow)
            post(*args)

        session._line._post = strike
    started = time.monotonic()
    with pytest.raises(PeerLost) as raised:
        turn()
    took = time.monotonic() - started
    with pytest.raises(PeerLost, match="build a new one"):
        turn()
    return str(raised.value), took, first, seal(bits)


@pytest.mark.parametrize(
    ("writer", "victim", "blow"),
    [
        (0, 2, signal.SIGKILL),
        pytest.param(0, 0, signal.SIGSTOP, marks=pytest.mark.long),
        pytest.param(0, 2, signal.SIGSTOP, marks=pytest.mark.long),
        pytest.param(1, 1, signal.SIGKILL, marks=pytest.mark.long),
    ],
)
def test_a_rank_that_dies_or_hangs_in_the_middle_is_named(writer, victim, blow):
    """All others raise in bounded time, with its rank in the message; their weights are those they had."""
    with ranks(3, struck, writer, victim, blow) as started:
        for _, pipe in started:
            assert pipe.poll(240)
            kind, value = pipe.recv()
            assert kind == "seal", value
        alive = [one for rank, one in enumerate(started) if rank != victim]
        for rank, (message, took, first, last) in zip(sorted({0, 1, 2} - {victim}), results(alive), strict=True):
            assert f"rank {victim}" in message, message
            assert took < PATIENCE
            assert first == last or rank == writer


def absent(rank, group, pipe):
    import torch.distributed as dist

    bits = policy(1)
    if rank == 0:
        dist.barrier()
        publisher = GroupPublisher(group, tensors(bits), timeout=2)
        for wait in (2, 10, 60):  # as long as a slow machine takes to bring rank 2 there
            publisher._line.timeout = wait
            with pytest.raises(PeerLost, match="rank 1 did not come to the sync") as raised:
                publisher.publish()
            if "rank 2" not in str(raised.value):
                break
        publisher._line.timeout = 30.0  # rank 1 now comes, however busy the machine is
        pipe.send(("late", None))
        report = publisher.publish()  # the group is in order
        publisher.close()
        return str(raised.value), report.kind
    mine = policy(2)
    subscriber = GroupSubscriber(group, tensors(mine), timeout=LIMIT)
    assert subscriber.stage(timeout=0.05) is None
    dist.barrier()
    if rank == 1:
        assert pipe.recv() == "come"
    report = subscriber.sync()
    return report.version, seal(mine) == seal(bits)


@pytest.mark.long
def test_a_rank_that_does_not_come_is_named_and_may_come_later():
    """Nobody waits inside a broadcast for it, so that the group stays in order."""
    with ranks(3, absent) as started:
        assert started[0][1].poll(240)
        assert started[0][1].recv()[0] == "late"
        started[1][1].send("come")
        (message, kind), *others = results(started)
    assert "rank 2" not in message
    assert kind == "anchor"
    assert others == [(0, True), (0, True)]


def interrupt(started, rank):
    press(started, rank)
    at(started, rank, "interrupted")


def hooked(rank, group, pipe):
    return _leads(group, Hand(pipe)) if rank == 0 else _trips(rank, group, Hand(pipe))


def _leads(group, hand):
    rng, bits, seals = np.random.default_rng(1), policy(1), []
    publisher = GroupPublisher(group, tensors(bits), timeout=LIMIT)

    def publish():
        report = quick(publisher.publish)
        seals.append((report.version, report.kind, seal(bits)))
        step(bits, rng)

    publish()
    hand.interrupted("publishes", publisher.publish)  # while rank 2 stages
    publish()
    hand.stop("goes on")
    quick(publisher.publish, SessionError, r"not committed anywhere: rank 1: KeyboardInterrupt")
    publish()
    quick(publisher.publish, SessionError, r"not committed everywhere: rank 1: RuntimeError: cannot pause")
    publish()
    before = {name: array.copy() for name, array in bits.items()}
    step(bits, rng)
    quick(publisher.publish, SessionError, r"not committed everywhere: rank 1: RuntimeError: cannot resume")
    for name, array in before.items():
        bits[name][:] = array  # the trainer went back: what rank 1 has committed changes again
    step(bits, rng)
    publish()
    quick(publisher.publish, PeerLost)  # rank 1 leaves after its hello, before rank 2 has come
    return seals


def _trips(rank, group, hand):
    bits, seals, fails = policy(2), [], []
    target = Faulty(tensors(bits))

    def hook(which):
        if which in fails:
            fails.remove(which)
            raise RuntimeError(f"cannot {which}")

    hooks = {"before": lambda: hook("pause"), "after": lambda: hook("resume")}
    subscriber = GroupSubscriber(group, target, timeout=LIMIT, **hooks)

    def sync():
        report = quick(subscriber.sync)
        seals.append((report.version, seal(bits)))

    sync()
    if rank == 2:
        for _ in range(2):  # the lead is interrupted first, then rank 1
            target.hold = lambda: hand.stop("stages")
            sync()
    else:
        sync()
        hand.interrupted("waits for the verdict", subscriber.sync)
        sync()
    for fault in ("pause", "resume"):
        if rank == 1:
            fails.append(fault)
            quick(subscriber.sync, RuntimeError, fault)
        else:
            sync()
        sync()
    if rank == 1:
        hand.interrupted("waits for rank 2", subscriber.sync)
    else:
        hand.stop("has not come")
        quick(subscriber.sync, PeerLost)
    return seals


@pytest.mark.long
def test_interrupts_and_hooks_that_raise_hang_nobody_and_heal():
    """Ctrl-C on the lead or a subscriber before the verdict, `before` or `after` that raise: all know, and all heal.

    A subscriber that leaves where frames may come at any time breaks the group, and nobody waits for it.
    """
    with ranks(3, hooked) as started:
        at(started, 0, "publishes")
        at(started, 2, "stages")
        interrupt(started, 0)
        go(started, 2)
        go(started, 0)
        at(started, 0, "goes on")
        at(started, 1, "waits for the verdict")
        go(started, 0)
        at(started, 2, "stages")
        interrupt(started, 1)
        go(started, 2)
        go(started, 1)
        at(started, 2, "has not come")
        at(started, 1, "waits for rank 2")
        time.sleep(0.5)
        interrupt(started, 1)
        go(started, 1)
        go(started, 2)
        sent, tripped, other = results(started)
    assert [row[:2] for row in sent] == [(0, "anchor"), (1, "patch"), (2, "patch"), (4, "patch"), (6, "anchor")]
    assert tripped == [(version, found) for version, _, found in sent]
    assert [row for row in other if row[0] not in (3, 5)] == tripped
    assert [version for version, _ in other] == list(range(7))


ROWS = ((0, 5), (5, 3))


def stepwise(rank, group, pipe):
    hand, writers, mine = Hand(pipe), (0, 1), np.zeros((8, 8), np.float32)
    if rank == 2:
        return _watches(group, hand, writers, mine)
    table = tensor_table({"w": mine})

    def made(first, rows, table=table):
        part = np.zeros((rows, 8), np.float32)
        shards = Shards(table, [Part("w", Region((first, 0), (rows, 8)), part)])
        return part, GroupPublisher(group, shards, writers=writers, timeout=LIMIT)

    for other, kind, match in (
        (made(5, 2), TensorMismatch, "no rank has 8 of the 64 elements of 'w'"),
        (made(4, 4), RegionOverlap, "'w'"),
        (made(5, 3, tensor_table({"w": np.zeros((8, 9), np.float32)})), SessionError, "TensorMismatch"),
    ):
        _, publisher = made(*ROWS[0]) if rank == 0 else other
        quick(publisher.publish, kind if rank == 0 else (SessionError, TensorMismatch), match if rank == 0 else None)
        publisher.stop()
    return _steps(rank, hand, *made(*ROWS[rank]))


def _steps(rank, hand, part, publisher):
    """All weights of a rank are the number of its step."""
    out = []

    def publish(number, **failure):
        part[:] = number
        report = quick(publisher.publish, **failure)
        out.append(None if report is None else (number, report.version))

    publish(1)
    if rank == 1:  # it is interrupted before the lead comes, and goes on with the next step
        part[:] = 2
        hand.interrupted("waits for the lead", publisher.publish)
    else:
        hand.stop("has not come")
        publish(2, error=SessionError, match="rank 1 left this publish")
    publish(3)
    if rank == 0:  # so is the lead
        part[:] = 4
        hand.interrupted("waits for rank 1", publisher.publish)
    else:
        hand.stop("has not come")
        publish(4, error=SessionError, match="rank 0 left this publish|called off: KeyboardInterrupt")
    publish(5)
    if rank == 0:  # and again, while the subscriber commits
        part[:] = 6
        hand.interrupted("waits for the commit", publisher.publish)
    else:
        publish(6, error=SessionError, match="not committed everywhere: KeyboardInterrupt")
    publish(7)
    publisher.close()
    return out


def _watches(group, hand, writers, mine):
    seen = []

    def before():
        if len(seen) == 3:
            hand.stop("commits")

    subscriber = GroupSubscriber(group, {"w": mine + 1}, writers=writers, timeout=LIMIT)
    subscriber.close()
    mine += 9
    subscriber = GroupSubscriber(group, {"w": mine}, writers=writers, before=before, timeout=LIMIT)
    subscriber.follow(on_commit=lambda report: seen.append((report.version, *np.unique(mine).tolist())))
    return seen


@pytest.mark.long
def test_writers_that_are_not_in_step_never_make_one_version():
    """A writer that was interrupted is a call ahead or behind: the other call is void, and the next ones fit again.

    Holes, overlaps and other tensor tables are refused before anything is sent, with the name of the tensor.
    """
    with ranks(3, stepwise) as started:
        at(started, 0, "has not come")
        at(started, 1, "waits for the lead")
        interrupt(started, 1)
        go(started, 1)
        go(started, 0)
        at(started, 0, "waits for rank 1")
        at(started, 1, "has not come")
        interrupt(started, 0)
        go(started, 0)
        go(started, 1)
        at(started, 0, "waits for the commit")
        at(started, 2, "commits")
        interrupt(started, 0)
        go(started, 2)
        go(started, 0)
        lead, other, seen = results(started)
    assert [row for row in lead if row] == [(1, 0), (3, 1), (5, 2), (7, 4)]
    assert [row for row in other if row] == [(1, 0), (3, 1), (5, 2), (7, 4)]
    assert seen == [(0, 1.0), (1, 3.0), (2, 5.0), (3, 6.0), (4, 7.0)]
