"""Parts on a GPU that are no runs, such as columns and what an engine has transposed, are summed up there, exactly."""

from __future__ import annotations

import numpy as np
import pytest

from sparserl import Part, Region, Shards
from sparserl.kernels import gpu
from sparserl.weights import gpu_grids
from sparserl.weights.digest import Digest, element_sums, place_sums
from sparserl.weights.dtypes import BY_NAME, Bits
from sparserl.weights.local import LocalWeights
from sparserl.weights.region import whole
from sparserl.weights.table import TensorSpec, TensorTable
from tests.dtypes import long_if_rare
from tests.patch.gpu.gpu_weights import CUDA, DEVICE, WITHOUT_KERNELS, gpu_tensor, needs_gpu, needs_kernels

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

LARGE = (300, 5001) if CUDA else (70, 301)


def bits_of(name, shape, seed=0):
    dtype = BY_NAME[name]
    raw = np.random.default_rng(seed).integers(
        0, 2 if name == "bool" else 256, int(np.prod(shape)) * dtype.width, np.uint8
    )
    return Bits(raw.view(dtype.uint).reshape(shape), dtype)


def cut(bits, region):
    """A region of a tensor, as a loader copies it into a parameter of its own."""
    return gpu_tensor(Bits(np.ascontiguousarray(bits.array[region.slices]), bits.dtype))


def transposed(bits, region, order):
    """A region whose dimensions lie in another order in the engine's memory."""
    part = bits.array[region.slices].transpose(order)
    return gpu_tensor(Bits(np.ascontiguousarray(part), bits.dtype)).permute(*np.argsort(order).tolist())


def spaced(bits, region):
    """A region in the middle of a wider parameter, at odd addresses."""
    room = np.zeros([n + 3 for n in region.size], bits.dtype.uint)
    inside = tuple(slice(1, 1 + n) for n in region.size)
    room[inside] = bits.array[region.slices]
    return gpu_tensor(Bits(room, bits.dtype))[inside]


def columns(shape, first, size):
    return Region((0,) * (len(shape) - 1) + (first,), (*shape[:-1], size))


CASES = {
    "columns": (LARGE, columns(LARGE, 40, 133), cut),
    "one column": (LARGE, columns(LARGE, 300, 1), cut),
    "one element of two rows": ((2, 2), columns((2, 2), 1, 1), cut),
    "columns of two dimensions": ((3, 5, 40), columns((3, 5, 40), 7, 11), cut),
    "long rows": ((3, 20_000), columns((3, 20_000), 1, 9001), cut),
    "rows of a block": ((3, 9000), columns((3, 9000), 5, 8192), cut),
    "almost a block": ((3, 9000), columns((3, 9000), 5, 8191), cut),
    "middle": ((6, 9, 50), Region((0, 4, 0), (6, 3, 50)), cut),
    "box": ((6, 9, 50), Region((1, 4, 3), (4, 3, 40)), cut),
    "transposed": ((90, 41), whole((90, 41)), lambda b, r: transposed(b, r, (1, 0))),
    "transposed columns": (LARGE, columns(LARGE, 40, 50), lambda b, r: transposed(b, r, (1, 0))),
    "stacked": ((2, 64, 48), columns((2, 64, 48), 8, 20), lambda b, r: transposed(b, r, (0, 2, 1))),
    "channels last": ((64, 64, 3, 3), columns((64, 64, 3, 3), 0, 3), lambda b, r: transposed(b, r, (0, 2, 3, 1))),
    "spaced": (LARGE, columns(LARGE, 40, 133), spaced),
    "spaced whole": ((33, 65), whole((33, 65)), spaced),
}


def shards(name, case, layout=None):
    shape, region, make = CASES[case]
    bits = bits_of(name, shape)
    table = TensorTable([TensorSpec("a", BY_NAME[name], (3,)), TensorSpec("w", bits.dtype, shape)])
    data = (layout or make)(bits, region)
    return Shards(table, [Part("w", region, data)])


def on_host(bits, region):
    return Bits(bits.array[region.slices], bits.dtype)


def require_same_sums(name, case):
    expected = place_sums(LocalWeights.of(shards(name, case, on_host)), 1)
    weights = LocalWeights.of(shards(name, case))
    assert weights.gpu_streams
    assert place_sums(weights, 1) == expected
    assert element_sums(weights, weights.places, 1) == sum(expected.values(), Digest())


