"""A few bytes from every rank of a process group to every other: how the ranks of a sharded trainer agree.

Ranks must be in step: a message belongs to one call (of `publish`) and one stage of it. A rank that leaves a call in
the middle says so, and the others leave it too.
"""

from __future__ import annotations

import json
import time
import weakref
from typing import Any

from ...errors import PeerLost, SessionError
from .line import Line

_LOOK = 0.2  # seconds between looks for ranks that have left
_made: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # how many were made for each group


class RankGather:
    """Exchanges messages between the ranks of a process group.

    They go through the store of the group. Nothing is broadcast, so that a trainer may use the group meanwhile.

    Args:
        process_group: the group; None is the group of all ranks.
        timeout: seconds that a rank is waited for. A process that was stopped or killed is noticed sooner, and named.
    """

    def __init__(self, process_group: Any, timeout: float) -> None:
        self._line = Line(process_group, timeout)
        self.rank = self._line.rank
        self.size = self._line.size
        group = self._line.group
        _made[group] = _made.get(group, 0) + 1
        self._name = f"writers/{_made[group]}"
        self._call = 0
        self._stage = 0
        self._written: list[str] = []  # notes that some rank may still have to read
        self._last_look = 0.0

    def begin(self) -> None:
        """Begin a call, on this rank."""
        self._call += 1
        self._stage = 0

    def leave(self, why: str) -> None:
        """Leave the call in the middle, and let the ranks that wait for this one know."""
        if self._line.broken is None:
            self._line.write_note(f"{self._name}/left/{self.rank}", json.dumps([self._call, why[:500]]).encode())

    def all_gather(self, label: str, data: bytes) -> list[bytes]:
        """The bytes of every rank, by rank, at one stage of the call. `what` names the stage."""
        self._line.require()
        self._stage += 1
        stage = f"{self._name}/{self._call}/{self._stage}"
        names = {rank: f"{stage}/{rank}" for rank in range(self.size)}
        self._written.append(names[self.rank])
        try:
            self._line.write_note(names[self.rank], label.encode() + b"\n" + data)
            notes = self._line.await_notes(names, f"{label} with the others", look=lambda: self._require_present(names))
        except PeerLost as error:
            raise self._line.mark_broken(error) from None
        self._line.delete_notes(self._written[:-1])  # a rank at this stage has read the notes of the one before
        self._written = self._written[-1:]
        messages = [notes[rank].partition(b"\n") for rank in range(self.size)]
        for rank, (rank_stage, _, _) in enumerate(messages):
            if rank_stage != label.encode():
                raise SessionError(f"rank {rank} is at {rank_stage.decode()!r}, rank {self.rank} at {label!r}")
        return [message for _, _, message in messages]

    def _require_present(self, names: dict[int, str]) -> None:
        """Now and then: raise if a rank that is waited for has left this call."""
        if time.monotonic() - self._last_look < _LOOK:
            return
        self._last_look = time.monotonic()
        for rank, name in names.items():
            note = self._line.read_note(f"{self._name}/left/{rank}")
            call, why = (0, "") if note is None else json.loads(note)
            if call >= self._call and self._line.read_note(name) is None:
                raise SessionError(f"rank {rank} left the publish: {why}")

    def close(self) -> None:
        """Stop the heartbeat."""
        self._line.close()
