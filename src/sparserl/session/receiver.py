"""The end of every session: targets that change together or not at all, and the version that they hold."""

from __future__ import annotations

import asyncio
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import ChecksumMismatch, CommitFailed, SessionError, SparserlError, WeightsError
from ..parallel import require_threads, uninterrupted
from ..targets import Change, Prepared, Target, module
from ..weights.digest import Digest, digest
from ..weights.memory import Weights
from ..weights.table import TensorTable
from .callbacks import Callback, Callbacks
from .options import CommitHooks
from .report import SyncReport

Targets = Target | Weights | Sequence[Target | Weights]


@dataclass(frozen=True)
class Held:
    """A version of a run."""

    run: str
    created: float
    version: int
    digest: Digest


@dataclass
class Staged:
    """A version that is ready to be committed."""

    held: Held
    prepared: list[Prepared]
    report: SyncReport


class Receiver(ABC):
    """Targets that change together or not at all, and the version that they hold.

    Several threads may call it: their calls take turns. `follow` waits for versions without keeping others waiting.
    """

    def __init__(
        self,
        targets: Targets,
        hooks: CommitHooks,
        threads: int | None,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        require_threads(threads)
        several = targets if isinstance(targets, Sequence) else [targets]
        self.targets = [_as_target(target, threads) for target in several]
        self.threads = threads
        self._hooks = hooks
        self._commits = 0
        self._callbacks = Callbacks(callbacks)
        self._table: TensorTable | None = None
        self._held: Held | None = None
        self._staged: Staged | None = None
        self._doubt = False  # whether the targets may hold other bits than those of the version held
        self._turn = threading.RLock()  # of the thread whose call is at work

    @property
    def version(self) -> int | None:
        """The version that is held; None before the first commit."""
        return None if self._held is None else self._held.version

    @property
    def run(self) -> str | None:
        """The run it belongs to."""
        return None if self._held is None else self._held.run

    def commit(self) -> SyncReport:
        """Make the staged version the one that is held: in O(changed), all targets or none.

        If a target fails, those before it are taken back, and `CommitFailed` says what happened. An interrupt (Ctrl-C)
        is raised before anything is written, or when all targets have the version.
        """
        with self._turn:
            with self._callbacks.failures("commit"):
                report = self._commit_staged()
            self._callbacks.committed(report)
            return report

    def _commit_staged(self) -> SyncReport:
        staged = self._staged
        if staged is None:
            raise SessionError("nothing is staged; call stage() first")
        started = time.perf_counter()
        if self._hooks.before is not None:
            self._hooks.before()  # what is staged stays so if this raises
        try:
            self._require_free_locks()
            self._commit(staged)
        finally:
            staged.report.seconds["commit"] = time.perf_counter() - started
            try:
                if self._hooks.after is not None:
                    self._hooks.after()
            finally:
                if self._held == staged.held:
                    self._settle(staged)
        audit_every = self._hooks.audit_every
        if audit_every is not None and self._commits % audit_every == 0:
            self.audit()
        return staged.report

    def audit(self) -> None:
        """Read all bits of every target and compare them with the digest of the version that is held."""
        with self._turn:
            if self._held is None or self._table is None:
                raise SessionError("nothing is held yet")
            for target in self.targets:
                weights = target.attach(self._table)
                bits = None if weights is None else digest(weights, threads=self.threads)
                if bits != self._held.digest:
                    version = self._held.version
                    self._held = None
                    raise ChecksumMismatch(
                        f"a target should hold version {version}, but its bits are others: something else wrote to it. "
                        "The next sync starts from an anchor"
                    )

    def discard(self) -> None:
        """Forget what is staged."""
        with self._turn:
            staged = self._staged
            self._staged = None
            for prepared in () if staged is None else staged.prepared:
                prepared.discard()

    @abstractmethod
    def follow(self, *, stop: Callable[[], bool] | None = None) -> None:
        """Commit every version as it comes."""

    async def commit_async(self) -> SyncReport:
        """`commit` on a thread."""
        return await asyncio.to_thread(self.commit)

    async def follow_async(self, **options: Any) -> None:
        """`follow` on a thread; when the task is cancelled it ends with the version it is at."""
        ended = False
        theirs = options.pop("stop", None)

        def stop() -> bool:
            return ended or (theirs is not None and theirs())

        try:
            await asyncio.to_thread(self.follow, stop=stop, **options)
        finally:
            ended = True

    def _bits(self, table: TensorTable) -> Digest | None:
        """What all targets hold, by their bits; None if they differ, or hold nothing."""
        found = set()
        for target in self.targets:
            weights = target.attach(table)
            found.add(None if weights is None else digest(weights, threads=self.threads))
        self._table, self._doubt = table, False
        return found.pop() if len(found) == 1 else None

    def prepare(self, change: Change) -> list[Prepared]:
        """Get every target ready, or none."""
        prepared: list[Prepared] = []
        try:
            prepared.extend(target.prepare(change) for target in self.targets)
        except BaseException:
            for one in prepared:
                one.discard()
            raise
        return prepared

    def _require_free_locks(self) -> None:
        """A commit takes the locks of its targets on a thread of its own, which would wait for its caller for ever."""
        for target in self.targets:
            is_owned = getattr(getattr(target, "lock", None), "_is_owned", None)
            if is_owned is not None and is_owned():
                raise SessionError(
                    "the thread that commits has the lock of a target already; commit outside of it, or give the lock "
                    "to the subscriber: before=lock.acquire, after=lock.release"
                )

    def _commit(self, staged: Staged) -> None:
        """Commit every target, or none; an interrupt comes before that or after it."""
        uninterrupted(lambda: self._commit_targets(staged))

    def _commit_targets(self, staged: Staged) -> None:
        """Commit every target, or take back those that were; in between, nothing is said to be held."""
        done: list[Callable[[], None]] = []
        before = self._held
        self._held = None
        self._staged = None
        try:
            for prepared in staged.prepared:
                done.append(prepared.commit())  # noqa: PERF401  # what was done must be known when the next one fails
            self._held = staged.held
        except BaseException as error:
            for undo in reversed(done):
                undo()
            for prepared in staged.prepared[len(done) :]:
                prepared.discard()
            self._taken_back(staged, before, error)
            raise

    def _taken_back(self, staged: Staged, before: Held | None, error: BaseException) -> None:
        """After a commit that failed and was undone: what is held, in doubt now; whoever asked for it is told."""
        self._held, self._doubt = before, True
        if isinstance(error, SparserlError | OSError | MemoryError):
            raise CommitFailed(
                f"version {staged.held.version} was not committed, and nothing has changed: {error}"
            ) from error

    def _settle(self, staged: Staged) -> None:
        for prepared in staged.prepared:
            prepared.finish()
        self._commits += 1


def _as_target(target: Any, threads: int | None) -> Target:
    """A target as it is; a torch module or a mapping as live weights."""
    if callable(getattr(target, "prepare", None)):
        live: Target = target
        return live
    if isinstance(target, Mapping) and not target:
        raise WeightsError("a target is an empty mapping; it must hold at least one tensor")
    return module(target, threads)
