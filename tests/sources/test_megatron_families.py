"""The maps of Megatron-core's families against the checkpoints of transformers."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest

import sparserl
from sparserl.errors import RegionOverlap, TensorMismatch, UnsupportedTensor
from sparserl.sources import Family, GroupRows, Ranks, Row, megatron, require_cover
from sparserl.sources.megatron_core import Model, canonical, layout
from sparserl.sources.megatron_families import FAMILIES, LLAVA
from tests.sources.megatron_shards import columns, fused_qkv, gated, grid, rows
from tests.sources.test_megatron_processes import as_module
from tests.sources.transformers_models import COMMON, CONFIGS, transformers_model, vision_language_model

torch = pytest.importorskip("torch")
NAMES = ("gate_proj", "up_proj", "down_proj")


def cut(tensors, r):
    """A rank's rows of each tensor, one below the other."""
    return torch.cat([rows(tensor, r.tp, r.tp_size) for tensor in tensors])


def megatron_tensors(kind, config, hf, r):
    """The tensors that a rank of Megatron-Bridge has of a checkpoint, made by reshaping it."""
    out = {"embedding.word_embeddings.weight": cut([hf["model.embed_tokens.weight"]], r)}
    out["decoder.final_layernorm.weight"] = hf["model.norm.weight"]
    if "lm_head.weight" in hf:
        out["output_layer.weight"] = cut([hf["lm_head.weight"]], r)
    for i in range(config.num_hidden_layers):
        at = f"model.layers.{i}."
        named = BUILDERS[kind](config, hf, at, r)
        out |= {f"decoder.layers.{i}.{name}": tensor.clone() for name, tensor in named.items()}
    return out


def attention(config, hf, at, r):
    out = {"self_attention.linear_proj.weight": columns(hf[at + "self_attn.o_proj.weight"], r.tp, r.tp_size)}
    out["self_attention.linear_qkv.layer_norm_weight"] = hf[at + "input_layernorm.weight"]
    for what in ("weight", "bias"):
        if at + f"self_attn.q_proj.{what}" in hf:
            fused = fused_qkv(hf, at, what, config.num_key_value_heads)
            out[f"self_attention.linear_qkv.{what}"] = rows(fused, r.tp, r.tp_size)
    for name in "qk":
        if at + f"self_attn.{name}_norm.weight" in hf:
            out[f"self_attention.{name}_layernorm.weight"] = hf[at + f"self_attn.{name}_norm.weight"]
    return out


def gemma(config, hf, at, r):
    return {
        **attention(config, hf, at, r),
        **gated(hf, at + "mlp.", "mlp.linear_fc%d.%s", NAMES, r.tp, r.tp_size),
        "self_attention.linear_proj.post_layernorm.weight": hf[at + "post_attention_layernorm.weight"],
        "mlp.linear_fc1.layer_norm_weight": hf[at + "pre_feedforward_layernorm.weight"],
        "mlp.linear_fc2.post_layernorm.weight": hf[at + "post_feedforward_layernorm.weight"],
    }


def gpt_oss(config, hf, at, r):
    out = attention(config, hf, at, r) | {
        "self_attention.linear_proj.bias": hf[at + "self_attn.o_proj.bias"],
        "self_attention.core_attention.softmax_offset": rows(hf[at + "self_attn.sinks"], r.tp, r.tp_size),
        "pre_mlp_layernorm.weight": hf[at + "post_attention_layernorm.weight"],
        "mlp.router.weight": hf[at + "mlp.router.weight"],
        "mlp.router.bias": hf[at + "mlp.router.bias"],
    }
    here = 4 // r.ep_size
    for i in range(here):
        expert = r.ep * here + i
        gate_up = hf[at + "mlp.experts.gate_up_proj"][expert].T
        gate_up_bias = hf[at + "mlp.experts.gate_up_proj_bias"][expert]
        down = hf[at + "mlp.experts.down_proj"][expert].T
        out[f"mlp.experts.linear_fc1.weight{i}"] = cut([gate_up[::2], gate_up[1::2]], r)
        out[f"mlp.experts.linear_fc1.bias{i}"] = cut([gate_up_bias[::2], gate_up_bias[1::2]], r)
        out[f"mlp.experts.linear_fc2.weight{i}"] = columns(down, r.tp, r.tp_size)
        out[f"mlp.experts.linear_fc2.bias{i}"] = hf[at + "mlp.experts.down_proj_bias"][expert]
    return out


