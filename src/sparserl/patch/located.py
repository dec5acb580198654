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
_KEEP_BYTES = 416 << 20  # of decoded changes that may be needed again: two of the largest buckets
_ENTRY_BYTES = 1 << 10  # what remembering one thing takes besides
_JOIN_ROWS = 1 << 10


class EntryRows(NamedTuple):
    """Entries of one tensor in one bucket of a patch."""

    patch: int
    bucket: int
    entries: Flat


class Located(NamedTuple):
    """Changes in a covered region: rising positions in it, with bits or steps, and which of the two."""

    positions: npt.NDArray[Any]
    words: UIntArray
    absolute: bool


def touched(patches: Sequence[Contents]) -> Iterator[tuple[int, Region | None, list[EntryRows]]]:
    """Every region that the patches cover and change, and the entries that are in it."""
    first = patches[0]
    rows = _entry_rows(patches)
    tensors, begin = np.unique(rows[0], return_index=True)
    covers: dict[int, list[Region | None]] = {tensor: [None] for tensor in tensors.tolist()}
    if not first.complete:
        covers = {tensor: [] for tensor in covers}
        for tensor, region in first.covers:
            if tensor in covers:
                covers[tensor].append(region)
    columns = rows[1:].T
    spans = dict(zip(tensors.tolist(), _spans(begin, len(columns)), strict=True))
    for tensor in sorted(spans, key=lambda t: (first.table[t].dtype.code, t)):
        entry_rows = [EntryRows(p, bucket, np.arange(a, b)) for p, bucket, a, b in columns[spans[tensor]].tolist()]
        for cover, inside in _by_cover(patches, tensor, covers[tensor], entry_rows):
            yield tensor, cover, inside


def _spans(begin: Flat, end: int) -> Iterator[slice]:
    """From each beginning to the next one, and from the last to the end."""
    return map(slice, begin.tolist(), np.append(begin, end)[1:].tolist())


def _entry_rows(patches: Sequence[Contents]) -> Flat:
    """Where tensors are in buckets: tensor, patch, bucket, and their first entry and the one behind the last."""
    rows: list[Flat] = [np.empty((5, 0), np.int64)]
    for p, patch in enumerate(patches):
        for bucket, head in enumerate(patch.heads):
            tensors, begin = np.unique(head.entries.tensor, return_index=True)
            same = np.ones_like(tensors)
            rows.append(np.stack((tensors, p * same, bucket * same, begin, np.append(begin[1:], len(head.entries)))))
            if len(rows) > _JOIN_ROWS:
                rows = [np.concatenate(rows, axis=1)]
    joined = np.concatenate(rows, axis=1)
    return joined[:, np.argsort(joined[0], kind="stable")]


def _by_cover(
    patches: Sequence[Contents], tensor: int, covers: Sequence[Region | None], rows: list[EntryRows]
) -> Iterator[tuple[Region | None, list[EntryRows]]]:
    """Entries of a tensor, by the covered region that they are in; none reaches out of what is covered."""
    if len(covers) == 1:
        yield covers[0], rows
        return
    table = patches[0].table
    owner = np.full(len(covers), tensor, np.int64)
    start, stop = corners(table, owner, *ends(table, owner, covers))
    inside: dict[int, list[EntryRows]] = {}
    for row in rows:
        entries = patches[row.patch].heads[row.bucket].entries
        tensors = entries.tensor[row.entries]
        low, high = corners(table, tensors, *ends(table, tensors, select(entries.region, row.entries)))
        fits = [((start <= low[:, e, None]) & (high[:, e, None] <= stop)).all(axis=0) for e in range(tensors.size)]
        cover_of_entry = np.array([fit.argmax() for fit in fits])
        for c in np.unique(cover_of_entry).tolist():
            inside.setdefault(c, []).append(row._replace(entries=row.entries[cover_of_entry == c]))
    for c, rows_inside in sorted(inside.items()):
        yield covers[c], rows_inside


def by_window(
    located: ChangeLocator, cover: Place, rows: Sequence[EntryRows], outer: Region, most: int
) -> Iterator[tuple[int, Iterator[EntryRows]]]:
    """The windows of a covered region in which anything changes, by their numbers, and the entries that change it."""
    if cover[1] is None and outer.numel <= most:
        yield 0, iter(rows)
        return
    window_parts = [np.empty(0, np.int64)]
    user_parts = [np.empty(0, np.int64)]
    for i, row in enumerate(rows):
        for changes in located.of(row, cover, again=True):
            window_parts.append(np.unique(outer.pieces_of(most, changes.positions)))
            user_parts.append(np.full(window_parts[-1].size, i))
    windows = np.concatenate(window_parts)
    users = np.concatenate(user_parts)
    order = np.lexsort((users, windows))
    users = users[order]
    numbers, begin = np.unique(windows[order], return_index=True)
    for number, span in zip(numbers.tolist(), _spans(begin, users.size), strict=True):
        yield number, (rows[i] for i in dict.fromkeys(users[span].tolist()))


