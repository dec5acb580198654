"""A patch of all weights staged on the parts of one rank: on several sets of parts, each with digests of its own.

    buckets ──► all entries in one set, and on a GPU ──► decoded and located there
        └─────► any other ──► decoded on the CPU, cut along the parts, staged

A publisher that knows the parts of all ranks cuts patches so that most buckets go the first way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ..errors import TensorMismatch
from ..parallel import ordered
from ..weights.digest import Digest
from ..weights.local import LocalWeights
from ..wire import Head
from .application import Application
from .contents import Contents
from .slicing import PatchSlicer
from .staging import Staged, refuse_conflicts, stage

if TYPE_CHECKING:
    from .gpu_apply import GpuBucket, GpuStaged


def stage_slices(
    patch: Contents,
    base: LocalWeights,
    sets: Sequence[LocalWeights],
    threads: int | None = None,
    *,
    only_touched: bool = False,
) -> list[Application]:
    """Stage what a patch changes in the parts of one rank. Nothing is written; digests count from zero.

    Args:
        patch: The patch, of all weights.
        base: The parts, which must have all old bits that it takes to decode the patch.
        sets: The same parts, in sets.
        threads: How many threads decode; None for as many as there are cores.
        only_touched: Whether buckets that change nothing in the parts are not even decoded.

    Returns:
        The changes of each set, ready to be written.
    """
    slices = _Slices(patch, base, sets)
    slices.stage(threads, only_touched=only_touched)
    return slices.applications()


class _Slices:
    """The changes of a patch, by set of parts."""

    def __init__(self, patch: Contents, base: LocalWeights, sets: Sequence[LocalWeights]) -> None:
        self._patch = patch
        self._base = base
        self._sets = sets
        self._slicers = [*map(PatchSlicer, sets)]
        self._tied = [weights.tied for weights in sets]
        self._shared = [{tensor for group in tied for tensor in group} for tied in self._tied]
        self._set_of = {place: number for number, weights in enumerate(sets) for place in weights.places}
        self._staged: list[list[Staged]] = [[] for _ in sets]
        self._on_gpu: list[list[GpuStaged]] = [[] for _ in sets]

    def stage(self, threads: int | None, *, only_touched: bool) -> None:
        """Decode all buckets."""
        indices = self._patch.arrivals()
        if self._base.has_kernels:
            indices = self._for_cpu(threads, only_touched=only_touched)
        for every in ordered(self._stage_bucket, indices, threads):
            for staged, part in zip(self._staged, every, strict=True):
                staged.append(part)
        self._patch.heads  # noqa: B018  # reading them checks that no entries overlap, which parts on a GPU would not notice
        self._finish_on_gpu()

    def applications(self) -> list[Application]:
        """What was staged on each set."""
        return [self._application(number) for number in range(len(self._sets))]

    def _application(self, number: int) -> Application:
        weights = self._sets[number]
        tied = self._tied[number]
        staged = self._staged[number]
        on_gpu = self._on_gpu[number]
        refuse_conflicts(weights, tied, staged)
        parts: tuple[Staged | GpuStaged, ...] = (*on_gpu, *staged)
        moved = sum((part.moved for part in parts), Digest())
        changed = sum(int(part.decoded.head.entries.count.sum()) for part in staged)
        changed += sum(part.changes.addresses.numel() for part in on_gpu)
        return Application(weights, Digest(), moved, parts, bool(tied), changed)

    def _stage_bucket(self, index: int) -> list[Staged]:
        """Decode a bucket on the CPU, and stage what each set has of it."""
        bucket = self._patch.decode(index, self._base).in_order()
        return [stage(weights, slicer.slice(bucket)) for weights, slicer in zip(self._sets, self._slicers, strict=True)]

    def _for_cpu(self, threads: int | None, *, only_touched: bool) -> Iterator[int]:
        """Launch what GPUs can decode; gives the other buckets, by their numbers."""
        from . import gpu_apply

        every = [gpu_apply.Groups(self._patch) for _ in self._sets]
        for index, head, reader in self._patch.open_buckets(threads):
            if only_touched and not any(slicer.touches(head) for slicer in self._slicers):
                continue
            number = self._only_set(head)
            bucket = None
            if number is not None and not self._shared[number].intersection(head.entries.tensor.tolist()):
                bucket = gpu_apply.gpu_bucket(self._sets[number], index, head, reader)
            if number is None or bucket is None:
                yield index
                continue
            for group in every[number].add(bucket):
                self._launch(number, group)
        if not any(self._on_gpu) and sum(groups.share for groups in every) < 1:
            for groups in every:
                yield from groups.indices
            return
        for number, groups in enumerate(every):
            for group in groups.rest:
                self._launch(number, group)

    def _launch(self, number: int, group: list[GpuBucket]) -> None:
        from . import gpu_apply

        self._on_gpu[number].append(gpu_apply.stage_group(self._patch, self._sets[number], group))

    def _only_set(self, head: Head) -> int | None:
        """The set that has all entries of a bucket, each in one of its parts; None if there is none."""
        numbers = set()
        for place in head.entries.places():
            try:
                part = self._base.part_index(*place)
            except TensorMismatch:
                return None
            numbers.add(self._set_of[self._base.places[part]])
            if len(numbers) > 1:
                return None
        return numbers.pop() if numbers else None

    def _finish_on_gpu(self) -> None:
        """Wait for the GPUs, and stage the dense entries of what they decoded."""
        for number, parts in enumerate(self._on_gpu):
            if not parts:
                continue
            from . import gpu_apply

            weights = self._sets[number]
            gpu_apply.require_decoded(self._patch, weights, parts)
            self._staged[number] += [stage(weights, dense) for part in parts for dense in part.dense]
