"""Threads and processes: results do not depend on how many there are, and none gets in another's way."""

from __future__ import annotations

import operator
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import sparserl
import sparserl.parallel
import sparserl.patch.apply
from sparserl import Patch
from sparserl.errors import SparserlError
from sparserl.parallel import ReadAhead, default_threads, in_turn, ordered
from tests.class_choice import always
from tests.effort import each

PROFILES = ("auto", "raw", "gap", "ulp", "ctx")


def versions(seed=0, count=2):
    """Some versions of weights large enough for several pieces and buckets once those are small."""
    rng = np.random.default_rng(seed)
    first = {
        "a": rng.integers(0, 2**16, (300, 400), np.uint16),
        "b": rng.integers(0, 2**32, (100, 90), np.uint32),
        "c": rng.integers(0, 2**16, (7,), np.uint16),
        "d": rng.integers(0, 256, (50, 50, 20), np.uint8),
    }
    out = [first]
    for density in (0.02, 0.3, 0.01)[: count - 1]:
        last = out[-1]
        out.append({n: np.where(rng.random(b.shape) < density, b + b.dtype.type(1), b) for n, b in last.items()})
    return out


@pytest.fixture
def small(monkeypatch):
    """Pieces so small that there is work for every thread."""
    monkeypatch.setattr("sparserl.weights.batches.PIECE_BYTES", 4096)
    monkeypatch.setattr("sparserl.plan.buckets.BUCKET_COVER_BYTES", 40_000)
    monkeypatch.setattr("sparserl.plan.buckets.choose_classes", always)


@each("profile", PROFILES, by_day=["ctx"])
def test_the_same_bytes_whatever_the_number_of_threads(profile, small):
    """Diff, squash and invert write the same patch on one, two and four threads; apply does the same."""
    first, second, third = versions(count=3)
    results = []
    for threads in (1, 2, 4):
        a = sparserl.diff(first, second, profile=profile, threads=threads)
        b = sparserl.diff(second, third, profile=profile, threads=threads)
        squashed = sparserl.squash(a, b, base=first, profile=profile, threads=threads)
        undo = squashed.invert(first, profile=profile, threads=threads)
        weights = {n: t.copy() for n, t in first.items()}
        squashed.apply(weights, threads=threads)
        assert all((weights[n] == third[n]).all() for n in third)
        undo.apply(weights, threads=threads)
        assert all((weights[n] == first[n]).all() for n in first)
        results.append([p.to_bytes() for p in (a, b, squashed, undo)])
        assert a.buckets > 4
    assert results[0] == results[1] == results[2]


def test_many_python_threads_at_once(small, tmp_path):
    """Diffs and applies on shared inputs and one shared patch on disk, from eight threads, all come out exact."""
    old, new = versions()
    expected = sparserl.diff(old, new).to_bytes()
    shared = sparserl.diff(old, new, to=tmp_path / "shared.srl")
    opened = Patch.open(tmp_path / "shared.srl")
    gate = threading.Barrier(8)

    def work(i):
        gate.wait()
        for round_ in range(3):
            weights = {n: t.copy() for n, t in old.items()}
            (shared, opened)[i % 2].apply(weights, threads=1 + (i + round_) % 3)
            assert all((weights[n] == new[n]).all() for n in new)
            assert sparserl.diff(old, new, threads=1 + i % 3).to_bytes() == expected
            assert opened.stats().changed == shared.changed
        return True

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))


FORK = """
import os, signal, sys
import numpy as np, sparserl, sparserl.weights.batches
rng = np.random.default_rng(0)
old = {f"t{i}": rng.integers(0, 2**16, 50_000, np.uint16) for i in range(8)}
new = {n: np.where(rng.random(b.size) < 0.01, b + np.uint16(1), b) for n, b in old.items()}
sparserl.weights.batches.PIECE_BYTES = 1 << 14
patch = sparserl.diff(old, new, threads=3)
patch.apply({n: b.copy() for n, b in old.items()}, threads=3)
children = []
for _ in range(3):
    child = os.fork()
    if child == 0:
        try:
            mine = {n: b.copy() for n, b in old.items()}
            patch.apply(mine, threads=3)
            again = sparserl.diff(old, mine, threads=3)
            good = all((mine[n] == new[n]).all() for n in new) and again.to_bytes() == patch.to_bytes()
            if len(children) == 1 and good:
                inner = os.fork()
                if inner == 0:
                    os._exit(0 if sparserl.digest(mine, threads=3) == patch.result else 4)
                good = os.waitpid(inner, 0)[1] == 0
            os._exit(0 if good else 3)
        finally:
            os._exit(5)
    children.append(child)
codes = [os.waitpid(child, 0)[1] for child in children]
print(codes, sparserl.digest(new, threads=3) == patch.result)
"""


