"""Where an engine keeps the elements of a checkpoint, found by watching what its loader copies where.

    made-up tensors ──► the engine's own load, every operation of PyTorch watched ──► copies ──► pieces ──► compare

One load is enough, of made-up tensors here, or the engine's own first one (`first_load`). What other operations than
copies make of a checkpoint tensor is left to `numbering`, which loads numbers; so are elements that were read as Python
numbers, and those that did not arrive where they were copied to, as when a loader has threads of its own.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from ..weights.region import row_major
from .copies import ElementCopy, Untraceable
from .made_up import Alphabet, MadeUp
from .pieces import CheckpointTensor, Load, Piece, has_bits, reach

_COPIES = {torch.ops.aten._to_copy.default, torch.ops.aten.clone.default}  # noqa: SLF001
_VIEWS = {  # most of what a load does; but for classes of tensors that do otherwise, none of them copies
    torch.ops.aten.detach.default,
    torch.ops.aten.select.int,
    torch.ops.aten.slice.Tensor,
    torch.ops.aten.view.default,
    torch.ops.aten.view.dtype,
}
_EMPTY = {"empty_like", "full_like", "new_empty", "new_full"}
_FILLED = {"zeros": 0, "zeros_like": 0, "new_zeros": 0, "ones": 1, "ones_like": 1, "new_ones": 1}
_CONSTANTS = {torch.ops.aten.zero_.default, torch.ops.aten.fill_.Scalar}
_FRESH = {torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default}  # made of Python numbers


class _Arrived(NamedTuple):
    """Elements of a checkpoint tensor in some memory: the range that they are in, and the copy from the tensor."""

    at: int
    end: int
    name: str
    copy: ElementCopy

    @classmethod
    def of(cls, name: str, copy: ElementCopy) -> _Arrived:
        return cls(copy.at, copy.end, name, copy)


_TOLD = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}  # operations that tell Python of elements


class Fill(NamedTuple):
    """A place in some memory that was filled with a number."""

    place: ElementCopy
    number: Any

    @property
    def numel(self) -> int:
        return math.prod(dimension.size for dimension in self.place.dimensions)


@dataclass
class _Memory:
    """What one memory has of the checkpoint: copies that were followed, and tensors of which it has something else.

    `fills` are constants; some may have been written over since.
    """

    itemsize: int
    copies: list[_Arrived] = field(default_factory=list)
    unclear: set[str] = field(default_factory=set)
    end: int = 0  # of the last copy
    is_checkpoint: bool = False  # a tensor of the checkpoint, as it was registered
    fills: list[Fill] = field(default_factory=list)

    @property
    def names(self) -> set[str]:
        return self.unclear.union(arrived.name for arrived in self.copies)

    def add(self, copies: Iterable[_Arrived]) -> None:
        """Note elements that have come."""
        for arrived in copies:
            self.copies.append(arrived)
            self.end = max(self.end, arrived.end)

    def read(self, copy: ElementCopy, itemsize: int) -> list[_Arrived]:
        """What a copy, whose source is this memory, takes of the checkpoint."""
        if self.copies and self.itemsize != itemsize:
            raise Untraceable
        start = copy.source
        end = copy.source_end
        inside = ((name, copy.through(earlier)) for at, stop, name, earlier in self.copies if at < end and start < stop)
        return [_Arrived.of(name, part) for name, part in inside if part is not None]

    def overwrite(self, copy: ElementCopy, tensor: torch.Tensor) -> None:
        """Forget what a copy to a tensor in this memory takes the place of."""
        self.is_checkpoint = False
        if tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes():
            self.copies = []
            self.unclear = set()
            self.end = 0
            self.fills = []
        elif self.copies and self.itemsize != tensor.element_size():
            raise Untraceable
        self.itemsize = tensor.element_size()
        self.fills = [fill for fill in self.fills if not _replaces(copy, fill.place)]
        if copy.at < self.end:
            end = copy.end
            self.copies = [
                arrived
                for arrived in self.copies
                if arrived.end <= copy.at or end <= arrived.at or not copy.overwrites(arrived.copy)
            ]

    def blur(self) -> None:
        """Give up on all copies."""
        self.is_checkpoint = False
        self.unclear = self.names
        self.copies = []


OnCopy = Callable[[str, ElementCopy, torch.Tensor, torch.Tensor], None]


class LoadWatch(TorchDispatchMode):  # type: ignore[misc]  # PyTorch has no types for it
    """Follows the elements of checkpoint tensors through copies while it is entered.

    An operation that it fails to follow is done all the same; `failure` is the first such error.

    Args:
        on_copy: Is called as soon as bits of a checkpoint tensor are copied as they are, with its name, the copy, the
            tensor that has them now and the one that they come from.
    """

    def __init__(self, on_copy: OnCopy | None = None) -> None:
        super().__init__()
        self._on_copy = on_copy
        self.failure: Exception | None = None
        self._memories: dict[int, _Memory] = {}  # by the address of their storage
        self.taken: dict[str, set[tuple[ElementCopy, torch.dtype]]] = {}  # what was copied of a tensor, to which dtypes
        self.read: set[str] = set()  # tensors of which elements were read: anything may have been made of them
        self._dtypes: dict[str, torch.dtype] = {}  # of tensors of the checkpoint

    def register(self, name: str, tensor: torch.Tensor) -> None:
        """A contiguous tensor of the checkpoint, which begins its storage."""
        strides = row_major(tuple(tensor.shape))
        memory = _Memory(tensor.element_size(), is_checkpoint=True)
        if tensor.numel():
            memory.add([_Arrived.of(name, ElementCopy.of(tuple(tensor.shape), 0, strides, 0, strides))])
        self._memories[_address(tensor)] = memory
        self._dtypes[name] = tensor.dtype

    def memory(self, tensor: torch.Tensor) -> _Memory | None:
        """What the memory of a tensor has of the checkpoint."""
        return self._memories.get(_address(tensor))

    def read_unseen(self, tensor: torch.Tensor) -> None:
        """What becomes of the elements of a tensor cannot be seen from now on."""
        if (memory := self.memory(tensor)) is not None:
            self.read |= memory.names

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func in _VIEWS and not types:
            return out
        try:
            self._note(func, args, kwargs, out)
        except Exception as error:  # noqa: BLE001  # the engine's load does not depend on it
            self.failure = self.failure or error.with_traceback(None)  # whose frames have tensors
        return out

    def _note(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        if func in _CONSTANTS:
            self._fill(args[0], args[1] if len(args) > 1 else None)
            return
        name = func._schema.name.partition("::")[2]  # noqa: SLF001
        if func in (torch.ops.aten.copy_.default, torch.ops.aten.fill_.Tensor):
            if isinstance(args[1], torch.Tensor):
                self._write(args[0], args[1], is_copy=func is torch.ops.aten.copy_.default)
            else:  # torch hands numbers on as they are
                self._fill(args[0], args[1])
        elif func in _COPIES:
            self._make([out], args)
            self._write(out, args[0], is_copy=True)
        elif func is torch.ops.aten.cat.default:
            self._join(out, args[0], args[1] if len(args) > 1 else kwargs.get("dim", 0))
        elif func is torch.ops.aten.stack.default:
            axis = args[1] if len(args) > 1 else kwargs.get("dim", 0)
            self._join(out, [tensor.unsqueeze(axis) for tensor in args[0]], axis)
        elif func in _FRESH:
            self._make([out], ())
            if out.numel() == 1 and not out.is_meta:
                self._fill(out, out.item())
        elif name in _EMPTY:
            self._make(_tensors(out), args)
        elif name in _FILLED:
            self._make(_tensors(out), args)
            self._fill(out, _FILLED[name])
        else:
            self._mix(func, args, kwargs, out)

    def _make(self, made: Iterable[Any], inputs: Any) -> list[_Memory]:
        """New memory of results, if it is not that of an input: what was known of its address belongs to others."""
        known = {_address(tensor) for tensor in _tensors(inputs)}
        memories = []
        for tensor in made:
            if (address := _address(tensor)) and address not in known:
                self._memories[address] = _Memory(tensor.element_size())
                memories.append(self._memories[address])
        return memories

    def _join(self, out: torch.Tensor, tensors: Sequence[torch.Tensor], axis: int) -> None:
        self._make([out], tensors)
        start = 0
        for tensor in tensors:
            if tensor.numel():
                self._write(out.narrow(axis, start, tensor.shape[axis]), tensor)
                start += tensor.shape[axis]

    def _fill(self, tensor: torch.Tensor, value: Any) -> None:
        """A constant. If it was made of a number that was read, the tensor of this is lost sight of already."""
        self._write(tensor, None)
        if (memory := self.memory(tensor)) is not None and tensor.numel():
            with contextlib.suppress(Untraceable):
                memory.fills.append(Fill(_copy(tensor, tensor), 0 if value is None else value))

    def _mix(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Any other operation: it makes something unclear of what it reads."""
        inputs = _tensors((args, kwargs))
        if not _TOLD.isdisjoint(func.tags):
            for tensor in inputs:
                self.read_unseen(tensor)
        read = {name for tensor in inputs if (memory := self.memory(tensor)) for name in memory.names}
        for memory in self._make(_tensors(out), inputs):
            memory.unclear |= read
        if not read or not func._schema.is_mutable:  # noqa: SLF001
            return
        for argument, value in zip(func._schema.arguments, args, strict=False):  # noqa: SLF001
            if argument.alias_info is not None and argument.alias_info.is_write:
                self._blur(_tensors(value), read)
        self._blur(_tensors([*kwargs.values()]), read)

    def _blur(self, tensors: Iterable[torch.Tensor], names: set[str]) -> None:
        for tensor in tensors:
            if address := _address(tensor):
                memory = self._memories.setdefault(address, _Memory(tensor.element_size()))
                memory.blur()
                memory.unclear |= names

    def _write(self, tensor: torch.Tensor, source: torch.Tensor | None, *, is_copy: bool = False) -> None:
        """Elements of a source, or constants, are written to a tensor; all by PyTorch's own copy, or otherwise."""
        address = _address(tensor)
        if not address or not tensor.numel() or _is_same(tensor, source):
            return
        memory = self._memories.setdefault(address, _Memory(tensor.element_size()))
        known = _Memory(1) if source is None else self.memory(source) or _Memory(1)
        names = known.names
        unclear = set(known.unclear)
        try:
            copy = _copy(tensor, tensor if source is None else source)
            arrived = [] if source is None else self._arrived(known, copy, tensor, source)
            memory.overwrite(copy, tensor)
        except Untraceable:
            memory.blur()
            memory.unclear |= names
        else:
            memory.add(arrived)
            memory.unclear |= unclear
            for _, _, name, part in arrived:
                self.taken.setdefault(name, set()).add((part.at_source(), tensor.dtype))
                if is_copy and source is not None and known.is_checkpoint:
                    self._tell_of_copy(name, part, tensor, source)

    def _arrived(self, known: _Memory, copy: ElementCopy, tensor: torch.Tensor, source: torch.Tensor) -> list[_Arrived]:
        """What a tensor gets of the checkpoint by a copy from a source, of whose memory this is known.

        Raises:
            Untraceable: it may have been rounded on the way, since it comes from a dtype that does not have all of it.
        """
        arrived = known.read(copy, source.element_size())
        if source.dtype != tensor.dtype and not all(_holds_all(source.dtype, self._dtypes[a.name]) for a in arrived):
            raise Untraceable
        return arrived

    def _tell_of_copy(self, name: str, copy: ElementCopy, tensor: torch.Tensor, source: torch.Tensor) -> None:
        if self._on_copy is None or self.failure is not None or not _keeps_bits(tensor, source):
            return
        with torch._C.DisableTorchFunction():  # noqa: SLF001  # what the caller reads is not read by the loader
            self._on_copy(name, copy, tensor, source)


