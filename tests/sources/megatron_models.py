"""Megatron-core's own models on a CPU, with the weights of transformers' models.

Megatron-core runs on GPUs. Here its models, its data parallelism and its optimizers run as they are, on processes with
Gloo; only what they ask of CUDA is answered by the CPU.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from functools import partial
from importlib.util import find_spec

import pytest

import sparserl
from sparserl.sources import Ranks
from sparserl.sources.megatron_core import canonical
from sparserl.sources.megatron_families import EMBEDDING, OUTPUT
from tests.sources.test_megatron_processes import spawn
from tests.sources.transformers_models import VOCAB

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")
TorchFunctionMode = pytest.importorskip("torch.overrides").TorchFunctionMode

PADDED = 32


def two_ranks(folder, job):
    """Run `job(rank)` in two processes, where Megatron-core and transformers are installed."""
    if find_spec("megatron") is None:
        pytest.skip("Megatron-core is not installed")
    pytest.importorskip("transformers")
    spawn(folder, job, 2)


class OnCpu(TorchFunctionMode):
    """Tensors for a GPU are made on the CPU, and say of themselves that they are on a GPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if func is torch.Tensor.cuda:
            return args[0]
        result = func(*args, **kwargs)
        is_question = func is torch.Tensor.type and len(args) == 1 and not kwargs
        return result.replace("torch.", "torch.cuda.") if is_question else result


class Stream:
    """A stream of a GPU on which everything is done at once."""

    def wait_stream(self, other):
        pass

    def record_event(self):
        return self

    def wait(self, stream):
        pass

    def synchronize(self):
        pass


class OffGpu(TorchFunctionMode):
    """Tensors are on a GPU, but for copies that were made on the CPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func == torch.Tensor.is_cuda.__get__:
            return not hasattr(args[0], "was_copied")
        if func is torch.Tensor.pin_memory:
            return args[0]
        kwargs.pop("pin_memory", None)
        result = func(*args, **kwargs)
        if func is torch.Tensor.cpu:
            result = result.clone()
        if func is torch.Tensor.cpu or (func is torch.Tensor.float and hasattr(args[0], "was_copied")):
            result.was_copied = True
        return result


def offloaded(make):
    """What `make` makes of parameters that it takes to be on a GPU, with streams of a GPU from now on."""
    torch.cuda.current_stream = Stream
    torch.cuda.Stream = Stream
    torch.cuda.stream = lambda stream: contextlib.nullcontext()
    with OffGpu():
        return make()


def prepare_cpu():
    """Replace what Megatron-core's models ask of a GPU when they are made."""
    import megatron.core.tensor_parallel.random as randomness
    import megatron.core.transformer.moe.moe_utils as moe_utils
    import megatron.core.transformer.multi_latent_attention as latent

    torch.cuda.current_device = lambda: "cpu"
    randomness.CudaRNGStatesTracker.fork = lambda *_: contextlib.nullcontext()
    moe_utils.te_general_gemm = None
    latent.TELinear = ()  # no class: Transformer Engine is not installed


@contextlib.contextmanager
def megatron_ranks(tp=1, pp=1, ep=1):
    """Megatron-core's process groups, on a CPU. Experts that are spread are not cut."""
    from megatron.core import parallel_state

    prepare_cpu()
    parallel_state.initialize_model_parallel(
        tp, pp, expert_model_parallel_size=ep, expert_tensor_parallel_size=tp if ep == 1 else 1
    )
    with OnCpu():
        yield
    parallel_state.destroy_model_parallel()


def logits_of(model):
    """The logits of tokens 0, 1, 2, … and those of multi-token prediction, on ranks that have the last stage."""
    from megatron.core import parallel_state

    ids = torch.arange(VOCAB).view(1, -1)
    mask = torch.ones(1, 1, VOCAB, VOCAB).triu(1).bool()
    labels = ids if getattr(model, "mtp", None) is not None else None
    if parallel_state.get_pipeline_model_parallel_rank():
        hidden = torch.empty(VOCAB, 1, model.config.hidden_size)
        dist.recv(hidden, 0)
        model.set_input_tensor(hidden)
    outputs = []
    if hasattr(model, "output_layer"):
        hook = model.output_layer.register_forward_hook(lambda *call: outputs.append(call[-1][0].clone()))
    result = model(ids, ids, mask, labels=labels)
    if not outputs:
        dist.send(result.contiguous(), 1)
        return []
    hook.remove()
    outputs = outputs[-1:] + outputs[:-1]  # those of multi-token prediction are computed before the others
    return [logits.transpose(0, 1)[..., :VOCAB] for logits in outputs]


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
    copies = {name for name in parameters if not name.endswith("_extra_state")} - filled
    assert copies <= {EMBEDDING, OUTPUT}
    assert here.pp or not copies
    for name in copies:  # of the embedding, on the last stage
        parameters[name][:VOCAB] = checkpoint["model.embed_tokens.weight"]


