"""What a session tells others about itself: metrics, recordings, whatever has a `Callback`."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from ..errors import SessionError
from ..transport.stores.base import Store
from .report import SyncReport

_log = logging.getLogger("sparserl.callbacks")


class Callback:
    """Is told what a publisher or a subscriber did, on the thread that did it. Every method does nothing by default.

    What a callback raises is logged, once for each callback, and changes nothing.
    """

    def published(self, report: SyncReport) -> None:
        """A version is in the store, or at all ranks."""

    def committed(self, report: SyncReport) -> None:
        """A version is what the targets hold; `report.seconds["commit"]` is how long that paused them."""

    def failed(self, stage: str, error: BaseException) -> None:
        """`publish`, `stage` or `commit` raised an error."""

    def retried(self) -> None:
        """A request to the store failed on the way, and is made again."""


class Callbacks(Callback):
    """Several callbacks as one that never raises."""

    def __init__(self, callbacks: Sequence[Callback] = ()) -> None:
        if not isinstance(callbacks, Sequence):
            raise SessionError(f"callbacks is {callbacks!r}; it must be a sequence of callbacks, such as a list")
        self._callbacks = tuple(callbacks)
        self._logged: set[int] = set()  # those that have raised once

    def published(self, report: SyncReport) -> None:
        self._tell("published", report)

    def committed(self, report: SyncReport) -> None:
        self._tell("committed", report)

    def failed(self, stage: str, error: BaseException) -> None:
        self._tell("failed", stage, error)

    def retried(self) -> None:
        self._tell("retried")

    @contextmanager
    def failures(self, stage: str) -> Iterator[None]:
        """Tell about errors that go through here."""
        try:
            yield
        except Exception as error:
            self.failed(stage, error)
            raise

    def hear_retries(self, store: Store) -> None:
        """Be told when requests to a store are made again: each time it sleeps first."""
        retry = getattr(store, "retry", None)
        if retry is None or not self._callbacks:
            return

        def sleep(seconds: float) -> None:
            self.retried()
            retry.sleep(seconds)

        store.retry = replace(retry, sleep=sleep)  # type: ignore[attr-defined]

    def _tell(self, event: str, *about: object) -> None:
        for number, callback in enumerate(self._callbacks):
            try:
                getattr(callback, event)(*about)
            except Exception:  # noqa: BLE001  # whatever it is, a sync does not depend on it
                if number not in self._logged:
                    self._logged.add(number)
                    _log.exception(
                        "%r raised in %s(); it will be called again, but this is not said again", callback, event
                    )
