"""Several ranks publish one run: each its own shards, one head. Real processes over Gloo."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import sparserl
from sparserl import Part, Region, Shards, Subscriber
from sparserl.errors import NotFound, PeerLost, Refused, SessionError, TensorMismatch, Unavailable
from sparserl.session.store.holding_records import HoldingRecord
from sparserl.session.store.leases import Lease
from sparserl.session.store.manifests import Manifest
from sparserl.session.store.records import get_named
from sparserl.session.store.retention import faults, read_head, read_index
from sparserl.session.store.writers import Writers
from sparserl.transport.stores.folder import FolderStore
from tests.session.ranks import finish, launch

SHAPES = {"embed": (37, 16), "up": (24, 30), "norm": (16,), "none": (0, 4)}
HALF = (3, Region((0, 0), (24, 15)))  # of `up`, in the order of the table


def whole(version: int) -> dict[str, np.ndarray]:
    """The weights of a version, as one process would hold them."""
    rng = np.random.default_rng(5)
    out = {name: rng.integers(0, 2**16, shape, np.uint16) for name, shape in SHAPES.items()}
    for _ in range(version):
        for bits in out.values():
            bits += (rng.random(bits.shape) < 0.05).astype(np.uint16)
    return out


def regions(rank: int, size: int) -> list[tuple[str, Region]]:
    """Rows of one tensor, unevenly; columns of another; what is replicated has one owner."""
    rows, columns = ([n * r // size for r in range(size + 1)] for n in (37, 30))
    found = [
        ("embed", Region((rows[rank], 0), (rows[rank + 1] - rows[rank], 16))),
        ("up", Region((0, columns[rank]), (24, columns[rank + 1] - columns[rank]))),
    ]
    return found + ([("norm", Region((0,), (16,))), ("none", Region((0, 0), (0, 4)))] if rank == size - 1 else [])


def shards(version: int, rank: int, size: int) -> Shards:
    weights = whole(version)
    return Shards(
        sparserl.tensor_table(weights), [Part(name, r, weights[name][r.slices]) for name, r in regions(rank, size)]
    )


class Trainer:
    """A source whose shards are those of a version."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size, self.version, self.committed_at = rank, size, 0, []

    def weights(self) -> Shards:
        return shards(self.version, self.rank, self.size)

    def committed(self) -> None:
        self.committed_at.append(self.version)


