"""Magnitude classes on a GPU, in Triton: from a bitmap of changes to ranks inside classes, and back.

    count (how many of each class lie before each word), for encoding together with the diff
    encode: emit (class and rank inside the block) ──► scan ──► sort (rank inside the tile, by class)
    decode: scan ──► select (the element of a rank) ──► land

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
    _SLOTS,
    INTS,
    Blocks,
    Side,
    add_sums,
    advance,
    block_span,
    difference_mask,
    digest_delta,
    lowest,
    natural_order,
    new_sums,
    pair_difference_mask,
    popcount,
    read_pairs,
    store_word,
    unsigned,
    weyl_number,
)
from .changes import (
    steps as zigzag_steps,
)

_FLOAT, _SIGNED, _PLAIN = 0, 1, 2  # kinds of magnitude
MOST = 7  # thresholds
# What a program looks at together, and its warps.
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
    """How the parts of some blocks are told apart: limits (magnitudes) of each part, its tiles, its kind of magnitude.

    All parts have as many limits as the one with the most; what is filled up stands first, with zeros.
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
        return cls(
            blocks.upload(rows.view(np.int64)), blocks.upload(logs, torch.int32), rows.shape[1], kind, sign_magnitude
        )

    def paired(self, blocks: Blocks, side: Side) -> bool:
        """Whether elements can be compared two at a time."""
        return blocks.width == 2 and self.kind == _FLOAT and side.aligned


@triton.jit
def magnitude(x, KIND: tl.constexpr, BITS: tl.constexpr):
    """The size of a value, from its bits as uint64."""
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
    """The elements of W words, a word a row: one by one, or as pairs."""
    if PAIRED:
        return read_pairs(bits, a, n, W, True, PAST)
    else:
        j = tl.arange(0, W)[:, None] * 32 + tl.arange(0, 32)[None, :]
        return tl.load(bits + a + j, mask=j < n, other=0)


@triton.jit
def _sizes(x, PAIRED: tl.constexpr):
    """Elements as they are compared with limits: unsigned, or as pairs without signs and with the top bits set."""
    if PAIRED:
        return (x.to(tl.uint32, bitcast=True) & 0x7FFF7FFF) | 0x80008000
    else:
        return unsigned(x).to(tl.uint64)


@triton.jit
def _read_rows(bits, at, n, whole, PAIRED: tl.constexpr):
    """The words at some addresses, a row each, of which `n` elements are there, or all if `whole`."""
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
    return _sizes(x, PAIRED)


@triton.jit
def _reached4(even, odd, limit, bits):
    """Of two pairs each, the bits of those elements that reach the limit; element p of the four has byte p."""
    if _INTERPRETED:
        x, y = even - limit, odd - limit
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
        reached = _reached4(even, odd, half | (half << 16), bits)
        return tl.sum(reached, axis=1).to(tl.uint32) ^ 0xFFFFFFFF
    else:
        lane = tl.arange(0, 32)[None, :].to(tl.uint32)
        less = magnitude(x, KIND, BITS) < limit
        return tl.sum(less.to(tl.uint32) << lane, axis=1).to(tl.uint32)


@triton.jit
def _reached_sums(even, odd, one, two, three, four):
    """Of two pairs each, minus how many elements reach each of four limits; 1, 64, 2^16 and 2^22 count one."""
    if _INTERPRETED:
        ones = tl.full([1, 1], 0x01010101, tl.uint32)
        low = (_reached4(even, odd, one, ones) * ones) >> 24
        low += ((_reached4(even, odd, two, ones) * ones) >> 24) << 6
        low += ((_reached4(even, odd, three, ones) * ones) >> 24) << 16
        return -(low + (((_reached4(even, odd, four, ones) * ones) >> 24) << 22)).to(tl.int32, bitcast=True)
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
    one, two = _limit(limits, k, K, PAIRED), _limit(limits, k + 1, K, PAIRED)
    three, four = _limit(limits, k + 2, K, PAIRED), _limit(limits, k + 3, K, PAIRED)
    if PAIRED:
        even, odd = tl.split(tl.reshape(x, [x.shape[0], 8, 2]))
        sums = (-tl.sum(_reached_sums(even, odd, one, two, three, four), axis=1)).to(tl.uint32, bitcast=True)
        low = 0x200020 - ((sums & 0x3F) | ((sums & 0xFC0) << 10))
        high = 0x200020 - (((sums >> 16) & 0x3F) | ((sums >> 6) & 0x3F0000))
        return low.to(tl.int64) | (high.to(tl.int64) << 32)
    else:
        low = popcount(_below(x, one, KIND, BITS, PAIRED)) | (popcount(_below(x, two, KIND, BITS, PAIRED)) << 16)
        high = popcount(_below(x, three, KIND, BITS, PAIRED)) | (popcount(_below(x, four, KIND, BITS, PAIRED)) << 16)
        return low.to(tl.int64) | (high.to(tl.int64) << 32)


