"""What an anchor costs: CPU seconds per GB on one core, to make as a publisher does, and to take.

`python -m benchmarks.anchors` prints a line of JSON for each kind. Every turn is a process of its own, since the first
anchor of a process also has to sum up the zeros that it is a patch of.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections.abc import Callable

import numpy as np

from benchmarks.fresh import told
from sparserl.patch.contents import BucketList
from sparserl.session.anchors import anchor_of, restored
from sparserl.session.options import EncodingOptions
from sparserl.weights.dtypes import BY_NAME, Bits

_KINDS = {"dense": "raw", "coded": "gap"}
_ROWS = 4096  # of each tensor, as many as columns
_TENSOR_BYTES = 2 * _ROWS * _ROWS


def weights(nbytes: int) -> dict[str, Bits]:
    """Normal bf16 weights, in matrices of 32 MiB."""
    rng = np.random.default_rng(0)
    matrix = (0.02 * rng.standard_normal((_ROWS, _ROWS), np.float32)).view(np.uint32) >> 16
    bits = matrix.astype(np.uint16)
    return {f"w{i}": Bits(bits + np.uint16(i), BY_NAME["bfloat16"]) for i in range(max(1, nbytes // _TENSOR_BYTES))}


def cpu_seconds(action: Callable[[], object]) -> float:
    """CPU seconds of this process, all threads, that an action takes."""
    before = resource.getrusage(resource.RUSAGE_SELF)
    action()
    after = resource.getrusage(resource.RUSAGE_SELF)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measure(kind: str, nbytes: int) -> dict[str, float]:
    """CPU seconds per GB of the first anchor of this process, of another one, and of taking it."""
    encoding = EncodingOptions(_KINDS[kind], link=None, threads=1, progress=None)
    tensors = weights(nbytes)
    size = sum(bits.array.nbytes for bits in tensors.values()) / 1e9
    some = {"w": Bits(tensors["w0"].array[:1024].copy(), BY_NAME["bfloat16"])}
    restored(anchor_of(some, encoding), 1)  # kernels are loaded off the clock

    def make() -> None:
        anchor_of(tensors, encoding, BucketList(keep=False, on_add=lambda _: None))

    first, again = cpu_seconds(make), cpu_seconds(make)
    anchor = anchor_of(tensors, encoding, BucketList())  # in memory, as it arrives
    taken = cpu_seconds(lambda: restored(anchor, 1))
    return {"first": round(first / size, 3), "again": round(again / size, 3), "take": round(taken / size, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bytes", type=float, default=1e9, help="of weights")
    parser.add_argument("--turns", type=int, default=3, help="processes of each kind")
    parser.add_argument("--kind", choices=sorted(_KINDS), help="measure one kind in this process")
    options = parser.parse_args()
    if options.kind:
        print(json.dumps(measure(options.kind, int(options.bytes))))
        return
    for kind in _KINDS:
        for _ in range(options.turns):
            began = time.perf_counter()
            row = told("benchmarks.anchors", "--kind", kind, "--bytes", str(options.bytes))
            print(json.dumps({"kind": kind, **row, "wall_s": round(time.perf_counter() - began, 1)}), flush=True)


if __name__ == "__main__":
    main()
