"""Weights cut into batches: the amount of work that one thread handles at a time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter

import numpy as np

from .boxes import columns
from .dtypes import BY_CODE, DType
from .region import Numbers, Region, all_whole, whole
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


def batches(table: TensorTable, places: Iterable[Place], limit: int | None = None) -> Iterator[Batch]:
    """Cut large tensors into batches of at most `limit` bytes, and put small ones of one dtype together, in order.

    A batch of small tensors comes where the next one of its dtype does not fit; those that are not full come last.
    """
    limit = PIECE_BYTES if limit is None else limit
    tensor, regions = _columns(table, places)
    numel = table.numel[tensor]
    are_whole = all_whole(regions)
    if not are_whole:
        for row, region in enumerate(regions):
            if region is not None:
                numel[row] = region.numel
    most = limit // table.widths[tensor]
    due: list[tuple[float, Numbers]] = [(row, np.array([row])) for row in np.flatnonzero(numel > most).tolist()]
    small = np.flatnonzero((numel > 0) & (numel <= most))
    codes = table.codes[tensor[small]]
    for code in dict.fromkeys(codes.tolist()):
        due += _filled(small[codes == code], numel, limit // BY_CODE[code].width)
    for _, rows in sorted(due, key=itemgetter(0)):
        first = int(rows[0])
        spec = table.specs[int(tensor[first])]
        if numel[first] > most[first]:
            yield from _cut(table, int(tensor[first]), regions[first] or whole(spec.shape), int(most[first]))
        else:
            batch_regions = [None] * rows.size if are_whole else [regions[row] for row in rows.tolist()]
            yield Batch(spec.dtype, tensor[rows], batch_regions, numel[rows])


def _columns(table: TensorTable, places: Iterable[Place]) -> tuple[Numbers, Sequence[Region | None]]:
    """The tensors of places, and their regions."""
    if places is table.places:  # very many, perhaps: they are not read one by one
        return np.arange(len(table)), [None] * len(table)
    return columns([*places])


def _filled(rows: Numbers, numel: Numbers, most: int) -> Iterator[tuple[float, Numbers]]:
    """Rows in batches of at most `most` elements, each with the row that did not fit any more."""
    ends = np.cumsum(numel[rows])
    begin = 0
    while begin < rows.size:
        before = int(ends[begin - 1]) if begin else 0
        end = int(np.searchsorted(ends, before + most, side="right"))
        yield math.inf if end == rows.size else int(rows[end]), rows[begin:end]
        begin = end


def _cut(table: TensorTable, tensor: int, region: Region, most: int) -> Iterator[Batch]:
    """A large region in batches of at most `most` elements."""
    offset = 0
    for piece in region.split(most):
        yield Batch.of(table, tensor, piece, offset)
        offset += piece.numel
