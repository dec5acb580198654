"""Single elements on a GPU, in Triton: by address, by gap or position, swapping located changes, a histogram.

An address here is a number of elements from a tensor that stands for all: see `gpu.Side`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from .gpu import _SLOTS, Blocks, Side, add_sums, advance, moved, new_sums, store_word, unsigned, weyl_of
from .gpu_classes import Found, Tiles, magnitude

KEYS = 512  # of a histogram
_AT_ONCE = 128  # changes of a tile and class that are swapped together
_CELLS = 1024  # elements that a program reads or writes
_STRETCH = 64  # elements that lie together in a sample
_STRETCHES = 16  # that a program looks at
_SPAN = 4096  # changes with positions that a program locates
SHAPES = {"locate": (512, 4)}  # changes that a program locates at a time, and its warps


@triton.jit
def _take_kernel(base, where, out, cells, C: tl.constexpr):
    k = tl.program_id(0).to(tl.int64) * C + tl.arange(0, C)
    ok = k < cells
    tl.store(out + k, tl.load(base + tl.load(where + k, mask=ok, other=0), mask=ok, other=0), mask=ok)


def take(base: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
    """The bits at some addresses."""
    out = torch.empty(where.numel(), dtype=base.dtype, device=base.device)
    if where.numel():
        _take_kernel[(triton.cdiv(where.numel(), _CELLS),)](base, where, out, where.numel(), _CELLS, num_warps=4)
    return out


@triton.jit
def _put_kernel(base, where, bits, cells, C: tl.constexpr):
    k = tl.program_id(0).to(tl.int64) * C + tl.arange(0, C)
    ok = k < cells
    tl.store(base + tl.load(where + k, mask=ok, other=0), tl.load(bits + k, mask=ok, other=0), mask=ok)


def put(base: torch.Tensor, where: torch.Tensor, bits: torch.Tensor) -> None:
    """Write bits to some addresses."""
    if where.numel():
        _put_kernel[(triton.cdiv(where.numel(), _CELLS),)](base, where, bits, where.numel(), _CELLS, num_warps=4)


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
    counts,
    given,
    words,
    where,
    old,
    out,
    sums,
    bad,
    GAPS: tl.constexpr,
    SIGN: tl.constexpr,
    BITS: tl.constexpr,
    Q: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """A program has the changes of a tile, from gaps and steps; or a span of those of a part, from positions and bits.

    `begin` is where the tile begins in its part; or the first change of the part.
    """
    span = tl.program_id(0)
    due = tl.load(counts + span)
    if (due > 0) & (tl.load(bad) == 0):
        e, first, low = tl.load(part + span), tl.load(begin + span), tl.load(starts + span)
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
                store_word(out + q, y, ok, BITS)
            tl.store(where + q, a + place, mask=ok)
            store_word(old + q, x, ok, BITS)
            first_moved, second_moved = moved(weyl_of(key, origin + place), key2, x, y, ok)
            one += first_moved
            two += second_moved
            if tl.max(wrong.to(tl.int32), axis=0) > 0:
                tl.store(bad, 1)
            i += Q
        add_sums(sums, span % SLOTS, one, two)


def follow_gaps(
    blocks: Blocks,
    side: Side,
    tiles: Tiles,
    tile_log: torch.Tensor,
    counts: torch.Tensor,
    gaps: torch.Tensor,
    steps: torch.Tensor,
    bad: torch.Tensor,
    sign_magnitude: bool,
) -> Found:
    """The changes of gaps inside tiles, and of steps; `counts` says how many a tile has. Writes no weights.

    Where a gap leads out of its tile, `bad` is set; where it is set before, nothing is located.
    """
    begin = (tiles.block - blocks.first[tiles.part]) * blocks.block
    starts = torch.cumsum(counts, 0, dtype=torch.int64) - counts
    new = blocks.empty(steps.numel(), steps.dtype)
    spans = (tiles.part, begin, tile_log, starts, counts)
    return _located(blocks, side, spans, gaps, steps, new, bad, True, sign_magnitude)


def at_positions(
    blocks: Blocks,
    side: Side,
    changes: np.ndarray[Any, Any],
    positions: torch.Tensor,
    bits: torch.Tensor,
    bad: torch.Tensor,
) -> Found:
    """Changes at positions of the parts, so many of each. Writes no weights.

    Unless the positions of every part rise strictly and lie inside it, `bad` is set.
    """
    per = -(-changes // _SPAN)
    many, first, spans, passed = blocks.put(
        np.stack((changes, np.cumsum(changes) - changes, per, np.cumsum(per) - per))
    )
    part = torch.repeat_interleave(spans, output_size=int(per.sum()))
    inside = (torch.arange(part.numel(), device=blocks.device) - passed[part]) * _SPAN
    counts, heads = (many[part] - inside).clamp(max=_SPAN).to(torch.int32), first[part]
    return _located(blocks, side, (part, heads, part, heads + inside, counts), positions, bits, bits, bad, False, True)


def _located(
    blocks: Blocks,
    side: Side,
    spans: tuple[torch.Tensor, ...],
    given: torch.Tensor,
    words: torch.Tensor,
    new: torch.Tensor,
    bad: torch.Tensor,
    gaps: bool,
    sign_magnitude: bool,
) -> Found:
    *_, starts, counts = spans
    where, old = blocks.empty(given.numel(), torch.int64), blocks.empty(given.numel(), words.dtype)
    found = Found(where, old, new, new_sums(blocks.device), counts.view(-1, 1), starts)
    together, warps = SHAPES["locate"]
    if counts.numel():
        _locate_kernel[(counts.numel(),)](
            *(side.base, side.at, blocks.numel, blocks.keys, blocks.start, *spans, given, words, where, old, new),
            *(found.sums, bad, gaps, sign_magnitude, 8 * blocks.width, together, _SLOTS),
            num_warps=warps,
        )
    return found


@triton.jit
def _swap_kernel(weights, where, old, new, counts, starts, moved, T, C: tl.constexpr, Q: tl.constexpr):
    program = tl.program_id(0)
    t, c = (program // C).to(tl.int64), program % C
    due = tl.load(counts + t * C + c)
    if due > 0:
        begin = tl.load(starts + c.to(tl.int64) * T + t)
        i = due - due
        while i < due:
            lane = i + tl.arange(0, Q)
            ok = lane < due
            q = begin + lane
            there = weights + tl.load(where + q, mask=ok, other=0)
            found = tl.load(there, mask=ok, other=0)
            other = ok & (found != tl.load(old + q, mask=ok, other=0))
            tl.store(there, tl.load(new + q, mask=ok, other=0), mask=ok)
            tl.store(old + q, found, mask=ok)
            if tl.max(other.to(tl.int32), axis=0) > 0:
                tl.store(moved, 1)
            i += Q


def swap(side: Side, found: Found, moved: torch.Tensor) -> None:
    """Write the new bits of all changes; `found.old` is then what was there, and `moved` set if it was something else.

    Tile by tile, as `gpu_classes.land` does.
    """
    tiles, classes = found.counts.shape
    if tiles:
        _swap_kernel[(tiles * classes,)](
            *(side.base, found.where, found.old, found.new, found.counts, found.starts, moved, tiles, classes),
            _AT_ONCE,
            num_warps=4,
        )


@triton.jit
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
    size = magnitude(unsigned(x).to(tl.uint64), KIND, BITS) >> tl.load(shifts + b)[:, None].to(tl.uint64)
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
    total, device = int(many.sum()), blocks.device
    per, steps, rows = blocks.put(np.stack((many, step, row)))
    part = torch.repeat_interleave(per, output_size=total)
    begin = (torch.arange(total, device=device) - (torch.cumsum(per, 0) - per)[part]) * steps[part]
    counts = torch.zeros((len(every), KEYS), dtype=torch.int32, device=device)
    if total:
        _keys_kernel[(triton.cdiv(total, _STRETCHES),)](
            *(side.base, side.at, blocks.numel, part, begin, rows[part], blocks.put(shift), counts, total),
            *(kind, 8 * blocks.width, _STRETCH, _STRETCHES, KEYS),
            num_warps=4,
        )
    return counts
