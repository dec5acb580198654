"""Which parameters of Megatron-core are which tensors of the Hugging Face checkpoint, for each family of models.

How Megatron-core stores them:

    query, key, value   fused, by query group: (its q heads, k, v); these rows are cut into equal parts
    gate, up            fused on each rank: its rows of gate, then its rows of up
    o_proj, down_proj   cut along columns
    embeddings          padded to a vocabulary that can be cut; only the real rows are published
    experts             spread over expert-parallel ranks, numbered from 0 on each
    norms, routers      the same on every tensor-parallel rank: rank 0 publishes them

`megatron_map` says what a row means. Names are those of the local layers; those of Transformer Engine's fused layers
come to the same.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from .megatron_map import Family, GroupRows, Row, fields_of

EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"
FINAL_NORM = "decoder.final_layernorm.weight"

# Adapters of Megatron-Bridge that belong to one tensor of a fused layer, and that tensor.
ADAPTERS = {
    "adapter_q": "q_proj",
    "adapter_k": "k_proj",
    "adapter_v": "v_proj",
    "adapter_gate": "gate_proj",
    "adapter_up": "up_proj",
}

_SIZES = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "groups": "num_key_value_heads or heads",
    "head_dim": "head_dim or hidden // heads",
    "queries": "heads * head_dim",
    "keys": "groups * head_dim",
    "width": "intermediate_size",
    "experts": "0",
    "sparse": "0",
    "tied": "tie_word_embeddings",
}
_MODEL = {
    EMBEDDING: Row("vocabulary", {"model.embed_tokens.weight": "vocab_size, hidden"}),
    FINAL_NORM: Row("whole", {"model.norm.weight": "hidden"}),
    OUTPUT: Row("vocabulary", {"lm_head.weight": "vocab_size, hidden"}, when="not tied"),
}
_NORMS = {
    "input_layernorm.weight": Row("whole", {"input_layernorm.weight": "hidden"}),
    "pre_mlp_layernorm.weight": Row("whole", {"post_attention_layernorm.weight": "hidden"}),
}


def _qkv(kind: str, when: str = "1", columns: str = ", hidden") -> Row:
    """Fused query, key and value: for each group the queries that share a key, the key and the value."""
    query, key, value = (f"self_attn.{name}_proj.{kind}" for name in "qkv")
    shapes = {query: f"queries{columns}", key: f"keys{columns}", value: f"keys{columns}"}
    return Row(
        "segments", shapes, when, groups="groups", segments=[[GroupRows(query), GroupRows(key), GroupRows(value)]]
    )


def _gated(gate: str, up: str, shape: str = "width, hidden", when: str = "1") -> Row:
    """A rank's rows of gate, then its rows of up."""
    return Row("segments", {gate: shape, up: shape}, when, segments=[[GroupRows(gate)], [GroupRows(up)]])


def _mlp(parameter: str, tensor: str, width: str, when: str) -> dict[str, Row]:
    """A gated MLP without biases."""
    return {
        f"{parameter}.linear_fc1.weight": _gated(
            f"{tensor}.gate_proj.weight", f"{tensor}.up_proj.weight", f"{width}, hidden", when
        ),
        f"{parameter}.linear_fc2.weight": Row("columns", {f"{tensor}.down_proj.weight": f"hidden, {width}"}, when),
    }


def _experts(
    moe: str = "mlp", gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj", width: str = "expert_width"
) -> dict[str, Row]:
    """A router, and experts that are gated MLPs."""
    expert = f"{moe}.experts.{{expert}}"
    return {
        "mlp.router.weight": Row("whole", {f"{moe}.gate.weight": "experts, hidden"}, "sparse"),
        "mlp.experts.linear_fc1.weight{expert}": _gated(
            f"{expert}.{gate}.weight", f"{expert}.{up}.weight", f"{width}, hidden", "sparse"
        ),
        "mlp.experts.linear_fc2.weight{expert}": Row(
            "columns", {f"{expert}.{down}.weight": f"hidden, {width}"}, "sparse"
        ),
    }


