"""Finding changes: our kernel against the ceiling, against PyTorch, and on many small tensors."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import sparserl
import sparserl.weights.dtypes
from benchmarks import ceiling
from benchmarks.traces import Bits
from sparserl.parallel import ordered
from sparserl.patch.cpu_compare import scan  # what `sparserl.diff` runs on every batch
from sparserl.weights.batches import PIECE_BYTES

SMALL = 10_000
SMALL_MOST = 5_000


@dataclass(frozen=True)
class Finding:
    """Dense GB/s of diff-and-compact, and what it is held against, all from one run."""

    bytes: int
    density: float
    one_thread: float
    two_threads: float
    torch_one: float
    torch_two: float
    ceilings: ceiling.Ceilings
    small_kernel_ratio: float  # time of 10,000 small tensors over the time of the same bytes in one
    small_diff_ratio: float  # the same for a whole `sparserl.diff`, one thread
    digest_one_thread: float
    digest_two_threads: float

    @property
    def share_one(self) -> float:
        return self.one_thread / self.ceilings.two_stream_1

    @property
    def share_two(self) -> float:
        return self.two_threads / self.ceilings.two_stream_2


def best(work: Callable[[], Any], repeats: int) -> float:
    """Seconds of the fastest of several runs."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def measure(old: Bits, new: Bits, rounds: int = 4) -> Finding:
    """Ceilings and kernels take turns, so that a slow moment hits all of them; the best of each counts."""
    took: dict[str, list[float]] = {}
    ceilings: list[ceiling.Ceilings] = []
    held = {"w": sparserl.Bits(old, sparserl.weights.dtypes.BY_NAME["bfloat16"])}
    for _ in range(rounds):
        ceilings.append(ceiling.measure(old.nbytes, repeats=3))
        for threads in (1, 2):
            took.setdefault(f"diff {threads}", []).append(best(lambda t=threads: find(old, new, t), 6))
            took.setdefault(f"digest {threads}", []).append(best(lambda t=threads: sparserl.digest(held, threads=t), 2))
    for threads in (1, 2):  # when all others are done: for a while, its threads wait for more by turning round
        took[f"torch {threads}"] = [best(lambda t=threads: torch_way(old, new, t), rounds)]
    seconds = {name: min(all_) for name, all_ in took.items()}
    small = many_small(old, new)
    return Finding(
        old.nbytes,
        float(np.count_nonzero(old != new)) / old.size,
        old.nbytes / seconds["diff 1"],
        old.nbytes / seconds["diff 2"],
        old.nbytes / seconds["torch 1"],
        old.nbytes / seconds["torch 2"],
        ceiling.best(ceilings),
        *small,
        old.nbytes / seconds["digest 1"],
        old.nbytes / seconds["digest 2"],
    )


def find(old: Bits, new: Bits, threads: int) -> int:
    """Positions, old and new bits of all changes, piece by piece, as the library finds them."""
    step = PIECE_BYTES // old.itemsize
    tag = np.empty(0, old.dtype)

    def one(at: int) -> int:
        size = np.array([min(step, old.size - at)], np.int64)
        here = (np.array([a.ctypes.data + at * a.itemsize], np.int64) for a in (old, new))
        return int(scan(tag, *here, size)[0].size)

    return sum(ordered(one, range(0, old.size, step), threads))


def torch_way(old: Bits, new: Bits, threads: int) -> Any:
    """`ne`, `nonzero`, gather: what the frameworks do."""
    torch.set_num_threads(threads)
    before, after = (torch.from_numpy(a.view(np.int16)) for a in (old, new))
    where = torch.ne(before, after).nonzero().squeeze(1)
    return where.to(torch.int32), before[where], after[where]


def many_small(old: Bits, new: Bits) -> tuple[float, float]:
    """10,000 tensors of 1 to 5,000 elements against the same bytes in one: the kernel alone, and all of `diff`."""
    sizes = np.random.default_rng(0).integers(1, SMALL_MOST + 1, SMALL)
    total = int(sizes.sum())
    cuts = np.cumsum(sizes) - sizes
    one = tuple(a[:total].copy() for a in (old, new))
    tag = np.empty(0, old.dtype)
    starts = [np.array([a.ctypes.data], np.int64) for a in one]
    spread = [s + cuts * old.itemsize for s in starts]
    whole = best(lambda: scan(tag, *starts, np.array([total], np.int64)), 7)
    parts = best(lambda: scan(tag, *spread, sizes), 7)
    bf16 = torch.bfloat16
    joined = [{"w": torch.from_numpy(a.view(np.int16)).view(bf16)} for a in one]
    apart = [{f"t{i}": t.clone() for i, t in enumerate(w["w"].split(sizes.tolist()))} for w in joined]
    together = best(lambda: sparserl.diff(*joined, threads=1), 5)
    alone = best(lambda: sparserl.diff(*apart, threads=1), 5)
    return parts / whole, alone / together