def test_a_forked_child_has_its_own_threads():
    """After use in the parent, children (and theirs) diff and apply without waiting for threads they do not have."""
    root = Path(sparserl.__file__).parents[1]
    env = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORK], env=env, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.stdout.strip() == "[0, 0, 0] True", done.stderr


def test_urgent_work_goes_first():
    """A bucket is encoded before a batch is compared that was waiting when the bucket came."""
    begun, taken, handed = [], threading.Event(), threading.Event()

    def batches():
        for i in range(6):
            if i == 3:
                taken.set()
            yield i

    def find(i):
        begun.append(("find", i))
        assert (handed if i else taken).wait(120)
        return i

    def found():
        for i in ordered(find, batches(), 2):
            yield i
            handed.set()  # it is asked for more: what it gave has been handed to the threads

    def encode(i):
        begun.append(("encode", i))
        return i

    assert [*ordered(encode, found(), 2, urgent=True)] == [*range(6)]
    assert begun.index(("encode", 0)) < begun.index(("find", 3))
    assert {*begun} == {(what, i) for what in ("find", "encode") for i in range(6)}


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_results_come_in_order(threads):
    """Whoever finishes first, results come in the order of the items."""

    def work(i):
        time.sleep(0.002 * ((7 * i) % 5))
        return i

    assert list(ordered(work, range(40), threads)) == list(range(40))
    assert list(ordered(work, [], threads)) == []


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_few_items_are_taken_ahead(threads):
    """At most two items per thread are in flight, so memory stays bounded while the consumer is slow."""
    taken = []

    def items():
        for i in range(100):
            taken.append(i)
            yield i

    for done, _ in enumerate(ordered(lambda i: i, items(), threads), 1):
        assert len(taken) - done <= 2 * threads


def test_more_items_can_be_taken_ahead():
    """As many as said wait for a thread, however few these are, and no more."""
    taken, go = [], threading.Event()

    def items():
        for i in range(20):
            taken.append(i)
            if len(taken) == 7:
                threading.Timer(0.05, go.set).start()
            yield i

    results = ordered(lambda i: go.wait(120) and i, items(), 2, ahead=7)
    assert next(results) == 0
    assert len(taken) == 7
    assert list(results) == list(range(1, 20))


@pytest.mark.parametrize(
    ("most", "most_bytes", "sizes", "in_flight"),
    [
        (3, 0, [9, 9, 9, 9, 9], [3, 3, 3, 2, 1]),
        (9, 10, [4, 4, 4, 4], [2, 2, 2, 1]),
        (9, 10, [4, 20, 4, 4, 4], [1, 1, 2, 2, 1]),
        (9, 0, [1, 2, 3], [3, 2, 1]),
    ],
)
def test_how_much_is_read_ahead(most, most_bytes, sizes, in_flight):
    """As many items as both limits allow are submitted before one is given out; a large one is alone, all in order."""
    submitted, seen = [], []

    def submit(item):
        submitted.append(item)
        future = Future()
        future.set_result(item)
        return future

    window = ReadAhead(most, most_bytes)
    for given, future in enumerate(window.run(submit, enumerate(sizes), operator.itemgetter(1))):
        assert future.result() == (given, sizes[given])
        seen.append(len(submitted) - given)
    assert seen == in_flight
    assert submitted == list(enumerate(sizes))


def test_what_is_done_may_be_given_at_once():
    """An eager reader gives what is done before it submits more."""
    submitted = []

    def submit(item):
        submitted.append(item)
        future = Future()
        future.set_result(item)
        return future

    for future in ReadAhead(5).run(submit, range(4), eager=True):
        assert submitted[-1] == future.result()


def test_jobs_take_steps_in_turn():
    """One that need not wait goes on, the oldest first; few are begun and not done; what they return comes in order."""
    steps, begun = [], []

    class Pause:
        """Over when it was looked at so often."""

        def __init__(self, looks):
            self.looks = looks

        def ready(self):
            self.looks -= 1
            return self.looks < 0

    def job(name, *pauses):
        begun.append(name)
        for i, looks in enumerate(pauses):
            steps.append((name, i))
            yield Pause(looks)
        begun.remove(name)
        return name

    results = in_turn(iter([job("a", 2, 0), job("b", 0, 0), job("c", 5), job("d")]))
    assert next(results) == "a"
    assert steps == [("a", 0), ("b", 0), ("b", 1), ("c", 0), ("a", 1)]
    assert list(results) == ["b", "c", "d"]
    assert not begun
    assert list(in_turn([])) == []
    for _ in in_turn(job(i, 1, 1, 1, 1) for i in range(5)):
        assert len(begun) <= 2


