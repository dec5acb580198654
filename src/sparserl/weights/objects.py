"""Very many Python objects at once: which they are, of which types, and where arrays among them have their elements."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import numpy as np

from ..kernels import cpu
from .memory import address_of
from .region import Numbers

ObjectArray = np.ndarray[Any, np.dtype[np.object_]]
Objects = Sequence[Any] | ObjectArray
_TYPE_AT = object.__basicsize__ - 8  # the last field that all objects have


def object_array(objects: Objects) -> ObjectArray:
    """Objects as an array of references to them."""
    return objects if isinstance(objects, np.ndarray) else np.fromiter(objects, object, len(objects))


def identities(objects: Objects) -> Numbers:
    """The `id` of each object."""
    return np.frombuffer(object_array(objects), np.int64)


def type_identities(objects: Objects, pointers: Numbers | None = None) -> Numbers:
    """The `id` of each object's type; `pointers` are the objects' own, if they are known."""
    return _fields((identities(objects) if pointers is None else pointers) + _TYPE_AT, map(id, map(type, objects)))


def has_items(mapping: dict[Any, Any], keys: Numbers, values: Numbers) -> bool:
    """Whether a dict has these keys and values, given by their `id`, in this order, and no others."""
    return bool(cpu.objects.has_items(c_function("PyDict_Next"), id(mapping), keys, values))


@cache
def c_function(name: str) -> int:
    """The address of a function of Python's C interface."""
    return ctypes.cast(getattr(ctypes.pythonapi, name), ctypes.c_void_p).value or 0


def types_of(objects: Objects) -> set[type]:
    """The types of objects."""
    types = type_identities(objects)
    first = [0] if (types == types[:1]).all() else np.unique(types, return_index=True)[1].tolist()
    return {type(objects[i]) for i in first[: len(objects)]}


def array_addresses(arrays: Objects) -> Numbers:
    """The address of the first element of every array; they must be of no subclass.

    NumPy takes microseconds to tell one. Its C interface, for which all extension modules are compiled, says where an
    array keeps it: in its first field.
    """
    return _fields(identities(arrays) + object.__basicsize__, map(address_of, arrays))


def _fields(addresses: Numbers, values: Iterable[int]) -> Numbers:
    """The words at these addresses, if the first one is the first of the values, which are slow to get; else these."""
    words = np.empty_like(addresses)
    cpu.objects.read_words(addresses, words)
    remaining = iter(values)
    first = next(remaining, None)
    if first is None or words[0] == first:
        return words
    return np.array([first, *remaining], np.int64)
