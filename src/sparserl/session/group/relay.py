"""One rank of a site pulls from the store, and the others get the same buckets from it by broadcast."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ...errors import PeerLost, SessionError
from ...patch import Patch
from ...targets import Target
from ...transport.groups.line import TIMEOUT, Bucket, Line
from ...transport.stores.base import Store
from ...weights.digest import Digest
from ...weights.memory import Weights
from ...wire import encode_table, table_hash
from ..receiver import Held, Staged
from ..report import SyncReport, Watch
from ..store import routes, transfer
from ..store.records import Step
from ..store.side_files import StoredFiles
from ..store.subscriber import Subscriber, View
from . import rounds
from .incoming import Arrival
from .rounds import Course, Leg, Note, Round, Share


class Relay(Subscriber):
    """A subscriber of a store that hands on what it gets, bucket by bucket, to the other ranks of a process group.

    What it fetches is verified and goes on as it is: nothing is encoded again. The other ranks are
    `CollectiveSubscriber`s, with this rank as their only writer. Its own target, if it has one, changes with theirs:
    all ranks commit a version, or none.

    url: the store of the run, as for `Subscriber`; further options (`key`, `run`, `before`, …) are those of it.
    target: weights of this rank's own; none by default.
    process_group: a group that nothing else uses.
    timeout: seconds that any single wait for another rank may take.
    """

    def __init__(
        self,
        url: str | Store,
        target: Target | Weights | Sequence[Target | Weights] = (),
        *,
        process_group: Any,
        timeout: float = TIMEOUT,
        device: str = "cpu",
        **options: Any,
    ) -> None:
        super().__init__(url, target, **options)
        self._line = Line(process_group, timeout, device)
        self._round: Round | None = None  # the one whose version is staged
        self._everywhere: Held | None = None  # what every rank has committed

    def stage(self, version: int | None = None) -> SyncReport | None:
        """Get the newest version (or a given one) ready on all ranks; None if all hold it already."""
        watch = Watch()
        with self._turn, self._callbacks.failures("stage"):
            self.discard()
            self._line.require()
            with watch.stage("plan"):
                view, held = self._wanted(version)
            return None if held == self._everywhere else self._hand_on(view, held, watch)

    def commit(self) -> SyncReport:
        """Commit on this rank, and wait until all others have."""
        with self._turn:
            report = super().commit()
            round, self._round = self._round, None
            assert round is not None
            if failed := rounds.committed(round, self._line.others):
                raise SessionError(f"version {report.version} was not committed everywhere: {failed}")
            self._everywhere = self._held
            return report

    def close(self) -> None:
        """Tell the other ranks that this was all, and let go of store, targets and group."""
        try:
            if self._line.broken is None:
                rounds.close_rounds(self._line)
        finally:
            self._line.close()
            super().close()

    def _hand_on(self, view: View, held: Held, watch: Watch) -> SyncReport:
        line, run, before = self._line, view.run, self._line.moved
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
            self._view = None  # what was planned with may have gone meanwhile
            rounds.call_off(round, error)
            raise
        course = _course(held, steps, patches, line.rank).with_files(files, line.rank)
        round.tell("course", course.to_note())
        arrival = self._arrival(course, view)

        def mine(leg: int, patch: Patch) -> Iterator[Bucket]:
            for index in range(patch.buckets):
                bucket = patch.bucket(index)
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
            self._doubt = self._doubt or arrival.failure is not None
            raise
        report = rounds.report(course, run.table, line.moved - before, watch.seconds)
        self._staged, self._round = Staged(held, arrival.prepared, report), round
        round.tell("verdict", {})
        return report

    def _arrival(self, course: Course, view: View) -> Arrival:
        """The part of this rank: what it sends is staged here as it is elsewhere."""
        have = course.digest if not self.targets else None if self._held is None else self._held.digest
        return Arrival(self, course, view.run.table, table_hash(encode_table(view.run.table)), have)

    def _way(self, view: View, wanted: Held, hellos: dict[int, Note]) -> list[Step]:
        """The steps that bring all ranks to a version: from the oldest one held if all are on its way, or an anchor."""
        if failed := rounds.failures(hellos):
            raise SessionError(f"not every rank can take part: {failed}")
        holders = {None if note["digest"] is None else Digest.from_hex(note["digest"]) for note in hellos.values()}
        limits = [frozenset(note["profiles"]) for note in hellos.values() if note["profiles"] is not None]
        if self.targets:
            same_run = self._held is not None and self._held.run == wanted.run
            holders.add(self._held.digest if same_run and self._held is not None else None)
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

    def _files(self, view: View) -> dict[str, bytes]:
        return dict(StoredFiles(self.store, view.run))


def _course(held: Held, steps: Sequence[Step], patches: Sequence[Patch], rank: int) -> Course:
    legs = []
    for step, patch in zip(steps, patches, strict=True):
        first = len(patch.bucket(0)) if patch.buckets else 0
        share = Share(rank, patch.buckets, patch.changed, first)
        legs.append(Leg(step.base is None, patch.base, patch.result, (share,)))
    return Course(held.run, held.created, held.version, held.digest, tuple(legs))


def _nothing(_leg: int, _bucket: bytes) -> None:
    """No other rank sends."""