@pytest.mark.parametrize("threads", [1, 3])
def test_an_error_reaches_the_caller(threads):
    """An exception in the work comes out where its result would have; what lies behind is not begun without need."""
    begun = []

    def work(i):
        begun.append(i)
        if i == 5:
            raise ValueError("five")
        return i

    results = ordered(work, range(1000), threads)
    assert [next(results) for _ in range(5)] == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="five"):
        next(results)
    assert len(begun) <= 5 + 2 * threads + 1


def test_an_abandoned_loop_leaves_the_pool_usable():
    """Breaking off early cancels what was not begun; the next use works."""
    for result in ordered(lambda i: i, range(1000), 3):
        if result == 3:
            break
    assert list(ordered(lambda i: i * i, range(10), 3)) == [i * i for i in range(10)]


def test_the_number_of_threads_can_be_said(monkeypatch):
    """SPARSERL_THREADS decides where the caller does not; nonsense is an error."""
    monkeypatch.setenv("SPARSERL_THREADS", "3")
    assert default_threads() == 3
    monkeypatch.setenv("SPARSERL_THREADS", "0")
    assert default_threads() == 1
    monkeypatch.setenv("SPARSERL_THREADS", "many")
    with pytest.raises(SparserlError, match="'many'"):
        default_threads()
    monkeypatch.delenv("SPARSERL_THREADS")
    assert default_threads() == len(os.sched_getaffinity(0))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("keep", "writes"), [(1 << 28, "exchange"), (-1, "Overlay.write")])
def test_an_interrupt_while_writing_waits(monkeypatch, threads, keep, writes):
    """Ctrl-C in the middle of a commit is raised when all is written: the weights are the result, whole."""
    rng = np.random.default_rng(3)
    old = {f"w{i}": rng.integers(0, 255, 5000, np.uint8).astype(kind) for i, kind in enumerate(("u1", "u2", "u4"))}
    new = {name: bits + (rng.random(5000) < 0.1) for name, bits in old.items()}
    new = {name: new[name].astype(old[name].dtype) for name in old}
    patch = sparserl.diff(old, new)
    assert patch.buckets == 3
    inner = operator.attrgetter(writes)(sparserl.patch.apply)
    seen = []

    def interrupted(*args):
        if not seen:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.2)  # gives the main thread the time to hear of it
        seen.append(args)
        return inner(*args)

    monkeypatch.setattr("sparserl.patch.apply.KEEP_BYTES", keep)
    monkeypatch.setattr(f"sparserl.patch.apply.{writes}", interrupted)
    with pytest.raises(KeyboardInterrupt):
        patch.apply(old, threads=threads)
    assert len(seen) == 3
    assert all((old[name] == new[name]).all() for name in new)
    assert sparserl.digest(old) == patch.result


def test_an_error_of_uninterrupted_work_is_the_callers():
    """What goes wrong on the thread is raised where it was asked for."""
    with pytest.raises(ZeroDivisionError):
        sparserl.parallel.uninterrupted(lambda: 1 // 0)


def test_nothing_goes_on_behind_the_callers_back():
    """When one piece of work fails, those that run beside it have ended before the caller hears of it."""
    ended = []

    def work(item):
        if item == 0:
            time.sleep(0.05)
            raise ValueError(item)
        time.sleep(0.3)
        ended.append(item)

    with pytest.raises(ValueError, match="0"):
        list(ordered(work, range(2), threads=2))
    assert ended == [1]


@pytest.mark.long
def test_no_byte_comes_from_memory_that_nobody_wrote():
    """The C library fills memory that is handed out, or back, with a pattern: patches are the same whatever it is."""
    code = """
import hashlib
import numpy as np
import sparserl
rng = np.random.default_rng(0)
old = {"w": rng.integers(0, 2**16, 150_001, np.uint16), "x": rng.normal(size=70_003).astype(np.float32)}
new = {n: np.where(rng.random(b.shape) < 0.3, b.view(f"u{b.itemsize}") + 1, b.view(f"u{b.itemsize}")).view(b.dtype)
       for n, b in old.items()}
for profile in ("raw", "gap", "ulp", "ctx", "auto"):
    patch = sparserl.diff(old, new, profile=profile)
    undo = patch.invert(old)
    undo.apply({n: b.copy() for n, b in new.items()})
    print(profile, hashlib.sha256(patch.to_bytes() + undo.to_bytes()).hexdigest())
"""
    said = []
    for pattern in ("0", "77", "200"):
        env = {**os.environ, "MALLOC_PERTURB_": pattern, "PYTHONPATH": str(Path(sparserl.__file__).parents[1])}
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        said.append(done.stdout)
    assert said[0] == said[1] == said[2]
