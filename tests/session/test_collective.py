"""A publisher and subscribers as ranks of a process group: real processes, real Gloo."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import numpy as np
import pytest

import sparserl
from sparserl import Part, Region, Shards, targets, tensor_table
from sparserl.errors import (
    ChecksumMismatch,
    CommitFailed,
    FormatError,
    PeerLost,
    RegionOverlap,
    SessionError,
    TensorMismatch,
)
from sparserl.targets.modules import ModuleTarget, PreparedModule
from tests.session.ranks import policy, ranks, results, seal, step, tensors

pytest.importorskip("torch")

from sparserl.session.group.publisher import CollectivePublisher
from sparserl.session.group.subscriber import CollectiveSubscriber

WIDE = {"w": ("u2", (3 << 20,)), "b": ("u4", (100,))}  # an anchor of it takes several frames


class Faulty(ModuleTarget):
    """A target that fails when it is told to, or takes its time to stage."""

    fails = ""
    hold = None

    def prepare(self, change):
        if self.fails == "prepare":
            self.fails = ""
            raise MemoryError("no room to stage")
        prepared = super().prepare(change)
        if self.hold is not None:
            hold, self.hold = self.hold, None
            hold()
        return FaultyPrepared(self, prepared)


class FaultyPrepared:
    def __init__(self, target, inner: PreparedModule):
        self.target, self.inner, self.changed = target, inner, inner.changed
        self.finish, self.discard = inner.finish, inner.discard

    def commit(self):
        if self.target.fails == "commit":
            self.target.fails = ""
            raise OSError("the device fell off")
        return self.inner.commit()


# -- one writer --------------------------------------------------------------------------------------------------------


def many_syncs(rank, group, pipe, folder):
    return _publishes(group) if rank == 0 else _follows(rank, group, folder)


def _publishes(group):
    rng, bits = np.random.default_rng(1), policy(1)
    seals, kinds, errors = [], [], []
    files = {"config.json": b"{}", "empty": b""}
    publisher = sparserl.Publisher(source=tensors(bits), process_group=group, files=files, timeout=30)

    def publish(times=1):
        for _ in range(times):
            report = publisher.publish()
            seals.append((report.version, seal(bits)))
            kinds.append(report.kind)
            step(bits, rng)

    def fail():
        with pytest.raises(SessionError) as raised:
            publisher.publish()
        errors.append(str(raised.value))
        step(bits, rng)

    publish(6)
    held = publisher.version
    fail()  # rank 2 cannot stage
    assert publisher.version == held
    publish()
    fail()  # rank 2 cannot commit
    publish()
    fail()  # a frame that rank 2 gets was altered
    publish()
    taken = seal(bits)
    assert publisher.publish(wait=False) is None
    step(bits, rng)  # the trainer goes on at once
    report = publisher.settle()
    seals.append((report.version, taken))
    messages = report.messages
    publish()
    with pytest.raises(TensorMismatch):
        CollectivePublisher.publish(_renamed(publisher, bits))
    publisher._source = tensors(bits)
    publish()
    publisher.close()
    return seals, kinds, errors, messages


def _renamed(publisher, bits):
    publisher._source = tensors({**bits, "another": bits["f32"]})
    return publisher


def _follows(rank, group, folder):
    bits = policy(1 if rank == 1 else 2)
    seals, errors, calls = [], [], []
    target = Faulty(tensors(bits))
    several = [target, targets.folder(folder)] if rank == 2 else target
    hooks = {"before": lambda: calls.append("before"), "after": lambda: calls.append("after")}
    subscriber = sparserl.Subscriber(target=several, process_group=group, timeout=30, audit_every=3, **hooks)
    receive = subscriber._line.receive

    def altered(*args):
        for bucket in receive(*args):
            middle = len(bucket) // 2
            yield bucket[:middle] + bytes([bucket[middle] ^ 1]) + bucket[middle + 1 :]

    def note(report):
        seals.append((report.version, seal(bits)))

    if rank == 2:
        for _ in range(6):
            note(subscriber.sync())
        for fault in ("prepare", "commit", "frame"):
            before = seal(bits)
            if fault == "frame":
                subscriber._line.receive = altered
            else:
                target.fails = fault
            with pytest.raises((MemoryError, CommitFailed, FormatError)) as raised:
                subscriber.sync()
            errors.append(type(raised.value).__name__)
            assert seal(bits) == before
            subscriber._line.receive = receive
            note(subscriber.sync())
        note(asyncio.run(subscriber.sync_async()))
    subscriber.follow(on_commit=note)
    subscriber.close()
    return seals, errors, calls


def test_random_syncs_are_exact_and_faults_heal(tmp_path):
    """Every version is the publisher's, bit for bit; a rank that fails is named, and the next publish heals it."""
    with ranks(3, many_syncs, tmp_path / "folder") as started:
        (seals, kinds, errors, messages), (first, _, calls), (second, faults, _) = results(started)
    expected = dict(seals)
    assert len(expected) == 12
    assert kinds[:2] == ["anchor", "patch"]
    assert kinds[6:9] == ["patch", "anchor", "patch"]  # after a fault in staging, in committing, and of a frame
    assert all("rank 2" in error for error in errors)
    assert "no room to stage" in errors[0]
    assert "fell off" in errors[1]
    assert "anywhere" in errors[0]
    assert "everywhere" in errors[1]
    assert "anywhere" in errors[2]
    assert faults[:2] == ["MemoryError", "CommitFailed"]
    assert dict(second) == expected
    missed = [version for version, found in first if expected.get(version, found) != found]
    assert not missed
    assert set(dict(first)) == set(expected) | {7}  # the version that rank 2 could not commit
    assert calls == ["before", "after"] * len(first)
    assert messages == 3  # one for each dtype: nothing is sent tensor by tensor
    link = tmp_path / "folder" / "current"
    assert (link / "config.json").read_bytes() == b"{}"
    found = {name: np.asarray(bits.array) for name, bits in sparserl.sources.open_checkpoint(link).items()}
    assert seal(found) == seals[-1][1]


