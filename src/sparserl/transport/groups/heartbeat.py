"""The store of a process group, kept on a thread of its own: beats, alarms, and a name that no other group has had.

A store outlives its groups: where one was destroyed and built anew, the notes of the old one are still there, under the
same names. So the notes of a group stand under a name of its own. Rank 0 makes it, and tells it to each rank that asks.
A rank asks in the name of a random word, which only an answer to itself can have.
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

_words: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()  # of each group: its name, or who asks for it


class Clerk:
    """Does with the store what it is asked, so that nobody has to wait for a store that hangs.

    Work is handed the notes of the group; None as long as rank 0 has not told their name.
    """

    def __init__(self, group: Any, rank: int, size: int) -> None:
        from torch.distributed import distributed_c10d as c10d

        self._prefixed, self._groups = c10d.PrefixStore, c10d._world.pg_map  # noqa: SLF001
        self._store = c10d.PrefixStore("sparserl", c10d._get_process_group_store(group))  # noqa: SLF001
        self._group, self._rank, self._size = weakref.ref(group), rank, size
        self._word = _words.setdefault(group, secrets.token_hex(8))
        self._notes = self._named(self._word) if rank == 0 else None
        self._asks, self._answered = False, 0
        self._asked: queue.SimpleQueue[tuple[Callable[[Any], Any], Future[Any]] | None] = queue.SimpleQueue()
        self.alarm = threading.Event()
        threading.Thread(target=self._serve, name="sparserl-beat", daemon=True).start()

    def ask(self, work: Callable[[Any], T]) -> Future[T]:
        future: Future[T] = Future()
        self._asked.put((work, future))
        return future

    def stop(self) -> None:
        self._asked.put(None)

    def _serve(self) -> None:
        due, pause = 0.0, 0.01  # ranks that come together find each other at once
        while True:
            if time.monotonic() >= due:
                pause = min(1.3 * pause, PERIOD)
                due = time.monotonic() + pause
                self._beat()
            try:
                asked = self._asked.get(timeout=max(0.0, due - time.monotonic()))
            except queue.Empty:
                continue
            if asked is None:
                return
            work, future = asked
            try:
                self._learn()
                future.set_result(work(self._notes))
            except BaseException as error:  # noqa: BLE001  # raised again where it was asked
                future.set_exception(error)

    def _beat(self) -> None:
        try:
            self._learn()
            self._answer()
            if self._notes is not None:
                self._notes.add(f"beat/{self._rank}", 1)
                if self._notes.check([ALARM]):
                    self.alarm.set()
        except RuntimeError:
            return  # whoever asks something will hear of it

    def _learn(self) -> None:
        """Ask for the name of the group, and take it when rank 0 has told it."""
        if self._notes is not None:
            return
        if not self._asks:
            self._store.set(f"asks/{self._rank}", self._word)
            self._store.add("asks", 1)
            self._asks = True
        if self._store.check([f"name/{self._word}"]):
            self._notes = self._named(self._store.get(f"name/{self._word}").decode())

    def _answer(self) -> None:
        """Tell the name to all ranks that have asked since the last time, unless the group was destroyed meanwhile."""
        if self._rank == 0 and self._group() in self._groups:
            asks = self._store.add("asks", 0)
            if asks != self._answered:
                for name in (f"asks/{rank}" for rank in range(1, self._size)):
                    if self._store.check([name]):
                        self._store.set(f"name/{self._store.get(name).decode()}", self._word)
                self._answered = asks

    def _named(self, name: str) -> Any:
        return self._prefixed(name, self._store)
