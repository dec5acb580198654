"""Sessions under accidents and attacks: interrupts, threads, exits, restarts, odd names and clocks, vandals."""

from __future__ import annotations

import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import sparserl
from sparserl import Publisher, Subscriber, targets
from sparserl.errors import Fenced, LimitExceeded, SessionError, UnsupportedFormat
from sparserl.session.store import signing
from sparserl.session.store.retention import collect, faults, read_head
from sparserl.sources import open_checkpoint
from sparserl.transport import open_store

SOURCE = str(Path(sparserl.__file__).parent)
DAY = 86_400


@pytest.fixture
def url(tmp_path):
    return f"file://{tmp_path}/store"


def weights(size=1000, seed=0):
    return {"w": np.random.default_rng(seed).integers(0, 2**32, size, np.uint32)}


def interrupted_at(line, work):
    """Do the work on this thread, but for an interrupt at the given line of ours; how many lines there were."""
    count = 0

    def trace(frame, _event, _argument):
        return step if frame.f_code.co_filename.startswith(SOURCE) else None

    def step(_frame, event, _argument):
        nonlocal count
        if event in ("line", "return"):
            count += 1
            if count == line:
                sys.settrace(None)
                raise KeyboardInterrupt
        return step

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("kind", ["memory", "folder"])
def test_an_interrupt_at_any_line_of_a_commit(url, tmp_path, kind):
    """All targets have the new version, or none has, and the subscriber knows which; the next sync goes on."""
    trainer = weights()
    publisher = Publisher(url, trainer, anchor_after=1e9, ladder=None)
    publisher.publish()
    mine = {"w": np.zeros(1000, np.uint32)}
    folder = targets.folder(tmp_path / "model")
    other = {"w": np.zeros(1000, np.uint32)} if kind == "memory" else folder
    subscriber = Subscriber(url, [mine, other], name=False, threads=1)
    subscriber.sync()
    outcomes = set()
    for line in range(1, 70):
        old = trainer["w"].copy()
        trainer["w"][line] += 1
        publisher.publish()
        subscriber.stage()
        held = subscriber.version
        lines = interrupted_at(line, subscriber.commit)
        both = [mine["w"], other["w"] if kind == "memory" else open_checkpoint(folder.current)["w"].array]
        wanted = trainer["w"] if subscriber.version == publisher.version else old
        assert subscriber.version in (held, publisher.version), line
        assert all(np.array_equal(bits, wanted) for bits in both), line
        outcomes.add(subscriber.version == publisher.version)
        subscriber.sync()
        assert np.array_equal(mine["w"], trainer["w"]), line
        if lines < line:
            break
    assert outcomes == {False, True}
    subscriber.close()


def test_a_commit_that_would_wait_for_its_own_caller(url):
    """Whoever has the lock of a target and commits is told so, instead of waiting for ever."""
    trainer = weights()
    Publisher(url, trainer).publish()
    lock = threading.RLock()
    mine = {"w": np.zeros(1000, np.uint32)}
    subscriber = Subscriber(url, targets.module(mine, lock=lock))
    with lock, pytest.raises(SessionError, match="has the lock of a target already"):
        subscriber.sync()
    assert subscriber.commit().version == 0  # it is staged still
    assert np.array_equal(mine["w"], trainer["w"])


