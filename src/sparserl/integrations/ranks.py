"""A subscriber for an engine of several ranks, each with its parts of the weights: all have the same version, always.

    each rank for itself:  fetch ──► decode ──► stage, while the engine serves
    all ranks at once:     which version are the parts? ── staged on all, with the right digest? ── commit ── or undo

Methods whose docstring says "on all ranks at once" must be called so, as engines call their workers. An error on one
rank is then raised on all.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

from ..errors import ChecksumMismatch, NotFound, PeerLost, SessionError, Unavailable
from ..session import Subscriber, SyncReport
from ..session.logs import log
from ..session.receiver import StagedVersion
from ..session.store.records import StoreSnapshot
from ..session.store.retention import read_head, read_index
from ..session.store.routes import version_of_step
from ..targets.engine import EngineTarget, Members, MovedSums, PreparedEngine
from ..weights.digest import Digest, table_digest
from ..weights.shards import Place, require_whole
from ..weights.table import TensorTable

T = TypeVar("T")
Gather = Callable[[Any], list[Any]]
_READS = 10  # of the store, until all ranks have read the same head
_POLL_SECONDS = 0.5  # between two looks for the version of a step


class _UnknownVersion(SessionError):
    """The version of the engine is unknown; all ranks at once must identify it."""

    def __init__(self, snapshot: StoreSnapshot) -> None:
        super().__init__("the version of the engine is unknown")
        self.snapshot = snapshot


class EngineSubscriber(Subscriber):
    """Follows a run on one rank of an engine. `audit`, too, is called on all ranks at once.

    Args:
        rank: The number of this rank.
        gather: Sends an object to all ranks and returns the objects of all, in order of rank.
    """

    def __init__(self, url: str, target: EngineTarget, rank: int, gather: Gather, **options: Any) -> None:
        super().__init__(url, target, **options)
        self._engine = target
        self._rank = rank
        self._gather = gather
        self._engine_digest = Digest()  # of the parts of all ranks together
        self._last_read: StoreSnapshot | None = None

    def refresh(self) -> None:
        """On all ranks at once: read the store; if the engine's version is unknown, identify it by its bits."""

        def read() -> tuple[bool, str, str]:
            is_unknown = False
            try:
                self._last_read = self._read_store(None)
            except _UnknownVersion as error:
                self._last_read = error.snapshot
                is_unknown = True
            return is_unknown, self._last_read.run.run, self._last_read.head.index

        for _ in range(_READS):  # ranks that go by different indices may take the same bits for different versions
            answers = self._on_all_ranks(read)
            is_unknown = any(is_unknown for is_unknown, *_ in answers)
            if not is_unknown or len({index for _, _, index in answers}) == 1:
                break
        else:
            raise SessionError("versions are published faster than all ranks read them; try again")
        snapshot = self._last_read
        assert snapshot is not None
        if len({run for _, run, _ in answers}) != 1:
            raise SessionError("another run has just begun, and not all ranks have read it yet; try again")
        if is_unknown:
            super()._identify(snapshot, snapshot.head.version)
            self._snapshot = snapshot
            self._newest_head = snapshot.head
            self._tell_version()

    def commit_version(self, version: int | None = None, run: str | None = None) -> SyncReport | None:
        """On all ranks at once: commit a version, by default the newest; None if the engine has it already.

        run: The run that it is a version of; None for the one that is followed.
        """
        self.refresh()
        super()._audit_if_due()
        snapshot = self._snapshot
        assert snapshot is not None
        if run is not None and run != snapshot.run.run:
            raise SessionError(
                f"the engine follows run {snapshot.run.run} of {self.store.url}, but version {version} is to be one of "
                f"run {run}; let it follow that run first"
            )
        goal = self._gather(snapshot.head.version if version is None else version)[0]
        answers = self._on_all_ranks(lambda: self._stage_version(goal))
        staged = self._staged
        if len({is_staged for is_staged, _ in answers}) != 1:
            self.discard()
            self._is_uncertain = True
            raise SessionError(f"version {goal} is on some ranks already; try again")
        if staged is None:
            return None
        partial = {rank: sums for rank, (_, sums) in enumerate(answers) if sums is not None}
        if partial and _moved(partial, self._engine_digest) != staged.run_version.digest:
            self.discard()
            self._is_uncertain = True
            raise ChecksumMismatch(f"version {goal} would not have its digest on these ranks; nothing was written")
        return self.commit()

    def commit_step(self, step: int, timeout: float) -> SyncReport | None:
        """On all ranks at once: commit the version of a training step, once it is published.

        Args:
            step: The step, as in `publish(step=)`.
            timeout: Seconds to wait for it.

        Raises:
            PeerLost: It was not published in time.
        """
        versions = self._on_all_ranks(lambda: self._wait_for_step(step, timeout))
        return self.commit_version(versions[0])

    def _wait_for_step(self, step: int, timeout: float) -> int:
        end = time.monotonic() + timeout
        last_head = None
        while True:
            with contextlib.suppress(NotFound):  # the run has not begun, or the index was replaced meanwhile
                head, _ = read_head(self.store, self._trusted_keys)
                if head != last_head:
                    version = version_of_step(read_index(self.store, head).steps, step)
                    if version is not None:
                        return version
                    last_head = head
            if time.monotonic() >= end:
                raise PeerLost(f"{self.store.url}: step {step} was not published within {timeout:g} s")
            time.sleep(min(_POLL_SECONDS, max(0.0, end - time.monotonic())))

    def stage_newest(self) -> None:
        """On one rank, at any time: stage the newest version, if the version of the engine is known."""
        if self._newest_head is None or self._is_uncertain:
            return
        try:
            snapshot = self._read_store(None)
            if self._staged is None or self._staged.run_version.version != snapshot.head.version:
                self.stage()
        except (_UnknownVersion, NotFound, Unavailable):
            return  # all ranks will identify it, or the store will be available again
        except Exception as error:  # noqa: BLE001  # nobody else hears of it on this thread
            self._is_uncertain = True  # the next call on all ranks tries again, and raises the error
            log.warning("%s: staging ahead failed: %s: %s", self.store.url, type(error).__name__, error)

    def wait(self, seconds: float) -> None:
        """Wait up to so many seconds for a new version."""
        self._wait_for_change(seconds)

    def _stage_version(self, version: int) -> tuple[bool, Mapping[Members, MovedSums] | None]:
        """Stage a version, unless the engine has it: whether it did, and its sums, if this rank has only parts."""
        staged = self._staged
        if staged is None or (staged.run_version.run, staged.run_version.version) != (self._run_name, version):
            self.stage(version)
            staged = self._staged
        if staged is None:
            return False, None
        (prepared,) = staged.prepared
        assert isinstance(prepared, PreparedEngine)
        return True, prepared.sums

    @property
    def _run_name(self) -> str | None:
        return None if self._snapshot is None else self._snapshot.run.run

    def _identify(self, snapshot: StoreSnapshot, version: int) -> None:  # noqa: ARG002  # all ranks look at the newest
        raise _UnknownVersion(snapshot)

    def _audit_if_due(self) -> None:
        """Ranks audit at once, as `commit_version` begins: none of them alone knows the digest of its parts."""

    def _accept_layout(self, table: TensorTable) -> None:
        """An engine keeps the tensors that it was built with."""
        if self._table is not None:
            self._table.require(table, "the engine", "the version")

    def _digest_targets(self, table: TensorTable) -> Digest | None:
        """The digest of the parts of all ranks, from their bits; None if copies of a part on two ranks differ."""

        def read() -> dict[Place, Digest]:
            self._engine.attach(table)
            return self._engine.sums()

        first: dict[Place, Digest] = {}
        members: dict[Place, Members] = {}
        is_consistent = True
        for rank, sums in enumerate(self._on_all_ranks(read)):
            for place, part_digest in sums.items():
                is_consistent &= first.setdefault(place, part_digest) == part_digest
                members[place] = (*members.get(place, ()), rank)
        require_whole(table, [[*first]])
        self._engine.share(members)
        self._engine_digest = sum(first.values(), table_digest(table))
        self._table = table
        self._is_uncertain = False
        return self._engine_digest if is_consistent else None

    def _commit(self, staged: StagedVersion) -> None:
        """Commit on all ranks, or on none."""
        before = self._current
        self._current = None
        self._staged = None
        undo: list[Callable[[], None]] = []
        try:
            self._on_all_ranks(lambda: undo.append(staged.prepared[0].commit()))
        except BaseException as error:  # also if a rank is lost, and cannot tell what it did
            for undo_commit in undo:
                undo_commit()
            self._restore(staged, before, error)
            raise
        self._current = staged.run_version
        self._engine_digest = staged.run_version.digest

    def _on_all_ranks(self, work: Callable[[], T]) -> list[T]:
        return on_all_ranks(work, self._gather)


