"""One publish in the background: at most one in flight, and what went wrong with it is raised by the next call.

A script may end while its last publish is in flight. The interpreter then waits for it, for a while; if it fails, or
takes longer, that is said on stderr and the process ends with exit code 1.
"""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401  # ends all pools at exit, unless they were asked to wait: see below
import os
import sys
import threading
from collections.abc import Callable

from .report import SyncReport

EXIT_SECONDS = 300.0  # that the end of a process waits for a publish
_PATIENCE = 2.0  # seconds of that in silence
_in_flight: set[Flight] = set()


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

        thread = threading.Thread(target=fly, name="sparserl-publish", daemon=True)
        thread.start()
        self._thread = thread
        _in_flight.add(self)

    def settle(self) -> SyncReport | None:
        """Wait for what is in flight; returns its report, or raises what went wrong with it."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        _in_flight.discard(self)
        failure, self._failure = self._failure, None
        report, self._report = self._report, None
        if failure is not None:
            raise failure
        return report

    def trouble_at_exit(self) -> str | None:
        """Wait for what is in flight, but not for ever; what went wrong with it, if anything did."""
        assert self._thread is not None
        self._thread.join(_PATIENCE)
        if self._thread.is_alive():
            _say(f"a publish is in flight; waiting for it up to {EXIT_SECONDS:.0f} s")
            self._thread.join(EXIT_SECONDS - _PATIENCE)
        if self._thread.is_alive():
            return f"a publish was in flight for {EXIT_SECONDS:.0f} s at exit, and was given up"
        if self._failure is not None:
            return f"the publish that was in flight failed: {type(self._failure).__name__}: {self._failure}"
        return None


def _finish_at_exit() -> None:
    """Let no publish be lost because nobody has waited for it."""
    troubles = [trouble for flight in list(_in_flight) if (trouble := flight.trouble_at_exit()) is not None]
    if not troubles:
        return
    for trouble in troubles:
        _say(f"error: {trouble}")
    atexit._run_exitfuncs()  # noqa: SLF001  # `os._exit`, which alone can set the exit code here, would skip them
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def _say(text: str) -> None:
    print(f"sparserl: {text}", file=sys.stderr, flush=True)  # noqa: T201  # nobody is left to be told in another way


# Plain exit handlers run when pools of threads take no more work, and a publish needs some. These run before that, the
# one that was registered last before all others.
threading._register_atexit(_finish_at_exit)  # type: ignore[attr-defined]  # noqa: SLF001
