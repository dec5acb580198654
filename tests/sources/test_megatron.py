"""Megatron layouts: what every rank has of its fused, cut and renumbered parameters is the checkpoint, bit by bit."""

from __future__ import annotations

import contextlib
import itertools
import traceback
import warnings
from dataclasses import replace
from types import SimpleNamespace

import pytest

import sparserl
from sparserl.errors import TensorMismatch, UnsupportedTensor
from sparserl.sources import Ranks, joined, mapped, require_cover
from sparserl.sources.megatron_core import Model, canonical, layout
from sparserl.weights.digest import table_digest
from tests.session.ranks import together

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")

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


def require_exact(kind, ranks, make=layout):
    """Ranks that see only their parameters make the patch of the whole, and its digests."""
    old, new = checkpoint(kind), changed(checkpoint(kind))
    layouts = [make(CONFIGS[kind], r, padded_vocab=PADDED) for r in ranks]
    require_cover(layouts)
    was, now = (
        [
            lay.shards({canonical(n): t for n, t in parameters(kind, hf, r).items()})
            for lay, r in zip(layouts, ranks, strict=True)
        ]
        for hf in (old, new)
    )
    merged = sparserl.merge(*(sparserl.diff(a, b, threads=1) for a, b in zip(was, now, strict=True)))
    whole = sparserl.diff(old, new, threads=1)
    assert merged.complete
    assert (merged.base, merged.result, merged.changed) == (whole.base, whole.result, whole.changed)
    if len(ranks) > 1:
        digests = [sparserl.digest(shards, threads=1) for shards in now]
        assert sum(digests, table_digest(whole.table)) == whole.result
    merged.apply(old)
    require_equal(old, new)


GRIDS = [{"tp": tp, "pp": pp} for tp in (1, 2, 4) for pp in (1, 2)] + [{"tp": 2, "dp": 2}]


@pytest.mark.parametrize("kind", CONFIGS)
def test_shards_are_the_checkpoint(kind):
    """Under tensor, pipeline and data parallelism, merged patches are the patch of the whole; digests add up."""
    for sizes in GRIDS:
        require_exact(kind, list(grid(**sizes)))