def on_all_ranks(work: Callable[[], T], gather: Gather) -> list[T]:
    """Do some work on every rank, and return the results of all; if it fails on any rank, all raise."""
    result: Any = None
    error: Exception | None = None
    try:
        result = work()
    except Exception as exception:  # noqa: BLE001  # whatever it is, the other ranks must not wait for this one
        error = exception
    answers = gather((result, None if error is None else f"{type(error).__name__}: {error}"))
    if error is not None:
        raise error
    for rank, (_, failure) in enumerate(answers):
        if failure is not None:
            raise SessionError(f"rank {rank} of the engine: {failure}")
    return [result for result, _ in answers]


def together(work: Callable[[], T], gather: Gather) -> T:
    """Do some work on every rank, and return what it gives on this one; if it fails on any rank, all raise."""
    results: list[T] = []
    on_all_ranks(lambda: results.append(work()), gather)
    return results[0]


def _moved(ranks: Mapping[int, Mapping[Members, MovedSums]], before: Digest) -> Digest | None:
    """The digest that a version has on all ranks; None if ranks do not agree on parts that they share."""
    total = before
    for members in {members for sums in ranks.values() for members in sums}:
        sums = [ranks[rank].get(members) for rank in members if rank in ranks]
        known = [one for one in sums if one is not None]
        one_of_each = {one.from_zero: one for one in known}.values()
        if len(known) < max(1, len(sums)) or not all(a.is_same(b) for a in known for b in one_of_each):
            return None
        total += known[0].after - known[0].before
    return total


def make_subscriber(url: str, target: EngineTarget, group: Any, **options: Any) -> EngineSubscriber:
    """On all ranks of a group of vLLM or SGLang at once: a subscriber of each; if one cannot be made, none is."""
    gather = gather_over(group)
    return together(lambda: EngineSubscriber(url, target, group.rank_in_group, gather, **options), gather)


def gather_over(group: Any) -> Gather:
    """A `gather` over the ranks of a group of vLLM or SGLang."""

    def gather(value: Any) -> list[Any]:
        values = [value] * group.world_size
        if group.world_size > 1:
            torch.distributed.all_gather_object(values, value, group=group.cpu_group)
        return values

    return gather
