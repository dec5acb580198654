"""What a publisher of a process group sends: the baseline that every rank has, and the changes since."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from ...patch import Captured
from ...patch.contents import Contents
from ...transport.groups.frames import Bucket
from ...weights.digest import Digest, table_digest
from ...weights.local import LocalWeights
from ...weights.table import TensorTable
from ..baseline import HostBaseline
from .transfer_plan import RankShare, WriterLeg


class EncodeRequest(NamedTuple):
    """What every writer is to encode: an anchor too, or the changes alone, in profiles that all receivers can take."""

    anchor: bool
    profiles: list[str] | None  # None for all


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
    """The bits that every rank had when it last committed, as far as this rank has them."""

    version: int
    bits: HostBaseline
    local: LocalWeights
    terms: Digest  # what the tensor table adds to the digest of the bits here, where they are whole

    @classmethod
    def of(cls, bits: HostBaseline) -> GroupBaseline:
        """Bits that no rank has committed yet."""
        local = LocalWeights.of(bits.weights)
        return cls(-1, bits, local, table_digest(local.table) if local.complete else Digest())

    @property
    def table(self) -> TensorTable:
        return self.local.table

    @property
    def digest(self) -> Digest:
        """Of all elements that are here, so that those of several ranks add up."""
        return self.bits.digest - self.terms


@dataclass
class CapturedPublish:
    """What one publish has to send: the baseline, and the changes since.

    call: which call of publish it is.
    legs: what this rank sends, once it is known what the others need.
    """

    call: int
    baseline: GroupBaseline
    changes: Captured | None
    patch: OutgoingPatch | None
    legs: list[OutgoingPatch] = field(default_factory=list)

    @property
    def result(self) -> Digest:
        """Of the elements that are here, with the changes."""
        return self.baseline.digest if self.patch is None else self.patch.result
