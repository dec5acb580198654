"""A rank that receives: it holds weights of a run that another rank of its process group sends."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ...errors import PeerLost, SessionError
from ...transport.groups.line import TIMEOUT, CalledOff, Line
from ...weights.digest import Digest
from ..callbacks import Callback
from ..options import CommitHooks, require_timeout, require_writers
from ..receiver import Receiver, RunVersion, StagedVersion, Targets
from ..report import SyncReport, Watch
from . import rounds
from .incoming import Arrival
from .rounds import Course, Note, Round


class GroupSubscriber(Receiver):
    """Follows a run that a `GroupPublisher`, or a `Relay`, of the same process group sends.

    >>> subscriber = sparserl.GroupSubscriber(process_group, weights)                              # doctest: +SKIP
    >>> subscriber.sync().version                                                                  # doctest: +SKIP
    0

    Args:
        process_group: A `torch.distributed` group that nothing else uses; None for the group of all ranks. Ranks are
            counted inside it.
        targets: Where the weights are written: a mapping from names to tensors or a torch module, which are written in
            place; a target such as `sparserl.targets.folder(path)`; or a sequence of them, which change together or
            not at all.
        writers: The ranks that publish, as the publisher has them; of a relay, its rank.
        before: Called before each commit, for an engine to pause.
        after: Called after each commit whose `before` was called, whether or not it worked, for an engine to resume.
        audit_every: After so many commits all bits of the targets are read and compared with the digest; None to leave
            that to `audit`.
        timeout: How many seconds any single wait inside a sync may take.
        threads: How many threads to use; None for one a core.
        callbacks: What is told about every commit, and about what went wrong; see `sparserl.metrics`.
        device: The torch device that buckets are received on; `cuda` for NCCL.

    Raises:
        SessionError: An option cannot be used, or this rank is one of the writers.
        WeightsError: A target has no tensors, or is no target.
    """

    def __init__(
        self,
        process_group: Any,
        targets: Targets,
        *,
        writers: Sequence[int] = (0,),
        before: Callable[[], None] | None = None,
        after: Callable[[], None] | None = None,
        audit_every: int | None = None,
        timeout: float = TIMEOUT,
        threads: int | None = None,
        callbacks: Sequence[Callback] = (),
        device: str = "cpu",
    ) -> None:
        super().__init__(targets, CommitHooks(before, after, audit_every), threads, callbacks)
        require_timeout("timeout", timeout)
        self._line = Line(process_group, timeout, device)
        self._writers = list(writers)
        require_writers(self._writers, self._line.size)
        if self._line.rank in self._writers:
            raise SessionError(f"rank {self._line.rank} is a writer; it cannot receive")
        self._lead = self._writers[0]
        self._hash = b""
        self._at: Digest | None = None  # what the targets hold, of whatever run
        self._round: Round | None = None  # the one whose version is staged

    def stage(self, timeout: float | None = None) -> SyncReport | None:
        """Wait for the next version, and get it ready while the weights are in use.

        On return every rank has staged it, and all are to commit.

        Args:
            timeout: How many seconds to wait for a version; None for no limit.

        Returns:
            What was staged; None if no version came in that time.

        Raises:
            PeerLost: The publisher hangs or is gone.
            SparserlError: The version could not be staged; no rank commits it.
        """
        with self._turn, self._callbacks.failures("stage"):
            return self._stage(timeout, None)

    def commit(self) -> SyncReport:
        """Make the staged version the one that is held: in O(changed), all targets or none."""
        with self._turn:
            return self._commit_round()

    def _commit_round(self) -> SyncReport:
        round, self._is_uncertain = self._round, True  # until it is through, only the bits tell what the targets hold
        try:
            report = super().commit()
            self._at, self._is_uncertain = None if self._current is None else self._current.digest, False
            assert round is not None
            self._done(round, {})
        except BaseException as error:
            if self._staged is None and round is not None:
                self._done(round, rounds.told(error))
            raise
        return report

    def sync(self, timeout: float | None = None) -> SyncReport | None:
        """Wait for the next version, and commit it.

        Args:
            timeout: How many seconds to wait for a version; None for no limit.

        Returns:
            What was committed; None if no version came in that time.

        Raises:
            PeerLost: The publisher hangs or is gone.
            CommitFailed: A target failed; all of this rank hold what they held before.
            SparserlError: The version could not be staged; no rank commits it.
        """
        with self._turn:
            return None if self.stage(timeout) is None else self._commit_or_discard()

    def follow(
        self,
        *,
        timeout: float | None = None,
        stop: Callable[[], bool] | None = None,
        on_commit: Callable[[SyncReport], None] | None = None,
    ) -> None:
        """Commit every version as it comes, until the publisher closes.

        Args:
            timeout: How many seconds to follow; None for no limit.
            stop: Called now and then; following ends when it returns true.
            on_commit: Called with the report of every commit.
        """
        end = None if timeout is None else time.monotonic() + timeout
        while stop is None or not stop():
            left = None if end is None else max(0.0, end - time.monotonic())
            with self._turn:
                try:
                    staged = self._stage(left, stop)
                except rounds.Closed:
                    return
                except Exception as error:
                    self._callbacks.failed("stage", error)
                    raise
                if staged is None:
                    return
                report = self._commit_or_discard()
            if on_commit is not None:
                on_commit(report)

    def discard(self) -> None:
        """Forget what is staged; the publisher is told that it was not committed."""
        with self._turn:
            if self._staged is not None and self._round is not None:
                self._done(self._round, {"error": "the staged version was discarded"})
            super().discard()

    def close(self) -> None:
        """Forget what is staged, and let go of targets and group."""
        self.discard()
        for target in self.targets:
            target.close()
        self._line.close()

    def __enter__(self) -> GroupSubscriber:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def stage_async(self, timeout: float | None = None) -> SyncReport | None:
        """`stage` on a thread."""
        return await asyncio.to_thread(self.stage, timeout)

    async def sync_async(self, timeout: float | None = None) -> SyncReport | None:
        """`sync` on a thread."""
        return await asyncio.to_thread(self.sync, timeout)

    # -- staging -------------------------------------------------------------------------------------------------------

    def _stage(self, timeout: float | None, stop: Callable[[], bool] | None) -> SyncReport | None:
        self.discard()
        end, watch = None if timeout is None else time.monotonic() + timeout, Watch()
        while True:
            with watch.stage("wait"):
                round = rounds.join_round(self._line, self._lead, end, stop)
            if round is None:
                return None
            course = self._joined(round, watch)
            if course is not None and (report := self._receive(round, course, watch)) is not None:
                return report

    def _joined(self, round: Round, watch: Watch) -> Course | None:
        """Say what is held, and hear what will come; None if the round was called off."""
        try:
            with watch.stage("attach"):
                self._identify(round)
        except BaseException as error:
            round.tell("hello", rounds.told(error))
            raise
        limits = [target.profiles for target in self.targets if target.profiles is not None]
        held = None if self._at is None else self._at.hex
        round.tell("hello", {"digest": held, "profiles": sorted(frozenset.intersection(*limits)) if limits else None})
        with watch.stage("wait"):
            heard = rounds.hear_course(round, self._lead)
        return None if "off" in heard else Course.of_note(heard)

    def _identify(self, round: Round) -> None:
        """Find out what the targets hold, by their bits, where that is not known."""
        if round.opened["writers"] != self._writers:
            raise SessionError(f"the writers are {round.opened['writers']} there and {self._writers} here")
        if bytes.fromhex(round.opened["table"]) != self._hash:
            table, hash = rounds.table_of(round)
            self._at, self._hash = self._digest_targets(table), hash
        elif self._is_uncertain or self._current is None:
            assert self._table is not None
            self._at = self._digest_targets(self._table)

    def _receive(self, round: Round, course: Course, watch: Watch) -> SyncReport | None:
        """Stage what comes while more of it comes. None if the round was called off."""
        line, before = self._line, self._line.traffic
        arrival = Arrival(self, course, self._table, self._hash, self._at)
        try:
            with watch.stage("receive"):
                rounds.transfer(line, course, [iter(())] * len(course.legs), (), arrival.add)
        except CalledOff:
            arrival.stop()
            return None
        except BaseException as error:
            arrival.stop()
            line.abandon(f"{type(error).__name__} while receiving")
            raise
        try:
            with watch.stage("stage"):
                arrival.finish()
            round.tell("ack", {} if arrival.failure is None else rounds.told(arrival.failure))
            with watch.stage("agree"):
                verdict = round.hear("verdict", [self._lead], "say whether to commit", 2.0)[self._lead]
        except BaseException as error:
            if isinstance(error, PeerLost):
                line.mark_broken(error)
            else:  # the verdict may be told or not
                self._leave(round, error)
            arrival.stop()
            raise
        if "off" in verdict:
            arrival.stop()
            if arrival.failure is not None:
                self._is_uncertain = True  # where something else wrote to a target, its bits tell
                raise arrival.failure
            return None
        assert self._table is not None
        held = RunVersion(course.run, course.created, course.version, course.digest)
        report = rounds.report(course, self._table, line.traffic - before, watch.seconds)
        changed = max((p.changed for p in arrival.prepared), default=0)
        report = replace(report, kind=arrival.kind, changed=changed)
        self._staged, self._round = StagedVersion(held, arrival.prepared, report), round
        return report

    def _commit_or_discard(self) -> SyncReport:
        """Commit; where that cannot even begin there is no second try, and the publisher is told why."""
        round = self._round
        try:
            return self.commit()
        except BaseException as error:
            if self._staged is not None and round is not None:
                self._done(round, rounds.told(error))
                self.discard()
            raise

    def _done(self, round: Round, note: Note) -> None:
        """Tell the publisher. If it is gone, the next stage says so; what was committed stays."""
        self._round = None
        with contextlib.suppress(PeerLost):
            round.tell("done", note)

    def _leave(self, round: Round, error: BaseException) -> None:
        """Leave before the verdict is heard: nobody is to commit, or if that was decided, all but this rank have."""
        with contextlib.suppress(PeerLost):
            round.tell("ack", rounds.told(error))
        self._done(round, rounds.told(error))
