"""The head as its publisher moves it: under the condition that nobody else has, and knowing what a lost reply meant."""

from __future__ import annotations

import functools
import math
import secrets
import time
from collections.abc import Callable
from typing import NamedTuple

from ...errors import Fenced, FormatError, NotFound, Refused, Unavailable, UnsupportedFormat, Untrusted
from ...transport.stores.base import Store
from ...weights.digest import Digest
from . import signing
from .records import HEAD, MOST_HEAD, Head, Index, Run, Step, path, sha256
from .retention import read_index
from .writers import Writers

Steps = tuple[Step, ...]
Landing = Callable[[Head, Index], None]

_SWAPS = 8  # attempts at a head whose replies are lost
_MOST_GARBAGE = 1 << 26  # bytes in the place of a head that a publisher with a key takes for garbage, and replaces


class _Late(Unavailable):
    """A swap of ours that was given up worked after all."""


class _Look(NamedTuple):
    """What is in the place of the head: a head (None for none, or another's), its tag, or garbage and its tag."""

    head: Head | None
    tag: str | None
    is_garbage: bool = False


class OwnHead:
    """The head of a store, which this publisher (or rank 0 of several) may move.

    found: the head that was there in the beginning; None where there was none, or none that our key has signed.
    after: when a new run must say that it began, at the least: a later run says so, whatever the clock.
    """

    def __init__(self, store: Store, key: str | None, writers: Writers, clock: Callable[[], float]) -> None:
        self._store, self._key, self._writers, self._clock = store, key, writers, clock
        self._unsure: tuple[str, Callable[[], None]] | None = None  # a swap that nobody answered, and what it is to do
        look = self._look(0) if writers.rank == 0 else _Look(None, None)
        self.found = look.head
        self._tag = look.tag
        self.after = 0.0 if self.found is None else _later(self.found.created)

    def move(
        self,
        run: Run,
        version: int,
        digest: Digest,
        steps: Callable[[Steps], Steps],
        known: Steps,
        ours: Head | None,
        land: Landing,
    ) -> None:
        """Make a version visible: the index, then the head under the condition that nobody else has moved it.

        `steps` makes the new steps of the known ones, perhaps twice: tools may have added to the index meanwhile.
        `ours` is the head that we moved last. `land` is called when the head has moved; where that cannot be found out
        now, by `resolve`.
        """
        for _ in range(_SWAPS):
            propose = functools.partial(self._proposal, run, version, digest, steps, known)
            head, index = self._writers.lead("propose", propose, _dump, _load)
            before = self._unsure
            self._unsure = head.nonce, functools.partial(self._land, land, head, index)
            swap = functools.partial(self._moved, head, ours, None if before is None else before[0])
            try:
                other = self._writers.lead("move the head", swap, _dump_other, _load_other)
            except _Late:
                self._unsure = before
                raise
            if other is None:
                self._unsure[1]()
                return
            self._unsure = None
            known = other.steps
        raise Unavailable(f"{self._store.url}: the head could not be moved in {_SWAPS} attempts")

    def resolve(self) -> None:
        """Find out what became of a swap that was not answered, or interrupted."""
        unsure = self._unsure

        def landed() -> str:
            look = _Look(None, None) if unsure is None else self._look(0)
            if unsure is None or look.head is None or look.head.nonce != unsure[0]:
                return ""
            self._tag = look.tag
            return look.head.nonce

        nonce = self._writers.lead("look back", landed, str.encode, bytes.decode)
        if unsure is not None and nonce == unsure[0]:
            unsure[1]()

    def _land(self, land: Landing, head: Head, index: Index) -> None:
        self._unsure = None
        self.after = _later(head.created)
        land(head, index)

    def _proposal(
        self, run: Run, version: int, digest: Digest, steps: Callable[[Steps], Steps], known: Steps
    ) -> tuple[Head, Index]:
        """The next head, and the index that it names, which is written."""
        index = Index(run.run, steps(known))
        data = index.to_bytes()
        hash = sha256(data)
        self._store.put(path(run.run, "index", hash), data)
        ends = version, digest, hash, sha256(run.to_bytes()), run.created
        return Head(run.run, *ends, self._clock(), secrets.token_hex(8)), index

    def _moved(self, head: Head, ours: Head | None, earlier: str | None) -> Index | None:
        """Move the head; returns None, or the index to start from again."""
        other = self._swap(signing.seal(head.body(), self._key), head.nonce, ours, earlier)
        return None if other is None else read_index(self._store, other)

    def _swap(self, data: bytes, nonce: str, ours: Head | None, earlier: str | None) -> Head | None:
        """Swap the head. Returns None when it is done, or a head with another index to start from again.

        A reply may be lost: then the nonce that is there tells whose swap worked.
        """
        last: Exception | None = None
        for attempt in range(_SWAPS):
            try:
                self._tag = self._store.swap(HEAD, data, self._tag)
            except (Refused, Unavailable) as error:
                head, tag, is_garbage = self._look(attempt)
                if tag == self._tag:
                    last = error
                    continue  # it did not get through
                if is_garbage:
                    self._tag = tag
                    continue  # no publisher has written that
                if head is not None and (head.nonce == nonce or _same_version(head, ours)):
                    self._tag = tag
                    return None if head.nonce == nonce else head
                if head is not None and head.nonce == earlier:
                    raise _Late(
                        f"{self._store.url}: a publish that seemed to fail got through; publish again"
                    ) from error
                raise Fenced(f"{self._store.url}: another publisher has moved the head; this one must stop") from error
            return None
        raise Unavailable(f"{self._store.url}: the head could not be moved in {_SWAPS} attempts; the last said: {last}")

    def _look(self, attempt: int) -> _Look:
        """Read the head. With a key of our own, a head that it did not sign is none of ours.

        Nor is garbage, which anyone who can write to the store could lock us out with. A head of another format may be
        that of a newer release, and is an error.
        """
        if attempt:
            time.sleep(min(2.0, 0.1 * 2**attempt))
        key = self._key
        try:
            data, tag = self._store.get(HEAD, MOST_HEAD if key is None else _MOST_GARBAGE)
        except NotFound:
            return _Look(None, None)
        if len(data) > MOST_HEAD:
            return _Look(None, tag, is_garbage=True)
        try:
            pinned = None if key is None else signing.public_key(key)
            return _Look(Head.parse(signing.unseal(data, pinned, HEAD)), tag)
        except Untrusted:
            return _Look(None, tag)
        except UnsupportedFormat:
            raise
        except FormatError:
            if key is None:
                raise
            return _Look(None, tag, is_garbage=True)


def _later(time: float) -> float:
    """A time after another, however large that is."""
    return max(time + 0.001, math.nextafter(time, math.inf))


def _same_version(head: Head, ours: Head | None) -> bool:
    """Whether a head only has another index than ours: a tool has squashed patches, say."""
    return ours is not None and (head.run, head.version, head.digest) == (ours.run, ours.version, ours.digest)


def _dump(proposal: tuple[Head, Index]) -> bytes:
    return proposal[0].body() + b"\n" + proposal[1].to_bytes()


def _load(data: bytes) -> tuple[Head, Index]:
    head, index = data.split(b"\n")
    return Head.parse(head), Index.parse(index, "the index")


def _dump_other(index: Index | None) -> bytes:
    return b"" if index is None else index.to_bytes()


def _load_other(data: bytes) -> Index | None:
    return Index.parse(data, "the index") if data else None
