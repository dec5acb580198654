"""Tracking: every optimizer step marks the elements that it changes, so that a publish need not compare all weights.

    step ──► copy of the old bits ──► compare ──► marks: one bit per element, ORed over all steps
                                             └──► difference of the digest of the part

What is compared are the bits that are published, which change less often than wider parameters behind them. Every part
has two bitmaps: changes since the last call of `weights`, and changes that were published but are not committed yet. So
a publish that fails loses nothing, and steps go on during a publish.

Parts that the optimizer does not write (buffers, frozen parameters) have no marks and are compared in full at every
publish. So is, once, a part that was not tracked since the last publish, or that something else wrote to: torch counts
the writes to a tensor. Writes that torch does not count, through `.data` or NumPy, must happen between `before` and
`after`.

There may be tens of thousands of parts, so that little is done in Python for each of them. What depends on their
addresses is kept in a plan while nothing moves; kernels take many parts at a time.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from ..errors import TensorMismatch, UnsupportedTensor
from ..parallel import ordered
from ..weights.dtypes import BY_NAME
from ..weights.memory import Weights
from ..weights.shards import Shards
from ..weights.staging import lazy_bits
from ..weights.table import TensorTable
from ..weights.tensors import memories, table_of
from .casting import Cast, cast_of
from .modules import ModuleSource, Source, files_of, module
from .renaming import RenamedSource
from .tracked_rows import (
    Copy,
    Extents,
    Key,
    OpenStep,
    Plan,
    PublishedMarks,
    RowChanges,
    RowMarks,
    TrackedRow,
    addresses,
    compare,
    count_writes,
    extent,
    extents,
    gather,
    local,
    signature,
)


def track(
    optimizer: Any,
    source: Any,
    *,
    params: Iterable[Any] | None = None,
    masters: Mapping[Any, Any] | None = None,
    cast: Any = None,
    threads: int | None = None,
) -> Tracker:
    """A source that knows what has changed, because it marks the changes of every optimizer step.

    Args:
        optimizer: a torch optimizer, or several. None if something else writes the weights: then `Tracker.step` is put
            around that, and `params` are the tensors that it writes.
        source: a torch module, or a source whose parts are in the memory of the optimizer's parameters.
        params: further tensors that are written between `Tracker.before` and `Tracker.after`.
        masters: if the optimizer has fp32 masters of narrower weights: the master of each weight, by the weight or its
            name. After a step they are cast, compared with the weights and written there; nothing else has to do it.
        cast: if the optimizer's parameters are wider than what is published: the dtype of all floating-point tensors
            that are wider, or a function from a name to a dtype, or to None for a tensor that is published as it is.
        threads: how many threads compare; by default as many as there are cores, up to 16.

    Returns:
        A source for one `Publisher`. `Tracker.close` removes its hooks from the optimizers.

    Raises:
        TensorMismatch: neither an optimizer nor `params` is given.
        UnsupportedTensor: the source is neither a source nor a torch module.

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
        raise TensorMismatch("without an optimizer, give the tensors that are written as `params`")
    optimizers = [] if optimizer is None else [*optimizer] if isinstance(optimizer, Sequence) else [optimizer]
    for one in optimizers:
        if not hasattr(one, "register_step_pre_hook"):
            raise UnsupportedTensor(f"{type(one).__name__} is no optimizer of torch: track(optimizer, model)")
    base = source if isinstance(source, Source) else module(source)
    return Tracker(optimizers, base, tuple(params or ()), masters or {}, cast_of(cast), threads)


