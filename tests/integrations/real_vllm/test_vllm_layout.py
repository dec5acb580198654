"""A checkpoint that is loaded once more is compared as it is loaded: bit for bit, without another look at it."""

from __future__ import annotations

import warnings

import pytest
import torch

from sparserl.errors import UnsupportedTensor

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM uses what PyTorch advises against
    pytest.importorskip("vllm")
    from sparserl.integrations.vllm_layout import LoadedModel


class Reloaded(LoadedModel):
    """Two tensors that are fused, loaded as a function says. It counts how often the checkpoint is read."""

    def __init__(self, change):
        generator = torch.Generator().manual_seed(1)
        names = [f"layers.0.{name}.weight" for name in ("up", "gate")]
        checkpoint = {name: (torch.randn(8, 16, generator=generator) * 20_000).to(torch.bfloat16) for name in names}
        model = torch.nn.Module()
        model.fused = torch.nn.Parameter(torch.zeros(16, 16, dtype=torch.bfloat16), requires_grad=False)
        self.reads = 0
        self.change = change
        super().__init__(model, None, lambda: self.read(checkpoint))
        self.load(checkpoint.items())

    def read(self, checkpoint):
        self.reads += 1
        return iter(checkpoint.items())

    def load(self, tensors):
        for name, tensor in tensors:
            self.model.fused[: 8 if "up" in name else None][-8:].copy_(self.change(tensor))


@pytest.mark.parametrize("change", [torch.clone, lambda tensor: tensor[torch.arange(7, -1, -1)]])
def test_a_checkpoint_is_loaded_once_more(change):
    """Its tensors are looked at for their shapes, and then loaded: what is learnt is compared without a third time."""
    model = Reloaded(change)
    before = model.model.fused.clone()
    pieces = model.learn_pieces()
    assert model.reads == 2
    assert torch.equal(model.model.fused, before)
    assert sum(piece.region.numel for piece in pieces) == 256


def test_what_numbers_do_not_show_is_noticed():
    """Large weights are clipped, and numbers are not: the tensor is named."""

    def clipped(tensor):
        return torch.where(tensor.abs() < 10_000, tensor, tensor.sign() * 10_000)[torch.arange(8)]

    model = Reloaded(clipped)
    with pytest.raises(UnsupportedTensor, match=r"'layers\.0\.(up|gate)\.weight' is not a copy in 'fused'"):
        model.learn_pieces()
