"""Finding changes: compare two versions of the weights bit by bit."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from .. import plan
from ..errors import TensorMismatch
from ..kernels import cpu
from ..parallel import Progress, default_threads, ordered, thread_count
from ..plan import Changes, Chooser, Dense, Draft, Link, Speeds, estimate
from ..weights.batches import Batch, batches
from ..weights.digest import Digest, sums, table_digest
from ..weights.dtypes import UIntArray
from ..weights.local import LocalWeights
from ..weights.marks import Bitmap
from ..weights.memory import Weights
from ..weights.shards import Place, Shards
from ..wire import encode_table, table_hash
from .assemble import Target, assemble
from .contents import Stream
from .patch import Patch

_WRITERS, _WAITING = 4, 64
_HUGE = 1 << 22  # bytes: arrays as large as this are asked to lie in huge pages
_KEPT = 1 << 19  # changes whose room a thread keeps, at most 10 MiB
_Part = tuple[list[Changes | Draft], Digest, Digest, int]
_Found = tuple[npt.NDArray[np.uint32], UIntArray, UIntArray, npt.NDArray[np.int64]]


def diff(
    old: Weights | Shards,
    new: Weights | Shards,
    *,
    profile: str = "auto",
    link: Link | str | None = None,
    base_digest: Digest | None = None,
    positions: Mapping[str, Any] | None = None,
    to: Target = None,
    threads: int | None = None,
    progress: Progress | None = None,
) -> Patch:
    """The patch that turns `old` into `new`, exactly.

    Weights are mappings from names to torch tensors or NumPy arrays. Both sides must hold the same names, dtypes
    and shapes; anything else raises `TensorMismatch`. Of `Shards` the patch covers just the regions that are at hand;
    `merge` joins such patches without recoding.

    profile: `raw`, `gap`, `ulp`, `ctx`, or `auto`, which takes the smallest for each bucket. Where telling elements
        apart by magnitude does not pay, `ctx` becomes `ulp`.
    link: the way to the receiver, as in "25Gbit" or "3GB/s". `auto` then takes for each bucket the profile that is
        coded, sent and landed soonest, by the speeds that `sparserl plan` measured here, else by built-in ones.
    base_digest: the digest of `old`, where it is known already; saves one read of `old`.
    positions: for sources that know where changes can be: flat positions inside each tensor, in any order. They must
        include every change; more is harmless. Tensors not named are compared in full. Parts of shards have `marks`.
    to: write the patch to this file, bucket by bucket, instead of keeping it in memory.
    progress: called with the number of dense bytes just compared.

    >>> old = {"w": np.zeros(4, np.float32)}
    >>> new = {"w": np.array([0, 0, 1, 0], np.float32)}
    >>> patch = diff(old, new)
    >>> patch.changed
    1
    """
    found = _Difference(old, new, profile, base_digest, positions)
    return found.encode(found.parts(threads, progress, keep=link is not None), profile, link, to, threads)


class Captured:
    """All changes between two versions, found but not encoded: `new` is not looked at any more, `old` still is.

    Made by `capture`, for a trainer that goes on with its weights while they are encoded and sent.
    """

    def __init__(self, difference: _Difference, parts: list[Changes | Draft], profile: str) -> None:
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

    def stream(
        self, *, link: Link | str | None = None, profiles: Collection[str] | None = None, threads: int | None = None
    ) -> Stream:
        """The patch bucket by bucket, to be sent while it is encoded; in none but these profiles, if they are given."""
        return self._difference.stream(self._parts, self._profile, link, profiles, threads)

    def back(self, *, to: Target = None, threads: int | None = None) -> Patch:
        """The patch that undoes it, in `gap`; `old` must not have been written to yet."""
        return self._difference.back(self._parts, to, threads)


def capture(
    old: Weights | Shards,
    new: Weights | Shards,
    *,
    profile: str = "auto",
    base_digest: Digest | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
) -> Captured:
    """The first half of `diff`: read both versions and keep what changed."""
    found = _Difference(old, new, profile, base_digest)
    return Captured(found, list(found.parts(threads, progress, keep=True)), profile)


class _Difference:
    """Two versions being compared: finds the changes, then knows both digests."""

    def __init__(
        self,
        old: Weights | Shards,
        new: Weights | Shards,
        profile: str,
        base_digest: Digest | None = None,
        positions: Mapping[str, Any] | None = None,
    ) -> None:
        was = LocalWeights.of(old)
        now = LocalWeights.of(new, was.table)
        _require_same_places(was, now)
        if positions and isinstance(new, Shards):
            raise TensorMismatch("positions are of whole tensors; the parts of shards have marks")
        self.table, self.covers, self.complete = was.table, was.places, was.complete
        known = _marked(now, new) if isinstance(new, Shards) else _known(now, positions or {})
        self.search = _Search(was, now, known, plan.candidates(profile), base_digest is None)
        self.base = base_digest or Digest()
        if base_digest is None and self.complete:
            self.base += table_digest(self.table)
        self.delta = Digest()

    def parts(self, threads: int | None, progress: Progress | None, keep: bool) -> Iterator[Changes | Draft]:
        """Routed changes. `keep`: buckets may be wanted in any profile, or when the weights went on."""
        for routed, read, moved, done in self._found(threads, keep):
            self.base += read
            self.delta += moved
            yield from routed
            if progress is not None:
                progress(done)

    def _found(self, threads: int | None, keep: bool) -> Iterator[_Part]:
        """What is on a device in both versions is compared there, the rest here."""
        search, near = self.search, self.covers
        if search.was.gpu_streams and search.now.gpu_streams:
            from ..weights.on_gpu import split_by_gpu
            from . import gpu_compare as device_diff

            near, far = split_by_gpu(near, search.was, search.now)
            yield from device_diff.search(search.was, search.now, far, search.names, search.digest_base, keep)
        yield from ordered(search.run, search.batches(near), threads)

    def encode(
        self, parts: Iterator[Changes | Draft], profile: str, link: Link | str | None, to: Target, threads: int | None
    ) -> Patch:
        chooser = None if link is None else _chooser(link, threads)
        covers = None if self.complete else self.covers
        ends = lambda: (self.base, self.base + self.delta)  # noqa: E731  # known when all parts went through
        writers, ahead = self._writers(profile, threads)
        return Patch(assemble(self.table, parts, profile, ends, covers, to, writers, chooser, ahead))

    def _writers(self, profile: str, threads: int | None) -> tuple[int | None, int | None]:
        """Threads that write buckets, and how many may wait for them.

        Where a device codes buckets there is little left to do: more threads would wait for the interpreter's lock.
        """
        if profile == "gap" or not (self.search.was.gpu_streams and self.search.now.gpu_streams):
            return threads, None
        return threads or min(_WRITERS, default_threads()), _WAITING

    def stream(
        self,
        parts: list[Changes | Draft],
        profile: str,
        link: Link | str | None,
        profiles: Collection[str] | None,
        threads: int | None,
    ) -> Stream:
        names = [name for name in plan.candidates(profile) if profiles is None or name in profiles]
        if not names:
            raise TensorMismatch(f"profile {profile!r} cannot be written with {sorted(profiles or ())} alone")
        chooser = None if link is None else _chooser(link, threads)
        drafts = [draft for draft in plan.cut(parts) if draft.changed]
        hash = table_hash(encode_table(self.table))
        write = lambda draft: plan.write(draft, names, hash, chooser)  # noqa: E731
        written = ordered(write, drafts, *self._writers(profile, threads))
        return Stream(
            self.table,
            self.base,
            self.base + self.delta,
            sum(draft.changed for draft in drafts),
            None if self.complete else self.covers,
            len(drafts),
            (bucket for bucket, _ in filter(None, written)),
        )

    def back(self, parts: list[Changes | Draft], to: Target, threads: int | None) -> Patch:
        def turned(part: Changes) -> Changes:
            dense = [Dense(d.place, d.count, self.search.was.bits(*d.place).copy()) for d in part.dense]
            cost = estimate(replace(part, after=part.before), ("gap",)) if part.count.size else {}
            return replace(part, after=part.before, steps=None, before=None, base=None, dense=dense, cost=cost)

        covers = None if self.complete else self.covers
        ends = self.base + self.delta, self.base
        found = (p for part in parts for p in (part.parts if isinstance(part, Draft) else [part]))
        return Patch(assemble(self.table, map(turned, found), "gap", lambda: ends, covers, to, threads))


def _chooser(link: Link | str, threads: int | None) -> Chooser:
    """What picks profiles for a link, by what is known of this machine."""
    there = Link.parse(link) if isinstance(link, str) else link
    return Chooser(there, Speeds.known(thread_count(threads)))


class _Search:
    """Finds the changes of batches of pieces; one object, many threads."""

    def __init__(
        self,
        was: LocalWeights,
        now: LocalWeights,
        known: Mapping[int, Bitmap | _Listed],
        names: Sequence[str],
        digest_base: bool,
    ) -> None:
        self.was, self.now, self.known = was, now, known
        self.table = was.table
        self.names = names
        self.digest_base = digest_base

    def batches(self, covers: Sequence[Place]) -> Iterator[Batch]:
        """Batches to compare in full, then batches whose possible changes are known."""
        known = {p for p in covers if self.now.part_index(*p) in self.known} if self.known else set()
        yield from batches(self.table, (p for p in covers if p not in known))
        yield from batches(self.table, (p for p in covers if p in known))

    def run(self, batch: Batch) -> _Part:
        """Routed changes, the element sums of the old bits (if wanted), how the changes move them, bytes covered."""
        old, old_alive = self.was.read(batch)
        new, new_alive = self.now.read(batch)
        tag = np.empty(0, batch.dtype.uint)
        if self.now.part_index(int(batch.tensor[0]), batch.region[0]) in self.known:
            positions, before, after, counts = self._look(tag, old, new, batch)
        else:
            positions, before, after, counts = scan(tag, old, new, batch.numel)
        read = sums(self.table, batch, old) if self.digest_base else Digest()
        changes = self._changes(batch, counts, positions, before, after)
        moved = self._moved(changes, before)
        routed: list[Changes | Draft] = list(plan.route(changes, self.names, self.table))
        del old_alive, new_alive  # copies may go only now
        return routed, read, moved, batch.elements * batch.dtype.width

    def _look(self, tag: Any, old: Any, new: Any, batch: Batch) -> _Found:
        """Compare only where changes can be."""
        slices = []
        for tensor, region, numel in zip(batch.tensor.tolist(), batch.region, batch.numel.tolist(), strict=True):
            marks = self.known[self.now.part_index(tensor, region)]
            slices.append(marks.between(batch.offset, batch.offset + numel))
        counts = np.array([s.size for s in slices], np.int64)
        positions = np.concatenate(slices)
        flat, ones = np.ones((counts.size, 1), np.int64), np.ones(counts.size, np.int64)
        before, after = np.empty(positions.size, tag.dtype), np.empty(positions.size, tag.dtype)
        cpu.changes.gather(tag, counts, old, ones, flat, flat, positions, before)
        cpu.changes.gather(tag, counts, new, ones, flat, flat, positions, after)
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
        first, second = cpu.changes.digest_delta(
            changes.count, g.start, g.dims, g.size, g.tensor_strides, g.keys, changes.positions, before, changes.after
        )
        return Digest(int(first), int(second))


def scan(tag: Any, old: Any, new: Any, size: Any) -> _Found:
    """Run the comparing kernel with room for few changes, and once more where there are many.

    A thread keeps the room that a few changes took: to have new memory mapped for every piece costs more than a copy.
    While it is in use nobody else has it, not even a signal handler that comes in between.
    """
    counts = np.empty(size.size, np.int64)
    columns = _room.kept.pop(tag.dtype, None) or _columns(_HUGE // max(4, tag.itemsize) - 1, tag.dtype)
    n = cpu.changes.diff(tag, old, new, size, *columns, counts)
    if 0 <= n <= _KEPT:
        positions, before, after = (column[:n].copy() for column in columns)
        _room.kept[tag.dtype] = columns
        return positions, before, after, counts
    if n < 0:
        columns = _columns(int(size.sum()), tag.dtype)
        n = cpu.changes.diff(tag, old, new, size, *columns, counts)
    for column in columns:
        column.resize(n, refcheck=False)  # gives back what was not needed, without a copy
    return *columns, counts


_Columns = tuple[npt.NDArray[np.uint32], UIntArray, UIntArray]


def _columns(room: int, dtype: Any) -> _Columns:
    """Room for positions, old bits and new bits.

    What is not written to costs nothing, as long as NumPy does not ask for huge pages, which come zeroed.
    """
    return np.empty(room, np.uint32), np.empty(room, dtype), np.empty(room, dtype)


class _Room(threading.local):
    """Columns that a thread keeps, by the dtype of bits."""

    def __init__(self) -> None:
        self.kept: dict[Any, _Columns] = {}


_room = _Room()


class _Listed:
    """Positions handed over as a list, sorted and without repeats."""

    def __init__(self, where: npt.NDArray[np.int64]) -> None:
        self.where = where

    def between(self, low: int, high: int) -> npt.NDArray[np.uint32]:
        a, b = np.searchsorted(self.where, [low, high])
        return (self.where[a:b] - low).astype(np.uint32)


def _known(held: LocalWeights, positions: Mapping[str, Any]) -> dict[int, Bitmap | _Listed]:
    """Positions handed over, checked, by the number of the part."""
    out: dict[int, Bitmap | _Listed] = {}
    for name, given in positions.items():
        tensor = held.table.index.get(name)
        if tensor is None:
            raise TensorMismatch(f"positions are given for {name!r}, which is not among the weights")
        numel = held.table.specs[tensor].numel
        found = np.asarray(given)
        if found.size and found.dtype.kind not in "iu":  # a mask, say, would pass for positions 0 and 1
            raise TensorMismatch(f"positions of {name!r} are {found.dtype}; hand over integers")
        where = np.unique(found.astype(np.int64))
        if where.size and (where[0] < 0 or where[-1] >= numel):
            raise TensorMismatch(f"positions of {name!r} reach outside its {numel} elements")
        out[held.part_index(tensor, None)] = _Listed(where)
    return out


def _marked(held: LocalWeights, shards: Shards) -> dict[int, Bitmap | _Listed]:
    """The marks of parts, by the number of the part."""
    out: dict[int, Bitmap | _Listed] = {}
    for part in shards.parts:
        if part.marks is not None:
            if part.marks.numel != part.region.numel:
                raise TensorMismatch(
                    f"{part.tensor!r}: marks for {part.marks.numel} elements, the region has {part.region.numel}"
                )
            out[held.part_index(held.table.index[part.tensor], part.region)] = part.marks
    return out


def _require_same_places(was: LocalWeights, now: LocalWeights) -> None:
    if was.places != now.places:
        some = sorted(set(was.memory_by_name()) ^ set(now.memory_by_name()))[:10]
        raise TensorMismatch(f"old and new are not the same parts of their tensors: {some}")
