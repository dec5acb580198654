"""Tracking: which elements changed, told by every step of the optimizer, so that no publish has to search for them.

    step ──► old bits, kept while it lasts ──► compare ──► marks: one bit per element, ORed over all steps
                                                      └──► how the digest of the part moved

Published bits change seldom, the parameters behind them at every step, so what is compared are the published bits. Of
every part there are two bitmaps: what is marked since the last `weights`, and what was handed out and is not committed
yet. A publish that fails loses nothing, and steps go on while one is in flight.

What the optimizer does not write (buffers, frozen parameters) has no marks, and is compared in full at every publish.
So is, once, a part that was not tracked all the time since the last publish, or that something else wrote to: torch
counts the writes to a tensor. Writes that it does not count, through `.data` or NumPy, must not go to parameters that
are tracked, unless they happen between `before` and `after`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ..bitmap import Bitmap
from ..bits import BY_NAME, Bits
from ..digest import Digest
from ..errors import TensorMismatch
from ..kernels import cpu
from ..memory import Foreign, Memory, _span, foreign, memories, memory_of, table_of
from ..parallel import ordered
from ..patch.diff import _scan
from ..pieces import Batch, Geometry, Held, batches, outline
from ..region import Region, whole
from ..shards import Part, Place, Shards
from ..table import TensorSpec, TensorTable
from .module import Source, module

Key = tuple[str, Region]
Cast = Callable[[TensorSpec], Any]


def track(
    optimizer: Any,
    source: Any,
    *,
    params: Iterable[Any] | None = None,
    masters: Mapping[Any, Any] | None = None,
    cast: Any = None,
    threads: int | None = None,
) -> Tracker:
    """A source that knows where changes are, because it looks at every step of an optimizer.

    optimizer: a torch optimizer, or several. None where the weights are written by something else: `Tracker.step` goes
        around that, and `params` are the tensors it writes.
    source: a torch module, or a source whose parts lie in the memory of the optimizer's parameters.
    masters: where the optimizer has fp32 masters of narrower weights: the master of each, by the weight or its name.
        After a step their cast is compared with the weights and then written there, so that nobody else has to.
    cast: where the optimizer's parameters are wider than what is published: the dtype of all floating-point tensors
        that are wider, or a function from a name to a dtype, or to None for a tensor that is published as it is.

    >>> import torch, sparserl
    >>> model = torch.nn.Linear(4, 4, bias=False, dtype=torch.bfloat16)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    >>> source = sparserl.sources.track(optimizer, model)
    >>> _ = source.weights(); source.committed()
    >>> model.weight.grad = torch.zeros(4, 4, dtype=torch.bfloat16); model.weight.grad[1, 2] = 3.0
    >>> optimizer.step()
    >>> source.weights().parts[0].marks.between(0, 16).tolist()
    [6]
    """
    if optimizer is None and params is None:
        raise TensorMismatch("without an optimizer, `params` must say which tensors are written")
    optimizers = [] if optimizer is None else [*optimizer] if isinstance(optimizer, Sequence) else [optimizer]
    given = source if isinstance(source, Source) else module(source)
    return Tracker(optimizers, given, tuple(params or ()), masters or {}, _by_spec(cast), threads)


class Tracker:
    """The weights of a source, with marks. Made by `track`; for one publisher, which calls `committed`."""

    def __init__(
        self,
        optimizers: Sequence[Any],
        source: Source,
        params: tuple[Any, ...],
        masters: Mapping[Any, Any],
        cast: Cast | None,
        threads: int | None,
    ) -> None:
        self._optimizers, self._source, self._params = optimizers, source, params
        self._masters, self._cast, self._threads = masters, cast, threads
        self._table: TensorTable | None = None
        self._tracks: dict[Key, _Track] = {}
        self._open: dict[Key, Bits | None] = {}  # parts in a step that is not over: old bits; None: the weight has them
        self._uncounted = _Spans(())
        self._hooks: list[Any] = []
        for optimizer in optimizers:
            self._hooks.append(optimizer.register_step_pre_hook(self._before_step))
            self._hooks.append(optimizer.register_step_post_hook(lambda *_: self.after()))

    def weights(self) -> Shards:
        """All weights; marks tell where changes since the last committed version can be."""
        self.after()  # a step that raised has no end of its own
        shards = self._shards()
        self._follow(shards)
        return Shards(shards.table, [self._handed(part) for part in shards.parts])

    def committed(self) -> None:
        """The weights that were handed out last are a committed version: changes count from there."""
        for track in list(self._tracks.values()):
            track.handed = None

    def before(self) -> None:
        """What tracked parameters are written by begins. A step that was not ended is ended first."""
        self._begin(self._written())

    def after(self) -> None:
        """It is over: find what it changed. Does nothing if nothing has begun."""
        if not self._open:
            return
        shards = self._shards()
        parts = {_key(part): part for part in shards.parts if _key(part) in self._open}
        now = _memory({key: part.data for key, part in parts.items()})
        copies = {key: bits for key, bits in self._open.items() if bits is not None}
        masters = {key: bits for key, bits in self._mastered(shards).items() if key in parts and key not in copies}
        self._compare(shards.table, _memory(copies), now)
        self._compare(shards.table, now, _memory(masters), land=True)
        for key, part in parts.items():
            if key in self._tracks:
                self._tracks[key].seen = self._state(part)
        self._open = {}

    @contextmanager
    def step(self) -> Iterator[None]:
        """Goes around whatever writes the tracked parameters."""
        self.before()
        try:
            yield
        finally:
            self.after()

    def close(self) -> None:
        """Take the hooks off the optimizers."""
        for hook in self._hooks:
            hook.remove()

    # -- steps ---------------------------------------------------------------------------------------------------------

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """A step of torch's own optimizers writes to parameters with gradients, and to no others."""
        params = _params_of(optimizer)
        closure = any(a is not None and a is not optimizer for a in (*args, *kwargs.values()))
        if type(optimizer).__module__.startswith("torch.optim.") and not closure:
            params = [p for p in params if p.grad is not None]
        self._begin(params)

    def _begin(self, params: Iterable[Any]) -> None:
        self.after()  # a step that raised has no end of its own
        shards = self._shards()
        masters = self._follow(shards)
        spans = _Spans(params)
        due = [part for part in shards.parts if _key(part) in self._tracks and spans.have(_root(part, masters))]
        plain = [part for part in due if _key(part) not in masters]
        bits = ordered(_copy, (memory_of(part.tensor, part.data) for part in plain), self._threads)
        opened: dict[Key, Bits | None] = {_key(part): None for part in due}
        opened.update((_key(part), copy) for part, copy in zip(plain, bits, strict=True))
        self._open = opened

    def _written(self) -> list[Any]:
        """All that steps may write to; what is frozen is not among it."""
        params = [p for optimizer in self._optimizers for p in _params_of(optimizer) if p.requires_grad]
        return [*params, *self._params]

    def _follow(self, shards: Shards) -> dict[Key, Foreign]:
        """Begin to track parts that are written from now on, let go of others, notice writes by somebody else."""
        masters, spans = self._mastered(shards), _Spans(self._written())
        self._uncounted = _Spans(self._params)
        tracks: dict[Key, _Track] = {}
        for part in shards.parts:
            if spans.have(_root(part, masters)):
                track = self._tracks.get(_key(part)) or _Track(part.region.numel)
                if (state := self._state(part)) != track.seen:
                    track.now.unknown, track.seen = True, state
                tracks[_key(part)] = track
        self._tracks = tracks
        return masters

    def _state(self, part: Part) -> object:
        """Where a part is, and how often torch has counted a write to it: all views of a buffer are counted as one.

        So nothing is made of it where `params` are given, which may be ranges of a buffer that others write to, too.
        """
        data = part.data.origin if isinstance(part.data, Foreign) else part.data
        if not hasattr(data, "data_ptr") or self._uncounted.have(data):
            return None
        return data.data_ptr(), None if data.is_inference() else data._version  # noqa: SLF001

    # -- parts ---------------------------------------------------------------------------------------------------------

    def _shards(self) -> Shards:
        """What the source has now, cast."""
        given = self._source.weights()
        shards = given if isinstance(given, Shards) else Shards.of(self._known(table_of(memories(given))), given)
        if self._cast is None:
            return shards
        specs = {spec.name: spec for spec in shards.table.specs}
        made = {name: dtype for name, spec in specs.items() if (dtype := self._cast(spec)) is not None}
        for name, dtype in made.items():
            specs[name] = specs[name]._replace(dtype=BY_NAME[str(dtype).removeprefix("torch.")])
        parts = [
            replace(part, data=foreign(part.data, made[part.tensor])) if part.tensor in made else part
            for part in shards.parts
        ]
        return Shards(self._known(TensorTable(specs.values())), parts)

    def _known(self, table: TensorTable) -> TensorTable:
        """The table of last time if it is the same: what was computed of it is still there."""
        if self._table is None or self._table != table:
            self._table = table
        return self._table

    def _mastered(self, shards: Shards) -> dict[Key, Foreign]:
        """Masters of parts, cast: known by the name of a tensor, or by the weight in whose memory a part lies."""
        weights = [(*_extent(_local(w)), w) for w in self._masters if not isinstance(w, str)]
        weights.sort(key=lambda found: found[:2])
        out = {}
        for part in shards.parts if self._masters else ():
            weight: Any = part.tensor
            if weight not in self._masters:
                low, high = _extent(part.data)
                i = bisect_right(weights, low, key=lambda found: found[0]) - 1
                if i < 0 or high > weights[i][1]:
                    continue
                weight = weights[i][2]
            out[_key(part)] = foreign(_like(part, weight, _local(self._masters[weight])), part.data.dtype)
        return out

    def _handed(self, part: Part) -> Part:
        """A part with all its marks since the last committed version; what is handed out is not written to any more."""
        track = self._tracks.get(_key(part))
        if track is None:
            return part
        track.now.unite(track.handed)
        track.handed, track.now = track.now, _Since(part.region.numel)
        if track.handed.unknown:
            return part
        moved = track.handed.moved
        return replace(part, marks=track.handed.marks, moved=(moved.first, moved.second))

    def _compare(
        self, table: TensorTable, old: Mapping[Key, Memory], new: Mapping[Key, Memory], land: bool = False
    ) -> None:
        """Mark where old and new differ; with `land`, then write the new bits over the old ones."""
        keys = {_place(table, key): key for key in old.keys() & new.keys()}
        was, now = (Held(table, [(place, m[key]) for place, key in keys.items()]) for m in (old, new))
        places = was.places
        for found in ordered(lambda batch: _Found(was, now, batch), batches(table, places), self._threads):
            for tensor, region, positions, moved in found.rows():
                track = self._tracks.get(keys[places[was.part(tensor, region)]])
                if track is not None:
                    track.now.marks.add(positions, found.offset)
                    track.now.moved += moved
            if land:
                found.land(was)


