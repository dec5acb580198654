"""Writes runs to a store: the record of a run, patches as buckets and manifests, and the head, on all ranks in step."""

from __future__ import annotations

import functools
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ...errors import FormatError, NotFound, SessionError, StoreError, Unavailable
from ...parallel import Progress
from ...patch import Patch
from ...transport.stores.base import Store, exists
from ...weights.digest import Digest
from ...weights.holdings import Holdings
from ...weights.table import TensorTable
from ..baseline import Baseline
from ..logs import log
from ..report import SyncReport, Watch
from . import side_files, transfer
from .coming import NOTHING
from .head import HeadMove, HeadWriter, Steps
from .leases import Lease
from .records import (
    MOST_HEAD,
    FileChanges,
    HeadRecord,
    Index,
    LayoutChange,
    PlacedFile,
    RouteStep,
    RunRecord,
    is_own,
    path,
    run_path,
)
from .writers import Writers

_MOST_BAD_LEASES = 1024  # that are warned of


@dataclass(frozen=True)
class CommittedVersion:
    """The newest version of the run: what receivers can have, and its bits here."""

    run: RunRecord
    head: HeadRecord
    index: Index
    baseline: Baseline


class RunWriter:
    """What a publisher writes to its store. `committed` is the version that its next patch starts from, if any."""

    def __init__(
        self,
        store: Store,
        head: HeadWriter,
        writers: Writers,
        clock: Callable[[], float],
        progress: Progress | None,
    ) -> None:
        self.store = store
        self.writers = writers
        self.clock = clock
        self.committed: CommittedVersion | None = None
        self.is_sending = False  # whether there may be objects of a version that nothing refers to yet
        self.holdings: Holdings | None = None  # the parts that receivers have which do not have all
        self._turn = threading.RLock()  # of the thread that moves the head: that of a publish, or of upkeep behind it
        self._bad_leases: set[str] = set()  # those of which it was said that they cannot be read
        self._known_ranks: set[int] = set()  # those that are known to upload to the same store
        self._head = head
        self._progress = progress

    def begin_run(self, table: TensorTable, files: side_files.Captured | None) -> RunRecord:
        """A new run, with all that its versions have in common in the store.

        files: those of its first version.
        """

        def begin() -> RunRecord:
            run = RunRecord(secrets.token_hex(8), max(self.clock(), self._head.next_run_time), table)
            first_files = files or {}
            side_files.upload(self.store, first_files, lambda file: path(run.run, "files", file.blob.hash))
            run = replace(run, files={name: file.blob for name, file in first_files.items()})
            self.store.put(run_path(run.run), run.to_bytes())
            return run

        return self.writers.lead("begin", begin, RunRecord.to_bytes, lambda data: RunRecord.parse(data, "the run"))

    def send(
        self, run: RunRecord, encode: Callable[[transfer.Upload], Patch], watch: Watch, base: Digest | None = NOTHING
    ) -> tuple[Patch, transfer.UploadedPatch]:
        """Every rank encodes and uploads what it has; when all of it is there, the manifest is written.

        base: the digest of the version that the patch starts from; None for a patch behind a version, of which neither
            followers are told nor whoever asked for progress.

        Returns:
            The patch of this rank, and what all ranks have uploaded.
        """
        place = self.writers.lead("find a place", lambda: secrets.token_hex(8), str.encode, bytes.decode)
        patches: list[Patch] = []

        def send_share() -> transfer.UploadedPatch:
            wait = functools.partial(watch.stage, "upload")
            holdings = self.holdings_for(run.layout)
            announced_base = base if self.writers.rank == 0 else None
            progress = None if base is None else self._progress
            with transfer.Upload(
                self.store, run.run, place, run.layout, progress, wait, holdings, announced_base
            ) as upload:
                patches.append(encode(upload))
                return upload.finish(patches[0])

        sent_by_rank = self.writers.gather(
            "upload", send_share, transfer.UploadedPatch.to_bytes, transfer.UploadedPatch.parse
        )
        sent = transfer.joined(run.layout, sent_by_rank)

        def write_down() -> None:
            self._require_one_store(sent_by_rank)
            transfer.put_manifest(self.store, sent)

        with watch.stage("upload"):
            self.writers.lead("write down", write_down, _no_bytes, _no_bytes)
        return patches[0], sent

    def _require_one_store(self, sent_by_rank: Sequence[transfer.UploadedPatch]) -> None:
        """Once for every rank: what it has uploaded must be in the store of rank 0, whatever its URL means there."""
        for rank, sent in enumerate(sent_by_rank):
            buckets = sent.manifest.buckets
            if rank in self._known_ranks or not buckets:
                continue
            if rank and not exists(self.store, sent.manifest.bucket(buckets[0])):
                raise SessionError(
                    f"rank {rank} uploads to another place than rank 0, which finds nothing of it in {self.store.url}"
                )
            self._known_ranks.add(rank)

    def holdings_for(self, table: TensorTable) -> Holdings | None:
        """The parts that receivers have of these tensors; None if those that are known are of others."""
        known = self.holdings
        return known if known is not None and (known.table is table or known.table.specs == table.specs) else None

    def send_alone(self, run: RunRecord, patch: Patch) -> transfer.UploadedPatch:
        """Upload a patch that this process has all of."""
        return transfer.send(self.store, run.run, patch)

    def commit(
        self,
        run: RunRecord,
        step: RouteStep,
        baseline: Baseline,
        *,
        files: side_files.Captured | None = None,
        layout: LayoutChange | None = None,
        add_steps: Callable[[Steps], Steps] | None = None,
        advance: Callable[[], None] | None = None,
        notify: Callable[[], None] | None = None,
    ) -> CommittedVersion:
        """Move the head to the version that a step leads to.

        files: the files of the version; None if they are those of the version before.
        layout: the tensors of the version, if they are others than those of the version before.
        add_steps: makes the new index of the old one's steps; without it, the step is added.
        advance: called when the head has moved, to move the baseline too; if it fails, a new run will begin.
        notify: called after that, when the next patch can start from the version.
        """
        versions: list[CommittedVersion] = []

        def moved(head: HeadRecord, index: Index) -> None:
            version = CommittedVersion(run, head, index, baseline)
            versions.append(version)
            if advance is not None:
                self.committed = None  # interrupted, a new run would begin: no version is ever published twice
                advance()
            self.committed = version
            if notify is not None:
                notify()

        with self._turn:
            last = self.committed
            before = last if last is not None and last.run.run == run.run else None  # of the same run

            @functools.cache  # the head may have to be moved several times
            def changed_files() -> tuple[FileChanges, ...]:
                return () if before is None else self._changed_files(before, step.version, files)

            layouts = () if before is None else before.index.layouts
            if layout is not None:
                layouts = (*layouts, layout)
            move = HeadMove(run, step, add_steps or (lambda steps: (*steps, step)), changed_files, layouts, moved)
            self._head.move(move, () if last is None else last.index.steps, None if last is None else last.head)
            return versions[0]

    def amend(self, run: str, add_steps: Callable[[Steps], Steps]) -> CommittedVersion:
        """Move the head of a run to an index with other steps, whatever its newest version is by now."""
        with self._turn:
            newest = self.committed
            if newest is None or newest.run.run != run:
                raise SessionError(f"run {run} has ended")
            if self._head.is_unsure:
                raise Unavailable("what became of the last version is not known yet")
            step = next(step for step in newest.index.steps if step.version == newest.head.version)
            return self.commit(newest.run, step, newest.baseline, add_steps=add_steps)

    def _changed_files(
        self, last: CommittedVersion, version: int, files: side_files.Captured | None
    ) -> tuple[FileChanges, ...]:
        """The files of the next index: those of the last one, and what has changed since, which is uploaded."""
        index = last.index
        if files is None:
            return index.files
        current = index.files_of(last.head.version, last.run)
        changed = {name: file for name, file in files.items() if name not in current or current[name].blob != file.blob}
        removed = current.keys() - files.keys()
        if not changed and not removed:
            return index.files
        place = secrets.token_hex(8)
        placed = {name: PlacedFile(*file.blob, place) for name, file in changed.items()}
        side_files.upload(self.store, changed, lambda file: PlacedFile(*file.blob, place).name(last.run.run))
        return (*index.files, FileChanges(version, {**placed, **dict.fromkeys(removed)}))

    def resolve(self) -> None:
        """Find out what became of a commit that was not answered, or interrupted."""
        with self._turn:
            self._head.resolve()

    def wait(self, version: int, subscribers: int, timeout: float) -> int:
        """Wait until so many subscribers hold a version or a later one; how many do."""
        end = time.monotonic() + timeout
        while True:
            holders = sum(lease.version is not None and lease.version >= version for lease in self.leases())
            if holders >= subscribers or time.monotonic() >= end:
                return holders
            time.sleep(min(0.1, max(0.0, end - time.monotonic())))

    def leases(self, most: int | None = None) -> list[Lease]:
        """What the subscribers of the run hold; of very many, the newest leases."""
        leases: list[Lease] = []
        committed = self.committed  # another thread may commit meanwhile
        if committed is None:
            return leases
        items = sorted(self.store.list(path(committed.run.run, "leases", "")), key=lambda item: -item.time)
        for item in items[:most]:
            try:
                leases.append(Lease.parse(self.store.get(item.name, MOST_HEAD).data, item.name))
            except NotFound:
                continue
            except Unavailable:
                raise
            except (FormatError, StoreError) as error:
                self._warn_of_lease(item.name, error)
        return leases

    def _warn_of_lease(self, name: str, error: Exception) -> None:
        """Say once that a lease cannot be read: whoever wrote it counts for nothing, and the others count on."""
        if name not in self._bad_leases and len(self._bad_leases) < _MOST_BAD_LEASES:
            self._bad_leases.add(name)
            log.warning("%s: %s cannot be read: its receiver is not heard: %s", self.store.url, name, error)

    def holding_hashes(self, run: str, most: int, since: float) -> list[str]:
        """The hashes of the parts that subscribers of a run have had since then; of very many, the newest."""
        prefix = path(run, "holdings", "")
        items = sorted(self.store.list(prefix), key=lambda item: -item.time)
        return [item.name.removeprefix(prefix) for item in items[:most] if is_own(item.name) and item.time > since]


def published_report(
    version: CommittedVersion,
    sent: transfer.UploadedPatch,
    watch: Watch,
    notes: tuple[str, ...],
    reason: str | None = None,
) -> SyncReport:
    """What a publisher reports of a version that it has committed.

    reason: why a patch is in its profiles; None for an anchor.
    """
    table = version.run.layout
    return SyncReport(
        run=version.run.run,
        version=version.head.version,
        digest=version.head.digest.hex,
        kind="anchor" if reason is None else "patch",
        changed=sent.manifest.changed,
        elements=table.elements,
        bytes=sent.written,
        dense_bytes=table.dense_bytes,
        seconds=watch.seconds,
        notes=notes,
        profile=f"{'+'.join(sorted(sent.profiles))} ({reason})" if sent.profiles and reason else "",
    )


def _no_bytes(_: object) -> bytes:
    return b""
