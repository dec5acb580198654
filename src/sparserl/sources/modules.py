"""The protocol of a source, and torch modules as sources."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from ..errors import UnsupportedTensor
from ..weights.memory import Weights
from ..weights.shards import Shards


@runtime_checkable
class Source(Protocol):
    """Anything that has weights. It is asked for them at every publish, since they may have moved meanwhile."""

    def weights(self) -> Weights | Shards:
        """All weights under their checkpoint names; of a sharded trainer, the parts that this process has."""
        ...


def weights_of(source: Source | Weights | Shards) -> Weights | Shards:
    """The weights of a source as they are now; weights are returned as they are."""
    return source.weights() if isinstance(source, Source) else source


class ModuleSource:
    """The parameters and persistent buffers of a torch module, without a copy. Made by `module`."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def weights(self) -> Weights:
        """All tensors of the module's `state_dict`."""
        items = self._module.state_dict(keep_vars=True).items()
        return {name: tensor.detach() if hasattr(tensor, "detach") else tensor for name, tensor in items}


def module(module: Any) -> ModuleSource:
    """The weights of a torch module: everything in its `state_dict`, buffers included.

    Tied weights appear under every name that they have there.

    Args:
        module: a `torch.nn.Module`.

    Returns:
        A source that reads the module at every publish.

    Raises:
        UnsupportedTensor: the object has no `state_dict`.

    >>> import torch, sparserl
    >>> source = sparserl.sources.module(torch.nn.Linear(2, 3))
    >>> {name: tuple(tensor.shape) for name, tensor in source.weights().items()}
    {'weight': (3, 2), 'bias': (3,)}
    """
    if not callable(getattr(module, "state_dict", None)):
        raise UnsupportedTensor(f"expected a torch module, got {type(module).__name__}")
    return ModuleSource(module)
