"""How long calls of a store may take, and what ends them early.

The caller of a store sets a deadline around the call (`within`); the store reads it (`current`). Every wait is made of
short slices, so that a deadline, a cancelled transfer or a signal ends it soon.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from types import TracebackType
from typing import Generic, TypeVar

from ...errors import Unavailable
from ...parallel import ReadAhead

T = TypeVar("T")
R = TypeVar("R")
AT_ONCE = 8  # transfers
FLIGHT_BYTES = 128 << 20  # of objects that are on their way at a time; one that is larger comes alone
SLICE = 0.2  # seconds after which a wait checks whether it should go on


class Deadline:
    """Ends after some seconds, when it is cancelled, or when `stop()` is true; and with the deadline around it.

    `stop` is called only on the thread that made the deadline.
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
        """Seconds that are left; zero when it is over."""
        if self._cancelled.is_set():
            return 0.0
        if self._stop is not None and threading.get_ident() == self._owner and self._stop():
            self._cancelled.set()
            return 0.0
        left = max(0.0, self._end - time.monotonic())
        return left if self._around is None else min(left, self._around.left)

    @property
    def over(self) -> bool:
        """Whether no time is left."""
        return self.left <= 0.0

    def cancel(self) -> None:
        """End it now; from any thread."""
        self._cancelled.set()

    def require(self, label: str) -> None:
        """Raise `Unavailable` when it is over."""
        if self.over:
            raise Unavailable(f"{label}: not done in time")

    def sleep(self, seconds: float) -> None:
        """Sleep for some seconds, or until it is over."""
        end = time.monotonic() + seconds
        while (pause := min(SLICE, end - time.monotonic(), self.left)) > 0:
            self._cancelled.wait(pause)

    def result(self, future: Future[R], label: str) -> R:
        """Wait for the result of work on another thread. Raises `Unavailable` if it is not there in time."""
        while not future.done():
            self.require(label)
            futures.wait([future], timeout=min(SLICE, self.left))
        return future.result()

    def run(self, work: Callable[[T], R], item: T) -> R:
        """Call `work` with this deadline, on any thread."""
        token = _current.set(self)
        try:
            return work(item)
        finally:
            _current.reset(token)


_current: ContextVar[Deadline] = ContextVar("deadline", default=Deadline())  # noqa: B039  # never over, never changed


def current() -> Deadline:
    """The deadline of the calls that this thread makes."""
    return _current.get()


@contextmanager
def within(seconds: float | None = None, stop: Callable[[], bool] | None = None) -> Iterator[Deadline]:
    """Calls of stores in this block end after some seconds, or when `stop()` is true, with `Unavailable`."""
    deadline = Deadline(seconds, stop, current())
    token = _current.set(deadline)
    try:
        yield deadline
    finally:
        _current.reset(token)


class Transfers:
    """Threads that call stores. Their calls end with the deadline of the thread that started them or when it leaves.

    A bounded number of transfers is in flight.
    """

    def __init__(self, threads: int, label: str) -> None:
        self._label = label
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
        max_bytes: int = 0,
    ) -> Iterator[R]:
        """`map` on the threads, with results in order.

        Of all items in flight there are at most `max_bytes`, as `size` counts them; an item that is larger goes alone.
        """
        for future in ReadAhead[R](2 * self._threads, max_bytes).run(self._submit(work), items, size):
            yield current().result(future, self._label)
            del future  # and the bytes with it

    def sink(self, work: Callable[[T], R], max_bytes: int, on_result: Callable[[R], None]) -> Sink[T, R]:
        """`ahead` for items that are given one by one."""
        return Sink(self._submit(work), ReadAhead(2 * self._threads, max_bytes), on_result, self._label)

    def submit(self, work: Callable[[T], R], item: T) -> Future[R]:
        """Begin one transfer."""
        return self._pool.submit(self._deadline.run, work, item)

    def _submit(self, work: Callable[[T], R]) -> Callable[[T], Future[R]]:
        return lambda item: self.submit(work, item)


class Sink(Generic[T, R]):
    """Takes items to be transferred, and hands on their results in order.

    Whoever gives an item waits while too many, or too many bytes, are in flight.
    """

    def __init__(
        self,
        submit: Callable[[T], Future[R]],
        window: ReadAhead[R],
        on_result: Callable[[R], None],
        label: str,
    ) -> None:
        self._submit = submit
        self._window = window
        self._on_result = on_result
        self._label = label

    def add(self, item: T, nbytes: int) -> None:
        """Transfer one more item."""
        self._wait(self._window.make_room(nbytes))
        self._window.add(self._submit(item), nbytes)

    def finish(self) -> None:
        """Wait until all are transferred."""
        self._wait(self._window.rest())

    def _wait(self, futures: Iterator[Future[R]]) -> None:
        for future in futures:
            self._on_result(current().result(future, self._label))


def run_detached(work: Callable[[], R], discard: Callable[[R], object]) -> tuple[Future[R], Callable[[], None]]:
    """Start work that cannot be interrupted on a thread that nobody has to wait for.

    Returns:
        A future of the result, and a function to call if the result is not needed any more: then `discard` gets it.
    """
    future: Future[R] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001  # raised where the result is awaited
            future.set_exception(error)

    def abandon() -> None:
        future.add_done_callback(lambda done: None if done.exception() else discard(done.result()))

    threading.Thread(target=run, name="sparserl-detached", daemon=True).start()
    return future, abandon
