"""The kernels on a GPU, in Triton: finding changes, writing them down, marks and the digest.

Each is specified by `reference.py`. Weights are contiguous tensors of one width, as integers; all are one launch:

    tensors ──► Blocks: 8192 elements to a program ──► diff: bitmap, changes per block ──► compact: the changes
                                                                                       └─► gpu_classes: ranks by class

A bitmap has one bit per element, the first lowest; every tensor begins at a word of its own. Nothing here waits for the
device. With TRITON_INTERPRET=1, set before the import, everything runs on CPU tensors, slowly.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeVar

import numpy as np
import torch
import triton
import triton.language as tl

T = TypeVar("T")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_INTERPRETED = tl.constexpr(INTERPRETED)
BLOCK = 8192  # elements that a program looks at; tiles are whole numbers of blocks
_SLOTS = 512  # sums that programs add to, so that few meet in one
_SMALL = 1 << 16  # bytes that travel with the command to copy them, from anywhere
_CACHED = 8  # tables that blocks keep
INTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# What a program looks at together, and its warps: more registers would mean fewer programs at a time.
SHAPES = {
    "diff": (4096, 4),  # bytes of a side
    "mark": (64, 4),  # words of the bitmap, where elements have two bytes
    "compact": (128, 1),  # changes of a block
}


def as_ints(tensor: torch.Tensor) -> torch.Tensor:
    """The bit patterns of a contiguous tensor, flat."""
    if not tensor.is_contiguous():
        raise ValueError("kernels on a device take contiguous tensors")
    return tensor.detach().reshape(-1).view(INTS[tensor.element_size()])


class HostCopy:
    """Numbers on their way to the host. A call waits for them, but for no work that was given later."""

    def __init__(self, host: torch.Tensor, event: torch.cuda.Event | None = None) -> None:
        self._host, self._event = host, event

    def ready(self) -> bool:
        """Whether they have come."""
        return self._event is None or bool(self._event.query())

    def __call__(self) -> np.ndarray[Any, Any]:
        if self._event is not None:
            self._event.synchronize()
        return self._host.numpy()


class Blocks:
    """Elements of several tensors (or contiguous parts of them), chunk_spans into blocks.

    start: where each part begins in its tensor; keys: the two keys of its tensor. Both are for digests.
    """

    def __init__(
        self,
        width: int,
        numel: Any,
        device: Any,
        keys: np.ndarray[Any, Any] | None = None,
        start: Any = None,
        block: int = BLOCK,
    ) -> None:
        self.width, self.block, self.device = width, block, torch.device(device)
        self._cache: dict[tuple[str, bytes], Any] = {}
        sizes = np.asarray(numel, np.int64)
        per = -(-sizes // block)
        self.count = int(per.sum())
        self.sizes, self.first_block, n = sizes, np.cumsum(per) - per, sizes.size
        table = np.zeros((6, n + n % 2), np.int64)  # rows begin at 16-byte boundaries: kernels are compiled for these
        table[:3, :n] = sizes, self.first_block, per
        table[3, :n] = 0 if start is None else start
        table[4:].reshape(-1)[: 2 * n] = 0 if keys is None else np.asarray(keys, np.uint64).view(np.int64).ravel()
        there = self.upload(table)
        self.numel, self.first, self.blocks_of, self.start = there[:4, :n]
        self.keys = there[4:].view(-1)[: 2 * n].view(n, 2)
        self.entry = torch.repeat_interleave(
            torch.arange(n, dtype=torch.int32, device=self.device), self.blocks_of, output_size=self.count
        )

    def upload(self, numbers: Any, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        """Numbers of the host on the device."""
        numbers = np.asarray(numbers)
        large = self.device.type == "cuda" and numbers.size * dtype.itemsize > _SMALL
        host = torch.empty(numbers.shape, dtype=dtype, pin_memory=large)
        host.numpy()[...] = numbers  # torch would take all cores for it, and they would be busy for a while after it
        return host.to(self.device, non_blocking=True)

    def upload_columns(self, *columns: Any) -> list[torch.Tensor]:
        """Columns of numbers in one copy. Each begins at a 16-byte boundary: kernels are compiled for these."""
        sizes = [len(column) for column in columns]
        room = [size + size % 2 for size in sizes]
        flat, begins = np.zeros(sum(room), np.int64), accumulate(room, initial=0)
        for begin, size, column in zip(begins, sizes, columns, strict=False):
            flat[begin : begin + size] = column
        there = self.upload(flat).split(room)
        return [row[:size] if size % 2 else row for row, size in zip(there, sizes, strict=True)]

    def fetch(self, numbers: torch.Tensor) -> HostCopy:
        """Begin to bring numbers to the host."""
        if self.device.type != "cuda":
            return HostCopy(numbers)
        host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
        host.copy_(numbers, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return HostCopy(host, event)

    def event(self) -> torch.cuda.Event | None:
        """An event behind all that the device was given to do so far, on the current stream."""
        if self.device.type != "cuda":
            return None
        event: torch.cuda.Event = torch.cuda.current_stream(self.device).record_event()
        return event

    def empty(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=self.device)

    @property
    def words(self) -> int:
        """Words of 32 bits that a bitmap of all blocks has."""
        return self.count * (self.block // 32)

    def bitmap(self) -> torch.Tensor:
        """A bitmap without marks."""
        return torch.zeros(self.words, dtype=torch.int32, device=self.device)

    def side(self, tensors: Sequence[torch.Tensor]) -> Side:
        """Tensors of the right sizes, one per part, as kernels want them."""
        flat = [as_ints(t) for t in tensors]
        sizes = [t.numel() for t in flat]
        if sizes != self.sizes.tolist() or any(t.element_size() != self.width for t in flat):
            raise ValueError("the tensors are not those that the blocks were made for")
        base = next((t for t in flat if t.numel()), self.empty(1, INTS[self.width]))
        return self.side_at(np.array([t.data_ptr() for t in flat], np.int64), base, flat)

    def side_at(self, address: np.ndarray[Any, Any], base: torch.Tensor, alive: Sequence[Any]) -> Side:
        """Parts at some addresses, counted from a tensor; `alive` is what keeps their memory."""
        base = as_ints(base)
        offset = (address - base.data_ptr()) // self.width
        at = self.cached(("side", offset.tobytes()), lambda: self.upload(offset))
        return Side(base, at, not (address % 16).any(), alive)

    def cached(self, key: tuple[str, bytes], make: Callable[[], T]) -> T:
        """What is made of these blocks and of numbers that stand in the key, and so the same every time."""
        value: T | None = self._cache.get(key)
        if value is None:
            value = make()
            self._cache = dict([*self._cache.items()][1 - _CACHED :]) | {key: value}  # others may be at the old one
        return value


@dataclass(frozen=True)
class Side:
    """One version of the weights: a tensor to count addresses from, and where each part lies, in elements."""

    base: torch.Tensor
    at: torch.Tensor
    aligned: bool
    alive: Sequence[Any]

    def step(self, width: int) -> int:
        """What addresses are multiples of, in elements."""
        return 16 // width if self.aligned else 1


@triton.jit
def popcount(x):
    if _INTERPRETED:
        x = x - ((x >> 1) & 0x55555555)
        x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
        x = (x + (x >> 4)) & 0x0F0F0F0F
        return ((x * 0x01010101) >> 24).to(tl.int32)
    else:
        return tl.inline_asm_elementwise("popc.b32 $0, $1;", "=r,r", [x], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def lowest(x):
    """The index of the lowest bit that is set."""
    return popcount(x ^ (x - 1)) - 1


@triton.jit
def block_span(block, entry, first, numel, B: tl.constexpr):
    """Part of a block, where the block begins in it, and how many elements are left from there."""
    e = tl.load(entry + block)
    begin = (block - tl.load(first + e)) * B
    return e, begin, tl.load(numel + e) - begin


@triton.jit
def unsigned(x):
    """Bits as an unsigned number of their width."""
    if x.dtype == tl.int16:
        return x.to(tl.uint16, bitcast=True)
    elif x.dtype == tl.int32:
        return x.to(tl.uint32, bitcast=True)
    elif x.dtype == tl.int64:
        return x.to(tl.uint64, bitcast=True)
    else:
        return x


@triton.jit
def _swap_bits(x, shift: tl.constexpr, mask: tl.constexpr):
    t = (x ^ (x >> shift)) & mask
    return x ^ t ^ (t << shift)


@triton.jit
def natural_order(x):
    """A word of a bitmap, from the order in which pairs give it: bit 16 (p & 1) + 8 (p >> 1 & 1) + (p >> 2)."""
    return _swap_bits(_swap_bits(_swap_bits(x, 12, 0x0000F0F0), 6, 0x00CC00CC), 3, 0x0A0A0A0A)


@triton.jit
def read_pairs(bits, a, n, W: tl.constexpr, ONCE: tl.constexpr = True, PAST: tl.constexpr = True):
    """The two-byte elements of W words, as words × 16 pairs.

    Of the eight that lie in the same 16 bytes all are read if one of the `n` is among them; other words are zero.
    ONCE: nobody needs them again soon. PAST: they pass by the first cache, which most kernels are faster with.
    """
    j = tl.arange(0, W)[:, None] * 16 + tl.arange(0, 16)[None, :]
    pairs = bits.to(tl.pointer_type(tl.int32)) + a // 2 + j
    there = (j // 4) * 8 < n
    if ONCE and PAST:
        return tl.load(pairs, mask=there, other=0, cache_modifier=".cg")
    else:
        return tl.load(pairs, mask=there, other=0, eviction_policy="evict_first" if ONCE else "")


@triton.jit
def _differing_halves(x, y):
    """1 in the lowest bit of each half in which two pairs differ."""
    if _INTERPRETED:
        d = (x ^ y).to(tl.uint32, bitcast=True)
        return ((d & 0xFFFF) != 0).to(tl.uint32) | (((d >> 16) != 0).to(tl.uint32) << 16)
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 d; xor.b32 d, $1, $2; min.u16x2 $0, d, $3; }",
            "=r,r,r,r",
            [x, y, tl.full([1, 1], 0x10001, tl.int32)],
            dtype=tl.uint32,
            is_pure=True,
            pack=1,
        )


@triton.jit
def _diff_kernel(
    old,
    new,
    old_at,
    new_at,
    entry,
    first,
    numel,
    words,
    counts,
    B: tl.constexpr,
    SA: tl.constexpr,
    SB: tl.constexpr,
    PAIRED: tl.constexpr,
    W: tl.constexpr,
):
    block = tl.program_id(0)
    e, begin, n = block_span(block, entry, first, numel, B)
    a = tl.multiple_of(tl.load(old_at + e) + begin, SA)
    b = tl.multiple_of(tl.load(new_at + e) + begin, SB)
    there = words + block.to(tl.int64) * (B // 32) + tl.arange(0, W)
    count = tl.zeros([W], tl.int32)
    for i in range(0, B, W * 32):
        mask = difference_mask(old, new, a + i, b + i, n - i, W, PAIRED)
        tl.store(there + i // 32, mask.to(tl.int32, bitcast=True))
        count += popcount(mask)
    tl.store(counts + block, tl.sum(count, axis=0))


@triton.jit
def difference_mask(old, new, a, b, n, W: tl.constexpr, PAIRED: tl.constexpr):
    """W words of a bitmap: which of the elements at `a` and `b` differ, of which `n` are left."""
    if PAIRED:
        return pair_difference_mask(read_pairs(old, a, n, W), read_pairs(new, b, n, W), n, W)
    else:
        bit = tl.arange(0, 32)
        j = tl.arange(0, W)[:, None] * 32 + bit[None, :]
        if n >= W * 32:
            x = (tl.load(old + a + j) != tl.load(new + b + j)).to(tl.uint32)
        else:
            x = tl.load(old + a + j, mask=j < n, other=0) != tl.load(new + b + j, mask=j < n, other=0)
            x = x.to(tl.uint32)
        return tl.sum(x << bit[None, :].to(tl.uint32), axis=1).to(tl.uint32)


@triton.jit
def pair_difference_mask(x, y, n, W: tl.constexpr):
    """W words of a bitmap: which elements of two rows of pairs differ, of which `n` are left."""
    even, odd = tl.split(tl.reshape(_differing_halves(x, y), [W, 8, 2]))
    power = (tl.zeros([8], tl.uint32) + 1) << tl.arange(0, 8).to(tl.uint32)
    mask = natural_order(tl.sum((odd * 256 + even) * power[None, :], axis=1).to(tl.uint32))
    left = tl.minimum(tl.maximum(n - tl.arange(0, W) * 32, 0), 32).to(tl.uint64)
    return mask & (((tl.zeros([W], tl.uint64) + 1) << left) - 1).to(tl.uint32)


def diff(blocks: Blocks, old: Side, new: Side) -> tuple[torch.Tensor, torch.Tensor]:
    """A bitmap of the elements whose bits differ, and how many there are in each block."""
    words, counts = blocks.empty(blocks.words, torch.int32), blocks.empty(blocks.count, torch.int32)
    nbytes, warps = SHAPES["diff"]
    if blocks.count:
        _diff_kernel[(blocks.count,)](
            *(old.base, new.base, old.at, new.at, blocks.entry, blocks.first, blocks.numel, words, counts),
            *(blocks.block, old.step(blocks.width), new.step(blocks.width)),
            *(blocks.width == 2 and old.aligned and new.aligned, min(nbytes // blocks.width, blocks.block) // 32),
            num_warps=warps,
        )
    return words, counts


@triton.jit
def _turn(z):
    return z.to(tl.uint32).to(tl.uint64) * (z >> 32) + ((z << 41) | (z >> 23))


@triton.jit
def mix(weyl, key, bits):
    """What an element adds to the first sum of the digest; a turn more gives the second."""
    return _turn(_turn(_turn(weyl ^ bits) + key))


@triton.jit
def weyl_number(key, position):
    return key.to(tl.uint64, bitcast=True) + position.to(tl.uint64) * 0x9E3779B97F4A7C15


@triton.jit
def digest_delta(weyl, key, old, new, ok):
    """How both sums move when old bits become new ones."""
    was, now = mix(weyl, key, old.to(tl.uint64)), mix(weyl, key, new.to(tl.uint64))
    zero = was ^ was
    return tl.where(ok, now - was, zero), tl.where(ok, _turn(now) - _turn(was), zero)


@triton.jit
def add_sums(sums, slot, one, two):
    """Add to both sums in a slot."""
    tl.atomic_add(sums + 2 * slot, tl.sum(one, axis=0).to(tl.int64, bitcast=True), sem="relaxed")
    tl.atomic_add(sums + 2 * slot + 1, tl.sum(two, axis=0).to(tl.int64, bitcast=True), sem="relaxed")


def new_sums(device: Any) -> torch.Tensor:
    """Room for both sums of a digest, many times; `sum_slots` adds them up."""
    return torch.zeros((_SLOTS, 2), dtype=torch.int64, device=device)


def sum_slots(sums: torch.Tensor) -> torch.Tensor:
    """Both sums, modulo 2^64, as int64."""
    return sums.sum(0)


@triton.jit
def _order(x, top, SIGN: tl.constexpr):
    if SIGN:
        x = tl.where((x & top) != 0, x ^ (top | (top - 1)), x | top)
    return x


@triton.jit
def steps(old, new, SIGN: tl.constexpr, BITS: tl.constexpr):
    """The zigzag step from old to new bits, both as uint64."""
    top = tl.full([1], 1, tl.uint64) << (BITS - 1)
    ones = top | (top - 1)
    delta = (_order(new, top, SIGN) - _order(old, top, SIGN)) & ones
    doubled = (delta << 1) & ones
    return tl.where((delta & top) != 0, doubled ^ ones, doubled)


@triton.jit
def advance(old, step, SIGN: tl.constexpr, BITS: tl.constexpr):
    """The new bits, from old ones and a zigzag step, both as uint64."""
    top = tl.full([1], 1, tl.uint64) << (BITS - 1)
    ones = top | (top - 1)
    half = step >> 1
    z = (_order(old, top, SIGN) + tl.where((step & 1) != 0, half ^ ones, half)) & ones
    if SIGN:
        z = tl.where((z & top) != 0, z ^ top, z ^ ones)
    return z


@triton.jit
def store_word(pointer, value, mask, BITS: tl.constexpr):
    """Store the lower bits of a uint64."""
    if BITS == 8:
        tl.store(pointer, value.to(tl.uint8), mask=mask)
    elif BITS == 16:
        tl.store(pointer, value.to(tl.uint16).to(tl.int16, bitcast=True), mask=mask)
    elif BITS == 32:
        tl.store(pointer, value.to(tl.uint32).to(tl.int32, bitcast=True), mask=mask)
    else:
        tl.store(pointer, value.to(tl.int64, bitcast=True), mask=mask)


@triton.jit
def _compact_kernel(
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
    tile_log,
    positions,
    before,
    out,
    sums,
    B: tl.constexpr,
    BITS: tl.constexpr,
    SIGN: tl.constexpr,
    STEPS: tl.constexpr,
    TILED: tl.constexpr,
    BEFORE: tl.constexpr,
    SLOTS: tl.constexpr,
    Q: tl.constexpr,
):
    block = tl.program_id(0)
    e, begin, _ = block_span(block, entry, first, numel, B)
    row = tl.arange(0, B // 32)
    left = tl.load(words + block.to(tl.int64) * (B // 32) + row).to(tl.uint32, bitcast=True)
    count = popcount(left)
    here = tl.sum(count, axis=0)
    if here > 0:
        a, b = tl.load(old_at + e), tl.load(new_at + e)
        k = tl.load(ends + block) - here + tl.cumsum(count, 0) - count
        key, key2 = tl.load(keys + 2 * e), tl.load(keys + 2 * e + 1).to(tl.uint64, bitcast=True)
        origin = tl.load(start + e)
        if TILED:
            log = tl.load(tile_log + e)
            into = begin & ((tl.full([1], 1, tl.int64) << log) - 1)  # where the block begins in its tile
            head = block - tl.sum(into // B, axis=0).to(tl.int32)
            tile_first = tl.load(ends + head - 1, mask=head > 0, other=0)
        # Few words have a change, so lanes write down where changes are, and then take a change each.
        most = tl.max(count, axis=0)
        while most > 0:
            there = begin + row * 32 + lowest(left)
            tl.store(positions + k, there.to(tl.uint32).to(tl.int32, bitcast=True), mask=left != 0)
            left &= left - 1
            k += 1
            most -= 1
        tl.debug_barrier()
        at = tl.load(ends + block) - here
        one = tl.zeros([Q], tl.uint64)
        two = tl.zeros([Q], tl.uint64)
        i = here - here
        while i < here:
            q = i + tl.arange(0, Q)
            ok = q < here
            q = at + q
            j = tl.load(positions + q, mask=ok, other=0).to(tl.uint32, bitcast=True).to(tl.int64)
            x = unsigned(tl.load(old + a + j, mask=ok, other=0)).to(tl.uint64)
            y = unsigned(tl.load(new + b + j, mask=ok, other=0)).to(tl.uint64)
            if TILED:
                flag = (q == tile_first).to(tl.int64) << 31
                inside = (into + j - begin) | flag
                tl.store(positions + q, inside.to(tl.uint32).to(tl.int32, bitcast=True), mask=ok)
            if BEFORE:
                store_word(before + q, x, ok, BITS)
            if STEPS:
                store_word(out + q, steps(x, y, SIGN, BITS), ok, BITS)
            else:
                store_word(out + q, y, ok, BITS)
            first_moved, second_moved = digest_delta(weyl_number(key, origin + j), key2, x, y, ok)
            one += first_moved
            two += second_moved
            i += Q
        add_sums(sums, block % SLOTS, one, two)


def compact(
    blocks: Blocks,
    old: Side,
    new: Side,
    words: torch.Tensor,
    counts: torch.Tensor,
    changes: int,
    *,
    steps: bool = False,
    sign_magnitude: bool = True,
    tile_log: torch.Tensor | None = None,
    keep_old: bool = False,
    ends: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The changes of a bitmap: positions, new bits or steps, old bits where they are to be kept, and the digest's sums.

    tile_log: of each part. Positions are then counted from the start of their tile, and bit 31 is set in the first of
        each tile: what gaps are made of.
    ends: the changes up to the end of each block, where they are known.
    """
    ints = INTS[blocks.width]
    positions, out = blocks.empty(changes, torch.int32), blocks.empty(changes, ints)
    before = blocks.empty(changes if keep_old else 0, ints)
    sums = new_sums(blocks.device)
    together, warps = SHAPES["compact"]
    if blocks.count and changes:
        ends = torch.cumsum(counts, 0, dtype=torch.int64) if ends is None else ends
        _compact_kernel[(blocks.count,)](
            *(old.base, new.base, old.at, new.at, blocks.entry, blocks.first, blocks.numel, blocks.keys, blocks.start),
            *(words, ends, tile_log, positions, before, out, sums, blocks.block, 8 * blocks.width, sign_magnitude),
            *(steps, tile_log is not None, keep_old, _SLOTS, together),
            num_warps=warps,
        )
    return positions, out, before, sums


