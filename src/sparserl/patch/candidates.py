"""Where changes can be, if a source says so: positions in a list, or the marks of parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import TensorMismatch
from ..weights.local import LocalWeights
from ..weights.marks import Bitmap
from ..weights.old_bits import OldBits
from ..weights.shards import Shards


class PositionList:
    """Positions in a part, sorted and without repeats."""

    def __init__(self, positions: npt.NDArray[np.int64]) -> None:
        self._positions = positions

    def between(self, low: int, high: int) -> npt.NDArray[np.uint32]:
        """Those from `low` up to `high`, counted from `low`."""
        first, last = np.searchsorted(self._positions, [low, high])
        return (self._positions[first:last] - low).astype(np.uint32)


Candidates = Mapping[int, Bitmap | OldBits | PositionList]
"""Positions at which a part may have changed, by the number of the part; other parts may have changed anywhere."""


def from_positions(weights: LocalWeights, positions: Mapping[str, Any]) -> Candidates:
    """Positions that a caller hands over for whole tensors, checked."""
    candidates: dict[int, Bitmap | OldBits | PositionList] = {}
    for name, values in positions.items():
        tensor = weights.table.index.get(name)
        if tensor is None:
            raise TensorMismatch(f"positions are given for {name!r}, which is not among the weights")
        numel = weights.table.specs[tensor].numel
        array = np.asarray(values)
        if array.size and array.dtype.kind not in "iu":  # a mask, say, would pass for positions 0 and 1
            raise TensorMismatch(f"positions of {name!r} are {array.dtype}; hand over integers")
        rising = np.unique(array.astype(np.int64))
        if rising.size and (rising[0] < 0 or rising[-1] >= numel):
            raise TensorMismatch(f"positions of {name!r} reach outside its {numel} elements")
        candidates[weights.part_index(tensor, None)] = PositionList(rising)
    return candidates


def from_marks(weights: LocalWeights, shards: Shards) -> Candidates:
    """The marks that some parts of shards carry."""
    candidates: dict[int, Bitmap | OldBits | PositionList] = {}
    for part in shards.parts:
        if part.marks is None:
            continue
        if part.marks.numel != part.region.numel:
            raise TensorMismatch(
                f"{part.tensor!r}: marks for {part.marks.numel} elements, the region has {part.region.numel}"
            )
        candidates[weights.part_index(weights.table.index[part.tensor], part.region)] = part.marks
    return candidates