@pytest.mark.parametrize("kind", ["mixtral", "qwen2_moe", "qwen3_moe"])
def test_experts(kind):
    """Experts spread over ranks, with replicas, with stages, and cut in another way than all else."""
    for sizes in ({"ep": 2, "dp": 2}, {"ep": 4, "dp": 4}, {"ep": 2, "dp": 4}, {"tp": 2, "pp": 2, "ep": 2, "dp": 2}):
        require_exact(kind, list(grid(**sizes)))
    own = [Ranks(tp=t, tp_size=4, ep=t // 2, ep_size=2, etp=t % 2, etp_size=2) for t in range(4)]
    require_exact(kind, own)
    spread = [Ranks(tp=t, tp_size=2, ep=t, ep_size=2, etp=0, etp_size=1) for t in range(2)]
    require_exact(kind, spread)


def test_the_table_is_that_of_the_checkpoint():
    """Names, dtypes and shapes follow from the config, be it an object or what its JSON says."""
    for kind, config in CONFIGS.items():
        table = sparserl.tensor_table(checkpoint(kind))
        assert Model.of(config).table == Model.of(SimpleNamespace(**config)).table == table, kind


def test_uneven_and_interleaved_stages():
    """Layers are where they are said to be; the chunks of an interleaved pipeline are joined."""
    hf, model = checkpoint("qwen3"), Model.of(CONFIGS["qwen3"])

    def chunk(*layers, last=None):
        named = parameters("qwen3", hf, Ranks(), layers=range(*layers), last=last)
        found = layout(model, Ranks(), layers=range(*layers), last=last, padded_vocab=PADDED)
        return mapped(found, {canonical(name): tensor for name, tensor in named.items()})

    uneven = [chunk(0, 1), chunk(1, 4, last=False), chunk(4, 4, last=True)]
    require_cover([source.layout for source in uneven])
    interleaved = [joined(chunk(0, 1), chunk(2, 3)), joined(chunk(1, 2), chunk(3, 4))]
    for sources in (uneven, interleaved):
        digests = [sparserl.digest(source.weights()) for source in sources]
        assert sum(digests, table_digest(model.table)) == sparserl.digest(hf)


def test_names():
    """Wrappers, Transformer Engine and local layers come to one name."""
    layer = "decoder.layers.0."
    assert canonical("module.module." + layer + "mlp.linear_fc1.weight") == layer + "mlp.linear_fc1.weight"
    for name in ("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"):
        assert canonical(layer + name) == layer + "input_layernorm.weight"
    for name in ("linear_fc2.weight3", "local_experts.3.linear_fc2.weight"):
        assert canonical(layer + "mlp.experts." + name) == layer + "mlp.experts.linear_fc2.weight3"


def test_tied_weights_under_every_name():
    """A checkpoint that has the head though it is tied gets it from the embedding."""
    hf = checkpoint("qwen2")
    hf["lm_head.weight"] = hf["model.embed_tokens.weight"]
    table = sparserl.tensor_table(hf)
    shards = []
    for r in grid(tp=2, pp=2):
        lay = layout(CONFIGS["qwen2"], r, padded_vocab=PADDED, table=table)
        named = parameters("qwen2", {n: t for n, t in hf.items() if n != "lm_head.weight"}, r)
        shards.append(lay.shards({canonical(n): t for n, t in named.items()}))
    assert sum(map(sparserl.digest, shards), table_digest(table)) == sparserl.digest(hf)


def test_parts_are_views():
    """Whatever is written to a parameter is in the weights, without asking again."""
    named = {canonical(n): t for n, t in parameters("llama", checkpoint("llama"), Ranks(tp=1, tp_size=2)).items()}
    held = {t.untyped_storage().data_ptr() for t in named.values()}
    parts = layout(CONFIGS["llama"], Ranks(tp=1, tp_size=2), padded_vocab=PADDED).shards(named).parts
    assert {part.data.untyped_storage().data_ptr() for part in parts} <= held


def test_what_does_not_fit_is_refused():
    """Models without a map, sizes that cannot be cut, and parameters of other names or shapes."""
    with pytest.raises(UnsupportedTensor, match=r"'gpt2'; known are llama, mistral"):
        Model.of({"model_type": "gpt2"})
    with pytest.raises(TensorMismatch, match="4 layers are not as many on each of 3 stages"):
        layout(CONFIGS["llama"], Ranks(pp_size=3))
    with pytest.raises(TensorMismatch, match="4 experts cannot be spread evenly over 3 ranks"):
        layout(CONFIGS["mixtral"], Ranks(ep_size=3))
    with pytest.raises(TensorMismatch, match="cannot be cut into 2 equal parts"):
        layout(CONFIGS["llama"], Ranks(tp_size=2))  # 21 tokens, not padded
    with pytest.raises(TensorMismatch, match="no room for a vocabulary of 21"):
        layout(CONFIGS["llama"], Ranks(), padded_vocab=20)
    named = {canonical(n): t for n, t in parameters("llama", checkpoint("llama"), Ranks()).items()}
    lay = layout(CONFIGS["llama"], Ranks(), padded_vocab=PADDED)
    with pytest.raises(TensorMismatch, match=r"\['mtp.weight'\] are not in the layout"):
        lay.shards({**named, "mtp.weight": torch.zeros(1)})
    with pytest.raises(TensorMismatch, match=r"'output_layer.weight' is \[21, 12\], the layout says \[32, 12\]"):
        lay.shards({**named, "output_layer.weight": torch.zeros(VOCAB, HIDDEN)})


class Layer(torch.nn.Module):
    """A layer that knows its number, as Megatron's do."""

    def __init__(self, number=None):
        super().__init__()
        if number is not None:
            self.layer_number = number


def as_module(named, offset):
    """Parameters by dotted names, as a tree of modules inside two wrappers."""
    root = Layer()
    for name, tensor in {f"module.module.{n}": t for n, t in named.items()}.items():
        *path, leaf = name.split(".")
        at = root
        for i, step in enumerate(path):
            if step not in at._modules:
                numbered = path[i - 1] == "layers" and step.isdigit()
                at.add_module(step, Layer(int(step) + 1 + offset if numbered else None))
            at = at._modules[step]
        at.register_parameter(leaf, torch.nn.Parameter(tensor, requires_grad=False))
    return root


def work(rank, folder, jobs):
    """One of four ranks; what went wrong is left in a file."""
    try:
        warnings.simplefilter("ignore")
        torch.set_num_threads(1)
        world = 4 if jobs is publish_all else 2
        dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world)
        jobs(rank)
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        (folder / f"failed.{rank}").write_text(traceback.format_exc())
        raise


def publish_all(rank):
    for kind, sizes in (
        ("qwen3_moe", {"tp": 2, "ep": 2, "dp": 2}),
        ("few_keys", {"tp": 4}),
        ("qwen2", {"tp": 2, "pp": 2}),
    ):
        publish(rank, kind, list(grid(**sizes))[rank])


def publish(rank, kind, ranks):
    """Every rank compares its own parameters; patches and digests meet at rank 0, the weights never do."""
    old = checkpoint(kind)
    new = changed(old)
    named = parameters(kind, old, ranks, engine=rank % 2 == 0)
    source = sparserl.sources.megatron(as_module(named, ranks.pp * 2), CONFIGS[kind], ranks)
    shards = source.weights()
    was = sparserl.Shards(shards.table, [replace(part, data=part.data.clone()) for part in shards.parts])
    for name, tensor in parameters(kind, new, ranks, engine=rank % 2 == 0).items():
        named[name].copy_(tensor)
    now = source.weights()
    mine = sparserl.diff(was, now, threads=1).to_bytes(), sparserl.digest(now, threads=1)
    met = [None] * 4 if rank == 0 else None
    dist.gather_object(mine, met)
    if rank == 0:
        merged = sparserl.merge(*(sparserl.Patch.from_bytes(data) for data, _ in met))
        assert merged.complete
        assert merged.result == sparserl.digest(new)
        assert sum((d for _, d in met), table_digest(shards.table)) == sparserl.digest(new)
        merged.apply(old)
        require_equal(old, new)


def spawn(folder, jobs, world):
    try:
        together(work, (folder, jobs), world)
    except torch.multiprocessing.ProcessRaisedException:  # the first one to be heard of is seldom the one to blame
        pytest.fail("\n".join(p.read_text() for p in sorted(folder.glob("failed.*"))))


def test_four_processes(tmp_path):
    """Modules in four real processes, under three ways to be parallel: the whole, bit by bit."""
    spawn(tmp_path, publish_all, 4)


@pytest.mark.slow
def test_megatron_core_itself(tmp_path):
    """Weights put where the layouts say make Megatron-core's own models compute what the Hugging Face models do."""
    pytest.importorskip("megatron.core")
    pytest.importorskip("transformers")
    spawn(tmp_path, run_megatron, 2)


def run_megatron(rank):
    import megatron.core.tensor_parallel.random as randomness
    import megatron.core.transformer.moe.moe_utils as moe_utils
    from megatron.core import parallel_state

    torch.cuda.current_device = lambda: "cpu"  # Megatron-core asks for devices it does not need
    randomness.CudaRNGStatesTracker.fork = lambda *_: contextlib.nullcontext()
    moe_utils.te_general_gemm = None
    for kind, tp, ep in (("qwen2", 2, 1), ("llama", 2, 1), ("qwen3_moe", 1, 2)):
        parallel_state.initialize_model_parallel(tp, expert_model_parallel_size=ep)
        require_same_logits(kind)
        parallel_state.destroy_model_parallel()


def require_same_logits(kind):
    import transformers

    config = {
        **CONFIGS[kind],
        "hidden_size": 16,
        "num_key_value_heads": 1 if kind == "qwen2" else 2,
        "dtype": "float32",
        "rms_norm_eps": 1e-6,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "mlp_only_layers": [],
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
    del config["torch_dtype"]
    torch.manual_seed(0)
    reference = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config)).eval()
    full = {}
    with torch.no_grad():
        for name, tensor in reference.state_dict().items():
            tensor.copy_(torch.randn_like(tensor) * 0.3)
            if name.endswith("experts.gate_up_proj"):
                for e, n in itertools.product(range(4), (0, 1)):
                    full[name.replace("gate_up_proj", f"{e}.{('gate', 'up')[n]}_proj.weight")] = tensor[e].chunk(2)[n]
            elif name.endswith("experts.down_proj"):
                full |= {name.replace("down_proj", f"{e}.down_proj.weight"): tensor[e] for e in range(4)}
            else:
                full[name] = tensor
    if config.get("tie_word_embeddings"):
        del full["lm_head.weight"]
    model = megatron_model(kind, config)
    with torch.no_grad():
        fill(model, config, full)
        ids = torch.arange(VOCAB).view(1, -1)
        mask = torch.ones(1, 1, VOCAB, VOCAB).triu(1).bool()
        got, want = model(ids, ids, mask)[..., :VOCAB], reference(ids).logits
        assert (got - want).abs().max() < 1e-5 * want.abs().max()  # sums are taken in another order