def experts(hf, at, r, shared):
    out = {"mlp.router.weight": hf[at + "mlp.gate.weight"]}
    out["pre_mlp_layernorm.weight"] = hf[at + "post_attention_layernorm.weight"]
    here = 4 // r.ep_size
    for i in range(here):
        name = f"mlp.experts.linear_fc%d.%s{i}"
        out |= gated(hf, f"{at}mlp.experts.{r.ep * here + i}.", name, NAMES, *r.expert)
    return out | gated(hf, f"{at}mlp.{shared}.", "mlp.shared_experts.linear_fc%d.%s", NAMES, r.tp, r.tp_size)


def dense(hf, at, r):
    out = gated(hf, at + "mlp.", "mlp.linear_fc%d.%s", NAMES, r.tp, r.tp_size)
    return out | {"mlp.linear_fc1.layer_norm_weight": hf[at + "post_attention_layernorm.weight"]}


def deepseek(config, hf, at, r):
    """With the layers of Transformer Engine, whose down projections are whole on every rank."""
    attn, to = at + "self_attn.", "self_attention."
    out = {
        "input_layernorm.weight": hf[at + "input_layernorm.weight"],
        to + "linear_q_down_proj.weight": hf[attn + "q_a_proj.weight"],
        to + "linear_q_up_proj.layer_norm_weight": hf[attn + "q_a_layernorm.weight"],
        to + "linear_q_up_proj.weight": rows(hf[attn + "q_b_proj.weight"], r.tp, r.tp_size),
        to + "linear_kv_down_proj.weight": hf[attn + "kv_a_proj_with_mqa.weight"],
        to + "linear_kv_up_proj.layer_norm_weight": hf[attn + "kv_a_layernorm.weight"],
        to + "linear_kv_up_proj.weight": rows(hf[attn + "kv_b_proj.weight"], r.tp, r.tp_size),
        to + "linear_proj.weight": columns(hf[attn + "o_proj.weight"], r.tp, r.tp_size),
    }
    if at + "mlp.gate.weight" not in hf:
        return out | dense(hf, at, r)
    out["mlp.router.expert_bias"] = hf[at + "mlp.gate.e_score_correction_bias"]
    return out | experts(hf, at, r, "shared_experts")


def qwen3_next(config, hf, at, r):
    if at + "mlp.gate.weight" in hf:
        out = experts(hf, at, r, "shared_expert")
        out["mlp.shared_experts.gate_weight"] = hf[at + "mlp.shared_expert_gate.weight"]
    else:
        out = dense(hf, at, r)
    if at + "linear_attn.A_log" in hf:
        return out | delta_net(config, hf, at + "linear_attn.", r, hf[at + "input_layernorm.weight"])
    q, k, v = (hf[f"{at}self_attn.{name}_proj.weight"] for name in "qkv")
    hidden = q.shape[1]
    by_group = q.view(config.num_key_value_heads, -1, 2, config.head_dim, hidden)
    parts = (by_group[:, :, 0], by_group[:, :, 1], k, v)
    fused = torch.cat([part.reshape(config.num_key_value_heads, -1, hidden) for part in parts], 1)
    named = attention(config, {name: t for name, t in hf.items() if "q_proj" not in name}, at, r)
    return out | named | {"self_attention.linear_qkv.weight": rows(fused.flatten(0, 1), r.tp, r.tp_size)}


