"""The rollout's side: a subscriber follows a run, and holds one of its versions, bit for bit.

head ──► route (patches, squashed patches, anchor + patches) ──► fetch ──► verify ──► decode ──► staged
staged ──► commit, all targets or none
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from ...errors import NotFound, NotRetained, SparserlError, StoreError, Unavailable
from ...parallel import Progress
from ...sources import PublishedSource
from ...targets import Change, Prepared
from ...transport.stores.base import Store, StoredObject
from ...transport.stores.deadline import current, within
from ...transport.stores.opening import store_at
from ...weights.digest import Digest
from ...weights.table import TensorTable
from ..arrival import Arrival
from ..callbacks import Callback
from ..logs import TroubleLog, log, may_pass
from ..options import AUDIT_EVERY, CommitHooks, require_callable, require_count, require_number
from ..receiver import Receiver, RunVersion, StagedVersion, Targets
from ..report import SyncReport, Watch
from . import routes, signing, transfer
from .coming import NOTHING, BucketsAhead
from .fields import checked_clock
from .holding_records import OwnHolding
from .layouts import run_at
from .manifests import Manifest
from .neighbours import NeighbourOptions, Served
from .own_lease import OwnLease
from .pinning import OwnPin
from .records import HEAD, Blob, HeadRecord, RouteStep, RunRecord, StoreSnapshot, run_id
from .retention import read_head
from .side_files import StoredFiles
from .signing import PublicKeys
from .snapshots import files_change, likely_version, read_snapshot, require_newer

_REPLANS = 4  # times that a route is planned anew because objects of it went away


class Subscriber(Receiver):
    """Follows a run in a store: holds one of its versions, and moves from version to version, bit for bit.

    Several threads may call a subscriber: their calls take turns.

    >>> import numpy as np, sparserl, tempfile
    >>> url = f"file://{tempfile.mkdtemp()}"
    >>> publisher = sparserl.Publisher(url, {"w": np.arange(5, dtype=np.float32)})
    >>> _ = publisher.publish()
    >>> weights = {"w": np.zeros(5, np.float32)}
    >>> subscriber = sparserl.Subscriber(url, weights)
    >>> subscriber.sync().version
    0
    >>> weights["w"].tolist()
    [0.0, 1.0, 2.0, 3.0, 4.0]

    Args:
        url: The store of the run: a folder, an `s3://`, `gs://`, `az://` or `http(s)://` URL, or an open store.
        targets: Where the weights are written: a mapping from names to tensors or a torch module, which are written in
            place; a target such as `sparserl.targets.folder(path)`; or a sequence of them, which change together or
            not at all.
        trusted_keys: The publisher's public key, or several: what none of them has signed is refused, and so is
            anything older than what is held. To replace a key without a gap, trust the old and the new one until the
            publisher signs with the new one. None to accept what is not signed.
        run: The id of a run; any other is refused. None to follow whatever run the store has.
        name: Under which name this subscriber writes down in the store what it holds, so that publishers can wait for
            it and retention spares what it needs. True for a name made of host and process, False to write nothing;
            nothing is written to a store that can only be read.
        before: Called before each commit, for an engine to pause.
        after: Called after each commit whose `before` was called, whether or not it worked, for an engine to resume.
        audit_every: After so many commits `audit` is called when the next version is staged; None for never.
        validate: A source, as of a publisher, of the full weights: after each commit all bits are compared with them.
        token: The token that an `http(s)://` store asks for, and that neighbours ask for and are asked for.
        near: The URLs of other receivers of the run that serve what they have: they are asked before the store.
        serve: The address `HOST:PORT` at which neighbours may fetch what this subscriber has fetched; port 0 for any
            free one. What they fetch is verified as if it came from the store. Needs `mirror`.
        mirror: A folder that keeps what is fetched: for neighbours, and for this subscriber after a restart.
        threads: How many threads to use; None for one a core.
        progress: Called with the number of bytes whenever some have been fetched.
        callbacks: What is told about every commit, and about what went wrong; see `sparserl.metrics`.
        clock: Gives the time in seconds since 1970.

    Raises:
        SessionError: An option cannot be used.
        WeightsError: A target has no tensors, or is no target.
        StoreError: The URL names no store.
    """

    def __init__(
        self,
        url: str | Path | Store,
        targets: Targets,
        *,
        trusted_keys: PublicKeys | None = None,
        run: str | None = None,
        name: str | bool = True,
        before: Callable[[], None] | None = None,
        after: Callable[[], None] | None = None,
        audit_every: int | None = AUDIT_EVERY,
        validate: PublishedSource | None = None,
        token: str | None = None,
        near: Sequence[str] = (),
        serve: str | None = None,
        mirror: str | Path | None = None,
        threads: int | None = None,
        progress: Progress | None = None,
        callbacks: Sequence[Callback] = (),
        clock: Callable[[], float] = time.time,
    ) -> None:
        hooks = CommitHooks(before, after, audit_every, validate)
        super().__init__(targets, hooks, threads, callbacks, "")
        signing.public_keys(trusted_keys)
        require_callable("progress", progress)
        neighbours = NeighbourOptions(near, serve, mirror, token)
        self._trusted_keys = trusted_keys
        self._pinned_run = None if run is None else run_id(run)
        self._progress = progress
        store = store_at(url, token)
        self._callbacks.place = store.url
        self._callbacks.watch_retries(store)
        self.store = neighbours.around(store)
        self._lease = OwnLease(self.store, name, checked_clock(clock), self)
        try:
            self._served = Served.start(self.store, neighbours)
        except BaseException:
            self.store.close()
            raise
        self._snapshot: StoreSnapshot | None = None
        self._newest_head: HeadRecord | None = None  # of all heads seen: nothing older is accepted
        self._awaited_head: StoredObject | None = None  # for the next look at the store
        self._unfinished: transfer.Fetch | None = None  # what was fetched when a store failed in the middle
        self._holding = OwnHolding(self.targets)
        self._ahead = BucketsAhead(self.store)
        self._is_store_empty = False  # as far as is known

    @property
    def served_url(self) -> str | None:
        """The URL at which neighbours are served; None if they are not."""
        return None if self._served is None else self._served.url

    def stage(self, version: int | None = None) -> SyncReport | None:
        """Get a version ready while the weights are in use: fetched, verified and decoded; `commit` shows it.

        Args:
            version: Which version, older or newer; None for the newest.

        Returns:
            What was staged; None if the version is held already.

        Raises:
            NotRetained: The store does not have the version, or has it no more.
            Untrusted: The head is not signed by a trusted key, is of another run, or was rolled back.
            StoreError: The store cannot be reached, or has no run yet.
        """
        require_count("version", 0 if version is None else version, 0)
        with self._turn, self._callbacks.failures("stage"):
            try:
                return self._stage_with_retries(version)
            finally:
                self._awaited_head = None

    def _stage_with_retries(self, version: int | None) -> SyncReport | None:
        self.discard()
        watch = Watch()
        for attempt in range(_REPLANS):
            with watch.stage("plan"):
                snapshot, goal = self._choose_version(version)
                if goal == self._current:
                    self._unfinished = None
                    self._tell_version()
                    return None
                steps = self._route(snapshot, goal)
            try:
                return self._stage(snapshot, goal, steps, watch)
            except NotFound:  # what was planned with went away meanwhile: plan anew
                if attempt + 1 == _REPLANS:
                    raise
                self._snapshot = None
            except SparserlError as error:
                if not isinstance(error, StoreError):  # perhaps something else wrote to a target: its bits tell
                    self._is_uncertain = True
                raise
        raise AssertionError("unreachable")

    def _choose_version(self, version: int | None) -> tuple[StoreSnapshot, RunVersion]:
        """What the store has, and the version of it to go to: the newest, or a given one."""
        self._audit_if_due()
        snapshot = self._read_store(version)
        head = snapshot.head
        number = head.version if version is None else version
        digests = routes.versions(snapshot.index.steps)
        if number not in digests:
            raise NotRetained(f"version {number} is not in the store; it has {routes.span(snapshot.index.steps)}")
        return snapshot, RunVersion(head.run, head.created, number, digests[number])

    def sync(self, version: int | None = None) -> SyncReport | None:
        """Stage a version and commit it.

        Args:
            version: Which version, older or newer; None for the newest.

        Returns:
            What was committed; None if the version is held already.

        Raises:
            CommitFailed: A target failed; all hold what they held before.
            SparserlError: The version could not be staged; see `stage`.
        """
        with self._turn:
            return None if self.stage(version) is None else self.commit()

    def goto(self, version: int) -> SyncReport | None:
        """Hold a given version, older or newer, as long as the store has it."""
        return self.sync(version)

    def follow(
        self,
        *,
        once: bool = False,
        every: int | None = None,
        pin: str | None = None,
        timeout: float | None = None,
        stop: Callable[[], bool] | None = None,
        on_commit: Callable[[SyncReport], None] | None = None,
        on_trouble: Callable[[SparserlError], None] | None = None,
    ) -> None:
        """Commit every version as it comes.

        A store that cannot be reached, or has no run yet, is waited for, which is logged. So is, once the store was
        read, what the next look at it may mend: a full disk (`CheckpointError`), a commit that was undone, a head, an
        object or weights that are not what they should be (`FormatError`, `Untrusted`, `WrongBase`). A version that is
        still being fetched when time is up, or another thread calls `close`, is given up: the weights stay as they are.

        Args:
            once: Whether to stop at the newest version; nothing is waited for then.
            every: Commit only versions that this number divides, one after the other, as far as the store has them;
                targets that hold no version begin with the newest. None to go to the newest version each time.
            pin: The name of a pin, which is moved to each version that is committed and so unpins the last one. When
                following ends, it stays. One that cannot be written is logged.
            timeout: How many seconds to follow; None for no limit. Targets that hold no version by then are an error.
            stop: Called now and then; following ends when it returns true.
            on_commit: Called with the report of every commit.
            on_trouble: Called with every error that is waited for.

        Raises:
            Unavailable: Time is up, and no version could be fetched.
            SparserlError: What is not waited for.
        """
        is_over = self._is_over(stop)
        require_count("every", 1 if every is None else every)
        require_number("timeout", 0 if timeout is None else timeout, 0)
        own_pin = OwnPin(self.store, pin, self._trusted_keys)
        trouble = TroubleLog(self.store.url)
        awaited_head = None
        known = self._snapshot
        with within(timeout) as deadline, self._ahead.running(self._coming_buckets):
            while True:
                report = staged = None
                try:
                    with self._turn:
                        if is_over():
                            return
                        if self._snapshot is known:  # else another thread has looked at the store meanwhile
                            self._awaited_head = awaited_head
                        with within(stop=is_over) as staging:  # a commit, and telling the store of it, is not cut off
                            staged = self.stage() if every is None else self._stage_multiple(every, once)
                        report = None if staged is None else self.commit()
                        own_pin.move(self._current)
                except SparserlError as error:
                    if once or not may_pass(error, self._newest_head is not None, staged is not None):
                        raise
                    self._is_store_empty = isinstance(error, NotFound)
                    trouble.failed(error, in_time=not staging.over)
                    if on_trouble is not None and not staging.over:
                        on_trouble(error)
                else:
                    trouble.over()
                if report is not None and on_commit is not None:
                    on_commit(report)
                if deadline.over and not self._has_held_a_version():
                    reason = trouble.last_error or "the first version was still being fetched"
                    raise Unavailable(f"{self.store.url}: no version within {timeout:g} s: {reason}")
                if (once and (every is None or report is None)) or deadline.over:
                    return
                with within(stop=is_over):
                    current().sleep(trouble.pause)
                    known = self._snapshot
                    patience = 30.0 if stop is None and not trouble.reason else 1.0  # trouble can end with the old head
                    if every is not None and report is not None:
                        patience = 0.0  # the next multiple may be there already
                    awaited_head = self._wait_for_change(min(patience, deadline.left))

    def _stage_multiple(self, every: int, once: bool) -> SyncReport | None:
        """Stage the next version that a number divides; None if there is none. With `once`, one must be held then."""
        snapshot = self._read_store(None)
        head = snapshot.head
        start = self._start_in(head.run)
        refused: NotRetained | None = None
        for number, digest in routes.next_multiples(steps := snapshot.index.steps, start, every):
            try:
                self._route(snapshot, RunVersion(head.run, head.created, number, digest))
                return self.stage(number)
            except NotRetained as error:  # not for this receiver, or just removed
                refused = error if error.is_refused else refused
        if refused is None and once and start is None:
            refused = NotRetained(f"{self.store.url}: no version is a multiple of {every}: it has {routes.span(steps)}")
        if refused is not None:
            with self._callbacks.failures("stage"):
                raise refused
        self._tell_version()
        return None

    def _has_held_a_version(self) -> bool:
        """Whether the targets hold a version, or have held one before this process or a new run began."""
        return bool(self._commits) or self._current is not None or any(t.remembered_version() for t in self.targets)

    def _disconnect(self) -> None:
        self._unfinished = None
        if self._served is not None:
            self._served.close()
        self.store.close()

    async def stage_async(self, version: int | None = None) -> SyncReport | None:
        """`stage` on a thread."""
        return await asyncio.to_thread(self.stage, version)

    async def sync_async(self, version: int | None = None) -> SyncReport | None:
        """`sync` on a thread."""
        return await asyncio.to_thread(self.sync, version)

    def _read_store(self, version: int | None) -> StoreSnapshot:
        """Read the head, and what it leads to if it moved; `version` is the one to go to, None for the newest."""
        awaited_head = self._awaited_head
        self._awaited_head = None
        head, tag = read_head(self.store, self._trusted_keys, awaited_head)
        if (last := self._snapshot) is not None and head == last.head:
            if self._is_uncertain:
                self._identify(last, head.version if version is None else version)
            return last
        seen = [place for target in self.targets if (place := target.remembered_version()) is not None]
        require_newer(head, self._newest_head, seen, self._pinned_run, is_signed=self._trusted_keys is not None)
        snapshot = read_snapshot(self.store, head, tag, None if last is None else last.run)
        newest = self._newest_head
        if newest is not None and newest.run != head.run:
            log.warning("%s: run %s has replaced run %s", self.store.url, head.run, newest.run)
        if newest is None or newest.run != head.run or self._is_uncertain:
            self._identify(snapshot, head.version if version is None else version)
        self._snapshot = snapshot
        self._newest_head = head
        return snapshot

    def _run_at(self, snapshot: StoreSnapshot, version: int) -> RunRecord:
        """The run, with the tensor table of a version."""
        return run_at(self.store, snapshot.run, snapshot.index, version)

    def _accept_tensors(self, table: TensorTable) -> None:
        """Have the targets accept the tensors of a version that is about to be staged, if they are others."""
        held = self._table
        if held is None or (held is not table and held.specs != table.specs):
            self._accept_layout(table)
            self._table = held or table  # they hold the others until the commit

    def _accept_layout(self, table: TensorTable) -> None:
        """Have the targets accept the tensors of a version; one that cannot take them refuses, and names them."""
        self._digest_targets(table)

    def _identify(self, snapshot: StoreSnapshot, version: int) -> None:
        """Find out which version of the run the targets hold, by their bits, where they have the tensors of one."""
        run = self._run_at(snapshot, version)
        bits = self._digest_targets(run.layout)
        versions = [version for version, digest in routes.versions(snapshot.index.steps).items() if digest == bits]
        held = None
        if bits is not None and versions:
            held = RunVersion(run.run, run.created, likely_version(self.targets, run.run, versions), bits)
        self._holds(held)

    def _route(self, snapshot: StoreSnapshot, goal: RunVersion) -> list[RouteStep]:
        """The steps that lead from the current version to another."""
        parts = self._holding.name(self._table)
        try:
            return routes.route(snapshot.index.steps, self._start_in(goal.run), goal.version, self._profiles(), parts)
        except NotRetained:
            self._tell_version()  # and so the publisher, which keeps to what can be taken
            raise

    def _start_in(self, run: str) -> tuple[int, Digest] | None:
        """The version of a run that is held, and its digest; None for none."""
        current = self._current
        return (current.version, current.digest) if current is not None and current.run == run else None

    def _stage(self, snapshot: StoreSnapshot, goal: RunVersion, steps: list[RouteStep], watch: Watch) -> SyncReport:
        run = self._run_at(snapshot, goal.version)
        self._accept_tensors(run.layout)
        is_anchor = bool(steps) and steps[0].base is None
        keeps_files = any(target.keeps_files for target in self.targets)
        has_files = keeps_files and (is_anchor or files_change(snapshot, self._current, goal))
        files = StoredFiles(self.store, snapshot.index.files_of(goal.version, run)) if has_files else None
        with watch.stage("fetch"):
            fetch = transfer.Fetch(
                self.store,
                run.run,
                [(step, run.layout) for step in steps],
                self._progress,
                begun=self._unfinished,
                holding=self._holding.name(self._table),
                ahead=self._ahead,
            )

        def prepare() -> list[Prepared]:
            patches = [] if is_anchor else fetch.patches
            change = Change(run.run, run.created, goal.version, goal.digest, patches, files=files)
            return self.prepare(self.with_fresh(change, fetch.arriving) if is_anchor else change)

        prepared = self._prepare_arriving(fetch, prepare, watch)
        report = SyncReport(
            run=run.run,
            version=goal.version,
            digest=goal.digest.hex,
            kind="anchor" if is_anchor else "patch" if steps else "none",
            changed=max((target.changed for target in prepared), default=0),
            elements=run.layout.elements,
            bytes=fetch.size,
            dense_bytes=run.layout.dense_bytes,
            seconds=watch.seconds,
            behind=self._versions_behind(snapshot),
            profile="" if is_anchor else "+".join(sorted({name for step in steps for name in step.profiles})),
        )
        self._staged = StagedVersion(goal, self._current, prepared, report)
        return report

    def _prepare_arriving(
        self, fetch: transfer.Fetch, prepare: Callable[[], list[Prepared]], watch: Watch
    ) -> list[Prepared]:
        """Get all targets ready while buckets are fetched; if that fails, what has arrived is kept for next time."""
        self._unfinished = fetch
        arrival = Arrival(fetch.arriving, prepare)
        try:
            with watch.stage("fetch"):
                fetch.fetch_into(arrival)
                self._ahead.clear()
            with watch.stage("stage"):
                prepared = arrival.finish()
        except BaseException:
            if arrival.failure is not None and not isinstance(arrival.failure, StoreError):
                self._unfinished = None  # what has arrived cannot be used
            for every in arrival.stop():
                for target in every:
                    target.discard()
            raise
        self._unfinished = None
        return prepared

    def _coming_buckets(self, coming: Manifest) -> tuple[Blob, ...]:
        """The buckets that are needed of a patch that may become the next version."""
        current = self._current
        is_first = self._is_store_empty and self._snapshot is None and coming.base == NOTHING
        is_next = current is not None and (coming.run, coming.base) == (current.run, current.digest)
        return coming.for_holding(self._holding.name(self._table)) if is_first or is_next else ()

    def _versions_behind(self, snapshot: StoreSnapshot) -> int | None:
        """How many versions the targets are behind the newest one; None if they hold none of the run."""
        current = self._current
        return None if current is None or current.run != snapshot.head.run else snapshot.head.version - current.version

    def _finish(self, staged: StagedVersion) -> None:
        super()._finish(staged)
        if self._snapshot is not None:
            self._table = self._run_at(self._snapshot, staged.run_version.version).layout
        self._tell_version()

    def _tell_version(self) -> None:
        """Tell the store and the neighbours which version is held, and the store what can be taken."""
        snapshot = self._snapshot
        if snapshot is None:
            return
        start = self._start_in(snapshot.run.run)
        holding = self._holding.record(self._table)
        self._lease.renew(snapshot.run.run, start and start[0], self._profiles(), holding)
        if self._served is not None and self._versions_behind(snapshot) == 0:
            self._served.show(snapshot.tag)

    def _wait_for_change(self, seconds: float) -> StoredObject | None:
        """Wait for another head, for so long; None if there is none."""
        try:
            return self.store.changed(HEAD, None if self._snapshot is None else self._snapshot.tag, seconds)
        except SparserlError:  # staging says what is wrong
            current().sleep(1.0)
            return None
