"""What a recording holds of one sync: which elements changed, by how much, and what each profile takes for them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ..codec import PROFILES, Stream
from ..codec.ctx import KEYS, magnitude
from ..kernels import cpu
from ..parallel import Progress, ordered
from ..patch import Patch, diff
from ..patch.cpu_compare import scan
from ..plan import steps_between
from ..weights.batches import Batch, batches
from ..weights.digest import Digest
from ..weights.dtypes import DType
from ..weights.local import LocalWeights
from ..weights.marks import Bitmap
from ..weights.memory import Weights
from ..weights.table import TensorTable

Counts = npt.NDArray[np.int64]
EXPONENTS = {  # of floats whose classes are their exponents: bits of the fraction, and the exponent that means 2^0
    "bfloat16": (7, 127),
    "float16": (10, 15),
    "float32": (23, 127),
    "float8_e4m3fn": (3, 7),
    "float8_e5m2": (2, 15),
    "float8_e4m3fnuz": (3, 8),
    "float8_e5m2fnuz": (2, 16),
}
STEPS = ("-1", "+1", "-2", "+2", "more")  # in the order of zigzag
PARTS = ("index", "value", "dense", "header", "table")
READS = 1 + 1 + len(PROFILES)  # times that all weights are looked at: here, and once for `auto` and each profile


def class_shift(dtype: DType) -> int:
    """How far a magnitude is shifted to get its class: the exponent of a float, else the highest byte."""
    if dtype.name in EXPONENTS:
        return EXPONENTS[dtype.name][0]
    return max(0, 8 * dtype.width - dtype.sign_magnitude - 8)


@dataclass
class ChangedBefore:
    """Which elements have changed so far, one bit for each."""

    table: TensorTable
    marks: list[Bitmap] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.marks = [Bitmap(spec.numel) for spec in self.table.specs]

    def add(self, tensor: int, positions: npt.NDArray[np.uint32], offset: int) -> int:
        """Mark changes; returns how many of them were marked before."""
        marks = self.marks[tensor]
        elements = positions.astype(np.int64) + offset
        again = (marks.words[elements >> 6] >> (elements & 63).astype(np.uint64)) & np.uint64(1)
        marks.add(positions, offset)
        return int(again.sum())


@dataclass
class _ClassCounts:
    """Elements and changes of one dtype, by magnitude class."""

    members: Counts = field(default_factory=lambda: np.zeros(KEYS, np.int64))
    changed: Counts = field(default_factory=lambda: np.zeros(KEYS, np.int64))

    def add(self, other: _ClassCounts) -> None:
        self.members += other.members
        self.changed += other.changed


@dataclass(frozen=True)
class _BatchCounts:
    """The changes of one batch, counted."""

    batch: Batch
    positions: npt.NDArray[np.uint32]
    counts: Counts
    classes: _ClassCounts
    steps: Counts


def observe(
    old: Weights,
    new: Weights,
    changed_before: ChangedBefore | None,
    threads: int | None,
    progress: Progress | None,
) -> tuple[dict[str, Any], ChangedBefore]:
    """The figures of one sync, and the elements that have changed so far, with those that changed in it."""
    local_old = LocalWeights.of(old)
    table = local_old.table
    local_new = LocalWeights.of(new, table)
    changed_before = changed_before or ChangedBefore(table)
    changed_before.table.require(table, "the syncs before", "this one")
    changed = np.zeros(len(table), np.int64)
    steps = np.zeros(len(STEPS), np.int64)
    again = 0
    classes: dict[DType, _ClassCounts] = defaultdict(_ClassCounts)
    counted = ordered(lambda batch: _count(local_old, local_new, batch), batches(table, local_old.places), threads)
    for counts in counted:
        batch = counts.batch
        np.add.at(changed, batch.tensor, counts.counts)
        steps += counts.steps
        classes[batch.dtype].add(counts.classes)
        cuts = np.cumsum(counts.counts)[:-1]
        for tensor, positions in zip(batch.tensor.tolist(), np.split(counts.positions, cuts), strict=True):
            again += changed_before.add(tensor, positions, batch.offset)
        if progress is not None:
            progress(batch.elements * batch.dtype.width)
    return {
        "dense_bytes": table.dense_bytes,
        "changed": changed.tolist(),
        "again": again,
        "ever": sum(marks.count for marks in changed_before.marks),
        "steps": dict(zip(STEPS, steps.tolist(), strict=True)),
        "classes": {dtype.name: _by_class(dtype, class_counts) for dtype, class_counts in classes.items()},
        "profiles": _profiles(old, new, threads, progress),
    }, changed_before


def _count(local_old: LocalWeights, local_new: LocalWeights, batch: Batch) -> _BatchCounts:
    dtype = batch.dtype
    old, old_alive = local_old.read(batch)
    new, new_alive = local_new.read(batch)
    positions, before, after, counts = scan(np.empty(0, dtype.uint), old, new, batch.numel)
    kind, keep = magnitude(dtype)
    shift = np.uint64(class_shift(dtype))
    classes = _ClassCounts()
    cpu.classes.key_histogram(kind, old, batch.numel, keep, shift, 1, classes.members)
    del old_alive, new_alive  # copies may go only now
    steps = steps_between(dtype, before, after)
    by_step = np.zeros((KEYS, 4), np.int64)
    cpu.classes.change_histogram(kind, keep, shift, 1, before, steps, by_step)
    classes.changed += by_step.sum(1)
    sizes = np.bincount(np.minimum(steps, len(STEPS)).astype(np.int64), minlength=len(STEPS) + 1)[1:]
    return _BatchCounts(batch, positions, counts, classes, sizes)


def _by_class(dtype: DType, classes: _ClassCounts) -> dict[str, Any]:
    keys = np.flatnonzero(classes.members)
    return {
        "shift": class_shift(dtype),
        "keys": keys.tolist(),
        "members": classes.members[keys].tolist(),
        "changed": classes.changed[keys].tolist(),
    }


def _profiles(old: Weights, new: Weights, threads: int | None, progress: Progress | None) -> dict[str, dict[str, int]]:
    """Bytes of the patch in each profile, by what they are for."""
    base: Digest | None = None
    out = {}
    for name in ("auto", *PROFILES):
        patch = diff(old, new, profile=name, base_digest=base, threads=threads, progress=progress)
        base = patch.base
        out[name] = dict(zip(PARTS, breakdown(patch), strict=True))
    return out


def breakdown(patch: Patch) -> Sequence[int]:
    """Bytes of the index, the values, dense entries, headers and checksums, and the tensor table, in this order."""
    index = value = dense = 0
    for number in range(patch.buckets):
        for stream, (_, chunks) in patch.contents.open_bucket(number)[1].left().items():
            size = sum(map(len, chunks))
            if Stream.is_dense(stream):
                dense += size
            elif _is_index(stream):
                index += size
            elif stream != Stream.CLASSES:
                value += size
    return index, value, dense, patch.nbytes - patch.table_nbytes - index - value - dense, patch.table_nbytes


def _is_index(stream: int) -> bool:
    if stream >= Stream.CLASS:
        return (stream - Stream.CLASS) % 4 < 2
    return stream == Stream.POSITIONS or Stream.TILE_TOKENS <= stream <= Stream.GAP_LOWS
