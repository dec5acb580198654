"""What a publisher does behind its versions: squashed patches, further anchors, retention, the anchor for a restart.

    publish  ─ head moved ─► begin ─────────────► the next publish
                             └► squash ─► anchor ─► pins ─► saved anchor ─► collect      on a thread of its own

No version depends on it, and no publish waits for it. What fails is noted in the report of a later publish, and tried
again. Where it takes longer than the publishes between two rungs, it goes on with the newest version.
"""

from __future__ import annotations

import errno
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

from ...errors import Fenced, SessionError
from ...patch import Captured, Patch
from ...weights.memory import Weights
from ...weights.shards import Shards
from ..anchors import SPOOL_BYTES, anchor_of
from ..background import BackgroundPublish
from ..baseline import CapturedChanges
from ..logs import log
from ..options import EncodingOptions, require_count, require_number
from ..quantized_baseline import QuantizedBaseline
from ..report import Watch
from . import routes
from .head import Steps
from .label import Label
from .ladder import Ladder
from .pinning import PublishedPins
from .receivers import Receivers
from .records import RouteStep
from .resume import SavedAnchor
from .retention import collect
from .run_writer import CommittedVersion, RunWriter
from .signing import PublicKeys
from .transfer import Upload

_STEPS = 256  # there are at most so many steps before another anchor is written
_MOST_STEPS = 1024  # that an index keeps for the sake of subscribers that are far behind
_THREADS = 1  # the trainer is at work meanwhile, and each thread more would make it wait for the interpreter's lock
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_HOW_TO_FREE = ". `sparserl gc` with a short --grace frees space, as does a publisher with a shorter grace"
_SQUASH_SHARE = 0.9  # a squashed patch is kept if it takes less than this share of the patches it stands for


@dataclass(frozen=True)
class RetentionOptions:
    """When anchors and squashed patches are written, and what stays in the store; see `Publisher`."""

    anchor_after: float
    keep_anchors: int | None  # None for all
    ladder: tuple[int, int] | None
    grace: float
    lease: float

    def __post_init__(self) -> None:
        require_number("anchor_after", self.anchor_after, 0)
        require_count("keep_anchors", 1 if self.keep_anchors is None else self.keep_anchors)
        require_number("grace", self.grace, 0)
        require_number("lease", self.lease, 0)
        if self.ladder is not None:
            _require_ladder(self.ladder)


def _require_ladder(ladder: tuple[int, int]) -> None:
    try:
        first, last = ladder
    except (TypeError, ValueError) as error:
        raise SessionError(f"ladder is {ladder!r}; it must be a pair of numbers of versions, or None") from error
    require_count("the first number of ladder", first, 2)
    require_count("the second number of ladder", last, first)


@dataclass(frozen=True)
class _Due:
    """What upkeep looks at next: the newest version, and an anchor that had to be made already, with its version."""

    version: CommittedVersion
    anchor: tuple[int, Patch] | None


def _with(step: RouteStep, steps: Steps) -> Steps:
    return (*steps, step)


def _label_of(steps: Steps, version: int) -> Label:
    """What was said of a version."""
    labels = [Label(step.step, step.note) for step in steps if step.version == version]
    return next((label for label in labels if label.step is not None or label.note is not None), Label(None, None))


