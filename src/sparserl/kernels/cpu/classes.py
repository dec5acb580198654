"""Magnitude classes, in Numba: how many elements of the same class lie between two changes, and back.

The class of an element is the number of thresholds that its old magnitude reaches. Tiles are looked at in stretches
that the nearest caches hold: a vector comparison per threshold gives a mask for every 64 elements, popcounts give
ranks, and only the places with changes are then touched one by one. On Arm, where masks take long, ranks are counted
without them, and masks made of the blocks with changes.

`kind` is an empty array whose dtype tells width and magnitude (see `classify`), `keep` the magnitude bits of the
unsigned ones. `address` names the old bits of each entry, contiguous.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import MOST_CLASSES
from .changes import advanced
from .llvm import (
    ARM,
    STRETCH,
    alive,
    at_most8,
    at_most16,
    classify,
    classify_short,
    copy_bytes,
    every8,
    inline,
    kernel,
    load,
    load32,
    members,
    members_short,
    popcount,
    prefetch,
    select,
    store,
)
from .llvm import width as width_of

_BLOCKS = STRETCH
_ROW = _BLOCKS + 8
_ONE, _ALL = np.uint64(1), ~np.uint64(0)
_INT16, _UINT32, _UINT64 = (np.empty(0, kind) for kind in (np.int16, np.uint32, np.uint64))  # what is at an address
_SHORT, _HIGH = np.uint64(0x7FFF), np.uint64(0x7F80)  # the magnitude bits of 16-bit floats, and the highest eight


@inline
def magnitude(kind: Any, keep: Any, bits: Any) -> Any:
    """The size of one element's value; `bits` are unsigned, whatever the kind."""
    wide = np.uint64(bits)
    if kind.dtype.type(-1) < kind.dtype.type(0):
        top = np.uint64(1) << np.uint64(8 * width_of(kind) - 1)
        return (~wide + _ONE) & (top | (top - _ONE)) if wide & top else wide
    return wide & keep


@kernel
def key_histogram(kind: Any, address: Any, numel: Any, keep: Any, shift: Any, every: Any, keys: Any) -> Any:
    """Count keys (magnitude >> shift, at most 511) of one block of 64 in `every`. Returns the elements looked at."""
    width = width_of(kind)
    seen = np.int64(0)
    for e in range(numel.size):
        for low in range(0, numel[e], 64 * every):
            for i in range(low, min(low + 64, numel[e])):
                size = magnitude(kind, keep, load(kind, address[e] + i * width))
                keys[min(size >> shift, np.uint64(511))] += 1
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
def change_histogram(kind: Any, keep: Any, shift: Any, every: Any, old: Any, steps: Any, keys: Any) -> None:
    """Count keys of every so many changed elements by step: +1, -1, one or two more, any other."""
    for i in range(0, old.size, every):
        key = min(magnitude(kind, keep, old[i]) >> shift, np.uint64(511))
        step = np.uint64(steps[i])
        column = (
            np.int64(step != np.uint64(2))
            + np.int64(step != _ONE and step != np.uint64(2))
            + np.int64(step > np.uint64(6))
        )
        keys[key, column] += 1


@inline
def _fill(masks: Any, ranks: Any, last: Any) -> None:
    """The row that stands for all elements, of a full stretch."""
    for b in range(_BLOCKS):
        masks[last, b], ranks[last, b] = _ALL, 64 * b
    ranks[last, _BLOCKS] = 64 * _BLOCKS


@inline
def _grid(kind: Any, classes: Any) -> Any:
    """Room for the masks and ranks of a stretch, and for a block that is not full."""
    masks, ranks = np.empty((classes + 1, _ROW), np.uint64), np.empty((classes + 1, _ROW), np.int16)
    for k in range(classes + 1):
        for b in range(_ROW):
            masks[k, b], ranks[k, b] = 0, 0
    _fill(masks, ranks, classes)
    return masks, ranks, np.empty(64, kind.dtype)