@triton.jit
def _ahead(p, PAIRED: tl.constexpr):
    """A mask of the elements of a word that stand before element `p`."""
    q = p.to(tl.uint32)
    one = tl.zeros_like(q) + 1
    if PAIRED:
        # Whole groups of four, and then those of the group that stand before.
        group = q >> 2
        inside = tl.where((q & 3) == 0, 0, tl.where((q & 3) == 1, 1, tl.where((q & 3) == 2, 0x10001, 0x10101)))
        return ((one << group) - 1) * 0x01010101 + (inside.to(tl.uint32) << group)
    else:
        return (one << q) - 1


@triton.jit
def _field(packed, high, k, K: tl.constexpr):
    """Number k of those packed, 16 bits each, four to a word."""
    if K > 4:
        packed = tl.where(k >= 4, high, packed)
        k = k & 3
    return ((packed >> (16 * k)) & 0xFFFF).to(tl.int32)


@triton.jit
def _natural_bits(x, PAIRED: tl.constexpr):
    """A mask in the order of a bitmap."""
    if PAIRED:
        x = natural_order(x)
    return x


@triton.jit
def _classify_kernel(
    old,
    new,
    old_at,
    new_at,
    entry,
    first,
    numel,
    keys,
    start,
    words,
    ends,
    limits,
    places,
    ranks,
    kinds,
    steps,
    changed,
    low_ranks,
    high_ranks,
    sums,
    NB,
    B: tl.constexpr,
    K: tl.constexpr,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    SIGN: tl.constexpr,
    PAIRED: tl.constexpr,
    SLOTS: tl.constexpr,
    Q: tl.constexpr,
):
    block = tl.program_id(0)
    e, begin, n = block_span(block, entry, first, numel, B)
    row = tl.arange(0, B // 32)
    a, b = tl.load(old_at + e) + begin, tl.load(new_at + e) + begin
    limits += e * K
    left = tl.load(words + block.to(tl.int64) * (B // 32) + row).to(tl.uint32, bitcast=True)
    count = popcount(left)
    here = tl.sum(count, axis=0)
    at = tl.load(ends + block) - here
    k = at + tl.cumsum(count, 0) - count
    # Few words have a change, so lanes write down where changes are, and then take a change each.
    most = tl.max(count, axis=0)
    while most > 0:
        tl.store(places + k, (row * 32 + lowest(left)).to(tl.int16), mask=left != 0)
        left &= left - 1
        k += 1
        most -= 1
    tl.debug_barrier()
    key, key2 = tl.load(keys + 2 * e), tl.load(keys + 2 * e + 1).to(tl.uint64, bitcast=True)
    origin = tl.load(start + e) + begin
    one = tl.zeros([Q], tl.uint64)
    two = tl.zeros([Q], tl.uint64)
    low_kinds = tl.zeros([Q], tl.int64)
    high_kinds = tl.zeros([Q], tl.int64)
    i = here - here
    while i < here:
        change = at + i + tl.arange(0, Q)
        ok = i + tl.arange(0, Q) < here
        j = tl.load(places + change, mask=ok, other=0).to(tl.int32) & 0xFFFF
        u = unsigned(tl.load(old + a + j, mask=ok, other=0)).to(tl.uint64)
        v = unsigned(tl.load(new + b + j, mask=ok, other=0)).to(tl.uint64)
        word = j // 32
        x = _read_rows(old, a + word * 32, n - word * 32, n >= B, PAIRED)
        low = tl.load(low_ranks + block.to(tl.int64) * (B // 32) + word)
        high = low
        if K > 4:
            high = tl.load(high_ranks + block.to(tl.int64) * (B // 32) + word)
        ahead, size = _ahead(j & 31, PAIRED), magnitude(u, KIND, BITS)
        # Between the elements that reach the last limit this one reaches, and those that reach the next.
        c = tl.zeros_like(j)
        reach, over = j, tl.zeros_like(j)
        for t in tl.static_range(K):
            limit = tl.load(limits + t).to(tl.uint64, bitcast=True)
            below = _field(low, high, t, K) + popcount(_below(x, limit, KIND, BITS, PAIRED) & ahead)
            less = size < limit
            over = tl.where(less & (c == t), j - below, over)
            reach = tl.where(less, reach, j - below)
            c = tl.where(less, c, t + 1)
        tl.store(ranks + change, (reach - over).to(tl.int16), mask=ok)
        tl.store(kinds + change, c.to(tl.uint8), mask=ok)
        single = ok.to(tl.int64) << (16 * (c & 3)).to(tl.int64)
        low_kinds += tl.where(c < 4, single, 0)
        high_kinds += tl.where(c < 4, 0, single)
        store_word(steps + change, zigzag_steps(u, v, SIGN, BITS), ok, BITS)
        first_moved, second_moved = digest_delta(weyl_number(key, origin + j), key2, u, v, ok)
        one += first_moved
        two += second_moved
        i += Q
    low_all, high_all = tl.sum(low_kinds, axis=0), tl.sum(high_kinds, axis=0)
    for c in tl.static_range(K + 1):
        tl.store(changed + tl.full([], c, tl.int64) * NB + block, _field(low_all, high_all, c, 8))
    if here > 0:
        add_sums(sums, block % SLOTS, one, two)


@triton.jit
def _sort_kernel(
    entry,
    first,
    tile_log,
    counts,
    ends,
    members,
    changed,
    ranks,
    kinds,
    steps,
    tile_ranks,
    sorted_steps,
    NB,
    B: tl.constexpr,
    C: tl.constexpr,
    Q: tl.constexpr,
):
    block = tl.program_id(0)
    here = tl.load(counts + block)
    if here > 0:
        e = tl.load(entry + block)
        inside = block - tl.load(first + e).to(tl.int32)
        head = block - (inside & (((tl.full([], 1, tl.int64) << tl.load(tile_log + e)) // B) - 1).to(tl.int32))
        begin = tl.load(ends + block) - here
        for c in tl.static_range(C):
            at = tl.load(changed + tl.full([], c, tl.int64) * NB + block)
            tile_at = tl.load(changed + tl.full([], c, tl.int64) * NB + head)
            before = tl.load(members + tl.full([], c, tl.int64) * NB + block)
            before -= tl.load(members + tl.full([], c, tl.int64) * NB + head)
            i = here - here
            while i < here:
                q = begin + i + tl.arange(0, Q)
                ok = i + tl.arange(0, Q) < here
                mine = ok & (tl.load(kinds + q, mask=ok, other=255) == c)
                hit = mine.to(tl.int32)
                k = at + tl.cumsum(hit, 0) - hit
                rank = before + (tl.load(ranks + q, mask=mine, other=0).to(tl.int32) & 0xFFFF)
                flagged = rank.to(tl.uint32) | ((k == tile_at).to(tl.uint32) << 31)
                tl.store(tile_ranks + k, flagged.to(tl.int32, bitcast=True), mask=mine)
                tl.store(sorted_steps + k, tl.load(steps + q, mask=mine, other=0), mask=mine)
                at += tl.sum(hit, axis=0)
                i += Q


def exclusive_sum(counts: torch.Tensor) -> torch.Tensor:
    """Sums of all that stand before, modulo 2^32."""
    return torch.cumsum(counts, 0, dtype=torch.int32) - counts


@dataclass(frozen=True)
class ClassifiedChanges:
    """Changes in the order of positions: class, rank inside the block, step.

    before: how many changes lie before each block, in all classes before and in its own: C × blocks.
    members: likewise, of elements, modulo 2^32.
    """

    ranks: torch.Tensor
    kinds: torch.Tensor
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
    found: ClassRanks,
    changes: int,
) -> ClassifiedChanges:
    """The changes of a bitmap with their classes, from the ranks of the old bits and the words with changes.

    ends: the changes up to the end of each block.
    """
    places, ranks = blocks.empty(changes, torch.int16), blocks.empty(changes, torch.int16)
    kinds, steps = blocks.empty(changes, torch.uint8), blocks.empty(changes, INTS[blocks.width])
    sums, changed = new_sums(blocks.device), blocks.empty((classification.K + 1) * blocks.count, torch.int32)
    together, warps = SHAPES["classify"]
    if blocks.count:
        _classify_kernel[(blocks.count,)](
            *(old.base, new.base, old.at, new.at, blocks.entry, blocks.first, blocks.numel, blocks.keys, blocks.start),
            *(words, ends, classification.limits, places, ranks, kinds, steps, changed, found.low, found.high, sums),
            *(
                blocks.count,
                blocks.block,
                classification.K,
                classification.kind,
                8 * blocks.width,
                classification.sign_magnitude,
            ),
            *(classification.paired(blocks, old), _SLOTS, together),
            num_warps=warps,
        )
    return ClassifiedChanges(ranks, kinds, steps, ends, exclusive_sum(changed), found.before, sums)


def sort_by_class(
    blocks: Blocks, classification: Classification, counts: torch.Tensor, emitted: ClassifiedChanges
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ranks and steps by class, and in a class by part and position.

    Ranks are among the members of the class in the tile; bit 31 is set in the first change of each tile.
    """
    ranks, steps = blocks.empty(emitted.steps.numel(), torch.int32), torch.empty_like(emitted.steps)
    together, warps = SHAPES["sort"]
    if blocks.count:
        _sort_kernel[(blocks.count,)](
            *(
                blocks.entry,
                blocks.first,
                classification.tile_log,
                counts,
                emitted.ends,
                emitted.members,
                emitted.before,
            ),
            *(emitted.ranks, emitted.kinds, emitted.steps, ranks, steps, blocks.count, blocks.block),
            *(classification.K + 1, together),
            num_warps=warps,
        )
    return ranks, steps


@dataclass(frozen=True)
class Tiles:
    """The tiles of the parts, in order: part, first block, and number of blocks of each."""

    part: torch.Tensor
    block: torch.Tensor
    blocks: torch.Tensor
    of_part: np.ndarray[Any, Any]  # how many each part has
    owner: np.ndarray[Any, Any]
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
        tiles = -(-part_blocks // per_tile)
        owner = np.repeat(np.arange(tiles.size), tiles)
        # The columns are made on the device: there are many tiles and few parts.
        per, total, many, first = blocks.upload(np.stack((per_tile, part_blocks, tiles, np.cumsum(tiles) - tiles)))
        part = torch.repeat_interleave(many, output_size=int(owner.size))
        inside = (torch.arange(owner.size, device=blocks.device) - first[part]) * per[part]
        lengths = torch.minimum(per[part], total[part] - inside)
        most = int(np.minimum(per_tile, part_blocks).max(initial=1))
        return cls(part, blocks.first[part] + inside, lengths, tiles, owner, int(owner.size), most)

    def by_part(self, counts: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Numbers of the tiles (tiles × C), added up for each part."""
        some, out = self.of_part > 0, np.zeros((self.of_part.size, counts.shape[1]), np.int64)
        if some.any():
            first = (np.cumsum(self.of_part) - self.of_part)[some]
            out[some] = np.add.reduceat(counts, first, axis=0, dtype=np.int64)
        return out

    def counts(self, before: torch.Tensor, changes: int, C: int) -> torch.Tensor:
        """Changes by tile and class (tiles × C, int32), from those before each block and how many there are in all."""
        rows = before.view(C, -1)
        starts = torch.cat((rows[:, self.block].reshape(-1), torch.full_like(rows[0, :1], changes)))
        return (starts[1:] - starts[:-1]).view(C, -1).t().contiguous()


class ChangeLayout(NamedTuple):
    """How changes lie: how many each tile has of each class (tiles × C), where these begin in the streams and by tile.

    by_class: among the numbers of all streams, which lie by class: C × tiles.
    by_tile: among all changes: tiles × C.
    """

    counts: torch.Tensor
    by_class: torch.Tensor
    by_tile: torch.Tensor
    total: int


@triton.jit(do_not_specialize=["N"])
def _change_layout_kernel(
    counts,
    part,
    block,
    first,
    tiles,
    changes,
    before,
    begins,
    chunks,
    many,
    by_class,
    by_tile,
    sizes,
    bad,
    T,
    N,
    CHUNK: tl.constexpr,
    C: tl.constexpr,
    CS: tl.constexpr,
    P: tl.constexpr,
):
    """A program knows a bucket: where its tiles, its changes, and the numbers and chunks of its streams begin."""
    bucket, buckets = tl.program_id(0), tl.num_programs(0)
    t, end = tl.load(tiles + bucket), tl.load(tiles + bucket + 1)
    done = tl.load(changes + bucket)
    c = tl.arange(0, CS)
    stream = c * buckets + bucket
    at = tl.load(begins + stream, mask=c < C, other=0)
    run = tl.zeros([CS], tl.int64)
    wrong = tl.zeros([P], tl.int32)
    while t < end:
        tile = t + tl.arange(0, P)
        ok = tile < end
        both = ok[:, None] & (c < C)[None, :]
        x = unsigned(tl.load(counts + tile[:, None] * C + c[None, :], mask=both, other=0)).to(tl.int64)
        tl.store(
            by_class + c[None, :].to(tl.int64) * T + tile[:, None], (at + run)[None, :] + tl.cumsum(x, 0) - x, mask=both
        )
        run += tl.sum(x, axis=0)
        row = tl.sum(x, axis=1)
        ahead = done + tl.cumsum(row, 0) - row
        tl.store(by_tile + tile[:, None] * C + c[None, :], ahead[:, None] + tl.cumsum(x, 1) - x, mask=both)
        e = tl.load(part + tile, mask=ok, other=0)
        head = ok & (tl.load(block + tile, mask=ok, other=0) == tl.load(first + e))
        wrong |= (head & (ahead != tl.load(before + e))).to(tl.int32)
        done += tl.sum(row, axis=0)
        t += P
    due = tl.load(many + stream, mask=c < C, other=0)
    odd = (c < C) & ((run + CHUNK - 1) // CHUNK != due)
    if (tl.max(wrong, axis=0) > 0) | (tl.max(odd.to(tl.int32), axis=0) > 0) | (done != tl.load(changes + bucket + 1)):
        tl.store(bad, 1)
    run = tl.minimum(run, tl.load(changes + bucket + 1) - tl.load(changes + bucket))  # what there is room for
    i = t - t
    while i < tl.max(due, axis=0):
        size = tl.minimum(tl.maximum(run - i * CHUNK, 0), CHUNK)
        there = sizes + tl.load(chunks + stream, mask=c < C, other=0) + i
        tl.store(there, size, mask=i < due)
        tl.store(there + N, size, mask=i < due)
        i += 1


def change_layout(
    blocks: Blocks,
    tiles: Tiles,
    counts: torch.Tensor,
    bucket: np.ndarray[Any, Any],
    changes: np.ndarray[Any, Any],
    begin: np.ndarray[Any, Any],
    many: np.ndarray[Any, Any],
    chunk: int,
    bad: torch.Tensor,
) -> tuple[ChangeLayout, torch.Tensor]:
    """How changes lie, from those by tile and class; and the sizes of all chunks, once for gaps and once for steps.

    bucket, changes: of each part. begin, many: by class and bucket, where the numbers of a stream begin and how many
        chunks it has. `bad` is set unless there are as many changes and as many chunks.
    """
    edges = np.searchsorted(bucket, np.arange(int(bucket.max(initial=-1)) + 2))
    ends = [np.append(0, np.cumsum(column)) for column in (tiles.of_part, changes)]
    table = blocks.upload_columns(
        *(column[edges] for column in ends), ends[1][:-1], begin, np.cumsum(many) - many, many
    )
    per, total, n = counts.numel(), int(ends[1][-1]), int(many.sum())
    out = ChangeLayout(counts, blocks.empty(per, torch.int64), blocks.empty(per, torch.int64), total)
    sizes, classes = blocks.empty(2 * n, torch.int64), many.size // max(edges.size - 1, 1)
    if edges.size > 1:
        _change_layout_kernel[(edges.size - 1,)](
            *(counts, tiles.part, tiles.block, blocks.first, *table, out.by_class, out.by_tile, sizes, bad),
            *(tiles.count, n, chunk, classes, max(2, triton.next_power_of_2(classes)), 128),
            num_warps=4,
        )
    return out, sizes


@triton.jit
def _count_kernel(
    bits,
    new,
    at,
    new_at,
    entry,
    first,
    numel,
    limits,
    members,
    low_ranks,
    high_ranks,
    words,
    changes,
    NB,
    B: tl.constexpr,
    SA: tl.constexpr,
    SB: tl.constexpr,
    K: tl.constexpr,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    PAIRED: tl.constexpr,
    DIFF: tl.constexpr,
    NEW_PAIRED: tl.constexpr,
    W: tl.constexpr,
):
    block = tl.program_id(0)
    e, begin, n = block_span(block, entry, first, numel, B)
    a = tl.multiple_of(tl.load(at + e) + begin, SA)
    b = tl.multiple_of(tl.load(new_at + e) + begin, SB)
    whole = tl.zeros([], tl.int64)
    whole_high = tl.zeros([], tl.int64)
    changed = tl.zeros([W], tl.int32)
    for i in tl.static_range(0, B, W * 32):
        there = block.to(tl.int64) * (B // 32) + i // 32 + tl.arange(0, W)
        x = _read_words(bits, a + i, n - i, W, PAIRED, not DIFF)
        if DIFF:
            if PAIRED and NEW_PAIRED:
                mask = pair_difference_mask(x, read_pairs(new, b + i, n - i, W, True, False), n - i, W)
            else:
                mask = difference_mask(bits, new, a + i, b + i, n - i, W, False)
            tl.store(words + there, mask.to(tl.int32, bitcast=True))
            changed += popcount(mask)
        x = _sizes(x, PAIRED)
        low = _count_below(x, limits + e * K, 0, K, KIND, BITS, PAIRED)
        tl.store(low_ranks + there, whole + tl.cumsum(low, 0) - low)
        whole += tl.sum(low, axis=0)
        if K > 4:
            high = _count_below(x, limits + e * K, 4, K, KIND, BITS, PAIRED)
            tl.store(high_ranks + there, whole_high + tl.cumsum(high, 0) - high)
            whole_high += tl.sum(high, axis=0)
    last = 0
    for k in tl.static_range(K):
        below = _field(whole, whole_high, k, K)
        tl.store(members + tl.full([], k, tl.int64) * NB + block, below - last)
        last = below
    tl.store(members + tl.full([], K, tl.int64) * NB + block, B - last)
    if DIFF:
        tl.store(changes + block, tl.sum(changed, axis=0))


@triton.jit
def _members_before(low_ranks, high_ranks, there, w, c, K: tl.constexpr, B: tl.constexpr):
    """Members of class c in a block before its word w."""
    low = tl.load(low_ranks + there + w)
    high = low
    if K > 4:
        high = tl.load(high_ranks + there + w)
    upper = tl.where(c < K, _field(low, high, tl.minimum(c, K - 1), K), w * 32)
    lower = tl.where(c > 0, _field(low, high, tl.maximum(c - 1, 0), K), 0)
    return upper - lower


@triton.jit
def _class_positions_kernel(
    bits,
    at,
    first,
    numel,
    keys,
    start,
    limits,
    before,
    members,
    low_ranks,
    high_ranks,
    tile_part,
    tile_block,
    tile_blocks,
    counts,
    starts,
    places,
    gaps,
    steps,
    where,
    old,
    out,
    sums,
    bad,
    NB,
    T,
    B: tl.constexpr,
    K: tl.constexpr,
    LOG: tl.constexpr,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    SIGN: tl.constexpr,
    PAIRED: tl.constexpr,
    Q: tl.constexpr,
    SLOTS: tl.constexpr,
):
    C: tl.constexpr = K + 1
    WORDS: tl.constexpr = B // 32
    program = tl.program_id(0)
    t, c = (program // C).to(tl.int64), program % C
    due = tl.load(counts + t * C + c)
    if (due > 0) & (tl.load(bad) == 0):
        e = tl.load(tile_part + t)
        head, length = tl.load(tile_block + t), tl.load(tile_blocks + t)
        into = c.to(tl.int64) * NB + head
        zero = tl.load(before + into)
        a, n = tl.load(at + e), tl.load(numel + e)
        tile = (head - tl.load(first + e)) * B
        key, key2 = tl.load(keys + 2 * e), tl.load(keys + 2 * e + 1).to(tl.uint64, bitcast=True)
        origin = tl.load(start + e)
        under = tl.load(limits + e * K + c - 1, mask=c > 0, other=0).to(tl.uint64, bitcast=True)
        upper = tl.load(limits + e * K + c, mask=c < K, other=0).to(tl.uint64, bitcast=True)
        begin = tl.load(starts + c.to(tl.int64) * T + t)
        to = tl.load(places + t * C + c)
        whole = tile + length * B <= n
        last = tl.full([], -1, tl.int64)
        one = tl.zeros([Q], tl.uint64)
        two = tl.zeros([Q], tl.uint64)
        i = due - due
        while i < due:
            q = begin + i + tl.arange(0, Q)
            ok = i + tl.arange(0, Q) < due
            gap = tl.load(gaps + q, mask=ok, other=0).to(tl.uint32, bitcast=True).to(tl.int64) + 1
            rank = last + tl.cumsum(gap, 0)
            last += tl.sum(gap, axis=0)
            b = tl.zeros([Q], tl.int64)
            passed = tl.zeros([Q], tl.int64)
            for s in tl.static_range(LOG):
                reach = b + (1 << (LOG - 1 - s))
                there = ok & (reach < length)
                more = (tl.load(before + into + reach, mask=there, other=0) - zero).to(tl.int64) & 0xFFFFFFFF
                there = there & (more <= rank)
                b = tl.where(there, reach, b)
                passed = tl.where(there, more, passed)
            rank -= passed
            inside = rank < tl.load(members + into + b)
            wrong = ok & (inside == 0)
            ok = ok & inside
            r = tl.where(ok, rank, 0).to(tl.int32)
            row = (head + b) * WORDS
            w = tl.zeros([Q], tl.int32)
            passed_words = tl.zeros([Q], tl.int32)
            for s in tl.static_range(0, 16):
                if (WORDS >> (s + 1)) > 0:
                    reach_word = w + (WORDS >> (s + 1))
                    more_words = _members_before(low_ranks, high_ranks, row, reach_word, c, K, B)
                    w = tl.where(more_words <= r, reach_word, w)
                    passed_words = tl.where(more_words <= r, more_words, passed_words)
            r -= passed_words
            place = tile + b * B + w * 32
            x = _read_rows(bits, a + place, n - place, whole, PAIRED)
            mask = _class_mask(x, under, upper, c, K, KIND, BITS, PAIRED, Q)
            p = select(_natural_bits(mask, PAIRED), r)
            place += p
            wrong = wrong | (ok & (place >= n))
            ok = ok & (place < n)
            u = unsigned(tl.load(bits + a + place, mask=ok, other=0)).to(tl.uint64)
            y = advance(u, unsigned(tl.load(steps + q, mask=ok, other=0)).to(tl.uint64), SIGN, BITS)
            k = to + i + tl.arange(0, Q)
            tl.store(where + k, a + place, mask=ok)
            store_word(old + k, u, ok, BITS)
            store_word(out + k, y, ok, BITS)
            first_moved, second_moved = digest_delta(weyl_number(key, origin + place), key2, u, y, ok)
            one += first_moved
            two += second_moved
            if tl.max(wrong.to(tl.int32), axis=0) > 0:
                tl.store(bad, 1)
            i += Q
        add_sums(sums, program % SLOTS, one, two)


@triton.jit
def _class_mask(
    x, under, upper, c, K: tl.constexpr, KIND: tl.constexpr, BITS: tl.constexpr, PAIRED: tl.constexpr, Q: tl.constexpr
):
    """Of each row's elements, those between two limits."""
    mask = tl.zeros([Q], tl.uint32) + 0xFFFFFFFF
    if c < K:
        mask = _below(x, upper, KIND, BITS, PAIRED)
    if c > 0:
        mask = mask & (_below(x, under, KIND, BITS, PAIRED) ^ 0xFFFFFFFF)
    return mask


@triton.jit
def select(x, r):
    """The place of bit number r, from 0, of those that are set."""
    place = tl.zeros_like(r)
    for i in tl.static_range(5):
        half = 16 >> i
        passed = popcount(x & ((1 << half) - 1))
        go = r >= passed
        r = tl.where(go, r - passed, r)
        x = tl.where(go, x >> half, x)
        place = tl.where(go, place + half, place)
    return place


@dataclass(frozen=True)
class ClassRanks:
    """How many elements of each class lie before each block, and before each word inside its block."""

    members: torch.Tensor
    before: torch.Tensor
    low: torch.Tensor
    high: torch.Tensor


def class_ranks(blocks: Blocks, classification: Classification, side: Side) -> ClassRanks:
    """Ranks of the old bits: one read of them."""
    none = blocks.empty(0, torch.int32)
    return _count(blocks, classification, side, side, none, none, "count")


def diff_with_class_ranks(
    blocks: Blocks, classification: Classification, old: Side, new: Side
) -> tuple[torch.Tensor, torch.Tensor, ClassRanks]:
    """`diff` and `count` in one pass over both sides."""
    words, counts = blocks.empty(blocks.words, torch.int32), blocks.empty(blocks.count, torch.int32)
    return words, counts, _count(blocks, classification, old, new, words, counts, "diff and count")


def _count(
    blocks: Blocks,
    classification: Classification,
    old: Side,
    new: Side,
    words: torch.Tensor,
    counts: torch.Tensor,
    shape: str,
) -> ClassRanks:
    members = blocks.empty((classification.K + 1) * blocks.count, torch.int32)
    low = blocks.empty(blocks.words, torch.int64)
    high = blocks.empty(blocks.words if classification.K > 4 else 0, torch.int64)
    together, warps = SHAPES[shape]
    if blocks.count:
        _count_kernel[(blocks.count,)](
            *(
                old.base,
                new.base,
                old.at,
                new.at,
                blocks.entry,
                blocks.first,
                blocks.numel,
                classification.limits,
                members,
            ),
            *(low, high, words, counts, blocks.count, blocks.block, old.step(blocks.width), new.step(blocks.width)),
            *(classification.K, classification.kind, 8 * blocks.width, classification.paired(blocks, old)),
            *(words.numel() > 0, classification.paired(blocks, new), min(together, blocks.block // 32)),
            num_warps=warps if blocks.width <= 2 else 2 * warps,
        )
    return ClassRanks(members, exclusive_sum(members), low, high)


@dataclass(frozen=True)
class LocatedChanges:
    """Changes located: where each lies from the side's base, in elements, the bits that are there and the new ones."""

    where: torch.Tensor
    old: torch.Tensor
    new: torch.Tensor
    sums: torch.Tensor


def class_positions(
    blocks: Blocks,
    classification: Classification,
    side: Side,
    tiles: Tiles,
    ranks: ClassRanks,
    spread: ChangeLayout,
    gaps: torch.Tensor,
    steps: torch.Tensor,
    bad: torch.Tensor,
) -> LocatedChanges:
    """The changes of gaps and steps by class, tile by tile. Writes no weights.

    Where a gap leads out of its tile, `bad` is set; where it is set before, nothing is located.
    """
    out = LocatedChanges(
        blocks.empty(spread.total, torch.int64),
        blocks.empty(spread.total, steps.dtype),
        blocks.empty(spread.total, steps.dtype),
        new_sums(blocks.device),
    )
    together, warps = SHAPES["positions"]
    if tiles.count:
        _class_positions_kernel[(tiles.count * (classification.K + 1),)](
            *(side.base, side.at, blocks.first, blocks.numel, blocks.keys, blocks.start, classification.limits),
            *(ranks.before, ranks.members, ranks.low, ranks.high, tiles.part, tiles.block, tiles.blocks),
            *(*spread[:3], gaps, steps, out.where, out.old, out.new, out.sums, bad),
            *(blocks.count, tiles.count, blocks.block, classification.K, (tiles.most_blocks - 1).bit_length()),
            *(
                classification.kind,
                8 * blocks.width,
                classification.sign_magnitude,
                classification.paired(blocks, side),
            ),
            *(together, _SLOTS),
            num_warps=warps,
        )
    return out


@triton.jit(do_not_specialize=["changes"])
def _write_kernel(weights, where, bits, bad, changes, Q: tl.constexpr):
    if tl.load(bad) == 0:
        k = tl.program_id(0).to(tl.int64) * Q + tl.arange(0, Q)
        ok = k < changes
        tl.store(weights + tl.load(where + k, mask=ok, other=0), tl.load(bits + k, mask=ok, other=0), mask=ok)


def write(side: Side, found: LocatedChanges, bits: torch.Tensor, bad: torch.Tensor) -> None:
    """Write the new bits (or the old ones) of all changes, unless `bad` is set."""
    changes = found.where.numel()
    together, warps = SHAPES["write"]
    if changes:
        _write_kernel[(triton.cdiv(changes, together),)](
            side.base, found.where, bits, bad, changes, together, num_warps=warps
        )
