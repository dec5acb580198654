"""What a publisher of a process group sends: the baseline that every rank has, and the changes since."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

from ...patch import Captured
from ...patch.contents import Stream
from ...transport.groups.frames import Bucket
from ...weights.digest import Digest, table_digest
from ...weights.local import LocalWeights
from ...weights.table import TensorTable
from ..baseline import HostBaseline
from .rounds import Share


class OutgoingPatch:
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
class GroupBaseline:
    """The bits that every rank had when it last committed, as far as this rank has them."""

    version: int
    bits: HostBaseline
    held: LocalWeights
    terms: Digest  # what the tensor table adds to the digest of the bits here, where they are whole

    @classmethod
    def of(cls, bits: HostBaseline) -> GroupBaseline:
        """Bits that no rank has committed yet."""
        held = LocalWeights.of(bits.weights)
        return cls(-1, bits, held, table_digest(held.table) if held.complete else Digest())

    @property
    def table(self) -> TensorTable:
        return self.held.table

    @property
    def digest(self) -> Digest:
        """Of all elements that are here, so that those of several ranks add up."""
        return self.bits.digest - self.terms


@dataclass
class CapturedPublish:
    """What one publish has to send: the baseline, and the changes since."""

    call: int
    baseline: GroupBaseline
    found: Captured | None
    patch: OutgoingPatch | None
    legs: list[OutgoingPatch] = field(default_factory=list)

    @property
    def now(self) -> Digest:
        return self.baseline.digest if self.patch is None else self.patch.ends()[1]
