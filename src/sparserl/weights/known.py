"""Tensors that were looked at before: while they stay in the same memory, what was found out about them stays true."""

from __future__ import annotations

import gc
import operator
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakValueDictionary

from .columns import Columns, look_at
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
    """Tensors that were looked at, and where they lay.

    Args:
        weights: The tensors by name.
        tensors: The tensors in the order of the table.
        columns: Where they lay.
        found: What was found out about them.
    """

    def __init__(self, weights: Weights, tensors: list[Any], columns: Columns, found: Any) -> None:
        self.found = found
        self._names = tuple(weights)
        self._values = list(weights.values())
        self._tensors = tensors
        self._columns = columns

    def are(self, weights: Weights) -> bool:
        """Whether these are the same tensors under the same names, in the same memory."""
        if tuple(weights) != self._names or not all(map(operator.is_, weights.values(), self._values)):
            return False
        columns = look_at(self._tensors)
        return columns is not None and columns.equal(self._columns)


_known: WeakValueDictionary[int, KnownTensors] = WeakValueDictionary()  # by the id of their first tensor


def find_known(weights: Weights) -> KnownTensors | None:
    """What is known of weights; None if it is nothing, or if a tensor has moved."""
    known = _known.get(id(next(iter(weights.values()), None)))
    return known if known is not None and known.are(weights) else None


def remember(weights: Weights, tensors: list[Any], columns: Columns | None, found: Any) -> KnownTensors | None:
    """Remember what was found out about tensors for as long as somebody keeps the object that is returned.

    None if they are not of a kind that can be looked at quickly.
    """
    if columns is None or not tensors:
        return None
    known = KnownTensors(weights, tensors, columns, found)
    _known[id(next(iter(weights.values())))] = known
    return known
