"""What a patch takes, and where: per tensor, per bucket, in total."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import starmap
from typing import Any

import numpy as np

from .. import codec
from ..plan.cost import bandwidth
from ..weights.table import TensorSpec
from ..wire import LINK, Head
from .contents import Contents


@dataclass(frozen=True, slots=True)
class TensorStats:
    """One tensor of a patch in figures.

    Attributes:
        name: The tensor's name.
        dtype: The name of its dtype.
        elements: How many elements it has.
        changed: How many of them change.
        density: Changed elements per element.
        bytes: Its share of the buckets, by its changes: streams are shared by all entries of a bucket.
        bits_per_changed: Bits for each element that changes.
        dense_entries: How many of its entries are dense.
    """

    name: str
    dtype: str
    elements: int
    changed: int
    density: float
    bytes: int
    bits_per_changed: float
    dense_entries: int


@dataclass(frozen=True, slots=True)
class BucketStats:
    """One bucket of a patch in figures.

    Attributes:
        profile: How it is encoded; `dense` where every entry is.
        reason: Why it is.
        dtype: The name of its dtype.
        entries: How many entries it has.
        dense_entries: How many of them are dense.
        changed: How many elements it changes.
        bytes: Its size.
    """

    profile: str
    reason: str
    dtype: str
    entries: int
    dense_entries: int
    changed: int
    bytes: int


@dataclass(frozen=True)
class Stats:
    """A patch in figures; made by `Patch.stats`.

    Attributes:
        elements: Elements of all tensors.
        changed: How many of them change.
        density: Changed elements per element.
        bytes: Size of the patch, all in all.
        table_bytes: The part of it that is the tensor table.
        dense_bytes: Size of the weights themselves.
        ratio: Dense bytes per byte of the patch.
        bits_per_changed: Bits for each element that changes, without the table, which a run sends once.
        profile: The profiles of all buckets.
        base_digest: The digest of the weights that the patch applies to.
        result_digest: The digest of the weights it makes.
        complete: Whether it covers the whole tensor table.
        untouched_tensors: How many tensors do not change.
        tensors: The tensors, in the order of the table.
        buckets: The buckets, in order.

    Example:
        >>> old = {"w": np.zeros(4, np.float32)}
        >>> stats = sparserl.diff(old, {"w": np.array([0, 0, 1, 0], np.float32)}).stats()
        >>> stats.changed, stats.density, stats.tensors[0].name
        (1, 0.25, 'w')
    """

    elements: int
    changed: int
    density: float
    bytes: int
    table_bytes: int
    dense_bytes: int
    ratio: float
    bits_per_changed: float
    profile: str
    base_digest: str
    result_digest: str
    complete: bool
    untouched_tensors: int
    tensors: tuple[TensorStats, ...]
    buckets: tuple[BucketStats, ...]

    def as_dict(self) -> dict[str, Any]:
        """The figures as plain values, for JSON."""
        return asdict(self)


def stats(patch: Contents) -> Stats:
    """Figures from the entry tables; no changes are decoded."""
    changed = np.zeros(len(patch.table), np.int64)
    share = np.zeros(len(patch.table))
    dense = np.zeros(len(patch.table), np.int64)
    buckets = []
    for index, head in enumerate(patch.heads):
        size = len(patch.bucket(index))
        entries = head.entries
        np.add.at(changed, entries.tensor, entries.count)
        np.add.at(dense, entries.tensor, entries.dense)
        np.add.at(share, entries.tensor, _shares(head, size))
        buckets.append(_bucket(head, size))
    columns = changed.tolist(), share.tolist(), dense.tolist()
    tensors = tuple(starmap(_tensor, zip(patch.table.specs, *columns, strict=True)))
    total = int(changed.sum())
    profiles = sorted({bucket.profile for bucket in buckets})
    return Stats(
        elements=patch.table.elements,
        changed=total,
        density=_ratio(total, patch.table.elements),
        bytes=patch.nbytes,
        table_bytes=patch.table_nbytes,
        dense_bytes=patch.table.dense_bytes,
        ratio=_ratio(patch.table.dense_bytes, patch.nbytes),
        bits_per_changed=_ratio(8 * (patch.nbytes - patch.table_nbytes), total),
        profile="+".join(profiles) if profiles else "none",
        base_digest=patch.base.hex,
        result_digest=patch.result.hex,
        complete=patch.complete,
        untouched_tensors=int((changed == 0).sum()),
        tensors=tensors,
        buckets=tuple(buckets),
    )


def _tensor(spec: TensorSpec, changed: int, share: float, dense_entries: int) -> TensorStats:
    return TensorStats(
        name=spec.name,
        dtype=spec.dtype.name,
        elements=spec.numel,
        changed=changed,
        density=_ratio(changed, spec.numel),
        bytes=round(share),
        bits_per_changed=_ratio(8 * share, changed),
        dense_entries=dense_entries,
    )


def _shares(head: Head, size: int) -> Any:
    """Each entry's share of its bucket's bytes: dense streams by elements, all else by changes."""
    entries = head.entries
    dense = np.where(entries.dense, entries.numel, 0)
    sparse = np.where(entries.dense, 0, entries.count)
    dense_share = dense / max(1, dense.sum()) * head.dense_bytes
    weight = sparse if sparse.sum() else dense
    return dense_share + weight / max(1, weight.sum()) * (size - head.dense_bytes)


def _bucket(head: Head, size: int) -> BucketStats:
    entries = head.entries
    return BucketStats(
        "dense" if entries.dense.all() else head.profile.name,
        _reason(head),
        head.dtype.name,
        len(entries),
        int(entries.dense.sum()),
        int(entries.count.sum()),
        size,
    )


def _reason(head: Head) -> str:
    """Why a bucket has its profile."""
    dense = int(head.entries.dense.sum())
    entries = len(head.entries)
    if dense == entries:
        return "the dense bits are smaller than any sparse form"
    note = f"; {dense} of {entries} entries dense, where that is smaller" if dense else ""
    if not head.estimates:
        return "as asked" + note
    names = {p.id: p.name for p in codec.PROFILES.values()}
    ranked = sorted((pair for pair in head.estimates if pair[0] != LINK), key=lambda pair: pair[1])
    sizes = " < ".join(f"{names.get(i, f'profile {i}')} {b} B" for i, b in ranked)
    link = dict(head.estimates).get(LINK)
    if link is not None:
        return f"least predicted time at {bandwidth(link)}: {head.profile.name}, of {sizes}{note}"
    if ranked[0][0] != head.profile.id:  # its classes are chosen afterwards, and change the estimate
        return f"{head.profile.name} by a first estimate; now {sizes}{note}"
    return f"smallest estimate: {sizes}{note}"


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
