"""A small checkpoint, and the parameters that Megatron would hold of it on each rank."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest

from sparserl.sources import Ranks

torch = pytest.importorskip("torch")

HIDDEN, HEAD_DIM, LAYERS, VOCAB, PADDED = 12, 2, 4, 21, 32
COMMON = {
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": HEAD_DIM,
    "intermediate_size": 16,
    "vocab_size": VOCAB,
    "torch_dtype": "bfloat16",
}
MOE = {"num_experts": 4, "moe_intermediate_size": 8, "intermediate_size": 16}
CONFIGS = {
    "llama": {**COMMON, "model_type": "llama"},
    "llama_bias": {**COMMON, "model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "mha": {**COMMON, "model_type": "mistral", "num_key_value_heads": None},
    "few_keys": {**COMMON, "model_type": "llama", "num_key_value_heads": 1},
    "qwen2": {**COMMON, "model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {**COMMON, "model_type": "qwen3"},
    "mixtral": {**COMMON, "model_type": "mixtral", "num_local_experts": 4},
    "qwen2_moe": {**COMMON, **MOE, "model_type": "qwen2_moe", "shared_expert_intermediate_size": 4},
    "qwen3_moe": {**COMMON, **MOE, "model_type": "qwen3_moe", "mlp_only_layers": [1]},
}


def random_bits(shape, generator):
    """Any bits, so NaNs of all kinds too."""
    return torch.randint(-(1 << 15), 1 << 15, shape, generator=generator, dtype=torch.int16).view(torch.bfloat16)


def checkpoint(kind, seed=0):
    """Tensors under the names and shapes that the Hugging Face models of this kind have."""
    c, g = SimpleNamespace(**CONFIGS[kind]), torch.Generator().manual_seed(seed)
    keys = (c.num_key_value_heads or 8) * HEAD_DIM
    shapes = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    if kind != "qwen2":
        shapes["lm_head.weight"] = (VOCAB, HIDDEN)
    for i in range(LAYERS):
        at = f"model.layers.{i}."
        shapes |= {at + "input_layernorm.weight": (HIDDEN,), at + "post_attention_layernorm.weight": (HIDDEN,)}
        shapes |= {at + "self_attn.q_proj.weight": (16, HIDDEN), at + "self_attn.o_proj.weight": (HIDDEN, 16)}
        shapes |= {at + f"self_attn.{n}_proj.weight": (keys, HIDDEN) for n in "kv"}
        if kind in ("qwen2", "qwen2_moe", "llama_bias"):
            shapes |= {at + "self_attn.q_proj.bias": (16,)} | {at + f"self_attn.{n}_proj.bias": (keys,) for n in "kv"}
        if kind == "llama_bias":
            shapes |= {at + "self_attn.o_proj.bias": (HIDDEN,), at + "mlp.down_proj.bias": (HIDDEN,)}
            shapes |= {at + "mlp.gate_proj.bias": (16,), at + "mlp.up_proj.bias": (16,)}
        if kind.startswith("qwen3"):
            shapes |= {at + f"self_attn.{n}_norm.weight": (HEAD_DIM,) for n in "qk"}
        if kind == "mixtral":
            shapes[at + "block_sparse_moe.gate.weight"] = (4, HIDDEN)
            for e, n in itertools.product(range(4), ("w1", "w2", "w3")):
                shapes[at + f"block_sparse_moe.experts.{e}.{n}.weight"] = (HIDDEN, 16) if n == "w2" else (16, HIDDEN)
            continue
        prefixes, width = ["mlp."], 16
        if "moe" in kind and not (kind == "qwen3_moe" and i == 1):
            shapes[at + "mlp.gate.weight"] = (4, HIDDEN)
            prefixes, width = [f"mlp.experts.{e}." for e in range(4)], 8
            if kind == "qwen2_moe":
                shapes[at + "mlp.shared_expert_gate.weight"] = (1, HIDDEN)
                for n in ("gate", "up", "down"):
                    shapes[at + f"mlp.shared_expert.{n}_proj.weight"] = (HIDDEN, 4) if n == "down" else (4, HIDDEN)
        for prefix, n in itertools.product(prefixes, ("gate", "up", "down")):
            shapes[at + f"{prefix}{n}_proj.weight"] = (HIDDEN, width) if n == "down" else (width, HIDDEN)
    return {name: random_bits(shape, g) for name, shape in shapes.items()}


def rows(tensor, rank, size):
    return tensor.chunk(size, 0)[rank].clone()


def columns(tensor, rank, size):
    return tensor.chunk(size, 1)[rank].contiguous().clone()


def fused_qkv(hf, at, what, groups):
    """Megatron's order, with reshapes: [group, (queries, key, value), head_dim, …]."""
    q, k, v = (hf[f"{at}self_attn.{n}_proj.{what}"] for n in "qkv")
    rest = q.shape[1:]
    return torch.cat([t.reshape(groups, -1, *rest) for t in (q, k, v)], 1).reshape(-1, *rest)


def padded(weight):
    return torch.cat([weight, torch.full((PADDED - VOCAB, HIDDEN), 7.0, dtype=weight.dtype)])


