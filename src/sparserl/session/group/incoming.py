"""Patches whose buckets are still arriving: they are staged meanwhile."""

from __future__ import annotations

import threading
from concurrent.futures import Future

from ...errors import ChecksumMismatch, SessionError, SparserlError
from ...patch import Patch
from ...patch.contents import BucketList, Contents, Ends
from ...targets import Change, Prepared
from ...weights.digest import Digest
from ...weights.table import TensorTable
from .. import anchors
from ..receiver import Receiver
from ..store.fields import sha256
from .transfer_plan import TransferPlan


class Arrival:
    """The patches of a transfer as they come in, staged on a thread of its own."""

    def __init__(
        self,
        receiver: Receiver,
        plan: TransferPlan,
        table: TensorTable | None,
        table_hash: bytes,
        digest: Digest | None,
    ) -> None:
        assert table is not None
        self.failure: BaseException | None = None
        self.prepared: list[Prepared] = []
        self.kind = "none"
        self._receiver = receiver
        self._plan = plan
        self._table = table
        self._start = len(plan.legs)  # the first leg that is needed
        self._files: Future[dict[str, bytes]] = Future()
        self._received: list[bytes] = []
        try:
            self._start = plan.first_leg(digest)
        except SessionError as error:
            self.failure = error
        legs = plan.legs[self._start :]
        self._buckets = [BucketList(leg.buckets, memory_bytes=anchors.SPOOL_BYTES) for leg in legs]
        self._patches = [
            Patch(Contents(table, Ends(leg.base, leg.result, leg.changed), buckets, table_hash))
            for leg, buckets in zip(legs, self._buckets, strict=True)
        ]
        self._thread = threading.Thread(target=self._work, name="sparserl-stage", daemon=True)
        self._thread.start()

    def add(self, leg: int, bucket: bytes) -> None:
        """A bucket of a leg, or a file behind the last one."""
        if leg == len(self._plan.legs):
            self._received.append(bucket)
        elif leg >= self._start:
            self._buckets[leg - self._start].add(bucket)

    def finish(self) -> None:
        """Everything has come: wait until it is staged."""
        try:
            self._files.set_result(self._checked_files())
        except ChecksumMismatch as error:
            self._files.set_exception(error)
        self._thread.join()
        try:
            for patch in self._patches:
                patch.contents.heads  # noqa: B018  # reading them checks every bucket, and that none overlap
        except SparserlError as error:
            self.failure = self.failure or error
        if self.failure is not None:
            self._discard()

    def stop(self) -> None:
        """Give it up, whether or not all of it has come."""
        for buckets in self._buckets:
            buckets.stop()
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
            elif self._plan.files is not None and self.failure is None:
                self.prepared = self._staged_files()
        except BaseException as error:  # noqa: BLE001  # the publisher is told, and it is raised again
            self.failure = self.failure or error

    def _staged(self) -> list[Prepared]:
        plan = self._plan
        receiver = self._receiver
        patches = list(self._patches)
        fresh = None
        files = None
        self.kind = "patch"
        if plan.legs[self._start].anchor:
            self.kind = "anchor"
            fresh = anchors.build_weights(self._table, patches, plan.digest, receiver.threads)
            patches = []
        if fresh is not None or plan.files is not None:
            files = self._files.result()
        change = Change(plan.run, plan.created, plan.version, plan.digest, patches, fresh, files)
        return receiver.prepare(change)

    def _staged_files(self) -> list[Prepared]:
        """A version with the bits that are held already, and perhaps other files."""
        plan = self._plan
        change = Change(plan.run, plan.created, plan.version, plan.digest, [], None, self._files.result())
        return self._receiver.prepare(change, only_files=True)

    def _checked_files(self) -> dict[str, bytes]:
        names = self._plan.files or ()
        if len(names) != len(self._received) or any(
            sha256(data) != hash for (_, hash), data in zip(names, self._received, strict=True)
        ):
            raise ChecksumMismatch("the files that came with the version are not those that were announced")
        return {name: data for (name, _), data in zip(names, self._received, strict=True)}
