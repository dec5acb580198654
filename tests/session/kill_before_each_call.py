"""Publisher, subscriber and whoever pins, killed before each of their calls in turn. Runs as a process of its own:

python -m tests.session.kill_before_each_call publisher|subscriber|pinner CASE FOLDER
"""

from __future__ import annotations

import json
import shutil
import sys
from collections import Counter
from pathlib import Path

import pytest

import sparserl
from sparserl.errors import NotFound, SessionError
from sparserl.session.store.records import HeadRecord
from sparserl.session.store.retention import faults, read_head
from sparserl.session.store.stored_run import StoredRun
from sparserl.targets import folder
from sparserl.transport.stores.folder import FolderStore
from sparserl.weights.dtypes import Bits
from tests.session.killed_processes import (
    FILES,
    Fuse,
    Journal,
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
    synced,
    tidy,
    warm,
    weights_at,
)


class Kills:
    """A store, the state of a publisher and a folder target, which are reset for every kill."""

    def __init__(self, root: Path, fuse: Fuse, every: int) -> None:
        self.work, self.old, self.fuse, self.every = root / "work", root / "old", fuse, every
        self.work.mkdir()
        self.journal = Journal(self.work / "journal")
        self.total: Counter[str] = Counter()
        self.store, self.state, self.target = self.work / "store", self.work / "state", self.work / "target"
        self.n = 0
        self.options: dict[str, object] = {}

    def publish(self, times: int = 1) -> None:
        """The life of a publisher."""
        publisher, weights = self.start()
        for _ in range(times):
            self.n += 1
            publish(publisher, weights, self.n, self.journal)

    def start(self) -> tuple[sparserl.Publisher, dict[str, Bits]]:
        """A publisher and its weights; where a first version may have been lost, it is told to begin a new run."""
        url = f"file://{self.store}"
        weights = weights_at(0)
        options = {"files": FILES, "state": self.state, "threads": 1, **self.options}
        is_lost = has_lost_head(FolderStore(self.store))
        if is_lost:
            with pytest.raises(SessionError, match=r"has no head\.json.*new_run=True"):
                sparserl.Publisher(url, weights, **options)
        return sparserl.Publisher(url, weights, new_run=is_lost, **options), weights

    def subscribe(self) -> None:
        """The life of a subscriber with a folder."""
        with closing(folder(self.target, threads=1)) as target:
            subscriber = sparserl.Subscriber(f"file://{self.store}", target, name="rollout", threads=1)
            subscriber.sync()
            subscriber.audit()
        self.journal.add("committed", run=subscriber.run, version=subscriber.version, sha=current(self.target))

    def head(self) -> HeadRecord | None:
        try:
            return read_head(FolderStore(self.store))[0]
        except NotFound:
            return None

    def keep(self) -> None:
        shutil.rmtree(self.old, ignore_errors=True)
        shutil.copytree(self.work, self.old, symlinks=True)

    def reset(self) -> None:
        shutil.rmtree(self.work, ignore_errors=True)
        shutil.copytree(self.old, self.work, symlinks=True)

    def publisher(self, case: str) -> None:
        """Cases: `first` version; a `patch`; an `anchor` with a patch, after which garbage is collected."""
        if case != "first":
            self.options = {"anchor_after": 100.0}
            ended(fork(lambda: self.publish(3)))
            self.n = 3
        if case == "anchor":
            self.options = {"anchor_after": 0.0, "keep_anchors": 1, "grace": 0.0}
        self.keep()
        for kill in range(0, 10_000, self.every):
            self.reset()
            self.fuse.left = kill
            child = fork(self.publish)
            self.fuse.left = None
            lived = ended(child)
            self.n += 1
            head = self.head()
            old = head is None if case == "first" else head is not None and head.version == 2
            self.total["old" if old else "new"] += 1
            self.total["lost heads"] += has_lost_head(FolderStore(self.store))
            self.total["drafts"] += any(p.is_file() and p.name != "lock" for p in (self.store / ".tmp").rglob("*"))
            if head is not None:
                synced(f"file://{self.store}", self.journal)
            if kill % 8 == 0 or lived:
                ended(fork(lambda: self.publish(2)))
                self.n += 2
            else:
                ended(fork(self.publish))
                self.n += 1
            self.total["new runs"] += head is not None and head.run != self.head().run
            assert synced(f"file://{self.store}", self.journal) == sha(weights_at(self.n)), kill
            store = FolderStore(self.store)
            settled(store)
            store.close()
            no_drafts(self.store)
            kept = sorted(p.name.partition("-")[0] for p in self.state.iterdir())
            assert kept == ["anchor", "head"], kill
            self.total.update(check(self.journal))
            if lived:
                break
            self.total["kills"] += 1

    def subscriber(self, case: str) -> None:
        """Cases: the `first` version, an anchor; a `patch`; a version that is there already (`again`), but damaged."""
        self.options = {"anchor_after": 100.0}
        ended(fork(lambda: self.publish(1)))
        before, self.n = None, 1
        if case != "first":
            ended(fork(self.subscribe))
            before = current(self.target)
            ended(fork(lambda: self.publish(2)))
            self.n = 3
        if case == "again":
            ended(fork(self.subscribe))
            path = self.target / "current" / "model.safetensors"
            data = bytearray(path.read_bytes())
            data[-9] ^= 1
            path.write_bytes(data)
            before = current(self.target)
        self.keep()
        after = sha(weights_at(self.n))
        assert before != after
        for kill in range(0, 10_000, self.every):
            self.reset()
            self.fuse.left = kill
            child = fork(self.subscribe)
            self.fuse.left = None
            lived = ended(child)
            found = current(self.target)
            assert found in (before, after), kill
            self.total["new" if found == after else "old"] += 1
            self.total["leftovers"] += any(self.target.glob(".sparserl/*"))
            ended(fork(self.subscribe))
            assert current(self.target) == after, kill
            tidy(self.target)
            no_drafts(self.store)
            self.total.update(check(self.journal))
            if lived:
                break
            self.total["kills"] += 1

    def pinner(self) -> None:
        """Version 1 is being pinned; after each kill, retention removes whatever it may."""
        self.options = {"anchor_after": 100.0}
        ended(fork(lambda: self.publish(3)))
        self.n = 3
        self.options = {"anchor_after": 0.0, "keep_anchors": 1, "grace": 0.0}
        self.keep()
        for kill in range(0, 10_000, self.every):
            self.reset()
            self.n = 3
            self.fuse.left = kill
            child = fork(lambda: sparserl.pin(self.store, 1, name="best"))
            self.fuse.left = None
            lived = ended(child)
            ended(fork(lambda: self.publish(2)))
            store = FolderStore(self.store)
            pins = sparserl.pins(store)
            self.total["new" if pins else "old"] += 1
            assert pins or not lived, kill
            if pins:
                assert sha(StoredRun.at_pin(store, "best").weights(1)) == sha(weights_at(2)), kill
            assert list(faults(store)) == [], kill
            store.close()
            if lived:
                break
            self.total["kills"] += 1


def main() -> None:
    who, case, root, every = (*sys.argv[1:], "1")[:4]
    (Path(root) / "warm").mkdir()
    warm(Path(root) / "warm")
    kills = Kills(Path(root), Fuse(), int(every))
    if who == "pinner":
        kills.pinner()
    else:
        kills.publisher(case) if who == "publisher" else kills.subscriber(case)
    print(json.dumps(kills.total))


if __name__ == "__main__":
    main()
