"""A process group as a line between ranks: frames by broadcast, notes through the store of the group.

    frame   a bucket, and the length of the next frame: one message for each bucket
    note    a few bytes under a name: that a rank is present, what will be sent, that a rank is ready
    beat    a number in the store that every live rank counts up, to tell a dead rank from a slow one

No rank waits inside a broadcast before all ranks have said by a note that they are present. A rank that is missing then
is named, and the group can still be used. A rank that is lost between two frames is named, too, but then the group
cannot be used any more: a broadcast cannot be cancelled.
"""

from __future__ import annotations

import contextlib
import struct
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

from ...errors import InvalidField, PeerLost, SessionError
from ...wire import limits
from .frames import END, TAIL, Bucket, Frame, frame_device, frame_on, read_tail
from .heartbeat import ALARM, PERIOD, Heartbeat

T = TypeVar("T")

TIMEOUT = 600.0  # seconds, if no other timeout is given
SILENCE = 30.0  # seconds without a beat after which a rank is lost, if the timeout is not shorter
_WATCH_SECONDS = 6 * PERIOD  # how long the beats are watched after a broadcast has failed
_NOTE_BYTES = 1 << 20  # a longer note is cut into several: stores limit the size of a value
_FRAMES = 2  # one is sent while the other is filled or emptied
_FINDING = "finding"

_rounds: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # of each group: it outlives its sessions


@dataclass(frozen=True)
class Traffic:
    """Messages and bytes that were broadcast."""

    messages: int = 0
    bytes: int = 0

    def __sub__(self, other: Traffic) -> Traffic:
        return Traffic(self.messages - other.messages, self.bytes - other.bytes)


class CalledOff(SessionError):
    """The sending rank has stopped in the middle; all ranks know, and the line can still be used."""