class _Found:
    """The changes of one batch."""

    def __init__(self, was: Held, now: Held, batch: Batch) -> None:
        old, alive = was.read(batch)
        new, also = now.read(batch)
        self._tag = np.empty(0, batch.dtype.uint)
        self._positions, self._before, self._after, counts = _scan(self._tag, old, new, batch.numel)
        del alive, also  # copies may go only now
        live = np.flatnonzero(counts)
        self._tensor, self._count, self.offset = batch.tensor[live], counts[live], batch.offset
        self._region = [batch.region[i] for i in live.tolist()]
        self._moved = self._moves(outline(was.table, self._tensor, self._region))

    def _moves(self, g: Geometry) -> list[Digest]:
        """How the changes of each part move its digest."""
        out = []
        for e, some in enumerate(self._slices()):
            row = slice(e, e + 1)
            where = self._count[row], g.start[row], g.dims[row], g.size[row], g.outside[row], g.keys[row]
            moved = cpu.digest_delta(*where, self._positions[some], self._before[some], self._after[some])
            out.append(Digest(int(moved[0]), int(moved[1])))
        return out

    def _slices(self) -> list[slice]:
        ends = np.cumsum(self._count).tolist()
        return [slice(end - n, end) for end, n in zip(ends, self._count.tolist(), strict=True)]

    def rows(self) -> Iterator[tuple[int, Region | None, npt.NDArray[np.uint32], Digest]]:
        """Part by part: the positions of its changes, and how they move its digest."""
        positions = [self._positions[some] for some in self._slices()]
        return zip(self._tensor.tolist(), self._region, positions, self._moved, strict=True)

    def land(self, was: Held) -> None:
        """Write the new bits over the old ones."""
        g = was.geometry(self._tensor, self._region)
        cpu.scatter(self._tag, self._count, g.first, g.dims, g.size, g.inside, self._positions, self._after)