@inline
def _is_short(kind: Any, keep: Any, limits: Any) -> Any:
    """Whether the highest eight bits of 16-bit floats tell their class."""
    short = width_of(kind) == 2 and keep == _SHORT
    for limit in limits:
        short &= limit & ~_HIGH == 0
    return short


@inline
def _bounds(short: Any, limits: Any) -> Any:
    """The lowest magnitude of every class, and how far the highest lies above it.

    A class below a limit of 0 has no members, and what is said of it no meaning.
    """
    low, span = np.empty(len(limits) + 1, np.uint64), np.empty(len(limits) + 1, np.uint64)
    for c in range(len(limits) + 1):
        low[c] = limits[c - 1] if c else np.uint64(0)
        top = limits[c] - _ONE if c < len(limits) else _SHORT if short else _ALL
        span[c] = top - low[c]
    return low, span


@inline
def _class_mask(kind: Any, keep: Any, short: Any, at: Any, low: Any, span: Any, mask_at: Any) -> Any:
    """Which elements of a block, which lies at an address, are of a class; `mask_at`: in the row of masks below it."""
    if ARM:
        return members_short(at, low, span) if short else members(kind, at, keep, low, span)
    return load(_UINT64, mask_at + 8 * _ROW) & ~load(_UINT64, mask_at)


@inline
def _classify(kind: Any, keep: Any, short: Any, a: Any, n: Any, limits: Any, masks: Any, ranks: Any, edge: Any) -> None:
    """Look at a stretch of `n` elements, the last block perhaps not full, which is then copied to `edge`.

    masks[k, b]: which elements of block b are below limit k - 1 (on Arm only for the block that is not full). The first
    row stands for none, the one behind the last limit for all. ranks[k, b]: how many of those lie before the block; so
    ranks[c + 1, b] - ranks[c, b] are of class c.
    Blocks that are not there are empty.
    """
    line = 64 * width_of(kind)
    full, rest, last = n >> 6, n & 63, len(limits) + 1
    mask_at, rank_at = np.int64(masks.ctypes.data) + 8 * _ROW, np.int64(ranks.ctypes.data) + 2 * _ROW
    if masks[last, _BLOCKS - 1] != _ALL:  # the stretch before was not full
        _fill(masks, ranks, last)
    if short:
        classify_short(a, full, limits, mask_at, rank_at, _ROW)
    else:
        classify(kind, a, full, keep, limits, mask_at, rank_at, _ROW)
    if full < _BLOCKS:
        if rest:
            for i in range(rest):
                edge[i] = load(kind, a + full * line + i * width_of(kind))
            there = (_ONE << np.uint64(rest)) - _ONE
            for k in range(1, last):
                masks[k, full] = np.uint64(0)
                if limits[k - 1]:
                    below = members(kind, np.int64(edge.ctypes.data), keep, np.uint64(0), limits[k - 1] - _ONE)
                    masks[k, full] = below & there
            masks[last, full] = there
            for k in range(1, last + 1):
                ranks[k, full + 1] = ranks[k, full] + popcount(masks[k, full])
            full += 1
        for k in range(1, last + 1):
            for b in range(full, _BLOCKS):
                masks[k, b] = np.uint64(0)
                ranks[k, b + 1] = ranks[k, b]