class Maintenance:
    """Keeps a run short to catch up with, and its store small."""

    def __init__(
        self,
        writer: RunWriter,
        options: RetentionOptions,
        saved_anchor: SavedAnchor | None,
        encoding: EncodingOptions,
        trusted_keys: PublicKeys | None = None,
    ) -> None:
        self._writer = writer
        self._options = options
        self._saved_anchor = saved_anchor
        self._encoding = encoding
        self.receivers = Receivers(writer, encoding, options.lease)
        self._is_alone = writer.writers.size == 1  # several writers look after their run in step, within `publish`
        self._rungs = options.ladder if options.ladder is not None and self._is_alone else (0, 0)
        self._ladder = Ladder(*self._rungs)
        self._notes: deque[str] = deque()  # of what failed, for the next report
        self._pins = PublishedPins(writer.store, trusted_keys, options.grace)
        self._are_pins_due = True  # whether retention may have removed what was being pinned
        self._is_collection_due = False
        self._lock = threading.Lock()
        self._saving = threading.Lock()  # of the state folder, which both threads write to
        self._due: _Due | None = None  # what the thread does next
        self._is_working = False
        self._is_anchor_ready = False  # whether one that had to be made already is not written yet
        self._thread: BackgroundPublish | None = None

    @property
    def saves_anchors(self) -> bool:
        """Whether anchors are needed here after they were sent."""
        return self._saved_anchor is not None

    def encode_anchor(self, weights: Weights | Shards, upload: Upload) -> Patch:
        """An anchor of weights, which is sent while it is encoded, and kept only where it is needed here too."""
        to = upload.bucket_list(keep=self.saves_anchors, memory_bytes=SPOOL_BYTES)
        return anchor_of(weights, self._encoding, to, upload.holdings)

    def leave_run(self) -> None:
        """A new run is about to replace that of the store: what is too old goes while the head leads to the rest."""
        if self._options.keep_anchors is not None:
            self._try(self._collect)

    def begin_layout(self, anchor: Patch, run: str, version: int) -> None:
        """A new run, or other tensors, are about to begin: save the anchor first, for whoever is killed after that."""
        self.finish()  # upkeep of what was before would take its own anchor for the one to keep
        self._due = None
        self._is_anchor_ready = False
        self._ladder = Ladder(*self._rungs)
        if (saved_anchor := self._saved_anchor) is not None:
            self._try(lambda: saved_anchor.save(anchor, run, version))

    def layout_begun(self, run: str) -> None:
        """The head names the run, or the tensors, now: saved anchors of others can go, and what is too old."""
        if self._saved_anchor is not None and self._saved_anchor.run == run:
            self._try(self._saved_anchor.remove_others)
        self._is_collection_due = True

    def retaining(self, step: RouteStep) -> Callable[[Steps], Steps]:
        """Adds an anchor to the steps of an index, without those that are too old then."""
        self._are_pins_due = True

        def add(steps: Steps) -> Steps:
            if self._options.keep_anchors is None:
                return (*steps, step)
            now = self._writer.clock()
            fresh = [lease for lease in self._writer.leases() if now - lease.time < self._options.lease]
            leased = [lease.version for lease in fresh if lease.version is not None]
            pinned = self._pinned_steps(steps)
            return routes.retained((*steps, step), self._options.keep_anchors, leased, _MOST_STEPS, pinned)

        return add

    def _pinned_steps(self, steps: Steps) -> Steps:
        """The steps that pins of the run need, beside those that its index has."""
        committed = self._writer.committed
        if committed is None:
            return ()
        return self._pins.steps(committed.run, replace(committed.index, steps=steps), self._writer.clock())

    def add_changes(self, version: int, changes: CapturedChanges) -> None:
        """A version, before the baseline moves to it: its way back is for the ladder, and for a copy under way."""
        if not isinstance(changes, Captured) or not (self._rungs[0] or self._is_working):
            return
        try:
            if not self._ladder.add(version, changes, _THREADS):
                self._notes.append("no squashed patches for a while: making them takes longer than eight publishes")
        except Exception as error:  # noqa: BLE001  # the head has moved: only the baseline must not fail now
            self._notes.append(f"no squashed patches for a while: {error}")

    def begin(self, version: CommittedVersion, anchor: Patch | None, watch: Watch) -> tuple[str, ...]:
        """Begin all that is due after a version; notes about what has failed since the last one.

        anchor: one of the version, where it had to be made already.
        """
        self._try(self._keep_head)
        due = _Due(version, None if anchor is None else (version.head.version, anchor))
        self._is_anchor_ready |= anchor is not None
        if not self._is_alone or isinstance(version.baseline, QuantizedBaseline):  # whose bits another run writes to
            with watch.stage("upkeep"):
                self._do(due, version.baseline.weights)
        else:
            with self._lock:
                earlier = None if self._due is None else self._due.anchor
                self._due = replace(due, anchor=due.anchor or earlier)
                if not self._is_working:
                    self._try(self._start)
        self.receivers.hear()
        return self._take_notes()

    def _start(self) -> None:
        self._thread = BackgroundPublish(self._work, "upkeep")
        self._is_working = True

    def finish(self) -> None:
        """Wait until nothing is due any more."""
        if self._thread is not None:
            self._thread.finish()

    def _work(self) -> None:
        """On the thread: do what is due, until nothing is."""
        while True:
            with self._lock:
                due = self._due
                self._due = None
                self._is_working = due is not None
            if due is None:
                return
            try:
                self._do(due)
            except Fenced as error:  # which the next publish is told as well
                self._notes.append(f"upkeep failed: {error}")
            except BaseException:
                self._is_working = False
                raise  # to whoever closes the publisher

    def _do(self, due: _Due, weights: Weights | Shards | None = None) -> None:
        """All that is due after a version.

        weights: those of the version, where nobody writes to them meanwhile.
        """

        @cache
        def weights_of(number: int) -> Any:
            return self._frozen(due.version, number) if weights is None else weights

        self._ladder.forget(due.version.head.version)
        if self._is_collection_due:  # since a version was being sent when it was the last one's turn
            self._try(self._collect)
        has_weights = due.version.baseline.weights is not None
        if has_weights:
            self._try(lambda: self._squash_if_due(due.version, weights_of))
        ready = due.anchor
        try:
            if ready is not None or has_weights:
                self._try(lambda: self._anchor_if_due(due.version, ready, weights_of))
        finally:
            self._is_anchor_ready = False
        self._try(lambda: self._add_pinned_if_due(due.version))
        if ready is not None or has_weights:
            self._try(lambda: self._save_if_new(due.version, ready, weights_of))
        self._try(self._keep_head)
        if self._is_collection_due:
            self._try(self._collect)

    def _frozen(self, version: CommittedVersion, number: int) -> Any:
        """The weights of a version, which publishes write to meanwhile."""
        weights = version.baseline.weights
        assert weights is not None
        return self._ladder.frozen(weights, number, routes.versions(version.index.steps)[number], _THREADS)

    def _take_notes(self) -> tuple[str, ...]:
        return tuple(self._notes.popleft() for _ in range(len(self._notes)))

    def needs_ready_anchor(self, version: CommittedVersion) -> bool:
        """Whether an anchor must be made of what the source has: one is due, and there is no baseline to make it of."""
        return version.baseline.weights is None and not self._is_anchor_ready and self.anchor_is_due(version)

    def anchor_is_due(self, version: CommittedVersion) -> bool:
        """Whether patches since the last anchor are as large as an anchor, or very many, or not for all receivers."""
        steps = version.index.steps
        last = max((step for step in steps if step.base is None), key=lambda step: step.version, default=None)
        if last is None or self.receivers.need_anchor(version.run.run, last.version):  # none: somebody moved the head
            return True
        patches = [step for step in steps if step.base is not None and last.version <= step.base]
        size = sum(step.bytes for step in patches if step.base == step.version - 1)
        return size >= self._options.anchor_after * max(1, last.bytes) or len(patches) >= _STEPS - 1

    def close(self) -> None:
        """Wait for what is due, give up the ladder, and let another publisher have the state folder."""
        try:
            self.finish()
            for note in self._take_notes():
                log.warning("%s: %s", self._writer.store.url, note)
        finally:
            self.receivers.close()
            if self._saved_anchor is not None:
                self._saved_anchor.close()
            self._ladder = Ladder()

    def _try(self, work: Callable[[], None]) -> None:
        """Do what a version does not depend on: a failure is noted, and it is tried again next time."""
        try:
            work()
        except Fenced:
            raise
        except Exception as error:  # noqa: BLE001  # a GPU may be full, too
            is_full = any(getattr(one, "errno", None) in _NO_SPACE for one in (error, error.__cause__))
            self._notes.append(f"upkeep failed, and will be tried again: {error}{_HOW_TO_FREE * is_full}")

    def _squash_if_due(self, version: CommittedVersion, weights_of: Callable[[int], Any]) -> None:
        """A squashed patch for each rung of the ladder that ends here, where it takes less than what it stands for."""
        ladder = self._ladder
        ladder.take()
        newest = ladder.due(version.head.version)
        if newest is None or newest not in routes.versions(version.index.steps):
            return
        if ladder.newest and newest - ladder.newest > ladder.spans[0]:
            self._notes.append(f"no squashed patches to versions after {ladder.newest} and before {newest}: no time")
        for base, patch in ladder.rungs(newest, weights_of(newest), self.receivers.squashed_profile, _THREADS):
            size = sum(len(patch.contents.bucket(index)) for index in range(patch.buckets))
            steps = routes.route(version.index.steps, (base, patch.base), newest)
            step_bytes = sum(step.bytes for step in steps)
            if any(step.base is None for step in steps) or size > _SQUASH_SHARE * step_bytes:
                continue
            step = self._writer.send_alone(version.run, patch).step(base, newest, self._writer.clock())
            version = self._writer.amend(version.run.run, partial(_with, step))

    def _anchor_if_due(
        self, version: CommittedVersion, ready: tuple[int, Patch] | None, weights_of: Callable[[int], Any]
    ) -> None:
        """Write an anchor if one is due; what is too old then goes."""
        number = version.head.version if ready is None else ready[0]
        has_anchor = any(step.base is None and step.version == number for step in version.index.steps)
        if has_anchor or not self.anchor_is_due(self._writer.committed or version):
            return

        def encode(upload: Upload) -> Patch:
            return self.encode_anchor(weights_of(number), upload) if ready is None else upload.add_all(ready[1])

        written, sent = self._writer.send(version.run, encode, Watch(), None)
        step = sent.step(None, number, self._writer.clock())
        step = _label_of(version.index.steps, number).on(step)  # the patch with this label may go
        self._writer.amend(version.run.run, self.retaining(step))
        self._is_collection_due = True
        if self._saved_anchor is not None:
            self._save(written, version.run.run, number)

    def _add_pinned_if_due(self, version: CommittedVersion) -> None:
        """Put back what retention has removed while it was being pinned: whoever pinned it saw it in the store."""
        if not self._are_pins_due:
            return

        def with_pinned(steps: Steps) -> Steps:
            return routes.with_pinned(steps, self._pinned_steps(steps))

        def is_missing() -> bool:
            steps = (self._writer.committed or version).index.steps
            return len(with_pinned(steps)) > len(steps)

        self._are_pins_due = False  # a publish may drop further steps meanwhile
        try:
            if self._writer.writers.lead("look at pins", is_missing, lambda missing: b"+" * missing, bool):
                self._writer.amend(version.run.run, with_pinned)
        except BaseException:
            self._are_pins_due = True
            raise

    def _keep_head(self) -> None:
        """Keep a copy of the head: a publisher that is started again knows by it what it has published."""
        with self._saving:
            if self._saved_anchor is not None and self._writer.writers.rank == 0 and self._writer.committed is not None:
                self._saved_anchor.keep_head(self._writer.committed.head)

    def _save_if_new(
        self, version: CommittedVersion, ready: tuple[int, Patch] | None, weights_of: Callable[[int], Any]
    ) -> None:
        """Save an anchor of the run here, for a restart, where that could not be done before its first version."""
        if self._saved_anchor is None or self._saved_anchor.run == version.run.run:
            return
        number = version.head.version
        number, anchor = ready or (number, anchor_of(weights_of(number), self._encoding))
        self._save(anchor, version.run.run, number)

    def _save(self, anchor: Patch, run: str, version: int) -> None:
        assert self._saved_anchor is not None
        with self._saving:
            self._saved_anchor.save(anchor, run, version)
            self._saved_anchor.remove_others()

    def _collect(self) -> None:
        """Remove what nothing refers to any more; not in the first publish of a run, whatever it has replaced."""
        started = self._writer.clock()  # what is written from now on is younger
        if self._writer.is_sending:  # objects of a version, which nothing refers to yet
            return
        committed = self._writer.committed
        if self._writer.writers.rank == 0 and (committed is None or committed.head.version):
            other_runs = self._options.keep_anchors is not None  # else nothing is forgotten
            collect(self._writer.store, self._options.grace, lambda: started, other_runs=other_runs)
        self._is_collection_due = False
