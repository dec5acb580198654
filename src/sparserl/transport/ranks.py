"""A few bytes from every rank of a process group to every other: how the ranks of a sharded trainer agree."""

from __future__ import annotations

import weakref
from typing import Any

from ..errors import PeerLost
from .collective import Line

_counts: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # of each group: it outlives publishers


class Ranks:
    """The ranks of a process group. Notes go through its store: nothing is broadcast, so trainers may go on meanwhile.

    timeout: seconds that a rank is waited for; one that hangs or is gone is noticed sooner, and named.
    """

    def __init__(self, process_group: Any, timeout: float) -> None:
        self._line = Line(process_group, timeout)
        self.rank, self.size = self._line.rank, self._line.size

    def all_gather(self, data: bytes) -> list[bytes]:
        """What every rank has to say, by rank."""
        self._line.require()
        group = self._line._group  # noqa: SLF001
        number = _counts[group] = _counts.get(group, 0) + 1
        try:
            self._line.tell(f"writers/{number}/{self.rank}", data)
            notes = {rank: f"writers/{number}/{rank}" for rank in range(self.size)}
            heard = self._line.hear(notes, "publish with the others")
        except PeerLost as error:
            raise self._line.lose(error) from None
        self._line.forget([f"writers/{number - 1}/{self.rank}"])  # who is here has read all of the last ones
        return [heard[rank] for rank in range(self.size)]

    def close(self) -> None:
        self._line.close()