_QKV = {
    "self_attention.linear_qkv.weight": _qkv("weight"),
    "self_attention.linear_proj.weight": Row("columns", {"self_attn.o_proj.weight": "hidden, queries"}),
}
_QKV_BIAS = {"self_attention.linear_qkv.bias": _qkv("bias", "attention_bias", "")}
_OUT_BIAS = {"self_attention.linear_proj.bias": Row("whole", {"self_attn.o_proj.bias": "hidden"}, "attention_bias")}
_QK_NORM = {
    "self_attention.q_layernorm.weight": Row("whole", {"self_attn.q_norm.weight": "head_dim"}),
    "self_attention.k_layernorm.weight": Row("whole", {"self_attn.k_norm.weight": "head_dim"}),
}
_QWEN2_BIAS = {"self_attention.linear_qkv.bias": _qkv("bias", "not qkv_bias == 0", "")}  # unless it is False
_DENSE = _mlp("mlp", "mlp", "width", "not sparse")
_MLP_BIAS = {
    "mlp.linear_fc1.bias": _gated("mlp.gate_proj.bias", "mlp.up_proj.bias", "width", "mlp_bias"),
    "mlp.linear_fc2.bias": Row("whole", {"mlp.down_proj.bias": "hidden"}, "mlp_bias"),
}
_LLAMA = _NORMS | _QKV | _DENSE

_QWEN_MOE = (
    {"mlp_only": "mlp_only_layers and layer in mlp_only_layers"}
    | _SIZES
    | {
        "experts": "num_experts or num_local_experts",
        "expert_width": "moe_intermediate_size",
        "shared_width": "shared_expert_intermediate_size",
        "sparse": "experts and (layer + 1) % (decoder_sparse_step or 1) == 0 and not mlp_only",
    }
)
_SHARED_EXPERT = _mlp("mlp.shared_experts", "mlp.shared_expert", "shared_width", "sparse and shared_width") | {
    "mlp.shared_experts.gate_weight": Row(
        "whole", {"mlp.shared_expert_gate.weight": "1, hidden"}, "sparse and shared_width"
    )
}

# Experts with a bias that balances them, and experts that all tokens go through.
_DEEPSEEK_MOE = _SIZES | {
    "experts": "n_routed_experts or num_local_experts",
    "expert_width": "moe_intermediate_size",
    "shared_width": "(n_shared_experts or 0) * expert_width",
    "sparse": "experts and layer >= (first_k_dense_replace or 0) and layer % (moe_layer_freq or 1) == 0",
}
_BALANCED = (
    _experts()
    | {
        "mlp.router.expert_bias": Row(
            "whole", {"mlp.gate.e_score_correction_bias": "experts"}, "sparse", dtype="float32"
        )
    }
    | _mlp("mlp.shared_experts", "mlp.shared_experts", "shared_width", "sparse and shared_width")
)

