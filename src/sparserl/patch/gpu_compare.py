"""Comparing two versions of weights that are on a GPU in both: changes are found, and buckets coded, where they are.

    old, new ──► bitmap ──► changes per part │ compacted on the GPU ──► `ulp`, `ctx`: coded there ──► bytes
                                                                   └──► few, heavy, `raw`, `gap`: to the CPU's coders

Where one group of parts waits for the GPU, the next takes a step.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from .. import plan
from ..kernels import gpu
from ..parallel import Waiting, in_turn
from ..plan import Changes, Draft
from ..plan.buckets import Capacity, cut_runs
from ..plan.estimates import index_bits
from ..plan.routing import BUCKET_CHANGES, may_be_dense
from ..weights.digest import Digest
from ..weights.local import LocalWeights
from ..weights.on_gpu import Runs, groups, on_stream
from ..weights.region import Numbers
from .cpu_compare import Compared
from .gpu_changes import ComparedRuns, CountedRuns, fetched_digest
from .gpu_encode import encode

FEW_CHANGES = 1 << 18
"""Changes of a group below which the CPU codes them: launches and waits take a GPU as long, whatever the number."""
_FEW_FOR_CTX = 1 << 10  # the same where `ctx` is wanted, which only the GPU can code: it saves half of the bytes
_WORD_BITS = 2  # taken for a word where buckets are cut, which is what steps take
R = TypeVar("R")


class Options(NamedTuple):
    """What is wanted of a comparison."""

    names: Sequence[str]
    capacity: Capacity
    digest_base: bool
    keep: bool
    to_host: bool = False  # whether all changes are left to the CPU, as they are


def compare(
    old: LocalWeights,
    new: LocalWeights,
    all_runs: Sequence[Runs],
    names: Sequence[str],
    digest_base: bool,
    keep: bool,
) -> Iterator[Compared]:
    """Find and encode the changes of runs, group by group. Where one group waits for the GPU, the next takes a step.

    Args:
        old: The version before.
        new: The version now.
        all_runs: The parts that are on GPUs in both.
        names: The profiles that may be used.
        digest_base: Whether the element sums of the old bits are wanted.
        keep: Whether buckets may be wanted in another profile than the one with the fewest bits, or later.
    """
    capacity = Capacity.of_gpu(sum(runs.nbytes for runs in all_runs))
    return _compare(old, new, all_runs, Options(names, capacity, digest_base, keep))


def compare_to_host(
    old: LocalWeights, new: LocalWeights, all_runs: Sequence[Runs], digest_base: bool
) -> Iterator[Compared]:
    """The changes of runs in host memory, neither routed nor encoded."""
    return _compare(old, new, all_runs, Options((), Capacity.of_gpu(0), digest_base, keep=False, to_host=True))


def _compare(old: LocalWeights, new: LocalWeights, all_runs: Sequence[Runs], options: Options) -> Iterator[Compared]:
    jobs = ((runs, _compare_group(old, new, runs, options)) for runs in groups(all_runs))
    return in_turn(_on_gpu(old, runs, job) for runs, job in jobs)


def _on_gpu(weights: LocalWeights, runs: Runs, job: Generator[Waiting, None, R]) -> Generator[Waiting, None, R]:
    """A job whose steps run on the stream of the GPU that some runs are on; between them others may use it."""
    while True:
        with on_stream(weights, runs.device):
            try:
                pause = next(job)
            except StopIteration as end:
                result: R = end.value
                return result
        yield pause


def _compare_group(
    old_weights: LocalWeights, new_weights: LocalWeights, runs: Runs, options: Options
) -> Generator[Waiting, None, Compared]:
    """Find and encode the changes of a group of runs."""
    blocks, (old, new) = runs.blocks()
    bitmap, block_counts = gpu.changes.diff(blocks, old, new)
    counts = blocks.fetch(gpu.streams.part_changes(blocks, block_counts))
    done = blocks.event()
    base = blocks.fetch(gpu.changes.digest(blocks, old)) if options.digest_base else None
    yield counts
    versions = old_weights, new_weights
    compared = ComparedRuns(*versions, runs, counts(), blocks, old, new, bitmap, block_counts, done)
    rest = _route(compared, options)
    del bitmap, compared  # a bitmap is large, and not needed to the end: the next group takes its memory
    routed, moved = yield from rest
    return Compared(routed, Digest() if base is None else fetched_digest(base), moved, runs.nbytes)


def _route(compared: ComparedRuns, options: Options) -> Generator[Waiting, None, tuple[list[Changes | Draft], Digest]]:
    """Buckets that are coded on the GPU, and changes that are left to the CPU; how the digest moves."""
    live = np.flatnonzero(compared.changes)
    if options.to_host:
        packed = compared.select(live).compacted()
        return [packed.on_host(slice(i, i + 1)) for i in range(live.size)], packed.moved
    for_cpu = is_for_cpu(compared, live, options.names)
    routed: list[Changes | Draft] = []
    moved = Digest()
    cpu_runs = live[for_cpu]
    if cpu_runs.size:
        packed = compared.select(cpu_runs).compacted()
        for part in cut_buckets(packed, options):
            routed += plan.route(packed.on_host(part), options.names, compared.old_weights.table)
        moved += packed.moved
    gpu_runs = live[~for_cpu]
    if gpu_runs.size:
        compared = compared.select(gpu_runs)
        rest = encode(compared, [*cut_buckets(compared, options)], options.names, options.keep)
        del compared
        drafts, delta = yield from rest
        routed += drafts
        moved += delta
    return routed, moved


def is_for_cpu(compared: CountedRuns, live: Numbers, names: Sequence[str]) -> npt.NDArray[np.bool_]:
    """Which runs are left to the CPU: those that may be dense or are too heavy for a bucket; all if they are few."""
    count = compared.changes[live]
    few = min(FEW_CHANGES, _FEW_FOR_CTX) if "ctx" in names else FEW_CHANGES
    if int(count.sum()) < few or set(names) == {"gap"}:
        return np.ones(live.size, bool)
    heavy: npt.NDArray[np.bool_] = may_be_dense(compared.runs.dtype, compared.runs.numel[live], count)
    return heavy | (count > BUCKET_CHANGES)


def cut_buckets(compared: CountedRuns, options: Options) -> Iterator[slice]:
    """Runs that make a bucket each."""
    width = compared.runs.dtype.width
    bits = index_bits(compared.runs.numel, compared.changes) + _WORD_BITS * compared.changes
    if set(options.names) == {"raw"}:
        bits = (32 + 8 * width) * compared.changes.astype(np.float64)
    return cut_runs(compared.runs.numel * width, compared.changes, bits / 8, options.capacity)
