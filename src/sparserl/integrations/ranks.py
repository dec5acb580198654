"""A subscriber for an engine of several ranks, each with its parts of the weights: all hold one version, always.

    each rank for itself:  fetch ──► decode ──► stage, while the engine serves
    all ranks at once:     what do the parts hold together? ── staged on all, to the right digest? ── commit ── or undo

Every call that is marked so must be made on all ranks at once, as engines do with calls to their workers. What fails on
one rank is then raised on all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from ..errors import ChecksumMismatch, NotFound, SessionError, SparserlError, Unavailable
from ..session import Subscriber, SyncReport
from ..session.receiver import StagedVersion
from ..session.store.subscriber import StoreSnapshot
from ..targets.engine import EngineTarget, PreparedEngine
from ..weights.digest import Digest, table_digest
from ..weights.shards import Place, require_whole
from ..weights.table import TensorTable

T = TypeVar("T")
Gather = Callable[[Any], list[Any]]


class _Unattached(SessionError):
    """What the engine holds must be found out by all ranks at once."""

    def __init__(self, view: StoreSnapshot) -> None:
        super().__init__("what the engine holds is not known")
        self.view = view


class EngineSubscriber(Subscriber):
    """Follows a run on one rank of an engine.

    rank, gather: which rank this is, and what hands an object to all ranks and returns those of all, in order of rank.
    """

    def __init__(self, url: str, target: EngineTarget, rank: int, gather: Gather, **options: Any) -> None:
        super().__init__(url, target, **options)
        self._live = target
        self._rank = rank
        self._gather = gather
        self._now = Digest()  # of what all ranks hold
        self._seen: StoreSnapshot | None = None

    def meet(self) -> None:
        """On all ranks at once: see what the store has; where it is not known, find out by its bits what is held."""

        def look() -> tuple[bool, str]:
            try:
                self._seen = self._read_store()
            except _Unattached as found:
                self._seen = found.view
                return True, self._seen.run.run
            return False, self._seen.run.run

        said = self._together(look)
        view = self._seen
        assert view is not None
        if len({run for _, run in said}) != 1:
            raise SessionError("another run has begun just now, which not all ranks have seen; try again")
        if any(unknown for unknown, _ in said):
            super()._identify(view)
            self._snapshot = view
            self._newest_head = view.head

    def hold(self, version: int | None = None) -> SyncReport | None:
        """On all ranks at once: commit a version, the newest if none is given; None if it is held already."""
        self.meet()
        view = self._snapshot
        assert view is not None
        wanted = self._gather(view.head.version if version is None else version)[0]
        moves = self._together(lambda: self._moved_by(wanted))
        staged = self._staged
        if staged is None:
            return None
        known = [move for move in moves if move is not None]
        if known and sum(known, self._now) != staged.run_version.digest:
            self.discard()
            self._is_uncertain = True
            raise ChecksumMismatch(f"version {wanted} does not lead to its digest on these ranks; nothing was written")
        return self.commit()

    def ahead(self) -> None:
        """On one rank, whenever it likes: get the newest version ready, if it is known what is held."""
        if self._newest_head is None or self._is_uncertain:
            return
        try:
            view = self._read_store()
            if self._staged is None or self._staged.run_version.version != view.head.version:
                self.stage()
        except (_Unattached, NotFound, Unavailable):
            return  # all ranks will meet, or the store will be back
        except SparserlError:
            self._is_uncertain = True  # it will be tried again when all ranks meet, and then be said

    def wait(self, seconds: float) -> None:
        """Wait for a new version, for so long."""
        self._wait_for_change(seconds)

    def audit(self) -> None:
        """On all ranks at once: read all bits and compare them with the digest of the version that is held."""
        if self._current is None or self._table is None:
            raise SessionError("nothing is held yet")
        if self._digest_targets(self._table) != self._current.digest:
            version = self._current.version
            self._current = None
            self._is_uncertain = True
            raise ChecksumMismatch(
                f"the engine should hold version {version}, but its bits are others: something else wrote to them. "
                "The next commit starts from an anchor"
            )

    def _moved_by(self, version: int) -> Digest | None:
        """Have a version staged, unless it is held. How it moves the digest, where this rank does not have all."""
        staged = self._staged
        if staged is None or (staged.run_version.run, staged.run_version.version) != (self._run_seen, version):
            self.stage(version)
            staged = self._staged
        if staged is None:
            return None
        (prepared,) = staged.prepared
        assert isinstance(prepared, PreparedEngine)
        return prepared.moved

    @property
    def _run_seen(self) -> str | None:
        return None if self._snapshot is None else self._snapshot.run.run

    def _identify(self, view: StoreSnapshot) -> None:
        raise _Unattached(view)

    def _digest_targets(self, table: TensorTable) -> Digest | None:
        """What all ranks hold together, by their bits; None where ranks that should hold the same do not."""

        def read() -> dict[Place, Digest]:
            self._live.attach(table)
            return self._live.sums()

        first: dict[Place, tuple[int, Digest]] = {}
        alike = True
        for rank, sums in enumerate(self._together(read)):
            for place, found in sums.items():
                alike &= first.setdefault(place, (rank, found))[1] == found
        require_whole(table, [[*first]])
        self._live.own([place for place, (rank, _) in first.items() if rank == self._rank])
        self._now = sum((found for _, found in first.values()), table_digest(table))
        self._table = table
        self._is_uncertain = False
        return self._now if alike else None

    def _commit(self, staged: StagedVersion) -> None:
        """Commit on all ranks, or on none."""
        before = self._current
        self._current = None
        self._staged = None
        undo: list[Callable[[], None]] = []
        try:
            self._together(lambda: undo.append(staged.prepared[0].commit()))
        except BaseException as error:  # also where a rank is gone, and cannot say what it did
            for back in undo:
                back()
            self._restore(staged, before, error)
            raise
        self._current = staged.run_version
        self._now = staged.run_version.digest

    def _together(self, work: Callable[[], T]) -> list[T]:
        """What all ranks made of some work; if it failed on any, all raise."""
        made: Any = None
        error: Exception | None = None
        try:
            made = work()
        except Exception as raised:  # noqa: BLE001  # whatever it is, the other ranks must not wait for this one
            error = raised
        said = self._gather((made, None if error is None else f"{type(error).__name__}: {error}"))
        if error is not None:
            raise error
        for rank, (_, failed) in enumerate(said):
            if failed is not None:
                raise SessionError(f"rank {rank} of the engine: {failed}")
        return [one for one, _ in said]


def over(group: Any) -> Gather:
    """A `gather` over the ranks of a group, as vLLM and SGLang have them."""

    def gather(mine: Any) -> list[Any]:
        out = [mine] * group.world_size
        if group.world_size > 1:
            torch.distributed.all_gather_object(out, mine, group=group.cpu_group)
        return out

    return gather
