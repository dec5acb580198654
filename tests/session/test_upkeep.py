"""Upkeep goes on behind publishes: what a publish does in its own thread, and what becomes of a run meanwhile."""

from __future__ import annotations

import statistics
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

import sparserl
from sparserl.errors import Unavailable
from sparserl.session import background
from sparserl.session.store import maintenance, routes
from sparserl.session.store.stored_run import StoredRun
from sparserl.transport import open_store

pytestmark = pytest.mark.behind


class Training:
    """Weights of a run, and what each version of them was."""

    def __init__(self, url, **options):
        self.rng = np.random.default_rng(0)
        self.weights = {f"w{i}": self.rng.integers(0, 1 << 16, 20_000).astype(np.uint16) for i in range(6)}
        self.publisher = sparserl.Publisher(url, self.weights, **options)
        self.history = []

    def publish(self):
        for tensor in self.weights.values():
            tensor[self.rng.integers(0, tensor.size, 100)] ^= 1
        self.history.append({name: tensor.copy() for name, tensor in self.weights.items()})
        return self.publisher.publish()

    def require_exact(self, url):
        """Every step that the store has leads to the bits that were published."""
        store = open_store(url)
        stored = StoredRun.read(store)
        for version in routes.versions(stored.index.steps):
            for step in stored.index.steps:
                if step.version != version:
                    continue
                steps = [step] if step.base is None else [*stored.steps(None, step.base), step]
                built = stored.build(steps, version)
                for name, tensor in self.history[version].items():
                    np.testing.assert_array_equal(built[name].array, tensor)
        return stored.index.steps


@contextmanager
def held_up(monkeypatch, method="send_alone") -> Iterator[threading.Event]:
    """Uploads of upkeep wait until the event is set."""
    go_on = threading.Event()
    begun = threading.Event()
    real = getattr(maintenance.RunWriter, method)

    def slow(self, *arguments):
        if threading.current_thread().name == "sparserl-upkeep":
            begun.set()
            assert go_on.wait(60)
        return real(self, *arguments)

    monkeypatch.setattr(maintenance.RunWriter, method, slow)
    go_on.begun = begun
    try:
        yield go_on
    finally:
        go_on.set()


def test_every_publish_takes_the_same(url):
    """Over 64 versions, the slowest publish does at most 1.5 times what the median does in the caller's thread."""
    training = Training(url)
    for _ in range(2):
        training.publish()  # the first patch loads modules and kernels
    calls = []

    def count(_frame, event, _argument):
        calls[-1] += event == "call"

    for _ in range(64):
        calls.append(0)
        sys.setprofile(count)
        try:
            training.publish()
        finally:
            sys.setprofile(None)
    training.publisher.close()
    assert max(calls) <= 1.5 * statistics.median(calls)
    squashed = [step for step in training.require_exact(url) if step.base is not None and step.version - step.base > 1]
    assert squashed


def test_no_publish_waits_for_upkeep(url, monkeypatch):
    """While a squashed patch is on its way, versions go on; it is in the store once it has arrived, and exact."""
    training = Training(url, ladder=(4, 8))
    with held_up(monkeypatch) as go_on:
        for _ in range(5):
            training.publish()
        assert go_on.begun.wait(60)
        for _ in range(3):
            training.publish()
        assert training.publisher.version == 7
    training.publisher.close()
    assert (0, 4) in {(step.base, step.version) for step in training.require_exact(url)}


def test_upkeep_that_falls_behind_says_so(url, monkeypatch):
    """Rungs that ended while another was made are left out, and the report of a later version tells."""
    training = Training(url, ladder=(2, 4))
    notes = []
    with held_up(monkeypatch):
        for _ in range(30):
            notes += training.publish().notes
    training.publisher._maintenance.finish()
    for _ in range(6):
        notes += training.publish().notes
        training.publisher._maintenance.finish()
    training.publisher.close()
    assert any("no squashed patches" in note for note in notes)
    training.require_exact(url)


def test_an_anchor_is_of_its_version_whatever_is_written_meanwhile(url, monkeypatch):
    """Weights that are copied for an anchor while publishes write to them give the bits of one version."""
    training = Training(url, anchor_after=0.0, ladder=None, grace=0.0)
    real = maintenance.Ladder.frozen
    copies = 0

    def copy_between_publishes(self, weights, version, expected, threads):
        nonlocal copies
        copies += 1
        if copies == 1:
            for _ in range(3):
                training.publish()  # the way back of each is added before it writes
        return real(self, weights, version, expected, threads)

    training.publish()
    # In the thread of upkeep itself: a publish from another one would end before the copy, or after it.
    monkeypatch.setattr(maintenance.Ladder, "frozen", copy_between_publishes)
    training.publish()
    training.publisher._maintenance.finish()
    training.publisher.close()
    assert copies >= 1
    anchors = [step.version for step in training.require_exact(url) if step.base is None]
    assert anchors


