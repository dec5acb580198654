"""Where an engine keeps the elements of a checkpoint, found by letting the engine load numbered elements.

    numbers of all elements, one digit per pass ──► the engine's own load ──► read back: which element is where
    ──► join into boxes ──► pieces: a region of a checkpoint tensor, and its address and strides in the engine

Nothing has to be known about names, fused projections, shards or transposes. Digits are small whole numbers, which
every dtype represents exactly. Two passes of mixed digits follow, which reveal any element that is not a plain copy;
its tensor is refused by name. What stays the same in all passes does not come from the checkpoint.

It needs host memory for about six copies of a group of layers, which has at most `AT_ONCE` elements.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..errors import UnsupportedTensor
from ..parallel import ordered
from ..weights.digest import digest
from ..weights.region import Region, Shape
from .strides import StridedBoxes, join_all

Load = Callable[[Iterable[tuple[str, torch.Tensor]]], None]
Numbers = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
Bits = npt.NDArray[Any]

AT_ONCE = 1 << 28  # elements that are learnt together
MOST_PIECES = 1 << 14  # of one tensor: what lies about in more is not worth following
_CHUNK = 1 << 17  # elements that are looked at together: they stay in a near cache
_MIX = (-0x61C8864680B583EB, -0x2127599BF4325C37)  # odd numbers, whose products have no pattern in their upper bits
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


def find_pieces(tensors: Iterable[CheckpointTensor], live: Mapping[str, torch.Tensor], load: Load) -> list[Piece]:
    """Find out where the elements of checkpoint tensors are in an engine's tensors.

    Args:
        tensors: the tensors of the checkpoint.
        live: the tensors of the engine. They have numbers, not weights, when this returns or raises.
        load: lets the engine load some tensors, given under their checkpoint names, into `live`, with all
            postprocessing. The tensors of a layer come together.

    Raises:
        UnsupportedTensor: a tensor of the engine is not a plain copy of elements.
    """
    groups = [_Group(group) for group in _groups(tensors)]
    return [piece for group in groups for piece in group.pieces(live, load, alone=len(groups) == 1)]


def _groups(tensors: Iterable[CheckpointTensor]) -> Iterator[list[CheckpointTensor]]:
    """Tensors that are learnt together: whole layers, as many as there is room for."""
    layers: dict[str, list[CheckpointTensor]] = {}
    for one in tensors:
        found = _LAYER.match(one.name)
        layers.setdefault(found.group() if found else "", []).append(one)
    group: list[CheckpointTensor] = []
    for layer in layers.values():
        if group and sum(one.numel for one in (*group, *layer)) > AT_ONCE:
            yield group
            group = []
        group += layer
    if group:
        yield group


class _Alphabet:
    """How the digits are written in a dtype: each as the whole number that is one larger."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        self.letters = patterns(torch.arange(1, 1 + (1 << width)).to(dtype))
        self._table: Numbers | None = None
        if dtype.itemsize <= 2:
            self._table = np.zeros(1 << 8 * dtype.itemsize, np.int64)
            self._table[self.letters] = np.arange(self.letters.size)

    def digits(self, bits: Bits) -> Numbers:
        """The digits that were written so; any digits for other bits."""
        if self._table is not None:
            return self._table[bits]
        return np.minimum(np.searchsorted(self.letters, bits), self.letters.size - 1)  # bits rise with their numbers


