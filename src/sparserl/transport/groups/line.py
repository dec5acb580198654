"""A process group as a line between ranks: frames by broadcast, short notes through the store of the group.

    frame   a bucket, and the length of the frame that comes next: one message a bucket
    note    a few bytes under a name: who is there, what will come, who is ready
    beat    a number in the store that every live rank counts up, so that a dead one can be told from a slow one

No rank waits inside a broadcast before all ranks have said by a note that they are there. A rank that is missing then
is named, and the group is still in order. One that goes away between two frames is named too, but its group can not be
used any more: broadcasts have no way back.
"""

from __future__ import annotations

import contextlib
import struct
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import TimeoutError as Late
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import xxhash

from ...errors import InvalidField, PeerLost, SessionError
from ...wire import limits
from .heartbeat import ALARM, PERIOD, Clerk

T = TypeVar("T")
Bucket = bytes | memoryview

TIMEOUT = 600.0  # seconds, where none is given
SILENCE = 30.0  # seconds without a beat after which a rank is lost, if the timeout is not shorter
_GRACE = 6 * PERIOD  # how long the beats are watched when a broadcast has failed
_NOTE_BYTES = 1 << 20  # a longer note is cut: stores take only so much at a time
_TAIL = struct.Struct("<QQ")  # length of the next frame, and a checksum of it
_OFF = (1 << 64) - 1  # instead of a length: nothing more will come
_FRAMES = 2  # one is on the way while the other is filled or emptied
_FINDING = "finding"

_rounds: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # of each group: it outlives sessions on it


@dataclass(frozen=True)
class Moved:
    """What went over a line."""

    messages: int = 0
    bytes: int = 0

    def __sub__(self, other: Moved) -> Moved:
        return Moved(self.messages - other.messages, self.bytes - other.bytes)


class CalledOff(SessionError):
    """The rank that sends has stopped in the middle; all ranks know, and the line is in order."""


