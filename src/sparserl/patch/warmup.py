"""Loads, or compiles, the kernels that later versions come to need, before the first one is there."""

from __future__ import annotations

import threading
from collections.abc import Iterable

import numpy as np

from ..codec import PROFILES
from ..codec.ctx import magnitude
from ..kernels import cpu
from ..kernels.cpu.arguments import ClassChanges, ClassStreams, InTensor, Landing, Tiled
from ..weights import dlpack
from ..weights.digest import place_sums
from ..weights.dtypes import Bits, DType, UIntArray
from ..weights.local import LocalWeights
from ..weights.objects import has_items
from ..weights.region import Region
from ..weights.shards import Part, Shards
from ..weights.table import TensorTable
from .application import stage_all
from .compare import diff
from .patch import Patch
from .slicing import PROFILES as PARTIAL
from .slicing import PatchSlicer
from .staging import stage

THRESHOLDS = (4, 7)  # between classes: kernels are compiled for either number
_SHAPE = (128, 128)
_FEW = 10  # changes, for which streams are not coded
_warm: set[DType] = set()
_warming = threading.Lock()


def warm_up(weights: LocalWeights, new: LocalWeights | None = None) -> None:
    """Load or compile the kernels that syncs of weights on GPUs launch, once for a process; on a CPU nothing is done.

    new: weights that they will be compared with; None for weights that are only written to.
    """
    if not weights.gpu_streams and (new is None or not new.gpu_streams):
        return
    warm_up_cpu(spec.dtype for spec in weights.table.specs)
    if weights.has_kernels:
        from ..weights import gpu_grids, on_gpu

        on_gpu.warm_up(weights, new)
        gpu_grids.warm_up(weights)


def warm_up_cpu(dtypes: Iterable[DType]) -> None:
    """Load or compile what takes patches of weights of some dtypes, of any profile.

    Weights on GPUs need it, too: few changes and some streams are for the CPU.
    """
    with _warming:
        no_items = np.empty(0, np.int64)
        has_items({}, no_items, no_items)
        no_rows = no_items.reshape(0, 1)
        nowhere = InTensor(no_items, no_items, no_rows, no_rows, no_rows.astype(np.uint64))
        cpu.changes.locate(no_items, nowhere, no_items.astype(np.uint32), no_items)
        dlpack.warm_up()
        for dtype in {*dtypes} - _warm:
            for changes in (_FEW, _SHAPE[0] * _SHAPE[1] // 4, _SHAPE[0] * _SHAPE[1]):
                for profile in PROFILES:
                    _take_patch(dtype, profile, changes)
            for thresholds in THRESHOLDS:
                find_classes(dtype, thresholds)
            _warm.add(dtype)


def find_classes(dtype: DType, thresholds: int) -> None:
    """Read changes by class, of which there are none: that needs the same kernel."""
    old = np.zeros(64, dtype.uint)
    classes = thresholds + 1
    regions = Tiled(np.array([old.ctypes.data]), np.array([old.size]), np.array([0]), 22)
    no_words = np.zeros(1, dtype.uint)
    streams = ClassStreams(np.zeros(classes, np.uint32), np.zeros(classes, np.int64), np.zeros(1, np.uint32), no_words)
    located = ClassChanges(np.empty(0, np.uint32), np.empty(0, dtype.uint), np.empty(0, dtype.uint))
    limits = tuple(np.uint64(limit) for limit in range(1, classes))
    landing = Landing(False, dtype.sign_magnitude)
    cpu.classes.class_positions(old[:0], magnitude(dtype), regions, limits, streams, landing, located)


def _take_patch(dtype: DType, profile: str, changes: int) -> None:
    """Stage a patch, commit it, and undo that; stage it on parts, one of which lies transposed."""
    size = _SHAPE[0] * _SHAPE[1]
    old = np.zeros(size, dtype.uint)
    new = old.copy()
    new[:: size // changes] = 1
    weights = {"w": Bits(old.reshape(_SHAPE), dtype)}
    patch = diff(weights, {"w": Bits(new.reshape(_SHAPE), dtype)}, profile=profile)
    patch = Patch.from_bytes(patch.to_bytes())
    stage_all(patch.contents, weights).commit()()
    if profile in PARTIAL:
        local = LocalWeights.of(_halves(patch.contents.table, old.reshape(_SHAPE), dtype))
        place_sums(local)
        for bucket in patch.contents.arrivals():
            stage(local, PatchSlicer(local).slice(patch.contents.decode(bucket, local).in_order()))


def _halves(table: TensorTable, bits: UIntArray, dtype: DType) -> Shards:
    """Copies of the left and the right half of a tensor, the right one transposed."""
    rows, columns = _SHAPE
    middle = columns // 2
    left = Part("w", Region((0, 0), (rows, middle)), Bits(bits[:, :middle].copy(), dtype))
    right = Part("w", Region((0, middle), (rows, middle)), Bits(bits[:, middle:].T.copy().T, dtype))
    return Shards(table, [left, right])