@inline
def _before(at: Any) -> Any:
    """How many elements of a class lie before a block; `at` is the address of the rank below the class."""
    return np.int64(load(_INT16, at + 2 * _ROW)) - np.int64(load(_INT16, at))


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
    words: Any,
    tiles: Any,
    gap_at: Any,
    word_at: Any,
) -> Any:
    """Gaps and words of all changes, class by class, and the changes per tile and class. Returns how many these are.

    `gap_at` and `word_at` are the addresses where the uint32 gaps and the words of each class go, and where they end.
    """
    width, word = width_of(kind), width_of(words)
    classes = len(limits) + 1
    masks, ranks, edge = _grid(kind, classes)
    seen, last, before = (
        np.empty(MOST_CLASSES, np.int64),
        np.empty(MOST_CLASSES, np.int64),
        np.empty(MOST_CLASSES, np.int64),
    )
    mask_at, rank_at, edge_at = np.int64(masks.ctypes.data), np.int64(ranks.ctypes.data), np.int64(edge.ctypes.data)
    short = _is_short(kind, keep, limits)
    lowest, span = _bounds(short, limits)
    k, t = np.int64(0), np.int64(0)
    for e in range(counts.size):
        end = k + counts[e]
        for tile in range(0, numel[e], np.int64(1) << log):
            stop = min(tile + (np.int64(1) << log), numel[e])
            seen[:] = 0
            last[:] = -1
            for j in range(classes):
                before[j] = gap_at[j]
            low = np.int64(tile)
            while low < stop and k < end and np.int64(positions[k]) < stop:
                n = min(stop - low, np.int64(64 * _BLOCKS))
                a = address[e] + low * width
                _classify(kind, keep, short, a, n, limits, masks, ranks, edge)
                while k < end and np.int64(positions[k]) < low + n:
                    p = np.int64(positions[np.uint64(k)]) - low
                    size = magnitude(kind, keep, load(kind, a + p * width))
                    c = np.int64(0)
                    for j in range(classes - 1):
                        c += np.int64(size >= limits[j])
                    b, bit, column = p >> 6, np.uint64(p & 63), np.uint64(c)
                    at = a + 64 * b * width if b < n >> 6 else edge_at
                    mask = _class_mask(
                        kind, keep, short, at, lowest[column], span[column], mask_at + 8 * (_ROW * c + b)
                    )
                    before_it = mask & ((_ONE << bit) - _ONE)
                    rank = seen[column] + _before(rank_at + 2 * (_ROW * c + b)) + popcount(before_it)
                    store(positions, gap_at[column], np.uint32(rank - last[column] - 1))
                    store(words, word_at[column], words[np.uint64(k)])
                    gap_at[column] += 4
                    word_at[column] += word
                    last[column] = rank
                    prefetch(a + 128 * _BLOCKS * width + 64 * (k & 255))
                    k += 1
                for j in range(classes):
                    seen[j] += _before(rank_at + 2 * (_ROW * j + _BLOCKS))
                low += n
            for j in range(classes):
                tiles[t + j] = (gap_at[j] - before[j]) >> 2
            t += classes
    alive(masks)
    alive(ranks)
    alive(edge)
    return t


@inline
def _find(rank: Any, q: Any, end: Any, rank_at: Any, coarse_at: Any, gap_at: Any, to: Any) -> Any:
    """Write down the block, and the rank in it, of the changes of a class in a stretch that gaps from `q` on lead to.

    The first of them has `rank`. All others are addresses: the row of ranks below the class, room for 16 ranks, the
    gaps, and where 64 times the block plus the rank goes. Returns the next rank, counted from the next stretch, and the
    next gap. Addresses alone are arguments, since an array is seven.
    """
    there = _before(rank_at + 2 * _BLOCKS)
    if rank < there and q < end:
        every8(rank_at, rank_at + 2 * _ROW, coarse_at)
    while rank < there and q < end:
        b = 8 * at_most16(coarse_at, rank) - 8
        b += at_most8(rank_at + 2 * b, rank_at + 2 * (_ROW + b), rank) - 1
        store(_UINT32, to, np.uint32(64 * b + rank - _before(rank_at + 2 * b)))
        to += 4
        q += 1
        rank += 1 + load32(gap_at + 4 * q)
    return rank - there, q


