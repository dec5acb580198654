"""The rollout's side of the demo: start from zeros, apply every patch of a folder as it appears, verify each version.

It speaks JSON lines on stdout: first `{"ready": true}`, then for every version
`{"version": 7, "seconds": 0.004, "digest": "…"}`, where the digest is that of all live weights, read anew.
Whatever goes wrong is one line `{"refused": "…"}`, the same text on stderr, and exit code 1: weights are bit-exact, or
nothing further is applied.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import small_transformer
import torch

import sparserl

PAUSE = 0.005  # seconds between two looks into the folder


class Refused(Exception):
    """A version that did not come, or is not what the trainer published."""


def compile_kernels() -> float:
    """Send weights of the demo's shapes there and back once, so that nothing is compiled later. Returns seconds."""
    started = time.perf_counter()
    live, dense = small_transformer.zeros(), small_transformer.published(small_transformer.Adder())
    sparse = {name: tensor.clone() for name, tensor in dense.items()}
    for tensor in sparse.values():
        tensor.view(-1)[::50] *= 1.01
    for weights in (dense, sparse):
        sparserl.diff(live, weights).apply(live)
    sparserl.digest(live)
    return time.perf_counter() - started


def follow(folder: Path, last: int, patience: float) -> None:
    """Apply and verify the versions 0 to `last`, telling about each."""
    weights = small_transformer.zeros()
    digest = sparserl.digest(weights)
    for version in range(last + 1):
        path = folder / f"{version:06}.patch"
        await_file(path, patience)
        started = time.perf_counter()
        try:
            patch = sparserl.Patch.open(path)
            applied = patch.apply(weights, digest=digest)  # we know what we hold: no full read, O(changed)
        except (sparserl.SparserlError, OSError) as error:
            raise Refused(f"version {version} ({path}): {type(error).__name__}: {error}") from error
        seconds = time.perf_counter() - started
        digest = applied.digest
        live = sparserl.digest(weights)
        if not live == digest == patch.result:
            raise Refused(f"version {version} ({path}): live weights {live}, tracked {digest}, sent {patch.result}")
        tell(version=version, seconds=seconds, digest=live.hex)


def await_file(path: Path, patience: float) -> None:
    """Return when the file is there: a patch takes its name when it is whole."""
    deadline = time.monotonic() + patience
    while not path.exists():
        if time.monotonic() > deadline:
            raise Refused(f"{path} did not appear within {patience:g} s; is the trainer still running?")
        time.sleep(PAUSE)


def tell(**fact: Any) -> None:
    """One JSON line for whoever listens."""
    print(json.dumps(fact), flush=True)


def main() -> int:
    """Follow a folder; 0 when every version up to the last was verified."""
    parser = argparse.ArgumentParser(description="Apply every patch of a folder as it appears and verify each version.")
    parser.add_argument("folder", type=Path, help="where the patches appear, as 000000.patch, 000001.patch, …")
    parser.add_argument("--last", type=int, required=True, help="the version to stop after")
    parser.add_argument("--patience", type=float, default=300, help="seconds to wait for a patch (default %(default)s)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    try:
        compile_kernels()
        tell(ready=True)
        follow(options.folder, options.last, options.patience)
    except Refused as refused:
        print(f"refused: {refused}", file=sys.stderr)
        tell(refused=str(refused))
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
