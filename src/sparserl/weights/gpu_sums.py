"""Sums of the digest over weights on GPUs, group by group, piece by piece or run by run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from ..kernels import gpu
from .batches import PIECE_BYTES
from .dtypes import BY_NAME
from .gpu_copies import fetch
from .gpu_grids import SummedGrids, split_grids
from .local import LocalWeights
from .on_gpu import Runs, groups, on_stream, split_by_gpu, stream_of
from .shards import Place
from .table import TensorSpec, TensorTable


class _Tables(NamedTuple):
    """What kernels need for runs on a stream."""

    stream: int
    blocks: gpu.changes.Blocks
    side: gpu.changes.Side


class SummedRuns:
    """Runs whose elements are summed up again and again: what kernels need for it is kept, but no memory of tensors.

    They have no owners, of which they may be a part themselves.
    """

    def __init__(self, runs: Runs) -> None:
        self.device = runs.device
        self.nbytes = runs.nbytes
        self._runs = replace(runs, owners=())
        self._tables: _Tables | None = None

    def sums(self) -> tuple[int, int]:
        """Both element sums of the digest, on the current stream."""
        stream = stream_of(self.device)
        tables = self._tables  # which another thread may replace
        if tables is None or tables.stream != stream:
            blocks, (side,) = self._runs.blocks()
            tables = _Tables(stream, blocks, side)
            self._tables = tables
        return _pair(gpu.changes.digest(tables.blocks, tables.side))


def summed_groups(weights: LocalWeights, places: list[Place]) -> tuple[list[Place], list[SummedRuns | SummedGrids]]:
    """Split places into those for the CPU, and groups of runs or grids that kernels sum up.

    The groups of all places are kept while the weights stay where they are.
    """

    def split() -> tuple[list[Place], list[SummedRuns | SummedGrids]]:
        no_runs, all_runs = split_by_gpu(places, weights)
        elsewhere, all_grids = split_grids(no_runs, weights)
        return elsewhere, [*map(SummedRuns, groups(all_runs)), *all_grids]

    return weights.kept("summed groups", split) if places is weights.places else split()


def group_sums(weights: LocalWeights, all_groups: Iterable[SummedRuns | SummedGrids]) -> Iterator[tuple[int, int, int]]:
    """Both element sums of the digest, group by group, and the bytes that were read."""
    for group in all_groups:
        with on_stream(weights, group.device):
            yield *group.sums(), group.nbytes


def piece_sums(weights: LocalWeights, all_runs: Iterable[Runs]) -> Iterator[tuple[Place, int, int, int]]:
    """Both element sums of every piece of the runs, and its bytes; pieces are as large as batches."""
    for runs in groups(all_runs, PIECE_BYTES):
        yield from run_sums(weights, runs)


def run_sums(weights: LocalWeights, runs: Runs) -> Iterator[tuple[Place, int, int, int]]:
    """Both element sums of every run, and its bytes."""
    with on_stream(weights, runs.device):
        blocks, (side,) = runs.blocks()
        sums = fetch(gpu.sums.digests(blocks, side))().view(np.uint64).tolist()
    for place, numel, (first, second) in zip(runs.places, runs.numel.tolist(), sums, strict=True):
        yield place, first, second, numel * runs.dtype.width


def tensor_sums(spec: TensorSpec, tensor: torch.Tensor, start: int) -> torch.Tensor:
    """Both element sums of consecutive elements from a position of a tensor on, by the current stream, on the GPU."""
    keys = TensorTable([spec]).keys
    with torch.cuda.device_of(tensor):  # type: ignore[no-untyped-call]
        blocks = gpu.changes.Blocks(tensor.element_size(), [tensor.numel()], tensor.device, keys, [start])
        return gpu.sums.digests(blocks, blocks.side([tensor]))[0]


def load_kernel(device: torch.device) -> None:
    """Load the kernel of `tensor_sums` for elements of two bytes, or compile it."""
    spec = TensorSpec("w", BY_NAME["bfloat16"], (1,))
    tensor_sums(spec, torch.zeros(1, dtype=torch.bfloat16, device=device), 0)


def _pair(sums: torch.Tensor) -> tuple[int, int]:
    """Two sums on a GPU as numbers."""
    first, second = sums.cpu().numpy().view(np.uint64).tolist()
    return first, second
