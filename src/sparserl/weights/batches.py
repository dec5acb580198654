"""Weights cut into batches: the amount of work that one thread handles at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from .dtypes import DType
from .region import Numbers, Region, whole
from .shards import Place
from .table import TensorTable

PIECE_BYTES = 64 << 20  # large enough to amortize Python, small enough to balance threads


@dataclass(frozen=True)
class Batch:
    """Regions of tensors of one dtype that one thread handles at a time, column by column.

    `offset` is the position of the region inside the place that it was cut from, where a large place was cut.
    """

    dtype: DType
    tensor: Numbers
    region: Sequence[Region | None]
    numel: Numbers
    offset: int = 0

    def __len__(self) -> int:
        return len(self.region)

    @property
    def elements(self) -> int:
        return int(self.numel.sum())

    @classmethod
    def of(cls, table: TensorTable, tensor: int, region: Region | None, offset: int = 0) -> Batch:
        """A batch of a single region."""
        spec = table.specs[tensor]
        numel = spec.numel if region is None else region.numel
        return cls(spec.dtype, np.array([tensor], np.int64), [region], np.array([numel], np.int64), offset)


@dataclass
class _Draft:
    """A batch of small tensors that is being filled."""

    dtype: DType
    free: int  # elements that still fit
    tensors: list[int] = field(default_factory=list)
    regions: list[Region | None] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)

    def add(self, tensor: int, region: Region | None, numel: int) -> None:
        self.tensors.append(tensor)
        self.regions.append(region)
        self.sizes.append(numel)
        self.free -= numel

    def batch(self) -> Batch:
        return Batch(self.dtype, np.array(self.tensors, np.int64), self.regions, np.array(self.sizes, np.int64))


def batches(table: TensorTable, places: Iterable[Place], limit: int | None = None) -> Iterator[Batch]:
    """Cut large tensors into batches of at most `limit` bytes, and put small ones of one dtype together, in order."""
    limit = PIECE_BYTES if limit is None else limit
    numels = table.numel.tolist()
    drafts: dict[DType, _Draft] = {}
    for tensor, region in places:
        spec = table.specs[tensor]
        numel = numels[tensor] if region is None else region.numel
        most = limit // spec.dtype.width
        if not numel:
            continue
        if numel > most:
            yield from _cut(table, tensor, region or whole(spec.shape), most)
            continue
        draft = drafts.get(spec.dtype)
        if draft is None or draft.free < numel:
            if draft is not None:
                yield draft.batch()
            draft = _Draft(spec.dtype, most)
            drafts[spec.dtype] = draft
        draft.add(tensor, region, numel)
    for draft in drafts.values():
        yield draft.batch()


def _cut(table: TensorTable, tensor: int, region: Region, most: int) -> Iterator[Batch]:
    """A large region in batches of at most `most` elements."""
    offset = 0
    for piece in region.split(most):
        yield Batch.of(table, tensor, piece, offset)
        offset += piece.numel