class Tracker:
    """The weights of a source, with marks of what has changed. Made by `track`, for one publisher."""

    def __init__(
        self,
        optimizers: Sequence[Any],
        source: Source,
        params: tuple[Any, ...],
        masters: Mapping[Any, Any],
        cast: Cast | None,
        threads: int | None,
    ) -> None:
        self._optimizers = optimizers
        self._source = source
        self._params = params
        self._masters = masters
        self._cast = cast
        self._threads = threads
        self._table = TensorTable(())
        self._plan = Plan((), self._table, [], extents(()))
        self._marks = RowMarks(self._plan)
        self._published: dict[Key, PublishedMarks] = {}  # not committed yet
        self._step: OpenStep | None = None
        self._hooks: list[Any] = []
        for optimizer in optimizers:
            self._hooks.append(optimizer.register_step_pre_hook(self._before_step))
            self._hooks.append(optimizer.register_step_post_hook(lambda *_: self.after()))

    def files(self) -> dict[str, bytes]:
        """The files that the source brings along; a config names the dtype that is published."""
        source = self._source
        if isinstance(source, ModuleSource | RenamedSource) and self._cast is not None:
            source = source.published_as(self._cast)
        return files_of(source)

    def weights(self) -> Shards:
        """All weights. Their marks contain every change since the last committed version."""
        self.after()  # for a step that raised
        weights, _ = self._follow()
        shards, casts = self._shards(weights)
        parts = [replace(p, data=lazy_bits(p.data, casts[p.tensor])) if p.tensor in casts else p for p in shards.parts]
        marks = self._marks
        earlier = self._published
        self._marks = RowMarks(self._plan)  # the publisher has the old ones, which are not written to any more
        self._published = {}
        for r, row in enumerate(self._plan.rows):
            published = marks.publish(self._plan, r, earlier.get(row.key))
            self._published[row.key] = published
            if not published.unknown:
                moved = (int(published.moved[0]), int(published.moved[1]))
                parts[row.part] = replace(parts[row.part], marks=published.marks, moved=moved)
        return Shards(shards.table, parts)

    def committed(self) -> None:
        """Called by the publisher when the weights that it got last are a committed version."""
        self._published = {}

    def before(self) -> None:
        """Begin a step that writes tracked parameters. An open step is ended first."""
        self._begin(self._written())

    def after(self) -> None:
        """End a step, and mark what it changed. Does nothing if no step has begun."""
        if (step := self._step) is None:
            return
        if (data := self._data_after(step)) is None:
            self._marks.unknown |= step.due
            self._step = None
            return
        mastered = []
        copies = self._mark_on_gpu(step, data) if self._plan.on_gpu.any() or step.gpu_copies else step.copies
        for changes in ordered(lambda copy: self._compare(copy, data), copies, self._threads):
            self._marks.add(self._plan, changes)
            if changes.cut.mastered:
                mastered.append(changes)
        for changes in mastered:  # only now, since tied weights are compared under each of their names
            self._plan.write(changes, data)
        for r in np.flatnonzero(step.due).tolist():
            self._plan.writes[r] = count_writes(self._plan.rows[r], data[r])
        self._step = None

    @contextmanager
    def step(self) -> Iterator[None]:
        """Put this around anything that writes tracked parameters."""
        self.before()
        try:
            yield
        finally:
            self.after()

    def close(self) -> None:
        """Remove the hooks from the optimizers."""
        for hook in self._hooks:
            hook.remove()

    # -- steps ---------------------------------------------------------------------------------------------------------

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Begin a step. Torch's own optimizers write only parameters that have gradients."""
        params = _params_of(optimizer)
        closure = any(a is not None and a is not optimizer for a in (*args, *kwargs.values()))
        if type(optimizer).__module__.startswith("torch.optim.") and not closure:
            params = [p for p in params if p.grad is not None]
        self._begin(params)

    def _begin(self, params: list[Any]) -> None:
        self.after()  # for a step that raised
        _, data = self._follow()
        due = self._plan.due(params)
        gpu_copies = self._copy_on_gpu(np.flatnonzero(due & self._plan.copied_on_gpu).tolist(), data)
        on_host = due.copy()
        on_host[[*gpu_copies]] = False
        cuts = [(cut, some) for cut in self._plan.cuts if (some := np.flatnonzero(on_host[cut.rows])).size]
        copies = list(ordered(lambda cut: self._plan.copy(*cut, data), cuts, self._threads))
        watched = [*params, *(weight for weight in self._masters if not isinstance(weight, str))]
        self._step = OpenStep(data, watched, addresses(watched), due, copies, gpu_copies)

    def _data_after(self, step: OpenStep) -> list[Any] | None:
        """The data of the tracked parts after a step, which may have moved it; None if the source has other parts."""
        # Only the source knows the address of a weight whose master is given by name.
        by_name = any(isinstance(weight, str) for weight in self._masters)
        if not by_name and step.addresses == addresses(step.watched):
            return step.data
        table, keys, data = _parts_of(self._source.weights())
        if (table, keys) != self._plan.look[:2]:
            return None
        tracked = [data[row.part] for row in self._plan.rows]
        if self._plan.signatures != [signature(tensor) for tensor in tracked]:
            self._plan.locate(tracked)
        return tracked

    def _compare(self, copy: Copy, data: Sequence[Any]) -> RowChanges:
        """What a step changed. Weights with masters still have their old bits."""
        cut, some, old = copy
        current = self._plan.read(cut, some, data)
        if not cut.mastered:
            return compare(cut, some, old, current)
        masters = [self._master(self._plan.rows[r], data[r]) for r in cut.rows[some].tolist()]
        return compare(cut, some, current, gather(masters, cut, some))

    def _copy_on_gpu(self, rows: list[int], data: Sequence[Any]) -> dict[int, Any]:
        """Copies of rows on their GPUs, by row; none if a GPU has too little memory."""
        if not rows:
            return {}
        from .tracked_gpu import has_memory_for

        return {r: data[r].detach().clone() for r in rows} if has_memory_for([data[r] for r in rows]) else {}

    def _mark_on_gpu(self, step: OpenStep, data: Sequence[Any]) -> list[Copy]:
        """Mark the rows that can be marked on their GPU. Returns what is left to compare in host memory."""
        from .tracked_gpu import fits

        pairs: dict[int, tuple[Any, Any]] = {}
        for r, old in step.gpu_copies.items():
            if self._plan.on_gpu[r] and fits(data[r], old):
                pairs[r] = (data[r], old)
            else:  # the step has moved it
                self._marks.unknown[r] = True
        rest = []
        for copy in step.copies:
            on_host = []
            for i, r in zip(copy.some.tolist(), copy.cut.rows[copy.some].tolist(), strict=True):
                on_gpu = copy.cut.mastered and self._plan.on_gpu[r]
                master = self._master(self._plan.rows[r], data[r]) if on_gpu else None
                if master is not None and fits(master, data[r]):
                    pairs[r] = (master, data[r])
                else:
                    on_host.append(i)
            if len(on_host) == copy.some.size:
                rest.append(copy)
            elif on_host:
                rest.append(Copy(copy.cut, np.array(on_host), (np.array(on_host), None)))
        self._marks.mark_on_gpu(self._plan, pairs)
        return rest

    def _written(self) -> list[Any]:
        """Everything that steps may write; frozen parameters are left out."""
        params = [p for optimizer in self._optimizers for p in _params_of(optimizer) if p.requires_grad]
        return [*params, *self._params]

    def _follow(self) -> tuple[Weights | Shards, list[Any]]:
        """The weights of the source, and the data of the tracked parts. Notices moved parts, and writes by others."""
        weights = self._source.weights()
        written = self._written()
        table, keys, data = _parts_of(weights)
        look = (table, keys, [signature(d) for d in data], [id(p) for p in written], addresses(written))
        if look != self._plan.look:
            self._change_plan(look, weights, written)
        plan = self._plan
        tracked = [data[row.part] for row in plan.rows]
        writes = [count_writes(row, tensor) for row, tensor in zip(plan.rows, tracked, strict=True)]
        if writes != plan.writes:
            self._marks.unknown |= np.array([a != b for a, b in zip(writes, plan.writes, strict=True)], bool)
            plan.writes = writes
        return weights, tracked

    def _change_plan(self, look: tuple[Any, ...], weights: Weights | Shards, written: list[Any]) -> None:
        """Begin to track parts that are written from now on, drop others, and keep what is known of the rest."""
        shards, _ = self._shards(weights)
        master_keys = self._master_keys(shards)
        data = [part.data for part in shards.parts]
        counted = ~Extents(self._params).contain(extents(data))
        rows = [
            TrackedRow(i, (part.tensor, part.region), master_keys.get(i), bool(counted[i]))
            for i, part in enumerate(shards.parts)
        ]
        roots = extents([d if r.weight is None else self._master(r, d) for r, d in zip(rows, data, strict=True)])
        tracked = np.flatnonzero(Extents(written).contain(roots)).tolist()
        plan = Plan(look, shards.table, [rows[i] for i in tracked], roots[tracked])
        plan.locate([data[i] for i in tracked])
        marks = RowMarks(plan, unknown=True)
        old_rows = {row.key: r for r, row in enumerate(self._plan.rows)}
        for r, row in enumerate(plan.rows):
            if (old := old_rows.get(row.key)) is not None:
                marks.take_over(plan, r, self._marks, self._plan, old)
                plan.writes[r] = self._plan.writes[old]
        self._plan = plan
        self._marks = marks

    # -- parts ---------------------------------------------------------------------------------------------------------

    def _shards(self, weights: Weights | Shards) -> tuple[Shards, dict[str, Any]]:
        """The parts of the source with the table of what is published, and the torch dtypes of cast tensors."""
        if isinstance(weights, Shards):
            shards = weights
        else:
            shards = Shards.of(self._same_table(table_of(memories(weights))), weights)
        if self._cast is None:
            return shards, {}
        specs = {spec.name: spec for spec in shards.table.specs}
        import torch

        dtypes = {name: self._cast(name, getattr(torch, spec.dtype.name)) for name, spec in specs.items()}
        casts = {name: dtype for name, dtype in dtypes.items() if dtype is not None}
        for name, dtype in casts.items():
            specs[name] = specs[name]._replace(dtype=BY_NAME[str(dtype).removeprefix("torch.")])
        return Shards(self._same_table(TensorTable(specs.values())), shards.parts), casts

    def _same_table(self, table: TensorTable) -> TensorTable:
        """The table object of the last time if it is equal: it caches what was computed from it."""
        if self._table != table:
            self._table = table
        return self._table

    def _master_keys(self, shards: Shards) -> dict[int, Any]:
        """The keys of the masters of parts: the name of a tensor, or the weight whose memory a part is in."""
        weights = [(*extent(local(w)), w) for w in self._masters if not isinstance(w, str)]
        weights.sort(key=lambda row: row[:2])
        keys: dict[int, Any] = {}
        for i, part in enumerate(shards.parts if self._masters else ()):
            if part.tensor in self._masters:
                keys[i] = part.tensor
                continue
            low, high = extent(part.data)
            index = bisect_right(weights, low, key=lambda row: row[0]) - 1
            if index >= 0 and high <= weights[index][1]:
                keys[i] = weights[index][2]
        return keys

    def _master(self, row: TrackedRow, data: Any) -> Any:
        """The master of a part, which may be a slice of its weight."""
        weight = row.weight
        master = local(self._masters[weight]).detach()
        if master.shape == data.shape:
            return master
        if isinstance(weight, str) or weight.stride() != master.stride():
            raise TensorMismatch(f"{row.key[0]!r} has shape {list(data.shape)}, its master {list(master.shape)}")
        offset = (data.data_ptr() - weight.data_ptr()) // weight.itemsize
        return master.as_strided(data.shape, data.stride(), master.storage_offset() + offset)


def _parts_of(weights: Weights | Shards) -> tuple[TensorTable | None, list[Any], list[Any]]:
    """The table of shards, the keys of their parts, and the data; of a mapping, its names and tensors."""
    if isinstance(weights, Shards):
        keys = [(part.tensor, part.region) for part in weights.parts]
        return weights.table, keys, [part.data for part in weights.parts]
    return None, [*weights], [*weights.values()]


def _params_of(optimizer: Any) -> list[Any]:
    return [param for group in optimizer.param_groups for param in group["params"]]
