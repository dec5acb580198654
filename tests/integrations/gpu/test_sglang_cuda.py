"""The loader for SGLang with weights on a GPU that two ranks share, and the same on the CPU."""

from __future__ import annotations

import pytest
import torch

import sparserl
from sparserl.integrations import sglang as ours
from sparserl.plan import buckets
from tests.class_choice import always
from tests.integrations.sglang_server import (
    Refreshed,
    bits,
    checkpoint,
    control,
    expected,
    in_group,
    kept_reports,
    marks,
)
from tests.session.ranks import ranks

SIZES = (1, 2)
PROFILES = ("ctx", "ulp", "gap", "raw")
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
    reports = kept_reports()
    model = Refreshed(rank, size).to(device)
    model.load_weights(checkpoint(0).items())
    addresses = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    for url, version in iter(pipe.recv, None):
        ours.load(model, control(url, version=version))
        assert addresses == {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
        assert {parameter.device for parameter in model.parameters()} == {torch.device(device)}
        is_recomputed = torch.equal(model.made, model.lm_head.weight.float().sum(dim=1))
        pipe.send((marks(model), bits(model), is_recomputed, reports[-1] and reports[-1].bytes))


def code_few_changes_on_gpu():
    """Do there what would be left to the host for so few changes."""
    from sparserl.patch import gpu_apply, gpu_compare

    gpu_apply.FEW_BYTES = gpu_apply.FEW_CHANGES = gpu_compare.FEW_CHANGES = 0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", SIZES)
def test_ranks_follow_in_place(tmp_path, size, device, monkeypatch):
    """In every profile tensors stay where they are and get the bits of each version; each rank fetches its share."""
    monkeypatch.setattr(buckets, "choose_classes", always)
    with ranks(size, follow, size, device) as started:
        for profile in PROFILES:
            run = Run(f"file://{tmp_path}/{profile}", profile, device)
            for version in COMMITS:
                patch = run.publish_up_to(version)
                for _, pipe in started:
                    pipe.send((run.url, version))
                for rank, (_, pipe) in enumerate(started):
                    assert pipe.poll(240), f"rank {rank} does not answer"
                    said, live, is_recomputed, fetched = pipe.recv()
                    assert said == [f"sparserl: {run.name} {version}"]
                    assert live == expected(version, rank, size)
                    assert is_recomputed
                    if patch is not None and patch.version == version == 2:
                        assert fetched < 1.2 * patch.bytes / size
                        assert patch.profiles == (profile,)


class Run:
    """A run whose weights are on a device."""

    def __init__(self, url, profile, device):
        self.url = url
        self._weights = {name: tensor.to(device) for name, tensor in checkpoint().items()}
        self._publisher = sparserl.Publisher(url, self._weights, profile=profile, ladder=None)
        self._version = -1

    @property
    def name(self):
        return self._publisher.run

    def publish_up_to(self, version):
        """Publish the versions up to one that are still to be published; returns the newest patch."""
        for next_version in range(self._version + 1, version + 1):
            for name, tensor in checkpoint(next_version).items():
                self._weights[name].copy_(tensor)
            self._publisher.publish()
            self._version = next_version
        steps = self._publisher._committed.index.steps
        return next((step for step in reversed(steps) if step.base is not None), None)