# -- several writers ---------------------------------------------------------------------------------------------------


def sharded(rank, group, pipe):
    shapes = {"row": ("u2", (64, 33)), "column": ("u4", (40, 50)), "first": ("u1", (1000,)), "last": ("u2", (7,))}
    rng, bits, writers, seals = np.random.default_rng(3), policy(3, shapes), (2, 1), []
    if rank not in writers:
        mine = policy(9, shapes)
        subscriber = CollectiveSubscriber(tensors(mine), group, writers=writers, timeout=30)
        subscriber.follow(on_commit=lambda report: seals.append((report.version, report.changed, seal(mine))))
        return seals
    table, whole = tensor_table(tensors(bits)), tensors(bits)

    def parts():
        if rank == 1:
            boxes = {
                "row": Region((0, 0), (20, 33)),
                "column": Region((0, 0), (40, 11)),
                "first": Region((0,), (1000,)),
            }
        else:
            boxes = {"row": Region((20, 0), (44, 33)), "column": Region((0, 11), (40, 39)), "last": Region((0,), (7,))}
        return Shards(table, [Part(name, box, whole[name][box.slices]) for name, box in boxes.items()])

    publisher = CollectivePublisher(parts(), group, writers=writers, timeout=30)
    for _ in range(4):
        report = publisher.publish()
        seals.append((report.version, report.changed, seal(bits)))
        step(bits, rng, 0.05)
    if rank == 1:
        publisher._now = None  # a writer that has lost its baseline
    with pytest.raises(SessionError, match="one version"):
        publisher.publish()
    report = publisher.publish()
    seals.append((report.version, report.changed, seal(bits)))
    publisher.close()
    return [(*row, report.kind) for row in seals]


def test_the_shards_of_two_writers_become_one_version():
    """Two writers with boxes of the tensors, two subscribers with all of them: exact, also when one writer is new."""
    with ranks(4, sharded) as started:
        one, led, second, other = results(started)
    assert led == second
    assert [row[0] for row in led] == [0, 1, 2, 3, 4]
    assert led[-1][3] == "anchor"
    for found in (one, other):
        assert [(version, found_seal) for version, _, found_seal in found] == [(row[0], row[2]) for row in led]
        assert [row[1] for row in found[1:4]] == [row[1] for row in led[1:4]]


