"""Syncs over a process group with weights and frames on a GPU: two ranks of Gloo share one, NCCL has a rank alone."""

from __future__ import annotations

import hashlib

import pytest

import sparserl
from tests.session.group_faults import LIMIT
from tests.session.ranks import ranks, results

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

SHAPES = {"large": (1024, 3000), "odd": (333, 77), "small": (70,)}


def fp32_model(seed):
    """fp32 parameters on the GPU."""
    model = torch.nn.Module()
    generator = torch.Generator("cuda").manual_seed(seed)
    for name, shape in SHAPES.items():
        values = torch.randn(shape, generator=generator, device="cuda")
        model.register_parameter(name, torch.nn.Parameter(values, requires_grad=False))
    return model


def train(model, seed):
    """Move every element, by so little that the bf16 of few of them changes."""
    generator = torch.Generator("cuda").manual_seed(seed)
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.mul_(1 + 1e-5 * torch.randn(tensor.shape, generator=generator, device="cuda"))


def seal(tensors):
    """What tells one state of bf16 tensors from another."""
    bits = [tensors[name].detach().bfloat16().view(torch.int16).cpu().numpy().tobytes() for name in sorted(SHAPES)]
    return hashlib.sha256(b"".join(bits)).hexdigest()


def publish(group, model, device, count):
    """Versions of a model that is trained, the last one in the background; what the group's baseline is."""
    source = sparserl.sources.module(model, cast=torch.bfloat16)
    versions = []
    with sparserl.GroupPublisher(group, source, baseline="device", device=device, timeout=LIMIT) as publisher:
        for version in range(count):
            train(model, version)
            version_seal = seal(dict(model.named_parameters()))
            if version < count - 1:
                report = publisher.publish()
            else:
                background = publisher.publish_in_background()
                train(model, 100)
                report = background.result()
            versions.append((report.version, report.kind, version_seal))
        return versions, publisher.baseline


def on_one_gpu(rank, group, pipe, device):
    torch.cuda.set_device(0)
    if rank == 0:
        return publish(group, fp32_model(0), device, 5)
    weights = {name: torch.zeros(shape, dtype=torch.bfloat16, device="cuda") for name, shape in SHAPES.items()}
    versions = []
    with sparserl.GroupSubscriber(group, weights, device=device, timeout=LIMIT, audit_every=1) as subscriber:
        for _ in range(5):
            report = subscriber.sync()
            versions.append((report.version, report.kind, seal(weights)))
    return versions


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_two_ranks_of_gloo_on_one_gpu(device):
    """Every version is the cast of the publisher's weights, with frames on the GPU or in host memory."""
    with ranks(2, on_one_gpu, device) as started:
        (published, label), received = results(started)
    assert received == published
    assert [kind for _, kind, _ in published] == ["anchor", *["patch"] * 4]
    assert "where the weights are" in label


def alone_with_nccl(rank, group, pipe):
    import torch.distributed as dist

    torch.cuda.set_device(0)
    group = dist.new_group([0], backend="nccl")
    model = fp32_model(0)
    versions, label = publish(group, model, None, 4)
    return versions, label


def test_one_rank_of_nccl():
    """Frames are on the GPU without being asked for, and every patch goes through NCCL."""
    with ranks(1, alone_with_nccl) as started:
        ((versions, label),) = results(started)
    assert [version for version, _, _ in versions] == [0, 1, 2, 3]
    assert [kind for _, kind, _ in versions][1:] == ["patch"] * 3
    assert "where the weights are" in label


def frames_of_nccl(rank, group, pipe):
    import torch.distributed as dist

    from sparserl.transport.groups.frames import GpuFrame
    from sparserl.transport.groups.line import Line

    torch.cuda.set_device(0)
    line = Line(dist.new_group([0], backend="nccl"), LIMIT)
    sizes = (5, 0, 70_000, 3)
    line.send(sizes[0], iter([bytes([i]) * size for i, size in enumerate(sizes)]), len(sizes))
    frame = line._frames[1]
    line.close()
    return isinstance(frame, GpuFrame), frame.tensor().is_cuda, bytes(frame.tail()[:8]), bytes(frame.bucket())


def test_frames_of_nccl():
    """What NCCL has sent is on the GPU, as it was given."""
    with ranks(1, frames_of_nccl) as started:
        assert results(started) == [(True, True, bytes(8), bytes([3]) * 3)]
