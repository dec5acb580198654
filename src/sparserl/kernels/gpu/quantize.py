"""Quantized blocks on a GPU, in Triton: one read of the weights measures, quantizes and compares them.

    weights ──► largest magnitude of a block ──► its scale ──► codes ──► their difference from those before, and a count

`sources/block_codes.py` specifies every step with operations of torch; the bits are the same. Rounding is done on
integers, since GPUs before Hopper do not have the formats. Blocks of one row whose columns are a power of two are taken
as runs of memory, many by each program. A program takes one of any other blocks; of one that is larger than a tile, the
weights are read twice, the second time out of the cache. Where a scale depends on a whole matrix (one scale for all, or
global scales), no program has seen all of it: `run_magnitudes` reads the weights first.

Codes are compared in the pass that writes them: the memory of the new ones still has the old.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

_FP8 = tl.constexpr(0)
_INT8 = tl.constexpr(1)
_FP4 = tl.constexpr(2)
_POWERS = tl.constexpr(1)
_E4M3 = tl.constexpr(2)
ELEMENTS = {"float8_e4m3fn": 0, "int8": 1, "float4_e2m1": 2}
SCALES = {"float32": 0, "float8_e8m0fnu": 1, "float8_e4m3fn": 2}
_OFFSETS = {"float8_e4m3fn": 8, "float4_e2m1": 2}  # the exponent of the format's largest number
_TILE = 16384  # elements that a program holds at a time
_RUN = 4096  # elements of a program that takes runs
_LARGEST_RUN = 1024  # columns of the widest blocks that are taken as runs


class Format(NamedTuple):
    """The formats of elements and of scales, and what a magnitude is divided by to get a scale."""

    elements: str
    scales: str
    limit: float


@triton.jit
def _largest_of(x, ok):
    """Magnitudes as float32, with infinity for NaN."""
    a = tl.abs(x.to(tl.float32))
    return tl.where(ok, tl.where(a != a, float("inf"), a), 0.0)


@triton.jit
def _e4m3(y):
    """Numbers of at most 448 as bits of float8_e4m3fn."""
    bits = y.to(tl.int32, bitcast=True)
    m = bits & 0x7FFFFFFF
    subnormal = (m.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - (141 << 23)
    normal = (m + ((m >> 20) & 1) + 0x7FFFF - (120 << 23)) >> 20
    return tl.where(m < (121 << 23), subnormal, normal) | ((bits >> 24) & 0x80)


@triton.jit
def _e4m3_value(code):
    """The numbers of bits of float8_e4m3fn without sign."""
    normal = (((code >> 3) + 120) << 23) | ((code & 7) << 20)
    return tl.where(code < 8, code.to(tl.float32) * 0.001953125, normal.to(tl.float32, bitcast=True))


@triton.jit
def _scale(largest, global_scale, LIMIT: tl.constexpr, SCALE: tl.constexpr, OFFSET: tl.constexpr):
    """The stored bits of scales, what elements are divided by, and whether the block has a NaN or an infinity."""
    broken = largest == float("inf")
    if SCALE == _POWERS:
        exponent = ((largest.to(tl.int32, bitcast=True) + (1 << 21)) >> 23) - OFFSET
        exponent = tl.minimum(tl.maximum(exponent, 0), 254)
        divisor = tl.where(exponent > 0, exponent << 23, 1 << 22).to(tl.float32, bitcast=True)
        stored = tl.where(broken, 255, exponent)
    else:
        divisor = tl.div_rn(largest, tl.zeros_like(largest) + LIMIT)
        if SCALE == _E4M3:
            code = _e4m3(tl.minimum(global_scale * divisor, 448.0))
            code = tl.where(code == 0, 0x20, code)
            divisor = tl.div_rn(_e4m3_value(code), tl.zeros_like(largest) + global_scale)
            stored = tl.where(broken, 0x7F, code)
        else:
            divisor = tl.where(divisor < 1.1754943508222875e-38, 1.0, divisor)
            stored = tl.where(broken, 0x7FC00000, divisor.to(tl.int32, bitcast=True))
    return stored, tl.where(broken, 1.0, divisor), broken


@triton.jit
def _code(x, divisor, broken, ELEMENT: tl.constexpr):
    """The bits of quantized elements, as int32; of float4_e2m1, four bits."""
    y = tl.div_rn(x.to(tl.float32), divisor)
    y = tl.where(broken, 0.0, y)
    if ELEMENT == _FP8:
        return _e4m3(y)
    elif ELEMENT == _INT8:
        y = tl.minimum(tl.maximum(y, -128.0), 127.0)
        return (y + 12582912.0).to(tl.int32, bitcast=True) & 0xFF  # 1.5 · 2^23 leaves no room for a fraction
    else:
        a = tl.abs(y)
        code = (a > 0.25).to(tl.int32) + (a >= 0.75).to(tl.int32) + (a > 1.25).to(tl.int32)
        code += (a >= 1.75).to(tl.int32) + (a > 2.5).to(tl.int32) + (a >= 3.5).to(tl.int32) + (a > 5.0).to(tl.int32)
        return code | tl.where(y < 0.0, 8, 0)


@triton.jit
def _write(out, base, offset, new, ok):
    """Write codes or scales.

    They are at `base`, of 64 bits, plus `offset`, of 32: many numbers of 64 bits would take too many registers.
    """
    tl.store(out + base + offset, new.to(out.dtype.element_ty), mask=ok)


@triton.jit
def _write_codes(codes, difference, base, offset, new, ok, COMPARED: tl.constexpr):
    """Write codes; if they are COMPARED, also the bits in which they differ from those before. How many differ."""
    if COMPARED:
        old = tl.load(codes + base + offset, mask=ok, other=0)
        changed = tl.where(ok, old ^ new.to(codes.dtype.element_ty), 0)
        tl.debug_barrier()  # threads may hold copies of an element: all of them must have read it before one writes
        tl.store(difference + base + offset, changed, mask=ok)
        count = tl.sum(tl.sum((changed != 0).to(tl.int32), axis=1), axis=0)
    else:
        count = 0
    _write(codes, base, offset, new, ok)
    return count


@triton.jit
def _runs_kernel(
    weights,
    codes,
    difference,
    counts,
    scales,
    largest,
    global_scale,
    numel,
    SIZE: tl.constexpr,
    COUNT: tl.constexpr,
    SHARED: tl.constexpr,
    MEASURED: tl.constexpr,
    ELEMENT: tl.constexpr,
    SCALE: tl.constexpr,
    LIMIT: tl.constexpr,
    OFFSET: tl.constexpr,
    COMPARED: tl.constexpr,
):
    """COUNT runs of SIZE elements, with a scale each. SHARED: all of them have the same scale."""
    first = tl.program_id(0).to(tl.int64) * COUNT
    run = tl.arange(0, COUNT)
    left = tl.minimum(numel - first * SIZE, COUNT * SIZE).to(tl.int32)
    index = run[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    ok = index < left
    x = tl.load(weights + first * SIZE + index, mask=ok, other=0.0)
    exists = run * SIZE < left
    first_scale = first * 0 if SHARED else first
    number = run * 0 if SHARED else run
    if MEASURED:  # only one of them is compiled
        most = tl.load(largest + first_scale + number, mask=exists, other=0.0)
    else:
        most = tl.max(_largest_of(x, ok), axis=1)
    total = tl.load(global_scale) if SCALE == _E4M3 else 1.0
    stored, divisor, broken = _scale(most, total, LIMIT, SCALE, OFFSET)
    if SHARED:
        exists = first + run == 0
    _write(scales, first_scale, number, stored, exists)
    code = _code(x, divisor[:, None], broken[:, None], ELEMENT)
    if ELEMENT == _FP4:
        low, high = tl.split(tl.reshape(code, [COUNT, SIZE // 2, 2]))
        pair = run[:, None] * (SIZE // 2) + tl.arange(0, SIZE // 2)[None, :]
        packed = low | (high << 4)
        count = _write_codes(codes, difference, first * (SIZE // 2), pair, packed, pair * 2 < left, COMPARED)
    else:
        count = _write_codes(codes, difference, first * SIZE, index, code, ok, COMPARED)
    if COMPARED:
        tl.store(counts + tl.program_id(0), count)


@triton.jit
def _run_magnitudes_kernel(weights, largest, numel, SIZE: tl.constexpr, COUNT: tl.constexpr):
    """The largest magnitude of each of COUNT runs of SIZE elements."""
    run = tl.program_id(0).to(tl.int64) * COUNT + tl.arange(0, COUNT)
    index = run[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    ok = index < numel
    x = tl.load(weights + index, mask=ok, other=0.0)
    tl.store(largest + run, tl.max(_largest_of(x, ok), axis=1), mask=run * SIZE < numel)


@triton.jit
def _blocks_kernel(
    weights,
    codes,
    difference,
    counts,
    scales,
    rows,
    columns,
    height,
    width,
    grid_rows,
    grid_columns,
    TALL: tl.constexpr,
    WIDE: tl.constexpr,
    DOWN: tl.constexpr,
    ACROSS: tl.constexpr,
    ELEMENT: tl.constexpr,
    LIMIT: tl.constexpr,
    COMPARED: tl.constexpr,
):
    """One block with a float32 scale: DOWN times ACROSS tiles of TALL rows and WIDE columns."""
    number = tl.program_id(0).to(tl.int64)
    row = (number // grid_columns) % grid_rows * height
    column = number % grid_columns * width
    origin = number // grid_columns // grid_rows * rows * columns
    height = tl.minimum(height, rows - row).to(tl.int32)
    width = tl.minimum(width, columns - column).to(tl.int32)
    down = tl.arange(0, TALL)[:, None]
    across = tl.arange(0, WIDE)[None, :]
    origin += row * columns + column
    index = down * columns + across
    if DOWN * ACROSS == 1:
        ok = (down < height) & (across < width)
        x = tl.load(weights + origin + index, mask=ok, other=0.0)
        most = tl.max(tl.max(_largest_of(x, ok), axis=1), axis=0)
    else:
        most = tl.zeros([TALL, WIDE], tl.float32)
        for i in range(0, DOWN * TALL, TALL):
            for j in range(0, ACROSS * WIDE, WIDE):
                ok = (down < height - i) & (across < width - j)
                base = origin + (tl.zeros_like(origin) + i) * columns + j
                x = tl.load(weights + base + index, mask=ok, other=0.0)
                most = tl.maximum(most, _largest_of(x, ok))
        most = tl.max(tl.max(most, axis=1), axis=0)
    stored, divisor, broken = _scale(tl.zeros([1], tl.float32) + most, 1.0, LIMIT, 0, 0)
    place = tl.arange(0, 1)
    _write(scales, number, place, stored, place == 0)
    if DOWN * ACROSS == 1:
        code = _code(x, divisor[:, None], broken[:, None], ELEMENT)
        count = _write_codes(codes, difference, origin, index, code, ok, COMPARED)
    else:
        count = tl.program_id(0) * 0
        for i in range(0, DOWN * TALL, TALL):
            for j in range(0, ACROSS * WIDE, WIDE):
                ok = (down < height - i) & (across < width - j)
                base = origin + (tl.zeros_like(origin) + i) * columns + j
                x = tl.load(weights + base + index, mask=ok, other=0.0)
                code = _code(x, divisor[:, None], broken[:, None], ELEMENT)
                count += _write_codes(codes, difference, base, index, code, ok, COMPARED)
    if COMPARED:
        tl.store(counts + number, count)


class _Compared:
    """What a kernel needs to compare codes, if that is wanted."""

    def __init__(self, codes: torch.Tensor, difference: torch.Tensor | None, programs: int) -> None:
        self.is_wanted = difference is not None
        self.counts = codes.new_empty(programs, dtype=torch.int32) if self.is_wanted else None
        self.tensors = (codes if difference is None else difference, codes if self.counts is None else self.counts)


def run_magnitudes(weights: torch.Tensor, size: int) -> torch.Tensor:
    """The largest magnitude of each run of `size` elements of a contiguous tensor; infinity for NaN."""
    numel = weights.numel()
    largest = torch.empty(-(-numel // size), dtype=torch.float32, device=weights.device)
    count = max(1, _RUN // size)
    _run_magnitudes_kernel[(-(-largest.numel() // count),)](weights, largest, numel, size, count, num_warps=4)
    return largest


def quantize(
    weights: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    kind: Format,
    block: tuple[int, int],
    largest: torch.Tensor | None = None,
    global_scale: torch.Tensor | None = None,
    difference: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """Quantize a contiguous matrix, or a stack of them, that consists of whole blocks.

    Args:
        weights: the matrix.
        codes: what becomes the quantized elements, as integers.
        scales: what becomes the scales of the blocks, as integers.
        kind: the formats of both.
        block: the rows and columns of a block.
        largest: the largest magnitudes of the blocks, which must be given if there is only one block.
        global_scale: a scale for the scales, if the format has one.
        difference: what becomes the bits in which codes differ from those that were there before, as integers.

    Returns:
        How many codes differ, by the programs that wrote them; None without `difference`.
    """
    options = (ELEMENTS[kind.elements], SCALES[kind.scales], kind.limit)
    rows, columns = weights.shape[-2:]
    height, width = block
    is_one = largest is not None and largest.numel() == 1
    if is_one or (height == 1 and is_run(width) and columns % width == 0):
        size = 64 if is_one else width
        count = _RUN // size
        programs = -(-weights.numel() // _RUN)
        compared = _Compared(codes, difference, programs)
        _runs_kernel[(programs,)](
            *(weights, codes, *compared.tensors, scales, weights if largest is None else largest),
            *(weights if global_scale is None else global_scale, weights.numel(), size, count),
            *(is_one, largest is not None, *options, _OFFSETS.get(kind.elements, 0), compared.is_wanted),
            num_warps=4,
        )
        return compared.counts
    grid = (-(-rows // height), -(-columns // width))
    matrices = weights.numel() // (rows * columns)
    tall = min(triton.next_power_of_2(height), _TILE // min(triton.next_power_of_2(width), _TILE))
    wide = min(triton.next_power_of_2(width), _TILE // tall)
    tiles = (-(-height // tall), -(-width // wide))
    compared = _Compared(codes, difference, matrices * grid[0] * grid[1])
    _blocks_kernel[(matrices * grid[0] * grid[1],)](
        *(weights, codes, *compared.tensors, scales, rows, columns, height, width, *grid, tall, wide, *tiles),
        *(options[0], kind.limit, compared.is_wanted),
        num_warps=8 if tall * wide > 4096 else 4,
    )
    return compared.counts


def is_run(width: int) -> bool:
    """Whether blocks of one row and so many columns are taken as runs."""
    return width <= _LARGEST_RUN and width & (width - 1) == 0