class Line:
    """One rank's end of the line. Nothing else may use the group meanwhile, and only one thread at a time the line.

    Args:
        group: the process group; None is the group of all ranks.
        timeout: seconds that a single wait may take: for a rank to come, for a frame, for a rank to get ready.
        device: where frames are while they are broadcast; the backend of the group must be able to send from there.
            None for a GPU where that backend is NCCL, and for host memory elsewhere.
    """

    def __init__(self, group: Any, timeout: float, device: str | None = None) -> None:
        import torch.distributed as dist
        from torch.distributed import distributed_c10d as c10d

        group = group or c10d._get_default_group()  # noqa: SLF001  # None is the group of all ranks, as in torch
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        if self.rank < 0:
            raise SessionError("this process is not a rank of the given process group")
        self.timeout = timeout
        self.traffic = Traffic()
        self._group = group
        where = frame_device(group, device)
        self._frames = [frame_on(where) for _ in range(_FRAMES)]
        self._heartbeat = Heartbeat(group, self.rank, self.size)
        self._beats: dict[int, tuple[int, float]] = {}  # the last count of each rank, and since when it has that count
        self.broken: PeerLost | None = None

    @property
    def group(self) -> Any:
        """The process group."""
        return self._group

    @property
    def others(self) -> list[int]:
        """All ranks but this one."""
        return [rank for rank in range(self.size) if rank != self.rank]

    @property
    def number(self) -> int:
        """The number of the last sync on this group."""
        return _rounds.get(self._group, 0)

    @number.setter
    def number(self, number: int) -> None:
        _rounds[self._group] = number

    @property
    def silence(self) -> float:
        """Seconds without an answer after which a rank or the store counts as lost."""
        return min(self.timeout, SILENCE)

    def require(self) -> None:
        """Raise if the group is broken."""
        if self.broken is not None:
            raise PeerLost(f"the process group is broken, build a new one: {self.broken}") from self.broken

    def close(self) -> None:
        """Stop the heartbeat."""
        self._heartbeat.stop()

    # -- notes ---------------------------------------------------------------------------------------------------------

    def write_note(self, name: str, note: bytes) -> None:
        """Write a note for all ranks. The first one waits for rank 0."""
        pieces = [note[start : start + _NOTE_BYTES] for start in range(0, len(note), _NOTE_BYTES)] or [b""]

        def write(store: Any) -> bool:
            if store is None:
                return False
            for i, piece in enumerate(pieces[1:], 1):
                store.set(f"{name}/{i}", b"." + piece)
            store.set(name, struct.pack("<I", len(pieces)) + pieces[0])
            return True

        end = time.monotonic() + self.timeout
        while not self._with_store(write):
            if time.monotonic() > end:
                raise PeerLost(f"rank 0 did not join the group within {self.timeout:g} s: it has never answered")
            time.sleep(0.01)

    def read_note(self, name: str) -> bytes | None:
        """A note; None if it was not written yet."""

        def read(store: Any) -> bytes | None:
            if store is None or not store.check([name]):
                return None
            first = bytes(store.get(name))
            (count,) = struct.unpack_from("<I", first)
            return first[4:] + b"".join(bytes(store.get(f"{name}/{i}"))[1:] for i in range(1, count))

        return self._with_store(read)

    def delete_notes(self, names: Iterable[str]) -> None:
        """Delete notes that no rank will read any more."""
        names = list(names)
        self._heartbeat.submit(lambda store: store is not None and [store.delete_key(name) for name in names])

    def await_notes(
        self, names: Mapping[int, str], label: str, wait: float | None = None, look: Callable[[], None] | None = None
    ) -> dict[int, bytes]:
        """Wait for a note of each of some ranks.

        Args:
            names: the name of each rank's note.
            label: what the ranks have done when they have written it, for errors: "come to the sync".
            wait: seconds; else the timeout of the line.
            look: called now and then; it may raise to end the wait.

        Raises:
            PeerLost: a rank did not write its note in time, or is lost. The message names it.
        """
        self.restart_silence()
        end = time.monotonic() + (self.timeout if wait is None else wait)
        keys = list(names.values())
        pause = 0.0005
        while keys and not self._with_store(lambda store: store is not None and store.check(keys)):
            self.require_no_alarm(f"waiting for {_list_ranks(names)} to {label}")
            if look is not None:
                look()
            silent = self.silent(names)
            late = time.monotonic() > end
            if late or silent:
                missing = [rank for rank, name in names.items() if self.read_note(name) is None]
                if missing and (late or set(silent) & set(missing)):
                    raise self._missing(missing, silent, label, wait)
            time.sleep(pause)
            pause = min(1.3 * pause, 0.02)
        return {rank: self._written_note(name) for rank, name in names.items()}

    def silent(self, ranks: Iterable[int]) -> list[int]:
        """Which of some ranks have stopped beating."""
        others = [rank for rank in ranks if rank != self.rank]
        now = time.monotonic()
        for rank in others:
            count, since = self._beats.get(rank, (-1, now))
            if count < 0 or now - since > PERIOD:
                new_count = self._count(rank)
                self._beats[rank] = (new_count, since if new_count == count else now)
        return [rank for rank in others if self._beats[rank][0] > 0 and now - self._beats[rank][1] > self.silence]

    def restart_silence(self) -> None:
        """Count silence from now on: time in which this rank waited for nobody does not count."""
        self._beats.clear()

    def _missing(self, missing: list[int], silent: list[int], label: str, wait: float | None) -> PeerLost:
        limit = f"{self.timeout if wait is None else wait:g} s"
        reasons = []
        for rank in missing:
            if rank in silent:
                reasons.append(f"rank {rank} did not answer for {self.silence:g} s: it hangs or is gone")
            elif self._beats.get(rank, (0, 0.0))[0] > 0:
                reasons.append(f"rank {rank} did not {label} within {limit}, but its process is alive")
            else:
                reasons.append(f"rank {rank} did not {label} within {limit}: it has never answered")
        return PeerLost("; ".join(reasons))

    def _written_note(self, name: str) -> bytes:
        note = self.read_note(name)
        assert note is not None
        return note

    def _count(self, rank: int) -> int:
        return int(self._with_store(lambda store: 0 if store is None else store.add(f"beat/{rank}", 0)))

    def _with_store(self, work: Callable[[Any], T]) -> T:
        """Do work with the store of the group, which may hang as any process may."""
        self.require()
        try:
            return self._heartbeat.submit(work).result(self.silence)
        except FutureTimeout:
            self.broken = PeerLost(
                f"the store of the group did not answer for {self.silence:g} s: "
                "the process that has it, most often rank 0, hangs"
            )
            raise self.broken from None
        except RuntimeError as error:  # torch has its own kinds, all of them runtime errors
            self.broken = PeerLost(
                f"the store of the group is gone, and with it the process that has it, most often rank 0: {error}"
            )
            raise self.broken from error

    # -- frames --------------------------------------------------------------------------------------------------------

    def send(self, first: int, buckets: Iterator[Bucket], count: int) -> None:
        """Broadcast buckets. All ranks know the length of the first.

        A frame names the length of the next bucket, so that it is sent when that bucket exists. While it is on its way,
        that bucket is copied to the other frame, and further ones are encoded.
        """
        if not count:
            return
        bucket = next(buckets)
        assert len(bucket) == first
        failure: BaseException | None = None
        for index in range(count):
            frame = self._frames[index % _FRAMES]
            self._finish(frame, self.rank)
            following: Bucket = b""
            length = 0
            if index + 1 < count:
                try:
                    following = next(buckets)
                    length = len(following)
                except BaseException as error:  # noqa: BLE001  # raised when the others know
                    failure = error
                    length = END
            frame.fill(bucket, length)
            self._post(frame, self.rank)
            if failure is not None:
                break
            bucket = following
        for frame in self._frames:
            self._finish(frame, self.rank)
        if failure is not None:
            raise failure

    def receive(self, source: int, first: int, count: int) -> Iterator[Bucket]:
        """The buckets that a rank sends, each while the next one is on its way."""
        if not count:
            return
        self._frames[0].size = _require_length(first) + TAIL.size
        self._post(self._frames[0], source)
        for index in range(count):
            frame = self._frames[index % _FRAMES]
            next_frame = self._frames[(index + 1) % _FRAMES]
            self._finish(frame, source)
            length = self._next_length(frame, source)
            if length == END:
                raise CalledOff(f"rank {source} has stopped sending")
            if index + 1 < count:
                next_frame.size = _require_length(length) + TAIL.size
                self._post(next_frame, source)
            yield frame.bucket()

    def _next_length(self, frame: Frame, source: int) -> int:
        """The length of the next frame; a wrong one would leave the ranks out of step for good."""
        length = read_tail(frame.tail())
        if length is None:
            self._fail(source, "a frame was altered on its way, and with it the length of the next one")
        return length

    def _post(self, frame: Frame, source: int) -> None:
        import torch.distributed as dist

        self.require()
        options = dist.BroadcastOptions()
        options.rootRank = source
        options.rootTensor = 0
        options.timeout = timedelta(seconds=self.timeout)
        try:
            frame.work = self._group.broadcast([frame.tensor()], options)
        except RuntimeError as error:
            self._fail(source, str(error), error)
        self.traffic = Traffic(self.traffic.messages + 1, self.traffic.bytes + frame.size)

    def _finish(self, frame: Frame, source: int) -> None:
        """Wait until a broadcast has ended."""
        work = frame.work
        frame.work = None
        if work is None:
            return
        end = time.monotonic() + self.timeout
        pause = 0.00002
        label = f"a frame of rank {source}"
        while not work.is_completed():
            if self._heartbeat.alarm.is_set():
                self._fail(source, f"waiting for {label}")
            if time.monotonic() > end:
                self._fail(source, f"{label} took longer than {self.timeout:g} s")
            time.sleep(pause)
            pause = min(1.5 * pause, 0.001)
        try:
            work.wait()
        except RuntimeError as error:
            self._fail(source, f"{label} did not get through: {error}", error)

    # -- failures ------------------------------------------------------------------------------------------------------

    def require_no_alarm(self, label: str) -> None:
        """Raise if another rank has found the group broken. `what` is what this rank was doing."""
        if self._heartbeat.alarm.is_set():
            self._fail(None, label)

    def abandon(self, why: str) -> None:
        """Leave in the middle of a transfer, and tell all ranks, so that they do not wait for the timeout."""
        if self.broken is None:
            with contextlib.suppress(PeerLost):
                self._raise_alarm(why)
            self.broken = PeerLost(f"rank {self.rank} left in the middle of a transfer: {why}")

    def mark_broken(self, error: PeerLost) -> PeerLost:
        """Let the group not be used any more, because of this error. Returns the error."""
        self.broken = self.broken or error
        return error

    def _raise_alarm(self, why: str) -> None:
        self._with_store(lambda store: store.set(ALARM, f"rank {self.rank}: {why}".encode()))

    def _fail(self, source: int | None, why: str, cause: BaseException | None = None) -> NoReturn:
        """Find out which ranks have stopped beating, and raise an error that names them."""
        awaited = "" if source is None or source == self.rank else f", waiting for rank {source}"
        try:
            if not self._heartbeat.alarm.is_set():
                self._raise_alarm(why)
            failure = PeerLost(f"{self._find_lost()} ({why}{awaited}). Build a new group")
        except PeerLost as error:  # the store is gone, with the rank that had it
            failure = PeerLost(f"{error} ({why}{awaited}). Build a new group")
        self.broken = failure
        raise failure from cause

    def _find_lost(self) -> str:
        """Which ranks have stopped beating. The first rank that knows tells all, as it may end soon itself."""
        counts = {rank: self._count(rank) for rank in self.others}
        end = time.monotonic() + _WATCH_SECONDS
        lost = set(self.others)
        while lost and time.monotonic() < end:
            time.sleep(PERIOD / 2)
            if (note := self.read_note(_FINDING)) is not None:
                return note.decode()
            lost = {rank for rank in lost if self._count(rank) == counts[rank]}
        finding = "all ranks answer, but a broadcast failed"
        if lost:
            finding = f"{_list_ranks(sorted(lost))} did not answer for {_WATCH_SECONDS:g} s: hangs or is gone"
        self.write_note(_FINDING, finding.encode())
        return finding


def _require_length(length: int) -> int:
    if not 0 <= length <= limits.BUCKET_BYTES:
        raise InvalidField(f"a frame of {length} bytes; a bucket has at most {limits.BUCKET_BYTES}")
    return length


def _list_ranks(ranks: Iterable[int]) -> str:
    numbers = [str(rank) for rank in ranks]
    return f"rank {numbers[0]}" if len(numbers) == 1 else f"ranks {', '.join(numbers)}"
