"""Magnitude classes on a GPU, in Triton: from a bitmap of changes to ranks inside classes, and back.

    class_ranks: how many elements of each class lie before each word; for encoding together with the diff
    encode: classify_changes (class and rank inside the block) ──► sort_by_class (rank inside the tile)
    decode: change_layout ──► class_positions (the elements that have the ranks) ──► write

A word is the 32 elements of a word of the bitmap. For each limit a mask says which of them are below it. Two-byte
floats are compared in pairs, four elements in a few instructions; `natural_order` puts their masks in order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from .changes import (
    _INTERPRETED,
    Blocks,
    Side,
    add_to_slot,
    advance,
    block_span,
    difference_mask,
    digest_delta,
    list_marks,
    load_bits,
    load_keys,
    load_marks,
    load_new_bits,
    load_rows,
    load_uint32,
    natural_order,
    new_sums,
    pair_difference_mask,
    popcount,
    read_pairs,
    steps,
    store_word,
    tensor_position,
    unsigned,
    weyl_number,
)
from .ints import INTS

# kinds of magnitude
_FLOAT = 0
_SIGNED = 1
_PLAIN = 2
# How much a program handles at a time, and its warps.
SHAPES = {
    "count": (256, 4),  # words
    "diff and count": (256, 4),
    "classify": (32, 1),  # changes of a block: at usual densities there are not many more
    "sort": (32, 1),
    "positions": (32, 1),  # changes of a tile and class
    "write": (256, 4),  # changes
}


@dataclass(frozen=True)
class Classification:
    """How the elements of each part are divided into classes: limits (magnitudes), tiles, and the kind of magnitude.

    All parts have as many limits as the one with the most; the missing ones are zeros, and come first.
    """

    limits: torch.Tensor  # uint64 as int64, parts × K
    tile_log: torch.Tensor  # int32, of each part
    K: int
    kind: int
    sign_magnitude: bool

    @classmethod
    def of(
        cls, blocks: Blocks, limits: np.ndarray[Any, Any], tile_log: Any, sign_magnitude: bool, signed: bool = False
    ) -> Classification:
        rows = np.asarray(limits, np.uint64)
        if int(np.min(tile_log, initial=31)) < blocks.block.bit_length() - 1:
            raise ValueError("a tile is smaller than a block; make smaller blocks")
        logs = np.broadcast_to(np.asarray(tile_log, np.int32), (rows.shape[0],))
        kind = _FLOAT if sign_magnitude else _SIGNED if signed else _PLAIN
        on_gpu = blocks.upload(rows.view(np.int64))
        return cls(on_gpu, blocks.upload(logs, torch.int32), rows.shape[1], kind, sign_magnitude)

    def paired(self, blocks: Blocks, side: Side) -> bool:
        """Whether elements can be compared two at a time."""
        return side.base.element_size() == blocks.width == 2 and self.kind == _FLOAT and side.aligned


class ClassRanks(NamedTuple):
    """How many elements lie before each block, and before each word inside its block.

    members, before: of each class (classes × blocks), in the block and before it.
    low, high: of each word, how many elements below each limit lie before it: 16 bits each, four to a number.
    """

    members: torch.Tensor
    before: torch.Tensor
    low: torch.Tensor
    high: torch.Tensor


@triton.jit
def magnitude(x, KIND: tl.constexpr, BITS: tl.constexpr):
    """The magnitude of a value, from its bits as uint64."""
    top = tl.full([1], 1, tl.uint64) << (BITS - 1)
    ones = top | (top - 1)
    if KIND == 0:
        return x & (top - 1)
    elif KIND == 1:
        return tl.where((x & top) != 0, ((x ^ ones) + 1) & ones, x)
    else:
        return x


@triton.jit
def _read_words(bits, a, n, W: tl.constexpr, PAIRED: tl.constexpr, PAST: tl.constexpr):
    """The elements of W consecutive words, a word a row: one by one, or as pairs."""
    if PAIRED:
        return read_pairs(bits, a, n, W, True, PAST)
    else:
        j = tl.arange(0, W)[:, None] * 32 + tl.arange(0, 32)[None, :]
        return tl.load(bits + a + j, mask=j < n, other=0)


@triton.jit
def _comparable(x, PAIRED: tl.constexpr):
    """Elements as they are compared with limits: unsigned, or as pairs without signs and with the top bits set."""
    if PAIRED:
        return (x.to(tl.uint32, bitcast=True) & 0x7FFF7FFF) | 0x80008000
    else:
        return unsigned(x).to(tl.uint64)


@triton.jit
def _read_rows(bits, at, n, whole, PAIRED: tl.constexpr):
    """The words at some places, a row each: `n` elements of each exist, or all if `whole`."""
    if PAIRED:
        j = tl.arange(0, 16)[None, :]
        pairs = bits.to(tl.pointer_type(tl.int32)) + tl.multiple_of(at // 2, [4])[:, None] + j
        if whole:  # noqa: SIM108  # the branch is the kernel's
            x = tl.load(pairs)
        else:
            x = tl.load(pairs, mask=(j // 4) * 8 < n[:, None], other=0)
    else:
        j = tl.arange(0, 32)[None, :]
        x = tl.load(bits + at[:, None] + j, mask=j < n[:, None], other=0)
    return _comparable(x, PAIRED)


@triton.jit
def _reach_bits(even, odd, limit, bits):
    """Of two pairs each, the bits of those elements that reach the limit; element p of the four has byte p."""
    if _INTERPRETED:
        x = even - limit
        y = odd - limit
        out = ((x >> 15) & 1) * 0xFF | (((y >> 15) & 1) * 0xFF) << 8
        return (out | ((x >> 31) * 0xFF) << 16 | ((y >> 31) * 0xFF) << 24) & bits
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 x, y; sub.u32 x, $1, $3; sub.u32 y, $2, $3; prmt.b32 x, x, y, 0xFBD9; and.b32 $0, x, $4; }",
            "=r,r,r,r,r",
            [even, odd, limit, bits],
            dtype=tl.uint32,
            is_pure=True,
            pack=1,
        )


@triton.jit
def _below(x, limit, KIND: tl.constexpr, BITS: tl.constexpr, PAIRED: tl.constexpr):
    """Mask of each row's elements whose magnitude is below a limit."""
    if PAIRED:
        half = limit.to(tl.uint32)
        even, odd = tl.split(tl.reshape(x, [x.shape[0], 8, 2]))
        bits = (tl.zeros([1, 8], tl.uint32) + 0x01010101) << tl.arange(0, 8)[None, :].to(tl.uint32)
        # Byte by byte: even low, odd low, even high, odd high, which is the order of pairs.
        reached = _reach_bits(even, odd, half | (half << 16), bits)
        return tl.sum(reached, axis=1).to(tl.uint32) ^ 0xFFFFFFFF
    else:
        lane = tl.arange(0, 32)[None, :].to(tl.uint32)
        less = magnitude(x, KIND, BITS) < limit
        return tl.sum(less.to(tl.uint32) << lane, axis=1).to(tl.uint32)


