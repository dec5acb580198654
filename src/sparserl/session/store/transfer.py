"""Patches in a store: writing one as buckets and a manifest, and reading it back, checked."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...errors import ChecksumMismatch, InvalidField, LimitExceeded
from ...parallel import Progress, ordered
from ...patch import Patch
from ...patch.compare import Comparison
from ...patch.contents import BucketList, Contents, Ends
from ...transport.stores.base import Store, fetch
from ...transport.stores.deadline import Transfers
from ...weights.digest import Digest, digest, table_digest
from ...weights.dtypes import Bits, DType
from ...weights.memory import Memory, Weights
from ...weights.region import Shape
from ...weights.shards import Part, Shards
from ...weights.staging import gpu_tensor
from ...weights.table import TensorTable
from ...weights.tensors import memories, memory_of, table_of
from ...wire import limits
from .memory_limit import require_memory
from .records import Blob, Manifest, Step, canonical, get_named, path, require_hash, sha256

AT_ONCE = 8  # transfers
SPOOL_BYTES = 256 << 20  # patches that may be larger than this lie on disk
FLIGHT_BYTES = 128 << 20  # of buckets that are fetched ahead; one that is larger comes alone
_ENTRY_BYTES, _BUCKET_BYTES = 512, 1 << 15  # more than either takes besides its changes


def zeros(table: TensorTable) -> dict[str, Bits]:
    """Weights in which every bit is zero: what an anchor is a patch of. Pages not written to take no memory."""
    return {spec.name: _blank(spec.shape, spec.dtype, table) for spec in table.specs}


def _blank(shape: Shape, dtype: DType, table: TensorTable) -> Bits:
    try:
        return Bits(np.zeros(shape, dtype.uint), dtype)
    except (MemoryError, ValueError) as error:
        raise LimitExceeded(f"there is no room for {table.dense_bytes} bytes of weights: {error}") from error


def copied(weights: Weights | Shards, threads: int | None = None, *, there: bool = False) -> Any:
    """Bits of our own, which nobody else writes to; several tensors at a time, so that copies from a device overlap.

    there: whether what is on a device is copied to the same device, not to host memory.
    """

    def copy(memory: Memory) -> Any:
        if there and (tensor := gpu_tensor(memory)) is not None:
            return tensor.new_empty(tensor.shape).copy_(tensor.detach())
        return Bits(memory.copied(), memory.dtype)

    threads = 1 if there else threads  # a device copies in the order of this thread
    if isinstance(weights, Shards):
        bits = ordered(copy, [memory_of(part.tensor, part.data) for part in weights.parts], threads)
        parts = zip(weights.parts, bits, strict=True)
        return Shards(weights.table, [Part(part.tensor, part.region, copy) for part, copy in parts])
    named = memories(weights)
    return dict(zip(named, ordered(copy, named.values(), threads), strict=True))


def built(
    table: TensorTable,
    patches: Iterable[Patch],
    wanted: Digest,
    threads: int | None = None,
    start: tuple[dict[str, Bits], Digest] | None = None,
) -> dict[str, Bits]:
    """Weights that patches lead to, which must have a digest: from a start that is written to, or from nothing."""
    if start is None:
        require_memory(table.dense_bytes)
    weights, at = start or ((blank := zeros(table)), digest(blank, threads=threads))
    for patch in patches:
        patch.apply(weights, digest=at, threads=threads)
        at = patch.result
    if at != wanted:
        raise ChecksumMismatch(f"the patches lead to {at}, not to {wanted}")
    return weights


def anchor_of(weights: Weights | Shards, threads: int | None = None) -> Patch:
    """All weights (of shards: those at hand), as the patch that makes them of nothing."""
    nothing: Weights | Shards
    if isinstance(weights, Shards):
        table = weights.table
        weights = weights.map(lambda part: part.data)  # marks count from another version
        nothing = weights.map(lambda part: _blank(part.region.size, table[table.index[part.tensor]].dtype, table))
    else:
        nothing = zeros(table := table_of(memories(weights)))
    comparison = Comparison(nothing, weights, profile="auto")
    changes = comparison.compare(threads, None, keep=False)
    return Patch(comparison.encode(changes, None, bucket_list(table.dense_bytes), threads))


def bucket_list(size: int, count: int | None = None) -> BucketList:
    """Buckets of a patch that may have this size: in memory, or on disk if that would take too much."""
    return BucketList(count, memory_bytes=SPOOL_BYTES if size <= SPOOL_BYTES else 0)


@dataclass(frozen=True)
class Sent:
    """A patch in the store, or one rank's share of it: its manifest, which may not be written yet, and more."""

    manifest: Manifest
    profiles: frozenset[str]
    entries: int

    @property
    def size(self) -> int:
        """Bytes of the buckets."""
        return self.manifest.size

    @property
    def written(self) -> int:
        """Bytes of the buckets and the manifest."""
        return self.size + len(self.manifest.to_bytes())

    def to_bytes(self) -> bytes:
        about = {"profiles": sorted(self.profiles), "entries": self.entries}
        return canonical(about) + b"\n" + self.manifest.to_bytes()

    @classmethod
    def parse(cls, data: bytes) -> Sent:
        about, manifest = data.split(b"\n")
        fields = json.loads(about)
        return cls(Manifest.parse(manifest, "a rank's share"), frozenset(fields["profiles"]), fields["entries"])

    def step(self, base: int | None, version: int, now: float) -> Step:
        """How it stands in the index."""
        m = self.manifest
        start = None if base is None else m.base
        hash = sha256(m.to_bytes())
        return Step(base, version, start, m.result, self.size, m.changed, tuple(sorted(self.profiles)), hash, now)


