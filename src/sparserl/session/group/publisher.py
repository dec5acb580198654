"""A publisher and its subscribers as the ranks of one process group: buckets by broadcast, nothing in between.

All ranks go through a sync in step (see `rounds`): each says what it holds; the first writer decides whether a patch
will do or an anchor must come first; buckets are broadcast while the next ones are encoded and the last ones staged;
all commit, or none. The publisher's baseline moves on when every rank has committed.

The group must be one of its own (`torch.distributed.new_group`): nothing else may use it. When a rank joins, or one
is lost, build a new group and new objects over it: `CollectivePublisher(..., previous=old)` goes on with the run, and
whoever does not hold its baseline gets an anchor first.
"""

from __future__ import annotations

import contextlib
import itertools
import secrets
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ... import plan
from ...errors import PeerLost, SessionError, SparserlError
from ...parallel import Progress
from ...patch import Captured
from ...patch.contents import Stream
from ...sources import Source
from ...sources.modules import weights_of
from ...transport.groups.line import TIMEOUT, Bucket, CalledOff, Line
from ...weights.digest import Digest, table_digest
from ...weights.local import LocalWeights as AtHand
from ...weights.memory import Weights
from ...weights.shards import Shards, dump_places, load_places, require_whole
from ...weights.table import TensorTable
from ..background import Flight
from ..baseline import HostBaseline
from ..callbacks import Callback, Callbacks
from ..report import SyncReport, Watch
from ..store import transfer
from . import rounds
from .rounds import Apart, Behind, Course, Leg, Note, Round, Share

# How often publish was called on each group, by its writers: it outlives publishers.
_calls: weakref.WeakKeyDictionary[Any, dict[tuple[int, ...], int]] = weakref.WeakKeyDictionary()


class Sending:
    """A stream of which the first bucket is there already; it remembers what was sent."""

    def __init__(self, stream: Stream, keep: bool = False) -> None:
        self.stream = stream
        self._first = next(stream.buckets) if stream.count else b""
        self._keep, self.kept = keep, list[Bucket]()

    def __iter__(self) -> Iterator[Bucket]:
        for bucket in itertools.chain([self._first] if self.stream.count else [], self.stream.buckets):
            if self._keep:
                self.kept.append(bucket)
            yield bucket

    def share(self, rank: int) -> Share:
        return Share(rank, self.stream.count, self.stream.changed, len(self._first))

    def ends(self) -> tuple[Digest, Digest]:
        """Base and result without the terms of the tensor table, so that those of several ranks add up."""
        terms = table_digest(self.stream.table) if self.stream.covers is None else Digest()
        return self.stream.base - terms, self.stream.result - terms


@dataclass(frozen=True)
class _Baseline:
    """The bits that every rank had when it last committed, as far as this rank has them."""

    version: int
    bits: HostBaseline
    held: AtHand
    terms: Digest  # what the tensor table adds to the digest of the bits here, where they are whole

    @classmethod
    def of(cls, bits: HostBaseline) -> _Baseline:
        """Bits that no rank has committed yet."""
        held = AtHand.of(bits.weights)
        return cls(-1, bits, held, table_digest(held.table) if held.complete else Digest())

    @property
    def table(self) -> TensorTable:
        return self.held.table

    @property
    def digest(self) -> Digest:
        """Of all elements that are here, so that those of several ranks add up."""
        return self.bits.digest - self.terms


@dataclass
class _Taken:
    """What one publish has to send: the baseline, and the changes since."""

    call: int
    baseline: _Baseline
    found: Captured | None
    patch: Sending | None
    legs: list[Sending] = field(default_factory=list)

    @property
    def now(self) -> Digest:
        return self.baseline.digest if self.patch is None else self.patch.ends()[1]


