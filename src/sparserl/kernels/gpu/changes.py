"""Changes on a GPU, in Triton: find them, write them down, mark them, and digest weights.

Each kernel is specified by `reference.py`. All tensors of a call are one launch, over blocks of 8192 elements:

    tensors ──► Blocks ──► diff: a bitmap, changes per block ──► compact: positions and bits
                                                             └─► classes: ranks by magnitude class

A bitmap has one bit per element, the first element lowest, and every tensor begins with a word of its own. New bits may
be fp32 where the old ones are bf16: kernels cast what they read of them. Nothing here waits for the GPU. With
TRITON_INTERPRET=1, set before the import, everything runs on CPU tensors, slowly.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
import triton
import triton.language as tl

from .ints import INTS

T = TypeVar("T")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_INTERPRETED = tl.constexpr(INTERPRETED)
_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
BLOCK = 8192  # elements per program; tiles are whole numbers of blocks
_CPU_NAN = tl.constexpr(0x7FC0)  # the bf16 pattern that the interpreter casts a NaN to
_SLOTS = tl.constexpr(512)  # digest sums that programs add to, so that few programs add to the same one
_SMALL_COPY = 1 << 16  # bytes up to which a copy to the GPU needs no pinned memory
_CACHED_TABLES = 8  # tables that `Blocks.cached` keeps
# How much a program handles at a time, and its warps.
SHAPES = {
    "diff": (4096, 4),  # bytes of either side
    "mark": (64, 4),  # words of the bitmap, for elements of two bytes
    "compact": (128, 1),  # changes of a block
}


def as_ints(tensor: torch.Tensor) -> torch.Tensor:
    """The bit patterns of a contiguous tensor, flat."""
    if not tensor.is_contiguous():
        raise ValueError("GPU kernels need contiguous tensors")
    return tensor.detach().reshape(-1).view(INTS[tensor.element_size()])


class HostCopy:
    """Numbers on their way from the GPU. Calling it waits for them, but not for work that was queued later."""

    def __init__(self, host: torch.Tensor, event: torch.cuda.Event | None = None) -> None:
        self._host = host
        self._event = event

    def ready(self) -> bool:
        """Whether the numbers have arrived."""
        return self._event is None or bool(self._event.query())

    def __call__(self) -> np.ndarray[Any, Any]:
        if self._event is not None:
            self._event.synchronize()
        return self._host.numpy()


class BlockTable(NamedTuple):
    """What kernels read about blocks: `part` has a number per block, the others one (`keys` two) per part."""

    part: torch.Tensor
    first: torch.Tensor  # the first block of the part
    numel: torch.Tensor
    keys: torch.Tensor  # of the part's tensor, for digests
    start: torch.Tensor  # where the part begins in its tensor, for digests
    columns: torch.Tensor  # elements of a row; what this and `gap` have means nothing where all parts are runs
    gap: torch.Tensor  # elements of the tensor between two rows


@cache
def origin(width: int, device: torch.device) -> torch.Tensor:
    """Where kernels count elements of a width from: at a 16-byte boundary, wherever weights lie.

    From an element of the weights, no distance to a part at such a boundary might be a whole number of 16 bytes. And
    Triton compiles a kernel once more for pointers that are not aligned.
    """
    return torch.empty(16 // width, dtype=INTS[width], device=device)


class Blocks:
    """Elements of several tensors (or contiguous parts of them), divided into blocks.

    start: where each part begins in its tensor; keys: the two keys of its tensor. Both are for digests.
    rows: for each part the elements of a row, and how many elements of the tensor lie between two rows; None if all
        parts are runs of their tensors.
    """

    def __init__(
        self,
        width: int,
        numel: Any,
        device: Any,
        keys: np.ndarray[Any, Any] | None = None,
        start: Any = None,
        block: int = BLOCK,
        rows: tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]] | None = None,
    ) -> None:
        self.width = width
        self.has_rows = rows is not None
        self.block = block
        self.device = torch.device(device)
        self._cache: dict[tuple[str, bytes], Any] = {}
        self.sizes = np.asarray(numel, np.int64)
        per_part = -(-self.sizes // block)
        self.count = int(per_part.sum())
        self.first_block = np.cumsum(per_part) - per_part
        n = self.sizes.size
        # Lines of the table begin at 16-byte boundaries: kernels are compiled for these.
        table = np.zeros((6 + 2 * self.has_rows, n + n % 2), np.int64)
        table[0, :n] = self.sizes
        table[1, :n] = self.first_block
        table[2, :n] = per_part
        table[3, :n] = 0 if start is None else start
        table[4:6].reshape(-1)[: 2 * n] = 0 if keys is None else np.asarray(keys, np.uint64).view(np.int64).ravel()
        if rows is not None:
            table[6:, :n] = rows
        on_gpu = self.upload(table)
        sizes, first, self.per_part, starts = on_gpu[:4, :n]
        part_keys = on_gpu[4:6].view(-1)[: 2 * n].view(n, 2)
        columns, gap = on_gpu[6:, :n] if self.has_rows else (starts, starts)
        if n == 1:
            part = torch.zeros(self.count, dtype=torch.int32, device=self.device)
        else:
            parts = torch.arange(n, dtype=torch.int32, device=self.device)
            part = torch.repeat_interleave(parts, self.per_part, output_size=self.count)
        self.table = BlockTable(part, first, sizes, part_keys, starts, columns, gap)

    def require_runs(self) -> None:
        """Refuse parts with gaps between their rows, for kernels that know nothing of rows."""
        if self.has_rows:
            raise ValueError("this kernel needs parts that are runs of their tensors")

    def upload(self, numbers: Any, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        """Copy numbers to the GPU."""
        numbers = np.asarray(numbers)
        large = self.device.type == "cuda" and numbers.size * dtype.itemsize > _SMALL_COPY
        host = torch.empty(numbers.shape, dtype=dtype, pin_memory=large)
        host.numpy()[...] = numbers  # not by torch, which would start a thread on every core
        return host.to(self.device, non_blocking=True)

    def upload_columns(self, *columns: Any) -> list[torch.Tensor]:
        """Copy columns of numbers in one go. Each begins at a 16-byte boundary: kernels are compiled for these."""
        sizes = [len(column) for column in columns]
        padded = [size + size % 2 for size in sizes]
        flat = np.zeros(sum(padded), np.int64)
        for begin, size, column in zip(accumulate(padded, initial=0), sizes, columns, strict=False):
            flat[begin : begin + size] = column
        rows = self.upload(flat).split(padded)
        return [row[:size] if size % 2 else row for row, size in zip(rows, sizes, strict=True)]

    def fetch(self, numbers: torch.Tensor) -> HostCopy:
        """Begin to copy numbers to the host."""
        if self.device.type != "cuda":
            return HostCopy(numbers)
        host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
        host.copy_(numbers, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return HostCopy(host, event)

    def event(self) -> torch.cuda.Event | None:
        """An event behind everything that the current stream has been given so far."""
        if self.device.type != "cuda":
            return None
        event: torch.cuda.Event = torch.cuda.current_stream(self.device).record_event()
        return event

    def empty(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=self.device)

    @property
    def words(self) -> int:
        """Words of 32 bits in a bitmap of all blocks."""
        return self.count * (self.block // 32)

    def bitmap(self) -> torch.Tensor:
        """A bitmap without marks."""
        return torch.zeros(self.words, dtype=torch.int32, device=self.device)

    def side(self, tensors: Sequence[torch.Tensor]) -> Side:
        """One version of the weights: tensors of the right sizes, one per part."""
        flat = [as_ints(t) for t in tensors]
        sizes = [t.numel() for t in flat]
        if sizes != self.sizes.tolist() or any(t.element_size() != self.width for t in flat):
            raise ValueError("the tensors do not have the sizes that the blocks were made for")
        return self.side_at(np.array([t.data_ptr() for t in flat], np.int64), self.width, flat)

    def side_at(
        self, address: np.ndarray[Any, Any], width: int, owners: Sequence[Any], *, aligned: bool | None = None
    ) -> Side:
        """One version of the weights, by the parts' addresses; `owners` keep their memory alive.

        width: the bytes of an element in that version: as wide as the blocks' elements, or fp32 that is cast to bf16.
        aligned: whether all parts begin at 16-byte boundaries; False also where other versions' do not, since kernels
            are compiled for versions alike. By default, what the addresses say.
        """
        if aligned is None:
            aligned = not (address & 15).any()
        base = origin(width, self.device)
        offset = (address - base.data_ptr()) // width
        at = self.cached(("side", offset.tobytes()), lambda: self.upload(offset))
        return Side(base, at, aligned, owners)

    def cached(self, key: tuple[str, bytes], make: Callable[[], T]) -> T:
        """A value that depends on these blocks and the key alone; it is made once."""
        value: T | None = self._cache.get(key)
        if value is None:
            value = make()
            # A new dictionary: another thread may be reading the old one.
            self._cache = dict([*self._cache.items()][1 - _CACHED_TABLES :]) | {key: value}
        return value


class Pointers(NamedTuple):
    """Where kernels find parts: a tensor to count from, and the distance of each part from it, in elements."""

    base: torch.Tensor
    at: torch.Tensor


@dataclass(frozen=True)
class Side:
    """One version of the weights, old or new: see `Pointers`."""

    base: torch.Tensor
    at: torch.Tensor
    aligned: bool  # whether all parts begin at 16-byte boundaries
    owners: Sequence[Any]

    @cached_property
    def pointers(self) -> Pointers:
        return Pointers(self.base, self.at)

    @property
    def step(self) -> int:
        """What the distances of parts are multiples of, in elements."""
        return 16 // self.base.element_size() if self.aligned else 1


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
def block_span(block, blocks, B: tl.constexpr):
    """The part of a block, where the block begins in it, and how many elements are left from there."""
    part = tl.load(blocks.part + block)
    begin = (block - tl.load(blocks.first + part)) * B
    return part, begin, tl.load(blocks.numel + part) - begin


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
def load_bits(pointer, ok):
    """Bits as uint64, zero where `ok` is false."""
    return unsigned(tl.load(pointer, mask=ok, other=0)).to(tl.uint64)


@triton.jit
def narrowed(x, BITS: tl.constexpr):
    """Patterns of so many bits: wider ones are fp32, and are cast to bf16."""
    return cast(x, x.dtype.primitive_bitwidth > BITS, _CPU_NAN)


@triton.jit
def load_new_bits(pointer, ok, BITS: tl.constexpr):
    """New bits as uint64, cast where they are wider than BITS; zero where `ok` is false."""
    return unsigned(narrowed(tl.load(pointer, mask=ok, other=0), BITS)).to(tl.uint64)


@triton.jit
def load_uint32(pointer, ok):
    """Numbers of 32 bits, without sign, as int64; zero where `ok` is false."""
    return tl.load(pointer, mask=ok, other=0).to(tl.uint32, bitcast=True).to(tl.int64)


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
def load_marks(words, block, B: tl.constexpr):
    """The words of a bitmap that belong to a block."""
    row = tl.arange(0, B // 32)
    return tl.load(words + block.to(tl.int64) * (B // 32) + row).to(tl.uint32, bitcast=True)


@triton.jit
def list_marks(marks, count, first, begin, out, B: tl.constexpr):
    """Write down the positions of a block's marks, counted from `begin`, to `out` from index `first` on.

    Few words have a mark. So every lane lists those of its word, and afterwards a lane can take one change.
    """
    row = tl.arange(0, B // 32)
    k = first + tl.cumsum(count, 0) - count
    most = tl.max(count, axis=0)
    while most > 0:
        position = begin + row * 32 + lowest(marks)
        tl.store(out + k, position.to(out.dtype.element_ty), mask=marks != 0)
        marks &= marks - 1
        k += 1
        most -= 1
    tl.debug_barrier()


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

    Elements are read in groups of eight (16 bytes): a group is read if one of the first `n` elements is in it, and is
    zero otherwise.
    ONCE: the elements are not needed again soon. PAST: bypass the first cache, which makes most kernels faster.
    """
    j = tl.arange(0, W)[:, None] * 16 + tl.arange(0, 16)[None, :]
    pairs = bits.to(tl.pointer_type(tl.int32)) + a // 2 + j
    ok = (j // 4) * 8 < n
    if ONCE and PAST:
        return tl.load(pairs, mask=ok, other=0, cache_modifier=".cg")
    else:
        return tl.load(pairs, mask=ok, other=0, eviction_policy="evict_first" if ONCE else "")


@triton.jit
def read_new_pairs(bits, a, n, W: tl.constexpr, CAST: tl.constexpr, NAN: tl.constexpr):
    """`read_pairs` of elements that are not needed again, cast from fp32 if asked for: four of them are 16 bytes."""
    if CAST:
        j = tl.arange(0, W)[:, None] * 16 + tl.arange(0, 16)[None, :]
        wide = bits.to(tl.pointer_type(tl.int64)) + a // 2 + j
        return _cast_pairs(tl.load(wide, mask=(j // 2) * 4 < n, other=0, eviction_policy="evict_first"), NAN)
    else:
        return read_pairs(bits, a, n, W)


@triton.jit
def _differing_halves(x, y):
    """1 in the lowest bit of each half in which two pairs differ."""
    d = (x ^ y).to(tl.uint32, bitcast=True)
    return ((((d & 0x7FFF7FFF) + 0x7FFF7FFF) | d) >> 15) & 0x10001


@triton.jit
def pair_difference_mask(x, y, n, W: tl.constexpr):
    """W words of a bitmap: which of the first `n` elements of two rows of pairs differ."""
    even, odd = tl.split(tl.reshape(_differing_halves(x, y), [W, 8, 2]))
    power = (tl.zeros([8], tl.uint32) + 1) << tl.arange(0, 8).to(tl.uint32)
    mask = natural_order(tl.sum((odd * 256 + even) * power[None, :], axis=1).to(tl.uint32))
    left = tl.minimum(tl.maximum(n - tl.arange(0, W) * 32, 0), 32).to(tl.uint64)
    return mask & (((tl.zeros([W], tl.uint64) + 1) << left) - 1).to(tl.uint32)


@triton.jit
def difference_mask(old, new, a, b, n, W: tl.constexpr, PAIRED: tl.constexpr):
    """W words of a bitmap: which of the `n` elements that are left at `a` and `b` differ; new ones may be cast."""
    BITS: tl.constexpr = old.dtype.element_ty.primitive_bitwidth
    if PAIRED:
        y = read_new_pairs(new, b, n, W, new.dtype.element_ty.primitive_bitwidth > BITS, _CPU_NAN)
        return pair_difference_mask(read_pairs(old, a, n, W), y, n, W)
    else:
        bit = tl.arange(0, 32)
        j = tl.arange(0, W)[:, None] * 32 + bit[None, :]
        if n >= W * 32:
            x = (tl.load(old + a + j) != narrowed(tl.load(new + b + j), BITS)).to(tl.uint32)
        else:
            y = narrowed(tl.load(new + b + j, mask=j < n, other=0), BITS)
            x = (tl.load(old + a + j, mask=j < n, other=0) != y).to(tl.uint32)
        return tl.sum(x << bit[None, :].to(tl.uint32), axis=1).to(tl.uint32)


@triton.jit
def _diff_kernel(
    old,
    new,
    blocks,
    words,
    counts,
    B: tl.constexpr,
    OLD_STEP: tl.constexpr,
    NEW_STEP: tl.constexpr,
    PAIRED: tl.constexpr,
    W: tl.constexpr,
):
    block = tl.program_id(0)
    part, begin, n = block_span(block, blocks, B)
    a = tl.multiple_of(tl.load(old.at + part) + begin, OLD_STEP)
    b = tl.multiple_of(tl.load(new.at + part) + begin, NEW_STEP)
    out = words + block.to(tl.int64) * (B // 32) + tl.arange(0, W)
    count = tl.zeros([W], tl.int32)
    for i in range(0, B, W * 32):
        mask = difference_mask(old.base, new.base, a + i, b + i, n - i, W, PAIRED)
        tl.store(out + i // 32, mask.to(tl.int32, bitcast=True))
        count += popcount(mask)
    tl.store(counts + block, tl.sum(count, axis=0))


def diff(blocks: Blocks, old: Side, new: Side) -> tuple[torch.Tensor, torch.Tensor]:
    """A bitmap of the elements whose bits differ, and how many there are in each block."""
    words = blocks.empty(blocks.words, torch.int32)
    counts = blocks.empty(blocks.count, torch.int32)
    nbytes, warps = SHAPES["diff"]
    if blocks.count:
        _diff_kernel[(blocks.count,)](
            *(old.pointers, new.pointers, blocks.table, words, counts, blocks.block),
            *(old.step, new.step, blocks.width == 2 and old.aligned and new.aligned),
            min(nbytes // blocks.width, blocks.block) // 32,
            num_warps=warps,
        )
    return words, counts


@triton.jit
def turn(z):
    """A round of the digest's mixing."""
    return z.to(tl.uint32).to(tl.uint64) * (z >> 32) + ((z << 41) | (z >> 23))


@triton.jit
def mix(weyl, key, bits):
    """What an element adds to the first sum of the digest; another `turn` gives the second."""
    return turn(turn(turn(weyl ^ bits) + key))


@triton.jit
def weyl_number(key, position):
    """What is mixed with the bits of the element at a position."""
    return key.to(tl.uint64, bitcast=True) + position.to(tl.uint64) * _GOLDEN


@triton.jit
def load_keys(blocks, part):
    """Both keys of a part's tensor."""
    return tl.load(blocks.keys + 2 * part), tl.load(blocks.keys + 2 * part + 1).to(tl.uint64, bitcast=True)


@triton.jit
def load_rows(blocks, part, ROWS: tl.constexpr):
    """Where a part begins in its tensor and, if asked for, the elements of its rows and of the gaps between them."""
    start = tl.load(blocks.start + part)
    if ROWS:
        return start, tl.load(blocks.columns + part), tl.load(blocks.gap + part)
    else:
        return start, start, start


@triton.jit
def tensor_position(rows, position, ROWS: tl.constexpr):
    """A position of a part as one of its tensor."""
    start, columns, gap = rows
    if ROWS:
        return start + position + position // columns * gap
    else:
        return start + position


@triton.jit
def digest_delta(weyl, key, old, new, ok):
    """How both sums change when old bits become new ones."""
    before = mix(weyl, key, old.to(tl.uint64))
    after = mix(weyl, key, new.to(tl.uint64))
    zero = before ^ before
    return tl.where(ok, after - before, zero), tl.where(ok, turn(after) - turn(before), zero)


@triton.jit
def add_sums(sums, row, first, second):
    """Add to both sums of a row."""
    tl.atomic_add(sums + 2 * row, tl.sum(first, axis=0).to(tl.int64, bitcast=True), sem="relaxed")
    tl.atomic_add(sums + 2 * row + 1, tl.sum(second, axis=0).to(tl.int64, bitcast=True), sem="relaxed")


@triton.jit
def add_to_slot(sums, program, first, second):
    """Add to both sums of one of the slots, which programs share evenly."""
    add_sums(sums, program % _SLOTS, first, second)


def new_sums(device: Any) -> torch.Tensor:
    """Slots for both sums of a digest; `sum_slots` adds them up."""
    return torch.zeros((_SLOTS.value, 2), dtype=torch.int64, device=device)


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


class CompactChanges(NamedTuple):
    """Changes of a bitmap: positions in their parts, old bits (if asked for), new bits or steps, and digest sums."""

    positions: torch.Tensor
    new: torch.Tensor
    old: torch.Tensor
    sums: torch.Tensor


@triton.jit
def _tile_start(block, begin, log, ends, B: tl.constexpr):
    """Where a block begins in its tile, and the index of the tile's first change."""
    into = begin & ((tl.full([1], 1, tl.int64) << log) - 1)
    head = block - tl.sum(into // B, axis=0).to(tl.int32)
    return into, tl.load(ends + head - 1, mask=head > 0, other=0)


@triton.jit
def _compact_kernel(
    old,
    new,
    blocks,
    words,
    ends,
    tile_log,
    out,
    B: tl.constexpr,
    BITS: tl.constexpr,
    SIGN: tl.constexpr,
    STEPS: tl.constexpr,
    TILED: tl.constexpr,
    KEEP_OLD: tl.constexpr,
    ROWS: tl.constexpr,
    Q: tl.constexpr,
):
    block = tl.program_id(0)
    part, begin, _ = block_span(block, blocks, B)
    marks = load_marks(words, block, B)
    count = popcount(marks)
    changes = tl.sum(count, axis=0)
    if changes > 0:
        first = tl.load(ends + block) - changes
        list_marks(marks, count, first, begin, out.positions, B)
        old_at = old.base + tl.load(old.at + part)
        new_at = new.base + tl.load(new.at + part)
        key, second_key = load_keys(blocks, part)
        rows = load_rows(blocks, part, ROWS)
        if TILED:
            into, tile_first = _tile_start(block, begin, tl.load(tile_log + part), ends, B)
        first_sum = tl.zeros([Q], tl.uint64)
        second_sum = tl.zeros([Q], tl.uint64)
        i = changes - changes
        while i < changes:
            ok = i + tl.arange(0, Q) < changes
            k = first + i + tl.arange(0, Q)
            position = load_uint32(out.positions + k, ok)
            x = load_bits(old_at + position, ok)
            y = load_new_bits(new_at + position, ok, BITS)
            if TILED:
                in_tile = (into + position - begin) | ((k == tile_first).to(tl.int64) << 31)
                tl.store(out.positions + k, in_tile.to(tl.int32), mask=ok)
            if KEEP_OLD:
                store_word(out.old + k, x, ok, BITS)
            store_word(out.new + k, steps(x, y, SIGN, BITS) if STEPS else y, ok, BITS)
            weyl = weyl_number(key, tensor_position(rows, position, ROWS))
            delta = digest_delta(weyl, second_key, x, y, ok)
            first_sum += delta[0]
            second_sum += delta[1]
            i += Q
        add_to_slot(out.sums, block, first_sum, second_sum)


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
) -> CompactChanges:
    """The changes of a bitmap, of which there are `changes`.

    steps: write steps instead of new bits.
    tile_log: of each part. Positions are then counted from the start of their tile, and bit 31 is set in the first of
        each tile: gaps are made from these.
    ends: the changes up to the end of each block, if they are known.
    """
    ints = INTS[blocks.width]
    out = CompactChanges(
        blocks.empty(changes, torch.int32),
        blocks.empty(changes, ints),
        blocks.empty(changes if keep_old else 0, ints),
        new_sums(blocks.device),
    )
    at_a_time, warps = SHAPES["compact"]
    if blocks.count and changes:
        ends = torch.cumsum(counts, 0, dtype=torch.int64) if ends is None else ends
        _compact_kernel[(blocks.count,)](
            *(old.pointers, new.pointers, blocks.table, words, ends, tile_log, out),
            *(blocks.block, 8 * blocks.width, sign_magnitude, steps, tile_log is not None, keep_old),
            *(blocks.has_rows, at_a_time),
            num_warps=warps,
        )
    return out


@triton.jit
def _digest_kernel(weights, blocks, sums, B: tl.constexpr, STEP: tl.constexpr):
    block = tl.program_id(0)
    part, begin, n = block_span(block, blocks, B)
    a = tl.multiple_of(tl.load(weights.at + part) + begin, STEP)
    key, second_key = load_keys(blocks, part)
    origin = weyl_number(key, tl.load(blocks.start + part) + begin)
    lane = tl.arange(0, 1024)
    first_sum = tl.zeros([1024], tl.uint64)
    second_sum = tl.zeros([1024], tl.uint64)
    for i in range(0, B, 1024):
        j = i + lane
        weyl = origin + j.to(tl.uint64) * _GOLDEN
        if n - i >= 1024:
            z = mix(weyl, second_key, unsigned(tl.load(weights.base + a + j)).to(tl.uint64))
            first_sum += z
            second_sum += turn(z)
        else:
            ok = j < n
            z = mix(weyl, second_key, load_bits(weights.base + a + j, ok))
            first_sum += tl.where(ok, z, z ^ z)
            second_sum += tl.where(ok, turn(z), z ^ z)
    add_to_slot(sums, block, first_sum, second_sum)


def digest(blocks: Blocks, side: Side) -> torch.Tensor:
    """The element sums of the digest (int64, modulo 2^64), without the terms of the tensor table."""
    blocks.require_runs()
    sums = new_sums(blocks.device)
    if blocks.count:
        _digest_kernel[(blocks.count,)](side.pointers, blocks.table, sums, blocks.block, side.step, num_warps=4)
    return sum_slots(sums)


@triton.jit
def cast(x, CAST: tl.constexpr, NAN: tl.constexpr):
    """fp32 patterns as bf16, to the nearest and ties to even; or patterns unchanged."""
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
def _cast_pairs(x, NAN: tl.constexpr):
    """Two fp32 patterns in one number as a pair of bf16."""
    if _INTERPRETED:
        even = cast(x.to(tl.int32), True, NAN).to(tl.int32) & 0xFFFF
        return even | (cast((x >> 32).to(tl.int32), True, NAN).to(tl.int32) << 16)
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
    masters,
    weights,
    blocks,
    words,
    counts,
    B: tl.constexpr,
    MASTER_STEP: tl.constexpr,
    WEIGHT_STEP: tl.constexpr,
    CAST: tl.constexpr,
    NAN: tl.constexpr,
    PAIRED: tl.constexpr,
    W: tl.constexpr,
):
    block = tl.program_id(0)
    part, begin, n = block_span(block, blocks, B)
    a = tl.multiple_of(tl.load(masters.at + part) + begin, MASTER_STEP)
    b = tl.multiple_of(tl.load(weights.at + part) + begin, WEIGHT_STEP)
    count = tl.zeros([W], tl.int32)
    for i in range(0, B, W * 32):
        place = words + block.to(tl.int64) * (B // 32) + i // 32 + tl.arange(0, W)
        marks = tl.load(place).to(tl.uint32, bitcast=True)
        if PAIRED:
            marks |= _write_changed_pairs(masters.base, weights.base, a + i, b + i, n - i, W, CAST, NAN)
        else:
            marks |= _write_changed(masters.base, weights.base, a + i, b + i, n - i, W, CAST, NAN)
        tl.store(place, marks.to(tl.int32, bitcast=True))
        count += popcount(marks)
    tl.store(counts + block, tl.sum(count, axis=0))


@triton.jit
def _write_changed_pairs(master, weight, a, b, n, W: tl.constexpr, CAST: tl.constexpr, NAN: tl.constexpr):
    """`_write_changed` for weights of two bytes, by pairs."""
    k = tl.arange(0, W)[:, None] * 16 + tl.arange(0, 16)[None, :]
    new = read_new_pairs(master, a, n, W, CAST, NAN)
    mask = pair_difference_mask(new, read_pairs(weight, b, n, W, False), n, W)
    # A word without changes is not written, and any other is written whole: memory has less to do.
    changed, _ = tl.broadcast((mask != 0)[:, None], new)
    pairs = weight.to(tl.pointer_type(tl.int32)) + b // 2 + k
    if n >= W * 32:
        tl.store(pairs, new, mask=changed)
    else:
        tl.store(pairs, new, mask=changed & (2 * k + 1 < n))
        last = tl.sum(tl.sum(tl.where(2 * k + 1 == n, new, 0), axis=1), axis=0)
        tl.store(weight + b + n - 1, last.to(tl.int16), mask=(n > 0) & (n % 2 == 1))
    return mask


@triton.jit
def _write_changed(master, weight, a, b, n, W: tl.constexpr, CAST: tl.constexpr, NAN: tl.constexpr):
    """Write W words' elements of the weight that differ from the master's. Returns which did, as words of a bitmap."""
    bit = tl.arange(0, 32)[None, :]
    j = tl.arange(0, W)[:, None] * 32 + bit
    if n >= W * 32:
        new = cast(tl.load(master + a + j), CAST, NAN)
        differs = (new != tl.load(weight + b + j)).to(tl.uint32)
        mask = tl.sum(differs << bit.to(tl.uint32), axis=1).to(tl.uint32)
        changed, _ = tl.broadcast((mask != 0)[:, None], new)
        tl.store(weight + b + j, new, mask=changed)
    else:
        new = cast(tl.load(master + a + j, mask=j < n, other=0), CAST, NAN)
        edge = (new != tl.load(weight + b + j, mask=j < n, other=0)) & (j < n)
        mask = tl.sum(edge.to(tl.uint32) << bit.to(tl.uint32), axis=1).to(tl.uint32)
        tl.store(weight + b + j, new, mask=edge)
    return mask


def nan_of(device: torch.device) -> int:
    """The bf16 pattern that torch casts a NaN to on a device."""
    return 0x7FFF if device.type == "cuda" else 0x7FC0


def mark(blocks: Blocks, masters: Side, weights: Side, words: torch.Tensor, counts: torch.Tensor) -> None:
    """Copy masters to the weights, cast from fp32 to bf16 where they are wider, and mark in a bitmap what changed.

    A NaN becomes the one that torch makes of it on this GPU. `counts` become the marks of each block.
    """
    wide = masters.base.element_size()
    if (wide, blocks.width) != (4, 2) and wide != blocks.width:
        raise ValueError("masters must be fp32 for bf16 weights, or as wide as the weights")
    at_a_time, warps = SHAPES["mark"]
    if blocks.count:
        _mark_kernel[(blocks.count,)](
            *(masters.pointers, weights.pointers, blocks.table, words, counts, blocks.block),
            *(masters.step, weights.step, wide != blocks.width, nan_of(blocks.device)),
            blocks.width == 2 and masters.aligned and weights.aligned,
            min(2 * at_a_time // max(blocks.width, 2), blocks.block // 32),
            num_warps=warps,
        )
