"""Single elements on a GPU, in Triton: by address, by gap or position, swapping located changes, samples.

An address here is a number of elements from a tensor that stands for all: see `gpu.Side`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from .changes import (
    _SLOTS,
    Blocks,
    Side,
    add_sums,
    advance,
    digest_delta,
    new_sums,
    popcount,
    store_word,
    unsigned,
    weyl_number,
)
from .classes import ChangeLayout, LocatedChanges, Tiles, magnitude, select

KEYS = 512  # of a histogram
_AT_ONCE = 128  # changes that a program swaps
_CELLS = 1024  # elements that a program reads or writes
_STRETCH = 64  # elements that lie together in a sample
_STRETCHES = 16  # that a program looks at
_SPAN = 4096  # changes with positions that a program locates
SHAPES = {"locate": (512, 4)}  # changes that a program locates at a time, and its warps


@triton.jit(do_not_specialize=["cells"])
def _gather_kernel(base, where, out, cells, C: tl.constexpr):
    k = tl.program_id(0).to(tl.int64) * C + tl.arange(0, C)
    ok = k < cells
    tl.store(out + k, tl.load(base + tl.load(where + k, mask=ok, other=0), mask=ok, other=0), mask=ok)


def gather(base: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
    """The bits at some addresses."""
    out = torch.empty(where.numel(), dtype=base.dtype, device=base.device)
    if where.numel():
        _gather_kernel[(triton.cdiv(where.numel(), _CELLS),)](base, where, out, where.numel(), _CELLS, num_warps=4)
    return out


@triton.jit(do_not_specialize=["cells"])
def _scatter_kernel(base, where, bits, cells, C: tl.constexpr):
    k = tl.program_id(0).to(tl.int64) * C + tl.arange(0, C)
    ok = k < cells
    tl.store(base + tl.load(where + k, mask=ok, other=0), tl.load(bits + k, mask=ok, other=0), mask=ok)


def scatter(base: torch.Tensor, where: torch.Tensor, bits: torch.Tensor) -> None:
    """Write bits to some addresses."""
    if where.numel():
        _scatter_kernel[(triton.cdiv(where.numel(), _CELLS),)](base, where, bits, where.numel(), _CELLS, num_warps=4)


@triton.jit
def _locate_kernel(
    weights,
    at,
    numel,
    keys,
    start,
    part,
    begin,
    tile_log,
    starts,
    places,
    counts,
    given,
    words,
    where,
    old,
    out,
    sums,
    bad,
    parts,
    GAPS: tl.constexpr,
    SIGN: tl.constexpr,
    BITS: tl.constexpr,
    SPAN: tl.constexpr,
    Q: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """A program has the changes of a tile, from gaps and steps; or a span of those of a part, from positions and bits.

    Of tiles there are the part, where it begins in that, its first change, where that stands in the streams, and how
    many it has. Of parts there are the first change, the spans before it, and how many changes it has.
    """
    span = tl.program_id(0)
    if GAPS:
        e, first, due = tl.load(part + span), tl.load(begin + span), tl.load(counts + span)
        low, to = tl.load(starts + span), tl.load(places + span)
    else:
        e, step = span - span, span - span + 1
        while 2 * step < parts:
            step *= 2
        while step > 0:
            reach = e + step
            before = tl.load(starts + reach, mask=reach < parts, other=0)
            e = tl.where((reach < parts) & (before <= span), reach, e)
            step = step // 2
        first = tl.load(begin + e)
        inside = (span - tl.load(starts + e)) * SPAN
        low = first + inside
        to = low
        due = tl.minimum(tl.load(counts + e) - inside, SPAN).to(tl.int32)
    shift = to - low
    if (due > 0) & (tl.load(bad) == 0):
        a, end = tl.load(at + e), tl.load(numel + e)
        key, key2 = tl.load(keys + 2 * e), tl.load(keys + 2 * e + 1).to(tl.uint64, bitcast=True)
        origin = tl.load(start + e)
        if GAPS:
            end = tl.minimum(end, first + (tl.full([], 1, tl.int64) << tl.load(tile_log + e)))
        last = first - 1
        one = tl.zeros([Q], tl.uint64)
        two = tl.zeros([Q], tl.uint64)
        i = due - due
        while i < due:
            q = low + i + tl.arange(0, Q)
            ok = i + tl.arange(0, Q) < due
            place = tl.load(given + q, mask=ok, other=0).to(tl.uint32, bitcast=True).to(tl.int64)
            if GAPS:
                gap = place + 1
                place = last + tl.cumsum(gap, 0)
                last += tl.sum(gap, axis=0)
                wrong = ok & (place >= end)
            else:
                ahead = tl.load(given + q - 1, mask=ok & (q > first), other=0)
                rises = (q == first) | (place > ahead.to(tl.uint32, bitcast=True).to(tl.int64))
                wrong = ok & ((place >= end) | (rises == 0))
            ok = ok & (wrong == 0)
            x = unsigned(tl.load(weights + a + place, mask=ok, other=0)).to(tl.uint64)
            y = unsigned(tl.load(words + q, mask=ok, other=0)).to(tl.uint64)
            if GAPS:
                y = advance(x, y, SIGN, BITS)
                store_word(out + shift + q, y, ok, BITS)
            tl.store(where + shift + q, a + place, mask=ok)
            store_word(old + shift + q, x, ok, BITS)
            first_moved, second_moved = digest_delta(weyl_number(key, origin + place), key2, x, y, ok)
            one += first_moved
            two += second_moved
            if tl.max(wrong.to(tl.int32), axis=0) > 0:
                tl.store(bad, 1)
            i += Q
        add_sums(sums, span % SLOTS, one, two)


def tile_positions(
    blocks: Blocks,
    side: Side,
    tiles: Tiles,
    tile_log: torch.Tensor,
    spread: ChangeLayout,
    gaps: torch.Tensor,
    steps: torch.Tensor,
    bad: torch.Tensor,
    sign_magnitude: bool,
) -> LocatedChanges:
    """The changes of gaps inside tiles, and of steps. Writes no weights.

    Where a gap leads out of its tile, `bad` is set; where it is set before, nothing is located.
    """
    begin = (tiles.block - blocks.first[tiles.part]) * blocks.block
    new = blocks.empty(spread.total, steps.dtype)
    spans = (tiles.part, begin, tile_log, spread.by_class, spread.by_tile, spread.counts)
    return _located(blocks, side, tiles.count, spans, gaps, steps, new, bad, True, sign_magnitude)


def locate(
    blocks: Blocks,
    side: Side,
    changes: np.ndarray[Any, Any],
    positions: torch.Tensor,
    bits: torch.Tensor,
    bad: torch.Tensor,
) -> LocatedChanges:
    """Changes at positions of the parts, so many of each. Writes no weights.

    Unless the positions of every part rise strictly and lie inside it, `bad` is set.
    """
    per = -(-changes // _SPAN)
    first, before, many = blocks.upload_columns(np.cumsum(changes) - changes, np.cumsum(per) - per, changes)
    spans = (first, first, first, before, first, many)
    return _located(blocks, side, int(per.sum()), spans, positions, bits, bits, bad, False, True)


def _located(
    blocks: Blocks,
    side: Side,
    programs: int,
    spans: tuple[torch.Tensor, ...],
    given: torch.Tensor,
    words: torch.Tensor,
    new: torch.Tensor,
    bad: torch.Tensor,
    gaps: bool,
    sign_magnitude: bool,
) -> LocatedChanges:
    where, old = blocks.empty(new.numel(), torch.int64), blocks.empty(new.numel(), words.dtype)
    found = LocatedChanges(where, old, new, new_sums(blocks.device))
    together, warps = SHAPES["locate"]
    if programs:
        _locate_kernel[(programs,)](
            *(side.base, side.at, blocks.numel, blocks.keys, blocks.start, *spans, given, words, where, old, new),
            *(found.sums, bad, blocks.sizes.size, gaps, sign_magnitude, 8 * blocks.width, _SPAN, together, _SLOTS),
            num_warps=warps,
        )
    return found


@triton.jit(do_not_specialize=["changes"])
def _swap_kernel(weights, where, old, new, moved, changes, Q: tl.constexpr):
    k = tl.program_id(0).to(tl.int64) * Q + tl.arange(0, Q)
    ok = k < changes
    there = weights + tl.load(where + k, mask=ok, other=0)
    found = tl.load(there, mask=ok, other=0)
    other = ok & (found != tl.load(old + k, mask=ok, other=0))
    tl.store(there, tl.load(new + k, mask=ok, other=0), mask=ok)
    tl.store(old + k, found, mask=ok)
    if tl.max(other.to(tl.int32), axis=0) > 0:
        tl.store(moved, 1)


def swap(side: Side, found: LocatedChanges, moved: torch.Tensor) -> None:
    """Write the new bits of all changes; `found.old` is then what was there, and `moved` set if that was other bits."""
    changes = found.where.numel()
    if changes:
        _swap_kernel[(triton.cdiv(changes, _AT_ONCE),)](
            side.base, found.where, found.old, found.new, moved, changes, _AT_ONCE, num_warps=4
        )


@triton.jit(do_not_specialize=["N"])
def _sample_kernel(
    old, new, old_at, new_at, entry, first, words, ends, which, out, N, NB, B: tl.constexpr, LOG: tl.constexpr
):
    """A program looks for a change: its block, its word, and its bit."""
    i = tl.program_id(0)
    k = tl.load(which + i)
    block = i - i
    for s in tl.static_range(LOG):
        reach = block + (1 << (LOG - 1 - s))
        passed = (reach < NB) & (tl.load(ends + reach - 1, mask=reach < NB, other=0) <= k)
        block = tl.where(passed, reach, block)
    row = tl.arange(0, B // 32)
    marks = tl.load(words + block.to(tl.int64) * (B // 32) + row).to(tl.uint32, bitcast=True)
    count = popcount(marks)
    upto = tl.load(ends + block) - tl.sum(count, axis=0) + tl.cumsum(count, 0)  # changes up to the end of each word
    mine = (upto > k) & (upto - count <= k)
    word = tl.sum(tl.where(mine, row, 0), axis=0)
    left = k - tl.sum(tl.where(mine, upto - count, 0), axis=0)
    bit = select(tl.sum(tl.where(mine, marks, 0), axis=0).to(tl.uint32), left.to(tl.int32))
    e = tl.load(entry + block)
    place = (block - tl.load(first + e)) * B + word * 32 + bit
    tl.store(out + i, tl.load(old + tl.load(old_at + e) + place))
    tl.store(out + N + i, tl.load(new + tl.load(new_at + e) + place))


def sample(
    blocks: Blocks, old: Side, new: Side, words: torch.Tensor, counts: torch.Tensor, which: torch.Tensor
) -> torch.Tensor:
    """Old and new bits of some of the changes of a bitmap, by their numbers."""
    out = blocks.empty(2 * which.numel(), old.base.dtype).view(2, -1)
    if which.numel():
        _sample_kernel[(which.numel(),)](
            *(old.base, new.base, old.at, new.at, blocks.entry, blocks.first, words, torch.cumsum(counts, 0)),
            *(which, out, which.numel(), blocks.count, blocks.block, blocks.count.bit_length()),
            num_warps=1,
        )
    return out


@triton.jit(do_not_specialize=["stretches"])
def _keys_kernel(
    bits,
    at,
    numel,
    part,
    begin,
    row,
    shifts,
    counts,
    stretches,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    S: tl.constexpr,
    R: tl.constexpr,
    KEYS: tl.constexpr,
):
    r = tl.program_id(0) * R + tl.arange(0, R)
    ok = r < stretches
    e = tl.load(part + r, mask=ok, other=0)
    first = tl.load(begin + r, mask=ok, other=0)
    left = tl.where(ok, tl.load(numel + e) - first, 0)
    j = tl.arange(0, S)[None, :]
    there = j < left[:, None]
    x = tl.load(bits + (tl.load(at + e) + first)[:, None] + j, mask=there, other=0)
    b = tl.load(row + r, mask=ok, other=0)
    shift = tl.load(shifts + r, mask=ok, other=0).to(tl.uint64)
    size = magnitude(unsigned(x).to(tl.uint64), KIND, BITS) >> shift[:, None]
    key = tl.minimum(size, KEYS - 1).to(tl.int64)
    tl.atomic_add(counts + b[:, None] * KEYS + key, there.to(tl.int32), mask=there, sem="relaxed")


def key_histogram(
    blocks: Blocks,
    side: Side,
    kind: int,
    row: np.ndarray[tuple[int], np.dtype[np.int64]],
    every: np.ndarray[tuple[int], np.dtype[np.int64]],
    shift: np.ndarray[tuple[int], np.dtype[np.int64]],
) -> torch.Tensor:
    """Count keys (magnitude >> shift, at most 511) of one stretch of 64 in so many, of each part for its row.

    row: of each part. every, shift: of each row; they are as in `kernels.classes`.
    """
    step = _STRETCH * np.asarray(every)[row]
    many = -(-blocks.sizes // step)
    part = np.repeat(np.arange(many.size), many)
    inside = np.arange(part.size) - (np.cumsum(many) - many)[part]
    counts = torch.zeros((len(every), KEYS), dtype=torch.int32, device=blocks.device)
    if part.size:
        table = blocks.upload_columns(part, inside * step[part], row[part], np.asarray(shift)[row[part]])
        _keys_kernel[(triton.cdiv(part.size, _STRETCHES),)](
            *(side.base, side.at, blocks.numel, *table, counts, part.size, kind, 8 * blocks.width),
            *(_STRETCH, _STRETCHES, KEYS),
            num_warps=4,
        )
    return counts
