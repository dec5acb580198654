"""Layouts of Megatron-core models in the coordinates of their Hugging Face checkpoints.

What Megatron-core does to Llama-, Qwen- and Mixtral-style models, and a layout undoes:

    query, key, value   fused, by query group: (its q heads, k, v); these rows are cut into equal parts
    gate, up            fused on each rank: its rows of gate, then its rows of up
    o_proj, down_proj   cut along columns
    embeddings          padded to a vocabulary that can be cut; only the real rows are published
    experts             spread over expert-parallel ranks, numbered from 0 on each
    layers              spread over pipeline stages, numbered from 0 on each
    norms, routers      the same on every tensor-parallel rank: rank 0 owns them

Names are those of the Transformer Engine layers or of the local ones, with or without the `module.` of wrappers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import TensorMismatch, UnsupportedTensor
from ..weights.dtypes import BY_NAME
from ..weights.region import Shape
from ..weights.table import TensorSpec, TensorTable
from .layout import Layout, LayoutSource, Local, Run, joined, local_tensors, split, stack
from .modules import Source

EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
_WORDS, _OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
_FINAL = "decoder.final_layernorm.weight"
_NAMES = (
    (r"^(module\.)+", ""),
    (r"self_attention\.linear_qkv\.layer_norm_weight$", "input_layernorm.weight"),
    (r"mlp\.linear_fc1\.layer_norm_weight$", "pre_mlp_layernorm.weight"),
    (r"mlp\.experts\.local_experts\.(\d+)\.(linear_fc[12])\.weight$", r"mlp.experts.\2.weight\1"),
)
_KINDS = frozenset(("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen2_moe", "qwen3_moe"))
_GATED = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Ranks:
    """Where a process stands: its rank and the size in each kind of parallelism.

    etp: tensor parallelism of the experts; as `tp`, unless it is given.
    dp: the number among the ranks that hold the same parameters, data and context parallel; 0 publishes them.
    edp: the same for the parameters of experts.
    """

    tp: int = 0
    tp_size: int = 1
    pp: int = 0
    pp_size: int = 1
    ep: int = 0
    ep_size: int = 1
    etp: int | None = None
    etp_size: int | None = None
    dp: int = 0
    edp: int = 0

    @property
    def expert(self) -> tuple[int, int]:
        """Rank and size in the tensor parallelism of the experts."""
        return self.tp if self.etp is None else self.etp, self.tp_size if self.etp_size is None else self.etp_size

    @classmethod
    def here(cls) -> Ranks:
        """Where this process stands, by Megatron-core's `parallel_state`."""
        from megatron.core import parallel_state as state  # type: ignore[import-not-found, unused-ignore]

        return cls(
            state.get_tensor_model_parallel_rank(),
            state.get_tensor_model_parallel_world_size(),
            state.get_pipeline_model_parallel_rank(),
            state.get_pipeline_model_parallel_world_size(),
            state.get_expert_model_parallel_rank(),
            state.get_expert_model_parallel_world_size(),
            state.get_expert_tensor_parallel_rank(),
            state.get_expert_tensor_parallel_world_size(),
            state.get_data_parallel_rank(with_context_parallel=True),
            state.get_expert_data_parallel_rank(),
        )


