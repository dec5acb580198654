"""Once an engine is attached, no patch makes it compile a kernel for the CPU, nor load one."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import pytest

import sparserl
from sparserl.integrations.ranks import EngineSubscriber
from sparserl.targets.engine import EngineTarget
from sparserl.targets.pieces import Piece
from sparserl.weights.region import Region, whole
from tests.triton_runs import run

torch = pytest.importorskip("torch")

PARTIAL = ("ulp", "gap", "raw")  # profiles for ranks that have only parts
PROFILES = ("auto", "ctx", *PARTIAL)
SHARES = (1e-5, 0.002, 0.02, 0.3, 1.0, 0.002)  # of all elements that change
COMMITS = (0, 1, 2, 3, 4, 5, 6, 2, 5)  # one patch, several, older versions; an anchor comes first
SHAPES = {"q": (640, 960), "k": (320, 960), "s": (7,)}


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_attached_engines_need_no_more_kernels(tmp_path, dtype):
    """In every profile, for few changes and many, dense entries and anchors, of whole tensors and of parts."""
    for profile in PROFILES:
        publish(tmp_path / profile, profile, getattr(torch, dtype))
    assert run("-W", "ignore", "-m", "tests.targets.test_engine_kernels", str(tmp_path), dtype) == "[]\n"


def publish(folder, profile, dtype):
    """Versions of weights of which some share changes, by steps of one and two."""
    generator = torch.Generator().manual_seed(1)
    weights = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}
    options = {"ladder": None, "anchor_after": 1e9, "keep_anchors": None}
    with sparserl.Publisher(folder, weights, profile=profile, **options) as publisher:
        publisher.publish()
        for number, share in enumerate(SHARES):
            for tensor in weights.values():
                bits = tensor.view(torch.int16 if dtype.itemsize == 2 else torch.int32)
                bits ^= (torch.rand(tensor.shape, generator=generator) < share) * (1 + number % 2)
            publisher.publish()


def follow(folder, dtype):
    """Commit versions of all runs; the names of kernels that were compiled or loaded after an engine was attached."""
    found = set()
    for profile, rows in [*((profile, 640) for profile in PROFILES), *((profile, 320) for profile in PARTIAL)]:
        with EngineSubscriber(str(folder / profile), engine(rows, dtype), 0, lambda value: [value]) as subscriber:
            subscriber.refresh()
            before = ready_kernels()
            for version in COMMITS:
                subscriber.commit_version(version)
            found |= ready_kernels() - before
    return sorted({name for name, _ in found})


def engine(rows, dtype):
    """Fused tensors, with so many rows of one; its other rows lie transposed in another tensor."""
    live = {"qkv": torch.zeros(rows + 320, 960, dtype=dtype), "s": torch.zeros(7, dtype=dtype)}
    box = whole((640, 960)) if rows == 640 else Region((0, 0), (rows, 960))
    pieces = [
        Piece("q", box, "qkv", 0, (960, 1)),
        Piece("k", whole((320, 960)), "qkv", rows * 960, (960, 1)),
        Piece("s", whole((7,)), "s", 0, (1,)),
    ]
    if rows < 640:
        live["transposed"] = torch.zeros(960, 640 - rows, dtype=dtype)
        pieces.append(Piece("q", Region((rows, 0), (640 - rows, 960)), "transposed", 0, (1, 640 - rows)))
    return EngineTarget(pieces, lambda: live)


def ready_kernels():
    """Name and signature of every kernel that is compiled or loaded."""
    from numba.core.dispatcher import Dispatcher

    kernels = [thing for thing in gc.get_objects() if issubclass(type(thing), Dispatcher)]
    ours = [kernel for kernel in kernels if kernel.py_func.__module__.startswith("sparserl.")]
    return {(kernel.py_func.__name__, signature) for kernel in ours for signature in kernel.signatures}


if __name__ == "__main__":
    print(follow(Path(sys.argv[1]), getattr(torch, sys.argv[2])))
