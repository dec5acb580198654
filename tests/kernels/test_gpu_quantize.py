"""Kernels that quantize, in Triton's interpreter, bit for bit against operations of torch.

That happens in a process of its own, as in `test_gpu.py`. `tests/sources/gpu` says the same on a real GPU.
"""

from __future__ import annotations

import os

import numpy as np
import pytest

from tests.triton_runs import hasten_interpreter, run

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
inside = pytest.mark.skipif(not INTERPRETED, reason="runs in the interpreter, see test_interpreted")
outside = pytest.mark.skipif(INTERPRETED, reason="starts a process of its own")
NAMES = ("fp8_blockwise", "fp8_per_channel", "fp8_per_tensor", "int8", "mxfp4", "mxfp8", "nvfp4")

if INTERPRETED:
    hasten_interpreter()


@outside
@pytest.mark.long
def test_interpreted():
    """The tests below pass in Triton's interpreter."""
    options = ("-q", "-p", "no:cacheprovider", "-p", "no:xdist")
    assert "passed" in run("-m", "pytest", *options, __file__, TRITON_INTERPRET="1")


def weights_like(shape, dtype, seed=0):
    """Weights with a NaN, an infinity, zeros and numbers that are hardly any."""
    from tests.sources.quantized_reference import weight

    w = weight(shape[-2], shape[-1], seed)
    w[8] /= 2.0**10  # float16 has no larger numbers
    w[5, 7] = float("nan")
    w[9, 40] = float("inf")
    w[10, :32] = 0
    w[11, 32:] = 1e-42
    return w.expand(shape).clone().to(dtype)


def quantize_twice(monkeypatch, name, first, second, on_gpu):
    """A plan of one tensor that was quantized, committed and quantized again; its parts."""
    from sparserl.sources import quantized
    from sparserl.sources.schemes import SCHEMES
    from sparserl.weights import memory

    monkeypatch.setattr(memory, "is_on_gpu", lambda _: on_gpu)
    weights = {"fc.weight": first.clone()}
    source = quantized(weights, SCHEMES[name](names=lambda _: True), track=True)
    source.weights()
    source.committed()
    weights["fc.weight"].copy_(second)
    return source.weights().parts


@inside
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((12, 96), torch.float32), ((130, 160), torch.bfloat16), ((2, 12, 64), torch.float16)],
)
def test_kernels_do_what_torch_does(monkeypatch, name, shape, dtype):
    """Codes, scales and what changed are those of torch, after a change of some elements too."""
    first = weights_like(shape, dtype)
    if name in ("fp8_per_channel", "int8"):
        first = first[..., :40, :]  # the interpreter takes a row at a time
    second = first.clone()
    second[..., 3, 5:20] *= -2
    second[..., 5, 7] = 1.0
    second[..., 9, 40] = 0.5
    expected = quantize_twice(monkeypatch, name, first, second, on_gpu=False)
    results = quantize_twice(monkeypatch, name, first, second, on_gpu=True)
    assert [part.tensor for part in results] == [part.tensor for part in expected]
    for part, wanted in zip(results, expected, strict=True):
        assert torch.equal(part.data.view(torch.uint8), wanted.data.view(torch.uint8)), part.tensor
        changes, wanted_changes = (one.marks.run(0, one.region.numel) for one in (part, wanted))
        assert all(map(np.array_equal, changes, wanted_changes)), part.tensor
    assert sum(part.marks.between(0, part.region.numel).size for part in results) > 10