@pytest.fixture
def nothing_is_read(monkeypatch):
    """No element of weights comes to the host."""
    from sparserl.weights import staging

    if not WITHOUT_KERNELS:
        monkeypatch.setattr(staging.StagedMemory, "read", None)
        monkeypatch.setattr(staging.StagedMemory, "view", None)


@needs_gpu
@pytest.mark.usefixtures("nothing_is_read")
@pytest.mark.parametrize("case", CASES)
def test_every_layout(case, monkeypatch):
    """The sums are those of the same parts in host memory, and none of their elements leaves the GPU."""
    monkeypatch.setattr(gpu_grids, "_LEAST_ELEMENTS", 1)  # small grids, too
    require_same_sums("bfloat16", case)


@needs_gpu
@pytest.mark.filterwarnings("ignore:ComplexHalf support")
@pytest.mark.usefixtures("nothing_is_read")
@pytest.mark.parametrize("dtype", [pytest.param(name, marks=long_if_rare(name)) for name in BY_NAME])
def test_every_dtype(dtype):
    """Elements of any width are summed up."""
    require_same_sums(dtype, "columns of two dimensions")
    require_same_sums(dtype, "stacked")


@needs_kernels
def test_many_grids_are_for_the_cpu(monkeypatch):
    """A table of them would take more memory than the elements; the sums are right all the same."""
    monkeypatch.setattr(gpu.sums, "grid_digests", None)
    shape = (6, 4, 5, 3)
    monkeypatch.setitem(CASES, "many", (shape, whole(shape), lambda b, r: transposed(b, r, (1, 3, 0, 2))))
    require_same_sums("bfloat16", "many")


@needs_kernels
def test_parts_together(monkeypatch):
    """Runs, grids of several kinds and what is in host memory, each under its own place."""
    monkeypatch.setattr(gpu_grids, "_LEAST_ELEMENTS", 1)
    shapes = {"a": (40, 30), "b": (7, 9, 11), "c": (50,), "d": (8, 16), "e": (0, 4)}
    bits = {name: bits_of("float32" if name == "d" else "bfloat16", shape) for name, shape in shapes.items()}
    table = TensorTable(TensorSpec(name, one.dtype, one.array.shape) for name, one in bits.items())

    def parts(on_device):
        def part(name, region, make):
            return Part(name, region, make(bits[name], region) if on_device else on_host(bits[name], region))

        return [
            part("a", columns(shapes["a"], 0, 10), cut),
            part("a", columns(shapes["a"], 20, 3), spaced),
            part("a", Region((5, 10), (9, 10)), lambda b, r: transposed(b, r, (1, 0))),
            part("b", whole(shapes["b"]), lambda b, r: transposed(b, r, (2, 0, 1))),
            part("c", Region((3,), (40,)), cut),
            part("d", columns(shapes["d"], 1, 7), cut),
            part("d", columns(shapes["d"], 9, 7), on_host),
            part("e", whole(shapes["e"]), cut),
        ]

    expected = place_sums(LocalWeights.of(Shards(table, parts(on_device=False))), 1)
    weights = LocalWeights.of(Shards(table, parts(on_device=True)))
    assert place_sums(weights, 1) == expected
    for _ in range(2):  # what is kept from the first time is right the second time
        assert element_sums(weights, weights.places, 1) == sum(expected.values(), Digest())


@pytest.mark.skipif(not CUDA, reason="takes 8 GiB of a GPU")
def test_very_large_parts():
    """Positions and addresses behind 2^31, and no memory beside the part."""
    shape = (3, (1 << 31) + 77)
    spec = TensorSpec("w", BY_NAME["uint8"], shape)
    region = columns(shape, 50, (1 << 31) + 5)
    data = torch.zeros(region.size, dtype=torch.uint8, device=DEVICE)
    for row in range(3):
        data[row, -1] = data[row, row] = row + 1
    weights = LocalWeights.of(Shards(TensorTable([spec]), [Part("w", region, data)]))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    sums = place_sums(weights, 1)
    assert torch.cuda.max_memory_allocated() - before < data.nbytes // 1000
    parts = [Part("w", region, Bits(data.cpu().numpy(), spec.dtype))]
    assert sums == place_sums(LocalWeights.of(Shards(weights.table, parts)))
