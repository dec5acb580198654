"""Patches in a store: writing one as buckets and a manifest, and reading it back, checked."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

from ...errors import InvalidField, LimitExceeded
from ...parallel import Progress
from ...patch import Patch
from ...patch.contents import Bucket, BucketList, Ends
from ...patch.slicing import PROFILES
from ...transport.stores.base import Store
from ...transport.stores.deadline import AT_ONCE, FLIGHT_BYTES, Transfers
from ...weights.digest import Digest, table_digest
from ...weights.holdings import Holdings
from ...weights.table import TensorTable
from ...wire import encoded_table, limits, read_bucket
from ...wire.cursor import CHECKSUM_BYTES
from ..arrival import Arrival, ArrivingPatch
from .coming import Announcer, BucketsAhead, fetch_bucket
from .fields import canonical, sha256
from .manifests import Manifest
from .records import Blob, RouteStep, get_named, path

R = TypeVar("R")
_ENTRY_BYTES = 512  # more than an entry takes besides its changes
_BUCKET_BYTES = 1 << 15  # more than a bucket takes besides its entries


@dataclass(frozen=True)
class UploadedPatch:
    """A patch in the store, or one rank's share of it: its manifest, which may not be written yet, and more."""

    manifest: Manifest
    profiles: frozenset[str]
    entries: int
    takers: tuple[str, ...] = ()  # holdings that can take it, whatever its profiles

    @property
    def size(self) -> int:
        """Bytes of the buckets."""
        return self.manifest.size

    @property
    def written(self) -> int:
        """Bytes of the buckets and the manifest."""
        return self.size + len(self.manifest_record)

    @cached_property
    def manifest_record(self) -> bytes:
        """The manifest as it is stored."""
        return self.manifest.to_bytes()

    def to_bytes(self) -> bytes:
        about = {"profiles": sorted(self.profiles), "entries": self.entries, "takers": self.takers}
        return canonical(about) + b"\n" + self.manifest_record

    @classmethod
    def parse(cls, data: bytes) -> UploadedPatch:
        about, manifest = data.split(b"\n")
        fields = json.loads(about)
        profiles = frozenset(fields["profiles"])
        return cls(Manifest.parse(manifest, "a rank's share"), profiles, fields["entries"], tuple(fields["takers"]))

    def step(self, base: int | None, version: int, now: float) -> RouteStep:
        """How it stands in the index."""
        return RouteStep(
            base=base,
            version=version,
            base_digest=None if base is None else self.manifest.base,
            digest=self.manifest.result,
            bytes=self.size,
            changed=self.manifest.changed,
            profiles=tuple(sorted(self.profiles)),
            manifest=sha256(self.manifest_record),
            time=now,
            holdings=() if PROFILES.issuperset(self.profiles) else self.takers,
        )


class Upload:
    """Writes the buckets of a patch to a store, several at a time, while later ones are still being encoded.

    Args:
        store: The store.
        run: The id of the run.
        place: The folder of the patch in the store.
        table: The tensor table of the patch.
        progress: Called with the number of bytes just written.
        wait: Entered while an encoder has to wait because too much is on its way.
        holdings: The holdings of receivers: which of them each bucket is for is written to the manifest.
        announced_base: The digest of the version that the patch starts from, to announce buckets to those who hold it;
            zero to announce an anchor to those who hold nothing, None to announce nothing.
    """

    def __init__(
        self,
        store: Store,
        run: str,
        place: str,
        table: TensorTable,
        progress: Progress | None = None,
        wait: Callable[[], AbstractContextManager[None]] = nullcontext,
        holdings: Holdings | None = None,
        announced_base: Digest | None = None,
    ) -> None:
        self._store = store
        self._manifest = Manifest(run, place, Digest(), Digest(), 0, ())
        self._announcer: Announcer | None = None
        if announced_base is not None:
            self._announcer = Announcer(store, replace(self._manifest, base=announced_base))
        self.holdings = holdings
        self._holding_names = () if holdings is None else holdings.names
        self._touched: list[int] = []  # by each bucket
        self._refused = 0  # holdings that cannot take a bucket, since they have a part of what it takes to decode it
        self._table = table
        self._progress = progress
        self._wait = wait
        self._profiles: set[str] = set()
        self._entries = 0
        self._blobs: list[Blob] = []
        self._transfers = Transfers(AT_ONCE, f"{store.url}: run {run}")
        self._sink = self._transfers.sink(self._put, FLIGHT_BYTES, self._written)

    def __enter__(self) -> Upload:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._transfers.__exit__(kind, error, trace)

    def bucket_list(self, *, keep: bool = True, memory_bytes: int | None = None) -> BucketList:
        """A list to encode the patch to; see `BucketList`."""
        return BucketList(keep=keep, memory_bytes=memory_bytes, on_add=self.add)

    def add(self, bucket: Bucket) -> None:
        """Write one more bucket."""
        body = memoryview(bucket)[:-CHECKSUM_BYTES]
        head, _ = read_bucket(body, self._table, encoded_table(self._table).hash, "a bucket that was encoded")
        self._profiles.add(head.profile.name)
        self._entries += len(head.entries)
        mark = 0
        if self.holdings is not None:
            touched = self.holdings.touched(head.entries.places())
            mark = touched.holdings
            self._touched.append(mark)
            self._refused |= touched.partly if head.profile.conditional else 0
        with self._wait():
            self._sink.add((bucket, mark), len(bucket))

    def add_all(self, patch: Patch) -> Patch:
        """Write all buckets of a patch that is encoded already."""
        for index in range(patch.buckets):
            self.add(patch.contents.bucket(index))
        return patch

    def finish(self, patch: Patch) -> UploadedPatch:
        """Wait until all buckets are written. What comes back has digests of elements alone: those of ranks add up."""
        with self._wait():
            self._sink.finish()
        terms = table_digest(self._table) if patch.complete else Digest()
        names = self._holding_names
        manifest = replace(
            self._manifest,
            base=patch.base - terms,
            result=patch.result - terms,
            changed=patch.changed,
            buckets=tuple(self._blobs),
            holdings=names,
            touched=tuple(self._touched),
        )
        takers = tuple(name for number, name in enumerate(names) if not self._refused >> number & 1)
        return UploadedPatch(manifest, frozenset(self._profiles), self._entries, takers)

    def _put(self, row: tuple[Bucket, int]) -> Blob:
        bucket, mark = row
        blob = Blob(sha256(bucket), len(bucket))
        self._store.put(self._manifest.bucket(blob), bucket)
        if self._announcer is not None:
            self._announcer.add(blob, mark, self._holding_names)
        return blob

    def _written(self, blob: Blob) -> None:
        self._blobs.append(blob)
        if self._progress is not None:
            self._progress(blob.size)


