"""Single elements on a GPU, in Triton: by address, by gap or position, swapping located changes, samples.

An address here is the distance in elements from a tensor, the base of a side: see `changes.Pointers`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from .changes import (
    Blocks,
    Side,
    add_to_slot,
    advance,
    digest_delta,
    load_bits,
    load_keys,
    load_marks,
    load_rows,
    load_uint32,
    narrowed,
    new_sums,
    popcount,
    store_word,
    tensor_position,
    unsigned,
    weyl_number,
)
from .classes import ChangeNumbers, LocatedChanges, Tiles, magnitude, select

KEYS = 512  # of a histogram
_SWAPPED = 128  # changes that a program swaps
_CELLS = 1024  # elements that a program reads or writes
_STRETCH = 64  # elements of a sample that are next to each other
_STRETCHES = 16  # stretches per program
_SPAN = 4096  # changes with positions that a program locates
SHAPES = {"locate": (512, 4)}  # changes that a program locates at a time, and its warps


@triton.jit(do_not_specialize=["cells"])
def _gather_kernel(base, addresses, out, cells, C: tl.constexpr):
    k = tl.program_id(0).to(tl.int64) * C + tl.arange(0, C)
    ok = k < cells
    tl.store(out + k, tl.load(base + tl.load(addresses + k, mask=ok, other=0), mask=ok, other=0), mask=ok)


def gather(base: torch.Tensor, addresses: torch.Tensor) -> torch.Tensor:
    """The bits at some addresses."""
    count = addresses.numel()
    out = torch.empty(count, dtype=base.dtype, device=base.device)
    if count:
        _gather_kernel[(triton.cdiv(count, _CELLS),)](base, addresses, out, count, _CELLS, num_warps=4)
    return out


@triton.jit(do_not_specialize=["cells"])
def _scatter_kernel(base, addresses, bits, cells, C: tl.constexpr):
    k = tl.program_id(0).to(tl.int64) * C + tl.arange(0, C)
    ok = k < cells
    tl.store(base + tl.load(addresses + k, mask=ok, other=0), tl.load(bits + k, mask=ok, other=0), mask=ok)


def scatter(base: torch.Tensor, addresses: torch.Tensor, bits: torch.Tensor) -> None:
    """Write bits to some addresses."""
    count = addresses.numel()
    if count:
        _scatter_kernel[(triton.cdiv(count, _CELLS),)](base, addresses, bits, count, _CELLS, num_warps=4)


class _Spans(NamedTuple):
    """What `_locate_kernel` reads about its programs.

    For gaps, there is a program per tile, and of each tile: the part, where the tile begins in it (`begin`), its first
    change in the streams (`starts`) and among the changes (`places`), and how many changes it has.
    For positions, a program has a span of a part's changes, and of each part: its first change (`begin`), the spans
    before it (`starts`), and how many changes it has; the others mean nothing.
    """

    part: torch.Tensor
    begin: torch.Tensor
    tile_log: torch.Tensor
    starts: torch.Tensor
    places: torch.Tensor
    counts: torch.Tensor


@triton.jit
def _part_of_span(span, starts, parts):
    """The last part before which there are no more than `span` spans."""
    part = span - span
    step = span - span + 1
    while 2 * step < parts:
        step *= 2
    while step > 0:
        reach = part + step
        before = tl.load(starts + reach, mask=reach < parts, other=0)
        part = tl.where((reach < parts) & (before <= span), reach, part)
        step = step // 2
    return part


@triton.jit
def _load_span(span, spans, parts, GAPS: tl.constexpr, SPAN: tl.constexpr):
    """Part and `begin` of a span, its first change as given and as written, and how many changes it has."""
    if GAPS:
        part = tl.load(spans.part + span)
        begin = tl.load(spans.begin + span)
        changes = tl.load(spans.counts + span)
        source = tl.load(spans.starts + span)
        target = tl.load(spans.places + span)
    else:
        part = _part_of_span(span, spans.starts, parts)
        begin = tl.load(spans.begin + part)
        inside = (span - tl.load(spans.starts + part)) * SPAN
        source = begin + inside
        target = source
        changes = tl.minimum(tl.load(spans.counts + part) - inside, SPAN).to(tl.int32)
    return part, begin, source, target, changes


@triton.jit
def _check_positions(positions, position, k, first, end, ok):
    """Which positions are not above the one before, or lie behind the end of their part."""
    previous = load_uint32(positions + k - 1, ok & (k > first))
    rises = (k == first) | (position > previous)
    return ok & ((position >= end) | (rises == 0))


@triton.jit(do_not_specialize=["parts"])
def _locate_kernel(
    weights,
    blocks,
    spans,
    numbers,
    words,
    out,
    bad,
    parts,
    GAPS: tl.constexpr,
    SIGN: tl.constexpr,
    BITS: tl.constexpr,
    ROWS: tl.constexpr,
    SPAN: tl.constexpr,
    Q: tl.constexpr,
):
    """Locate changes by gaps inside tiles, and steps; or by positions in parts, and new bits. See `_Spans`."""
    span = tl.program_id(0)
    part, begin, source, target, changes = _load_span(span, spans, parts, GAPS, SPAN)
    if (changes > 0) & (tl.load(bad) == 0):
        a = tl.load(weights.at + part)
        end = tl.load(blocks.numel + part)
        key, second_key = load_keys(blocks, part)
        rows = load_rows(blocks, part, ROWS)
        if GAPS:
            end = tl.minimum(end, begin + (tl.full([], 1, tl.int64) << tl.load(spans.tile_log + part)))
        last = begin - 1
        first_sum = tl.zeros([Q], tl.uint64)
        second_sum = tl.zeros([Q], tl.uint64)
        i = changes - changes
        while i < changes:
            k = source + i + tl.arange(0, Q)
            ok = i + tl.arange(0, Q) < changes
            position = load_uint32(numbers + k, ok)
            if GAPS:
                gap = position + 1
                position = last + tl.cumsum(gap, 0)
                last += tl.sum(gap, axis=0)
                wrong = ok & (position >= end)
            else:
                wrong = _check_positions(numbers, position, k, begin, end, ok)
            ok = ok & (wrong == 0)
            old = load_bits(weights.base + a + position, ok)
            new = load_bits(words + k, ok)
            k += target - source
            if GAPS:
                new = advance(old, new, SIGN, BITS)
                store_word(out.new + k, new, ok, BITS)
            tl.store(out.addresses + k, a + position, mask=ok)
            store_word(out.old + k, old, ok, BITS)
            weyl = weyl_number(key, tensor_position(rows, position, ROWS))
            delta = digest_delta(weyl, second_key, old, new, ok)
            first_sum += delta[0]
            second_sum += delta[1]
            if tl.max(wrong.to(tl.int32), axis=0) > 0:
                tl.store(bad, 1)
            i += Q
        add_to_slot(out.sums, span, first_sum, second_sum)


def tile_positions(
    blocks: Blocks,
    side: Side,
    tiles: Tiles,
    tile_log: torch.Tensor,
    numbers: ChangeNumbers,
    bad: torch.Tensor,
    sign_magnitude: bool,
) -> LocatedChanges:
    """The changes of gaps inside tiles, and of steps. Writes no weights.

    Where a gap leads out of its tile, `bad` is set; if it is set already, nothing is located.
    """
    table = tiles.table
    layout = numbers.layout
    begin = (table.block - blocks.table.first[table.part]) * blocks.block
    spans = _Spans(table.part, begin, tile_log, layout.by_class, layout.by_tile, layout.counts)
    out = LocatedChanges.empty(blocks, numbers.total, numbers.steps.dtype)
    at_a_time, warps = SHAPES["locate"]
    if tiles.count:
        _locate_kernel[(tiles.count,)](
            *(side.pointers, blocks.table, spans, numbers.gaps, numbers.steps, out, bad, blocks.sizes.size),
            *(True, sign_magnitude, 8 * blocks.width, blocks.has_rows, _SPAN, at_a_time),
            num_warps=warps,
        )
    return out


def locate(
    blocks: Blocks,
    side: Side,
    changes: np.ndarray[Any, Any],
    positions: torch.Tensor,
    bits: torch.Tensor,
    bad: torch.Tensor,
) -> LocatedChanges:
    """Changes at positions of the parts; each part has so many `changes`. Writes no weights.

    Unless the positions of every part rise strictly and lie inside it, `bad` is set.
    """
    per_part = -(-changes // _SPAN)
    columns = np.cumsum(changes) - changes, np.cumsum(per_part) - per_part, changes
    first, before, counts = blocks.upload_columns(*columns)
    spans = _Spans(first, first, first, before, first, counts)
    count = bits.numel()
    addresses = blocks.empty(count, torch.int64)
    out = LocatedChanges(addresses, blocks.empty(count, bits.dtype), bits, new_sums(blocks.device))
    programs = int(per_part.sum())
    at_a_time, warps = SHAPES["locate"]
    if programs:
        _locate_kernel[(programs,)](
            *(side.pointers, blocks.table, spans, positions, bits, out, bad, blocks.sizes.size),
            *(False, True, 8 * blocks.width, blocks.has_rows, _SPAN, at_a_time),
            num_warps=warps,
        )
    return out


@triton.jit(do_not_specialize=["changes"])
def _swap_kernel(weights, addresses, old, new, moved, changes, Q: tl.constexpr):
    k = tl.program_id(0).to(tl.int64) * Q + tl.arange(0, Q)
    ok = k < changes
    place = weights + tl.load(addresses + k, mask=ok, other=0)
    current = tl.load(place, mask=ok, other=0)
    differs = ok & (current != tl.load(old + k, mask=ok, other=0))
    tl.store(place, tl.load(new + k, mask=ok, other=0), mask=ok)
    tl.store(old + k, current, mask=ok)
    if tl.max(differs.to(tl.int32), axis=0) > 0:
        tl.store(moved, 1)


def swap(side: Side, changes: LocatedChanges, moved: torch.Tensor) -> None:
    """Write the new bits of all changes, and what was there to `changes.old`; if that was different, set `moved`."""
    count = changes.addresses.numel()
    if count:
        _swap_kernel[(triton.cdiv(count, _SWAPPED),)](
            side.base, changes.addresses, changes.old, changes.new, moved, count, _SWAPPED, num_warps=4
        )


@triton.jit
def _find_mark(words, ends, k, blocks, leap, B: tl.constexpr):
    """The block of mark number k of a bitmap, and where the mark lies in it; there are less than 2 * leap blocks."""
    block = tl.program_id(0) - tl.program_id(0)
    while leap > 0:
        reach = block + leap
        passed = (reach < blocks) & (tl.load(ends + reach - 1, mask=reach < blocks, other=0) <= k)
        block = tl.where(passed, reach, block)
        leap = leap >> 1
    marks = load_marks(words, block, B)
    count = popcount(marks)
    upto = tl.load(ends + block) - tl.sum(count, axis=0) + tl.cumsum(count, 0)  # marks up to the end of each word
    has_mark = (upto > k) & (upto - count <= k)
    word = tl.sum(tl.where(has_mark, tl.arange(0, B // 32), 0), axis=0)
    rank = k - tl.sum(tl.where(has_mark, upto - count, 0), axis=0)
    bit = select(tl.sum(tl.where(has_mark, marks, 0), axis=0).to(tl.uint32), rank.to(tl.int32))
    return block, word * 32 + bit


@triton.jit(do_not_specialize=["N", "NB", "leap"])
def _sample_kernel(old, new, blocks, words, ends, which, out, N, NB, leap, B: tl.constexpr):
    """A program looks for one change."""
    i = tl.program_id(0)
    block, place = _find_mark(words, ends, tl.load(which + i), NB, leap, B)
    part = tl.load(blocks.part + block)
    position = (block - tl.load(blocks.first + part)) * B + place
    tl.store(out + i, tl.load(old.base + tl.load(old.at + part) + position))
    y = tl.load(new.base + tl.load(new.at + part) + position)
    tl.store(out + N + i, narrowed(y, out.dtype.element_ty.primitive_bitwidth))


def sample(
    blocks: Blocks, old: Side, new: Side, words: torch.Tensor, counts: torch.Tensor, which: torch.Tensor
) -> torch.Tensor:
    """Old and new bits of some of the changes of a bitmap, by their numbers."""
    out = blocks.empty(2 * which.numel(), old.base.dtype).view(2, -1)
    if which.numel():
        _sample_kernel[(which.numel(),)](
            *(old.pointers, new.pointers, blocks.table, words, torch.cumsum(counts, 0), which, out),
            *(which.numel(), blocks.count, 1 << blocks.count.bit_length() >> 1, blocks.block),
            num_warps=1,
        )
    return out


class _Stretches(NamedTuple):
    """Stretches of a sample: part, where it begins in the part, row of the histogram, and shift of its keys."""

    part: torch.Tensor
    begin: torch.Tensor
    row: torch.Tensor
    shift: torch.Tensor


@triton.jit(do_not_specialize=["count"])
def _keys_kernel(
    weights,
    blocks,
    stretches,
    histogram,
    count,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    S: tl.constexpr,
    R: tl.constexpr,
    KEYS: tl.constexpr,
):
    r = tl.program_id(0) * R + tl.arange(0, R)
    ok = r < count
    part = tl.load(stretches.part + r, mask=ok, other=0)
    begin = tl.load(stretches.begin + r, mask=ok, other=0)
    left = tl.where(ok, tl.load(blocks.numel + part) - begin, 0)
    j = tl.arange(0, S)[None, :]
    inside = j < left[:, None]
    x = tl.load(weights.base + (tl.load(weights.at + part) + begin)[:, None] + j, mask=inside, other=0)
    row = tl.load(stretches.row + r, mask=ok, other=0)
    shift = tl.load(stretches.shift + r, mask=ok, other=0).to(tl.uint64)
    size = magnitude(unsigned(x).to(tl.uint64), KIND, BITS) >> shift[:, None]
    key = tl.minimum(size, KEYS - 1).to(tl.int64)
    tl.atomic_add(histogram + row[:, None] * KEYS + key, inside.to(tl.int32), mask=inside, sem="relaxed")


def key_histogram(
    blocks: Blocks,
    side: Side,
    kind: int,
    row: np.ndarray[tuple[int], np.dtype[np.int64]],
    every: np.ndarray[tuple[int], np.dtype[np.int64]],
    shift: np.ndarray[tuple[int], np.dtype[np.int64]],
) -> torch.Tensor:
    """Count keys (magnitude >> shift, at most 511) of one stretch of 64 in `every`, for several histograms.

    row: the histogram of each part. every, shift: of each histogram, as in `cpu.classes.key_histogram`.
    """
    step = _STRETCH * np.asarray(every)[row]
    per_part = -(-blocks.sizes // step)
    part = np.repeat(np.arange(per_part.size), per_part)
    inside = np.arange(part.size) - (np.cumsum(per_part) - per_part)[part]
    histogram = torch.zeros((len(every), KEYS), dtype=torch.int32, device=blocks.device)
    if part.size:
        columns = part, inside * step[part], row[part], np.asarray(shift)[row[part]]
        stretches = _Stretches(*blocks.upload_columns(*columns))
        _keys_kernel[(triton.cdiv(part.size, _STRETCHES),)](
            *(side.pointers, blocks.table, stretches, histogram, part.size, kind, 8 * blocks.width),
            *(_STRETCH, _STRETCHES, KEYS),
            num_warps=4,
        )
    return histogram
