"""What a publisher of a process group sends: the baseline that every rank has, and the changes since."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from ...patch import Captured
from ...patch.contents import Contents
from ...transport.groups.frames import Bucket
from ...weights.digest import Digest, table_digest
from ...weights.local import LocalWeights
from ...weights.table import TensorTable
from ..baseline import HostBaseline
from .rounds import Share


class OutgoingPatch:
    """A patch to be sent, of which the first bucket is encoded already."""

    def __init__(self, contents: Contents) -> None:
        self.contents = contents
        self._first_bytes = len(contents.bucket(0)) if len(contents) else 0

    def __iter__(self) -> Iterator[Bucket]:
        return (self.contents.bucket(index) for index in range(len(self.contents)))

    def share(self, rank: int) -> Share:
        return Share(rank, len(self.contents), self.contents.changed, self._first_bytes)

    def ends(self) -> tuple[Digest, Digest]:
        """Base and result without the terms of the tensor table, so that those of several ranks add up."""
        terms = table_digest(self.contents.table) if self.contents.complete else Digest()
        return self.contents.base - terms, self.contents.result - terms


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
