"""What must hold between the buckets of a patch, and between them and the footer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from ..errors import InvalidField, LimitExceeded
from ..region import Region, refuse_overlap, whole
from ..shards import Place
from ..table import TensorTable
from . import limits
from .bucket import Head

_FEW = 64  # regions of a tensor that are cheaper to compare all with all, for many tensors at once


def gather_heads(
    heads: Iterable[Head], table: TensorTable, changed: int, covers: Sequence[Place] | None
) -> tuple[Head, ...]:
    """All heads of a patch, once they agree with one another and with what the footer says.

    The heads come one by one and are counted as they come, so that many small buckets cannot claim more entries
    than a patch may have.
    """
    out: list[Head] = []
    entries = counted = 0
    for head in heads:
        entries += len(head.entries)
        counted += int(head.entries.count.sum())
        if entries > limits.PATCH_ENTRIES:
            raise LimitExceeded(f"bucket {len(out)}: entry {entries} of the patch, the limit is {limits.PATCH_ENTRIES}")
        out.append(head)
    if counted != changed:
        raise InvalidField(f"the footer promises {changed} changes, the buckets hold {counted}")
    places = [p for h in out for p in zip(h.entries.tensor.tolist(), h.entries.region, strict=True)]
    if covers is not None:
        _require_covered(table, places, covers)
    refuse_shared(table, places)
    return tuple(out)


def _require_covered(table: TensorTable, places: Sequence[Place], covers: Sequence[Place]) -> None:
    """Every entry lies in one of the regions that the patch speaks for; the digests are over those alone."""
    by_tensor: dict[int, list[Region]] = {}
    for tensor, region in covers:
        by_tensor.setdefault(tensor, []).append(region or whole(table[tensor].shape))
    if sum(len(by_tensor.get(tensor, ())) for tensor, _ in places) > limits.COMPARISONS:
        raise LimitExceeded("the patch has too many regions and entries to tell whether they fit together")
    for tensor, region in places:
        mine = region or whole(table[tensor].shape)
        if not any(mine.inside(cover) for cover in by_tensor.get(tensor, ())):
            raise InvalidField(
                f"tensor {table[tensor].name!r}: the patch has an entry for {mine}, but does not cover it"
            )


def refuse_shared(table: TensorTable, places: Sequence[Place]) -> None:
    """Places never overlap: entries would be applied twice, covered regions would count twice in the digest."""
    counts = np.bincount(np.array([t for t, _ in places], np.int64), minlength=len(table))
    shared: dict[int, list[Region]] = {t: [] for t in np.flatnonzero(counts > 1).tolist()}
    if not shared:
        return
    for tensor, region in places:
        if tensor in shared:
            shared[tensor].append(region or whole(table[tensor].shape))
    few: dict[int, list[tuple[int, Region]]] = {}  # by rank
    for tensor, regions in shared.items():
        if len(regions) > limits.REGIONS_PER_TENSOR:
            raise LimitExceeded(
                f"tensor {table[tensor].name!r} has {len(regions)} regions, the limit is {limits.REGIONS_PER_TENSOR}"
            )
        if len(regions) > _FEW:
            refuse_overlap(table[tensor].name, regions)
        else:
            few.setdefault(len(table[tensor].shape), []).extend((tensor, region) for region in regions)
    for group in few.values():
        _refuse_neighbours(table, group)


def _refuse_neighbours(table: TensorTable, group: list[tuple[int, Region]]) -> None:
    """Many tensors of one rank with a few regions each: compare each region with the next, the one after, and so on."""
    owner = np.array([t for t, _ in group], np.int64)
    start = np.array([r.start for _, r in group], np.int64)
    stop = start + np.array([r.size for _, r in group], np.int64)
    follows = (start[1:, :1] >= stop[:-1, :1]).any(axis=1)
    if (follows | (owner[1:] != owner[:-1])).all():  # one behind the other, as a large tensor is cut
        return
    for step in range(1, _FEW):
        same = owner[step:] == owner[:-step]
        if not same.any():
            return
        hit = same & (start[step:] < stop[:-step]).all(axis=1) & (start[:-step] < stop[step:]).all(axis=1)
        if hit.any():
            i = int(hit.argmax())
            refuse_overlap(table[int(owner[i])].name, [group[i][1], group[i + step][1]])
