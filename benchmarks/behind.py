"""A receiver on a GPU that is several versions behind: what it takes to stage them together, and to commit them.

    python -m benchmarks.behind --versions 8 --folder /dev/shm

Weights of 6.7 B parameters, of which 0.6% change in every version; the patches are in a folder. The aim is that so many
versions take as many times one, and 50 ms. All bits are compared afterwards.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from typing import Any

import torch

from benchmarks.engine import step, timed
from benchmarks.gpu_scenes import shapes_7b
from sparserl import Publisher, Subscriber

SHARE = 0.006
SLACK_MS = 50.0


def catch_up(
    publisher: Publisher, subscriber: Subscriber, weights: dict[str, torch.Tensor], versions: int
) -> tuple[float, float]:
    """Publish some versions; the milliseconds to stage them all, and to commit."""
    for _ in range(versions):
        step(weights, SHARE, seed=1 + (publisher.version or 0))
        publisher.publish()
    torch.cuda.synchronize()
    return timed(subscriber.stage), timed(subscriber.commit)


def measure(folder: str, versions: int, scale: int, repeats: int) -> dict[str, Any]:
    """Stage and commit one version and several, in turn."""
    shapes = [(max(1, shape[0] // scale), *shape[1:]) for shape in shapes_7b()]
    weights = {f"tensor.{i}": torch.randn(shape, device="cuda").bfloat16() for i, shape in enumerate(shapes)}
    received = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    options = {"profile": "ulp", "baseline": "device", "ladder": None, "anchor_after": 1e9}
    rows: dict[int, list[tuple[float, float]]] = {1: [], versions: []}
    with (
        tempfile.TemporaryDirectory(dir=folder) as store,
        Publisher(store, weights, **options) as publisher,
        Subscriber(store, received) as subscriber,
    ):
        publisher.publish()
        subscriber.sync()
        for _ in range(repeats):
            for many, times in rows.items():
                times.append(catch_up(publisher, subscriber, weights, many))
    same = all(torch.equal(weights[n].view(torch.int16), received[n].view(torch.int16)) for n in weights)
    return {
        "parameters": sum(tensor.numel() for tensor in weights.values()),
        "same_bits": same,
        "stage_ms": {many: [round(stage, 1) for stage, _ in times] for many, times in rows.items()},
        "commit_ms": {many: [round(commit, 1) for _, commit in times] for many, times in rows.items()},
        "aim_ms": round(versions * min(stage for stage, _ in rows[1]) + SLACK_MS, 1),
    }


def main() -> None:
    """Measure, and print a record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--versions", type=int, default=8)
    parser.add_argument("--folder", default="/dev/shm", help="where the store is made")
    parser.add_argument("--scale", type=int, default=1, help="divides the number of parameters")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("There is no GPU here: nothing to measure.")
    print(json.dumps(measure(options.folder, options.versions, options.scale, options.repeats)))


if __name__ == "__main__":
    main()
