"""A few bytes from every rank of a process group to every other: how the ranks of a sharded trainer agree.

Ranks must be in step: what one says belongs to a call (of `publish`) and a stage of it, and is paired with nothing
else. A rank that leaves a call in the middle says so, and the others leave it too.
"""

from __future__ import annotations

import json
import time
import weakref
from typing import Any

from ...errors import PeerLost, SessionError
from .line import Line

_LOOK = 0.2  # seconds between looks for ranks that have left
_made: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # how many were made on each group


class Ranks:
    """The ranks of a process group. Notes go through its store: nothing is broadcast, so trainers may go on meanwhile.

    timeout: seconds that a rank is waited for; a process that was stopped or killed is noticed sooner, and named.
    """

    def __init__(self, process_group: Any, timeout: float) -> None:
        self._line = Line(process_group, timeout)
        self.rank, self.size = self._line.rank, self._line.size
        group = self._line.group
        _made[group] = _made.get(group, 0) + 1
        self._name = f"writers/{_made[group]}"
        self._call, self._stage = 0, 0
        self._told: list[str] = []  # notes that some rank may still have to read
        self._looked = 0.0

    def begin(self) -> None:
        """A call begins, on this rank."""
        self._call, self._stage = self._call + 1, 0

    def leave(self, why: str) -> None:
        """Leave the call in the middle; who waits for this rank is told."""
        if self._line.broken is None:
            self._line.tell(f"{self._name}/left/{self.rank}", json.dumps([self._call, why[:500]]).encode())

    def all_gather(self, what: str, data: bytes) -> list[bytes]:
        """What every rank has to say, by rank, at a stage of the call."""
        self._line.require()
        self._stage += 1
        at = f"{self._name}/{self._call}/{self._stage}"
        notes = {rank: f"{at}/{rank}" for rank in range(self.size)}
        self._told.append(notes[self.rank])
        try:
            self._line.tell(notes[self.rank], what.encode() + b"\n" + data)
            heard = self._line.hear(notes, f"{what} with the others", look=lambda: self._require_there(notes))
        except PeerLost as error:
            raise self._line.lose(error) from None
        self._line.forget(self._told[:-1])  # who is at this stage has read what was said before
        self._told = self._told[-1:]
        said = [heard[rank].partition(b"\n") for rank in range(self.size)]
        for rank, (stage, _, _) in enumerate(said):
            if stage != what.encode():
                raise SessionError(f"rank {rank} is at {stage.decode()!r}, rank {self.rank} at {what!r}")
        return [data for _, _, data in said]

    def _require_there(self, notes: dict[int, str]) -> None:
        """Raise if a rank that is waited for has left this call; looks now and then."""
        if time.monotonic() - self._looked < _LOOK:
            return
        self._looked = time.monotonic()
        for rank, name in notes.items():
            found = self._line.peek(f"{self._name}/left/{rank}")
            call, why = (0, "") if found is None else json.loads(found)
            if call >= self._call and self._line.peek(name) is None:
                raise SessionError(f"rank {rank} left the publish: {why}")

    def close(self) -> None:
        self._line.close()
