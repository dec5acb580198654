"""The trainer's side: every publish makes one more version, which is seen when the head moves and not before.

    find changes ──► encode ──► buckets ──► manifest ──► index ──► head, if it is still ours ──► baseline
    └─ captured: the trainer may go on                              └─ committed

A publish that fails anywhere before the head moved has changed nothing: the baseline is still the committed one, and
the next publish finds the changes against it again.
"""

from __future__ import annotations

import functools
import json
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ... import plan
from ...errors import Fenced, FormatError, NotFound, SessionError, SparserlError, StoreError
from ...parallel import Progress
from ...patch import Captured, Patch
from ...sources import Source
from ...sources.modules import weights_of
from ...transport.groups.gather import Ranks
from ...transport.stores.base import Store
from ...transport.stores.opening import open_store
from ...weights.local import LocalWeights
from ...weights.memory import Weights
from ...weights.shards import Shards, dump_places, load_places, require_whole
from ...weights.table import TensorTable
from ..background import Flight
from ..baseline import Baseline, Found, HostBaseline, choose
from ..callbacks import Callback, Callbacks
from ..report import SyncReport, Watch
from . import routes, side_files, signing, transfer
from .head import OwnHead, Steps
from .ladder import Ladder
from .records import MOST_HEAD, Head, Index, Lease, Run, Step, checked_clock, path, run_path
from .resume import KeptAnchor
from .retention import collect
from .writers import Writers

_STEPS = 256  # there are at most so many steps before another anchor is written
_MOST_STEPS = 1024  # that an index keeps for the sake of subscribers that are far behind
_WORTH = 0.9  # a squashed patch is kept if it takes less than this share of the patches it stands for


@dataclass(frozen=True)
class _Committed:
    """Where the run stands: what receivers can have, and its bits here."""

    run: Run
    head: Head
    index: Index
    baseline: Baseline


