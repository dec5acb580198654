"""The loader for SGLang with weights on a GPU that two ranks share, and the same on the CPU."""

from __future__ import annotations

import pytest
import torch

import sparserl
from sparserl.integrations import sglang as ours
from tests.integrations.sglang_server import Refreshed, bits, checkpoint, control, expected, in_group, marks
from tests.session.ranks import ranks

PROFILES = {1: ("ctx", "ulp", "gap", "raw"), 2: ("ulp", "gap", "raw")}  # of several ranks, none has all old bits
COMMITS = (0, 1, 2, 1, 3)  # also an older one, and one over two patches
DEVICES = [
    pytest.param("cpu", marks=pytest.mark.long),  # test_sglang.py says nearly the same
    pytest.param("cuda:0", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")),
]


def follow(rank, group, pipe, size, device):
    """A rank of an engine: commits what it is told to, and says what it has then."""
    in_group(rank, size, group)
    if device != "cpu":
        code_few_changes_on_gpu()
    model = Refreshed(rank, size).to(device)
    model.load_weights(checkpoint(0).items())
    addresses = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    for url, version in iter(pipe.recv, None):
        ours.load(model, control(url, version=version))
        assert addresses == {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
        assert {parameter.device for parameter in model.parameters()} == {torch.device(device)}
        pipe.send((marks(model), bits(model), torch.equal(model.made, model.lm_head.weight.float().sum(dim=1))))


def code_few_changes_on_gpu():
    """Do there what would be left to the host for so few changes."""
    from sparserl.patch import gpu_apply, gpu_compare

    gpu_apply.FEW_BYTES = gpu_apply.FEW_CHANGES = gpu_compare.FEW_CHANGES = 0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", PROFILES)
def test_ranks_follow_in_place(tmp_path, size, device):
    """In every profile that ranks can decode, their tensors stay where they are and get the bits of each version."""
    with ranks(size, follow, size, device) as started:
        for profile in PROFILES[size]:
            url = f"file://{tmp_path}/{profile}"
            run = publish(url, profile, device)
            for version in COMMITS:
                for _, pipe in started:
                    pipe.send((url, version))
                for rank, (_, pipe) in enumerate(started):
                    assert pipe.poll(240), f"rank {rank} does not answer"
                    said, live, is_recomputed = pipe.recv()
                    assert said == [f"sparserl: {run} {version}"]
                    assert live == expected(version, rank, size)
                    assert is_recomputed


def publish(url, profile, device):
    """Publish all versions from tensors on the device; returns their run."""
    weights = {name: tensor.to(device) for name, tensor in checkpoint().items()}
    with sparserl.Publisher(url, weights, profile=profile, ladder=None) as publisher:
        for version in range(max(COMMITS) + 1):
            for name, tensor in checkpoint(version).items():
                weights[name].copy_(tensor)
            publisher.publish()
        return publisher.run
