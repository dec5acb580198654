"""A publisher and two subscribers that are killed over and over, and must end with the same bits and a clean store.

    python -m tests.session.soak --kills 500 --store file|seaweedfs|moto --seed 1

Kills come before a drawn call of the process itself (its file calls; with an S3 server, before or after its requests),
or from outside at a drawn moment. One subscriber keeps its weights in a folder, the other one in memory: what it holds
dies with it. A line shows how far it is; the last line is a summary in JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import sparserl
from sparserl.errors import Fenced, StoreError
from sparserl.transport.stores.base import Store
from sparserl.transport.stores.opening import open_store
from tests.servers import Server, running
from tests.session.killed_processes import (
    FILES,
    Fuse,
    Journal,
    Killing,
    check,
    closing,
    current,
    ended,
    fork,
    has_lost_head,
    no_drafts,
    publish,
    settled,
    sha,
    tidy,
    warm,
    weights_at,
)

LIFE = 3.0  # seconds after which a life that nothing ended ends by itself
CALLS = {"publisher": 500, "folder": 250, "memory": 60}  # about as many as a life of a few versions takes


@dataclass
class Lives:
    """Processes that are killed over and over, and what they have in common: a store, a journal, drawn moments."""

    root: Path
    kind: str
    seed: int
    server: Server | None = None
    kills: Counter[str] = field(default_factory=Counter)
    lives: int = 0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.fuse = Fuse()
        self.journal = Journal(self.root / "journal")
        self._started = time.monotonic()
        self._shown = self._started

    def store(self) -> Store:
        """Opened in every life anew; with a server, each request may be the last one."""
        if self.server is None:
            return open_store(f"file://{self.root / 'store'}")
        return Killing(self.server.store("soak"), self.fuse)  # type: ignore[return-value]

    def show(self, done: int, kills: int) -> None:
        """Say now and then how far it is."""
        if time.monotonic() > self._shown + 2:
            self._shown = time.monotonic()
            seconds = self._shown - self._started
            print(f"{done} of {kills} kills, {self.lives} lives, {seconds:.0f} s", file=sys.stderr)

    def run(self, kills: int) -> dict[str, Any]:
        """Kill that often; a summary, or an error where something was wrong."""
        raise NotImplementedError

    def summary(self, done: int, **more: Any) -> dict[str, Any]:
        """What came of it, once nothing was wrong."""
        for line in self.journal.read():
            if line["what"] == "killed":
                self.kills[f"{line['who']}: {line['where']}"] += 1
        counts = check(self.journal) | {"lives": self.lives, **more}
        ends = {"store": self.kind, "seed": self.seed, "kills": done, **counts}
        seconds = round(time.monotonic() - self._started, 1)
        return {**ends, "seconds": seconds, "faults": 0, "where": dict(self.kills.most_common())}


@dataclass
class Soak(Lives):
    """A publisher and two subscribers, and what they left behind."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.target = self.root / "target"
        self.alive: dict[int, tuple[str, float]] = {}

    # -- lives ---------------------------------------------------------------------------------------------------------

    def publisher(self, life: int, times: int | None = None) -> None:
        """Publishes, with anchors, squashed patches and collections all the time."""
        weights = weights_at(0)
        grace = 0.2 if self.server is None else 1.5  # S3 tells times in seconds
        end = time.monotonic() + LIFE
        try:
            publisher = sparserl.Publisher(
                self.store(),
                weights,
                files=FILES,
                state=self.root / "state",
                anchor_after=0.3,
                keep_anchors=1,
                ladder=(2, 4),
                grace=grace,
                lease=1.0,
                threads=1,
                new_run=has_lost_head(self.store()),
            )
            for n in range(10**6):
                if n == times or (times is None and time.monotonic() > end):
                    return
                publish(publisher, weights, life * 10_000 + n, self.journal)
                time.sleep(0.005)
        except Fenced:  # what a killed one had sent arrived late
            self.journal.add("fenced")
            if times is not None:
                raise

    def folder(self, life: int, times: int | None = None) -> None:
        with closing(sparserl.targets.folder(self.target, threads=1)) as target:
            subscriber = sparserl.Subscriber(self.store(), target, name="folder", threads=1)
            self._receive(subscriber, lambda: current(self.target), life, times)

    def memory(self, life: int, times: int | None = None) -> None:
        mine = weights_at(10**8 + life)
        subscriber = sparserl.Subscriber(self.store(), mine, name="memory", threads=1)
        self._receive(subscriber, lambda: sha(mine), life, times)

    def _receive(
        self, subscriber: sparserl.Subscriber, bits: Callable[[], str | None], life: int, times: int | None
    ) -> None:
        """Sync over and over, or in every other life follow, which fetches buckets before the head moves."""
        end = time.monotonic() + LIFE

        def note_commit(_: sparserl.SyncReport | None = None) -> None:
            self.journal.add("committed", run=subscriber.run, version=subscriber.version, sha=bits())

        def note_trouble(error: StoreError) -> None:
            about = " of the head" if "head.json" in str(error) else ""
            self.journal.add("trouble", kind=f"{type(error).__name__}{about}")

        while time.monotonic() < end:
            try:
                if times is None and life % 2:
                    subscriber.follow(timeout=LIFE, on_commit=note_commit, on_trouble=note_trouble)
                elif subscriber.sync() is not None:
                    note_commit()
            except StoreError as error:  # no head yet, or it moves faster than we can follow
                if times is not None:
                    raise
                note_trouble(error)
            if times is not None:
                subscriber.audit()
                self.journal.add("final", version=subscriber.version, sha=bits())
                return
            time.sleep(0.002)

    # -- and deaths ----------------------------------------------------------------------------------------------------

    def start(self, who: str) -> None:
        self.lives += 1
        life, by_itself = self.lives, self.random.random() < 0.7
        calls = self.random.randrange(CALLS[who]) if by_itself else None
        moment = LIFE * 2 if by_itself else self.random.uniform(0, 0.3 if self.server is None else 1.0)

        def work() -> None:
            self.fuse.note = lambda where: self.journal.add("killed", who=who, where=where)
            self.fuse.left = calls
            getattr(self, who)(life)

        self.alive[fork(work)] = who, time.monotonic() + moment

    def reap(self) -> int:
        """Kill those whose time has come, and see who has died; returns how many were killed."""
        killed = 0
        for child, (who, moment) in list(self.alive.items()):
            if time.monotonic() > moment:
                os.kill(child, signal.SIGKILL)
                self.kills[f"{who}: at a moment"] += 1
            elif not os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                continue
            del self.alive[child]
            if not ended(child):
                killed += 1
                if who == "folder":
                    self.look()
        return killed

    def look(self) -> None:
        """What the folder shows, whenever its process is killed, is a whole version that was published."""
        found = current(self.target)
        known = {line["sha"] for line in self.journal.read() if line["what"] == "attempt"}
        assert found is None or found in known, "the folder shows what nobody published"

    def run(self, kills: int) -> dict[str, Any]:
        done = 0
        try:
            while done < kills:
                for who in CALLS.keys() - {name for name, _ in self.alive.values()}:
                    self.start(who)
                time.sleep(0.001)
                done += self.reap()
                self.show(done, kills)
        finally:
            for child in self.alive:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
        self.finish()
        troubles = Counter(line["kind"] for line in self.journal.read() if line["what"] == "trouble")
        fenced = sum(line["what"] == "fenced" for line in self.journal.read())
        return self.summary(done, **{"waited out": troubles, "fenced": fenced})

    def finish(self) -> None:
        """Nobody is killed any more: all must come to the same bits, and nothing may be left over."""
        life = self.lives + 1
        assert ended(fork(lambda: self.publisher(life, times=3)))
        for who in (self.folder, self.memory):
            assert ended(fork(lambda who=who: who(life, times=1)))
        wanted = sha(weights_at(life * 10_000 + 2))
        finals = [line["sha"] for line in self.journal.read() if line["what"] == "final"]
        assert finals == [wanted, wanted]
        tidy(self.target)
        assert ended(fork(lambda: settled(self.store())))
        if self.server is None:
            no_drafts(self.root / "store")
        left = sorted(p.name for p in (self.root / "state").iterdir())
        assert [name.partition("-")[0] for name in left] == ["anchor", "head"], left


def soak(kills: int, kind: str, seed: int, root: Path, lives: type[Lives] = Soak) -> dict[str, Any]:
    """Kill that often; returns the summary, or raises what was wrong."""
    (root / "warm").mkdir()
    warm(root / "warm")
    with contextlib.ExitStack() as stack:
        server = None if kind == "file" else stack.enter_context(running(kind, root / "server"))
        return lives(root, kind, seed, server).run(kills)


def main(lives: type[Lives] = Soak, description: str | None = __doc__, kills: int = 500) -> None:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--kills", type=int, default=kills)
    parser.add_argument("--store", choices=["file", "seaweedfs", "moto"], default="file")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="sparserl-soak-") as root:
        print(json.dumps(soak(args.kills, args.store, args.seed, Path(root), lives)))


if __name__ == "__main__":
    main()
