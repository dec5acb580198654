"""A publisher and its subscribers as the ranks of one process group: buckets by broadcast, nothing in between.

All ranks go through a sync in step (see `rounds`): each says what it holds; the first writer decides whether a patch
will do or an anchor must come first; buckets are broadcast while the next ones are encoded and the last ones staged;
all commit, or none. The publisher's baseline moves on when every rank has committed.

The group must be one of its own (`torch.distributed.new_group`): nothing else may use it. When a rank joins, or one
is lost, build a new group and new objects over it: `GroupPublisher(..., previous=old)` goes on with the run, and
whoever does not hold its baseline gets an anchor first.
"""

from __future__ import annotations

import contextlib
import secrets
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...errors import PeerLost, SessionError, SparserlError
from ...parallel import Progress
from ...patch import Patch
from ...sources import Source
from ...sources.modules import weights_of
from ...transport.groups.line import TIMEOUT, CalledOff, Line
from ...weights.digest import Digest, table_digest
from ...weights.memory import Weights
from ...weights.shards import Shards, dump_places, load_places, require_whole
from ..background import BackgroundPublish, BackgroundSlot
from ..baseline import HostBaseline
from ..callbacks import Callback, Callbacks
from ..options import EncodingOptions, require_source, require_timeout, require_writers
from ..report import SyncReport, Watch
from ..store import transfer
from . import rounds
from .outgoing import CapturedPublish, GroupBaseline, OutgoingPatch
from .rounds import Apart, Behind, Course, Leg, Note, Round, Share

# How often publish was called on each group, by its writers: it outlives publishers.
_calls: weakref.WeakKeyDictionary[Any, dict[tuple[int, ...], int]] = weakref.WeakKeyDictionary()


