"""Processes are killed, replies are lost, clocks jump and bytes rot: both sides end bit-identical, and nothing is lost.

The long form is `python -m tests.session.soak`; with `SPARSERL_KILLS=all` the kills here come before every single call.
"""

from __future__ import annotations

import os
import threading
import time
import uuid
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from sparserl import Publisher, Subscriber
from sparserl.errors import Fenced, SparserlError, StoreError, Unavailable
from sparserl.session.store import signing
from sparserl.session.store.retention import collect, faults
from sparserl.transport.stores.folder import FolderStore
from tests.effort import each
from tests.servers import Proxy, Server
from tests.session.killed_processes import driver, settled, sha, weights_at

YEAR = 365 * 86400.0


class Trainer:
    """Weights that are set to those of a step."""

    def __init__(self) -> None:
        self.weights = weights_at(0)

    def step(self, n: int) -> str:
        """Returns the bits that it then has."""
        for name, bits in weights_at(n).items():
            self.weights[name].array[...] = bits.array
        return sha(self.weights)


class Rollout:
    """A subscriber in memory."""

    def __init__(self, store: Any, **options: Any) -> None:
        self.weights = weights_at(10**6)
        self.subscriber = Subscriber(store, self.weights, threads=1, **options)

    def sync(self) -> str:
        self.subscriber.sync()
        return self.bits

    @property
    def bits(self) -> str:
        return sha(self.weights)


# -- kills -------------------------------------------------------------------------------------------------------------


@each(("case", "every"), [("patch", 6), ("first", 9), ("anchor", 12)], by_day=[("patch", 6)])
def test_a_publisher_is_killed_at_any_moment(case: str, every: int, tmp_path: Path) -> None:
    """Whatever it was about to write, receivers see the old version or the new one, and its next life goes on."""
    every = 1 if os.environ.get("SPARSERL_KILLS") == "all" else every
    seen = driver("-m", "tests.session.kill_before_each_call", "publisher", case, tmp_path, every)
    assert seen["kills"] * every > 60
    assert seen["old"] > 3
    assert seen["new"] > 0
    assert seen["drafts"] > 0
    assert case == "first" or seen["new runs"] < seen["kills"] / 2


@each("case", ["first", "again", "patch"], by_day=["patch"])
def test_a_subscriber_is_killed_at_any_moment(case: str, tmp_path: Path) -> None:
    """`current` is the old checkpoint or the new one, whole; the next life ends with the new one and clears up."""
    every = 1 if os.environ.get("SPARSERL_KILLS") == "all" else 3
    seen = driver("-m", "tests.session.kill_before_each_call", "subscriber", case, tmp_path, every)
    assert seen["kills"] * every > 40
    assert seen["old"] > 5
    assert seen["new"] > 5
    assert seen["leftovers"] > 2


@pytest.mark.long
def test_a_process_is_killed_while_it_pins(tmp_path: Path) -> None:
    """There is a pin, and the version stays; or there is none."""
    every = 1 if os.environ.get("SPARSERL_KILLS") == "all" else 4
    seen = driver("-m", "tests.session.kill_before_each_call", "pinner", "pin", tmp_path, every)
    assert seen["kills"] * every > 10
    assert seen["old"] > 1
    assert seen["new"] > 1


SERVERS = (("seaweedfs", 20, 12), ("moto", 20, 13))


@each(("store", "kills", "seed"), [("file", 20, 11), *SERVERS], long=SERVERS)
def test_all_are_killed_over_and_over(store: str, kills: int, seed: int) -> None:
    """A publisher and two subscribers that live at the same time, and die at drawn moments."""
    seen = driver("-m", "tests.session.soak", "--kills", kills, "--store", store, "--seed", seed)
    assert seen["kills"] >= kills
    assert seen["faults"] == 0
    assert seen["published"] > 3
    assert seen["committed"] > 2


