"""Tensors that a model keeps beside its parameters and buffers, wherever its objects have them."""

from __future__ import annotations

import contextlib
import functools
import types
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch

_DEEPEST = 6  # steps from a module; an MoE kernel of vLLM has its biases five steps away
_PLAIN = (str, bytes, int, float, complex, type(None), type, types.ModuleType, torch.dtype, torch.device)


def attribute_tensors(model: torch.nn.Module, live: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors in the attributes of modules that are neither parameters nor buffers nor views of these.

    Attributes of attributes, items of containers and what functions have closed over are searched, too.

    Args:
        model: the model.
        live: its parameters and buffers.

    Example:
        >>> model = torch.nn.Linear(2, 2)
        >>> model.kernel = {"doubled": [model.weight.data * 2, model.weight.data.t()]}
        >>> [*attribute_tensors(model, dict(model.named_parameters()))]
        ['.kernel.doubled.0']
    """
    addresses = {tensor.untyped_storage().data_ptr() for tensor in live.values()}
    visited: dict[int, Any] = {}  # objects are kept, so that no other has their id
    tensors: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        for label, tensor in _reachable(name, module, visited):
            if tensor.numel() and not tensor.is_meta and tensor.untyped_storage().data_ptr() not in addresses:
                tensors[label] = tensor.detach()
    return tensors


def _reachable(label: str, module: torch.nn.Module, visited: dict[int, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors that can be reached from a module without going through other modules, nearest first."""
    queue = deque((f"{label}.{name}", value, 1) for name, value in vars(module).items())
    while queue:
        path, value, depth = queue.popleft()
        if isinstance(value, torch.Tensor):
            if _has_memory(value):
                yield path, value
        elif not isinstance(value, (torch.nn.Module, *_PLAIN)) and id(value) not in visited and depth < _DEEPEST:
            visited[id(value)] = value
            queue.extend((f"{path}.{name}", part, depth + 1) for name, part in _parts(value))


def _parts(value: Any) -> Iterator[tuple[Any, Any]]:
    """What an object refers to, by names."""
    if isinstance(value, Mapping):
        yield from [*value.items()]
    elif isinstance(value, (list, tuple, set, frozenset, deque)):
        yield from enumerate([*value])
    elif isinstance(value, types.FunctionType):
        for index, cell in enumerate(value.__closure__ or ()):
            with contextlib.suppress(ValueError):  # an empty cell
                yield index, cell.cell_contents
    elif isinstance(value, types.MethodType):
        yield "self", value.__self__
    elif isinstance(value, functools.partial):
        yield from enumerate((value.func, *value.args))
        yield from value.keywords.items()
    yield from [*getattr(value, "__dict__", {}).items()]


def _has_memory(tensor: torch.Tensor) -> bool:
    with contextlib.suppress(RuntimeError, NotImplementedError):  # sparse tensors, and others without a storage
        tensor.untyped_storage()
        return True
    return False
