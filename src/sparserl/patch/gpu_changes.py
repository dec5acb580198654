"""Changes of weights that are on a GPU in both versions: as a bitmap, or as positions and bits one after another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from .. import plan
from ..kernels import gpu
from ..parallel import Waiting
from ..plan import Changes
from ..weights.digest import Digest
from ..weights.dtypes import UIntArray
from ..weights.gpu_copies import fetch, upload
from ..weights.local import LocalWeights
from ..weights.on_gpu import Runs, on_stream
from ..weights.region import Numbers

_SAMPLE_CHANGES = 1 << 13  # of a lot, for estimates


def fetched_digest(sums: Callable[[], Any]) -> Digest:
    """The digest that a GPU summed up, when it has arrived."""
    return Digest(*sums().view(np.uint64).tolist())


@dataclass(frozen=True)
class CountedRuns:
    """Runs in two versions, and how many changes each has."""

    old_weights: LocalWeights
    new_weights: LocalWeights
    runs: Runs
    changes: Numbers

    @cached_property
    def ends(self) -> Numbers:
        """Changes before each run, and of all."""
        return np.concatenate(([0], np.cumsum(self.changes)))

    def columns(self, part: slice) -> dict[str, Any]:
        """The entries of some runs."""
        return {
            "dtype": self.runs.dtype,
            "tensor": self.runs.tensor[part],
            "region": [region for _, region in self.runs.places[part]],
            "numel": self.runs.numel[part],
            "count": self.changes[part],
            "covered": int(self.runs.numel[part].sum()),
        }


@dataclass(frozen=True)
class ComparedRuns(CountedRuns):
    """Runs that were compared, with a bitmap of the changes."""

    blocks: gpu.changes.Blocks
    old: gpu.changes.Side
    new: gpu.changes.Side
    bitmap: torch.Tensor
    block_counts: torch.Tensor  # changes of each block
    done: torch.cuda.Event | None  # when the bitmap is there

    @property
    def without_bitmap(self) -> CountedRuns:
        """The same without the bitmap, which is large."""
        return CountedRuns(self.old_weights, self.new_weights, self.runs, self.changes)

    def select(self, which: Numbers) -> ComparedRuns:
        """Some of the runs."""
        if which.size == self.changes.size:
            return self
        runs = self.runs.select(which)
        blocks, (old, new) = runs.blocks()
        selected = np.zeros(self.changes.size, bool)
        selected[which] = True
        blocks_of_runs = -(-self.blocks.sizes // self.blocks.block)
        take = self.blocks.upload(np.flatnonzero(np.repeat(selected, blocks_of_runs)))
        return ComparedRuns(
            self.old_weights,
            self.new_weights,
            runs,
            self.changes[which],
            blocks,
            old,
            new,
            self.bitmap.view(self.blocks.count, -1)[take].view(-1),
            self.block_counts[take],
            blocks.event(),
        )

    def compacted(self) -> CompactedChanges:
        """The changes without the bitmap. Every run must have some."""
        total = int(self.changes.sum())
        positions, after, before, sums = gpu.changes.compact(
            self.blocks, self.old, self.new, self.bitmap, self.block_counts, total, keep_old=True
        )
        moved = self.blocks.fetch(gpu.changes.sum_slots(sums))
        versions = self.old_weights, self.new_weights
        return CompactedChanges(*versions, self.runs, self.changes, positions, after, before, moved)

    def sample(self, lots: Sequence[slice]) -> tuple[Waiting, Callable[[], list[Changes]]]:
        """Begin to copy some of the changes of each lot to the host, for estimates."""
        bounds = [(int(self.ends[lot.start]), int(self.ends[lot.stop])) for lot in lots]
        picked = [np.arange(low, high, max(1, (high - low) // _SAMPLE_CHANGES)) for low, high in bounds]
        indices = upload(np.concatenate(picked), self.runs.device)
        copies = self.blocks.fetch(
            gpu.cells.sample(self.blocks, self.old, self.new, self.bitmap, self.block_counts, indices)
        )

        def samples() -> list[Changes]:
            cuts = np.cumsum([indices.size for indices in picked])[:-1]
            old_bits, new_bits = (np.split(side.view(self.runs.dtype.uint), cuts) for side in copies())
            return [self._sample(*sample) for sample in zip(lots, old_bits, new_bits, strict=True)]

        return copies, samples

    def _sample(self, lot: slice, before: UIntArray, after: UIntArray) -> Changes:
        return Changes(
            **self.columns(lot),
            positions=np.zeros(before.size, np.uint32),
            after=after,
            steps=plan.steps_between(self.runs.dtype, before, after),
            before=before,
            base=self.old_weights,
        )


@dataclass(frozen=True)
class CompactedChanges(CountedRuns):
    """Changes of runs on their GPU, one after the other, and how the digest's sums move."""

    positions: torch.Tensor
    after: torch.Tensor
    before: torch.Tensor
    sums: Callable[[], Any]  # waits until they have arrived

    @property
    def moved(self) -> Digest:
        return fetched_digest(self.sums)

    def on_host(self, part: slice) -> Changes:
        """The changes of some runs in host memory. Without a base: the old bits stay on the GPU, so no `ctx`."""
        low = self.ends[part.start]
        high = self.ends[part.stop]
        with on_stream(self.old_weights, self.runs.device):
            copies = [fetch(column[low:high]) for column in (self.positions, self.after, self.before)]
        positions, after, before = (copy() for copy in copies)
        after = after.view(self.runs.dtype.uint)
        before = before.view(self.runs.dtype.uint)
        places = self.runs.places[part]
        return Changes(
            **self.columns(part),
            positions=positions.view(np.uint32),
            after=after,
            steps=plan.steps_between(self.runs.dtype, before, after),
            bits=lambda entry: self.new_weights.bits(*places[entry]),
            before=before,
        )
