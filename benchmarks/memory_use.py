"""Memory beyond the inputs: what diff and apply take at their peak, measured in a process of their own.

`python -m benchmarks.memory_use` prints a line of JSON, in bytes.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np

import sparserl
from benchmarks.fresh import told
from benchmarks.traces import Weights
from sparserl.weights.dtypes import BY_NAME

T = TypeVar("T")


def measure(megabytes: int = 512, density: float = 0.006, threads: int = 2) -> dict[str, int]:
    """Peaks of a fresh process: `diff` to disk and to memory, and `apply`, with the patch's size and changes."""
    arguments = [f"--megabytes={megabytes}", f"--density={density}", f"--threads={threads}"]
    return told("benchmarks.memory_use", *arguments)


def anonymous() -> int:
    """Memory of this process that no file stands behind."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


def peak(work: Callable[[], T]) -> tuple[int, T]:
    """How far memory rises while `work` runs. What was freed before goes back first.

    The kernels hold no lock, so that a sampling thread sees what they take.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    stop, seen = threading.Event(), [anonymous()]

    def watch() -> None:
        while not stop.is_set():
            seen.append(anonymous())
            time.sleep(0.001)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        result = work()
    finally:
        stop.set()
        watcher.join()
    return max(seen) - seen[0], result


def _weights(elements: int) -> Weights:
    rng = np.random.default_rng(0)
    return {f"layer.{i}": rng.integers(0, 2**16, (elements // 8 // 1024, 1024), np.uint16) for i in range(8)}


def _stepped(weights: Weights, density: float) -> Weights:
    rng = np.random.default_rng(1)
    out = {name: bits.copy() for name, bits in weights.items()}
    for bits in out.values():
        bits.reshape(-1)[rng.integers(0, bits.size, int(bits.size * density))] ^= np.uint16(1)
    return out


def _held(weights: Weights) -> dict[str, sparserl.Bits]:
    return {name: sparserl.Bits(bits, BY_NAME["bfloat16"]) for name, bits in weights.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=512)
    parser.add_argument("--density", type=float, default=0.006)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    threads = options.threads
    warm = _weights(1 << 16)
    sparserl.diff(_held(warm), _held(_stepped(warm, 0.01)), threads=threads).apply(_held(warm), threads=threads)
    old = _weights(options.megabytes << 19)
    new = _stepped(old, options.density)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "patch"
        to_disk, patch = peak(lambda: sparserl.diff(_held(old), _held(new), to=path, threads=threads))
        in_memory, kept = peak(lambda: sparserl.diff(_held(old), _held(new), threads=threads))
        applied, done = peak(lambda: patch.apply(_held(old), threads=threads))
    if kept.nbytes != patch.nbytes or any((old[name] != new[name]).any() for name in new):
        raise AssertionError("the patch did not land; its figures would be worth nothing")
    figures = {"to_disk": to_disk, "in_memory": in_memory, "applied": applied}
    print(json.dumps({"changed": done.changed, "size": patch.nbytes, **figures}))


if __name__ == "__main__":
    main()
