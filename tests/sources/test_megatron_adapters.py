"""Adapters of Megatron-core's parallel layers against peft: the same bits under peft's names, and the same logits."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

import sparserl
from sparserl.errors import TensorMismatch, UnsupportedTensor
from sparserl.sources import Ranks
from sparserl.sources.megatron_adapters import _cut
from sparserl.weights.digest import table_digest
from tests.sources.megatron_models import fill, logits_of, megatron_model, megatron_ranks, two_ranks
from tests.sources.transformers_models import VOCAB, transformers_model

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")
pytest.importorskip("peft")

RANK = 4
ALPHA = 6
LAYERS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
SPLIT = {"linear_qkv": ("adapter_q", "adapter_k", "adapter_v"), "linear_fc1": ("adapter_gate", "adapter_up")}


class ParallelAdapter(torch.nn.Module):
    """The layers of Megatron-Bridge's `ParallelLinearAdapter`, which are Megatron-core's own."""

    def __init__(self, base, out_features):
        from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

        super().__init__()
        self.dim = RANK
        self.alpha = ALPHA
        is_row = isinstance(base, RowParallelLinear)
        options = {"config": base.config, "bias": False, "init_method": torch.nn.init.normal_}
        if is_row:
            self.linear_in = RowParallelLinear(
                base.input_size, RANK, input_is_parallel=True, skip_bias_add=True, **options
            )
        else:
            self.linear_in = ColumnParallelLinear(base.input_size, RANK, gather_output=True, **options)
        self.linear_out = ColumnParallelLinear(RANK, out_features, gather_output=is_row, **options)
        if base.weight.dtype is torch.bfloat16:
            self.bfloat16()

    def forward(self, x):
        return self.linear_out(self.linear_in(x)[0])[0] * (self.alpha / self.dim)


class AdaptedLinear(torch.nn.Module):
    """The shape of Megatron-Bridge's `LoRALinear`: the layer is `to_wrap`, which names of a state dict leave out."""

    def __init__(self, to_wrap, adapter):
        super().__init__()
        self.to_wrap = to_wrap
        self.adapter = adapter

    def forward(self, x, *args, **kwargs):
        output, bias = self.to_wrap(x, *args, **kwargs)
        if isinstance(self.adapter, torch.nn.ModuleDict):  # gate and up
            return output + torch.cat([adapter(x) for adapter in self.adapter.values()], -1), bias
        return output + self.adapter(x), bias

    def state_dict(self, destination=None, prefix="", keep_vars=False):
        destination = {} if destination is None else destination
        self.to_wrap.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        self.adapter.state_dict(destination=destination, prefix=f"{prefix}adapter.", keep_vars=keep_vars)
        return destination


def adapt(model, names=LAYERS, layers=range(3), split=False):
    """Add adapters to some of the layers; those of data-parallel ranks are the same."""
    for layer in model.decoder.layers:
        for parent in (layer.self_attention, layer.mlp):
            for name in names:
                base = getattr(parent, name, None)
                if base is None or layer.layer_number - 1 not in layers:
                    continue
                torch.manual_seed(1000 * layer.layer_number + Ranks.here().tp + len(name) * 7)
                if split and name in SPLIT:
                    config = model.config
                    sizes = {"adapter_q": config.num_attention_heads * config.kv_channels}
                    sizes |= dict.fromkeys(("adapter_k", "adapter_v"), config.num_query_groups * config.kv_channels)
                    sizes |= dict.fromkeys(("adapter_gate", "adapter_up"), base.output_size // 2)
                    adapter = torch.nn.ModuleDict({key: ParallelAdapter(base, sizes[key]) for key in SPLIT[name]})
                else:
                    adapter = ParallelAdapter(base, base.output_size)
                for parameter in adapter.parameters():
                    torch.nn.init.normal_(parameter, std=0.2)
                setattr(parent, name, AdaptedLinear(base, adapter))


def published(source):
    """The whole adapter, of the parts that all ranks publish, and their digests."""
    weights = source.weights()
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, [(part.tensor, part.region, part.data.clone()) for part in weights.parts])
    specs = weights.table.specs
    tensors = {spec.name: torch.full(spec.shape, torch.nan, dtype=getattr(torch, spec.dtype.name)) for spec in specs}
    for tensor, region, data in (part for rank in parts for part in rank):
        assert tensors[tensor][region.slices].isnan().all(), f"{tensor} {region} is published twice"
        tensors[tensor][region.slices] = data
    digests = [None] * dist.get_world_size()
    dist.all_gather_object(digests, sparserl.digest(weights, threads=1))
    assert sum(digests, table_digest(weights.table)) == sparserl.digest(tensors, threads=1)
    return tensors