class _Since:
    """What is known of the changes of a part since some moment."""

    def __init__(self, numel: int, unknown: bool = False) -> None:
        self.marks, self.moved, self.unknown = Bitmap(numel), Digest(), unknown

    def unite(self, other: _Since | None) -> None:
        if other is not None:
            self.marks.unite(other.marks)
            self.moved += other.moved
            self.unknown |= other.unknown


class _Track:
    """A part that steps write to."""

    def __init__(self, numel: int) -> None:
        self.now = _Since(numel, unknown=True)  # what was before is not known
        self.handed: _Since | None = None  # handed out, not committed
        self.seen: object = None  # where the part was, and how often it had been written to


class _Spans:
    """The memory of some tensors."""

    def __init__(self, tensors: Iterable[Any]) -> None:
        found = []
        for tensor in map(_local, tensors):
            low, high = _extent(tensor)
            if high - low == tensor.numel() * tensor.itemsize:  # a tensor with holes in it says nothing about these
                found.append((low, high))
        self._low: list[int] = []
        self._high: list[int] = []
        for low, high in sorted(found):
            if self._low and low <= self._high[-1]:
                self._high[-1] = max(high, self._high[-1])
            else:
                self._low.append(low)
                self._high.append(high)

    def have(self, tensor: Any) -> bool:
        """Whether a tensor lies in this memory."""
        low, high = _extent(tensor)
        i = bisect_right(self._low, low) - 1
        return low < high and i >= 0 and high <= self._high[i]


