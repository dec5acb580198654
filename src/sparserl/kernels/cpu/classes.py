"""Magnitude classes on a CPU, in Numba: how many elements of the same class lie between two changes, and back.

The class of an element is the number of limits that its old magnitude reaches. Tiles are read in stretches that fit the
nearest caches: a vector comparison per limit gives a mask for every 64 elements, popcounts give ranks, and only changed
elements are then touched one by one. On Arm, where masks are slow, ranks are counted without them, and masks are made
for blocks with changes only.

`kind` is an empty array whose dtype gives width and magnitude (see `llvm.classify`), `keep` the magnitude bits of an
unsigned dtype.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import MOST_CLASSES
from .arguments import ClassChanges, ClassEnds, ClassStreams, Landing, Magnitudes, Tiled
from .changes import advance_bits
from .compiling import inline, kernel
from .llvm import (
    ARM,
    STRETCH,
    at_most8,
    at_most16,
    class_mask,
    class_mask_short,
    classify,
    classify_short,
    copy_bytes,
    every8,
    keep_alive,
    load,
    load32,
    popcount,
    prefetch,
    select,
    store,
)
from .llvm import width as width_of

_BLOCKS = STRETCH
_ROW = _BLOCKS + 8
_ONE = np.uint64(1)
_ALL = ~np.uint64(0)
_INT16 = np.empty(0, np.int16)  # tags: the dtype of what lies at an address
_UINT32 = np.empty(0, np.uint32)
_UINT64 = np.empty(0, np.uint64)
_SHORT = np.uint64(0x7FFF)
_HIGH = np.uint64(0x7F80)  # magnitude bits of a 16-bit float, and the highest eight of them


@inline
def magnitude(kind: Any, keep: Any, bits: Any) -> Any:
    """The magnitude of one element; `bits` are unsigned, whatever the kind."""
    wide = np.uint64(bits)
    if kind.dtype.type(-1) < kind.dtype.type(0):
        top = np.uint64(1) << np.uint64(8 * width_of(kind) - 1)
        return (~wide + _ONE) & (top | (top - _ONE)) if wide & top else wide
    return wide & keep


@kernel
def key_histogram(kind: Any, address: Any, numel: Any, keep: Any, shift: Any, every: Any, keys: Any) -> Any:
    """Count keys (magnitude >> shift, at most 511) of one block of 64 in `every`. Returns how many elements it read."""
    width = width_of(kind)
    sampled = np.int64(0)
    for e in range(numel.size):
        for low in range(0, numel[e], 64 * every):
            for i in range(low, min(low + 64, numel[e])):
                size = magnitude(kind, keep, load(kind, address[e] + i * width))
                keys[min(size >> shift, np.uint64(511))] += 1
                sampled += 1
    return sampled


@kernel
def restore_keys(magnitudes: Magnitudes, shift: Any, every: Any, positions: Any, new: Any, old: Any, keys: Any) -> None:
    """Turn the histogram that `key_histogram` counts over new bits into that of the old bits."""
    kind, keep = magnitudes
    for i in range(positions.size):
        if (np.int64(positions[i]) >> 6) % every == 0:
            keys[min(magnitude(kind, keep, new[i]) >> shift, np.uint64(511))] -= 1
            keys[min(magnitude(kind, keep, old[i]) >> shift, np.uint64(511))] += 1


@kernel
def largest(kind: Any, keep: Any, old: Any) -> Any:
    """The largest magnitude among some elements."""
    most = np.uint64(0)
    for i in range(old.size):
        most = max(most, magnitude(kind, keep, old[i]))
    return most


@kernel
def change_histogram(kind: Any, keep: Any, shift: Any, every: Any, old: Any, steps: Any, keys: Any) -> None:
    """Count the keys of one changed element in `every`, by step: +1, -1, up to 3 either way, any other."""
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
def _fill_last_row(masks: Any, ranks: Any, last: Any) -> None:
    """Fill the row that stands for all elements with a full stretch."""
    for b in range(_BLOCKS):
        masks[last, b] = _ALL
        ranks[last, b] = 64 * b
    ranks[last, _BLOCKS] = 64 * _BLOCKS


@inline
def _allocate_stretch(kind: Any, classes: Any) -> Any:
    """Arrays for the masks and ranks of a stretch, and for a block that is not full."""
    masks = np.empty((classes + 1, _ROW), np.uint64)
    ranks = np.empty((classes + 1, _ROW), np.int16)
    for k in range(classes + 1):
        for b in range(_ROW):
            masks[k, b] = 0
            ranks[k, b] = 0
    _fill_last_row(masks, ranks, classes)
    return masks, ranks, np.empty(64, kind.dtype)


@inline
def _is_short(kind: Any, keep: Any, limits: Any) -> Any:
    """Whether the highest eight magnitude bits of 16-bit floats determine their class."""
    short = width_of(kind) == 2 and keep == _SHORT
    for limit in limits:
        short &= limit & ~_HIGH == 0
    return short


@inline
def _bounds(short: Any, limits: Any) -> Any:
    """The lowest magnitude of every class, and the distance of the highest from it.

    A class below a limit of 0 has no members, and its numbers mean nothing.
    """
    low = np.empty(len(limits) + 1, np.uint64)
    span = np.empty(len(limits) + 1, np.uint64)
    for c in range(len(limits) + 1):
        low[c] = limits[c - 1] if c else np.uint64(0)
        top = limits[c] - _ONE if c < len(limits) else _SHORT if short else _ALL
        span[c] = top - low[c]
    return low, span


@inline
def _class_mask(kind: Any, keep: Any, short: Any, at: Any, low: Any, span: Any, mask_at: Any) -> Any:
    """Mask of the elements of a class in the block at an address; `mask_at` is in the row of masks below the class."""
    if ARM:
        return class_mask_short(at, low, span) if short else class_mask(kind, at, keep, low, span)
    return load(_UINT64, mask_at + 8 * _ROW) & ~load(_UINT64, mask_at)


@inline
def _classify(kind: Any, keep: Any, short: Any, a: Any, n: Any, limits: Any, masks: Any, ranks: Any, edge: Any) -> None:
    """Compare a stretch of `n` elements with the limits. If its last block is not full, that is copied to `edge`.

    masks[k, b]: which elements of block b are below limit k - 1 (on Arm only for the block that is not full). The first
    row stands for none, the one behind the last limit for all. ranks[k, b]: how many of those lie before the block; so
    ranks[c + 1, b] - ranks[c, b] are of class c. Blocks behind the end are empty.
    """
    line = 64 * width_of(kind)
    full = n >> 6
    rest = n & 63
    last = len(limits) + 1
    mask_at = np.int64(masks.ctypes.data) + 8 * _ROW
    rank_at = np.int64(ranks.ctypes.data) + 2 * _ROW
    if masks[last, _BLOCKS - 1] != _ALL:  # the stretch before was not full
        _fill_last_row(masks, ranks, last)
    if short:
        classify_short(a, full, limits, mask_at, rank_at, _ROW)
    else:
        classify(kind, a, full, keep, limits, mask_at, rank_at, _ROW)
    if full < _BLOCKS:
        if rest:
            for i in range(rest):
                edge[i] = load(kind, a + full * line + i * width_of(kind))
            existing = (_ONE << np.uint64(rest)) - _ONE
            for k in range(1, last):
                masks[k, full] = np.uint64(0)
                if limits[k - 1]:
                    below = class_mask(kind, np.int64(edge.ctypes.data), keep, np.uint64(0), limits[k - 1] - _ONE)
                    masks[k, full] = below & existing
            masks[last, full] = existing
            for k in range(1, last + 1):
                ranks[k, full + 1] = ranks[k, full] + popcount(masks[k, full])
            full += 1
        for k in range(1, last + 1):
            for b in range(full, _BLOCKS):
                masks[k, b] = np.uint64(0)
                ranks[k, b + 1] = ranks[k, b]


@inline
def _before(at: Any) -> Any:
    """How many elements of a class lie before a block; `at` is the address of its rank in the row below the class."""
    return np.int64(load(_INT16, at + 2 * _ROW)) - np.int64(load(_INT16, at))


@inline
def _block_mask(kind: Any, keep: Any, short: Any, stretch: Any, b: Any, c: Any, low: Any, span: Any) -> Any:
    """Mask of the elements of class c in block b of a stretch: its address, its size, and addresses of masks and edge.

    `low` and `span` are the bounds of the class.
    """
    a, n, mask_at, edge_at = stretch
    block = a + 64 * b * width_of(kind) if b < n >> 6 else edge_at
    return _class_mask(kind, keep, short, block, low, span, mask_at + 8 * (_ROW * c + b))


@inline
def _class_of(size: Any, limits: Any) -> Any:
    """How many limits a magnitude reaches."""
    c = np.int64(0)
    for k in range(len(limits)):
        c += np.int64(size >= limits[k])
    return c


@inline
def _restored_copy(kind: Any, a: Any, n: Any, low: Any, k: Any, end: Any, positions: Any, old: Any, to: Any) -> None:
    """Copy the `n` elements at an address, which begin at position `low`, with the old bits of changes from `k` on."""
    width = width_of(kind)
    copy_bytes(a, n * width, to)
    while k < end and np.int64(positions[k]) < low + n:
        store(old, to + (np.int64(positions[k]) - low) * width, old[k])
        k += 1


@kernel
def class_gaps(
    magnitudes: Magnitudes, regions: Tiled, limits: Any, positions: Any, words: Any, old: Any, ends: ClassEnds
) -> Any:
    """Gaps and words of all changes, class by class, and the changes per tile and class. Returns how many these are.

    old: the old bits of the changes, if the regions have their new bits; else empty. They are put back in a copy of
        one stretch at a time.
    ends: the addresses where the uint32 gaps and the words of each class go, and then where they end.
    """
    kind, keep = magnitudes
    address, numel, counts, log = regions
    tiles, gap_at, word_at = ends
    width = width_of(kind)
    classes = len(limits) + 1
    masks, ranks, edge = _allocate_stretch(kind, classes)
    stretch_copy = np.empty(64 * _BLOCKS if old.size else 1, kind.dtype)
    passed = np.empty(MOST_CLASSES, np.int64)  # members of each class in the tile before the stretch
    last = np.empty(MOST_CLASSES, np.int64)
    tile_at = np.empty(MOST_CLASSES, np.int64)
    mask_at = np.int64(masks.ctypes.data)
    rank_at = np.int64(ranks.ctypes.data)
    edge_at = np.int64(edge.ctypes.data)
    short = _is_short(kind, keep, limits)
    lowest, span = _bounds(short, limits)
    k = np.int64(0)
    t = np.int64(0)
    for e in range(counts.size):
        end = k + counts[e]
        for tile in range(0, numel[e], np.int64(1) << log):
            stop = min(tile + (np.int64(1) << log), numel[e])
            passed[:] = 0
            last[:] = -1
            for j in range(classes):
                tile_at[j] = gap_at[j]
            low = np.int64(tile)
            while low < stop and k < end and np.int64(positions[k]) < stop:
                n = min(stop - low, np.int64(64 * _BLOCKS))
                a = address[e] + low * width
                ahead = a + 128 * _BLOCKS * width
                if old.size:
                    _restored_copy(kind, a, n, low, k, end, positions, old, np.int64(stretch_copy.ctypes.data))
                    a = np.int64(stretch_copy.ctypes.data)
                _classify(kind, keep, short, a, n, limits, masks, ranks, edge)
                stretch = a, n, mask_at, edge_at
                while k < end and np.int64(positions[k]) < low + n:
                    p = np.int64(positions[np.uint64(k)]) - low
                    b = p >> 6
                    c = _class_of(magnitude(kind, keep, load(kind, a + p * width)), limits)
                    column = np.uint64(c)
                    mask = _block_mask(kind, keep, short, stretch, b, c, lowest[column], span[column])
                    earlier = mask & ((_ONE << np.uint64(p & 63)) - _ONE)
                    rank = passed[column] + _before(rank_at + 2 * (_ROW * c + b)) + popcount(earlier)
                    store(positions, gap_at[column], np.uint32(rank - last[column] - 1))
                    store(words, word_at[column], words[np.uint64(k)])
                    gap_at[column] += 4
                    word_at[column] += width_of(words)
                    last[column] = rank
                    prefetch(ahead + 64 * (k & 255))
                    k += 1
                for j in range(classes):
                    passed[j] += _before(rank_at + 2 * (_ROW * j + _BLOCKS))
                low += n
            for j in range(classes):
                tiles[t + j] = (gap_at[j] - tile_at[j]) >> 2
            t += classes
    keep_alive(masks)
    keep_alive(ranks)
    keep_alive(edge)
    keep_alive(stretch_copy)
    return t


@inline
def _find_blocks(rank: Any, q: Any, end: Any, rank_at: Any, coarse_at: Any, gap_at: Any, to: Any) -> Any:
    """Write down the block, and the rank in it, of the changes of a class in a stretch, by their gaps from `q` on.

    The first of them has `rank`. The others are addresses: the row of ranks below the class, scratch for 16 ranks, the
    gaps, and where 64 times the block plus the rank goes. Returns the next rank, counted from the next stretch, and the
    next gap. Arguments are addresses because an array would be seven arguments.
    """
    members = _before(rank_at + 2 * _BLOCKS)
    if rank < members and q < end:
        every8(rank_at, rank_at + 2 * _ROW, coarse_at)
    while rank < members and q < end:
        b = 8 * at_most16(coarse_at, rank) - 8
        b += at_most8(rank_at + 2 * b, rank_at + 2 * (_ROW + b), rank) - 1
        store(_UINT32, to, np.uint32(64 * b + rank - _before(rank_at + 2 * b)))
        to += 4
        q += 1
        rank += 1 + load32(gap_at + 4 * q)
    return rank - members, q


@inline
def _read_and_write(tag: Any, address: Any, ahead: Any, k: Any, end: Any, landing: Any, out: Any) -> None:
    """Read the old bits of the changes from `k` to `end`, and write the new ones if asked to.

    A short loop of its own, so that a processor works on several changes at once.
    """
    positions, words, old = out
    write, sign_magnitude = landing
    width = width_of(tag)
    for i in range(k, end):
        at = address + np.int64(positions[np.uint64(i)]) * width
        bits = load(tag, at)
        old[np.uint64(i)] = bits
        if write:
            word = advance_bits(tag, bits, words[np.uint64(i)], sign_magnitude)
            words[np.uint64(i)] = word
            store(tag, at, word)
        prefetch(ahead + 64 * (i & 255))  # while memory is idle


@kernel
def class_positions(
    tag: Any,
    magnitudes: Magnitudes,
    regions: Tiled,
    limits: Any,
    streams: ClassStreams,
    landing: Landing,
    out: ClassChanges,
) -> Any:
    """Positions with their words and old bits, from gaps and words by class.

    Inside an entry they are ordered by stretches of 8192 elements, and in a stretch by class.
    Returns -1, or the first entry whose counts do not add up or whose gaps leave their tile.

    landing: whether to replace the words by the new bits, and write these over the old ones; nothing if an entry is
        wrong.
    """
    k, bad = _positions(tag, magnitudes, regions, limits, streams, landing, out)
    if landing.write and bad >= 0:
        _restore(tag, regions.address, regions.counts, out.positions, out.old, k)
    return bad


@inline
def _restore(tag: Any, address: Any, counts: Any, positions: Any, old: Any, end: Any) -> None:
    """Write the old bits of the first `end` changes."""
    k = np.int64(0)
    for e in range(counts.size):
        for _ in range(min(counts[e], end - k)):
            store(tag, address[e] + np.int64(positions[k]) * width_of(tag), old[k])
            k += 1


@inline
def _resolve(
    kind: Any, keep: Any, short: Any, stretch: Any, c: Any, bounds: Any, low: Any, place_at: Any, count: Any
) -> None:
    """Turn 64 times a block plus a rank in it, for each of `count` changes of class c, into a position."""
    for i in range(count):
        place = load32(place_at + 4 * i)
        b = place >> 6
        mask = _block_mask(kind, keep, short, stretch, b, c, *bounds)
        store(_UINT32, place_at + 4 * i, np.uint32(low + 64 * b + select(mask, place & 63)))


@inline
def _positions(tag: Any, magnitudes: Any, regions: Any, limits: Any, streams: Any, landing: Any, out: Any) -> Any:
    """Returns how many changes were located, and the first wrong entry or -1."""
    kind, keep = magnitudes
    address, numel, counts, log = regions
    tiles, at, gaps, sorted_words = streams
    width = width_of(kind)
    classes = len(limits) + 1
    masks, ranks, edge = _allocate_stretch(kind, classes)
    coarse = np.empty(16, np.int16)
    mask_at = np.int64(masks.ctypes.data)
    rank_at = np.int64(ranks.ctypes.data)
    coarse_at = np.int64(coarse.ctypes.data)
    gap_at = np.int64(gaps.ctypes.data)
    edge_at = np.int64(edge.ctypes.data)
    short = _is_short(kind, keep, limits)
    lowest, span = _bounds(short, limits)
    position_at = np.int64(out.positions.ctypes.data)
    new_at = np.int64(out.words.ctypes.data)
    word = width_of(sorted_words)
    word_at = np.int64(sorted_words.ctypes.data)
    rank = np.empty(MOST_CLASSES, np.int64)  # of the next change of each class, counted from the stretch
    left = np.empty(MOST_CLASSES, np.int64)
    k = np.int64(0)
    t = np.int64(0)
    for e in range(counts.size):
        entry_left = counts[e]
        for tile in range(0, numel[e], np.int64(1) << log):
            stop = min(tile + (np.int64(1) << log), numel[e])
            tile_left = np.int64(0)
            for c in range(classes):
                left[c] = tiles[t + c]
                rank[c] = np.int64(gaps[at[c]])
                tile_left += left[c]
            t += classes
            entry_left -= tile_left
            if entry_left < 0:
                return k, e
            low = np.int64(tile)
            while tile_left and low < stop:
                n = min(stop - low, np.int64(64 * _BLOCKS))
                a = address[e] + low * width
                _classify(kind, keep, short, a, n, limits, masks, ranks, edge)
                stretch = a, n, mask_at, edge_at
                first = k
                for c in range(classes):
                    q = at[c]
                    end = at[c] + left[c]
                    row = rank_at + 2 * _ROW * c
                    to = position_at + 4 * k
                    rank[c], at[c] = _find_blocks(rank[c], q, end, row, coarse_at, gap_at, to)
                    count = at[c] - q
                    _resolve(kind, keep, short, stretch, c, (lowest[c], span[c]), low, to, count)
                    copy_bytes(word_at + word * q, word * count, new_at + word * k)
                    k += count
                    left[c] -= count
                    tile_left -= count
                after_next = a + 128 * _BLOCKS * width  # a stretch to prefetch meanwhile
                _read_and_write(tag, address[e], after_next, first, k, landing, out)
                low += n
            if tile_left:
                return k, e
        if entry_left:
            return k, e
    keep_alive(masks)
    keep_alive(ranks)
    keep_alive(coarse)
    keep_alive(edge)
    return k, -1
