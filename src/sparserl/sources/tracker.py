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

There may be tens of thousands of parts, so little is done for each of them in Python. What follows from where they lie
is a plan, kept for as long as everything lies there; kernels take many parts at a time.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from ..errors import TensorMismatch
from ..parallel import ordered
from ..weights.dtypes import BY_NAME
from ..weights.memory import Weights
from ..weights.shards import Shards
from ..weights.staging import lazy_bits
from ..weights.table import TensorSpec, TensorTable
from ..weights.tensors import memories, table_of
from .modules import Source, module
from .tracked_rows import (
    Copy,
    Found,
    Handed,
    Key,
    Plan,
    Row,
    Since,
    Spans,
    Step,
    brought,
    compared,
    extent,
    extents,
    local,
    places,
    sign,
    writes,
)

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
        self._table = TensorTable(())
        self._plan = Plan((), self._table, [], extents(()))
        self._now = Since(self._plan)
        self._handed: dict[Key, Handed] = {}  # not committed yet
        self._open: Step | None = None
        self._hooks: list[Any] = []
        for optimizer in optimizers:
            self._hooks.append(optimizer.register_step_pre_hook(self._before_step))
            self._hooks.append(optimizer.register_step_post_hook(lambda *_: self.after()))

    def weights(self) -> Shards:
        """All weights; marks tell where changes since the last committed version can be."""
        self.after()  # a step that raised has no end of its own
        given, _ = self._follow()
        shards, made = self._shards(given)
        parts = [replace(p, data=lazy_bits(p.data, made[p.tensor])) if p.tensor in made else p for p in shards.parts]
        now, earlier = self._now, self._handed
        self._now, self._handed = Since(self._plan), {}  # what is handed out is not written to any more
        for r, row in enumerate(self._plan.rows):
            found = self._handed[row.key] = now.handed(self._plan, r, earlier.get(row.key))
            if not found.unknown:
                moved = int(found.moved[0]), int(found.moved[1])
                parts[row.part] = replace(parts[row.part], marks=found.marks, moved=moved)
        return Shards(shards.table, parts)

    def committed(self) -> None:
        """The weights that were handed out last are a committed version: changes count from there."""
        self._handed = {}

    def before(self) -> None:
        """What tracked parameters are written by begins. A step that was not ended is ended first."""
        self._begin(self._written())

    def after(self) -> None:
        """It is over: find what it changed. Does nothing if nothing has begun."""
        if (step := self._open) is None:
            return
        if (data := self._there(step)) is None:
            self._now.unknown |= step.due
            self._open = None
            return
        landing = []
        copies = self._mark(step, data) if self._plan.there.any() or step.there else step.copies
        for found in ordered(lambda copy: self._compare(copy, data), copies, self._threads):
            self._now.add(self._plan, found)
            if found.cut.mastered:
                landing.append(found)
        for found in landing:  # only now, since tied weights are compared under each of their names
            self._plan.land(found, data)
        for r in np.flatnonzero(step.due).tolist():
            self._plan.seen[r] = writes(self._plan.rows[r], data[r])
        self._open = None

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

    def _begin(self, params: list[Any]) -> None:
        self.after()  # a step that raised has no end of its own
        _, data = self._follow()
        due = self._plan.due(params)
        there = self._kept(np.flatnonzero(due & self._plan.kept).tolist(), data)
        wanted = due.copy()
        wanted[[*there]] = False
        cuts = [(cut, some) for cut in self._plan.cuts if (some := np.flatnonzero(wanted[cut.rows])).size]
        copies = list(ordered(lambda cut: self._plan.copied(*cut, data), cuts, self._threads))
        watched = [*params, *(weight for weight in self._masters if not isinstance(weight, str))]
        self._open = Step(data, watched, places(watched), due, copies, there)

    def _there(self, step: Step) -> list[Any] | None:
        """The data of the tracked parts after a step, which may have moved it; None if there are other parts now."""
        named = any(isinstance(weight, str) for weight in self._masters)  # where that one lies only the source knows
        if not named and step.places == places(step.watched):
            return step.data
        table, keys, data = _listed(self._source.weights())
        if (table, keys) != self._plan.look[:2]:
            return None
        tracked = [data[row.part] for row in self._plan.rows]
        if self._plan.where != [sign(d) for d in tracked]:
            self._plan.place(tracked)
        return tracked

    def _compare(self, copy: Copy, data: Sequence[Any]) -> Found:
        """What a step changed. Where there are masters, the weights still have the old bits."""
        cut, some, old = copy
        now = self._plan.read(cut, some, data)
        if not cut.mastered:
            return compared(cut, some, old, now)
        masters = [self._master(self._plan.rows[r], data[r]) for r in cut.rows[some].tolist()]
        return compared(cut, some, now, brought(masters, cut, some))

    def _kept(self, rows: list[int], data: Sequence[Any]) -> dict[int, Any]:
        """Copies of rows on their devices, by row; none where there is no room for them."""
        if not rows:
            return {}
        from .tracked_gpu import room

        return {r: data[r].detach().clone() for r in rows} if room([data[r] for r in rows]) else {}

    def _mark(self, step: Step, data: Sequence[Any]) -> list[Copy]:
        """Mark on their devices the rows that can be. Returns what is left to compare in host memory."""
        from .tracked_gpu import fits

        pairs: dict[int, tuple[Any, Any]] = {}
        for r, old in step.there.items():
            if self._plan.there[r] and fits(data[r], old):
                pairs[r] = data[r], old
            else:  # it went elsewhere during the step
                self._now.unknown[r] = True
        left = []
        for copy in step.copies:
            near = []
            for i, r in zip(copy.some.tolist(), copy.cut.rows[copy.some].tolist(), strict=True):
                master = (
                    self._master(self._plan.rows[r], data[r]) if copy.cut.mastered and self._plan.there[r] else None
                )
                if master is not None and fits(master, data[r]):
                    pairs[r] = master, data[r]
                else:
                    near.append(i)
            if len(near) == copy.some.size:
                left.append(copy)
            elif near:
                left.append(Copy(copy.cut, np.array(near), (np.array(near), None)))
        self._now.mark(self._plan, pairs)
        return left

    def _written(self) -> list[Any]:
        """All that steps may write to; what is frozen is not among it."""
        params = [p for optimizer in self._optimizers for p in _params_of(optimizer) if p.requires_grad]
        return [*params, *self._params]

    def _follow(self) -> tuple[Weights | Shards, list[Any]]:
        """What the source has, and the data of what is tracked of it. Notices what moved, and writes by others."""
        given, written = self._source.weights(), self._written()
        table, keys, data = _listed(given)
        look = table, keys, [sign(d) for d in data], [id(p) for p in written], places(written)
        if look != self._plan.look:
            self._change(look, given, written)
        plan = self._plan
        tracked = [data[row.part] for row in plan.rows]
        seen = [writes(row, d) for row, d in zip(plan.rows, tracked, strict=True)]
        if seen != plan.seen:
            self._now.unknown |= np.array([a != b for a, b in zip(seen, plan.seen, strict=True)], bool)
            plan.seen = seen
        return given, tracked

    def _change(self, look: tuple[Any, ...], given: Weights | Shards, written: list[Any]) -> None:
        """Begin to track parts that are written from now on, let go of others, keep what is known of the rest."""
        shards, _ = self._shards(given)
        weights, uncounted = self._mastered(shards), Spans(self._params)
        data = [part.data for part in shards.parts]
        counted = ~uncounted.have(extents(data))
        rows = [
            Row(i, (part.tensor, part.region), weights.get(i), bool(counted[i])) for i, part in enumerate(shards.parts)
        ]
        roots = extents([d if r.weight is None else self._master(r, d) for r, d in zip(rows, data, strict=True)])
        tracked = np.flatnonzero(Spans(written).have(roots)).tolist()
        plan = Plan(look, shards.table, [rows[i] for i in tracked], roots[tracked])
        plan.place([data[i] for i in tracked])
        now, before = Since(plan, unknown=True), {row.key: r for r, row in enumerate(self._plan.rows)}
        for r, row in enumerate(plan.rows):
            if (old := before.get(row.key)) is not None:
                now.keep(plan, r, self._now, self._plan, old)
                plan.seen[r] = self._plan.seen[old]
        self._plan, self._now = plan, now

    # -- parts ---------------------------------------------------------------------------------------------------------

    def _shards(self, given: Weights | Shards) -> tuple[Shards, dict[str, Any]]:
        """What the source has, under the table of what is published; and the torch dtypes of what is cast for that."""
        shards = given if isinstance(given, Shards) else Shards.of(self._known(table_of(memories(given))), given)
        if self._cast is None:
            return shards, {}
        specs = {spec.name: spec for spec in shards.table.specs}
        made = {name: dtype for name, spec in specs.items() if (dtype := self._cast(spec)) is not None}
        for name, dtype in made.items():
            specs[name] = specs[name]._replace(dtype=BY_NAME[str(dtype).removeprefix("torch.")])
        return Shards(self._known(TensorTable(specs.values())), shards.parts), made

    def _known(self, table: TensorTable) -> TensorTable:
        """The table of last time if it is the same: what was computed of it is still there."""
        if self._table != table:
            self._table = table
        return self._table

    def _mastered(self, shards: Shards) -> dict[int, Any]:
        """What the masters of parts are known by: the name of a tensor, or the weight in whose memory a part lies."""
        weights = [(*extent(local(w)), w) for w in self._masters if not isinstance(w, str)]
        weights.sort(key=lambda found: found[:2])
        out: dict[int, Any] = {}
        for i, part in enumerate(shards.parts if self._masters else ()):
            if part.tensor in self._masters:
                out[i] = part.tensor
                continue
            low, high = extent(part.data)
            at = bisect_right(weights, low, key=lambda found: found[0]) - 1
            if at >= 0 and high <= weights[at][1]:
                out[i] = weights[at][2]
        return out

    def _master(self, row: Row, data: Any) -> Any:
        """What of a master is the master of a part, which may be a slice of its weight."""
        weight, master = row.weight, local(self._masters[row.weight]).detach()
        if master.shape == data.shape:
            return master
        if isinstance(weight, str) or weight.stride() != master.stride():
            raise TensorMismatch(f"{row.key[0]!r} is {list(data.shape)}, its master {list(master.shape)}")
        offset = (data.data_ptr() - weight.data_ptr()) // weight.itemsize
        return master.as_strided(data.shape, data.stride(), master.storage_offset() + offset)


def _listed(given: Weights | Shards) -> tuple[TensorTable | None, list[Any], list[Any]]:
    """The table of shards; what the parts of weights are known by; their data."""
    if isinstance(given, Shards):
        return given.table, [(part.tensor, part.region) for part in given.parts], [part.data for part in given.parts]
    return None, [*given], [*given.values()]


def _by_spec(cast: Any) -> Cast | None:
    """The dtype that a tensor is to be cast to, or None, by its spec."""
    if cast is None or not hasattr(cast, "itemsize"):
        return None if cast is None else lambda spec: cast(spec.name)
    return lambda spec: cast if spec.dtype.sign_magnitude and spec.dtype.width > cast.itemsize else None


def _params_of(optimizer: Any) -> list[Any]:
    return [param for group in optimizer.param_groups for param in group["params"]]
