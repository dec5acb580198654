"""Magnitude classes, in Numba: how many elements of the same class lie between two changes, and back.

The class of an element is the number of thresholds that its old magnitude reaches. Tiles are looked at in stretches
that the nearest caches hold: a vector comparison per threshold gives a mask for every 64 elements, popcounts give
ranks, and only the places with changes are then touched one by one.

`kind` is an empty array whose dtype tells width and magnitude (see `below64`), `keep` the magnitude bits of the
unsigned ones. `address` names the old bits of each entry, contiguous.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .llvm import at_most8, at_most16, classify64, inline, kernel, load, lowest, popcount, prefetch, select, store

MOST = 8  # classes
_BLOCKS = 128  # of 64 elements: a stretch
_ROW = _BLOCKS + 8
_WALKERS = 4
_ONE, _ALL = np.uint64(1), ~np.uint64(0)


@inline
def magnitude(kind: Any, keep: Any, bits: Any) -> Any:
    """The size of one element's value; `bits` are unsigned, whatever the kind."""
    wide = np.uint64(bits)
    if kind.dtype.type(-1) < kind.dtype.type(0):
        top = np.uint64(1) << np.uint64(8 * kind.itemsize - 1)
        return (~wide + _ONE) & (top | (top - _ONE)) if wide & top else wide
    return wide & keep


@kernel
def key_histogram(kind: Any, address: Any, numel: Any, keep: Any, shift: Any, every: Any, keys: Any) -> Any:
    """Count keys (magnitude >> shift, at most 511) of one block of 64 in `every`. Returns the elements looked at."""
    width = np.int64(kind.itemsize)
    seen = np.int64(0)
    for e in range(numel.size):
        for low in range(0, numel[e], 64 * every):
            for i in range(low, min(low + 64, numel[e])):
                size = magnitude(kind, keep, load(kind, address[e] + i * width))
                keys[min(np.int64(size >> shift), 511)] += 1
                seen += 1
    return seen


@kernel
def largest(kind: Any, keep: Any, old: Any) -> Any:
    """The largest magnitude among some elements."""
    most = np.uint64(0)
    for i in range(old.size):
        most = max(most, magnitude(kind, keep, old[i]))
    return most


@kernel
def change_histogram(kind: Any, keep: Any, shift: Any, old: Any, steps: Any, keys: Any) -> None:
    """Count keys of changed elements by step: +1, -1, one or two more, any other."""
    for i in range(old.size):
        key = min(np.int64(magnitude(kind, keep, old[i]) >> shift), 511)
        step = np.uint64(steps[i])
        column = 0 if step == np.uint64(2) else 1 if step == _ONE else 2 if step < np.uint64(7) else 3
        keys[key, column] += 1


@inline
def _fill(masks: Any, ranks: Any, last: Any) -> None:
    """The row that stands for all elements, of a full stretch."""
    for b in range(_BLOCKS):
        masks[last, b], ranks[last, b] = _ALL, 64 * b
    ranks[last, _BLOCKS] = 64 * _BLOCKS


@inline
def _grid(classes: Any) -> Any:
    """Room for the masks and ranks of a stretch, and for the ranks inside each class."""
    masks, ranks = np.zeros((classes + 1, _ROW), np.uint64), np.zeros((classes + 1, _ROW), np.int32)
    _fill(masks, ranks, classes)
    return masks, ranks, np.empty((classes, _ROW), np.int32)


