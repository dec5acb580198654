"""A publish in the background: at most one at a time, and what went wrong with it is never lost.

A script may end while its last publish is running. The interpreter then waits for it, for a while; if it fails, or
takes longer, that is printed on stderr and the process ends with exit code 1.
"""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401  # ends all pools at exit, unless they were asked to wait: see below
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

from ..errors import SessionError
from .report import SyncReport

EXIT_SECONDS = 300.0  # that the end of a process waits for a publish
_SILENT_SECONDS = 2.0  # of these, before it says that it waits
_pending: set[BackgroundPublish] = set()  # of this process: running, or failed and not yet reported


class BackgroundPublish:
    """A publish that runs while the trainer goes on: what `publish_in_background` returns.

    Nothing has to be done with it. The publisher's next call waits for it, and so do `close` and the end of the
    process; each of them raises or reports its error, unless `result` has raised it before.

    >>> import numpy as np, sparserl, tempfile
    >>> weights = {"w": np.zeros(1000, np.float32)}
    >>> publisher = sparserl.Publisher(f"file://{tempfile.mkdtemp()}", weights)
    >>> background = publisher.publish_in_background()
    >>> weights["w"][7] = 1  # belongs to the next version
    >>> background.result().version
    0
    >>> background.done()
    True
    """

    def __init__(self, work: Callable[[], Any], what: str = "a publish") -> None:
        self._process = os.getpid()
        self._what = what
        self._finished = threading.Event()
        self._report: Any = None
        self._failure: BaseException | None = None
        self._is_reported = False
        name = f"sparserl-{what.removeprefix('a ')}"
        thread = threading.Thread(target=self._run, args=(work,), name=name, daemon=True)
        _pending.add(self)  # before it begins: it may have failed when `start` returns
        try:
            thread.start()
        except RuntimeError:
            _pending.discard(self)
            raise

    def done(self) -> bool:
        """Whether the publish has ended, well or not."""
        return self._finished.is_set()

    def result(self, timeout: float | None = None) -> SyncReport:
        """Wait for the publish to end.

        Args:
            timeout: How many seconds to wait at most; None to wait as long as it takes.

        Returns:
            The report of the version that was published.

        Raises:
            TimeoutError: The publish is still running after `timeout` seconds.
            SparserlError: The publish failed; this is the error that `publish` would have raised.
        """
        if self._process != os.getpid():
            raise SessionError("the publish runs in the process that this one was forked from")
        if not self._finished.wait(timeout):
            raise TimeoutError(f"the publish is still running after {timeout:g} s")
        self._is_reported = True
        _pending.discard(self)
        if self._failure is not None:
            raise self._failure
        report: SyncReport = self._report
        return report

    def finish(self) -> None:
        """Wait for the publish to end, and raise its error unless that was done before."""
        if self._process == os.getpid():
            self._finished.wait()
            if not self._is_reported:
                self.result()

    def problem_at_exit(self) -> str | None:
        """Wait for the publish to end, but not for ever; what went wrong with it, if anything did."""
        if not self._finished.wait(_SILENT_SECONDS):
            _print(f"{self._what} is running; waiting for it for up to {EXIT_SECONDS:.0f} s")
            self._finished.wait(EXIT_SECONDS - _SILENT_SECONDS)
        if not self.done():
            return f"{self._what} was still running {EXIT_SECONDS:.0f} s after the script had ended, and was abandoned"
        if self._failure is not None:
            return f"{self._what} in the background failed: {type(self._failure).__name__}: {self._failure}"
        return None

    def _run(self, work: Callable[[], SyncReport]) -> None:
        try:
            self._report = work()
        except BaseException as error:  # noqa: BLE001  # raised again by `result`
            self._failure = error
        finally:
            self._finished.set()
            if self._failure is None:
                _pending.discard(self)


class BackgroundSlot:
    """The place for the one publish that a publisher may have in the background."""

    def __init__(self) -> None:
        self._publish: BackgroundPublish | None = None

    def start(self, work: Callable[[], SyncReport]) -> BackgroundPublish:
        """Do the work in the background; the publish before it must have been finished."""
        self._publish = BackgroundPublish(work)
        return self._publish

    def finish(self) -> None:
        """Wait for the publish in the background, if there is one, and raise its error unless that was done before."""
        publish = self._publish
        if publish is None:
            return
        try:
            publish.finish()
        finally:
            if publish.done():  # not so after an interrupt: then the next call waits again
                self._publish = None


def _finish_at_exit() -> None:
    """Let no publish be lost because nobody has waited for it."""
    problems = [problem for publish in list(_pending) if (problem := publish.problem_at_exit()) is not None]
    if not problems:
        return
    for problem in problems:
        _print(f"error: {problem}")
    atexit._run_exitfuncs()  # noqa: SLF001  # `os._exit`, which alone can set the exit code here, would skip them
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def _print(text: str) -> None:
    print(f"sparserl: {text}", file=sys.stderr, flush=True)  # noqa: T201  # there is no caller left to raise to


# Plain exit handlers run when pools of threads take no more work, and a publish needs some. These run before that, the
# one that was registered last before all others.
threading._register_atexit(_finish_at_exit)  # type: ignore[attr-defined]  # noqa: SLF001
os.register_at_fork(after_in_child=_pending.clear)  # a child has none of its parent's threads
