"""One publish in the background: at most one in flight, and what went wrong with it is raised by the next call."""

from __future__ import annotations

import threading
from collections.abc import Callable

from .report import SyncReport


class Flight:
    """Work on a thread of its own, whose report or failure is handed over once."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._report: SyncReport | None = None

    def launch(self, work: Callable[[], SyncReport]) -> None:
        """Do the work in the background; what flew before must have been settled."""

        def fly() -> None:
            try:
                self._report = work()
            except BaseException as error:  # noqa: BLE001  # raised again by `settle`
                self._failure = error

        self._thread = threading.Thread(target=fly, name="sparserl-publish", daemon=True)
        self._thread.start()

    def settle(self) -> SyncReport | None:
        """Wait for what is in flight; returns its report, or raises what went wrong with it."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        report, self._report = self._report, None
        if failure is not None:
            raise failure
        return report
