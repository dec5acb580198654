"""Tensors and numbers that a model keeps beside its parameters and buffers, wherever its objects have them."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

_DEEPEST = 6  # steps from a module; an MoE kernel of vLLM has its biases five steps away
_PLAIN = (str, bytes, int, float, complex, type(None), type, types.ModuleType, torch.dtype, torch.device)
_LEAVES = (torch.Tensor, np.ndarray, np.generic, *_PLAIN)
_NUMBERS = (bool, float, complex, np.bool_, np.inexact)  # other whole numbers are counters and sizes
_METHODS = (types.MethodType, types.BuiltinMethodType, types.MethodWrapperType)
Types = tuple[type, ...]


def attribute_tensors(
    model: torch.nn.Module, live: Mapping[str, torch.Tensor], apart: Types = ()
) -> dict[str, torch.Tensor]:
    """Tensors in the attributes of modules that are neither parameters nor buffers nor views of these.

    Attributes of attributes, items of containers and what functions have closed over are searched, too.

    Args:
        model: the model.
        live: its parameters and buffers.
        apart: types of objects that belong to the engine rather than to the model; they are not searched.

    Example:
        >>> model = torch.nn.Linear(2, 2)
        >>> model.kernel = {"doubled": [model.weight.data * 2, model.weight.data.t()]}
        >>> [*attribute_tensors(model, dict(model.named_parameters()))]
        ['.kernel.doubled.0']
    """
    addresses = {tensor.untyped_storage().data_ptr() for tensor in live.values()}
    tensors = {}
    for label, value in _reachable(model, apart):
        if not isinstance(value, torch.Tensor) or not _has_memory(value) or not value.numel() or value.is_meta:
            continue
        if value.untyped_storage().data_ptr() not in addresses:
            tensors[label] = value.detach()
    return tensors


def attribute_values(model: torch.nn.Module, apart: Types = ()) -> dict[str, object]:
    """Numbers in the attributes of modules: those that may be of weights, and what stands for the bits of arrays.

    They are searched for as tensors are. Whole numbers are left out, and arrays that are views of weights.

    Example:
        >>> model = torch.nn.Linear(2, 2)
        >>> model.scales = {"k": 0.5, "heads": 8}
        >>> {name: value for name, value in attribute_values(model).items() if "scales" in name}
        {'.scales.k': 0.5}
    """
    memory = [
        (tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes())
        for tensor in (*model.parameters(), *model.buffers())
        if tensor.device.type == "cpu" and _has_memory(tensor)
    ]
    values: dict[str, object] = {}
    for label, value in _reachable(model, apart):
        if isinstance(value, _NUMBERS):
            values[label] = value
        elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
            address = value.__array_interface__["data"][0]
            if not any(first <= address < first + nbytes for first, nbytes in memory):
                bits = hashlib.blake2b(value.tobytes()).hexdigest()
                values[label] = value.dtype.str, value.shape, bits
    return values


def changed_values(before: Mapping[str, object], after: Mapping[str, object]) -> list[str]:
    """The numbers that are there before and after, and are not the same."""
    return [name for name, value in after.items() if name in before and repr(before[name]) != repr(value)]


def attribute_objects(model: torch.nn.Module, apart: Types = ()) -> Iterator[Any]:
    """Objects that the modules of a model refer to, and containers, each once: all in which tensors are searched."""
    return (value for _, value in _reachable(model, apart) if not isinstance(value, _LEAVES))


def _reachable(model: torch.nn.Module, apart: Types) -> Iterator[tuple[str, Any]]:
    """What can be reached from modules without going through others of the model, nearest first; objects once."""
    visited: dict[int, Any] = {id(module): module for module in model.modules()}  # kept, so that no other has their id
    queue = deque(
        (f"{label}.{name}", value, 1) for label, module in model.named_modules() for name, value in vars(module).items()
    )
    while queue:
        path, value, depth = queue.popleft()
        if isinstance(value, _LEAVES):
            yield path, value
        elif depth < _DEEPEST and not isinstance(value, apart) and id(value) not in visited:
            visited[id(value)] = value
            yield path, value
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
        yield from ((f"defaults.{index}", default) for index, default in enumerate(value.__defaults__ or ()))
        yield from (value.__kwdefaults__ or {}).items()
    elif isinstance(value, _METHODS):
        yield "self", value.__self__
    elif isinstance(value, functools.partial):
        yield from enumerate((value.func, *value.args))
        yield from value.keywords.items()
    yield from [*getattr(value, "__dict__", {}).items()]
    for name, slot in slots_of(value):
        with contextlib.suppress(AttributeError):  # an empty slot
            yield name, slot.__get__(value)


def slots_of(value: Any) -> Iterable[tuple[str, types.MemberDescriptorType]]:
    """The slots of an object, by the names that its classes give them."""
    for owner in type(value).__mro__:
        if "__slots__" in vars(owner):
            for name, slot in vars(owner).items():
                if isinstance(slot, types.MemberDescriptorType):
                    yield name, slot


def _has_memory(tensor: torch.Tensor) -> bool:
    with contextlib.suppress(RuntimeError, NotImplementedError):  # sparse tensors, and others without a storage
        tensor.untyped_storage()
        return True
    return False
