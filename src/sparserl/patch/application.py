"""A patch staged on weights: all of it is decoded and checked, and nothing is written before it is committed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ..errors import WrongBase
from ..parallel import ordered, uninterrupted
from ..weights.digest import Digest
from ..weights.local import LocalWeights
from ..weights.memory import Weights
from ..weights.shards import Shards
from .contents import Contents
from .matching import (
    digest_of,
    matching_weights,
    require_base,
    require_result,
    require_touched_writable,
)
from .overlay import Overlay
from .staging import Staged, changes, refuse_conflicts, require_old_bits, stage, stage_parts, swap

if TYPE_CHECKING:
    from .gpu_apply import GpuStaged


@dataclass(frozen=True)
class Application:
    """A patch staged on weights.

    Attributes:
        weights: The weights it will be written to.
        base: Their digest now.
        result: Their digest afterwards.
        parts: The changes, bucket by bucket.
        tied: Whether some tensors share memory: what is written under one name is there under the other.
        changed: How many elements change.
    """

    weights: LocalWeights
    base: Digest
    result: Digest
    parts: tuple[Staged | GpuStaged, ...]
    tied: bool
    changed: int

    def commit(self, threads: int | None = None) -> Callable[[], None]:
        """Write the new bits, in O(changed), and return a function that takes them back.

        The bits that are there must still be those that were staged on: the digest is tracked while they are swapped.
        If it does not come out right, or anything else fails, everything is put back.
        """
        log = _UndoLog(self.weights)
        return write_or_undo(self.weights, lambda: self._write(log, threads), log.undo)

    def changed_positions(self) -> dict[str, list[npt.NDArray[np.int64]]]:
        """Where elements will change, in tensors that are in host memory: their flat positions, entry by entry.

        It reads the bits that are there, and so must be called before the commit.
        """
        positions: dict[str, list[npt.NDArray[np.int64]]] = {}
        for part in self.parts:
            assert isinstance(part, Staged)
            for tensor, entry_positions, _ in changes(self.weights, part):
                positions.setdefault(self.weights.table[tensor].name, []).append(entry_positions)
        return positions

    def _write(self, log: _UndoLog, threads: int | None) -> None:
        """Write everything."""
        staged = [part for part in self.parts if isinstance(part, Staged)]
        on_gpu = [part for part in self.parts if not isinstance(part, Staged)]
        if on_gpu:
            self._write_on_gpu(log, on_gpu)
        if self.tied:
            self._write_tied(log, staged, threads)
        else:
            deque(ordered(lambda part: log.add(*swap(self.weights, part)), staged, threads), maxlen=0)
        self._require_tracked(self.base + log.moved)

    def _write_on_gpu(self, log: _UndoLog, parts: list[GpuStaged]) -> None:
        from .gpu_apply import swap_all

        for part in parts:
            log.add(part, part.moved)
        swap_all(parts)

    def _write_tied(self, log: _UndoLog, parts: list[Staged], threads: int | None) -> None:
        """Look at all bits before any is written: afterwards a tensor has what was written under another name."""
        for part in parts:
            log.add(require_old_bits(self.weights, part), part.moved)
        deque(ordered(lambda part: part.new.write(self.weights), parts, threads), maxlen=0)

    def _require_tracked(self, digest: Digest) -> None:
        if digest != self.result:
            raise WrongBase(
                f"the weights were changed after the patch was staged on them: they lead to {digest}, not to "
                f"{self.result}. They are as they were before the commit"
            )


def write_or_undo(weights: LocalWeights, write: Callable[[], None], undo: Callable[[], None]) -> Callable[[], None]:
    """Write to weights without being interrupted, or put back what was written; returns what takes it back later.

    undo: puts back what has been written so far; once it has, it does nothing.
    """

    def write_all() -> None:
        try:
            write()
        except BaseException:
            undo()
            raise

    weights.follow_current_streams()
    try:
        uninterrupted(write_all)
    except BaseException:
        uninterrupted(undo)  # where an interrupt came while all was written; else there is nothing to undo
        raise
    return lambda: uninterrupted(undo)


class _UndoLog:
    """What was there before a commit wrote over it, and how the digest has moved."""

    def __init__(self, weights: LocalWeights) -> None:
        self._weights = weights
        self._entries: list[tuple[Overlay | GpuStaged, Digest]] = []

    def add(self, old: Overlay | GpuStaged, moved: Digest) -> None:
        self._entries.append((old, moved))

    @property
    def moved(self) -> Digest:
        return sum((moved for _, moved in self._entries), Digest())

    def undo(self) -> None:
        while self._entries:
            self._entries.pop()[0].write(self._weights)


def stage_all(
    patch: Contents,
    weights: Weights | Shards | LocalWeights,
    *,
    digest: Digest | None = None,
    threads: int | None = None,
) -> Application:
    """Decode a patch on the weights it will be applied to, while they are in use, and check where it leads.

    Memory: all decoded changes with their old bits, until the commit.

    Args:
        patch: The patch.
        weights: The weights, whose digest must be the patch's base.
        digest: Their digest, if the caller vouches for it; else they are read once.
        threads: How many threads to use; None for as many as there are cores.
    """
    local = matching_weights(patch, weights)
    current = digest_of(patch, local, threads) if digest is None else digest
    require_base(patch, current)
    local.require_writable()
    return stage_on(patch, local, current, local.tied, threads)


def stage_on(
    patch: Contents, weights: LocalWeights, base: Digest, tied: list[list[int]], threads: int | None
) -> Application:
    """Stage all buckets on weights that are known to be the base.

    Buckets that can be are decoded on the GPU that the weights are on, several together, behind the others.
    """
    on_gpu: list[GpuStaged] = []
    if weights.has_kernels:
        staged, on_gpu = _stage_with_gpu(patch, weights, tied, threads)
    else:
        staged_parts = ordered(lambda i: stage_parts(weights, patch.decode(i, weights)), patch.arrivals(), threads)
        staged = [part for parts in staged_parts for part in parts]
    patch.heads  # noqa: B018  # reading them checks that no entries overlap, which nothing on a GPU would notice
    parts: tuple[Staged | GpuStaged, ...] = (*on_gpu, *staged)
    require_result(patch, sum((part.moved for part in parts), base))
    refuse_conflicts(weights, tied, staged)
    return Application(weights, patch.base, patch.result, parts, bool(tied), patch.changed)


def _stage_with_gpu(
    patch: Contents, weights: LocalWeights, tied: list[list[int]], threads: int | None
) -> tuple[list[Staged], list[GpuStaged]]:
    """All buckets, staged by the CPU or on a GPU; those with tensors that share memory are staged by the CPU."""
    from . import gpu_apply

    shared = {tensor for group in tied for tensor in group}
    groups = gpu_apply.Groups(patch)
    on_gpu: list[GpuStaged] = []

    def for_cpu() -> Iterator[int]:
        for index, head, reader in patch.open_buckets(threads):
            bucket = None
            if not shared.intersection(head.entries.tensor.tolist()):
                bucket = gpu_apply.gpu_bucket(weights, index, head, reader)
            if bucket is None:
                yield index
            else:
                on_gpu.extend(gpu_apply.stage_group(patch, weights, group) for group in groups.add(bucket))
        if not on_gpu and groups.share < 1:
            yield from groups.indices
        else:
            on_gpu.extend(gpu_apply.stage_group(patch, weights, group) for group in groups.rest)

    staged = [*ordered(lambda i: stage(weights, patch.decode(i, weights)), for_cpu(), threads)]
    require_touched_writable(patch, weights)  # while the GPUs are at work
    gpu_apply.require_decoded(patch, weights, on_gpu)
    return staged + [stage(weights, decoded) for part in on_gpu for decoded in part.dense], on_gpu
