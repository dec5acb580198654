"""Patches whose buckets are still on their way: they are staged while they arrive."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import IO

from ...errors import ChecksumMismatch, SessionError, SparserlError
from ...patch import Patch
from ...patch.assemble import rewrite
from ...targets import Change, Prepared
from ...weights.digest import Digest
from ...weights.table import TensorTable
from ...wire import Footer, PatchReader
from ..receiver import Receiver
from ..store import transfer
from ..store.records import sha256
from ..store.transfer import SPOOL_BYTES
from .rounds import Course


class Incoming(PatchReader):
    """What the reader of a whole patch offers, with buckets that are waited for. Past 256 MiB they lie on disk."""

    def __init__(self, table: TensorTable, hash: bytes, base: Digest, result: Digest, changed: int, count: int) -> None:
        self.table, self.hash = table, hash
        self.footer = Footer(base, result, changed, None)
        self.size = self.header_bytes = 0
        self._count = count
        self._kept: list[bytes | tuple[int, int]] = []  # the bytes, or where they lie in the file
        self._file: IO[bytes] | None = None
        self._come, self._stopped = threading.Condition(), False

    def __len__(self) -> int:
        return self._count

    @property
    def in_memory(self) -> bool:
        return self._file is None

    def add(self, bucket: bytes) -> None:
        """One more bucket has come."""
        at, self.size = self.size, self.size + len(bucket)
        kept: bytes | tuple[int, int] = bucket
        if self.size > SPOOL_BYTES:
            if self._file is None:
                self._file = tempfile.TemporaryFile(prefix="sparserl-")  # noqa: SIM115  # as long as the patch lives
            os.pwrite(self._file.fileno(), bucket, at)
            kept = at, len(bucket)
        with self._come:
            self._kept.append(kept)
            self._come.notify_all()

    def stop(self) -> None:
        """No more will come: who waits is told so."""
        with self._come:
            self._stopped = True
            self._come.notify_all()

    def ready(self) -> Iterator[int]:
        for index in range(self._count):
            self._await(index)
            yield index

    def bucket(self, index: int) -> bytes:
        self._await(index)
        kept = self._kept[index]
        if isinstance(kept, bytes):
            return kept
        assert self._file is not None
        return os.pread(self._file.fileno(), kept[1], kept[0])

    def parts(self) -> Iterator[bytes | memoryview]:
        f = self.footer
        buckets = (self.bucket(index) for index in range(self._count))
        yield from rewrite(self.table, buckets, f.base, f.result, f.changed, None).parts()

    def _await(self, index: int) -> None:
        with self._come:
            self._come.wait_for(lambda: self._stopped or len(self._kept) > index)
            if len(self._kept) <= index:
                raise SessionError(f"bucket {index} of {self._count} never came")


class Arrival:
    """The patches of a course as they come in, staged on a thread of its own."""

    def __init__(
        self, receiver: Receiver, course: Course, table: TensorTable | None, hash: bytes, held: Digest | None
    ) -> None:
        assert table is not None
        self.failure: BaseException | None = None
        self.prepared: list[Prepared] = []
        self.kind = "none"
        self._receiver, self._course, self._table = receiver, course, table
        self._legs, self._start = len(course.legs), 0
        self._files: Future[dict[str, bytes]] = Future()
        self._received: list[bytes] = []
        try:
            self._start = course.start(held)
        except SessionError as error:
            self._start, self.failure = self._legs, error
        legs = course.legs[self._start :]
        self._incoming = [Incoming(table, hash, leg.base, leg.result, leg.changed, leg.count) for leg in legs]
        self._patches = [Patch(incoming) for incoming in self._incoming]
        self._thread = threading.Thread(target=self._work, name="sparserl-stage", daemon=True)
        self._thread.start()

    def add(self, leg: int, bucket: bytes) -> None:
        """A bucket of a leg, or a file behind the last one."""
        if leg == self._legs:
            self._received.append(bucket)
        elif leg >= self._start:
            self._incoming[leg - self._start].add(bucket)

    def finish(self) -> None:
        """Everything has come: wait until it is staged."""
        try:
            self._files.set_result(self._checked_files())
        except ChecksumMismatch as error:
            self._files.set_exception(error)
        self._thread.join()
        try:
            for patch in self._patches:
                patch.heads  # noqa: B018  # reading them checks every bucket, and that none overlap
        except SparserlError as error:
            self.failure = self.failure or error
        if self.failure is not None:
            self._discard()

    def stop(self) -> None:
        """Give it up, whether or not all of it has come."""
        for incoming in self._incoming:
            incoming.stop()
        if not self._files.done():
            self._files.set_exception(SessionError("the files never came"))
        self._thread.join()
        self._discard()

    def _discard(self) -> None:
        for prepared in self.prepared:
            prepared.discard()
        self.prepared = []

    def _work(self) -> None:
        try:
            if self._patches:
                self.prepared = self._staged()
        except BaseException as error:  # noqa: BLE001  # the publisher is told, and it is raised again
            self.failure = self.failure or error

    def _staged(self) -> list[Prepared]:
        course, receiver = self._course, self._receiver
        fresh, files, patches = None, None, list(self._patches)
        self.kind = "patch"
        if course.legs[self._start].anchor:
            self.kind = "anchor"
            fresh = transfer.built(self._table, patches, course.digest, receiver.threads)
            files = self._files.result()
            patches = []
        change = Change(course.run, course.created, course.version, course.digest, patches, fresh, files)
        return receiver.prepare(change)

    def _checked_files(self) -> dict[str, bytes]:
        names = self._course.files
        if len(names) != len(self._received) or any(
            sha256(data) != hash for (_, hash), data in zip(names, self._received, strict=True)
        ):
            raise ChecksumMismatch("the files that came with the anchor are not those that were announced")
        return {name: data for (name, _), data in zip(names, self._received, strict=True)}
