"""Sharded tensors follow a run: each rank writes its parts, wherever they lie in its memory."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import sparserl
from sparserl.integrations.ranks import EngineSubscriber
from sparserl.targets.dtensors import dtensors
from tests.session.ranks import ranks, results

PLACEMENTS = {"rows": Shard(0), "columns": Shard(1), "same": Replicate(), "uneven": Shard(0)}
SHAPES = {"rows": (8, 6), "columns": (4, 10), "same": (5, 3), "uneven": (5, 7), "whole": (9,)}


def _weights(version: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    weights = {name: torch.randn(shape).bfloat16() for name, shape in SHAPES.items()}
    for tensor in weights.values():
        tensor.view(-1)[version::7] += version
    return weights


def _follow(rank, _group, pipe, url: str) -> bool:
    mesh = init_device_mesh("cpu", (2,))
    sharded = {}
    for name, placement in PLACEMENTS.items():
        tensor = torch.zeros(SHAPES[name]).bfloat16()
        part = tensor.chunk(2, placement.dim)[rank] if placement.is_shard() else tensor
        local = _in_the_middle(part)
        sharded[name] = DTensor.from_local(local, mesh, [placement], shape=tensor.shape, stride=tensor.stride())
    sharded |= {"whole": torch.zeros(SHAPES["whole"]).bfloat16(), "not of the run": torch.ones(3)}

    def gather(value):
        values = [None] * 2
        dist.all_gather_object(values, value)
        return values

    subscriber = EngineSubscriber(url, dtensors(sharded), rank, gather)
    for version in range(3):
        pipe.send(version)
        assert pipe.recv() == version
        subscriber.commit_version()
        for name, wanted in _weights(version).items():
            tensor = sharded[name]
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            assert torch.equal(whole.view(torch.int16), wanted.view(torch.int16)), (name, version)
    return bool((sharded["not of the run"] == 1).all())


def _in_the_middle(tensor: torch.Tensor) -> torch.Tensor:
    """The same tensor as a part of a longer memory, as fused parameters are."""
    memory = torch.zeros(tensor.numel() + 11, dtype=tensor.dtype)
    return memory[4 : 4 + tensor.numel()].view(tensor.shape).copy_(tensor)


@pytest.mark.long
def test_dtensors_follow_a_run(tmp_path):
    """Rows, columns, uneven shards, replicas and whole tensors are exact on both ranks, and others left alone."""
    weights = _weights(0)
    url = f"file://{tmp_path}"
    publisher = sparserl.Publisher(url, weights)
    with ranks(2, _follow, url) as started:
        for version in range(3):
            for name, tensor in _weights(version).items():
                weights[name].copy_(tensor)
            for _, pipe in started:
                assert pipe.recv() == version
            publisher.publish()
            for _, pipe in started:
                pipe.send(version)
        assert results(started) == [True, True]