class Line:
    """One rank's end of the line. It must be the only one that uses its group, from one thread at a time.

    timeout: seconds that any single wait may take: for a rank to come, for a frame, for a rank to get ready.
    device: where frames lie while they are broadcast: what the backend of the group can send from.
    """

    def __init__(self, group: Any, timeout: float, device: str = "cpu") -> None:
        import torch.distributed as dist
        from torch.distributed import distributed_c10d as c10d

        group = group or c10d._get_default_group()  # noqa: SLF001  # None is the group of all ranks, as in torch
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise SessionError("this process is not a rank of the process group handed over")
        self.timeout, self.moved = timeout, Moved()
        self._group = group
        self._frames = [_Frame(device) for _ in range(_FRAMES)]
        self._clerk = Clerk(group, self.rank, self.size)
        self._beats: dict[int, tuple[int, float]] = {}  # the last count of each rank, and since when it is that
        self.broken: PeerLost | None = None

    @property
    def group(self) -> Any:
        """The process group."""
        return self._group

    @property
    def others(self) -> list[int]:
        return [rank for rank in range(self.size) if rank != self.rank]

    @property
    def number(self) -> int:
        """The number of the last sync on this group."""
        return _rounds.get(self._group, 0)

    @number.setter
    def number(self, number: int) -> None:
        _rounds[self._group] = number

    def require(self) -> None:
        """Refuse to go on with a group that is broken."""
        if self.broken is not None:
            raise PeerLost(f"the process group is broken, build a new one: {self.broken}") from self.broken

    def close(self) -> None:
        """Stop beating."""
        self._clerk.stop()

    # -- notes ---------------------------------------------------------------------------------------------------------

    def tell(self, name: str, note: bytes) -> None:
        """Leave a note for all ranks. Before the first one, rank 0 must have come."""
        cuts = [note[at : at + _NOTE_BYTES] for at in range(0, len(note), _NOTE_BYTES)] or [b""]

        def write(store: Any) -> bool:
            if store is None:
                return False
            for i, cut in enumerate(cuts[1:], 1):
                store.set(f"{name}/{i}", b"." + cut)
            store.set(name, struct.pack("<I", len(cuts)) + cuts[0])
            return True

        end = time.monotonic() + self.timeout
        while not self._ask(write):
            if time.monotonic() > end:
                raise PeerLost(f"rank 0 did not come to the group within {self.timeout:g} s: it was never heard of")
            time.sleep(0.01)

    def peek(self, name: str) -> bytes | None:
        """A note, if it is there."""

        def read(store: Any) -> bytes | None:
            if store is None or not store.check([name]):
                return None
            first = bytes(store.get(name))
            (count,) = struct.unpack_from("<I", first)
            return first[4:] + b"".join(bytes(store.get(f"{name}/{i}"))[1:] for i in range(1, count))

        return self._ask(read)

    def forget(self, names: Iterable[str]) -> None:
        """Take notes away that nobody will read any more."""
        names = list(names)
        self._clerk.ask(lambda store: store is not None and [store.delete_key(name) for name in names])

    def hear(
        self, notes: Mapping[int, str], what: str, wait: float | None = None, look: Callable[[], None] | None = None
    ) -> dict[int, bytes]:
        """The notes of some ranks, which are waited for. `what` says in the error what a missing rank has not done.

        `look` is called while they are waited for, and may raise.
        """
        self.fresh()
        end = time.monotonic() + (self.timeout if wait is None else wait)
        names, pause = list(notes.values()), 0.0005
        while names and not self._ask(lambda store: store is not None and store.check(names)):
            self.require_calm(f"waiting for {_ranks(notes)} to {what}")
            if look is not None:
                look()
            silent, late = self.silent(notes), time.monotonic() > end
            if late or silent:
                missing = [rank for rank, name in notes.items() if self.peek(name) is None]
                if missing and (late or set(silent) & set(missing)):
                    raise self._missing(missing, silent, what, wait)
            time.sleep(pause)
            pause = min(1.3 * pause, 0.02)
        return {rank: self._note(name) for rank, name in notes.items()}

    def silent(self, ranks: Iterable[int]) -> list[int]:
        """Those of some ranks whose beats have stopped."""
        now = time.monotonic()
        limit = min(self.timeout, SILENCE)
        for rank in ranks:
            count, since = self._beats.get(rank, (-1, now))
            if rank != self.rank and (count < 0 or now - since > PERIOD):
                found = self._count(rank)
                self._beats[rank] = found, (since if found == count else now)
        return [r for r in ranks if r != self.rank and self._beats[r][0] > 0 and now - self._beats[r][1] > limit]

    def fresh(self) -> None:
        """Count silence from now on: time in which nobody was waited for does not count."""
        self._beats.clear()

    def _missing(self, missing: list[int], silent: list[int], what: str, wait: float | None) -> PeerLost:
        took = f"{self.timeout if wait is None else wait:g} s"
        said = []
        for rank in missing:
            if rank in silent:
                said.append(f"rank {rank} did not answer for {min(self.timeout, SILENCE):g} s: it hangs or is gone")
            elif self._beats.get(rank, (0, 0.0))[0] > 0:
                said.append(f"rank {rank} did not {what} within {took}, though it is there")
            else:
                said.append(f"rank {rank} did not {what} within {took}: it was never heard of")
        return PeerLost("; ".join(said))

    def _note(self, name: str) -> bytes:
        found = self.peek(name)
        assert found is not None
        return found

    def _count(self, rank: int) -> int:
        return int(self._ask(lambda store: 0 if store is None else store.add(f"beat/{rank}", 0)))

    def _ask(self, work: Callable[[Any], T]) -> T:
        """Something of the store, which may hang as any process may."""
        self.require()
        try:
            return self._clerk.ask(work).result(min(self.timeout, SILENCE))
        except Late:
            gone = f"did not answer for {min(self.timeout, SILENCE):g} s"
            self.broken = PeerLost(f"the store of the group {gone}: the process that has it, most often rank 0, hangs")
            raise self.broken from None
        except RuntimeError as error:  # torch has its own kinds, all of them runtime errors
            self.broken = PeerLost(
                f"the store of the group is gone, and with it the process that has it, most often rank 0: {error}"
            )
            raise self.broken from error

    # -- frames --------------------------------------------------------------------------------------------------------

    def send(self, first: int, buckets: Iterator[Bucket], count: int) -> None:
        """Broadcast buckets; the length of the first is known to all.

        A frame goes out when the bucket after it is there, since it tells its length. While it is on the way, that
        bucket is copied to the other frame, and the next ones are encoded.
        """
        if not count:
            return
        bucket = next(buckets)
        assert len(bucket) == first
        for index in range(count):
            frame = self._frames[index % _FRAMES]
            self._finish(frame, self.rank)
            following, failure, length = None, None, 0
            if index + 1 < count:
                try:
                    following = next(buckets)
                    length = len(following)
                except BaseException as error:  # noqa: BLE001  # raised when the others know
                    failure, length = error, _OFF
            frame.fill(bucket, length)
            self._post(frame, self.rank)
            if failure is not None:
                break
            bucket = following if following is not None else b""
        for frame in self._frames:
            self._finish(frame, self.rank)
        if failure is not None:
            raise failure

    def receive(self, source: int, first: int, count: int) -> Iterator[bytes]:
        """The buckets that a rank sends, each while the next one is on the way."""
        if not count:
            return
        self._frames[0].size = _checked(first) + _TAIL.size
        self._post(self._frames[0], source)
        for index in range(count):
            frame, other = self._frames[index % _FRAMES], self._frames[(index + 1) % _FRAMES]
            self._finish(frame, source)
            length = self._following(frame, source)
            if length == _OFF:
                raise CalledOff(f"rank {source} has stopped sending")
            if index + 1 < count:
                other.size = _checked(length) + _TAIL.size
                self._post(other, source)
            yield frame.take()

    def _following(self, frame: _Frame, source: int) -> int:
        """The length that a frame tells of the next one; a wrong one would leave the ranks out of step for good."""
        raw = frame.tail()
        length, check = _TAIL.unpack(raw)
        if xxhash.xxh64_intdigest(raw[:8]) != check:
            self._fail(source, "a frame was altered on its way, and with it the length of the next one")
        return int(length)

    def _post(self, frame: _Frame, source: int) -> None:
        import torch.distributed as dist

        self.require()
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = source, 0
        options.timeout = timedelta(seconds=self.timeout)
        try:
            frame.work = self._group.broadcast([frame.sent()], options)
        except RuntimeError as error:
            self._fail(source, str(error), error)
        self.moved = Moved(self.moved.messages + 1, self.moved.bytes + frame.size)

    def _finish(self, frame: _Frame, source: int) -> None:
        """Wait until a frame is where it should be."""
        work, frame.work = frame.work, None
        if work is None:
            return
        end, pause, what = time.monotonic() + self.timeout, 0.00002, f"a frame of rank {source}"
        while not work.is_completed():
            if self._clerk.alarm.is_set() or time.monotonic() > end:
                late = not self._clerk.alarm.is_set()
                self._fail(source, f"{what} took longer than {self.timeout:g} s" if late else f"waiting for {what}")
            time.sleep(pause)
            pause = min(1.5 * pause, 0.001)
        try:
            work.wait()
        except RuntimeError as error:
            self._fail(source, f"{what} did not get through: {error}", error)

    # -- trouble -------------------------------------------------------------------------------------------------------

    def require_calm(self, what: str) -> None:
        """Stop waiting where another rank has found the group broken."""
        if self._clerk.alarm.is_set():
            self._fail(None, what)

    def abandon(self, why: str) -> None:
        """Leave in the middle of a transfer: tell all ranks, so that they need not wait until their time is up."""
        if self.broken is None:
            with contextlib.suppress(PeerLost):
                self._alarm(why)
            self.broken = PeerLost(f"rank {self.rank} left in the middle of a transfer: {why}")

    def lose(self, error: PeerLost) -> PeerLost:
        """The group is of no use any more, for this reason."""
        self.broken = self.broken or error
        return error

    def _alarm(self, why: str) -> None:
        self._ask(lambda store: store.set(ALARM, f"rank {self.rank}: {why}".encode()))

    def _fail(self, source: int | None, why: str, cause: BaseException | None = None) -> None:
        """Find out which ranks do not beat any more, and raise with their names."""
        waited = "" if source is None or source == self.rank else f", waiting for rank {source}"
        try:
            if not self._clerk.alarm.is_set():
                self._alarm(why)
            found = PeerLost(f"{self._roll_call()} ({why}{waited}). Build a new group")
        except PeerLost as error:  # the store went with the rank that has it
            found = PeerLost(f"{error} ({why}{waited}). Build a new group")
        self.broken = found
        raise found from cause

    def _roll_call(self) -> str:
        """Which ranks do not beat any more. The first rank that knows tells all: it may be gone itself soon."""
        before, end = {rank: self._count(rank) for rank in self.others}, time.monotonic() + _GRACE
        lost = set(self.others)
        while lost and time.monotonic() < end:
            time.sleep(PERIOD / 2)
            if (found := self.peek(_FINDING)) is not None:
                return found.decode()
            lost = {rank for rank in lost if self._count(rank) == before[rank]}
        found = b"all ranks answer, but a broadcast failed"
        if lost:
            found = f"{_ranks(sorted(lost))} did not answer for {_GRACE:g} s: hangs or is gone".encode()
        self.tell(_FINDING, found)
        return found.decode()