class GroupPublisher:
    """Publishes the versions of one run to all other ranks of a process group: no store is needed.

    >>> import numpy as np, sparserl, tempfile, torch.distributed as dist
    >>> store = dist.FileStore(f"{tempfile.mkdtemp()}/group", 1)
    >>> dist.init_process_group("gloo", store=store, rank=0, world_size=1)  # others would receive
    >>> with sparserl.GroupPublisher(dist.group.WORLD, {"w": np.zeros(9, np.float32)}) as publisher:
    ...     publisher.publish().version
    0
    >>> dist.destroy_process_group()

    Args:
        process_group: A `torch.distributed` group that nothing else uses; None for the group of all ranks. Ranks are
            counted inside it.
        source: The weights, which may change between calls: a mapping from names to tensors or arrays, the `Shards` of
            one rank, or a source such as `sparserl.sources.module(model)`.
        writers: The ranks that publish, the first of which leads; all others receive. Every writer calls `publish`.
        previous: The publisher on a group that this one replaces: its run, version and baseline are taken over.
        files: Files that travel with an anchor (config, tokenizer), by name.
        profile: How patches are encoded: `raw`, `gap`, `ulp`, `ctx`, or `auto`, which takes the smallest or, with
            `link`, the quickest.
        link: The bandwidth between the ranks, such as `25Gbit`, by which `auto` chooses.
        timeout: How many seconds any single wait may take: for a rank to come, for a bucket, for a rank to stage or
            commit.
        threads: How many threads to use; None for one a core.
        progress: Called with the number of bytes whenever some have been compared.
        callbacks: What is told about every publish, and about what went wrong; see `sparserl.metrics`.
        device: The torch device that buckets are broadcast from; `cuda` for NCCL.

    Raises:
        SessionError: An option cannot be used, or this rank is not among the writers.
        WeightsError: The source has no tensors, or is no source.
    """

    def __init__(
        self,
        process_group: Any,
        source: Source | Weights | Shards,
        *,
        writers: Sequence[int] = (0,),
        previous: GroupPublisher | None = None,
        files: Mapping[str, bytes] | None = None,
        profile: str = "auto",
        link: str | None = None,
        timeout: float = TIMEOUT,
        threads: int | None = None,
        progress: Progress | None = None,
        callbacks: Sequence[Callback] = (),
        device: str = "cpu",
    ) -> None:
        require_source(source)
        require_timeout("timeout", timeout)
        self._source = source
        self._files = dict(files or {})
        self._encoding = EncodingOptions(profile, link, threads, progress)
        self._callbacks = Callbacks(callbacks)
        self._background = BackgroundSlot()
        self._line = Line(process_group, timeout, device)
        self.writers = tuple(writers)
        require_writers(self.writers, self._line.size)
        if self._line.rank not in self.writers:
            raise SessionError(f"rank {self._line.rank} is not among the writers {self.writers}")
        self._run = secrets.token_hex(8)
        self._created = time.time()
        self._now: GroupBaseline | None = None
        self._last = -1  # the last version that some rank may have committed
        if previous is not None:
            self._take_over(previous)

    def _take_over(self, previous: GroupPublisher) -> None:
        """Go on with the run of the publisher on a group that was replaced."""
        previous.stop()
        self._run = previous._run
        self._created = previous._created
        self._now = previous._now
        self._last = previous._last

    @property
    def run(self) -> str | None:
        """The id of the run; None before its first version."""
        return None if self._now is None else self._run

    @property
    def version(self) -> int | None:
        """The newest version that every rank has committed; None before the first."""
        return None if self._now is None else self._now.version

    def publish(self) -> SyncReport:
        """Publish the weights as they are now, as the next version: on return every rank has committed it.

        Where a rank cannot stage it, nobody commits; where one cannot commit it, the next publish brings it back.

        Returns:
            What was published, how large it is, and how long each stage took.

        Raises:
            PeerLost: A rank hangs, is gone, or did not come; the message names it.
            SessionError: A rank could not stage or commit; the message names it.
            SparserlError: Something else went wrong, perhaps with an earlier publish in the background.
        """
        return self._capture()()

    def publish_in_background(self) -> BackgroundPublish:
        """Publish the weights as they are now, and return as soon as the changes are captured.

        The trainer may go on while the changes are encoded and sent. The next call of the publisher waits for that,
        and raises what went wrong with it.

        Returns:
            The publish that is running; its `result()` waits for the report.

        Raises:
            SparserlError: The changes could not be captured, or an earlier publish in the background failed.
        """
        return self._background.start(self._capture())

    def _capture(self) -> Callable[[], SyncReport]:
        """Take all that a publish needs of the weights, which may change from now on; returns what is left to do."""
        counts = _calls.setdefault(self._line.group, {})
        call = counts[self.writers] = counts.get(self.writers, 0) + 1
        self._background.finish()
        self._line.require()
        watch = Watch()
        with self._callbacks.failures("publish"):
            taken = self._take(call, watch)
        leads = self._line.rank == self.writers[0]

        def complete() -> SyncReport:
            with self._callbacks.failures("publish"):
                report = self._lead(taken, watch) if leads else self._go_along(taken, watch)
            self._callbacks.published(report)
            return report

        return complete

    def stop(self) -> None:
        """Wait for a publish in the background, whatever becomes of it, and let go of the group without a word."""
        try:
            self._background.finish()
        except SparserlError:
            pass  # it was the group's last, and the group is being replaced
        finally:
            self._line.close()

    def close(self) -> None:
        """Wait for a publish in the background, tell the subscribers that this was all, and let go of the group.

        Raises:
            SparserlError: The publish in the background failed, and nobody was told yet.
        """
        try:
            self._background.finish()
        finally:
            if self._line.broken is None and self._line.rank == self.writers[0]:
                rounds.close_rounds(self._line)
            self._line.close()

    def __enter__(self) -> GroupPublisher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- what is to be sent --------------------------------------------------------------------------------------------

    def _take(self, call: int, watch: Watch) -> CapturedPublish:
        """Look at the weights: afterwards they may change."""
        weights = weights_of(self._source)
        if (now := self._now) is None:
            with watch.stage("capture"):
                fresh = GroupBaseline.of(HostBaseline(weights, threads=self._encoding.threads))
            return CapturedPublish(call, fresh, None, None)
        with watch.stage("find"):
            options: Any = {
                "profile": self._encoding.profile,
                "threads": self._encoding.threads,
                "progress": self._encoding.progress,
            }
            found = now.bits.capture(weights, **options)
        with watch.stage("encode"):
            stream = found.stream(link=self._encoding.link, threads=self._encoding.threads)
            return CapturedPublish(call, now, found, OutgoingPatch(stream))

    def _legs(self, taken: CapturedPublish, anchor: bool, profiles: list[str] | None) -> list[OutgoingPatch]:
        """What this rank sends: the baseline from nothing, where it is asked for, and the changes since."""
        legs = []
        if anchor:
            whole = transfer.anchor_of(taken.baseline.bits.weights, self._encoding.threads)
            legs.append(OutgoingPatch(whole.contents))
        if taken.found is not None and taken.patch is not None:
            if profiles is not None:
                stream = taken.found.stream(link=self._encoding.link, profiles=profiles, threads=self._encoding.threads)
                taken.patch = OutgoingPatch(stream)
            legs.append(taken.patch)
        taken.legs = legs
        return legs

    # -- the first writer ----------------------------------------------------------------------------------------------

    def _lead(self, taken: CapturedPublish, watch: Watch) -> SyncReport:
        line, table, before = self._line, taken.baseline.table, self._line.traffic
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
        return rounds.report(course, table, line.traffic - before, watch.seconds)

    def _agreed(self, taken: CapturedPublish, watch: Watch) -> tuple[Round, Course]:
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

    def _course(self, round: Round, taken: CapturedPublish, hellos: dict[int, Note]) -> Course:
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

    def _transfer(self, course: Course, taken: CapturedPublish, watch: Watch) -> None:
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

    def _advance(self, taken: CapturedPublish, course: Course, watch: Watch) -> None:
        """Every rank has committed: what was published is the baseline now."""
        baseline = taken.baseline
        with watch.stage("baseline"):
            if taken.found is not None and taken.patch is not None:
                self._now = None  # were this interrupted, a copy would be taken anew
                baseline.bits.advance(Patch(taken.patch.contents), taken.found, self._encoding.threads)
            self._now = replace(baseline, version=course.version)
        if (committed := getattr(self._source, "committed", None)) is not None:
            committed()  # a source that tracks changes counts them from here

    # -- the other writers ---------------------------------------------------------------------------------------------

    def _go_along(self, taken: CapturedPublish, watch: Watch) -> SyncReport:
        line, lead, before = self._line, self.writers[0], self._line.traffic
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
        return rounds.report(course, taken.baseline.table, line.traffic - before, watch.seconds)

    def _joined(self, taken: CapturedPublish) -> tuple[Round, Course]:
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

    def _heard(self, round: Round, taken: CapturedPublish) -> Note:
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

    def _share(self, round: Round, taken: CapturedPublish, plan: Note) -> Note:
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
            self._line.require_no_alarm(f"waiting for the plan of rank {lead}")
            time.sleep(0.002)
        raise PeerLost(f"rank {lead} did not plan the sync within {2 * self._line.timeout:g} s")


def _ignore(_leg: int, _bucket: bytes) -> None:
    """What another writer sends is for the subscribers."""
