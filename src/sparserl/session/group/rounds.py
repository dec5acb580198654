"""One sync over a process group, in step on all ranks, as the notes that they write for each other.

    lead         open ────────────► transfer ─► buckets ─────────► verdict ──────────► outcome
    other ranks        hello (digest) ┘                    staged ┘            committed ┘

Several writers agree on what they send before that: the lead asks by `encode`, the others answer by `share`. A round
is called off as long as no rank has committed: when a rank does not come, cannot stage, or cannot encode.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from ...errors import InvalidField, PeerLost, SessionError
from ...transport.groups.frames import Bucket
from ...transport.groups.line import Line, Traffic
from ...weights.table import TensorTable
from ...wire import decode_table, decompress_table, encoded_table, limits, table_hash
from ..report import SyncReport
from ..store.fields import canonical
from .transfer_plan import Note, TransferPlan

_ERROR_CHARACTERS = 2000  # of an error that travel
_OPEN = "open"  # the newest round; one name for all of them
_FAREWELL = 1.0  # seconds
_OF_THE_LEAD = ("encode", "transfer", "verdict", "outcome")  # notes that there are once in a round
_OF_EACH_RANK = ("hello", "share", "staged", "committed")
PATIENT = 2.0  # timeouts that a rank waits for the lead, which may itself wait for another rank that long


class PublisherClosed(SessionError):
    """The publisher has closed; there will be no more versions."""


class WritersApart(SessionError):
    """Writers that do not start from one version: what they would send does not fit together."""


class WriterBehind(SessionError):
    """A writer came with an earlier call of publish than the lead: the lead waits for its next one."""


class Round:
    """The notes of one sync."""

    def __init__(self, line: Line, number: int, opened: Note) -> None:
        self.line = line
        self.number = number
        self.opened = opened  # the note by which the lead has opened it

    def write(self, kind: str, note: Note) -> None:
        """Write a note: one that there is once, or one of this rank."""
        self.line.write_note(self._name(kind, self.line.rank), canonical(note))

    def read(self, kind: str, ranks: Iterable[int], label: str, patience: float = 1.0) -> dict[int, Note]:
        """The notes of some ranks, waited for as long as the line allows, times `patience`."""
        names = {rank: self._name(kind, rank) for rank in ranks}
        notes = self.line.await_notes(names, label, patience * self.line.timeout)
        return {rank: json.loads(note) for rank, note in notes.items()}

    def has(self, kind: str) -> bool:
        """Whether a note that there is once was written."""
        return self.line.read_note(self._name(kind, 0)) is not None

    def _name(self, kind: str, rank: int) -> str:
        return f"{self.number}/{kind}" if kind in _OF_THE_LEAD else f"{self.number}/{kind}/{rank}"


def error_note(error: BaseException) -> Note:
    """A note that says what went wrong on this rank."""
    return {"error": error_text(error)}


def error_text(error: BaseException) -> str:
    """An error in words that other ranks can show."""
    return f"{type(error).__name__}: {error}"[:_ERROR_CHARACTERS]


def failures(notes: dict[int, Note]) -> str:
    """Which ranks failed, and how; empty if none did."""
    return "; ".join(f"rank {rank}: {note['error']}" for rank, note in sorted(notes.items()) if "error" in note)


# -- the lead ----------------------------------------------------------------------------------------------------------


def open_round(
    line: Line, writers: Sequence[int], run: str, created: float, table: TensorTable, call: int = 0
) -> Round:
    """Begin a sync: from now on the other ranks may join it. The tensor table is written where it was not yet.

    call: which call of publish this is, on the lead.
    """
    encoded = encoded_table(table)
    hash = encoded.hash.hex()
    if line.read_note(f"table/{hash}") is None:
        line.write_note(f"table/{hash}", len(encoded.raw).to_bytes(8, "big") + encoded.compressed)
    line.number += 1
    _delete_round(line, line.number - 2)  # nobody waits for its notes any more
    opened = {
        "number": line.number,
        "writers": list(writers),
        "run": run,
        "created": created,
        "table": hash,
        "call": call,
    }
    line.write_note(_OPEN, canonical(opened))
    return Round(line, line.number, opened)


def _delete_round(line: Line, number: int) -> None:
    names = [f"{number}/{kind}" for kind in _OF_THE_LEAD]
    names += [f"{number}/{kind}/{rank}" for kind in _OF_EACH_RANK for rank in line.others]
    line.delete_notes(names)


def close_rounds(line: Line) -> None:
    """Tell those who wait that no round will be opened any more, and give them a moment to read it.

    The store of the group may go with this process.
    """
    line.number += 1
    line.write_note(_OPEN, canonical({"number": line.number, "closed": True}))
    with contextlib.suppress(PeerLost):
        line.await_notes({rank: f"{line.number}/bye/{rank}" for rank in line.others}, "leave", _FAREWELL)


def call_off(round: Round, error: BaseException) -> None:
    """Tell all ranks that no buckets will come in this round."""
    kind = {"afresh": isinstance(error, WritersApart), "again": isinstance(error, WriterBehind)}
    round.write("transfer", {"off": error_text(error), **kind})


def require_staged(round: Round, ranks: Iterable[int], stage: Callable[[], BaseException | None] | None = None) -> None:
    """Wait until all ranks have staged. Where one has not, tell that nobody is to commit, and raise.

    stage: what this rank does meanwhile; returns why it cannot commit. If all is well the verdict is still to be told.
    """
    rank = round.line.rank
    try:
        own_failure = None if stage is None else stage()
        failed = failures(round.read("staged", ranks, "stage the version"))
        if own_failure is not None:
            failed = "; ".join(filter(None, [f"rank {rank}: {error_text(own_failure)}", failed]))
    except PeerLost as error:
        round.write("verdict", {"off": str(error)})
        raise round.line.mark_broken(error) from error
    except BaseException as error:
        round.write("verdict", {"off": f"rank {rank}: {error_text(error)}"})
        raise
    if failed:
        round.write("verdict", {"off": failed})
        raise SessionError(f"the version was not committed anywhere: {failed}") from own_failure


def commit_failures(round: Round, ranks: Iterable[int]) -> str:
    """Which ranks did not commit, and why; empty if all did."""
    return failures(round.read("committed", ranks, "commit the version"))


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
                raise PublisherClosed(f"rank {lead} has closed: there will be no more versions")
            line.number = opened["number"]
            return Round(line, line.number, opened)
        line.require_no_alarm(f"waiting for rank {lead} to publish")
        if line.silent([lead]):
            raise line.mark_broken(PeerLost(f"rank {lead}, which publishes, does not answer: it hangs or is gone"))
        if (end is not None and time.monotonic() >= end) or (stop is not None and stop()):
            return None
        time.sleep(pause)
        pause = min(1.3 * pause, 0.05)


def read_transfer(round: Round, lead: int) -> Note:
    """What the lead is going to send, or that it has called the round off.

    Buckets may come as soon as all ranks have come: a rank that leaves now would be missed in a broadcast, so that all
    are told.
    """
    try:
        return round.read("transfer", [lead], "say what it sends", PATIENT)[lead]
    except PeerLost:
        raise
    except BaseException as error:
        round.line.abandon(f"{type(error).__name__} while waiting for rank {lead}")
        raise


def read_verdict(round: Round, lead: int) -> Note:
    """Whether all ranks are to commit; else why none is."""
    return round.read("verdict", [lead], "say whether to commit", PATIENT)[lead]


def table_of(round: Round) -> tuple[TensorTable, bytes]:
    """The tensor table of a round, and its hash."""
    hash = bytes.fromhex(round.opened["table"])
    note = round.line.read_note(f"table/{hash.hex()}")
    size = 0 if note is None else int.from_bytes(note[:8], "big")
    if note is None or size > limits.TABLE_BYTES:
        raise InvalidField(f"the tensor table {hash.hex()} is missing, or too large")
    raw = decompress_table(note[8:], size)
    if table_hash(raw) != hash:
        raise InvalidField(f"the tensor table {hash.hex()} was altered")
    return decode_table(raw), hash


# -- all ---------------------------------------------------------------------------------------------------------------


def transfer(
    line: Line,
    plan: TransferPlan,
    own_buckets: Sequence[Iterator[Bucket]],
    files: Sequence[bytes],
    receive: Callable[[int, Bucket], None],
) -> None:
    """Send and receive all buckets of a transfer, in the same order on all ranks.

    own_buckets: those that this rank sends of each leg. What others send goes to `receive`, with the number of its
        leg; files come after the last leg and have the number of legs.
    """
    transfers = [(leg.shares, buckets) for leg, buckets in zip(plan.legs, own_buckets, strict=True)]
    transfers.append(((plan.file_share,), iter(files)))
    for number, (shares, buckets) in enumerate(transfers):
        for share in shares:
            if share.rank == line.rank:
                line.send(share.first_bytes, buckets, share.buckets)
                continue
            for bucket in line.receive(share.rank, share.first_bytes, share.buckets):
                receive(number, bucket)


def report(plan: TransferPlan, table: TensorTable, traffic: Traffic, seconds: dict[str, float]) -> SyncReport:
    """What a sync did."""
    return SyncReport(
        run=plan.run,
        version=plan.version,
        digest=plan.digest.hex,
        kind=plan.kind,
        changed=plan.legs[-1].changed if plan.legs else 0,
        elements=table.elements,
        bytes=traffic.bytes,
        dense_bytes=table.dense_bytes,
        seconds=seconds,
        messages=traffic.messages,
    )