def test_restarts_do_not_pile_up(tmp_path: Path) -> None:
    """A publisher that is restarted again and again, each time with a new run, leaves no more than one run behind."""
    store, trainer = FolderStore(tmp_path / "store"), Trainer()
    for n in range(4):
        bits = trainer.step(n)
        Publisher(store, trainer.weights, grace=0.0, threads=1, new_run=True).publish()
        time.sleep(0.01)
    assert len({item.name.split("/")[1] for item in store.list("runs/")}) == 2  # which goes with the next anchor
    assert Rollout(store, name=False).sync() == bits


# -- two publishers ----------------------------------------------------------------------------------------------------

# Publishers that have seen the same head publish at the same time, as processes. Prints what became of each, by round.
RACE = """
import json, os, sys, time
from pathlib import Path

import sparserl
from sparserl.errors import Fenced
from tests.session.killed_processes import Journal, ended, fork, warm, weights_at

root = Path(sys.argv[1])
(root / "warm").mkdir()
warm(root / "warm")
journal = Journal(root / "journal")


def publisher(round, me):
    weights = weights_at(me)
    publisher = sparserl.Publisher(f"file://{root / 'store'}", weights, threads=1, new_run=True)
    journal.add("ready", round=round)
    while sum(line == {"what": "ready", "round": round} for line in journal.read()) < 3:
        time.sleep(0.001)
    try:
        for _ in range(3):
            publisher.publish()
    except Fenced:
        journal.add("fenced", round=round, me=me)
    else:
        journal.add("won", round=round, me=me, run=publisher.run, version=publisher.version)


for round in range(4):
    for child in [fork(lambda me=me: publisher(round, me)) for me in range(3)]:
        assert ended(child)
print(json.dumps([line for line in journal.read() if line["what"] != "ready"]))
"""


def test_publishers_at_once(tmp_path: Path) -> None:
    """Of three that have seen the same head exactly one goes on; the others are fenced off, and nothing is mixed up."""
    lines = driver("-c", RACE, tmp_path)
    for turn in range(4):
        ends = sorted(line["what"] for line in lines if line["round"] == turn)
        assert ends == ["fenced", "fenced", "won"]
    last = next(line for line in lines if line["round"] == 3 and line["what"] == "won")
    store = FolderStore(tmp_path / "store")
    rollout = Rollout(store, name=False)
    assert rollout.sync() == sha(weights_at(last["me"]))
    assert (rollout.subscriber.run, rollout.subscriber.version) == (last["run"], 2)
    settled(store)


# -- the way to the store ----------------------------------------------------------------------------------------------


@pytest.fixture
def place() -> str:
    return uuid.uuid4().hex


def _is_swap(line: str) -> bool:
    return line.startswith("PUT") and "head.json" in line


@each("kind", ["lost", "reset", "503", "hang"], by_day=["lost"])
def test_the_reply_to_a_swap_is_lost(server: Server, place: str, kind: str) -> None:
    """Whether the head was moved or not, the publish succeeds once, and the version grows by one."""
    left: list[str] = []

    def trouble(line: str) -> str:
        return left.pop() if left and _is_swap(line) else ""

    trainer, rollout = Trainer(), Rollout(server.store(place))
    with Proxy(server, trouble) as proxy:
        store = server.store(place, proxy.endpoint, timeout=timedelta(seconds=0.5))
        publisher = Publisher(store, trainer.weights, threads=1)
        for n in range(3):
            bits = trainer.step(n)
            left[:] = [kind] * (1 if kind == "hang" else 1 + n)
            before = len([line for line in proxy.seen if _is_swap(line)])
            report = publisher.publish()
            assert report is not None
            assert report.version == publisher.version == n
            sent = len([line for line in proxy.seen if _is_swap(line)]) - before
            assert sent == {"lost": 1, "hang": 2}.get(kind, 2 + n)
            assert rollout.sync() == bits
            assert rollout.subscriber.version == n
    settled(server.store(place))