def upload(store: Store, run: str, place: str, patch: Patch, progress: Progress | None = None) -> Sent:
    """Write buckets. What comes back has the digests of the elements alone, so that those of ranks add up."""

    def put(index: int) -> Blob:
        data = patch.contents.bucket(index)
        blob = Blob(sha256(data), len(data))
        store.put(manifest.bucket(blob), data)
        return blob

    terms = table_digest(patch.table) if patch.complete else Digest()
    manifest = Manifest(run, place, patch.base - terms, patch.result - terms, patch.changed, ())
    blobs = []
    with Transfers(AT_ONCE, f"{store.url}: run {run}") as transfers:
        for blob in transfers.ahead(put, range(patch.buckets)):
            blobs.append(blob)
            if progress is not None:
                progress(blob.size)
    profiles = frozenset(head.profile.name for head in patch.contents.heads)
    entries = sum(len(head.entries) for head in patch.contents.heads)
    return Sent(replace(manifest, buckets=tuple(blobs)), profiles, entries)


def joined(table: TensorTable, shares: Sequence[Sent]) -> Sent:
    """The patch that the shares of all ranks are together."""
    first = shares[0].manifest
    if any((s.manifest.run, s.manifest.place) != (first.run, first.place) for s in shares):
        raise InvalidField("the ranks have not uploaded parts of one patch")
    terms = table_digest(table)
    manifest = replace(
        first,
        base=sum((s.manifest.base for s in shares), terms),
        result=sum((s.manifest.result for s in shares), terms),
        changed=sum(s.manifest.changed for s in shares),
        buckets=tuple(blob for s in shares for blob in s.manifest.buckets),
    )
    entries = sum(s.entries for s in shares)
    if entries > limits.PATCH_ENTRIES:
        raise LimitExceeded(f"the shares of all ranks have {entries} entries, the limit is {limits.PATCH_ENTRIES}")
    return Sent(manifest, frozenset().union(*(s.profiles for s in shares)), entries)


def put_manifest(store: Store, sent: Sent) -> None:
    """Write the manifest, when all buckets are there."""
    record = sent.manifest.to_bytes()
    store.put(path(sent.manifest.run, "manifests", sha256(record)), record)


def send(store: Store, run: str, patch: Patch, progress: Progress | None = None) -> Sent:
    """Write the buckets of a patch, then its manifest."""
    sent = joined(patch.table, [upload(store, run, secrets.token_hex(8), patch, progress)])
    put_manifest(store, sent)
    return sent


def receive(
    store: Store,
    run: str,
    table: TensorTable,
    step: Step,
    progress: Progress | None = None,
) -> Patch:
    """The patch of a step: every byte is the one that manifest and index promise."""
    what = path(run, "manifests", step.manifest)
    manifest = Manifest.parse(get_named(store, run, "manifests", step.manifest), what)
    starts = manifest.base if step.base_digest is None else step.base_digest
    if manifest.run != run or manifest.base != starts or manifest.result != step.digest:
        raise InvalidField(f"{what} is not the manifest of {step.name} in run {run}")

    def get(blob: Blob) -> bytes:
        name = manifest.bucket(blob)
        data = fetch(store, name, blob.size, ranges)
        require_hash(data, blob.hash, name)
        if progress is not None:
            progress(blob.size)
        return data

    size = manifest.size
    if size != step.bytes:
        raise InvalidField(f"{what}: buckets of {size} bytes, the index promises {step.bytes}")
    require_size(manifest, table, what)
    buckets = bucket_list(size, len(manifest.buckets))
    with (
        ThreadPoolExecutor(AT_ONCE, thread_name_prefix="sparserl-range") as ranges,
        Transfers(AT_ONCE, f"{store.url}: run {run}") as transfers,
    ):
        for bucket in transfers.ahead(get, manifest.buckets, lambda blob: blob.size, FLIGHT_BYTES):
            buckets.add(bucket)
    contents = Contents(table, Ends(manifest.base, manifest.result, manifest.changed), buckets)
    contents.heads  # noqa: B018  # reading them checks every bucket
    return Patch(contents)


def require_size(manifest: Manifest, table: TensorTable, what: str) -> None:
    """Refuse buckets that are more, or larger, than any patch of these weights can be.

    A bucket has an entry, and an entry a change. A change takes its bits, or a step of as many, and a position of four
    bytes, with a byte more for each where they are written as tokens; an entry takes less than `_ENTRY_BYTES`, its
    tiles among them, and a bucket less than `_BUCKET_BYTES` besides. No element is in two entries. Twice the sum is
    above what any writer can reach.
    """
    elements, count, size = table.elements, len(manifest.buckets), manifest.size
    changes = table.dense_bytes + 6 * elements
    most = 2 * (changes + _ENTRY_BYTES * min(elements, limits.PATCH_ENTRIES) + _BUCKET_BYTES * count)
    if count > elements or size > most:
        raise LimitExceeded(
            f"{what}: {count} buckets of {size} bytes; weights of {elements} elements in {table.dense_bytes} bytes can "
            f"take {min(elements, limits.BUCKETS)} of {most} bytes at most"
        )
