"""Runs every kernel of a sync once, on a few elements: no sync waits for Triton's compiler afterwards.

A kernel is compiled for a width of elements, for parts that begin at 16-byte boundaries or elsewhere, and for a number
of classes; sizes do not matter.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import torch
import triton

from . import cells, changes, classes, planes, streams, sums
from .ints import INTS

MOST_THRESHOLDS = 4  # between the classes that publishers choose
_PARTS = 2
_BLOCKS = 3  # of a part
_EVERY = 29  # elements of which one changes: numbers enough for the entropy coder to be worth while


def warm_up(
    width: int,
    device: torch.device,
    *,
    aligned: bool,
    is_cast: bool = False,
    sign_magnitude: bool,
    signed: bool,
    has_rows: bool = False,
    block: int = changes.BLOCK,
) -> None:
    """Compile the kernels for elements of a width, or load them if they were compiled before.

    Args:
        width: The bytes of an element.
        device: The GPU that the weights are on.
        aligned: Whether the parts of the weights begin at 16-byte boundaries.
        is_cast: Whether new weights are fp32, and are compared as bf16.
        sign_magnitude: Whether the elements are floating-point numbers.
        signed: Whether they are signed integers.
        has_rows: Whether some parts are rows with gaps between them in their tensors.
        block: The elements of a program.
    """
    numel = _BLOCKS * block
    blocks = changes.Blocks(width, [numel] * _PARTS, device, block=block)
    bits = torch.arange(_PARTS * (numel + 1), device=device).to(INTS[width]).view(_PARTS, numel + 1)
    first = slice(None, numel) if aligned else slice(1, None)
    old = blocks.side([row[first].clone() if aligned else row[first] for row in bits])
    other = bits.clone()
    other[:, ::_EVERY] ^= 1
    maker = blocks
    if is_cast:
        maker = changes.Blocks(4, [numel] * _PARTS, device, block=block)
        other = other.to(torch.int32) << 16
    new = maker.side([row[first].clone() if aligned else row[first] for row in other])
    with_rows = [blocks]
    if has_rows:
        rows = np.full(_PARTS, block), np.ones(_PARTS, np.int64)
        with_rows.append(changes.Blocks(width, [numel] * _PARTS, device, block=block, rows=rows))
    order = {"sign_magnitude": sign_magnitude, "signed": signed}
    for thresholds in range(MOST_THRESHOLDS + 1):
        limits = np.tile(np.arange(1, thresholds + 1, dtype=np.uint64), (_PARTS, 1)) if thresholds else None
        tile_log = block.bit_length()  # a tile has two blocks, and a part two tiles
        _code([streams.StreamPlan.of(some, [0] * _PARTS, tile_log, limits, **order) for some in with_rows], old, new)
    _compare(blocks, old, new, 0 if sign_magnitude else 1 if signed else 2)
    for some in with_rows:
        _locate(some, old, new)
    _join(blocks, old)


@contextlib.contextmanager
def unwatched() -> Iterator[None]:
    """Compile or load kernels without telling whoever watches Triton for them, such as vLLM once it serves requests."""
    runtime = getattr(getattr(triton, "knobs", None), "runtime", None)
    hook = getattr(runtime, "jit_post_compile_hook", None)
    if runtime is None or hook is None:
        yield
        return
    runtime.jit_post_compile_hook = None
    try:
        yield
    finally:
        if runtime.jit_post_compile_hook is None:  # nobody else has set one meanwhile
            runtime.jit_post_compile_hook = hook


def _code(plans: list[streams.StreamPlan], old: changes.Side, new: changes.Side) -> None:
    """Encode changes by the first plan, decode them by each, write them, and undo that."""
    plan = plans[0]
    encoded = streams.encode(plan, old, new, changes.diff(plan.blocks, old, new))
    bad = torch.zeros(1, dtype=torch.int32, device=plan.blocks.device)
    received = streams.ReceivedChunks(encoded.data, encoded.directory)
    for other in plans[1:]:
        streams.decode(other, old, encoded.changes, bad, lambda: received)
    located = streams.decode(plan, old, encoded.changes, bad, lambda: received)
    cells.swap(old, located, bad)
    classes.write(old, located, located.old, bad)


def _compare(blocks: changes.Blocks, old: changes.Side, new: changes.Side, kind: int) -> None:
    """What is done around the coders: digests, estimates, and changes for the CPU's coders."""
    changes.digest(blocks, old)
    sums.digests(blocks, old)
    bitmap, counts = changes.diff(blocks, old, new)
    which = torch.arange(4, device=blocks.device)
    cells.sample(blocks, old, new, bitmap, counts, which)
    one = np.ones(1, np.int64)
    cells.key_histogram(blocks, old, kind, np.zeros(_PARTS, np.int64), one, one)
    offsets = torch.arange(4, device=blocks.device)
    some = torch.zeros(4, dtype=INTS[blocks.width], device=blocks.device)
    cells.scatter(some, offsets, cells.gather(some, offsets))


def _locate(blocks: changes.Blocks, old: changes.Side, new: changes.Side) -> None:
    """What is done with a difference that stays on the GPU, which is undone."""
    bitmap, counts = changes.diff(blocks, old, new)
    per_part = streams.part_changes(blocks, counts).cpu().numpy()
    compacted = changes.compact(blocks, old, new, bitmap, counts, int(per_part.sum()), keep_old=True)
    bad = torch.zeros(1, dtype=torch.int32, device=blocks.device)
    located = cells.locate(blocks, old, per_part, compacted.positions, compacted.new, bad)
    cells.swap(old, located, bad)
    classes.write(old, located, located.old, bad)


def _join(blocks: changes.Blocks, target: changes.Side) -> None:
    """What is done for anchors: elements from planes."""
    data = torch.zeros(_BLOCKS * blocks.block, dtype=torch.uint8, device=blocks.device)
    bad = torch.zeros(1, dtype=torch.int32, device=blocks.device)
    planes.join(blocks, target, torch.zeros((_PARTS, blocks.width), dtype=torch.int64, device=blocks.device), data, bad)
