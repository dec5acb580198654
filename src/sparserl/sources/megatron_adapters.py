"""LoRA adapters of a Megatron-core model, as Megatron-Bridge adds them, under peft's names.

An adapted layer `linear_qkv` has parameters `linear_qkv.adapter.linear_in.weight` and `…linear_out.weight`: peft's
lora_A and lora_B. Both are parallel layers of Megatron-core, and their shapes say how ranks cut them:

    base layer              linear_in (A)                     linear_out (B)
    cut by rows, or fused   the rank r of the adapter         rows, as those of the base layer
    cut by columns          columns, as the base layer        rows
    on every rank           any of these, or not at all       rows, or not at all

peft has one adapter for each tensor of the checkpoint. So the A of a fused layer is published once for each tensor that
the layer consists of, and its B is cut up as the base layer is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ..errors import TensorMismatch, UnsupportedTensor
from ..weights.dtypes import BY_NAME
from ..weights.region import Shape
from ..weights.table import TensorSpec, TensorTable
from .adapters import CONFIG
from .layout import Layout, LayoutSource, Local, joined, split
from .megatron_core import Model, Ranks, Stage
from .megatron_families import ADAPTERS
from .megatron_map import Family, Row, fields_of
from .megatron_source import layers_of, named_modules_of, parameters_of

_PREFIX = "base_model.model."
_NAME = re.compile(r"decoder\.layers\.(\d+)\.(.+)\.adapter\.(?:(\w+)\.)?linear_(?:in|out)\.weight")


class Adapted(NamedTuple):
    """An adapter of a layer of the model.

    Attributes:
        layer: The number of the transformer layer, as the checkpoint counts.
        base: The adapted layer below it, such as `self_attention.linear_qkv`.
        key: Which of several adapters of a fused layer it is, such as `adapter_q`; empty where there is one.
        rank: The rank r.
        alpha: What its product is multiplied by, times r.
        dtype: The dtype of both matrices.
    """

    layer: int
    base: str
    key: str
    rank: int
    alpha: float
    dtype: str


class MegatronAdapterSource:
    """The adapters of one rank of a Megatron-core model. Made by `megatron_lora`."""

    def __init__(self, source: Any, config: Mapping[str, Any]) -> None:
        self._source = source
        self._config = dict(config)

    def weights(self) -> Any:
        """The parts of this rank."""
        return self._source.weights()

    def files(self) -> dict[str, bytes]:
        """The `adapter_config.json` that peft reads; a `Publisher` sends it along."""
        return {CONFIG: json.dumps(self._config, indent=2).encode()}


def megatron_lora(
    model: Any,
    config: Any,
    ranks: Ranks | None = None,
    *,
    family: Family | Mapping[str, Any] | None = None,
    group: Any = None,
) -> MegatronAdapterSource:
    """The LoRA adapters that this rank publishes of a Megatron-core model, under peft's names.

    Adapters are those of Megatron-Bridge's `LoRA` and `CanonicalLoRA`. Parameters must have been gathered when they are
    published, as they are without `overlap_param_gather`.

    Args:
        model: the model, or the list of its chunks if the pipeline is interleaved; wrapped or not.
        config: the Hugging Face config of the base model.
        ranks: the ranks of this process; by default Megatron-core is asked for them.
        family: the map of the base model's family, as for `megatron`.
        group: the process group of the stages of the pipeline, which tell one another what is adapted; by default
            Megatron-core's. All its ranks call this function.

    Returns:
        A source of the parts of this rank. Every rank publishes its own, with `writers`.

    Raises:
        UnsupportedTensor: nothing is adapted; or an adapter is one of experts, of DoRA, or outside the layers.
        TensorMismatch: an adapter has another shape than its layer asks for.

    >>> source = sparserl.sources.megatron_lora(model, AutoConfig.from_pretrained("Qwen/Qwen3-8B"))  # doctest: +SKIP
    >>> publisher = sparserl.Publisher(url, source, writers=dist.group.WORLD)                        # doctest: +SKIP
    """
    if group is None and ranks is None:
        from megatron.core import parallel_state

        group = parallel_state.get_pipeline_model_parallel_group()
    ranks = Ranks.here() if ranks is None else ranks
    if ranks.pp_size > 1 and group is None:
        raise UnsupportedTensor("give `group`, the process group of the pipeline's stages, where `ranks` are given")
    base_model = Model(config, family)
    chunks = list(model) if isinstance(model, Sequence) else [model]
    here = [_adapters(chunk, base_model) for chunk in chunks]
    everywhere = _gathered([adapted for adapters in here for adapted in adapters.values()], ranks, group)
    if not everywhere:
        raise UnsupportedTensor("no layer of the model has an adapter; publish it with sparserl.sources.megatron")
    table = TensorTable(spec for adapted in everywhere for spec in _specs(base_model, adapted))
    sources = [
        _chunk_source(chunk, base_model, adapters, ranks, table) for chunk, adapters in zip(chunks, here, strict=True)
    ]
    return MegatronAdapterSource(joined(*sources), _peft_config(config, base_model, everywhere))


def _adapters(chunk: Any, model: Model) -> dict[str, Adapted]:
    """The adapters of a chunk, by the name of their module."""
    numbers = layers_of(chunk, model)
    parameters = _parameters(chunk, model)
    modules = named_modules_of(chunk, model)
    adapters = {}
    for name, parameter in parameters.items():
        match = _NAME.fullmatch(name)
        if match is None or parameter.ndim != 2 or ".experts." in name:
            raise UnsupportedTensor(f"{name!r} is no LoRA matrix of a dense layer; such adapters cannot be published")
        layer = int(match[1]) + numbers.start
        module = name.rpartition(".linear_")[0]
        rank = parameters.get(f"{module}.linear_out.weight", parameter).shape[1]
        alpha = getattr(modules.get(module), "alpha", None)
        if alpha is None or getattr(modules[module], "dim", None) != rank:
            raise UnsupportedTensor(f"{module!r} does not say its `dim`, which should be {rank}, and its `alpha`")
        dtype = str(parameter.dtype).removeprefix("torch.")
        adapters[module] = Adapted(layer, match[2], match[3] or "", rank, float(alpha), dtype)
    return adapters


def _parameters(chunk: Any, model: Model) -> dict[str, Any]:
    """The parameters of all adapters of a chunk."""
    return {name: tensor for name, tensor in parameters_of(chunk, model).items() if ".adapter." in name}


def _gathered(adapters: list[Adapted], ranks: Ranks, group: Any) -> list[Adapted]:
    """The adapters of all stages of the pipeline, in order."""
    stages = [adapters]
    if ranks.pp_size > 1:
        import torch.distributed as dist

        stages = [[] for _ in range(dist.get_world_size(group))]
        dist.all_gather_object(stages, adapters, group=group)
    return sorted({Adapted(*adapted) for stage in stages for adapted in stage})


def _row(model: Model, adapted: Adapted) -> Row:
    """The row of the adapted layer in the map; of one of several adapters, with its own tensor alone."""
    row = dict(model.rows(adapted.layer)).get(f"{adapted.base}.weight")
    if row is None:
        raise UnsupportedTensor(f"layer {adapted.layer}: {adapted.base!r} is adapted, and not in the map of the model")
    if not adapted.key:
        return row
    suffix = ADAPTERS.get(adapted.key, adapted.key)
    tensors = {name: shape for name, shape in row.tensors.items() if name.endswith(f"{suffix}.weight")}
    if len(tensors) != 1:
        raise UnsupportedTensor(f"layer {adapted.layer}: {adapted.base!r} has no tensor for adapter {adapted.key!r}")
    return Row("rows", tensors)


def _names(model: Model, adapted: Adapted, row: Row) -> list[str]:
    """The modules of the Hugging Face model that an adapter belongs to."""
    names = {"layer": adapted.layer}
    return [model.tensor(tensor, names).removesuffix(".weight") for tensor in row.tensors]


def _specs(model: Model, adapted: Adapted) -> Iterable[TensorSpec]:
    row = _row(model, adapted)
    for module, shape in zip(_names(model, adapted, row), row.tensors.values(), strict=True):
        rows, columns = model.sizes.shape(shape, layer=adapted.layer)
        dtype = BY_NAME[adapted.dtype]
        yield TensorSpec(f"{_PREFIX}{module}.lora_A.weight", dtype, (adapted.rank, columns))
        yield TensorSpec(f"{_PREFIX}{module}.lora_B.weight", dtype, (rows, adapted.rank))


def _chunk_source(
    chunk: Any, model: Model, adapters: Mapping[str, Adapted], ranks: Ranks, table: TensorTable
) -> LayoutSource:
    shapes = {name: tuple(parameter.shape) for name, parameter in _parameters(chunk, model).items()}
    stage = Stage(_adapter_model(model), ranks, table, shapes)
    locals_: dict[str, Local] = {}
    for module, adapted in adapters.items():
        row = _row(model, adapted)
        matrices = [f"{_PREFIX}{name}.lora_" for name in _names(model, adapted, row)]
        parameter = f"{module}.linear_in.weight"
        locals_[parameter] = _cut(parameter, shapes, table, [f"{name}A.weight" for name in matrices], ranks)
        parameter = f"{module}.linear_out.weight"
        if row.cut == "segments":
            locals_[parameter] = stage.local(parameter, _rows_of_b(row, adapted.rank), {"layer": adapted.layer})
        else:
            locals_[parameter] = _cut(parameter, shapes, table, [f"{matrices[0]}B.weight"], ranks)

    def tensors() -> dict[str, Any]:
        return {name: parameter.detach() for name, parameter in _parameters(chunk, model).items()}

    chunk_layout = Layout(table, locals_)
    chunk_layout.require(tensors())
    return LayoutSource(chunk_layout, tensors)


def _cut(parameter: str, shapes: Mapping[str, Shape], table: TensorTable, tensors: list[str], ranks: Ranks) -> Local:
    """A matrix that ranks cut by rows, by columns or not at all, as its shape says; under each of its names."""
    shape = shapes[parameter]
    whole = table[table.index[tensors[0]]].shape
    if shape == whole:
        parts = [split(table, tensor, 0, 0, 1) for tensor in tensors]
        own = ranks.tp == 0
    else:
        dims = [dim for dim in (0, 1) if shape[dim] * ranks.tp_size == whole[dim] and shape[1 - dim] == whole[1 - dim]]
        if not dims:
            raise TensorMismatch(f"{parameter!r} has shape {list(shape)}, which is no part of {list(whole)}")
        parts = [split(table, tensor, dims[0], ranks.tp, ranks.tp_size) for tensor in tensors]
        own = True
    slices = tuple(slice_ for part in parts for slice_ in part.slices)
    return Local(shape, slices).owned(own and ranks.dp == 0)


def _adapter_model(model: Model) -> Model:
    """The base model under the names that peft has for it."""
    return model.renamed(replace(model.family, prefix=_PREFIX + model.family.prefix))


def _rows_of_b(row: Row, rank: int) -> Row:
    """The row of a fused layer's B: the rows of the base layer, with r columns."""

    def matrix(tensor: str) -> str:
        return tensor.removesuffix(".weight") + ".lora_B.weight"

    tensors = {matrix(name): f"{shape.split(',')[0]}, {rank}" for name, shape in row.tensors.items()}
    segments = [[replace(rows, tensor=matrix(rows.tensor)) for rows in segment] for segment in row.segments]
    return replace(row, tensors=tensors, segments=segments)


def _peft_config(config: Any, model: Model, adapters: Sequence[Adapted]) -> dict[str, Any]:
    """What peft's `LoraConfig` needs to make these adapters, and no others."""
    scales = {(adapted.rank, adapted.alpha) for adapted in adapters}
    if len(scales) > 1:
        raise UnsupportedTensor(f"adapters have different ranks and alphas: {sorted(scales)}; peft's config has one")
    ((rank, alpha),) = scales
    modules = {name for adapted in adapters for name in _names(model, adapted, _row(model, adapted))}
    linear = {spec.name.removesuffix(".weight") for spec in model.table.specs if len(spec.shape) == 2}
    short = {module.rpartition(".")[2] for module in modules}
    uniform = {module for module in linear if module.rpartition(".")[2] in short} == modules
    read = fields_of(config)
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(read("_name_or_path") or read("name_or_path") or ""),
        "r": rank,
        "lora_alpha": int(alpha) if alpha.is_integer() else alpha,
        "target_modules": sorted(short if uniform else modules),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
