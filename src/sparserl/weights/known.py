"""Tensors that were looked at before: while they stay in the same memory, what was found out about them stays true."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from .columns import Columns, are_plain, look_at
from .objects import ObjectArray, has_items, identities, type_identities, types_of
from .region import Numbers


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
        names: Their names, in the order of the mapping that they were in.
        values: The tensors, in that order.
        order: Which of the tensors each one of the table is.
        columns: Where those of the table lay.
        found: What was found out about them.
    """

    def __init__(
        self, names: tuple[str, ...], values: ObjectArray, order: Numbers, columns: Columns, found: Any
    ) -> None:
        self.found = found
        self._names = names
        self._name_identities = identities(names).copy()
        self._identities = identities(values).copy()
        self._tensors = values[order].tolist()  # the garbage collector does not see what is in an array
        self._pointers = self._identities[order]
        self._types = type_identities(self._tensors, self._pointers)
        self._kinds = types_of(self._tensors)
        self._columns = columns

    def are(self, names: tuple[str, ...], values: ObjectArray) -> bool:
        """Whether these are the same tensors under the same names, in the same memory."""
        is_same = names == self._names and np.array_equal(identities(values), self._identities)
        return is_same and self._have_stayed()

    def are_in(self, weights: dict[str, Any]) -> bool:
        """Whether a dict has these tensors, in the same memory, under names that are these very objects."""
        return has_items(weights, self._name_identities, self._identities) and self._have_stayed()

    def _have_stayed(self) -> bool:
        if not np.array_equal(type_identities(self._tensors, self._pointers), self._types):  # `__class__` can be set
            return False
        columns = look_at(self._tensors, self._kinds, self._pointers)
        return columns is not None and columns.equal(self._columns) and are_plain(self._tensors)


_known: WeakValueDictionary[int, KnownTensors] = WeakValueDictionary()  # by the id of their first tensor


def find_known(names: tuple[str, ...], values: ObjectArray) -> KnownTensors | None:
    """What is known of tensors; None if it is nothing, or if one of them has moved."""
    known = _known.get(id(values[0])) if len(values) else None
    return known if known is not None and known.are(names, values) else None


def find_known_dict(weights: dict[str, Any]) -> KnownTensors | None:
    """`find_known`, for a dict whose names are the very objects that they were, without a copy of what it has."""
    try:
        first = next(iter(weights.values()), None)
    except RuntimeError:  # another thread changes it
        return None
    known = _known.get(id(first))
    return known if known is not None and known.are_in(weights) else None


def remember(
    names: tuple[str, ...], values: ObjectArray, order: Numbers, columns: Columns | None, found: Any
) -> KnownTensors | None:
    """Remember what was found out about tensors for as long as somebody keeps the object that is returned.

    None if they are not of a kind that can be looked at quickly.
    """
    if columns is None or not len(values):
        return None
    known = KnownTensors(names, values, order, columns, found)
    _known[id(values[0])] = known
    return known
