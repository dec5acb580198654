"""The maps of Megatron-core's families against Megatron-core's own models, where it is installed."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import pytest

import sparserl
from sparserl.sources import Ranks
from sparserl.sources.megatron_core import canonical
from sparserl.weights.digest import table_digest
from tests.sources.test_megatron_processes import spawn
from tests.sources.transformers_models import VOCAB, transformers_model

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")

PADDED = 32
RUNS = (  # tensor-parallel and expert-parallel ranks, and options of the config
    ("qwen2", 2, 1, {}),
    ("llama", 2, 1, {"attention_bias": False, "mlp_bias": False}),
    ("qwen3_moe", 1, 2, {}),
    ("deepseek_v3", 2, 1, {}),
    ("deepseek_v3", 1, 2, {"q_lora_rank": None}),
    ("glm4_moe", 2, 1, {}),
    ("glm4_moe", 1, 2, {"use_qk_norm": False, "attention_bias": False}),
    ("gpt_oss", 2, 2, {}),
    ("qwen3_next", 2, 1, {}),
)


@pytest.mark.slow
def test_megatron_core_itself(tmp_path):
    """Megatron-core's models compute what the Hugging Face models do, and are published as their checkpoints."""
    pytest.importorskip("megatron.core")
    pytest.importorskip("transformers")
    spawn(tmp_path, run_megatron, 2)


def run_megatron(rank):
    import megatron.core.tensor_parallel.random as randomness
    import megatron.core.transformer.moe.moe_utils as moe_utils
    import megatron.core.transformer.multi_latent_attention as latent
    from megatron.core import parallel_state

    torch.cuda.current_device = lambda: "cpu"  # Megatron-core asks for devices it does not need
    randomness.CudaRNGStatesTracker.fork = lambda *_: contextlib.nullcontext()
    moe_utils.te_general_gemm = None
    latent.TELinear = ()  # no class: Transformer Engine is not installed
    for kind, tp, ep, options in RUNS:
        parallel_state.initialize_model_parallel(
            tp, expert_model_parallel_size=ep, expert_tensor_parallel_size=tp if ep == 1 else 1
        )
        require_same_model(kind, options)
        parallel_state.destroy_model_parallel()


def require_same_model(kind, options):
    """Filled by the map, Megatron-core's model has the same logits; published by it, the checkpoint's bits."""
    reference, config, checkpoint = transformers_model(kind, "float32", **options)
    model = megatron_model(kind, config)
    source = sparserl.sources.megatron(model, config)
    assert source.layout.table == sparserl.tensor_table(checkpoint), kind
    with torch.no_grad():
        fill(model, config, checkpoint)
        require_same_bits(kind, source, checkpoint)
        if kind == "qwen3_next":  # its norms add 1 to their weights, which those that run without a GPU do not
            for name, parameter in model.named_parameters():
                if name.endswith("norm.weight"):
                    parameter += 1
        ids = torch.arange(VOCAB).view(1, -1)
        mask = torch.ones(1, 1, VOCAB, VOCAB).triu(1).bool()
        logits = model(ids, ids, mask)[..., :VOCAB]
        expected = reference(ids).logits
    assert (logits - expected).abs().max() < 1e-5 * expected.abs().max(), kind  # sums are taken in another order


def require_same_bits(kind, source, checkpoint):
    digests = [None, None]
    dist.all_gather_object(digests, sparserl.digest(source.weights(), threads=1))
    assert sum(digests, table_digest(source.layout.table)) == sparserl.digest(checkpoint, threads=1), kind


def fill(model, config, checkpoint):
    """Put weights where the layouts say, also those that another rank publishes."""
    here = Ranks.here()
    filled = set()
    parameters = {canonical(name): tensor for name, tensor in model.state_dict(keep_vars=True).items()}
    for ranks in (replace(here, dp=0, edp=0), replace(here, tp=0, dp=0, edp=0)):
        layout = sparserl.sources.megatron(model, config, ranks).layout
        for name, local in layout.parameters.items():
            for piece in local.slices if name not in filled else ():
                data = checkpoint[piece.tensor][piece.region.slices]
                if local.convert is not None:
                    places = local.convert(torch.arange(data.numel()).view(local.shape))
                    data = data.flatten()[places.flatten().argsort()].view(local.shape)
                    data = data - int(places.is_floating_point())  # `plus=1.0` makes floats
                parameters[name][piece.local.slices] = data.view(piece.local.size)
        filled |= {name for name, local in layout.parameters.items() if local.slices}
    assert filled == {name for name in parameters if not name.endswith("_extra_state")}


