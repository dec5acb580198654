"""Applying a patch in place: check the base, write every change, check the result; all of it or nothing.

    weights ──► digest = base? ──► decode, swap old bits for new, sum up ──► digest = result? ──► done
                     └ result: nothing to do                                      └ no: put the old bits back

Each touched line of memory is fetched once, and the old bits are held until the tracked digest equals the patch's
result. Where they would take more than 256 MiB, or tensors share memory, everything is decoded and summed up before the
first bit is written, and what does not fit is decoded twice. Either way a patch is applied whole or not at all, and an
interrupt (Ctrl-C) comes before the first bit is written or after the last one; only the end of the process can stop it
in between, or memory that runs out while changes are decoded for the second time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from ..codec.profile import Allocator, empty
from ..kernels import cpu
from ..kernels.cpu.arguments import WordKind
from ..parallel import Progress, ordered, uninterrupted
from ..weights.digest import Digest
from ..weights.dtypes import DType
from ..weights.geometry import runs_at
from ..weights.local import LocalWeights
from ..weights.memory import Weights
from ..weights.shards import Shards
from ..wire import Head
from .application import stage_on
from .contents import Contents
from .matching import (
    digest_of,
    matching_weights,
    require_base,
    require_result,
    require_touched_writable,
)
from .overlay import Overlay
from .staging import (
    Staged,
    entry_geometry,
    exchange_bits,
    overlay,
    refuse_conflicts,
    stage_parts,
    write_dense_entries,
)

_LINE = 64  # bytes
KEEP_BYTES = 256 << 20  # of decoded changes, while the result is not known yet


@dataclass(frozen=True)
class Applied:
    """What `Patch.apply` did.

    Attributes:
        digest: The digest of the weights now.
        changed: How many elements were written.
        already: Whether the weights were the result before, so that nothing was written.

    Example:
        >>> weights = {"w": np.zeros(4, np.float32)}
        >>> patch = sparserl.diff(weights, {"w": np.array([0, 0, 1, 0], np.float32)})
        >>> patch.apply(weights).already, patch.apply(weights).already
        (False, True)
    """

    digest: Digest
    changed: int
    already: bool


def apply(
    patch: Contents,
    weights: Weights | Shards | LocalWeights,
    *,
    digest: Digest | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
) -> Applied:
    """Turn the base into the result, in place; see `Patch.apply`."""
    local = matching_weights(patch, weights)
    current = digest_of(patch, local, threads, progress) if digest is None else digest
    if current == patch.result:
        return Applied(patch.result, 0, already=True)
    require_base(patch, current)
    tied = local.tied
    if local.gpu_streams:
        stage_on(patch, local, current, tied, threads).commit(threads)
        return Applied(patch.result, patch.changed, already=False)
    patch.read_heads(threads)
    require_touched_writable(patch, local)
    if tied or _undo_bytes(patch) > KEEP_BYTES:
        _stage_then_write(patch, local, current, tied, threads)
    else:
        _exchange_or_undo(patch, local, current, threads)
    return Applied(patch.result, patch.changed, already=False)


def _undo_bytes(patch: Contents) -> int:
    """What it takes to remember where changes were and what was there."""
    return sum(_sparse_bytes(head) + head.dense_elements * head.dtype.width for head in patch.heads)


def _sparse_bytes(head: Head) -> int:
    """The positions and old bits of the sparse changes of a bucket, each from a new line of memory on."""
    return sum(_whole_lines(head.layout.changes * width) for width in (4, head.dtype.width))


def _whole_lines(nbytes: int) -> int:
    return nbytes + -nbytes % _LINE


class _Arena:
    """Memory to be handed out: one large piece costs less than many, and is there before a bit is written."""

    def __init__(self, memory: npt.NDArray[np.uint8]) -> None:
        self._left = memory

    def take(self, count: int, dtype: Any) -> npt.NDArray[Any]:
        nbytes = count * np.dtype(dtype).itemsize
        if nbytes > self._left.size:
            return empty(count, dtype)
        taken = self._left[:nbytes]
        self._left = self._left[_whole_lines(nbytes) :]
        return taken.view(dtype)


def _exchange_or_undo(patch: Contents, weights: LocalWeights, base: Digest, threads: int | None) -> None:
    """Swap old bits for new ones bucket by bucket, and put them back unless they lead to the result."""
    log: list[tuple[Overlay, Digest]] = []
    ends = [0, *accumulate(_sparse_bytes(head) for head in patch.heads)]
    memory = empty(ends[-1], np.uint8)

    def write(index: int) -> None:
        arena = _Arena(memory[ends[index] : ends[index + 1]])
        for old in exchange(weights, patch, index, arena.take):
            log.append(old)  # noqa: PERF402  # one by one: what was done must be known when the next one fails

    def write_all() -> None:
        try:
            deque(ordered(write, range(len(patch)), threads), maxlen=0)
            require_result(patch, sum((moved for _, moved in log), base))
        except BaseException:
            for old, _ in log:
                old.write(weights)
            raise

    for dtype in {head.dtype for head in patch.heads}:
        _load_undo(dtype)
    uninterrupted(write_all)


@cache
def _load_undo(dtype: DType) -> None:
    """Have the kernel that undoes changes compiled and at hand before there are any."""
    none = np.empty(0, np.int64)
    bits = np.empty(0, dtype.uint)
    cpu.changes.scatter(bits, none, runs_at(none), 0, bits)


def exchange(
    weights: LocalWeights, patch: Contents, index: int, allocate: Allocator = empty
) -> Iterator[tuple[Overlay, Digest]]:
    """Write the new bits of a bucket; give, part by part, the bits before, in new arrays, and how the digest moved."""
    head, _ = patch.open_bucket(index)
    geometry = entry_geometry(weights, head)  # nothing may fail before it is known what was where
    decoded = patch.decode(index, weights, overwrite=True, allocate=allocate)
    for part in decoded.parts():
        if part.positions is not decoded.positions:
            geometry = entry_geometry(weights, part.head)
        new = part.words
        absolute = part.head.profile.absolute
        if part.overwritten:
            old = overlay(geometry, part, part.old)
            moved = None
        else:  # old bits take the place of steps
            old = overlay(geometry, part, allocate(new.size, new.dtype) if absolute else new)
            moved = exchange_bits(old, new, WordKind(absolute, part.head.dtype.sign_magnitude))
        yield write_dense_entries(weights, old, new, moved, part)


def _stage_then_write(
    patch: Contents, weights: LocalWeights, base: Digest, tied: list[list[int]], threads: int | None
) -> None:
    """Decode and sum up everything before the first bit is written; what does not fit is decoded twice."""
    result = base
    room = KEEP_BYTES
    staged: list[Staged] = []  # where names share memory, all of them
    to_write: list[Overlay | tuple[int, bytes]] = []  # decoded changes, or the bytes of a bucket
    for index, data, parts in ordered(lambda i: _stage_bucket(patch, weights, i), range(len(patch)), threads):
        result += sum((part.moved for part in parts), Digest())
        room -= sum(part.new.nbytes for part in parts)
        to_write += [part.new for part in parts] if tied or room >= 0 else [(index, bytes(data))]
        if tied:
            staged += parts
    require_result(patch, result)
    refuse_conflicts(weights, tied, staged)

    def write(part: Overlay | tuple[int, bytes]) -> None:
        if isinstance(part, Overlay):
            part.write(weights)
            return
        for again in stage_parts(weights, patch.decode_bytes(*part, weights)):
            again.new.write(weights)

    uninterrupted(lambda: deque(ordered(write, to_write, threads), maxlen=0))


def _stage_bucket(patch: Contents, weights: LocalWeights, index: int) -> tuple[int, bytes | memoryview, list[Staged]]:
    data = patch.bucket(index)
    return index, data, stage_parts(weights, patch.decode_bytes(index, data, weights))
