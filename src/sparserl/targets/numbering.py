"""Where an engine keeps the elements of a checkpoint, found by letting the engine load numbered elements.

    numbers of all elements, one digit per pass ──► the engine's own load ──► read back: which element is where
    ──► join into boxes ──► pieces: a region of a checkpoint tensor, and its address and strides in the engine

Nothing has to be known about names, fused projections, shards or transposes. Digits are small whole numbers, which
every dtype represents exactly. Three passes of mixed digits follow, the last of which is the opposite of the first:
they reveal any element that is not a plain copy, and its tensor is refused by name. Elements that are the same in all
passes do not come from the checkpoint.

It needs host memory for about six copies of a group of layers, which has at most `GROUP_ELEMENTS` elements.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import numpy as np
import numpy.typing as npt
import torch

from ..errors import UnsupportedTensor
from ..parallel import ordered
from ..weights.digest import digest
from .pieces import Bits, CheckpointTensor, Load, Numbers, Piece, layer_of, letters, patterns, span
from .strides import StridedBoxes, join_all

Mask = npt.NDArray[np.bool_]

GROUP_ELEMENTS = 1 << 28  # at most so many elements are numbered together
MAX_PIECES = 1 << 14  # of one tensor; a tensor in more pieces is refused
_CHUNK = 1 << 17  # elements that are processed together, so that they stay in the cache
_MIX = (-0x61C8864680B583EB, -0x2127599BF4325C37)  # odd numbers, whose products have no pattern in their upper bits
_MIXED_PASSES = 3


def number_pieces(
    tensors: Iterable[CheckpointTensor], live: Mapping[str, torch.Tensor], load: Load, *, is_all: bool = True
) -> list[Piece]:
    """Find out where the elements of checkpoint tensors are in an engine's tensors.

    Args:
        tensors: the tensors of the checkpoint.
        live: the tensors of the engine. They have numbers, not weights, when this returns or raises.
        load: lets the engine load some tensors, given under their checkpoint names, into `live`, with all
            postprocessing. The tensors of a layer come together.
        is_all: whether these are all tensors of the checkpoint.

    Raises:
        UnsupportedTensor: a tensor of the engine is not a plain copy of elements.
    """
    groups = [_Group(group) for group in _groups(tensors)]
    return [piece for group in groups for piece in group.pieces(live, load, is_only=is_all and len(groups) == 1)]


def _groups(tensors: Iterable[CheckpointTensor]) -> Iterator[list[CheckpointTensor]]:
    """Split tensors into groups of whole layers, of at most `GROUP_ELEMENTS` elements if a layer is not larger."""
    layers: dict[str, list[CheckpointTensor]] = {}
    for tensor in tensors:
        layers.setdefault(layer_of(tensor.name), []).append(tensor)
    group: list[CheckpointTensor] = []
    for layer in layers.values():
        if group and sum(tensor.numel for tensor in (*group, *layer)) > GROUP_ELEMENTS:
            yield group
            group = []
        group += layer
    if group:
        yield group


class _Alphabet:
    """The letters of the dtype of a tensor, written and read."""

    def __init__(self, name: str, width: int, dtype: torch.dtype) -> None:
        self.letters = letters(width, dtype)
        self._order = np.argsort(self.letters)
        if np.unique(self.letters).size < self.letters.size:
            raise UnsupportedTensor(
                f"{name!r} is not followed: {dtype} cannot represent enough whole numbers to tell elements apart"
            )
        self._table: Numbers | None = None
        if dtype.itemsize <= 2:
            self._table = np.zeros(1 << 8 * dtype.itemsize, np.int64)
            self._table[self.letters] = np.arange(self.letters.size)

    def digits(self, bits: Bits) -> Numbers:
        """The digits of these bits; arbitrary digits for bits that are not of a digit."""
        if self._table is not None:
            return self._table[bits]
        place = np.searchsorted(self.letters, bits, sorter=self._order)
        digits: Numbers = self._order[np.minimum(place, self.letters.size - 1)]
        return digits


class _Group:
    """Some checkpoint tensors, whose elements are numbered from 0 on."""

    def __init__(self, tensors: list[CheckpointTensor]) -> None:
        self.tensors = tensors
        ends = np.cumsum([tensor.numel for tensor in tensors])
        self.first = np.concatenate([[0], ends[:-1]]).astype(np.int64)
        self.total = int(ends[-1])
        self.bits = 4 if any(tensor.dtype.itemsize == 1 for tensor in tensors) else 8  # of a digit
        self.places = next(k for k in range(1, 64) if self.total <= 1 << k * self.bits)

    def pieces(self, live: Mapping[str, torch.Tensor], load: Load, is_only: bool) -> list[Piece]:
        """Where these tensors are. Unless this is the only group, only tensors that a load changes are copied."""
        if not is_only:
            live = self._loaded(live, load)
        passes: dict[str, list[torch.Tensor]] = {}
        for turn in range(self.places + _MIXED_PASSES):
            load(self._numbered(turn))
            for name, tensor in live.items():
                passes.setdefault(name, []).append(span(tensor).to("cpu", copy=True))
        by_name = ordered(lambda name: [*self._pieces(name, passes[name], _width(live[name]))], live)
        return [piece for pieces in by_name for piece in pieces]

    def _loaded(self, live: Mapping[str, torch.Tensor], load: Load) -> Mapping[str, torch.Tensor]:
        """The engine's tensors that these are loaded into: two opposite passes change each of their elements."""
        digests = []
        for turn in (self.places, self.places + _MIXED_PASSES - 1):
            load(self._numbered(turn))
            digests.append({name: digest({name: tensor}) for name, tensor in live.items()})
        return {name: tensor for name, tensor in live.items() if digests[0][name] != digests[1][name]}

    def _numbered(self, turn: int) -> Iterator[tuple[str, torch.Tensor]]:
        """The checkpoint tensors of one pass, in which every element is a digit of its number, written as above."""
        for tensor, first in zip(self.tensors, self.first.tolist(), strict=True):
            digits = torch.empty(tensor.numel, dtype=tensor.dtype)
            letters = _Alphabet(tensor.name, self.bits, tensor.dtype).letters
            bits = patterns(digits)
            for low in range(0, tensor.numel, _CHUNK):
                part = bits[low : low + _CHUNK]
                part[...] = letters[self._digit(np.arange(first + low, first + low + part.size), turn)]
            yield tensor.name, digits.view(tensor.shape)

    def _digit(self, number: Numbers, turn: int) -> Numbers:
        """The digit of a pass. The last have digits mixed from all others: many, few, and the opposite of many."""
        most = (1 << self.bits) - 1
        if turn < self.places:
            return (number >> turn * self.bits) & most
        last = turn - self.places
        if last == 1:
            return mixed(number, _MIX[1]) & (most >> 2)
        digit = mixed(number, _MIX[0]) & most
        return digit if last == 0 else most - digit

    def _pieces(self, name: str, passes: list[torch.Tensor], width: int) -> Iterator[Piece]:
        """The pieces in one tensor of the engine, with rows of `width` elements, from its contents after each pass."""
        bits = [patterns(contents) for contents in passes]
        if all(np.array_equal(later, bits[0]) for later in bits[1:]):
            return
        alphabet = _Alphabet(name, self.bits, passes[0].dtype)
        by_tensor: dict[int, list[StridedBoxes]] = {}
        step = width * max(1, _CHUNK // width)
        for low in range(0, bits[0].size, step):
            number, right = self._numbers(name, [contents[low : low + step] for contents in bits], alphabet)
            for tensor, boxes in self._boxes(number, right, low, width):
                by_tensor.setdefault(tensor, []).append(boxes)
        for tensor, chunks in by_tensor.items():
            boxes = join_all(StridedBoxes.concatenate(chunks))
            source = self.tensors[tensor].name
            if boxes.index.size > MAX_PIECES:
                raise UnsupportedTensor(f"{source!r} is in {boxes.index.size} pieces in {name!r}: the engine packs it")
            for region, offset, strides in boxes.each():
                yield Piece(source, region, name, offset, strides)

    def _numbers(self, name: str, passes: list[Bits], alphabet: _Alphabet) -> tuple[Numbers, Mask]:
        """The numbers of the checkpoint elements in some places, and which places have one."""
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
        """The boxes of the elements in some places from `low` on, by tensor."""
        rows = number.reshape(-1, width)
        if width > 1 and right.all() and (np.diff(rows, axis=1) == 1).all():  # rows are whole, as in most tensors
            heads = rows[:, 0]
            at = np.arange(low, low + number.size, width)
            boxes = [(t, place, index, self.tensors[t].shape) for t, place, index in self._by_tensor(at, heads)]
            if all(shape and (index % shape[-1] + width <= shape[-1]).all() for _, _, index, shape in boxes):
                for tensor, place, index, shape in boxes:
                    yield tensor, StridedBoxes.of(place, index, shape, width)
                return
        at = np.flatnonzero(right)
        for tensor, place, index in self._by_tensor(at + low, number[at]):
            yield tensor, StridedBoxes.of(place, index, self.tensors[tensor].shape).joined()

    def _by_tensor(self, at: Numbers, number: Numbers) -> Iterator[tuple[int, Numbers, Numbers]]:
        """Elements by tensor: their places in memory, and their positions in the tensor."""
        owner = np.searchsorted(self.first, number, side="right") - 1
        for tensor in np.unique(owner).tolist():
            in_tensor = owner == tensor
            yield tensor, at[in_tensor], number[in_tensor] - self.first[tensor]


def mixed(number: Numbers, factor: int = _MIX[0]) -> Numbers:
    """Numbers without a pattern in their lower bits."""
    return (number * factor) >> 40


def _width(tensor: torch.Tensor) -> int:
    """Elements of a row of a contiguous tensor; 1 for other tensors."""
    return tensor.shape[-1] if tensor.dim() and tensor.numel() and tensor.is_contiguous() else 1
