"""Comparing two versions of the weights bit by bit, and encoding what changed.

    capture ──► compare ──► route ──► cut ──► encode ──► collect
    both        in batches  dense or  into    on         in memory,
    versions    on threads  sparse    buckets threads    or in a file

Every stage takes what the one before it yields, so that buckets are encoded while weights are still being compared.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from .. import plan
from ..errors import TensorMismatch
from ..parallel import Progress, default_threads, ordered
from ..plan import Boundary, Changes, Dense, Draft, Link, estimate
from ..weights.digest import Digest, table_digest
from ..weights.holdings import Holdings
from ..weights.local import LocalWeights
from ..weights.memory import Weights
from ..weights.shards import Place, Shards
from ..weights.table import TensorTable
from .assemble import Encoding, PatchPath, chooser_for, collect, profile_names
from .candidates import from_marks, from_positions
from .contents import Bucket, BucketList, Contents, Ends
from .cpu_compare import Compared, Comparer
from .patch import Patch

Timed = Callable[[Iterator[Any]], Iterator[Any]]
"""Gives what an iterator gives, and measures how long that takes."""

_GPU_WRITERS = 4  # threads that write buckets which a GPU encodes: more would wait for the interpreter's lock
_GPU_WAITING = 64  # buckets that may wait for them


def diff(
    old: Weights | Shards,
    new: Weights | Shards,
    *,
    profile: str = "auto",
    link: Link | str | None = None,
    base_digest: Digest | None = None,
    positions: Mapping[str, Any] | None = None,
    to: PatchPath | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
) -> Patch:
    """Find the patch that turns `old` into `new`, exactly.

    Args:
        old: The version before: a mapping from names to torch tensors or NumPy arrays, or `Shards`. Of shards the patch
            covers just the regions that are present; `merge` joins such patches without recoding.
        new: The version now, with the same names, dtypes and shapes.
        profile: `raw`, `gap`, `ulp`, `ctx`, or `auto`, which takes the smallest for each bucket. Where telling elements
            apart by magnitude does not pay, `ctx` becomes `ulp`.
        link: The link to the receiver, as in "25Gbit" or "3GB/s". `auto` then takes for each bucket the profile that is
            encoded, sent and applied soonest, by the speeds that `sparserl plan` measured on this machine, or else by
            built-in ones.
        base_digest: The digest of `old`, if it is known already; saves one read of `old`.
        positions: For sources that know where changes can be: flat positions inside each tensor, in any order. They
            must include every change; more is harmless. Tensors that are not named are compared in full. Parts of
            shards have `marks` instead.
        to: Write the patch to this file, bucket by bucket, instead of keeping it in memory.
        threads: How many threads to use; None for as many as there are cores.
        progress: Called with the number of dense bytes just compared.

    Returns:
        The patch. It is empty if nothing changed.

    Raises:
        TensorMismatch: If the two versions differ in names, dtypes, shapes or regions, or if positions do not fit.
        UnsupportedTensor: If a tensor has a dtype or layout that patches cannot describe.

    Example:
        >>> old = {"w": np.zeros(4, np.float32)}
        >>> new = {"w": np.array([0, 0, 1, 0], np.float32)}
        >>> patch = diff(old, new)
        >>> patch.changed
        1
        >>> patch.apply(old).changed, old["w"].tolist()
        (1, [0.0, 0.0, 1.0, 0.0])
    """
    comparison = Comparison(old, new, profile, base_digest, positions)
    changes = comparison.compare(threads, progress, keep=link is not None)
    return Patch(comparison.encode(changes, link, to, threads))


class Captured:
    """All changes between two versions, found but not encoded. `old` is still read when they are encoded.

    Made by `capture`, for a trainer that goes on with its weights while they are encoded and sent.
    """

    def __init__(self, comparison: Comparison, changes: Iterator[Changes | Draft]) -> None:
        self._comparison = comparison
        self._changes: list[Changes | Draft] = []  # those that were found
        self._coming = changes
        self._buckets: list[tuple[Bucket, int]] | None = None  # where they are encoded already
        self._way_back: Callable[[], Patch] | None = None

    def find(self) -> Captured:
        """Find all changes now: `new` is not read any more."""
        self._changes.extend(self._coming)
        return self

    def detach(
        self, link: Link | str | None = None, threads: int | None = None, *, with_way_back: bool = False
    ) -> Captured:
        """Take all that is needed of both versions, which may change then: that is encoding.

        with_way_back: whether `back` will be called.
        """
        self.find()
        self._buckets = [*self._comparison.buckets(self._changes, link, threads)]
        if with_way_back:
            self._way_back = self.back(threads=threads)
        self._changes = []
        return self

    def _found(self) -> Iterator[Changes | Draft]:
        """All changes: those that were found, and those that are found meanwhile."""
        yield from self._changes
        for change in self._coming:
            self._changes.append(change)
            yield change

    def encode(
        self,
        *,
        link: Link | str | None = None,
        to: PatchPath | BucketList | None = None,
        threads: int | None = None,
    ) -> Patch:
        """Encode the patch."""
        if self._buckets is not None:
            return Patch(self._comparison.collect(self._buckets, to))
        return Patch(self._comparison.encode(self._found(), link, to, threads))

    def stream(
        self, *, link: Link | str | None = None, profiles: Collection[str] | None = None, threads: int | None = None
    ) -> Contents:
        """The patch with buckets that are encoded when they are needed, so that it can be sent meanwhile.

        Args:
            link: The link to the receiver, for which profiles are chosen.
            profiles: The profiles that the receiver can read; None for all.
            threads: How many threads to use; None for as many as there are cores.
        """
        return self._comparison.stream(self._changes, link, profiles, threads)

    def back(self, *, threads: int | None = None) -> Callable[[], Patch]:
        """What makes the patch that undoes it, in `gap`, in a temporary file. Only now `old` must still be the base."""
        if self._way_back is not None:
            return self._way_back
        return self._comparison.back(self._changes, threads)


def capture(
    old: Weights | Shards | LocalWeights,
    new: Weights | Shards,
    *,
    profile: str = "auto",
    profiles: Collection[str] | None = None,
    base_digest: Digest | None = None,
    holdings: Holdings | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
    timed: Timed | None = None,
) -> Captured:
    """The first half of `diff`: read both versions and keep what changed.

    With `profiles`, profiles are chosen among these, which are what receivers can take. With `holdings`, every bucket
    is for the same receivers, and contains no region that one of them has a part of.
    With `timed`, changes are found while they are encoded, and come through it.
    """
    comparison = Comparison(old, new, profile, base_digest, holdings=holdings, profiles=profiles)
    changes = comparison.compare(threads, progress, keep=True)
    return Captured(comparison, changes).find() if timed is None else Captured(comparison, timed(changes))


class Comparison:
    """Two versions that are being compared: finds the changes, and then knows both digests."""

    def __init__(
        self,
        old: Weights | Shards | LocalWeights,
        new: Weights | Shards,
        profile: str,
        base_digest: Digest | None = None,
        positions: Mapping[str, Any] | None = None,
        holdings: Holdings | None = None,
        profiles: Collection[str] | None = None,
    ) -> None:
        self._old = LocalWeights.of(old)
        self._new = LocalWeights.of(new, self._old.table)
        _require_same_places(self._old, self._new)
        if positions and isinstance(new, Shards):
            raise TensorMismatch("positions are of whole tensors; the parts of shards have marks")
        self._profile = profile
        self._names = profile_names(profile, profiles)
        self._candidates = (
            from_marks(self._new, new) if isinstance(new, Shards) else from_positions(self._new, positions or {})
        )
        self._holdings = holdings
        self._digest_base = base_digest is None
        self._base = base_digest or Digest()
        if base_digest is None and self._old.complete:
            self._base += table_digest(self.table)
        self._moved = Digest()

    @property
    def table(self) -> TensorTable:
        return self._old.table

    @property
    def _on_gpu(self) -> bool:
        """Whether some weights are on a GPU with kernels in both versions."""
        return self._old.has_kernels and self._new.has_kernels

    def compare(self, threads: int | None, progress: Progress | None, keep: bool) -> Iterator[Changes | Draft]:
        """Compare both versions and route the changes: dense or sparse.

        Args:
            threads: How many threads to use.
            progress: Called with the number of bytes just compared.
            keep: Whether buckets may be wanted in any profile, or after the weights have changed.
        """
        for compared in self._compared(threads, keep):
            self._base += compared.old_sums
            self._moved += compared.moved
            yield from compared.routed
            if progress is not None:
                progress(compared.nbytes)

    def _compared(self, threads: int | None, keep: bool) -> Iterator[Compared]:
        """All places; or those that the same receivers have, and a boundary, for one group of receivers after another.

        Whether changes are looked for among candidates does not depend on the receivers: they have their places.
        """
        if self._holdings is None or self._candidates:
            yield from self._compare_places(self._old.places, threads, keep)
            return
        groups = self._holdings.cells(self._old.places)
        sliced: list[list[Changes | Draft]] = [[] for _ in groups]
        if self._on_gpu:
            from .gpu_cells import slice_columns

            groups, sliced, compared = slice_columns(self._old, self._new, groups, self._names, self._digest_base)
            yield compared
        for places, changes in zip(groups, sliced, strict=True):
            yield from self._compare_places(places, threads, keep)
            yield Compared([*changes, Boundary()], Digest(), Digest(), 0)

    def _compare_places(self, places: Sequence[Place], threads: int | None, keep: bool) -> Iterator[Compared]:
        """What is on a GPU in both versions is compared there, the rest by the CPU."""
        if self._on_gpu:
            from ..weights.on_gpu import split_by_gpu
            from . import gpu_compare

            places, runs = split_by_gpu(places, self._old, self._new)
            yield from gpu_compare.compare(self._old, self._new, runs, self._names, self._digest_base, keep)
        comparer = Comparer(self._old, self._new, self._candidates, self._names, self._digest_base)
        if not self._digest_base:
            places = self._new.without_lazy_bits_of(self._old, places)
        yield from ordered(comparer.compare, comparer.batches(places), threads)

    def ends(self, changed: int) -> Ends:
        """The ends of the patch; known when all changes have been taken."""
        covers = None if self._old.complete else self._old.places
        return Ends(self._base, self._base + self._moved, changed, covers)

    def encode(
        self,
        changes: Iterable[Changes | Draft],
        link: Link | str | None,
        to: PatchPath | BucketList | None,
        threads: int | None,
    ) -> Contents:
        """Cut changes into buckets, encode them, and collect them."""
        return self.collect(self.buckets(changes, link, threads), to)

    def buckets(
        self, changes: Iterable[Changes | Draft], link: Link | str | None, threads: int | None
    ) -> Iterator[tuple[Bucket, int]]:
        """Cut changes into buckets, and encode them."""
        return self._encoding(link, threads).buckets(self.table, plan.cut(changes))

    def collect(self, buckets: Iterable[tuple[Bucket, int]], to: PatchPath | BucketList | None) -> Contents:
        """Collect buckets that contain all changes."""
        return collect(self.table, buckets, self.ends, to)

    def stream(
        self,
        changes: list[Changes | Draft],
        link: Link | str | None,
        profiles: Collection[str] | None,
        threads: int | None,
    ) -> Contents:
        """Cut changes into buckets, which are encoded when they are needed."""
        encoding = replace(self._encoding(link, threads), names=profile_names(self._profile, profiles))
        drafts = [draft for draft in plan.cut(changes) if draft.changed]
        buckets = encoding.buckets(self.table, drafts)
        bucket_list = BucketList(len(drafts), source=(bucket for bucket, _ in buckets))
        return Contents(self.table, self.ends(sum(draft.changed for draft in drafts)), bucket_list)

    def back(self, changes: list[Changes | Draft], threads: int | None) -> Callable[[], Patch]:
        """What makes the patch from the new version to the old one, when the old one may be gone."""
        # Changes have their old bits, on the host or on a GPU, whence they come later. Dense entries read them now.
        parts: list[Changes] = []
        on_gpu: list[Draft] = []
        for item in changes:
            if isinstance(item, Draft) and item.is_on_gpu:
                on_gpu.append(item)
            else:
                parts += [self._with_old_dense(part) for part in (item.parts if isinstance(item, Draft) else [item])]
        forward = self.ends(0)
        ends = Ends(forward.result, forward.base, 0, forward.covers)

        def make() -> Patch:
            all_parts = chain(parts, (part for draft in on_gpu for part in draft.parts))
            buckets = Encoding(("gap",), threads=threads).buckets(self.table, plan.cut(map(_undo, all_parts)))
            return Patch(collect(self.table, buckets, lambda n: ends._replace(changed=n), BucketList(memory_bytes=0)))

        return make

    def _with_old_dense(self, part: Changes) -> Changes:
        dense = [Dense(d.place, d.count, self._old.bits(*d.place).copy()) for d in part.dense]
        return replace(part, dense=dense) if dense else part

    def _encoding(self, link: Link | str | None, threads: int | None) -> Encoding:
        chooser = None if link is None else chooser_for(link, threads)
        if self._on_gpu and self._profile != "gap":
            return Encoding(self._names, chooser, threads or min(_GPU_WRITERS, default_threads()), _GPU_WAITING)
        return Encoding(self._names, chooser, threads)


def _undo(part: Changes) -> Changes:
    """Changes that put the old bits back; dense entries have them."""
    cost = estimate(replace(part, after=part.before), ("gap",)) if part.count.size else {}
    return replace(part, after=part.before, steps=None, before=None, base=None, bits=None, cost=cost)


def _require_same_places(old: LocalWeights, new: LocalWeights) -> None:
    if old.places != new.places:
        examples = sorted(set(old.memory_by_name()) ^ set(new.memory_by_name()))[:10]
        raise TensorMismatch(f"old and new are not the same parts of their tensors: {examples}")
