"""LoRA: adapters alone as peft saves them, and merged weights with the very bits that peft's own merging gives."""

from __future__ import annotations

import copy
import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest

import sparserl
from sparserl.errors import UnsupportedTensor
from sparserl.sources import fp8_blockwise, lora, open_checkpoint, quantized

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

LINEAR = ["q_proj", "v_proj", "down_proj"]


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def llama(dtype=torch.bfloat16, **more):
    """A tiny language model with random weights."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
        max_position_embeddings=32,
        **more,
    )
    return transformers.LlamaForCausalLM(config).to(dtype)


def adapted(model, *configs):
    """The model with adapters called default, a1, a2 and so on, all of them active."""
    torch.manual_seed(1)
    model = peft.get_peft_model(model, configs[0])
    for i, config in enumerate(configs[1:], 1):
        model.add_adapter(f"a{i}", config)
    if len(configs) > 1:
        model.base_model.set_adapter(["default", *(f"a{i}" for i in range(1, len(configs)))])
    return model


def config(**more):
    return peft.LoraConfig(**{"r": 4, "target_modules": LINEAR, "init_lora_weights": False, **more})


def peft_merged(model, adapters=None):
    """What peft makes of a deep copy."""
    return copy.deepcopy(model).merge_and_unload(adapter_names=adapters).state_dict()


def is_tied(model) -> bool:
    return getattr(getattr(model.base_model.model, "config", None), "tie_word_embeddings", False)


def state(weights) -> dict[str, tuple]:
    """Names, and what the tensors are bit for bit."""
    return {
        name: (t.dtype, tuple(t.shape), t.contiguous().view(torch.uint8 if t.ndim else t.dtype).tolist())
        for name, t in weights.items()
    }


def train(model, optimizer, tokens) -> None:
    optimizer.zero_grad()
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()


TOKENS = torch.arange(24).reshape(2, 12) % 64


def test_merged_weights_are_those_of_peft_step_by_step() -> None:
    """Over optimizer steps the merged bits are peft's, under the names of the base, and no live bit moves."""
    model = adapted(llama(), config(modules_to_save=["lm_head"]))
    source = lora(model, merged=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    names, seen = set(llama().state_dict()), []
    for _ in range(3):
        before = state(model.state_dict())
        weights = source.weights()
        assert set(weights) == names
        assert state(weights) == state(peft_merged(model))
        assert state(model.state_dict()) == before
        seen.append(weights["model.layers.0.self_attn.q_proj.weight"].clone())
        train(model, optimizer, TOKENS)
    assert not torch.equal(seen[0], seen[2])
    assert not any(getattr(layer, "merged", False) for layer in model.modules())
    live = {p.data_ptr() for p in model.parameters()}
    merged = {name for name, tensor in weights.items() if tensor.data_ptr() not in live}
    assert merged == {name for name in names if name.split(".")[-2] in LINEAR}
    assert {n: t.data_ptr() for n, t in source.weights().items()} == {n: t.data_ptr() for n, t in weights.items()}


def gpt2():
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=64, n_positions=32)
    )


def convolutions():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.Conv1d(8, 4, 2), torch.nn.Linear(4, 4))


def mixture():
    torch.manual_seed(0)
    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            vocab_size=32,
            num_local_experts=4,
        )
    ).to(torch.bfloat16)


CASES = {
    "float32": (lambda: llama(torch.float32), [config()]),
    "dora": (llama, [config(use_dora=True)]),
    "rslora, ranks by layer": (
        llama,
        [config(use_rslora=True, rank_pattern={"q_proj": 1}, alpha_pattern={"v_proj": 9})],
    ),
    "rank 1": (llama, [config(r=1, lora_alpha=0)]),
    "embedding": (llama, [config(target_modules=["embed_tokens", "q_proj"])]),
    "dora on an embedding": (llama, [config(target_modules=["embed_tokens"], use_dora=True)]),
    "tied embedding": (lambda: llama(tie_word_embeddings=True), [config(target_modules=["embed_tokens"])]),
    "tokens": (llama, [config(trainable_token_indices=[1, 5])]),
    "two adapters": (llama, [config(), config(r=2, target_modules=["q_proj", "o_proj"])]),
    "two adapters, one dora": (llama, [config(), config(r=2, use_dora=True)]),
    "fan in, fan out": (gpt2, [config(target_modules=["c_attn", "c_proj"], fan_in_fan_out=True)]),
    "bias": (gpt2, [config(target_modules=["c_attn"], fan_in_fan_out=True, lora_bias=True)]),
    "convolutions": (convolutions, [config(target_modules=["0", "1", "2"])]),
    "dora on convolutions": (convolutions, [config(target_modules=["0", "1"], use_dora=True)]),
    "parameters": (mixture, [config(target_modules=["q_proj"], target_parameters=["experts.gate_up_proj"])]),
    "attention": (lambda: torch.nn.Sequential(torch.nn.MultiheadAttention(8, 2)), [config(target_modules=["0"])]),
}


