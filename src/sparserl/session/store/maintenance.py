"""What a publisher does beside its versions: squashed patches, further anchors, retention, the anchor for a restart.

No version depends on it. What fails is noted in the report of the publish, and tried again by the next one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from ...errors import Fenced, FormatError, SessionError, SparserlError, StoreError
from ...patch import Captured, Patch
from ...weights.memory import Weights
from ...weights.shards import Shards
from ..anchors import SPOOL_BYTES, anchor_of
from ..baseline import CapturedChanges
from ..options import EncodingOptions, require_count, require_number
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
        self._encoding_options = encoding
        self.receivers = Receivers(writer, encoding, options.lease)
        is_alone = writer.writers.size == 1  # `sparserl squash` makes squashed patches of what several writers publish
        self._ladder = Ladder(*options.ladder) if options.ladder is not None and is_alone else None
        self._notes: list[str] = []
        self._pins = PublishedPins(writer.store, trusted_keys, options.grace)
        self._are_pins_due = True  # whether retention may have removed what was being pinned

    @property
    def _encoding(self) -> EncodingOptions:
        return self._writer.measured_link.resolve(self._encoding_options)

    @property
    def saves_anchors(self) -> bool:
        """Whether anchors are needed here after they were sent."""
        return self._saved_anchor is not None

    def encode_anchor(self, weights: Weights | Shards, upload: Upload) -> Patch:
        """An anchor of weights, which is sent while it is encoded, and kept only where it is needed here too."""
        to = upload.bucket_list(keep=self.saves_anchors, memory_bytes=SPOOL_BYTES)
        return anchor_of(weights, self._encoding, to, upload.holdings)

    def begin_layout(self, anchor: Patch, run: str, version: int) -> None:
        """A new run, or other tensors, are about to begin: save the anchor first, for whoever is killed after that."""
        if self._ladder is not None:
            self._ladder.clear()
        if (saved_anchor := self._saved_anchor) is not None:
            self._try(lambda: saved_anchor.save(anchor, run, version))

    def layout_begun(self, run: str) -> None:
        """The head names the run, or the tensors, now: saved anchors of others can go, and what is too old."""
        if self._saved_anchor is not None and self._saved_anchor.run == run:
            self._try(self._saved_anchor.remove_others)
        self._try(self._collect)

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
        """One more version for the ladder; where that fails, late subscribers take longer, and nothing else."""
        if self._ladder is None or not isinstance(changes, Captured):  # without a baseline there is no way back
            return
        try:
            self._ladder.add(version, changes, self._encoding.threads)
        except (OSError, SparserlError) as error:
            self._notes.append(f"no squashed patches for a while: {error}")

    def run(self, version: CommittedVersion, anchor: Patch | None, watch: Watch) -> tuple[str, ...]:
        """All that is due after a version; notes about what failed.

        anchor: one of the version, where it had to be made already.
        """
        with watch.stage("upkeep"):
            self._try(lambda: self._squash_if_due(self._writer.committed or version))
            self._try(lambda: self._anchor_if_due(anchor, self._writer.committed or version))
            self._try(lambda: self._add_pinned_if_due(self._writer.committed or version))
            self._try(lambda: self._save_if_new(anchor, self._writer.committed or version))
        self.receivers.hear()
        notes = tuple(self._notes)
        self._notes = []
        return notes

    def anchor_is_due(self, version: CommittedVersion) -> bool:
        """Whether patches since the last anchor are as large as an anchor, or very many, or not for all receivers."""
        if self.receivers.need_anchor:
            return True
        steps = version.index.steps
        last = max((step for step in steps if step.base is None), key=lambda step: step.version)
        patches = [step for step in steps if step.base is not None and last.version <= step.base]
        size = sum(step.bytes for step in patches if step.base == step.version - 1)
        return size >= self._options.anchor_after * max(1, last.bytes) or len(patches) >= _STEPS - 1

    def close(self) -> None:
        """Give up the ladder, and let another publisher have the state folder."""
        self.receivers.close()
        if self._saved_anchor is not None:
            self._saved_anchor.close()
        if self._ladder is not None:
            self._ladder.clear()

    def _try(self, work: Callable[[], None]) -> None:
        """Do what a version does not depend on: a failure is noted, and it is tried again next time."""
        try:
            work()
        except Fenced:
            raise
        except (StoreError, FormatError, SessionError, OSError) as error:
            self._notes.append(f"upkeep failed, and will be tried again: {error}")

    def _squash_if_due(self, version: CommittedVersion) -> None:
        """A squashed patch for each rung of the ladder that ends here, where it takes less than what it stands for."""
        weights = version.baseline.weights
        if self._ladder is None or weights is None:
            return
        newest = version.head.version
        for base, patch in self._ladder.rungs(newest, weights, self.receivers.squashed_profile, self._encoding.threads):
            size = sum(len(patch.contents.bucket(index)) for index in range(patch.buckets))
            steps = routes.route(version.index.steps, (base, patch.base), newest)
            step_bytes = sum(step.bytes for step in steps)
            if any(step.base is None for step in steps) or size > _SQUASH_SHARE * step_bytes:
                continue
            step = self._writer.send_alone(version.run, patch).step(base, newest, self._writer.clock())
            version = self._writer.commit(version.run, step, version.baseline)

    def _anchor_if_due(self, anchor: Patch | None, version: CommittedVersion) -> None:
        """Write an anchor if one is due; what is too old then goes."""
        weights = version.baseline.weights
        if not self.anchor_is_due(version) or (weights is None and anchor is None):
            return

        def encode(upload: Upload) -> Patch:
            return self.encode_anchor(weights, upload) if anchor is None else upload.add_all(anchor)

        newest = version.head.version
        written, sent = self._writer.send(version.run, encode, Watch())
        step = sent.step(None, newest, self._writer.clock())
        step = _label_of(version.index.steps, newest).on(step)  # the patch with this label may go
        version = self._writer.commit(version.run, step, version.baseline, add_steps=self.retaining(step))
        self.receivers.anchor_written()
        if self._saved_anchor is not None:
            self._save(written, version)
        self._collect()

    def _add_pinned_if_due(self, version: CommittedVersion) -> None:
        """Put back what retention has removed while it was being pinned: whoever pinned it saw it in the store."""
        if not self._are_pins_due:
            return

        def is_missing() -> bool:
            steps = version.index.steps
            return len(routes.with_pinned(steps, self._pinned_steps(steps))) > len(steps)

        if self._writer.writers.lead("look at pins", is_missing, lambda missing: b"+" * missing, bool):
            newest = next(step for step in version.index.steps if step.version == version.head.version)
            add = lambda steps: routes.with_pinned(steps, self._pinned_steps(steps))  # noqa: E731
            self._writer.commit(version.run, newest, version.baseline, add_steps=add)
        self._are_pins_due = False

    def _save_if_new(self, anchor: Patch | None, version: CommittedVersion) -> None:
        """Save an anchor of the run here, for a restart, where that could not be done before its first version."""
        if self._saved_anchor is None or self._saved_anchor.run == version.run.run:
            return
        if anchor is None and version.baseline.weights is not None:
            anchor = anchor_of(version.baseline.weights, self._encoding)
        if anchor is not None:
            self._save(anchor, version)

    def _save(self, anchor: Patch, version: CommittedVersion) -> None:
        assert self._saved_anchor is not None
        self._saved_anchor.save(anchor, version.run.run, version.head.version)
        self._saved_anchor.remove_others()

    def _collect(self) -> None:
        """Remove what nothing refers to any more."""
        if self._writer.writers.rank == 0:
            collect(self._writer.store, self._options.grace, self._writer.clock)