@triton.jit
def _reach_counts(even, odd, one, two, three, four):
    """Of two pairs each, minus how many elements reach each of four limits; 1, 64, 2^16 and 2^22 count one."""
    if _INTERPRETED:
        ones = tl.full([1, 1], 0x01010101, tl.uint32)
        low = (_reach_bits(even, odd, one, ones) * ones) >> 24
        low += ((_reach_bits(even, odd, two, ones) * ones) >> 24) << 6
        low += ((_reach_bits(even, odd, three, ones) * ones) >> 24) << 16
        return -(low + (((_reach_bits(even, odd, four, ones) * ones) >> 24) << 22)).to(tl.int32, bitcast=True)
    else:
        # Bytes of ones are -1, and are added up four at a time.
        return tl.inline_asm_elementwise(
            """{ .reg .b32 x, y, a, b;
            sub.u32 x, $1, $3; sub.u32 y, $2, $3; prmt.b32 x, x, y, 0xFBD9; dp4a.s32.s32 a, x, 0x01010101, 0;
            sub.u32 x, $1, $4; sub.u32 y, $2, $4; prmt.b32 x, x, y, 0xFBD9; dp4a.s32.s32 a, x, 0x40404040, a;
            sub.u32 x, $1, $5; sub.u32 y, $2, $5; prmt.b32 x, x, y, 0xFBD9; dp4a.s32.s32 b, x, 0x01010101, 0;
            sub.u32 x, $1, $6; sub.u32 y, $2, $6; prmt.b32 x, x, y, 0xFBD9; dp4a.s32.s32 b, x, 0x40404040, b;
            mad.lo.s32 $0, b, 65536, a; }""",
            "=r,r,r,r,r,r,r",
            [even, odd, one, two, three, four],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )


@triton.jit
def _limit(limits, k: tl.constexpr, K: tl.constexpr, PAIRED: tl.constexpr):
    """Limit k, or the last; for pairs twice in a word."""
    limit = tl.load(limits + min(k, K - 1)).to(tl.uint64, bitcast=True)
    if PAIRED:
        half = limit.to(tl.uint32)
        return half | (half << 16)
    else:
        return limit


@triton.jit
def _count_below(
    x, limits, k: tl.constexpr, K: tl.constexpr, KIND: tl.constexpr, BITS: tl.constexpr, PAIRED: tl.constexpr
):
    """How many of each row's elements are below each of four limits, from limit k on, in 16 bits each."""
    one = _limit(limits, k, K, PAIRED)
    two = _limit(limits, k + 1, K, PAIRED)
    three = _limit(limits, k + 2, K, PAIRED)
    four = _limit(limits, k + 3, K, PAIRED)
    if PAIRED:
        even, odd = tl.split(tl.reshape(x, [x.shape[0], 8, 2]))
        sums = (-tl.sum(_reach_counts(even, odd, one, two, three, four), axis=1)).to(tl.uint32, bitcast=True)
        low = 0x200020 - ((sums & 0x3F) | ((sums & 0xFC0) << 10))
        high = 0x200020 - (((sums >> 16) & 0x3F) | ((sums >> 6) & 0x3F0000))
        return low.to(tl.int64) | (high.to(tl.int64) << 32)
    else:
        low = popcount(_below(x, one, KIND, BITS, PAIRED)) | (popcount(_below(x, two, KIND, BITS, PAIRED)) << 16)
        high = popcount(_below(x, three, KIND, BITS, PAIRED)) | (popcount(_below(x, four, KIND, BITS, PAIRED)) << 16)
        return low.to(tl.int64) | (high.to(tl.int64) << 32)


@triton.jit
def _mask_before(p, PAIRED: tl.constexpr):
    """A mask of the elements of a word that lie before element `p`."""
    q = p.to(tl.uint32)
    one = tl.zeros_like(q) + 1
    if PAIRED:
        # Whole groups of four, and then the elements of the group that lie before.
        group = q >> 2
        inside = tl.where((q & 3) == 0, 0, tl.where((q & 3) == 1, 1, tl.where((q & 3) == 2, 0x10001, 0x10101)))
        return ((one << group) - 1) * 0x01010101 + (inside.to(tl.uint32) << group)
    else:
        return (one << q) - 1


