"""Going on with a run after a restart: from an anchor that the publisher saved on its own machine, or from the store.

    STATE/anchor-STORE-RUN-VERSION.srl
    STATE/head-STORE.json                the newest head that it has moved to: a copy, which can be put back

The anchor of a run is there before the head moves to its first version, and those of earlier runs go after that:
whenever a publisher is killed, the anchor of the run that the head names is there. STORE is a hash of the store's URL:
anchors of other stores are left alone. One publisher at a time has the folder.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ...errors import FormatError, NotFound, NotRetained, SessionError, TensorMismatch, WeightsError, WrongBase
from ...files import Folder, replacing
from ...humanize import size
from ...parallel import Progress
from ...patch import Patch
from ...transport.stores.base import Store
from ...weights.digest import Digest, digest, table_digest
from ...weights.dtypes import Bits
from ...weights.local import LocalWeights
from ...weights.memory import Weights
from ...weights.shards import Shards
from ...weights.table import TensorTable
from ..anchors import restored
from ..logs import log
from ..options import EncodingOptions
from . import routes, signing
from .fields import sha256
from .head import HOW_TO_REPLACE
from .records import HEAD, HeadRecord, Index, RunRecord
from .stored_run import StoredRun
from .writers import Writers

_ANCHOR = re.compile(r"anchor-(?P<store>[0-9a-f]{8})-(?P<run>[0-9a-f]{16})-(?P<version>\d{1,16})\.srl")
_DRAFT = re.compile(r"\.(anchor|head)-(?P<store>[0-9a-f]{8})(-[0-9a-f]{16}-\d{1,16}\.srl|\.json)\..+")


@dataclass(frozen=True)
class ResumedRun:
    """A run to go on with, and the weights of its newest version."""

    run: RunRecord
    index: Index
    weights: dict[str, Bits] | Shards
    digest: Digest  # of these weights

    @classmethod
    def of(
        cls, stored: StoredRun, run: RunRecord, weights: dict[str, Bits] | Shards, threads: int | None
    ) -> ResumedRun:
        """A run whose weights are rebuilt: all of them, which have the digest of the head, or some parts."""
        is_all = not isinstance(weights, Shards)
        return cls(run, stored.index, weights, stored.head.digest if is_all else digest(weights, threads=threads))


def resume_from_store(
    store: Store,
    head: HeadRecord,
    threads: int | None = None,
    progress: Progress | None = None,
    local: LocalWeights | None = None,
) -> ResumedRun:
    """The run of the store's head, whose weights are built from its last anchor and the patches since then.

    local: the shards of this rank, where there are several: then the weights are those at their places.

    Raises:
        SessionError: What the store has does not lead to the weights of the head.
    """
    with _reading(store, head):
        stored = StoredRun.of(store, head, progress)
        steps = stored.steps(None, head.version)
        fetched = size(sum(step.bytes for step in steps))
        log.info("%s: fetching %s to continue run %s at version %d", store.url, fetched, head.run, head.version)
        run = stored.run_at(head.version)
        weights: dict[str, Bits] | Shards
        if local is None:
            weights = stored.build(steps, head.version, threads)
        else:
            _require_tensors(run, local)
            weights = stored.build_parts(steps, local.places, threads)
    return ResumedRun.of(stored, run, weights, threads)


@contextmanager
def _reading(store: Store, head: HeadRecord) -> Iterator[None]:
    """Raise a `SessionError` where the store does not have what its head leads to."""
    try:
        yield
    except SessionError as error:
        raise SessionError(f"{error}. {HOW_TO_REPLACE}") from error
    except (FormatError, NotFound, NotRetained, WeightsError, WrongBase) as error:
        raise SessionError(
            f"{store.url} has run {head.run} at version {head.version}, whose weights cannot be rebuilt: {error}. "
            f"{HOW_TO_REPLACE}"
        ) from error


def _build(stored: StoredRun, anchor: Patch, version: int, threads: int | None) -> dict[str, Bits]:
    """The weights of the head, from an anchor of a version where the way from there takes the fewest bytes."""
    newest = stored.head.version
    steps = routes.route(stored.index.steps, (version, anchor.result), newest)
    needs_anchor = not steps or steps[0].base is not None
    start = (restored(anchor, threads), anchor.result) if needs_anchor else None
    return stored.build(steps, newest, threads, start)


def _build_parts(stored: StoredRun, anchor: Patch, version: int, local: LocalWeights, threads: int | None) -> Shards:
    """The same for the parts that one rank has, of which it has saved an anchor."""
    if set(anchor.contents.covers) != set(local.places):
        raise TensorMismatch("the saved anchor is of other parts")
    steps = stored.steps(version, stored.head.version)
    needs_anchor = not steps or steps[0].base is not None
    return stored.build_parts(steps, local.places, threads, anchor if needs_anchor else None)


def _require_tensors(run: RunRecord, local: LocalWeights) -> None:
    """Refuse shards of other tensors than those of the run."""
    try:
        run.layout.require(local.table, "the run", "this rank")
    except TensorMismatch as error:
        raise SessionError(
            f"run {run.run} has other tensors, and several writers cannot change them within a run: {error}"
        ) from error


def resume_run(
    store: Store,
    writers: Writers,
    head: HeadRecord,
    saved_anchor: SavedAnchor | None,
    weights: Callable[[TensorTable], Weights | Shards],
    encoding: EncodingOptions,
) -> ResumedRun:
    """The run of the store's head, on every rank with the weights that are this rank's.

    saved_anchor: the anchors that this rank has saved, if it has a folder for them.
    weights: returns the shards of this rank, by the table of the run; called where there are several.

    Raises:
        SessionError: What the store has does not lead to the weights of the head.
    """
    if writers.size == 1:
        return _resume_share(store, head, saved_anchor, None, encoding)
    local = _shards_of(writers, lambda: weights(_layout_of(store, head)))
    for anchor in (saved_anchor, None):
        shares: list[ResumedRun] = []

        def resume(anchor: SavedAnchor | None = anchor, shares: list[ResumedRun] = shares) -> bytes:
            shares.append(_resume_share(store, head, anchor, local, encoding))
            terms = table_digest(local.table) if local.complete else Digest()  # they are added once for all ranks
            return (shares[0].digest - terms).to_bytes()

        rows = writers.together("rebuild the weights", resume)
        if sum(map(Digest.from_bytes, rows), table_digest(local.table)) == head.digest:
            return shares[0]
        if anchor is not None:
            anchor.distrust()
    raise SessionError(
        f"{store.url} has run {head.run} at version {head.version}; what the ranks have rebuilt are other weights. "
        f"{HOW_TO_REPLACE}"
    )


def _layout_of(store: Store, head: HeadRecord) -> TensorTable:
    """The tensors of the version that a head names."""
    with _reading(store, head):
        return StoredRun.of(store, head).run_at(head.version).layout


def _shards_of(writers: Writers, weights: Callable[[], Weights | Shards]) -> LocalWeights:
    """The shards of this rank; those of all ranks must be all weights."""
    own: list[LocalWeights] = []

    def look() -> bytes:
        own.append(LocalWeights.of(weights()))
        return b""

    writers.together("look at the shards", look)
    writers.require_whole(own[0], own[0].table)
    return own[0]


def _resume_share(
    store: Store,
    head: HeadRecord,
    saved_anchor: SavedAnchor | None,
    local: LocalWeights | None,
    encoding: EncodingOptions,
) -> ResumedRun:
    """The run with the weights of this process, from what it has saved, or else from the store."""
    if saved_anchor is not None:
        resumed = saved_anchor.resume(store, head, encoding.threads, local)
        if resumed is not None:
            return resumed
    return resume_from_store(store, head, encoding.threads, encoding.progress, local)


class SavedAnchor:
    """A folder with one anchor of the run that is being published to a store, and a copy of its head."""

    def __init__(self, folder: Path, url: str, signing_key: str | None = None) -> None:
        self._path = folder
        self._url = url
        self._signing_key = signing_key
        self._store = sha256(url.rstrip("/").encode())[:8]
        self._head_name = f"head-{self._store}.json"
        self._nonce = ""  # of the head that was copied last
        self._folder: Folder | None = None  # locked as long as it is open
        self.run: str | None = None  # of which an anchor is here
        self._name = ""  # of its file
        self._lock()

    def save(self, anchor: Patch, run: str, version: int) -> None:
        """Save an anchor beside those that are here; `remove_others` removes these."""
        self._lock()
        name = f"anchor-{self._store}-{run}-{version}.srl"
        anchor.save(self._path / name)
        self.run = run
        self._name = name

    def remove_others(self) -> None:
        """The head names the run whose anchor was saved last: remove others, and drafts of a killed publisher."""
        for path in self._path.iterdir():
            match = _ANCHOR.fullmatch(path.name) or _DRAFT.fullmatch(path.name)
            if match is not None and path.name != self._name and self._store == match["store"]:
                path.unlink(missing_ok=True)

    def keep_head(self, head: HeadRecord) -> None:
        """Keep a copy of the head that the publisher has moved to, for `require_newest`."""
        if head.nonce != self._nonce:
            self._lock()
            with replacing(self._path / self._head_name) as file:
                file.write(signing.seal(head.body(), self._signing_key))
            self._nonce = head.nonce

    def require_newest(self, head: HeadRecord) -> None:
        """Refuse a head that is older than the last one that was kept: its versions would be published twice."""
        path = self._path / self._head_name
        try:
            last = HeadRecord.parse(signing.unseal(path.read_bytes(), None, self._head_name))
        except (OSError, FormatError):  # there is none yet, or it is damaged
            return
        if last.version > head.version if last.run == head.run else last.created > head.created:
            raise SessionError(
                f"{self._url} has an old head, of run {head.run} at version {head.version}; this publisher has "
                f"published run {last.run} up to version {last.version}. To go on with that, put a copy of {path} in "
                f"the place of {HEAD}. {HOW_TO_REPLACE}"
            )

    def resume(
        self, store: Store, head: HeadRecord, threads: int | None = None, local: LocalWeights | None = None
    ) -> ResumedRun | None:
        """The run of the store's head, if an anchor of it is saved here; see `resume_from_store`."""
        for version, name in sorted(self._anchors(head.run), reverse=True):
            resumed = self._resume_from(name, version, store, head, threads, local)
            if resumed is not None:
                self.run = head.run
                self._name = name
                self.remove_others()
                return resumed
        return None

    def distrust(self) -> None:
        """What is saved here has not led to the weights of the head: save another anchor when one is at hand."""
        self.run = None

    def close(self) -> None:
        """Let another publisher have the folder."""
        if self._folder is not None:
            self._folder.close()
            self._folder = None

    def _anchors(self, run: str) -> list[tuple[int, str]]:
        """The versions of a run of which there are anchors, whatever the URL of its store was, and their files."""
        matches = [_ANCHOR.fullmatch(path.name) for path in self._path.iterdir()]
        return [(int(match["version"]), match[0]) for match in matches if match is not None and match["run"] == run]

    def _resume_from(
        self,
        name: str,
        version: int,
        store: Store,
        head: HeadRecord,
        threads: int | None,
        local: LocalWeights | None,
    ) -> ResumedRun | None:
        try:
            anchor = Patch.open(self._path / name)
            stored = StoredRun.of(store, head)
            run = stored.run_at(head.version)
            anchor.table.require(run.layout, "the saved anchor", "the run")
            if local is None:
                weights: dict[str, Bits] | Shards = _build(stored, anchor, version, threads)
            else:
                run.layout.require(local.table, "the run", "this rank")
                weights = _build_parts(stored, anchor, version, local, threads)
        except (OSError, FormatError, NotFound, NotRetained, WeightsError, WrongBase):  # damaged here or there
            return None
        return ResumedRun.of(stored, run, weights, threads)

    def _lock(self) -> None:
        """Have the folder for ourselves, until we are closed or gone."""
        if self._folder is not None and not self._folder.gone:
            return
        try:
            folder = Folder.open(self._path, make=True)
            is_free = folder.lock()
        except OSError as error:
            raise SessionError(f"the state of a publisher cannot be kept in {self._path}: {error}") from error
        if not is_free:
            raise SessionError(
                f"another publisher keeps its state in {self._path}; end it first, or choose another folder"
            )
        self._folder = folder