def fill(model, config, full):
    """Put weights where the layouts say, also those that another rank owns."""
    here, filled = Ranks.here(), set()
    held = {canonical(name): tensor for name, tensor in model.named_parameters()}
    for ranks in (replace(here, dp=0, edp=0), replace(here, tp=0, dp=0, edp=0)):
        found = sparserl.sources.megatron(model, config, ranks).layout
        assert found.table == sparserl.tensor_table(full)
        for name, local in found.parameters.items():
            for piece in local.slices if name not in filled else ():
                held[name][piece.local.slices] = full[piece.tensor][piece.region.slices]
        filled |= {name for name, local in found.parameters.items() if local.slices}
    assert filled == held.keys()


def megatron_model(kind, config):
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    sparse = kind.endswith("moe")
    experts = {
        "num_moe_experts": 4,
        "moe_router_topk": 2,
        "moe_ffn_hidden_size": 8,
        "moe_token_dispatcher_type": "allgather",
        "moe_router_load_balancing_type": "none",
    }
    settings = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=config["hidden_size"],
        num_attention_heads=8,
        num_query_groups=config["num_key_value_heads"],
        kv_channels=HEAD_DIM,
        ffn_hidden_size=16,
        use_cpu_initialization=True,
        normalization="RMSNorm",
        layernorm_epsilon=1e-6,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=kind == "qwen2",
        qk_layernorm=kind == "qwen3_moe",
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        expert_model_parallel_size=parallel_state.get_expert_model_parallel_world_size(),
        hidden_dropout=0.0,
        attention_dropout=0.0,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        **(experts if sparse else {}),
    )
    spec = get_gpt_layer_local_spec(4 if sparse else None, qk_layernorm=settings.qk_layernorm, normalization="RMSNorm")
    return GPTModel(
        settings,
        spec,
        vocab_size=PADDED,
        max_sequence_length=VOCAB,
        share_embeddings_and_output_weights=bool(config.get("tie_word_embeddings")),
        position_embedding_type="rope",
        parallel_output=False,
    ).eval()
