"""Pieces: where an engine keeps the elements of a checkpoint."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from ..errors import UnsupportedTensor
from ..weights.region import Region, Shape

Load = Callable[[Iterable[tuple[str, torch.Tensor]]], None]
Numbers = npt.NDArray[np.int64]
_FRACTION = 2.0**-14
_SMALLEST = 2.0**-4
_SIGNIFICANT = {4: 3, 8: 5}  # bits of the numbers that stand for digits of so many bits
_COMPARED_AT_ONCE = 1 << 24  # elements, so that a comparison needs little memory on a GPU
_LAYER = re.compile(r".*?\.\d+\.")


@dataclass(frozen=True, slots=True)
class Piece:
    """A region of a checkpoint tensor, and where it is in a tensor of the engine (`live`).

    `offset` counts elements from the first one of the engine's tensor; `strides` are those of the region there.
    """

    tensor: str
    region: Region
    live: str
    offset: int
    strides: Shape

    def view(self, live: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The region as a view of the engine's tensor."""
        tensor = live[self.live].data
        return tensor.as_strided(self.region.size, self.strides, tensor.storage_offset() + self.offset)


@dataclass(frozen=True)
class CheckpointTensor:
    """A checkpoint tensor to be loaded."""

    name: str
    shape: Shape
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def layer_of(name: str) -> str:
    """What the names of all tensors of a layer begin with; empty for tensors outside layers."""
    match = _LAYER.match(name)
    return match.group() if match else ""


def parts_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers of a model without those that are views of others; of equal ones, the first.

    Example:
        >>> model = torch.nn.Module()
        >>> both = torch.zeros(4, 3)
        >>> model.register_buffer("upper", both[:2])
        >>> model.register_buffer("both", both)
        >>> [*parts_of(model)]
        ['both']
    """
    named = (*model.named_parameters(), *model.named_buffers())
    tensors = {name: tensor.data for name, tensor in named if not tensor.is_meta and tensor.numel()}
    covered: dict[torch.device, int] = {}  # up to which address memory belongs to tensors without gaps
    places = set()
    views = set()
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].data_ptr(), -_end(item[1]))):
        place = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride())
        if place in places or _end(tensor) <= covered.get(tensor.device, 0):
            views.add(name)
        places.add(place)
        if reach(tensor) == tensor.numel():
            covered[tensor.device] = max(covered.get(tensor.device, 0), _end(tensor))
    return {name: tensor for name, tensor in tensors.items() if name not in views}


def _end(tensor: torch.Tensor) -> int:
    """The address behind the last element of a tensor."""
    return tensor.data_ptr() + reach(tensor) * tensor.element_size()


def by_tensor(pieces: Iterable[Piece]) -> dict[str, list[Piece]]:
    """The pieces of every checkpoint tensor."""
    grouped: dict[str, list[Piece]] = {}
    for piece in pieces:
        grouped.setdefault(piece.tensor, []).append(piece)
    return grouped


def moved_name(before: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor]) -> str | None:
    """The first tensor that is gone, or is in other memory than before."""
    moved = (name for name in before if name not in after or after[name].data_ptr() != before[name].data_ptr())
    return next(moved, None)


def span(tensor: torch.Tensor) -> torch.Tensor:
    """The memory from a tensor's first element to its last, as one dimension."""
    return tensor.data.as_strided((reach(tensor),), (1,), tensor.storage_offset())


def reach(tensor: torch.Tensor) -> int:
    """Elements from a tensor's first to its last in memory."""
    steps = zip(tensor.stride(), tensor.shape, strict=True)
    return sum(stride * (size - 1) for stride, size in steps) + 1 if tensor.numel() else 0


def has_bits(tensor: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether a tensor has the bits of another one of its dtype and shape, which is taken to its device part by part.

    Example:
        >>> has_bits(torch.zeros(2), torch.tensor([0.0, -0.0]))
        False
    """
    bits = patterns(tensor)
    expected_bits = patterns(expected)
    if tensor.dim() == 0:
        return torch.equal(bits, expected_bits.to(bits.device))
    rows = max(1, _COMPARED_AT_ONCE // max(1, math.prod(tensor.shape[1:])))
    starts = range(0, tensor.shape[0], rows)
    return all(torch.equal(bits[i : i + rows], expected_bits[i : i + rows].to(bits.device)) for i in starts)


def patterns(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of a tensor as whole numbers, not copied."""
    return tensor.data.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


def letters(bits: int, dtype: torch.dtype) -> torch.Tensor:
    """The bits of every digit in a dtype, as numbers that no clamp, rounding, power or absolute value leaves alone.

    Those of the upper half of the digits are negative where there are negative numbers; in each half, larger digits
    are larger numbers. No two have the same absolute value, none is the reciprocal of another, and none is a power of
    two, which scales often are. In floating-point dtypes they range from 1/16 to 8704, with few enough bits for bf16,
    or for digits of 4 bits from 1/16 to 2.5, with few enough for fp8. In fp32 and wider they have a fraction that
    narrower dtypes round away.
    """
    if dtype.is_complex:
        raise UnsupportedTensor(f"{dtype} is not supported")
    significant = _SIGNIFICANT[bits] if dtype.is_floating_point else bits
    ends = range((1 << significant - 1) + 1, 1 << significant)  # all but a power of two
    sizes = [end << shift for shift in range(1 << bits) for end in ends][: 1 << bits]
    numbers = torch.tensor(sizes, dtype=torch.float64, device="cpu")
    if dtype.is_floating_point or (dtype != torch.bool and torch.iinfo(dtype).min < 0):
        numbers = torch.cat((numbers[::2], -numbers[1::2].flip(0)))
    if dtype.is_floating_point:
        numbers *= _SMALLEST / (1 << significant - 1)
        numbers *= 1 + _FRACTION * (dtype.itemsize >= 4)
    return patterns(numbers.to(dtype))
