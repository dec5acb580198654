"""Layouts of Megatron-core models in the coordinates of their Hugging Face checkpoints.

Layers are spread over pipeline stages and numbered from 0 on each. What their parameters are is in the maps of
`megatron_families`. Names are those of the Transformer Engine layers or of the local ones, with or without the
`module.` of wrappers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ..errors import TensorMismatch, UnsupportedTensor
from ..weights.dtypes import BY_NAME
from ..weights.region import Region, Shape, whole
from ..weights.table import TensorSpec, TensorTable
from .layout import Layout, Local, Slice, Span, entire, split, stack
from .megatron_families import EMBEDDING, FAMILIES, LLAVA, OUTPUT, family_of
from .megatron_map import Family, GroupRows, Row, Sizes, fields_of

_NAMES = (
    (r"^(module\.)+", ""),
    (r"\.to_wrap\.", "."),
    (r"^mtp\.layers\.(\d+)\.mtp_model_layer\.", r"mtp.layers.\1.transformer_layer."),
    (r"self_attention\.linear_(q|kv)_up_proj\.layer_norm_(weight|bias)$", r"self_attention.\1_layernorm.\2"),
    (r"self_attention\.(linear_qkv|linear_q_proj|in_proj)\.layer_norm_(weight|bias)$", r"input_layernorm.\2"),
    (r"mlp\.linear_fc1\.layer_norm_(weight|bias)$", r"pre_mlp_layernorm.\1"),
    (r"mlp\.experts\.local_experts\.(\d+)\.(linear_fc[12])\.(weight|bias)$", r"mlp.experts.\2.\3\1"),
)


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
        from megatron.core import parallel_state as state

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


class Model:
    """A model of a family: its config, its rows and the tensor table of its checkpoint.

    Args:
        config: a Hugging Face config, which is an object or the dict of its JSON.
        family: the map of the family; by default that of the config's `model_type`.
        mtp: the number of multi-token prediction layers.

    Raises:
        UnsupportedTensor: there is no map for this type of model, or none of its multi-token prediction.
    """

    def __init__(self, config: Any, family: Family | Mapping[str, Any] | None = None, mtp: int = 0) -> None:
        kind = fields_of(config)("model_type")
        known = family_of(config) if family is None else Family.of(family)
        if known is None:
            raise UnsupportedTensor(
                f"no map for models of type {kind!r}; there are maps for {', '.join(sorted(FAMILIES))}, "
                f"and for {', '.join(LLAVA)} with one of these. Give the map of this family as `family`"
            )
        self.family = known
        if mtp and not self.family.mtp:
            raise UnsupportedTensor(
                f"the map for models of type {kind!r} has no multi-token prediction: no rows in `mtp`"
            )
        self.mtp = mtp
        read = fields_of(config, self.family.config)
        self.sizes = Sizes(read, self.family.sizes)
        self.dtype = str(read("dtype") or read("torch_dtype") or "bfloat16").removeprefix("torch.")
        (self.layers,) = self.sizes.shape("layers")
        self.experts: int = self.sizes("experts") or 0
        self.tied = bool(self.sizes("tied"))

    def renamed(self, family: Family) -> Model:
        """The same model, with another map."""
        model = copy(self)
        model.family = family
        model.__dict__.pop("table", None)  # that of the other names
        return model

    @cached_property
    def table(self) -> TensorTable:
        """The tensor table of the whole checkpoint."""
        return TensorTable(spec for row, names in self._all_rows() for spec in self._specs(row, names))

    def rows(self, layer: int | None = None) -> Iterator[tuple[str, Row]]:
        """The rows of a layer, which the checkpoint counts from 0, or without a layer those of all else."""
        table = self.family.model if layer is None else self.family.layer
        for name, row in table.items():
            if self.sizes(row.when, layer=layer):
                yield name, row

    def _all_rows(self) -> Iterator[tuple[Row, dict[str, Any]]]:
        for _, row in self.rows():
            yield row, {}
        for layer in range(self.layers, self.layers + self.mtp):
            for row in self.family.mtp.values():
                yield row, {"layer": layer}
        for layer in range(self.layers + self.mtp):
            for name, row in self.rows(layer):
                each_expert = "{expert}" in name and all("{expert}" in tensor for tensor in row.tensors)
                for expert in range(self.experts if each_expert else 1):
                    yield row, {"layer": layer, "expert": expert}

    def _specs(self, row: Row, names: Mapping[str, Any]) -> Iterator[TensorSpec]:
        for tensor, shape in row.tensors.items():
            dtype = BY_NAME[row.dtype or self.dtype]
            yield TensorSpec(self.tensor(tensor, names), dtype, self.sizes.shape(shape, **names))

    def names_of(self, parameter: str, table: TensorTable) -> list[str]:
        """The names of a vocabulary's rows in the checkpoint.

        It may have a tied head under its own name too, and repeat embedding and head in layers of multi-token
        prediction.
        """
        tensors = list(self.family.model[parameter].tensors)
        parameters = [parameter]
        if self.tied and parameter == EMBEDDING and OUTPUT in self.family.model:
            tensors += [head for head in self.family.model[OUTPUT].tensors if head in table.index]
            parameters.append(OUTPUT)
        repeated = [
            tensor for name in parameters if name in self.family.mtp for tensor in self.family.mtp[name].tensors
        ]
        for layer in range(self.layers, self.layers + self.mtp):
            in_layer = [self.tensor(tensor, {"layer": layer}) for tensor in repeated]
            tensors += [tensor for tensor in in_layer if tensor in table.index]
        return tensors

    def tensor(self, name: str, names: Mapping[str, Any]) -> str:
        """The name of a tensor in the checkpoint."""
        prefix = self.family.prefix if "layer" in names else ""
        return (prefix + name).format(**names)


class Stage:
    """The parameters of one rank. `shapes` are those that they have, where they are known."""

    def __init__(self, model: Model, ranks: Ranks, table: TensorTable, shapes: Mapping[str, Shape]) -> None:
        self.model = model
        self.ranks = ranks
        self.table = table
        self.shapes = shapes

    def layer(self, module: str, layer: int) -> Iterator[tuple[str, Local]]:
        """The parameters of a layer, which is this module on the rank and `layer` in the checkpoint."""
        for name, row in self.model.rows(layer):
            parameter = f"{module}.{name}"
            if "{expert}" not in name:
                yield parameter, self.local(parameter, row, {"layer": layer})
                continue
            for i, expert in enumerate(self._experts()):
                each = parameter.format(expert=i)
                yield each, self.local(each, row, {"layer": layer, "expert": expert})

    def prediction(self) -> Iterator[tuple[str, Local]]:
        """The parameters of the layers of multi-token prediction, which are all on one rank of the pipeline."""
        for number in range(self.model.mtp):
            layer = self.model.layers + number
            for name, row in self.model.family.mtp.items():
                if name not in (EMBEDDING, OUTPUT):
                    parameter = f"mtp.layers.{number}.{name}"
                    yield parameter, self.local(parameter, row, {"layer": layer})
            yield from self.layer(f"mtp.layers.{number}.transformer_layer", layer)

    def _experts(self) -> range:
        """The experts of this rank."""
        count, remainder = divmod(self.model.experts, self.ranks.ep_size)
        if remainder:
            raise TensorMismatch(
                f"{self.model.experts} experts cannot be spread evenly over {self.ranks.ep_size} ranks"
            )
        return range(self.ranks.ep * count, (self.ranks.ep + 1) * count)

    def local(self, parameter: str, row: Row, names: Mapping[str, Any]) -> Local:
        """A parameter, with slices if this rank publishes it."""
        ranks = self.ranks
        rank, size = ranks.expert if "expert" in names else (ranks.tp, ranks.tp_size)
        replica = ranks.edp if "expert" in names else ranks.dp
        tensors = [self.model.tensor(name, names) for name in row.tensors]
        cut: str = row.cut
        if cut == "duplicated":
            cut = self._cut_of(parameter, tensors[0], size)
        if cut in ("whole", "one"):
            local = entire(self.table, tensors[0]) if cut == "whole" else self._one(tensors[0], names)
            return replace(local, convert=_added(row.plus)).owned(rank == 0 and replica == 0)
        if cut in ("transposed", "interleaved"):
            local = self._transposed(cut, tensors[0], names, rank, size)
        elif cut == "segments":
            local = self._segments(row, names, rank, size)
        else:
            local = split(self.table, tensors[0], 1 if cut == "columns" else 0, rank, size)
        return local.owned(replica == 0)

    def _one(self, tensor: str, names: Mapping[str, Any]) -> Local:
        """One expert of a tensor that has all."""
        slice_ = split(self.table, tensor, 0, names["expert"], self.model.experts).slices[0]
        shape = slice_.region.size[1:]
        return Local(shape, (Slice(tensor, slice_.region, whole(shape)),))

    def _transposed(self, cut: str, tensor: str, names: Mapping[str, Any], rank: int, size: int) -> Local:
        """One expert of a tensor that has all and stores columns as rows: its columns are cut, or its fused rows."""
        region = self._one(tensor, names).slices[0].region
        dim = 1 if cut == "transposed" else len(region.size) - 1
        count, remainder = divmod(region.size[dim], size)
        if remainder:
            raise TensorMismatch(f"{tensor!r}: dimension {dim} cannot be cut into {size} equal parts")
        start = (*region.start[:dim], rank * count, *region.start[dim + 1 :])
        extent = (*region.size[:dim], count, *region.size[dim + 1 :])
        shape = extent[:0:-1]
        convert = interleaved if cut == "interleaved" else transposed
        return Local(shape, (Slice(tensor, Region(start, extent), whole(shape)),), convert)

    def _cut_of(self, parameter: str, tensor: str, size: int) -> str:
        """How a parameter is cut that may be whole on every rank: its shape says so."""
        shape = self.shapes.get(parameter, ())
        of_tensor = self.table[self.table.index[tensor]].shape if tensor in self.table.index else ()
        for cut, count, all_ranks in zip(("rows", "columns"), shape, of_tensor, strict=False):
            if size > 1 and all_ranks == count * size:
                return cut
        return "whole"

    def _segments(self, row: Row, names: Mapping[str, Any], rank: int, size: int) -> Local:
        """The rank's part of each segment, one below the other."""
        spans: list[Span] = []
        for segment in row.segments:
            part = stack(self.table, self._spans(row, segment, names), rank, size)
            spans += [Span(s.tensor, s.region.start[0], s.region.size[0]) for s in part.slices]
        return stack(self.table, spans)

    def _spans(self, row: Row, segment: Sequence[GroupRows], names: Mapping[str, Any]) -> Iterator[Span]:
        """The rows of a segment, group by group."""
        sizes = self.model.sizes
        (groups,) = sizes.shape(row.groups, **names)
        runs = []
        for rows in segment:
            tensor = self.model.tensor(rows.tensor, names)
            in_group, remainder = divmod(sizes.shape(row.tensors[rows.tensor], **names)[0], groups)
            if remainder:
                raise TensorMismatch(f"the rows of {tensor!r} cannot be divided into {groups} groups")
            start, repeat, step = (sizes(number, **names) for number in (rows.start, rows.repeat, rows.step))
            count = sizes(rows.count, **names) if rows.count else in_group
            runs += [(tensor, in_group, start + i * step, count) for i in range(repeat)]
        for group in range(groups):
            for tensor, in_group, start, count in runs:
                yield Span(tensor, group * in_group + start, count)

    def outside(self) -> Iterator[tuple[str, Local]]:
        """The parameters that are not the language model's, which are the same on every rank."""
        family = self.model.family
        for parameter in self.shapes:
            if (tensor := family.tensor_outside(parameter)) is not None:
                yield parameter, entire(self.table, tensor).owned(self.ranks.tp == 0 and self.ranks.dp == 0)

    def vocabulary(self, tensors: Sequence[str], padded: int | None) -> Local:
        """Rows of a padded vocabulary, under each name that they have in the checkpoint."""
        ranks = self.ranks
        locals_ = []
        for tensor in tensors:
            vocab = split(self.table, tensor, 0, 0, 1).shape[0]
            padding = 0 if padded is None else padded - vocab
            if padding < 0:
                raise TensorMismatch(f"an embedding of {padded} rows is too small for a vocabulary of {vocab}")
            locals_.append(stack(self.table, [Span(tensor, 0, vocab), Span(None, 0, padding)], ranks.tp, ranks.tp_size))
        slices = tuple(slice_ for local in locals_ for slice_ in local.slices)
        return Local(locals_[0].shape, slices).owned(ranks.dp == 0)