def parameters(kind, hf, r, engine=True, layers=None, last=None):
    """The parameters of one rank, cut as Megatron's converters do; `engine` for the names of Transformer Engine."""
    each, cut = LAYERS // r.pp_size, (r.tp, r.tp_size)
    layers = range(r.pp * each, (r.pp + 1) * each) if layers is None else layers
    out = {}
    if layers.start == 0:
        out["embedding.word_embeddings.weight"] = rows(padded(hf["model.embed_tokens.weight"]), *cut)
    if layers.stop == LAYERS if last is None else last:
        out["decoder.final_layernorm.weight"] = hf["model.norm.weight"].clone()
        head = "lm_head.weight" if "lm_head.weight" in hf else "model.embed_tokens.weight"
        if "lm_head.weight" in hf or layers.start:
            out["output_layer.weight"] = rows(padded(hf[head]), *cut)
    for i, layer in enumerate(layers):
        at, to = f"model.layers.{layer}.", f"decoder.layers.{i}."
        found = attention(kind, hf, at, *cut) | feed_forward(kind, hf, at, r, engine)
        sparse = "mlp.router.weight" in found
        norms = ("input_layernorm.weight", "pre_mlp_layernorm.weight")
        if engine:
            norms = (
                "self_attention.linear_qkv.layer_norm_weight",
                norms[1] if sparse else "mlp.linear_fc1.layer_norm_weight",
            )
        found[norms[0]] = hf[at + "input_layernorm.weight"].clone()
        found[norms[1]] = hf[at + "post_attention_layernorm.weight"].clone()
        out |= {to + name: tensor for name, tensor in found.items()}
    return out


def attention(kind, hf, at, rank, size):
    out = {"self_attention.linear_proj.weight": columns(hf[at + "self_attn.o_proj.weight"], rank, size)}
    for what in ("weight", "bias"):
        if at + f"self_attn.q_proj.{what}" in hf:
            fused = fused_qkv(hf, at, what, CONFIGS[kind]["num_key_value_heads"] or 8)
            out[f"self_attention.linear_qkv.{what}"] = rows(fused, rank, size)
    if at + "self_attn.o_proj.bias" in hf:
        out["self_attention.linear_proj.bias"] = hf[at + "self_attn.o_proj.bias"].clone()
    for n in "qk":
        if at + f"self_attn.{n}_norm.weight" in hf:
            out[f"self_attention.{n}_layernorm.weight"] = hf[at + f"self_attn.{n}_norm.weight"].clone()
    return out


def feed_forward(kind, hf, at, r, engine):
    moe, cut = at + ("block_sparse_moe." if kind == "mixtral" else "mlp."), (r.tp, r.tp_size)
    names = ("w1", "w3", "w2") if kind == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    if moe + "gate.weight" not in hf:
        return gated(hf, moe, "mlp.linear_fc%d.%s", names, *cut)
    out = {"mlp.router.weight": hf[moe + "gate.weight"].clone()}
    here = 4 // r.ep_size
    for e in range(here):
        name = f"mlp.experts.linear_fc%d.%s{e}" if engine else f"mlp.experts.local_experts.{e}.linear_fc%d.%s"
        out |= gated(hf, f"{moe}experts.{r.ep * here + e}.", name, names, *r.expert)
    if moe + "shared_expert_gate.weight" in hf:
        out |= gated(hf, moe + "shared_expert.", "mlp.shared_experts.linear_fc%d.%s", names, *cut)
        out["mlp.shared_experts.gate_weight"] = hf[moe + "shared_expert_gate.weight"].clone()
    return out


def gated(hf, at, name, names, rank, size):
    gate, up, down = (at + n for n in names)
    out = {name % (2, "weight"): columns(hf[down + ".weight"], rank, size)}
    for what in ("weight", "bias"):
        if f"{gate}.{what}" in hf:
            out[name % (1, what)] = torch.cat([rows(hf[f"{n}.{what}"], rank, size) for n in (gate, up)])
    if down + ".bias" in hf:
        out[name % (2, "bias")] = hf[down + ".bias"].clone()
    return out


def grid(tp=1, pp=1, ep=1, dp=1):
    """All ranks, as Megatron numbers them where experts are cut as all else."""
    for p, d, t in itertools.product(range(pp), range(dp), range(tp)):
        yield Ranks(tp=t, tp_size=tp, pp=p, pp_size=pp, ep=d % ep, ep_size=ep, dp=d, edp=d // ep)


def changed(hf, seed=1):
    """Some bits of every tensor are others, signs of zero and NaNs among them."""
    new, g = {name: t.clone() for name, t in hf.items()}, torch.Generator().manual_seed(seed)
    for tensor in new.values():
        flat = tensor.view(-1).view(torch.int16)
        flat[torch.randint(0, flat.numel(), (max(1, flat.numel() // 8),), generator=g)] ^= 1
        flat[0] ^= -(1 << 15)
    return new


def require_equal(got, want):
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert torch.equal(got[name].view(torch.int16), tensor.view(torch.int16)), name
