"""`python -m benchmarks.upkeep`: how long each publish takes, and what squashed patches behind it cost a trainer.

fp32 masters take steps of Adam's size, and are published in bf16, as in RL. Between two publishes a trainer multiplies
matrices for a while; how often it gets to do so shows what upkeep takes from it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import sparserl

_LAYER = ((1536, 1536), (256, 1536), (256, 1536), (1536, 1536), (8960, 1536), (8960, 1536), (1536, 8960))  # 1.5 B
_EMBEDDING = (151936, 1536)


def parameters(layers: int, device: str) -> dict[str, torch.Tensor]:
    """Weights on the grid of bf16, as a run begins with them."""
    torch.manual_seed(0)
    shapes = [*_LAYER * layers, _EMBEDDING]
    return {f"w{i}": (torch.randn(shape, device=device) * 0.02).bfloat16().float() for i, shape in enumerate(shapes)}


def train(weights: dict[str, torch.Tensor], seconds: float, lr: float) -> int:
    """A step of every weight, and multiplications until the time is up; how many there were."""
    for weight in weights.values():
        weight.add_(torch.randn_like(weight), alpha=lr)
    device = next(iter(weights.values())).device
    size = 4096 if device.type == "cuda" else 128
    a = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    end = time.perf_counter() + seconds
    count = 0
    while time.perf_counter() < end:
        for _ in range(20):
            a @ a
        if device.type == "cuda":
            torch.cuda.synchronize()
        count += 20
    return count


def measure(args: argparse.Namespace) -> dict[str, Any]:
    weights = parameters(args.layers, args.device)
    source = sparserl.sources.module(torch.nn.ParameterDict(weights), cast=torch.bfloat16)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        options = {"baseline": args.baseline, "profile": "ctx", **({} if args.ladder else {"ladder": None})}
        with sparserl.Publisher(f"file://{folder}/store", source, **options) as publisher:
            for version in range(args.versions + 1):
                work = train(weights, args.seconds if version else 0, args.lr)
                start = time.perf_counter()
                report = publisher.publish()
                row = {"version": version, "ms": round(1e3 * (time.perf_counter() - start), 1), "work": work}
                row |= {"density": round(report.density, 5), "bytes": report.bytes, "notes": report.notes}
                rows.append(row | {"stages": {stage: round(1e3 * s, 1) for stage, s in report.seconds.items()}})
            start = time.perf_counter()
        closing = time.perf_counter() - start
    later = [row["ms"] for row in rows if row["version"] >= args.skip]
    work = [row["work"] for row in rows if row["version"] >= args.skip]
    return {
        "elements": sum(weight.numel() for weight in weights.values()),
        "baseline": args.baseline,
        "ladder": args.ladder,
        "median_ms": statistics.median(later),
        "slowest_ms": max(later),
        "slowest_by_median": round(max(later) / statistics.median(later), 2),
        "trainer_work": statistics.mean(work),
        "close_s": round(closing, 2),
        "device": torch.cuda.get_device_name() if args.device == "cuda" else "cpu",
        "rows": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--versions", type=int, default=72)
    parser.add_argument("--skip", type=int, default=8, help="versions that are not counted: kernels are loaded")
    parser.add_argument("--seconds", type=float, default=1.5, help="that the trainer works between two publishes")
    parser.add_argument("--lr", type=float, default=1e-6)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--baseline", default="device", choices=("device", "host"))
    parser.add_argument("--no-ladder", dest="ladder", action="store_false", help="without squashed patches")
    parser.add_argument("--out", type=Path, help="write the figures to this file as JSON")
    args = parser.parse_args()
    result = measure(args)
    print(json.dumps({name: value for name, value in result.items() if name != "rows"}, indent=1))
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