@pytest.mark.long
@pytest.mark.parametrize("when", ["before the swap", "after the swap"])
def test_an_outage(server: Server, place: str, when: str) -> None:
    """A publish that an outage stops is told; the next one is right, whether or not the head had moved."""
    down = False

    def trouble(line: str) -> str:
        nonlocal down
        if _is_swap(line) and broken:
            down = True
            return "lost" if when == "after the swap" else "reset"
        return "reset" if down else ""

    trainer, rollout = Trainer(), Rollout(server.store(place), name=False)
    with Proxy(server, trouble) as proxy:
        broken = False
        publisher = Publisher(server.store(place, proxy.endpoint), trainer.weights, threads=1)
        trainer.step(0)
        publisher.publish()
        for n in range(1, 4):
            committed = trainer.step(n)
            publisher.publish()
            assert rollout.sync() == committed
            version = publisher.version
            broken, lost = True, trainer.step(10 + n)
            for _ in range(2):
                with pytest.raises(Unavailable):
                    publisher.publish()
            broken = down = False
            assert rollout.sync() == (committed if when == "before the swap" else lost)
            bits = trainer.step(20 + n)
            report = publisher.publish()
            assert report is not None
            assert report.version == version + (1 if when == "before the swap" else 2)
            assert rollout.sync() == bits
    settled(server.store(place))


def test_following_through_outages(server: Server, place: str) -> None:
    """A subscriber that follows waits an outage out, and goes on by itself."""
    down, seen, end = threading.Event(), [], threading.Event()
    trainer = Trainer()
    publisher = Publisher(server.store(place), trainer.weights, threads=1)
    wanted = [trainer.step(0)]
    publisher.publish()
    with Proxy(server, lambda _line: "reset" if down.is_set() else "") as proxy:
        rollout = Rollout(server.store(place, proxy.endpoint))
        follow = threading.Thread(
            target=rollout.subscriber.follow,
            kwargs={"stop": end.is_set, "on_commit": lambda report: seen.append((report.version, rollout.bits))},
        )
        follow.start()
        try:
            for n in range(2):
                if n:
                    down.set()
                    wanted.append(trainer.step(n))
                    publisher.publish()
                    time.sleep(0.4)
                    assert (n, wanted[n]) not in seen
                    down.clear()
                deadline = time.monotonic() + 20
                while (n, wanted[n]) not in seen and time.monotonic() < deadline:
                    time.sleep(0.02)
        finally:
            end.set()
            follow.join()
    assert seen == list(enumerate(wanted))


@pytest.mark.long
def test_what_is_in_flight_belongs_to_its_version(server: Server, place: str) -> None:
    """Weights that change right after `publish_in_background()` do not leak; its error comes out with the next call."""
    slow, down = threading.Event(), threading.Event()

    def trouble(_line: str) -> str:
        if slow.is_set():
            time.sleep(0.05)
        return "reset" if down.is_set() else ""

    trainer, rollout = Trainer(), Rollout(server.store(place))
    with Proxy(server, trouble) as proxy:
        publisher = Publisher(server.store(place, proxy.endpoint), trainer.weights, threads=1)
        slow.set()
        for n in range(3):
            bits = trainer.step(n)
            background = publisher.publish_in_background()
            trainer.step(100 + n)
            report = background.result()
            assert report is not None
            assert report.version == n
            assert rollout.sync() == bits
        down.set()
        trainer.step(3)
        publisher.publish_in_background()
        trainer.step(103)
        with pytest.raises(StoreError):
            publisher.publish()
        assert publisher.version == 2
        down.clear()
        assert rollout.sync() == bits
        bits = trainer.step(4)
        report = publisher.publish()
        assert report is not None
        assert report.version == 3
        assert rollout.sync() == bits
    settled(server.store(place))


# -- clocks and bytes --------------------------------------------------------------------------------------------------


