"""slime: disk weight sync, with patches in a store between the trainer's disk and the disks of rollout hosts.

    trainer: weight_v000007/ on its disk ──► publish ──► store ──► fetch ──► weight_v000007 on a rollout host ──► engine

slime calls the first hook on every rank of the trainer when a version is written, and SGLang, as slime patches it, the
second one on every rank of an engine before it reads that version (see docs/how-to/integrations/slime.md):

    --update-weight-mode full --update-weight-transport disk --update-weight-disk-dir /scratch/weights
    --update-weight-local-checkpoint-dir /scratch/checkpoint
    --custom-update-weight-post-write-path sparserl.integrations.slime.publish
    --sglang-custom-pull-weights-pre-read-hook sparserl.integrations.slime.fetch

Both take the store from the environment: SPARSERL_URL. Also SPARSERL_STATE, a folder in which the trainer keeps what it
needs to continue its run, SPARSERL_SIGNING_KEY_FILE, a file with its secret key, and
SPARSERL_TRUSTED_KEYS, the public keys that rollouts trust, separated by commas.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from ..files import lock
from ..session import Publisher, Subscriber
from ..session.store.retention import read_head
from ..sources import open_checkpoint
from ..sources.checkpoint_files import travelling_files
from ..targets import folder
from ..transport.stores.opening import open_store
from ..weights.memory import Weights
from .environment import publisher_options, store_url, trusted_keys


class _LatestCheckpoint:
    """A source with the checkpoint that slime wrote last."""

    path: Path

    def weights(self) -> Weights:
        return open_checkpoint(self.path)

    def files(self) -> dict[str, bytes]:
        """Its config and tokenizer, which may change from version to version."""
        return {name: file.read_bytes() for name, file in travelling_files(self.path).items()}


_latest = _LatestCheckpoint()
_publishers: dict[str, Publisher] = {}


def publish(args: Any, version_dir: str, rollout_engines: Any) -> None:  # noqa: ARG001  # slime passes all three
    """Publish the checkpoint in `version_dir`; rank 0 does it, the other ranks do nothing."""
    if _rank() != 0:
        return
    _latest.path = Path(version_dir)
    url = store_url()
    if url not in _publishers:
        _publishers[url] = Publisher(url, _latest, **publisher_options())
    _publishers[url].publish()


def fetch(source_dir: str, target_version: int) -> None:
    """Fetch the newest version of the store into `source_dir`, under the name that slime expects; one rank per host.

    slime writes a version before any engine reads it, so that the newest version is the right one. If the trainer's
    own files are in `source_dir`, on one machine or on a shared disk, nothing is fetched.
    """
    root = Path(source_dir)
    name = root / f"weight_v{target_version:06d}"
    if name.is_dir() and not name.is_symlink():
        return
    root.mkdir(parents=True, exist_ok=True)
    keys = trusted_keys()
    with (
        _host_lock(root),
        closing(open_store(store_url())) as store,
        closing(folder(root / "sparserl", keep=2)) as target,
    ):
        head, _ = read_head(store, keys)
        if target.remembered_version() != (head.run, head.created, head.version):
            Subscriber(store, target, trusted_keys=keys).sync()
        draft = root / f".{name.name}"
        draft.unlink(missing_ok=True)
        draft.symlink_to(target.current.resolve())
        draft.replace(name)
        for link in root.glob("weight_v*"):
            if link.is_symlink() and not link.exists():  # to a version that was removed
                link.unlink()


def _rank() -> int:
    import torch.distributed as dist

    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


@contextmanager
def _host_lock(root: Path) -> Iterator[None]:
    """Let one process of this host in at a time."""
    handle = os.open(root, os.O_RDONLY | os.O_CLOEXEC)
    try:
        lock(handle, math.inf)
        yield
    finally:
        os.close(handle)
