"""A patch on its way: its ends are known, its buckets come one by one as they are encoded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..weights.digest import Digest
from ..weights.shards import Place
from ..weights.table import TensorTable
from .assemble import Target, rewrite
from .patch import Patch


@dataclass(frozen=True)
class Stream:
    """What a patch says of itself, and its buckets, which can be taken once."""

    table: TensorTable
    base: Digest
    result: Digest
    changed: int
    covers: Sequence[Place] | None
    count: int
    buckets: Iterator[bytes | memoryview]

    @classmethod
    def of(cls, patch: Patch) -> Stream:
        """The buckets of a patch that is there already."""
        covers = None if patch.complete else patch.covers
        buckets = (patch.bucket(index) for index in range(patch.buckets))
        return cls(patch.table, patch.base, patch.result, patch.changed, covers, patch.buckets, buckets)

    def patch(self, buckets: Sequence[bytes | memoryview], to: Target = None) -> Patch:
        """The patch, from all its buckets."""
        return Patch(rewrite(self.table, buckets, self.base, self.result, self.changed, self.covers, to))
