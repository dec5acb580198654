"""What a publisher of a process group sends: the baseline that every rank has, and the changes since."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ... import plan
from ...errors import SessionError
from ...patch import Captured
from ...patch.contents import BucketList, Contents
from ...transport.groups.frames import Bucket
from ...weights.digest import Digest, table_digest
from ...weights.local import LocalWeights
from ...weights.memory import Weights
from ...weights.shards import Place, Shards
from ...weights.table import TensorTable
from ..anchors import SPOOL_BYTES, anchor_of
from ..baseline import CapturedChanges, HostBaseline, NoBaseline, ResumedBaseline, choose_baseline
from ..options import BaselineOptions, EncodingOptions
from ..profiles import refusal
from ..report import Watch
from .transfer_plan import RankShare, WriterLeg


class EncodeRequest(NamedTuple):
    """What every writer is to encode: an anchor too, or the changes alone, in profiles that all receivers can take."""

    anchor: bool
    profiles: list[str] | None  # None for all
    of_new: bool = False  # whether the anchor is of the new version, without changes: a writer has no bits of the old


class OutgoingPatch:
    """A patch to be sent, of which the first bucket is encoded already."""

    def __init__(self, contents: Contents) -> None:
        self.contents = contents
        self._first_bytes = len(contents.bucket(0)) if len(contents) else 0
        # Without the terms of the tensor table, the digests of several ranks add up.
        terms = table_digest(contents.table) if contents.complete else Digest()
        self.base = contents.base - terms
        self.result = contents.result - terms

    def __iter__(self) -> Iterator[Bucket]:
        return (self.contents.bucket(index) for index in range(len(self.contents)))

    def leg(self, rank: int) -> WriterLeg:
        """The share of this rank in a leg."""
        share = RankShare(rank, len(self.contents), self.contents.changed, self._first_bytes)
        return WriterLeg(self.base, self.result, share)


@dataclass(frozen=True)
class GroupBaseline:
    """What this rank keeps of the version that every rank committed last: the bits, or only their sums."""

    version: int
    kept: HostBaseline | NoBaseline | ResumedBaseline
    label: str  # where it is, in words
    table: TensorTable
    places: Sequence[Place]
    terms: Digest  # what the tensor table adds to the digest of the parts here, where they are whole

    @classmethod
    def of(
        cls,
        weights: Weights | Shards,
        options: BaselineOptions,
        *,
        tracked: bool,
        observed: bool,
        threads: int | None,
    ) -> GroupBaseline:
        """A baseline of weights that no rank has committed yet."""
        kept, label = choose_baseline(weights, options, tracked=tracked, observed=observed, threads=threads)
        local = LocalWeights.of(weights)
        terms = table_digest(local.table) if local.complete else Digest()
        return cls(-1, kept, label, local.table, local.places, terms)

    @property
    def has_bits(self) -> bool:
        """Whether an anchor can be made of it."""
        return self.kept.weights is not None

    @property
    def digest(self) -> Digest:
        """Of all elements that are here, so that those of several ranks add up."""
        return self.kept.digest - self.terms


@dataclass
class CapturedPublish:
    """What one publish has to send: the baseline, and the changes since.

    call: which call of publish it is.
    weights: the weights of the source, if they stay as they are until the publish is over.
    anchor: all weights, where no baseline has them and they may change.
    legs: what this rank sends, once it is known what the others need.
    """

    call: int
    baseline: GroupBaseline
    changes: CapturedChanges | None
    patch: OutgoingPatch | None
    weights: Weights | Shards | None
    anchor: Contents | None = None
    legs: list[OutgoingPatch] = field(default_factory=list)

    @property
    def result(self) -> Digest:
        """Of the elements that are here, with the changes."""
        return self.baseline.digest if self.patch is None else self.patch.result

    def encode(self, request: EncodeRequest, encoding: EncodingOptions) -> None:
        """Get the legs ready: an anchor, where it is asked for, and the changes since."""
        self.legs = []
        if request.anchor:
            self.legs.append(OutgoingPatch(self._anchor(request.of_new, encoding)))
        if self.changes is None or self.patch is None or request.of_new:
            return
        if request.profiles is not None:
            self.patch = OutgoingPatch(_encoded(self.changes, encoding, request.profiles))
        self.legs.append(self.patch)

    def _anchor(self, of_new: bool, encoding: EncodingOptions) -> Contents:
        if self.anchor is not None:
            return self.anchor
        weights: Any = self.baseline.kept.weights
        if of_new and self.changes is not None:
            weights = self.weights
        if weights is None:
            raise SessionError(
                "a rank holds neither the last version nor this one, and no bits of the last are kept here "
                f"({self.baseline.label}): call publish() once, which sends all weights"
            )
        return anchor_of(weights, encoding).contents


def capture(
    weights: Weights | Shards,
    baseline: GroupBaseline,
    encoding: EncodingOptions,
    watch: Watch,
    *,
    call: int,
    in_background: bool,
) -> CapturedPublish:
    """Look at the weights: afterwards they may change, where the publish goes on in the background."""
    stable = None if in_background else weights
    if baseline.version < 0:
        anchor = None
        if not baseline.has_bits:
            with watch.stage("encode"):
                anchor = anchor_of(weights, encoding).contents
        return CapturedPublish(call, baseline, None, None, stable, anchor)
    with watch.stage("find"):
        changes = baseline.kept.capture(
            weights, profile=encoding.profile, threads=encoding.threads, progress=encoding.progress
        )
    with watch.stage("encode"):
        patch = OutgoingPatch(_encoded(changes, encoding, None))
    return CapturedPublish(call, baseline, changes, patch, stable)


def _encoded(changes: CapturedChanges, encoding: EncodingOptions, profiles: Sequence[str] | None) -> Contents:
    """The patch of some changes; where bits are kept, its buckets are encoded while others are sent."""
    if not plan.candidates(encoding.profile, profiles):
        raise SessionError(refusal("the next version", [encoding.profile], profiles or ()))
    if isinstance(changes, Captured):
        return changes.stream(link=encoding.link, profiles=profiles, threads=encoding.threads)
    to = BucketList(memory_bytes=SPOOL_BYTES)
    contents = changes.encode(link=encoding.link, to=to, threads=encoding.threads).contents
    if profiles is not None and (refused := {head.profile.name for head in contents.heads} - {*profiles}):
        raise SessionError(
            f"{refusal('the next version', refused, profiles)}, or with baseline='host', which keeps what is needed to "
            "encode it for all receivers"
        )
    return contents
