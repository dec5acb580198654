"""Finding changes: compare two versions of the weights bit by bit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from .. import plan
from ..bits import UIntArray
from ..digest import Digest, sums, table_digest
from ..errors import TensorMismatch
from ..kernels import cpu
from ..memory import Memory, Weights, memories, require_like, table_of
from ..parallel import Progress, default_threads, ordered
from ..pieces import Batch, Held, Place, batches
from ..plan import Changes, Chooser, Dense, Link, Speeds, estimate
from ..region import Region, whole
from ..table import TensorTable
from .assemble import Target, assemble
from .patch import Patch

_HUGE = 1 << 22  # bytes: arrays as large as this are asked to lie in huge pages
_Found = tuple[npt.NDArray[np.uint32], UIntArray, UIntArray, npt.NDArray[np.int64]]


def diff(
    old: Weights,
    new: Weights,
    *,
    profile: str = "auto",
    link: Link | str | None = None,
    base_digest: Digest | None = None,
    table: TensorTable | None = None,
    regions: Mapping[str, Region] | None = None,
    positions: Mapping[str, Any] | None = None,
    to: Target = None,
    threads: int | None = None,
    progress: Progress | None = None,
) -> Patch:
    """The patch that turns `old` into `new`, exactly.

    Weights are mappings from names to torch tensors or NumPy arrays. Both sides must hold the same names, dtypes
    and shapes; anything else raises `TensorMismatch`.

    profile: `raw`, `gap`, `ulp`, `ctx`, or `auto`, which takes the smallest for each bucket. Where telling elements
        apart by magnitude does not pay, `ctx` becomes `ulp`.
    link: the way to the receiver, as in "25Gbit" or "3GB/s". `auto` then takes for each bucket the profile that is
        coded, sent and landed soonest, by the speeds that `sparserl plan` measured here, else by built-in ones.
    base_digest: the digest of `old`, where it is known already; saves one read of `old`.
    table, regions: for shards. `old` and `new` hold only parts; `table` is the tensor table of the whole and
        `regions` says which box of its tensor each part is (tensors not named are whole). The patch then covers
        those regions only; `merge` joins such patches without recoding.
    positions: for sources that know where changes can be: flat positions inside each tensor (or part), in any order.
        They must include every change; more is harmless. Tensors not named are compared in full.
    to: write the patch to this file, bucket by bucket, instead of keeping it in memory.
    progress: called with the number of dense bytes just compared.

    >>> old = {"w": np.zeros(4, np.float32)}
    >>> new = {"w": np.array([0, 0, 1, 0], np.float32)}
    >>> patch = diff(old, new)
    >>> patch.changed
    1
    """
    found = _Difference(old, new, profile, base_digest, table, regions, positions)
    return found.encode(found.parts(threads, progress), profile, link, to, threads)


class Captured:
    """All changes between two versions, found but not encoded: `new` is not looked at any more, `old` still is.

    Made by `capture`, for a trainer that goes on with its weights while they are encoded and sent.
    """

    def __init__(self, difference: _Difference, parts: list[Changes], profile: str) -> None:
        self._difference, self._parts, self._profile = difference, parts, profile

    def encode(
        self,
        *,
        link: Link | str | None = None,
        to: Target = None,
        threads: int | None = None,
    ) -> Patch:
        """The patch."""
        return self._difference.encode(iter(self._parts), self._profile, link, to, threads)

    def back(self, *, to: Target = None, threads: int | None = None) -> Patch:
        """The patch that undoes it, in `gap`; `old` must not have been written to yet."""
        return self._difference.back(self._parts, to, threads)


def capture(
    old: Weights,
    new: Weights,
    *,
    profile: str = "auto",
    base_digest: Digest | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
) -> Captured:
    """The first half of `diff`: read both versions and keep what changed."""
    found = _Difference(old, new, profile, base_digest)
    return Captured(found, list(found.parts(threads, progress)), profile)


class _Difference:
    """Two versions being compared: finds the changes, then knows both digests."""

    def __init__(
        self,
        old: Weights,
        new: Weights,
        profile: str,
        base_digest: Digest | None = None,
        table: TensorTable | None = None,
        regions: Mapping[str, Region] | None = None,
        positions: Mapping[str, Any] | None = None,
    ) -> None:
        before, after = memories(old), memories(new)
        if regions is None and table is None:
            table = table_of(before)
            require_like(table, after)
        else:
            table = _require_parts(table, before, after, regions or {})
            regions = {n: r for n, r in (regions or {}).items() if r != whole(table[table.index[n]].shape)}
        self.table = table
        was, now = Held(table, before, regions), Held(table, after, regions)
        self.covers = was.places()
        self.complete = len(self.covers) == len(table) and all(r is None for _, r in self.covers)
        known = _known(table, self.covers, positions or {})
        self.search = _Search(was, now, known, plan.candidates(profile), base_digest is None)
        self.base = base_digest or Digest()
        if base_digest is None and self.complete:
            self.base += table_digest(table)
        self.delta = Digest()

    def parts(self, threads: int | None, progress: Progress | None) -> Iterator[Changes]:
        for routed, read, moved, done in ordered(self.search.run, self.search.batches(self.covers), threads):
            self.base += read
            self.delta += moved
            yield from routed
            if progress is not None:
                progress(done)

    def encode(
        self, parts: Iterator[Changes], profile: str, link: Link | str | None, to: Target, threads: int | None
    ) -> Patch:
        chooser = None if link is None else _chooser(link, threads)
        covers = None if self.complete else self.covers
        ends = lambda: (self.base, self.base + self.delta)  # noqa: E731  # known when all parts went through
        return Patch(assemble(self.table, parts, profile, ends, covers, to, threads, chooser))

    def back(self, parts: list[Changes], to: Target, threads: int | None) -> Patch:
        def turned(part: Changes) -> Changes:
            dense = [Dense(d.place, d.count, self.search.was.bits(*d.place).copy()) for d in part.dense]
            cost = estimate(replace(part, after=part.before), ("gap",)) if part.count.size else {}
            return replace(part, after=part.before, steps=None, before=None, base=None, dense=dense, cost=cost)

        covers = None if self.complete else self.covers
        ends = self.base + self.delta, self.base
        return Patch(assemble(self.table, map(turned, parts), "gap", lambda: ends, covers, to, threads))


def _chooser(link: Link | str, threads: int | None) -> Chooser:
    """What picks profiles for a link, by what is known of this machine."""
    there = Link.parse(link) if isinstance(link, str) else link
    return Chooser(there, Speeds.known(threads or default_threads()))


class _Search:
    """Finds the changes of batches of pieces; one object, many threads."""

    def __init__(
        self,
        was: Held,
        now: Held,
        known: Mapping[int, npt.NDArray[np.int64]],
        names: Sequence[str],
        digest_base: bool,
    ) -> None:
        self.was, self.now, self.known = was, now, known
        self.table = was.table
        self.names = names
        self.digest_base = digest_base

    def batches(self, covers: Sequence[Place]) -> Iterator[Batch]:
        """Batches to compare in full, then batches whose possible changes are known."""
        yield from batches(self.table, (p for p in covers if p[0] not in self.known))
        yield from batches(self.table, (p for p in covers if p[0] in self.known))

    def run(self, batch: Batch) -> tuple[list[Changes], Digest, Digest, int]:
        """Routed changes, the element sums of the old bits (if wanted), how the changes move them, bytes covered."""
        old, old_alive = self.was.read(batch)
        new, new_alive = self.now.read(batch)
        tag = np.empty(0, batch.dtype.uint)
        if int(batch.tensor[0]) in self.known:
            positions, before, after, counts = self._look(tag, old, new, batch)
        else:
            positions, before, after, counts = _scan(tag, old, new, batch.numel)
        read = sums(self.table, batch, old) if self.digest_base else Digest()
        changes = self._changes(batch, counts, positions, before, after)
        moved = self._moved(changes, before)
        routed = list(plan.route(changes, self.names, self.table))
        del old_alive, new_alive  # copies may go only now
        return routed, read, moved, batch.elements * batch.dtype.width

    def _look(self, tag: Any, old: Any, new: Any, batch: Batch) -> _Found:
        """Compare only where changes can be."""
        slices = []
        for tensor, numel in zip(batch.tensor.tolist(), batch.numel.tolist(), strict=True):
            where = self.known[tensor]
            a, b = np.searchsorted(where, [batch.offset, batch.offset + numel])
            slices.append((where[a:b] - batch.offset).astype(np.uint32))
        counts = np.array([s.size for s in slices], np.int64)
        positions = np.concatenate(slices)
        flat, ones = np.ones((counts.size, 1), np.int64), np.ones(counts.size, np.int64)
        before, after = np.empty(positions.size, tag.dtype), np.empty(positions.size, tag.dtype)
        cpu.gather(tag, counts, old, ones, flat, flat, positions, before)
        cpu.gather(tag, counts, new, ones, flat, flat, positions, after)
        real = before != after
        owner = np.repeat(np.arange(counts.size), counts)[real]
        return positions[real], before[real], after[real], np.bincount(owner, minlength=counts.size)

    def _changes(self, batch: Batch, counts: Any, positions: Any, before: Any, after: Any) -> Changes:
        live = np.flatnonzero(counts)
        tensor, region = batch.tensor[live], [batch.region[i] for i in live.tolist()]
        return Changes(
            batch.dtype,
            tensor,
            region,
            batch.numel[live],
            counts[live],
            positions,
            after,
            plan.steps_between(batch.dtype, before, after),
            batch.elements,
            lambda entry: self.now.bits(int(tensor[entry]), region[entry]),
            before=before,
            base=self.was,
        )

    def _moved(self, changes: Changes, before: UIntArray) -> Digest:
        g = self.was.geometry(changes.tensor, changes.region)
        first, second = cpu.digest_delta(
            changes.count, g.start, g.dims, g.size, g.outside, g.keys, changes.positions, before, changes.after
        )
        return Digest(int(first), int(second))


def _scan(tag: Any, old: Any, new: Any, size: Any) -> _Found:
    """Run the comparing kernel with room for few changes, and once more where there are many.

    Room that is not written to costs nothing, as long as NumPy does not ask for huge pages, which come zeroed.
    """
    counts = np.empty(size.size, np.int64)
    elements = int(size.sum())
    for room in (min(max(1024, elements // 16), _HUGE // max(4, tag.itemsize) - 1), elements):
        positions = np.empty(room, np.uint32)
        before, after = np.empty(room, tag.dtype), np.empty(room, tag.dtype)
        n = cpu.diff(tag, old, new, size, positions, before, after, counts)
        if n >= 0:
            break
    return positions[:n].copy(), before[:n].copy(), after[:n].copy(), counts


def _known(
    table: TensorTable, covers: Sequence[Place], positions: Mapping[str, Any]
) -> dict[int, npt.NDArray[np.int64]]:
    """Positions handed over, sorted and checked, by tensor."""
    out: dict[int, npt.NDArray[np.int64]] = {}
    if not positions:
        return out
    numel = {t: table.specs[t].numel if r is None else r.numel for t, r in covers}
    for name, given in positions.items():
        tensor = table.index.get(name)
        if tensor is None or tensor not in numel:
            raise TensorMismatch(f"positions are given for {name!r}, which is not among the weights")
        found = np.asarray(given)
        if found.size and found.dtype.kind not in "iu":  # a mask, say, would pass for positions 0 and 1
            raise TensorMismatch(f"positions of {name!r} are {found.dtype}; hand over integers")
        where = np.unique(found.astype(np.int64))
        if where.size and (where[0] < 0 or where[-1] >= numel[tensor]):
            raise TensorMismatch(f"positions of {name!r} reach outside its {numel[tensor]} elements")
        out[tensor] = where
    return out


def _require_parts(
    table: TensorTable | None, before: dict[str, Memory], after: dict[str, Memory], regions: Mapping[str, Region]
) -> TensorTable:
    """The tensor table, once every part is known to be the region of its tensor that it claims to be."""
    if table is None:
        raise TensorMismatch("regions are boxes of whole tensors: hand over the tensor table of the whole, too")
    if strangers := sorted(regions.keys() - before.keys()):
        raise TensorMismatch(f"regions are given for {strangers[:10]}, which are not among the weights")
    require_like(table_of(before), after)
    for name, memory in before.items():
        spec = table.get(name)
        if spec is None:
            raise TensorMismatch(f"{name!r} is not in the tensor table")
        region = regions.get(name, whole(spec.shape))
        if not region.fits(spec.shape) and region != whole(spec.shape):
            raise TensorMismatch(f"{name!r}: region {region} does not lie in {spec}")
        if memory.dtype is not spec.dtype or memory.shape != region.size:
            raise TensorMismatch(
                f"{name!r}: region {region} of {spec} cannot be {memory.dtype.name}{list(memory.shape)}"
            )
    return table
