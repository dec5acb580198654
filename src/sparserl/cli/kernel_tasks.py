"""Compiles the kernels that sessions need before any session needs them, on several processes.

Each task does a part of what sessions do, on small weights. Tasks need different kernels for the most part; of those
that several need, one process compiles each, and the others load it.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from ..codec import PROFILES
from ..codec.coders import CODERS
from ..codec.ctx import magnitude
from ..kernels import cpu
from ..kernels.cpu.arguments import ClassEnds, Tiled
from ..parallel import default_threads
from ..patch import Patch, diff, squash
from ..patch.warmup import THRESHOLDS, find_classes, warm_up
from ..session import Publisher, Subscriber
from ..weights import dlpack
from ..weights.dtypes import BY_NAME, Bits, DType
from ..weights.local import LocalWeights
from ..weights.marks import Bitmap

_ELEMENTS = (5 << 20) // 2  # in two buckets of an anchor, so that its tensor is cut
_FEW = 1000  # changes
_MOST_PROCESSES = 4  # there is no more to share


@dataclass(frozen=True)
class Task:
    """Some kernels to compile: those that a part of a session needs for one dtype."""

    dtype: str
    part: str

    def run(self) -> int:
        """Compile or load them; returns how many functions were compiled."""
        from numba.core import event

        from ..kernels.cpu.compiling import announced

        announced()
        dtype = BY_NAME[self.dtype]
        with event.install_recorder("numba:compile") as recorder:
            _PARTS[self.part](dtype)
        return sum(row.is_start for _, row in recorder.buffer)


def tasks(dtypes: Sequence[str], *, gpu: bool) -> list[Task]:
    """All tasks for some dtypes."""
    return [Task(dtype, part) for dtype in dtypes for part in _PARTS if gpu or part != _GPU]


def has_gpu() -> bool:
    """Whether there is an NVIDIA driver; asking torch would take seconds."""
    return Path("/proc/driver/nvidia/version").exists()


def cache_folder() -> str:
    """Where compiled kernels are kept."""
    return str(cpu.changes.diff.stats.cache_path)  # type: ignore[attr-defined]  # of Numba


def compile_all(
    dtypes: Sequence[str], *, gpu: bool = False, processes: int | None = None
) -> Iterator[tuple[Task, int, float]]:
    """Compile the kernels for some dtypes.

    Args:
        dtypes: Their names.
        gpu: Whether to compile those for a GPU, too.
        processes: How many processes compile; None for as many as are worth it.

    Yields:
        Each task when it is done, with the number of kernels that it compiled, and the seconds since the beginning.
    """
    started = time.monotonic()
    count = processes or min(_MOST_PROCESSES, default_threads())
    with ProcessPoolExecutor(count, mp_context=get_context("spawn")) as pool:
        running = {pool.submit(task.run): task for task in tasks(dtypes, gpu=gpu)}
        for done in as_completed(running):
            yield running[done], done.result(), time.monotonic() - started


def _random_bits(dtype: DType, seed: int) -> Bits:
    most = np.iinfo(dtype.uint).max
    return Bits(np.random.default_rng(seed).integers(0, most, _ELEMENTS, dtype.uint, endpoint=True), dtype)


def _changed(bits: Bits, seed: int) -> Bits:
    after = bits.array.copy()
    after[np.random.default_rng(seed).choice(after.size, _FEW, replace=False)] ^= 1
    return Bits(after, bits.dtype)


def _classify(dtype: DType) -> None:
    """Write and read changes by class, without the coders, which another task compiles."""
    for thresholds in THRESHOLDS:
        _classify_by(dtype, thresholds)


def _classify_by(dtype: DType, thresholds: int) -> None:
    old = _random_bits(dtype, 1).array
    classes = thresholds + 1
    limits = tuple(np.uint64(limit) for limit in range(1, classes))
    regions = Tiled(np.array([old.ctypes.data]), np.array([old.size]), np.array([_FEW]), 22)
    counts = np.empty(classes, np.uint32)
    gaps = np.zeros((classes, _FEW), np.uint32)
    words = np.empty((classes, _FEW), dtype.uint)
    ends = ClassEnds(counts, *(np.array([row.ctypes.data for row in rows]) for rows in (gaps, words)))
    positions = np.arange(_FEW, dtype=np.uint32)
    steps = np.full(_FEW, 2, dtype.uint)
    cpu.classes.class_gaps(magnitude(dtype), regions, limits, positions, steps, old[:0], ends)
    find_classes(dtype, thresholds)


def _code(_: DType) -> None:
    """Write and read bytes with each coder."""
    symbols = np.minimum(np.random.default_rng(1).geometric(0.3, 1 << 16), 255).astype(np.uint8).tobytes()
    for coder in CODERS.values():
        coder.decode(coder.encode(symbols), len(symbols))


def _patch(dtype: DType, profiles: Sequence[str]) -> None:
    """Make, apply, squash and read patches."""
    first = _random_bits(dtype, 1)
    second = _changed(first, 2)
    third = _changed(second, 3)
    for profile in profiles:
        weights = {"w": Bits(first.array.copy(), dtype)}
        patches = [diff({"w": old}, {"w": new}, profile=profile) for old, new in ((first, second), (second, third))]
        squash(*patches, base=weights).stats()
        for patch in patches:
            Patch.from_bytes(patch.to_bytes()).apply(weights)


def _mark(_: DType) -> None:
    """Mark changes, as sources do that track them."""
    bitmap = Bitmap(1000)
    bitmap.add(np.arange(3, dtype=np.uint32))
    bitmap.between(0, bitmap.count)


def _follow(dtype: DType) -> None:
    """Publish an anchor and patches, and take both."""
    dlpack.warm_up()
    weights = {"w": _random_bits(dtype, 1), "b": Bits(np.ones(3, dtype.uint), dtype)}
    received = {name: Bits(np.zeros_like(bits.array), dtype) for name, bits in weights.items()}
    with (
        tempfile.TemporaryDirectory(prefix="sparserl-") as folder,
        Publisher(folder, weights) as publisher,
    ):
        publisher.publish()
        with Subscriber(folder, received) as subscriber:
            for seed in range(3):
                subscriber.sync()
                weights["w"].array[:] = _changed(weights["w"], seed).array
                publisher.publish()


def _patch_on_gpu(dtype: DType) -> None:
    """Make and apply patches of weights on a GPU."""
    import torch

    if (torch_dtype := getattr(torch, dtype.name, None)) is None:
        return
    first = _random_bits(dtype, 1)

    def on_gpu(bits: Bits) -> dict[str, torch.Tensor]:
        return {"w": torch.from_numpy(bits.array.view(np.uint8).copy()).cuda().view(torch_dtype)}

    for profile in PROFILES:
        weights = on_gpu(first)
        patch = diff(weights, on_gpu(_changed(first, 2)), profile=profile)
        Patch.from_bytes(patch.to_bytes()).apply(weights)
    warm_up(LocalWeights.of(on_gpu(first)))


_GPU = "patches on a GPU"
_PARTS: dict[str, Callable[[DType], None]] = {  # in an order that keeps two processes busy
    "classes": _classify,
    "coders": _code,
    "raw patches": lambda dtype: _patch(dtype, ("raw",)),
    "gap patches": lambda dtype: _patch(dtype, ("gap",)),
    "ulp and ctx patches": lambda dtype: _patch(dtype, ("ulp", "ctx")),
    "sessions": _follow,
    "marks": _mark,
    _GPU: _patch_on_gpu,
}
