"""Where an engine keeps the elements of a checkpoint, found by letting the engine load numbered elements.

    numbers of all elements, one digit per pass ──► the engine's own load ──► read back: which element is where
    ──► join into boxes ──► pieces: a region of a checkpoint tensor, and its address and strides in the engine

Nothing has to be known about names, fused projections, shards or transposes. Digits are written as numbers that
dtypes represent exactly (`letters`). Passes of opposite and of mixed digits follow, which reveal any element that is
not a plain copy, and its tensor is refused by name. Elements that are the same in all passes do not come from the
tensors that are numbered.

Digits are made where the engine's tensors are, and put together there. For an element in question that takes 9 bytes
beside its own, of at most about `GROUP_ELEMENTS` elements; where too little memory is free, the host's is used.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import numpy as np
import torch

from ..errors import UnsupportedTensor
from ..parallel import ordered
from ..weights.digest import digest
from .pieces import CheckpointTensor, Load, Numbers, Piece, has_bits, layer_of, letters, patterns, reach, span
from .strides import StridedBoxes, join_all

GROUP_ELEMENTS = 1 << 28  # at most so many elements are numbered together
MAX_PIECES = 1 << 14  # of one tensor; a tensor in more pieces is refused
_CHUNK = 1 << 17  # elements that are processed together, so that they stay in the cache
_GPU_CHUNK = 1 << 22  # elements that a GPU processes together, in little memory
_MIX = (-0x61C8864680B583EB, -0x2127599BF4325C37)  # odd numbers, whose products have no pattern in their upper bits
_MIXED_PASSES = 4
_OPPOSITE_BITS = 8  # so many bits of a number come in opposite digits, too: 256 small tensors of a layer are told apart
_NONE = -1  # the number of an element that is none of the numbered ones
_STATE_BYTES = 9  # of an element that changes: its number, and whether it is constant
_HOST = torch.device("cpu")


def number_pieces(
    tensors: Iterable[CheckpointTensor],
    live: Mapping[str, torch.Tensor],
    load: Load,
) -> list[Piece]:
    """Find out where the elements of checkpoint tensors are in an engine's tensors.

    Args:
        tensors: the tensors that are numbered, whole layers of them.
        live: the tensors of the engine that may have elements of these. They have numbers, not weights, when this
            returns or raises.
        load: lets the engine load some tensors, given under their checkpoint names, into `live`, with all
            postprocessing. The tensors of a layer come together.

    Raises:
        UnsupportedTensor: a tensor of the engine is not a plain copy of elements.
    """
    return [piece for group in _groups(tensors) for piece in _Group(group).pieces(live, load)]


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
    """The letters of the dtype of a tensor, written and read on a device."""

    def __init__(self, name: str, width: int, dtype: torch.dtype, device: torch.device) -> None:
        own = letters(width, dtype)
        if len({*own.tolist()}) < own.numel():
            raise UnsupportedTensor(
                f"{name!r} is not followed: {dtype} cannot represent enough whole numbers to tell elements apart"
            )
        self.letters = own.to(device)
        self._sorted, self._order = self.letters.sort()
        self._last = (1 << 8 * dtype.itemsize) - 1  # of all bits
        self._table: torch.Tensor | None = None
        if dtype.itemsize <= 2:
            self._table = torch.zeros(self._last + 1, dtype=torch.int64, device=device)
            self._table[self.letters.long() & self._last] = torch.arange(1 << width, device=device)

    def digits(self, bits: torch.Tensor) -> torch.Tensor:
        """The digits of these bits; arbitrary digits for bits that are not of a digit."""
        if self._table is not None:
            return self._table[bits.long() & self._last]
        place = torch.searchsorted(self._sorted, bits)
        return self._order[place.clamp_(max=self._order.numel() - 1)]


class _Group:
    """Some checkpoint tensors, whose elements are numbered from 0 on."""

    def __init__(self, tensors: list[CheckpointTensor]) -> None:
        self._in_order = tensors
        # Scales of a layer, of which an engine may keep the largest, have numbers that follow one another.
        self.tensors = sorted(tensors, key=lambda tensor: (layer_of(tensor.name), tensor.numel))
        ends = np.cumsum([0, *(tensor.numel for tensor in self.tensors)])
        self.first = ends[:-1]
        self.total = int(ends[-1])
        self.bits = 4 if any(tensor.dtype.itemsize == 1 for tensor in tensors) else 8  # of a digit
        self.places = next(k for k in range(1, 64) if self.total <= 1 << k * self.bits)
        self.mixed_from = self.places + min(self.places, _OPPOSITE_BITS // self.bits)  # the first pass of mixed digits
        self.passes = self.mixed_from + _MIXED_PASSES
        self._alphabets: dict[tuple[torch.dtype, torch.device], _Alphabet] = {}

    def alphabet(self, name: str, dtype: torch.dtype, device: torch.device) -> _Alphabet:
        """The letters of a tensor of this name."""
        if (dtype, device) not in self._alphabets:
            self._alphabets[dtype, device] = _Alphabet(name, self.bits, dtype, device)
        return self._alphabets[dtype, device]

    def pieces(self, live: Mapping[str, torch.Tensor], load: Load) -> list[Piece]:
        """Where these tensors are. Of more tensors than can be kept, only those that a load changes are read."""
        device = _device_of(live.values())
        if sum(map(reach, live.values())) > GROUP_ELEMENTS:
            live = self._changed(live, load, device)
        readings = [_Reading(name, tensor, self) for name, tensor in live.items()]
        for turn in range(self.passes):
            load(self._numbered(turn, device))
            for reading in readings:
                reading.add(turn)
        return [piece for pieces in ordered(lambda reading: [*self._pieces(reading)], readings) for piece in pieces]

    def _changed(
        self, live: Mapping[str, torch.Tensor], load: Load, device: torch.device
    ) -> Mapping[str, torch.Tensor]:
        """The engine's tensors that these are loaded into: two opposite passes change each of their elements."""
        digests = []
        for turn in (self.mixed_from, self.passes - 1):
            load(self._numbered(turn, device))
            digests.append({name: digest({name: tensor}) for name, tensor in live.items()})
        return {name: tensor for name, tensor in live.items() if digests[0][name] != digests[1][name]}

    def _numbered(self, turn: int, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors of one pass, in which every element is a digit of its number, written as above."""
        first = dict(zip((tensor.name for tensor in self.tensors), self.first.tolist(), strict=True))
        for tensor in self._in_order:
            yield tensor.name, self._made(tensor, first[tensor.name], turn, device)

    def _made(self, tensor: CheckpointTensor, first: int, turn: int, device: torch.device) -> torch.Tensor:
        """A tensor of one pass, whose elements have numbers from `first` on."""
        place = _with_room(device, tensor.numel * tensor.dtype.itemsize)
        made = torch.empty(tensor.numel, dtype=tensor.dtype, device=place)
        own_letters = self.alphabet(tensor.name, tensor.dtype, place).letters
        for part, bits in _chunks(patterns(made)):
            number = torch.arange(first + part.start, first + part.start + bits.numel(), device=place)
            bits.copy_(own_letters[self.digit(number, turn)])
        return made.view(tensor.shape)

    def digit(self, number: torch.Tensor, turn: int) -> torch.Tensor:
        """The digit of a pass. The last have digits mixed from all others.

        Any number comes as a small letter and as a large one: rounding shows in one, and a limit in the other. Of two
        letters, the opposite of the larger one is the smaller one.
        """
        most = (1 << self.bits) - 1
        if turn < self.places:
            return (number >> turn * self.bits) & most
        if turn < self.mixed_from:
            return most - self.digit(number, turn - self.places)
        last = turn - self.mixed_from
        if last in (1, 2):
            few = mixed(number, _MIX[1]) & (most >> self.bits // 2)
            return few if last == 1 else (most >> 1) - few
        digit = mixed(number, _MIX[0]) & most
        return digit if last == 0 else most - digit

    def _pieces(self, reading: _Reading) -> Iterator[Piece]:
        """The pieces in one tensor of the engine."""
        if reading.numbers is None:
            return
        number = reading.numbers.all()
        by_tensor: dict[int, list[StridedBoxes]] = {}
        step = reading.width * max(1, _chunk(number.device) // reading.width)
        for low in range(0, number.numel(), step):
            for tensor, boxes in self._boxes(number[low : low + step], low, reading.width):
                by_tensor.setdefault(tensor, []).append(boxes)
        name = reading.name
        for tensor, chunks in by_tensor.items():
            boxes = join_all(StridedBoxes.concatenate(chunks))
            source = self.tensors[tensor].name
            if boxes.index.size > MAX_PIECES:
                raise UnsupportedTensor(f"{source!r} is in {boxes.index.size} pieces in {name!r}: the engine packs it")
            for region, offset, strides in boxes.each():
                yield Piece(source, region, name, offset, strides)

    def _boxes(self, number: torch.Tensor, low: int, width: int) -> Iterator[tuple[int, StridedBoxes]]:
        """The boxes of the elements in some places from `low` on, by tensor."""
        rows = number.view(-1, width)
        if width > 1 and bool((rows[:, 0] >= 0).all()) and bool((rows.diff(dim=1) == 1).all()):
            heads = rows[:, 0].cpu().numpy()  # rows are whole, as in most tensors
            at = np.arange(low, low + number.numel(), width)
            boxes = [(t, place, index, self.tensors[t].shape) for t, place, index in self._by_tensor(at, heads)]
            if all(shape and (index % shape[-1] + width <= shape[-1]).all() for _, _, index, shape in boxes):
                for tensor, place, index, shape in boxes:
                    yield tensor, StridedBoxes.of(place, index, shape, width)
                return
        numbers = number.cpu().numpy()
        at = np.flatnonzero(numbers != _NONE)
        for tensor, place, index in self._by_tensor(at + low, numbers[at]):
            yield tensor, StridedBoxes.of(place, index, self.tensors[tensor].shape).joined()

    def _by_tensor(self, at: Numbers, number: Numbers) -> Iterator[tuple[int, Numbers, Numbers]]:
        """Elements by tensor: their places in memory, and their positions in the tensor."""
        owner = np.searchsorted(self.first, number, side="right") - 1
        for tensor in np.unique(owner).tolist():
            in_tensor = owner == tensor
            yield tensor, at[in_tensor], number[in_tensor] - self.first[tensor]


class _Reading:
    """What one tensor of the engine has of a group, as one pass after the other tells."""

    def __init__(self, name: str, tensor: torch.Tensor, group: _Group) -> None:
        self.name = name
        self.width = _width(tensor)
        self.numbers: _Numbers | None = None  # of a tensor that has changed
        self._tensor = tensor
        self._group = group
        self._first = torch.empty(0)  # the bits after the first pass, until they change

    def add(self, turn: int) -> None:
        """Read what a pass has left in the tensor."""
        memory = span(self._tensor)
        if turn == 0:
            self._first = patterns(memory).to(_with_room(memory.device, memory.nbytes), copy=True)
        elif self.numbers is not None:
            self.numbers.add(turn, patterns(memory))
        elif not has_bits(memory, self._first):
            self.numbers = _Numbers(self.name, memory.dtype, self._first, self._group)
            for earlier in range(turn):
                self.numbers.add(earlier, self._first)
            self.numbers.add(turn, patterns(memory))
            self._first = torch.empty(0)


class _Numbers:
    """The numbers of the checkpoint elements in one tensor of the engine; `_NONE` where there is none."""

    def __init__(self, name: str, dtype: torch.dtype, first: torch.Tensor, group: _Group) -> None:
        device = _with_room(first.device, first.numel() * _STATE_BYTES)
        self._name = name
        self._group = group
        self._alphabet = group.alphabet(name, dtype, device)
        self._first = first.to(device)
        self._number = torch.zeros(first.shape, dtype=torch.int64, device=device)
        self._is_constant = torch.ones(first.shape, dtype=torch.bool, device=device)

    def add(self, turn: int, bits: torch.Tensor) -> None:
        """Take the digits of a pass, and give up numbers that these contradict."""
        for place, part in _chunks(bits):
            self._add(turn, place, part.to(self._first.device))

    def _add(self, turn: int, place: slice, bits: torch.Tensor) -> None:
        number = self._number[place]
        is_constant = self._is_constant[place]
        is_constant &= bits == self._first[place]
        digit = self._alphabet.digits(bits)
        right = self._alphabet.letters[digit] == bits
        if turn < self._group.places:
            number |= digit << turn * self._group.bits
        else:
            right &= self._group.digit(number, turn) == digit
        number.masked_fill_(~right, _NONE)

    def all(self) -> torch.Tensor:
        """The numbers after the last pass.

        Raises:
            UnsupportedTensor: an element is neither a copy of one of the checkpoint nor constant.
        """
        self._number.masked_fill_(self._number >= self._group.total, _NONE)
        if not bool(((self._number != _NONE) | self._is_constant).all()):
            raise UnsupportedTensor(
                f"{self._name!r} is not a copy of elements of the checkpoint: the engine quantizes, packs or computes "
                "it when it loads, so that changes cannot be written into it"
            )
        return self._number


def mixed(number: torch.Tensor, factor: int = _MIX[0]) -> torch.Tensor:
    """Numbers without a pattern in their lower bits."""
    return (number * factor) >> 40


def _chunk(device: torch.device) -> int:
    """How many elements are processed together on a device."""
    return _CHUNK if device.type == "cpu" else _GPU_CHUNK


def _chunks(bits: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
    """Some elements after the other, and where they are."""
    step = _chunk(bits.device)
    return ((slice(low, low + step), bits[low : low + step]) for low in range(0, bits.numel(), step))


def _device_of(tensors: Iterable[torch.Tensor]) -> torch.device:
    """The GPU of some tensors; the host if all are there, or if they are on several GPUs."""
    devices = {tensor.device for tensor in tensors} - {_HOST}
    return devices.pop() if len(devices) == 1 else _HOST


def _with_room(device: torch.device, nbytes: int) -> torch.device:
    """A device, if so many bytes leave the engine's load as many; otherwise the host."""
    if device.type != "cuda":
        return device
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return device if 2 * nbytes <= torch.cuda.mem_get_info(device)[0] + cached else _HOST


def _width(tensor: torch.Tensor) -> int:
    """Elements of a row of a contiguous tensor; 1 for other tensors."""
    return tensor.shape[-1] if tensor.dim() and tensor.numel() and tensor.is_contiguous() else 1
