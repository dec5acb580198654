"""Encoding changes of weights on a GPU where they are, from the weights now and the old bits of the changes.

    changes ──► buckets, as a comparison of two versions would cut them ──► for four of these at a time:
    a copy of their weights with the old bits put back ──► compare ──► encode

The buckets are those of a baseline on the GPU, byte for byte. The copy takes as much as four buckets cover: an eighth
of the weights each, and at most 1 GiB.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from .. import plan
from ..kernels import gpu
from ..kernels.gpu.ints import INTS
from ..parallel import in_turn
from ..plan import Changes, Draft
from ..plan.buckets import Capacity
from ..weights.dtypes import UIntArray
from ..weights.gpu_copies import upload
from ..weights.local import LocalWeights
from ..weights.old_bits import OldBits, Positions
from ..weights.on_gpu import Runs, groups, on_stream
from ..weights.region import Numbers, run_start
from ..weights.shards import Place
from ..weights.staging import gpu_tensor
from .gpu_changes import ComparedRuns, CountedRuns
from .gpu_compare import Options, cut_buckets, is_for_cpu
from .gpu_encode import LOT_BUCKETS, GpuDraft, encode

_ALIGNED = 16  # bytes that every run of a copy begins at a multiple of


class FoundBits(NamedTuple):
    """The changed elements of a part: their old bits, and the bits now at the same positions."""

    old: OldBits
    new: OldBits


@dataclass(frozen=True)
class _FoundRuns(CountedRuns):
    """Runs and their changes in host memory, one run after the other."""

    positions: Positions
    before: UIntArray
    after: UIntArray

    def select(self, which: Numbers) -> _FoundRuns:
        """Some of the runs."""
        selected = np.zeros(self.changes.size, bool)
        selected[which] = True
        inside = np.repeat(selected, self.changes)
        return replace(
            self,
            runs=self.runs.select(which),
            changes=self.changes[which],
            positions=self.positions[inside],
            before=self.before[inside],
            after=self.after[inside],
        )

    def on_host(self, part: slice) -> Changes:
        """The changes of some runs. Without a base: the old bits of other elements are not at hand, so no `ctx`."""
        inside = slice(self.ends[part.start], self.ends[part.stop])
        places = self.runs.places[part]
        before = self.before[inside]
        after = self.after[inside]
        return Changes(
            **self.columns(part),
            positions=self.positions[inside],
            after=after,
            steps=plan.steps_between(self.runs.dtype, before, after),
            bits=lambda entry: self.new_weights.bits(*places[entry]),
            before=before,
        )


def route(
    weights: LocalWeights, all_runs: Sequence[Runs], found: Mapping[Place, FoundBits], names: Sequence[str]
) -> Iterator[Changes | Draft]:
    """Buckets that are coded on the GPU, and changes that are left to the CPU.

    Args:
        weights: The weights now.
        all_runs: The parts that are on GPUs.
        found: Their changes, by part.
        names: The profiles that may be used.
    """
    capacity = Capacity.of_gpu(sum(runs.nbytes for runs in all_runs))
    options = Options(names, capacity, digest_base=False, keep=True)
    for runs in groups(all_runs):
        changes = _found_runs(weights, runs, found)
        live = np.flatnonzero(changes.changes)
        for_cpu = is_for_cpu(changes, live, names)
        cpu_runs = changes.select(live[for_cpu])
        if cpu_runs.changes.size:
            for part in cut_buckets(cpu_runs, options):
                yield from plan.route(cpu_runs.on_host(part), names, weights.table)
        gpu_runs = changes.select(live[~for_cpu])
        if gpu_runs.changes.size:
            buckets = [*cut_buckets(gpu_runs, options)]
            for i in range(0, len(buckets), LOT_BUCKETS):
                yield from _encode(weights, gpu_runs, buckets[i : i + LOT_BUCKETS], names)


def _found_runs(weights: LocalWeights, runs: Runs, found: Mapping[Place, FoundBits]) -> _FoundRuns:
    """The changes of some runs."""
    positions = []
    before = []
    after = []
    for (tensor, region), numel in zip(runs.places, runs.numel.tolist(), strict=True):
        part, _ = weights.parts[weights.part_index(tensor, region)]
        _, local = weights.locate(tensor, region)
        bits = found.get(part)
        start = 0
        if local is not None:
            start = run_start(local, weights.locate(*part)[0].shape) or 0
        none = (np.empty(0, np.uint32), np.empty(0, runs.dtype.uint))
        run_positions, run_before = none if bits is None else bits.old.run(start, start + numel)
        positions.append(run_positions)
        before.append(run_before.astype(runs.dtype.uint, copy=False))
        after.append(none[1] if bits is None else bits.new.run(start, start + numel)[1])
    counts = np.array([column.size for column in positions], np.int64)
    columns = (np.concatenate(positions), np.concatenate(before), np.concatenate(after))
    return _FoundRuns(weights, weights, runs, counts, *columns)


def _encode(
    weights: LocalWeights, changes: _FoundRuns, buckets: Sequence[slice], names: Sequence[str]
) -> list[GpuDraft]:
    """Encode a lot of buckets: its runs are compared with a copy in which the old bits are put back."""
    lot = changes.select(np.arange(buckets[0].start, buckets[-1].stop))
    parts = [slice(part.start - buckets[0].start, part.stop - buckets[0].start) for part in buckets]
    with on_stream(weights, lot.runs.device):
        copy, addresses = _restored(weights, lot)
        versions = np.stack((addresses, lot.runs.address[0]))
        runs = replace(lot.runs, address=versions, widths=(copy.element_size(), *lot.runs.widths))
        blocks, (old, new) = runs.blocks()
        bitmap, block_counts = gpu.changes.diff(blocks, old, new)
        compared = ComparedRuns(
            weights, weights, runs, lot.changes, blocks, old, new, bitmap, block_counts, blocks.event()
        )
        steps = encode(compared, parts, names, keep=True)
        del compared, bitmap  # a bitmap is large
        ((drafts, _),) = in_turn([steps])
        if lot.runs.device.type == "cuda":
            torch.cuda.synchronize(lot.runs.device)  # the copy is read until here
        del copy
    return drafts


def _restored(weights: LocalWeights, lot: _FoundRuns) -> tuple[torch.Tensor, Numbers]:
    """A copy of runs with the old bits of their changes, and the address of each run in it."""
    width = lot.runs.dtype.width
    spans = -(-lot.runs.numel * width // _ALIGNED) * _ALIGNED // width
    starts = np.cumsum(spans) - spans
    copy = torch.empty(int(spans.sum()), dtype=INTS[width], device=lot.runs.device)
    sizes = zip(starts.tolist(), lot.runs.numel.tolist(), strict=True)
    torch._foreach_copy_(
        [copy[start : start + numel] for start, numel in sizes], [_bits(weights, place) for place in lot.runs.places]
    )
    where = np.repeat(starts, lot.changes) + lot.positions
    copy.scatter_(0, upload(where.astype(np.int64), copy.device), upload(lot.before, copy.device))
    return copy, copy.data_ptr() + starts * width


def _bits(weights: LocalWeights, place: Place) -> torch.Tensor:
    """The bits of a run as integers, flat, where they are."""
    memory, local = weights.locate(*place)
    bits: torch.Tensor = gpu_tensor(memory).detach().view(INTS[memory.dtype.width])
    return (bits if local is None else bits[local.slices]).reshape(-1)
