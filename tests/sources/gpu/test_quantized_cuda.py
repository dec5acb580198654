"""Quantized weights on a real GPU: the bits of the CPU, by kernels and without them, published and followed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import sparserl
from sparserl import Part, Region, Shards
from sparserl.kernels import gpu
from sparserl.sources import block_codes, quantized
from sparserl.sources.schemes import SCHEMES
from sparserl.weights import staging
from tests.session.ranks import port, together
from tests.sources.quantized_reference import weight

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
SHAPES = [(12, 64), (300, 4128), (1024, 2048), (3, 140, 192)]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def weights_like(shape, dtype, seed=0):
    """Weights of all magnitudes, with a NaN, an infinity, zeros, and numbers that are subnormal."""
    w = weight(shape[-2], shape[-1], seed)
    w[8] /= 2.0**10  # float16 has no larger numbers
    w[5, 7] = float("nan")
    w[9, 40] = float("-inf")
    w[10, :32] = 0
    w[11, 32:] *= 1e-38
    return w.expand(shape).clone().to(dtype)


def scheme_of(name):
    return SCHEMES[name](names=lambda spec: spec.name == "fc.weight")


def require_same(on_gpu, on_host):
    """The same tensors, on a GPU and in host memory."""
    assert on_gpu.keys() == on_host.keys()
    for name, tensor in on_gpu.items():
        assert tensor.is_cuda, name
        assert torch.equal(tensor.cpu().view(torch.uint8), on_host[name].view(torch.uint8)), name


@pytest.mark.parametrize("kernels", ["on", "off"])
@pytest.mark.parametrize("name", SCHEMES)
def test_the_bits_are_those_of_the_cpu(monkeypatch, name, kernels):
    """In every dtype and shape, by kernels and by operations of torch; what is not quantized stays as it is."""
    monkeypatch.setenv("SPARSERL_GPU", kernels)
    for shape in SHAPES:
        for dtype in DTYPES:
            w = {"fc.weight": weights_like(shape, dtype), "norm.weight": torch.ones(9, dtype=dtype)}
            on_host = quantized(w, scheme_of(name)).weights()
            source = quantized({key: tensor.cuda() for key, tensor in w.items()}, scheme_of(name))
            require_same(source.weights(), on_host)
            require_same(source.weights(), on_host)


@pytest.mark.parametrize("name", SCHEMES)
def test_kernels_do_it_without_a_copy_on_the_host(monkeypatch, name):
    """Of a matrix on a GPU neither weights nor codes come to the host, and operations of torch are not used."""
    if gpu.support.obstacle(torch.device("cuda", 0)) is not None:
        pytest.skip("there are no kernels for this GPU")
    w = weights_like((256, 512), torch.bfloat16)
    on_host = quantized({"fc.weight": w}, name).weights()
    monkeypatch.setattr(block_codes, "write_codes", None)
    monkeypatch.setattr("sparserl.sources.quantize_plan.write_codes", None)
    monkeypatch.setattr("sparserl.sources.quantize_plan.magnitudes", None)
    monkeypatch.setattr(staging.StagedMemory, "read", None)
    monkeypatch.setattr(staging.StagedMemory, "view", None)
    require_same(quantized({"fc.weight": w.cuda()}, name).weights(), on_host)


@pytest.mark.parametrize("name", SCHEMES)
def test_parts_that_cut_blocks(name):
    """Parts in any memory layout give the elements and scales of the whole, each of them once."""
    w = weights_like((140, 160), torch.bfloat16)
    table = sparserl.tensor_table({"fc.weight": w})
    boxes = [Region((0, 0), (60, 160)), Region((60, 0), (80, 72)), Region((60, 72), (80, 88))]
    parts = [Part("fc.weight", box, w.cuda()[box.slices]) for box in boxes]

    class Boxes:
        def weights(self):
            return Shards(table, parts)

    whole = quantized({"fc.weight": w}, name).weights()
    seen = {key: torch.zeros(tensor.shape, dtype=torch.int64) for key, tensor in whole.items()}
    for part in quantized(Boxes(), name).weights().parts:
        assert part.data.is_cuda
        expected = whole[part.tensor][part.region.slices].contiguous()
        assert torch.equal(part.data.cpu().view(torch.uint8), expected.view(torch.uint8)), part
        seen[part.tensor][part.region.slices] += 1
    assert all((count == 1).all() for count in seen.values())


@pytest.mark.parametrize("kernels", ["on", "off"])
@pytest.mark.parametrize("baseline", ["device", "host", "none"])
@pytest.mark.parametrize("name", SCHEMES)
def test_published_and_followed(tmp_path, monkeypatch, name, baseline, kernels):
    """Weights on a GPU are published quantized, and a rollout there gets every version exactly."""
    monkeypatch.setenv("SPARSERL_GPU", kernels)
    w = {"fc.weight": weight(300, 512).cuda().to(torch.bfloat16), "norm.weight": torch.ones(512, device="cuda")}
    source = quantized(w, name, track=baseline == "none")
    rollout = {key: torch.zeros_like(tensor) for key, tensor in quantized(w, name).weights().items()}
    generator = torch.Generator("cuda").manual_seed(0)
    with (
        sparserl.Publisher(tmp_path, source, baseline=baseline) as publisher,
        sparserl.Subscriber(tmp_path, rollout) as subscriber,
    ):
        for step in range(4):
            where = torch.rand(w["fc.weight"].shape, generator=generator, device="cuda") < 0.01
            w["fc.weight"][where] *= -1.5
            report = publisher.publish()
            subscriber.sync()
            host = {key: tensor.cpu() for key, tensor in w.items()}
            on_host = quantized(host, name).weights()
            require_same(rollout, on_host)
            if step:
                assert 0 < report.changed < 300 * 512


def agree(rank, at, backend, size):
    """A rank with half of the rows of a matrix, which cuts blocks; returns nothing, and raises where bits differ."""
    import torch.distributed as dist

    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    dist.init_process_group(backend, init_method=f"tcp://127.0.0.1:{at}", rank=rank, world_size=size)
    w = weights_like((140, 192), torch.bfloat16)
    table = sparserl.tensor_table({"fc.weight": w})
    rows = np.linspace(0, 140, size + 1).astype(int).tolist()
    box = Region((rows[rank], 0), (rows[rank + 1] - rows[rank], 192))
    part = Part("fc.weight", box, w[box.slices].to(device))

    class Rows:
        def weights(self):
            return Shards(table, [part])

    for name in SCHEMES:
        whole = quantized({"fc.weight": w}, name).weights()
        parts = quantized(Rows(), name, dist.group.WORLD).weights().parts
        assert parts
        for result in parts:
            assert result.data.device == device
            expected = whole[result.tensor][result.region.slices].contiguous()
            assert torch.equal(result.data.cpu().view(torch.uint8), expected.view(torch.uint8)), result
    dist.destroy_process_group()


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_processes_agree_over_their_group(backend):
    """Scales of cut blocks go through the device of the group. NCCL takes a GPU for each process."""
    size = 2 if backend == "gloo" else min(2, torch.cuda.device_count())
    together(agree, (port(), backend, size), size)
