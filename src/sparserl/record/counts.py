"""The changes of one sync, counted: by tensor, expert, magnitude and size, and how many elements changed before."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ..codec.ctx import KEYS, magnitude
from ..errors import TensorMismatch
from ..kernels import cpu
from ..patch.decode import flatten
from ..patch.located import relative
from ..plan import steps_between
from ..weights.batches import Batch
from ..weights.dtypes import DType, UIntArray
from ..weights.local import LocalWeights
from ..weights.marks import Bitmap
from ..weights.region import Region
from ..weights.shards import Place
from ..weights.table import TensorTable
from .kinds import fused_experts

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
_SPAN = 1 << 32  # positions that marks are set at together


def class_shift(dtype: DType) -> int:
    """How far a magnitude is shifted to get its class: the exponent of a float, else the highest byte."""
    if dtype.name in EXPONENTS:
        return EXPONENTS[dtype.name][0]
    return max(0, 8 * dtype.width - dtype.sign_magnitude - 8)


class ChangedBefore:
    """Which elements have changed so far, one bit for each element of the parts at hand."""

    def __init__(self, table: TensorTable, places: Sequence[Place]) -> None:
        self.table = table
        self.places = list(places)
        self._marks: dict[int, list[tuple[Region | None, Bitmap]]] = {}
        for tensor, region in self.places:
            numel = table.specs[tensor].numel if region is None else region.numel
            self._marks.setdefault(tensor, []).append((region, Bitmap(numel)))

    def require(self, table: TensorTable, places: Sequence[Place]) -> None:
        """Refuse a sync of other tensors, or of other parts of them."""
        self.table.require(table, "the syncs before", "this one")
        if self.places != list(places):
            raise TensorMismatch("this sync is of other parts of the tensors than those before; record it elsewhere")

    @property
    def count(self) -> int:
        """How many elements have changed."""
        return sum(marks.count for parts in self._marks.values() for _, marks in parts)

    def add(self, tensor: int, region: Region | None, flat: Counts) -> int:
        """Mark changes of a region, by their positions in the tensor; returns how many of them were marked before."""
        part, marks = next(
            (part, marks)
            for part, marks in self._marks[tensor]
            if part is None or (region is not None and region.inside(part))
        )
        positions = relative(self.table, (tensor, part), flat)
        again = (marks.words[positions >> 6] >> (positions & 63).astype(np.uint64)) & np.uint64(1)
        for span in np.unique(positions // _SPAN).tolist():
            inside = positions[positions // _SPAN == span] - span * _SPAN
            marks.add(inside.astype(np.uint32), span * _SPAN)
        return int(again.sum())


@dataclass
class ClassCounts:
    """Elements and changes of one dtype, by magnitude class."""

    members: Counts = field(default_factory=lambda: np.zeros(KEYS, np.int64))
    changed: Counts = field(default_factory=lambda: np.zeros(KEYS, np.int64))

    @classmethod
    def of_members(cls, batch: Batch, addresses: Any) -> ClassCounts:
        """The elements of a batch, by the class of their bits."""
        kind, keep = magnitude(batch.dtype)
        counts = cls()
        shift = np.uint64(class_shift(batch.dtype))
        cpu.classes.key_histogram(kind, addresses, batch.numel, keep, shift, 1, counts.members)
        return counts

    def add(self, other: ClassCounts) -> None:
        self.members += other.members
        self.changed += other.changed

    def columns(self, dtype: DType) -> dict[str, Any]:
        """The classes that have members, as a line has them."""
        keys = np.flatnonzero(self.members)
        return {
            "shift": class_shift(dtype),
            "keys": keys.tolist(),
            "members": self.members[keys].tolist(),
            "changed": self.changed[keys].tolist(),
        }


@dataclass(frozen=True)
class RegionChanges:
    """The changes of some regions of one dtype, counted by class and step.

    Without the old bits both are empty.
    """

    dtype: DType
    tensor: Counts
    region: Sequence[Region | None]
    count: Counts
    positions: npt.NDArray[np.uint32]  # in each region
    classes: ClassCounts
    steps: Counts

    @classmethod
    def of(
        cls,
        dtype: DType,
        tensor: Counts,
        region: Sequence[Region | None],
        count: Counts,
        positions: npt.NDArray[np.uint32],
        old_bits: UIntArray | None,
        new_bits: UIntArray,
    ) -> RegionChanges:
        """Count changes; the bits are those of the changed elements."""
        classes = ClassCounts()
        sizes = np.zeros(len(STEPS), np.int64)
        if old_bits is not None:
            kind, keep = magnitude(dtype)
            steps = steps_between(dtype, old_bits, new_bits)
            by_step = np.zeros((KEYS, 4), np.int64)
            shift = np.uint64(class_shift(dtype))
            cpu.classes.change_histogram(kind, keep, shift, 1, old_bits, steps, by_step)
            classes.changed += by_step.sum(1)
            sizes += np.bincount(np.minimum(steps, len(STEPS)).astype(np.int64), minlength=len(STEPS) + 1)[1:]
        return cls(dtype, tensor, region, count, positions, classes, sizes)


class SyncCounts:
    """All changes of one sync, added up."""

    def __init__(self, changed_before: ChangedBefore) -> None:
        self._changed_before = changed_before
        self._table = changed_before.table
        self._changed = np.zeros(len(self._table), np.int64)
        self._again = np.zeros(len(self._table), np.int64)
        self._steps = np.zeros(len(STEPS), np.int64)
        self._classes: dict[DType, ClassCounts] = defaultdict(ClassCounts)
        self._experts = {
            tensor: np.zeros(spec.shape[0], np.int64)
            for tensor, spec in enumerate(self._table.specs)
            if fused_experts(spec.name, spec.shape)
        }

    def add(self, changes: RegionChanges) -> None:
        np.add.at(self._changed, changes.tensor, changes.count)
        self._steps += changes.steps
        self._classes[changes.dtype].add(changes.classes)
        cuts = np.cumsum(changes.count)[:-1]
        rows = zip(changes.tensor.tolist(), changes.region, np.split(changes.positions, cuts), strict=True)
        for tensor, region, positions in rows:
            flat = flatten(self._table, (tensor, region), positions)
            self._again[tensor] += self._changed_before.add(tensor, region, flat)
            if (experts := self._experts.get(tensor)) is not None:
                spec = self._table.specs[tensor]
                experts += np.bincount(flat // max(1, spec.numel // spec.shape[0]), minlength=experts.size)

    def add_members(self, dtype: DType, counts: ClassCounts) -> None:
        """Elements of the old version, changed or not."""
        self._classes[dtype].add(counts)

    def line(self, *, with_bits: bool = True) -> dict[str, Any]:
        """The figures by the names of a recording. Without old bits, nothing is known of classes and steps."""
        specs = self._table.specs
        places = self._changed_before.places
        figures: dict[str, Any] = {
            "dense_bytes": sum(
                specs[t].dtype.width * (specs[t].numel if region is None else region.numel) for t, region in places
            ),
            "changed": self._changed.tolist(),
            "again": int(self._again.sum()),
            "again_by_tensor": self._again.tolist(),
            "ever": self._changed_before.count,
            "steps": dict(zip(STEPS, self._steps.tolist(), strict=True)) if with_bits else {},
            "classes": {dtype.name: c.columns(dtype) for dtype, c in self._classes.items()} if with_bits else {},
        }
        experts = {specs[tensor].name: counts.tolist() for tensor, counts in self._experts.items()}
        return figures | ({"experts": experts} if experts else {})


def count_members(weights: LocalWeights, batch: Batch) -> tuple[DType, ClassCounts]:
    """The elements of a batch by magnitude class."""
    addresses, owners = weights.read(batch)
    counts = ClassCounts.of_members(batch, addresses)
    del owners  # copies may go only now
    return batch.dtype, counts