class ChangeLocator:
    """Changes as positions in covered regions, decoded once as long as they fit into some memory."""

    def __init__(self, patches: Sequence[Contents]) -> None:
        self._patches = patches
        self._table = patches[0].table
        self._kept: OrderedDict[Any, tuple[int, Any]] = OrderedDict()
        self._room = _KEEP_BYTES

    def of(self, row: EntryRows, cover: Place, again: bool = False) -> list[Located]:
        """The changes of some entries in a covered region.

        Args:
            row: The entries.
            cover: The covered region.
            again: Whether they will be needed once more.
        """
        key = row.patch, row.bucket, cover
        located: list[Located] | None = self._recall(key)
        if located is None:
            located = self._locate(row, cover)
            if again:
                self._keep(key, located, sum(part.positions.nbytes + part.words.nbytes for part in located))
        return located

    def inside(self, rows: Iterable[EntryRows], cover: Place, low: int, numel: int) -> Iterator[Located]:
        """Changes in a window: `numel` positions of a covered region from `low` on, counted from there.

        Those of each patch come together, bits and steps apart.
        """
        for _, patch_rows in groupby(rows, key=lambda row: row.patch):
            kinds: dict[bool, list[tuple[Flat, UIntArray]]] = {}
            for row in patch_rows:
                for positions, words, absolute in self.of(row, cover):
                    bounds = np.minimum([low, low + numel], np.iinfo(positions.dtype).max).astype(positions.dtype)
                    a, b = np.searchsorted(positions, bounds)
                    if a < b:
                        kinds.setdefault(absolute, []).append((positions[a:b].astype(np.int64) - low, words[a:b]))
            for absolute, parts in kinds.items():
                columns = (np.concatenate(c) if len(c) > 1 else c[0] for c in zip(*parts, strict=True))
                yield Located(*_rising(*columns), absolute)

    def _locate(self, row: EntryRows, cover: Place) -> list[Located]:
        decoded, begin = self._decoded(row.patch, row.bucket)
        entries = decoded.head.entries
        located = []
        for dense in (False, True):
            chosen = row.entries[entries.dense[row.entries] == dense]
            if not chosen.size:
                continue
            count = (entries.numel if dense else entries.count)[chosen]
            inside = _slices(begin[chosen], count)
            positions: npt.NDArray[Any] = counted(count) if dense else decoded.positions[inside]
            words = (decoded.dense if dense else decoded.words)[inside]
            if cover[1] is not None or entries.region[int(chosen[0])] is not None:
                regions = select(entries.region, chosen)
                flat = flatten_all(self._table, entries.tensor[chosen], regions, count, positions)
                positions = relative(self._table, cover, flat)
            located.append(Located(*_rising(positions, words), dense or decoded.head.profile.absolute))
        return located

    def _decoded(self, patch: int, bucket: int) -> tuple[Decoded, Flat]:
        """A bucket, and where the words of each entry begin among those of the sparse or of the dense ones."""
        key = patch, bucket
        kept: tuple[Decoded, Flat] | None = self._recall(key)
        if kept is None:
            decoded = self._patches[patch].decode(bucket)
            entries = decoded.head.entries
            sparse = np.where(entries.dense, 0, entries.count)
            dense = np.where(entries.dense, entries.numel, 0)
            begin = np.where(entries.dense, np.cumsum(dense) - dense, np.cumsum(sparse) - sparse)
            kept = decoded, begin
            self._keep(key, kept, decoded.positions.nbytes + decoded.words.nbytes + decoded.dense.nbytes + begin.nbytes)
        return kept

    def _recall(self, key: Any) -> Any:
        if key not in self._kept:
            return None
        self._kept.move_to_end(key)
        return self._kept[key][1]

    def _keep(self, key: Any, value: Any, nbytes: int) -> None:
        """Remember a value, and forget those that were not needed the longest where they take too much."""
        nbytes += _ENTRY_BYTES
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


def among(numbers: Flat, others: Flat) -> npt.NDArray[np.bool_]:
    """Which numbers are among others; both rise."""
    if not numbers.size or not others.size:
        return np.zeros(numbers.size, bool)
    at = np.minimum(np.searchsorted(others, numbers), others.size - 1)
    is_among: npt.NDArray[np.bool_] = others[at] == numbers
    return is_among


def _rising(positions: npt.NDArray[Any], words: UIntArray) -> tuple[npt.NDArray[Any], UIntArray]:
    """Positions in order, and their words."""
    if bool((positions[1:] > positions[:-1]).all()):
        return positions, words
    order = np.argsort(positions, kind="stable")
    return positions[order], words[order]


def relative(table: TensorTable, cover: Place, flat: Flat) -> Flat:
    """Positions in a tensor as positions in a region of it that holds them; both orders rise together."""
    tensor, region = cover
    if region is None:
        return flat
    coordinates = np.unravel_index(flat, table[tensor].shape)
    inside = tuple(c - a for c, a in zip(coordinates, region.start, strict=True))
    return np.asarray(np.ravel_multi_index(inside, region.size), np.int64)
