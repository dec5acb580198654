"""Faults on demand in the ranks of a process group: targets that fail, interrupts at a place that a test names."""

from __future__ import annotations

import os
import signal
import time

import pytest

from sparserl.targets.modules import ModuleTarget, PreparedModule

pytest.importorskip("torch")


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


LIMIT = 120.0  # seconds that ranks wait for each other
PATIENCE = 60.0  # seconds: nothing that ends before the limit takes that long


class Hand:
    """One rank's end of the pipe to the test, which stops it at given points and presses Ctrl-C."""

    def __init__(self, pipe):
        signal.signal(signal.SIGINT, signal.default_int_handler)
        self.pipe = pipe

    def stop(self, where):
        """Tell the test where this rank is, and wait until it may go on."""
        self.pipe.send(("at", where))
        assert self.pipe.poll(240)
        self.pipe.recv()

    def interrupted(self, where, work):
        """Work in which Ctrl-C comes; the test is told before."""
        self.pipe.send(("at", where))
        with pytest.raises(KeyboardInterrupt):
            work()
        self.stop("interrupted")


def at(started, rank, where):
    pipe = started[rank][1]
    assert pipe.poll(240), f"rank {rank} is not at {where!r}"
    found = pipe.recv()
    assert found == ("at", where), found[1]


def go(started, rank):
    started[rank][1].send("go")


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
