"""Maps of the real Megatron-Bridge, whose own code puts the checkpoint into Megatron-core's models."""

from __future__ import annotations

import json
import re
import sys
import types
from dataclasses import asdict
from functools import partial

import pytest

import sparserl
from sparserl.errors import TensorMismatch, UnsupportedTensor
from sparserl.sources import Family, Ranks, megatron
from sparserl.sources.megatron_bridge import bridge_family
from sparserl.sources.megatron_core import Model, layout
from sparserl.sources.megatron_families import FAMILIES
from sparserl.weights.digest import table_digest
from tests.integrations.wheels import installed
from tests.sources.megatron_models import PADDED, megatron_model, megatron_ranks, two_ranks
from tests.sources.megatron_shards import grid
from tests.sources.test_megatron_processes import as_module
from tests.sources.transformers_models import BALANCED, CONFIGS, LATENT, transformers_model, vision_language_model

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
        import megatron.core.models.gpt.gpt_model  # these first: they find that there is no Transformer Engine

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
        sources = [megatron(model, config, family=family, table=table)]
        if kind in FAMILIES:
            sources.append(megatron(model, config))
        for published in sources:
            digests = [None, None]
            dist.all_gather_object(digests, sparserl.digest(published.weights(), threads=1))
            assert sum(digests, table_digest(table)) == sparserl.digest(checkpoint, threads=1), (kind, sizes)


def publish_some():
    require_published("gemma", {"tp": 2})
    require_published("gpt_oss", CUT)
    require_vision()
    require_same_maps()
    require_refused()


@pytest.mark.long
def test_published(tmp_path):
    """A model that Megatron-Bridge has loaded is published as its checkpoint, also of a family without a map here."""
    two_ranks(tmp_path, WithBridge(installed(*BRIDGE), publish_some))


def require_vision():
    """Where the table has them, the tensors outside of the language model are published too; otherwise by none."""
    config, checkpoint = vision_language_model("qwen3_vl")
    config.architectures = ["Qwen3VLForConditionalGeneration"]
    language = layout(Model(config), Ranks())
    named = {name: torch.zeros(local.shape, dtype=torch.bfloat16) for name, local in language.parameters.items()}
    model = {f"language_model.{name}": tensor for name, tensor in named.items()}
    model |= {
        name.replace("model.visual.", "vision_model."): tensor
        for name, tensor in checkpoint.items()
        if name.startswith("model.visual.")
    }
    module = as_module(model, 0)
    source = megatron(module, config, Ranks(), family="bridge", table=sparserl.tensor_table(checkpoint))
    parts = {part.tensor: part.data for part in source.weights().parts}
    assert parts.keys() == checkpoint.keys()
    for name, data in parts.items():
        assert not name.startswith("model.visual.") or data.data_ptr() == checkpoint[name].data_ptr(), name
    replica = megatron(module, config, Ranks(dp=1), family="bridge", table=sparserl.tensor_table(checkpoint))
    assert not replica.weights().parts
    alone = megatron(module, config, Ranks(), family="bridge", table=language.table)
    assert {part.tensor for part in alone.weights().parts} == language.table.index.keys()


def require_same_maps():
    """A bridge, its registry and "bridge" are one map, which is data and says which layers have what."""
    config, checkpoint = checkpoint_of("deepseek_v3")
    table = sparserl.tensor_table(checkpoint)
    bridge = bridge_of(config)
    family = bridge_family("bridge", config, table)
    assert family == bridge_family(bridge, config, table) == bridge_family(bridge.mapping_registry(), config, table)
    assert Family.of(json.loads(json.dumps(asdict(family)))) == family
    assert family.layer["mlp.linear_fc2.weight"].when == "layer in [0]"
    assert family.layer["mlp.router.weight"].when == "layer in [1, 2]"
    assert Model(config, family).table.names == table.names
    for rank in grid(tp=2, pp=3, dp=2):  # experts are cut too
        known = layout(Model(config), rank, padded_vocab=64, table=table)
        shapes = {name: local.shape for name, local in known.parameters.items()}
        read = layout(Model(config, family), rank, padded_vocab=64, table=table, shapes=shapes)
        assert read.parameters == known.parameters


def require_refused():
    """What a map here cannot say, or the checkpoint does not have, is refused by name."""
    config, checkpoint = checkpoint_of("gemma")
    table = sparserl.tensor_table(checkpoint)
    registry = bridge_of(config).mapping_registry()
    with pytest.raises(TensorMismatch, match=r"'gemma' have the map of Megatron-Bridge, which has no shapes.*`table`"):
        bridge_family("bridge", config, None)
    with pytest.raises(UnsupportedTensor, match=r"there is no map 'gemma'"):
        bridge_family("gemma", config, table)
    with pytest.raises(UnsupportedTensor, match=r"names no architecture"):
        bridge_family("bridge", {"model_type": "gemma"}, table)
    with pytest.raises(UnsupportedTensor, match=r"has no map for MixtralForCausalLM"):
        bridge_family("bridge", {"architectures": ["MixtralForCausalLM"]}, table)
    with pytest.raises(UnsupportedTensor, match=r"it has no 'embedding.word_embeddings.weight'"):
        bridge_family([mapping for mapping in registry if "embedding" not in mapping.megatron_param], config, table)
    more = sparserl.tensor_table(checkpoint | {"score.weight": torch.zeros(2)})
    with pytest.raises(TensorMismatch, match=r"has no parameter for 'score.weight'"):
        bridge_family(registry, config, more)
    key = "model.layers.1.self_attn.k_proj.weight"
    fewer = sparserl.tensor_table({name: tensor for name, tensor in checkpoint.items() if name != key})
    with pytest.raises(TensorMismatch, match=rf"'{key}', of which '.*linear_qkv.weight' consists, is not in the table"):
        bridge_family(registry, config, fewer)
    wider = sparserl.tensor_table(checkpoint | {"model.layers.2.mlp.down_proj.weight": torch.zeros(16, 48)})
    with pytest.raises(TensorMismatch, match=r"layers.2.mlp.down_proj.weight.* has another shape in layer 0"):
        bridge_family(registry, config, wider)
    config, checkpoint = checkpoint_of("qwen3_next")
    table = sparserl.tensor_table(checkpoint)
    with pytest.raises(UnsupportedTensor, match=r"64, 8 and 8 rows are not those of 8 queries"):
        bridge_family("bridge", config, table)
    others = [m for m in bridge_of(config).mapping_registry() if type(m).__name__ != "QKVMapping"]
    with pytest.raises(
        UnsupportedTensor, match=r"has a GDNConv1dMapping for 'decoder.*conv1d.weight', which no `Row` can be"
    ):
        bridge_family(others, config, table)
    config, checkpoint = vision_language_model("gemma3")
    config.architectures = ["Gemma3ForConditionalGeneration"]
    with pytest.raises(
        UnsupportedTensor, match=r"a AutoMapping for 'multi_modal_projector.proj.weight'.* leave .* out"
    ):
        bridge_family("bridge", config, sparserl.tensor_table(checkpoint))
    with pytest.raises(UnsupportedTensor, match=r"Qwen3VLMoEBridge.maybe_modify_converted_hf_weight .* is not known"):
        bridge_family("bridge", {"architectures": ["Qwen3VLMoeForConditionalGeneration"]}, table)


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