def test_threads_that_sync_at_once_take_turns(url):
    """Of two threads one commits, and the other finds the version held; the bits are always those of a version."""
    trainer = weights(100_000)
    publisher = Publisher(url, trainer, anchor_after=1e9, ladder=None)
    publisher.publish()
    mine = {"w": np.zeros(100_000, np.uint32)}
    subscriber = Subscriber(url, mine, name=False)
    subscriber.sync()
    rng = np.random.default_rng(1)
    for _ in range(12):
        trainer["w"][rng.integers(0, 100_000, 10_000)] += 1
        publisher.publish()
        reports = []

        def sync(reports=reports):
            reports.append(subscriber.sync())

        threads = [threading.Thread(target=sync) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(report is None for report in reports) == [False, True, True]
        assert subscriber.version == publisher.version
        assert np.array_equal(mine["w"], trainer["w"])


def test_threads_that_publish_at_once_take_turns(url):
    """Each gets a version of its own, and every version can be had."""
    trainer = weights()
    publisher = Publisher(url, trainer, anchor_after=1e9, ladder=None)
    publisher.publish()
    versions = []

    def publish():
        versions.extend(publisher.publish().version for _ in range(4))

    threads = [threading.Thread(target=publish) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(versions) == list(range(1, 13))
    assert list(faults(open_store(url))) == []


ENDS_IN_FLIGHT = """
import logging, shutil, sys, numpy as np, sparserl
logging.getLogger("sparserl").setLevel(logging.ERROR)  # it may log that it compiles kernels
weights = {"w": np.random.default_rng(0).integers(0, 2**32, 300_000, np.uint32)}
publisher = sparserl.Publisher("file://" + sys.argv[1], weights)
publisher.publish()
weights["w"][::3] += 1
if sys.argv[2] == "broken":
    shutil.rmtree(sys.argv[1])
    open(sys.argv[1], "w").close()
publisher.publish_in_background()
"""


@pytest.mark.parametrize("store", ["whole", "broken"])
def test_the_end_of_a_script_waits_for_its_last_publish(tmp_path, store):
    """It arrives; if it cannot, that is said on stderr, and by the exit code."""
    command = [sys.executable, "-c", ENDS_IN_FLIGHT, str(tmp_path / "store"), store]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=900)
    if store == "whole":
        assert done.returncode == 0
        notice = r"sparserl: a publish is running; waiting for it for up to 300 s\n"  # on a slow machine
        assert re.fullmatch(f"({notice})?", done.stderr)
        assert read_head(open_store(f"file://{tmp_path}/store"))[0].version == 1
    else:
        assert done.returncode == 1
        assert "sparserl: error: a publish in the background failed: StoreError" in done.stderr


PUBLISHES_UNTIL_KILLED = """
import os, sys, time, numpy as np, sparserl
weights = {"w": np.arange(1000, dtype=np.float32)}
publisher = sparserl.Publisher(sys.argv[1], weights, state=sys.argv[2])
publisher.publish()
if not os.fork():  # a worker that outlives the publisher, as those of a data loader may
    print(publisher.run, os.getpid(), flush=True)
time.sleep(600)
"""


def test_one_publisher_at_a_time_has_a_state_folder(url, tmp_path):
    """A second one is refused and changes nothing; when the first was killed, its run goes on."""
    state = tmp_path / "state"
    command = [sys.executable, "-c", PUBLISHES_UNTIL_KILLED, url, str(state)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as first:
        run, worker = first.stdout.readline().split()
        before = {file.name: file.read_bytes() for file in state.iterdir()}
        with pytest.raises(SessionError, match="another publisher keeps its state in"):
            Publisher(url, weights(), state=state)
        assert {file.name: file.read_bytes() for file in state.iterdir()} == before
        first.send_signal(signal.SIGKILL)
        first.wait()
    with Publisher(url, {"w": np.ones(1000, np.float32)}, state=state) as second:
        report = second.publish()
    os.kill(int(worker), signal.SIGKILL)
    assert (report.run, report.version, report.kind) == (run, 1, "patch")


def test_a_publisher_that_loses_throws_nothing_away(url, tmp_path, monkeypatch):
    """Where locks do not work: who is fenced has not removed the anchor that the winner would go on from."""
    monkeypatch.setattr("sparserl.session.store.resume.SavedAnchor._lock", lambda self: self._path.mkdir(exist_ok=True))
    trainer = weights()
    winner = Publisher(url, trainer, state=tmp_path / "state")
    loser = Publisher(url, trainer, state=tmp_path / "state")
    winner.publish()
    with pytest.raises(Fenced):
        loser.publish()
    trainer["w"][0] += 1
    winner.publish()
    again = Publisher(url, trainer, state=tmp_path / "state")
    assert (again.run, again.version) == (winner.run, 1)


def test_a_state_folder_that_serves_two_stores(url, tmp_path):
    """One publisher after the other: neither removes what the other goes on from."""
    trainer = weights()
    runs = {}
    for place in (url, f"{url}-other"):
        with Publisher(place, trainer, state=tmp_path / "state") as publisher:
            publisher.publish()
            runs[place] = publisher.run
    for place, run in runs.items():
        with Publisher(place, trainer, state=tmp_path / "state") as publisher:
            assert (publisher.run, publisher.version) == (run, 0)
    assert len(list((tmp_path / "state").glob("anchor-*"))) == 2


@pytest.mark.parametrize("state", ["a file", "below a file"])
def test_a_state_folder_that_cannot_be(url, tmp_path, state):
    """It is refused where it is given."""
    (tmp_path / "file").write_text("mine")
    folder = tmp_path / "file" if state == "a file" else tmp_path / "file" / "state"
    with pytest.raises(SessionError, match="the state of a publisher cannot be kept in"):
        Publisher(url, weights(), state=folder)


@pytest.mark.parametrize("what", ["too many", "too large", "as a mapping"])
def test_files_past_the_limits_are_not_published(url, tmp_path, monkeypatch, what):
    """What no subscriber could read is refused before anything is written."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    if what == "too large":
        with (folder / "optimizer.distcp").open("wb") as file:
            file.truncate((1 << 30) + 1)
    else:
        for number in range(4097):
            (folder / f"{number}.txt").touch()
    files = {path.name: b"" for path in folder.iterdir()} if what == "as a mapping" else folder
    with pytest.raises(LimitExceeded, match="the limits are 4096 files and 1073741824 bytes"):
        Publisher(url, weights(), files=files)
    assert not (tmp_path / "store").exists()


def test_a_file_that_grows_while_it_is_published(url, tmp_path):
    """The head does not move to a run that nobody can read."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "log.txt").touch()
    publisher = Publisher(url, weights(), files=folder)
    with (folder / "log.txt").open("wb") as file:
        file.truncate((1 << 30) + 1)
    with pytest.raises(LimitExceeded, match=r"the largest is 'log\.txt'"):
        publisher.publish()
    assert not (tmp_path / "store" / "head.json").exists()
    os.truncate(folder / "log.txt", 3)
    publisher.publish()
    target = targets.folder(tmp_path / "model")
    with Subscriber(url, target) as subscriber:
        subscriber.sync()
        assert (target.current / "log.txt").read_bytes() == bytes(3)


def test_a_subscriber_far_behind_costs_no_anchors(url, monkeypatch):
    """While its lease is fresh the index keeps its steps, and anchors stay rare; but not without bound."""
    monkeypatch.setattr("sparserl.session.store.maintenance._STEPS", 10)
    monkeypatch.setattr("sparserl.session.store.maintenance._MOST_STEPS", 40)
    trainer = weights()
    publisher = Publisher(url, trainer, ladder=None, grace=0.5, anchor_after=1e9)
    publisher.publish()
    mine = {"w": np.zeros(1000, np.uint32)}
    subscriber = Subscriber(url, mine, name="slow")
    subscriber.sync()
    anchors, steps = [], []
    for version in range(1, 101):
        trainer["w"][version] += 1
        publisher.publish()
        index = publisher._committed.index.steps
        steps.append(len(index))
        if any(step.base is None and step.version == version for step in index):
            anchors.append(version)
        if version == 35:
            assert {step.base for step in index} >= {0, 1, 2}
    assert all(b - a >= 9 for a, b in zip(anchors, anchors[1:], strict=False))
    assert len(anchors) >= 8
    assert max(steps) <= 40 + 10 + 3
    assert subscriber.sync().kind == "anchor"
    assert np.array_equal(mine["w"], trainer["w"])


def test_collection_takes_only_what_is_ours(url, tmp_path):
    """Names that no session gives neither stop a collection nor fall to it."""
    for seed in range(3):
        with Publisher(url, weights(seed=seed)) as publisher:
            publisher.publish()
    root = tmp_path / "store"
    strangers = ["runs/0 notes.txt", "runs/notes.txt", "runs/0123456789abcdef/index/readme", "runs/x/run.json"]
    for name in strangers:
        (root / name).parent.mkdir(exist_ok=True, parents=True)
        (root / name).write_text("mine")
    for path in root.rglob("*"):
        os.utime(path, (time.time() - 10 * DAY,) * 2)
    store = open_store(url)
    assert collect(store, 3600.0)
    assert len(list((root / "runs").glob("*/run.json"))) == 2  # the newest run, and the stranger's
    assert all((root / name).read_text() == "mine" for name in strangers)
    assert list(faults(store)) == []


def test_fsck_sees_what_stands_behind_a_large_object(url, tmp_path):
    """An object that is read piece by piece must end where it should."""
    Publisher(url, weights(), files={"large.dat": bytes(9 << 20)}).publish()
    store = open_store(url)
    assert list(faults(store)) == []
    [large] = (tmp_path / "store" / "runs").glob("*/files/*")
    with large.open("ab") as file:
        file.write(b"more")
    assert any("is longer than" in fault for fault in faults(store))


GARBAGE = {
    "text": b"garbage",
    "nothing": b"",
    "an array": b"[]",
    "no body": b'{"format":1}',
    "no format": b'{"body":"{}"}',
    "70 kB": b" " * 70_000,
    "deep": b"[" * 60_000,
}


@pytest.mark.parametrize("kind", GARBAGE)
def test_garbage_in_place_of_the_head(url, tmp_path, kind):
    """It does not stop a publisher that runs. After a restart, only a new run that was asked for takes its place."""
    secret, public = signing.keygen()
    trainer = weights()
    head = tmp_path / "store" / "head.json"
    publisher = Publisher(url, trainer, signing_key=secret, state=tmp_path / "state")
    publisher.publish()
    mine = {"w": np.zeros(1000, np.uint32)}
    subscriber = Subscriber(url, mine, trusted_keys=public)
    subscriber.sync()
    head.write_bytes(GARBAGE[kind])
    trainer["w"][3] += 1
    report = publisher.publish()
    assert (report.run, report.version) == (subscriber.run, 1)
    assert subscriber.sync().version == 1
    publisher.close()
    head.write_bytes(GARBAGE[kind])
    with pytest.raises(SessionError, match=rf"has a damaged head.* run {publisher.run}, put back a copy of head\.json"):
        Publisher(url, trainer, signing_key=secret, state=tmp_path / "state")
    with Publisher(url, trainer, signing_key=secret, state=tmp_path / "state", new_run=True) as again:
        assert again.publish().version == 0
    subscriber.sync()
    assert subscriber.run == again.run
    assert np.array_equal(mine["w"], trainer["w"])


def test_heads_of_others_still_fence_a_publisher(url, tmp_path):
    """A head that is well formed may be another publisher's, and one of another format a newer release's."""
    secret, _ = signing.keygen()
    publisher = Publisher(url, weights(), signing_key=secret)
    publisher.publish()
    Publisher(url, weights(), new_run=True).publish()
    with pytest.raises(Fenced):
        publisher.publish()
    (tmp_path / "store" / "head.json").write_text('{"format":2}')
    with pytest.raises(UnsupportedFormat, match="format 2; this release reads 1"):
        Publisher(url, weights(), signing_key=secret)


@pytest.mark.parametrize("host", ["_builder", "-x", "höst", "x" * 64, "", "a/b", "..", "日本"])
def test_any_host_name_can_name_a_lease(url, monkeypatch, host):
    """A subscriber needs no name of its own on a machine with an odd one."""
    trainer = weights()
    publisher = Publisher(url, trainer)
    publisher.publish()
    monkeypatch.setattr(socket, "gethostname", lambda: host)
    Subscriber(url, {"w": np.zeros(1000, np.uint32)}).sync()
    assert publisher.wait(0, 1, timeout=0) == 1


@pytest.mark.parametrize("now", [math.nan, math.inf, -math.inf, 1.5e308])
def test_a_clock_that_tells_no_time(url, tmp_path, now):
    """A publisher refuses it before anything can be seen; a subscriber leaves no lease, and goes on."""
    trainer = weights()
    with pytest.raises(SessionError, match="the clock of this machine says"):
        Publisher(url, trainer, clock=lambda: now).publish()
    assert not (tmp_path / "store" / "head.json").exists()
    Publisher(url, trainer).publish()
    assert Subscriber(url, {"w": np.zeros(1000, np.uint32)}, clock=lambda: now).sync().version == 0


@pytest.mark.parametrize("now", [1e17, 1e30])
def test_a_clock_that_was_far_ahead_once(url, now):
    """The next run is a later one all the same, whatever the clock says then."""
    secret, public = signing.keygen()
    trainer = weights()
    Publisher(url, trainer, signing_key=secret, clock=lambda: now).publish()
    mine = {"w": np.zeros(1000, np.uint32)}
    subscriber = Subscriber(url, mine, trusted_keys=public)
    subscriber.sync()
    trainer["w"][5] += 1
    Publisher(url, trainer, signing_key=secret, new_run=True).publish()
    assert subscriber.sync().kind == "anchor"
    assert np.array_equal(mine["w"], trainer["w"])


def test_a_run_of_another_store_is_refused_where_the_run_is_pinned(tmp_path):
    """One key for two stores cannot tell their runs apart; a subscriber that names its run does."""
    secret, public = signing.keygen()
    one, two = (f"file://{tmp_path}/{name}" for name in ("one", "two"))
    trainer = weights()
    publisher = Publisher(one, trainer, signing_key=secret)
    publisher.publish()
    subscriber = Subscriber(one, {"w": np.zeros(1000, np.uint32)}, trusted_keys=public, run=publisher.run)
    subscriber.sync()
    Publisher(two, weights(seed=1), signing_key=secret).publish()
    shutil.copytree(tmp_path / "two" / "runs", tmp_path / "one" / "runs", dirs_exist_ok=True)
    shutil.copy(tmp_path / "two" / "head.json", tmp_path / "one" / "head.json")
    with pytest.raises(sparserl.errors.Untrusted, match="only follows run"):
        subscriber.sync()


def test_weights_of_zeros_need_one_anchor(url):
    """An anchor of no bytes does not make every version write another one."""
    with Publisher(url, {"w": np.zeros(1000, np.float32)}) as publisher:
        for _ in range(4):
            publisher.publish()
        assert sum(step.base is None for step in publisher._committed.index.steps) == 1