class _Frame:
    """Room for one bucket and its tail, on the host and where the group sends from."""

    def __init__(self, device: str) -> None:
        import torch

        self._device, self._pinned = torch.device(device), device != "cpu" and torch.cuda.is_available()
        self._host: Any = None
        self._there: Any = None
        self._bytes = np.empty(0, np.uint8)
        self._size = 0
        self.work: Any = None

    @property
    def size(self) -> int:
        return self._size

    @size.setter
    def size(self, size: int) -> None:
        import torch

        self._size = size
        if size > self._bytes.size:
            self._host = torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned)
            self._there = self._host if self._device.type == "cpu" else self._host.to(self._device)
            self._bytes = self._host.numpy()

    def fill(self, bucket: Bucket, following: int) -> None:
        self.size = len(bucket) + _TAIL.size
        length = struct.pack("<Q", following)
        tail = length + struct.pack("<Q", xxhash.xxh64_intdigest(length))
        self._bytes[: len(bucket)] = np.frombuffer(bucket, np.uint8)
        self._bytes[len(bucket) : self.size] = np.frombuffer(tail, np.uint8)
        if self._there is not self._host:
            self._there[: self.size].copy_(self._host[: self.size])

    def sent(self) -> Any:
        return self._there[: self.size]

    def tail(self) -> bytes:
        if self._there is not self._host:
            self._host[: self.size].copy_(self._there[: self.size])
        return self._bytes[self.size - _TAIL.size : self.size].tobytes()

    def take(self) -> bytes:
        return self._bytes[: self.size - _TAIL.size].tobytes()


def _checked(length: int) -> int:
    if not 0 <= length <= limits.BUCKET_BYTES:
        raise InvalidField(f"a frame of {length} bytes; a bucket has at most {limits.BUCKET_BYTES}")
    return length


def _ranks(ranks: Iterable[int]) -> str:
    found = [str(rank) for rank in ranks]
    return f"rank {found[0]}" if len(found) == 1 else f"ranks {', '.join(found)}"
