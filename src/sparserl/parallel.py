"""Work on threads: results in order, a bounded number of items in flight."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import lru_cache
from typing import Any, Generic, Protocol, TypeVar

from .errors import SparserlError

T = TypeVar("T")
R = TypeVar("R")
_POLL = 2e-5  # seconds between two looks at what jobs wait for
Progress = Callable[[int], None]  # called with the dense bytes just finished
_Task = tuple[Future[Any], Callable[[Any], Any], Any]  # a future, and the function and the argument for it


def default_threads() -> int:
    """As many threads as this process may use cores, up to 16, unless SPARSERL_THREADS sets the number.

    Memory bandwidth limits this work: more threads than saturate it only keep more data in flight.
    """
    if setting := os.environ.get("SPARSERL_THREADS"):
        if not setting.isdecimal():
            raise SparserlError(f"SPARSERL_THREADS is {setting!r}; set it to a number of threads, such as 8")
        return max(1, int(setting))
    try:
        return min(16, len(os.sched_getaffinity(0)))
    except AttributeError:  # not on Linux
        return min(16, os.cpu_count() or 1)


def require_threads(threads: int | None) -> None:
    """Refuse what is not a number of threads; None stands for `default_threads`."""
    if threads is not None and (not isinstance(threads, int) or isinstance(threads, bool) or threads < 1):
        raise SparserlError(f"threads is {threads!r}; it must be an integer, 1 or more, or None to use every core")


def thread_count(threads: int | None) -> int:
    """How many threads to use: the given number, or `default_threads` for None."""
    require_threads(threads)
    return default_threads() if threads is None else threads


class _Pool:
    """Threads that work on items in the order they came, but on urgent ones first."""

    def __init__(self, threads: int) -> None:
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="sparserl")
        self._urgent = deque[_Task]()

    def submit(self, work: Callable[[T], R], item: T, urgent: bool) -> Future[R]:
        if not urgent:
            return self._threads.submit(self._after_urgent, work, item)
        future = Future[R]()
        self._urgent.append((future, work, item))
        self._threads.submit(self._run_urgent)
        return future

    def _after_urgent(self, work: Callable[[T], R], item: T) -> R:
        while self._run_urgent():
            pass
        return work(item)

    def _run_urgent(self) -> bool:
        """Do one urgent task; False if there is none, because another thread took it."""
        try:
            future, work, item = self._urgent.popleft()
        except IndexError:
            return False
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(work(item))
            except BaseException as error:  # noqa: BLE001  # raised again where the result is read
                future.set_exception(error)
                del future  # it refers to the error, which refers to this frame
        return True


@lru_cache(maxsize=8)
def _pool(threads: int, _process: int) -> _Pool:
    return _Pool(threads)


def ordered(
    work: Callable[[T], R],
    items: Iterable[T],
    threads: int | None = None,
    ahead: int | None = None,
    *,
    urgent: bool = False,
) -> Iterator[R]:
    """`map` on threads, lazily: at most `ahead` items are in flight before the consumer, by default two per thread.

    Threads are shared. `urgent` work does not wait for other work that nobody has begun: a bucket should be written
    before more weights are compared.
    """
    return _ordered(work, items, thread_count(threads), ahead, urgent)  # checks `threads` now, not at the first result


def _ordered(work: Callable[[T], R], items: Iterable[T], threads: int, ahead: int | None, urgent: bool) -> Iterator[R]:
    if threads == 1:
        yield from map(work, items)
        return
    pool = _pool(threads, os.getpid())  # a fork does not inherit its parent's threads

    def submit(item: T) -> Future[R]:
        return pool.submit(work, item, urgent)

    window = ReadAhead[R](ahead or 2 * threads)
    try:
        yield from map(_result, window.run(submit, items, eager=True))
    finally:
        window.cancel()  # nothing goes on after the caller has left


def _result(future: Future[R]) -> R:
    return future.result()


class ReadAhead(Generic[R]):
    """Futures that were submitted ahead of their consumer: at most `most` of them, and at most `most_bytes` in all.

    0 bytes is no limit. An item that is larger than `most_bytes` is in flight alone.
    """

    def __init__(self, most: int, most_bytes: int = 0) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._futures: deque[tuple[Future[R], int]] = deque()
        self._nbytes = 0

    def run(
        self,
        submit: Callable[[T], Future[R]],
        items: Iterable[T],
        size: Callable[[T], int] = lambda _: 0,
        *,
        eager: bool = False,
    ) -> Iterator[Future[R]]:
        """Submit every item, as `size` and the limits allow, and give the futures in order.

        `eager` gives those that are done before more are submitted; else as many as possible are kept in flight.
        """
        for item in items:
            nbytes = size(item)
            yield from self.make_room(nbytes)
            self.add(submit(item), nbytes)
            while self._futures and (len(self._futures) >= self._most or (eager and self._futures[0][0].done())):
                yield self._pop()
        yield from self.rest()

    def make_room(self, nbytes: int) -> Iterator[Future[R]]:
        """Give the futures that must be done before one more, of so many bytes, may be in flight."""
        while self._futures and (len(self._futures) >= self._most or self._nbytes + nbytes > self._most_bytes > 0):
            yield self._pop()

    def add(self, future: Future[R], nbytes: int) -> None:
        """One more is in flight."""
        self._futures.append((future, nbytes))
        self._nbytes += nbytes

    def rest(self) -> Iterator[Future[R]]:
        """Give all futures that are left."""
        while self._futures:
            yield self._pop()

    def _pop(self) -> Future[R]:
        future, nbytes = self._futures.popleft()
        self._nbytes -= nbytes
        return future

    def cancel(self) -> None:
        """Cancel what has not begun, and wait for what has."""
        wait([future for future, _ in self._futures if not future.cancel()])


class Waiting(Protocol):
    """What a job waits for."""

    def ready(self) -> bool:
        """Whether the job can go on."""


def in_turn(jobs: Iterable[Generator[Waiting, None, R]], most: int = 2) -> Iterator[R]:
    """The results of jobs, in order. Where a job would wait, it pauses, and another one that need not wait goes on.

    At most `most` jobs are begun and not done; each takes its first step at once. While the consumer uses one result,
    all other jobs have something to wait for.
    """
    remaining = iter(jobs)
    begun = deque[_Job[R]]()
    while True:
        while sum(not job.results for job in begun) < most and (steps := next(remaining, None)) is not None:
            begun.append(_Job(steps))
        if not begun:
            return
        if (job := next((job for job in begun if not job.results and job.pause.ready()), None)) is not None:
            job.step()
        elif begun[0].results:
            yield begun.popleft().results[0]
        else:
            time.sleep(_POLL)


class _Job(Generic[R]):
    """A job that is begun: what it waits for, and its result once it is done."""

    def __init__(self, steps: Generator[Waiting, None, R]) -> None:
        self._steps = steps
        self.results = list[R]()
        self.step()

    def step(self) -> None:
        try:
            self.pause = next(self._steps)
        except StopIteration as end:
            self.results.append(end.value)


def uninterrupted(work: Callable[[], object]) -> None:
    """Run `work` on a thread of its own: an interrupt comes before it or after it, never in between."""
    go = threading.Event()
    done = threading.Event()
    called_off = False
    errors: list[BaseException] = []

    def run() -> None:
        go.wait()
        try:
            if not called_off:
                work()
        except BaseException as error:  # noqa: BLE001  # raised again below, on the caller's thread
            errors.append(error)
        finally:
            done.set()

    try:
        threading.Thread(target=run, name="sparserl-commit").start()
        go.set()
        done.wait()  # not `join`: a thread whose join was interrupted counts as ended
    except BaseException as error:
        if not go.is_set():
            called_off = True  # the thread may have started or not; in both cases it does nothing
            go.set()
            raise
        errors.append(error)
        errors += outlast(done)
    if errors:
        raise errors[0]


def outlast(done: threading.Event) -> list[BaseException]:
    """Wait until something is done, whatever is raised meanwhile, and return that.

    An event, not `join`: a thread whose join was interrupted counts as ended.
    """
    errors: list[BaseException] = []
    while not done.is_set():
        try:
            done.wait()
        except BaseException as error:  # noqa: BLE001  # the caller goes on when it is done
            errors.append(error)
    return errors