def joined(table: TensorTable, shares: Sequence[UploadedPatch]) -> UploadedPatch:
    """The patch that the shares of all ranks are together."""
    first = shares[0].manifest
    if any((s.manifest.run, s.manifest.place) != (first.run, first.place) for s in shares):
        raise InvalidField("the ranks have not uploaded parts of one patch")
    terms = table_digest(table)
    is_cut_alike = all(s.manifest.holdings == first.holdings for s in shares)
    manifest = replace(
        first,
        base=sum((s.manifest.base for s in shares), terms),
        result=sum((s.manifest.result for s in shares), terms),
        changed=sum(s.manifest.changed for s in shares),
        buckets=tuple(blob for s in shares for blob in s.manifest.buckets),
        holdings=first.holdings if is_cut_alike else (),
        touched=tuple(bits for s in shares for bits in s.manifest.touched) if is_cut_alike else (),
    )
    takers = tuple(name for name in manifest.holdings if all(name in s.takers for s in shares))
    entries = sum(s.entries for s in shares)
    if entries > limits.PATCH_ENTRIES:
        raise LimitExceeded(f"the shares of all ranks have {entries} entries, the limit is {limits.PATCH_ENTRIES}")
    return UploadedPatch(manifest, frozenset().union(*(s.profiles for s in shares)), entries, takers)


def put_manifest(store: Store, sent: UploadedPatch) -> None:
    """Write the manifest, when all buckets are there."""
    record = sent.manifest_record
    store.put(path(sent.manifest.run, "manifests", sha256(record)), record)


def send(store: Store, run: str, patch: Patch) -> UploadedPatch:
    """Write the buckets of a patch, then its manifest."""
    with Upload(store, run, secrets.token_hex(8), patch.table) as upload:
        sent = joined(patch.table, [upload.finish(upload.add_all(patch))])
    put_manifest(store, sent)
    return sent


class FetchedStep(NamedTuple):
    """A step whose patch is being fetched, or has been."""

    step: RouteStep
    manifest: Manifest
    buckets: tuple[Blob, ...]  # those of the manifest that are needed here
    arriving: ArrivingPatch


