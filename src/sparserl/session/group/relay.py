"""One rank of a site pulls from the store, and the others get the same buckets from it by broadcast."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ...errors import PeerLost, SessionError
from ...parallel import Progress
from ...patch import Patch
from ...transport.groups.frames import Bucket
from ...transport.groups.line import TIMEOUT, Line
from ...transport.stores.base import Store
from ...weights.digest import Digest
from ...wire import encoded_table
from ..callbacks import Callback
from ..options import require_timeout
from ..receiver import RunVersion, StagedVersion, Targets
from ..report import SyncReport, Watch
from ..store import routes, transfer
from ..store.records import Step
from ..store.side_files import StoredFiles
from ..store.signing import PublicKeys
from ..store.subscriber import StoreSnapshot, Subscriber
from . import rounds
from .incoming import Arrival
from .rounds import Course, Leg, Note, Round, Share


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
        audit_every: After so many commits all bits of the targets are read and compared with the digest; None to leave
            that to `audit`.
        token: The token that an `http(s)://` store asks for.
        timeout: How many seconds any single wait for another rank may take.
        threads: How many threads to use; None for one a core.
        progress: Called with the number of bytes whenever some have been fetched.
        callbacks: What is told about every commit, and about what went wrong; see `sparserl.metrics`.
        clock: Gives the time in seconds since 1970.
        device: The torch device that buckets are broadcast from; `cuda` for NCCL.

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
        audit_every: int | None = None,
        token: str | None = None,
        timeout: float = TIMEOUT,
        threads: int | None = None,
        progress: Progress | None = None,
        callbacks: Sequence[Callback] = (),
        clock: Callable[[], float] = time.time,
        device: str = "cpu",
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
        self._everywhere: RunVersion | None = None  # what every rank has committed

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
                view, held = self._choose_version(version)
            return None if held == self._everywhere else self._hand_on(view, held, watch)

    def commit(self) -> SyncReport:
        """Commit on this rank, and wait until all others have."""
        with self._turn:
            report = super().commit()
            round, self._round = self._round, None
            assert round is not None
            if failed := rounds.committed(round, self._line.others):
                raise SessionError(f"version {report.version} was not committed everywhere: {failed}")
            self._everywhere = self._current
            return report

    def close(self) -> None:
        """Tell the other ranks that this was all, and let go of store, targets and group."""
        try:
            if self._line.broken is None:
                rounds.close_rounds(self._line)
        finally:
            self._line.close()
            super().close()

    def _hand_on(self, view: StoreSnapshot, held: RunVersion, watch: Watch) -> SyncReport:
        line, run, before = self._line, view.run, self._line.traffic
        self._everywhere = None
        round = rounds.open_round(line, (line.rank,), run.run, run.created, run.table)
        try:
            with watch.stage("gather"):
                hellos = round.hear("hello", line.others, "come to the sync")
            with watch.stage("plan"):
                steps = self._way(view, held, hellos)
            with watch.stage("fetch"):
                patches = [transfer.receive(self.store, run.run, run.table, step, self._progress) for step in steps]
                files = self._files(view) if steps and steps[0].base is None else {}
        except BaseException as error:
            self._snapshot = None  # what was planned with may have gone meanwhile
            rounds.call_off(round, error)
            raise
        course = _course(held, steps, patches, line.rank).with_files(files, line.rank)
        round.tell("course", course.to_note())
        arrival = self._arrival(course, view)

        def mine(leg: int, patch: Patch) -> Iterator[Bucket]:
            for index in range(patch.buckets):
                bucket = patch.contents.bucket(index)
                if self.targets:
                    arrival.add(leg, bytes(bucket))
                yield bucket

        try:
            with watch.stage("send"):
                own = [mine(leg, patch) for leg, patch in enumerate(patches)]
                rounds.transfer(line, course, own, list(files.values()), _nothing)
        except BaseException as error:
            arrival.stop()
            if not isinstance(error, PeerLost):
                line.abandon(f"{type(error).__name__} while sending")
            raise
        for data in files.values():
            arrival.add(len(course.legs), data)

        def stage() -> BaseException | None:
            arrival.finish()
            return arrival.failure

        try:
            with watch.stage("stage"):
                rounds.judge(round, line.others, stage)
        except BaseException:
            arrival.stop()
            self._is_uncertain = self._is_uncertain or arrival.failure is not None
            raise
        report = rounds.report(course, run.table, line.traffic - before, watch.seconds)
        self._staged, self._round = StagedVersion(held, arrival.prepared, report), round
        round.tell("verdict", {})
        return report

    def _arrival(self, course: Course, view: StoreSnapshot) -> Arrival:
        """The part of this rank: what it sends is staged here as it is elsewhere."""
        have = course.digest if not self.targets else None if self._current is None else self._current.digest
        return Arrival(self, course, view.run.table, encoded_table(view.run.table).hash, have)

    def _way(self, view: StoreSnapshot, wanted: RunVersion, hellos: dict[int, Note]) -> list[Step]:
        """The steps that bring all ranks to a version: from the oldest one held if all are on its way, or an anchor."""
        if failed := rounds.failures(hellos):
            raise SessionError(f"not every rank can take part: {failed}")
        holders = {None if note["digest"] is None else Digest.from_hex(note["digest"]) for note in hellos.values()}
        limits = [frozenset(note["profiles"]) for note in hellos.values() if note["profiles"] is not None]
        if self.targets:
            same_run = self._current is not None and self._current.run == wanted.run
            holders.add(self._current.digest if same_run and self._current is not None else None)
            limits += [target.profiles for target in self.targets if target.profiles is not None]
        if holders == {wanted.digest}:
            return []
        profiles = frozenset.intersection(*limits) if limits else None
        for version, digest in sorted(routes.versions(view.index.steps).items()):
            if digest in holders:
                steps = routes.route(view.index.steps, (version, digest), wanted.version, profiles)
                nodes = {wanted.digest, *(step.base_digest for step in steps)}
                if holders <= nodes or (steps and steps[0].base is None):
                    return steps
        return routes.route(view.index.steps, None, wanted.version, profiles)

    def _files(self, view: StoreSnapshot) -> dict[str, bytes]:
        return dict(StoredFiles(self.store, view.run))


def _course(held: RunVersion, steps: Sequence[Step], patches: Sequence[Patch], rank: int) -> Course:
    legs = []
    for step, patch in zip(steps, patches, strict=True):
        first = len(patch.contents.bucket(0)) if patch.buckets else 0
        share = Share(rank, patch.buckets, patch.changed, first)
        legs.append(Leg(step.base is None, patch.base, patch.result, (share,)))
    return Course(held.run, held.created, held.version, held.digest, tuple(legs))


def _nothing(_leg: int, _bucket: bytes) -> None:
    """No other rank sends."""
