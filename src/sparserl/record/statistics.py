"""What a recording holds of one sync: which elements changed, by how much, and what each profile takes for them.

The changes come from comparing two versions, or from a patch and the version that it applies to.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from .. import plan
from ..codec import PROFILES, Stream
from ..errors import NeedsBase
from ..parallel import Progress, ordered
from ..patch import Patch, diff
from ..patch.assemble import Encoding, collect
from ..patch.contents import BucketList, Contents
from ..patch.cpu_compare import scan
from ..patch.decode import Decoded
from ..patch.staging import stage
from ..plan import Changes, steps_between
from ..weights.batches import Batch, batches
from ..weights.boxes import select
from ..weights.digest import Digest
from ..weights.local import LocalWeights
from ..weights.memory import Weights
from ..weights.shards import Shards
from .counts import ChangedBefore, ClassCounts, RegionChanges, SyncCounts, count_members

PARTS = ("index", "value", "dense", "header", "table")
READS = 1 + 1 + len(PROFILES)  # times that all weights are looked at: here, and once for `auto` and each profile
_MEMORY_BYTES = 256 << 20  # of a patch that is encoded only for its size


def observe(
    old: Weights,
    new: Weights,
    changed_before: ChangedBefore | None,
    threads: int | None,
    progress: Progress | None,
) -> tuple[dict[str, Any], ChangedBefore]:
    """The figures of one sync, and the elements that have changed so far, with those that changed in it."""
    local_old = LocalWeights.of(old)
    table = local_old.table
    local_new = LocalWeights.of(new, table)
    changed_before = changed_before or ChangedBefore(table, table.places)
    changed_before.require(table, table.places)
    sync = SyncCounts(changed_before)
    counted = ordered(lambda batch: _count(local_old, local_new, batch), batches(table, local_old.places), threads)
    for batch, members, changes in counted:
        sync.add_members(batch.dtype, members)
        sync.add(changes)
        if progress is not None:
            progress(batch.elements * batch.dtype.width)
    return sync.line() | {"profiles": _profiles(old, new, threads, progress)}, changed_before


def _count(local_old: LocalWeights, local_new: LocalWeights, batch: Batch) -> tuple[Batch, ClassCounts, RegionChanges]:
    old, old_alive = local_old.read(batch)
    new, new_alive = local_new.read(batch)
    positions, before, after, counts = scan(np.empty(0, batch.dtype.uint), old, new, batch.numel)
    members = ClassCounts.of_members(batch, old)
    del old_alive, new_alive  # copies may go only now
    return batch, members, RegionChanges.of(batch.dtype, batch.tensor, batch.region, counts, positions, before, after)


def _profiles(old: Weights, new: Weights, threads: int | None, progress: Progress | None) -> dict[str, dict[str, int]]:
    """Bytes of the patch in each profile, by what they are for."""
    base: Digest | None = None
    out = {}
    for name in ("auto", *PROFILES):
        patch = diff(old, new, profile=name, base_digest=base, threads=threads, progress=progress)
        base = patch.base
        out[name] = dict(zip(PARTS, breakdown(patch), strict=True))
    return out


def observe_patch(
    patch: Patch, old: Weights | Shards | None, changed_before: ChangedBefore | None, threads: int | None
) -> tuple[dict[str, Any], ChangedBefore]:
    """The figures of a patch, which may be that of one rank; as `observe` returns them.

    Nothing is copied but what changed: the patch is decoded bucket by bucket, once for each profile.

    old: the version that the patch applies to. Without it, nothing is known of steps, magnitudes and other profiles.
    """
    contents = patch.contents
    table = contents.table
    places = list(contents.covers)
    local = None if old is None else LocalWeights.of(old, table, "the patch", "the version before")
    changed_before = changed_before or ChangedBefore(table, places)
    changed_before.require(table, places)
    sync = SyncCounts(changed_before)
    for parts in ordered(lambda i: [_counted(c) for c in _changes(contents, local, i)], range(len(contents)), threads):
        for changes in parts:
            sync.add(changes)
    if local is None:
        profiles = {"auto": dict(zip(PARTS, breakdown(patch), strict=True))}
    else:
        weights = local
        for dtype, members in ordered(lambda b: count_members(weights, b), batches(table, local.places), threads):
            sync.add_members(dtype, members)
        profiles = {name: _recoded(contents, local, name, threads) for name in ("auto", *PROFILES)}
    return sync.line(with_bits=local is not None) | {"profiles": profiles}, changed_before


def _counted(changes: Changes) -> RegionChanges:
    assert changes.after is not None
    return RegionChanges.of(
        changes.dtype,
        changes.tensor,
        changes.region,
        changes.count,
        changes.positions,
        changes.before,
        changes.after,
    )


def _changes(patch: Contents, weights: LocalWeights | None, index: int) -> list[Changes]:
    """The changes of a bucket, with their old bits where these are known; none are dense."""
    parts = patch.decode(index, weights).in_order().without_dense()
    return [_without_base(part) if weights is None else _real_changes(part, weights) for part in parts]


def _without_base(decoded: Decoded) -> Changes:
    if not decoded.head.profile.absolute:
        raise NeedsBase(f"a patch in profile {decoded.head.profile.name!r} cannot be counted without the base weights")
    entries = decoded.head.entries
    return Changes(
        decoded.head.dtype,
        entries.tensor,
        entries.region,
        entries.numel,
        decoded.sparse_count,
        decoded.positions,
        decoded.words,
        None,
        int(entries.numel.sum()),
    )


def _real_changes(decoded: Decoded, weights: LocalWeights) -> Changes:
    """What differs from the old bits: a patch may also name elements that stay what they are."""
    entries = decoded.head.entries
    staged = stage(weights, decoded)
    differs = staged.old_bits != staged.new.bits
    owner = np.repeat(np.arange(len(entries)), decoded.sparse_count)[differs]
    count = np.bincount(owner, minlength=len(entries)).astype(np.int64)
    live = np.flatnonzero(count)
    tensor = entries.tensor[live]
    region = select(entries.region, live)
    count = count[live]
    positions = decoded.positions[differs]
    before = staged.old_bits[differs]
    after = staged.new.bits[differs]
    begin = np.cumsum(count) - count

    def bits(entry: int) -> Any:
        new_bits = weights.bits(int(tensor[entry]), region[entry]).copy()
        inside = slice(int(begin[entry]), int(begin[entry] + count[entry]))
        new_bits[positions[inside]] = after[inside]
        return new_bits

    return Changes(
        decoded.head.dtype,
        tensor,
        region,
        entries.numel[live],
        count,
        positions,
        after,
        steps_between(decoded.head.dtype, before, after),
        int(entries.numel.sum()),
        bits,
        before=before,
        base=weights,
    )


def _recoded(patch: Contents, weights: LocalWeights, profile: str, threads: int | None) -> dict[str, int]:
    """Bytes of the same changes in a profile, by what they are for."""
    names = plan.candidates(profile)

    def routed() -> Iterator[Changes]:
        for parts in ordered(lambda index: _changes(patch, weights, index), range(len(patch)), threads):
            for changes in parts:
                yield from plan.route(changes, names, patch.table)

    buckets = Encoding(names, threads=threads).buckets(patch.table, plan.cut(routed()))
    to = BucketList(memory_bytes=_MEMORY_BYTES)
    recoded = collect(patch.table, buckets, lambda changed: patch.ends._replace(changed=changed), to)
    return dict(zip(PARTS, breakdown(Patch(recoded)), strict=True))


def breakdown(patch: Patch) -> Sequence[int]:
    """Bytes of the index, the values, dense entries, headers and checksums, and the tensor table, in this order."""
    index = value = dense = 0
    for number in range(patch.buckets):
        for stream, (_, chunks) in patch.contents.open_bucket(number)[1].left().items():
            size = sum(map(len, chunks))
            if Stream.is_dense(stream):
                dense += size
            elif _is_index(stream):
                index += size
            elif stream != Stream.CLASSES:
                value += size
    return index, value, dense, patch.nbytes - patch.table_nbytes - index - value - dense, patch.table_nbytes


def _is_index(stream: int) -> bool:
    if stream >= Stream.CLASS:
        return (stream - Stream.CLASS) % 4 < 2
    return stream == Stream.POSITIONS or Stream.TILE_TOKENS <= stream <= Stream.GAP_LOWS
