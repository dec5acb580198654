"""What a publisher keeps of the last committed version, to find the next changes: all its bits, or only its sums.

| baseline | memory | finding changes |
| --- | --- | --- |
| host | all bits at hand | a comparison of all bits |
| device | all bits at hand, where the weights are | the same, on the GPU |
| none | 16 bytes a part, beside the old bits that the source keeps | one full digest read; needs a source that tracks |

With a baseline in host memory, weights on a GPU are compared in host memory: pieces are copied to staging buffers that
are used again, on threads, so that some pieces are on their way while others are compared.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Protocol

from .. import codec, plan
from ..errors import SessionError
from ..humanize import short_size
from ..parallel import Progress
from ..patch import Captured, Patch, TrackedChanges, capture, capture_tracked
from ..patch.apply import apply
from ..patch.compare import Timed
from ..patch.tracked import part_sums
from ..patch.warmup import warm_up
from ..plan import Link
from ..weights.digest import Digest, digest, table_digest
from ..weights.holdings import Holdings
from ..weights.local import LocalWeights
from ..weights.memory import Weights
from ..weights.shards import Shards
from .anchors import copy_weights
from .options import BaselineOptions


class CapturedChanges(Protocol):
    """Changes that were captured: the weights they come from are not looked at any more."""

    def encode(self, *, link: Link | str | None = None, to: Any = None, threads: int | None = None) -> Patch:
        """The patch."""
        ...


class Baseline(Protocol):
    """What is known here of the last committed version."""

    @property
    def digest(self) -> Digest:
        """Of the parts at hand; with the terms of the tensor table, if these are all."""
        ...

    @property
    def weights(self) -> Any:
        """The bits, which nobody else may write to; None where they are not kept."""
        ...

    def capture(
        self,
        weights: Weights | Shards,
        *,
        profile: str = "auto",
        profiles: Collection[str] | None = None,
        holdings: Holdings | None = None,
        threads: int | None = None,
        progress: Progress | None = None,
        timed: Timed | None = None,
        link: Link | str | None = None,
    ) -> CapturedChanges:
        """What changed since the last committed version. With `timed`, it may be found while it is encoded.

        profiles: those that receivers can take, to choose among; None for all.
        holdings: the parts that receivers have, along which it is cut where that is possible.
        link: the link to the receivers, if it must be encoded now, before the weights may change.
        """
        ...

    def advance(self, patch: Patch, changes: CapturedChanges, threads: int | None = None) -> None:
        """A patch is committed; `changes` are what it was made of."""
        ...


class HostBaseline:
    """A copy of all bits in host memory; or, of those on a GPU, on that GPU."""

    def __init__(
        self,
        weights: Weights | Shards,
        digest: Digest | None = None,
        *,
        copy: bool = True,
        on_gpu: bool = False,
        threads: int | None = None,
    ) -> None:
        """A copy of the weights, whose digest may be known.

        copy: False for weights that nobody else writes to: they are the baseline themselves.
        on_gpu: whether the copy of a tensor on a GPU lies on that GPU.
        """
        self.weights = copy_weights(weights, threads, on_gpu=on_gpu) if copy else weights
        self._local = LocalWeights.of(self.weights)  # nobody else moves them: they are looked at once
        warm_up(self._local, LocalWeights.of(weights))
        self._digest = digest
        self._threads = threads

    @property
    def digest(self) -> Digest:
        if self._digest is None:
            self._digest = digest(self.weights, threads=self._threads)
        return self._digest

    def set_digest(self, digest: Digest) -> None:
        """Take over the digest, where all bits had to be read anyway."""
        self._digest = digest

    def capture(
        self,
        weights: Weights | Shards,
        *,
        profile: str = "auto",
        profiles: Collection[str] | None = None,
        holdings: Holdings | None = None,
        threads: int | None = None,
        progress: Progress | None = None,
        timed: Timed | None = None,
        link: Link | str | None = None,  # noqa: ARG002  # the baseline is still there when it is encoded
    ) -> Captured:
        """What changed. All bits are compared: looking at marked elements alone is hardly faster, and trusts marks."""
        if isinstance(weights, Shards):
            weights = weights.map(lambda part: part.data)
        return capture(
            self._local,
            weights,
            profile=profile,
            profiles=profiles,
            base_digest=self.digest,
            holdings=holdings,
            threads=threads,
            progress=progress,
            timed=timed,
        )

    def advance(self, patch: Patch, changes: CapturedChanges, threads: int | None = None) -> None:  # noqa: ARG002
        """Apply the patch."""
        apply(patch.contents, self._local, digest=self.digest, threads=threads)
        self.set_digest(patch.result)


class NoBaseline:
    """The sums of every part. The old bits of what changes are kept by the source, which tracks changes."""

    weights = None

    def __init__(self, weights: Weights | Shards, threads: int | None = None, *, observed: bool = False) -> None:
        """The sums of weights.

        observed: whether someone reads the patches here, who has no old bits either: then `ulp` and `ctx` are left out.
        """
        local = LocalWeights.of(weights)
        warm_up(local)
        self._table = local.table
        self._observed = observed
        self.sums = part_sums(local, threads)
        self.digest = sum(self.sums.values(), table_digest(local.table) if local.complete else Digest())

    def capture(
        self,
        weights: Weights | Shards,
        *,
        profile: str = "auto",
        profiles: Collection[str] | None = None,
        holdings: Holdings | None = None,
        threads: int | None = None,
        progress: Progress | None = None,
        timed: Timed | None = None,
        link: Link | str | None = None,
    ) -> TrackedChanges:
        """What changed, by the old bits that the source kept; one full digest read. Encoded, unless it is timed."""
        changes = capture_tracked(
            weights,
            self.sums,
            table=self._table,
            profile=profile,
            profiles=_readable(profiles) if self._observed and profile == "auto" else profiles,
            holdings=holdings,
            threads=threads,
            progress=progress,
            timed=timed,
        )
        return changes.detach(link, threads) if timed is None else changes

    def advance(self, patch: Patch, changes: CapturedChanges, threads: int | None = None) -> None:  # noqa: ARG002  # takes no work
        """Take the sums over that were read when the patch was captured."""
        if not isinstance(changes, TrackedChanges) or changes.result != patch.result:
            raise SessionError("the patch was not made of what was captured")
        self.sums = changes.sums
        self.digest = changes.result


class ResumedBaseline:
    """All bits of the version that a run goes on from, until the next one is committed; from then on no baseline.

    A source that tracks changes does not know what it had before a restart, and the bits were rebuilt anyway.
    """

    def __init__(self, weights: Weights | Shards, digest: Digest, threads: int | None, *, observed: bool) -> None:
        self._baseline: HostBaseline | NoBaseline = HostBaseline(weights, digest, copy=False, threads=threads)
        self._observed = observed

    @property
    def digest(self) -> Digest:
        return self._baseline.digest

    @property
    def weights(self) -> None:
        """They are not kept: anchors are made of what the source has."""
        return None

    def capture(
        self,
        weights: Weights | Shards,
        *,
        profile: str = "auto",
        profiles: Collection[str] | None = None,
        **options: Any,
    ) -> Captured | TrackedChanges:
        """What changed."""
        if isinstance(self._baseline, HostBaseline):
            warm_up(LocalWeights.of(weights))  # the next capture is of these alone
        if self._observed and profile == "auto":
            profiles = _readable(profiles)
        return self._baseline.capture(weights, profile=profile, profiles=profiles, **options)

    def advance(self, patch: Patch, changes: CapturedChanges, threads: int | None = None) -> None:
        """A patch is committed: the bits can go, when their sums were taken."""
        baseline = self._baseline
        baseline.advance(patch, changes, threads)
        if isinstance(baseline, HostBaseline):
            self._baseline = NoBaseline(baseline.weights, threads, observed=self._observed)


def _readable(profiles: Collection[str] | None) -> Collection[str]:
    """Of profiles that receivers can take, those that an observer without old bits can read, if there are any."""
    names = plan.candidates("auto", profiles)
    return [name for name in names if codec.PROFILES[name].absolute] or names


def choose_baseline(
    weights: Weights | Shards,
    options: BaselineOptions,
    *,
    tracked: bool = False,
    observed: bool = False,
    threads: int | None = None,
    own_digest: Digest | None = None,
) -> tuple[HostBaseline | NoBaseline | ResumedBaseline, str]:
    """A baseline of the weights, and where it is, in words.

    options: `auto` is `none` for a source that tracks changes, unless it is observed and a copy fits the memory; for
        other sources it is `host`.
    tracked: whether the source keeps the old bits of changes, and is told of every commit.
    observed: whether statistics of the changes are taken, for which old bits are needed.
    own_digest: the digest of weights that nobody else writes to: they need not be copied.
    """
    kind = options.kind
    local = LocalWeights.of(weights)
    dense_bytes = local.nbytes
    fits = options.memory is None or dense_bytes <= options.memory
    limit = short_size(options.memory or 0)
    if kind == "auto" and tracked and not observed:
        kind = "none"
    if kind != "none" and fits:
        on_gpu = kind == "device" and own_digest is None
        baseline = HostBaseline(weights, own_digest, copy=own_digest is None, on_gpu=on_gpu, threads=threads)
        place = "where the weights are" if on_gpu and local.gpu_streams else "in host memory"
        return baseline, f"baseline: {short_size(dense_bytes)} {place}"
    if kind in ("host", "device"):
        raise SessionError(f"a baseline takes {short_size(dense_bytes)}, the budget is {limit}")
    reason = "" if kind == "none" else f": {short_size(dense_bytes)} would not fit {limit}"
    if not tracked:
        raise SessionError(f"baseline: none{reason}; that takes a source that tracks changes (sparserl.sources.track)")
    words = f"baseline: none{reason}; the source keeps old bits of changes; one full digest read per publish"
    if own_digest is not None and fits:
        return ResumedBaseline(weights, own_digest, threads, observed=observed), words
    return NoBaseline(weights, threads, observed=observed), words