class Fetch:
    """Fetches the patches of a route, bucket by bucket and several at a time, while they are used.

    Every byte is the one that manifest and index promise.

    Args:
        store: The store.
        run: The id of the run.
        route: The steps, and the tensor table of each.
        progress: Called with the number of bytes just fetched.
        restore: Whether an anchor becomes weights as it arrives (see `ArrivingPatch.restored`), instead of being kept.
        begun: An earlier fetch that has failed; what it has fetched of the same steps is not fetched again.
        holding: The name of the parts that are here: buckets that change nothing in them are left out. None for all.
        ahead: Buckets that were fetched before.
    """

    def __init__(
        self,
        store: Store,
        run: str,
        route: Sequence[tuple[RouteStep, TensorTable]],
        progress: Progress | None = None,
        *,
        restore: bool = True,
        begun: Fetch | None = None,
        holding: str | None = None,
        ahead: BucketsAhead | None = None,
    ) -> None:
        self._holding = holding
        self._ahead = ahead
        self._store = store
        self._run = run
        self._progress = progress
        self._restore = restore
        self._label = f"{store.url}: run {run}"
        self._steps = [] if begun is None else begun.same_steps([step for step, _ in route])
        with Transfers(AT_ONCE, self._label) as transfers:
            self._steps += transfers.ahead(lambda row: self._begin(*row), route[len(self._steps) :])

    @property
    def arriving(self) -> list[ArrivingPatch]:
        """The patches, in the order of the steps."""
        return [step.arriving for step in self._steps]

    @property
    def patches(self) -> list[Patch]:
        """The patches, in the order of the steps."""
        return [arriving.patch for arriving in self.arriving]

    @property
    def size(self) -> int:
        """Bytes of the buckets that are fetched."""
        return sum(blob.size for step in self._steps for blob in step.buckets)

    def run(self, work: Callable[[], R]) -> R:
        """Do work on the patches while they are fetched; its result."""
        arrival = Arrival(self.arriving, work)
        try:
            self.fetch_into(arrival)
            return arrival.finish()
        except BaseException:
            arrival.stop()
            raise

    def all(self) -> list[Patch]:
        """The patches, when they are fetched."""
        self.run(lambda: None)
        return self.patches

    def fetch_into(self, arrival: Arrival[Any]) -> None:
        """Fetch all that is missing, as long as the arrival has a use for it."""
        missing = [
            (number, step.manifest, blob)
            for number, step in enumerate(self._steps)
            for blob in step.buckets[step.arriving.buckets.arrived :]
        ]
        with (
            ThreadPoolExecutor(AT_ONCE, thread_name_prefix="sparserl-range") as ranges,
            Transfers(AT_ONCE, self._label) as transfers,
        ):

            def get(row: tuple[int, Manifest, Blob]) -> tuple[int, bytes]:
                number, manifest, blob = row
                data = None if self._ahead is None else self._ahead.take(manifest, blob)
                if data is None:
                    data = fetch_bucket(self._store, manifest, blob, ranges)
                return number, data

            for number, bucket in transfers.ahead(get, missing, lambda row: row[2].size, FLIGHT_BYTES):
                if arrival.failure is not None:
                    return
                arrival.add(number, bucket)
                if self._progress is not None:
                    self._progress(len(bucket))

    def _begin(self, step: RouteStep, table: TensorTable) -> FetchedStep:
        """Read the manifest of a step, and see that it is what the index promises."""
        run = self._run
        label = path(run, "manifests", step.manifest)
        manifest = Manifest.parse(get_named(self._store, run, "manifests", step.manifest), label)
        starts = manifest.base if step.base_digest is None else step.base_digest
        if manifest.run != run or manifest.base != starts or manifest.result != step.digest:
            raise InvalidField(f"{label} is not the manifest of {step.name} in run {run}")
        if manifest.size != step.bytes:
            raise InvalidField(f"{label}: buckets of {manifest.size} bytes, the index promises {step.bytes}")
        require_size(manifest, table, label)
        ends = Ends(manifest.base, manifest.result, manifest.changed)
        restores = self._restore and step.base is None
        buckets = manifest.for_holding(self._holding)
        is_partial = len(buckets) < len(manifest.buckets)
        arriving = ArrivingPatch(table, ends, len(buckets), restores=restores, is_partial=is_partial)
        return FetchedStep(step, manifest, buckets, arriving)

    def same_steps(self, steps: Sequence[RouteStep]) -> list[FetchedStep]:
        """The first steps of this fetch, as far as they are those of another one, and can be used for it."""
        same: list[FetchedStep] = []
        for begun, step in zip(self._steps, steps, strict=False):
            if begun.step.manifest != step.manifest:
                break
            same.append(begun)
        is_ahead = any(begun.arriving.is_applied for begun in self._steps[len(same) :])
        is_spoiled = any(begun.arriving.is_spoiled for begun in self._steps)
        return [] if is_ahead or is_spoiled else same


def require_size(manifest: Manifest, table: TensorTable, label: str) -> None:
    """Refuse buckets that are more, or larger, than any patch of these weights can be.

    A bucket has an entry, and an entry a change. A change takes its bits, or a step of as many, and a position of four
    bytes, with a byte more for each where they are written as tokens; an entry takes less than `_ENTRY_BYTES`, its
    tiles among them, and a bucket less than `_BUCKET_BYTES` besides. No element is in two entries. Twice the sum is
    above what any writer can reach.
    """
    elements = table.elements
    count = len(manifest.buckets)
    size = manifest.size
    changes = table.dense_bytes + 6 * elements
    most = 2 * (changes + _ENTRY_BYTES * min(elements, limits.PATCH_ENTRIES) + _BUCKET_BYTES * count)
    if count > elements or size > most:
        raise LimitExceeded(
            f"{label}: {count} buckets of {size} bytes; weights of {elements} elements in {table.dense_bytes} bytes "
            f"can take {min(elements, limits.BUCKETS)} of {most} bytes at most"
        )
