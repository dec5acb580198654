"""The shards of verl's training engines as a source: each rank publishes its own, and nothing is gathered.

Names and shapes are those that verl's engines give their rollouts: the keys of the checkpoint, and one tensor for each
expert where transformers packs the experts of a layer into one parameter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from .. import sources
from ..errors import UnsupportedTensor
from ..sources.tying import tied_of
from ..weights.region import Region
from ..weights.shards import Part, Shards
from ..weights.staging import LazyBits, lazy_bits
from ..weights.table import TensorSpec, TensorTable

_FSDP = ("fsdp", "fsdp2")
_GATE_UP = ".mlp.experts.gate_up_proj"  # [experts, gate and up rows, columns]
_DOWN = ".mlp.experts.down_proj"  # [experts, rows, columns]
_HINT = "shards=False lets verl gather tensor by tensor"


class EngineShards:
    """A source with the shards that this rank publishes of a training engine.

    Args:
        engine: A training engine of verl, with FSDP or Megatron.
        dtype: The torch dtype in which parameters of FSDP are published; None for their own. Those of Megatron must
            have the dtype that the config of the checkpoint names.

    Raises:
        UnsupportedTensor: The engine is another one, or trains what is not published as it stands: adapters, or
            weights for quantization.

    Example:
        >>> source = EngineShards(worker.actor.engine, torch.bfloat16)                             # doctest: +SKIP
        >>> publisher = sparserl.Publisher(url, source, writers=torch.distributed.group.WORLD)     # doctest: +SKIP
    """

    def __init__(self, engine: Any, dtype: torch.dtype | None) -> None:
        self._engine = engine
        strategy = engine.engine_config.strategy
        module = getattr(engine.module, "_fsdp_wrapped_module", engine.module)
        if getattr(engine, "peft_cls", None) is not None or hasattr(module, "peft_config"):
            raise UnsupportedTensor(f"the actor has adapters, whose merged weights no rank has in shards: {_HINT}")
        if getattr(engine, "_qat_enabled", False):
            raise UnsupportedTensor(f"the actor trains for quantization, and publishes other tensors: {_HINT}")
        self._source: sources.Source
        if strategy == "megatron":
            self._source = sources.megatron(engine.module, engine.model_config.hf_config)
            self._is_loaded_to_publish = bool(engine.is_param_offload_enabled)
        elif strategy in _FSDP:
            packed = UnpackedExperts(sources.fsdp(engine.module, cast=dtype), engine.model_config.hf_config.model_type)
            self._source = _under_checkpoint_names(packed, module)
            self._is_loaded_to_publish = False  # shards are read where they are
        else:
            raise UnsupportedTensor(f"the actor's strategy is {strategy!r}; known are megatron, fsdp, fsdp2: {_HINT}")

    def weights(self) -> Any:
        """The parts of this rank."""
        return self._source.weights()

    @property
    def tied(self) -> Mapping[str, str]:
        """The names that `weights` left out, each with that of the same tensor."""
        return tied_of(self._source)

    @contextmanager
    def in_memory(self) -> Iterator[None]:
        """Inside it, parameters have memory: Megatron's, when they are offloaded, have none."""
        if not self._is_loaded_to_publish:
            yield
            return
        from verl.utils.device import get_device_name

        self._engine.to(get_device_name(), model=True, optimizer=False, grad=False)
        try:
            yield
        finally:
            self._engine.to("cpu", model=True, optimizer=False, grad=False)


def _under_checkpoint_names(source: UnpackedExperts, module: Any) -> sources.Source:
    """The same source under the names that verl gives its rollouts, where transformers has others."""
    from verl.utils.model import convert_weight_keys

    names = [spec.name for spec in source.weights().table.specs]
    new_names = {old: new for new, old in convert_weight_keys({name: name for name in names}, module).items()}
    rules = {old: new for old, new in new_names.items() if old != new}
    return sources.renamed(source, rules) if rules else source


class UnpackedExperts:
    """Shards, in which packed experts are cut into tensors of their own."""

    def __init__(self, source: sources.ShardedSource, model_type: str) -> None:
        self._source = source
        self._is_packed = model_type == "gpt_oss"  # whose checkpoints have packed experts

    @property
    def tied(self) -> Mapping[str, str]:
        """The names that `weights` left out, each with that of the same tensor."""
        return self._source.tied

    def weights(self) -> Shards:
        """The parts of this rank."""
        shards = self._source.weights()
        if self._is_packed or not any(_is_packed(spec) for spec in shards.table.specs):
            return shards
        specs = {spec.name: spec for spec in shards.table.specs}
        table = TensorTable(new for spec in shards.table.specs for new in _unpacked_specs(spec))
        return Shards(table, [new for part in shards.parts for new in _unpacked_parts(specs[part.tensor], part)])


def _is_packed(spec: TensorSpec) -> bool:
    return spec.name.endswith((_GATE_UP, _DOWN)) and len(spec.shape) == 3


def _row_ranges(spec: TensorSpec) -> list[tuple[str, int, int]]:
    """The tensors of an expert that a packed parameter has, and their first row and number of rows in it."""
    rows = spec.shape[1]
    if spec.name.endswith(_DOWN):
        return [("down_proj", 0, rows)]
    return [("gate_proj", 0, rows // 2), ("up_proj", rows // 2, rows // 2)]


def _name(spec: TensorSpec, expert: int, projection: str) -> str:
    return f"{spec.name.rpartition('.')[0]}.{expert}.{projection}.weight"


def _unpacked_specs(spec: TensorSpec) -> Iterator[TensorSpec]:
    if not _is_packed(spec):
        yield spec
        return
    for expert in range(spec.shape[0]):
        for projection, _, rows in _row_ranges(spec):
            yield TensorSpec(_name(spec, expert, projection), spec.dtype, (rows, spec.shape[2]))


def _unpacked_parts(spec: TensorSpec, part: Part) -> Iterator[Part]:
    """A part of a packed parameter as parts of the tensors in it."""
    if not _is_packed(spec):
        yield part
        return
    first_expert, first_row, first_column = part.region.start
    experts, count, columns = part.region.size
    for index in range(experts):
        for projection, start, rows in _row_ranges(spec):
            low = max(first_row, start)
            high = min(first_row + count, start + rows)
            if low < high:
                data = _rows(part.data, index, low - first_row, high - first_row)
                region = Region((low - start, first_column), (high - low, columns))
                yield Part(_name(spec, first_expert + index, projection), region, data)


def _rows(data: Any, index: int, low: int, high: int) -> Any:
    """Rows of one expert in a part: a view, or what is cast when it is read."""
    if isinstance(data, LazyBits):
        return lazy_bits(data.origin[index, low:high], getattr(torch, data.dtype.name))
    return data[index, low:high]
