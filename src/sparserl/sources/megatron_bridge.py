"""The maps of Megatron-Bridge, read as maps of this library.

A registry of Megatron-Bridge says which parameters are which tensors, and what kind each mapping is. It has no shapes:
those, and which layers have a tensor, are in the tensor table of the checkpoint. How ranks cut a parameter that is one
tensor is seen from its shape. Only names and kinds are read: nothing of Megatron-Bridge runs when weights are
published.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

from ..errors import TensorMismatch, UnsupportedTensor
from ..weights.region import Shape
from ..weights.table import TensorTable
from .megatron_core import canonical
from .megatron_families import EMBEDDING, OUTPUT
from .megatron_map import Cut, Family, GroupRows, Row, Sizes, fields_of

_SIZES = {
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "groups": "num_key_value_heads or heads",
}
# What bridges do to tensors after their mappings. The hooks of these leave values alone: they add buffers that are no
# parameters, or put experts into one tensor, which rows do too.
_HOOK = "maybe_modify_converted_hf_weight"
_KNOWN_HOOKS = [
    f"{bridge}.{_HOOK}" for bridge in ("MegatronModelBridge", "LlamaBridge", "DeepSeekV3Bridge", "GPTOSSBridge")
]


@runtime_checkable
class MappingRegistry(Protocol):
    """Megatron-Bridge's `MegatronMappingRegistry`."""

    def __iter__(self) -> Iterator[Any]: ...

    def megatron_to_hf_lookup(self, megatron_param_name: str) -> Any: ...


@runtime_checkable
class ModelBridge(Protocol):
    """Megatron-Bridge's `MegatronModelBridge`."""

    def mapping_registry(self) -> MappingRegistry: ...


def bridge_family(bridge: str | ModelBridge | MappingRegistry, config: Any, table: TensorTable | None) -> Family:
    """The map of a family, made of Megatron-Bridge's.

    Args:
        bridge: a `MegatronModelBridge` or its registry; or `"bridge"`, for the one of the config's architecture.
        config: the Hugging Face config of the model.
        table: the tensor table of the checkpoint.

    Returns:
        The map. It is for this checkpoint: its shapes are numbers.

    Raises:
        UnsupportedTensor: Megatron-Bridge has no map for the architecture, or one with a mapping of a kind that a `Row`
            cannot be; the message names it.
        TensorMismatch: there is no table, or the map and the table differ.

    >>> table = sparserl.tensor_table(sparserl.sources.open_checkpoint("gemma-2b/"))               # doctest: +SKIP
    >>> source = sparserl.sources.megatron(model, config, family="bridge", table=table)            # doctest: +SKIP
    """
    if table is None:
        raise TensorMismatch(
            f"models of type {fields_of(config)('model_type')!r} have the map of Megatron-Bridge, which has no shapes: "
            "give the tensor table of the checkpoint as `table`, for example "
            "`sparserl.tensor_table(sparserl.sources.open_checkpoint(path))`"
        )
    return _Registry(_mappings(bridge, config), config, table).family()


def _mappings(bridge: str | ModelBridge | MappingRegistry, config: Any) -> list[Any]:
    """The mappings of a registry, of a bridge, or of the bridge for a config."""
    if isinstance(bridge, str):
        bridge = _installed_bridge(bridge, config)
    if not isinstance(bridge, ModelBridge):
        return list(bridge)
    hook = getattr(getattr(type(bridge), _HOOK, None), "__qualname__", None)
    if hook is not None and hook not in _KNOWN_HOOKS:
        raise UnsupportedTensor(
            f"{hook} of Megatron-Bridge changes tensors in a way that is not known: give a `Family`"
        )
    return list(bridge.mapping_registry())


def _installed_bridge(name: str, config: Any) -> Any:
    if name != "bridge":
        raise UnsupportedTensor(f"there is no map {name!r}; `family` is a map, or 'bridge' for that of Megatron-Bridge")
    kind = fields_of(config)("model_type")
    architectures = fields_of(config)("architectures") or []
    if not architectures:
        raise UnsupportedTensor("the config names no architecture (`architectures`), by which Megatron-Bridge has maps")
    try:
        from megatron.bridge import AutoBridge
        from megatron.bridge.models.conversion.model_bridge import get_model_bridge
    except ImportError as error:
        raise UnsupportedTensor(f"the map of Megatron-Bridge for {kind!r} cannot be read: {error}") from error
    for architecture in architectures:
        if architecture in AutoBridge.list_supported_models():
            bridge = get_model_bridge(architecture)
            bridge.hf_config = config
            return bridge
    raise UnsupportedTensor(f"Megatron-Bridge has no map for {', '.join(architectures)}: give one as `family`")


