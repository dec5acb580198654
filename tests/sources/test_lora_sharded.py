"""Adapters whose parameters are sharded, in real processes: every rank publishes its own parts."""

from __future__ import annotations

import warnings

import pytest

import sparserl
from sparserl.errors import UnsupportedTensor
from tests.session.ranks import port, ranks, results
from tests.sources import zero3_engine
from tests.sources.test_flat_shards import publish

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("torch without Gloo", allow_module_level=True)

TOKENS = torch.arange(24).reshape(2, 12) % 32


def adapted(rank=3):
    """A small model with an adapter whose rank two processes do not divide."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, vocab_size=32
    )
    lora = peft.LoraConfig(r=rank, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    return peft.get_peft_model(transformers.LlamaForCausalLM(config), lora)


def refused(model):
    """Merging shards, and writing to them, is refused with the way out."""
    with pytest.raises(UnsupportedTensor, match=r"publish the adapter alone.*targets\.lora\(model, merged=True\)"):
        sparserl.sources.lora(model, merged=True).weights()
    with pytest.raises(UnsupportedTensor, match="'default' is sharded; a target needs whole tensors"):
        sparserl.targets.lora(model).weights()


def fsdp2(rank, group, pipe, folder):
    """An adapter under FSDP2, as its trainer shards it."""
    from torch.distributed.fsdp import fully_shard

    warnings.simplefilter("ignore")
    plain = adapted()
    config = sparserl.sources.lora(plain).files()
    model = adapted()
    for layer in model.base_model.model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)

    def step():
        optimizer.zero_grad()
        model(input_ids=TOKENS, labels=TOKENS).loss.backward()
        optimizer.step()

    def gathered():
        return {name: tensor.full_tensor() for name, tensor in peft.get_peft_model_state_dict(model).items()}

    source = sparserl.sources.lora(model, group=group)
    assert source.files() == config
    assert sparserl.digest(gathered()) == sparserl.digest(sparserl.sources.lora(plain).weights())
    refused(model)
    fsdp1()
    return publish(rank, group, source, f"{folder}/run", step, gathered)


def zero3(rank, group, pipe, folder, at):
    """An adapter in a real engine of DeepSpeed."""
    zero3_engine.join(rank, at)
    model = adapted()
    engine = zero3_engine.engine_of(model, 1e-2, persistence_threshold=0)

    def step():
        engine.backward(engine(input_ids=TOKENS, labels=TOKENS).loss)
        engine.step()

    def gathered():
        return peft.get_peft_model_state_dict(model, state_dict=zero3_engine.whole_weights(model))

    refused(model)
    return publish(rank, group, sparserl.sources.lora(model), f"{folder}/run", step, gathered)


def fsdp1():
    """FSDP1 hides which parameters are an adapter's."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = FullyShardedDataParallel(adapted(), use_orig_params=True, device_id=torch.device("cpu")).module
    with pytest.raises(UnsupportedTensor, match=r"adapters in modules of FSDP1 cannot be read; use FSDP2"):
        sparserl.sources.lora(model).weights()
    with pytest.raises(UnsupportedTensor, match="sharded by FSDP1: publish the adapter alone"):
        sparserl.sources.lora(model, merged=True).weights()


@pytest.mark.long
def test_fsdp2(tmp_path):
    """Every version of the adapter arrives bit for bit, with peft's names and config; FSDP1 is refused by name."""
    with ranks(2, fsdp2, str(tmp_path)) as started:
        assert all(results(started))


@pytest.mark.slow
def test_zero3(tmp_path):
    """The partitions of an adapter arrive as the adapter, where DeepSpeed is installed."""
    pytest.importorskip("deepspeed")
    with ranks(2, zero3, str(tmp_path), port()) as started:
        assert all(results(started))