# -- ranks that go away ------------------------------------------------------------------------------------------------


def struck(rank, group, pipe, writer, victim, blow):
    """One sync that works, and one in the middle of which a rank is killed or stopped."""
    bits, limit = policy(4, WIDE), 30.0
    if rank == writer:
        session = CollectivePublisher(tensors(bits), group, writers=(writer,), timeout=limit)
        turn = session.publish
    else:
        bits = policy(5, WIDE)
        session = CollectiveSubscriber(tensors(bits), group, writers=(writer,), timeout=limit)
        turn = session.sync
    turn()
    session._line.timeout = 4.0
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
        (0, 0, signal.SIGSTOP),
        pytest.param(0, 2, signal.SIGSTOP, marks=pytest.mark.long),
        pytest.param(1, 1, signal.SIGKILL, marks=pytest.mark.long),
    ],
)
def test_a_rank_that_dies_or_hangs_in_the_middle_is_named(writer, victim, blow):
    """All others raise in bounded time, with its rank in the message; their weights are those they had."""
    with ranks(3, struck, writer, victim, blow) as started:
        for _, pipe in started:
            assert pipe.poll(60)
            kind, value = pipe.recv()
            assert kind == "seal", value
        alive = [one for rank, one in enumerate(started) if rank != victim]
        for rank, (message, took, first, last) in zip(sorted({0, 1, 2} - {victim}), results(alive, 40), strict=True):
            assert f"rank {victim}" in message, message
            assert took < 25
            assert first == last or rank == writer


def absent(rank, group, pipe):
    import torch.distributed as dist

    bits = policy(1)
    if rank == 0:
        dist.barrier()
        publisher = CollectivePublisher(tensors(bits), group, timeout=2)
        with pytest.raises(PeerLost, match="rank 1 did not come to the sync") as raised:
            publisher.publish()
        pipe.send(("late", None))
        report = publisher.publish()  # the group is in order
        publisher.close()
        return str(raised.value), report.kind
    mine = policy(2)
    subscriber = CollectiveSubscriber(tensors(mine), group, timeout=20)
    assert subscriber.stage(timeout=0.05) is None
    dist.barrier()
    if rank == 1:
        assert pipe.recv() == "come"
    report = subscriber.sync()
    return report.version, seal(mine) == seal(bits)


def test_a_rank_that_does_not_come_is_named_and_may_come_later():
    """Nobody waits inside a broadcast for it, so that the group stays in order."""
    with ranks(3, absent) as started:
        assert started[0][1].poll(60)
        assert started[0][1].recv()[0] == "late"
        started[1][1].send("come")
        (message, kind), *others = results(started)
    assert "rank 2" not in message
    assert kind == "anchor"
    assert others == [(0, True), (0, True)]


# -- a rebuilt group ---------------------------------------------------------------------------------------------------


def rebuilt(rank, group, pipe):
    import torch.distributed as dist

    small = dist.new_group([0, 1])
    large = dist.new_group([0, 1, 2])
    larger = dist.new_group([0, 1, 2])
    rng, bits, out = np.random.default_rng(1), policy(1), []
    if rank == 0:
        publisher = None
        for which in (small, large, larger):
            publisher = CollectivePublisher(tensors(bits), which, previous=publisher, timeout=30)
            for _ in range(2):
                report = publisher.publish()
                out.append((report.run, report.version, report.kind, seal(bits)))
                step(bits, rng)
        publisher.close()
        return out
    mine = policy(2)
    for which in (small, large, larger)[rank - 1 :]:
        subscriber = CollectiveSubscriber(tensors(mine), which, timeout=30)
        for _ in range(2):
            report = subscriber.sync()
            out.append((report.run, report.version, report.kind, seal(mine)))
        subscriber.close()
    return out


