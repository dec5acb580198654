"""The maps of Megatron-core's families against Megatron-core's own models."""

from __future__ import annotations

from copy import deepcopy

import pytest

import sparserl
from sparserl.weights.digest import table_digest
from tests.sources.megatron_models import EXPERTS, fill, logits_of, megatron_model, megatron_ranks, two_ranks
from tests.sources.megatron_towers import require_same_tower
from tests.sources.transformers_models import VOCAB, transformers_model

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")

SIMPLE = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen2_moe", "qwen3_moe")
OTHERS = ("deepseek_v3", "glm4_moe", "gpt_oss", "qwen3_next")
PREDICTING = ("deepseek_v3", "glm4_moe")
TOWERS = ("llama", "qwen3")
WITHOUT_BIAS = {"attention_bias": False, "mlp_bias": False}
OPTIONS = {"llama": WITHOUT_BIAS}  # Megatron-core has biases in all of its layers or in none
VARIANTS = {
    "deepseek_v3": [({"tp": 2}, {"q_lora_rank": None})],
    "glm4_moe": [({"ep": 2}, {"use_qk_norm": False, "attention_bias": False})],
}


@pytest.mark.long
def test_short(tmp_path):
    """Tied embeddings on two stages; experts on two ranks; latent attention cut in two, with multi-token prediction.

    And the language model of a LLaVA.
    """
    two_ranks(tmp_path, run_short)


@pytest.mark.long
@pytest.mark.parametrize(("kinds", "predicting"), [(SIMPLE, PREDICTING), (OTHERS, ())], ids=["simple", "others"])
def test_every_family(tmp_path, kinds, predicting):
    """Megatron-core's models compute what the Hugging Face models do, and are published as their checkpoints.

    So do the layers of multi-token prediction. Starting processes that import all this takes as long as two families.
    """
    two_ranks(tmp_path, EveryWay(kinds, predicting))


class EveryWay:
    """Two ranks that share a model in every way: cut, as stages of a pipeline, with experts on each."""

    def __init__(self, kinds, predicting):
        self.kinds = kinds
        self.predicting = predicting

    def __call__(self, rank):
        for kind in self.kinds:
            options = OPTIONS.get(kind, {})
            ways = [{"tp": 2, "ep": 2 if kind == "gpt_oss" else 1}, {"pp": 2}] + [{"ep": 2}] * (kind in EXPERTS)
            runs = [(sizes, options) for sizes in ways] + VARIANTS.get(kind, [])
            for sizes, options in runs:
                with megatron_ranks(**sizes):
                    require_same_model(kind, options)
            if kind in TOWERS:
                with megatron_ranks(tp=2):
                    require_same_tower(kind)
        for kind in self.predicting:
            for sizes in ({"tp": 2}, {"pp": 2}, {"ep": 2}):
                with megatron_ranks(**sizes):
                    require_same_predictions(kind)


def run_short(rank):
    with megatron_ranks(pp=2):
        require_same_model("qwen2", {})
    with megatron_ranks(ep=2):
        require_same_model("qwen3_moe", {})
    with megatron_ranks(tp=2):
        require_same_predictions("deepseek_v3")
        require_same_tower("llama")


def require_same_model(kind, options):
    """Filled by the map, Megatron-core's model has the same logits; published by it, the checkpoint's bits."""
    reference, config, checkpoint = transformers_model(kind, "float32", **options)
    model = megatron_model(kind, config)
    with torch.no_grad():
        expected = reference(torch.arange(VOCAB).view(1, -1)).logits
    require_same(kind, model, config, checkpoint, [expected])


def require_same(kind, model, config, checkpoint, expected):
    source = sparserl.sources.megatron(model, config)
    assert source.layout.table == sparserl.tensor_table(checkpoint), kind
    with torch.no_grad():
        fill(model, config, checkpoint)
        require_same_bits(kind, source, checkpoint)
        if kind == "qwen3_next":  # its norms add 1 to their weights, which those that run without a GPU do not
            for name, parameter in model.named_parameters():
                if name.endswith("norm.weight"):
                    parameter += 1
        for logits, wanted in zip(logits_of(model), expected, strict=False):
            # sums are taken in another order
            assert (logits - wanted).abs().max() < 1e-5 * wanted.abs().max(), kind


def require_same_bits(kind, source, checkpoint):
    digests = [None, None]
    dist.all_gather_object(digests, sparserl.digest(source.weights(), threads=1))
    assert sum(digests, table_digest(source.layout.table)) == sparserl.digest(checkpoint, threads=1), kind


def require_same_predictions(kind):
    """Transformers leaves multi-token prediction out: it is put together of a further layer of the model."""
    further, config, checkpoint = transformers_model(kind, "float32", num_hidden_layers=4)
    config.num_hidden_layers = 3
    at = "model.layers.3."
    hidden = config.hidden_size
    shapes = {"enorm": (hidden,), "hnorm": (hidden,), "eh_proj": (hidden, 2 * hidden), "shared_head.norm": (hidden,)}
    added = {name: torch.randn(shape) * 0.3 for name, shape in shapes.items()}
    checkpoint |= {f"{at}{name}.weight": tensor for name, tensor in added.items()}
    checkpoint[at + "embed_tokens.weight"] = checkpoint["model.embed_tokens.weight"]
    checkpoint[at + "shared_head.head.weight"] = checkpoint["lm_head.weight"]
    with torch.no_grad():
        expected = predictions(further, added)
    require_same(kind, megatron_model(kind, config, mtp=1), config, checkpoint, expected)


def predictions(further, added):
    """The logits of the model without its last layer, and those of this layer as one of multi-token prediction."""
    model, head = deepcopy(further), deepcopy(further)  # their tensors are the checkpoint
    model.model.layers = model.model.layers[:3]
    head.model.layers = head.model.layers[3:]
    ids = torch.arange(VOCAB).view(1, -1)
    hidden = model.model(ids).last_hidden_state
    following = model.model.embed_tokens(torch.arange(1, VOCAB + 1).view(1, -1) % VOCAB)
    norm = deepcopy(model.model.norm)
    both = []
    for name, states in (("enorm", following), ("hnorm", hidden)):
        norm.weight.copy_(added[name])
        both.append(norm(states))
    head.model.norm.weight.copy_(added["shared_head.norm"])
    combined = torch.cat(both, -1) @ added["eh_proj"].T
    return [model(ids).logits, head(inputs_embeds=combined, use_cache=False).logits]
