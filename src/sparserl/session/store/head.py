"""The head as its publisher moves it: only if nobody else has moved it, and sure about swaps whose reply was lost."""

from __future__ import annotations

import functools
import math
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from ...errors import Fenced, FormatError, NotFound, Refused, SessionError, Unavailable, UnsupportedFormat, Untrusted
from ...transport.stores.base import Store
from . import signing
from .fields import sha256
from .records import (
    HEAD,
    MOST_HEAD,
    FileChanges,
    HeadRecord,
    Index,
    LayoutChange,
    PlacedFile,
    RouteStep,
    RunRecord,
    path,
)
from .retention import read_index, runs_with_versions
from .signing import PublisherKeys
from .writers import Writers

Steps = tuple[RouteStep, ...]

HOW_TO_REPLACE = (
    "To begin a new run, pass new_run=True (on the command line, --new-run); subscribers then fetch all weights again"
)
_SWAPS = 8  # attempts at a head whose replies are lost
_MOST_GARBAGE = 1 << 26  # bytes in the place of a head that are taken for garbage


class _LateSwap(Unavailable):
    """A swap of ours that was given up worked after all."""


class _HeadRead(NamedTuple):
    """What is in the place of the head: a head, None for none or one that we do not accept, and its tag."""

    head: HeadRecord | None
    tag: str | None
    is_garbage: bool = False
    obstacle: str | None = None  # what is there instead of a head that we accept, in words

    @property
    def is_lost(self) -> bool:
        """Whether nothing is there that a publisher has written."""
        return self.tag is None or self.is_garbage


class _OpenSwap(NamedTuple):
    """A swap that nobody has answered yet, by its nonce, and what to do if it worked."""

    nonce: str
    finish: Callable[[], None]


@dataclass(frozen=True)
class HeadMove:
    """A version that the head is to be moved to.

    step: the step that leads to the version.
    add_steps: makes the new index of the old one's steps; may be called again with others, which tools have added to.
    files: uploads files that changed, and returns those of the new index.
    layouts: those of the new index.
    finish: called when the head has moved.
    """

    run: RunRecord
    step: RouteStep
    add_steps: Callable[[Steps], Steps]
    files: Callable[[], tuple[FileChanges, ...]]
    layouts: tuple[LayoutChange, ...]
    finish: Callable[[HeadRecord, Index], None]


