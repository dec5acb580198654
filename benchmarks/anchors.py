"""What an anchor costs: CPU seconds per GB on one core, to make as a publisher does, and to take.

`python -m benchmarks.anchors` prints a line of JSON for each kind. Every turn is a process of its own, since the first
anchor of a process also has to sum up the zeros that it is a patch of.

`python -m benchmarks.anchors --gpu --bytes 2e9` takes an anchor on a GPU instead, from host memory to weights whose
digest is right: coded and decoded there, coded and decoded by the host, and dense. Seconds are by the host's clock,
medians after one turn that does not count; every result is compared bit for bit.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.fresh import told
from sparserl.patch.contents import BucketList, Contents
from sparserl.session.anchors import anchor_of, begin_restoration, restored
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


def measure_on_gpu(nbytes: int, turns: int, device: str = "cuda") -> dict[str, dict[str, float]]:
    """Seconds, CPU seconds and MiB of GPU memory beside the new weights that it takes to build these on a GPU."""
    import torch

    from sparserl.patch import gpu_apply

    usual = gpu_apply.FEW_BYTES
    tensors = weights(nbytes)
    new = {name: torch.from_numpy(bits.array.view(np.int16)).view(torch.bfloat16) for name, bits in tensors.items()}
    live = {name: torch.zeros_like(tensor, device=device) for name, tensor in new.items()}
    size = sum(tensor.nbytes for tensor in live.values())
    ways = {"coded, by the GPU": ("gap", usual), "coded, by the host": ("gap", 1 << 62), "dense": ("raw", usual)}
    anchors = {}
    for profile in ("gap", "raw"):
        encoding = EncodingOptions(profile, link=None, threads=None, progress=None)
        anchors[profile] = anchor_of(tensors, encoding, BucketList()).contents
    rows: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    for turn in range(turns + 1):
        for way, (profile, gpu_apply.FEW_BYTES) in ways.items():
            anchor = anchors[profile]
            row, fresh = _taken(anchor, live, size)
            if not all(torch.equal(fresh[name].cpu().view(torch.int16), new[name].view(torch.int16)) for name in new):
                raise SystemExit(f"wrong: {way}")
            del fresh
            if turn:
                rows[way].append({**row, "coded_bytes": anchor.nbytes, "bytes": size})
    gpu_apply.FEW_BYTES = usual
    return {way: {key: statistics.median(row[key] for row in some) for key in some[0]} for way, some in rows.items()}


def _taken(anchor: Contents, live: dict[str, Any], size: int) -> tuple[dict[str, float], dict[str, Any]]:
    """What it takes to build weights beside others from an anchor whose buckets nobody has looked at yet."""
    import torch

    buckets = BucketList.of(anchor.bucket(index) for index in range(len(anchor)))
    unread = Contents(anchor.table, anchor.ends, buckets)
    on_gpu = next(iter(live.values())).is_cuda
    before = 0
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    restoration = begin_restoration(unread, live)
    began = time.perf_counter()
    cpu = cpu_seconds(restoration.run)
    if on_gpu:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    peak = torch.cuda.max_memory_allocated() - before - size if on_gpu else 0
    return {"s": seconds, "cpu_s": cpu, "peak_mib": peak / 2**20}, restoration.weights


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bytes", type=float, default=1e9, help="of weights")
    parser.add_argument("--turns", type=int, default=3, help="processes of each kind")
    parser.add_argument("--kind", choices=sorted(_KINDS), help="measure one kind in this process")
    parser.add_argument("--gpu", action="store_true", help="take a coded anchor on a GPU")
    options = parser.parse_args()
    if options.gpu:
        for way, figures in measure_on_gpu(int(options.bytes), options.turns).items():
            print(json.dumps({"way": way, **{key: round(value, 4) for key, value in figures.items()}}), flush=True)
        return
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
