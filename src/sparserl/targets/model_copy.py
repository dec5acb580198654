"""A copy of what a load may change in a model, so that one can be watched and undone; and what a load has changed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch

from ..errors import SessionError
from ..weights.digest import Digest
from .attributes import Types, attribute_objects, attribute_values, changed_values, slots_of
from .engine_layout import changed_names, digests_of


class ModelCopy:
    """What a load may change in a model: its tensors, copied to host memory, and what its objects refer to.

    Args:
        model: The model.
        tensors: Its tensors by name: parameters, buffers, and what was computed from them.
        apart: Types of objects that are left alone, as for `attribute_tensors`.
    """

    def __init__(self, model: torch.nn.Module, tensors: dict[str, torch.Tensor], apart: Types = ()) -> None:
        self._bits = {name: (tensor, tensor.to("cpu", copy=True)) for name, tensor in tensors.items()}
        self._data = [(tensor, tensor.data) for tensor in (*model.parameters(), *model.buffers())]
        self._objects = [_Contents.of(value) for value in (*model.modules(), *attribute_objects(model, apart))]

    def put_back(self) -> None:
        """Make the model what it was: the same objects, and the same bits in the same memory."""
        for contents in self._objects:
            contents.put_back()
        for tensor, data in self._data:
            tensor.data = data
        self.put_back_bits(self._bits)

    def put_back_bits(self, names: Iterable[str]) -> None:
        """Give some of the tensors the bits that they had, wherever the model has them now."""
        for name in names:
            tensor, bits = self._bits[name]
            tensor.copy_(bits)


class _Contents(NamedTuple):
    """What an object refers to itself: its items, its attributes and its slots."""

    containers: list[tuple[Any, Any]]  # that may be changed in place, and copies
    owner: Any
    slots: dict[Any, Any]

    @classmethod
    def of(cls, value: Any) -> _Contents:
        containers = [one for one in (value, getattr(value, "__dict__", None)) if isinstance(one, dict | list | set)]
        slots = {}
        for _, slot in slots_of(value):
            with contextlib.suppress(AttributeError):  # an empty slot
                slots[slot] = slot.__get__(value)
        return cls([(one, _plain_copy(one)) for one in containers], value, slots)

    def put_back(self) -> None:
        """Change what is not the same; everything else is left alone, for others may be using it."""
        for now, before in self.containers:
            if _ids(now) != _ids(before):
                now.clear()
                now.extend(before) if isinstance(now, list) else now.update(before)
        for slot, before in self.slots.items():
            with contextlib.suppress(AttributeError):
                if slot.__get__(self.owner) is before:
                    continue
            slot.__set__(self.owner, before)


def _plain_copy(container: Any) -> Any:
    if isinstance(container, dict):
        return dict(container)
    return [*container] if isinstance(container, list) else {*container}


def _ids(container: Any) -> list[Any]:
    """What a container has, and in which order, whatever its objects take for equal."""
    if isinstance(container, dict):
        return [(id(key), id(value)) for key, value in container.items()]
    return [*map(id, container)] if isinstance(container, list) else sorted(map(id, container))


class Derived(NamedTuple):
    """What a model has beside its weights, at some time: tensors, and numbers of Python.

    Example:
        >>> model = torch.nn.Linear(2, 2)
        >>> model.scale = 0.5
        >>> before = Derived.of(model, {})
        >>> model.scale = 0.25
        >>> before.changes(Derived.of(model, {}))
        ['.scale']
    """

    digests: dict[str, Digest]
    values: dict[str, object]

    @classmethod
    def of(cls, model: torch.nn.Module, tensors: Mapping[str, torch.Tensor], apart: Types = ()) -> Derived:
        """As it is now, with these tensors."""
        return cls(digests_of(tensors), attribute_values(model, apart))

    def changes(self, now: Derived, *, with_gone: bool = False) -> list[str]:
        """What is not the same now; with tensors that are gone, which may be computed anew when they are needed."""
        gone = [name for name in self.digests if name not in now.digests] if with_gone else []
        return [*changed_names(self.digests, now.digests), *gone, *changed_values(self.values, now.values)]


class Trial:
    """A model that loads made-up tensors for a while, and what of it such loads change that it keeps beside them.

    Args:
        model: The model.
        live: Its parameters and buffers.
        derived: Returns its tensors beside these.
        refresh: Lets the model recompute what it can.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        live: dict[str, torch.Tensor],
        derived: Callable[[], dict[str, torch.Tensor]],
        refresh: Callable[[], None],
    ) -> None:
        self.computed: set[str] = set()  # by a load, from the weights
        self.stale: set[str] = set()  # of these, which the model does not recompute
        self._model = model
        self._live = live
        self._derived = derived
        self._refresh = refresh
        self._tensors = derived()
        self._before = self._refreshed = Derived.of(model, self._tensors)
        self._copy = ModelCopy(model, live | self._tensors)

    def begin(self) -> None:
        """Let the model recompute what it can, so that it is known what this should be."""
        self._refresh()
        self._refreshed = Derived.of(self._model, self._derived())

    def check(self) -> None:
        """After a load: give the model its weights, and note what is not what it was."""
        self._copy.put_back_bits(self._live)
        self.computed.update(self._changes(self._before))
        self._refresh()
        self.stale.update(self._changes(self._refreshed))

    def put_back(self) -> None:
        """Make the model what it was."""
        self._copy.put_back()
        for name, tensor in self._derived().items():
            if name in self._tensors and tensor.shape == self._tensors[name].shape:
                tensor.copy_(self._tensors[name])  # if a load has put another tensor in the place of this one
        if changed := self._changes(self._before):
            raise SessionError(f"{changed[0]!r} is not what it was: restart the engine")

    def _changes(self, since: Derived) -> list[str]:
        return since.changes(Derived.of(self._model, self._derived()), with_gone=True)
