"""Sums of the digest for each part alone, on a GPU, in Triton: of all its bits, and how they move at a step."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .changes import Blocks, Side, _rounded, _turn, add_sums, block_span, digest_delta, mix, unsigned, weyl_number

_LANES = tl.constexpr(1024)


@triton.jit
def _digests_kernel(bits, at, entry, first, numel, keys, start, sums, B: tl.constexpr):
    block = tl.program_id(0)
    e, begin, n = block_span(block, entry, first, numel, B)
    key, key2 = tl.load(keys + 2 * e), tl.load(keys + 2 * e + 1).to(tl.uint64, bitcast=True)
    a, origin = tl.load(at + e) + begin, tl.load(start + e) + begin
    one = tl.zeros([_LANES], tl.uint64)
    two = tl.zeros([_LANES], tl.uint64)
    for i in range(0, B, _LANES):
        j = i + tl.arange(0, _LANES)
        ok = j < n
        z = mix(weyl_number(key, origin + j), key2, unsigned(tl.load(bits + a + j, mask=ok, other=0)).to(tl.uint64))
        one += tl.where(ok, z, z ^ z)
        two += tl.where(ok, _turn(z), z ^ z)
    add_sums(sums, e, one, two)


def digests(blocks: Blocks, side: Side) -> torch.Tensor:
    """Both element sums of each part (int64, modulo 2^64)."""
    sums = torch.zeros((blocks.sizes.size, 2), dtype=torch.int64, device=blocks.device)
    if blocks.count:
        _digests_kernel[(blocks.count,)](
            *(side.base, side.at, blocks.entry, blocks.first, blocks.numel, blocks.keys, blocks.start, sums),
            blocks.block,
            num_warps=4,
        )
    return sums


@triton.jit
def _digest_deltas_kernel(
    new,
    old,
    new_at,
    old_at,
    entry,
    first,
    numel,
    keys,
    start,
    sums,
    B: tl.constexpr,
    CAST: tl.constexpr,
    NAN: tl.constexpr,
):
    block = tl.program_id(0)
    e, begin, n = block_span(block, entry, first, numel, B)
    key, key2 = tl.load(keys + 2 * e), tl.load(keys + 2 * e + 1).to(tl.uint64, bitcast=True)
    a, b, origin = tl.load(new_at + e) + begin, tl.load(old_at + e) + begin, tl.load(start + e) + begin
    one = tl.zeros([_LANES], tl.uint64)
    two = tl.zeros([_LANES], tl.uint64)
    changes = begin.to(tl.int32) * 0
    for i in range(0, B, _LANES):
        j = i + tl.arange(0, _LANES)
        ok = j < n
        y = _rounded(tl.load(new + a + j, mask=ok, other=0), CAST, NAN)
        x = tl.load(old + b + j, mask=ok, other=0)
        ok = ok & (x != y)
        some = tl.sum(ok.to(tl.int32), axis=0)
        if some > 0:
            was, now = unsigned(x).to(tl.uint64), unsigned(y).to(tl.uint64)
            first_moved, second_moved = digest_delta(weyl_number(key, origin + j), key2, was, now, ok)
            one += first_moved
            two += second_moved
        changes += some
    if changes > 0:
        add_sums(sums, e, one, two)


def digest_deltas(blocks: Blocks, new: Side, old: Side, sums: torch.Tensor) -> None:
    """Add to both sums of each part how they move when old bits become new ones, cast as `mark` casts them."""
    wide = new.base.element_size()
    if blocks.count:
        _digest_deltas_kernel[(blocks.count,)](
            *(new.base, old.base, new.at, old.at, blocks.entry, blocks.first, blocks.numel, blocks.keys, blocks.start),
            *(sums, blocks.block, wide != blocks.width, 0x7FFF if blocks.device.type == "cuda" else 0x7FC0),
            num_warps=4,
        )
