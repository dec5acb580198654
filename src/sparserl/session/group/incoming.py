"""A version that other ranks are sending: it is staged meanwhile."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace

from ...errors import ChecksumMismatch, SessionError
from ...patch.contents import Bucket, Ends
from ...targets import Change, Prepared
from ...weights.digest import Digest
from ...weights.table import TensorTable
from ..arrival import Arrival, ArrivingPatch
from ..receiver import Receiver
from ..store.fields import sha256
from .transfer_plan import TransferPlan


class IncomingVersion:
    """The patches and files of a transfer as they come in, staged on a thread of its own."""

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
        self._start = len(plan.legs)  # the first leg that is needed
        self._files: Future[dict[str, bytes]] = Future()
        self._received: list[bytes] = []
        try:
            self._start = plan.first_leg(digest)
        except SessionError as error:
            self.failure = error
        self._arriving = [
            ArrivingPatch(
                table,
                Ends(leg.base, leg.result, leg.changed),
                leg.buckets,
                restores=leg.anchor and number == 0,
                table_hash=table_hash,
            )
            for number, leg in enumerate(plan.legs[self._start :])
        ]
        self._staging = Arrival(self._arriving, self._stage)

    def add(self, leg: int, bucket: Bucket) -> None:
        """A bucket of a leg, or a file behind the last one."""
        if leg == len(self._plan.legs):
            self._received.append(bytes(bucket))
        elif leg >= self._start:
            self._staging.add(leg - self._start, bucket)

    def finish(self) -> None:
        """Everything has come: wait until it is staged."""
        try:
            self._files.set_result(self._checked_files())
        except ChecksumMismatch as error:
            self._files.set_exception(error)
        try:
            self.prepared = self._staging.finish()
        except BaseException as error:
            if error is not self._staging.failure:  # an interrupt of this thread
                raise
            self.failure = self.failure or error  # the publisher is told, and it is raised again
            self._discard()

    def stop(self) -> None:
        """Give it up, whether or not all of it has come."""
        if not self._files.done():
            self._files.set_exception(SessionError("the files never came"))
        self._discard()

    def _discard(self) -> None:
        for every in self._staging.stop():
            for prepared in every:
                prepared.discard()
        self.prepared = []

    def _stage(self) -> list[Prepared]:
        if self._arriving:
            return self._staged()
        if self._plan.files is not None and self.failure is None:
            return self._staged_files()
        return []

    def _staged(self) -> list[Prepared]:
        plan = self._plan
        receiver = self._receiver
        patches = [arriving.patch for arriving in self._arriving]
        is_anchor = self._arriving[0].restores
        self.kind = "anchor" if is_anchor else "patch"
        change = Change(plan.run, plan.created, plan.version, plan.digest, [] if is_anchor else patches)
        if is_anchor:
            change = receiver.with_fresh(change, self._arriving)
        if is_anchor or plan.files is not None:
            change = replace(change, files=self._files.result())
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