@dataclass(frozen=True)
class _Tensors:
    """The tensors of one parameter: names with `{layer}` and `{expert}`, by the word that the mapping has for each."""

    parameter: str
    names: Mapping[str, str]
    shapes: Mapping[str, Shape]
    when: str
    sizes: Sizes

    def row(self, cut: Cut, **options: Any) -> Row:
        shapes = {name: ", ".join(map(str, self.shapes[word])) for word, name in self.names.items()}
        return Row(cut, shapes, self.when, **options)

    def one(self) -> Row:
        """One tensor, cut as the parameter's shape says."""
        return self.row("duplicated")

    def replicated(self) -> Row:
        return self.row("whole")

    def query_key_value(self) -> Row:
        """For each group the queries that share a key, the key and the value."""
        query, key, value = (self.shapes[word][0] for word in ("q", "k", "v"))
        heads, groups = self.sizes.shape("heads, groups")
        if key != value or query * groups != key * heads or key % groups:
            raise UnsupportedTensor(
                f"{self.parameter!r}: {query}, {key} and {value} rows are not those of {heads} queries, and of keys "
                f"and values for {groups} groups of them"
            )
        group = [GroupRows(self.names[word]) for word in ("q", "k", "v")]
        return self.row("segments", groups="groups", segments=[group])

    def gated(self) -> Row:
        """A rank's rows of gate, then its rows of up."""
        return self.row("segments", segments=[[GroupRows(self.names[word])] for word in ("gate", "up")])

    def down_of_experts(self) -> Row:
        """One expert of a tensor that has all, and columns as rows."""
        return self.row("transposed" if len(self.shapes[""]) == 3 else "one")

    def gate_up_of_experts(self) -> Row:
        """The same, among which gate and up take turns."""
        return self.row("interleaved")


_KINDS: dict[str, Callable[[_Tensors], Row]] = {
    "AutoMapping": _Tensors.one,
    "ColumnParallelMapping": _Tensors.one,
    "RowParallelMapping": _Tensors.one,
    "ReplicatedMapping": _Tensors.replicated,
    "QKVMapping": _Tensors.query_key_value,
    "GatedMLPMapping": _Tensors.gated,
    "GPTOSSMLPDownProjMapping": _Tensors.down_of_experts,
    "GPTOSSMLPGateUpProjMapping": _Tensors.gate_up_of_experts,
}


