"""The source of a rank of a Megatron-core model, which may track Megatron-core's optimizers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Any

from ..errors import UnsupportedTensor
from ..weights.table import TensorTable
from .layout import Layout, LayoutSource, Local, joined
from .megatron_bridge import MappingRegistry, ModelBridge, bridge_family
from .megatron_core import Model, Ranks, canonical, layout
from .megatron_families import EMBEDDING, FINAL_NORM, OUTPUT, family_of
from .megatron_map import Family
from .megatron_optimizer import OptimizerSteps, gathers_late, owned_ranges, within
from .modules import Source
from .tracker import Tracker, track


def megatron(
    model: Any,
    config: Any,
    ranks: Ranks | None = None,
    *,
    optimizer: Any = None,
    family: Family | Mapping[str, Any] | str | ModelBridge | MappingRegistry | None = None,
    table: TensorTable | None = None,
) -> Source:
    """The weights that this rank publishes of a Megatron-core model, in the coordinates of the Hugging Face checkpoint.

    Multi-token prediction layers that the model has are published too. Of a vision-language model the language model is
    published, and the rest if `outside` of the map has names for it.

    Args:
        model: the model, or the list of its chunks if the pipeline is interleaved; wrapped or not.
        config: the Hugging Face config of the model.
        ranks: the ranks of this process; by default Megatron-core is asked for them.
        optimizer: what `get_megatron_optimizer` returned, or an optimizer of torch: changes are found at its steps, as
            `track` does. With a distributed optimizer, each data-parallel rank publishes what its optimizer writes, so
            that a publish need not wait until parameters were gathered.
        family: the map of the model's family, or the dict of its fields; by default that for the config's `model_type`.
            `"bridge"` is Megatron-Bridge's map for the config's architecture, which is the default for other types
            where Megatron-Bridge is installed; a `MegatronModelBridge` or its registry is such a map too.
        table: the tensor table of the checkpoint, if not all tensors have the dtype of the config. Maps of
            Megatron-Bridge need it.

    Returns:
        A source of the parts of this rank. Every rank publishes its own, with `writers`.

    Raises:
        UnsupportedTensor: there is no map for this type of model; give one as `family`. Or the optimizer cannot be
            tracked.
        TensorMismatch: the parameters are not those of the config; the message names them.

    >>> config = AutoConfig.from_pretrained("Qwen/Qwen3-8B")                                       # doctest: +SKIP
    >>> source = sparserl.sources.megatron(model, config, optimizer=optimizer)                     # doctest: +SKIP
    >>> publisher = sparserl.Publisher(url, source, writers=dist.group.WORLD)                      # doctest: +SKIP
    """
    ranks = Ranks.here() if ranks is None else ranks
    chunks = list(model) if isinstance(model, Sequence) else [model]
    if not isinstance(config, Model):
        config = Model(config, _family(config, family, table), max(map(_prediction_layers, chunks)))
    if optimizer is None or hasattr(optimizer, "register_step_pre_hook"):
        source = joined(*(_chunk(chunk, config, ranks, table) for chunk in chunks))
        return source if optimizer is None else track(optimizer, source)
    return _tracked(chunks, config, ranks, table, optimizer)


def _family(config: Any, family: Any, table: TensorTable | None) -> Family | Mapping[str, Any] | None:
    """The map that was given; one made of Megatron-Bridge's, if that was given or there is no other; or None."""
    if family is None and family_of(config) is None and _has_bridge():
        family = "bridge"
    if isinstance(family, (str, ModelBridge, MappingRegistry)):
        return bridge_family(family, config, table)
    given: Family | Mapping[str, Any] | None = family
    return given


def _has_bridge() -> bool:
    return find_spec("megatron") is not None and find_spec("megatron.bridge") is not None


def _tracked(chunks: list[Any], model: Model, ranks: Ranks, table: TensorTable | None, optimizer: Any) -> Tracker:
    """A source that tracks an optimizer of Megatron-core."""
    ranges = owned_ranges(optimizer)
    sources = [_chunk(chunk, model, ranks, table) for chunk in chunks]
    for i, chunk in enumerate(chunks if ranges else ()):
        everything = _chunk_layout(chunk, model, replace(ranks, dp=0, edp=0), table)
        parameters = sources[i].layout.parameters | _owned(chunk, model, everything, ranges, gathers_late(optimizer))
        sources[i] = LayoutSource(Layout(everything.table, parameters), partial(_tensors, chunk, model))
    written = [parameter for chunk in chunks for parameter in chunk.parameters() if parameter.requires_grad]
    return track(OptimizerSteps(optimizer, written, ranges), joined(*sources))