class Troubled(FolderStore):
    """A store that fails where it is told to."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.trouble = ""

    def put(self, name: str, data: bytes | memoryview) -> None:
        if self.trouble == "put" and "/buckets/" in name:
            raise Unavailable(f"{name}: out of reach")
        if self.trouble == "stop" and "/buckets/" in name:
            Path(self.trouble_file).touch()
            time.sleep(600)
        super().put(name, data)

    def get(self, name: str, most: int):
        if self.trouble == "swap, then away":
            raise Unavailable("away")
        return super().get(name, most)

    def swap(self, name: str, data: bytes, tag: str | None) -> str:
        if self.trouble == "swap":
            super().swap(name, data, tag)
            self.trouble = "swap, then away"
            raise Unavailable("the reply was lost")
        if self.trouble == "swap, then away":
            raise Refused("another tag")
        return super().swap(name, data, tag)


def rank_main(rank: int, size: int, folder: str, scenario: str) -> None:
    """What one rank does; `print` tells the test."""
    import datetime as dt

    import torch.distributed as dist

    limit = dt.timedelta(seconds=20)
    dist.init_process_group("gloo", init_method=f"file://{folder}/init", rank=rank, world_size=size, timeout=limit)
    for part in scenario.split():
        store, trainer = Troubled(f"{folder}/{part}"), Trainer(rank, size)
        seconds = 8 if part == "die" else 60  # one that dies is waited for
        publisher = sparserl.Publisher(store, trainer, writers=dist.group.WORLD, anchor_after=0.4, timeout=seconds)
        globals()[part](rank, trainer, store, publisher, folder)
        publisher.close()
    dist.destroy_process_group()


def follow(rank, trainer, store, publisher, folder) -> None:
    for version in range(8):
        trainer.version = version
        report = publisher.publish() if version % 2 == 0 else publisher.publish_in_background().result()
        assert (report.version, report.changed > 0) == (version, True)
        assert report.digest == sparserl.digest(whole(version)).hex
        if rank == 0 and version == 0:  # a receiver that has half of a tensor
            holding = HoldingRecord.of(sparserl.tensor_table(whole(0)), [HALF])
            holding.put(store, report.run)
            lease = Lease("half", 0, time.time(), ("ulp",), holding.hash)
            store.put(f"runs/{report.run}/leases/half", lease.to_bytes())
        if rank == 0:
            got = sparserl.Subscriber(store, mine := {k: np.zeros_like(w) for k, w in whole(0).items()}).sync()
            assert got.version == version
            assert all((mine[name] == bits).all() for name, bits in whole(version).items())
    assert trainer.committed_at == list(range(8))


def fail_once(rank, trainer, store, publisher, folder) -> None:
    """An upload fails on one rank: all are told, nothing is seen, and the next publish has it all."""
    publisher.publish()
    trainer.version = 1
    store.trouble = "put" if rank == 1 else ""
    with pytest.raises(Unavailable, match="out of reach" if rank == 1 else "rank 1: Unavailable: .*out of reach"):
        publisher.publish()
    assert read_head(store)[0].version == 0
    store.trouble = ""
    trainer.version = 2
    assert publisher.publish().digest == sparserl.digest(whole(2)).hex
    assert trainer.committed_at == [0, 2]
    if rank == 1:  # weights that cannot be published
        trainer.weights = lambda: {"other": np.zeros(3)}
    trainer.version = 3
    with pytest.raises(TensorMismatch, match="rank 1" if rank != 1 else "other"):
        publisher.publish()
    trainer.__dict__.pop("weights", None)
    assert publisher.publish().version == 2


def lose_reply(rank, trainer, store, publisher, folder) -> None:
    """The head moved and nobody was told; the next publish finds out, on all ranks, and goes on from there."""
    publisher.publish()
    run = publisher.run
    trainer.version = 1
    store.trouble = "swap" if rank == 0 else ""
    with pytest.raises(Unavailable):
        publisher.publish()
    store.trouble = ""
    assert read_head(store)[0].version == 1
    trainer.version = 2
    report = publisher.publish()
    assert (report.version, report.run, report.kind) == (2, run, "patch")
    assert report.digest == sparserl.digest(whole(2)).hex
    assert trainer.committed_at[-1] == 2
    if rank == 1:  # a rank that lost its baseline: all begin a new run together
        publisher._run_writer.committed = None
    trainer.version = 3
    report = publisher.publish()
    assert (report.version, report.kind) == (0, "anchor")
    assert report.run != run


def overlap(rank, trainer, store, publisher, folder) -> None:
    """What two ranks cover, and what none covers, is refused before anything is uploaded."""
    own = regions(rank, 2)
    if rank == 1:
        own[0] = ("embed", Region((17, 0), (20, 16)))
    table = sparserl.tensor_table(whole(0))
    for change, words in ((own, "overlap"), (own[1:], "no rank has .* of the 592 elements of 'embed'")):
        parts = [Part(name, r, whole(0)[name][r.slices]) for name, r in change]
        trainer.weights = lambda parts=parts: Shards(table, parts)
        with pytest.raises(sparserl.SparserlError, match=words):
            publisher.publish()
    with pytest.raises(NotFound):
        read_head(store)
    trainer.weights = lambda: shards(0, rank, 2) if rank else {"w": np.zeros(3)}
    with pytest.raises(TensorMismatch):
        publisher.publish()


def interrupted(rank, trainer, store, publisher, folder) -> None:
    """Ctrl-C on one rank, wherever it waits: the others leave the publish too, and the next one is all of one step."""
    exchange = publisher._writers._exchange
    hear = exchange._line.await_notes
    publisher.publish(step=0)
    for version, stage in enumerate((1, 3, 4, 6, 7), 1):  # stages of a publish

        def stop(*args, stage=stage, **options):
            if exchange._stage == stage:
                raise KeyboardInterrupt
            return hear(*args, **options)

        trainer.version = version
        if rank == 1:
            exchange._line.await_notes = stop
        with pytest.raises(KeyboardInterrupt if rank == 1 else SessionError, match="" if rank == 1 else "rank 1 left"):
            publisher.publish(step=version)
        exchange._line.await_notes = hear
    trainer.version = 8 - rank  # and one that goes on with another step
    with pytest.raises(SessionError, match=r"not at one step: \[8, 7\]"):
        publisher.publish(step=trainer.version)
    trainer.version = 8
    assert publisher.publish(step=8).digest == sparserl.digest(whole(8)).hex


def two(rank, trainer, store, publisher, folder) -> None:
    """Two publishers on one group, both in flight."""
    import torch.distributed as dist

    other = sparserl.Publisher(f"file://{folder}/other", trainer, writers=dist.group.WORLD, timeout=8)
    for version in range(3):
        trainer.version = version
        backgrounds = [session.publish_in_background() for session in (publisher, other)]
        for background in reversed(backgrounds):
            assert background.result().digest == sparserl.digest(whole(version)).hex
    other.close()
    publisher.close()
    assert not [t for t in threading.enumerate() if t.name == "sparserl-beat" and not t.join(1) and t.is_alive()]


def apart(rank, trainer, store, publisher, folder) -> None:
    """Ranks whose URLs mean different places: nothing is published."""
    import torch.distributed as dist

    other = sparserl.Publisher(f"{folder}/apart-{rank}", trainer, writers=dist.group.WORLD, timeout=8)
    with pytest.raises(SessionError, match="rank 1 uploads to another place"):
        other.publish()
    other.close()
    assert not Path(f"{folder}/apart-{rank}/head.json").exists()


def blocked(rank, trainer, store, publisher, folder) -> None:
    """The state of one rank cannot be kept: the others hear of it at once."""
    import torch.distributed as dist

    state = Path(folder) / "state"
    state.mkdir(exist_ok=True)
    if rank == 1:
        (state / "rank-1").write_bytes(b"in the way")
    with pytest.raises(SessionError, match="rank 1 left" if rank == 0 else "cannot be kept"):
        sparserl.Publisher(f"{folder}/blocked-2", trainer, writers=dist.group.WORLD, timeout=60, state=state)


def mixed(rank, trainer, store, publisher, folder) -> None:
    """Where one rank has no room for a baseline, none has one: all do the same, anchors included."""
    import torch.distributed as dist

    url = f"file://{folder}/mixed-2"
    publisher = sparserl.Publisher(
        url, trainer, writers=dist.group.WORLD, timeout=8, anchor_after=0.1, memory=None if rank else 10
    )
    for version in range(4):
        trainer.version = version
        assert publisher.publish().digest == sparserl.digest(whole(version)).hex
    assert publisher.baseline.startswith("baseline: none")
    assert len([s for s in publisher._committed.index.steps if s.base is None]) > 1
    publisher.close()


def die(rank, trainer, store, publisher, folder) -> None:
    """A rank is killed while it uploads: the others are told within the group's timeout, and the old head stands."""
    publisher.publish()
    trainer.version = 1
    store.trouble, store.trouble_file = "stop" if rank == 1 else "", f"{folder}/uploading"
    Path(f"{folder}/pid-{rank}").write_text(str(os.getpid()))
    with pytest.raises(PeerLost, match="rank 1 did not") as told:
        publisher.publish()
    print(told.value, flush=True)
    assert read_head(store)[0].version == 0
    started = time.monotonic()
    with pytest.raises(PeerLost, match="rank 1"):  # and at once from now on
        publisher.publish()
    assert time.monotonic() - started < 7, "it waited for rank 1 again"


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.long), 4])
def test_every_version_is_that_of_the_whole(tmp_path, size):
    """Shards of all ranks, anchors and patches, waited for or not: the subscriber has the unsharded weights."""
    finish(launch(rank_main, size, tmp_path, "follow"), tmp_path)
    store = FolderStore(f"{tmp_path}/follow")
    assert list(faults(store)) == []
    mine = {name: np.zeros_like(bits) for name, bits in whole(0).items()}
    subscriber = Subscriber(store, mine)
    subscriber.goto(6)
    assert all((mine[name] == bits).all() for name, bits in whole(6).items())
    head, _ = read_head(store)
    for step in read_index(store, head).steps:
        data = get_named(store, head.run, "manifests", step.manifest)
        manifest = Manifest.parse(data, "it")
        if step.version:  # all ranks have heard of the receiver
            (name,) = manifest.holdings
            assert 0 < len(manifest.for_holding(name)) < len(manifest.for_holding("other")) == len(manifest.buckets)


@pytest.mark.long
def test_ranks_fail_together(tmp_path):
    finish(launch(rank_main, 2, tmp_path, "overlap fail_once lose_reply interrupted two mixed apart blocked"), tmp_path)


def test_a_killed_rank_leaves_the_old_head_standing(tmp_path):
    ranks = launch(rank_main, 3, tmp_path, "die")
    end = time.monotonic() + 60
    while not (tmp_path / "uploading").exists() and time.monotonic() < end and ranks[1].is_alive():
        time.sleep(0.05)
    os.kill(int((tmp_path / "pid-1").read_text()), signal.SIGKILL)
    said = finish(ranks, tmp_path, but=1)
    assert "rank 1" in said[0]
    mine = {name: np.zeros_like(bits) for name, bits in whole(0).items()}
    Subscriber(f"file://{tmp_path}/die", mine).sync()
    assert all((mine[name] == bits).all() for name, bits in whole(0).items())


def test_one_process_is_a_group_of_one():
    writers = Writers()
    assert (writers.rank, writers.size, writers.together("do", lambda: b"x")) == (0, 1, [b"x"])
    assert writers.lead("do", lambda: 3, bytes, len) == 3
