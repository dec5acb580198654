"""One thread per group that counts up this rank's heartbeat, watches for alarms, and uses the store of the group.

A store outlives its groups: after a group was destroyed and built anew, the notes of the old one are still in it. So
every group keeps its notes under a random prefix, which rank 0 draws. Another rank requests the prefix with a random id
of its own, so that it cannot take the answer to an older request for an answer to its own.
"""

from __future__ import annotations

import queue
import secrets
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")

PERIOD = 0.5  # seconds between two beats
ALARM = "alarm"
_FIRST_PAUSE = 0.01  # seconds: ranks that start together should find each other at once

_ids: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()  # of each group: its prefix, or our request id


class Heartbeat:
    """Does all work with the store on its own thread, so that no caller is stuck with a store that hangs."""

    def __init__(self, group: Any, rank: int, size: int) -> None:
        from torch.distributed import distributed_c10d as c10d

        self._prefix_store = c10d.PrefixStore
        self._groups = c10d._world.pg_map  # noqa: SLF001
        self._store = c10d.PrefixStore("sparserl", c10d._get_process_group_store(group))  # noqa: SLF001
        self._group = weakref.ref(group)
        self._rank = rank
        self._size = size
        self._id = _ids.setdefault(group, secrets.token_hex(8))
        self._notes = self._prefixed(self._id) if rank == 0 else None
        self._requested = False
        self._answered = 0
        self._work: queue.SimpleQueue[tuple[Callable[[Any], Any], Future[Any]] | None] = queue.SimpleQueue()
        self.alarm = threading.Event()
        threading.Thread(target=self._run, name="sparserl-beat", daemon=True).start()

    def submit(self, work: Callable[[Any], T]) -> Future[T]:
        """Have the thread call `work` with the notes of the group; with None while their prefix is not known."""
        future: Future[T] = Future()
        self._work.put((work, future))
        return future

    def stop(self) -> None:
        """End the thread."""
        self._work.put(None)

    def _run(self) -> None:
        due = 0.0
        pause = _FIRST_PAUSE
        while True:
            if time.monotonic() >= due:
                pause = min(1.3 * pause, PERIOD)
                due = time.monotonic() + pause
                self._beat()
            try:
                item = self._work.get(timeout=max(0.0, due - time.monotonic()))
            except queue.Empty:
                continue
            if item is None:
                return
            work, future = item
            try:
                self._find_prefix()
                future.set_result(work(self._notes))
            except BaseException as error:  # noqa: BLE001  # raised where the result is awaited
                future.set_exception(error)

    def _beat(self) -> None:
        try:
            self._find_prefix()
            self._answer_requests()
            if self._notes is not None:
                self._notes.add(f"beat/{self._rank}", 1)
                if self._notes.check([ALARM]):
                    self.alarm.set()
        except RuntimeError:
            return  # the next caller of `submit` gets the error

    def _find_prefix(self) -> None:
        """Request the prefix of the group, and use it when rank 0 has answered."""
        if self._notes is not None:
            return
        if not self._requested:
            self._store.set(f"asks/{self._rank}", self._id)
            self._store.add("asks", 1)
            self._requested = True
        if self._store.check([f"name/{self._id}"]):
            self._notes = self._prefixed(self._store.get(f"name/{self._id}").decode())

    def _answer_requests(self) -> None:
        """On rank 0: answer all new requests, unless the group was destroyed meanwhile."""
        if self._rank != 0 or self._group() not in self._groups:
            return
        requests = self._store.add("asks", 0)
        if requests == self._answered:
            return
        for name in (f"asks/{rank}" for rank in range(1, self._size)):
            if self._store.check([name]):
                self._store.set(f"name/{self._store.get(name).decode()}", self._id)
        self._answered = requests

    def _prefixed(self, prefix: str) -> Any:
        return self._prefix_store(prefix, self._store)
