"""The trainer's side: every publish makes one more version, which is seen when the head moves and not before.

    find changes ──► encode ──► buckets ──► manifest ──► index ──► head, if it is still ours ──► baseline
    └─ captured: the trainer may go on                              └─ committed

A publish that fails before the head moved has changed nothing: the next one finds the changes again.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ...errors import SessionError, TensorMismatch
from ...parallel import Progress
from ...patch import Patch
from ...sources import PublishedSource
from ...sources.modules import as_source, weights_of
from ...transport.groups.gather import RankGather
from ...transport.stores.base import Store
from ...transport.stores.opening import open_writable
from ...weights.digest import Digest
from ...weights.local import LocalWeights
from ...weights.memory import Weights
from ...weights.shards import Shards
from ..anchors import anchor_of
from ..background import BackgroundPublish, BackgroundSlot
from ..baseline import Baseline, CapturedChanges, HostBaseline, choose_baseline
from ..callbacks import Callback, Callbacks
from ..logs import log
from ..observing import Observing, PatchObserver
from ..options import BaselineOptions, EncodingOptions, require_count, require_number, require_timeout
from ..report import SyncReport, Watch
from ..source_check import SourceCheck
from . import side_files
from .fields import checked_clock
from .head import HOW_TO_REPLACE, HeadWriter
from .label import Label
from .layouts import has_new_layout, write_layout
from .maintenance import Maintenance, RetentionOptions
from .resume import SavedAnchor, resume_run
from .run_writer import CommittedVersion, RunWriter, published_report
from .signing import PublicKeys, PublisherKeys
from .transfer import Upload
from .writers import Writers

_Completion = Callable[[], SyncReport]  # what is left of a publish once the weights may change


class Publisher:
    """Publishes the versions of one run to a store, for any number of subscribers.

    One publisher at a time may write to a store: a second one fences the first off. Several threads may call a
    publisher: their calls take turns.

    >>> import numpy as np, sparserl, tempfile
    >>> weights = {"w": np.zeros(1000, np.float32)}
    >>> publisher = sparserl.Publisher(f"file://{tempfile.mkdtemp()}", weights)
    >>> publisher.publish().kind
    'anchor'
    >>> weights["w"][7] = 1
    >>> report = publisher.publish()
    >>> (report.version, report.changed)
    (1, 1)

    Args:
        url: Where to publish: a folder, an `s3://`, `gs://` or `az://` URL, or an open store.
        source: The weights, which may change between calls: a torch module, a mapping from names to tensors or arrays,
            a function that returns one, the `Shards` of one rank, or a source such as
            `sparserl.sources.module(model, cast=torch.bfloat16)`.
        signing_key: The secret Ed25519 key to sign heads with (see `sparserl keygen`); None to sign nothing.
        trusted_keys: Further public keys whose runs this publisher may go on with, such as a key that was replaced.
        files: Files that travel with the weights, by name or in a folder, beside those that the source brings along.
        state: A folder on this machine that survives a restart. With it, a publisher that was killed goes on with its
            run from the anchor that it saved there, and fetches only the patches since then. Without it, or when it
            does not fit the run in the store, the publisher fetches the anchor too. One publisher at a time has the
            folder; a second one is refused. Of several writers each has a folder in it, and saves its own shards.
        new_run: Whether to leave the run that the store has, and begin another: subscribers then fetch all weights
            again. Without it, a publisher goes on with that run, or is refused where it cannot.
        profile: How patches are encoded: `raw`, `gap`, `ulp`, `ctx`, or `auto`, which takes the smallest or, with
            `link`, the quickest.
        link: The bandwidth between the publisher and its subscribers, such as `25Gbit`, by which `auto` chooses.
            `measured`: as it was in the last 32 transfers of publisher and subscribers, who write that to their
            leases. For None, and where no subscriber has told of it yet, `auto` takes the smallest.
        anchor_after: An anchor is written when the patches since the last one add up to this many times its bytes.
        keep_anchors: How many anchors stay in the store.
        ladder: Squashed patches are written over so many versions, twice as many and so on, from the first number up
            to the second, where they take less than the patches they stand for. Late subscribers take them. None for
            no squashed patches.
        grace: How many seconds objects stay in the store after nothing refers to them any more.
        lease: How many seconds a subscriber that has not been heard of still keeps old versions from being removed.
        threads: How many threads to use; None for one a core.
        progress: Called with the number of bytes whenever some have been compared or sent.
        writers: The process group of a sharded trainer, each rank of which has a publisher with the `Shards` it holds.
            All make their publishers and call `publish` in step; each uploads its own buckets, and rank 0 moves the
            head when all are there. After a restart they may be more or fewer.
        timeout: How many seconds writers wait for one another; one that was stopped is noticed within 30 seconds.
        baseline: Where the bits of the last version are kept, to find changes: `host` for host memory; `device` for
            where the weights are, so that changes on a GPU are found and encoded there; `none` for a source that keeps
            the old bits of what changes itself (see `sparserl.sources.track`). `auto` takes `none` for such a source,
            unless there is an observer and `memory` has room for a copy, and `host` for others.
        memory: How many bytes a baseline may take in this process; None for as many as it needs.
        observe: A `sparserl.record.Recorder` of statistics from what has changed; of several writers each has its own.
        callbacks: What is told about every publish, and about what went wrong; see `sparserl.metrics`.
        clock: Gives the time in seconds since 1970.

    Raises:
        SessionError: An option cannot be used, the store can only be read, or the state folder is in use.
        WeightsError: The source has no tensors, or is no source.
        StoreError: The store cannot be reached.
    """

    baseline: str
    """Where the bits of the last version are kept, in words; empty before the first publish."""

    def __init__(
        self,
        url: str | Path | Store,
        source: PublishedSource,
        *,
        signing_key: str | None = None,
        trusted_keys: PublicKeys | None = None,
        files: Mapping[str, bytes] | str | Path | None = None,
        state: str | Path | None = None,
        new_run: bool = False,
        profile: str = "auto",
        link: str | None = "measured",
        anchor_after: float = 1.0,
        keep_anchors: int = 2,
        ladder: tuple[int, int] | None = (8, 64),
        grace: float = 600.0,
        lease: float = 120.0,
        threads: int | None = None,
        progress: Progress | None = None,
        writers: Any = None,
        timeout: float = 600.0,
        baseline: str = "auto",
        memory: int | None = None,
        observe: PatchObserver | None = None,
        callbacks: Sequence[Callback] = (),
        clock: Callable[[], float] = time.time,
    ) -> None:
        require_timeout("timeout", timeout)
        self._source = as_source(source)
        encoding = EncodingOptions(profile, link, threads, progress)
        self._baseline_options = BaselineOptions(baseline, memory)
        self._observing = Observing(observe, self._source)
        retention = RetentionOptions(anchor_after, keep_anchors, ladder, grace, lease)
        keys = PublisherKeys.of(signing_key, trusted_keys)
        clock = checked_clock(clock)
        clock()
        self._side_files = side_files.SideFiles(files, self._source)
        self._turn = threading.RLock()  # of the thread whose call is at work
        self._background = BackgroundSlot()
        self.baseline = ""

        self.store = open_writable(url)
        self._callbacks = Callbacks(callbacks, self.store.url)
        self._callbacks.watch_retries(self.store)
        self._source_check = SourceCheck(self._source, self.store.url)
        self._writers = Writers(None if writers is None else RankGather(writers, timeout))
        self._encoding_options = encoding
        self._is_closed = False
        self._had_run = False  # whether a version of this publisher was committed
        saved_anchor = None
        try:
            with self._writers.call():  # whoever fails does not let the others wait
                if state is not None:
                    saved_anchor = SavedAnchor(self._writers.own_folder(Path(state)), self.store.url)
                head = HeadWriter(self.store, keys, self._writers, clock, new_run)
                self._run_writer = RunWriter(self.store, head, self._writers, clock, progress)
                self._maintenance = Maintenance(self._run_writer, retention, saved_anchor, encoding)
                if not new_run:
                    self._continue_run(head, saved_anchor)
        except BaseException:
            self._writers.close()
            self.store.close()
            if saved_anchor is not None:
                saved_anchor.close()
            raise

    @property
    def run(self) -> str | None:
        """The id of the run; None before its first version."""
        return None if self._committed is None else self._committed.run.run

    @property
    def version(self) -> int | None:
        """The newest committed version; None before the first."""
        return None if self._committed is None else self._committed.head.version

    def publish(self, *, step: int | None = None, note: str | None = None) -> SyncReport:
        """Publish the weights as they are now, as the next version.

        Args:
            step: The training step of these weights, which `sparserl log` shows. Several writers must publish the
                weights of one step: ranks that name different ones are refused.
            note: A few words about the version, which `sparserl log` shows: up to 200 characters in one line.

        Returns:
            What was published, how large it is, and how long each stage took.

        Raises:
            Fenced: Another publisher has taken over; this one must not go on.
            StoreError: The store failed; nothing was published, and the next publish has these changes too.
            SparserlError: Something else went wrong, perhaps with an earlier publish in the background.
        """
        with self._turn:
            self._require_open()
            self._background.finish()
            with self._callbacks.failures("publish"), self._writers.call():
                return self._report(self._capture(Label.of(step, note), at_once=False)())

    def publish_in_background(self, *, step: int | None = None, note: str | None = None) -> BackgroundPublish:
        """Publish the weights as they are now, and return as soon as the changes are captured.

        The trainer may go on while the changes are encoded and sent. The next call of the publisher waits for that,
        and raises what went wrong with it.

        Args:
            step: As for `publish`.
            note: As for `publish`.

        Returns:
            The publish that is running; its `result()` waits for the report.

        Raises:
            SparserlError: The changes could not be captured, or an earlier publish in the background failed.
        """
        with self._turn:
            self._require_open()
            self._background.finish()
            with self._callbacks.failures("publish"), self._writers.call():
                complete = self._capture(Label.of(step, note), at_once=True)

            def work() -> SyncReport:
                with self._callbacks.failures("publish"), self._writers.call(begin=False):
                    return self._report(complete())

            return self._background.start(work)

    def wait(self, version: int, subscribers: int, timeout: float = 600.0) -> int:
        """Wait until so many subscribers hold a version or a later one.

        Args:
            version: The version that they should hold, or a later one.
            subscribers: How many subscribers to wait for.
            timeout: How many seconds to wait at most.

        Returns:
            How many subscribers hold it: fewer than `subscribers` if time is up.
        """
        require_count("subscribers", subscribers, 0)
        require_number("timeout", timeout, 0)
        return self._run_writer.wait(version, subscribers, timeout)

    def close(self) -> None:
        """Wait for a publish in the background, and let go of the store.

        Raises:
            SparserlError: The publish in the background failed, and nobody was told yet.
        """
        try:
            with self._turn:
                self._background.finish()
        finally:
            self._is_closed = True
            self._writers.close()
            self._maintenance.close()
            self.store.close()

    def __enter__(self) -> Publisher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _require_open(self) -> None:
        if self._is_closed:
            raise SessionError("the publisher is closed; make another one, which continues the run")

    # -- capturing -----------------------------------------------------------------------------------------------------

    @property
    def _committed(self) -> CommittedVersion | None:
        return self._run_writer.committed

    @property
    def _encoding(self) -> EncodingOptions:
        return self._run_writer.measured_link.resolve(self._encoding_options)

    def _choose_baseline(
        self, weights: Weights | Shards, own_digest: Digest | None, options: BaselineOptions
    ) -> Baseline:
        baseline, self.baseline = choose_baseline(
            weights,
            options,
            tracked=hasattr(self._source, "committed"),
            observed=self._observing.is_active,
            threads=self._encoding.threads,
            own_digest=own_digest,
        )
        return baseline

    def _continue_run(self, writer: HeadWriter, saved_anchor: SavedAnchor | None) -> None:
        """Go on with the run that the store has; where that cannot be done, it is not replaced without a word."""
        head = writer.head_to_continue()
        if head is None:
            return
        weights = partial(weights_of, self._source)
        resumed = resume_run(self.store, self._writers, head, saved_anchor, weights, self._encoding)

        choose = partial(self._choose_baseline, resumed.weights, resumed.digest)
        baseline = self._writers.choose_alike(self._baseline_options, choose)
        self._run_writer.committed = CommittedVersion(resumed.run, head, resumed.index, baseline)
        self._source_check.resume()
        log.info("%s: continuing run %s at version %d", self.store.url, head.run, head.version)

    def _capture(self, label: Label, *, at_once: bool) -> _Completion:
        """Take what a publish needs of the weights; returns what is left to do.

        at_once: whether to take all of it, since the weights may change from now on; else changes are found while
            others are encoded and sent.
        """
        watch = Watch()
        self._run_writer.resolve()
        self._require_one_step(label.step)
        committed = self._committed
        if committed is None:
            return self._capture_first(label, watch)
        return self._capture_changes(committed, label, watch, at_once=at_once)

    def _require_one_step(self, step: int | None) -> None:
        """All ranks must be at one step, and start from one version; if one has lost its baseline, a new run begins."""
        nonce = None if self._committed is None else self._committed.head.nonce
        receivers = self._maintenance.receivers
        rows = self._writers.together("meet", lambda: json.dumps([step, nonce, receivers.heard()]).encode())
        steps, nonces, heard = zip(*map(json.loads, rows), strict=True)
        receivers.agree(heard)
        if len(set(steps)) > 1:
            raise SessionError(f"the ranks are not at one step: {list(steps)}")
        if len(set(nonces)) > 1:
            self._run_writer.committed = None

    def _capture_first(self, label: Label, watch: Watch, last: CommittedVersion | None = None) -> _Completion:
        """Capture all weights: the first version of a new run, or of other tensors than the last version has."""
        work: list[_Completion] = []
        if self._had_run and last is None:
            log.warning("%s: the baseline was lost, so a new run begins: subscribers fetch all weights", self.store.url)

        def capture(options: BaselineOptions) -> Baseline:
            weights = self._observing.captured(weights_of(self._source), watch)
            with watch.stage("capture"):
                baseline = self._choose_baseline(weights, None, options)
            anchor = self._anchor_now(weights, watch) if baseline.weights is None else None
            named = label._replace(files=self._capture_files())
            work[:] = [partial(self._publish_first, LocalWeights.of(weights), baseline, anchor, named, watch, last)]
            return baseline

        self._writers.choose_alike(self._baseline_options, capture)
        return work[0]

    def _capture_changes(
        self, committed: CommittedVersion, label: Label, watch: Watch, *, at_once: bool
    ) -> _Completion:
        """Capture the changes since a version."""
        work: list[_Completion] = []
        encoding = self._encoding

        def capture() -> bytes:
            weights = self._observing.captured(weights_of(self._source), watch)
            try:
                with watch.stage("find"):
                    changes = committed.baseline.capture(
                        weights,
                        profile=self._maintenance.receivers.profile(encoding.profile),
                        holdings=self._run_writer.holdings,
                        threads=encoding.threads,
                        progress=encoding.progress,
                        timed=None if at_once else partial(watch.timed, "find"),
                        link=encoding.link,
                    )
            except TensorMismatch as error:
                if self._writers.size == 1 and has_new_layout(self.store, committed.run, weights):
                    work[:] = [self._capture_first(label, watch, committed)]
                    return b""
                raise TensorMismatch(
                    f"{self.store.url}: run {committed.run.run} has other tensors: {error}. {HOW_TO_REPLACE}"
                ) from error
            needs_anchor = committed.baseline.weights is None and self._maintenance.anchor_is_due(committed)
            anchor = self._anchor_now(weights, watch) if needs_anchor else None
            named = label._replace(files=self._capture_files())
            work[:] = [partial(self._publish_next, committed, changes, anchor, named, watch)]
            return b""

        self._writers.together("capture", capture)
        return work[0]

    def _capture_files(self) -> side_files.Captured | None:
        """The files of this version, which one rank sends."""
        return self._side_files.capture() if self._writers.rank == 0 else None

    def _anchor_now(self, weights: Weights | Shards, watch: Watch) -> Patch:
        """An anchor of weights that may change before it is sent."""
        holdings = self._run_writer.holdings_for(LocalWeights.of(weights).table)
        with watch.stage("encode"):
            return anchor_of(weights, self._encoding, holdings=holdings)

    # -- versions ------------------------------------------------------------------------------------------------------

    def _publish_first(
        self,
        local: LocalWeights,
        baseline: Baseline,
        ready_anchor: Patch | None,
        label: Label,
        watch: Watch,
        last: CommittedVersion | None,
    ) -> SyncReport:
        """An anchor: the first version of a new run, or the first with other tensors than the last version has."""
        if last is None:
            run = self._run_writer.begin_run(local.table, label.files)
        else:
            run = replace(last.run, later_table=local.table)
        self._writers.require_whole(local, run.layout)
        number = 0 if last is None else last.head.version + 1

        def encode(upload: Upload) -> Patch:
            with watch.stage("encode"):
                if ready_anchor is not None:
                    return upload.add_all(ready_anchor)
                return self._maintenance.encode_anchor(baseline.weights, upload)

        anchor, sent = self._run_writer.send(run, encode, watch)
        if isinstance(baseline, HostBaseline):
            baseline.set_digest(anchor.result)
        step = label.on(sent.step(None, number, self._run_writer.clock()))
        self._maintenance.begin_layout(anchor, run.run, number)
        with watch.stage("commit"):
            version = self._run_writer.commit(
                run,
                step,
                baseline,
                files=None if last is None else label.files,
                layout=None if last is None else write_layout(self.store, run.run, number, local.table),
                add_steps=(lambda _steps: (step,)) if last is None else self._maintenance.retaining(step),
                notify=self._notify_source,
            )
        self._observing.begun()
        self._maintenance.layout_begun(run.run)
        self._had_run = True
        notes = self._maintenance.run(version, anchor if self._maintenance.saves_anchors else ready_anchor, watch)
        return published_report(version, "anchor", sent, watch, notes)

    def _publish_next(
        self, committed: CommittedVersion, changes: CapturedChanges, anchor: Patch | None, label: Label, watch: Watch
    ) -> SyncReport:
        """A version after the first: a patch."""
        encoding = self._run_writer.measured_link.resolve(self._encoding_options, is_coded=committed.baseline.is_on_gpu)

        def encode(upload: Upload) -> Patch:
            with watch.stage("encode"):
                return changes.encode(link=encoding.link, to=upload.bucket_list(), threads=encoding.threads)

        head = committed.head
        patch, sent = self._run_writer.send(committed.run, encode, watch, head.digest)
        if sent.manifest.base != head.digest:
            self._run_writer.committed = None
            raise SessionError("the baseline is not the last version any more; the next publish begins a new run")
        step = label.on(sent.step(head.version, head.version + 1, self._run_writer.clock()))

        def advance() -> None:
            self._observing.committed(step.version, patch, committed.baseline, encoding.threads, watch)
            with watch.stage("baseline"):
                self._maintenance.add_changes(step.version, changes)
                committed.baseline.advance(patch, changes, encoding.threads)

        with watch.stage("commit"):
            self._had_run = True
            version = self._run_writer.commit(
                committed.run, step, committed.baseline, files=label.files, advance=advance, notify=self._notify_source
            )
        notes = self._maintenance.run(version, anchor, watch)
        return published_report(version, "patch", sent, watch, notes)

    def _notify_source(self) -> None:
        """A version is committed: a source that tracks changes counts them from here."""
        if (committed := getattr(self._source, "committed", None)) is not None:
            committed()

    def _report(self, report: SyncReport) -> SyncReport:
        self._callbacks.published(report)
        self._source_check.published(report)
        return report
