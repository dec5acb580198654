"""Layouts of Megatron-core models in the coordinates of their Hugging Face checkpoints.

How Megatron-core stores Llama-, Qwen- and Mixtral-style models:

    query, key, value   fused, by query group: (its q heads, k, v); these rows are cut into equal parts
    gate, up            fused on each rank: its rows of gate, then its rows of up
    o_proj, down_proj   cut along columns
    embeddings          padded to a vocabulary that can be cut; only the real rows are published
    experts             spread over expert-parallel ranks, numbered from 0 on each
    layers              spread over pipeline stages, numbered from 0 on each
    norms, routers      the same on every tensor-parallel rank: rank 0 publishes them

Names are those of the Transformer Engine layers or of the local ones, with or without the `module.` of wrappers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import TensorMismatch, UnsupportedTensor
from ..weights.dtypes import BY_NAME
from ..weights.region import Shape
from ..weights.table import TensorSpec, TensorTable
from .layout import Layout, LayoutSource, Local, Span, joined, local_tensors, split, stack
from .modules import Source

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
NORM = "model.norm.weight"
_EMBEDDING = "embedding.word_embeddings.weight"
_OUTPUT = "output_layer.weight"
_FINAL_NORM = "decoder.final_layernorm.weight"
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
    """The rank of a process, and the number of ranks, in each kind of parallelism.

    Args:
        tp: tensor parallel rank.
        tp_size: number of tensor parallel ranks.
        pp: pipeline stage.
        pp_size: number of pipeline stages.
        ep: expert parallel rank.
        ep_size: number of expert parallel ranks.
        etp: tensor parallel rank among the ranks of an expert; by default `tp`.
        etp_size: number of tensor parallel ranks of an expert; by default `tp_size`.
        dp: rank among those with the same parameters, data and context parallel together; rank 0 publishes them.
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
        """Tensor parallel rank of an expert, and their number."""
        return self.tp if self.etp is None else self.etp, self.tp_size if self.etp_size is None else self.etp_size

    @classmethod
    def here(cls) -> Ranks:
        """The ranks of this process, from Megatron-core's `parallel_state`."""
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

    `groups` are the key and value heads, `width` the rows of gate and up, `moe` the name of the mixture of experts in a
    layer.
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
        """The model of a Hugging Face config, which is an object or the dict of its JSON."""
        read: Any = config.get if isinstance(config, Mapping) else lambda name: getattr(config, name, None)
        kind = read("model_type")
        if kind not in _KINDS:
            supported = ", ".join(sorted(_KINDS))
            raise UnsupportedTensor(
                f"no layout for models of type {kind!r}; supported are {supported}. Write a `Layout` for this one"
            )
        heads = read("num_attention_heads")
        hidden = read("hidden_size")
        bias = bool(read("attention_bias")) and kind in ("llama", "qwen3", "qwen3_moe")
        layers = read("num_hidden_layers")
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
            **_expert_options(kind, layers, read),
        )

    def has_experts(self, layer: int) -> bool:
        """Whether a layer is a mixture of experts."""
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
            prefix = f"model.layers.{layer}"
            yield f"{prefix}.input_layernorm.weight", (self.hidden,)
            yield f"{prefix}.post_attention_layernorm.weight", (self.hidden,)
            yield from self._attention(f"{prefix}.self_attn")
            if not self.has_experts(layer):
                yield from self._gated(f"{prefix}.mlp", self.width, _GATED, self.mlp_bias)
                continue
            moe = f"{prefix}.{self.moe}"
            yield f"{moe}.gate.weight", (self.experts, self.hidden)
            for expert in range(self.experts):
                yield from self._gated(f"{moe}.experts.{expert}", self.expert_width, self.expert_names)
            if self.shared_width:
                yield from self._gated(f"{moe}.shared_expert", self.shared_width, _GATED)
                yield f"{moe}.shared_expert_gate.weight", (1, self.hidden)

    def _attention(self, prefix: str) -> Iterator[tuple[str, Shape]]:
        queries = self.heads * self.head_dim
        keys = self.groups * self.head_dim
        for name, rows in (("q", queries), ("k", keys), ("v", keys)):
            yield f"{prefix}.{name}_proj.weight", (rows, self.hidden)
            if self.qkv_bias:
                yield f"{prefix}.{name}_proj.bias", (rows,)
        yield f"{prefix}.o_proj.weight", (self.hidden, queries)
        if self.out_bias:
            yield f"{prefix}.o_proj.bias", (self.hidden,)
        if self.qk_norm:
            yield f"{prefix}.q_norm.weight", (self.head_dim,)
            yield f"{prefix}.k_norm.weight", (self.head_dim,)

    def _gated(
        self, prefix: str, width: int, names: tuple[str, str, str], bias: bool = False
    ) -> Iterator[tuple[str, Shape]]:
        gate, up, down = names
        for name, shape in ((gate, (width, self.hidden)), (up, (width, self.hidden)), (down, (self.hidden, width))):
            yield f"{prefix}.{name}.weight", shape
            if bias:
                yield f"{prefix}.{name}.bias", shape[:1]


