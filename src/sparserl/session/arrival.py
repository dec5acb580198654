"""Patches whose buckets are still arriving, from a store or from other ranks: they are used meanwhile."""

from __future__ import annotations

import contextvars
import functools
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from ..errors import ChecksumMismatch
from ..parallel import outlast
from ..patch import Patch
from ..patch.contents import Bucket, BucketList, Contents, Ends
from ..patch.matching import require_base
from ..patch.snapshot import Restoration
from ..transport.stores.deadline import SLICE, Deadline, current
from ..weights.digest import Digest
from ..weights.memory import Weights
from ..weights.shards import Place, Shards
from ..weights.table import TensorTable
from .anchors import SPOOL_BYTES, apply_all, begin_parts, begin_restoration
from .parts import apply_to_parts

R = TypeVar("R")
_TRANSIENT_BYTES = 128 << 20  # of an anchor: buckets that have arrived, and are not written yet


class ArrivingPatch:
    """A patch whose buckets arrive one by one, in order.

    Args:
        table: The tensor table.
        ends: What the patch leads from and to.
        buckets: How many buckets there will be.
        restores: Whether it is an anchor whose buckets become weights as they arrive, and are not kept.
        table_hash: The hash of the table, if it is known.
        is_partial: Whether some buckets of the patch are left out, since they change nothing here.
    """

    def __init__(
        self,
        table: TensorTable,
        ends: Ends,
        buckets: int,
        *,
        restores: bool,
        table_hash: bytes | None = None,
        is_partial: bool = False,
    ) -> None:
        memory_bytes = _TRANSIENT_BYTES if restores else SPOOL_BYTES
        self.restores = restores
        self.is_applied = False  # to the weights that are being built from an anchor
        self.is_spoiled = False  # whether weights that are being built from it have some changes of a later patch
        self.buckets = BucketList(buckets, memory_bytes=memory_bytes, transient=restores)
        self.patch = Patch(Contents(table, ends, self.buckets, table_hash, is_partial=is_partial))
        self._restoration: Restoration[Any] | None = None

    def restored(self, threads: int | None = None, beside: Weights | None = None) -> dict[str, Any]:
        """The weights of an anchor. If buckets stop arriving it raises, and goes on from there when called again.

        beside: weights on GPUs: what is built lies there too, if there is room.
        """
        if self._restoration is None:
            self._restoration = begin_restoration(self.patch.contents, beside)
        weights: dict[str, Any] = self._restore(self._restoration, threads)
        return weights

    def restored_parts(
        self, places: Sequence[Place], threads: int | None = None, beside: Shards | None = None
    ) -> Shards:
        """Some parts of the weights of an anchor: always the same ones.

        beside: these parts on GPUs: what is built lies there too, if there is room.
        """
        if self._restoration is None:
            self._restoration = begin_parts(self.patch.contents, places, beside)
        weights: Shards = self._restore(self._restoration, threads)
        return weights

    def _restore(self, restoration: Restoration[Any], threads: int | None) -> Any:
        if not self.is_applied:
            restoration.run(threads)
            self.is_applied = True
        return restoration.weights


def arriving_weights(
    arriving: Sequence[ArrivingPatch], result: Digest, threads: int | None = None, beside: Weights | None = None
) -> dict[str, Any]:
    """The weights that an anchor and patches after it lead to, built while they arrive.

    result: the digest that they must have.
    beside: weights on GPUs: what is built lies there too, if there is room.
    """
    anchor, *others = arriving
    weights = anchor.restored(threads, beside)
    digest = anchor.patch.result
    for later in others:
        if not later.is_applied:
            apply_all(weights, digest, [later.patch], later.patch.result, threads)
            later.is_applied = True
        digest = later.patch.result
    return apply_all(weights, digest, [], result)


def arriving_parts(
    arriving: Sequence[ArrivingPatch],
    places: Sequence[Place],
    result: Digest,
    threads: int | None = None,
    beside: Shards | None = None,
) -> Shards:
    """Some parts of what an anchor and patches after it lead to, built while they arrive; no other memory is taken.

    result: the digest of all the weights. That the parts have theirs must be checked by the caller.
    beside: these parts on GPUs: what is built lies there too, if there is room.
    """
    anchor, *others = arriving
    weights = anchor.restored_parts(places, threads, beside)
    digest = anchor.patch.result
    for later in others:
        require_base(later.patch.contents, digest)
        if not later.is_applied:
            try:
                apply_to_parts(weights, [later.patch], threads)
            except BaseException:
                anchor.is_spoiled = True  # nobody knows which changes are written
                raise
            later.is_applied = True
        digest = later.patch.result
    if digest != result:
        raise ChecksumMismatch(f"the patches lead to {digest}, not to {result}")
    return weights


class Arrival(Generic[R]):
    """Work on patches that are arriving, on a thread of its own.

    Args:
        patches: The patches. Some of their buckets may be here from an earlier attempt.
        work: What is to be done with them. It is called at once, and waits for buckets where it needs them.
    """

    def __init__(self, patches: Sequence[ArrivingPatch], work: Callable[[], R]) -> None:
        self.failure: BaseException | None = None
        self._patches = patches
        self._results: list[R] = []
        self._deadline = Deadline(around=current())
        self._done = threading.Event()
        for patch in patches:
            patch.buckets.reopen()
        use = functools.partial(contextvars.copy_context().run, self._deadline.run, self._use, work)
        threading.Thread(target=self._run, args=(like_this_thread(use),), name="sparserl-arrival", daemon=True).start()

    def add(self, patch: int, bucket: Bucket) -> None:
        """The next bucket of a patch."""
        self._patches[patch].buckets.add(bucket, self._look)

    def finish(self) -> R:
        """Everything has arrived: wait for the work, and return its result."""
        while not self._done.wait(SLICE):
            self._look()
        if self.failure is not None:
            raise self.failure
        return self._results[0]

    def stop(self) -> list[R]:
        """Nothing more arrives, and nobody wants the result. It is returned, if there is one, to be given up: once."""
        self._deadline.cancel()
        for patch in self._patches:
            patch.buckets.stop()
        outlast(self._done)
        results = self._results
        self._results = []
        return results

    def _look(self) -> None:
        """End the work if the time of the caller is over: only the caller's own thread can tell."""
        if current().over:
            self._deadline.cancel()

    def _use(self, work: Callable[[], R]) -> None:
        self._results.append(work())
        for patch in self._patches:
            patch.patch.contents.heads  # noqa: B018  # reading them checks every bucket, and that none overlap

    def _run(self, use: Callable[[], None]) -> None:
        try:
            use()
        except BaseException as error:  # noqa: BLE001  # raised where the result is awaited
            self.failure = error
            for patch in self._patches:
                patch.buckets.stop()  # nobody reads them any more
        finally:
            self._done.set()


def like_this_thread(work: Callable[[], R]) -> Callable[[], R]:
    """Work for another thread, to be done with the modes of torch, the GPU and the CUDA stream that this thread has."""
    torch = sys.modules.get("torch")
    if torch is None:
        return work
    is_grad_enabled = torch.is_grad_enabled()
    is_inference = torch.is_inference_mode_enabled()
    stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None

    def run() -> R:
        with torch.inference_mode(is_inference), torch.set_grad_enabled(is_grad_enabled):
            if stream is None:
                return work()
            with torch.cuda.device(stream.device), torch.cuda.stream(stream):
                return work()

    return run
