"""Weight syncs by disk, with patches in a store between the trainer's disk and the disks of rollout hosts.

The trainer writes a whole checkpoint at every sync, and engines load it. In between, a hook publishes it on the
trainer's host, and another fetches it on each rollout host. Keys, state and mostly the store come from the environment,
as the processes of a framework are seldom ours to configure: see docs/reference/environment.md.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from ..files import lock
from ..session import Publisher, Subscriber
from ..session.store.retention import read_head
from ..targets import folder
from ..transport.stores.opening import open_store
from . import environment
from .saved_checkpoints import LatestCheckpoint


class CheckpointPublishers:
    """The publishers of this process, one for each store; they outlive the calls of a framework."""

    def __init__(self) -> None:
        self._publishers: dict[str, tuple[Publisher, LatestCheckpoint]] = {}
        self._lock = threading.Lock()  # a framework may call from several threads

    def publish(self, checkpoint: Path, url: str) -> None:
        """Publish the checkpoint in a folder."""
        with self._lock:
            if url not in self._publishers:
                self._publishers[url] = _open_publisher(url, checkpoint)
            publisher, latest = self._publishers[url]
            latest.path = checkpoint
            publisher.publish()

    def clear(self) -> None:
        """Forget them, as a process does that ends."""
        self._publishers.clear()

    def __len__(self) -> int:
        return len(self._publishers)


publishers = CheckpointPublishers()


def _open_publisher(url: str, checkpoint: Path) -> tuple[Publisher, LatestCheckpoint]:
    latest = LatestCheckpoint()
    latest.path = checkpoint
    return Publisher(url, latest, **environment.publisher_options()), latest


def fetch(path: Path, url: str | None = None) -> None:
    """Make `path` a link to a checkpoint of the newest version; one process of a host at a time.

    If there is a folder at `path`, which is the trainer's own on one machine or a shared disk, nothing is fetched.
    Versions are kept in the folder `sparserl` beside `path`: the newest, and the one before it.

    Args:
        path: What the engine is going to load.
        url: The store; by default that of the environment.

    Raises:
        SessionError: There is no store in the environment, or the run is not signed by a key that is trusted.
    """
    if path.is_dir() and not path.is_symlink():
        return
    root = path.parent
    root.mkdir(parents=True, exist_ok=True)
    trusted_keys = environment.trusted_keys()
    with (
        _host_lock(root),
        closing(open_store(url or environment.store_url())) as store,
        closing(folder(root / "sparserl", keep=2)) as target,
    ):
        head, _ = read_head(store, trusted_keys)
        if target.remembered_version() != (head.run, head.created, head.version):
            Subscriber(store, target, trusted_keys=trusted_keys).sync()
        draft = root / f".{path.name}"
        draft.unlink(missing_ok=True)
        draft.symlink_to(target.current.resolve())
        draft.replace(path)
        _remove_dead_links(root)


def _remove_dead_links(root: Path) -> None:
    """Remove links to versions that were removed."""
    versions = (root / "sparserl").resolve()
    for link in root.iterdir():
        if link.is_symlink() and not link.exists() and versions in link.readlink().parents:
            link.unlink()


@contextmanager
def _host_lock(root: Path) -> Iterator[None]:
    """Let one process of this host in at a time."""
    handle = os.open(root, os.O_RDONLY | os.O_CLOEXEC)
    try:
        lock(handle, math.inf)
        yield
    finally:
        os.close(handle)
