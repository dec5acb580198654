"""Where the changes of several patches are: in which covered regions, and in which windows of them.

Work and memory are in proportion to what the patches hold, whatever their tensors claim to be.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..weights.boxes import corners, ends, select
from ..weights.dtypes import UIntArray
from ..weights.region import Region
from ..weights.shards import Place
from ..weights.table import TensorTable
from .contents import Contents
from .decode import Decoded, counted, flatten_all

Flat = npt.NDArray[np.int64]
_KEEP_BYTES = 416 << 20  # of decoded changes that may be asked for again: two of the largest buckets
_TOGETHER = 1 << 10


class Rows(NamedTuple):
    """Entries of one tensor in one bucket of a patch."""

    patch: int
    bucket: int
    entries: Flat


def touched(patches: Sequence[Contents]) -> Iterator[tuple[int, Region | None, list[Rows]]]:
    """Every region that the patches cover and change, and the entries that lie in it."""
    first, table = patches[0], patches[0].table
    rows = _entry_rows(patches)
    every, begin = np.unique(rows[0], return_index=True)
    covers: dict[int, list[Region | None]] = {tensor: [None] for tensor in every.tolist()}
    if not first.complete:
        covers = {tensor: [] for tensor in covers}
        for tensor, region in first.covers:
            if tensor in covers:
                covers[tensor].append(region)
    columns = rows[1:].T
    spans = dict(zip(every.tolist(), _spans(begin, len(columns)), strict=True))
    for tensor in sorted(spans, key=lambda t: (table[t].dtype.code, t)):
        mine = [Rows(p, bucket, np.arange(a, b)) for p, bucket, a, b in columns[spans[tensor]].tolist()]
        for cover, its in _by_cover(patches, tensor, covers[tensor], mine):
            yield tensor, cover, its


def _spans(begin: Flat, end: int) -> Iterator[slice]:
    """From each beginning to the next one, and from the last to the end."""
    return map(slice, begin.tolist(), np.append(begin, end)[1:].tolist())


def _entry_rows(patches: Sequence[Contents]) -> Flat:
    """Where tensors stand in buckets: tensor, patch, bucket, and their first entry and the one behind the last."""
    rows: list[Flat] = [np.empty((5, 0), np.int64)]
    for p, patch in enumerate(patches):
        for bucket, head in enumerate(patch.heads):
            tensors, begin = np.unique(head.entries.tensor, return_index=True)
            same = np.ones_like(tensors)
            rows.append(np.stack((tensors, p * same, bucket * same, begin, np.append(begin[1:], len(head.entries)))))
            if len(rows) > _TOGETHER:
                rows = [np.concatenate(rows, axis=1)]
    joined = np.concatenate(rows, axis=1)
    return joined[:, np.argsort(joined[0], kind="stable")]


def _by_cover(
    patches: Sequence[Contents], tensor: int, covers: Sequence[Region | None], rows: list[Rows]
) -> Iterator[tuple[Region | None, list[Rows]]]:
    """Entries of a tensor, by the covered region that they lie in; none reaches out of what is covered."""
    if len(covers) == 1:
        yield covers[0], rows
        return
    table = patches[0].table
    owner = np.full(len(covers), tensor, np.int64)
    start, stop = corners(table, owner, *ends(table, owner, covers))
    inside: dict[int, list[Rows]] = {}
    for row in rows:
        entries = patches[row.patch].heads[row.bucket].entries
        its = entries.tensor[row.entries]
        low, high = corners(table, its, *ends(table, its, select(entries.region, row.entries)))
        its_cover = np.array(
            [((start <= low[:, e, None]) & (high[:, e, None] <= stop)).all(axis=0).argmax() for e in range(its.size)]
        )
        for c in np.unique(its_cover).tolist():
            inside.setdefault(c, []).append(row._replace(entries=row.entries[its_cover == c]))
    for c, its_rows in sorted(inside.items()):
        yield covers[c], its_rows


def by_window(
    located: Located, cover: Place, rows: Sequence[Rows], outer: Region, most: int
) -> Iterator[tuple[int, Iterator[Rows]]]:
    """The windows of a covered region in which anything changes, by their numbers, and what does."""
    if cover[1] is None and outer.numel <= most:
        yield 0, iter(rows)
        return
    number, row = [], []
    for i, one in enumerate(rows):
        for where, _, _ in located.of(one, cover, again=True):
            number.append(np.unique(outer.pieces_of(most, where)))
            row.append(np.full(number[-1].size, i))
    windows, users = np.concatenate(number or [np.empty(0, np.int64)]), np.concatenate(row or [np.empty(0, np.int64)])
    order = np.lexsort((users, windows))
    windows, users = windows[order], users[order]
    every, begin = np.unique(windows, return_index=True)
    for window, span in zip(every.tolist(), _spans(begin, users.size), strict=True):
        yield window, (rows[i] for i in dict.fromkeys(users[span].tolist()))


class Located:
    """Changes as positions in covered regions, decoded once as long as they fit into some memory."""

    def __init__(self, patches: Sequence[Contents]) -> None:
        self._patches = patches
        self._table = patches[0].table
        self._kept: OrderedDict[Any, tuple[int, Any]] = OrderedDict()
        self._room = _KEEP_BYTES

    def of(self, row: Rows, cover: Place, again: bool = False) -> list[tuple[Flat, UIntArray, bool]]:
        """Positions in a covered region, rising, with bits or steps, and which of the two; those of one row.

        again: whether they will be asked for once more.
        """
        key = row.patch, row.bucket, cover
        if (kept := self._recall(key)) is None:
            kept = self._found(row, cover)
            if again:
                self._keep(key, kept, sum(where.nbytes + words.nbytes for where, words, _ in kept))
        found: list[tuple[Flat, UIntArray, bool]] = kept
        return found

    def inside(
        self, rows: Iterable[Rows], cover: Place, low: int, numel: int
    ) -> Iterator[tuple[Flat, UIntArray, bool]]:
        """Changes in a window: `numel` positions of a covered region from `low` on, counted from there.

        Those of each patch come together, bits and steps apart.
        """
        for _, its in groupby(rows, key=lambda row: row.patch):
            kinds: dict[bool, list[tuple[Flat, UIntArray]]] = {}
            for row in its:
                for where, words, absolute in self.of(row, cover):
                    ends = np.minimum([low, low + numel], np.iinfo(where.dtype).max).astype(where.dtype)
                    a, b = np.searchsorted(where, ends)
                    if a < b:
                        kinds.setdefault(absolute, []).append((where[a:b].astype(np.int64) - low, words[a:b]))
            for absolute, parts in kinds.items():
                yield *_rising(*(np.concatenate(c) if len(c) > 1 else c[0] for c in zip(*parts, strict=True))), absolute

    def _found(self, row: Rows, cover: Place) -> list[tuple[Flat, UIntArray, bool]]:
        decoded, begin = self._decoded(row.patch, row.bucket)
        entries, out = decoded.head.entries, []
        for dense in (False, True):
            mine = row.entries[entries.dense[row.entries] == dense]
            if not mine.size:
                continue
            count = (entries.numel if dense else entries.count)[mine]
            at = _slices(begin[mine], count)
            positions = counted(count) if dense else decoded.positions[at]
            words = (decoded.dense if dense else decoded.words)[at]
            where: npt.NDArray[Any] = positions
            if cover[1] is not None or entries.region[int(mine[0])] is not None:
                where = flatten_all(self._table, entries.tensor[mine], select(entries.region, mine), count, positions)
                where = _relative(self._table, cover, where)
            out.append((*_rising(where, words), dense or decoded.head.profile.absolute))
        return out

    def _decoded(self, patch: int, bucket: int) -> tuple[Decoded, Flat]:
        """A bucket, and where the words of each entry begin among those of the sparse or of the dense ones."""
        key = patch, bucket
        if (kept := self._recall(key)) is None:
            decoded = self._patches[patch].decode(bucket)
            entries = decoded.head.entries
            sparse, dense = np.where(entries.dense, 0, entries.count), np.where(entries.dense, entries.numel, 0)
            begin = np.where(entries.dense, np.cumsum(dense) - dense, np.cumsum(sparse) - sparse)
            kept = decoded, begin
            self._keep(key, kept, decoded.positions.nbytes + decoded.words.nbytes + decoded.dense.nbytes + begin.nbytes)
        result: tuple[Decoded, Flat] = kept
        return result

    def _recall(self, key: Any) -> Any:
        if key not in self._kept:
            return None
        self._kept.move_to_end(key)
        return self._kept[key][1]

    def _keep(self, key: Any, value: Any, nbytes: int) -> None:
        """Remember a value, and forget those that were not asked for the longest where they take too much."""
        nbytes += 1 << 10
        self._kept[key] = nbytes, value
        self._room -= nbytes
        while self._room < 0 and len(self._kept) > 1:
            _, (freed, _) = self._kept.popitem(last=False)
            self._room += freed


def _slices(begin: Flat, count: Flat) -> slice | Flat:
    """Where so many things from each beginning on are: one slice, if each ends where the next one begins."""
    if bool((begin[1:] == (begin + count)[:-1]).all()):
        return slice(int(begin[0]), int(begin[-1] + count[-1]))
    return counted(count).astype(np.int64) + np.repeat(begin, count)


def among(these: Flat, those: Flat) -> npt.NDArray[np.bool_]:
    """Which of these numbers are among those; both rise."""
    if not these.size or not those.size:
        return np.zeros(these.size, bool)
    at = np.minimum(np.searchsorted(those, these), those.size - 1)
    found: npt.NDArray[np.bool_] = those[at] == these
    return found


def _rising(where: npt.NDArray[Any], words: UIntArray) -> tuple[npt.NDArray[Any], UIntArray]:
    """Positions in order, and their words."""
    if bool((where[1:] > where[:-1]).all()):
        return where, words
    order = np.argsort(where, kind="stable")
    return where[order], words[order]


def _relative(table: TensorTable, cover: Place, flat: Flat) -> Flat:
    """Positions in a tensor as positions in a region of it that holds them; both orders rise together."""
    tensor, region = cover
    if region is None:
        return flat
    coordinates = np.unravel_index(flat, table[tensor].shape)
    inside = tuple(c - a for c, a in zip(coordinates, region.start, strict=True))
    return np.asarray(np.ravel_multi_index(inside, region.size), np.int64)