def delta_net(config, hf, at, r, norm):
    keys, ratio = config.linear_num_key_heads, config.linear_num_value_heads // config.linear_num_key_heads
    key_dim, value_dim = config.linear_key_head_dim, ratio * config.linear_value_head_dim
    qkvz = hf[at + "in_proj_qkvz.weight"].unflatten(0, (keys, -1)).split([key_dim, key_dim, value_dim, value_dim], 1)
    ba = hf[at + "in_proj_ba.weight"].unflatten(0, (keys, -1)).split([ratio, ratio], 1)
    conv = hf[at + "conv1d.weight"].split([keys * key_dim, keys * key_dim, keys * value_dim])
    return {
        "self_attention.in_proj.layer_norm_weight": norm,
        "self_attention.in_proj.weight": cut([part.flatten(0, 1) for part in (*qkvz, *ba)], r),
        "self_attention.conv1d.weight": cut(conv, r),
        "self_attention.A_log": rows(hf[at + "A_log"], r.tp, r.tp_size),
        "self_attention.dt_bias": rows(hf[at + "dt_bias"], r.tp, r.tp_size),
        "self_attention.out_norm.weight": hf[at + "norm.weight"] - 1,
        "self_attention.out_proj.weight": columns(hf[at + "out_proj.weight"], r.tp, r.tp_size),
    }


BUILDERS = {"gemma3_text": gemma, "gpt_oss": gpt_oss, "deepseek_v3": deepseek, "qwen3_next": qwen3_next}


@pytest.mark.parametrize("kind", CONFIGS)
def test_tables_and_cover(kind):
    """Names, dtypes and shapes are those of transformers' checkpoint; all ranks together have each element once."""
    _, config, checkpoint = transformers_model(kind, "bfloat16")
    table = sparserl.tensor_table(checkpoint)
    as_json = config.to_dict()
    assert Model(config).table == Model(as_json).table == table
    if kind == "deepseek_v3":
        assert Model(as_json | {"model_type": "kimi_k2"}).table == table
    if kind == "qwen3_next":
        derived = {name: field for name, field in as_json.items() if name != "layer_types"}
        assert Model(derived | {"full_attention_interval": 2}).table == table
    model = Model(config)
    sizes = [{"tp": 2}, {"tp": 2, "pp": 3, "dp": 2}] + [{"tp": 2, "ep": 2, "dp": 2}] * bool(model.experts)
    for size in sizes:
        require_cover([layout(model, r, padded_vocab=32) for r in grid(**size)])


@pytest.mark.parametrize("kind", BUILDERS)
def test_bits(kind):
    """What all ranks publish is the checkpoint, bit by bit, also where it must be transposed or interleaved."""
    _, config, checkpoint = transformers_model(kind, "bfloat16", vocab_size=22)
    for sizes in ({}, {"tp": 2}, {"ep": 2, "dp": 2} if Model(config).experts else {"dp": 2}):
        published = {name: torch.zeros_like(tensor) for name, tensor in checkpoint.items()}
        sources = [
            megatron(as_module(megatron_tensors(kind, config, checkpoint, r), 0), config, r) for r in grid(**sizes)
        ]
        require_cover([source.layout for source in sources])
        for source in sources:
            for part in source.weights().parts:
                published[part.tensor][part.region.slices] = part.data
        for name, tensor in checkpoint.items():
            assert torch.equal(published[name].view(torch.uint8), tensor.view(torch.uint8)), (name, sizes)


def test_converted_parameters_are_tracked(tmp_path):
    """Steps of an optimizer arrive, also in tensors that are transposed or interleaved copies of parameters."""
    _, config, checkpoint = transformers_model("gpt_oss", "bfloat16")
    model = as_module(megatron_tensors("gpt_oss", config, checkpoint, Ranks()), 0)
    optimizer = torch.optim.SGD([p.requires_grad_() for p in model.parameters()], lr=0.5)
    source = megatron(model, config, Ranks())
    received = {name: torch.zeros_like(tensor) for name, tensor in checkpoint.items()}
    tracked = sparserl.sources.track(optimizer, source)
    with sparserl.Publisher(tmp_path, tracked) as publisher, sparserl.Subscriber(tmp_path, received) as subscriber:
        publisher.publish()
        subscriber.sync()
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape).bfloat16() * (torch.rand(parameter.shape) < 0.3)
        optimizer.step()
        publisher.publish()
        subscriber.sync()
    for part in source.weights().parts:
        assert torch.equal(received[part.tensor][part.region.slices], part.data), part.tensor
    experts = "model.layers.0.mlp.experts.gate_up_proj"
    assert not torch.equal(received[experts], checkpoint[experts])


