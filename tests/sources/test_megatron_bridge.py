"""Maps of the real Megatron-Bridge, whose own code puts the checkpoint into Megatron-core's models."""

from __future__ import annotations

import re
import sys
import types
from functools import partial

import pytest

import sparserl
from sparserl.errors import TensorMismatch, UnsupportedTensor
from sparserl.sources import Family, Ranks
from sparserl.sources.megatron_families import FAMILIES
from sparserl.weights.digest import table_digest
from tests.integrations.wheels import installed
from tests.sources.megatron_models import PADDED, megatron_model, megatron_ranks, two_ranks
from tests.sources.transformers_models import BALANCED, CONFIGS, LATENT, transformers_model

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")

BRIDGE = ("megatron-bridge==0.3.1", "omegaconf==2.3.0", "antlr4-python3-runtime==4.9.3", "einops==0.8.2")
WITHOUT_BIAS = {"attention_bias": False, "mlp_bias": False}
# Families without a map here, and what Megatron-core's model of them is.
OTHERS = {
    "gemma": ({"tie_word_embeddings": True}, {}),
    "nemotron": ({}, {"gated_linear_unit": False, "normalization": "LayerNorm"}),
    "deepseek_v2": (BALANCED | LATENT | {"topk_method": "greedy"}, {"moe_router_enable_expert_bias": False}),
}
CUT = {"tp": 2, "ep": 2}  # experts are spread, not cut: Megatron-Bridge cuts only those of Transformer Engine's layers


class WithBridge:
    """Runs a job in a process that can import Megatron-Bridge."""

    def __init__(self, folder, job, *args):
        self.folder = folder
        self.job = job
        self.args = args

    def __call__(self, rank):
        sys.path.insert(0, str(self.folder))
        import megatron.core.models.gpt.gpt_layer_specs
        import megatron.core.models.gpt.gpt_model  # these first: they find that there is no Transformer Engine  # noqa: F401

        # Megatron-Bridge's adapters name these classes when they are imported. Nothing here uses them.
        engine = types.ModuleType("transformer_engine")
        engine.pytorch = types.ModuleType("transformer_engine.pytorch")
        engine.pytorch.Linear = type("Linear", (), {})
        engine.pytorch.ops = types.SimpleNamespace(Sequential=type("Sequential", (), {}))
        stubs = {"transformer_engine": engine, "transformer_engine.pytorch": engine.pytorch}
        sys.modules.update(stubs)
        import megatron.bridge  # noqa: F401

        for name in stubs:
            del sys.modules[name]
        dist.scatter = partial(scatter, dist.scatter)
        self.job(*self.args)


def scatter(of_torch, output, parts, **options):
    """Gloo takes columns for rows: it sends parts as if they were contiguous. Megatron-Bridge is used with NCCL."""
    of_torch(output, parts and [part.contiguous() for part in parts], **options)


def checkpoint_of(kind):
    CONFIGS.setdefault(kind, OTHERS.get(kind, ({}, {}))[0])
    options = (WITHOUT_BIAS if kind == "llama" else {}) | {"vocab_size": PADDED}  # Megatron-Bridge pads nothing
    model, config, checkpoint = transformers_model(kind, "float32", **options)
    config.architectures = [type(model).__name__]  # as in a config that was saved
    return config, checkpoint


def bridge_of(config):
    from megatron.bridge.models.conversion.model_bridge import get_model_bridge

    return get_model_bridge(config.architectures[0])


def load(bridge, model, checkpoint):
    """Megatron-Bridge's own conversion, for every parameter of the rank."""
    registry = bridge.mapping_registry()
    modules = dict(model.named_modules())
    for name, parameter in model.state_dict(keep_vars=True).items():
        if name.endswith("_extra_state"):
            continue
        whole_name = global_name(model.config, modules, name)
        if whole_name == "output_layer.weight" and "lm_head.weight" not in checkpoint:
            whole_name = "embedding.word_embeddings.weight"
        mapping = registry.megatron_to_hf_lookup(whole_name)
        weights = bridge.maybe_modify_loaded_hf_weight(mapping.hf_param, checkpoint)
        module = modules[name.rpartition(".")[0]]
        if not hasattr(module, "config"):
            module.config = model.config
        parameter.data.copy_(mapping.hf_to_megatron(weights, module))


def global_name(config, modules, name):
    """The name of a parameter in the whole model, with Transformer Engine's name for those of experts."""
    if layer := re.match(r"decoder\.layers\.\d+", name):
        name = name.replace(layer[0], f"decoder.layers.{modules[layer[0]].layer_number - 1}", 1)
    if expert := re.search(r"local_experts\.(\d+)\.(linear_fc[12])\.(weight|bias)$", name):
        ranks = Ranks.here()
        number = ranks.ep * config.num_moe_experts // ranks.ep_size + int(expert[1])
        name = name.replace(expert[0], f"{expert[2]}.{expert[3]}{number}")
    return name


def require_published(kind, sizes):
    """What Megatron-Bridge has loaded is published by its map: the checkpoint, as by the map of this library."""
    config, checkpoint = checkpoint_of(kind)
    table = sparserl.tensor_table(checkpoint)
    with megatron_ranks(**sizes), torch.no_grad():
        model = megatron_model(kind, config, **OTHERS.get(kind, ({}, {}))[1])
        load(bridge_of(config), model, checkpoint)
        family = "bridge" if kind in FAMILIES else None
        sources = [sparserl.sources.megatron(model, config, family=family, table=table)]
        if kind in FAMILIES:
            sources.append(sparserl.sources.megatron(model, config))
        for published in sources:
            digests = [None, None]
            dist.all_gather_object(digests, sparserl.digest(published.weights(), threads=1))
            assert sum(digests, table_digest(table)) == sparserl.digest(checkpoint, threads=1), (kind, sizes)


def publish_some():
    require_published("gemma", {"tp": 2})
    require_published("qwen3_moe", {"ep": 2})
    require_published("gpt_oss", CUT)
    require_published("nemotron", {"pp": 2})


def test_published(tmp_path):
    """A model that Megatron-Bridge has loaded is published as its checkpoint, also of a family without a map here."""
    two_ranks(tmp_path, WithBridge(installed(*BRIDGE), publish_some))


def publish_every_family():
    for kind in ("llama", "mistral", "qwen2", "qwen3", "gemma", "nemotron"):
        require_published(kind, {"tp": 2})
        require_published(kind, {"pp": 2})
    for kind in ("qwen3_moe", "deepseek_v3", "glm4_moe", "gpt_oss", "deepseek_v2"):
        for sizes in (CUT, {"ep": 2}, {"pp": 2}):
            require_published(kind, sizes)


@pytest.mark.long
def test_every_family(tmp_path):
    """So is every family that this can be tried with: without Transformer Engine, on two ranks."""
    two_ranks(tmp_path, WithBridge(installed(*BRIDGE), publish_every_family))