def require_same_adapter(kind, names=LAYERS, layers=range(3), split=False, logits=True):
    """Megatron-core's model with adapters has the logits of peft's model that loads what was published."""
    import peft

    reference, config, checkpoint = transformers_model(kind, "float32", **({} if kind != "llama" else NO_BIAS))
    model = megatron_model(kind, config)
    with torch.no_grad():
        fill(model, config, checkpoint)
        adapt(model, names, layers, split)
        source = sparserl.sources.megatron_lora(model, config)
        tensors = published(source)
        peft_config = peft.LoraConfig(**json.loads(source.files()["adapter_config.json"]))
        assert (peft_config.r, peft_config.lora_alpha) == (RANK, ALPHA)
        peft_model = peft.get_peft_model(reference, peft_config)
        assert peft.get_peft_model_state_dict(peft_model).keys() == tensors.keys()
        loaded = peft.set_peft_model_state_dict(peft_model, tensors)
        assert not loaded.unexpected_keys
        unmerged = reference(torch.arange(VOCAB).view(1, -1)).logits
        merged = peft_model.merge_and_unload()
        expected = merged(torch.arange(VOCAB).view(1, -1)).logits
        assert (expected - unmerged).abs().max() < 1e-5 * expected.abs().max()
        for got in logits_of(model) if logits else ():
            assert (got - expected).abs().max() < 1e-5 * expected.abs().max(), kind


NO_BIAS = {"attention_bias": False, "mlp_bias": False}


def run_short(rank):
    with megatron_ranks(tp=2):
        require_same_adapter("qwen3")
        publish_steps()


def run_long(rank):
    with megatron_ranks(tp=2):
        require_same_adapter("llama", ("linear_proj", "linear_fc1"), layers=(0, 2))
        require_same_adapter("qwen3", ("linear_fc1", "linear_fc2"), split=True)
        require_same_adapter("qwen3", ("linear_qkv",), split=True, logits=False)
    with megatron_ranks(pp=2):
        require_same_adapter("qwen3")
        require_same_adapter("llama", ("linear_qkv", "linear_fc2"), layers=(1,))
    with megatron_ranks():  # two data-parallel ranks, of which the first publishes
        require_same_adapter("qwen3")
        _, config, _ = transformers_model("qwen3", "float32")
        model = megatron_model("qwen3", config)
        adapt(model)
        assert bool(sparserl.sources.megatron_lora(model, config).weights().parts) == (rank == 0)


def publish_steps():
    """Two writers publish an adapter whose every element changes, and what is not LoRA is refused by name."""
    _, config, _ = transformers_model("qwen3", "float32")
    model = megatron_model("qwen3", config).bfloat16()
    with pytest.raises(UnsupportedTensor, match="no layer of the model has an adapter"):
        sparserl.sources.megatron_lora(model, config)
    adapt(model)
    source = sparserl.sources.megatron_lora(model, config)
    before = published(source)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".adapter." in name:
                parameter.mul_(2)
    after = published(source)
    assert all(torch.equal(after[name], 2 * before[name]) for name in before)
    assert {tensor.dtype for tensor in after.values()} == {torch.bfloat16}
    adapter = model.decoder.layers[0].mlp.linear_fc1.adapter
    adapter.alpha = 7
    with pytest.raises(UnsupportedTensor, match=r"different ranks and alphas: \[\(4, 6.0\), \(4, 7.0\)\]"):
        sparserl.sources.megatron_lora(model, config)
    del adapter.alpha
    with pytest.raises(UnsupportedTensor, match=r"layers\.0\.mlp\.linear_fc1\.adapter' does not say its `dim`"):
        sparserl.sources.megatron_lora(model, config)
    adapter.weight_magnitude = torch.nn.Parameter(torch.ones(3))
    with pytest.raises(UnsupportedTensor, match=r"adapter\.weight_magnitude' is no LoRA matrix"):
        sparserl.sources.megatron_lora(model, config)


@pytest.mark.long
def test_cut_layers(tmp_path):
    """Adapters of layers that two ranks cut by rows and by columns, fused and not."""
    two_ranks(tmp_path, run_short)


@pytest.mark.long
def test_other_ranks_and_adapters(tmp_path):
    """Some layers alone, adapters of one tensor of a fused layer, stages of a pipeline, and data parallelism."""
    two_ranks(tmp_path, run_long)


def test_shapes_that_are_no_part():
    """A matrix that no cut explains is refused with both shapes; a pipeline without a group is refused, too."""
    table = sparserl.tensor_table({"a": torch.zeros(4, 10)})
    ranks = Ranks(tp=1, tp_size=2)
    assert [str(s.region) for s in _cut("p", {"p": (2, 10)}, table, ["a"], ranks).slices] == ["[2:4, 0:10]"]
    assert [str(s.region) for s in _cut("p", {"p": (4, 5)}, table, ["a"], ranks).slices] == ["[0:4, 5:10]"]
    assert not _cut("p", {"p": (4, 10)}, table, ["a"], ranks).slices
    with pytest.raises(TensorMismatch, match=r"'p' has shape \[3, 10\], which is no part of \[4, 10\]"):
        _cut("p", {"p": (3, 10)}, table, ["a"], ranks)
    with pytest.raises(UnsupportedTensor, match="give `group`"):
        sparserl.sources.megatron_lora(SimpleNamespace(), {"model_type": "llama"}, Ranks(pp_size=2))