# Multi-latent attention. Transformer Engine's layers keep the two down projections whole, the local ones cut them.
_LATENT_SIZES = _DEEPSEEK_MOE | {
    "query_dim": "qk_nope_head_dim + qk_rope_head_dim",
    "latent": "kv_lora_rank + qk_rope_head_dim",
    "keys_values": "heads * (qk_nope_head_dim + v_head_dim)",
}
_LATENT = {
    "self_attention.linear_q_proj.weight": Row(
        "rows", {"self_attn.q_proj.weight": "heads * query_dim, hidden"}, "not q_lora_rank"
    ),
    "self_attention.linear_q_down_proj.weight": Row(
        "duplicated", {"self_attn.q_a_proj.weight": "q_lora_rank, hidden"}, "q_lora_rank"
    ),
    "self_attention.linear_q_down_proj.bias": Row(
        "duplicated", {"self_attn.q_a_proj.bias": "q_lora_rank"}, "q_lora_rank and attention_bias"
    ),
    "self_attention.q_layernorm.weight": Row("whole", {"self_attn.q_a_layernorm.weight": "q_lora_rank"}, "q_lora_rank"),
    "self_attention.linear_q_up_proj.weight": Row(
        "rows", {"self_attn.q_b_proj.weight": "heads * query_dim, q_lora_rank"}, "q_lora_rank"
    ),
    "self_attention.linear_kv_down_proj.weight": Row(
        "duplicated", {"self_attn.kv_a_proj_with_mqa.weight": "latent, hidden"}
    ),
    "self_attention.linear_kv_down_proj.bias": Row(
        "duplicated", {"self_attn.kv_a_proj_with_mqa.bias": "latent"}, "attention_bias"
    ),
    "self_attention.kv_layernorm.weight": Row("whole", {"self_attn.kv_a_layernorm.weight": "kv_lora_rank"}),
    "self_attention.linear_kv_up_proj.weight": Row("rows", {"self_attn.kv_b_proj.weight": "keys_values, kv_lora_rank"}),
    "self_attention.linear_proj.weight": Row("columns", {"self_attn.o_proj.weight": "hidden, heads * v_head_dim"}),
}
# Multi-token prediction. The checkpoint repeats the embedding and the head, which Megatron-core's layers share.
_MTP = {
    "enorm.weight": Row("whole", {"enorm.weight": "hidden"}),
    "hnorm.weight": Row("whole", {"hnorm.weight": "hidden"}),
    "eh_proj.weight": Row("rows", {"eh_proj.weight": "hidden, 2 * hidden"}),
    "final_layernorm.weight": Row("whole", {"shared_head.norm.weight": "hidden"}),
    EMBEDDING: Row("vocabulary", {"embed_tokens.weight": "vocab_size, hidden"}),
    OUTPUT: Row("vocabulary", {"shared_head.head.weight": "vocab_size, hidden"}),
}
_DEEPSEEK_V3 = Family(_NORMS | _LATENT | _OUT_BIAS | _DENSE | _BALANCED, _MODEL, _LATENT_SIZES, mtp=_MTP)

# Gated delta nets. Megatron-core has query, key, value, gate (z), beta and alpha one after the other, each cut by rows;
# the checkpoint has them by key head.
_DELTA_NET_SIZES = _QWEN_MOE | {
    "full": "not (layer + 1) % (full_attention_interval or 4)",
    "linear": "layer_types[layer] == 'linear_attention' if layer_types else not full",
    "key_dim": "linear_key_head_dim",
    "value_heads": "linear_num_value_heads // linear_num_key_heads",
    "value_dim": "value_heads * linear_value_head_dim",
    "linear_keys": "linear_num_key_heads * key_dim",
    "linear_values": "linear_num_key_heads * value_dim",
}
_QKVZ = "linear_attn.in_proj_qkvz.weight"
_BA = "linear_attn.in_proj_ba.weight"
_CONV = "linear_attn.conv1d.weight"
_DELTA_NET = {
    "self_attention.in_proj.weight": Row(
        "segments",
        {_QKVZ: "2 * linear_keys + 2 * linear_values, hidden", _BA: "2 * linear_num_value_heads, hidden"},
        "linear",
        groups="linear_num_key_heads",
        segments=[
            [GroupRows(_QKVZ, "0", "key_dim")],
            [GroupRows(_QKVZ, "key_dim", "key_dim")],
            [GroupRows(_QKVZ, "2 * key_dim", "value_dim")],
            [GroupRows(_QKVZ, "2 * key_dim + value_dim", "value_dim")],
            [GroupRows(_BA, "0", "value_heads")],
            [GroupRows(_BA, "value_heads", "value_heads")],
        ],
    ),
    "self_attention.conv1d.weight": Row(
        "segments",
        {_CONV: "2 * linear_keys + linear_values, 1, linear_conv_kernel_dim"},
        "linear",
        segments=[
            [GroupRows(_CONV, "0", "linear_keys")],
            [GroupRows(_CONV, "linear_keys", "linear_keys")],
            [GroupRows(_CONV, "2 * linear_keys", "linear_values")],
        ],
    ),
    "self_attention.A_log": Row("rows", {"linear_attn.A_log": "linear_num_value_heads"}, "linear"),
    "self_attention.dt_bias": Row("rows", {"linear_attn.dt_bias": "linear_num_value_heads"}, "linear"),
    "self_attention.out_norm.weight": Row(
        "whole", {"linear_attn.norm.weight": "linear_value_head_dim"}, "linear", plus=1.0
    ),
    "self_attention.out_proj.weight": Row(
        "columns", {"linear_attn.out_proj.weight": "hidden, linear_values"}, "linear"
    ),
}