def test_a_rank_that_joins_means_a_new_group_and_an_anchor():
    """The run goes on; who holds the baseline takes the patch alone, and with nobody new there is no anchor."""
    with ranks(3, rebuilt) as started:
        sent, stayed, joined = results(started)
    assert [row[2] for row in sent] == ["anchor", "patch", "anchor", "patch", "patch", "patch"]
    assert [row[2] for row in stayed] == ["anchor", "patch", "patch", "patch", "patch", "patch"]
    assert [row[2] for row in joined] == ["anchor", "patch", "patch", "patch"]
    assert [row[1] for row in sent] == list(range(6))
    assert len({row[0] for row in sent}) == 1
    for found in (stayed, joined):
        assert [(*row[:2], row[3]) for row in found] == [(*row[:2], row[3]) for row in sent[-len(found) :]]


# -- a relay -----------------------------------------------------------------------------------------------------------


def relayed(rank, group, pipe, url):
    bits, out = policy(10 + rank), []
    session = (
        sparserl.Subscriber(url, tensors(bits), process_group=group, timeout=30)
        if rank == 0
        else CollectiveSubscriber(tensors(bits), group, timeout=30)
    )
    while (word := pipe.recv()) != "end":
        if word == "break" and rank == 2:
            bits["f32"].reshape(-1)[500] ^= 1
            with pytest.raises(ChecksumMismatch):
                session.audit()
        report = session.sync()
        out.append((report.version, report.kind, seal(bits)))
        if rank == 0:
            assert session.sync() is None  # nothing new: the others are not called
        pipe.send(("synced", out[-1]))
    session.close()
    return out


def test_a_relay_hands_on_what_the_store_has(tmp_path):
    """Store, one rank that pulls, two that get the same by broadcast: in step, from behind, and from an anchor."""
    url = f"file://{tmp_path}/store"
    rng, bits = np.random.default_rng(1), policy(1)
    with ranks(3, relayed, url) as started, sparserl.Publisher(url, tensors(bits)) as publisher:

        def sync(word, versions):
            for _ in range(versions):
                publisher.publish()
                now = seal(bits)
                step(bits, rng)
            found = []
            for _, pipe in started:
                pipe.send(word)
            for rank, (_, pipe) in enumerate(started):
                assert pipe.poll(60)
                kind, value = pipe.recv()
                assert kind == "synced", f"rank {rank}: {value}"
                found.append(value)
            assert {row[0] for row in found} == {publisher.version}
            assert {row[2] for row in found} == {now}
            return [row[1] for row in found]

        assert sync("go", 1) == ["anchor"] * 3
        assert sync("go", 1) == ["patch"] * 3
        assert sync("go", 3) == ["patch"] * 3  # three versions behind: a chain of patches
        kinds = sync("break", 1)
        assert kinds[2] == "anchor"  # something else wrote to it
        assert kinds[1] == "patch"
        assert sync("go", 1) == ["patch"] * 3
        for _, pipe in started:
            pipe.send("end")
        results(started)


# -- ranks that are interrupted, and hooks that raise ------------------------------------------------------------------

PATIENCE = 15.0  # seconds: nothing below may take that long, though ranks wait for each other up to 30


class Hand:
    """One rank's end of the pipe to the test, which stops it at given points and presses Ctrl-C."""

    def __init__(self, pipe):
        signal.signal(signal.SIGINT, signal.default_int_handler)
        self.pipe = pipe

    def stop(self, where):
        """Tell the test where this rank is, and wait until it may go on."""
        self.pipe.send(("at", where))
        assert self.pipe.poll(60)
        self.pipe.recv()

    def interrupted(self, where, work):
        """Work in which Ctrl-C comes; the test is told before."""
        self.pipe.send(("at", where))
        with pytest.raises(KeyboardInterrupt):
            work()
        self.stop("interrupted")


def at(started, rank, where):
    pipe = started[rank][1]
    assert pipe.poll(60), f"rank {rank} is not at {where!r}"
    found = pipe.recv()
    assert found == ("at", where), found[1]