@triton.jit
def _digest_kernel(
    bits, at, entry, first, numel, keys, start, sums, B: tl.constexpr, S: tl.constexpr, SLOTS: tl.constexpr
):
    block = tl.program_id(0)
    e, begin, n = block_span(block, entry, first, numel, B)
    a = tl.multiple_of(tl.load(at + e) + begin, S)
    key, key2 = tl.load(keys + 2 * e), tl.load(keys + 2 * e + 1).to(tl.uint64, bitcast=True)
    origin = weyl_number(key, tl.load(start + e) + begin)
    lane = tl.arange(0, 1024)
    one = tl.zeros([1024], tl.uint64)
    two = tl.zeros([1024], tl.uint64)
    for i in range(0, B, 1024):
        j = i + lane
        weyl = origin + j.to(tl.uint64) * 0x9E3779B97F4A7C15
        if n - i >= 1024:
            z = mix(weyl, key2, unsigned(tl.load(bits + a + j)).to(tl.uint64))
            one += z
            two += _turn(z)
        else:
            ok = j < n
            z = mix(weyl, key2, unsigned(tl.load(bits + a + j, mask=ok, other=0)).to(tl.uint64))
            one += tl.where(ok, z, z ^ z)
            two += tl.where(ok, _turn(z), z ^ z)
    add_sums(sums, block % SLOTS, one, two)