@inline
def _visit(tag: Any, address: Any, ahead: Any, k: Any, end: Any, out: Any) -> None:
    """Write down the old bits of the changes from `k` to `end`, and have the new ones take their place.

    In a loop of its own: a processor that looks a hundred instructions ahead sees several changes at once in both.
    """
    positions, words, old, land, sign_magnitude = out
    width = width_of(tag)
    for i in range(k, end):
        at = address + np.int64(positions[np.uint64(i)]) * width
        bits = load(tag, at)
        old[np.uint64(i)] = bits
        if land:
            word = advanced(tag, bits, words[np.uint64(i)], sign_magnitude)
            words[np.uint64(i)] = word
            store(tag, at, word)
        prefetch(ahead + 64 * (i & 255))  # while memory is idle


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
    land: Any,
    sign_magnitude: Any,
    positions: Any,
    words: Any,
    old: Any,
) -> Any:
    """Positions with their words and old bits, from gaps (and one to spare) and words by class.

    Inside an entry they come stretch by stretch of 8192 elements, and in a stretch class by class.
    -1, or the first entry whose counts do not add up or whose gaps leave their tile.

    Where they are to `land`, the words become the new bits, and are written over the old ones. Nothing is written
    where an entry is at fault.
    """
    out = positions, words, old, land, sign_magnitude
    k, bad = _positions(tag, kind, keep, address, numel, counts, log, limits, tiles, at, gaps, sorted_words, out)
    if land and bad >= 0:
        _put_back(tag, address, counts, positions, old, k)
    return bad


@inline
def _put_back(tag: Any, address: Any, counts: Any, positions: Any, old: Any, end: Any) -> None:
    """Write the old bits of the first changes."""
    k = np.int64(0)
    for e in range(counts.size):
        for _ in range(min(counts[e], end - k)):
            store(tag, address[e] + np.int64(positions[k]) * width_of(tag), old[k])
            k += 1


@inline
def _positions(
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
    out: Any,
) -> Any:
    """How many changes were found, and the first entry at fault or -1."""
    width = width_of(kind)
    classes = len(limits) + 1
    masks, ranks, edge = _grid(kind, classes)
    coarse = np.empty(16, np.int16)
    mask_at, rank_at = np.int64(masks.ctypes.data), np.int64(ranks.ctypes.data)
    coarse_at, gap_at, edge_at = np.int64(coarse.ctypes.data), np.int64(gaps.ctypes.data), np.int64(edge.ctypes.data)
    short = _is_short(kind, keep, limits)
    lowest, span = _bounds(short, limits)
    position_at, new_at = np.int64(out[0].ctypes.data), np.int64(out[1].ctypes.data)
    word, word_at = width_of(sorted_words), np.int64(sorted_words.ctypes.data)
    want, left = np.empty(MOST_CLASSES, np.int64), np.empty(MOST_CLASSES, np.int64)
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
                return k, e
            low = np.int64(tile)
            while here and low < stop:
                n = min(stop - low, np.int64(64 * _BLOCKS))
                a = address[e] + low * width
                _classify(kind, keep, short, a, n, limits, masks, ranks, edge)
                first = k
                for c in range(classes):
                    q, end = at[c], at[c] + left[c]
                    row, to = rank_at + 2 * _ROW * c, position_at + 4 * k
                    want[c], at[c] = _find(want[c], q, end, row, coarse_at, gap_at, to)
                    for i in range(at[c] - q):  # 64 times a block plus a rank in it becomes a position
                        place = load32(to + 4 * i)
                        b = place >> 6
                        block = a + 64 * b * width if b < n >> 6 else edge_at
                        mask = _class_mask(kind, keep, short, block, lowest[c], span[c], mask_at + 8 * (_ROW * c + b))
                        store(_UINT32, to + 4 * i, np.uint32(low + 64 * b + select(mask, place & 63)))
                    copy_bytes(word_at + word * q, word * (at[c] - q), new_at + word * k)
                    k += at[c] - q
                    left[c] = end - at[c]
                    here -= at[c] - q
                _visit(tag, address[e], a + 128 * _BLOCKS * width, first, k, out)  # and the stretch after the next
                low += n
            if here:
                return k, e
        if due:
            return k, e
    alive(masks)
    alive(ranks)
    alive(coarse)
    alive(edge)
    return k, -1
