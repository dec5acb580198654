"""Where the elements of regions lie, in memory and in their tensors: one row of numbers per region, for kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..kernels.cpu.arguments import InMemory, InTensor
from .boxes import Boxes, corners
from .region import Numbers, Region, Shape, collapse, row_major, run_start
from .table import TensorTable


@dataclass
class Geometry:
    """One row per region: the address of its first element, its position in the tensor, its sizes and strides."""

    keys: npt.NDArray[np.uint64]
    address: Numbers
    start: Numbers  # position of the first element in the tensor
    dims: Numbers
    size: Numbers
    memory_strides: Numbers  # in elements
    tensor_strides: Numbers  # in elements

    @property
    def in_memory(self) -> InMemory:
        """What kernels need to find elements in memory."""
        return InMemory(self.address, self.dims, self.size, self.memory_strides)

    @property
    def in_tensor(self) -> InTensor:
        """What kernels need to find elements in their tensors."""
        return InTensor(self.start, self.dims, self.size, self.tensor_strides, self.keys)

    @classmethod
    def contiguous(cls, table: TensorTable, tensor: Numbers) -> Geometry:
        """Whole, contiguous tensors, at addresses that are filled in later."""
        n = tensor.size
        return cls(
            keys=table.keys[tensor],
            address=np.zeros(n, np.int64),
            start=np.zeros(n, np.int64),
            dims=np.ones(n, np.int64),
            size=table.numel[tensor].reshape(-1, 1),
            memory_strides=np.ones((n, 1), np.int64),
            tensor_strides=np.ones((n, 1), np.int64),
        )

    def set_run(self, row: int, region: Region, shape: Shape) -> bool:
        """Fill a row with a region that is one run of a contiguous tensor; False if it is not one."""
        first = run_start(region, shape)
        if first is None:
            return False
        self.start[row] = first
        self.size[row, 0] = region.numel
        return True

    def set_boxes(self, regions: Boxes, selected: npt.NDArray[np.bool_]) -> None:
        """Fill the rows of the selected boxes, as they lie in contiguous tensors."""
        ranks = regions.table.wide.rank[regions.tensor]
        for rank in np.unique(ranks[selected]).tolist():
            rows = np.flatnonzero(selected & (ranks == rank))
            tensor = regions.tensor[rows]
            first = regions.first[rows]
            span = regions.span[rows]
            start, stop = corners(regions.table, tensor, first, first + span)
            size = (stop - start).T
            is_run = size.prod(axis=1) == span + 1
            self.start[rows] = first
            self.size[rows, 0] = span + 1
            if not is_run.all():
                self._set_strided(rows[~is_run], size[~is_run], _wide_strides(regions.table, tensor[~is_run], rank))

    def _set_strided(self, rows: Numbers, size: Numbers, strides: Numbers) -> None:
        """Fill rows with boxes of several dimensions, leaving out dimensions of one element."""
        order = np.argsort(size == 1, axis=1, kind="stable")  # dimensions of one element last
        dims = np.count_nonzero(size > 1, axis=1)
        most = int(dims.max())
        self.dims[rows] = dims
        self._widen(most)
        columns = order[:, :most]
        box_strides = np.take_along_axis(strides, columns, 1)
        self.size[rows, :most] = np.take_along_axis(size, columns, 1)
        self.memory_strides[rows, :most] = box_strides
        self.tensor_strides[rows, :most] = box_strides

    def _widen(self, dims: int) -> None:
        """Make the columns wide enough for this many dimensions."""
        missing = dims - self.size.shape[1]
        if missing > 0:
            pad = ((0, 0), (0, missing))
            self.size = np.pad(self.size, pad, constant_values=1)
            self.memory_strides = np.pad(self.memory_strides, pad, constant_values=1)
            self.tensor_strides = np.pad(self.tensor_strides, pad, constant_values=1)

    def set_box(self, row: int, start: int, size: Shape, memory_strides: Shape, tensor_strides: Shape) -> None:
        """Fill a row with a box that `collapse` gave."""
        self._widen(len(size))
        self.start[row] = start
        self.dims[row] = max(1, len(size))
        self.size[row, : max(1, len(size))] = size or (1,)
        self.memory_strides[row, : len(size)] = memory_strides
        self.tensor_strides[row, : len(size)] = tensor_strides


def runs_at(address: Numbers) -> InMemory:
    """Consecutive elements at each of these addresses, however many."""
    ones = np.ones((address.size, 1), np.int64)
    return InMemory(address, np.ones(address.size, np.int64), ones, ones)


def _wide_strides(table: TensorTable, tensor: Numbers, rank: int) -> Numbers:
    """Strides of the dimensions that have more than one element; all tensors have `rank` of them."""
    strides = np.ones((tensor.size, rank), np.int64)
    for d in reversed(range(rank - 1)):
        strides[:, d] = strides[:, d + 1] * table.wide.sizes[table.wide.offset[tensor] + d + 1]
    return strides


def tensor_geometry(table: TensorTable, tensor: Numbers, regions: Sequence[Region | None]) -> Geometry:
    """Where the elements of regions lie in their tensors, for bits that are stored in row-major order."""
    geometry = Geometry.contiguous(table, tensor)
    if isinstance(regions, Boxes):
        geometry.set_boxes(regions, regions.first >= 0)
        return geometry
    for row, region in enumerate(regions):
        shape = table.specs[int(tensor[row])].shape
        if region is not None and not geometry.set_run(row, region, shape):
            tensor_strides = row_major(shape)
            size, (strides,) = collapse(region.size, tensor_strides)
            geometry.set_box(row, dot(region.start, tensor_strides), size, strides, strides)
    return geometry


def dot(indices: Sequence[int], strides: Sequence[int]) -> int:
    """The offset of an element, from its indices and the strides."""
    return sum(i * s for i, s in zip(indices, strides, strict=True))