def _expert_options(kind: str, layers: int, read: Callable[[str], Any]) -> dict[str, Any]:
    """What a config says about experts."""
    if kind == "mixtral":
        return {
            "experts": read("num_local_experts"),
            "expert_width": read("intermediate_size"),
            "moe": "block_sparse_moe",
            "expert_names": ("w1", "w3", "w2"),
        }
    if kind in ("qwen2_moe", "qwen3_moe"):
        step = read("decoder_sparse_step") or 1
        mlp_only = read("mlp_only_layers") or ()
        return {
            "experts": read("num_experts"),
            "expert_width": read("moe_intermediate_size"),
            "dense": frozenset(i for i in range(layers) if i in mlp_only or (i + 1) % step),
            "shared_width": read("shared_expert_intermediate_size") if kind == "qwen2_moe" else 0,
        }
    return {}


class _Stage:
    """The parameters of one rank, by their names in Megatron-core."""

    def __init__(self, model: Model, ranks: Ranks, table: TensorTable) -> None:
        self.model = model
        self.ranks = ranks
        self.table = table
        self.tp = (ranks.tp, ranks.tp_size)

    def embedding(self, tensors: Sequence[str], padded: int) -> Local:
        """Rows of a padded vocabulary, under each name that they have in the checkpoint."""
        vocab = self.model.vocab
        if padded < vocab:
            raise TensorMismatch(f"an embedding of {padded} rows is too small for a vocabulary of {vocab}")
        locals_ = [stack(self.table, [Span(t, 0, vocab), Span(None, 0, padded - vocab)], *self.tp) for t in tensors]
        slices = tuple(slice_ for local in locals_ for slice_ in local.slices)
        return Local(locals_[0].shape, slices).owned(self.ranks.dp == 0)

    def layer(self, layer: int) -> Iterator[tuple[str, Local]]:
        """The parameters of a layer, which the checkpoint counts from 0."""
        prefix = f"model.layers.{layer}"
        yield "input_layernorm.weight", self.replicated(f"{prefix}.input_layernorm.weight")
        yield "pre_mlp_layernorm.weight", self.replicated(f"{prefix}.post_attention_layernorm.weight")
        yield from self._attention(f"{prefix}.self_attn")
        if self.model.has_experts(layer):
            yield from self._experts(f"{prefix}.{self.model.moe}")
        else:
            kinds = ("weight", "bias") if self.model.mlp_bias else ("weight",)
            owned = self.ranks.dp == 0
            yield from self._gated("mlp.linear_fc{}.{}", f"{prefix}.mlp", _GATED, self.tp, owned, kinds)

    def replicated(self, tensor: str) -> Local:
        """A tensor that every tensor-parallel rank has all of."""
        return split(self.table, tensor, 0, 0, 1).owned(self.ranks.tp == 0 and self.ranks.dp == 0)

    def _attention(self, prefix: str) -> Iterator[tuple[str, Local]]:
        model = self.model
        owned = self.ranks.dp == 0
        for kind in ("weight", "bias") if model.qkv_bias else ("weight",):
            spans = query_groups(f"{prefix}.{{}}_proj.{kind}", model.heads, model.groups, model.head_dim)
            yield f"self_attention.linear_qkv.{kind}", stack(self.table, spans, *self.tp).owned(owned)
        yield (
            "self_attention.linear_proj.weight",
            split(self.table, f"{prefix}.o_proj.weight", 1, *self.tp).owned(owned),
        )
        if model.out_bias:
            yield "self_attention.linear_proj.bias", self.replicated(f"{prefix}.o_proj.bias")
        if model.qk_norm:
            yield "self_attention.q_layernorm.weight", self.replicated(f"{prefix}.q_norm.weight")
            yield "self_attention.k_layernorm.weight", self.replicated(f"{prefix}.k_norm.weight")

    def _experts(self, prefix: str) -> Iterator[tuple[str, Local]]:
        model = self.model
        ranks = self.ranks
        yield "mlp.router.weight", self.replicated(f"{prefix}.gate.weight")
        local_experts, remainder = divmod(model.experts, ranks.ep_size)
        if remainder:
            raise TensorMismatch(f"{model.experts} experts cannot be spread evenly over {ranks.ep_size} ranks")
        for i in range(local_experts):
            name = f"mlp.experts.linear_fc{{}}.{{}}{i}"
            expert = f"{prefix}.experts.{ranks.ep * local_experts + i}"
            yield from self._gated(name, expert, model.expert_names, ranks.expert, ranks.edp == 0)
        if model.shared_width:
            shared = f"{prefix}.shared_expert"
            yield from self._gated("mlp.shared_experts.linear_fc{}.{}", shared, _GATED, self.tp, ranks.dp == 0)
            yield "mlp.shared_experts.gate_weight", self.replicated(f"{prefix}.shared_expert_gate.weight")

    def _gated(
        self,
        name: str,
        prefix: str,
        names: tuple[str, str, str],
        cut: tuple[int, int],
        owned: bool,
        kinds: Sequence[str] = ("weight",),
    ) -> Iterator[tuple[str, Local]]:
        """A gated MLP: a rank's rows of gate and up in one parameter, its columns of down in another."""
        gate, up, down = names
        for kind in kinds:
            slices = [split(self.table, f"{prefix}.{tensor}.{kind}", 0, *cut).slices[0] for tensor in (gate, up)]
            spans = [Span(slice_.tensor, slice_.region.start[0], slice_.region.size[0]) for slice_ in slices]
            yield name.format(1, kind), stack(self.table, spans).owned(owned)
        yield name.format(2, "weight"), split(self.table, f"{prefix}.{down}.weight", 1, *cut).owned(owned)
        if "bias" in kinds:
            yield name.format(2, "bias"), self.replicated(f"{prefix}.{down}.bias")


