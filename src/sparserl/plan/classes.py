"""Choosing magnitude classes: the cuts with which gaps and steps cost the fewest bits, if classes save any.

One histogram of the old magnitudes (of a sample) and one of the changed elements by step give the cost of any
partition: the entropy of which members of a class change, plus the entropy of their steps. The best cuts are found by
dynamic programming over at most 64 candidates. No constant is fitted to a data set.

What they save, compared with a single class, is taken from what `ulp` costs: both then count with the same entries,
some of which change more than others. Of any bucket, some 2^15 old magnitudes and 2^13 changes are looked at.
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
from .changes import Changes, RestoredBase
from .estimates import index_bits, number_bits

_MAX_CLASSES = 5  # more would save a percent or two and cost more time than that
# how many of a bucket are sampled
_SAMPLE_ELEMENTS = 1 << 15
_SAMPLE_CHANGES = 1 << 13
_CANDIDATES = 64
_TABLE_BITS = 500  # of one more class: tables and states of its streams, and their place in the directory
_COUNT_BITS = 6  # of one more number per tile
_MIN_SAVING = 0.004  # one more class must save this share of all bits

Array = npt.NDArray[Any]


def choose_classes(
    dtype: DType, old: Counts, numel: Counts, parts: Sequence[Changes], tiles: int
) -> tuple[Classes | None, float]:
    """The classes to use, or None if classes would not save bits, and the estimated bits."""
    kind, keep = magnitude(dtype)
    members = np.zeros(KEYS, np.int64)
    shift = key_shift(dtype, parts)
    every = sampling_interval(numel)
    cpu.classes.key_histogram(kind, old, numel, keep, np.uint64(shift), every, members)
    for part in parts:
        if isinstance(part.base, RestoredBase):
            cpu.classes.restore_keys(
                magnitude(dtype), np.uint64(shift), every, part.positions, part.after, part.before, members
            )
    total = sum(part.positions.size for part in parts)
    return classes_from_histogram(dtype, shift, members, int(numel.sum()), parts, total, tiles)


def sampling_interval(numel: Counts) -> int:
    """One in how many stretches of 64 elements is sampled."""
    return max(1, int(numel.sum()) // _SAMPLE_ELEMENTS)


def classes_from_histogram(
    dtype: DType, shift: int, members: Array, elements: int, parts: Sequence[Changes], total: int, tiles: int
) -> tuple[Classes | None, float]:
    """`choose_classes` from a histogram of old magnitudes.

    Args:
        dtype: The dtype of the elements.
        shift: How many low bits of a magnitude are left out of its key.
        members: How many elements have each key, in all `elements` or in a sample of them.
        elements: How many elements the bucket covers.
        parts: The changes, all or a sample of them.
        total: How many changes the bucket has.
        tiles: How many tiles the bucket has.
    """
    kind, keep = magnitude(dtype)
    all_members = members * (elements / max(1, int(members.sum())))
    histogram = np.zeros((KEYS, 4), np.int64)
    sample = sum(part.positions.size for part in parts)
    interval = max(1, sample // _SAMPLE_CHANGES)
    for part in parts:
        cpu.classes.change_histogram(kind, keep, np.uint64(shift), interval, part.before, part.steps, histogram)
    changed = histogram * (total / max(1, int(histogram.sum())))
    thresholds, saved = _partition(np.maximum(all_members, changed.sum(1)), changed, tiles)
    index = sum(float(index_bits(part.numel, part.count).sum()) for part in parts)
    steps = sum(number_bits(part.steps) * part.steps.size for part in parts if part.steps is not None)
    bits = index + steps * (total / max(1, sample)) - saved
    return (Classes(shift, thresholds) if thresholds and tiles <= limits.TILES else None), bits


def key_shift(dtype: DType, parts: Sequence[Changes]) -> int:
    """How many low bits of a magnitude are left out of its key.

    A key has the eight highest bits of a float. A ninth would say little, since the exponent determines the size of a
    step, and kernels are faster without it. For integers, a key has the nine highest bits of the largest magnitude
    that changed.
    """
    if dtype.sign_magnitude:
        return max(0, 8 * dtype.width - 9)
    kind, keep = magnitude(dtype)
    bits = max((int(cpu.classes.largest(kind, keep, part.before)) for part in parts), default=0).bit_length()
    return max(0, bits - (KEYS.bit_length() - 1))


def _partition(members: Array, changed: Array, tiles: int) -> tuple[tuple[int, ...], float]:
    """The thresholds that save the most estimated bits, compared with a single class, and how many."""
    costs = float(_TABLE_BITS + _COUNT_BITS * tiles), _MIN_SAVING
    single, _ = cpu.entropy.class_edges(members, changed, np.array([0, KEYS]), *costs, 1)
    bits, thresholds = cpu.entropy.class_edges(members, changed, _candidates(changed.sum(1)), *costs, _MAX_CLASSES)
    return tuple(thresholds.tolist()), float(single - bits)


def _candidates(changed: Array) -> Array:
    """Edges between keys where a cut can make a difference: about equally many changes between any two."""
    changed_keys = np.flatnonzero(changed)
    if not changed_keys.size:
        return np.array([0, KEYS])
    edges = np.unique(np.concatenate((changed_keys, changed_keys + 1)))
    if edges.size > _CANDIDATES:
        share = np.cumsum(changed)[changed_keys] / changed.sum() * _CANDIDATES
        edges = np.concatenate((changed_keys[np.diff(share.astype(np.int64), prepend=-1) > 0], [changed_keys[-1] + 1]))
    return np.unique(np.concatenate(([0], edges[(edges > 0) & (edges < KEYS)], [KEYS])))
