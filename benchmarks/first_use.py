"""How long the first versions of weights on a GPU take, by version, where Triton has compiled nothing yet.

    python -m benchmarks.first_use [--mib 1024] [--share 0.01]

A subscriber of a module and a publisher with its baseline on the GPU, each in a process of its own: with an empty cache
of Triton, then with what that left there. Kernels of the CPU are as on this machine (`sparserl warmup` compiles them).
From version 1 on nothing should be left to compile. Prints seconds; without a GPU it says so and ends.
"""

from __future__ import annotations

import argparse
import functools
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.fresh import told

_VERSIONS = 4
_TENSOR_MIB = 64
_ROLES = ("subscriber", "publisher")


@contextmanager
def _timed(took: dict[str, float], name: str) -> Iterator[None]:
    began = time.perf_counter()
    yield
    took[name] = took.get(name, 0.0) + time.perf_counter() - began


def _timed_call(took: dict[str, float], name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*arguments: Any) -> Any:
        with _timed(took, name):
            return function(*arguments)

    return call


def _weights(mib: int, device: str) -> dict[str, Any]:
    import torch

    torch.manual_seed(0)
    shape = (_TENSOR_MIB << 9, 1 << 10)
    return {f"w{i}": torch.randn(shape, device=device).bfloat16() for i in range(max(1, mib // _TENSOR_MIB))}


def _step(weights: dict[str, Any], share: float) -> None:
    import torch

    for tensor in weights.values():
        tensor.view(torch.int16).bitwise_xor_((torch.rand(tensor.shape, device=tensor.device) < share).short())


def write_versions(url: str, mib: int, share: float) -> None:
    """Publish the versions that a subscriber takes."""
    import sparserl

    weights = _weights(mib, "cpu")
    with sparserl.Publisher(url, weights, keep_anchors=None, ladder=None, anchor_after=1e9) as publisher:
        for _ in range(_VERSIONS):
            publisher.publish()
            _step(weights, share)


def subscribe(url: str, mib: int) -> dict[str, float]:
    """Take the versions one by one."""
    import torch

    import sparserl
    from sparserl.targets import modules

    took: dict[str, float] = {}
    modules.warm_up = _timed_call(took, "attach: kernels", modules.warm_up)
    weights = {name: torch.zeros_like(tensor) for name, tensor in _weights(mib, "cuda").items()}
    torch.cuda.synchronize()
    with sparserl.Subscriber(url, sparserl.targets.module(weights)) as subscriber:
        for version in range(_VERSIONS):
            with _timed(took, f"version {version}: stage"):
                subscriber.stage(version)
            with _timed(took, f"version {version}: commit"):
                subscriber.commit()
        subscriber.audit()
    return took


def publish(url: str, mib: int, share: float) -> dict[str, float]:
    """Publish versions from a baseline on the GPU."""
    import torch

    import sparserl
    from sparserl.session import baseline

    took: dict[str, float] = {}
    baseline.warm_up = _timed_call(took, "first publish: kernels", baseline.warm_up)
    weights = _weights(mib, "cuda")
    with sparserl.Publisher(url, weights, baseline="device", ladder=None, anchor_after=1e9) as publisher:
        for version in range(_VERSIONS):
            torch.cuda.synchronize()
            with _timed(took, f"version {version}: publish"):
                report = publisher.publish()
            took |= {f"version {version}: … {stage}": seconds for stage, seconds in report.seconds.items()}
            _step(weights, share)
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=1024, help="of weights in bf16")
    parser.add_argument("--share", type=float, default=0.01, help="of elements that change from version to version")
    parser.add_argument("--role", choices=_ROLES, help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role is not None:
        if options.role == "subscriber":
            took = subscribe(options.url, options.mib)
        else:
            took = publish(options.url, options.mib, options.share)
        print(json.dumps(took))
        return
    import torch

    if not torch.cuda.is_available():
        print("there is no GPU here")
        return
    common = ("--mib", str(options.mib), "--share", str(options.share))
    with tempfile.TemporaryDirectory() as folder:
        write_versions(f"{folder}/versions", options.mib, options.share)
        for role in _ROLES:
            times = []
            for turn in ("cold", "warm"):
                url = f"{folder}/versions" if role == "subscriber" else f"{folder}/{turn}"
                arguments = ("--role", role, "--url", url, *common)
                times.append(told("benchmarks.first_use", *arguments, TRITON_CACHE_DIR=f"{folder}/triton-{role}"))
            print(f"{role}: seconds with an empty cache of Triton, and with a full one")
            for name, cold in times[0].items():
                print(f"    {cold:9.3f} {times[1][name]:9.3f}  {name}")


if __name__ == "__main__":
    main()
