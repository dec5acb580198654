"""A relay between a store and a process group hands on what the store has, and hangs nobody."""

from __future__ import annotations

import time

import numpy as np
import pytest

import sparserl
from sparserl.errors import (
    ChecksumMismatch,
)
from tests.session.ranks import policy, ranks, results, seal, step, tensors

pytest.importorskip("torch")

from sparserl.session.group.subscriber import GroupSubscriber
from tests.session.group_faults import LIMIT, Faulty, Hand, at, go, press, quick


def relayed(rank, group, pipe, url):
    bits, out = policy(10 + rank), []
    session = (
        sparserl.Relay(url, group, tensors(bits), timeout=LIMIT)
        if rank == 0
        else GroupSubscriber(group, tensors(bits), timeout=LIMIT)
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


@pytest.mark.long
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
                assert pipe.poll(240)
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


def audited(rank, group, pipe, url):
    bits = policy(10 + rank)
    session = (
        sparserl.Relay(url, group, tensors(bits), timeout=LIMIT)
        if rank == 0
        else GroupSubscriber(group, tensors(bits), timeout=LIMIT)
    )
    kinds = [session.sync().kind]
    if rank == 0:
        bits["f32"].reshape(-1)[500] ^= 1
        with pytest.raises(ChecksumMismatch, match="next sync starts from an anchor"):
            session.audit()
    kinds.append(session.sync().kind)
    if rank == 0:
        assert session.sync() is None
    session.close()
    return kinds, seal(bits)


def test_a_relay_whose_own_weights_were_written_to(tmp_path):
    """It starts from an anchor, though there is no newer version; the others have that already."""
    url = f"file://{tmp_path}/store"
    bits = policy(1)
    with sparserl.Publisher(url, tensors(bits)) as publisher:
        publisher.publish()
        with ranks(2, audited, url) as started:
            assert results(started) == [(["anchor", "anchor"], seal(bits)), (["anchor", "none"], seal(bits))]


def into_folders(rank, group, pipe, url, root):
    target = sparserl.targets.folder(f"{root}/{rank}")
    session = (
        sparserl.Relay(url, group, target, timeout=LIMIT)
        if rank == 0
        else GroupSubscriber(group, target, timeout=LIMIT)
    )
    while pipe.recv() != "end":
        version = session.sync().version
        files = {path.name: path.read_text() for path in target.current.iterdir() if path.suffix == ".json"}
        pipe.send((version, files))
    session.close()


@pytest.mark.long
def test_a_relay_hands_on_files_that_change(tmp_path):
    """With weights, alone, added, removed, all gone, and back: every rank has those of the version."""
    url = f"file://{tmp_path}/store"
    rng, bits, files = np.random.default_rng(1), policy(1), {"config.json": b"a", "tokenizer.json": b"t"}
    with (
        ranks(2, into_folders, url, str(tmp_path)) as started,
        sparserl.Publisher(url, tensors(bits), files=files) as publisher,
    ):
        changes = [{}, {"config.json": b"b"}, {"new.json": b"n"}, {"tokenizer.json": None}]
        changes += [dict.fromkeys(("config.json", "new.json")), {}, {"config.json": b"a"}]
        for number, change in enumerate(changes):
            for name, data in change.items():
                if data is None:
                    del files[name]
                else:
                    files[name] = data
            if number != 1:  # then files alone change
                step(bits, rng)
            publisher.publish()
            for _, pipe in started:
                pipe.send("go")
            expected = {name: data.decode() for name, data in files.items()}
            for rank, (_, pipe) in enumerate(started):
                assert pipe.poll(240)
                assert pipe.recv() == (number, expected), f"rank {rank}"
        for _, pipe in started:
            pipe.send("end")
        results(started)


def relay_trips(rank, group, pipe, url):
    hand, bits = Hand(pipe), policy(10 + rank)
    if rank == 1:
        seen = []
        with GroupSubscriber(group, tensors(bits), timeout=LIMIT) as subscriber:
            subscriber.follow(on_commit=lambda report: seen.append((report.version, seal(bits))))
        return seen
    own, fails, target = policy(1), [], Faulty(tensors(bits))

    def before():
        if fails:
            raise RuntimeError(fails.pop())

    publisher = sparserl.Publisher(url, tensors(own))
    relay = sparserl.Relay(url, group, target, timeout=LIMIT, before=before)
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


@pytest.mark.long
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
