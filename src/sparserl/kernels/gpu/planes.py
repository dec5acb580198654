"""Elements from byte planes on a GPU, in Triton: what the dense entries of a bucket are coded as.

    coded chunks ──► rans.decode: planes ──► join: elements, written where they belong

A plane has one byte of every element. Planes that were not coded are read where they arrived.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .changes import Blocks, Side, block_span, store_word

_LANES = tl.constexpr(1024)


@triton.jit
def _join_kernel(target, planes, data, blocks, bad, B: tl.constexpr, BYTES: tl.constexpr):
    block = tl.program_id(0)
    part, begin, n = block_span(block, blocks, B)
    if tl.load(bad) == 0:
        to = tl.load(target.at + part) + begin
        row = planes + part.to(tl.int64) * BYTES
        for i in range(0, B, _LANES):
            j = i + tl.arange(0, _LANES)
            ok = j < n
            bits = tl.zeros([_LANES], tl.uint64)
            for plane in tl.static_range(BYTES):
                byte = tl.load(data + tl.load(row + plane) + begin + j, mask=ok, other=0)
                bits |= byte.to(tl.uint64) << (8 * plane)
            store_word(target.base + to + j, bits, ok, 8 * BYTES)


def join(blocks: Blocks, target: Side, planes: torch.Tensor, data: torch.Tensor, bad: torch.Tensor) -> None:
    """Write all elements of the parts of `target`, unless something was `bad`.

    planes: parts × bytes of an element: where in `data` each plane of a part begins, the lowest byte first.
    """
    if blocks.count:
        _join_kernel[(blocks.count,)](
            *(target.pointers, planes, data, blocks.table, bad, blocks.block, blocks.width), num_warps=4
        )