def transformer_of(kind, config, mtp=None, **options):
    """Megatron-core's config of a model, and the specification of its layers."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    stages = parallel_state.get_pipeline_model_parallel_world_size()
    settings = {
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "num_query_groups": config.num_key_value_heads,
        "kv_channels": getattr(config, "head_dim", None) or config.hidden_size // 8,
        "ffn_hidden_size": config.intermediate_size,
        "use_cpu_initialization": True,
        "normalization": "RMSNorm",
        "layernorm_epsilon": config.rms_norm_eps,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "add_qkv_bias": kind in ("qwen2", "qwen2_moe") or getattr(config, "attention_bias", False),
        "qk_layernorm": kind.startswith(("qwen3", "deepseek")) or getattr(config, "use_qk_norm", False),
        "pipeline_model_parallel_size": stages,
        "num_layers_in_first_pipeline_stage": 1 if stages > 1 else None,
        "pipeline_dtype": torch.float32,
        "mtp_num_layers": mtp,
        "tensor_model_parallel_size": parallel_state.get_tensor_model_parallel_world_size(),
        "expert_model_parallel_size": parallel_state.get_expert_model_parallel_world_size(),
        "expert_tensor_parallel_size": parallel_state.get_expert_tensor_parallel_world_size(),
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "apply_rope_fusion": False,
        **(EXPERTS[kind](config) if kind in EXPERTS else {}),
        **options,
    }
    make = MLATransformerConfig if "kv_lora_rank" in settings else TransformerConfig
    transformer = make(**settings)
    spec = get_gpt_decoder_block_spec(
        transformer, use_transformer_engine=False, normalization=transformer.normalization
    )
    if "kv_lora_rank" in settings:
        for layer in spec.layer_specs:
            layer.submodules.self_attention.submodules.core_attention = LatentCore
    if kind == "qwen3_next":
        names = config.layer_types[get_transformer_layer_offset(transformer) :]
        for layer, name in zip(spec.layer_specs, names, strict=False):
            if name == "linear_attention":
                layer.submodules.self_attention = delta_net_spec()
    return transformer, spec


def megatron_model(kind, config, mtp=None, **options):
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    transformer, spec = transformer_of(kind, config, mtp, **options)
    model = GPTModel(
        transformer,
        spec,
        vocab_size=PADDED,
        max_sequence_length=64,
        share_embeddings_and_output_weights=config.tie_word_embeddings,
        position_embedding_type="rope",
        rotary_percent=config.rope_parameters.get("partial_rotary_factor", 1.0),
        parallel_output=False,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        mtp_block_spec=get_gpt_mtp_block_spec(transformer, spec, use_transformer_engine=False) if mtp else None,
    )
    return model.eval()


def llava_model(config, **options):
    """Megatron-core's LLaVA: a language model behind a CLIP, with local layers."""
    import megatron.core.models.multimodal.llava_model as llava
    from megatron.core.models.vision.clip_vit_model import CLIPViTModel
    from megatron.core.models.vision.vit_layer_specs import get_vit_layer_with_local_spec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_config import TransformerConfig

    llava.CLIPViTModel = partial(CLIPViTModel, ln_pre_impl=WrappedTorchNorm)  # its default is Transformer Engine's
    text = config.text_config
    transformer, spec = transformer_of(text.model_type, text)
    vision = TransformerConfig(
        num_layers=config.vision_config.num_hidden_layers,
        hidden_size=config.vision_config.hidden_size,
        num_attention_heads=config.vision_config.num_attention_heads,
        tensor_model_parallel_size=transformer.tensor_model_parallel_size,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
    )
    vision.vision_model_type = "clip"
    layers = get_vit_layer_with_local_spec()
    model = llava.LLaVAModel(
        transformer,
        spec,
        PADDED,
        64,
        vision,
        layers,
        True,
        replace(transformer, gated_linear_unit=False),
        layers.submodules.mlp.submodules,
        language_position_embedding_type="rope",
        parallel_output=False,
        img_h=28,
        img_w=28,
        **options,
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


def mixtral(config):
    return {
        "num_moe_experts": config.num_local_experts,
        "moe_router_topk": config.num_experts_per_tok,
        "moe_ffn_hidden_size": config.intermediate_size,
        "moe_token_dispatcher_type": "allgather",
        "moe_router_load_balancing_type": "none",
    }


def qwen2_moe(config):
    return qwen_experts(config) | {
        "moe_shared_expert_intermediate_size": config.shared_expert_intermediate_size,
        "moe_shared_expert_gate": True,
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
    "mixtral": mixtral,
    "qwen2_moe": qwen2_moe,
    "qwen3_moe": qwen_experts,
    "deepseek_v2": latent_attention,
    "deepseek_v3": latent_attention,
    "glm4_moe": balanced_experts,
}