def go(started, rank):
    started[rank][1].send("go")


def interrupt(started, rank):
    press(started, rank)
    at(started, rank, "interrupted")


def press(started, rank):
    time.sleep(0.3)  # it is on its way into a wait
    os.kill(started[rank][0].pid, signal.SIGINT)


def quick(work, error=None, match=None):
    """The report of some work, which may not take long; or its error."""
    begun = time.monotonic()
    if error is None:
        out = work()
    else:
        with pytest.raises(error, match=match):
            work()
        out = None
    assert time.monotonic() - begun < PATIENCE
    return out


def hooked(rank, group, pipe):
    return _leads(group, Hand(pipe)) if rank == 0 else _trips(rank, group, Hand(pipe))


def _leads(group, hand):
    rng, bits, seals = np.random.default_rng(1), policy(1), []
    publisher = CollectivePublisher(tensors(bits), group, timeout=30)

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
    subscriber = CollectiveSubscriber(target, group, timeout=30, **hooks)

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


# -- writers that are not in step --------------------------------------------------------------------------------------

ROWS = ((0, 5), (5, 3))


def stepwise(rank, group, pipe):
    hand, writers, mine = Hand(pipe), (0, 1), np.zeros((8, 8), np.float32)
    if rank == 2:
        return _watches(group, hand, writers, mine)
    table = tensor_table({"w": mine})

    def made(first, rows, table=table):
        part = np.zeros((rows, 8), np.float32)
        shards = Shards(table, [Part("w", Region((first, 0), (rows, 8)), part)])
        return part, CollectivePublisher(shards, group, writers=writers, timeout=30)

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

    subscriber = CollectiveSubscriber({"w": mine + 1}, group, writers=writers, timeout=30)
    subscriber.close()
    mine += 9
    subscriber = CollectiveSubscriber({"w": mine}, group, writers=writers, before=before, timeout=30)
    subscriber.follow(on_commit=lambda report: seen.append((report.version, *np.unique(mine).tolist())))
    return seen


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


# -- a relay that is interrupted ---------------------------------------------------------------------------------------


def relay_trips(rank, group, pipe, url):
    hand, bits = Hand(pipe), policy(10 + rank)
    if rank == 1:
        seen = []
        with CollectiveSubscriber(tensors(bits), group, timeout=30) as subscriber:
            subscriber.follow(on_commit=lambda report: seen.append((report.version, seal(bits))))
        return seen
    own, fails, target = policy(1), [], Faulty(tensors(bits))

    def before():
        if fails:
            raise RuntimeError(fails.pop())

    publisher = sparserl.Publisher(url, tensors(own))
    relay = sparserl.Subscriber(url, target, process_group=group, timeout=30, before=before)
    seals = []

    def publish():
        step(own, np.random.default_rng(len(seals)))
        publisher.publish()
        seals.append((publisher.version, seal(own)))

    publish()
    quick(relay.sync)
    publish()
    target.hold = lambda: hand.stop("stages")
    hand.interrupted("syncs", relay.sync)
    assert quick(relay.sync).version == 1
    fails.append("cannot pause")
    publish()
    quick(relay.sync, RuntimeError, "cannot pause")
    assert quick(relay.commit).version == 2
    publish()
    quick(relay.stage)
    relay.discard()
    assert quick(lambda: relay.goto(2)).version == 2  # the other rank has gone on
    assert seal(bits) == seals[2][1]
    relay.close()
    return seals


def test_a_relay_that_is_interrupted_hangs_nobody(tmp_path):
    """Ctrl-C while it stages, `before` that raises, a version discarded: the others hear of it, and end as it does."""
    with ranks(2, relay_trips, f"file://{tmp_path}/store") as started:
        at(started, 0, "syncs")
        at(started, 0, "stages")
        press(started, 0)
        time.sleep(0.3)
        go(started, 0)  # what is being staged is waited for, and dropped
        at(started, 0, "interrupted")
        go(started, 0)
        sent, seen = results(started)
    assert seen == [sent[0], sent[1], sent[2], sent[3], sent[2]]