class CollectivePublisher:
    """Publishes the versions of one run to all other ranks of a process group.

    source: the weights, which may change between calls; a sharded trainer's writers hand over `Shards`.
    process_group: a group that nothing else uses. Its ranks are counted inside it.
    writers: the ranks that publish, the first of which leads; all others receive. Every writer calls `publish`.
    previous: the publisher on a group that this one replaces: its run, version and baseline are taken over.
    files: what travels with an anchor (config, tokenizer), by name.
    timeout: seconds that any single wait may take: for a rank to come, for a frame, for a rank to stage or commit.
    callbacks: are told what was published, and what went wrong; see `sparserl.metrics`.
    device: where frames lie while they are broadcast; "cuda" for NCCL.
    """

    def __init__(
        self,
        source: Source | Weights | Shards,
        process_group: Any,
        *,
        writers: Sequence[int] = (0,),
        previous: CollectivePublisher | None = None,
        files: Mapping[str, bytes] | None = None,
        profile: str = "auto",
        link: str | None = None,
        timeout: float = TIMEOUT,
        threads: int | None = None,
        progress: Progress | None = None,
        callbacks: Sequence[Callback] = (),
        device: str = "cpu",
    ) -> None:
        plan.candidates(profile)  # raises here, not in the middle of a publish
        self._line = Line(process_group, timeout, device)
        self.writers = tuple(writers)
        if self._line.rank not in self.writers:
            raise SessionError(f"rank {self._line.rank} is not among the writers {self.writers}")
        self._source, self._files = source, dict(files or {})
        self._profile, self._link, self._threads, self._progress = profile, link, threads, progress
        self._flight = Flight()
        self._callbacks = Callbacks(callbacks)
        self._run, self._created = secrets.token_hex(8), time.time()
        self._now: _Baseline | None = None
        self._last = -1  # the last version that some rank may have committed
        if previous is not None:
            previous.stop()
            self._run, self._created = previous._run, previous._created  # noqa: SLF001  # of the same class
            self._now, self._last = previous._now, previous._last  # noqa: SLF001

    @property
    def run(self) -> str | None:
        """The id of the run; None before its first version."""
        return None if self._now is None else self._run

    @property
    def version(self) -> int | None:
        """The newest version that every rank has committed; None before the first."""
        return None if self._now is None else self._now.version

    def publish(self, wait: bool = True) -> SyncReport | None:
        """Publish the weights as they are now, as the next version: on return every rank has committed it.

        Where a rank cannot stage it, nobody commits; where one cannot commit it, the next publish brings it back. Both
        raise, with the rank in the message, and so does a rank that hangs or is gone (`PeerLost`).

        With `wait=False`, returns None as soon as the changes are captured: the trainer may go on while they are
        encoded and sent. The next call, or `settle`, waits for that and raises what went wrong with it.
        """
        counts = _calls.setdefault(self._line.group, {})
        call = counts[self.writers] = counts.get(self.writers, 0) + 1
        self.settle()
        self._line.require()
        watch = Watch()
        with self._callbacks.failures("publish"):
            taken = self._take(call, watch)
        lead = self._line.rank == self.writers[0]

        def work() -> SyncReport:
            with self._callbacks.failures("publish"):
                report = (self._lead if lead else self._go_along)(taken, watch)
            self._callbacks.published(report)
            return report

        if wait:
            return work()
        self._flight.launch(work)
        return None

    def settle(self) -> SyncReport | None:
        """Wait for a publish that is in flight; returns its report, or raises what went wrong with it."""
        return self._flight.settle()

    def stop(self) -> None:
        """Wait for what is in flight, whatever becomes of it, and let go of the group without a word."""
        try:
            self.settle()
        except SparserlError:
            pass  # it was the group's last, and the group is being replaced
        finally:
            self._line.close()

    def close(self) -> None:
        """Wait for what is in flight, tell the subscribers that this was all, and let go of the group."""
        try:
            self.settle()
        finally:
            if self._line.broken is None and self._line.rank == self.writers[0]:
                rounds.close_rounds(self._line)
            self._line.close()

    def __enter__(self) -> CollectivePublisher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- what is to be sent --------------------------------------------------------------------------------------------

    def _take(self, call: int, watch: Watch) -> _Taken:
        """Look at the weights: afterwards they may change."""
        weights = weights_of(self._source)
        if (now := self._now) is None:
            with watch.stage("capture"):
                fresh = _Baseline.of(HostBaseline(weights, threads=self._threads))
            return _Taken(call, fresh, None, None)
        with watch.stage("find"):
            options: Any = {"profile": self._profile, "threads": self._threads, "progress": self._progress}
            found = now.bits.capture(weights, **options)
        with watch.stage("encode"):
            return _Taken(call, now, found, Sending(found.stream(link=self._link, threads=self._threads), keep=True))

    def _legs(self, taken: _Taken, anchor: bool, profiles: list[str] | None) -> list[Sending]:
        """What this rank sends: the baseline from nothing, where it is asked for, and the changes since."""
        legs = []
        if anchor:
            legs.append(Sending(Stream.of(transfer.anchor_of(taken.baseline.bits.weights, self._threads))))
        if taken.found is not None and taken.patch is not None:
            if profiles is not None:
                stream = taken.found.stream(link=self._link, profiles=profiles, threads=self._threads)
                taken.patch = Sending(stream, keep=True)
            legs.append(taken.patch)
        taken.legs = legs
        return legs

    # -- the first writer ----------------------------------------------------------------------------------------------

    def _lead(self, taken: _Taken, watch: Watch) -> SyncReport:
        line, table, before = self._line, taken.baseline.table, self._line.moved
        round, course = self._agreed(taken, watch)
        round.tell("course", course.to_note())
        self._transfer(course, taken, watch)
        with watch.stage("stage"):
            rounds.judge(round, line.others)
        with watch.stage("commit"):
            failed = self._outcome(round, course)
        if failed:
            raise SessionError(
                f"version {course.version} was not committed everywhere: {failed}. "
                "The next publish starts from what each rank holds"
            )
        self._advance(taken, course, watch)
        return rounds.report(course, table, line.moved - before, watch.seconds)

    def _agreed(self, taken: _Taken, watch: Watch) -> tuple[Round, Course]:
        """A round that every rank has come to, and what all of them will get.

        Writers must come with the same call of publish: were one of them interrupted in an earlier call, a version
        would have the weights of two steps. A call that is behind raises, on whichever rank it is; the next one of
        that rank is waited for.
        """
        while True:
            with watch.stage("gather"):
                table = taken.baseline.table
                round = rounds.open_round(self._line, self.writers, self._run, self._created, table, taken.call)
            try:
                with watch.stage("gather"):
                    hellos = round.hear("hello", self._line.others, "come to the sync")
                with watch.stage("encode"):
                    return round, self._course(round, taken, hellos)
            except BaseException as error:
                rounds.call_off(round, error)
                if not isinstance(error, Behind):
                    raise

    def _course(self, round: Round, taken: _Taken, hellos: dict[int, Note]) -> Course:
        """Decide what all ranks will get."""
        if failed := rounds.failures(hellos):
            raise SessionError(f"not every rank can take part: {failed}")
        line, terms = self._line, table_digest(taken.baseline.table)
        others = [rank for rank in self.writers if rank != line.rank]
        if ahead := [rank for rank in others if hellos[rank]["call"] > taken.call]:
            raise SessionError(f"rank {ahead[0]} left this publish and came with its next one; nothing was committed")
        if any(hellos[rank]["call"] < taken.call for rank in others):
            raise Behind("a writer came with an earlier publish; its next one is waited for")
        if any(hellos[rank]["version"] != taken.baseline.version for rank in others):
            self._now = None
            raise Apart("the writers do not start from one version; the next publish begins with an anchor")
        old = sum((Digest.from_hex(hellos[rank]["old"]) for rank in others), taken.baseline.digest + terms)
        new = sum((Digest.from_hex(hellos[rank]["new"]) for rank in others), taken.now + terms)
        receivers = [hello for rank, hello in hellos.items() if rank not in self.writers]
        anchor = any(hello["digest"] not in (old.hex, new.hex) for hello in receivers)
        limits = [set(hello["profiles"]) for hello in receivers if hello["profiles"] is not None]
        profiles = sorted(set.intersection(*limits)) if limits else None
        if others:
            round.tell("plan", {"anchor": anchor, "profiles": profiles})
        mine = self._legs(taken, anchor, profiles)
        shares = round.hear("share", others, "encode its part")
        if failed := rounds.failures(shares):
            raise SessionError(f"not every writer could encode its part: {failed}")
        if anchor:
            places = [taken.baseline.held.places, *(load_places(shares[rank]["places"]) for rank in others)]
            require_whole(taken.baseline.table, places)
        legs = []
        for i, sending in enumerate(mine):
            of_others = [shares[rank]["legs"][i] for rank in others]
            base, result = sending.ends()
            base = sum((Digest.from_hex(row[0]) for row in of_others), base + terms)
            result = sum((Digest.from_hex(row[1]) for row in of_others), result + terms)
            every = (sending.share(line.rank), *(Share(*row[2]) for row in of_others))
            legs.append(Leg(anchor and i == 0, base, result, every))
        course = Course(self._run, self._created, self._last + 1, new, tuple(legs))
        return course.with_files(self._files, line.rank) if anchor else course

    def _transfer(self, course: Course, taken: _Taken, watch: Watch) -> None:
        files = list(self._files.values())
        try:
            with watch.stage("send"):
                rounds.transfer(self._line, course, [iter(leg) for leg in taken.legs], files, _ignore)
        except CalledOff as error:
            raise SessionError(f"nothing was committed: {error}") from error
        except (SparserlError, OSError, MemoryError):
            raise  # either the line is broken, or all ranks know that nothing more comes
        except BaseException as error:
            self._line.abandon(f"{type(error).__name__} while sending")
            raise

    def _outcome(self, round: Round, course: Course) -> str:
        """Let all commit; which receivers did not, also for the other writers to know."""
        receivers = [rank for rank in self._line.others if rank not in self.writers]
        self._last = course.version
        try:
            round.tell("verdict", {})
            failed = rounds.committed(round, receivers)
        except BaseException as error:
            failed = rounds.told(error)["error"]
            round.tell("outcome", {"failed": failed})
            if isinstance(error, PeerLost):
                raise PeerLost(f"{error}. Version {course.version} may be committed on some ranks only") from error
            raise
        round.tell("outcome", {"failed": failed})
        return failed

    def _advance(self, taken: _Taken, course: Course, watch: Watch) -> None:
        """Every rank has committed: what was published is the baseline now."""
        baseline = taken.baseline
        with watch.stage("baseline"):
            if taken.found is not None and taken.patch is not None:
                self._now = None  # were this interrupted, a copy would be taken anew
                patch = taken.patch.stream.patch(taken.patch.kept)
                baseline.bits.advance(patch, taken.found, self._threads)
            self._now = replace(baseline, version=course.version)
        if (committed := getattr(self._source, "committed", None)) is not None:
            committed()  # a source that tracks changes counts them from here

    # -- the other writers ---------------------------------------------------------------------------------------------

    def _go_along(self, taken: _Taken, watch: Watch) -> SyncReport:
        line, lead, before = self._line, self.writers[0], self._line.moved
        with watch.stage("gather"):
            round, course = self._joined(taken)
        self._transfer(course, taken, watch)
        self._last = course.version
        round.tell("ack", {})
        with watch.stage("stage"):
            verdict = round.hear("verdict", [lead], "say whether to commit", 2.0)[lead]
        if "off" in verdict:
            raise SessionError(f"the version was not committed anywhere: {verdict['off']}")
        with watch.stage("commit"):
            failed = round.hear("outcome", [lead], "say whether all have committed", 2.0)[lead]["failed"]
        if failed:
            raise SessionError(f"version {course.version} was not committed everywhere: {failed}")
        self._advance(taken, course, watch)
        return rounds.report(course, taken.baseline.table, line.moved - before, watch.seconds)

    def _joined(self, taken: _Taken) -> tuple[Round, Course]:
        """The round of the lead's same call of publish, and what will be sent in it."""
        line, lead = self._line, self.writers[0]
        ends = {"old": taken.baseline.digest.hex, "new": taken.now.hex, "version": taken.baseline.version}
        while True:
            round = rounds.join_round(line, lead, time.monotonic() + line.timeout)
            if round is None:
                raise PeerLost(f"rank {lead} did not begin to publish within {line.timeout:g} s")
            round.tell("hello", {**ends, "call": taken.call})
            if round.opened["call"] > taken.call:
                raise SessionError(f"rank {lead} left this publish and came with its next one; nothing was committed")
            heard = self._heard(round, taken)
            if "off" not in heard:
                return round, Course.of_note(heard)
            if heard["afresh"]:
                self._now = None
            if round.opened["call"] == taken.call and not heard["again"]:
                raise SessionError(f"the sync was called off: {heard['off']}")

    def _heard(self, round: Round, taken: _Taken) -> Note:
        """Say what this writer will send, and hear what all will get; or that the round was called off."""
        lead = self.writers[0]
        self._run, self._created = round.opened["run"], round.opened["created"]
        try:
            heard = self._plan_or_course(round, lead)
            share = self._share(round, taken, heard) if "anchor" in heard else None
        except BaseException as error:
            with contextlib.suppress(PeerLost):
                round.tell("share", rounds.told(error))
            raise
        if share is None:
            return heard
        round.tell("share", share)
        return rounds.hear_course(round, lead)

    def _share(self, round: Round, taken: _Taken, plan: Note) -> Note:
        rank, baseline = self._line.rank, taken.baseline
        legs = self._legs(taken, plan["anchor"], plan["profiles"])
        ends = [(*leg.ends(), leg.share(rank)) for leg in legs]
        note: Note = {"legs": [[base.hex, result.hex, list(vars(share).values())] for base, result, share in ends]}
        if plan["anchor"]:
            rounds.table_of(round)[0].require(baseline.table, f"rank {self.writers[0]}", f"rank {rank}")
            note["places"] = dump_places(baseline.held.places)
        return note

    def _plan_or_course(self, round: Round, lead: int) -> Note:
        """The plan; or the course, where the round was called off before there was one."""
        end = time.monotonic() + 2 * self._line.timeout
        while time.monotonic() < end:
            for kind in ("plan", "course"):
                if round.there(kind):
                    return round.hear(kind, [lead], "plan")[lead]
            self._line.require_calm(f"waiting for the plan of rank {lead}")
            time.sleep(0.002)
        raise PeerLost(f"rank {lead} did not plan the sync within {2 * self._line.timeout:g} s")


def _ignore(_leg: int, _bucket: bytes) -> None:
    """What another writer sends is for the subscribers."""