def query_groups(tensor: str, heads: int, groups: int, head_dim: int) -> Iterator[Span]:
    """Rows of a fused query, key and value: for each group the queries that share a key, the key and the value.

    `tensor` is the name in the checkpoint, with `{}` for `q`, `k` or `v`.
    """
    queries = heads // groups * head_dim
    for group in range(groups):
        yield Span(tensor.format("q"), group * queries, queries)
        yield Span(tensor.format("k"), group * head_dim, head_dim)
        yield Span(tensor.format("v"), group * head_dim, head_dim)


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

    Args:
        config: a Hugging Face config of a Llama, Mistral, Qwen2, Qwen3, Mixtral, Qwen2-MoE or Qwen3-MoE, or a `Model`.
        ranks: the ranks of the process.
        layers: the layers of the rank, as the checkpoint counts them; by default every stage has as many.
        first: whether the rank has the embedding; by default, if it has the first layer.
        last: whether the rank has the final norm and the head; by default, if it has the last layer.
        padded_vocab: rows of the embedding on all ranks together; by default as many as there are tokens.
        table: the tensor table of the checkpoint, if not all tensors have the dtype of the config.

    Raises:
        UnsupportedTensor: the model is of another kind.
        TensorMismatch: layers, experts or the vocabulary cannot be spread over these ranks.
    """
    model = config if isinstance(config, Model) else Model.of(config)
    table = model.table if table is None else table
    if layers is None:
        each, remainder = divmod(model.layers, ranks.pp_size)
        if remainder:
            raise TensorMismatch(
                f"{model.layers} layers cannot be spread evenly over {ranks.pp_size} stages: give `layers`"
            )
        layers = range(ranks.pp * each, (ranks.pp + 1) * each)
    padded = model.vocab if padded_vocab is None else padded_vocab
    first = layers.start == 0 if first is None else first
    last = layers.stop == model.layers if last is None else last
    stage = _Stage(model, ranks, table)
    parameters: dict[str, Local] = {}
    if first:
        tensors = [EMBEDDING, HEAD] if model.tied and HEAD in table.index else [EMBEDDING]
        parameters[_EMBEDDING] = stage.embedding(tensors, padded)
    for i, layer in enumerate(layers):
        parameters |= {f"decoder.layers.{i}.{name}": local for name, local in stage.layer(layer)}
    if last:
        parameters[_FINAL_NORM] = stage.replicated(NORM)
        if not model.tied:
            parameters[_OUTPUT] = stage.embedding([HEAD], padded)
        elif not first:  # a copy of the embedding, which the first stage publishes
            parameters[_OUTPUT] = stage.embedding([EMBEDDING], padded).owned(False)
    return Layout(table, parameters)


def canonical(name: str) -> str:
    """The name that layouts have for a parameter, with any kind of layers and wrappers."""
    for pattern, replacement in _NAMES:
        name = re.sub(pattern, replacement, name)
    return name


def megatron(model: Any, config: Any, ranks: Ranks | None = None, *, table: TensorTable | None = None) -> Source:
    """The weights that this rank publishes of a Megatron-core model, in the coordinates of the Hugging Face checkpoint.

    Args:
        model: the model, or the list of its chunks if the pipeline is interleaved; wrapped or not.
        config: a Hugging Face config of a Llama, Mistral, Qwen2, Qwen3, Mixtral, Qwen2-MoE or Qwen3-MoE.
        ranks: the ranks of this process; by default Megatron-core is asked for them.
        table: the tensor table of the checkpoint, if not all tensors have the dtype of the config.

    Returns:
        A source of the parts of this rank. Every rank publishes its own, with `writers`.

    Raises:
        UnsupportedTensor: the model is of another kind; write a `Layout` for it.
        TensorMismatch: the parameters are not those of the config.

    >>> source = sparserl.sources.megatron(model, AutoConfig.from_pretrained("Qwen/Qwen3-8B"))     # doctest: +SKIP
    >>> publisher = sparserl.Publisher(url, source, writers=dist.group.WORLD)                      # doctest: +SKIP
    """
    ranks = Ranks.here() if ranks is None else ranks
    model_config = config if isinstance(config, Model) else Model.of(config)
    chunks = model if isinstance(model, Sequence) else [model]
    return joined(*(_chunk(chunk, model_config, ranks, table) for chunk in chunks))


def _chunk(chunk: Any, model: Model, ranks: Ranks, table: TensorTable | None) -> LayoutSource:
    def tensors() -> dict[str, Any]:
        return {canonical(name): tensor for name, tensor in local_tensors(chunk).items()}

    parameters = tensors()
    rows = next((parameters[name].shape[0] for name in (_EMBEDDING, _OUTPUT) if name in parameters), None)
    padded = None if rows is None else rows * ranks.tp_size
    chunk_layout = layout(
        model,
        ranks,
        layers=_layers(chunk),
        first=_EMBEDDING in parameters,
        last=_FINAL_NORM in parameters,
        padded_vocab=padded,
        table=table,
    )
    return LayoutSource(chunk_layout, tensors)


def _layers(chunk: Any) -> range:
    """The layers of a chunk, as the checkpoint counts them. Megatron-core numbers its layers from 1."""
    numbers = []
    for name, module in chunk.named_modules():
        if re.fullmatch(r"decoder\.layers\.\d+", canonical(name)):
            numbers.append(module.layer_number - 1)
    return range(numbers[0], numbers[0] + len(numbers)) if numbers else range(0)
