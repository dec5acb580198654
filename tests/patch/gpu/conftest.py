"""Every torch tensor passes for one on a GPU where there is none."""

from __future__ import annotations

import numpy as np
import pytest


@pytest.fixture(autouse=True)
def _weights_on_gpu(monkeypatch):
    """Torch tensors are on a GPU, few changes are coded there too, and classes always pay."""
    from tests.patch.gpu import gpu_weights  # skips where there is no Triton: not while pytest reads this file

    if gpu_weights.CUDA or gpu_weights.INTERPRETED:
        gpu_weights.pretend(monkeypatch)


@pytest.fixture
def nothing_leaves_the_gpu(monkeypatch):
    """No bits of weights come to the host but those that changed, and tensors so small that most of them did.

    Where kernels do not run, all bits do.
    """
    from sparserl.weights import staging
    from tests.patch.gpu import gpu_weights

    if gpu_weights.WITHOUT_KERNELS:
        return
    read = staging.StagedMemory.read

    def small(self, region):
        assert np.prod(region.size if region else self.shape) <= 70, "weights were brought to the host"
        return read(self, region)

    monkeypatch.setattr(staging.StagedMemory, "read", small)
    monkeypatch.setattr(staging.StagedMemory, "view", None)