@pytest.mark.parametrize("kind", ["gemma3", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", *LLAVA])
def test_language_models_of_vlms(kind):
    """Of a vision-language model, the tensors of its language model are published, under the checkpoint's names."""
    config, checkpoint = vision_language_model(kind)
    model = Model(config)
    table = model.table
    assert Model(config.to_dict()).table == table
    assert table == sparserl.tensor_table({name: checkpoint[name] for name in checkpoint if name in table.index})
    others = [name for name in checkpoint if name not in table.index]
    assert others
    vision = ("visual.", "vision", "model.visual.", "multi_modal", "image_newline")
    assert all(name.startswith(vision) for name in others), others
    require_cover([layout(model, r, padded_vocab=32) for r in grid(tp=2, pp=3)])
    tensors = {name: torch.zeros(local.shape) for name, local in layout(model, Ranks()).parameters.items()}
    named = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
    whole = megatron(as_module(named | {"vision_model.conv1.weight": torch.zeros(3)}, 0), config, Ranks())
    assert {part.tensor for part in whole.weights().parts} == table.index.keys()
    alone = megatron(as_module(tensors, 0), config, Ranks())
    assert alone.layout.parameters == whole.layout.parameters


def test_llava_of_an_unknown_language_model():
    """Of which family the language model is, the config says; one without a map is refused."""
    config = {"model_type": "llava", "text_config": COMMON | {"model_type": "qwen2"}}
    assert "language_model.model.layers.0.self_attn.q_proj.bias" in Model(config).table.index
    with pytest.raises(UnsupportedTensor, match=r"no map for models of type 'llava'.* llava, .* with one of these"):
        Model({"model_type": "llava", "text_config": {"model_type": "opt"}})
    with pytest.raises(TensorMismatch, match=r"'thinker.language_model.w'] are not in the layout"):
        megatron(as_module({"thinker.language_model.w": torch.zeros(1)}, 0), config, Ranks())


def test_outside_of_the_language_model():
    """What is outside is published under the names of the map, or not at all if the map says so; else it is refused."""
    norm = Row("whole", {"norm.weight": "2"})
    family = Family({}, {"decoder.final_layernorm.weight": norm}, {"layers": "1"}, module="language_model")
    family = replace(family, outside={"vision_model.": "model.visual.", "audio_model.": None})
    checkpoint = {
        "norm.weight": torch.ones(2),
        "model.visual.conv.weight": torch.ones(3),
        "model.visual.scale": torch.ones(()),
    }
    tensors = {"language_model.decoder.final_layernorm.weight": checkpoint["norm.weight"]}
    tensors |= {f"vision_model.{name}": checkpoint[f"model.visual.{name}"] for name in ("conv.weight", "scale")}
    table = sparserl.tensor_table(checkpoint)
    model = as_module(tensors | {"audio_model.weight": torch.ones(1)}, 0)
    sources = [megatron(model, {}, r, family=family, table=table) for r in grid(tp=2, dp=2)]
    require_cover([source.layout for source in sources])
    for part in sources[0].weights().parts:
        assert part.data.data_ptr() == checkpoint[part.tensor].data_ptr()
    with pytest.raises(UnsupportedTensor, match=r"\['audio_model.weight'\] are outside of 'language_model'"):
        megatron(model, {}, Ranks(), family=replace(family, outside={"vision_model.": None}), table=table)


def test_cut_as_the_shape_says():
    """A parameter that may be whole is cut by rows or columns where its shape says so, in the layers that have it."""
    tensors = {f"{name}.{layer}": torch.randn(4, 6) for layer in range(2) for name in ("rows", "columns", "whole")}
    del tensors["rows.1"]
    rows_ = {
        name: Row("duplicated", {name + ".{layer}": "4, 6"}, "layer in [0]" if name == "rows" else "1")
        for name in ("rows", "columns", "whole")
    }
    family = Family(rows_, {}, {"layers": "2"}, prefix="")
    published = {name: torch.zeros(4, 6) for name in tensors}
    for rank in grid(tp=2):
        parts = {"rows": rows, "columns": columns, "whole": lambda tensor, *_: tensor}
        local = {}
        for name, tensor in tensors.items():
            kind, _, layer = name.partition(".")
            local[f"decoder.layers.{layer}.{kind}"] = parts[kind](tensor, rank.tp, 2).clone()
        source = megatron(as_module(local, 0), {"dtype": "float32"}, rank, family=family)
        assert source.layout.table == sparserl.tensor_table(tensors)
        for part in source.weights().parts:
            published[part.tensor][part.region.slices] += part.data
    for name, tensor in tensors.items():
        assert torch.equal(published[name], tensor), name


def test_holes_and_overlaps_are_refused():
    """A rank that is forgotten or counted twice is found before anything is published; the message names tensors."""
    layouts = [layout(Model(transformers_model("qwen3_moe", "bfloat16")[1]), r, padded_vocab=32) for r in grid(tp=2)]
    with pytest.raises(TensorMismatch, match=r"hold only .* of 336 elements of 'model.embed_tokens.weight'"):
        require_cover(layouts[:1])
    with pytest.raises(RegionOverlap, match=r"'lm_head.weight': regions \[16:21, 0:16\] and \[16:21, 0:16\] overlap"):
        require_cover([*layouts, layouts[1]])


def test_multi_token_prediction_without_a_map():
    """A family whose map has no multi-token prediction is refused on every rank, not only where it is."""
    _, config, _ = transformers_model("qwen3_next", "bfloat16")
    with pytest.raises(UnsupportedTensor, match=r"'qwen3_next' has no multi-token prediction"):
        Model(config, mtp=1)
    _, config, _ = transformers_model("deepseek_v3", "bfloat16")
    for sizes in ({"tp": 2, "pp": 3}, {"ep": 2, "dp": 2}):
        require_cover([layout(Model(config, mtp=2), r, padded_vocab=32) for r in grid(**sizes)])
    assert "model.layers.4.shared_head.head.weight" in Model(config, mtp=2).table.index


def test_shared_experts_of_qwen3_moe():
    """A Qwen3-MoE whose config has a shared expert gets one, with its gate."""
    _, config, _ = transformers_model("qwen3_moe", "bfloat16")
    table = Model(config.to_dict() | {"shared_expert_intermediate_size": 6}).table
    shared = {spec.name: spec.shape for spec in table.specs if "layers.2.mlp.shared_expert" in spec.name}
    names = [f"model.layers.2.mlp.shared_expert.{name}.weight" for name in NAMES]
    shapes = [(6, 16), (6, 16), (16, 6), (1, 16)]
    assert shared == dict(zip([*names, "model.layers.2.mlp.shared_expert_gate.weight"], shapes, strict=True))
    require_cover(
        [layout(Model(config.to_dict() | {"shared_expert_intermediate_size": 6}), r) for r in grid(ep=2, dp=2)]
    )


def test_a_family_of_ones_own():
    """A map that is given is used; what it does not fit is refused by name, before anything is published."""
    base = FAMILIES["llama"]
    layer = dict(base.layer) | {"mlp.scale": Row("whole", {"mlp.scale": "hidden_size"}, "layer >= 1")}
    family = replace(base, layer=layer, prefix="decoder.{layer}.")
    config = {"model_type": "own", "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    config |= {"intermediate_size": 4, "vocab_size": 6, "dtype": "float32"}
    plan = layout(Model(config, family), Ranks())
    assert "decoder.1.mlp.scale" in plan.table.index
    assert "decoder.0.mlp.scale" not in plan.table.index
    tensors = {name: torch.randn(local.shape) for name, local in plan.parameters.items()}
    parts = megatron(as_module(tensors, 0), config, Ranks(), family=family).weights().parts
    assert {part.tensor for part in parts} == plan.table.index.keys()
    with pytest.raises(UnsupportedTensor, match=r"no map for models of type 'own'.*Give the map.*as `family`"):
        megatron(as_module(tensors, 0), config, Ranks())
    with pytest.raises(UnsupportedTensor, match=r"Megatron-Bridge for 'own' cannot be read: No module named 'megatron"):
        megatron(as_module(tensors, 0), config | {"architectures": ["O"]}, Ranks(), family="bridge", table=plan.table)
    without = {name: tensor for name, tensor in tensors.items() if "scale" not in name}
    with pytest.raises(TensorMismatch, match=r"'decoder.layers.1.mlp.scale'\] are missing"):
        megatron(as_module(without, 0), config, Ranks(), family=family)
    extra = tensors | {"decoder.layers.0.mlp.scale": torch.zeros(8)}
    with pytest.raises(TensorMismatch, match=r"'decoder.layers.0.mlp.scale'\] are not in the layout"):
        megatron(as_module(extra, 0), config, Ranks(), family=family)
    wrong = tensors | {"decoder.layers.1.mlp.scale": torch.zeros(9)}
    with pytest.raises(TensorMismatch, match=r"'decoder.layers.1.mlp.scale' has shape \[9\], in the layout \[8\]"):
        megatron(as_module(wrong, 0), config, Ranks(), family=family)


def test_maps_are_data():
    """Every map survives JSON, and can be given as what JSON has."""
    for kind, family in FAMILIES.items():
        assert Family.of(json.loads(json.dumps(asdict(family)))) == family, kind
    config = {"model_type": "own", "layers": 2, "width": 3}
    data = {"layer": {"w": {"cut": "whole", "tensors": {"w": "width"}}}, "model": {}, "sizes": {"layers": "layers"}}
    tensors = {f"decoder.layers.{i}.w": torch.zeros(3, dtype=torch.bfloat16) for i in range(2)}
    parts = megatron(as_module(tensors, 0), config, Ranks(), family=data).weights().parts
    assert [part.tensor for part in parts] == ["model.layers.0.w", "model.layers.1.w"]
    with pytest.raises(TensorMismatch, match="not the map of a family: 'layer'"):
        megatron(as_module(tensors, 0), config, Ranks(), family={"model": {}})
    with pytest.raises(TensorMismatch, match="no shape for 'layers'"):
        megatron(as_module(tensors, 0), {}, Ranks(), family=data)


def test_wrong_maps_are_refused():
    """Unknown cuts and dtypes, forgotten tensors, expressions that are none, sizes that the config does not have."""
    with pytest.raises(TensorMismatch, match="unknown dtype 'float33'"):
        Row("whole", {"w": "2"}, dtype="float33")
    with pytest.raises(TensorMismatch, match="a parameter that is 'rows' is one tensor"):
        Row("rows", {"w": "2", "v": "2"})
    with pytest.raises(TensorMismatch, match=r"rows of \['w'\], not of \['v', 'w'\]"):
        Row("segments", {"w": "2", "v": "2"}, segments=[[GroupRows("w")]])
    with pytest.raises(TensorMismatch, match="`plus` is for parameters that are whole, this one is 'rows'"):
        Row("rows", {"w": "2"}, plus=1.0)
    with pytest.raises(TensorMismatch, match="unknown cut 'diagonal'; there are columns"):
        Row("diagonal", {"w": "2"})
    for shape, message in (
        ("width // 0", "no value for 'width // 0'"),
        ("open('/')", "is not an expression of a map"),
        ("missing", r"no shape for 'missing': \[None\]"),
        ("2 *", r"no value for '2 \*'"),
    ):
        family = Family({"w": Row("whole", {"w": shape})}, {}, {"layers": "1", "width": "2"})
        with pytest.raises(TensorMismatch, match=message):
            _ = Model({}, family).table


def test_names_of_transformer_engine():
    """The norms inside Transformer Engine's fused layers come to the names of the local ones."""
    at = "decoder.layers.0."
    assert (
        canonical(at + "self_attention.linear_q_up_proj.layer_norm_weight") == at + "self_attention.q_layernorm.weight"
    )
    assert canonical(at + "self_attention.linear_q_proj.layer_norm_weight") == at + "input_layernorm.weight"
    local = at + "mlp.experts.local_experts.2.linear_fc2.bias"
    assert canonical(local) == at + "mlp.experts.linear_fc2.bias2"
