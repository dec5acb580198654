"""One rank of a site pulls from the store, and the others get the same buckets from it by broadcast."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

from ...errors import NotRetained, PeerLost, SessionError
from ...parallel import Progress
from ...patch import Patch
from ...transport.groups.frames import Bucket
from ...transport.groups.line import TIMEOUT, Line
from ...transport.stores.base import Store
from ...weights.digest import Digest
from ...weights.table import TensorTable
from ...wire import encoded_table
from ..callbacks import Callback
from ..options import AUDIT_EVERY, require_timeout
from ..profiles import common
from ..receiver import RunVersion, StagedVersion, Targets
from ..report import SyncReport, Watch
from ..store import routes, transfer
from ..store.records import RouteStep, StoreSnapshot
from ..store.side_files import StoredFiles
from ..store.signing import PublicKeys
from ..store.subscriber import Subscriber
from . import rounds
from .incoming import IncomingVersion
from .rounds import Round
from .transfer_plan import Note, PatchLeg, RankShare, TransferPlan


class Relay(Subscriber):
    """Follows a run in a store, and hands on what it fetches to the other ranks of a process group.

    One rank of a site fetches, and the others, which are `GroupSubscriber`s with this rank as their only writer, get
    the same buckets by broadcast. What is fetched is verified and goes on as it is: nothing is encoded again. Targets
    of the relay's own change with those of the others: all ranks commit a version, or none.

    >>> relay = sparserl.Relay("s3://bucket/run", process_group)                                   # doctest: +SKIP
    >>> relay.follow()                                                                             # doctest: +SKIP

    Args:
        url: The store of the run: a `file://`, `s3://`, `gs://`, `az://` or `http(s)://` URL, or an open store.
        process_group: A `torch.distributed` group that nothing else uses; None for the group of all ranks.
        targets: Weights of this rank's own, as for `Subscriber`; none by default.
        trusted_keys: The publisher's public key, or several: what none of them has signed is refused, and so is
            anything older than what is held. None to accept what is not signed.
        run: The id of a run; any other is refused. None to follow whatever run the store has.
        name: Under which name the relay writes down in the store what it holds, as for `Subscriber`.
        before: Called before each commit on this rank, for an engine to pause.
        after: Called after each commit whose `before` was called, whether or not it worked, for an engine to resume.
        audit_every: After so many commits all bits of the targets are read, as by `audit`, when the next version is
            staged; None for never.
        token: The token that an `http(s)://` store asks for.
        timeout: How many seconds any single wait for another rank may take.
        threads: How many threads to use; None for one a core.
        progress: Called with the number of bytes whenever some have been fetched.
        callbacks: What is told about every commit, and about what went wrong; see `sparserl.metrics`.
        clock: Gives the time in seconds since 1970.
        device: The torch device that buckets are broadcast from; None for `cuda` where the group's backend
            is NCCL, and for `cpu` elsewhere.

    Raises:
        SessionError: An option cannot be used.
        WeightsError: A target has no tensors, or is no target.
        StoreError: The URL names no store.
    """

    def __init__(
        self,
        url: str | Store,
        process_group: Any,
        targets: Targets = (),
        *,
        trusted_keys: PublicKeys | None = None,
        run: str | None = None,
        name: str | bool = True,
        before: Callable[[], None] | None = None,
        after: Callable[[], None] | None = None,
        audit_every: int | None = AUDIT_EVERY,
        token: str | None = None,
        timeout: float = TIMEOUT,
        threads: int | None = None,
        progress: Progress | None = None,
        callbacks: Sequence[Callback] = (),
        clock: Callable[[], float] = time.time,
        device: str | None = None,
    ) -> None:
        require_timeout("timeout", timeout)
        super().__init__(
            url,
            targets,
            trusted_keys=trusted_keys,
            run=run,
            name=name,
            before=before,
            after=after,
            audit_every=audit_every,
            token=token,
            threads=threads,
            progress=progress,
            callbacks=callbacks,
            clock=clock,
        )
        self._line = Line(process_group, timeout, device)
        self._round: Round | None = None  # the one whose version is staged
        self._rank_limits: Sequence[Collection[str] | None] = ()  # what profiles the other ranks can take
        self._committed_everywhere: RunVersion | None = None

    def stage(self, version: int | None = None) -> SyncReport | None:
        """Get a version ready on all ranks while the weights are in use.

        Args:
            version: Which version, older or newer; None for the newest.

        Returns:
            What was staged; None if all ranks hold the version already.

        Raises:
            PeerLost: A rank hangs, is gone, or did not come; the message names it.
            SparserlError: A rank could not stage the version, and none commits it; or see `Subscriber.stage`.
        """
        watch = Watch()
        with self._turn, self._callbacks.failures("stage"):
            self.discard()
            self._line.require()
            with watch.stage("plan"):
                snapshot, goal = self._choose_version(version)
            return None if goal == self._committed_everywhere else self._stage_everywhere(snapshot, goal, watch)

    def commit(self) -> SyncReport:
        """Commit on this rank, and wait until all others have.

        Returns:
            What was committed.

        Raises:
            CommitFailed: A target of this rank failed; all of them hold what they held before.
            SessionError: Another rank could not commit, or nothing is staged.
            PeerLost: A rank hangs or is gone.
        """
        with self._turn:
            report = super().commit()
            round = self._round
            self._round = None
            assert round is not None
            if failed := rounds.commit_failures(round, self._line.others):
                raise SessionError(f"version {report.version} was not committed everywhere: {failed}")
            self._committed_everywhere = self._current
            return report

    def _holds(self, version: RunVersion | None) -> None:
        super()._holds(version)
        if self._committed_everywhere != version:
            self._committed_everywhere = None

    def _disconnect(self) -> None:
        try:
            if self._line.broken is None:
                rounds.close_rounds(self._line)
        finally:
            self._line.close()
            super()._disconnect()

    def _stage_everywhere(self, snapshot: StoreSnapshot, goal: RunVersion, watch: Watch) -> SyncReport:
        """Fetch a version, send it to all ranks, and let them and the targets here stage it."""
        line = self._line
        run = self._run_at(snapshot, goal.version)
        self._accept_tensors(run.layout)
        traffic_before = line.traffic
        last = self._committed_everywhere
        self._committed_everywhere = None
        round = rounds.open_round(line, (line.rank,), run.run, run.created, run.layout)
        fetched = self._fetch(round, snapshot, goal, last, watch)
        plan = fetched.plan(goal, line.rank)
        round.write("transfer", plan.to_note())
        arrival = self._arrival(plan, run.layout)
        self._send(plan, fetched, arrival, watch)
        self._await_staged(round, arrival, watch)
        report = rounds.report(plan, run.layout, line.traffic - traffic_before, watch.seconds)
        self._staged = StagedVersion(goal, self._current, arrival.prepared, report)
        self._round = round
        round.write("verdict", {})
        return report

    def _fetch(
        self, round: Round, snapshot: StoreSnapshot, goal: RunVersion, last: RunVersion | None, watch: Watch
    ) -> _Fetched:
        """Wait for all ranks, and fetch what brings them to a version, from the last one if that is known."""
        run = self._run_at(snapshot, goal.version)
        try:
            with watch.stage("gather"):
                hellos = round.read("hello", self._line.others, "come to the sync")
            with watch.stage("plan"):
                steps = self._route_everywhere(snapshot, goal, hellos)
            with watch.stage("fetch"):
                route = [(step, run.layout) for step in steps]
                patches = transfer.Fetch(self.store, run.run, route, self._progress, restore=False).all()
                files = self._files(snapshot, steps, goal, last)
                return _Fetched(steps, patches, None if files is None else dict(files))
        except BaseException as error:
            self._snapshot = None  # what was planned with may have gone meanwhile
            rounds.call_off(round, error)
            raise

    def _files(
        self, snapshot: StoreSnapshot, steps: list[RouteStep], goal: RunVersion, last: RunVersion | None
    ) -> Mapping[str, bytes] | None:
        """The files of a version, where they must be sent: with an anchor, or because they may have changed.

        last: the version that all ranks hold, if that is known.
        """
        index = snapshot.index
        if not steps or steps[0].base is not None:
            if last is not None and last.run == goal.run:
                if not index.has_other_files(last.version, goal.version, snapshot.run):
                    return None
            elif not index.files:
                return None
        return StoredFiles(self.store, index.files_of(goal.version, snapshot.run))

    def _send(self, plan: TransferPlan, fetched: _Fetched, arrival: IncomingVersion, watch: Watch) -> None:
        """Send buckets and files to all ranks, and hand them to the targets here."""

        def buckets(leg: int, patch: Patch) -> Iterator[Bucket]:
            for index in range(patch.buckets):
                bucket = patch.contents.bucket(index)
                if self.targets:
                    arrival.add(leg, bytes(bucket))
                yield bucket

        try:
            with watch.stage("send"):
                own_buckets = [buckets(leg, patch) for leg, patch in enumerate(fetched.patches)]
                rounds.transfer(self._line, plan, own_buckets, list((fetched.files or {}).values()), _ignore)
        except BaseException as error:
            arrival.stop()
            if not isinstance(error, PeerLost):
                self._line.abandon(f"{type(error).__name__} while sending")
            raise
        for data in (fetched.files or {}).values():
            arrival.add(len(plan.legs), data)

    def _await_staged(self, round: Round, arrival: IncomingVersion, watch: Watch) -> None:
        """Stage on this rank, and wait until all others have."""

        def stage() -> BaseException | None:
            arrival.finish()
            return arrival.failure

        try:
            with watch.stage("stage"):
                rounds.require_staged(round, self._line.others, stage)
        except BaseException:
            arrival.stop()
            self._is_uncertain = self._is_uncertain or arrival.failure is not None
            raise

    def _arrival(self, plan: TransferPlan, table: TensorTable) -> IncomingVersion:
        """What is sent is staged here as it is on other ranks; without targets, nothing is."""
        digest: Digest | None = plan.digest
        if self.targets:
            digest = None if self._current is None else self._current.digest
        return IncomingVersion(self, plan, table, encoded_table(table).hash, digest)

    def _route_everywhere(self, snapshot: StoreSnapshot, goal: RunVersion, hellos: dict[int, Note]) -> list[RouteStep]:
        """The steps that bring all ranks to a version: from the oldest one held if all are on its way, or an anchor."""
        if failed := rounds.failures(hellos):
            raise SessionError(f"not every rank can take part: {failed}")
        digests = {None if note["digest"] is None else Digest.from_hex(note["digest"]) for note in hellos.values()}
        self._rank_limits = [note["profiles"] for note in hellos.values()]
        if self.targets:
            current = self._current
            digests.add(current.digest if current is not None and current.run == goal.run else None)
        if digests == {goal.digest}:
            return []
        try:
            return self._route_from(digests, snapshot.index.steps, goal)
        except NotRetained:
            self._tell_version()  # and so the publisher, which keeps to what all ranks can take
            raise

    def _route_from(
        self, digests: Set[Digest | None], all_steps: Sequence[RouteStep], goal: RunVersion
    ) -> list[RouteStep]:
        """The steps to a version from what ranks hold."""
        profiles = self._profiles()
        for version, digest in sorted(routes.versions(all_steps).items()):
            if digest not in digests:
                continue
            steps = routes.route(all_steps, (version, digest), goal.version, profiles)
            passed = {goal.digest, *(step.base_digest for step in steps)}
            if digests <= passed or (steps and steps[0].base is None):
                return steps
        return routes.route(all_steps, None, goal.version, profiles)

    def _profiles(self) -> Collection[str] | None:
        """Those that all ranks can take."""
        return common([super()._profiles(), *self._rank_limits])


class _Fetched(NamedTuple):
    """What was fetched from the store to bring all ranks to a version."""

    steps: Sequence[RouteStep]
    patches: Sequence[Patch]
    files: dict[str, bytes] | None

    def plan(self, goal: RunVersion, rank: int) -> TransferPlan:
        """How one rank sends it to the others."""
        legs = []
        for step, patch in zip(self.steps, self.patches, strict=True):
            first = len(patch.contents.bucket(0)) if patch.buckets else 0
            share = RankShare(rank, patch.buckets, patch.changed, first)
            legs.append(PatchLeg(step.base is None, patch.base, patch.result, (share,)))
        plan = TransferPlan(goal.run, goal.created, goal.version, goal.digest, tuple(legs))
        return plan if self.files is None else plan.with_files(self.files, rank)


def _ignore(_leg: int, _bucket: Bucket) -> None:
    """No other rank sends."""
