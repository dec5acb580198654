"""The trainer's side: every publish makes one more version, which is seen when the head moves and not before.

    find changes ──► encode ──► buckets ──► manifest ──► index ──► head, if it is still ours ──► baseline
    └─ captured: the trainer may go on                              └─ committed

A publish that fails anywhere before the head moved has changed nothing: the baseline is still the committed one, and
the next publish finds the changes against it again.
"""

from __future__ import annotations

import functools
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from .. import plan
from ..bits import Bits
from ..digest import Digest
from ..errors import (
    Fenced,
    FormatError,
    NotFound,
    NotRetained,
    Refused,
    SessionError,
    SparserlError,
    StoreError,
    Unavailable,
    Untrusted,
)
from ..files import replacing
from ..memory import Weights, memories, require_like, table_of
from ..parallel import Progress
from ..patch import Captured, Patch, capture
from ..sources import Source
from ..transport.store import Store, open_store
from . import chain, parcel, signing
from .flight import Flight
from .ladder import Ladder
from .records import (
    HEAD,
    MOST_HEAD,
    Blob,
    Head,
    Index,
    Lease,
    Run,
    Step,
    file_name,
    path,
    require_files,
    run_path,
    sha256,
)
from .report import SyncReport, Watch
from .squashing import step_of
from .upkeep import collect, read_index, read_run

Steps = tuple[Step, ...]

_SWAPS = 8  # attempts at a head whose replies are lost
_STEPS = 256  # an index does not grow past so many steps before an anchor is written
_WORTH = 0.9  # a squashed patch is kept if it takes less than this share of the patches it stands for


class _Late(Unavailable):
    """A swap of ours that was given up worked after all."""


@dataclass(frozen=True)
class _Committed:
    """Where the run stands: what receivers can have, and its bits here."""

    run: Run
    head: Head
    index: Index
    baseline: dict[str, Bits]