def _holds_all(dtype: torch.dtype, other: torch.dtype) -> bool:
    """Whether a dtype has all numbers of another one, so that a cast to it loses nothing.

    Example:
        >>> _holds_all(torch.float32, torch.bfloat16), _holds_all(torch.float16, torch.bfloat16)
        (True, False)
    """
    if dtype == other:
        return True
    if dtype.is_floating_point and other.is_floating_point:
        wide = torch.finfo(dtype)
        narrow = torch.finfo(other)
        is_wide = wide.max >= narrow.max and wide.tiny * wide.eps <= narrow.tiny * narrow.eps
        return is_wide and wide.eps <= narrow.eps
    with contextlib.suppress(RuntimeError):  # of two dtypes that PyTorch does not compute with
        whole = not dtype.is_floating_point and not other.is_floating_point
        return whole and torch.promote_types(dtype, other) == dtype
    return False


def _replaces(copy: ElementCopy, place: ElementCopy) -> bool:
    """Whether a copy is known to write to all elements of a place."""
    with contextlib.suppress(Untraceable):
        return copy.at < place.end and place.at < copy.end and copy.overwrites(place)
    return False


def _keeps_bits(tensor: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether a copy by PyTorch is nothing else: no view that computes, and no class or mode that does more."""
    if tensor.dtype != source.dtype or _get_current_dispatch_mode() is not None:
        return False
    return not any(
        one.is_neg() or one.is_conj() or type(one).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
        for one in (tensor, source)
    )


def _is_same(tensor: torch.Tensor, other: torch.Tensor | None) -> bool:
    """Whether two tensors are the same elements of one memory."""
    if other is None or _address(tensor) != _address(other) or tensor.dtype != other.dtype:
        return False
    places = [(one.storage_offset(), one.shape, one.stride()) for one in (tensor, other)]
    return places[0] == places[1]


def _copy(tensor: torch.Tensor, source: torch.Tensor) -> ElementCopy:
    source = source.expand(tensor.shape)
    offsets = int(tensor.storage_offset()), int(source.storage_offset())
    return ElementCopy.of(tuple(tensor.shape), offsets[0], tensor.stride(), offsets[1], source.stride())


def _tensors(values: Any) -> list[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        return [values]
    if isinstance(values, dict):
        return _tensors([*values.values()])
    return [tensor for value in values for tensor in _tensors(value)] if isinstance(values, list | tuple) else []


def _address(tensor: torch.Tensor) -> int:
    """The address of a tensor's storage; 0 where it has none."""
    with contextlib.suppress(RuntimeError, NotImplementedError):  # sparse tensors, and others without a storage
        return 0 if tensor.is_meta else tensor.untyped_storage().data_ptr()
    return 0


def watch_pieces(
    tensors: Iterable[CheckpointTensor], live: Mapping[str, torch.Tensor], load: Load
) -> tuple[list[Piece], set[str]]:
    """Find out where the elements of checkpoint tensors are in an engine's tensors by watching one load.

    Args:
        tensors: the tensors of the checkpoint.
        live: the tensors of the engine, which have made-up numbers afterwards.
        load: lets the engine load tensors, as for `find_pieces`.

    Returns:
        The pieces that were found, and the names of checkpoint tensors which could not be followed.
    """
    with MadeUp(tensors) as made_up:
        watch = LoadWatch()
        with watch:
            load(made_up.load(watch.register))
        if watch.failure is not None:
            return [], {tensor.name for tensor in made_up.tensors}
        pieces, unclear = arrived_pieces(watch, {tensor.name: tensor for tensor in made_up.tensors}, live)
        wrong = {piece.live for piece in _wrong(pieces, live, made_up)}
    unclear |= watch.read.union(piece.tensor for piece in pieces if piece.live in wrong)
    return pieces, unclear


def arrived_pieces(
    watch: LoadWatch, tensors: Mapping[str, CheckpointTensor], live: Mapping[str, torch.Tensor]
) -> tuple[list[Piece], set[str]]:
    """The pieces in an engine's tensors after a load that was watched, and the names of tensors that are unclear."""
    pieces: list[Piece] = []
    unclear: set[str] = set()
    for label, tensor in live.items():
        memory = watch.memory(tensor)
        if memory is None:
            continue
        start = int(tensor.storage_offset())
        end = start + reach(tensor)
        own = [arrived for arrived in memory.copies if arrived.at < end and start < arrived.end]
        beyond = any(arrived.at < start or end < arrived.end for arrived in own)
        if memory.unclear or memory.itemsize != tensor.element_size() or beyond:
            unclear |= memory.names
            continue
        for _, _, name, copy in own:
            try:
                region, strides = copy.region(tensors[name].shape)
            except Untraceable:
                unclear |= memory.names
                break
            pieces.append(Piece(name, region, label, copy.at - start, strides))
    return pieces, unclear


def _wrong(pieces: Iterable[Piece], live: Mapping[str, torch.Tensor], made_up: MadeUp) -> Iterator[Piece]:
    """Pieces that do not have the made-up numbers."""
    tensors = {tensor.name: tensor for tensor in made_up.tensors}
    sources: dict[torch.device, Callable[[CheckpointTensor], torch.Tensor]] = {}
    for piece in pieces:
        view = piece.view(live)
        if view.device not in sources:
            sources[view.device] = made_up.on(view.device)
        expected = sources[view.device](tensors[piece.tensor])[piece.region.slices]
        if not has_bits(view, expected.to(view.dtype)):
            yield piece


def computed_pieces(
    tensors: Iterable[CheckpointTensor],
    pieces: Iterable[Piece],
    live: Mapping[str, torch.Tensor],
    load: Load,
    alphabet: Callable[[torch.dtype], Alphabet],
) -> list[Piece]:
    """Let the engine load tensors of an alphabet, and tell which pieces then have other bits: these are no copies."""
    with MadeUp(tensors, alphabet) as made_up:
        load(made_up.load(lambda *_: None))
        return [*_wrong(pieces, live, made_up)]
