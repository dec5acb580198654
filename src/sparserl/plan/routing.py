"""Which entries are sent dense, and which are cut to fit a bucket."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from ..codec.profile import Counts
from ..errors import WeightsError
from ..weights.boxes import select
from ..weights.dtypes import DType, UIntArray
from ..weights.local import LocalWeights
from ..weights.region import Region, whole
from ..weights.table import TensorTable
from .changes import Changes, Dense
from .estimates import estimate, index_bits, plane_bits, word_bits

BUCKET_PAYLOAD_BYTES = 4 << 20
BUCKET_CHANGES = 1 << 22
_NO_CHANGES = slice(0)
_DENSE_SHARE = 0.25  # dense bits rarely compress to less than this share, so sparser entries need no estimate


def route(changes: Changes, names: Sequence[str], table: TensorTable) -> Iterator[Changes]:
    """Make entries dense that are smaller dense, cut those that are too large for a bucket, and estimate the others."""
    if changes.dense:
        yield replace(_columns(changes, [], sum(d.bits.size for d in changes.dense)), dense=changes.dense)
    is_sparse = np.ones(changes.count.size, bool)
    if changes.bits is not None:
        candidates = may_be_dense(changes.dtype, changes.numel, changes.count)
        cuts = np.cumsum(changes.count) - changes.count
        for e in np.flatnonzero(candidates).tolist():
            part = slice(int(cuts[e]), int(cuts[e] + changes.count[e]))
            sparse, dense = _compare(changes, changes.bits(e), e, part, names)
            if dense <= sparse:
                is_sparse[e] = False
                yield from _as_dense(changes, e, part, table)
    yield from _fit(_select(changes, is_sparse), names, table)


def may_be_dense(dtype: DType, numel: Counts, count: Counts) -> npt.NDArray[np.bool_]:
    """Which entries have so many changes that their dense bits may be smaller."""
    width = 8 * dtype.width
    return count * (width + 2) > _DENSE_SHARE * width * numel


def _compare(changes: Changes, all_bits: UIntArray, e: int, part: slice, names: Sequence[str]) -> tuple[float, float]:
    """Estimated bits of one entry, sparse (in its best profile) and dense."""
    count = int(changes.count[e])
    numel = int(changes.numel[e])
    gaps = float(index_bits(changes.numel[e : e + 1], changes.count[e : e + 1])[0])
    sparse = math.inf
    for name in names:
        bits = word_bits(changes, name, part)
        if bits is not None:
            sparse = min(sparse, (32.0 * count if name == "raw" else gaps) + bits * count)
    dense = 8.0 * changes.dtype.width * numel
    if tuple(names) != ("raw",):
        dense = min(dense, plane_bits(all_bits) * numel)
    return sparse, dense


def _fit(changes: Changes, names: Sequence[str], table: TensorTable) -> Iterator[Changes]:
    """Sparse changes in parts that fit a bucket each, with their estimates. An entry may be cut into several."""
    changes.cost = estimate(changes, names)
    entries = changes.count.size
    count = changes.total
    bits = min(changes.cost.values(), default=0.0)
    if (count <= BUCKET_CHANGES and bits <= 8 * BUCKET_PAYLOAD_BYTES) or int(changes.numel.sum()) == 1:
        yield changes
    elif entries > 1:
        middle = entries // 2
        for half in (_run(changes, slice(middle)), _run(changes, slice(middle, entries))):
            yield from _fit(half, names, table)
    else:
        for piece in _split(changes, table, bits):
            yield from _fit(piece, names, table)


def _as_dense(changes: Changes, e: int, part: slice, table: TensorTable) -> Iterator[Changes]:
    """One dense entry, or several where it is larger than a bucket should be."""
    assert changes.bits is not None
    bits = changes.bits(e).copy()
    positions = changes.positions[part]
    _require_same(changes, e, part, bits)
    begin = 0
    for region in _regions(changes, e, BUCKET_PAYLOAD_BYTES // changes.dtype.width, table):
        numel = bits.size if region is None else region.numel
        count = int(np.diff(np.searchsorted(positions, np.array([begin, begin + numel], np.uint32)))[0])
        if count:
            dense = Dense((int(changes.tensor[e]), region), count, bits[begin : begin + numel])
            yield replace(_columns(changes, [], numel), dense=[dense])
        begin += numel


def _require_same(changes: Changes, e: int, part: slice, bits: UIntArray) -> None:
    """Refuse the bits of an entry, read once more, that are not those in which changes were found."""
    is_same = changes.after is None or np.array_equal(bits[changes.positions[part]], changes.after[part])
    if isinstance(changes.base, LocalWeights):
        old = changes.base.bits(int(changes.tensor[e]), changes.region[e])
        is_same &= np.count_nonzero(bits != old) == changes.count[e]
    if not is_same:
        raise WeightsError(
            "the weights changed while they were published or compared: nothing may write to them until that is done"
        )


def _split(changes: Changes, table: TensorTable, bits: float) -> Iterator[Changes]:
    """A single sparse entry as several, small enough for a bucket if the changes are spread evenly."""
    count = int(changes.count[0])
    numel = int(changes.numel[0])
    parts = max(math.ceil(bits / (8 * BUCKET_PAYLOAD_BYTES)), math.ceil(count / BUCKET_CHANGES))
    begin = 0
    for region in _regions(changes, 0, max(1, numel // parts), table):
        size = numel if region is None else region.numel
        low, high = np.searchsorted(changes.positions, np.array([begin, begin + size], np.uint32))
        if high > low:
            piece = _columns(changes, [(int(changes.tensor[0]), region, size, int(high - low))], size, slice(low, high))
            piece.positions = piece.positions - np.uint32(begin)
            yield piece
        begin += size


def _regions(changes: Changes, e: int, limit: int, table: TensorTable) -> Iterator[Region | None]:
    """An entry's region in boxes of at most `limit` elements, each a run of its positions."""
    region = changes.region[e]
    if changes.numel[e] <= limit:
        yield region
        return
    yield from (region or whole(table[int(changes.tensor[e])].shape)).split(limit)


