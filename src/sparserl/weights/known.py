"""Tensors that were looked at before: while they stay in the same memory, what was found out about them stays true."""

from __future__ import annotations

import gc
import operator
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakValueDictionary

from .columns import Columns


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
        names: Their names, in the order of the table.
        tensors: The tensors.
        columns: Where they lay.
        found: What was found out about them.
    """

    def __init__(self, names: tuple[str, ...], tensors: list[Any], columns: Columns, found: Any) -> None:
        self.found = found
        self._names = names
        self._tensors = tensors
        self._columns = columns

    def are(self, names: tuple[str, ...], tensors: list[Any], columns: Columns) -> bool:
        """Whether these are the same tensors, in the same memory."""
        return names == self._names and all(map(operator.is_, tensors, self._tensors)) and columns.equal(self._columns)


_known: WeakValueDictionary[int, KnownTensors] = WeakValueDictionary()  # by the id of their first tensor


def find_known(names: tuple[str, ...], tensors: list[Any], columns: Columns | None) -> KnownTensors | None:
    """What is known of tensors; None if it is nothing, or if one of them has moved."""
    known = _known.get(id(tensors[0])) if tensors else None
    return known if known is not None and columns is not None and known.are(names, tensors, columns) else None


def remember(names: tuple[str, ...], tensors: list[Any], columns: Columns | None, found: Any) -> KnownTensors | None:
    """Remember what was found out about tensors for as long as somebody keeps the object that is returned.

    None if they are not of a kind that can be looked at quickly.
    """
    if columns is None or not tensors:
        return None
    known = KnownTensors(names, tensors, columns, found)
    _known[id(tensors[0])] = known
    return known