@inside
@pytest.mark.parametrize(
    ("elements", "scales", "block", "shape"),
    [
        ("float8_e4m3fn", "float32", (64, 48), (100, 112)),  # blocks in a tile, some of which are cut
        ("float8_e4m3fn", "float32", (3, 5), (7, 11)),  # blocks with fewer elements than threads
        ("int8", "float32", (1, 20000), (2, 20000)),  # blocks larger than a tile
        ("int8", "float32", (200, 130), (250, 140)),
        ("float8_e4m3fn", "float32", None, (130, 96)),  # one scale for all, which was measured before
        ("float8_e4m3fn", "float8_e8m0fnu", (1, 32), (70, 96)),
        ("float4_e2m1", "float8_e8m0fnu", (1, 32), (70, 96)),
        ("float4_e2m1", "float8_e4m3fn", (1, 16), (70, 96)),
    ],
)
def test_one_pass_is_both(elements, scales, block, shape):
    """Codes that are compared as they are written: the same codes, each difference, and how many there are."""
    from sparserl.kernels import gpu
    from sparserl.sources.schemes import LIMITS

    w = torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
    kind = gpu.quantize.Format(elements, scales, LIMITS[elements])
    is_measured = block is None or scales == "float8_e4m3fn"
    largest = gpu.quantize.run_magnitudes(w, 64 if block is None else block[1]) if is_measured else None
    if block is None:
        largest = largest.amax().view(1)
    block = block or shape
    size = w.numel() // 2 if elements == "float4_e2m1" else w.numel()
    blocks = -(-shape[0] // block[0]) * -(-shape[1] // block[1])
    expected, expected_scales = torch.zeros(size, dtype=torch.uint8), torch.zeros(blocks, dtype=torch.int32)
    if scales != "float32":
        expected_scales = expected_scales.to(torch.uint8)
    arguments = (kind, block, largest, torch.full((1,), 0.5))
    assert gpu.quantize.quantize(w, expected, expected_scales, *arguments) is None
    for share in (0.0, 0.1, 1.0):
        noise = torch.randint(1, 256, (size,), dtype=torch.uint8) * (torch.rand(size) < share)
        codes = expected ^ noise
        its_scales = torch.zeros_like(expected_scales)
        difference = torch.full_like(codes, 0xA5)
        counts = gpu.quantize.quantize(w, codes, its_scales, *arguments, difference)
        assert torch.equal(codes, expected)
        assert torch.equal(its_scales, expected_scales)
        assert torch.equal(difference, noise)
        assert int(counts.sum()) == int((noise != 0).sum())


@inside
def test_codes_are_compared_by_the_pass_that_writes_them(monkeypatch):
    """Where kernels quantize, no copy of old codes is made, and no more is looked for if nothing has changed."""
    from sparserl.sources import quantized_changes

    sizes = []
    fetch = quantized_changes.fetch

    def fetched(tensor):
        sizes.append(tensor.numel())
        return fetch(tensor)

    monkeypatch.setattr(quantized_changes, "fetch", fetched)
    w = weights_like((12, 96), torch.bfloat16)
    parts = quantize_twice(monkeypatch, "mxfp8", w, w, on_gpu=True)
    assert [part.marks.count for part in parts] == [0, 0]
    assert sizes == [0, 0]  # the scales, which torch compares: where they differ, and what they were
    many = quantize_twice(monkeypatch, "mxfp8", w, w * -3, on_gpu=True)
    assert many[0].marks.pieces[0].positions is None
    assert many[0].marks.count == w.numel()


@inside
def test_kernels_are_used(monkeypatch):
    """A contiguous part of whole blocks never comes to the operations of torch; one that cuts blocks does."""
    from sparserl import Part, Region, Shards, tensor_table
    from sparserl.sources import quantize_plan, quantized
    from sparserl.weights import memory

    monkeypatch.setattr(memory, "is_on_gpu", lambda _: True)
    w = weights_like((12, 64), torch.bfloat16)
    halves = [Region((0, 0), (12, 40)), Region((0, 40), (12, 24))]
    shards = Shards(tensor_table({"fc.weight": w}), [Part("fc.weight", box, w[box.slices]) for box in halves])

    class Halves:
        def weights(self):
            return shards

    cut = quantized(Halves(), "mxfp8").weights()
    monkeypatch.setattr(quantize_plan, "write_codes", None)
    whole = quantized({"fc.weight": w}, "mxfp8").weights()
    for part in cut.parts:
        assert torch.equal(part.data.view(torch.uint8), whole[part.tensor][part.region.slices].view(torch.uint8))
    with pytest.raises(TypeError):
        quantized(Halves(), "mxfp8").weights()
