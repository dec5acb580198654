"""How long work with a store may take, and how it ends before it is done.

Whoever calls a store says so around the call (`within`); the store asks for it (`current`). Every wait is cut into
slices, so that a deadline, a cancelled transfer or a signal ends it soon, wherever it is.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from types import TracebackType
from typing import TypeVar

from ...errors import Unavailable

T = TypeVar("T")
R = TypeVar("R")
SLICE = 0.2  # seconds after which a wait looks whether it shall go on


class Deadline:
    """Until a moment, until it is cancelled, or until `stop()` is true; and never longer than the one around it.

    `stop` is called on the thread that made the deadline, and on no other.
    """

    def __init__(
        self,
        seconds: float | None = None,
        stop: Callable[[], bool] | None = None,
        around: Deadline | None = None,
    ) -> None:
        self._end = math.inf if seconds is None else time.monotonic() + seconds
        self._stop = stop
        self._around = around
        self._owner = threading.get_ident()
        self._cancelled = threading.Event()

    @property
    def left(self) -> float:
        """Seconds; zero when it is over."""
        if self._cancelled.is_set():
            return 0.0
        if self._stop is not None and threading.get_ident() == self._owner and self._stop():
            self._cancelled.set()
            return 0.0
        left = max(0.0, self._end - time.monotonic())
        return left if self._around is None else min(left, self._around.left)

    @property
    def over(self) -> bool:
        """Whether nothing more shall be done."""
        return self.left <= 0.0

    def cancel(self) -> None:
        """End it now; from any thread."""
        self._cancelled.set()

    def require(self, what: str) -> None:
        """Raise `Unavailable` when it is over."""
        if self.over:
            raise Unavailable(f"{what}: not done within the time that there was for it")

    def sleep(self, seconds: float) -> None:
        """Do nothing for a while, or until it is over."""
        end = time.monotonic() + seconds
        while (pause := min(SLICE, end - time.monotonic(), self.left)) > 0:
            self._cancelled.wait(pause)

    def result(self, future: Future[R], what: str) -> R:
        """What comes of work elsewhere, if it comes in time."""
        while not future.done():
            self.require(what)
            futures.wait([future], timeout=min(SLICE, self.left))
        return future.result()

    def run(self, work: Callable[[T], R], item: T) -> R:
        """Do work for which this is the deadline, on whichever thread."""
        token = _current.set(self)
        try:
            return work(item)
        finally:
            _current.reset(token)


_current: ContextVar[Deadline] = ContextVar("deadline", default=Deadline())  # noqa: B039  # never over, never changed


def current() -> Deadline:
    """The deadline of the calls that this thread makes now."""
    return _current.get()


@contextmanager
def within(seconds: float | None = None, stop: Callable[[], bool] | None = None) -> Iterator[Deadline]:
    """Calls of stores inside end after so many seconds, or when `stop()` is true, with `Unavailable`."""
    deadline = Deadline(seconds, stop, current())
    token = _current.set(deadline)
    try:
        yield deadline
    finally:
        _current.reset(token)


class Transfers:
    """Threads that call stores. Their calls have the deadline of whoever waits for them, and end if that one leaves."""

    def __init__(self, threads: int, what: str) -> None:
        self._what = what
        self._deadline = Deadline(around=current())
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="sparserl-transfer")

    def __enter__(self) -> Transfers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._deadline.cancel()
        self._pool.shutdown(cancel_futures=True)

    def ahead(
        self,
        work: Callable[[T], R],
        items: Iterable[T],
        size: Callable[[T], int] = lambda _: 0,
        most: int = 0,
    ) -> Iterator[R]:
        """`map`, in order, with a bounded number in flight, and at most so many bytes of them: or one item alone."""
        flight: deque[tuple[Future[R], int]] = deque()
        in_flight = 0
        for item in items:
            nbytes = size(item)
            while flight and (len(flight) >= 2 * self._threads or in_flight + nbytes > most > 0):
                future, done = flight.popleft()
                yield current().result(future, self._what)
                del future  # and the bytes with it
                in_flight -= done
            flight.append((self._pool.submit(self._deadline.run, work, item), nbytes))
            in_flight += nbytes
        while flight:
            yield current().result(flight.popleft()[0], self._what)


def apart(work: Callable[[], R], leave: Callable[[R], object]) -> tuple[Future[R], Callable[[], None]]:
    """Work that cannot be interrupted, on a thread of its own that nobody has to wait for.

    Returns its future, and what to call if nobody wants it any more: `leave` is given the result, when it comes.
    """
    future: Future[R] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001  # whoever waits gets it
            future.set_exception(error)

    def abandon() -> None:
        future.add_done_callback(lambda done: None if done.exception() else leave(done.result()))

    threading.Thread(target=run, name="sparserl-apart", daemon=True).start()
    return future, abandon