FAMILIES: dict[str, Family] = {
    "llama": Family(_LLAMA | _QKV_BIAS | _OUT_BIAS | _MLP_BIAS, _MODEL, _SIZES),
    "mistral": Family(_LLAMA, _MODEL, _SIZES),
    "qwen2": Family(_LLAMA | _QWEN2_BIAS, _MODEL, _SIZES),
    "qwen3": Family(_LLAMA | _QKV_BIAS | _OUT_BIAS | _QK_NORM, _MODEL, _SIZES),
    "mixtral": Family(
        _NORMS | _QKV | _experts("block_sparse_moe", "w1", "w3", "w2", "width"),
        _MODEL,
        _SIZES | {"experts": "num_local_experts", "sparse": "1"},
    ),
    "qwen2_moe": Family(_LLAMA | _QWEN2_BIAS | _experts() | _SHARED_EXPERT, _MODEL, _QWEN_MOE),
    "qwen3_moe": Family(_LLAMA | _QKV_BIAS | _OUT_BIAS | _QK_NORM | _experts() | _SHARED_EXPERT, _MODEL, _QWEN_MOE),
    "deepseek_v3": _DEEPSEEK_V3,
    "kimi_k2": _DEEPSEEK_V3,
    "glm4_moe": Family(
        _LLAMA
        | _QKV_BIAS
        | {
            "self_attention.q_layernorm.weight": Row("whole", {"self_attn.q_norm.weight": "head_dim"}, "use_qk_norm"),
            "self_attention.k_layernorm.weight": Row("whole", {"self_attn.k_norm.weight": "head_dim"}, "use_qk_norm"),
        }
        | _BALANCED,
        _MODEL,
        _DEEPSEEK_MOE,
        mtp=_MTP,
    ),
    "gemma3_text": Family(
        {
            "input_layernorm.weight": Row("whole", {"input_layernorm.weight": "hidden"}),
            "pre_mlp_layernorm.weight": Row("whole", {"pre_feedforward_layernorm.weight": "hidden"}),
            "self_attention.linear_proj.post_layernorm.weight": Row(
                "whole", {"post_attention_layernorm.weight": "hidden"}
            ),
            "mlp.linear_fc2.post_layernorm.weight": Row("whole", {"post_feedforward_layernorm.weight": "hidden"}),
        }
        | _QKV
        | _QKV_BIAS
        | _OUT_BIAS
        | _QK_NORM
        | _DENSE,
        _MODEL,
        _SIZES | {"tied": "not tie_word_embeddings == 0"},
    ),
    "gpt_oss": Family(
        _NORMS
        | _QKV
        | _QKV_BIAS
        | _OUT_BIAS
        | {
            "self_attention.core_attention.softmax_offset": Row("rows", {"self_attn.sinks": "heads"}),
            "mlp.router.weight": Row("whole", {"mlp.router.weight": "experts, hidden"}),
            "mlp.router.bias": Row("whole", {"mlp.router.bias": "experts"}),
            "mlp.experts.linear_fc1.weight{expert}": Row(
                "interleaved", {"mlp.experts.gate_up_proj": "experts, hidden, 2 * width"}
            ),
            "mlp.experts.linear_fc1.bias{expert}": Row(
                "interleaved", {"mlp.experts.gate_up_proj_bias": "experts, 2 * width"}
            ),
            "mlp.experts.linear_fc2.weight{expert}": Row(
                "transposed", {"mlp.experts.down_proj": "experts, width, hidden"}
            ),
            "mlp.experts.linear_fc2.bias{expert}": Row("one", {"mlp.experts.down_proj_bias": "experts, hidden"}),
        },
        _MODEL,
        _SIZES | {"experts": "num_local_experts"},
    ),
    "qwen3_next": Family(
        _NORMS
        | {
            "self_attention.linear_qkv.weight": Row(
                "segments",
                {
                    "self_attn.q_proj.weight": "2 * queries, hidden",
                    "self_attn.k_proj.weight": "keys, hidden",
                    "self_attn.v_proj.weight": "keys, hidden",
                },
                "not linear",
                groups="groups",
                segments=[
                    [
                        GroupRows("self_attn.q_proj.weight", "0", "head_dim", "heads // groups", "2 * head_dim"),
                        GroupRows("self_attn.q_proj.weight", "head_dim", "head_dim", "heads // groups", "2 * head_dim"),
                        GroupRows("self_attn.k_proj.weight"),
                        GroupRows("self_attn.v_proj.weight"),
                    ]
                ],
            ),
            "self_attention.linear_proj.weight": Row(
                "columns", {"self_attn.o_proj.weight": "hidden, queries"}, "not linear"
            ),
            "self_attention.q_layernorm.weight": Row("whole", {"self_attn.q_norm.weight": "head_dim"}, "not linear"),
            "self_attention.k_layernorm.weight": Row("whole", {"self_attn.k_norm.weight": "head_dim"}, "not linear"),
        }
        | _DELTA_NET
        | _DENSE
        | _experts()
        | _SHARED_EXPERT,
        _MODEL,
        _DELTA_NET_SIZES,
    ),
}


