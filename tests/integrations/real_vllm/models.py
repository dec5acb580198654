"""Tiny models with a tokenizer, made here."""

from __future__ import annotations

import json
import multiprocessing
import shutil
import signal
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    DeepseekV3Config,
    Gemma3TextConfig,
    Glm4MoeConfig,
    GptOssConfig,
    Idefics3Config,
    Idefics3ImageProcessorPil,
    Idefics3Processor,
    LlamaConfig,
    MixtralConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3MoeConfig,
)

VOCAB = 90  # vLLM pads it to 128
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 64,
    "n_group": 1,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "topk_group": 1,
}
LATENT = {  # vLLM on a CPU computes MLA for these ranks only
    "kv_lora_rank": 512,
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "topk_method": "noaux_tc",
    "v_head_dim": 32,
}
WINDOWS = {"head_dim": 32, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 32}
VISION = {
    "hidden_size": 64,
    "image_size": 32,
    "intermediate_size": 96,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "patch_size": 8,
}
CONFIGS = {
    "llama": lambda: LlamaConfig(**COMMON),
    "fp8": lambda: LlamaConfig(**COMMON),
    "qwen2": lambda: Qwen2Config(tie_word_embeddings=True, **COMMON),
    "moe": lambda: Qwen3MoeConfig(
        moe_intermediate_size=64, num_experts=4, num_experts_per_tok=2, head_dim=32, **COMMON
    ),
    "mla": lambda: DeepseekV3Config(**COMMON | EXPERTS | LATENT),
    "glm": lambda: Glm4MoeConfig(head_dim=32, use_qk_norm=True, **COMMON, **EXPERTS),
    "gemma3": lambda: Gemma3TextConfig(query_pre_attn_scalar=32, **COMMON, **WINDOWS),
    "gpt-oss": lambda: GptOssConfig(
        num_local_experts=4, num_experts_per_tok=2, **COMMON | WINDOWS | {"intermediate_size": 128}
    ),
    "mixtral": lambda: MixtralConfig(num_local_experts=4, num_experts_per_tok=2, **COMMON),
    "vlm": lambda: Idefics3Config(
        text_config={"model_type": "llama", "tie_word_embeddings": True, **COMMON},
        vision_config=VISION,
        image_token_id=VOCAB - 1,
        scale_factor=2,
        tie_word_embeddings=True,
    ),
}
CHANNELS = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
TOKENS = CHANNELS | {"strategy": "token", "dynamic": True}
FP8 = {  # a scale for each row of a weight
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {"all": {"targets": ["Linear"], "weights": CHANNELS, "input_activations": TOKENS}},
    "ignore": ["lm_head"],
}
EMBEDDINGS = {  # of models that have them tied
    "gemma3": "model.embed_tokens.weight",
    "qwen2": "model.embed_tokens.weight",
    "vlm": "model.text_model.embed_tokens.weight",
}


MTP = "model.mtp_layers.0."


def config(kind):
    return CONFIGS[kind]()


def compute_in_bf16():
    """An op of vLLM, and nothing else."""
    import vllm._custom_ops  # noqa: F401

    torch.ops._C.silu_and_mul(torch.empty(1, 8, dtype=torch.bfloat16), torch.ones(1, 16, dtype=torch.bfloat16))


def dtype_of(kind):
    """Bfloat16 where vLLM can compute in it: on Arm, its wheel has instructions that not every processor has."""
    if kind not in ("llama", "qwen2", "fp8"):
        return torch.float32  # experts in bf16 need AMX
    process = multiprocessing.get_context("fork").Process(target=compute_in_bf16)
    process.start()
    process.join()
    return torch.float16 if process.exitcode == -signal.SIGILL else torch.bfloat16


