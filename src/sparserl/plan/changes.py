"""Changes of one dtype, column by column: what lies between finding changes and writing buckets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from ..bits import DType, UIntArray
from ..codec import Profile
from ..codec.profile import Counts, Positions
from ..kernels import cpu
from ..pieces import Place
from ..region import Region


@dataclass(frozen=True)
class Dense:
    """An entry whose bits are sent whole; `count` of them really changed."""

    place: Place
    count: int
    bits: UIntArray


@dataclass
class Changes:
    """The changes of some regions of one dtype, column by column.

    `after` holds new bits, `steps` zigzag steps; at least one of them is there. `covered` counts the elements
    looked at, changed or not. `bits` reads the dense bits of an entry, where that is possible.
    """

    dtype: DType
    tensor: Counts
    region: list[Region | None]
    numel: Counts
    count: Counts
    positions: Positions
    after: UIntArray | None
    steps: UIntArray | None
    covered: int
    bits: Callable[[int], UIntArray] | None = None
    dense: list[Dense] = field(default_factory=list)
    cost: dict[str, float] = field(default_factory=dict)  # estimated bits of the sparse part, by profile

    def words(self, profile: Profile) -> UIntArray:
        words = self.after if profile.absolute else self.steps
        if words is None:
            raise ValueError(f"these changes cannot be written as {profile.name}")
        return words


def steps_between(dtype: DType, before: UIntArray, after: UIntArray) -> UIntArray:
    """Zigzag steps from old to new bits."""
    out = np.empty_like(after)
    cpu.steps(before, after, dtype.uint.type(1 << (8 * dtype.width - 1)), dtype.sign_magnitude, out)
    return out


def advance(dtype: DType, before: UIntArray, steps: UIntArray) -> UIntArray:
    """New bits from old ones and zigzag steps."""
    out = np.empty_like(before)
    cpu.advance(before, steps, dtype.uint.type(1 << (8 * dtype.width - 1)), dtype.sign_magnitude, out)
    return out