def test_clocks_that_jump(tmp_path: Path) -> None:
    """Years forwards and backwards, on either side: anchors, leases and collections lose nothing that is needed."""
    store = FolderStore(tmp_path / "store")
    now = {"publisher": time.time(), "near": time.time(), "far": time.time()}
    jumps = [0, 10 * YEAR, -20 * YEAR, 30 * YEAR, -19 * YEAR, YEAR, -YEAR]
    trainer, (secret, public) = Trainer(), signing.keygen()
    options = {
        "signing_key": secret,
        "anchor_after": 0.3,
        "keep_anchors": 1,
        "grace": 60.0,
        "lease": 30.0,
        "threads": 1,
    }
    near = Rollout(store, trusted_keys=public, name="near", clock=lambda: now["near"])
    far = Rollout(store, trusted_keys=public, name="far", clock=lambda: now["far"])
    runs = set()
    for life in range(3):
        state = tmp_path / "state" if life < 2 else None
        clock = {"clock": lambda: now["publisher"]}
        publisher = Publisher(store, trainer.weights, state=state, new_run=life == 2, **clock, **options)
        for n, jump in enumerate(jumps):
            who = list(now)[(n + life) % 3]
            now[who] += jump
            bits = trainer.step(100 * life + n)
            report = publisher.publish()
            assert report is not None
            assert report.notes == ()
            runs.add(report.run)
            assert near.sync() == bits
            if n % 3 == 2:
                assert far.sync() == bits
            assert Rollout(store, name=False).sync() == bits
            assert list(faults(store)) == []
        now["publisher"] -= 25 * YEAR
        publisher.close()
    assert len(runs) == 2
    for clock in (lambda: 0.0, lambda: time.time() + 100 * YEAR):
        collect(store, 600.0, clock)
        assert list(faults(store)) == []
    settled(store)


@pytest.mark.parametrize("damage", ["cut", "flip", "longer", "empty", "gone"])
def test_objects_that_rot_are_refused(damage: str, tmp_path: Path) -> None:
    """Whatever object of a new version is damaged, the old weights stay, exact; once it is whole again, all is well."""
    root = tmp_path / "store"
    trainer = Trainer()
    publisher = Publisher(f"file://{root}", trainer.weights, threads=1)
    trainer.step(0)
    publisher.publish()
    before = {path for path in root.rglob("*") if path.is_file()}
    seeds = [Rollout(f"file://{root}", name=False) for _ in range(30)]
    old = {rollout.sync() for rollout in seeds}.pop()
    new = trainer.step(1)
    publisher.publish()
    objects = sorted({p for p in root.rglob("*") if p.is_file() and ".tmp" not in p.parts} - before)
    assert len(objects) >= 4
    for path in [*objects, *([root / "head.json"] if damage != "flip" else [])]:  # flips have a test of their own
        data = path.read_bytes()
        middle = len(data) // 2
        flipped = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
        if damage == "gone":
            path.unlink()
        else:
            path.write_bytes({"cut": data[:middle], "flip": flipped, "longer": data + data[:9], "empty": b""}[damage])
        rollout = seeds.pop()
        with pytest.raises(SparserlError):
            rollout.subscriber.sync()
        assert rollout.bits == old
        assert rollout.subscriber.version == 0
        path.write_bytes(data)
        assert rollout.sync() == new


def test_a_head_with_any_byte_wrong(tmp_path: Path) -> None:
    """It is refused, or means the same; and it leaves nothing behind that would keep us from the right one."""
    root = tmp_path / "store"
    trainer = Trainer()
    publisher = Publisher(f"file://{root}", trainer.weights, threads=1)
    trainer.step(0)
    publisher.publish()
    rollout = Rollout(f"file://{root}", name=False)
    old = rollout.sync()
    bits = trainer.step(1)
    publisher.publish()
    path = root / "head.json"
    data = path.read_bytes()
    refused = 0
    for at in range(len(data)):
        for flip in (1, 2, 16):
            path.write_bytes(data[:at] + bytes([data[at] ^ flip]) + data[at + 1 :])
            try:
                rollout.subscriber.stage()
            except SparserlError:
                refused += 1
                assert rollout.bits == old
            rollout.subscriber.discard()
    assert refused > len(data)
    path.write_bytes(data)
    assert rollout.sync() == bits


def test_a_fenced_publisher_stays_fenced(tmp_path: Path) -> None:
    """It cannot come back by trying again, and what it sent meanwhile is collected."""
    store = FolderStore(tmp_path / "store")
    one, two = Trainer(), Trainer()
    first = Publisher(store, one.weights, threads=1)
    first.publish()
    second = Publisher(store, two.weights, threads=1)
    bits = two.step(5)
    second.publish()
    for n in range(3):
        one.step(n + 1)
        with pytest.raises(Fenced):
            first.publish()
    assert Rollout(store, name=False).sync() == bits
    settled(store)