@dataclass(frozen=True)
class Model:
    """What the shapes of a checkpoint depend on; `Model.of` reads it from a Hugging Face config.

    groups: key and value heads. width: rows of gate and up. moe: what the mixture of experts is called in a layer.
    """

    layers: int
    hidden: int
    heads: int
    groups: int
    head_dim: int
    width: int
    vocab: int
    dtype: str = "bfloat16"
    tied: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    experts: int = 0
    expert_width: int = 0
    shared_width: int = 0
    dense: frozenset[int] = frozenset()  # layers without experts, in a model that has them
    moe: str = "mlp"
    expert_names: tuple[str, str, str] = _GATED

    @classmethod
    def of(cls, config: Any) -> Model:
        """The model of a Hugging Face config: an object, or what its JSON says."""
        read: Any = config.get if isinstance(config, Mapping) else lambda name: getattr(config, name, None)
        kind = read("model_type")
        if kind not in _KINDS:
            known = ", ".join(sorted(_KINDS))
            raise UnsupportedTensor(
                f"no layout for models of type {kind!r}; known are {known}. Write one with `Layout`"
            )
        heads, hidden = read("num_attention_heads"), read("hidden_size")
        bias = bool(read("attention_bias")) and kind in ("llama", "qwen3", "qwen3_moe")
        layers = read("num_hidden_layers")
        more: dict[str, Any] = {}
        if kind == "mixtral":
            width, names = read("intermediate_size"), ("w1", "w3", "w2")
            more = {"experts": read("num_local_experts"), "expert_width": width}
            more |= {"moe": "block_sparse_moe", "expert_names": names}
        elif kind in ("qwen2_moe", "qwen3_moe"):
            step, only = read("decoder_sparse_step") or 1, read("mlp_only_layers") or ()
            dense = frozenset(i for i in range(layers) if i in only or (i + 1) % step)
            more = {"experts": read("num_experts"), "expert_width": read("moe_intermediate_size"), "dense": dense}
            more["shared_width"] = read("shared_expert_intermediate_size") if kind == "qwen2_moe" else 0
        return cls(
            layers=layers,
            hidden=hidden,
            heads=heads,
            groups=read("num_key_value_heads") or heads,
            head_dim=read("head_dim") or hidden // heads,
            width=read("intermediate_size"),
            vocab=read("vocab_size"),
            dtype=str(read("dtype") or read("torch_dtype") or "bfloat16").removeprefix("torch."),
            tied=bool(read("tie_word_embeddings")),
            qkv_bias=bias or (kind.startswith("qwen2") and read("qkv_bias") is not False),
            out_bias=bias,
            mlp_bias=bool(read("mlp_bias")) and kind == "llama",
            qk_norm=kind.startswith("qwen3"),
            **more,
        )

    def has_experts(self, layer: int) -> bool:
        return bool(self.experts) and layer not in self.dense

    @property
    def table(self) -> TensorTable:
        """The tensor table of the whole checkpoint."""
        return TensorTable(TensorSpec(name, BY_NAME[self.dtype], shape) for name, shape in self._shapes())

    def _shapes(self) -> Iterator[tuple[str, Shape]]:
        yield EMBEDDING, (self.vocab, self.hidden)
        yield NORM, (self.hidden,)
        if not self.tied:
            yield HEAD, (self.vocab, self.hidden)
        for layer in range(self.layers):
            at = f"model.layers.{layer}"
            yield f"{at}.input_layernorm.weight", (self.hidden,)
            yield f"{at}.post_attention_layernorm.weight", (self.hidden,)
            yield from self._attention(f"{at}.self_attn")
            if not self.has_experts(layer):
                yield from self._gated(f"{at}.mlp", self.width, _GATED, self.mlp_bias)
                continue
            moe = f"{at}.{self.moe}"
            yield f"{moe}.gate.weight", (self.experts, self.hidden)
            for expert in range(self.experts):
                yield from self._gated(f"{moe}.experts.{expert}", self.expert_width, self.expert_names)
            if self.shared_width:
                yield from self._gated(f"{moe}.shared_expert", self.shared_width, _GATED)
                yield f"{moe}.shared_expert_gate.weight", (1, self.hidden)

    def _attention(self, at: str) -> Iterator[tuple[str, Shape]]:
        queries, keys = self.heads * self.head_dim, self.groups * self.head_dim
        for name, rows in (("q", queries), ("k", keys), ("v", keys)):
            yield f"{at}.{name}_proj.weight", (rows, self.hidden)
            if self.qkv_bias:
                yield f"{at}.{name}_proj.bias", (rows,)
        yield f"{at}.o_proj.weight", (self.hidden, queries)
        if self.out_bias:
            yield f"{at}.o_proj.bias", (self.hidden,)
        if self.qk_norm:
            yield f"{at}.q_norm.weight", (self.head_dim,)
            yield f"{at}.k_norm.weight", (self.head_dim,)

    def _gated(
        self, at: str, width: int, names: tuple[str, str, str], bias: bool = False
    ) -> Iterator[tuple[str, Shape]]:
        gate, up, down = names
        for name, shape in ((gate, (width, self.hidden)), (up, (width, self.hidden)), (down, (self.hidden, width))):
            yield f"{at}.{name}.weight", shape
            if bias:
                yield f"{at}.{name}.bias", shape[:1]


