"""Small models of transformers, one of each family, and the checkpoints that they are saved as."""

from __future__ import annotations

from copy import deepcopy

import pytest

torch = pytest.importorskip("torch")

VOCAB = 21
COMMON = {
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "intermediate_size": 24,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": False,
}
QWEN_MOE = {"num_experts": 4, "moe_intermediate_size": 8, "num_experts_per_tok": 2, "norm_topk_prob": True}
BALANCED = {
    "n_routed_experts": 4,
    "moe_intermediate_size": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 1,
}
LATENT = {
    "num_key_value_heads": 8,
    "head_dim": 2,
    "q_lora_rank": 12,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 2,
    "v_head_dim": 6,
    "n_shared_experts": 2,
}
CONFIGS = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mistral": {},
    "qwen3": {},
    "mixtral": {"num_local_experts": 4},
    "qwen2_moe": QWEN_MOE | {"shared_expert_intermediate_size": 4},
    "qwen2": {"num_key_value_heads": 1, "tie_word_embeddings": True},
    "qwen3_moe": QWEN_MOE,
    "deepseek_v3": BALANCED | LATENT,
    "glm4_moe": BALANCED
    | {"n_shared_experts": 1, "attention_bias": True, "use_qk_norm": True, "partial_rotary_factor": 0.5},
    "gemma3_text": {"tie_word_embeddings": True},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_next": QWEN_MOE
    | {
        "shared_expert_intermediate_size": 4,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "mlp_only_layers": [1],
        "partial_rotary_factor": 0.5,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 4,
        "linear_value_head_dim": 6,
    },
}


def transformers_model(kind, dtype, **options):
    """A model with random weights, its config, and the checkpoint that it is saved as."""
    transformers = pytest.importorskip("transformers")
    from transformers.core_model_loading import revert_weight_conversion

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **deepcopy({**COMMON, **CONFIGS[kind], **options, "dtype": dtype}))
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            gate, _, attribute = name.rpartition(".")
            if attribute == "e_score_correction_bias":  # float32 in every checkpoint, and where one is loaded
                tensor = tensor.float()
                setattr(model.get_submodule(gate), attribute, tensor)
            tensor.copy_(torch.randn(tensor.shape) * 0.3)
            if name.endswith("linear_attn.norm.weight"):  # Megatron-core has one less, which must be exact
                tensor.copy_(torch.randint(32, 96, tensor.shape) / 64)
    checkpoint = revert_weight_conversion(model, model.state_dict())  # as `save_pretrained` does
    if config.tie_word_embeddings:
        del checkpoint["lm_head.weight"]
    return model, config, {name: tensor.detach().contiguous() for name, tensor in checkpoint.items()}


def llava(text, dtype):
    """A small LLaVA with random weights, its config, and the checkpoint that it is saved as."""
    transformers = pytest.importorskip("transformers")
    from transformers.core_model_loading import revert_weight_conversion

    torch.manual_seed(0)
    vision = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.AutoConfig.for_model(
        "llava",
        text_config=deepcopy(COMMON | CONFIGS[text] | {"model_type": text, "attention_bias": False, "mlp_bias": False}),
        vision_config=vision | {"model_type": "clip_vision_model", "image_size": 28, "patch_size": 14},
        tie_word_embeddings=False,
        dtype=dtype,
    )
    model = transformers.AutoModelForImageTextToText.from_config(config).eval()
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.copy_(torch.randn(tensor.shape) * 0.3)
    checkpoint = revert_weight_conversion(model, model.state_dict())
    return model, config, {name: tensor.detach().contiguous() for name, tensor in checkpoint.items()}


def vision_language_model(kind):
    """The config of a small vision-language model, and the checkpoint that it is saved as, without its bits."""
    transformers = pytest.importorskip("transformers")
    from transformers.core_model_loading import revert_weight_conversion

    unused = ["rope_parameters", "tie_word_embeddings"] + ["head_dim"] * kind.startswith("qwen2")
    text = {name: value for name, value in COMMON.items() if name not in unused}
    config = transformers.AutoConfig.for_model(kind, text_config=text, dtype="bfloat16")
    with torch.device("meta"):
        model = transformers.AutoModelForImageTextToText.from_config(config).bfloat16()
    checkpoint = revert_weight_conversion(model, model.state_dict())
    if config.tie_word_embeddings:
        checkpoint = {name: tensor for name, tensor in checkpoint.items() if not name.endswith("lm_head.weight")}
    return config, {name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in checkpoint.items()}