def megatron_model(kind, config):
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    settings = {
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "num_query_groups": config.num_key_value_heads,
        "kv_channels": config.head_dim if hasattr(config, "head_dim") else config.hidden_size // 8,
        "ffn_hidden_size": config.intermediate_size,
        "use_cpu_initialization": True,
        "normalization": "RMSNorm",
        "layernorm_epsilon": config.rms_norm_eps,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "add_qkv_bias": kind == "qwen2" or config.attention_bias,
        "qk_layernorm": kind in ("qwen3_moe", "qwen3_next", "deepseek_v3") or getattr(config, "use_qk_norm", False),
        "tensor_model_parallel_size": parallel_state.get_tensor_model_parallel_world_size(),
        "expert_model_parallel_size": parallel_state.get_expert_model_parallel_world_size(),
        "expert_tensor_parallel_size": parallel_state.get_expert_tensor_parallel_world_size(),
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "apply_rope_fusion": False,
        **(EXPERTS[kind](config) if kind in EXPERTS else {}),
    }
    make = MLATransformerConfig if kind == "deepseek_v3" else TransformerConfig
    transformer = make(**settings)
    spec = get_gpt_decoder_block_spec(transformer, use_transformer_engine=False, normalization="RMSNorm")
    if kind == "deepseek_v3":
        for layer in spec.layer_specs:
            layer.submodules.self_attention.submodules.core_attention = LatentCore
    if kind == "qwen3_next":
        for layer, name in zip(spec.layer_specs, config.layer_types, strict=True):
            if name == "linear_attention":
                layer.submodules.self_attention = delta_net_spec()
    model = GPTModel(
        transformer,
        spec,
        vocab_size=PADDED,
        max_sequence_length=64,
        share_embeddings_and_output_weights=config.tie_word_embeddings,
        position_embedding_type="rope",
        rotary_percent=config.rope_parameters.get("partial_rotary_factor", 1.0),
        parallel_output=False,
    )
    return model.eval()


class LatentCore(torch.nn.Module):
    """Attention with values of another size than keys, which Megatron-core's own does not do without a GPU."""

    def __init__(self, *, softmax_scale, **_):
        super().__init__()
        self.scale = softmax_scale

    def forward(self, query, key, value, *_, **__):
        heads = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        mixed = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True, scale=self.scale)
        return mixed.permute(2, 0, 1, 3).flatten(2)


def delta_net_spec():
    """A gated delta net with local layers; the package it asks for is needed on GPUs only."""
    import megatron.core.ssm.gated_delta_net as delta_net
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    delta_net.HAVE_FLA = True
    delta_net.l2norm = lambda x: x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)
    parts = delta_net.GatedDeltaNetSubmodules(ColumnParallelLinear, WrappedTorchNorm, RowParallelLinear)
    return ModuleSpec(module=delta_net.GatedDeltaNet, submodules=parts)


def qwen3_next(config):
    return qwen_experts(config) | {
        "moe_layer_freq": [int(i not in config.mlp_only_layers) for i in range(config.num_hidden_layers)],
        "moe_shared_expert_intermediate_size": config.shared_expert_intermediate_size,
        "moe_shared_expert_gate": True,
        "attention_output_gate": True,
        "deterministic_mode": True,
        "experimental_attention_variant": "gated_delta_net",
        "linear_attention_freq": [int(name == "linear_attention") for name in config.layer_types],
        "linear_conv_kernel_dim": config.linear_conv_kernel_dim,
        "linear_key_head_dim": config.linear_key_head_dim,
        "linear_value_head_dim": config.linear_value_head_dim,
        "linear_num_key_heads": config.linear_num_key_heads,
        "linear_num_value_heads": config.linear_num_value_heads,
    }


def qwen_experts(config):
    return {
        "num_moe_experts": config.num_experts,
        "moe_router_topk": config.num_experts_per_tok,
        "moe_ffn_hidden_size": config.moe_intermediate_size,
        "moe_token_dispatcher_type": "allgather",
        "moe_router_load_balancing_type": "none",
    }


def balanced_experts(config):
    dense = config.first_k_dense_replace
    return {
        "num_moe_experts": config.n_routed_experts,
        "moe_router_topk": config.num_experts_per_tok,
        "moe_ffn_hidden_size": config.moe_intermediate_size,
        "moe_shared_expert_intermediate_size": config.moe_intermediate_size * config.n_shared_experts,
        "moe_layer_freq": [0] * dense + [1] * (config.num_hidden_layers - dense),
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_topk_scaling_factor": config.routed_scaling_factor,
        "moe_token_dispatcher_type": "allgather",
        "moe_router_load_balancing_type": "none",
    }


def latent_attention(config):
    return balanced_experts(config) | {
        "multi_latent_attention": True,
        "q_lora_rank": config.q_lora_rank,
        "kv_lora_rank": config.kv_lora_rank,
        "qk_head_dim": config.qk_nope_head_dim,
        "qk_pos_emb_head_dim": config.qk_rope_head_dim,
        "v_head_dim": config.v_head_dim,
        "rope_type": "rope",
        "rotary_scaling_factor": 1.0,
    }


def gpt_oss(config):
    from megatron.core.fusions.fused_bias_geglu import quick_gelu

    return {
        "num_moe_experts": config.num_local_experts,
        "moe_router_topk": config.num_experts_per_tok,
        "moe_ffn_hidden_size": config.intermediate_size,
        "moe_token_dispatcher_type": "allgather",
        "moe_router_load_balancing_type": "none",
        "add_bias_linear": True,
        "activation_func": quick_gelu,
        "activation_func_clamp_value": 7.0,
        "glu_linear_offset": 1.0,
        "bias_activation_fusion": False,
        "softmax_type": "learnable",
    }


EXPERTS = {
    "qwen3_next": qwen3_next,
    "gpt_oss": gpt_oss,
    "qwen3_moe": qwen_experts,
    "deepseek_v3": latent_attention,
    "glm4_moe": balanced_experts,
}
