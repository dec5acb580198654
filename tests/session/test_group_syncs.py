"""A publisher and subscribers in one process group: versions are exact, and faults heal."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest

import sparserl
from sparserl import Part, Region, Shards, targets, tensor_table
from sparserl.errors import (
    ChecksumMismatch,
    CommitFailed,
    FormatError,
    SessionError,
    TensorMismatch,
)
from tests.session.ranks import policy, ranks, results, seal, step, tensors

pytest.importorskip("torch")

from sparserl.session.group.publisher import GroupPublisher
from sparserl.session.group.subscriber import GroupSubscriber
from tests.session.group_faults import LIMIT, Faulty


def many_syncs(rank, group, pipe, folder):
    return _publishes(group) if rank == 0 else _follows(rank, group, folder)


def _publishes(group):
    rng, bits = np.random.default_rng(1), policy(1)
    seals, kinds, errors = [], [], []
    files = {"config.json": b"{}", "empty": b""}
    publisher = sparserl.GroupPublisher(group, tensors(bits), files=files, timeout=LIMIT)

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
    background = publisher.publish_in_background()
    step(bits, rng)  # the trainer goes on at once
    report = background.result()
    seals.append((report.version, taken))
    messages = report.messages
    publish()
    with pytest.raises(TensorMismatch):
        GroupPublisher.publish(_renamed(publisher, bits))
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
    subscriber = sparserl.GroupSubscriber(group, several, timeout=LIMIT, audit_every=3, **hooks)
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


def audited(rank, group, pipe):
    """Rank 1 stages a version on weights that something else then writes to, and audits them."""
    bits = policy(1 if rank == 0 else 2)
    if rank == 0:
        rng, kinds = np.random.default_rng(1), []
        publisher = sparserl.GroupPublisher(group, tensors(bits), timeout=LIMIT)
        for lost in (None, "discarded", None, "its bits are others", None):
            if lost:
                with pytest.raises(SessionError, match=f"rank 1.*{lost}"):
                    publisher.publish()
            else:
                kinds.append(publisher.publish().kind)
            step(bits, rng, 0.01)
        publisher.close()
        return kinds
    subscriber = GroupSubscriber(group, tensors(bits), timeout=LIMIT, audit_every=2)
    subscriber.sync()
    subscriber.stage()
    bits["f32"][0] ^= 1
    for call, error in ((subscriber.audit, ChecksumMismatch), (subscriber.commit, SessionError)):
        with pytest.raises(error):
            call()
    subscriber.sync()
    subscriber.audit()
    bits["f32"][0] ^= 1
    with pytest.raises(ChecksumMismatch):  # two versions are committed
        subscriber.sync()
    subscriber.sync()
    subscriber.audit()
    return subscriber.version


def test_what_was_staged_on_bits_that_others_wrote_to():
    """An audit that fails forgets it; the publisher hears of it, and sends an anchor."""
    with ranks(2, audited) as started:
        kinds, version = results(started)
    assert kinds == ["anchor", "anchor", "anchor"]
    assert version == 3


def closed(rank, group, pipe):
    """Rank 1 follows in a thread, until it is closed on another."""
    bits = policy(1 if rank == 0 else 2)
    if rank == 0:
        publisher = sparserl.GroupPublisher(group, tensors(bits), timeout=LIMIT)
        publisher.publish()
        pipe.recv()
        publisher.close()
        return None
    committed = threading.Event()
    subscriber = GroupSubscriber(group, tensors(bits), timeout=LIMIT)
    following = threading.Thread(target=subscriber.follow, kwargs={"on_commit": lambda _: committed.set()}, daemon=True)
    following.start()
    assert committed.wait(60)
    subscriber.close()
    following.join(60)
    return following.is_alive()


def test_closing_ends_following():
    """From another thread, though the publisher is there and sends nothing."""
    with ranks(2, closed) as started:
        assert results(started[1:]) == [False]
        started[0][1].send("end")
        results(started[:1])


def sharded(rank, group, pipe):
    shapes = {"row": ("u2", (64, 33)), "column": ("u4", (40, 50)), "first": ("u1", (1000,)), "last": ("u2", (7,))}
    rng, bits, writers, seals = np.random.default_rng(3), policy(3, shapes), (2, 1), []
    if rank not in writers:
        mine = policy(9, shapes)
        subscriber = GroupSubscriber(group, tensors(mine), writers=writers, timeout=LIMIT)
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

    publisher = GroupPublisher(group, parts(), writers=writers, timeout=LIMIT)
    for _ in range(4):
        report = publisher.publish()
        seals.append((report.version, report.changed, seal(bits)))
        step(bits, rng, 0.05)
    if rank == 1:
        publisher._baseline = None  # a writer that has lost its baseline
    with pytest.raises(SessionError, match="one version"):
        publisher.publish()
    report = publisher.publish()
    seals.append((report.version, report.changed, seal(bits)))
    publisher.close()
    return [(*row, report.kind) for row in seals]


@pytest.mark.long
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


def rebuilt(rank, group, pipe):
    import torch.distributed as dist

    small = dist.new_group([0, 1])
    large = dist.new_group([0, 1, 2])
    larger = dist.new_group([0, 1, 2])
    rng, bits, out = np.random.default_rng(1), policy(1), []
    if rank == 0:
        publisher = None
        for which in (small, large, larger):
            publisher = GroupPublisher(which, tensors(bits), previous=publisher, timeout=LIMIT)
            for _ in range(2):
                report = publisher.publish()
                out.append((report.run, report.version, report.kind, seal(bits)))
                step(bits, rng)
        publisher.close()
        return out
    mine = policy(2)
    for which in (small, large, larger)[rank - 1 :]:
        subscriber = GroupSubscriber(which, tensors(mine), timeout=LIMIT)
        for _ in range(2):
            report = subscriber.sync()
            out.append((report.run, report.version, report.kind, seal(mine)))
        subscriber.close()
    return out


@pytest.mark.long
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