class _Stage:
    """What one rank holds."""

    def __init__(self, model: Model, ranks: Ranks, table: TensorTable) -> None:
        self.model, self.ranks, self.table = model, ranks, table
        self.tp = ranks.tp, ranks.tp_size

    def embedding(self, tensors: Sequence[str], padded: int) -> Local:
        """Rows of a padded vocabulary, under each name that they have in the checkpoint."""
        real = self.model.vocab
        if padded < real:
            raise TensorMismatch(f"an embedding of {padded} rows has no room for a vocabulary of {real}")
        found = [stack(self.table, [Run(t, 0, real), Run(None, 0, padded - real)], *self.tp) for t in tensors]
        slices = tuple(piece for local in found for piece in local.slices)
        return Local(found[0].shape, slices).owned(self.ranks.dp == 0)

    def layer(self, layer: int) -> Iterator[tuple[str, Local]]:
        at = f"model.layers.{layer}"
        yield "input_layernorm.weight", self.same(f"{at}.input_layernorm.weight")
        yield "pre_mlp_layernorm.weight", self.same(f"{at}.post_attention_layernorm.weight")
        yield from self._attention(f"{at}.self_attn")
        if self.model.has_experts(layer):
            yield from self._experts(f"{at}.{self.model.moe}")
        else:
            kinds = ("weight", "bias") if self.model.mlp_bias else ("weight",)
            own = self.ranks.dp == 0
            yield from self._gated("mlp.linear_fc{}.{}", f"{at}.mlp", _GATED, self.tp, own, kinds)

    def same(self, tensor: str) -> Local:
        """A tensor that every tensor-parallel rank has all of."""
        return split(self.table, tensor, 0, 0, 1).owned(self.ranks.tp == 0 and self.ranks.dp == 0)

    def _attention(self, at: str) -> Iterator[tuple[str, Local]]:
        model, own = self.model, self.ranks.dp == 0
        for kind in ("weight", "bias") if model.qkv_bias else ("weight",):
            runs = query_groups(f"{at}.{{}}_proj.{kind}", model.heads, model.groups, model.head_dim)
            yield f"self_attention.linear_qkv.{kind}", stack(self.table, runs, *self.tp).owned(own)
        yield "self_attention.linear_proj.weight", split(self.table, f"{at}.o_proj.weight", 1, *self.tp).owned(own)
        if model.out_bias:
            yield "self_attention.linear_proj.bias", self.same(f"{at}.o_proj.bias")
        if model.qk_norm:
            yield "self_attention.q_layernorm.weight", self.same(f"{at}.q_norm.weight")
            yield "self_attention.k_layernorm.weight", self.same(f"{at}.k_norm.weight")

    def _experts(self, at: str) -> Iterator[tuple[str, Local]]:
        model, ranks = self.model, self.ranks
        yield "mlp.router.weight", self.same(f"{at}.gate.weight")
        here, rest = divmod(model.experts, ranks.ep_size)
        if rest:
            raise TensorMismatch(f"{model.experts} experts cannot be spread evenly over {ranks.ep_size} ranks")
        for i in range(here):
            expert, own = f"{at}.experts.{ranks.ep * here + i}", ranks.edp == 0
            name = f"mlp.experts.linear_fc{{}}.{{}}{i}"
            yield from self._gated(name, expert, model.expert_names, ranks.expert, own)
        if model.shared_width:
            own, shared = ranks.dp == 0, f"{at}.shared_expert"
            yield from self._gated("mlp.shared_experts.linear_fc{}.{}", shared, _GATED, self.tp, own)
            yield "mlp.shared_experts.gate_weight", self.same(f"{at}.shared_expert_gate.weight")

    def _gated(
        self,
        name: str,
        at: str,
        names: tuple[str, str, str],
        cut: tuple[int, int],
        own: bool,
        kinds: Sequence[str] = ("weight",),
    ) -> Iterator[tuple[str, Local]]:
        """A gated MLP: a rank's rows of gate and up in one parameter, its columns of down in another."""
        gate, up, down = names
        for kind in kinds:
            both = [split(self.table, f"{at}.{tensor}.{kind}", 0, *cut).slices[0] for tensor in (gate, up)]
            runs = [Run(piece.tensor, piece.region.start[0], piece.region.size[0]) for piece in both]
            yield name.format(1, kind), stack(self.table, runs).owned(own)
        yield name.format(2, "weight"), split(self.table, f"{at}.{down}.weight", 1, *cut).owned(own)
        if "bias" in kinds:
            yield name.format(2, "bias"), self.same(f"{at}.{down}.bias")


def query_groups(tensor: str, heads: int, groups: int, head_dim: int) -> Iterator[Run]:
    """Rows of a fused query, key and value: for each group the queries that share a key, the key and the value.

    tensor: the name in the checkpoint, with a place for `q`, `k` or `v`.
    """
    queries = heads // groups * head_dim
    for group in range(groups):
        yield Run(tensor.format("q"), group * queries, queries)
        yield Run(tensor.format("k"), group * head_dim, head_dim)
        yield Run(tensor.format("v"), group * head_dim, head_dim)


