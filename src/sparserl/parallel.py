"""Work on threads, results in order, a bounded number in flight."""

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
_PAUSE = 2e-5  # seconds between two looks at what jobs wait for
Progress = Callable[[int], None]  # called with the dense bytes just finished
_Work = tuple[Future[Any], Callable[[Any], Any], Any]  # what it becomes, what does it, and to what


def default_threads() -> int:
    """As many as the cores this process may use, up to 16, or what SPARSERL_THREADS says.

    Memory is the limit of this work: more threads than saturate it only hold more pieces in flight.
    """
    if said := os.environ.get("SPARSERL_THREADS"):
        if not said.isdecimal():
            raise SparserlError(f"SPARSERL_THREADS is {said!r}, not a number of threads")
        return max(1, int(said))
    try:
        return min(16, len(os.sched_getaffinity(0)))
    except AttributeError:  # not on Linux
        return min(16, os.cpu_count() or 1)


def require_threads(threads: int | None) -> None:
    """Refuse what is not a number of threads; None stands for `default_threads`."""
    if threads is not None and (not isinstance(threads, int) or isinstance(threads, bool) or threads < 1):
        raise SparserlError(f"threads is {threads!r}; it must be an integer, 1 or more, or None to use every core")


def thread_count(threads: int | None) -> int:
    """How many threads to use: so many, or where none are given `default_threads`."""
    require_threads(threads)
    return default_threads() if threads is None else threads


class _Pool:
    """Threads that do what came first, but urgent work before any other."""

    def __init__(self, threads: int) -> None:
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="sparserl")
        self._urgent = deque[_Work]()

    def submit(self, work: Callable[[T], R], item: T, urgent: bool) -> Future[R]:
        if not urgent:
            return self._threads.submit(self._in_turn, work, item)
        future = Future[R]()
        self._urgent.append((future, work, item))
        self._threads.submit(self._hurry)
        return future

    def _in_turn(self, work: Callable[[T], R], item: T) -> R:
        while self._hurry():
            pass
        return work(item)

    def _hurry(self) -> bool:
        """Do some urgent work; False if there is none, since another thread was faster."""
        try:
            future, work, item = self._urgent.popleft()
        except IndexError:
            return False
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(work(item))
            except BaseException as error:  # noqa: BLE001  # is raised again where the result is asked for
                future.set_exception(error)
                del future  # which has the error, which has this frame
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
    """`map` on threads, lazily: at most so many items are taken ahead of the consumer, else two per thread.

    Threads are shared. What is `urgent` does not wait for other work that nobody has begun: a bucket should be on its
    way before more weights are compared.
    """
    return _ordered(work, items, thread_count(threads), ahead, urgent)  # checked here, not when results are asked for


def _ordered(work: Callable[[T], R], items: Iterable[T], threads: int, ahead: int | None, urgent: bool) -> Iterator[R]:
    if threads == 1:
        yield from map(work, items)
        return
    pool = _pool(threads, os.getpid())  # a fork leaves its parent's threads behind
    flight: deque[Future[R]] = deque()
    try:
        for item in items:
            flight.append(pool.submit(work, item, urgent))
            while flight and (len(flight) >= (ahead or 2 * threads) or flight[0].done()):
                yield flight.popleft().result()
        while flight:
            yield flight.popleft().result()
    finally:
        wait([future for future in flight if not future.cancel()])  # nothing goes on behind the caller's back


class Waiting(Protocol):
    """What a job waits for."""

    def ready(self) -> bool:
        """Whether it need not wait any more."""


def in_turn(jobs: Iterable[Generator[Waiting, None, R]], most: int = 2) -> Iterator[R]:
    """What jobs return, in order. They pause where they would wait, and meanwhile one that need not goes on.

    At most so many are begun and not done; each takes its first step at once. While what one returned is in use, all
    others have something to wait for.
    """
    waiting, flight = iter(jobs), deque[_Job[R]]()
    while True:
        while sum(not job.done for job in flight) < most and (steps := next(waiting, None)) is not None:
            flight.append(_Job(steps))
        if not flight:
            return
        if (job := next((job for job in flight if not job.done and job.pause.ready()), None)) is not None:
            job.step()
        elif flight[0].done:
            yield flight.popleft().done[0]
        else:
            time.sleep(_PAUSE)


class _Job(Generic[R]):
    """A job that is begun: what it waits for, and what it returned."""

    def __init__(self, steps: Generator[Waiting, None, R]) -> None:
        self._steps, self.done = steps, list[R]()
        self.step()

    def step(self) -> None:
        try:
            self.pause = next(self._steps)
        except StopIteration as end:
            self.done.append(end.value)


def uninterrupted(work: Callable[[], object]) -> None:
    """Run `work` on a thread of its own: an interrupt comes before it or after it, never in between."""
    go = threading.Event()
    done = threading.Event()
    called_off = False
    raised: list[BaseException] = []

    def run() -> None:
        go.wait()
        try:
            if not called_off:
                work()
        except BaseException as error:  # noqa: BLE001  # is raised again below, on the caller's thread
            raised.append(error)
        finally:
            done.set()

    try:
        threading.Thread(target=run, name="sparserl-commit").start()
        go.set()
        done.wait()  # not `join`: a thread whose join was interrupted passes for dead
    except BaseException as error:
        if not go.is_set():
            called_off = True  # the thread may be there or not; either way it does nothing
            go.set()
            raise
        raised.append(error)
        _outlast(done, raised)
    if raised:
        raise raised[0]


def _outlast(done: threading.Event, raised: list[BaseException]) -> None:
    """Wait on, whatever is raised meanwhile."""
    while not done.is_set():
        try:
            done.wait()
        except BaseException as error:  # noqa: BLE001  # is raised again by the caller
            raised.append(error)