def _columns(
    changes: Changes, entries: list[tuple[int, Region | None, int, int]], covered: int, which: slice = _NO_CHANGES
) -> Changes:
    """Changes with other entries (tensor, region, elements, changes) and some of the positions and words."""
    tensor, region, numel, count = zip(*entries, strict=True) if entries else ((), (), (), ())
    return Changes(
        changes.dtype,
        np.array(tensor, np.int64),
        list(region),
        np.array(numel, np.int64),
        np.array(count, np.int64),
        covered=covered,
        base=changes.base,
        **changes.select_changes(which),
    )


def _run(changes: Changes, entries: slice) -> Changes:
    """Consecutive entries, as views: nothing is copied."""
    numel = changes.numel[entries]
    count = changes.count[entries]
    begin = int(changes.count[: entries.start].sum()) if entries.start else 0
    covered = int(numel.sum()) if entries.start else changes.covered - int(changes.numel[entries.stop :].sum())
    return Changes(
        changes.dtype,
        changes.tensor[entries],
        changes.region[entries],
        numel,
        count,
        covered=covered,
        base=changes.base,
        **changes.select_changes(slice(begin, begin + int(count.sum()))),
    )


def _select(changes: Changes, keep: npt.NDArray[np.bool_]) -> Changes:
    """The sparse changes without some of their entries."""
    if keep.all():
        return replace(changes, dense=[]) if changes.dense else changes
    return Changes(
        changes.dtype,
        changes.tensor[keep],
        select(changes.region, keep),
        changes.numel[keep],
        changes.count[keep],
        covered=int(changes.covered - changes.numel[~keep].sum()),
        base=changes.base,
        **changes.select_changes(np.repeat(keep, changes.count)),
    )
