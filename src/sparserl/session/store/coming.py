"""Buckets of the next version, which followers fetch while later ones are still being encoded.

The publisher names them in `coming.json` before the head moves. It is a hint: nothing in it is believed, every bucket
has to have its hash, and what the next head does not name is thrown away.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

from ...errors import FormatError, SparserlError
from ...transport.stores.base import COMING, Store, StoredObject, fetch
from ...transport.stores.deadline import AT_ONCE, Deadline, Transfers, current
from ...weights.digest import Digest
from ..logs import log
from .manifests import Manifest
from .records import Blob, require_hash

NOTHING = Digest()  # what an announced anchor starts from
AHEAD_BYTES = 256 << 20  # of buckets that are fetched before a head names them
_MOST_NAMED = 64  # buckets: the last ones
_SMALL = 1 << 16  # bytes of a bucket that is not announced while it is the only one
_PAUSE = 0.02  # seconds between two announcements
_LATER = 5.0  # seconds after which a store that announces nothing is asked again
_HOLD = 30.0  # seconds that one request waits for an announcement


def fetch_bucket(store: Store, manifest: Manifest, blob: Blob, ranges: ThreadPoolExecutor | None = None) -> bytes:
    """A bucket, checked.

    ranges: threads that fetch a large one, several ranges at a time.
    """
    name = manifest.bucket(blob)
    data = fetch(store, name, blob.size, ranges)
    require_hash(data, blob.hash, name)
    return data


class Announcer:
    """Names the buckets of a patch in the store as they are written.

    Args:
        store: The store. In one that has to be asked again and again for changes nothing is announced.
        manifest: The manifest of the patch, without buckets. Its base is the version that the patch starts from.
    """

    def __init__(self, store: Store, manifest: Manifest) -> None:
        self._store = store
        self._manifest = manifest
        self._is_wanted = getattr(store, "announces", False)
        self._rows: list[tuple[Blob, int]] = []
        self._guard = threading.Lock()  # of the rows
        self._writing = threading.Lock()
        self._next = 0.0  # when another announcement may be written

    def add(self, blob: Blob, touched: int, holdings: tuple[str, ...]) -> None:
        """A bucket is in the store. Several threads may call it; one of them writes the announcement."""
        if not self._is_wanted:
            return
        with self._guard:
            self._rows.append((blob, touched))
            rows = dict(self._rows[-_MOST_NAMED:])
        is_small = len(rows) < 2 and blob.size < _SMALL  # a patch that is there as soon as its announcement would be
        if is_small or time.monotonic() < self._next or not self._writing.acquire(blocking=False):
            return
        try:
            marks = tuple(rows.values()) if holdings else ()
            coming = replace(self._manifest, buckets=tuple(rows), holdings=holdings, touched=marks)
            self._store.put(COMING, coming.to_bytes())
            self._next = time.monotonic() + _PAUSE
        except SparserlError as error:
            log.debug("%s: what is coming cannot be announced: %s", self._store.url, error)
            self._is_wanted = False
        finally:
            self._writing.release()


class BucketsAhead:
    """Fetches buckets that a publisher has announced, in the background, and keeps them until they are asked for.

    Args:
        store: The store.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._guard = threading.Lock()
        self._place = ""
        self._buckets: dict[str, Future[bytes]] = {}
        self._closed = ""  # the place whose buckets somebody fetches now: none of it is fetched ahead any more
        self._nbytes = 0

    @contextmanager
    def running(self, wanted: Callable[[Manifest], Sequence[Blob]]) -> Iterator[None]:
        """Buckets are fetched ahead in this block.

        wanted: which buckets of an announced patch are needed, if the next head names it.
        """
        deadline = Deadline(around=current())
        if getattr(self._store, "announces", False):
            work = (self._run, wanted)
            threading.Thread(target=deadline.run, args=work, name="sparserl-ahead", daemon=True).start()
        try:
            yield
        finally:
            deadline.cancel()
            self.clear()

    def take(self, manifest: Manifest, blob: Blob) -> bytes | None:
        """A bucket that was fetched, or is on its way; None if the caller has to fetch it."""
        name = manifest.bucket(blob)
        with self._guard:
            self._closed = manifest.place
            future = self._buckets.pop(name, None)
            if future is None:
                return None
            self._nbytes -= blob.size
        try:
            return current().result(future, name)
        except (SparserlError, CancelledError):
            current().require(name)
            return None  # another attempt may work

    def clear(self) -> None:
        """Throw away what nobody has asked for."""
        with self._guard:
            for future in self._buckets.values():
                future.cancel()
            self._buckets = {}
            self._nbytes = 0

    def _run(self, wanted: Callable[[Manifest], Sequence[Blob]]) -> None:
        tag: str | None = None
        with Transfers(AT_ONCE, self._store.url) as transfers:
            while not current().over:
                try:
                    announced = self._store.changed(COMING, tag, 0.0 if tag is None else _HOLD)
                except SparserlError:  # also of an announcement that is too large
                    announced = None
                    tag = None
                if announced is not None:
                    tag = announced.tag
                    self._fetch(announced, wanted, transfers)
                elif tag is None:
                    current().sleep(_LATER)

    def _fetch(
        self, announced: StoredObject, wanted: Callable[[Manifest], Sequence[Blob]], transfers: Transfers
    ) -> None:
        """Fetch what is announced and not here, as far as there is room."""
        try:
            manifest = Manifest.parse(announced.data, COMING)
        except FormatError:  # also of a server whose store has announced nothing yet
            return
        blobs = wanted(manifest)
        if not blobs:
            return
        if manifest.place != self._place:
            self.clear()
            self._place = manifest.place
        begun = [self._begin(manifest, blob, transfers) for blob in blobs]
        for future in begun:
            if future is not None:
                _outcome(future)

    def _begin(self, manifest: Manifest, blob: Blob, transfers: Transfers) -> Future[bytes] | None:
        name = manifest.bucket(blob)
        with self._guard:
            is_late = name in self._buckets or manifest.place == self._closed
            if is_late or self._nbytes + blob.size > AHEAD_BYTES:
                return None
            future = transfers.submit(lambda blob: fetch_bucket(self._store, manifest, blob), blob)
            self._buckets[name] = future
            self._nbytes += blob.size
            return future


def _outcome(future: Future[bytes]) -> None:
    """Wait until a bucket is here, or will not come."""
    try:
        current().result(future, COMING)
    except (SparserlError, CancelledError) as error:
        log.debug("a bucket that was announced cannot be fetched: %s", error)