def test_closing_waits_for_what_is_due(url):
    """Who closes a publisher finds the anchor of the last version in the store."""
    training = Training(url, anchor_after=0.0)
    training.publish()
    training.publish()
    training.publisher.close()
    assert [step.version for step in training.require_exact(url) if step.base is None] == [0, 1]


def test_nothing_is_collected_while_a_version_is_sent(url, monkeypatch):
    """With no grace at all, objects of the version that is just being sent stay: nothing refers to them yet."""
    training = Training(url, anchor_after=0.0, keep_anchors=1, grace=0.0)
    real = maintenance.RunWriter.send

    def send(self, *arguments):
        sent = real(self, *arguments)
        if threading.current_thread().name != "sparserl-upkeep":
            training.publisher._maintenance._is_collection_due = True
            training.publisher._maintenance._collect()
        return sent

    monkeypatch.setattr(maintenance.RunWriter, "send", send)
    for _ in range(6):
        training.publish()
    training.publisher.close()
    training.require_exact(url)


def test_what_fails_behind_a_publish_is_told_by_the_next(url, monkeypatch):
    """A publish has returned when its upkeep fails: the next report has the note, or the log when there is none."""
    training = Training(url, anchor_after=0.0)
    training.publish()

    has_returned = threading.Event()

    def fail(*_arguments):
        assert has_returned.wait(60)
        raise Unavailable("the link is down")

    monkeypatch.setattr(maintenance.RunWriter, "amend", fail)
    assert training.publish().notes == ()
    has_returned.set()
    training.publisher._maintenance.finish()
    monkeypatch.undo()
    assert {"the link is down" in note for note in training.publish().notes} == {True}
    training.publisher.close()
    assert 2 in [step.version for step in training.require_exact(url) if step.base is None]


def test_a_way_back_that_cannot_be_kept_costs_no_run(url, monkeypatch):
    """The head has moved when old bits are kept for squashed patches: without room for them, the run goes on."""
    training = Training(url)
    run = training.publish().run

    def fail(*_arguments, **_options):
        raise MemoryError

    monkeypatch.setattr("sparserl.patch.compare.Captured.back", fail)
    assert any("no squashed patches" in note for note in training.publish().notes)
    monkeypatch.undo()
    assert training.publish().run == run
    training.publisher.close()
    training.require_exact(url)


def test_upkeep_outlives_any_error(url, monkeypatch):
    """Whatever its libraries raise, such as a GPU that is full, the next report says it and the next upkeep begins."""
    training = Training(url, anchor_after=0.0)
    training.publish()

    def fail(*_arguments):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(maintenance.Ladder, "frozen", fail)
    notes = [*training.publish().notes]
    training.publisher._maintenance.finish()
    monkeypatch.undo()
    notes += training.publish().notes
    training.publisher.close()
    assert any("out of memory" in note for note in notes)
    assert 2 in [step.version for step in training.require_exact(url) if step.base is None]


def test_nothing_is_kept_where_there_are_no_rungs(url, monkeypatch):
    """Ways back that only serve a copy under way go with it, however many versions come meanwhile."""
    training = Training(url, ladder=None, anchor_after=100)
    with held_up(monkeypatch, "leases") as go_on:
        monkeypatch.setattr(maintenance.Maintenance, "_add_pinned_if_due", lambda self, _: self._writer.leases())
        for _ in range(12):
            training.publish()
        assert go_on.begun.wait(60)
    training.publisher._maintenance.finish()
    training.publish()
    training.publisher._maintenance.finish()
    assert len(training.publisher._maintenance._ladder._back) <= 1
    training.publisher.close()


def test_a_failure_is_known_at_exit_however_soon_it_comes(monkeypatch):
    """Work that has failed before its thread is seen to run waits to be reported; work that went well does not."""
    start = threading.Thread.start

    def run_to_the_end(self):
        start(self)
        self.join()

    monkeypatch.setattr(threading.Thread, "start", run_to_the_end)
    failed = background.BackgroundPublish(lambda: 1 / 0)
    done = background.BackgroundPublish(lambda: None)
    assert failed in background._pending
    assert done not in background._pending
    with pytest.raises(ZeroDivisionError):
        failed.result()
    assert failed not in background._pending
