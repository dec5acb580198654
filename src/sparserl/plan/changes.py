"""Changes of one dtype, column by column, as they are found and before they are written to buckets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ..codec import Profile
from ..codec.profile import Counts, Positions
from ..kernels import cpu
from ..weights.batches import Batch
from ..weights.dtypes import DType, UIntArray
from ..weights.local import LocalWeights
from ..weights.region import Numbers, Region
from ..weights.shards import Place


@dataclass(frozen=True)
class Dense:
    """An entry of which all bits are sent; `count` of its elements changed."""

    place: Place
    count: int
    bits: UIntArray


@dataclass(frozen=True)
class RestoredBase:
    """Base weights that are not in memory: the weights now are, and `Changes.before` has what they had before."""

    weights: LocalWeights

    def read(self, batch: Batch) -> tuple[Numbers, list[object]]:
        """Addresses of the new bits of a batch's regions, and the objects that keep them valid."""
        return self.weights.read(batch)


@dataclass
class Changes:
    """The changes of some regions of one dtype, column by column.

    `after` has new bits, `steps` zigzag steps; one of them may be None. `covered` counts the elements that were
    compared, changed or not. `bits` reads the dense bits of an entry, where that is possible. If the base weights are
    in memory, or can be restored, `base` has them all and `before` has the old bits of the changed elements.
    """

    dtype: DType
    tensor: Counts
    region: Sequence[Region | None]
    numel: Counts
    count: Counts
    positions: Positions
    after: UIntArray | None
    steps: UIntArray | None
    covered: int
    bits: Callable[[int], UIntArray] | None = None
    dense: list[Dense] = field(default_factory=list)
    cost: dict[str, float] = field(default_factory=dict)  # estimated bits of the sparse part, by profile
    before: UIntArray | None = None
    base: LocalWeights | RestoredBase | None = None

    @property
    def total(self) -> int:
        """Changes that are not in dense entries."""
        return int(self.positions.size)

    def select_changes(self, which: slice | npt.NDArray[np.bool_]) -> dict[str, Any]:
        """Positions and words of some changes, by the names of their columns."""
        columns = {name: getattr(self, name) for name in ("positions", "after", "steps", "before")}
        return {name: None if column is None else column[which] for name, column in columns.items()}

    def words(self, profile: Profile) -> UIntArray:
        words = self.after if profile.absolute else self.steps
        if words is None:
            raise ValueError(f"these changes cannot be written in profile {profile.name}")
        return words


def steps_between(dtype: DType, before: UIntArray, after: UIntArray) -> UIntArray:
    """Zigzag steps from old to new bits."""
    out = np.empty_like(after)
    cpu.changes.steps(before, after, dtype.sign_magnitude, out)
    return out


def advance(dtype: DType, before: UIntArray, steps: UIntArray) -> UIntArray:
    """New bits from old ones and zigzag steps."""
    out = np.empty_like(before)
    cpu.changes.advance(before, steps, dtype.sign_magnitude, out)
    return out
