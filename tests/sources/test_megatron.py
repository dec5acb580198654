"""Megatron's parameters as shards of the checkpoint they will be saved as."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

import sparserl
from sparserl.errors import TensorMismatch, UnsupportedTensor
from sparserl.sources import Ranks, joined, mapped, require_cover
from sparserl.sources.megatron_core import Model, canonical, layout
from sparserl.weights.digest import table_digest
from tests.sources.megatron_shards import (
    CONFIGS,
    HIDDEN,
    PADDED,
    VOCAB,
    changed,
    checkpoint,
    grid,
    parameters,
    require_equal,
)

torch = pytest.importorskip("torch")


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


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[] if kind in ("llama_bias", "qwen3_moe") else pytest.mark.long) for kind in CONFIGS],
)
def test_shards_are_the_checkpoint(kind):
    """Under tensor, pipeline and data parallelism, merged patches are the patch of the whole; digests add up."""
    for sizes in GRIDS:
        require_exact(kind, list(grid(**sizes)))


@pytest.mark.parametrize(
    "kind", ["qwen3_moe", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("mixtral", "qwen2_moe"))]
)
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
        assert Model(config).table == Model(SimpleNamespace(**config)).table == table, kind


def test_uneven_and_interleaved_stages():
    """Layers are where they are said to be; the chunks of an interleaved pipeline are joined."""
    hf, model = checkpoint("qwen3"), Model(CONFIGS["qwen3"])

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
    with pytest.raises(UnsupportedTensor, match=r"'gpt2'; there are maps for deepseek_v3"):
        Model({"model_type": "gpt2"})
    with pytest.raises(TensorMismatch, match="4 layers cannot be spread evenly over 3 stages"):
        layout(CONFIGS["llama"], Ranks(pp_size=3))
    with pytest.raises(TensorMismatch, match="4 experts cannot be spread evenly over 3 ranks"):
        layout(CONFIGS["mixtral"], Ranks(ep_size=3))
    with pytest.raises(TensorMismatch, match="cannot be cut into 2 equal parts"):
        layout(CONFIGS["llama"], Ranks(tp_size=2))  # 21 tokens, not padded
    with pytest.raises(TensorMismatch, match="is too small for a vocabulary of 21"):
        layout(CONFIGS["llama"], Ranks(), padded_vocab=20)
    named = {canonical(n): t for n, t in parameters("llama", checkpoint("llama"), Ranks()).items()}
    lay = layout(CONFIGS["llama"], Ranks(), padded_vocab=PADDED)
    with pytest.raises(TensorMismatch, match=r"\['mtp.weight'\] are not in the layout"):
        lay.shards({**named, "mtp.weight": torch.zeros(1)})
    with pytest.raises(TensorMismatch, match=r"'output_layer.weight' has shape \[21, 12\], in the layout \[32, 12\]"):
        lay.shards({**named, "output_layer.weight": torch.zeros(VOCAB, HIDDEN)})
