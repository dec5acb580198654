"""Where a trainer's weights come from."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from ..errors import UnsupportedTensor
from ..weights.memory import Weights
from ..weights.shards import Shards


@runtime_checkable
class Source(Protocol):
    """Anything that has weights, and says so anew whenever it is asked: they may have moved meanwhile."""

    def weights(self) -> Weights | Shards:
        """All weights under their checkpoint names; of a sharded trainer, the parts that this process has."""
        ...


def weights_of(source: Source | Weights | Shards) -> Weights | Shards:
    """What a source has now; weights are what they are."""
    return source.weights() if isinstance(source, Source) else source


class ModuleSource:
    """The parameters and persistent buffers of a torch module, where they are."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def weights(self) -> Weights:
        found = self._module.state_dict(keep_vars=True).items()
        return {name: tensor.detach() if hasattr(tensor, "detach") else tensor for name, tensor in found}


def module(module: Any) -> ModuleSource:
    """The weights of a torch module: all that its `state_dict` has, so that buffers count too.

    Tied weights appear under every name they have, as they do in the state_dict.
    """
    if not callable(getattr(module, "state_dict", None)):
        raise UnsupportedTensor(f"expected a torch module, got {type(module).__name__}")
    return ModuleSource(module)
