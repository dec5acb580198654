"""Publishes the versions of one run: what a version needs of the weights is captured, and then encoded and committed.

    find changes ──► encode ──► buckets ──► manifest ──► index ──► head, if it is still ours ──► baseline
    └─ captured: the trainer may go on                              └─ committed

A publish that fails before the head moved has changed nothing: the next one finds the changes again.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...errors import SessionError, TensorMismatch, WeightsError
from ...patch import Patch
from ...sources.modules import Source, weights_of
from ...transport.groups.gather import RankGather
from ...transport.stores.base import Store
from ...transport.stores.opening import open_writable
from ...weights.digest import Digest
from ...weights.local import LocalWeights
from ...weights.memory import Weights
from ...weights.shards import Shards
from ...weights.table import TensorTable
from ..anchors import anchor_of
from ..baseline import Baseline, CapturedChanges, HostBaseline, ResumedBaseline, choose_baseline
from ..callbacks import Callbacks
from ..logs import log
from ..observing import Observing
from ..options import BaselineOptions, EncodingOptions
from ..quantized_baseline import QuantizedBaseline
from ..report import SyncReport, Watch
from ..source_check import SourceCheck
from . import side_files
from .head import HOW_TO_REPLACE, HeadWriter
from .label import Label
from .layouts import has_new_layout, write_layout
from .maintenance import Maintenance, RetentionOptions
from .records import HeadRecord
from .resume import SavedAnchor, resume_run
from .run_writer import CommittedVersion, RunWriter, published_report
from .signing import PublisherKeys
from .transfer import Upload
from .writers import Writers

Completion = Callable[[], SyncReport]
"""What is left of a publish once the weights may change."""


@dataclass(frozen=True)
class RunOptions:
    """How a run is published; see `Publisher`."""

    keys: PublisherKeys
    files: Mapping[str, bytes] | str | Path | None
    state: Path | None
    new_run: bool
    encoding: EncodingOptions
    baseline: BaselineOptions
    retention: RetentionOptions
    writers: Any
    timeout: float
    clock: Callable[[], float]


class RunPublisher:
    """Publishes one run to one store, one call at a time. `Publisher` and `QuantizedRun` are the two kinds of it.

    Args:
        url: Where to publish.
        source: The weights.
        options: How.
        observing: What looks at patches.
        callbacks: What is told about them.
    """

    baseline: str
    """Where the bits of the last version are kept, in words; empty before the first publish."""

    def __init__(
        self,
        url: str | Path | Store,
        source: Source | Weights | Shards,
        options: RunOptions,
        observing: Observing,
        callbacks: Any = (),
    ) -> None:
        self._source = source
        self._baseline_options = options.baseline
        self._encoding = options.encoding
        self._observing = observing
        self._side_files = side_files.SideFiles(options.files, source)
        self.baseline = ""
        self.store = open_writable(url)
        self._callbacks = Callbacks(callbacks, self.store.url)
        self._callbacks.watch_retries(self.store)
        self._source_check = SourceCheck(source, self.store.url)
        self._writers = Writers(None if options.writers is None else RankGather(options.writers, options.timeout))
        self._had_run = False  # whether a version of this publisher was committed
        self._saved_anchor: SavedAnchor | None = None
        try:
            with self._writers.call():  # whoever fails does not let the others wait
                if options.state is not None:
                    folder = self._writers.own_folder(options.state)
                    self._saved_anchor = SavedAnchor(folder, self.store.url, options.keys.signing_key)
                head = HeadWriter(self.store, options.keys, self._writers, options.clock)
                self._run_writer = RunWriter(self.store, head, self._writers, options.clock, options.encoding.progress)
                self._maintenance = Maintenance(
                    self._run_writer, options.retention, self._saved_anchor, options.encoding, options.keys.accepted
                )
                if not options.new_run:
                    self._continue_run(head)
                elif head.has_run_to_leave:
                    self._maintenance.leave_run()
        except BaseException:
            self._writers.close()
            self.store.close()
            if self._saved_anchor is not None:
                self._saved_anchor.close()
            raise

    @property
    def run(self) -> str | None:
        """The id of the run; None before its first version."""
        return None if self._committed is None else self._committed.run.run

    @property
    def version(self) -> int | None:
        """The newest committed version; None before the first."""
        return None if self._committed is None else self._committed.head.version

    def _host_baseline(self) -> HostBaseline | None:
        """All bits of the newest committed version; None where they are not kept."""
        baseline = None if self._committed is None else self._committed.baseline
        return baseline if isinstance(baseline, HostBaseline) else None

    def _tell(self, report: SyncReport) -> SyncReport:
        """Tell the log, callbacks and checks of a version that was published."""
        self._callbacks.published(report)
        self._source_check.published(report)
        return report

    def _tell_failure(self, error: Exception) -> None:
        """Tell callbacks of a version that was not published."""
        self._callbacks.failed("publish", error)

    def _let_go(self) -> None:
        """Let go of the store, and of all that is kept for it."""
        self._writers.close()
        try:
            self._maintenance.close()
        finally:
            self.store.close()

    # -- capturing -----------------------------------------------------------------------------------------------------

    @property
    def _committed(self) -> CommittedVersion | None:
        return self._run_writer.committed

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

    def _live_weights(self, table: TensorTable | None = None) -> Weights | Shards:
        """The weights as they are now; tied tensors under the names that the table of a run has."""
        return weights_of(self._source, table)

    def _continue_run(self, writer: HeadWriter) -> None:
        """Go on with the run that the store has; where that cannot be done, it is not replaced without a word."""
        head = writer.head_to_continue()
        if head is None:
            return
        if self._saved_anchor is not None:
            self._saved_anchor.require_newest(head)
        self._run_writer.committed = self._rebuilt(head)
        self._source_check.resume()
        log.info("%s: continuing run %s at version %d", self.store.url, head.run, head.version)

    def _rebuilt(self, head: HeadRecord) -> CommittedVersion:
        """The version that a head names, with its bits."""
        resumed = resume_run(self.store, self._writers, head, self._saved_anchor, self._live_weights, self._encoding)
        choose = functools.partial(self._choose_baseline, resumed.weights, resumed.digest)
        baseline = self._writers.choose_alike(self._baseline_options, choose)
        return CommittedVersion(resumed.run, head, resumed.index, baseline)

    def _capture(self, label: Label, *, at_once: bool) -> Completion:
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

    def _capture_first(self, label: Label, watch: Watch, last: CommittedVersion | None = None) -> Completion:
        """Capture all weights: the first version of a new run, or of other tensors than the last version has."""
        work: list[Completion] = []
        if self._had_run and last is None:
            log.warning("%s: the baseline was lost, so a new run begins: subscribers fetch all weights", self.store.url)

        def capture(options: BaselineOptions) -> Baseline:
            table = None if last is None else last.run.layout
            weights = self._observing.captured(self._live_weights(table), watch)
            with watch.stage("capture"):
                baseline = self._choose_baseline(weights, None, options)
            anchor = self._anchor_now(weights, watch) if baseline.weights is None else None
            named = label._replace(files=self._capture_files())
            local = LocalWeights.of(weights)
            work[:] = [functools.partial(self._publish_first, local, baseline, anchor, named, watch, last)]
            return baseline

        self._writers.choose_alike(self._baseline_options, capture)
        return work[0]

    def _capture_changes(self, committed: CommittedVersion, label: Label, watch: Watch, *, at_once: bool) -> Completion:
        """Capture the changes since a version."""
        work: list[Completion] = []
        encoding = self._encoding

        def capture() -> bytes:
            weights = self._observing.captured(self._live_weights(committed.run.layout), watch)
            try:
                with watch.stage("find"):
                    changes = committed.baseline.capture(
                        weights,
                        profile=self._maintenance.receivers.profile,
                        profiles=self._maintenance.receivers.profiles,
                        holdings=self._run_writer.holdings,
                        threads=encoding.threads,
                        progress=encoding.progress,
                        timed=None if at_once else functools.partial(watch.timed, "find"),
                        link=encoding.link,
                    )
            except TensorMismatch as error:
                if self._writers.size == 1 and has_new_layout(self.store, committed.run, weights):
                    work[:] = [self._capture_first(label, watch, committed)]
                    return b""
                raise TensorMismatch(
                    f"{self.store.url}: run {committed.run.run} has other tensors: {error}. {HOW_TO_REPLACE}"
                ) from error
            anchor = self._anchor_now(weights, watch) if self._maintenance.needs_ready_anchor(committed) else None
            named = label._replace(files=self._capture_files())
            work[:] = [functools.partial(self._publish_next, committed, changes, anchor, named, watch)]
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
        self._run_writer.is_sending = True
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
        if isinstance(baseline, HostBaseline | QuantizedBaseline):
            baseline.set_digest(anchor.result)
        elif baseline.digest != anchor.result:
            raise WeightsError("the weights changed while they were published")
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
        self._run_writer.is_sending = False
        self._observing.begun()
        self._maintenance.layout_begun(run.run)
        self._had_run = True
        notes = self._maintenance.begin(version, anchor if self._maintenance.saves_anchors else ready_anchor, watch)
        return published_report(version, sent, watch, notes)

    def _publish_next(
        self, committed: CommittedVersion, changes: CapturedChanges, anchor: Patch | None, label: Label, watch: Watch
    ) -> SyncReport:
        """A version after the first: a patch."""
        self._run_writer.is_sending = True
        encoding = self._encoding

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
                if not isinstance(committed.baseline, ResumedBaseline):  # which goes with this version
                    self._maintenance.add_changes(step.version, changes)
                committed.baseline.advance(patch, changes, encoding.threads)

        with watch.stage("commit"):
            self._had_run = True
            version = self._run_writer.commit(
                committed.run, step, committed.baseline, files=label.files, advance=advance, notify=self._notify_source
            )
        self._run_writer.is_sending = False
        notes = self._maintenance.begin(version, anchor, watch)
        return published_report(version, sent, watch, notes, self._maintenance.receivers.reason(encoding.link))

    def _notify_source(self) -> None:
        """A version is committed: a source that tracks changes counts them from here."""
        if (committed := getattr(self._source, "committed", None)) is not None:
            committed()