def _root(part: Part, masters: Mapping[Key, Foreign]) -> Any:
    """The tensor that a step writes to, when it changes a part."""
    data = masters.get(_key(part), part.data)
    return data.origin if isinstance(data, Foreign) else data


def _memory(tensors: Mapping[Key, Any]) -> dict[Key, Memory]:
    return {key: memory_of(key[0], data) for key, data in tensors.items()}


def _by_spec(cast: Any) -> Cast | None:
    """The dtype that a tensor is to be cast to, or None, by its spec."""
    if cast is None or not hasattr(cast, "itemsize"):
        return None if cast is None else lambda spec: cast(spec.name)
    return lambda spec: cast if spec.dtype.sign_magnitude and spec.dtype.width > cast.itemsize else None


def _extent(tensor: Any) -> tuple[int, int]:
    """Addresses of the first byte of a tensor and of the byte behind its last; nothing, where it is no tensor."""
    if not hasattr(tensor, "data_ptr"):
        return (0, 0) if isinstance(tensor, Foreign) else _span(memory_of("", tensor))
    if not tensor.numel():
        return 0, 0
    reach = tensor.numel()
    if not tensor.is_contiguous():
        reach = sum(stride * (n - 1) for stride, n in zip(tensor.stride(), tensor.shape, strict=True)) + 1
    low = int(tensor.data_ptr())
    return low, low + reach * int(tensor.itemsize)


def _local(tensor: Any) -> Any:
    """The shard of a DTensor that is here; another tensor as it is."""
    return tensor.detach().to_local() if hasattr(tensor, "device_mesh") else tensor


def _like(part: Part, weight: Any, master: Any) -> Any:
    """What of a master is the master of a part, which may be a slice of its weight."""
    if tuple(master.shape) == tuple(part.data.shape):
        return master.detach()
    if isinstance(weight, str) or weight.stride() != master.stride():
        raise TensorMismatch(f"{part.tensor!r} is {list(part.data.shape)}, its master {list(master.shape)}")
    offset = (part.data.data_ptr() - weight.data_ptr()) // weight.itemsize
    return master.detach().as_strided(part.data.shape, part.data.stride(), master.storage_offset() + offset)


def _params_of(optimizer: Any) -> list[Any]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _key(part: Part) -> Key:
    return part.tensor, part.region


def _place(table: TensorTable, key: Key) -> Place:
    index = table.index[key[0]]
    return index, None if key[1] == whole(table.specs[index].shape) else key[1]


def _copy(memory: Memory) -> Bits:
    return Bits(memory.copied(), memory.dtype)