@pytest.mark.parametrize("case", CASES)
def test_every_kind_of_layer_merges_like_in_peft(case: str) -> None:
    """Whatever peft can merge has peft's bits, twice over, and the live model keeps its own."""
    make, configs = CASES[case]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft's advice about tied embeddings and the like
        model = adapted(make(), *configs)
        before, source = state(model.state_dict()), lora(model, merged=True)
        expected = state(peft_merged(model))
        first = state(source.weights())
        assert set(source.tied) == ({"lm_head.weight"} if is_tied(model) else set())
        for name, kept in source.tied.items():
            assert expected.pop(name) == expected[kept]
        assert first == expected
        assert state(source.weights()) == expected
        assert state(model.state_dict()) == before
        plain = state(make().state_dict())
        assert set(plain) == set(expected) | set(source.tied)
        assert any(expected[name] != plain[name] for name in expected) == (case != "rank 1")


def test_some_adapters_of_several() -> None:
    """Merged are the ones asked for, or the active ones; alone is one."""
    model = adapted(llama(), config(), config(r=2, target_modules=["q_proj", "o_proj"]))
    for adapters in (["a1"], ["default"], ["a1", "default"]):
        assert state(lora(model, merged=True, adapter=adapters).weights()) == state(peft_merged(model, adapters))
    assert state(lora(model, merged=True, adapter="a1").weights()) == state(peft_merged(model, ["a1"]))
    with pytest.raises(UnsupportedTensor, match=r"are active; give `adapter`, one of \['default', 'a1'\]"):
        lora(model)
    alone = lora(model, adapter="a1").weights()
    assert state(alone) == state(peft.get_peft_model_state_dict(model, adapter_name="a1"))
    model.base_model.merge_adapter(["a1"])
    with pytest.warns(UserWarning, match="merged"):  # one is in the live weights, the other is merged now
        assert state(lora(model, merged=True).weights()) == state(peft_merged(model))


def test_the_active_adapter_is_asked_for_at_every_publish() -> None:
    """Without a name, both kinds follow `set_adapter`; with one, neither does."""
    model = adapted(llama(), config(), config(r=2))
    model.set_adapter("default")
    alone, merged, named = lora(model), lora(model, merged=True), lora(model, adapter="default")
    for name in ("default", "a1", "default"):
        model.set_adapter(name)
        assert state(alone.weights()) == state(peft.get_peft_model_state_dict(model, adapter_name=name))
        assert alone.files() == lora(model, adapter=name).files()
        assert state(merged.weights()) == state(peft_merged(model, [name]))
        assert state(named.weights()) == state(peft.get_peft_model_state_dict(model, adapter_name="default"))
    model.base_model.set_adapter(["default", "a1"])
    with pytest.raises(UnsupportedTensor, match="give `adapter`"):
        alone.weights()


def test_what_cannot_be_merged_is_refused_by_name() -> None:
    """A layer that peft cannot merge is named, and so is one with weights that are no floats."""
    model = adapted(llama(), config(target_modules=["v_proj"], alora_invocation_tokens=[1, 2], task_type="CAUSAL_LM"))
    with pytest.raises(UnsupportedTensor, match=r"layers\.0\.self_attn\.v_proj: peft cannot merge"):
        lora(model, merged=True).weights()
    model = adapted(llama(), config())
    base = model.base_model.model.model.layers[1].mlp.down_proj.base_layer
    base.weight = torch.nn.Parameter(base.weight.detach().to(torch.int8), requires_grad=False)
    with pytest.raises(UnsupportedTensor, match=r"layers\.1\.mlp\.down_proj: its weight is torch\.int8.*adapter alone"):
        lora(model, merged=True).weights()
    prompts = peft.get_peft_model(llama(), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))
    with pytest.raises(UnsupportedTensor, match="adapter alone"):
        lora(prompts, merged=True)
    assert set(lora(prompts).weights()) == {"prompt_embeddings"}
    with pytest.raises(UnsupportedTensor, match="expected a peft model, got LlamaForCausalLM"):
        lora(llama())
    with pytest.raises(UnsupportedTensor, match=r"no adapter is called 'b'; there are \['default'\]"):
        lora(model, adapter="b")


