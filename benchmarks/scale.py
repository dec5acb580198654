"""Diff and apply at growing sizes: time per gigabyte, extra memory, and when the first bucket leaves.

`python -m benchmarks.scale` prints a table; `--out` writes it as JSON. Every size runs in a process of its own. The
weights are tensors of 64 MB, all of them copies of one synthetic pair (see `benchmarks.traces`): making 4 GB of pairs
that differ would take minutes, and no tensor's cost depends on another's bits. The base's digest is held, as a running
session holds it.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

import sparserl
from benchmarks import traces
from benchmarks.fresh import told
from benchmarks.memory_use import peak
from benchmarks.traces import Bits
from sparserl.weights.dtypes import BY_NAME

SIZES = (64, 512, 4096)  # megabytes
_TENSOR = 64  # megabytes
_BF16 = BY_NAME["bfloat16"]


@dataclass(frozen=True)
class Scale:
    """One size. Memory is anonymous memory beyond the weights, at its peak; `None` where no bucket left in time."""

    bytes: int  # of one copy of the weights
    tensors: int
    changed: int
    patch_bytes: int
    buckets: int
    threads: int
    diff_seconds: float
    apply_seconds: float
    diff_memory: int
    apply_memory: int
    first_seconds: float | None  # until bytes of the first bucket were seen in the file
    first_compared: int | None  # bytes compared by then

    @property
    def diff_speed(self) -> float:
        """Dense bytes of one copy per second."""
        return self.bytes / self.diff_seconds

    @property
    def apply_speed(self) -> float:
        return self.bytes / self.apply_seconds

    @property
    def apply_per_change(self) -> float:
        """Bytes of memory that `apply` took per change."""
        return self.apply_memory / self.changed


def measure(sizes: Iterable[int] = SIZES, density: float = 0.006, threads: int = 2) -> list[Scale]:
    """All sizes, given in megabytes, one process after the other."""
    out = []
    for size in sizes:
        arguments = [f"--one={size}", f"--density={density}", f"--threads={threads}"]
        out.append(Scale(**told("benchmarks.scale", *arguments)))
    return out


class _Watch:
    """Looks at the growing file whenever some weights have been compared."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.start, self.compared = folder, time.perf_counter(), 0
        self.first: tuple[float, int] | None = None

    def __call__(self, compared: int) -> None:
        # The header waits in the writer's buffer: what shows first is a bucket. Until the patch is whole, its file
        # goes by another name.
        self.compared += compared
        if self.first is None and any(entry.stat().st_size for entry in os.scandir(self.folder)):
            self.first = time.perf_counter() - self.start, self.compared


def _held(weights: list[Bits]) -> dict[str, sparserl.Bits]:
    return {f"layer.{i:02}": sparserl.Bits(bits, _BF16) for i, bits in enumerate(weights)}


def _one(megabytes: int, density: float, threads: int, repeats: int = 2) -> Scale:
    """One size, in this process."""
    blocks = traces.synthetic(min(megabytes, _TENSOR) << 20, density, seed=0)
    tensors = max(1, megabytes // _TENSOR)
    warm = [{"w": sparserl.Bits(block[: 1 << 20].copy(), _BF16)} for block in blocks]
    sparserl.diff(*warm, threads=threads).apply(warm[0], threads=threads)  # compiles
    old, new = ([block.copy() for _ in range(tensors)] for block in blocks)
    digest = sparserl.digest(_held(old), threads=threads)
    diffs, applies, watches = [], [], []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)

        def diff(progress: _Watch | None = None) -> sparserl.Patch:
            return sparserl.diff(
                *map(_held, (old, new)),
                base_digest=digest,
                to=folder / "patch",
                threads=threads,
                progress=progress,
            )

        diff_memory, patch = peak(diff)
        for _ in range(repeats):
            (folder / "patch").unlink()
            watch = _Watch(folder)
            patch = diff(watch)
            diffs.append(time.perf_counter() - watch.start)
            watches.append(watch)

        def apply() -> sparserl.Applied:
            return patch.apply(_held(old), digest=digest, threads=threads)

        for _ in range(repeats):
            start = time.perf_counter()
            apply()
            applies.append(time.perf_counter() - start)
            _require_landed(old, new)
            for bits in old:
                bits[:] = blocks[0]
        apply_memory, _ = peak(apply)
        _require_landed(old, new)
    first = watches[int(np.argmin(diffs))].first
    return Scale(
        bytes=sum(bits.nbytes for bits in old),
        tensors=tensors,
        changed=patch.changed,
        patch_bytes=patch.nbytes,
        buckets=patch.buckets,
        threads=threads,
        diff_seconds=min(diffs),
        apply_seconds=min(applies),
        diff_memory=diff_memory,
        apply_memory=apply_memory,
        first_seconds=None if first is None else first[0],
        first_compared=None if first is None else first[1],
    )


def _require_landed(old: list[Bits], new: list[Bits]) -> None:
    if not all(map(np.array_equal, old, new)):
        raise AssertionError("the patch did not land; its figures would be worth nothing")


def render(scales: list[Scale]) -> str:
    """The table, in Markdown."""
    columns = "MB, changed, patch MB, buckets, diff GB/s, apply GB/s, diff extra MiB, apply extra MiB, per change B"
    columns += ", first bucket after, compared by then"
    lines = ["| " + columns.replace(", ", " | ") + " |", "| --- " * 11 + "|"]
    for s in scales:
        if s.first_seconds is None or s.first_compared is None:
            first = "the last comparison | all"
        else:
            first = f"{s.first_seconds:.2f} of {s.diff_seconds:.2f} s | {s.first_compared / s.bytes:.0%}"
        lines.append(
            f"| {s.bytes >> 20} | {s.changed:,} | {s.patch_bytes / 1e6:.1f} | {s.buckets} | {s.diff_speed / 1e9:.2f} "
            f"| {s.apply_speed / 1e9:.2f} | {s.diff_memory / 2**20:.0f} | {s.apply_memory / 2**20:.0f} "
            f"| {s.apply_per_change:.1f} | {first} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--density", type=float, default=0.006)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, help="write the figures to this file as JSON")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(asdict(_one(options.one, options.density, options.threads))))
        return
    scales = measure(options.megabytes, options.density, options.threads)
    if options.out:
        options.out.write_text(json.dumps([asdict(s) for s in scales], indent=1) + "\n")
    print(render(scales))


if __name__ == "__main__":
    main()
