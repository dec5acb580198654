"""Tensors that were looked at before: while they stay in the same memory, what was found out about them stays true."""

from __future__ import annotations

import gc
import operator
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from .dtypes import Bits
from .memory import Weights


@contextmanager
def collector_paused() -> Iterator[None]:
    """Make very many objects, all of which stay, without the garbage collector looking at them again and again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class KnownTensors:
    """Tensors of a kind that can be looked at quickly, and where they lay.

    Args:
        names: Their names, in the order of the table.
        tensors: The tensors.
        layout: Where they lay.
        found: What was found out about them.
    """

    def __init__(self, names: Iterable[str], tensors: list[Any], layout: Any, found: Any) -> None:
        self.found = found
        self._names = names
        self._tensors = tensors
        self._layout = layout

    def are(self, weights: Weights) -> bool:
        """Whether these are the same tensors, in the same memory."""
        if len(weights) != len(self._tensors):
            return False
        tensors = list(map(weights.get, self._names))
        return all(map(operator.is_, tensors, self._tensors)) and _layout(tensors) == self._layout


_known: WeakValueDictionary[int, KnownTensors] = WeakValueDictionary()  # by the id of their first tensor


def find_known(weights: Weights) -> KnownTensors | None:
    """What is known of tensors; None if it is nothing, or if one of them has moved."""
    first = next(iter(weights.values()), None) if type(weights) is dict else None
    known = None if first is None else _known.get(id(first))
    if known is None:
        return None
    with collector_paused():
        return known if known.are(weights) else None


def remember(weights: Weights, names: Iterable[str], found: Any) -> KnownTensors | None:
    """Remember what was found out about tensors for as long as somebody keeps the object that is returned.

    None if they are not of a kind that can be looked at quickly.
    """
    if type(weights) is not dict or not weights:
        return None
    tensors = list(map(weights.get, names))
    layout = _layout(tensors)
    if layout is None:
        return None
    known = KnownTensors(names, tensors, layout, found)
    _known[id(next(iter(weights.values())))] = known
    return known


def _layout(tensors: list[Any]) -> Any:
    """What changes when a tensor gets other memory, or has it read in another way; None for kinds that take long."""
    kinds = set(map(type, tensors))
    torch = sys.modules.get("torch")
    if torch is not None and kinds <= {torch.Tensor, torch.nn.Parameter}:
        return (
            [tensor.data_ptr() for tensor in tensors],
            [tensor.dtype for tensor in tensors],
            [tensor.shape for tensor in tensors],
            [tensor.stride() for tensor in tensors],
            [tensor.is_neg() for tensor in tensors],
        )
    if kinds == {Bits}:
        return [tensor.dtype for tensor in tensors], [tensor.array.__array_interface__ for tensor in tensors]
    return [tensor.__array_interface__ for tensor in tensors] if kinds == {np.ndarray} else None