def layout(
    config: Any,
    ranks: Ranks,
    *,
    layers: range | None = None,
    first: bool | None = None,
    last: bool | None = None,
    padded_vocab: int | None = None,
    table: TensorTable | None = None,
) -> Layout:
    """The layout of one rank of a Megatron-core model.

    config: a Hugging Face config of a Llama, Mistral, Qwen2, Qwen3, Mixtral, Qwen2-MoE or Qwen3-MoE, or a `Model`.
    layers: those that the rank has, as the checkpoint counts them; without it, every stage has as many.
    first, last: whether it has the embedding, and whether it has the final norm and the head; where nothing is said,
        whoever has the first layer and the last one.
    padded_vocab: rows of the embedding on all ranks together; as many as there are tokens, unless it is given.
    table: the tensor table of the checkpoint, where not all tensors are of the config's dtype.
    """
    model = config if isinstance(config, Model) else Model.of(config)
    table = model.table if table is None else table
    if layers is None:
        each, rest = divmod(model.layers, ranks.pp_size)
        if rest:
            raise TensorMismatch(
                f"{model.layers} layers are not as many on each of {ranks.pp_size} stages: name `layers`"
            )
        layers = range(ranks.pp * each, (ranks.pp + 1) * each)
    padded = model.vocab if padded_vocab is None else padded_vocab
    first = layers.start == 0 if first is None else first
    last = layers.stop == model.layers if last is None else last
    stage, found = _Stage(model, ranks, table), dict[str, Local]()
    if first:
        both = [EMBEDDING, HEAD] if model.tied and HEAD in table.index else [EMBEDDING]
        found[_WORDS] = stage.embedding(both, padded)
    for i, layer in enumerate(layers):
        found |= {f"decoder.layers.{i}.{name}": local for name, local in stage.layer(layer)}
    if last:
        found[_FINAL] = stage.same(NORM)
        if not model.tied:
            found[_OUTPUT] = stage.embedding([HEAD], padded)
        elif not first:  # a copy of the embedding, which the first stage publishes
            found[_OUTPUT] = stage.embedding([EMBEDDING], padded).owned(False)
    return Layout(table, found)


def canonical(name: str) -> str:
    """The one name that layouts have for a parameter, whichever layers and wrappers the model is made of."""
    for pattern, plain in _NAMES:
        name = re.sub(pattern, plain, name)
    return name


def megatron(model: Any, config: Any, ranks: Ranks | None = None, *, table: TensorTable | None = None) -> Source:
    """The weights that this rank owns of a Megatron-core model, in the coordinates of the Hugging Face checkpoint.

    model: the model, or the list of its chunks where the pipeline is interleaved; wrapped or not.
    config: a Hugging Face config; see `layout`.
    ranks: where this process stands; asked of Megatron-core, unless it is given.
    table: the tensor table of the checkpoint, where not all tensors are of the config's dtype.
    """
    ranks = Ranks.here() if ranks is None else ranks
    known = config if isinstance(config, Model) else Model.of(config)
    chunks = model if isinstance(model, Sequence) else [model]
    return joined(*(_chunk(chunk, known, ranks, table) for chunk in chunks))


def _chunk(chunk: Any, model: Model, ranks: Ranks, table: TensorTable | None) -> LayoutSource:
    def tensors() -> dict[str, Any]:
        return {canonical(name): tensor for name, tensor in local_tensors(chunk).items()}

    held = tensors()
    rows = next((held[name].shape[0] for name in (_WORDS, _OUTPUT) if name in held), None)
    padded = None if rows is None else rows * ranks.tp_size
    found = layout(
        model,
        ranks,
        layers=_layers(chunk),
        first=_WORDS in held,
        last=_FINAL in held,
        padded_vocab=padded,
        table=table,
    )
    return LayoutSource(found, tensors)


def _layers(chunk: Any) -> range:
    """The layers of a chunk, as the checkpoint counts them: Megatron-core's layers know their number, from 1 up."""
    numbers = []
    for name, module in chunk.named_modules():
        if re.fullmatch(r"decoder\.layers\.\d+", canonical(name)):
            numbers.append(module.layer_number - 1)
    return range(numbers[0], numbers[0] + len(numbers)) if numbers else range(0)
