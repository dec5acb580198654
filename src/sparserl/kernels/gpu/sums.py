"""Digest sums of each part by itself, on a GPU, in Triton: of all its bits, and how they change."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from .changes import (
    Blocks,
    Side,
    add_sums,
    block_span,
    cast,
    digest_delta,
    load_bits,
    load_keys,
    mix,
    nan_of,
    turn,
    unsigned,
    weyl_number,
)

_LANES = tl.constexpr(1024)
_MOST_BLOCK = 1 << 13


@triton.jit
def _digests_kernel(weights, blocks, sums, B: tl.constexpr):
    block = tl.program_id(0)
    part, begin, n = block_span(block, blocks, B)
    key, second_key = load_keys(blocks, part)
    a = tl.load(weights.at + part) + begin
    origin = tl.load(blocks.start + part) + begin
    first_sum = tl.zeros([_LANES], tl.uint64)
    second_sum = tl.zeros([_LANES], tl.uint64)
    for i in range(0, B, _LANES):
        j = i + tl.arange(0, _LANES)
        ok = j < n
        z = mix(weyl_number(key, origin + j), second_key, load_bits(weights.base + a + j, ok))
        first_sum += tl.where(ok, z, z ^ z)
        second_sum += tl.where(ok, turn(z), z ^ z)
    add_sums(sums, part, first_sum, second_sum)


def digests(blocks: Blocks, side: Side) -> torch.Tensor:
    """Both element sums of each part (int64, modulo 2^64)."""
    blocks.require_runs()
    sums = torch.zeros((blocks.sizes.size, 2), dtype=torch.int64, device=blocks.device)
    if blocks.count:
        _digests_kernel[(blocks.count,)](side.pointers, blocks.table, sums, blocks.block, num_warps=4)
    return sums


class Grids(NamedTuple):
    """Parts whose elements are not next to each other in memory or in their tensors: rows of columns. All in elements.

    columns: elements of a row. inverse: 2^28 divided by them, rounded up; 0 where a row has as many as a block.
    The others say how far apart rows and columns are, in memory and in their tensors.
    """

    columns: torch.Tensor
    inverse: torch.Tensor
    row_step: torch.Tensor
    column_step: torch.Tensor
    tensor_row_step: torch.Tensor
    tensor_column_step: torch.Tensor


@triton.jit
def _grid_digests_kernel(weights, blocks, grids, sums, B: tl.constexpr):
    block = tl.program_id(0)
    part, begin, n = block_span(block, blocks, B)
    key, second_key = load_keys(blocks, part)
    columns = tl.load(grids.columns + part)
    inverse = tl.load(grids.inverse + part)
    row_step = tl.load(grids.row_step + part)
    column_step = tl.load(grids.column_step + part)
    tensor_row_step = tl.load(grids.tensor_row_step + part)
    tensor_column_step = tl.load(grids.tensor_column_step + part)
    first_row = begin // columns
    first_column = begin - first_row * columns
    a = tl.load(weights.at + part) + first_row * row_step
    origin = tl.load(blocks.start + part) + first_row * tensor_row_step
    first_sum = tl.zeros([_LANES], tl.uint64)
    second_sum = tl.zeros([_LANES], tl.uint64)
    for i in range(0, B, _LANES):
        j = i + tl.arange(0, _LANES)
        ok = j < n
        column = first_column + j
        # A block has the end of at most one row that is as long as a block. Where rows are shorter, less than 2^14 is
        # divided by less than 2^13, so that the product is right.
        row = tl.where(columns < B, (column * inverse) >> 28, (column >= columns).to(tl.int64))
        column -= row * columns
        bits = load_bits(weights.base + a + row * row_step + column * column_step, ok)
        position = origin + row * tensor_row_step + column * tensor_column_step
        z = mix(weyl_number(key, position), second_key, bits)
        first_sum += tl.where(ok, z, z ^ z)
        second_sum += tl.where(ok, turn(z), z ^ z)
    add_sums(sums, part, first_sum, second_sum)


def grid_digests(
    blocks: Blocks, side: Side, columns: np.ndarray[Any, Any], steps: np.ndarray[Any, Any]
) -> torch.Tensor:
    """Both element sums of each part (int64, modulo 2^64), of parts that are grids.

    columns: elements of a row of each part; a part is a whole number of rows.
    steps: rows of numbers: see `Grids`, from `row_step` on.
    """
    if blocks.block > _MOST_BLOCK:
        raise ValueError(f"blocks of grids have at most {_MOST_BLOCK} elements")
    sums = torch.zeros((blocks.sizes.size, 2), dtype=torch.int64, device=blocks.device)
    if blocks.count:
        inverse = np.where(columns < blocks.block, -(-(1 << 28) // columns), 0)
        grids = Grids(*blocks.upload_columns(columns, inverse, *steps))
        _grid_digests_kernel[(blocks.count,)](side.pointers, blocks.table, grids, sums, blocks.block, num_warps=4)
    return sums


@triton.jit
def _digest_deltas_kernel(new, old, blocks, sums, B: tl.constexpr, CAST: tl.constexpr, NAN: tl.constexpr):
    block = tl.program_id(0)
    part, begin, n = block_span(block, blocks, B)
    key, second_key = load_keys(blocks, part)
    a = tl.load(new.at + part) + begin
    b = tl.load(old.at + part) + begin
    origin = tl.load(blocks.start + part) + begin
    first_sum = tl.zeros([_LANES], tl.uint64)
    second_sum = tl.zeros([_LANES], tl.uint64)
    changes = begin.to(tl.int32) * 0
    for i in range(0, B, _LANES):
        j = i + tl.arange(0, _LANES)
        ok = j < n
        y = cast(tl.load(new.base + a + j, mask=ok, other=0), CAST, NAN)
        x = tl.load(old.base + b + j, mask=ok, other=0)
        ok = ok & (x != y)
        count = tl.sum(ok.to(tl.int32), axis=0)
        if count > 0:
            before = unsigned(x).to(tl.uint64)
            after = unsigned(y).to(tl.uint64)
            delta = digest_delta(weyl_number(key, origin + j), second_key, before, after, ok)
            first_sum += delta[0]
            second_sum += delta[1]
        changes += count
    if changes > 0:
        add_sums(sums, part, first_sum, second_sum)


def digest_deltas(blocks: Blocks, new: Side, old: Side, sums: torch.Tensor) -> None:
    """Add to both sums of each part how they change when old bits become new ones, which are cast as in `mark`."""
    blocks.require_runs()
    wide = new.base.element_size()
    if blocks.count:
        _digest_deltas_kernel[(blocks.count,)](
            *(new.pointers, old.pointers, blocks.table, sums, blocks.block),
            *(wide != blocks.width, nan_of(blocks.device)),
            num_warps=4,
        )