class HeadWriter:
    """The head of a store, which this publisher (or rank 0 of several) may move.

    next_run_time: a new run must say that it began at this time or later.
    """

    def __init__(self, store: Store, keys: PublisherKeys, writers: Writers, clock: Callable[[], float]) -> None:
        self._store = store
        self._keys = keys
        self._writers = writers
        self._clock = clock
        self._open_swap: _OpenSwap | None = None
        self._begin(self._read(0) if writers.rank == 0 else _HeadRead(None, None))

    def move(self, move: HeadMove, steps: Steps, last_head: HeadRecord | None) -> None:
        """Make a version visible: the index, then the head, unless somebody else has moved it.

        steps: those of the index that the last head names.
        last_head: the head that we moved last.

        Where it cannot be found out now whether the head has moved, `resolve` finds out later.
        """
        for _ in range(_SWAPS):
            propose = functools.partial(self._propose, move, steps)
            head, index = self._writers.lead("propose", propose, _dump, _load)
            earlier = self._open_swap
            self._open_swap = _OpenSwap(head.nonce, functools.partial(self._finish, move, head, index))
            swap = functools.partial(self._swap_or_reread, head, last_head, None if earlier is None else earlier.nonce)
            try:
                other_index = self._writers.lead("move the head", swap, _dump_index, _load_index)
            except _LateSwap:
                self._open_swap = earlier
                raise
            if other_index is None:
                self._open_swap.finish()
                return
            self._open_swap = None
            steps = other_index.steps
        raise Unavailable(f"{self._store.url}: the head could not be moved in {_SWAPS} attempts")

    def head_to_continue(self) -> HeadRecord | None:
        """The head that was there in the beginning, on every rank; None where the store has none.

        Raises:
            SessionError: There is one that this publisher cannot continue, or there are versions without a head.
        """

        def first() -> HeadRecord | None:
            runs = runs_with_versions(self._store) if self._first.is_lost else ()
            if runs:
                self._begin(self._read(1))  # their publisher may just have moved it
            if self._first.obstacle is not None or (runs and self._first.tag is None):
                obstacle = self._first.obstacle or f"has no {HEAD}"
                put_back = f" To go on with run {' or '.join(runs)}, put back a copy of {HEAD}." if runs else ""
                raise SessionError(f"{self._store.url} {obstacle}.{put_back} {HOW_TO_REPLACE}")
            return self._first.head

        return self._writers.lead("read the head", first, _dump_head, _load_head)

    @property
    def is_unsure(self) -> bool:
        """Whether a swap was not answered, or interrupted."""
        return self._open_swap is not None

    @property
    def has_run_to_leave(self) -> bool:
        """Whether the store had a head that our keys accept; on rank 0."""
        return self._first.head is not None

    def resolve(self) -> None:
        """Find out what became of a swap that was not answered, or interrupted."""
        open_swap = self._open_swap

        def worked_nonce() -> str:
            head_read = _HeadRead(None, None) if open_swap is None else self._read(0)
            if open_swap is None or head_read.head is None or head_read.head.nonce != open_swap.nonce:
                return ""
            self._tag = head_read.tag
            return head_read.head.nonce

        nonce = self._writers.lead("look back", worked_nonce, str.encode, bytes.decode)
        if open_swap is not None and nonce == open_swap.nonce:
            open_swap.finish()

    def _begin(self, first: _HeadRead) -> None:
        """Start from what is in the place of the head. A new run is later than the one that is left, by any clock."""
        self._first = first
        self._tag = first.tag
        self.next_run_time = 0.0 if first.head is None else _later(first.head.created)

    def _finish(self, move: HeadMove, head: HeadRecord, index: Index) -> None:
        self._open_swap = None
        self.next_run_time = _later(head.created)
        move.finish(head, index)

    def _propose(self, move: HeadMove, steps: Steps) -> tuple[HeadRecord, Index]:
        """The next head, and the index that it names, which is written."""
        run = move.run
        new_steps = move.add_steps(steps)
        layouts = _needed_layouts(move.layouts, new_steps)
        index = Index(run.run, new_steps, _needed_files(move.files(), new_steps), layouts)
        data = index.to_bytes()
        index_hash = sha256(data)
        self._store.put(path(run.run, "index", index_hash), data)
        head = HeadRecord(
            run=run.run,
            version=move.step.version,
            digest=move.step.digest,
            index=index_hash,
            run_hash=sha256(run.to_bytes()),
            created=run.created,
            time=self._clock(),
            nonce=secrets.token_hex(8),
        )
        return head, index

    def _swap_or_reread(
        self, head: HeadRecord, last_head: HeadRecord | None, earlier_nonce: str | None
    ) -> Index | None:
        """Move the head; returns None, or the index to start from again."""
        other_head = self._swap(head, last_head, earlier_nonce)
        return None if other_head is None else read_index(self._store, other_head)

    def _swap(self, head: HeadRecord, last_head: HeadRecord | None, earlier_nonce: str | None) -> HeadRecord | None:
        """Swap the head. Returns None when it is done, or a head with another index to start from again.

        A reply may be lost: then the nonce in the store tells whose swap worked.
        """
        data = signing.seal(head.body(), self._keys.signing_key)
        last_error: Exception | None = None
        for attempt in range(_SWAPS):
            try:
                self._tag = self._store.swap(HEAD, data, self._tag)
            except (Refused, Unavailable) as error:
                stored, tag, is_garbage, _ = self._read(attempt)
                if tag == self._tag:
                    last_error = error
                    continue  # it did not get through
                if is_garbage and last_head is not None:
                    self._tag = tag
                    continue  # no publisher has written that, and the run is ours
                if stored is not None and (stored.nonce == head.nonce or _same_version(stored, last_head)):
                    self._tag = tag
                    return None if stored.nonce == head.nonce else stored
                if stored is not None and stored.nonce == earlier_nonce:
                    raise _LateSwap(
                        f"{self._store.url}: a publish that seemed to fail got through; publish again"
                    ) from error
                if tag is None:
                    raise Fenced(f"{self._store.url}: {HEAD} is gone, the store was emptied or moved") from error
                raise Fenced(f"{self._store.url}: another publisher has moved the head; this one must stop") from error
            return None
        raise Unavailable(
            f"{self._store.url}: the head could not be moved in {_SWAPS} attempts; the last error was: {last_error}"
        )

    def _read(self, attempt: int) -> _HeadRead:
        """Read the head. With a key of our own, a head that no accepted key has signed is none of ours.

        Nor is garbage, which no publisher has written: it stops no publisher that runs. A head of another format may be
        that of a newer release, and is an error.
        """
        if attempt:
            time.sleep(min(2.0, 0.1 * 2**attempt))
        try:
            data, tag = self._store.get(HEAD, _MOST_GARBAGE)
        except NotFound:
            return _HeadRead(None, None)
        if len(data) > MOST_HEAD:
            return _HeadRead(None, tag, is_garbage=True, obstacle=f"has a damaged head of {len(data)} bytes")
        try:
            if self._keys.signing_key is None:
                signing.require_unsigned(data, HEAD)
            return _HeadRead(HeadRecord.parse(signing.unseal(data, self._keys.accepted, HEAD)), tag)
        except Untrusted as error:
            return _HeadRead(None, tag, obstacle=_foreign(data, error))
        except UnsupportedFormat:
            raise
        except FormatError as error:
            return _HeadRead(None, tag, is_garbage=True, obstacle=f"has a damaged head: {error}")