def _added(number: float) -> Callable[[Any], Any] | None:
    return (lambda tensor: tensor + number) if number else None


def transposed(tensor: Any) -> Any:
    """Rows as columns, of one expert."""
    return tensor.T[None]


def interleaved(tensor: Any) -> Any:
    """Rows of gate and up as columns that take turns."""
    rows = tensor.unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1)
    return (rows.T if rows.ndim == 2 else rows)[None]


def layout(
    config: Any,
    ranks: Ranks,
    *,
    layers: range | None = None,
    first: bool | None = None,
    last: bool | None = None,
    mtp: bool | None = None,
    padded_vocab: int | None = None,
    table: TensorTable | None = None,
    shapes: Mapping[str, Shape] | None = None,
) -> Layout:
    """The layout of one rank of a Megatron-core model.

    Args:
        config: a Hugging Face config of a family with a map, or a `Model`.
        ranks: the ranks of the process.
        layers: the layers of the rank, as the checkpoint counts them; by default every stage has as many.
        first: whether the rank has the embedding; by default, if it has the first layer.
        last: whether the rank has the final norm and the head; by default, if it has the last layer.
        mtp: whether the rank has the layers of multi-token prediction, and then an embedding; by default, if `last`.
        padded_vocab: rows of the embedding on all ranks together; by default as many as there are tokens.
        table: the tensor table of the checkpoint, if not all tensors have the dtype of the config.
        shapes: the shapes of the parameters, where the kind of layers decides how they are cut.

    Raises:
        UnsupportedTensor: there is no map for this type of model.
        TensorMismatch: layers, experts or the vocabulary cannot be spread over these ranks.
    """
    model = config if isinstance(config, Model) else Model(config)
    table = model.table if table is None else table
    if layers is None:
        each, remainder = divmod(model.layers, ranks.pp_size)
        if remainder:
            raise TensorMismatch(
                f"{model.layers} layers cannot be spread evenly over {ranks.pp_size} stages: give `layers`"
            )
        layers = range(ranks.pp * each, (ranks.pp + 1) * each)
    first = layers.start == 0 if first is None else first
    last = layers.stop == model.layers if last is None else last
    mtp = model.mtp > 0 and (last if mtp is None else mtp)
    stage = Stage(model, ranks, table, shapes or {})
    parameters: dict[str, Local] = {}
    for name, row in model.rows():
        if first if name.startswith("embedding.") else last:
            tensors = model.names_of(name, table) if row.cut == "vocabulary" else []
            parameters[name] = stage.vocabulary(tensors, padded_vocab) if tensors else stage.local(name, row, {})
    # Copies of the embedding, which the first stage publishes.
    has_head = last and model.tied and (not mtp or OUTPUT in stage.shapes)
    for name in () if first else [EMBEDDING] * mtp + [OUTPUT] * has_head:
        parameters[name] = stage.vocabulary(model.names_of(EMBEDDING, table), padded_vocab).owned(False)
    for number, layer in enumerate(layers):
        parameters.update(stage.layer(f"decoder.layers.{number}", layer))
    if mtp:
        parameters.update(stage.prediction())
    parameters.update(stage.outside())
    return Layout(table, parameters)


def canonical(name: str) -> str:
    """The name that layouts have for a parameter, with any kind of layers and wrappers."""
    for pattern, replacement in _NAMES:
        name = re.sub(pattern, replacement, name)
    return name
