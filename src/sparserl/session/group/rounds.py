"""One sync over a line, in step on all ranks, as the notes that they leave for each other.

    lead         open ──────────────► course ─► frames ─────────► verdict ──────────► outcome
    other ranks        hello (held) ┘          (buckets) ack ┘            done ┘

A round is called off as long as no rank has committed: when a rank does not come, cannot stage, or cannot encode.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...errors import InvalidField, PeerLost, SessionError
from ...transport.groups.frames import Bucket
from ...transport.groups.line import Line, Traffic
from ...weights.digest import Digest
from ...weights.table import TensorTable
from ...wire import decode_table, decompress_table, encoded_table, limits, table_hash
from ..report import SyncReport
from ..store.records import canonical, sha256

Note = dict[str, Any]
_TEXT = 2000  # characters of an error that travel
_OPEN = "open"  # the newest round; one name for all of them
_FAREWELL = 1.0  # seconds
_ONE, _EACH = ("plan", "course", "verdict", "outcome"), ("hello", "share", "ack", "done")


class Closed(SessionError):
    """The publisher has closed; there will be no more versions."""


class Apart(SessionError):
    """Writers that do not start from one version: what they would send does not fit together."""


class Behind(SessionError):
    """A writer came with an earlier call of publish than the lead: the lead waits for its next one."""


@dataclass(frozen=True)
class Share:
    """The buckets of a patch that one rank sends: how many, with how many changes, and the length of the first."""

    rank: int
    count: int
    changed: int
    first: int


@dataclass(frozen=True)
class Leg:
    """One patch of a course; an anchor starts from nothing."""

    anchor: bool
    base: Digest
    result: Digest
    shares: tuple[Share, ...]

    @property
    def changed(self) -> int:
        return sum(share.changed for share in self.shares)

    @property
    def count(self) -> int:
        return sum(share.count for share in self.shares)


@dataclass(frozen=True)
class Course:
    """What one sync brings: patches that lead to a version, and files, by name and hash, with the anchor."""

    run: str
    created: float
    version: int
    digest: Digest
    legs: tuple[Leg, ...]
    files: tuple[tuple[str, str], ...] = ()
    file_share: Share = Share(0, 0, 0, 0)

    def start(self, held: Digest | None) -> int:
        """The first leg that is needed by whoever holds weights of this digest."""
        if held == self.digest:
            return len(self.legs)
        starts = [i for i, leg in enumerate(self.legs) if leg.base == held and not leg.anchor]
        if starts:
            return starts[-1]
        if self.legs and self.legs[0].anchor:
            return 0
        raise SessionError(f"what is sent starts neither from {held} nor from an anchor")

    def with_files(self, files: Mapping[str, bytes], rank: int) -> Course:
        """The same, and files that a rank sends behind the last leg."""
        named = tuple((name, sha256(data)) for name, data in files.items())
        first = len(next(iter(files.values()), b""))
        return replace(self, files=named, file_share=Share(rank, len(files), 0, first))

    def to_note(self) -> Note:
        legs = [[g.anchor, g.base.hex, g.result.hex, [list(vars(s).values()) for s in g.shares]] for g in self.legs]
        ends = {"run": self.run, "created": self.created, "version": self.version, "digest": self.digest.hex}
        return ends | {"legs": legs, "files": self.files, "file_share": list(vars(self.file_share).values())}

    @classmethod
    def of_note(cls, note: Note) -> Course:
        legs = tuple(
            Leg(anchor, Digest.from_hex(base), Digest.from_hex(result), tuple(Share(*s) for s in shares))
            for anchor, base, result, shares in note["legs"]
        )
        ends = note["run"], note["created"], note["version"], Digest.from_hex(note["digest"])
        return cls(*ends, legs, tuple((n, h) for n, h in note["files"]), Share(*note["file_share"]))


class Round:
    """The notes of one sync."""

    def __init__(self, line: Line, number: int, opened: Note) -> None:
        self.line, self.number, self.opened = line, number, opened

    def tell(self, kind: str, note: Note) -> None:
        """Leave a note: one that there is once, or one of this rank."""
        self.line.write_note(self._name(kind, self.line.rank), canonical(note))

    def hear(self, kind: str, ranks: Iterable[int], what: str, patience: float = 1.0) -> dict[int, Note]:
        """The notes of some ranks, waited for as long as the line allows, times `patience`."""
        names = {rank: self._name(kind, rank) for rank in ranks}
        heard = self.line.await_notes(names, what, patience * self.line.timeout)
        return {rank: json.loads(note) for rank, note in heard.items()}

    def there(self, kind: str) -> bool:
        """Whether a note that there is once is there."""
        return self.line.read_note(self._name(kind, 0)) is not None

    def _name(self, kind: str, rank: int) -> str:
        return f"{self.number}/{kind}" if kind in _ONE else f"{self.number}/{kind}/{rank}"


def told(error: BaseException) -> Note:
    """An error as a note."""
    return {"error": _text(error)}


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:_TEXT]


def failures(notes: dict[int, Note]) -> str:
    """Which ranks failed, and how; empty if none did."""
    return "; ".join(f"rank {rank}: {note['error']}" for rank, note in sorted(notes.items()) if "error" in note)


# -- the lead ----------------------------------------------------------------------------------------------------------


def open_round(
    line: Line, writers: Sequence[int], run: str, created: float, table: TensorTable, call: int = 0
) -> Round:
    """Begin a sync: from now on the other ranks may join it. The tensor table is told where it was not yet.

    call: which call of publish this is, on the lead.
    """
    encoded = encoded_table(table)
    hash = encoded.hash.hex()
    if line.read_note(f"table/{hash}") is None:
        line.write_note(f"table/{hash}", len(encoded.raw).to_bytes(8, "big") + encoded.compressed)
    number = line.number = line.number + 1
    old = number - 2  # nobody waits for its notes any more
    line.delete_notes([*(f"{old}/{kind}" for kind in _ONE), *(f"{old}/{k}/{r}" for k in _EACH for r in line.others)])
    opened = {"number": number, "writers": list(writers), "run": run, "created": created, "table": hash}
    opened["call"] = call
    line.write_note(_OPEN, canonical(opened))
    return Round(line, number, opened)


def close_rounds(line: Line) -> None:
    """Tell those who wait that no round will be opened any more, and give them a moment to hear it.

    The store of the group may go with this process.
    """
    line.number += 1
    line.write_note(_OPEN, canonical({"number": line.number, "closed": True}))
    with contextlib.suppress(PeerLost):
        line.await_notes({rank: f"{line.number}/bye/{rank}" for rank in line.others}, "leave", _FAREWELL)


def call_off(round: Round, error: BaseException) -> None:
    """There will be no frames in this round."""
    kind = {"afresh": isinstance(error, Apart), "again": isinstance(error, Behind)}
    round.tell("course", {"off": _text(error), **kind})


def judge(round: Round, ranks: Iterable[int], stage: Callable[[], BaseException | None] | None = None) -> None:
    """Hear from all ranks whether they have staged. Where one has not, tell that nobody is to commit, and raise.

    stage: what this rank does meanwhile; returns why it cannot commit. If all is well the verdict is still to be told.
    """
    try:
        own = None if stage is None else stage()
        failed = failures(round.hear("ack", ranks, "stage the version"))
        if own is not None:
            failed = "; ".join(filter(None, [f"rank {round.line.rank}: {_text(own)}", failed]))
    except PeerLost as error:
        round.tell("verdict", {"off": str(error)})
        raise round.line.mark_broken(error) from error
    except BaseException as error:
        round.tell("verdict", {"off": f"rank {round.line.rank}: {_text(error)}"})
        raise
    if failed:
        round.tell("verdict", {"off": failed})
        raise SessionError(f"the version was not committed anywhere: {failed}") from own


def committed(round: Round, ranks: Iterable[int]) -> str:
    """Which ranks did not commit, and why; empty if all did."""
    return failures(round.hear("done", ranks, "commit the version"))


# -- the others --------------------------------------------------------------------------------------------------------


def join_round(line: Line, lead: int, end: float | None, stop: Callable[[], bool] | None = None) -> Round | None:
    """The next round that the lead opens; None if it has opened none until then."""
    line.require()
    line.restart_silence()
    pause = 0.001
    while True:
        note = line.read_note(_OPEN)
        opened = {"number": 0} if note is None else json.loads(note)
        if opened["number"] > line.number:
            if "closed" in opened:
                line.write_note(f"{opened['number']}/bye/{line.rank}", b".")
                raise Closed(f"rank {lead} has closed: there will be no more versions")
            line.number = opened["number"]
            return Round(line, line.number, opened)
        line.require_no_alarm(f"waiting for rank {lead} to publish")
        if line.silent([lead]):
            raise line.mark_broken(PeerLost(f"rank {lead}, which publishes, does not answer: it hangs or is gone"))
        if (end is not None and time.monotonic() >= end) or (stop is not None and stop()):
            return None
        time.sleep(pause)
        pause = min(1.3 * pause, 0.05)


def hear_course(round: Round, lead: int) -> Note:
    """What the lead is going to send, or that it has called the round off.

    Frames may come as soon as all ranks have come: who leaves now would be missed in a broadcast, so all are told.
    """
    try:
        return round.hear("course", [lead], "say what it sends", 2.0)[lead]
    except PeerLost:
        raise
    except BaseException as error:
        round.line.abandon(f"{type(error).__name__} while waiting for rank {lead}")
        raise


def table_of(round: Round) -> tuple[TensorTable, bytes]:
    """The tensor table of a round, and its hash."""
    hash = bytes.fromhex(round.opened["table"])
    note = round.line.read_note(f"table/{hash.hex()}")
    size = 0 if note is None else int.from_bytes(note[:8], "big")
    if note is None or size > limits.TABLE_BYTES:
        raise InvalidField(f"the tensor table {hash.hex()} is not there, or too large")
    raw = decompress_table(note[8:], size)
    if table_hash(raw) != hash:
        raise InvalidField(f"the tensor table {hash.hex()} was altered")
    return decode_table(raw), hash


# -- all ---------------------------------------------------------------------------------------------------------------


def transfer(
    line: Line,
    course: Course,
    mine: Sequence[Iterator[Bucket]],
    files: Sequence[bytes],
    take: Callable[[int, bytes], None],
) -> None:
    """All frames of a course, in the same order on all ranks.

    mine: the buckets that this rank sends of each leg. What others send goes to `take`, with the number of its leg;
    files come after the last leg and have the number of legs.
    """
    legs = [*((leg.shares, own) for leg, own in zip(course.legs, mine, strict=True))]
    legs.append(((course.file_share,), iter(files)))
    for number, (shares, own) in enumerate(legs):
        for share in shares:
            if share.rank == line.rank:
                line.send(share.first, own, share.count)
                continue
            for bucket in line.receive(share.rank, share.first, share.count):
                take(number, bucket)


def report(course: Course, table: TensorTable, moved: Traffic, seconds: dict[str, float]) -> SyncReport:
    """What a sync did."""
    kind = "anchor" if course.legs and course.legs[0].anchor else "patch" if course.legs else "none"
    changed = course.legs[-1].changed if course.legs else 0
    ends = course.run, course.version, course.digest.hex, kind, changed
    return SyncReport(*ends, table.elements, moved.bytes, table.dense_bytes, seconds, messages=moved.messages)