# Modules of vision-language models that are not published: those of Megatron-core's LLaVA and of Megatron-Bridge.
_VISION = ("vision_model.", "vision_projection.", "visual.", "vision_tower.", "multi_modal_projector.")


def _tower(base: str, name: str, replacement: str) -> Family:
    """The language model of a vision-language model. Tensors whose names begin with `name` have another beginning."""
    family = FAMILIES[base]

    def renamed(tensor: str) -> str:
        return replacement + tensor.removeprefix(name) if tensor.startswith(name) else tensor

    def row(tensors: Row) -> Row:
        return replace(tensors, tensors={renamed(tensor): shape for tensor, shape in tensors.tensors.items()})

    model = {parameter: row(tensors) for parameter, tensors in family.model.items()}
    return replace(
        family,
        model=model,
        prefix=renamed(family.prefix),
        module="language_model",
        config="text_config",
        outside=dict.fromkeys(_VISION),
    )


FAMILIES.update(
    {
        "gemma3": _tower("gemma3_text", "", "language_model."),
        "qwen2_vl": _tower("qwen2", "", ""),
        "qwen2_5_vl": _tower("qwen2", "", ""),
        "qwen3_vl": _tower("qwen3", "model.", "model.language_model."),
    }
)
# Vision-language models whose language model is of any family.
LLAVA = ("llava", "llava_next", "llava_onevision")


def family_of(config: Any) -> Family | None:
    """The map for a Hugging Face config; None if there is none."""
    read = fields_of(config)
    kind = read("model_type")
    if kind not in LLAVA:
        return FAMILIES.get(kind)
    base = fields_of(read("text_config") or {})("model_type")
    return _tower(base, "", "language_model.") if base in FAMILIES else None