class _Group:
    """Some checkpoint tensors, whose elements are numbered through."""

    def __init__(self, tensors: list[CheckpointTensor]) -> None:
        self.tensors = tensors
        ends = np.cumsum([one.numel for one in tensors])
        self.first = np.concatenate([[0], ends[:-1]]).astype(np.int64)
        self.total = int(ends[-1])
        self.bits = 4 if any(one.dtype.itemsize == 1 for one in tensors) else 8  # of a digit
        self.places = next(k for k in range(1, 64) if self.total <= 1 << k * self.bits)

    def pieces(self, live: Mapping[str, torch.Tensor], load: Load, alone: bool) -> list[Piece]:
        """Where these tensors lie. Unless they are alone, copies are kept only of what changes when they are loaded."""
        before = None if alone else {name: digest({name: tensor}) for name, tensor in live.items()}
        seen: dict[str, list[torch.Tensor]] = {}
        for turn in range(self.places + 2):
            load(self._filled(turn))
            if before is not None:
                live = {name: tensor for name, tensor in live.items() if digest({name: tensor}) != before[name]}
                before = None
            for name, tensor in live.items():
                seen.setdefault(name, []).append(span(tensor).to("cpu", copy=True))
        found = ordered(lambda name: [*self._pieces(name, seen[name], _width(live[name]))], live)
        return [piece for pieces in found for piece in pieces]

    def _filled(self, turn: int) -> Iterator[tuple[str, torch.Tensor]]:
        """The checkpoint tensors, in which every element is a digit of its number, and one."""
        for one, first in zip(self.tensors, self.first.tolist(), strict=True):
            out = torch.empty(one.numel, dtype=one.dtype)
            letters = _Alphabet(self.bits, one.dtype).letters
            there = patterns(out)
            for low in range(0, one.numel, _CHUNK):
                part = there[low : low + _CHUNK]
                part[...] = letters[self._digit(np.arange(first + low, first + low + part.size), turn)]
            yield one.name, out.view(one.shape)

    def _digit(self, number: Numbers, turn: int) -> Numbers:
        """The digit at a place; after the last place, two mixtures of all, of which the second has small ones only."""
        if turn < self.places:
            return (number >> turn * self.bits) & ((1 << self.bits) - 1)
        last = turn - self.places
        return ((number * _MIX[last]) >> 40) & ((1 << self.bits - 2 * last) - 1)

    def _pieces(self, name: str, passes: list[torch.Tensor], width: int) -> Iterator[Piece]:
        """The boxes that lie in one tensor of the engine, with rows of `width` elements, of which there were passes."""
        seen = [patterns(one) for one in passes]
        alphabet = _Alphabet(self.bits, passes[0].dtype)
        if all(np.array_equal(one, seen[0]) for one in seen[1:]):
            return
        found: dict[int, list[StridedBoxes]] = {}
        step = width * max(1, _CHUNK // width)
        for low in range(0, seen[0].size, step):
            number, right = self._numbers(name, [one[low : low + step] for one in seen], alphabet)
            for tensor, boxes in self._boxes(number, right, low, width):
                found.setdefault(tensor, []).append(boxes)
        for tensor, several in found.items():
            boxes = join_all(StridedBoxes.concatenate(several))
            of = self.tensors[tensor].name
            if boxes.index.size > MOST_PIECES:
                raise UnsupportedTensor(f"{of!r} lies in {boxes.index.size} pieces in {name!r}: the engine packs it")
            for region, offset, strides in boxes.each():
                yield Piece(of, region, name, offset, strides)

    def _numbers(self, name: str, passes: list[Bits], alphabet: _Alphabet) -> tuple[Numbers, Mask]:
        """The numbers of the elements that lie in some places, and where there are any."""
        number = np.zeros(passes[0].shape, np.int64)
        right = np.ones(passes[0].shape, bool)
        for turn, bits in enumerate(passes):
            digit = alphabet.digits(bits)
            right &= alphabet.letters[digit] == bits
            if turn < self.places:
                number |= digit << turn * self.bits
            else:
                right &= self._digit(number, turn) == digit
        right &= number < self.total
        constant = np.logical_and.reduce([bits == passes[0] for bits in passes[1:]])
        if not (right | constant).all():
            raise UnsupportedTensor(
                f"{name!r} is not a copy of elements of the checkpoint: the engine quantizes, packs or computes it "
                "when it loads, so that changes cannot be written into it"
            )
        return number, right

    def _boxes(self, number: Numbers, right: Mask, low: int, width: int) -> Iterator[tuple[int, StridedBoxes]]:
        """Where the elements lie that were found in some places from `low` on, by tensor."""
        rows = number.reshape(-1, width)
        if width > 1 and right.all() and (np.diff(rows, axis=1) == 1).all():  # as most are
            heads = rows[:, 0]
            at = np.arange(low, low + number.size, width)
            alone = [(t, where, index, self.tensors[t].shape) for t, where, index in self._by_tensor(at, heads)]
            if all(shape and (index % shape[-1] + width <= shape[-1]).all() for _, _, index, shape in alone):
                for tensor, where, index, shape in alone:
                    yield tensor, StridedBoxes.of(where, index, shape, width)
                return
        at = np.flatnonzero(right)
        for tensor, where, index in self._by_tensor(at + low, number[at]):
            yield tensor, StridedBoxes.of(where, index, self.tensors[tensor].shape).joined()

    def _by_tensor(self, at: Numbers, number: Numbers) -> Iterator[tuple[int, Numbers, Numbers]]:
        """Which elements are of which tensor: where they lie, and their positions in it."""
        owner = np.searchsorted(self.first, number, side="right") - 1
        for tensor in np.unique(owner).tolist():
            mine = owner == tensor
            yield tensor, at[mine], number[mine] - self.first[tensor]


def parts_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers of a model, each memory once."""
    out: dict[str, torch.Tensor] = {}
    seen = set()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if not tensor.is_meta and tensor.numel() and tensor.data_ptr() not in seen:
            seen.add(tensor.data_ptr())
            out[name] = tensor.data
    return out


def _width(tensor: torch.Tensor) -> int:
    """Elements of a row, where rows lie behind each other."""
    return tensor.shape[-1] if tensor.dim() and tensor.numel() and tensor.is_contiguous() else 1


def span(tensor: torch.Tensor) -> torch.Tensor:
    """The memory from a tensor's first element to its last, as one line."""
    reach = sum(s * (n - 1) for s, n in zip(tensor.stride(), tensor.shape, strict=True)) + 1
    return tensor.data.as_strided((reach if tensor.numel() else 0,), (1,), tensor.storage_offset())


def patterns(tensor: torch.Tensor) -> Bits:
    """The bits of a contiguous tensor in host memory, where they lie."""
    array: Bits = tensor.view(torch.uint8).numpy().view(f"<u{tensor.element_size()}")
    return array