@triton.jit
def _packed_count(low, high, k, K: tl.constexpr):
    """Count k of those packed in 16 bits each, four to a number."""
    if K > 4:
        low = tl.where(k >= 4, high, low)
        k = k & 3
    return ((low >> (16 * k)) & 0xFFFF).to(tl.int32)


@triton.jit
def _load_ranks(ranks, word, K: tl.constexpr):
    """The packed counts of a word, in one number or two."""
    low = tl.load(ranks.low + word)
    high = low
    if K > 4:
        high = tl.load(ranks.high + word)
    return low, high


@triton.jit
def _class_and_rank(
    x, u, j, low, high, limits, K: tl.constexpr, KIND: tl.constexpr, BITS: tl.constexpr, PAIRED: tl.constexpr
):
    """The class of elements, and how many of their class lie before them in their block.

    x: the words in which they lie; u: their bits; j: where they lie in the block; low, high: the packed counts of the
    words. Of those that lie before an element, its class has the ones that reach the last limit that the element
    reaches, less the ones that reach the next limit too.
    """
    before = _mask_before(j & 31, PAIRED)
    size = magnitude(u, KIND, BITS)
    c = tl.zeros_like(j)
    reach = j
    over = tl.zeros_like(j)
    for k in tl.static_range(K):
        limit = tl.load(limits + k).to(tl.uint64, bitcast=True)
        below = _packed_count(low, high, k, K) + popcount(_below(x, limit, KIND, BITS, PAIRED) & before)
        less = size < limit
        over = tl.where(less & (c == k), j - below, over)
        reach = tl.where(less, reach, j - below)
        c = tl.where(less, c, k + 1)
    return c, reach - over


class _ClassOutput(NamedTuple):
    """What `_classify_kernel` writes of each change; `counts` has the changes by class and block."""

    places: torch.Tensor
    ranks: torch.Tensor
    classes: torch.Tensor
    steps: torch.Tensor
    counts: torch.Tensor
    sums: torch.Tensor


