"""Single elements on a GPU, in Triton: reading and writing them by address, swapping located changes, a histogram.

An address here is a number of elements from a tensor that stands for all: see `gpu.Side`.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl

from .gpu import Blocks, Side, unsigned
from .gpu_classes import Found, magnitude

KEYS = 512  # of a histogram
_AT_ONCE = 128  # changes of a tile and class that are swapped together
_CELLS = 1024  # elements that a program reads or writes
_STRETCH = 64  # elements that lie together in a sample
_STRETCHES = 16  # that a program looks at


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
