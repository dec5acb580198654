"""Choosing magnitude classes: where to cut so that gaps and steps cost least, and whether it pays at all.

One histogram of the old magnitudes (of a sample) and one of the changed elements by step give the cost of any
partition: the entropy of which members of a class change, plus the entropy of their steps. The best cuts are found by
dynamic programming over at most 64 candidates. Nothing here is fitted to any data set.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..codec.ctx import KEYS, magnitude
from ..codec.profile import Classes, Counts
from ..kernels import cpu
from ..weights.dtypes import DType
from ..wire import limits
from .changes import Changes
from .estimates import number_bits

MOST_CLASSES = 5  # more would save a percent or two and cost more time than that
# how many of a bucket are looked at
_MEMBERS = 1 << 15
_CHANGES = 1 << 13
_CANDIDATES = 64
_TABLE_BITS = 500  # of one more class: tables and states of its streams, and their place in the directory
_COUNT_BITS = 6  # of one more number per tile
_WORTH = 0.004  # one more class must save this share of the whole

Array = npt.NDArray[Any]


def choose(
    dtype: DType, old: Counts, numel: Counts, parts: Sequence[Changes], tiles: int
) -> tuple[Classes | None, float]:
    """The classes to use and their estimated bits; None where telling elements apart does not pay."""
    kind, keep = magnitude(dtype)
    members = np.zeros(KEYS, np.int64)
    shift = key_shift(dtype, parts)
    cpu.classes.key_histogram(kind, old, numel, keep, np.uint64(shift), sampling(numel), members)
    total = sum(part.positions.size for part in parts)
    return decide(dtype, shift, members, int(numel.sum()), parts, total, tiles)


def sampling(numel: Counts) -> int:
    """Of how many stretches of 64 elements one is looked at, where there are so many elements."""
    return max(1, int(numel.sum()) // _MEMBERS)


def decide(
    dtype: DType, shift: int, members: Array, elements: int, parts: Sequence[Changes], total: int, tiles: int
) -> tuple[Classes | None, float]:
    """`choose`, once the keys of some of the `elements` are counted. `parts` have all of `total` changes, or some."""
    kind, keep = magnitude(dtype)
    whole = members * (elements / max(1, int(members.sum())))
    counted = np.zeros((KEYS, 4), np.int64)
    there = sum(part.positions.size for part in parts)
    every = max(1, there // _CHANGES)
    for part in parts:
        cpu.classes.change_histogram(kind, keep, np.uint64(shift), every, part.before, part.steps, counted)
    changed = counted * (total / max(1, int(counted.sum())))
    thresholds, bits = _partition(np.maximum(whole, changed.sum(1)), changed, tiles)
    bits += _inside_columns(parts, changed, total / max(1, there))
    return (Classes(shift, thresholds) if thresholds and tiles <= limits.TILES else None), bits


def key_shift(dtype: DType, parts: Sequence[Changes]) -> int:
    """Keys are the highest bits of a magnitude: eight of any in floats, nine of the largest that changed in integers.

    A ninth bit of a float would say little, as the size of a step is a matter of the exponent; and kernels are faster
    without.
    """
    if dtype.sign_magnitude:
        return max(0, 8 * dtype.width - 9)
    kind, keep = magnitude(dtype)
    bits = max((int(cpu.classes.largest(kind, keep, part.before)) for part in parts), default=0).bit_length()
    return max(0, bits - (KEYS.bit_length() - 1))


def _inside_columns(parts: Sequence[Changes], changed: Array, scale: float) -> float:
    """Bits of steps that their histogram leaves out, since a column holds many; the same for any partition."""
    count = changed.sum(0)
    fine = sum(number_bits(part.steps) * part.steps.size for part in parts if part.steps is not None)
    return max(0.0, fine * scale - float(_xlogx(count.sum()) - _xlogx(count).sum()))


def _partition(members: Array, changed: Array, tiles: int) -> tuple[tuple[int, ...], float]:
    """Thresholds with the least estimated bits, and those bits."""
    bits, thresholds = cpu.entropy.class_edges(
        members, changed, _candidates(changed.sum(1)), float(_TABLE_BITS + _COUNT_BITS * tiles), _WORTH, MOST_CLASSES
    )
    return tuple(thresholds.tolist()), float(bits)


def _candidates(changed: Array) -> Array:
    """Edges between keys where a cut can make a difference: about equally many changes between any two."""
    live = np.flatnonzero(changed)
    if not live.size:
        return np.array([0, KEYS])
    edges = np.unique(np.concatenate((live, live + 1)))
    if edges.size > _CANDIDATES:
        share = np.cumsum(changed)[live] / changed.sum() * _CANDIDATES
        edges = np.concatenate((live[np.diff(share.astype(np.int64), prepend=-1) > 0], [live[-1] + 1]))
    return np.unique(np.concatenate(([0], edges[(edges > 0) & (edges < KEYS)], [KEYS])))


def _xlogx(x: Array) -> Array:
    return np.where(x > 0, x * np.log2(np.maximum(x, 1e-9)), 0.0)