@pytest.mark.parametrize("targets", [LINEAR, [*LINEAR, "embed_tokens"]], ids=["linear", "embedding"])
def test_an_adapter_alone_is_what_peft_saves(targets: list[str], tmp_path: Path) -> None:
    """Names and bits are those of adapter_model.safetensors, and the config has the bytes of adapter_config.json."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that embeddings are saved too
        model = adapted(llama(), config(target_modules=targets, modules_to_save=["lm_head"]))
        model.save_pretrained(tmp_path)
        source = lora(model)
        weights = source.weights()
        config_bytes = source.files()["adapter_config.json"]
    saved = open_checkpoint(tmp_path / "adapter_model.safetensors")
    assert sparserl.tensor_table(weights) == sparserl.tensor_table(saved)
    assert sparserl.digest(weights) == sparserl.digest(saved)
    assert config_bytes == (tmp_path / "adapter_config.json").read_bytes()
    live = {p.data_ptr() for p in model.parameters()}
    assert all(tensor.data_ptr() in live for tensor in weights.values())


def logits(model) -> np.ndarray:
    with torch.no_grad():
        return model.eval()(input_ids=TOKENS).logits.to(torch.float32).numpy().view(np.uint32)


def test_a_rollout_follows_the_merged_weights(tmp_path: Path) -> None:
    """A plain model that subscribes computes, bit for bit, what peft's merged model does; few elements change."""
    model = adapted(llama(), config(init_lora_weights=True))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    rollout = llama()
    url = f"file://{tmp_path}"
    with (
        sparserl.Publisher(url, lora(model, merged=True)) as publisher,
        sparserl.Subscriber(url, sparserl.targets.module(rollout)) as subscriber,
    ):
        for version in range(3):
            report = publisher.publish()
            subscriber.sync()
            assert subscriber.version == version
            assert (logits(rollout) == logits(copy.deepcopy(model).merge_and_unload())).all()
            if version:
                assert 0 < report.density < 0.25
            train(model.train(), optimizer, TOKENS)
    assert (logits(rollout) != logits(llama())).any()


def test_a_rollout_follows_the_adapter(tmp_path: Path) -> None:
    """Adapters that are live, or loaded from a folder with the config that travelled, compute what the trainer does."""
    model, rollout = adapted(llama(), config()), adapted(llama(), config())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    source, url = lora(model), f"file://{tmp_path / 'store'}"
    folder = sparserl.targets.folder(tmp_path / "folder")
    with (
        sparserl.Publisher(url, source, files=source.files()) as publisher,
        sparserl.Subscriber(url, lora(rollout).weights()) as subscriber,
        sparserl.Subscriber(url, folder) as keeper,
    ):
        for _ in range(3):
            train(model.train(), optimizer, TOKENS)
            report = publisher.publish()
            subscriber.sync()
            assert (logits(rollout) == logits(model)).all()
            assert report.elements == sum(t.numel() for t in source.weights().values()) < 5000
        keeper.sync()
        saved = shutil.copytree(folder.current, tmp_path / "adapter")
    loaded = peft.PeftModel.from_pretrained(llama(), saved)
    assert (logits(loaded) == logits(model)).all()


def test_merged_then_quantized() -> None:
    """Sources stack: merged weights are quantized like any others."""
    model = adapted(llama(), config())
    stacked = quantized(lora(model, merged=True), fp8_blockwise((16, 16))).weights()
    plain = quantized(peft_merged(model), fp8_blockwise((16, 16))).weights()
    assert state(stacked) == state(plain)
    assert stacked["model.layers.0.self_attn.q_proj.weight"].dtype is torch.float8_e4m3fn
