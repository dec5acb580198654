"""A copy of what a load may change in a model, so that one can be watched and undone."""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator
from typing import Any

import torch


class ModelCopy:
    """What a load may change in a model: its tensors, copied to host memory, and the attributes of its modules.

    Args:
        model: The model.
        tensors: Its tensors by name: parameters, buffers, and what was computed from them.
    """

    def __init__(self, model: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> None:
        self._bits = {name: (tensor, tensor.to("cpu", copy=True)) for name, tensor in tensors.items()}
        self._data = [(tensor, tensor.data) for tensor in (*model.parameters(), *model.buffers())]
        self._not_saved = [(m._non_persistent_buffers_set, {*m._non_persistent_buffers_set}) for m in model.modules()]  # noqa: SLF001
        self._attributes = [(attributes, dict(attributes)) for attributes in _attributes(model)]

    def put_back(self) -> None:
        """Make the model what it was: the same objects, and the same bits in the same memory."""
        for attributes, before in self._attributes:
            if [*attributes] != [*before]:
                attributes.clear()
            attributes.update(before)
        for names, names_before in self._not_saved:
            names.clear()
            names.update(names_before)
        for tensor, data in self._data:
            tensor.data = data
        self.put_back_bits(self._bits)

    def put_back_bits(self, names: Iterable[str]) -> None:
        """Give some of the tensors the bits that they had, wherever the model has them now."""
        for name in names:
            tensor, bits = self._bits[name]
            tensor.copy_(bits)


def _attributes(model: torch.nn.Module) -> Iterator[dict[str, Any]]:
    """The attributes of all modules, and of the objects that these have."""
    seen: set[int] = set()
    for module in model.modules():
        own = vars(module)
        yield own
        for name in ("_parameters", "_buffers", "_modules"):
            yield own[name]
        for value in [*own.values()]:
            is_object = hasattr(value, "__dict__") and not isinstance(
                value, torch.nn.Module | torch.Tensor | type | types.ModuleType | types.FunctionType
            )
            if is_object and id(value) not in seen:
                seen.add(id(value))
                yield vars(value)
