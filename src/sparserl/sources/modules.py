"""The protocol of a source; torch modules, and functions that return weights, as sources."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from ..errors import UnsupportedTensor, WeightsError
from ..weights.memory import Weights
from ..weights.shards import Shards
from ..weights.staging import lazy_bits
from ..weights.table import TensorTable
from .casting import Cast, buffers_among, cast_of
from .flat_shards import refuse_flat_shards
from .master_sample import ParameterState, state_of
from .tying import named_as_in, shared_names, tied_of


@runtime_checkable
class Source(Protocol):
    """Anything that has weights. It is asked for them at every publish, since they may have moved meanwhile.

    A source may also have a method `files`, which returns the small files that a checkpoint needs beside its weights,
    by name: `config.json`, say. After a call of `weights`, `tied` may have the names that it left out, each with that
    of the same tensor, and `buffers` the names of tensors that are not to be cast.
    """

    def weights(self) -> Weights | Shards:
        """All weights under their checkpoint names; of a sharded trainer, the parts that this process has."""
        ...


if TYPE_CHECKING:
    import torch

    PublishedSource = torch.nn.Module | Source | Weights | Shards | Callable[[], Weights | Shards]
else:
    PublishedSource = Source | Weights | Shards | Callable[[], Weights | Shards]


def weights_of(source: Source | Weights | Shards, table: TensorTable | None = None) -> Weights | Shards:
    """The weights of a source as they are now; weights are returned as they are.

    Args:
        source: The source, or weights.
        table: The table of a run that they belong to, which may have further names for tied tensors.

    Raises:
        WeightsError: There are none.
    """
    weights = source.weights() if isinstance(source, Source) else source
    if isinstance(weights, Mapping) and not weights:
        raise WeightsError("the source has no tensors")
    return weights if table is None else named_as_in(weights, tied_of(source), table)


def files_of(source: Any) -> dict[str, bytes]:
    """The files that a source brings along; none for most."""
    files = getattr(source, "files", None)
    return dict(files()) if isinstance(source, Source) and callable(files) else {}


def as_source(source: Any) -> Source | Weights | Shards:
    """A source of what a user gives: a torch module, a mapping, a function that returns one, or a source as it is.

    Raises:
        WeightsError: It is none of these, or has no tensors.
    """
    if isinstance(source, Mapping):
        if not source:
            raise WeightsError("source is an empty mapping; it must hold at least one tensor")
        return source
    if isinstance(source, Shards):
        if not source.table.specs:
            raise WeightsError("source has an empty tensor table; it must name at least one tensor")
        return source
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(source, torch.nn.Module):
        return ModuleSource(source, None)
    if isinstance(source, Source) and callable(source.weights):
        return source
    if callable(source):
        return FunctionSource(source)
    raise WeightsError(
        f"source is of type {type(source).__name__}; it must be a torch module, a mapping of tensors, a function that "
        "returns one, or an object with a weights() method, such as sparserl.sources.module(model)"
    )


class FunctionSource:
    """A function that returns weights, as a source: it is called at every publish."""

    def __init__(self, function: Callable[[], Weights | Shards]) -> None:
        self._function = function

    def weights(self) -> Weights | Shards:
        """What the function returns."""
        weights = self._function()
        if not isinstance(weights, Mapping | Shards):
            raise WeightsError(f"source returned a {type(weights).__name__}; it must return a mapping of tensors")
        return weights


class ModuleSource:
    """The parameters and persistent buffers of a torch module, without a copy. Made by `module`.

    Attributes:
        tied: The names that `weights` left out, each with that of the same tensor.
        buffers: The names of buffers, which are not cast.
    """

    def __init__(self, module: Any, cast: Cast | None) -> None:
        self._module = _unwrapped(module)
        self._cast = cast
        self.tied: Mapping[str, str] = {}
        self.buffers: frozenset[str] = frozenset()

    def weights(self) -> Weights:
        """All tensors of the module's `state_dict`, each under one name.

        Raises:
            UnsupportedTensor: The module has no whole tensors, since FSDP1 or ZeRO-3 has sharded it.
        """
        weights = self.all_weights()
        return {name: tensor for name, tensor in weights.items() if name not in self.tied}

    def all_weights(self) -> Weights:
        """The same, in which tied tensors have all of their names."""
        refuse_flat_shards(self._module)
        tensors = self._module.state_dict(keep_vars=True)
        self.tied = shared_names(self._module, tensors)
        self.buffers = buffers_among(self._module, tensors)
        return {name: self._published(name, value) for name, value in tensors.items()}

    def training_state(self) -> list[ParameterState]:
        """The parameters, with their gradients."""
        return [state_of(parameter) for parameter in self._module.parameters()]

    def published_as(self, cast: Cast | None) -> ModuleSource:
        """The same module, published in other dtypes."""
        return ModuleSource(self._module, cast)

    def files(self) -> dict[str, bytes]:
        """For a transformers model, its config and its generation config; for other modules nothing."""
        config: Any = getattr(self._module, "config", None)
        if not callable(getattr(config, "to_json_string", None)):
            return {}
        config = copy.deepcopy(config)
        config.architectures = [type(self._module).__name__]
        config.dtype = self._published_dtype() or getattr(config, "dtype", None)
        files = {"config.json": config.to_json_string().encode()}
        generation: Any = getattr(self._module, "generation_config", None)
        if callable(getattr(generation, "to_json_string", None)):
            files["generation_config.json"] = generation.to_json_string().encode()
        return files

    def _published_dtype(self) -> Any:
        """The dtype in which the first floating-point parameter is published."""
        for name, parameter in self._module.named_parameters():
            if parameter.dtype.is_floating_point:
                return (None if self._cast is None else self._cast(name, parameter.dtype)) or parameter.dtype
        return None

    def _published(self, name: str, value: Any) -> Any:
        if not hasattr(value, "detach"):
            return value
        tensor = value.detach()
        dtype = None if self._cast is None or name in self.buffers else self._cast(name, tensor.dtype)
        return tensor if dtype is None else lazy_bits(tensor, dtype)


def _unwrapped(module: Any) -> Any:
    """The module inside `torch.compile` and DistributedDataParallel, which put prefixes before all names."""
    torch = sys.modules.get("torch")
    if torch is None:
        return module
    while True:
        if isinstance(module, torch.nn.parallel.DistributedDataParallel):
            module = module.module
        elif isinstance(getattr(module, "_orig_mod", None), torch.nn.Module):
            module = module._orig_mod  # noqa: SLF001  # torch has no other name for it
        else:
            return module


def module(module: Any, *, cast: Any = None) -> ModuleSource:
    """The weights of a torch module: everything in its `state_dict`, buffers included.

    Names are those of the module inside `torch.compile` and DistributedDataParallel. A tied tensor is published once,
    under the name that `save_pretrained` keeps, or else the first; a run that has more of its names keeps them. A
    transformers model brings its config and its generation config along.

    Args:
        module: A `torch.nn.Module`.
        cast: The dtype to publish in, if the trainer keeps wider weights than its engines: `torch.bfloat16` for all
            floating-point parameters that are wider, or a function from a name to a dtype, or to None for a parameter
            that is published as it is. Buffers are never cast. A tensor is cast piece by piece while it is compared,
            not copied as a whole; fp32 on a GPU, with the baseline there, by the kernels that compare it with bf16.

    Returns:
        A source that reads the module at every publish.

    Raises:
        UnsupportedTensor: The object has no `state_dict`, or `cast` is no dtype.

    >>> import torch, sparserl
    >>> source = sparserl.sources.module(torch.nn.Linear(2, 3), cast=torch.bfloat16)
    >>> {name: (tuple(tensor.shape), str(tensor.dtype)) for name, tensor in source.weights().items()}
    {'weight': ((3, 2), 'bfloat16'), 'bias': ((3,), 'bfloat16')}
    """
    if not callable(getattr(module, "state_dict", None)):
        raise UnsupportedTensor(f"expected a torch module, got {type(module).__name__}")
    return ModuleSource(module, cast_of(cast))
