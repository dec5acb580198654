"""Publishing fp32 weights of FSDP2 in bf16, beside publishing bf16 weights of the same values.

    python -m benchmarks.casting [--layers 4] [--to store|group] [--folder DIR] [--out FILE]

The model has the shapes of a Llama: 4 layers are 1.07 billion parameters, 32 are 6.74 billion. One process holds it
twice, sharded by `fully_shard` over a group of one rank (NCCL on a GPU, Gloo without one), with the baselines where the
weights are. Weights are made on the device, tensor by tensor. Before every sync a share of the bf16 elements moves by
one step, and every fp32 element by less. Both publishers must give the same digest; then the times count.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

import sparserl

_WARM_UPS = 2  # syncs that do not count, the first of which is the anchor
_STEP_BIT = 16  # of an fp32 pattern: the lowest that its bf16 has, too


class Size(NamedTuple):
    """How large the model is."""

    layers: int = 4
    hidden: int = 4096
    inner: int = 11008
    vocabulary: int = 32000


class _Layer(nn.Module):
    """The weights of one layer of a Llama."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        for name in ("q", "k", "v", "o"):
            self.register_module(name, nn.Linear(size.hidden, size.hidden, bias=False))
        self.gate = nn.Linear(size.hidden, size.inner, bias=False)
        self.up = nn.Linear(size.hidden, size.inner, bias=False)
        self.down = nn.Linear(size.inner, size.hidden, bias=False)
        self.norms = nn.Parameter(torch.empty(2, size.hidden))


class _Model(nn.Module):
    """The weights of a Llama."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embed = nn.Embedding(size.vocabulary, size.hidden)
        self.layers = nn.ModuleList(_Layer(size) for _ in range(size.layers))
        self.head = nn.Linear(size.hidden, size.vocabulary, bias=False)


def _sharded(size: Size, dtype: torch.dtype, device: str) -> nn.Module:
    """A model whose parameters are DTensors, without values."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    with torch.device("meta"):
        model = _Model(size).to(dtype)
    mesh = init_device_mesh(device, (1,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model.to_empty(device=device)


def _shards(model: nn.Module) -> Iterator[torch.Tensor]:
    """What this rank has of every parameter."""
    for parameter in model.parameters():
        yield parameter.detach().to_local()  # type: ignore[attr-defined]  # a DTensor


def _initialize(masters: nn.Module, weights: nn.Module) -> None:
    for wide, narrow in zip(_shards(masters), _shards(weights), strict=True):
        wide.normal_(std=0.02)
        narrow.copy_(wide)


def _train(masters: nn.Module, weights: nn.Module, density: float) -> None:
    """Move a share of the bf16 elements by one step, and all fp32 elements by less."""
    for wide, narrow in zip(_shards(masters), _shards(weights), strict=True):
        bits = wide.view(torch.int32)
        bits ^= 1
        bits ^= (torch.rand(wide.shape, device=wide.device) < density).to(torch.int32) << _STEP_BIT
        narrow.copy_(wide)


@contextlib.contextmanager
def _publisher(source: Any, options: argparse.Namespace, name: str) -> Iterator[Any]:
    """A publisher with its baseline where the weights are: to a folder, or to a group that has no other rank."""
    if options.to == "group":
        with sparserl.GroupPublisher(dist.new_group([0]), source, baseline="device") as publisher:
            yield publisher
        return
    with (
        tempfile.TemporaryDirectory(dir=options.folder) as folder,
        sparserl.Publisher(f"{folder}/{name}", source, baseline="device", ladder=None, anchor_after=1e9) as publisher,
    ):
        yield publisher


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Publish both models, in turn, as often as asked for."""
    size = Size(options.layers, options.hidden, options.inner, options.vocabulary)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with tempfile.TemporaryDirectory() as folder:
        backend = "nccl" if device == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=f"file://{folder}/group", rank=0, world_size=1)
        try:
            return _measure(size, device, options)
        finally:
            dist.destroy_process_group()


def _measure(size: Size, device: str, options: argparse.Namespace) -> dict[str, Any]:
    torch.manual_seed(0)
    masters = _sharded(size, torch.float32, device)
    weights = _sharded(size, torch.bfloat16, device)
    _initialize(masters, weights)
    sources = {
        "fp32": sparserl.sources.fsdp(masters, cast=torch.bfloat16),
        "bf16": sparserl.sources.fsdp(weights),
    }
    seconds: dict[str, list[float]] = {name: [] for name in sources}
    stages: dict[str, list[dict[str, float]]] = {name: [] for name in sources}
    peaks = dict.fromkeys(sources, 0)
    changed = 0
    with contextlib.ExitStack() as stack:
        publishers = {name: stack.enter_context(_publisher(s, options, name)) for name, s in sources.items()}
        for sync in range(_WARM_UPS + options.syncs):
            if sync:
                _train(masters, weights, options.density)
            digests = set()
            for name, publisher in publishers.items():
                elapsed, peak, report = _timed_publish(publisher, device)
                digests.add(report.digest)
                changed = report.changed
                if sync >= _WARM_UPS:
                    seconds[name].append(elapsed)
                    stages[name].append(report.seconds)
                    peaks[name] = max(peaks[name], peak)
            if len(digests) != 1:
                raise RuntimeError(f"sync {sync}: the cast of fp32 weights is not what bf16 weights are: {digests}")
        labels = {name: publisher.baseline for name, publisher in publishers.items()}
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "parameters": sum(parameter.numel() for parameter in masters.parameters()),
        "to": options.to,
        "changed": changed,
        "baseline": labels,
        "ms": {name: round(1e3 * median, 2) for name, median in medians.items()},
        "best ms": {name: round(1e3 * min(times), 2) for name, times in seconds.items()},
        "stages ms": {name: _median_stages(rows) for name, rows in stages.items()},
        "peak MiB": {name: peak >> 20 for name, peak in peaks.items()},
        "ratio": round(medians["fp32"] / medians["bf16"], 3),
    }


def _timed_publish(publisher: Any, device: str) -> tuple[float, int, sparserl.SyncReport]:
    """Seconds of a publish, the GPU memory that it took beyond what was there, and its report."""
    before = 0
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    begin = time.perf_counter()
    report = publisher.publish()
    if device == "cuda":
        torch.cuda.synchronize()
    elapsed = time.perf_counter() - begin
    peak = torch.cuda.max_memory_allocated() - before if device == "cuda" else 0
    return elapsed, peak, report


def _median_stages(rows: list[dict[str, float]]) -> dict[str, float]:
    return {name: round(1e3 * statistics.median(row.get(name, 0.0) for row in rows), 2) for name in rows[0]}


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    defaults = Size()
    parser.add_argument("--layers", type=int, default=defaults.layers)
    parser.add_argument("--hidden", type=int, default=defaults.hidden)
    parser.add_argument("--inner", type=int, default=defaults.inner)
    parser.add_argument("--vocabulary", type=int, default=defaults.vocabulary)
    parser.add_argument("--syncs", type=int, default=7)
    parser.add_argument("--density", type=float, default=0.006, help="share of the bf16 elements that change")
    parser.add_argument("--to", choices=("store", "group"), default="store")
    parser.add_argument(
        "--folder", type=Path, help="where the stores are; in memory, such as /dev/shm, if there is room"
    )
    parser.add_argument("--out", type=Path)
    return parser


def main() -> None:
    options = parser().parse_args()
    figures = measure(options)
    print(json.dumps(figures, indent=1))
    print(f"publishing from fp32 takes {figures['ratio']} of the time that publishing from bf16 takes")
    if options.out is not None:
        options.out.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
