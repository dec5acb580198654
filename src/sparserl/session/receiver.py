"""The end of every session: targets that change together or not at all, and the version that they hold."""

from __future__ import annotations

import asyncio
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from ..errors import ChecksumMismatch, CommitFailed, SessionError, SparserlError, WeightsError
from ..parallel import require_threads, uninterrupted
from ..targets import Change, Prepared, Target, module
from ..weights.digest import Digest, digest, local_digest
from ..weights.memory import Weights
from ..weights.table import TensorTable
from .arrival import ArrivingPatch, arriving_parts, arriving_weights
from .callbacks import Callback, Callbacks
from .options import CommitHooks
from .profiles import common
from .report import SyncReport
from .validation import Validation

Targets = Target | Weights | Sequence[Target | Weights]
R = TypeVar("R", bound="Receiver")


@dataclass(frozen=True)
class RunVersion:
    """A version of a run."""

    run: str
    created: float
    version: int
    digest: Digest


@dataclass
class StagedVersion:
    """A version that is ready to be committed."""

    run_version: RunVersion
    base: RunVersion | None  # what the targets held when it was staged: it is right on top of that alone
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
        place: str = "process group",
    ) -> None:
        require_threads(threads)
        several = targets if isinstance(targets, Sequence) else [targets]
        self.targets = [_as_target(target, threads) for target in several]
        self.threads = threads
        self._hooks = hooks
        self._validation = None if hooks.validate is None else Validation(hooks.validate, threads)
        self._commits = 0
        self._audited = 0  # how many commits there had been when an audit was last due
        self._callbacks = Callbacks(callbacks, place)
        self._table: TensorTable | None = None
        self._current: RunVersion | None = None  # what the targets hold
        self._staged: StagedVersion | None = None
        self._is_uncertain = False  # whether the targets may hold other bits than those of the current version
        self._turn = threading.RLock()  # of the thread whose call is at work
        self._is_closing = False  # set before `close` waits for its turn, so that `follow` on another thread ends

    @property
    def version(self) -> int | None:
        """The version that the targets hold; None before the first commit."""
        return None if self._current is None else self._current.version

    @property
    def run(self) -> str | None:
        """The run that the version belongs to; None before the first commit."""
        return None if self._current is None else self._current.run

    def commit(self) -> SyncReport:
        """Make the staged version the one that the targets hold: all of them, or none.

        It takes time in proportion to what changed. An interrupt (Ctrl-C) is raised before anything is written, or
        when all targets have the version.

        Returns:
            What was committed; its `seconds["commit"]` is how long the targets were paused.

        Raises:
            CommitFailed: A target failed; those before it were taken back, and all hold what they held before.
            SessionError: Nothing is staged.
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
            if self._staged is not staged:
                raise SessionError("`before` staged something else, or what was staged is forgotten; stage it again")
            self._require_free_locks()
            self._commit(staged)
        finally:
            staged.report.seconds["commit"] = time.perf_counter() - started
            try:
                if self._hooks.after is not None:
                    self._hooks.after()
            finally:
                if self._current == staged.run_version:
                    self._finish(staged)
        if self._validation is not None and self._table is not None:
            try:
                self._validation.require_same_bits(staged.run_version.version, self.targets, self._table)
            except BaseException:
                self._is_uncertain = True
                raise
        return staged.report

    def audit(self) -> None:
        """Read all bits of every target and compare them with the digest of the version that they should hold.

        Raises:
            ChecksumMismatch: A target has other bits: something else wrote to it. What was staged is forgotten, and the
                next sync starts from an anchor.
            SessionError: No version was committed yet.
        """
        with self._turn:
            if self._current is None or self._table is None:
                raise SessionError("nothing was committed yet; there is nothing to audit")
            if self._digest_targets(self._table) != self._current.digest:
                version = self._current.version
                self._holds(None)
                self._is_uncertain = True
                raise ChecksumMismatch(
                    f"a target should hold version {version}, but its bits are others: something else wrote to it. "
                    "The next sync starts from an anchor"
                )

    def _audit_if_due(self) -> None:
        """Audit after so many commits: as the next version is staged, when nobody has paused for it."""
        audit_every = self._hooks.audit_every
        if audit_every is not None and self._commits - self._audited >= audit_every:
            self._audited = self._commits
            if self._current is not None:
                self.audit()

    def discard(self) -> None:
        """Forget what is staged."""
        with self._turn:
            staged = self._staged
            self._staged = None
            for prepared in () if staged is None else staged.prepared:
                prepared.discard()

    def _holds(self, version: RunVersion | None) -> None:
        """Bits were looked at: targets hold a version, or none that is known. What is right on others is forgotten."""
        self._current = version
        if self._staged is not None and (version is None or self._staged.base != version):
            self.discard()

    def close(self) -> None:
        """End `follow` where another thread is in it, forget what is staged, and let go of targets and connections."""
        self._is_closing = True
        with self._turn:
            self.discard()
            for target in self.targets:
                target.close()
            self._disconnect()

    @abstractmethod
    def _disconnect(self) -> None:
        """Let go of where versions come from."""

    def __enter__(self: R) -> R:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def follow(self, *, stop: Callable[[], bool] | None = None) -> None:
        """Commit every version as it comes."""

    def _is_over(self, stop: Callable[[], bool] | None) -> Callable[[], bool]:
        """What `follow` asks now and then: whether to end, since `stop` says so or the session is being closed."""
        return lambda: self._is_closing or (stop is not None and stop())

    async def commit_async(self) -> SyncReport:
        """`commit` on a thread."""
        return await asyncio.to_thread(self.commit)

    async def follow_async(self, **options: Any) -> None:
        """`follow` on a thread, with its options; when the task is cancelled it ends with the version it is at."""
        is_cancelled = threading.Event()
        stop = options.pop("stop", None) or (lambda: False)
        try:
            await asyncio.to_thread(self.follow, stop=lambda: is_cancelled.is_set() or stop(), **options)
        finally:
            is_cancelled.set()

    def _profiles(self) -> Collection[str] | None:
        """The profiles that can be taken here; None for all."""
        return common(target.profiles for target in self.targets)

    def _digest_targets(self, table: TensorTable) -> Digest | None:
        """The digest of what all targets hold; None if they differ, or hold nothing."""
        digests = set()
        for target in self.targets:
            digests.add(self._digest_target(target, table))
        self._table = table
        self._is_uncertain = False
        return digests.pop() if len(digests) == 1 else None

    def _digest_target(self, target: Target, table: TensorTable) -> Digest | None:
        """The digest of what a target holds; None if it holds nothing."""
        weights = target.attach(table)
        if weights is None:
            return None
        local = getattr(target, "local_weights", None)  # some have looked at them already
        return digest(weights, threads=self.threads) if local is None else local_digest(local, self.threads)

    def with_fresh(self, change: Change, arriving: Sequence[ArrivingPatch]) -> Change:
        """A change to what an anchor and patches after it lead to, built as they arrive; for a target that has parts,
        these alone.
        """
        sole = self.targets[0] if len(self.targets) == 1 else None
        places = getattr(sole, "places", None)
        weights_on_gpu = getattr(sole, "weights_on_gpu", None) if _exchanges_fresh(sole) else None
        beside = None if weights_on_gpu is None else weights_on_gpu()
        if places is None:
            return replace(change, fresh=arriving_weights(arriving, change.digest, self.threads, beside))
        return replace(change, fresh_parts=arriving_parts(arriving, places, change.digest, self.threads, beside))

    def prepare(self, change: Change, *, only_files: bool = False) -> list[Prepared]:
        """Get every target ready, or none; where only files change, those that keep files."""
        is_sole = len(self.targets) == 1 and _exchanges_fresh(self.targets[0])
        change = replace(change, owns_fresh=is_sole)
        every: list[Prepared] = []
        try:
            every.extend(target.prepare(change) for target in self.targets if target.keeps_files or not only_files)
        except BaseException:
            for prepared in every:
                prepared.discard()
            raise
        return every

    def _require_free_locks(self) -> None:
        """A commit takes the locks of its targets on a thread of its own, which would wait for its caller for ever."""
        for target in self.targets:
            is_owned = getattr(getattr(target, "lock", None), "_is_owned", None)
            if is_owned is not None and is_owned():
                raise SessionError(
                    "the thread that commits has the lock of a target already; commit outside of it, or give the lock "
                    "to the subscriber: before=lock.acquire, after=lock.release"
                )

    def _commit(self, staged: StagedVersion) -> None:
        """Commit every target, or none; an interrupt comes before that or after it."""
        uninterrupted(lambda: self._commit_targets(staged))

    def _commit_targets(self, staged: StagedVersion) -> None:
        """Commit every target, or take back those that were; in between, no version is current."""
        undos: list[Callable[[], None]] = []
        previous = self._current
        self._current = None
        self._staged = None
        try:
            for prepared in staged.prepared:
                undos.append(prepared.commit())  # noqa: PERF401  # what was done must be known when the next one fails
            self._current = staged.run_version
        except BaseException as error:
            for undo in reversed(undos):
                undo()
            for prepared in staged.prepared[len(undos) :]:
                prepared.discard()
            self._restore(staged, previous, error)
            raise

    def _restore(self, staged: StagedVersion, previous: RunVersion | None, error: BaseException) -> None:
        """After a commit that was undone: the previous version is current, but its bits must be looked at again."""
        self._current = previous
        self._is_uncertain = True
        if isinstance(error, SparserlError | OSError | MemoryError):
            raise CommitFailed(
                f"version {staged.run_version.version} was not committed, and nothing has changed: {error}"
            ) from error

    def _finish(self, staged: StagedVersion) -> None:
        """A version is committed."""
        for prepared in staged.prepared:
            prepared.finish()
        self._commits += 1


def _exchanges_fresh(target: Any) -> bool:
    """Whether a target may be given fresh weights as its own. Derived classes may hand them on, or use them twice."""
    return bool(vars(type(target)).get("exchanges_fresh"))


def _as_target(target: Any, threads: int | None) -> Target:
    """A target as it is; a torch module or a mapping as live weights."""
    if callable(getattr(target, "prepare", None)):
        live: Target = target
        return live
    if isinstance(target, Mapping) and not target:
        raise WeightsError("a target is an empty mapping; it must hold at least one tensor")
    return module(target, threads)