@kernel
def _classify(kind: Any, keep: Any, a: Any, n: Any, limits: Any, masks: Any, ranks: Any, inside: Any) -> None:
    """Look at a stretch of `n` elements, the last block perhaps not full.

    masks[k, b]: which elements of block b are below limit k - 1. The first row stands for none, the one behind the last
    limit for all. ranks[k, b]: how many of those lie before the block; inside[c, b]: how many of class c do. Blocks
    that are not there are empty.
    """
    line = 64 * np.int64(kind.itemsize)
    full, rest, last = n >> 6, n & 63, len(limits) + 1
    mask_at, rank_at = np.int64(masks.ctypes.data) + 8 * _ROW, np.int64(ranks.ctypes.data) + 4 * _ROW
    quarter = line * (_BLOCKS // _WALKERS)
    if masks[last, _BLOCKS - 1] != _ALL:  # the stretch before was not full
        _fill(masks, ranks, last)
    for b in range(full):
        # Meanwhile the next stretch is on its way, from several places at once, which keeps more of memory busy.
        ahead = a + _BLOCKS * line + (b % _WALKERS) * quarter + b // _WALKERS * line
        for byte in range(0, line, 64):
            prefetch(ahead + byte)
        classify64(kind, a + b * line, keep, limits, mask_at + 8 * b, rank_at + 4 * b, _ROW)
    if full < _BLOCKS:
        if rest:
            edge = np.zeros(64, kind.dtype)
            for i in range(rest):
                edge[i] = load(kind, a + full * line + i * kind.itemsize)
            classify64(kind, np.int64(edge.ctypes.data), keep, limits, mask_at + 8 * full, rank_at + 4 * full, _ROW)
            there = (_ONE << np.uint64(rest)) - _ONE
            for k in range(1, last + 1):
                masks[k, full] &= there
                ranks[k, full + 1] = ranks[k, full] + popcount(masks[k, full])
            full += 1
        for k in range(1, last + 1):
            for b in range(full, _BLOCKS):
                masks[k, b] = np.uint64(0)
                ranks[k, b + 1] = ranks[k, b]
    for c in range(last):
        for b in range(_BLOCKS + 1):
            inside[c, b] = ranks[c + 1, b] - ranks[c, b]


@kernel
def class_gaps(
    kind: Any,
    keep: Any,
    address: Any,
    numel: Any,
    counts: Any,
    log: Any,
    limits: Any,
    positions: Any,
    gaps: Any,
    owner: Any,
    tiles: Any,
) -> None:
    """Gap and class of every change, and the changes per tile and class."""
    width = np.int64(kind.itemsize)
    classes = len(limits) + 1
    masks, ranks, inside = _grid(classes)
    seen, last = np.empty(MOST, np.int64), np.empty(MOST, np.int64)
    k, t = 0, np.int64(0)
    for e in range(counts.size):
        end = k + counts[e]
        for tile in range(0, numel[e], np.int64(1) << log):
            stop = min(tile + (np.int64(1) << log), numel[e])
            seen[:] = 0
            last[:] = -1
            for c in range(classes):
                tiles[t + c] = 0
            low = tile
            while low < stop and k < end and np.int64(positions[k]) < stop:
                n = min(stop - low, np.int64(64 * _BLOCKS))
                a = address[e] + low * width
                _classify(kind, keep, a, n, limits, masks, ranks, inside)
                while k < end and np.int64(positions[k]) < low + n:
                    p = np.int64(positions[k]) - low
                    b, bit = p >> 6, np.uint64(p & 63)
                    size = magnitude(kind, keep, load(kind, a + p * width))
                    c = 0
                    for j in range(classes - 1):
                        c += int(size >= limits[j])
                    members = masks[c + 1, b] & ~masks[c, b]
                    rank = seen[c] + inside[c, b] + popcount(members & ((_ONE << bit) - _ONE))
                    gaps[k], owner[k] = rank - last[c] - 1, c
                    last[c] = rank
                    tiles[t + c] += np.uint32(1)
                    k += 1
                for c in range(classes):
                    seen[c] += inside[c, _BLOCKS]
                low += n
            t += classes


@kernel
def by_class(owner: Any, gaps: Any, words: Any, at: Any, sorted_gaps: Any, sorted_words: Any) -> None:
    """Gaps and words class by class, in order; `at[c]` says where class c begins, and afterwards where it ends."""
    for i in range(owner.size):
        c = np.uint64(owner[i])
        q = np.uint64(at[c])
        sorted_gaps[q], sorted_words[q] = gaps[i], words[i]
        at[c] += 1


@inline
def _mark(c: Any, rank: Any, q: Any, end: Any, masks: Any, inside: Any, gaps: Any, words: Any, found: Any) -> Any:
    """Mark the elements of class c in a stretch that gaps from `q` on lead to, the first of them to `rank`.

    Returns the next rank and gap. `found` is (marks, words by place, ranks of every eighth block).
    """
    marks, places, coarse = found
    mask_at, rank_at = np.int64(masks.ctypes.data) + 8 * _ROW * c, np.int64(inside.ctypes.data) + 4 * _ROW * c
    mark_at, place_at = np.int64(marks.ctypes.data), np.int64(places.ctypes.data)
    coarse_at, width = np.int64(coarse.ctypes.data), np.int64(places.itemsize)
    for j in range(16):
        coarse[j] = inside[c, 8 * j]
    members = np.int64(inside[c, _BLOCKS])
    while rank < members and q < end:
        b = 8 * at_most16(coarse_at, rank) - 8
        b += at_most8(rank_at + 4 * b, rank) - 1
        mask = load(masks, mask_at + 8 * _ROW + 8 * b) & ~load(masks, mask_at + 8 * b)
        bit = select(mask, rank - np.int64(load(inside, rank_at + 4 * b)))
        store(marks, mark_at + 8 * b, load(marks, mark_at + 8 * b) | (_ONE << np.uint64(bit)))
        store(places, place_at + (b * 64 + bit) * width, words[np.uint64(q)])
        q += 1
        rank += 1 + np.int64(gaps[np.uint64(q)])
    return rank - members, q


@inline
def _collect(tag: Any, a: Any, low: Any, k: Any, found: Any, positions: Any, words: Any, old: Any) -> Any:
    """Write down the marked elements of a stretch, from place `k` on, and wipe the marks. Returns the next place."""
    marks, places, _ = found
    hit, m = np.empty(_BLOCKS + 1, np.uint8), np.int64(0)
    for b in range(_BLOCKS):
        hit[m] = b
        m += np.int64(marks[b] != np.uint64(0))
    for j in range(m):
        block = np.int64(hit[j])
        mask = marks[block]
        marks[block] = np.uint64(0)
        while mask:
            p = block * 64 + lowest(mask)
            mask &= mask - _ONE
            positions[k] = low + p
            words[k] = places[p]
            old[k] = load(tag, a + p * np.int64(tag.itemsize))
            k += 1
    return k


@kernel
def class_positions(
    tag: Any,
    kind: Any,
    keep: Any,
    address: Any,
    numel: Any,
    counts: Any,
    log: Any,
    limits: Any,
    tiles: Any,
    at: Any,
    gaps: Any,
    sorted_words: Any,
    positions: Any,
    words: Any,
    old: Any,
) -> Any:
    """Positions in order, with their words and old bits, from gaps (and one to spare) and words by class.

    -1, or the first entry whose counts do not add up or whose gaps leave their tile.
    """
    width = np.int64(kind.itemsize)
    classes = len(limits) + 1
    masks, ranks, inside = _grid(classes)
    marks, places = np.zeros(_BLOCKS, np.uint64), np.empty(64 * _BLOCKS, words.dtype)
    found = (marks, places, np.empty(16, np.int32))
    want, left = np.empty(MOST, np.int64), np.empty(MOST, np.int64)
    k, t = np.int64(0), np.int64(0)
    for e in range(counts.size):
        due = counts[e]
        for tile in range(0, numel[e], np.int64(1) << log):
            stop = min(tile + (np.int64(1) << log), numel[e])
            here = np.int64(0)
            for c in range(classes):
                left[c] = tiles[t + c]
                want[c] = np.int64(gaps[at[c]])  # the rank of the next change, counted from the stretch
                here += left[c]
            t += classes
            due -= here
            if due < 0:
                return e
            low = np.int64(tile)
            while here and low < stop:
                n = min(stop - low, np.int64(64 * _BLOCKS))
                a = address[e] + low * width
                _classify(kind, keep, a, n, limits, masks, ranks, inside)
                for c in range(classes):
                    want[c], q = _mark(c, want[c], at[c], at[c] + left[c], masks, inside, gaps, sorted_words, found)
                    here -= q - at[c]
                    left[c] -= q - at[c]
                    at[c] = q
                k = _collect(tag, a, low, k, found, positions, words, old)
                low += n
            if here:
                return e
        if due:
            return e
    return -1
