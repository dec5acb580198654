"""Megatron-core's own LLaVA, of which the language model is published."""

from __future__ import annotations

import pytest

import sparserl
from sparserl.errors import TensorMismatch, UnsupportedTensor
from sparserl.sources import Ranks, megatron
from sparserl.sources.megatron_core import Model
from sparserl.weights.digest import table_digest
from tests.sources.megatron_models import fill, llava_model, logits_of, megatron_ranks, two_ranks
from tests.sources.test_megatron_processes import as_module
from tests.sources.transformers_models import COMMON, VOCAB, llava

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")


def require_same_tower(text):
    """Filled by the map, the language model has transformers' logits; the LLaVA is published as its checkpoint has it."""
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


def publish_towers(rank):
    with megatron_ranks(tp=2):
        require_same_tower("llama")
        require_same_tower("qwen3")


def test_language_model_of_llava(tmp_path):
    """The language model of a real LLaVA is published on two ranks; one without it is refused, and so are strangers."""
    two_ranks(tmp_path, publish_towers)


def test_llava_of_an_unknown_language_model():
    """Of which family the language model is, the config says; one without a map is refused."""
    config = {"model_type": "llava", "text_config": COMMON | {"model_type": "qwen2"}}
    assert "language_model.model.layers.0.self_attn.q_proj.bias" in Model(config).table.index
    with pytest.raises(UnsupportedTensor, match="no map for models of type 'llava'.* llava, .* with one of these"):
        Model({"model_type": "llava", "text_config": {"model_type": "opt"}})
    with pytest.raises(TensorMismatch, match="'thinker.language_model.w'] are not in the layout"):
        megatron(as_module({"thinker.language_model.w": torch.zeros(1)}, 0), config, Ranks())
