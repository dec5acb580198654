"""Casting: trainers keep wider weights than the engines that they publish to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..errors import UnsupportedTensor

Cast = Callable[[str, Any], Any]
"""From the name and the dtype of a tensor to the torch dtype that it is cast to, or to None."""


def cast_of(cast: Any) -> Cast | None:
    """The cast that an option describes: a dtype for all floating-point tensors that are wider, or a function of names.

    Tensors that are not floating-point are left alone; so are, by each source, the buffers of a module.

    Raises:
        UnsupportedTensor: It is neither a floating-point dtype of torch nor a function.
    """
    if cast is None:
        return None
    if getattr(cast, "is_floating_point", False):
        return lambda _name, dtype: cast if dtype.is_floating_point and dtype.itemsize > cast.itemsize else None
    if isinstance(cast, str) or not callable(cast):
        raise UnsupportedTensor(
            f"cast is {cast!r}; it must be a floating-point dtype such as torch.bfloat16, or a function from a name to "
            "a dtype or None"
        )
    return lambda name, dtype: wanted if dtype.is_floating_point and (wanted := cast(name)) != dtype else None


def buffers_among(module: Any, tensors: Mapping[str, Any]) -> frozenset[str]:
    """The names of those tensors that are buffers of a module, which no cast applies to."""
    buffers = {id(buffer) for buffer in getattr(module, "buffers", tuple)()}
    return frozenset(name for name, tensor in tensors.items() if id(tensor) in buffers)
