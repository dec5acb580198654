"""Very many small tensors, as mixtures of experts have, against one tensor with the same bytes.

    python -m benchmarks.small_tensors --tensors 10000 --bytes 512M --device cpu

Each stage is timed on both, in turn, and the best of some repeats counts. With `--count`, what each stage does on a GPU
is counted instead: kernels, copies and waits, which must not depend on the number of tensors; and calls of Python for
each tensor. Where there is no GPU, Triton's interpreter takes its place:

    TRITON_INTERPRET=1 SPARSERL_THREADS=1 python -m benchmarks.small_tensors --count --tensors 8 --bytes 1K --device cpu
"""

from __future__ import annotations

import argparse
import collections
import functools
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

import sparserl
from sparserl import Bits, Publisher, Subscriber
from sparserl.humanize import parse_number
from sparserl.weights.dtypes import BY_NAME

DENSITY = 0.006
STAGES = ("diff", "apply", "publish", "stage", "commit", "audit")
COUNTED = ("kernels", "copies", "waits", "calls")


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


class Counter:
    """Counts what happens on a GPU, or in Triton's interpreter, and calls of functions of sparserl.

    CUDA tells how many kernels, copies and waits there were. In the interpreter these are launches of Triton's kernels,
    and copies of sparserl's own; every copy to the host is one wait.
    """

    def __init__(self, device: str) -> None:
        self.counts: collections.Counter[str] = collections.Counter()
        self._is_cuda = device == "cuda"
        if not self._is_cuda:
            self._watch_interpreter()

    def _watch_interpreter(self) -> None:
        from triton.runtime.interpreter import GridExecutor

        from sparserl.kernels import gpu
        from sparserl.weights import gpu_copies, memory

        memory.is_on_gpu = lambda _: True  # every tensor passes for one on a GPU
        self._watch(GridExecutor, "__call__", "kernels", unseen=True)
        for owner in (gpu.changes.Blocks, gpu_copies):  # before other modules take functions from the latter
            self._watch(owner, "upload", "copies")
            self._watch(owner, "fetch", "copies", "waits")
        self._watch(gpu_copies, "upload_parts", "copies")
        self._watch(gpu_copies, "fetch_with_margins", "copies", "waits")

    def _watch(self, owner: Any, name: str, *kinds: str, unseen: bool = False) -> None:
        """Count calls of a function; the calls that it makes itself may be left out."""
        function = getattr(owner, name)

        @functools.wraps(function)
        def counting(*args: Any, **options: Any) -> Any:
            self.counts.update(kinds)
            note_calls = sys.getprofile()
            if unseen:
                sys.setprofile(None)
            try:
                return function(*args, **options)
            finally:
                sys.setprofile(note_calls)

        setattr(owner, name, counting)

    def _note_call(self, frame: Any, event: str, _: Any) -> None:
        if event == "call" and f"sparserl{os.sep}" in frame.f_code.co_filename:
            self.counts["calls"] += 1

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count what happens inside, on all threads that begin there."""
        self.counts.clear()
        threading.setprofile(self._note_call)
        sys.setprofile(self._note_call)
        try:
            if self._is_cuda:
                with self._cuda_counting():
                    yield
            else:
                yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    @contextmanager
    def _cuda_counting(self) -> Iterator[None]:
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CUDA]) as events:
            yield
            synchronize("cuda")
        for event in events.events() or ():
            if "Launch" in event.name:
                self.counts["kernels"] += 1
            elif event.name.startswith(("cudaMemcpy", "cuMemcpy")):
                self.counts["copies"] += 1
            elif event.name.endswith(("Synchronize", "Synchronize_v2")):
                self.counts["waits"] += 1


def measure(
    bits: Any, tensors: int, device: str, repeats: int, counter: Counter | None = None
) -> dict[str, float] | dict[str, dict[str, int]]:
    """The best seconds of every stage; or with a counter, what it counted the last time."""
    rng = np.random.default_rng(7)
    new = weights(bits, tensors, device)
    received = copied(new)
    best = dict.fromkeys(STAGES, float("inf"))
    counts: dict[str, dict[str, int]] = {}

    def note(stage: str, work: Callable[[], Any]) -> Any:
        if counter is not None:
            with counter.counting():
                result = work()
            counts[stage] = {kind: counter.counts[kind] for kind in COUNTED}
            return result
        seconds, result = timed(work, device)
        best[stage] = min(best[stage], seconds)
        return result

    baseline = "device" if device == "cuda" or counter is not None else "host"
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
    return best if counter is None else counts


def print_counts(bits: Any, tensors: int, device: str, repeats: int) -> None:
    """What every stage does for some tensors and for twice as many, and how many calls of Python a tensor takes."""
    counter = Counter(device)
    if device == "cpu":
        _code_few_changes_on_gpu()
    few = measure(bits, tensors, device, repeats, counter)
    many = measure(bits, 2 * tensors, device, repeats, counter)
    print(f"{'stage':10}{'kernels':>14}{'copies':>14}{'waits':>14}{'calls/tensor':>14}")
    for stage in STAGES:
        pairs = [f"{few[stage][kind]} → {many[stage][kind]}" for kind in COUNTED[:3]]
        calls = (many[stage]["calls"] - few[stage]["calls"]) / tensors
        print(f"{stage:10}" + "".join(f"{pair:>14}" for pair in pairs) + f"{calls:14.1f}")


def _code_few_changes_on_gpu() -> None:
    """Few changes are left to the CPU otherwise, and the interpreter can take no more than few."""
    from sparserl.patch import gpu_apply, gpu_compare

    gpu_compare.FEW_CHANGES = 0
    gpu_apply.FEW_BYTES = 0
    gpu_apply.FEW_CHANGES = 0


def main() -> None:
    """Measure both, and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, default=10_000)
    parser.add_argument("--bytes", type=lambda text: int(parse_number(text)), default=512_000_000)
    parser.add_argument("--device", choices=("numpy", "cpu", "cuda"), default="cpu", help="arrays, or tensors of torch")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print a record instead of a table")
    parser.add_argument(
        "--count", action="store_true", help="count what happens on a GPU, for twice as many tensors too"
    )
    options = parser.parse_args()
    if options.count and options.device != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        parser.error("--count takes --device cuda, or --device cpu with TRITON_INTERPRET=1")
    values = (np.random.default_rng(0).standard_normal(options.bytes // 2, np.float32) * 0.02).view(np.uint32) >> 16
    bits = values.astype(np.uint16)
    if options.count:
        print_counts(bits, options.tensors, options.device, options.repeats)
        return
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
