"""Receivers that help each other: one keeps what it has fetched and serves it, others ask it before the store."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import SessionError, SparserlError
from ...files import path_of
from ...transport.stores.base import Retry, Store
from ...transport.stores.mirror import MirrorStore
from ...transport.stores.nearest import NearestStore
from ...transport.stores.opening import open_store
from ...transport.stores.serving import TOKEN, needs_serving_packages
from ..logs import log
from .records import HEAD
from .retention import collect, needed, read_head

if TYPE_CHECKING:
    from ...transport.server import BackgroundServer

_GRACE = 600.0  # seconds that objects stay after nothing refers to them: a neighbour may be about to fetch them
_END_SECONDS = 5.0  # that the end waits for old objects to be removed
_COLLECT_EVERY = 60.0  # seconds
_QUICK = Retry(attempts=2)  # the store has everything that a neighbour has


@dataclass(frozen=True)
class NeighbourOptions:
    """Whom a subscriber asks, and whom it serves; see `Subscriber`."""

    near: Sequence[str]
    serve: str | None
    mirror: str | Path | None
    token: str | None

    def __post_init__(self) -> None:
        if isinstance(self.near, str) or not isinstance(self.near, Iterable):
            raise SessionError(f"near is {self.near!r}; it must be a list of URLs")
        for url in self.near:
            if not str(url).lower().startswith(("http://", "https://")):
                raise SessionError(f"near has {url!r}; write the URL of another receiver, as http://neighbour:9000")
        if self.serve is not None and not isinstance(self.serve, str):
            raise SessionError(f"serve is {self.serve!r}; write HOST:PORT, as 0.0.0.0:9000")
        if self.serve is not None and self.token is not None and not TOKEN.fullmatch(self.token):
            raise SessionError("a token is visible ASCII without spaces, and not empty")
        if self.mirror is not None and (not str(self.mirror) or str(path_of(self.mirror)).split("/")[0].endswith(":")):
            raise SessionError(f"mirror is {str(self.mirror)!r}; it must be the path of a folder")
        if self.serve is not None and self.mirror is None:
            raise SessionError("serve= needs mirror=, a folder for what neighbours may ask for")

    def around(self, store: Store) -> Store:
        """A store, with the neighbours that are asked first and the mirror that keeps what is read."""
        neighbours = [open_store(url, token=self.token, retry=_QUICK) for url in self.near]
        if self.mirror is not None:
            return MirrorStore(store, neighbours, path_of(self.mirror), HEAD)
        return NearestStore(store, neighbours) if neighbours else store


class Served:
    """What a subscriber serves to its neighbours: the objects in its mirror, and the head of the version it holds."""

    def __init__(self, mirror: MirrorStore, server: BackgroundServer | None) -> None:
        self._mirror = mirror
        self._server = server
        self._shown_tag: str | None = None
        self._collector: threading.Thread | None = None
        self._collected_at = time.monotonic()

    @classmethod
    def start(cls, store: Store, options: NeighbourOptions) -> Served | None:
        """Begin to serve, if that is wanted."""
        if not isinstance(store, MirrorStore):
            return None
        if options.serve is None:
            return cls(store, None)
        with needs_serving_packages():
            from ...transport.server import BackgroundServer
        server = BackgroundServer(store.folder.root, options.serve, token=options.token, mirror=store)
        log.info("%s: serving neighbours at %s", store.url, server.url)
        return cls(store, server)

    @property
    def url(self) -> str | None:
        """The URL for neighbours; None where nothing is served."""
        return None if self._server is None else self._server.url

    def show(self, tag: str) -> None:
        """The version that the head with a tag names is held: neighbours may have it. What is too old goes."""
        if tag != self._shown_tag:
            kept = self._mirror.kept
            self._mirror.show(tag, lambda: needed(kept, read_head(kept)[0]))
            self._shown_tag = tag
        if time.monotonic() - self._collected_at < _COLLECT_EVERY:
            return
        self._collected_at = time.monotonic()
        self._collector = threading.Thread(target=self._collect, name="sparserl-mirror", daemon=True)
        self._collector.start()

    def _collect(self) -> None:
        try:
            collect(self._mirror.kept, _GRACE)
        except SparserlError as error:
            log.warning("%s: old objects stay in the mirror: %s", self._mirror.url, error)

    def close(self) -> None:
        """End the server."""
        if self._server is not None:
            self._server.close()
        if self._collector is not None:
            self._collector.join(_END_SECONDS)
