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
    LlamaConfig,
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


MTP = "model.mtp_layers.0."


def config(kind):
    if kind == "llama":
        return LlamaConfig(**COMMON)
    if kind == "qwen2":
        return Qwen2Config(tie_word_embeddings=True, **COMMON)
    return Qwen3MoeConfig(moe_intermediate_size=64, num_experts=4, num_experts_per_tok=2, head_dim=32, **COMMON)


def compute_in_bf16():
    """An op of vLLM, and nothing else."""
    import vllm._custom_ops  # noqa: F401

    torch.ops._C.silu_and_mul(torch.empty(1, 8, dtype=torch.bfloat16), torch.ones(1, 16, dtype=torch.bfloat16))


def dtype_of(kind):
    """Bfloat16 where vLLM can compute in it: on Arm, its wheel has instructions that not every processor has."""
    if kind == "moe":
        return torch.float32  # its experts in bf16 need AMX
    process = multiprocessing.get_context("fork").Process(target=compute_in_bf16)
    process.start()
    process.join()
    return torch.float16 if process.exitcode == -signal.SIGILL else torch.bfloat16


def make(folder, kind):
    """A checkpoint with random weights, large enough that generations tell one from another."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config(kind)).to(dtype_of(kind)).requires_grad_(False)
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.save_pretrained(folder)
    words = {word: i for i, word in enumerate(["<pad>", "<s>", "</s>", *(f"w{i}" for i in range(VOCAB - 3))])}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>").save_pretrained(folder)


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
    if kind == "qwen2":
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]  # tied, as a trainer has it
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
        noise = torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
        tensor[chosen] += noise[chosen] * 0.05