class _Registry:
    """Mappings, and the checkpoint that they are read for."""

    def __init__(self, mappings: list[Any], config: Any, table: TensorTable) -> None:
        self.mappings = mappings
        self.table = table
        self.part = "text_config" if fields_of(config)("text_config") is not None else ""
        read = fields_of(config, self.part)
        self.sizes = Sizes(read, _SIZES)
        (self.layers,) = self.sizes.shape("layers")
        self.tied = bool(read("tie_word_embeddings"))
        self.module = self._module()
        self.experts = 0
        self.named: set[str] = set()  # tensors that some row has

    def family(self) -> Family:
        """The map; every tensor of the table is in it."""
        layer: dict[str, Row] = {}
        model: dict[str, Row] = {}
        outside: dict[str, str | None] = {}
        for mapping in self.mappings:
            if not mapping.megatron_param.startswith(self.module):
                outside |= self._outside(mapping)
                continue
            parameter = mapping.megatron_param.removeprefix(self.module)
            in_layer = parameter.startswith("decoder.layers.*.")
            for name, row in self._rows(mapping, parameter, in_layer):
                rows = layer if in_layer else model
                if rows.setdefault(name, row) != row:
                    raise UnsupportedTensor(f"Megatron-Bridge has two mappings for {parameter!r} that differ")
        unknown = [spec.name for spec in self.table.specs if spec.name not in self.named]
        if unknown:
            raise TensorMismatch(
                f"the map of Megatron-Bridge has no parameter for {_some(unknown)}: leave out of `table` what is not "
                "trained, or give a `Family`"
            )
        tied = self.tied or OUTPUT not in model
        sizes = _SIZES | {"experts": str(self.experts), "tied": str(int(tied))}
        return Family(layer, model, sizes, "", module=self.module[:-1], config=self.part, outside=outside)

    def _module(self) -> str:
        """The beginning of the names of the language model's parameters."""
        for mapping in self.mappings:
            if mapping.megatron_param.endswith(EMBEDDING):
                return str(mapping.megatron_param).removesuffix(EMBEDDING)
        raise UnsupportedTensor(f"this map of Megatron-Bridge is not that of a language model: it has no {EMBEDDING!r}")

    def _rows(self, mapping: Any, parameter: str, in_layer: bool) -> Iterator[tuple[str, Row]]:
        """The row of a mapping, if the checkpoint has its tensors."""
        names = {word: _template(name, in_layer) for word, name in _words(mapping)}
        tensors = self._tensors(parameter, names, in_layer)
        if tensors is None:
            return
        kind = type(mapping).__name__
        is_row = in_layer or not parameter.startswith(("decoder.layers.", "mtp."))
        if kind not in _KINDS or getattr(mapping, "permute_dims", None) or "**" in parameter or not is_row:
            raise UnsupportedTensor(
                f"Megatron-Bridge has a {kind} for {parameter!r}, which no `Row` can be: give a `Family`"
            )
        name = canonical(parameter.replace("*", "0")).removeprefix("decoder.layers.0.")
        if "*" in parameter.removeprefix("decoder.layers.*."):
            name = re.sub(r"0$", "{expert}", name)
            for word, tensor in names.items():
                if "{expert}" not in tensor:
                    self._set_experts(tensor, tensors.shapes[word][0])
        if name in (EMBEDDING, OUTPUT):
            yield name, replace(tensors.row("vocabulary"), when="not tied" if name == OUTPUT else "1")
        else:
            yield name, _KINDS[kind](tensors)

    def _tensors(self, parameter: str, names: Mapping[str, str], in_layer: bool) -> _Tensors | None:
        """The tensors of a parameter with their shapes, and the layers that have them; None if there are none."""
        layers: list[int] = []
        shapes: dict[str, Shape] = {}
        for layer in range(self.layers if in_layer else 1):
            here = {word: self._shape(name, layer) for word, name in names.items()}
            if all(shape is None for shape in here.values()):
                continue
            for word, shape in here.items():
                if shape is None or shapes.setdefault(word, shape) != shape:
                    tensor = names[word].format(layer=layer, expert=0)
                    wrong = "is not in the table" if shape is None else f"has another shape in layer {layers[0]}"
                    raise TensorMismatch(f"{tensor!r}, of which {parameter!r} consists, {wrong}")
            layers.append(layer)
        if not layers:
            return None
        everywhere = not in_layer or len(layers) == self.layers
        when = "1" if everywhere else f"layer in {layers}"
        return _Tensors(parameter, names, shapes, when, self.sizes)

    def _shape(self, name: str, layer: int) -> Shape | None:
        """The shape of a tensor in a layer, which all experts share; None if the checkpoint does not have it."""
        numbers = range(self.experts or len(self.table.specs)) if "{expert}" in name else range(1)
        shapes = []
        for number in numbers:
            tensor = name.format(layer=layer, expert=number)
            if tensor not in self.table.index:
                break
            self.named.add(tensor)
            shapes.append(self.table[self.table.index[tensor]].shape)
        if not shapes:
            return None
        if "{expert}" in name:
            self._set_experts(name, len(shapes))
        if len(set(shapes)) > 1:
            raise TensorMismatch(f"the experts of {name.format(layer=layer, expert='*')!r} have different shapes")
        return shapes[0]

    def _set_experts(self, tensor: str, count: int) -> None:
        """The number of experts, which all tensors must agree on."""
        self.experts = self.experts or count
        if count != self.experts:
            raise TensorMismatch(f"{tensor!r} is of {count} experts, others of {self.experts}")

    def _outside(self, mapping: Any) -> dict[str, str | None]:
        """Parameters that are not the language model's: they are published if the table has their tensors."""
        parameter: str = mapping.megatron_param
        patterns = [_pattern(name) for _, name in _words(mapping)]
        tensors = [spec.name for spec in self.table.specs if any(p.fullmatch(spec.name) for p in patterns)]
        if not tensors:
            return {parameter.partition("*")[0]: None}
        kind = type(mapping).__name__
        name = mapping.hf_param
        simple = kind in ("ReplicatedMapping", "AutoMapping") and not getattr(mapping, "permute_dims", None)
        beginning = parameter.removesuffix("**")
        if not simple or "*" in beginning + name.removesuffix("**") or beginning.endswith(".") != name.endswith("**"):
            raise UnsupportedTensor(
                f"Megatron-Bridge has a {kind} for {parameter!r}, which no `Family` can be outside of the language "
                f"model: leave {_some(tensors)} out of `table`, then these are not published"
            )
        self.named.update(tensors)
        return {beginning: name.removesuffix("**")}


def _words(mapping: Any) -> list[tuple[str, str]]:
    """The tensors of a mapping, by the word that it has for each, such as "q" or "gate"."""
    names = mapping.hf_param
    return [("", names)] if isinstance(names, str) else list(names.items())


def _template(name: str, in_layer: bool) -> str:
    """The name of a tensor, with `{layer}` and `{expert}` for the stars of Megatron-Bridge."""
    for number in ("{layer}", "{expert}") if in_layer else ():
        name = name.replace("*", number, 1)
    return name


def _pattern(name: str) -> re.Pattern[str]:
    return re.compile(re.escape(name).replace(r"\*\*", ".*").replace(r"\*", r"\d+"))


def _some(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(map(repr, names[:4])) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
