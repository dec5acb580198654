"""What a patch costs, and where: per tensor, per bucket, in total."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from .. import codec
from ..plan.cost import bandwidth
from ..wire import LINK, Head
from .contents import Contents


@dataclass(frozen=True, slots=True)
class TensorStats:
    """One tensor. Streams are shared by all entries of a bucket: `bytes` is the tensor's share, by its changes."""

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
    """One bucket: its profile (`dense` where every entry is), and why."""

    profile: str
    reason: str
    dtype: str
    entries: int
    dense_entries: int
    changed: int
    bytes: int


@dataclass(frozen=True)
class Stats:
    """A patch in figures. `density` is changed / elements; `ratio` is dense bytes / patch bytes.

    `bytes` counts everything, `table_bytes` the part that is the tensor table; `bits_per_changed` leaves the table out,
    since a run sends it once.
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
        """The same as plain values, for JSON."""
        return asdict(self)


def stats(patch: Contents) -> Stats:
    """Figures from the entry tables; no changes are decoded."""
    n = len(patch.table)
    changed, share, dense = np.zeros(n, np.int64), np.zeros(n), np.zeros(n, np.int64)
    buckets = []
    for index, head in enumerate(patch.heads):
        size = len(patch.bucket(index))
        entries = head.entries
        np.add.at(changed, entries.tensor, entries.count)
        np.add.at(dense, entries.tensor, entries.dense)
        np.add.at(share, entries.tensor, _shares(head, size))
        buckets.append(_bucket(head, size))
    columns = patch.table.numel.tolist(), changed.tolist(), share.tolist(), dense.tolist()
    tensors = tuple(
        TensorStats(spec.name, spec.dtype.name, numel, count, _ratio(count, numel), round(b), _ratio(8 * b, count), few)
        for spec, numel, count, b, few in zip(patch.table.specs, *columns, strict=True)
    )
    total = int(changed.sum())
    profiles = sorted({b.profile for b in buckets})
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


def _shares(head: Head, size: int) -> Any:
    """What each entry has of its bucket's bytes: dense streams by elements, all else by changes."""
    entries = head.entries
    dense = np.where(entries.dense, entries.numel, 0)
    sparse = np.where(entries.dense, 0, entries.count)
    both = dense / max(1, dense.sum()) * head.dense_bytes
    weight = sparse if sparse.sum() else dense
    return both + weight / max(1, weight.sum()) * (size - head.dense_bytes)


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
    dense, entries = int(head.entries.dense.sum()), len(head.entries)
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
    return f"smallest estimate: {sizes}{note}"


def _ratio(a: float, b: float) -> float:
    return a / b if b else 0.0
