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

from ... import plan
from ...errors import PeerLost, SessionError, SparserlError
from ...parallel import Progress
from ...patch import Patch
from ...sources import PublishedSource
from ...sources.modules import as_source, weights_of
from ...transport.groups.frames import Bucket
from ...transport.groups.line import TIMEOUT, CalledOff, Line
from ...weights.digest import Digest, table_digest
from ...weights.shards import dump_places, load_places, require_whole
from ..background import BackgroundPublish, BackgroundSlot
from ..callbacks import Callback, Callbacks
from ..observing import Observing, PatchObserver
from ..options import BaselineOptions, EncodingOptions, require_timeout, require_writers
from ..profiles import common, none_in_common
from ..report import SyncReport, Watch
from . import rounds
from .outgoing import CapturedPublish, EncodeRequest, GroupBaseline, capture
from .rounds import Round, WriterBehind, WritersApart
from .transfer_plan import Note, PatchLeg, TransferPlan, WriterLeg

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
        source: The weights, which may change between calls: a torch module, a mapping from names to tensors or arrays,
            a function that returns one, the `Shards` of one rank, or a source such as
            `sparserl.sources.module(model, cast=torch.bfloat16)`.
        writers: The ranks that publish, the first of which leads; all others receive. Every writer calls `publish`.
        previous: The publisher on a group that this one replaces: its run, version and baseline are taken over.
        files: Files that travel with an anchor (config, tokenizer), by name.
        profile: How patches are encoded: `raw`, `gap`, `ulp`, `ctx`, or `auto`, which takes the smallest or, with
            `link`, the quickest.
        link: The bandwidth between the ranks, such as `25Gbit`, by which `auto` chooses.
        timeout: How many seconds any single wait may take: for a rank to come, for a bucket, for a rank to stage or
            commit.
        threads: How many threads to use; None for one a core.
        baseline: Where the bits of the last version are kept, to find changes, as for `Publisher`: `host`, `device`,
            `none` or `auto`. With `device`, changes of weights on a GPU are found and encoded there. With `none`, a
            rank that holds another version gets all weights, which takes a `publish` that is not in the background.
        memory: How many bytes a baseline may take in this process; None for as many as it needs.
        progress: Called with the number of bytes whenever some have been compared.
        callbacks: What is told about every publish, and about what went wrong; see `sparserl.metrics`.
        observe: A `sparserl.record.Recorder` of statistics from what has changed; of several writers each has its own.
        device: The torch device that buckets are broadcast from; None for `cuda` where the group's backend
            is NCCL, and for `cpu` elsewhere.

    Raises:
        SessionError: An option cannot be used, or this rank is not among the writers.
        WeightsError: The source has no tensors, or is no source.
    """

    baseline: str
    """Where the bits of the last version are kept, in words; empty before the first publish."""

    def __init__(
        self,
        process_group: Any,
        source: PublishedSource,
        *,
        writers: Sequence[int] = (0,),
        previous: GroupPublisher | None = None,
        files: Mapping[str, bytes] | None = None,
        profile: str = "auto",
        link: str | None = None,
        timeout: float = TIMEOUT,
        threads: int | None = None,
        baseline: str = "auto",
        memory: int | None = None,
        progress: Progress | None = None,
        callbacks: Sequence[Callback] = (),
        observe: PatchObserver | None = None,
        device: str | None = None,
    ) -> None:
        require_timeout("timeout", timeout)
        self._source = as_source(source)
        self._observing = Observing(observe, self._source)
        self._files = dict(files or {})
        self._encoding = EncodingOptions(profile, link, threads, progress)
        self._baseline_options = BaselineOptions(baseline, memory)
        self.baseline = ""
        self._callbacks = Callbacks(callbacks, "process group")
        self._background = BackgroundSlot()
        self._line = Line(process_group, timeout, device)
        self.writers = tuple(writers)
        require_writers(self.writers, self._line.size)
        if self._line.rank not in self.writers:
            raise SessionError(f"rank {self._line.rank} is not among the writers {self.writers}")
        self._run = secrets.token_hex(8)
        self._created = time.time()
        self._baseline: GroupBaseline | None = None
        self._last_version = -1  # the last that some rank may have committed
        if previous is not None:
            self._take_over(previous)

    def _take_over(self, previous: GroupPublisher) -> None:
        """Go on with the run of the publisher on a group that was replaced."""
        previous.stop()
        self._run = previous._run
        self._created = previous._created
        self._baseline = previous._baseline
        self.baseline = previous.baseline
        self._last_version = previous._last_version

    @property
    def run(self) -> str | None:
        """The id of the run; None before its first version."""
        return None if self._baseline is None else self._run

    @property
    def version(self) -> int | None:
        """The newest version that every rank has committed; None before the first."""
        return None if self._baseline is None else self._baseline.version

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
        return self._capture(in_background=False)()

    def publish_in_background(self) -> BackgroundPublish:
        """Publish the weights as they are now, and return as soon as the changes are captured.

        The trainer may go on while the changes are encoded and sent. The next call of the publisher waits for that,
        and raises what went wrong with it.

        Returns:
            The publish that is running; its `result()` waits for the report.

        Raises:
            SparserlError: The changes could not be captured, or an earlier publish in the background failed.
        """
        return self._background.start(self._capture(in_background=True))

    def _capture(self, *, in_background: bool) -> Callable[[], SyncReport]:
        """Take what a publish needs of the weights; returns what is left to do.

        in_background: whether the weights may change from now on.
        """
        counts = _calls.setdefault(self._line.group, {})
        counts[self.writers] = counts.get(self.writers, 0) + 1
        call = counts[self.writers]
        self._background.finish()
        self._line.require()
        watch = Watch()
        with self._callbacks.failures("publish"):
            captured = self._capture_weights(call, watch, in_background)
        leads = self._line.rank == self.writers[0]

        def complete() -> SyncReport:
            with self._callbacks.failures("publish"):
                report = self._publish_as_lead(captured, watch) if leads else self._publish_along(captured, watch)
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

    def _capture_weights(self, call: int, watch: Watch, in_background: bool) -> CapturedPublish:
        """Look at the weights, and keep a baseline of them if there is none."""
        weights = self._observing.captured(weights_of(self._source), watch)
        baseline = self._baseline
        if baseline is None:
            with watch.stage("capture"):
                baseline = GroupBaseline.of(
                    weights,
                    self._baseline_options,
                    tracked=hasattr(self._source, "committed"),
                    observed=self._observing.is_active,
                    threads=self._encoding.threads,
                )
            self.baseline = baseline.label
        return capture(weights, baseline, self._encoding, watch, call=call, in_background=in_background)

    def _encode(self, captured: CapturedPublish, request: EncodeRequest) -> list[WriterLeg]:
        """Get ready what this rank sends."""
        captured.encode(request, self._encoding)
        return [patch.leg(self._line.rank) for patch in captured.legs]

    # -- the first writer ----------------------------------------------------------------------------------------------

    def _publish_as_lead(self, captured: CapturedPublish, watch: Watch) -> SyncReport:
        line = self._line
        traffic_before = line.traffic
        round, plan = self._gather(captured, watch)
        round.write("transfer", plan.to_note())
        self._transfer(plan, captured, watch)
        with watch.stage("stage"):
            rounds.require_staged(round, line.others)
        with watch.stage("commit"):
            failed = self._commit_everywhere(round, plan)
        if failed:
            raise SessionError(
                f"version {plan.version} was not committed everywhere: {failed}. "
                "The next publish starts from what each rank holds"
            )
        self._advance(captured, plan, watch)
        return rounds.report(plan, captured.baseline.table, line.traffic - traffic_before, watch.seconds)

    def _gather(self, captured: CapturedPublish, watch: Watch) -> tuple[Round, TransferPlan]:
        """A round that every rank has come to, and what all of them will get.

        Writers must come with the same call of publish: were one of them interrupted in an earlier call, a version
        would have the weights of two steps. A call that is behind raises, on whichever rank it is; the next one of
        that rank is waited for.
        """
        while True:
            with watch.stage("gather"):
                table = captured.baseline.table
                round = rounds.open_round(self._line, self.writers, self._run, self._created, table, captured.call)
            try:
                with watch.stage("gather"):
                    hellos = round.read("hello", self._line.others, "come to the sync")
                with watch.stage("encode"):
                    return round, self._plan_transfer(round, captured, hellos)
            except BaseException as error:
                rounds.call_off(round, error)
                if not isinstance(error, WriterBehind):
                    raise

    def _plan_transfer(self, round: Round, captured: CapturedPublish, hellos: dict[int, Note]) -> TransferPlan:
        """Decide what all ranks will get."""
        self._require_same_publish(captured, hellos)
        terms = table_digest(captured.baseline.table)
        writer_hellos = [hellos[rank] for rank in self._other_writers]
        old = sum((Digest.from_hex(hello["old"]) for hello in writer_hellos), captured.baseline.digest + terms)
        new = sum((Digest.from_hex(hello["new"]) for hello in writer_hellos), captured.result + terms)
        receiver_hellos = {rank: hello for rank, hello in hellos.items() if rank not in self.writers}
        has_bits = captured.baseline.has_bits and all(hello["has_bits"] for hello in writer_hellos)
        request = _request_for(receiver_hellos, (old, new), has_bits, captured.changes is not None)
        if self._other_writers:
            round.write("encode", request._asdict())
        own_legs = self._encode(captured, request)
        shares = self._read_shares(round, captured, request)
        other_legs = [[WriterLeg.of_row(row) for row in share["legs"]] for share in shares]
        legs = [
            PatchLeg.of_writers(request.anchor and number == 0, writer_legs, terms)
            for number, writer_legs in enumerate(zip(own_legs, *other_legs, strict=True))
        ]
        plan = TransferPlan(self._run, self._created, self._last_version + 1, new, tuple(legs))
        return plan.with_files(self._files, self._line.rank) if request.anchor else plan

    @property
    def _other_writers(self) -> list[int]:
        return [rank for rank in self.writers if rank != self._line.rank]

    def _require_same_publish(self, captured: CapturedPublish, hellos: dict[int, Note]) -> None:
        """All ranks must be able to take part, and all writers must be at one call of publish and at one version."""
        if failed := rounds.failures(hellos):
            raise SessionError(f"not every rank can take part: {failed}")
        calls = {rank: hellos[rank]["call"] for rank in self._other_writers}
        for rank, call in calls.items():
            if call > captured.call:
                raise SessionError(f"rank {rank} left this publish and came with its next one; nothing was committed")
        if any(call < captured.call for call in calls.values()):
            raise WriterBehind("a writer came with an earlier publish; its next one is waited for")
        if any(hellos[rank]["version"] != captured.baseline.version for rank in calls):
            self._baseline = None
            raise WritersApart("the writers do not start from one version; the next publish begins with an anchor")

    def _read_shares(self, round: Round, captured: CapturedPublish, request: EncodeRequest) -> list[Note]:
        """What the other writers send. With an anchor, all shares together must be the whole weights."""
        shares = round.read("share", self._other_writers, "encode its part")
        if failed := rounds.failures(shares):
            raise SessionError(f"not every writer could encode its part: {failed}")
        notes = [shares[rank] for rank in self._other_writers]
        if request.anchor:
            places = [captured.baseline.places, *(load_places(note["places"]) for note in notes)]
            require_whole(captured.baseline.table, places)
        return notes

    def _transfer(self, plan: TransferPlan, captured: CapturedPublish, watch: Watch) -> None:
        files = list(self._files.values())
        try:
            with watch.stage("send"):
                rounds.transfer(self._line, plan, [iter(leg) for leg in captured.legs], files, _ignore)
        except CalledOff as error:
            raise SessionError(f"nothing was committed: {error}") from error
        except (SparserlError, OSError, MemoryError):
            raise  # either the line is broken, or all ranks know that nothing more comes
        except BaseException as error:
            self._line.abandon(f"{type(error).__name__} while sending")
            raise

    def _commit_everywhere(self, round: Round, plan: TransferPlan) -> str:
        """Let all commit; which receivers did not, also for the other writers to know."""
        receivers = [rank for rank in self._line.others if rank not in self.writers]
        self._last_version = plan.version
        try:
            round.write("verdict", {})
            failed = rounds.commit_failures(round, receivers)
        except BaseException as error:
            round.write("outcome", {"failed": rounds.error_text(error)})
            if isinstance(error, PeerLost):
                raise PeerLost(f"{error}. Version {plan.version} may be committed on some ranks only") from error
            raise
        round.write("outcome", {"failed": failed})
        return failed

    def _advance(self, captured: CapturedPublish, plan: TransferPlan, watch: Watch) -> None:
        """Every rank has committed: what was published is the baseline now."""
        baseline = captured.baseline
        threads = self._encoding.threads
        patch = None if captured.patch is None else Patch(captured.patch.contents)
        if patch is None:
            self._observing.begun()
        else:
            self._observing.committed(plan.version, patch, baseline.kept, threads, watch)
        with watch.stage("baseline"):
            if captured.changes is not None and patch is not None:
                self._baseline = None  # were this interrupted, a copy would be taken anew
                baseline.kept.advance(patch, captured.changes, threads)
            self._baseline = replace(baseline, version=plan.version)
        if (committed := getattr(self._source, "committed", None)) is not None:
            committed()  # a source that tracks changes counts them from here

    # -- the other writers ---------------------------------------------------------------------------------------------

    def _publish_along(self, captured: CapturedPublish, watch: Watch) -> SyncReport:
        """Publish as the lead says."""
        line = self._line
        lead = self.writers[0]
        traffic_before = line.traffic
        with watch.stage("gather"):
            round, plan = self._join(captured)
        self._transfer(plan, captured, watch)
        self._last_version = plan.version
        round.write("staged", {})
        with watch.stage("stage"):
            verdict = rounds.read_verdict(round, lead)
        if "off" in verdict:
            raise SessionError(f"the version was not committed anywhere: {verdict['off']}")
        with watch.stage("commit"):
            outcome = round.read("outcome", [lead], "say whether all have committed", rounds.PATIENT)[lead]
        if outcome["failed"]:
            raise SessionError(f"version {plan.version} was not committed everywhere: {outcome['failed']}")
        self._advance(captured, plan, watch)
        return rounds.report(plan, captured.baseline.table, line.traffic - traffic_before, watch.seconds)

    def _join(self, captured: CapturedPublish) -> tuple[Round, TransferPlan]:
        """The round of the lead's same call of publish, and what will be sent in it."""
        line = self._line
        lead = self.writers[0]
        hello = {
            "old": captured.baseline.digest.hex,
            "new": captured.result.hex,
            "version": captured.baseline.version,
            "has_bits": captured.baseline.has_bits,
            "call": captured.call,
        }
        while True:
            round = rounds.join_round(line, lead, time.monotonic() + line.timeout)
            if round is None:
                raise PeerLost(f"rank {lead} did not begin to publish within {line.timeout:g} s")
            round.write("hello", hello)
            if round.opened["call"] > captured.call:
                raise SessionError(f"rank {lead} left this publish and came with its next one; nothing was committed")
            note = self._read_transfer(round, captured)
            if "off" not in note:
                return round, TransferPlan.of_note(note)
            if note["afresh"]:
                self._baseline = None
            if round.opened["call"] == captured.call and not note["again"]:
                raise SessionError(f"the sync was called off: {note['off']}")

    def _read_transfer(self, round: Round, captured: CapturedPublish) -> Note:
        """Say what this writer will send, and read what all will get; or that the round was called off."""
        lead = self.writers[0]
        self._run = round.opened["run"]
        self._created = round.opened["created"]
        try:
            note = self._read_request(round, lead)
            share = self._share(round, captured, EncodeRequest(**note)) if "anchor" in note else None
        except BaseException as error:
            with contextlib.suppress(PeerLost):
                round.write("share", rounds.error_note(error))
            raise
        if share is None:
            return note
        round.write("share", share)
        return rounds.read_transfer(round, lead)

    def _share(self, round: Round, captured: CapturedPublish, request: EncodeRequest) -> Note:
        """What this writer sends, for the lead to know."""
        baseline = captured.baseline
        note: Note = {"legs": [leg.to_row() for leg in self._encode(captured, request)]}
        if request.anchor:
            table, _ = rounds.table_of(round)
            table.require(baseline.table, f"rank {self.writers[0]}", f"rank {self._line.rank}")
            note["places"] = dump_places(baseline.places)
        return note

    def _read_request(self, round: Round, lead: int) -> Note:
        """What the lead asks the writers to encode; or that it has called the round off before it asked."""
        end = time.monotonic() + rounds.PATIENT * self._line.timeout
        while time.monotonic() < end:
            for kind in ("encode", "transfer"):
                if round.has(kind):
                    return round.read(kind, [lead], "plan")[lead]
            self._line.require_no_alarm(f"waiting for the plan of rank {lead}")
            time.sleep(0.002)
        raise PeerLost(f"rank {lead} did not plan the sync within {rounds.PATIENT * self._line.timeout:g} s")


def _request_for(
    receiver_hellos: Mapping[int, Note], ends: tuple[Digest, Digest], has_bits: bool, has_changes: bool
) -> EncodeRequest:
    """What all receivers can take: with an anchor, if one of them holds neither the old version nor the new.

    has_bits: whether all writers have the bits of the old version, which an anchor can be made of.
    has_changes: whether there is an old version.
    """
    digests = [end.hex for end in ends]
    needs_anchor = any(hello["digest"] not in digests for hello in receiver_hellos.values())
    of_new = needs_anchor and not has_bits
    limits = {f"rank {rank}": hello["profiles"] for rank, hello in receiver_hellos.items()}
    profiles = common(limits.values())
    if has_changes and not of_new and not plan.candidates("auto", profiles):
        raise SessionError(none_in_common({rank: names for rank, names in limits.items() if names is not None}))
    return EncodeRequest(needs_anchor, None if profiles is None else sorted(profiles), of_new)


def _ignore(_leg: int, _bucket: Bucket) -> None:
    """What another writer sends is for the subscribers."""
