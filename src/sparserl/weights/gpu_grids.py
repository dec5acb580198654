"""Parts on GPUs that are no runs: columns of a tensor, or parts that the engine has transposed. They are summed there.

Such a part is one grid or several: rows of columns, each with a step of its own in memory and in its tensor. Kernels
read grids where they lie. Columns are what is nearest to each other in memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..kernels import gpu
from .dtypes import DType
from .gpu_copies import fetch
from .local import LocalWeights
from .on_gpu import on_stream, split_by_gpu, warming
from .region import Numbers, Shape, collapse
from .shards import Place
from .staging import gpu_tensor

_LEAST_ELEMENTS = 1 << 10  # of a grid on average: a table of smaller ones would be long for what is in them


class _Grids(NamedTuple):
    """The grids of one place: where each begins, in elements from its first, and how all of them lie."""

    memory_offset: Numbers
    tensor_offset: Numbers
    rows: int
    columns: int
    steps: tuple[int, int, int, int]  # of rows and columns in memory, and in the tensor

    @classmethod
    def of(cls, size: Shape, memory_strides: Shape, tensor_strides: Shape) -> _Grids | None:
        """The grids of a box; None if it would be too many."""
        nearest_last = sorted(range(len(size)), key=lambda d: -memory_strides[d])
        axes = ([values[d] for d in nearest_last] for values in (size, memory_strides, tensor_strides))
        sizes, (in_memory, in_tensor) = collapse(*map(tuple, axes))
        columns = sizes[-1:] or (1,)
        column_steps = (in_memory[-1], in_tensor[-1]) if sizes else (0, 0)
        outer = [*zip(sizes[:-1], in_memory, in_tensor, strict=False)]
        rows = max(outer, default=(1, 0, 0))
        if outer:
            outer.remove(rows)
        count = math.prod(n for n, *_ in outer)
        if count > 1 and count * _LEAST_ELEMENTS > math.prod(sizes):
            return None
        offsets = np.zeros((2, 1), np.int64)
        for n, *strides in outer:
            offsets = (offsets[:, :, None] + np.arange(n) * np.array(strides).reshape(2, 1, 1)).reshape(2, -1)
        steps = (rows[1], column_steps[0], rows[2], column_steps[1])
        return cls(offsets[0], offsets[1], rows[0], columns[0], steps)


@dataclass(frozen=True)
class SummedGrids:
    """Grids of one dtype on one GPU, which kernels sum up. No memory of tensors is kept.

    Attributes:
        places: The places that they make up.
        place: The index of the place that each grid belongs to.
    """

    dtype: DType
    device: Any
    places: list[Place]
    place: Numbers
    keys: np.ndarray[Any, Any]
    address: Numbers
    start: Numbers
    rows: Numbers
    columns: Numbers
    steps: Numbers

    @property
    def nbytes(self) -> int:
        return int((self.rows * self.columns).sum()) * self.dtype.width

    def sums(self) -> tuple[int, int]:
        """Both element sums of the digest, of all places together, on the current stream."""
        first, second = self._grid_sums().sum(0).tolist()
        return first, second

    def place_sums(self) -> list[tuple[int, int]]:
        """Both element sums of every place, on the current stream."""
        sums = np.zeros((len(self.places), 2), np.uint64)
        np.add.at(sums, self.place, self._grid_sums())
        return [(first, second) for first, second in sums.tolist()]

    def _grid_sums(self) -> np.ndarray[Any, Any]:
        blocks = gpu.changes.Blocks(self.dtype.width, self.rows * self.columns, self.device, self.keys, self.start)
        side = blocks.side_at(self.address, self.dtype.width, [])
        return fetch(gpu.sums.grid_digests(blocks, side, self.columns, self.steps))().view(np.uint64)


def split_grids(places: Iterable[Place], weights: LocalWeights) -> tuple[list[Place], list[SummedGrids]]:
    """Split places that are no runs into those for the CPU, and grids on GPUs, by dtype and GPU."""
    elsewhere: list[Place] = []
    kinds: dict[tuple[DType, Any], tuple[list[Place], list[_Grids]]] = {}
    for place in places:
        grids = _grids(weights, place)
        if grids is None:
            elsewhere.append(place)
            continue
        tensor = gpu_tensor(weights.locate(*place)[0])
        kind = weights.table[place[0]].dtype, tensor.device
        its_places, its_grids = kinds.setdefault(kind, ([], []))
        its_places.append(place)
        its_grids.append(grids)
    return elsewhere, [_summed(weights, *kind, *its) for kind, its in kinds.items()]


def warm_up(weights: LocalWeights) -> None:
    """Compile the kernel that sums up grids, if weights have some."""
    if gpu.changes.INTERPRETED:
        return
    one = np.ones(1, np.int64)
    no_runs, _ = split_by_gpu(weights.places, weights)
    _, all_grids = split_grids(no_runs, weights)
    with warming():
        for grids in all_grids:
            with on_stream(weights, grids.device):
                blocks = gpu.changes.Blocks(grids.dtype.width, one, grids.device)
                side = blocks.side_at(grids.address[:1], grids.dtype.width, [])
                fetch(gpu.sums.grid_digests(blocks, side, one, np.zeros((4, 1), np.int64)))()


def _grids(weights: LocalWeights, place: Place) -> _Grids | None:
    """The grids of a place; None if it does not lie on a GPU with kernels, or would be too many grids."""
    tensor = gpu_tensor(weights.locate(*place)[0])
    if tensor is None or not tensor.numel() or gpu.support.obstacle(tensor.device) is not None:
        return None
    geometry = weights.geometry(np.array([place[0]], np.int64), [place[1]])
    dims = int(geometry.dims[0])
    axes = (geometry.size, geometry.memory_strides, geometry.tensor_strides)
    size, memory_strides, tensor_strides = (tuple(row[0, :dims].tolist()) for row in axes)
    return _Grids.of(size, memory_strides, tensor_strides)


def _summed(weights: LocalWeights, dtype: DType, device: Any, places: list[Place], grids: list[_Grids]) -> SummedGrids:
    """Grids of one dtype on one GPU."""
    tensors = np.array([number for number, _ in places], np.int64)
    geometry = weights.geometry(tensors, [region for _, region in places])
    place = np.repeat(np.arange(len(places)), [of_place.memory_offset.size for of_place in grids])
    memory_offset = np.concatenate([of_place.memory_offset for of_place in grids])
    return SummedGrids(
        dtype=dtype,
        device=device,
        places=places,
        place=place,
        keys=geometry.keys[place],
        address=geometry.address[place] + dtype.width * memory_offset,
        start=geometry.start[place] + np.concatenate([of_place.tensor_offset for of_place in grids]),
        rows=np.array([of_place.rows for of_place in grids])[place],
        columns=np.array([of_place.columns for of_place in grids])[place],
        steps=np.array([of_place.steps for of_place in grids])[place].T,
    )
