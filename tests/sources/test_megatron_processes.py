"""Megatron's parameters in several processes, and in Megatron itself where it is installed."""

from __future__ import annotations

import contextlib
import itertools
import traceback
import warnings
from dataclasses import replace

import pytest

import sparserl
from sparserl.sources import Ranks
from sparserl.sources.megatron_core import canonical
from sparserl.weights.digest import table_digest
from tests.session.ranks import together
from tests.sources.megatron_shards import (
    CONFIGS,
    HEAD_DIM,
    LAYERS,
    PADDED,
    VOCAB,
    changed,
    checkpoint,
    grid,
    parameters,
    require_equal,
)

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")


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