@triton.jit(do_not_specialize=["NB"])
def _classify_kernel(
    old,
    new,
    blocks,
    words,
    ends,
    limits,
    ranks,
    out,
    NB,
    B: tl.constexpr,
    K: tl.constexpr,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    SIGN: tl.constexpr,
    PAIRED: tl.constexpr,
    Q: tl.constexpr,
):
    block = tl.program_id(0)
    part, begin, n = block_span(block, blocks, B)
    marks = load_marks(words, block, B)
    count = popcount(marks)
    changes = tl.sum(count, axis=0)
    first = tl.load(ends + block) - changes
    list_marks(marks, count, first, 0, out.places, B)
    a = tl.load(old.at + part) + begin
    b = tl.load(new.at + part) + begin
    key, second_key = load_keys(blocks, part)
    origin = tl.load(blocks.start + part) + begin
    first_sum = tl.zeros([Q], tl.uint64)
    second_sum = tl.zeros([Q], tl.uint64)
    low_counts = tl.zeros([Q], tl.int64)
    high_counts = tl.zeros([Q], tl.int64)
    i = changes - changes
    while i < changes:
        change = first + i + tl.arange(0, Q)
        ok = i + tl.arange(0, Q) < changes
        j = tl.load(out.places + change, mask=ok, other=0).to(tl.int32) & 0xFFFF
        u = load_bits(old.base + a + j, ok)
        v = load_new_bits(new.base + b + j, ok, BITS)
        word = j // 32
        x = _read_rows(old.base, a + word * 32, n - word * 32, n >= B, PAIRED)
        low, high = _load_ranks(ranks, block.to(tl.int64) * (B // 32) + word, K)
        c, rank = _class_and_rank(x, u, j, low, high, limits + part * K, K, KIND, BITS, PAIRED)
        tl.store(out.ranks + change, rank.to(tl.int16), mask=ok)
        tl.store(out.classes + change, c.to(tl.uint8), mask=ok)
        store_word(out.steps + change, steps(u, v, SIGN, BITS), ok, BITS)
        single = ok.to(tl.int64) << (16 * (c & 3)).to(tl.int64)
        low_counts += tl.where(c < 4, single, 0)
        high_counts += tl.where(c < 4, 0, single)
        delta = digest_delta(weyl_number(key, origin + j), second_key, u, v, ok)
        first_sum += delta[0]
        second_sum += delta[1]
        i += Q
    low_count = tl.sum(low_counts, axis=0)
    high_count = tl.sum(high_counts, axis=0)
    for c in tl.static_range(K + 1):
        tl.store(out.counts + tl.full([], c, tl.int64) * NB + block, _packed_count(low_count, high_count, c, 8))
    if changes > 0:
        add_to_slot(out.sums, block, first_sum, second_sum)


def exclusive_sum(counts: torch.Tensor) -> torch.Tensor:
    """The sum of all that come before, modulo 2^32."""
    return torch.cumsum(counts, 0, dtype=torch.int32) - counts


@dataclass(frozen=True)
class ClassifiedChanges:
    """Changes in the order of positions: class, rank inside the block, step.

    ends: the changes up to the end of each block.
    before: how many changes lie before each block, in all classes before and in its own: classes × blocks.
    members: likewise, of elements, modulo 2^32.
    """

    ranks: torch.Tensor
    classes: torch.Tensor
    steps: torch.Tensor
    ends: torch.Tensor
    before: torch.Tensor
    members: torch.Tensor
    sums: torch.Tensor


def classify_changes(
    blocks: Blocks,
    classification: Classification,
    old: Side,
    new: Side,
    words: torch.Tensor,
    ends: torch.Tensor,
    ranks: ClassRanks,
    changes: int,
) -> ClassifiedChanges:
    """The changes of a bitmap with their classes, from the ranks of the old bits.

    ends: the changes up to the end of each block.
    """
    blocks.require_runs()
    out = _ClassOutput(
        blocks.empty(changes, torch.int16),
        blocks.empty(changes, torch.int16),
        blocks.empty(changes, torch.uint8),
        blocks.empty(changes, INTS[blocks.width]),
        blocks.empty((classification.K + 1) * blocks.count, torch.int32),
        new_sums(blocks.device),
    )
    at_a_time, warps = SHAPES["classify"]
    if blocks.count:
        _classify_kernel[(blocks.count,)](
            *(old.pointers, new.pointers, blocks.table, words, ends, classification.limits, ranks, out),
            *(blocks.count, blocks.block, classification.K, classification.kind, 8 * blocks.width),
            *(classification.sign_magnitude, classification.paired(blocks, old), at_a_time),
            num_warps=warps,
        )
    before = exclusive_sum(out.counts)
    return ClassifiedChanges(out.ranks, out.classes, out.steps, ends, before, ranks.before, out.sums)


class _UnsortedChanges(NamedTuple):
    """What `_sort_kernel` reads of changes: see `ClassifiedChanges`."""

    ranks: torch.Tensor
    classes: torch.Tensor
    steps: torch.Tensor
    ends: torch.Tensor
    before: torch.Tensor
    members: torch.Tensor


@triton.jit(do_not_specialize=["NB"])
def _sort_kernel(
    blocks,
    tile_log,
    counts,
    changes,
    sorted_ranks,
    sorted_steps,
    NB,
    B: tl.constexpr,
    C: tl.constexpr,
    Q: tl.constexpr,
):
    block = tl.program_id(0)
    count = tl.load(counts + block)
    if count > 0:
        part = tl.load(blocks.part + block)
        inside = block - tl.load(blocks.first + part).to(tl.int32)
        tile_blocks = (tl.full([], 1, tl.int64) << tl.load(tile_log + part)) // B
        head = block - (inside & (tile_blocks - 1).to(tl.int32))
        begin = tl.load(changes.ends + block) - count
        for c in tl.static_range(C):
            row = tl.full([], c, tl.int64) * NB
            at = tl.load(changes.before + row + block)
            tile_at = tl.load(changes.before + row + head)
            rank_before = tl.load(changes.members + row + block) - tl.load(changes.members + row + head)
            i = count - count
            while i < count:
                q = begin + i + tl.arange(0, Q)
                ok = i + tl.arange(0, Q) < count
                ok = ok & (tl.load(changes.classes + q, mask=ok, other=255) == c)
                hit = ok.to(tl.int32)
                k = at + tl.cumsum(hit, 0) - hit
                rank = rank_before + (tl.load(changes.ranks + q, mask=ok, other=0).to(tl.int32) & 0xFFFF)
                flagged = rank.to(tl.uint32) | ((k == tile_at).to(tl.uint32) << 31)
                tl.store(sorted_ranks + k, flagged.to(tl.int32, bitcast=True), mask=ok)
                tl.store(sorted_steps + k, tl.load(changes.steps + q, mask=ok, other=0), mask=ok)
                at += tl.sum(hit, axis=0)
                i += Q


def sort_by_class(
    blocks: Blocks, classification: Classification, counts: torch.Tensor, changes: ClassifiedChanges
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ranks and steps by class, and in a class by part and position.

    Ranks are among the members of the class in the tile; bit 31 is set in the first change of each tile.
    """
    ranks = blocks.empty(changes.steps.numel(), torch.int32)
    sorted_steps = torch.empty_like(changes.steps)
    unsorted = _UnsortedChanges(
        changes.ranks, changes.classes, changes.steps, changes.ends, changes.before, changes.members
    )
    at_a_time, warps = SHAPES["sort"]
    if blocks.count:
        _sort_kernel[(blocks.count,)](
            *(blocks.table, classification.tile_log, counts, unsorted, ranks, sorted_steps),
            *(blocks.count, blocks.block, classification.K + 1, at_a_time),
            num_warps=warps,
        )
    return ranks, sorted_steps


class TileTable(NamedTuple):
    """What kernels read about tiles: the part, the first block, and how many blocks."""

    part: torch.Tensor
    block: torch.Tensor
    blocks: torch.Tensor


@dataclass(frozen=True)
class Tiles:
    """The tiles of the parts, in order."""

    table: TileTable
    per_part: np.ndarray[Any, Any]  # how many tiles each part has
    part: np.ndarray[Any, Any]  # of each tile
    count: int
    most_blocks: int

    @classmethod
    def of(cls, blocks: Blocks, tile_log: Any) -> Tiles:
        logs = np.broadcast_to(np.asarray(tile_log, np.int64), blocks.sizes.shape)
        return blocks.cached(("tiles", logs.tobytes()), lambda: cls._of(blocks, logs))

    @classmethod
    def _of(cls, blocks: Blocks, logs: np.ndarray[Any, Any]) -> Tiles:
        per_tile = (1 << logs) // blocks.block
        part_blocks = -(-blocks.sizes // blocks.block)
        per_part = -(-part_blocks // per_tile)
        tile_part = np.repeat(np.arange(per_part.size), per_part)
        # The columns are made on the GPU: there are many tiles and few parts.
        rows = blocks.upload(np.stack((per_tile, part_blocks, per_part, np.cumsum(per_part) - per_part)))
        per, total, counts, first = rows
        part = torch.repeat_interleave(counts, output_size=int(tile_part.size))
        inside = (torch.arange(tile_part.size, device=blocks.device) - first[part]) * per[part]
        lengths = torch.minimum(per[part], total[part] - inside)
        table = TileTable(part, blocks.table.first[part] + inside, lengths)
        most = int(np.minimum(per_tile, part_blocks).max(initial=1))
        return cls(table, per_part, tile_part, int(tile_part.size), most)

    def counts(self, before: torch.Tensor, changes: int, C: int) -> torch.Tensor:
        """Changes by tile and class (tiles × C, int32), from those before each block and how many there are in all."""
        rows = before.view(C, -1)
        starts = torch.cat((rows[:, self.table.block].reshape(-1), torch.full_like(rows[0, :1], changes)))
        return (starts[1:] - starts[:-1]).view(C, -1).t().contiguous()


class ChangeLayout(NamedTuple):
    """How many changes each tile has of each class (tiles × C), and where these begin in the streams and by tile.

    by_class: among the numbers of all streams, which are ordered by class: C × tiles.
    by_tile: among all changes: tiles × C.
    """

    counts: torch.Tensor
    by_class: torch.Tensor
    by_tile: torch.Tensor


class _BucketTable(NamedTuple):
    """What `_change_layout_kernel` reads: where tiles and changes of buckets begin, and numbers and chunks of streams.

    before: the changes before each part. begins, chunks, counts: by class and bucket.
    """

    tiles: torch.Tensor
    changes: torch.Tensor
    before: torch.Tensor
    begins: torch.Tensor
    chunks: torch.Tensor
    counts: torch.Tensor


@triton.jit
def _write_chunk_sizes(sizes, numbers, chunks, first, ok, N, CHUNK: tl.constexpr):
    """The size of every chunk of some streams, once for gaps and once for steps."""
    i = tl.full([], 0, tl.int64)
    while i < tl.max(chunks, axis=0):
        size = tl.minimum(tl.maximum(numbers - i * CHUNK, 0), CHUNK)
        place = sizes + tl.load(first, mask=ok, other=0) + i
        tl.store(place, size, mask=i < chunks)
        tl.store(place + N, size, mask=i < chunks)
        i += 1


@triton.jit(do_not_specialize=["T", "N"])
def _change_layout_kernel(
    tiles,
    blocks,
    buckets,
    out,
    sizes,
    bad,
    T,
    N,
    CHUNK: tl.constexpr,
    C: tl.constexpr,
    CS: tl.constexpr,
    P: tl.constexpr,
):
    """A program has a bucket."""
    bucket = tl.program_id(0)
    t = tl.load(buckets.tiles + bucket)
    end = tl.load(buckets.tiles + bucket + 1)
    done = tl.load(buckets.changes + bucket)
    room = tl.load(buckets.changes + bucket + 1) - done
    c = tl.arange(0, CS)
    stream = c * tl.num_programs(0) + bucket
    at = tl.load(buckets.begins + stream, mask=c < C, other=0)
    total = tl.zeros([CS], tl.int64)
    wrong = tl.zeros([P], tl.int32)
    while t < end:
        tile = t + tl.arange(0, P)
        ok = tile < end
        cell = tile[:, None] * C + c[None, :]
        cell_ok = ok[:, None] & (c < C)[None, :]
        count = unsigned(tl.load(out.counts + cell, mask=cell_ok, other=0)).to(tl.int64)
        by_class = (at + total)[None, :] + tl.cumsum(count, 0) - count
        tl.store(out.by_class + c[None, :].to(tl.int64) * T + tile[:, None], by_class, mask=cell_ok)
        total += tl.sum(count, axis=0)
        row = tl.sum(count, axis=1)
        before = done + tl.cumsum(row, 0) - row
        tl.store(out.by_tile + cell, before[:, None] + tl.cumsum(count, 1) - count, mask=cell_ok)
        part = tl.load(tiles.part + tile, mask=ok, other=0)
        is_first = ok & (tl.load(tiles.block + tile, mask=ok, other=0) == tl.load(blocks.first + part))
        wrong |= (is_first & (before != tl.load(buckets.before + part))).to(tl.int32)
        done += tl.sum(row, axis=0)
        t += P
    chunks = tl.load(buckets.counts + stream, mask=c < C, other=0)
    odd = (c < C) & ((total + CHUNK - 1) // CHUNK != chunks)
    if (
        (tl.max(wrong, axis=0) > 0)
        | (tl.max(odd.to(tl.int32), axis=0) > 0)
        | (done != tl.load(buckets.changes + bucket + 1))
    ):
        tl.store(bad, 1)
    # Whatever the counts claim, a stream has no more numbers than its bucket has changes.
    _write_chunk_sizes(sizes, tl.minimum(total, room), chunks, buckets.chunks + stream, c < C, N, CHUNK)


def change_layout(
    blocks: Blocks,
    tiles: Tiles,
    counts: torch.Tensor,
    bucket: np.ndarray[Any, Any],
    changes: np.ndarray[Any, Any],
    begin: np.ndarray[Any, Any],
    chunks: np.ndarray[Any, Any],
    chunk: int,
    bad: torch.Tensor,
) -> tuple[ChangeLayout, torch.Tensor]:
    """Where changes lie, from their counts by tile and class; and the sizes of all chunks, for gaps and for steps.

    bucket, changes: of each part. begin, chunks: by class and bucket, where the numbers of a stream begin and how many
        chunks it has. `bad` is set unless changes and chunks agree with the counts.
    """
    edges = np.searchsorted(bucket, np.arange(int(bucket.max(initial=-1)) + 2))
    tile_ends = np.append(0, np.cumsum(tiles.per_part))
    change_ends = np.append(0, np.cumsum(changes))
    table = _BucketTable(
        *blocks.upload_columns(
            *(tile_ends[edges], change_ends[edges], change_ends[:-1], begin, np.cumsum(chunks) - chunks, chunks)
        )
    )
    cells = counts.numel()
    out = ChangeLayout(counts, blocks.empty(cells, torch.int64), blocks.empty(cells, torch.int64))
    total_chunks = int(chunks.sum())
    sizes = blocks.empty(2 * total_chunks, torch.int64)
    classes = chunks.size // max(edges.size - 1, 1)
    if edges.size > 1:
        _change_layout_kernel[(edges.size - 1,)](
            *(tiles.table, blocks.table, table, out, sizes, bad),
            *(tiles.count, total_chunks, chunk, classes, max(2, triton.next_power_of_2(classes)), 128),
            num_warps=4,
        )
    return out, sizes


class _CountOutput(NamedTuple):
    """What `_count_kernel` writes: see `ClassRanks`, and of the diff the bitmap and the changes of each block."""

    members: torch.Tensor
    low: torch.Tensor
    high: torch.Tensor
    words: torch.Tensor
    changes: torch.Tensor


@triton.jit
def _write_members(members, low, high, block, NB, B: tl.constexpr, K: tl.constexpr):
    """The members of each class in a block, from how many of its elements are below each limit."""
    last = 0
    for k in tl.static_range(K):
        below = _packed_count(low, high, k, K)
        tl.store(members + tl.full([], k, tl.int64) * NB + block, below - last)
        last = below
    tl.store(members + tl.full([], K, tl.int64) * NB + block, B - last)


@triton.jit(do_not_specialize=["NB"])
def _count_kernel(
    old,
    new,
    blocks,
    limits,
    out,
    NB,
    B: tl.constexpr,
    OLD_STEP: tl.constexpr,
    NEW_STEP: tl.constexpr,
    K: tl.constexpr,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    PAIRED: tl.constexpr,
    DIFF: tl.constexpr,
    NEW_PAIRED: tl.constexpr,
    W: tl.constexpr,
):
    block = tl.program_id(0)
    part, begin, n = block_span(block, blocks, B)
    a = tl.multiple_of(tl.load(old.at + part) + begin, OLD_STEP)
    b = tl.multiple_of(tl.load(new.at + part) + begin, NEW_STEP)
    limits += part * K
    low_total = tl.zeros([], tl.int64)
    high_total = tl.zeros([], tl.int64)
    changed = tl.zeros([W], tl.int32)
    for i in tl.static_range(0, B, W * 32):
        word = block.to(tl.int64) * (B // 32) + i // 32 + tl.arange(0, W)
        x = _read_words(old.base, a + i, n - i, W, PAIRED, not DIFF)
        if DIFF:
            if PAIRED and NEW_PAIRED:
                mask = pair_difference_mask(x, read_pairs(new.base, b + i, n - i, W, True, False), n - i, W)
            else:
                mask = difference_mask(old.base, new.base, a + i, b + i, n - i, W, False)
            tl.store(out.words + word, mask.to(tl.int32, bitcast=True))
            changed += popcount(mask)
        x = _comparable(x, PAIRED)
        low = _count_below(x, limits, 0, K, KIND, BITS, PAIRED)
        tl.store(out.low + word, low_total + tl.cumsum(low, 0) - low)
        low_total += tl.sum(low, axis=0)
        if K > 4:
            high = _count_below(x, limits, 4, K, KIND, BITS, PAIRED)
            tl.store(out.high + word, high_total + tl.cumsum(high, 0) - high)
            high_total += tl.sum(high, axis=0)
    _write_members(out.members, low_total, high_total, block, NB, B, K)
    if DIFF:
        tl.store(out.changes + block, tl.sum(changed, axis=0))


def class_ranks(blocks: Blocks, classification: Classification, side: Side) -> ClassRanks:
    """Ranks of the old bits, which are read once."""
    none = blocks.empty(0, torch.int32)
    return _class_ranks(blocks, classification, side, side, none, none, "count")


def diff_with_class_ranks(
    blocks: Blocks, classification: Classification, old: Side, new: Side
) -> tuple[torch.Tensor, torch.Tensor, ClassRanks]:
    """`diff` and `class_ranks` in one pass over both sides."""
    words = blocks.empty(blocks.words, torch.int32)
    counts = blocks.empty(blocks.count, torch.int32)
    return words, counts, _class_ranks(blocks, classification, old, new, words, counts, "diff and count")


def _class_ranks(
    blocks: Blocks,
    classification: Classification,
    old: Side,
    new: Side,
    words: torch.Tensor,
    counts: torch.Tensor,
    shape: str,
) -> ClassRanks:
    K = classification.K
    out = _CountOutput(
        blocks.empty((K + 1) * blocks.count, torch.int32),
        blocks.empty(blocks.words, torch.int64),
        blocks.empty(blocks.words if K > 4 else 0, torch.int64),
        words,
        counts,
    )
    at_a_time, warps = SHAPES[shape]
    if blocks.count:
        _count_kernel[(blocks.count,)](
            *(old.pointers, new.pointers, blocks.table, classification.limits, out, blocks.count, blocks.block),
            *(old.step, new.step, K, classification.kind, 8 * blocks.width),
            *(classification.paired(blocks, old), words.numel() > 0, classification.paired(blocks, new)),
            min(at_a_time, blocks.block // 32),
            num_warps=warps if blocks.width <= 2 else 2 * warps,
        )
    return ClassRanks(out.members, exclusive_sum(out.members), out.low, out.high)


@triton.jit
def _members_before(ranks, first_word, word, c, K: tl.constexpr):
    """Members of class c in a block before one of its words."""
    low, high = _load_ranks(ranks, first_word + word, K)
    upper = tl.where(c < K, _packed_count(low, high, tl.minimum(c, K - 1), K), word * 32)
    lower = tl.where(c > 0, _packed_count(low, high, tl.maximum(c - 1, 0), K), 0)
    return upper - lower


@triton.jit
def _class_mask(
    x, under, upper, c, K: tl.constexpr, KIND: tl.constexpr, BITS: tl.constexpr, PAIRED: tl.constexpr, Q: tl.constexpr
):
    """Of each row's elements, those between two limits, in the order of a bitmap."""
    mask = tl.zeros([Q], tl.uint32) + 0xFFFFFFFF
    if c < K:
        mask = _below(x, upper, KIND, BITS, PAIRED)
    if c > 0:
        mask = mask & (_below(x, under, KIND, BITS, PAIRED) ^ 0xFFFFFFFF)
    if PAIRED:
        mask = natural_order(mask)
    return mask


@triton.jit
def select(mask, rank):
    """The index of the set bit of a mask that has `rank` set bits below it."""
    index = tl.zeros_like(rank)
    for i in tl.static_range(5):
        half = 16 >> i
        passed = popcount(mask & ((1 << half) - 1))
        go = rank >= passed
        rank = tl.where(go, rank - passed, rank)
        mask = tl.where(go, mask >> half, mask)
        index = tl.where(go, index + half, index)
    return index


@triton.jit
def _find_block(before, blocks, rank, ok, leap, Q: tl.constexpr):
    """The block of a tile in which the members of a rank lie, and their rank in it.

    before: the members of the class before each of the tile's `blocks`, which are at most 2 * leap, or one.
    """
    zero = tl.load(before)
    block = tl.zeros([Q], tl.int64)
    passed = tl.zeros([Q], tl.int64)
    while leap > 0:
        reach = block + leap
        inside = ok & (reach < blocks)
        members = (tl.load(before + reach, mask=inside, other=0) - zero).to(tl.int64) & 0xFFFFFFFF
        inside = inside & (members <= rank)
        block = tl.where(inside, reach, block)
        passed = tl.where(inside, members, passed)
        leap = leap >> 1
    return block, rank - passed


@triton.jit
def _find_word(ranks, first_word, rank, c, K: tl.constexpr, WORDS: tl.constexpr, Q: tl.constexpr):
    """The word of a block in which the members of class c with a rank lie, and their rank in it."""
    word = tl.zeros([Q], tl.int32)
    passed = tl.zeros([Q], tl.int32)
    for s in tl.static_range(0, 16):
        if (WORDS >> (s + 1)) > 0:
            reach = word + (WORDS >> (s + 1))
            members = _members_before(ranks, first_word, reach, c, K)
            word = tl.where(members <= rank, reach, word)
            passed = tl.where(members <= rank, members, passed)
    return word, rank - passed


@triton.jit
def _member_positions(
    bits,
    a,
    n,
    tile,
    ranks,
    before,
    members,
    rank,
    ok,
    c,
    bounds,
    leap,
    B: tl.constexpr,
    K: tl.constexpr,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    PAIRED: tl.constexpr,
    Q: tl.constexpr,
):
    """The positions of members of class c, by their ranks in a tile; which are in the tile, and which are wrong.

    a, n: where the part lies, and how many elements it has; tile: its first block, how many blocks it has, where it
    begins in the part, and whether all its elements exist; before, members: of the class, before and in each block of
    the tile; bounds: of the class; leap: see `_find_block`.
    """
    WORDS: tl.constexpr = B // 32
    head, blocks, begin, whole = tile
    under, upper = bounds
    block, rank = _find_block(before, blocks, rank, ok, leap, Q)
    inside = rank < tl.load(members + block)
    wrong = ok & (inside == 0)
    ok = ok & inside
    word, rank_in_word = _find_word(ranks, (head + block) * WORDS, tl.where(ok, rank, 0).to(tl.int32), c, K, WORDS, Q)
    position = begin + block * B + word * 32
    x = _read_rows(bits, a + position, n - position, whole, PAIRED)
    position += select(_class_mask(x, under, upper, c, K, KIND, BITS, PAIRED, Q), rank_in_word)
    wrong = wrong | (ok & (position >= n))
    return position, ok & (position < n), wrong


class LocatedChanges(NamedTuple):
    """Changes and where they belong: distances from the side's base in elements, the bits there and the new ones."""

    addresses: torch.Tensor
    old: torch.Tensor
    new: torch.Tensor
    sums: torch.Tensor

    @classmethod
    def empty(cls, blocks: Blocks, changes: int, dtype: torch.dtype) -> LocatedChanges:
        return cls(
            blocks.empty(changes, torch.int64),
            blocks.empty(changes, dtype),
            blocks.empty(changes, dtype),
            new_sums(blocks.device),
        )


@triton.jit(do_not_specialize=["NB", "T", "leap"])
def _class_positions_kernel(
    weights,
    blocks,
    limits,
    ranks,
    tiles,
    layout,
    gaps,
    steps,
    out,
    bad,
    NB,
    T,
    leap,
    B: tl.constexpr,
    K: tl.constexpr,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    SIGN: tl.constexpr,
    PAIRED: tl.constexpr,
    ROWS: tl.constexpr,
    Q: tl.constexpr,
):
    """A program has the changes of one class in one tile."""
    C: tl.constexpr = K + 1
    program = tl.program_id(0)
    t = (program // C).to(tl.int64)
    c = program % C
    changes = tl.load(layout.counts + t * C + c)
    if (changes > 0) & (tl.load(bad) == 0):
        part = tl.load(tiles.part + t)
        head = tl.load(tiles.block + t)
        tile_blocks = tl.load(tiles.blocks + t)
        row = c.to(tl.int64) * NB + head
        a = tl.load(weights.at + part)
        n = tl.load(blocks.numel + part)
        tile_begin = (head - tl.load(blocks.first + part)) * B
        tile = (head, tile_blocks, tile_begin, tile_begin + tile_blocks * B <= n)
        key, second_key = load_keys(blocks, part)
        rows = load_rows(blocks, part, ROWS)
        under = tl.load(limits + part * K + c - 1, mask=c > 0, other=0).to(tl.uint64, bitcast=True)
        upper = tl.load(limits + part * K + c, mask=c < K, other=0).to(tl.uint64, bitcast=True)
        begin = tl.load(layout.by_class + c.to(tl.int64) * T + t)
        to = tl.load(layout.by_tile + t * C + c)
        last = tl.full([], -1, tl.int64)
        first_sum = tl.zeros([Q], tl.uint64)
        second_sum = tl.zeros([Q], tl.uint64)
        i = changes - changes
        while i < changes:
            q = begin + i + tl.arange(0, Q)
            ok = i + tl.arange(0, Q) < changes
            gap = load_uint32(gaps + q, ok) + 1
            rank = last + tl.cumsum(gap, 0)
            last += tl.sum(gap, axis=0)
            position, ok, wrong = _member_positions(
                *(weights.base, a, n, tile, ranks, ranks.before + row, ranks.members + row, rank, ok, c),
                *((under, upper), leap, B, K, KIND, BITS, PAIRED, Q),
            )
            old = load_bits(weights.base + a + position, ok)
            new = advance(old, load_bits(steps + q, ok), SIGN, BITS)
            k = to + i + tl.arange(0, Q)
            tl.store(out.addresses + k, a + position, mask=ok)
            store_word(out.old + k, old, ok, BITS)
            store_word(out.new + k, new, ok, BITS)
            weyl = weyl_number(key, tensor_position(rows, position, ROWS))
            delta = digest_delta(weyl, second_key, old, new, ok)
            first_sum += delta[0]
            second_sum += delta[1]
            if tl.max(wrong.to(tl.int32), axis=0) > 0:
                tl.store(bad, 1)
            i += Q
        add_to_slot(out.sums, program, first_sum, second_sum)


class ChangeNumbers(NamedTuple):
    """Decoded numbers of changes: where they lie, their gaps and steps, and how many changes there are."""

    layout: ChangeLayout
    gaps: torch.Tensor
    steps: torch.Tensor
    total: int


def class_positions(
    blocks: Blocks,
    classification: Classification,
    side: Side,
    tiles: Tiles,
    ranks: ClassRanks,
    numbers: ChangeNumbers,
    bad: torch.Tensor,
) -> LocatedChanges:
    """The changes of gaps and steps by class, tile by tile. Writes no weights.

    Where a gap leads out of its tile, `bad` is set; if it is set already, nothing is located.
    """
    out = LocatedChanges.empty(blocks, numbers.total, numbers.steps.dtype)
    at_a_time, warps = SHAPES["positions"]
    leap = 1 << (tiles.most_blocks - 1).bit_length() >> 1
    if tiles.count:
        _class_positions_kernel[(tiles.count * (classification.K + 1),)](
            *(side.pointers, blocks.table, classification.limits, ranks, tiles.table, numbers.layout),
            *(numbers.gaps, numbers.steps, out, bad, blocks.count, tiles.count, leap, blocks.block),
            *(classification.K, classification.kind, 8 * blocks.width),
            *(classification.sign_magnitude, classification.paired(blocks, side), blocks.has_rows, at_a_time),
            num_warps=warps,
        )
    return out


@triton.jit(do_not_specialize=["changes"])
def _write_kernel(weights, addresses, bits, bad, changes, Q: tl.constexpr):
    if tl.load(bad) == 0:
        k = tl.program_id(0).to(tl.int64) * Q + tl.arange(0, Q)
        ok = k < changes
        tl.store(weights + tl.load(addresses + k, mask=ok, other=0), tl.load(bits + k, mask=ok, other=0), mask=ok)


def write(side: Side, changes: LocatedChanges, bits: torch.Tensor, bad: torch.Tensor) -> None:
    """Write the new bits (or the old ones) of all changes, unless `bad` is set."""
    count = changes.addresses.numel()
    at_a_time, warps = SHAPES["write"]
    if count:
        _write_kernel[(triton.cdiv(count, at_a_time),)](
            side.base, changes.addresses, bits, bad, count, at_a_time, num_warps=warps
        )
