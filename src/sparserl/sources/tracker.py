"""Tracking: every optimizer step leaves the old bits of the elements that it changes, so that no copy is needed.

    step ──► copy of the old bits ──► compare ──► positions and old bits, merged with those of earlier steps

What is compared are the bits that are published, which change less often than wider parameters behind them. Of every
element the first old bits count, since the last committed version. Those of changes that were published but are not
committed yet are kept apart: a publish that fails loses nothing, and steps go on during a publish.

Parts that the optimizer does not write (buffers, frozen parameters) have no old bits and are compared in full at every
publish. So is, once, a part that was not tracked since the last publish, or that something else wrote to: torch counts
the writes to a tensor. Writes that torch does not count, through `.data` or NumPy, must happen between `before` and
`after`.

There may be tens of thousands of parts, so that little is done in Python for each of them. What depends on their
addresses is kept in a plan while nothing moves; kernels take many parts at a time.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from ..errors import TensorMismatch, UnsupportedTensor
from ..parallel import ordered
from ..weights import memory
from ..weights.dtypes import BY_NAME
from ..weights.memory import Weights
from ..weights.region import Numbers
from ..weights.shards import Shards
from ..weights.staging import lazy_bits
from ..weights.table import TensorTable
from ..weights.tensors import memories, table_of
from .casting import Cast, cast_of
from .kept_bits import KeptBits, PublishedBits
from .master_sample import ParameterState, state_of
from .modules import ModuleSource, Source, files_of, module
from .renaming import RenamedSource
from .tracked_rows import (
    Bits,
    Copy,
    Cut,
    Extents,
    Key,
    Mask,
    OpenStep,
    Plan,
    RowChanges,
    TrackedRow,
    addresses,
    compare,
    count_writes,
    extent,
    extents,
    flat_bits,
    gather,
    local,
    signature,
)
from .tying import tied_of

_log = logging.getLogger("sparserl.sources")


def track(
    optimizer: Any,
    source: Any,
    *,
    params: Iterable[Any] | None = None,
    masters: Mapping[Any, Any] | None = None,
    cast: Any = None,
    threads: int | None = None,
) -> Tracker:
    """A source that knows what has changed, because it keeps the old bits of what every optimizer step changes.

    Args:
        optimizer: a torch optimizer, or several. None if something else writes the weights: then `Tracker.step` is put
            around that, and `params` are the tensors that it writes.
        source: a torch module, or a source whose parts are in the memory of the optimizer's parameters.
        params: further tensors that are written between `Tracker.before` and `Tracker.after`.
        masters: if the optimizer has fp32 masters of narrower weights: the master of each weight, by the weight or its
            name. After a step they are cast, compared with the weights and written there; nothing else has to do it.
        cast: if the optimizer's parameters are wider than what is published: the dtype of all floating-point parameters
            that are wider, or a function from a name to a dtype, or to None for a parameter that is published as it is.
            Buffers of a module are never cast.
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
    """The weights of a source, with the old bits of what has changed. Made by `track`, for one publisher."""

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
        self._kept = KeptBits(self._plan)
        self._published: dict[Key, PublishedBits] = {}  # not committed yet
        self._step: OpenStep | None = None
        self._before_steps: list[Callable[[Weights | Shards], Any]] = []
        self._hooks: list[Any] = []
        for optimizer in optimizers:
            self._hooks.append(optimizer.register_step_pre_hook(self._before_step))
            self._hooks.append(optimizer.register_step_post_hook(lambda *_: self.after()))

    @property
    def tied(self) -> Mapping[str, str]:
        """The names that the source left out, each with that of the same tensor."""
        return tied_of(self._source)

    def files(self) -> dict[str, bytes]:
        """The files that the source brings along; a config names the dtype that is published."""
        source = self._source
        if isinstance(source, ModuleSource | RenamedSource) and self._cast is not None:
            source = source.published_as(self._cast)
        return files_of(source)

    def weights(self) -> Shards:
        """All weights. Their marks contain the old bits of every change since the last committed version."""
        self.after()  # for a step that raised
        weights, _ = self._follow()
        shards, casts = self._shards(weights)
        parts = [replace(p, data=lazy_bits(p.data, casts[p.tensor])) if p.tensor in casts else p for p in shards.parts]
        kept = self._kept
        earlier = self._published
        self._kept = KeptBits(self._plan)  # the publisher has the old ones, which are not written to any more
        self._published = {}
        for r, row in enumerate(self._plan.rows):
            published = kept.publish(r, earlier.get(row.key))
            self._published[row.key] = published
            if not published.unknown:
                parts[row.part] = replace(parts[row.part], marks=published.old)
        return Shards(shards.table, parts)

    @property
    def old_bytes(self) -> int:
        """How many bytes of host memory the old bits take now."""
        return self._kept.nbytes + sum(published.nbytes for published in self._published.values())

    def committed(self) -> None:
        """Called by the publisher when the weights that it got last are a committed version."""
        self._published = {}

    def training_state(self) -> list[ParameterState]:
        """The parameters that steps write, with their gradients, and the weights that have masters."""
        states = [
            ParameterState(local(tensor).detach(), None if master.grad is None else local(master.grad), master)
            for weight, master in self._masters.items()
            for tensor in self._tensors_of(weight)
        ]
        for optimizer in self._optimizers:
            master_of = getattr(optimizer, "master_of", lambda _parameter: (None, 0))
            states += [state_of(parameter, *master_of(parameter)) for parameter in _params_of(optimizer)]
        return states

    def before_steps(self, function: Callable[[Weights | Shards], Any]) -> None:
        """Call a function with the weights of the source before every step, when gradients are at hand."""
        self._before_steps.append(function)

    def before(self) -> None:
        """Begin a step that writes tracked parameters. An open step is ended first."""
        self._begin(self._written())

    def after(self) -> None:
        """End a step, and mark what it changed. Does nothing if no step has begun."""
        if (step := self._step) is None:
            return
        if (data := self._data_after(step)) is None:
            self._kept.unknown |= step.due
            self._step = None
            return
        writes: list[tuple[Any, Any]] = []  # weights on GPUs and their masters
        jobs = ((copy, self._compare_on_gpu(copy, data, writes)) for copy in step.copies)
        found = [*ordered(lambda job: self._keep(*job, data), jobs, self._threads)]
        for changes in found:  # only now, since tied weights are compared under each of their names
            if changes is not None:
                self._plan.write(changes, data)
        if writes:
            from . import tracked_gpu

            tracked_gpu.write(*zip(*writes, strict=True))
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
        weights, data = self._follow()
        for function in self._before_steps:
            function(weights)
        due = self._plan.due(params)
        on_gpu = due & self._rows_for_gpu(due, data)
        cuts = [(i, cut, some) for i, cut in enumerate(self._plan.cuts) if (some := np.flatnonzero(due[cut.rows])).size]
        on_gpus = (self._copy_on_gpu(*cut, on_gpu, data) for cut in cuts)  # in this thread, on its stream
        copies = list(ordered(lambda copy: copy._replace(bits=self._copied(copy, data)), on_gpus, self._threads))
        watched = [*params, *(weight for weight in self._masters if not isinstance(weight, str))]
        self._step = OpenStep(data, watched, addresses(watched), due, copies)

    def _rows_for_gpu(self, due: Mask, data: Sequence[Any]) -> Mask:
        """The rows that are compared on their GPUs; those without masters only if there is memory to copy them."""
        on_gpu = self._plan.on_gpu
        copied = [r for r in np.flatnonzero(due & on_gpu).tolist() if self._plan.rows[r].weight is None]
        if not copied:
            return on_gpu
        from .tracked_gpu import has_memory_for

        if has_memory_for([data[r] for r in copied]):
            return on_gpu
        on_gpu = on_gpu.copy()
        on_gpu[copied] = False
        return on_gpu

    def _copy_on_gpu(self, number: int, cut: Cut, some: Numbers, on_gpu: Mask, data: Sequence[Any]) -> Copy:
        """The old bits of those of some rows of a cut that are compared on GPUs."""
        there = on_gpu[cut.rows[some]]
        gpu_bits = []
        if there.any() and not cut.mastered:
            import torch

            from . import tracked_gpu

            gpu_bits = tracked_gpu.copy(self._flat(cut, some[there], data), getattr(torch, cut.batch.dtype.name))
        return Copy(number, cut, some[~there], (some[:0], None), some[there], gpu_bits)

    def _copied(self, copy: Copy, data: Sequence[Any]) -> Bits:
        """The old bits of the rows that are compared in host memory."""
        return self._plan.copy(copy.cut, copy.some, data) if copy.some.size else copy.bits

    def _flat(self, cut: Cut, some: Numbers, data: Sequence[Any] | Mapping[int, Any]) -> list[Any]:
        """The elements of some rows of a cut, flat, where they are."""
        sizes = cut.batch.numel[some].tolist()
        return [flat_bits(data[r], cut, n) for r, n in zip(cut.rows[some].tolist(), sizes, strict=True)]

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

    def _keep(self, copy: Copy, on_gpu: list[RowChanges], data: Sequence[Any]) -> RowChanges | None:
        """Keep the old bits of what a step changed in a cut. Returns what is to be copied from masters in host memory.

        on_gpu: what was found on GPUs.
        """
        changes = [*on_gpu, self._compare(copy, data)] if copy.some.size else on_gpu
        for found in changes:
            self._kept.add(copy.number, found, lambda: self._plan.all_bits(copy.cut, data))
        return changes[-1] if copy.some.size and copy.cut.mastered else None

    def _compare(self, copy: Copy, data: Sequence[Any]) -> RowChanges:
        """What a step changed in host memory. Weights with masters still have their old bits."""
        current = self._plan.read(copy.cut, copy.some, data)
        if not copy.cut.mastered:
            return compare(copy.cut, copy.some, copy.bits, current)
        masters = [self._master(self._plan.rows[r], data[r]) for r in copy.cut.rows[copy.some].tolist()]
        return compare(copy.cut, copy.some, current, gather(masters, copy.cut, copy.some))

    def _compare_on_gpu(self, copy: Copy, data: Sequence[Any], writes: list[tuple[Any, Any]]) -> list[RowChanges]:
        """What a step changed on GPUs. Adds weights with masters, and these, to what is to be written."""
        if not copy.on_gpu.size:
            return []
        from . import tracked_gpu

        cut = copy.cut
        current = self._flat(cut, copy.on_gpu, data)
        if cut.mastered:
            masters = {r: self._master(self._plan.rows[r], data[r]) for r in cut.rows[copy.on_gpu].tolist()}
            old = current
            new = self._flat(cut, copy.on_gpu, masters)
            writes += zip(old, new, strict=True)
        else:
            old = copy.gpu_bits
            new = current
        groups: dict[Any, list[int]] = {}
        for i, r in enumerate(cut.rows[copy.on_gpu].tolist()):
            if tracked_gpu.fits(new[i], old[i]):
                groups.setdefault((old[i].device, new[i].dtype), []).append(i)
            else:  # the step has moved it
                self._kept.unknown[r] = True
        return [
            tracked_gpu.compare(cut, copy.on_gpu[group], [old[i] for i in group], [new[i] for i in group])
            for group in groups.values()
        ]

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
            self._kept.unknown |= np.array([a != b for a, b in zip(writes, plan.writes, strict=True)], bool)
            plan.writes = writes
        return weights, tracked

    def _change_plan(self, look: tuple[Any, ...], weights: Weights | Shards, written: list[Any]) -> None:
        """Begin to track parts that are written from now on, drop others, and keep what is known of the rest."""
        shards, _ = self._shards(weights)
        master_keys = self._master_keys(shards)
        data = [part.data for part in shards.parts]
        counted = ~Extents(self._params).contain(extents(data))
        rows = [
            TrackedRow(i, (part.tensor, part.region), master_keys.get(i), bool(counted[i]), _is_on_gpu(part.data))
            for i, part in enumerate(shards.parts)
        ]
        roots = extents([d if r.weight is None else self._master(r, d) for r, d in zip(rows, data, strict=True)])
        tracked = np.flatnonzero(Extents(written).contain(roots)).tolist()
        if written and shards.parts and not tracked:
            _log.warning(
                "no weight is in the memory that the optimizer writes: nothing is tracked, changes are sent dense"
            )
        plan = Plan(look, shards.table, [rows[i] for i in tracked], roots[tracked])
        plan.locate([data[i] for i in tracked])
        kept = KeptBits(plan, unknown=True)
        old_rows = {row.key: r for r, row in enumerate(self._plan.rows)}
        for r, row in enumerate(plan.rows):
            if (old := old_rows.get(row.key)) is not None:
                kept.take_over(r, self._kept, old)
                plan.writes[r] = self._plan.writes[old]
        self._plan = plan
        self._kept = kept

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

        buffers = getattr(self._source, "buffers", ())
        casts = {
            name: dtype
            for name, spec in specs.items()
            if name not in buffers and (dtype := self._cast(name, getattr(torch, spec.dtype.name))) is not None
        }
        for name, dtype in casts.items():
            specs[name] = specs[name]._replace(dtype=BY_NAME[str(dtype).removeprefix("torch.")])
        return Shards(self._same_table(TensorTable(specs.values())), shards.parts), casts

    def _same_table(self, table: TensorTable) -> TensorTable:
        """The table object of the last time if it is equal: it caches what was computed from it."""
        if self._table != table:
            self._table = table
        return self._table

    def _tensors_of(self, weight: Any) -> list[Any]:
        """The tensors of a weight that is given by name; or the weight itself."""
        if not isinstance(weight, str):
            return [weight]
        shards, _ = self._shards(self._source.weights())
        name = self.tied.get(weight, weight)
        return [part.data for part in shards.parts if part.tensor == name and hasattr(part.data, "data_ptr")]

    def _master_keys(self, shards: Shards) -> dict[int, Any]:
        """The keys of the masters of parts: the name of a tensor, or the weight whose memory a part is in."""
        named = {self.tied.get(name, name): name for name in self._masters if isinstance(name, str)}
        unknown = [given for name, given in named.items() if name not in shards.table.index]
        if unknown:
            raise TensorMismatch(f"masters has {unknown[0]!r}, and the source no tensor of that name")
        weights = [(*extent(local(w)), w) for w in self._masters if not isinstance(w, str)]
        weights.sort(key=lambda row: row[:2])
        keys: dict[int, Any] = {}
        for i, part in enumerate(shards.parts if self._masters else ()):
            if part.tensor in named:
                keys[i] = named[part.tensor]
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


def _is_on_gpu(data: Any) -> bool:
    return hasattr(data, "data_ptr") and memory.is_on_gpu(data)


def _params_of(optimizer: Any) -> list[Any]:
    return [param for group in optimizer.param_groups for param in group["params"]]
