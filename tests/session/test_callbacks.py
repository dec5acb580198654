"""Callbacks are told what happened, once and in order, and whatever they raise changes nothing."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sparserl
from sparserl.errors import NotFound, SessionError, Unavailable
from sparserl.session import Callback, SyncReport
from sparserl.transport.stores.base import Retry
from sparserl.transport.stores.opening import open_store
from tests.session.ranks import ranks, results


class Heard(Callback):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def published(self, report: SyncReport) -> None:
        self.events.append(("published", report))

    def committed(self, report: SyncReport) -> None:
        self.events.append(("committed", report))

    def failed(self, stage: str, error: BaseException) -> None:
        self.events.append((stage, type(error)))

    def retried(self) -> None:
        self.events.append("retried")


class Raises(Callback):
    """Fails at everything."""

    def published(self, report: SyncReport) -> None:
        raise ZeroDivisionError(f"published {report.version}")

    committed = published  # type: ignore[assignment]


def test_reports_are_told(tmp_path: Path) -> None:
    """The very reports that `publish` and `sync` return, those of a publish in the background among them."""
    heard, url = Heard(), f"file://{tmp_path}"
    weights, mine = {"w": np.zeros(100, np.float32)}, {"w": np.ones(100, np.float32)}
    with (
        sparserl.Publisher(url, weights, callbacks=[heard]) as publisher,
        sparserl.Subscriber(url, mine, callbacks=[heard]) as subscriber,
    ):
        reports = [publisher.publish(), subscriber.sync()]
        weights["w"][5] = 1
        reports.append(publisher.publish_in_background().result())
        weights["w"][6] = 1
        reports += [publisher.publish(), subscriber.sync()]
        assert subscriber.sync() is None
    assert [report for _, report in heard.events] == reports
    names = ["published", "committed", "published", "published", "committed"]
    assert [name for name, _ in heard.events] == names
    assert [report.behind for report in reports if report] == [None, None, None, None, 2]


def test_what_raises_is_logged_once_and_changes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Publishing and committing go on, others are told, and the log has one line for the callback."""
    heard, url = Heard(), f"file://{tmp_path}"
    weights, mine = {"w": np.zeros(100, np.float32)}, {"w": np.ones(100, np.float32)}
    with (
        caplog.at_level(logging.ERROR, "sparserl.callbacks"),
        sparserl.Publisher(url, weights, callbacks=[Raises(), heard]) as publisher,
        sparserl.Subscriber(url, mine, callbacks=[Raises(), heard]) as subscriber,
    ):
        for turn in range(3):
            weights["w"][turn] = 7
            publisher.publish()
            subscriber.sync()
    assert (mine["w"] == weights["w"]).all()
    assert len(heard.events) == 6
    assert len(caplog.records) == 2  # one of the publisher, one of the subscriber
    assert "ZeroDivisionError: published 0" in caplog.text


def test_failures_are_told(tmp_path: Path) -> None:
    """What `publish`, `stage` and `commit` raise is told, and raised."""
    heard, url = Heard(), f"file://{tmp_path}"
    mine = {"w": np.ones(100, np.float32)}
    subscriber = sparserl.Subscriber(url, mine, callbacks=[heard])
    with pytest.raises(NotFound):
        subscriber.stage()
    with pytest.raises(SessionError, match="nothing is staged"):
        subscriber.commit()
    weights = {"w": np.zeros(100, np.float32)}
    publisher = sparserl.Publisher(url, weights, callbacks=[heard])
    publisher.publish()
    weights["w"] = np.zeros(100, np.float16)
    for publish in (publisher.publish, publisher.publish_in_background):
        with pytest.raises(sparserl.SparserlError):
            publish()
    kinds = [event if event[0] != "published" else "published" for event in heard.events]
    assert kinds == [
        ("stage", NotFound),
        ("commit", SessionError),
        "published",
        ("publish", sparserl.errors.TensorMismatch),
        ("publish", sparserl.errors.TensorMismatch),
    ]


def test_retries_are_told() -> None:
    """Every request that is made again to a store that does not answer."""
    pytest.importorskip("obstore")
    heard, waits = Heard(), list[float]()
    store = open_store("http://127.0.0.1:9", retry=Retry(attempts=4, sleep=waits.append))
    subscriber = sparserl.Subscriber(store, {"w": np.zeros(3, np.float32)}, callbacks=[heard])
    with pytest.raises(Unavailable):
        subscriber.stage()
    assert heard.events == ["retried"] * 3 + [("stage", Unavailable)]
    assert len(waits) == 3


def over_a_group(rank: int, group: Any, _pipe: Any) -> list[str]:
    """Two versions, and what this rank's callback heard."""
    heard, weights = Heard(), {"w": np.full(50, rank + 1, np.float32)}
    if rank == 0:
        with sparserl.GroupPublisher(group, weights, callbacks=[Raises(), heard]) as publisher:
            publisher.publish()
            weights["w"][3] = 7
            publisher.publish()
    else:
        with sparserl.GroupSubscriber(group, weights, callbacks=[Raises(), heard]) as subscriber:
            subscriber.follow()
    return [f"{name} {report.version} {report.changed}" for name, report in heard.events]


@pytest.mark.long
def test_ranks_tell_too() -> None:
    """Over a process group both ends tell their callbacks the same versions."""
    pytest.importorskip("torch")
    with ranks(2, over_a_group) as started:
        first, second = results(started)
    assert first == ["published 0 50", "published 1 1"]
    assert [line.rpartition(" ")[0] for line in second] == ["committed 0", "committed 1"]
