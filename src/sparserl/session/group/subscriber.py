"""A rank that receives: it holds weights of a run that another rank of its process group sends."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ...errors import PeerLost, SessionError
from ...sources import PublishedSource
from ...transport.groups.line import TIMEOUT, CalledOff, Line
from ...weights.digest import Digest
from ..callbacks import Callback
from ..options import AUDIT_EVERY, CommitHooks, require_timeout, require_writers
from ..receiver import Receiver, RunVersion, StagedVersion, Targets
from ..report import SyncReport, Watch
from . import rounds
from .incoming import IncomingVersion
from .rounds import Round
from .transfer_plan import Note, TransferPlan


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
        audit_every: After so many commits all bits of the targets are read, as by `audit`, when the next version is
            staged; None for never.
        validate: A source, as of a publisher, of the full weights: after each commit all bits are compared with them.
        timeout: How many seconds any single wait inside a sync may take.
        threads: How many threads to use; None for one a core.
        callbacks: What is told about every commit, and about what went wrong; see `sparserl.metrics`.
        device: The torch device that buckets are received on; None for `cuda` where the group's backend
            is NCCL, and for `cpu` elsewhere.

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
        audit_every: int | None = AUDIT_EVERY,
        validate: PublishedSource | None = None,
        timeout: float = TIMEOUT,
        threads: int | None = None,
        callbacks: Sequence[Callback] = (),
        device: str | None = None,
    ) -> None:
        super().__init__(targets, CommitHooks(before, after, audit_every, validate), threads, callbacks)
        require_timeout("timeout", timeout)
        self._line = Line(process_group, timeout, device)
        self._writers = list(writers)
        require_writers(self._writers, self._line.size)
        if self._line.rank in self._writers:
            raise SessionError(f"rank {self._line.rank} is a writer; it cannot receive")
        self._lead = self._writers[0]
        self._table_hash = b""
        self._target_digest: Digest | None = None  # of what the targets hold, of whatever run
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
        round = self._round
        self._is_uncertain = True  # until it is through, only the bits tell what the targets hold
        try:
            report = super().commit()
            self._target_digest = None if self._current is None else self._current.digest
            self._is_uncertain = False
            assert round is not None
            self._answer(round, {})
        except BaseException as error:
            if self._staged is None and round is not None:
                self._answer(round, rounds.error_note(error))
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
        """Commit every version as it comes, until the publisher closes, or another thread closes this subscriber.

        Args:
            timeout: How many seconds to follow; None for no limit.
            stop: Called now and then; following ends when it returns true.
            on_commit: Called with the report of every commit.
        """
        is_over = self._is_over(stop)
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            left = None if end is None else max(0.0, end - time.monotonic())
            with self._turn:
                if is_over():
                    return
                try:
                    staged = self._stage(left, is_over)
                except rounds.PublisherClosed:
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
                self._answer(self._round, {"error": "the staged version was discarded"})
            super().discard()

    def _disconnect(self) -> None:
        self._line.close()

    async def stage_async(self, timeout: float | None = None) -> SyncReport | None:
        """`stage` on a thread."""
        return await asyncio.to_thread(self.stage, timeout)

    async def sync_async(self, timeout: float | None = None) -> SyncReport | None:
        """`sync` on a thread."""
        return await asyncio.to_thread(self.sync, timeout)

    # -- staging -------------------------------------------------------------------------------------------------------

    def _stage(self, timeout: float | None, stop: Callable[[], bool] | None) -> SyncReport | None:
        self.discard()
        end = None if timeout is None else time.monotonic() + timeout
        watch = Watch()
        while True:
            with watch.stage("wait"):
                round = rounds.join_round(self._line, self._lead, end, stop)
            if round is None:
                return None
            plan = self._join(round, watch)
            report = None if plan is None else self._receive(round, plan, watch)
            if report is not None:
                return report

    def _join(self, round: Round, watch: Watch) -> TransferPlan | None:
        """Say what the targets hold, and read what will come; None if the round was called off."""
        try:
            with watch.stage("attach"):
                self._identify(round)
        except BaseException as error:
            round.write("hello", rounds.error_note(error))
            raise
        profiles = self._profiles()
        hello = {
            "digest": None if self._target_digest is None else self._target_digest.hex,
            "profiles": None if profiles is None else sorted(profiles),
        }
        round.write("hello", hello)
        with watch.stage("wait"):
            note = rounds.read_transfer(round, self._lead)
        return None if "off" in note else TransferPlan.of_note(note)

    def _identify(self, round: Round) -> None:
        """Find out what the targets hold, by their bits, where that is not known."""
        if round.opened["writers"] != self._writers:
            raise SessionError(
                f"the publisher has the writers {round.opened['writers']}, this subscriber {self._writers}"
            )
        if bytes.fromhex(round.opened["table"]) != self._table_hash:
            table, table_hash = rounds.table_of(round)
            self._target_digest = self._digest_targets(table)
            self._table_hash = table_hash
        elif self._is_uncertain or self._current is None:
            assert self._table is not None
            self._target_digest = self._digest_targets(self._table)
        else:
            self._audit_if_due()

    def _receive(self, round: Round, plan: TransferPlan, watch: Watch) -> SyncReport | None:
        """Stage what comes while more of it comes. None if the round was called off."""
        line = self._line
        traffic_before = line.traffic
        arrival = IncomingVersion(self, plan, self._table, self._table_hash, self._target_digest)
        try:
            with watch.stage("receive"):
                rounds.transfer(line, plan, [iter(())] * len(plan.legs), (), arrival.add)
        except CalledOff:
            arrival.stop()
            return None
        except BaseException as error:
            arrival.stop()
            line.abandon(f"{type(error).__name__} while receiving")
            raise
        verdict = self._await_verdict(round, arrival, watch)
        if "off" in verdict:
            arrival.stop()
            if arrival.failure is not None:
                self._is_uncertain = True  # perhaps something else wrote to a target: its bits tell
                raise arrival.failure
            return None
        assert self._table is not None
        report = rounds.report(plan, self._table, line.traffic - traffic_before, watch.seconds)
        changed = max((prepared.changed for prepared in arrival.prepared), default=0)
        report = replace(report, kind=arrival.kind, changed=changed)
        run_version = RunVersion(plan.run, plan.created, plan.version, plan.digest)
        self._staged = StagedVersion(run_version, self._current, arrival.prepared, report)
        self._round = round
        return report

    def _await_verdict(self, round: Round, arrival: IncomingVersion, watch: Watch) -> Note:
        """Stage all that has come, say whether that worked, and read whether all ranks are to commit."""
        try:
            with watch.stage("stage"):
                arrival.finish()
            round.write("staged", {} if arrival.failure is None else rounds.error_note(arrival.failure))
            with watch.stage("agree"):
                return rounds.read_verdict(round, self._lead)
        except BaseException as error:
            if isinstance(error, PeerLost):
                self._line.mark_broken(error)
            else:  # the verdict may be written or not
                self._leave(round, error)
            arrival.stop()
            raise

    def _commit_or_discard(self) -> SyncReport:
        """Commit; where that cannot even begin there is no second try, and the publisher is told why."""
        round = self._round
        try:
            return self.commit()
        except BaseException as error:
            if self._staged is not None and round is not None:
                self._answer(round, rounds.error_note(error))
                self.discard()
            raise

    def _answer(self, round: Round, note: Note) -> None:
        """Tell the publisher what became of a commit. If it is gone, the next stage says so."""
        self._round = None
        with contextlib.suppress(PeerLost):
            round.write("committed", note)

    def _leave(self, round: Round, error: BaseException) -> None:
        """Leave before the verdict was read: nobody is to commit, or if that was decided, all but this rank have."""
        with contextlib.suppress(PeerLost):
            round.write("staged", rounds.error_note(error))
        self._answer(round, rounds.error_note(error))
