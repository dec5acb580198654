"""Very many small tensors, as mixtures of experts have, against one tensor with the same bytes.

    python -m benchmarks.small_tensors --tensors 10000 --bytes 512M --device cpu

Each stage is timed on both, in turn, and the best of some repeats counts.
"""

from __future__ import annotations

import argparse
import functools
import json
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import sparserl
from sparserl import Bits, Publisher, Subscriber
from sparserl.humanize import parse_number
from sparserl.weights.dtypes import BY_NAME

DENSITY = 0.006
STAGES = ("diff", "apply", "publish", "stage", "commit", "audit")


def weights(bits: Any, tensors: int, device: str) -> dict[str, Any]:
    """The same bits, cut into so many tensors of equal size."""
    pieces = [piece.copy() for piece in np.array_split(bits, tensors)]
    if device == "numpy":
        return {f"experts.{i}.weight": Bits(piece, BY_NAME["bfloat16"]) for i, piece in enumerate(pieces)}
    import torch

    return {
        f"experts.{i}.weight": torch.from_numpy(piece.view(np.int16)).to(device).view(torch.bfloat16)
        for i, piece in enumerate(pieces)
    }


def flip(weights: dict[str, Any], rng: np.random.Generator) -> None:
    """Change some elements of every tensor by one step."""
    for tensor in weights.values():
        if isinstance(tensor, Bits):
            tensor.array[rng.random(tensor.array.size) < DENSITY] ^= 1
            continue
        import torch

        where = np.flatnonzero(rng.random(tensor.numel()) < DENSITY)
        tensor.view(torch.int16)[torch.from_numpy(where).to(tensor.device)] ^= 1


def timed(work: Callable[[], Any], device: str) -> tuple[float, Any]:
    """How long work takes, and its result."""
    synchronize(device)
    start = time.perf_counter()
    result = work()
    synchronize(device)
    return time.perf_counter() - start, result


def synchronize(device: str) -> None:
    """Wait for the GPU."""
    if device == "cuda":
        import torch

        torch.cuda.synchronize()


def copied(weights: dict[str, Any]) -> dict[str, Any]:
    """A copy of weights, where they are."""
    return {
        name: Bits(tensor.array.copy(), tensor.dtype) if isinstance(tensor, Bits) else tensor.clone()
        for name, tensor in weights.items()
    }


def measure(bits: Any, tensors: int, device: str, repeats: int) -> dict[str, float]:
    """The best seconds of every stage."""
    rng = np.random.default_rng(7)
    new = weights(bits, tensors, device)
    received = copied(new)
    best = dict.fromkeys(STAGES, float("inf"))

    def note(stage: str, work: Callable[[], Any]) -> Any:
        seconds, result = timed(work, device)
        best[stage] = min(best[stage], seconds)
        return result

    baseline = "device" if device == "cuda" else "host"
    with tempfile.TemporaryDirectory() as folder:
        publisher = Publisher(folder, new, profile="ulp", baseline=baseline, ladder=None)
        subscriber = Subscriber(folder, received)
        with publisher, subscriber:
            publisher.publish()
            subscriber.sync()
            for _ in range(repeats):
                old = copied(new)
                digest = sparserl.digest(old)
                flip(new, rng)
                find = functools.partial(sparserl.diff, old, new, profile="ulp", base_digest=digest)
                patch = note("diff", find)
                note("apply", functools.partial(patch.apply, old, digest=digest))
                note("publish", publisher.publish)
                note("stage", subscriber.stage)
                note("commit", subscriber.commit)
                note("audit", subscriber.audit)
    return best


def main() -> None:
    """Measure both, and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, default=10_000)
    parser.add_argument("--bytes", type=lambda text: int(parse_number(text)), default=512_000_000)
    parser.add_argument("--device", choices=("numpy", "cpu", "cuda"), default="cpu", help="arrays, or tensors of torch")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print a record instead of a table")
    options = parser.parse_args()
    values = (np.random.default_rng(0).standard_normal(options.bytes // 2, np.float32) * 0.02).view(np.uint32) >> 16
    bits = values.astype(np.uint16)
    one = measure(bits, 1, options.device, options.repeats)
    many = measure(bits, options.tensors, options.device, options.repeats)
    if options.json:
        print(json.dumps({"one": one, "many": many, "tensors": options.tensors, "device": options.device}))
        return
    print(f"{'stage':10}{'one, ms':>12}{'many, ms':>12}{'ratio':>8}")
    for stage in STAGES:
        print(f"{stage:10}{one[stage] * 1e3:12.1f}{many[stage] * 1e3:12.1f}{many[stage] / one[stage]:8.2f}")


if __name__ == "__main__":
    main()