def _owned(chunk: Any, model: Model, layout: Layout, ranges: Mapping[int, range], late: bool) -> dict[str, Local]:
    """What this rank publishes of the parameters of distributed optimizers, where that is not all or nothing."""
    owned = {}
    for name, parameter in parameters_of(chunk, model).items():
        if (elements := ranges.get(id(parameter))) is None:
            continue
        if (local := within(layout.parameters[name], elements)) is not None:
            owned[name] = local
        elif late:
            raise UnsupportedTensor(
                f"{name!r} is published by one rank, since the checkpoint has its rows in another order, but with "
                "`overlap_param_gather` no rank has all of it after a step: leave that out"
            )
    return owned


def _chunk(chunk: Any, model: Model, ranks: Ranks, table: TensorTable | None) -> LayoutSource:
    return LayoutSource(_chunk_layout(chunk, model, ranks, table), partial(_tensors, chunk, model))


def _chunk_layout(chunk: Any, model: Model, ranks: Ranks, table: TensorTable | None) -> Layout:
    parameters = parameters_of(chunk, model)
    if not parameters and ranks.pp_size == 1:
        raise UnsupportedTensor(f"the model has no parameters in {model.family.module!r}, which is published")
    rows = next((parameters[name].shape[0] for name in (EMBEDDING, OUTPUT) if name in parameters), None)
    mtp = any(name.startswith("mtp.") for name in parameters)
    chunk_layout = layout(
        model,
        ranks,
        layers=layers_of(chunk, model),
        first=EMBEDDING in parameters and not (mtp and ranks.pp),  # where MTP is, there is a copy of the embedding
        last=FINAL_NORM in parameters,
        mtp=mtp,
        padded_vocab=None if rows is None else rows * ranks.tp_size,
        table=table,
        shapes={name: tuple(tensor.shape) for name, tensor in parameters.items()},
    )
    chunk_layout.require(parameters)
    return chunk_layout


def _tensors(chunk: Any, model: Model) -> dict[str, Any]:
    return {name: tensor.detach() for name, tensor in parameters_of(chunk, model).items()}


def parameters_of(chunk: Any, model: Model) -> dict[str, Any]:
    """The parameters and persistent buffers of a chunk, by the names that layouts have for them."""
    state = chunk.state_dict(keep_vars=True).items()
    named = {canonical(name): tensor for name, tensor in state if not name.endswith("_extra_state")}
    family = model.family
    outside = {name: tensor for name, tensor in named.items() if name.startswith(tuple(family.outside))}
    others = {name: tensor for name, tensor in named.items() if name not in outside}
    inside = _of_module(others, model)
    if len(inside) < len(others):
        strangers = [name for name in others if not name.startswith(family.module + ".")]
        raise UnsupportedTensor(
            f"{strangers[:10]} are outside of {family.module!r}, which is published: say in `outside` of the family's "
            "map what their tensors are, or that they are not published (None)"
        )
    return inside | {name: tensor for name, tensor in outside.items() if family.tensor_outside(name)}


def _of_module(named: dict[str, Any], model: Model) -> dict[str, Any]:
    """What is in the module that the family publishes. It may be the chunk itself."""
    prefix = model.family.module + "."
    inside = {name.removeprefix(prefix): value for name, value in named.items() if name.startswith(prefix)}
    return inside or named


def named_modules_of(chunk: Any, model: Model) -> dict[str, Any]:
    """The modules of a chunk, by the names that layouts have for them."""
    return _of_module({canonical(name): module for name, module in chunk.named_modules()}, model)


def layers_of(chunk: Any, model: Model) -> range:
    """The layers of a chunk, as the checkpoint counts them. Megatron-core numbers its layers from 1."""
    modules = named_modules_of(chunk, model).items()
    numbers = [m.layer_number - 1 for name, m in modules if re.fullmatch(r"decoder\.layers\.\d+", name)]
    if numbers != list(range(min(numbers, default=0), max(numbers, default=-1) + 1)):
        raise UnsupportedTensor(f"the layers of a chunk must follow one another; these are numbers {numbers}")
    return range(numbers[0], numbers[0] + len(numbers)) if numbers else range(0)


def _prediction_layers(chunk: Any) -> int:
    """How many multi-token prediction layers the model has, also where they are on another stage."""
    names = (canonical(name) for name, _ in chunk.named_modules())
    here = sum(bool(re.fullmatch(r"(\w+\.)?mtp\.layers\.\d+", name)) for name in names)
    return here or int(getattr(getattr(chunk, "config", None), "mtp_num_layers", None) or 0)