class Publisher:
    """Publishes the versions of one run. One at a time may write to a store: a second one fences the first off.

    >>> import numpy as np, sparserl, tempfile
    >>> weights = {"w": np.zeros(1000, np.float32)}
    >>> publisher = sparserl.Publisher(f"file://{tempfile.mkdtemp()}", weights)
    >>> publisher.publish().kind
    'anchor'
    >>> weights["w"][7] = 1
    >>> report = publisher.publish()
    >>> (report.version, report.changed)
    (1, 1)

    url: where to publish to; see `sparserl.transport.store`. Or a store that is open already.
    source: the weights, which may change between calls: a mapping from names to tensors or arrays, or what
        `sparserl.sources.module` makes of a torch module.
    key: a secret Ed25519 key (see `sparserl keygen`); heads are signed with it.
    files: what travels with the weights (config, tokenizer): names and contents, or a folder.
    state: a folder on this machine that survives a restart. With it, a publisher that was killed goes on with its run:
        its baseline is the anchor it keeps there and the patches since. Without it, or when it does not fit what the
        store has, a new run begins.
    anchor_after: an anchor is written when the patches since the last one add up to this many times its bytes.
    keep_anchors: how many of them stay.
    ladder: squashed patches are written over so many versions, twice as many and so on, from the first number up to the
        second, where they take less than the patches they stand for. Late subscribers take them. None for none.
    grace: seconds that objects stay after nothing refers to them any more.
    """

    def __init__(
        self,
        url: str | Store,
        source: Source | Weights,
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
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.store = open_store(url) if isinstance(url, str) else url
        if not self.store.writable:
            raise SessionError(f"{self.store.url} can only be read; publish to a folder or an object store")
        plan.candidates(profile)  # raises here, not in the middle of a publish
        if key is not None:
            signing.public_key(key)
        self._source, self._key, self._clock = source, key, clock
        self._profile, self._link, self._threads, self._progress = profile, link, threads, progress
        self._anchor_after, self._keep, self._grace, self._lease = anchor_after, max(1, keep_anchors), grace, lease
        self._files = _contents(files)
        self._state = None if state is None else Path(state)
        self._flight = Flight()
        self._now: _Committed | None = None
        self._unsure: tuple[str, Callable[[], None]] | None = None  # a swap that nobody answered, and what it is to do
        self._ladder = None if ladder is None else Ladder(*ladder)
        self._notes: list[str] = []
        self._kept: str | None = None  # the run of the anchor that is kept here
        head, self._tag = self._there(0)
        self._after = 0.0 if head is None else head.created + 0.001  # a later run says so, whatever the clock
        if self._state is not None and head is not None:
            self._now = self._resumed(self._state, head)

    @property
    def run(self) -> str | None:
        """The id of the run; None before its first version."""
        return None if self._now is None else self._now.run.run

    @property
    def version(self) -> int | None:
        """The newest committed version; None before the first."""
        return None if self._now is None else self._now.head.version

    def publish(self, wait: bool = True) -> SyncReport | None:
        """Publish the weights as they are now, as the next version.

        With `wait=False`, returns None as soon as the changes are captured: the trainer may go on while they are
        encoded and sent. The next call, or `settle`, waits for that and raises what went wrong with it.
        """
        self.settle()
        self._resolve()
        weights = self._source.weights() if isinstance(self._source, Source) else self._source
        watch = Watch()
        work: Callable[[], SyncReport]
        if (now := self._now) is None:
            with watch.stage("capture"):
                copy = parcel.copied(weights)
            work = functools.partial(self._first, copy, watch)
        else:
            require_like(now.run.table, memories(weights), "the run", "the weights")
            with watch.stage("find"):
                found = capture(
                    now.baseline,
                    weights,
                    profile=self._profile,
                    base_digest=now.head.digest,
                    threads=self._threads,
                    progress=self._progress,
                )
            work = functools.partial(self._next, now, found, watch)
        if wait:
            return work()
        self._flight.launch(work)
        return None

    def settle(self) -> SyncReport | None:
        """Wait for a publish that is in flight; returns its report, or raises what went wrong with it."""
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
            self.store.close()

    def __enter__(self) -> Publisher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- versions ------------------------------------------------------------------------------------------------------

    def _first(self, weights: dict[str, Bits], watch: Watch) -> SyncReport:
        """The first version of a new run: an anchor."""
        run = Run(secrets.token_hex(8), max(self._clock(), self._after), table_of(memories(weights)))
        with watch.stage("encode"):
            patch = parcel.anchor_of(weights, run.table, self._threads)
        with watch.stage("upload"):
            run = replace(run, files=self._put_files(run.run))
            self.store.put(run_path(run.run), run.to_bytes())
            hash, sent = parcel.send(self.store, run.run, patch, self._progress)
        step = step_of(None, 0, patch, hash, self._clock())
        self._kept = None
        if self._ladder is not None:
            self._ladder.clear()
        with watch.stage("commit"):
            done = self._commit(run, 0, patch.result, lambda _steps: (step,), weights, self._set)
        notes = self._maintain(done, watch, patch)
        return _reported(done, "anchor", patch, sent, watch, notes)

    def _next(self, now: _Committed, found: Captured, watch: Watch) -> SyncReport:
        with watch.stage("encode"):
            patch = found.encode(link=self._link, threads=self._threads)
        with watch.stage("upload"):
            hash, sent = parcel.send(self.store, now.run.run, patch, self._progress)
        step = step_of(now.head.version, now.head.version + 1, patch, hash, self._clock())

        def land(done: _Committed) -> None:
            with watch.stage("baseline"):
                self._climb(step.version, found)
                patch.apply(now.baseline, digest=patch.base, threads=self._threads)
            self._now = done

        with watch.stage("commit"):
            done = self._commit(now.run, step.version, patch.result, lambda steps: (*steps, step), now.baseline, land)
        notes = self._maintain(done, watch)
        return _reported(done, "patch", patch, sent, watch, notes)

    def _put_files(self, run: str) -> dict[str, Blob]:
        out = {}
        for name, data in self._files.items():
            blob = out[name] = Blob(sha256(data), len(data))
            self.store.put(path(run, "files", blob.hash), data)
        return out

    # -- the head ------------------------------------------------------------------------------------------------------

    def _commit(
        self,
        run: Run,
        version: int,
        digest: Digest,
        steps: Callable[[Steps], Steps],
        baseline: dict[str, Bits],
        land: Callable[[_Committed], None],
    ) -> _Committed:
        """Make a version visible: the index, then the head under the condition that nobody else has moved it.

        `steps` makes the new steps of the old ones, perhaps twice: tools may have added to the index meanwhile. `land`
        is called when the head has moved; where that cannot be found out now, before the next publish.
        """
        known = () if self._now is None else self._now.index.steps
        for _ in range(_SWAPS):
            index = Index(run.run, steps(known))
            data = index.to_bytes()
            hash = sha256(data)
            self.store.put(path(run.run, "index", hash), data)
            ends = version, digest, hash, sha256(run.to_bytes()), run.created
            head = Head(run.run, *ends, self._clock(), secrets.token_hex(8))
            done = _Committed(run, head, index, baseline)
            sealed, before = signing.seal(head.body(), self._key), self._unsure
            self._unsure = head.nonce, functools.partial(self._land, land, done)
            try:
                moved = self._swap(sealed, head.nonce, None if before is None else before[0])
            except _Late:
                self._unsure = before
                raise
            if moved is None:
                self._unsure[1]()
                return done
            self._unsure = None
            known = read_index(self.store, moved).steps
        raise Unavailable(f"{self.store.url}: the head could not be moved in {_SWAPS} attempts")

    def _land(self, land: Callable[[_Committed], None], done: _Committed) -> None:
        """The head has moved. Were this interrupted, a new run would begin: no version is ever published twice."""
        self._now = None
        self._unsure = None
        self._after = done.run.created + 0.001
        land(done)

    def _resolve(self) -> None:
        """Find out what became of a swap that was not answered, or interrupted."""
        if self._unsure is not None:
            head, tag = self._there(0)
            if head is not None and head.nonce == self._unsure[0]:
                self._tag = tag
                self._unsure[1]()

    def _swap(self, data: bytes, nonce: str, earlier: str | None) -> Head | None:
        """Swap the head. Returns None when it is done, or a head with another index to start from again.

        A reply may be lost: then the nonce that is there tells whose swap worked.
        """
        for attempt in range(_SWAPS):
            try:
                self._tag = self.store.swap(HEAD, data, self._tag)
            except (Refused, Unavailable) as error:
                head, tag = self._there(attempt)
                if tag == self._tag:
                    continue  # it did not get through
                if head is not None and (head.nonce == nonce or self._same_version(head)):
                    self._tag = tag
                    return None if head.nonce == nonce else head
                if head is not None and head.nonce == earlier:
                    raise _Late(
                        f"{self.store.url}: a publish that seemed to fail got through; publish again"
                    ) from error
                raise Fenced(f"{self.store.url}: another publisher has moved the head; this one must stop") from error
            return None
        raise Unavailable(f"{self.store.url}: the head could not be moved in {_SWAPS} attempts")

    def _same_version(self, head: Head) -> bool:
        """Whether a head only has another index than ours: a tool has squashed patches, say."""
        ours = None if self._now is None else self._now.head
        return ours is not None and (head.run, head.version, head.digest) == (ours.run, ours.version, ours.digest)

    def _there(self, attempt: int) -> tuple[Head | None, str | None]:
        """The head that is there, and its tag. With a key of our own, a head that it did not sign is none of ours."""
        if attempt:
            time.sleep(min(2.0, 0.1 * 2**attempt))
        try:
            found = self.store.get(HEAD, MOST_HEAD)
        except NotFound:
            return None, None
        try:
            pinned = None if self._key is None else signing.public_key(self._key)
            return Head.parse(signing.unseal(found.data, pinned, HEAD)), found.tag
        except Untrusted:
            return None, found.tag

    # -- restarts ------------------------------------------------------------------------------------------------------

    def _keep_anchor(self, anchor: Patch | None, now: _Committed, anew: bool = False) -> None:
        """Keep an anchor here, so that a restart need not fetch one. One is enough; a later one saves patches."""
        if self._state is None or (self._kept == now.run.run and not anew):
            return
        anchor = anchor or parcel.anchor_of(now.baseline, now.run.table, self._threads)
        self._state.mkdir(parents=True, exist_ok=True)
        name = f"anchor-{now.run.run}-{now.head.version}.srl"
        anchor.save(self._state / name)
        with replacing(self._state / "run.txt") as file:
            file.write(f"{now.run.run} {now.head.version}\n".encode())
        self._kept = now.run.run
        _sweep(self._state, name)

    def _resumed(self, state: Path, head: Head) -> _Committed | None:
        """The run whose anchor is kept here, if it is the one of the store's head; else a new run begins."""
        try:
            name, version = (state / "run.txt").read_text().split()
            held = int(version)
            anchor = Patch.open(state / f"anchor-{name}-{held}.srl")
        except (OSError, ValueError, FormatError):
            return None
        if head.run != name:
            return None
        run, index = read_run(self.store, head), read_index(self.store, head)
        anchor.table.require(run.table, "the kept anchor", "the run")
        try:
            steps = chain.route(index.steps, (held, anchor.result), head.version)
        except NotRetained:
            return None
        patches = [anchor] if not steps or steps[0].base is not None else []
        patches += [parcel.receive(self.store, name, run.table, step) for step in steps]
        baseline = parcel.built(run.table, patches, head.digest, self._threads)
        self._kept = name
        _sweep(state, f"anchor-{name}-{held}.srl")
        return _Committed(run, head, index, baseline)

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
        """Squashed patches, anchors, retention, the anchor kept here: a failure is told, and tried again next time."""
        notes, self._notes = self._notes, []
        with watch.stage("upkeep"):
            for work in (self._squash_if_due, self._anchor_if_due, functools.partial(self._keep_anchor, anchor)):
                try:
                    work(self._now or now)
                except (StoreError, FormatError, OSError) as error:
                    notes.append(f"upkeep failed, and will be tried again: {error}")
        return tuple(notes)

    def _climb(self, version: int, found: Captured) -> None:
        """One more version for the ladder; where that fails, late subscribers take longer, and nothing else."""
        if self._ladder is None:
            return
        try:
            self._ladder.add(version, found, self._threads)
        except (OSError, SparserlError) as error:
            self._notes.append(f"no squashed patches for a while: {error}")

    def _squash_if_due(self, now: _Committed) -> None:
        """A squashed patch for each rung of the ladder that ends here, where it takes less than what it stands for."""
        for base, patch in (
            () if self._ladder is None else self._ladder.rungs(now.head.version, now.baseline, self._threads)
        ):
            size = sum(len(patch.bucket(i)) for i in range(patch.buckets))
            here = chain.route(now.index.steps, (base, patch.base), now.head.version)
            if any(step.base is None for step in here) or size > _WORTH * sum(step.bytes for step in here):
                continue
            hash, _ = parcel.send(self.store, now.run.run, patch, self._progress)
            step = step_of(base, now.head.version, patch, hash, self._clock())
            add = functools.partial(_with, step)
            now = self._commit(now.run, now.head.version, now.head.digest, add, now.baseline, self._set)

    def _set(self, done: _Committed) -> None:
        self._now = done

    def _anchor_if_due(self, now: _Committed) -> None:
        """An anchor when the patches since the last one have become as large; what is too old then goes."""
        steps = now.index.steps
        last = max((s for s in steps if s.base is None), key=lambda s: s.version)
        since = sum(s.bytes for s in steps if s.base is not None and last.version <= s.base == s.version - 1)
        if since < self._anchor_after * last.bytes and len(steps) < _STEPS:
            if len(steps) == 1:
                collect(self.store, self._grace, self._clock)  # what earlier runs left
            return
        anchor = parcel.anchor_of(now.baseline, now.run.table, self._threads)
        hash, _ = parcel.send(self.store, now.run.run, anchor, self._progress)
        step = step_of(None, now.head.version, anchor, hash, self._clock())
        live = [lease.version for lease in self._leases() if self._clock() - lease.time < self._lease]

        def kept(known: Steps) -> Steps:
            return chain.retained((*known, step), self._keep, live)

        done = self._commit(now.run, now.head.version, now.head.digest, kept, now.baseline, self._set)
        self._keep_anchor(anchor, done, anew=True)
        collect(self.store, self._grace, self._clock)


def _reported(
    now: _Committed, kind: str, patch: Patch, sent: int, watch: Watch, notes: tuple[str, ...] = ()
) -> SyncReport:
    table = now.run.table
    ends = now.run.run, now.head.version, now.head.digest.hex
    return SyncReport(*ends, kind, patch.changed, table.elements, sent, table.dense_bytes, watch.seconds, notes)


def _sweep(state: Path, name: str) -> None:
    """Remove other anchors, and what a publisher that was killed here was writing."""
    for left in (*state.glob("anchor-*.srl"), *state.glob(".anchor-*"), *state.glob(".run.txt.*")):
        if left.name != name:
            left.unlink(missing_ok=True)


def _with(step: Step, steps: Steps) -> Steps:
    return (*steps, step)


def _contents(files: Mapping[str, bytes] | str | Path | None) -> dict[str, bytes]:
    """Names and contents; of a folder, all but the weights."""
    if files is None:
        return {}
    if isinstance(files, Mapping):
        require_files({file_name(name): len(data) for name, data in files.items()}, "files")
        return dict(files)
    root = Path(files)
    found = (
        p
        for p in sorted(root.rglob("*"))
        if p.is_file() and not any(x.startswith(".") for x in p.parts[len(root.parts) :])
    )
    weights = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth")
    return {file_name(p.relative_to(root).as_posix()): p.read_bytes() for p in found if not p.name.endswith(weights)}