def make(folder, kind):
    """A checkpoint with random weights, large enough that generations tell one from another."""
    torch.manual_seed(0)
    of_kind = AutoModelForImageTextToText if kind == "vlm" else AutoModelForCausalLM
    model = of_kind.from_config(config(kind)).to(dtype_of(kind)).requires_grad_(False)
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.save_pretrained(folder)
    if kind == "fp8":
        quantize(folder)
    words = ["<pad>", "<s>", "</s>", *(f"w{i}" for i in range(VOCAB - 4)), "<image>"]
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    fast.save_pretrained(folder)
    if kind == "vlm":
        size = {"longest_edge": VISION["image_size"]}
        images = Idefics3ImageProcessorPil(size=size, max_image_size=size)
        Idefics3Processor(images, fast, image_seq_len=4).save_pretrained(folder)


def quantize(folder):
    """Give a checkpoint's projections codes of 8 bits, and scales."""
    tensors = load(folder)
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        scale = tensors[name].float().abs().amax(1, keepdim=True) / torch.finfo(torch.float8_e4m3fn).max
        tensors[name] = (tensors[name].float() / scale).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale"] = scale
    save_file(tensors, Path(folder) / "model.safetensors")
    change_config(folder, quantization_config=FP8)


def make_mimo(folder):
    """A checkpoint of MiMo, which is Qwen2 with a head that predicts one token more."""
    make(folder, "qwen2")
    tensors = load(folder, "qwen2")
    tensors["lm_head.weight"] = tensors["lm_head.weight"] * 1.5
    norm = tensors["model.norm.weight"]
    layer = {name.replace("layers.0.", "mtp_layers.0."): tensor * 1.1 for name, tensor in layer_of(tensors).items()}
    layer |= {f"{MTP}{name}_layernorm.weight": norm.clone() for name in ("token", "hidden", "final")}
    layer[f"{MTP}input_proj.weight"] = (torch.randn(norm.numel(), 2 * norm.numel()) * 0.1).to(norm.dtype)
    save_file(tensors | layer, Path(folder) / "model.safetensors")
    fields = {"architectures": ["MiMoForCausalLM"], "model_type": "mimo", "num_nextn_predict_layers": 1}
    change_config(folder, **fields, tie_word_embeddings=False)


def register_mimo():
    """Let transformers know its config, as the code beside the checkpoint on the Hub does."""
    AutoConfig.register("mimo", type("MiMoConfig", (Qwen2Config,), {"model_type": "mimo"}))


def make_eagle(folder, llama):
    """A drafter in the manner of EAGLE: a layer and what its inputs go through; embeddings are the policy's."""
    shutil.copytree(llama, folder)
    tensors = load(llama, "llama")
    layer = {name.removeprefix("model."): tensor * 1.1 for name, tensor in layer_of(tensors).items()}
    norm = tensors["model.norm.weight"]
    layer["fc.weight"] = (torch.randn(norm.numel(), 2 * norm.numel()) * 0.1).to(norm.dtype)
    del layer["layers.0.input_layernorm.weight"]
    save_file(layer, Path(folder) / "model.safetensors")
    change_config(folder, num_hidden_layers=1)


def layer_of(tensors):
    return {name: tensor for name, tensor in tensors.items() if name.startswith("model.layers.0.")}


def change_config(folder, **fields):
    path = Path(folder) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def load(folder, kind=None):
    """The tensors of a checkpoint."""
    tensors = load_file(Path(folder) / "model.safetensors")
    if kind in EMBEDDINGS:
        tensors["lm_head.weight"] = tensors[EMBEDDINGS[kind]]  # as a trainer has it
    return tensors


def save(tensors, old, new):
    """The same checkpoint with other weights."""
    shutil.copytree(old, new)
    names = {id(tensor): name for name, tensor in reversed(tensors.items())}  # of tied ones, the first
    save_file({name: tensors[name] for name in names.values()}, Path(new) / "model.safetensors")


def step(tensors, seed, share=0.01):
    """Change a share of all elements, by a little and by a lot, in place."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in {id(tensor): tensor for tensor in tensors.values()}.values():
        chosen = torch.rand(tensor.shape, generator=generator) < share
        if tensor.dtype == torch.float8_e4m3fn:
            codes = tensor.view(torch.uint8)
            codes[chosen & (codes & 127 < 126)] ^= 1  # and none becomes NaN
            continue
        noise = torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
        tensor[chosen] += noise[chosen] * 0.05