class Publisher:
    """Publishes the versions of one run. One at a time may write to a store: a second one fences the first off.

    Several threads may call it: their calls take turns.

    >>> import numpy as np, sparserl, tempfile
    >>> weights = {"w": np.zeros(1000, np.float32)}
    >>> publisher = sparserl.Publisher(f"file://{tempfile.mkdtemp()}", weights)
    >>> publisher.publish().kind
    'anchor'
    >>> weights["w"][7] = 1
    >>> report = publisher.publish()
    >>> (report.version, report.changed)
    (1, 1)

    url: where to publish to; see `sparserl.transport.stores.base`. Or a store that is open already.
    source: the weights, which may change between calls: a mapping from names to tensors or arrays, or what
        `sparserl.sources.module` makes of a torch module.
    key: a secret Ed25519 key (see `sparserl keygen`); heads are signed with it.
    files: what travels with the weights (config, tokenizer): names and contents, or a folder.
    state: a folder on this machine that survives a restart. With it, a publisher that was killed goes on with its run:
        its baseline is the anchor it keeps there and the patches since. Without it, or when it does not fit what the
        store has, a new run begins. One publisher at a time has the folder; a second one is refused.
    anchor_after: an anchor is written when the patches since the last one add up to this many times its bytes.
    keep_anchors: how many of them stay.
    ladder: squashed patches are written over so many versions, twice as many and so on, from the first number up to the
        second, where they take less than the patches they stand for. Late subscribers take them. None for none.
    grace: seconds that objects stay after nothing refers to them any more.
    writers: the process group of a sharded trainer, each rank of which has a publisher with the `Shards` it holds. All
        call `publish` in step; each uploads its own buckets, and rank 0 moves the head when all are there.
    timeout: seconds that writers wait for one another. A process that was stopped or killed is noticed within 30.
    baseline: where the bits of the last version are kept, to find changes against: `host`; `device`, which is where the
        weights are, so that changes of weights on a GPU are found and coded there; or `none` for a source that tracks
        changes itself (see `sparserl.sources.track`), at the price of one read of all weights per publish and of the
        profiles `ulp` and `ctx`. `auto` takes `host` if `memory` has room for it.
    memory: bytes that a baseline may take in this process.
    callbacks: are told what was published, and what went wrong; see `sparserl.metrics`.
    process_group: instead of a url, a process group that the subscribers are ranks of: what is made then is a
        `CollectivePublisher`, with options of its own.
    """

    def __new__(cls, url: str | Store | None = None, *_: Any, process_group: Any = None, **options: Any) -> Any:
        if process_group is None:
            return super().__new__(cls)
        if url is not None:
            raise SessionError("publish to a store or to a process group; a Relay hands on what is in a store")
        from ..group.publisher import CollectivePublisher

        return CollectivePublisher(process_group=process_group, **options)

    def __init__(
        self,
        url: str | Store,
        source: Source | Weights | Shards,
        *,
        key: str | None = None,
        files: Mapping[str, bytes] | str | Path | None = None,
        state: str | Path | None = None,
        profile: str = "auto",
        link: str | None = None,
        anchor_after: float = 1.0,
        keep_anchors: int = 2,
        ladder: tuple[int, int] | None = (8, 64),
        grace: float = 600.0,
        lease: float = 120.0,
        threads: int | None = None,
        progress: Progress | None = None,
        writers: Any = None,
        timeout: float = 600.0,
        baseline: str = "auto",
        memory: int | None = None,
        callbacks: Sequence[Callback] = (),
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.store = open_store(url) if isinstance(url, str) else url
        if not self.store.writable:
            raise SessionError(f"{self.store.url} can only be read; publish to a folder or an object store")
        plan.candidates(profile)  # raises here, not in the middle of a publish
        if key is not None:
            signing.public_key(key)
        self._source, self._key, self._clock = source, key, checked_clock(clock)
        self._profile, self._link, self._threads, self._progress = profile, link, threads, progress
        self._anchor_after, self._keep, self._grace, self._lease = anchor_after, max(1, keep_anchors), grace, lease
        self._files = side_files.contents_of(files)
        self._turn = threading.RLock()  # of the thread whose call is at work
        self._flight = Flight()
        self._writers = Writers(None if writers is None else Ranks(writers, timeout))
        self._kind, self._memory = baseline, memory
        self._callbacks = Callbacks(callbacks)
        self._callbacks.hear_retries(self.store)
        self.baseline = ""  # where the bits of the last version are kept, in words
        if self._writers.size > 1:
            if state is not None:
                raise SessionError("several writers keep no state: after a restart they begin a new run")
            ladder = None  # `sparserl squash` makes squashed patches of what several writers publish
        self._now: _Committed | None = None
        self._ladder = None if ladder is None else Ladder(*ladder)
        self._notes: list[str] = []
        self._kept = None if state is None else KeptAnchor(Path(state), self.store.url)
        self._head = OwnHead(self.store, key, self._writers, self._clock)
        if self._kept is not None and (head := self._head.found) is not None:
            found = self._kept.resumed(self.store, head, threads)
            if found is not None:
                bits, self.baseline = choose(
                    found.weights,
                    memory,
                    baseline,
                    tracked=hasattr(source, "committed"),
                    threads=threads,
                    own=head.digest,
                )
                self._now = _Committed(found.run, head, found.index, bits)

    @property
    def run(self) -> str | None:
        """The id of the run; None before its first version."""
        return None if self._now is None else self._now.run.run

    @property
    def version(self) -> int | None:
        """The newest committed version; None before the first."""
        return None if self._now is None else self._now.head.version

    def publish(self, wait: bool = True, step: int | None = None) -> SyncReport | None:
        """Publish the weights as they are now, as the next version.

        With `wait=False`, returns None as soon as the changes are captured: the trainer may go on while they are
        encoded and sent. The next call, or `settle`, waits for that and raises what went wrong with it.

        step: for several writers, which must publish the weights of one training step: which one that is. Ranks that
            name different ones are refused.
        """
        with self._turn:
            return self._publish(wait, step)

    def _publish(self, wait: bool, step: int | None) -> SyncReport | None:
        self.settle()
        watch = Watch()
        with self._callbacks.failures("publish"), self._writers.call():
            self._head.resolve()
            self._meet(step)
            work = self._captured(watch)
            if wait:
                return self._told(work())

        def rest() -> SyncReport:
            with self._callbacks.failures("publish"), self._writers.call(begin=False):
                return self._told(work())

        self._flight.launch(rest)
        return None

    def _told(self, report: SyncReport) -> SyncReport:
        self._callbacks.published(report)
        return report

    def _meet(self, step: int | None) -> None:
        """All ranks must be at one step, and start from one version; if one has lost its baseline, a new run begins."""
        mine = json.dumps([step, None if self._now is None else self._now.head.nonce]).encode()
        steps, nonces = zip(*map(json.loads, self._writers.together("meet", lambda: mine)), strict=True)
        if len(set(steps)) > 1:
            raise SessionError(f"the ranks are not at one step: {list(steps)}")
        if len(set(nonces)) > 1:
            self._now = None

    def _captured(self, watch: Watch) -> Callable[[], SyncReport]:
        """All that the publish needs of the weights, which may change from now on; what is left to do."""
        work: list[Callable[[], SyncReport]] = []

        def first(kind: str) -> bytes:
            weights = weights_of(self._source)
            with watch.stage("capture"):
                baseline, self.baseline = choose(
                    weights, self._memory, kind, tracked=hasattr(self._source, "committed"), threads=self._threads
                )
            anchor = self._anchor(weights, watch) if baseline.weights is None else None
            work[:] = [functools.partial(self._first, LocalWeights.of(weights), baseline, anchor, watch)]
            return b"none" if baseline.weights is None else b"host"

        def following(now: _Committed) -> bytes:
            weights = weights_of(self._source)
            with watch.stage("find"):
                found = now.baseline.capture(
                    weights, profile=self._profile, threads=self._threads, progress=self._progress
                )
            due = now.baseline.weights is None and self._anchor_due(now)
            anchor = self._anchor(weights, watch) if due else None
            work[:] = [functools.partial(self._next, now, found, anchor, watch)]
            return b""

        now = self._now
        if now is None:
            kinds = self._writers.together("capture", lambda: first(self._kind))
            if len(set(kinds)) > 1:  # one has no room for a baseline: then none has one, so that all do the same
                self._writers.together("capture", lambda: first("none"))
        else:
            self._writers.together("capture", lambda: following(now))
        return work[0]

    def _anchor(self, weights: Weights | Shards, watch: Watch) -> Patch:
        with watch.stage("encode"):
            return transfer.anchor_of(weights, self._threads)

    def settle(self) -> SyncReport | None:
        """Wait for a publish that is in flight; returns its report, or raises what went wrong with it."""
        with self._turn:
            return self._flight.settle()

    def wait(self, version: int, subscribers: int, timeout: float = 600.0) -> int:
        """Wait until so many subscribers hold a version or a later one, or time is up; returns how many do."""
        end = time.monotonic() + timeout
        while True:
            holders = sum(lease.version >= version for lease in self._leases())
            if holders >= subscribers or time.monotonic() >= end:
                return holders
            time.sleep(min(0.1, max(0.0, end - time.monotonic())))

    def close(self) -> None:
        """Wait for what is in flight, and let go of the store."""
        try:
            self.settle()
        finally:
            self._writers.close()
            self.store.close()
            if self._kept is not None:
                self._kept.close()
            if self._ladder is not None:
                self._ladder.clear()

    def __enter__(self) -> Publisher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- versions ------------------------------------------------------------------------------------------------------

    def _first(self, held: LocalWeights, baseline: Baseline, anchor: Patch | None, watch: Watch) -> SyncReport:
        """The first version of a new run: an anchor."""
        run = self._writers.lead(
            "begin", lambda: self._begin(held.table), Run.to_bytes, lambda data: Run.parse(data, "the run")
        )
        self._require_whole(held, run.table)

        def encoded() -> Patch:
            nonlocal anchor
            anchor = anchor or self._anchor(baseline.weights, watch)
            if isinstance(baseline, HostBaseline):
                baseline.know(anchor.result)
            return anchor

        sent = self._send(run, encoded, watch)
        step = sent.step(None, 0, self._clock())
        if self._ladder is not None:
            self._ladder.clear()
        if (kept := self._kept) is not None:  # before the head moves: whoever is killed after that goes on from here
            self._quietly(lambda: kept.keep(encoded(), run.run, 0))
        with watch.stage("commit"):
            done = self._commit(run, step, lambda _steps: (step,), baseline, self._begun)
        if kept is not None and kept.run == run.run:
            self._quietly(kept.settle)
        notes = self._maintain(done, watch, anchor)
        return _reported(done, "anchor", sent, watch, notes)

    def _next(self, now: _Committed, found: Found, anchor: Patch | None, watch: Watch) -> SyncReport:
        patch: Patch | None = None

        def encoded() -> Patch:
            nonlocal patch
            with watch.stage("encode"):
                patch = found.encode(link=self._link, threads=self._threads)
            return patch

        sent = self._send(now.run, encoded, watch)
        if sent.manifest.base != now.head.digest:
            self._now = None
            raise SessionError("the baseline is not the last version any more; the next publish begins a new run")
        step = sent.step(now.head.version, now.head.version + 1, self._clock())

        def land(done: _Committed) -> None:
            assert patch is not None
            with watch.stage("baseline"):
                self._climb(step.version, found)
                now.baseline.advance(patch, found, self._threads)
            self._begun(done)

        with watch.stage("commit"):
            done = self._commit(now.run, step, functools.partial(_with, step), now.baseline, land)
        notes = self._maintain(done, watch, anchor)
        return _reported(done, "patch", sent, watch, notes)

    def _begin(self, table: TensorTable) -> Run:
        """A new run, with all that its versions have in common in the store."""
        run = Run(secrets.token_hex(8), max(self._clock(), self._head.after), table)
        run = replace(run, files=side_files.upload(self.store, run.run, self._files))
        self.store.put(run_path(run.run), run.to_bytes())
        return run

    def _begun(self, done: _Committed) -> None:
        """A version is committed: changes count from here."""
        self._now = done
        if (committed := getattr(self._source, "committed", None)) is not None:
            committed()

    def _require_whole(self, held: LocalWeights, table: TensorTable) -> None:
        """All ranks must have the same tensor table, and every element of it must come from just one of them."""

        def own() -> bytes:
            table.require(held.table, "rank 0", f"rank {self._writers.rank}")
            return json.dumps(dump_places(held.places)).encode()

        rows = self._writers.together("compare parts", own)
        require_whole(table, [load_places(json.loads(row)) for row in rows])

    def _send(self, run: Run, make: Callable[[], Patch], watch: Watch) -> transfer.Sent:
        """Every rank encodes and uploads what it has; when all of it is there, the manifest is written."""
        place = self._writers.lead("find a place", lambda: secrets.token_hex(8), str.encode, bytes.decode)

        def own() -> bytes:
            patch = make()
            with watch.stage("upload"):
                return transfer.upload(self.store, run.run, place, patch, self._progress).to_bytes()

        shares = [transfer.Sent.parse(share) for share in self._writers.together("upload", own)]
        sent = transfer.joined(run.table, shares)
        with watch.stage("upload"):
            self._writers.lead("write down", lambda: transfer.put_manifest(self.store, sent), _nothing, _nothing)
        return sent

    def _commit(
        self,
        run: Run,
        step: Step,
        steps: Callable[[Steps], Steps],
        baseline: Baseline,
        land: Callable[[_Committed], None],
    ) -> _Committed:
        """Move the head to the version that a step leads to; `land` is called when it has moved."""
        done: list[_Committed] = []

        def moved(head: Head, index: Index) -> None:
            done.append(_Committed(run, head, index, baseline))
            self._now = None  # were this interrupted, a new run would begin: no version is ever published twice
            land(done[0])

        now = self._now
        known, ours = ((), None) if now is None else (now.index.steps, now.head)
        self._head.move(run, step.version, step.digest, steps, known, ours, moved)
        return done[0]

    # -- upkeep --------------------------------------------------------------------------------------------------------

    def _leases(self) -> list[Lease]:
        out: list[Lease] = []
        for item in self.store.list(path(self.run, "leases", "")) if self.run is not None else ():
            try:
                out.append(Lease.parse(self.store.get(item.name, MOST_HEAD).data, item.name))
            except (NotFound, FormatError):
                continue
        return out

    def _maintain(self, now: _Committed, watch: Watch, anchor: Patch | None = None) -> tuple[str, ...]:
        """Squashed patches, anchors, retention, the anchor kept here."""
        with watch.stage("upkeep"):
            self._quietly(lambda: self._squash_if_due(self._now or now))
            self._quietly(lambda: self._anchor_if_due(anchor, self._now or now))
            self._quietly(lambda: self._keep_if_new(anchor, self._now or now))
        notes, self._notes = self._notes, []
        return tuple(notes)

    def _quietly(self, work: Callable[[], None]) -> None:
        """Do what a version does not depend on: a failure is told, and it is tried again next time."""
        try:
            work()
        except Fenced:
            raise
        except (StoreError, FormatError, SessionError, OSError) as error:
            self._notes.append(f"upkeep failed, and will be tried again: {error}")

    def _climb(self, version: int, found: Found) -> None:
        """One more version for the ladder; where that fails, late subscribers take longer, and nothing else."""
        if self._ladder is None or not isinstance(found, Captured):  # without a baseline there is no way back
            return
        try:
            self._ladder.add(version, found, self._threads)
        except (OSError, SparserlError) as error:
            self._notes.append(f"no squashed patches for a while: {error}")

    def _squash_if_due(self, now: _Committed) -> None:
        """A squashed patch for each rung of the ladder that ends here, where it takes less than what it stands for."""
        weights = now.baseline.weights
        if self._ladder is None or weights is None:
            return
        for base, patch in self._ladder.rungs(now.head.version, weights, self._threads):
            size = sum(len(patch.bucket(i)) for i in range(patch.buckets))
            here = routes.route(now.index.steps, (base, patch.base), now.head.version)
            if any(step.base is None for step in here) or size > _WORTH * sum(step.bytes for step in here):
                continue
            step = transfer.send(self.store, now.run.run, patch, self._progress).step(
                base, now.head.version, self._clock()
            )
            now = self._commit(now.run, step, functools.partial(_with, step), now.baseline, self._set)

    def _set(self, done: _Committed) -> None:
        self._now = done

    def _anchor_due(self, now: _Committed) -> bool:
        """Whether the patches since the last anchor have become as large as an anchor, or very many."""
        last = max((s for s in now.index.steps if s.base is None), key=lambda s: s.version)
        since = [s for s in now.index.steps if s.base is not None and last.version <= s.base]
        written = sum(s.bytes for s in since if s.base == s.version - 1)
        return written >= self._anchor_after * max(1, last.bytes) or len(since) >= _STEPS - 1

    def _anchor_if_due(self, anchor: Patch | None, now: _Committed) -> None:
        """Write an anchor if one is due; what is too old then goes."""
        weights = now.baseline.weights
        if not self._anchor_due(now) or (weights is None and anchor is None):
            if len(now.index.steps) == 1:
                self._collect()  # what earlier runs left
            return
        made: list[Patch] = []

        def encoded() -> Patch:
            made.append(anchor or transfer.anchor_of(weights, self._threads))
            return made[0]

        step = self._send(now.run, encoded, Watch()).step(None, now.head.version, self._clock())

        def kept(known: Steps) -> Steps:
            live = [lease.version for lease in self._leases() if self._clock() - lease.time < self._lease]
            return routes.retained((*known, step), self._keep, live, _MOST_STEPS)

        done = self._commit(now.run, step, kept, now.baseline, self._set)
        if self._kept is not None:
            self._kept.keep(made[0], done.run.run, done.head.version)
            self._kept.settle()
        self._collect()

    def _keep_if_new(self, anchor: Patch | None, now: _Committed) -> None:
        """Keep an anchor of a run here, for a restart, where that could not be done before its first version."""
        if self._kept is None or self._kept.run == now.run.run:
            return
        if anchor is None and now.baseline.weights is not None:
            anchor = transfer.anchor_of(now.baseline.weights, self._threads)
        if anchor is not None:
            self._kept.keep(anchor, now.run.run, now.head.version)
            self._kept.settle()

    def _collect(self) -> None:
        """Remove what nothing refers to any more."""
        if self._writers.rank == 0:
            collect(self.store, self._grace, self._clock)


def _reported(now: _Committed, kind: str, sent: transfer.Sent, watch: Watch, notes: tuple[str, ...] = ()) -> SyncReport:
    table, changed = now.run.table, sent.manifest.changed
    ends = now.run.run, now.head.version, now.head.digest.hex
    return SyncReport(*ends, kind, changed, table.elements, sent.written, table.dense_bytes, watch.seconds, notes)


def _nothing(_: object) -> bytes:
    return b""


def _with(step: Step, steps: Steps) -> Steps:
    return (*steps, step)
