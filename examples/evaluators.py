"""Evaluation beside training: two evaluators take every tenth version of a run, each in a process of its own.

    python examples/evaluators.py
    python examples/evaluators.py --store s3://bucket/run --versions 40 --every 10

The trainer fits a line and publishes after every step; its store keeps little more than the newest version. Training
does not wait for evaluators: those that are behind take the versions they need in turn, because their leases keep the
patches. The version that is being evaluated is pinned, so that it stays however long that takes.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import sparserl

FEATURES = 512
ROWS = 2048


def problem(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Inputs, and what a line through the origin makes of them, with noise."""
    random = np.random.default_rng(seed)
    inputs = random.normal(size=(ROWS, FEATURES)).astype(np.float32)
    line = np.random.default_rng(0).normal(size=FEATURES).astype(np.float32)
    return inputs, inputs @ line + random.normal(size=ROWS).astype(np.float32)


def error(weights: np.ndarray, inputs: np.ndarray, outputs: np.ndarray) -> float:
    """The mean squared error."""
    return float(np.mean((inputs @ weights - outputs) ** 2))


def train(store: str, versions: int, evaluators: int) -> None:
    """Publish versions, as fast as it goes once every evaluator holds the first."""
    inputs, outputs = problem(1)
    weights = {"line": np.ones(FEATURES, np.float32)}
    with sparserl.Publisher(store, weights, keep_anchors=1, anchor_after=2.0, ladder=None) as publisher:
        publisher.publish(step=0)
        publisher.wait(0, evaluators)
        for step in range(1, versions):
            gradient = inputs.T @ (inputs @ weights["line"] - outputs) / len(outputs)
            largest = np.argsort(-np.abs(gradient))[:64]
            weights["line"][largest] -= 0.5 * gradient[largest]
            publisher.publish(step=step)


def evaluate(store: str, name: str, last: int, every: int, results: Path) -> None:
    """Follow every so many versions up to the last, and write down the error of each on data of our own."""
    inputs, outputs = problem(2)
    weights = {"line": np.zeros(FEATURES, np.float32)}
    rows: list[dict[str, float]] = []

    def evaluated(report: sparserl.SyncReport) -> None:
        rows.append({"version": report.version, "error": error(weights["line"], inputs, outputs)})

    with sparserl.Subscriber(store, weights, name=name) as subscriber:
        is_last = lambda: subscriber.version == last  # noqa: E731
        subscriber.follow(every=every, pin=name, on_commit=evaluated, stop=is_last, timeout=600)
    sparserl.unpin(store, name)
    results.write_text(json.dumps(rows))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", help="where to publish; by default a temporary folder")
    parser.add_argument("--versions", type=int, default=40)
    parser.add_argument("--every", type=int, default=10)
    options = parser.parse_args(arguments)
    last = (options.versions - 1) // options.every * options.every
    names = ("eval-1", "eval-2")
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        store = options.store or f"{folder}/store"
        processes = [
            context.Process(target=evaluate, args=(store, name, last, options.every, Path(folder) / name))
            for name in names
        ]
        for process in processes:
            process.start()
        train(store, options.versions, len(names))
        for process in processes:
            process.join()
        if any(process.exitcode for process in processes):
            sys.exit("an evaluator failed")
        for name in names:
            for row in json.loads((Path(folder) / name).read_text()):
                print(f"{name}: version {row['version']}, error {row['error']:.4f}")


if __name__ == "__main__":
    main()
