"""What metrics, recordings and others are told about a session: the methods of a `Callback`."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from ..errors import SessionError
from ..transport.stores.base import Store
from .logs import log_version
from .report import SyncReport

_log = logging.getLogger("sparserl.callbacks")


class Callback:
    """Base of what a session calls when something happened, on the thread on which it did.

    Every method does nothing by default. What a callback raises is logged, once for each callback, and changes nothing.

    >>> import numpy as np, sparserl, tempfile
    >>> class Prints(sparserl.metrics.Callback):
    ...     def published(self, report):
    ...         print("version", report.version)
    >>> weights = {"w": np.zeros(1000, np.float32)}
    >>> _ = sparserl.Publisher(f"file://{tempfile.mkdtemp()}", weights, callbacks=[Prints()]).publish()
    version 0
    """

    def published(self, report: SyncReport) -> None:
        """A version was published: it is in the store, or all ranks have committed it."""

    def committed(self, report: SyncReport) -> None:
        """A version was committed; `report.seconds["commit"]` is how long the targets were paused."""

    def failed(self, stage: str, error: BaseException) -> None:
        """`publish`, `stage` or `commit` raised an error."""

    def retried(self) -> None:
        """A request to the store failed, and is made again."""


class Callbacks(Callback):
    """The log, and several callbacks, as one callback that never raises.

    place: where versions go to or come from, for the log.
    """

    def __init__(self, callbacks: Sequence[Callback] = (), place: str = "") -> None:
        if not isinstance(callbacks, Sequence):
            raise SessionError(f"callbacks is {callbacks!r}; it must be a sequence of callbacks, such as a list")
        self._callbacks = tuple(callbacks)
        self.place = place
        self._logged: set[int] = set()  # those that have raised once

    def published(self, report: SyncReport) -> None:
        log_version("published" if report.version else f"new run {report.run}: published", self.place, report)
        self._call("published", report)

    def committed(self, report: SyncReport) -> None:
        log_version("committed", self.place, report)
        self._call("committed", report)

    def failed(self, stage: str, error: BaseException) -> None:
        self._call("failed", stage, error)

    def retried(self) -> None:
        self._call("retried")

    @contextmanager
    def failures(self, stage: str) -> Iterator[None]:
        """Call `failed` for errors that are raised inside."""
        try:
            yield
        except Exception as error:
            self.failed(stage, error)
            raise

    def watch_retries(self, store: Store) -> None:
        """Call `retried` whenever a request to a store is made again: each time it sleeps first."""
        retry = getattr(store, "retry", None)
        if retry is None or not self._callbacks:
            return

        def sleep(seconds: float) -> None:
            self.retried()
            retry.sleep(seconds)

        store.retry = replace(retry, sleep=sleep)  # type: ignore[attr-defined]

    def _call(self, event: str, *arguments: object) -> None:
        for number, callback in enumerate(self._callbacks):
            try:
                getattr(callback, event)(*arguments)
            except Exception:  # noqa: BLE001  # whatever it is, a sync does not depend on it
                if number not in self._logged:
                    self._logged.add(number)
                    _log.exception(
                        "%r raised in %s(); it will be called again, but this is not logged again", callback, event
                    )