def digest(blocks: Blocks, side: Side) -> torch.Tensor:
    """The element sums of the digest (int64, modulo 2^64), without the terms of the tensor table."""
    sums = new_sums(blocks.device)
    if blocks.count:
        _digest_kernel[(blocks.count,)](
            *(side.base, side.at, blocks.entry, blocks.first, blocks.numel, blocks.keys, blocks.start, sums),
            *(blocks.block, side.step(blocks.width), _SLOTS),
            num_warps=4,
        )
    return sum_slots(sums)


@triton.jit
def _rounded(x, CAST: tl.constexpr, NAN: tl.constexpr):
    """fp32 patterns as bf16, to the nearest and ties to even; or patterns as they are."""
    if not CAST:
        return x
    elif _INTERPRETED:
        u = x.to(tl.uint32, bitcast=True)
        near = (u + 0x7FFF + ((u >> 16) & 1)) >> 16
        near = tl.where((u & 0x7FFFFFFF) > 0x7F800000, NAN, near)
        return near.to(tl.uint16).to(tl.int16, bitcast=True)
    else:
        return x.to(tl.float32, bitcast=True).to(tl.bfloat16).to(tl.int16, bitcast=True)


@triton.jit
def _rounded_pairs(x, CAST: tl.constexpr, NAN: tl.constexpr):
    """Two fp32 patterns in one number as a pair of bf16; or a pair as it is."""
    if not CAST:
        return x
    elif _INTERPRETED:
        even = _rounded(x.to(tl.int32), CAST, NAN).to(tl.int32) & 0xFFFF
        return even | (_rounded((x >> 32).to(tl.int32), CAST, NAN).to(tl.int32) << 16)
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .f32 a, b; mov.b64 {a, b}, $1; cvt.rn.bf16x2.f32 $0, b, a; }",
            "=r,l",
            [x],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )


@triton.jit
def _mark_kernel(
    master,
    weight,
    master_at,
    weight_at,
    entry,
    first,
    numel,
    words,
    counts,
    B: tl.constexpr,
    SA: tl.constexpr,
    SB: tl.constexpr,
    CAST: tl.constexpr,
    NAN: tl.constexpr,
    PAIRED: tl.constexpr,
    W: tl.constexpr,
):
    block = tl.program_id(0)
    e, begin, n = block_span(block, entry, first, numel, B)
    a = tl.multiple_of(tl.load(master_at + e) + begin, SA)
    b = tl.multiple_of(tl.load(weight_at + e) + begin, SB)
    count = tl.zeros([W], tl.int32)
    for i in range(0, B, W * 32):
        there = words + block.to(tl.int64) * (B // 32) + i // 32 + tl.arange(0, W)
        marks = tl.load(there).to(tl.uint32, bitcast=True)
        marks |= _write_changed(master, weight, a + i, b + i, n - i, W, CAST, NAN, PAIRED)
        tl.store(there, marks.to(tl.int32, bitcast=True))
        count += popcount(marks)
    tl.store(counts + block, tl.sum(count, axis=0))


@triton.jit
def _write_changed(
    master, weight, a, b, n, W: tl.constexpr, CAST: tl.constexpr, NAN: tl.constexpr, PAIRED: tl.constexpr
):
    """Write W words' elements of the weight that differ from the master's. Returns which did, as words of a bitmap."""
    if PAIRED:
        k = tl.arange(0, W)[:, None] * 16 + tl.arange(0, 16)[None, :]
        if CAST:
            wide = master.to(tl.pointer_type(tl.int64)) + a // 2 + k
            near = tl.load(wide, mask=(k // 2) * 4 < n, other=0, eviction_policy="evict_first")
        else:
            near = read_pairs(master, a, n, W)
        near = _rounded_pairs(near, CAST, NAN)
        mask = pair_difference_mask(near, read_pairs(weight, b, n, W, False), n, W)
        # A word without changes is not written, any other as a whole: memory has less to do.
        wanted, _ = tl.broadcast((mask != 0)[:, None], near)
        pairs = weight.to(tl.pointer_type(tl.int32)) + b // 2 + k
        if n >= W * 32:
            tl.store(pairs, near, mask=wanted)
        else:
            tl.store(pairs, near, mask=wanted & (2 * k + 1 < n))
            last = tl.sum(tl.sum(tl.where(2 * k + 1 == n, near, 0), axis=1), axis=0)
            tl.store(weight + b + n - 1, last.to(tl.int16), mask=(n > 0) & (n % 2 == 1))
    else:
        bit = tl.arange(0, 32)[None, :]
        j = tl.arange(0, W)[:, None] * 32 + bit
        if n >= W * 32:
            new = _rounded(tl.load(master + a + j), CAST, NAN)
            differs = (new != tl.load(weight + b + j)).to(tl.uint32)
            mask = tl.sum(differs << bit.to(tl.uint32), axis=1).to(tl.uint32)
            wanted, _ = tl.broadcast((mask != 0)[:, None], new)
            tl.store(weight + b + j, new, mask=wanted)
        else:
            new = _rounded(tl.load(master + a + j, mask=j < n, other=0), CAST, NAN)
            edge = (new != tl.load(weight + b + j, mask=j < n, other=0)) & (j < n)
            mask = tl.sum(edge.to(tl.uint32) << bit.to(tl.uint32), axis=1).to(tl.uint32)
            tl.store(weight + b + j, new, mask=edge)
    return mask


def mark(blocks: Blocks, masters: Side, weights: Side, words: torch.Tensor, counts: torch.Tensor) -> None:
    """Copy masters to the weights, cast from fp32 to bf16 where they are wider, and mark in a bitmap what changed.

    A NaN becomes the one that torch makes of it on this device. `counts` are then the marks of each block.
    """
    wide = masters.base.element_size()
    if (wide, blocks.width) != (4, 2) and wide != blocks.width:
        raise ValueError("masters are fp32 for bf16 weights, or as wide as the weights")
    together, warps = SHAPES["mark"]
    if blocks.count:
        _mark_kernel[(blocks.count,)](
            *(masters.base, weights.base, masters.at, weights.at, blocks.entry, blocks.first, blocks.numel),
            *(words, counts, blocks.block, masters.step(wide), weights.step(blocks.width), wide != blocks.width),
            *(
                0x7FFF if blocks.device.type == "cuda" else 0x7FC0,
                blocks.width == 2 and masters.aligned and weights.aligned,
            ),
            min(2 * together // max(blocks.width, 2), blocks.block // 32),
            num_warps=warps,
        )