def _foreign(data: bytes, error: Untrusted) -> str:
    """What a head says that none of our keys has signed."""
    try:
        head = HeadRecord.parse(signing.unseal(data, None, HEAD))
    except FormatError:
        return f"has a head that cannot be used: {error}"
    return f"has run {head.run} at version {head.version}, which cannot be continued: {error}"


def _needed_files(files: tuple[FileChanges, ...], steps: Steps) -> tuple[FileChanges, ...]:
    """Changes of files, those up to the oldest version of an index as one."""
    oldest = _oldest_version(steps)
    old = [changes for changes in files if changes.version <= oldest]
    if len(old) < 2:
        return files
    merged: dict[str, PlacedFile | None] = {}
    for changes in old:
        merged |= changes.files
    return (FileChanges(old[-1].version, merged), *files[len(old) :])


def _oldest_version(steps: Steps) -> int:
    """The oldest version that steps lead to or from."""
    return min((step.version if step.base is None else min(step.base, step.version) for step in steps), default=0)


def _needed_layouts(layouts: tuple[LayoutChange, ...], steps: Steps) -> tuple[LayoutChange, ...]:
    """The layouts that a version of an index has: those that ended before its oldest are forgotten."""
    oldest = _oldest_version(steps)
    ended = sum(layout.version <= oldest for layout in layouts) - 1
    return layouts[max(0, ended) :]


def _later(time: float) -> float:
    """A time after another, however large that is."""
    return max(time + 0.001, math.nextafter(time, math.inf))


def _same_version(head: HeadRecord, last_head: HeadRecord | None) -> bool:
    """Whether a head only has another index than the last one: a tool has squashed patches, say."""
    if last_head is None:
        return False
    return (head.run, head.version, head.digest) == (last_head.run, last_head.version, last_head.digest)


def _dump_head(head: HeadRecord | None) -> bytes:
    return b"" if head is None else head.body()


def _load_head(data: bytes) -> HeadRecord | None:
    return HeadRecord.parse(data) if data else None


def _dump(proposal: tuple[HeadRecord, Index]) -> bytes:
    head, index = proposal
    return head.body() + b"\n" + index.to_bytes()


def _load(data: bytes) -> tuple[HeadRecord, Index]:
    head, index = data.split(b"\n")
    return HeadRecord.parse(head), Index.parse(index, "the index")


def _dump_index(index: Index | None) -> bytes:
    return b"" if index is None else index.to_bytes()


def _load_index(data: bytes) -> Index | None:
    return Index.parse(data, "the index") if data else None
