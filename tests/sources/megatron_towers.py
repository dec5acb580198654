"""Megatron-core's own LLaVA, of which the language model is published."""

from __future__ import annotations

import pytest

import sparserl
from sparserl.errors import UnsupportedTensor
from sparserl.sources import megatron
from sparserl.weights.digest import table_digest
from tests.sources.megatron_models import fill, llava_model, logits_of
from tests.sources.transformers_models import VOCAB, llava

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")


def require_same_tower(text):
    """Filled by the map, the language model has transformers' logits; the LLaVA is published as its checkpoint has it.

    Other modules than those of LLaVA are refused by name, and so is a LLaVA without a language model.
    """
    reference, config, checkpoint = llava(text, "float32")
    tower = {name: tensor for name, tensor in checkpoint.items() if name.startswith("language_model.")}
    model = llava_model(config)
    source = megatron(model, config)
    assert source.layout.table == sparserl.tensor_table(tower)
    with torch.no_grad():
        fill(model.language_model, config, checkpoint)
        expected = reference(torch.arange(VOCAB).view(1, -1)).logits
        (logits,) = logits_of(model.language_model)
        assert (logits - expected).abs().max() < 1e-5 * expected.abs().max()  # sums are taken in another order
    digests = [None, None]
    dist.all_gather_object(digests, sparserl.digest(source.weights(), threads=1))
    assert sum(digests, table_digest(source.layout.table)) == sparserl.digest(tower, threads=1)
    with pytest.raises(UnsupportedTensor, match="the model has no parameters in 'language_model', which is published"):
        megatron(llava_model(config, add_decoder=False), config)
    model.register_module("audio_model", torch.nn.Linear(1, 1))
    with pytest.raises(UnsupportedTensor, match=r"'audio_model.weight', .* are outside of 'language_model'.*`outside`"):
        megatron(model, config)
