"""AReaL: disk weight updates, with patches in a store between the trainer's disk and the disks of rollout hosts.

    trainer: weight_update_v7/ ──► publish ──► store ──► fetch ──► weight_update_v7 on a rollout host ──► server

AReaL has no place for hooks: docs/how-to/integrations/diffs/areal.diff adds two. See docs/how-to/integrations/areal.md.
Both functions are configured by environment variables, as those for slime are.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from . import disk_sync, environment

_written: list[Path] = []


def publish(path: str) -> None:
    """Publish the checkpoint in `path`; the one before it is deleted, as AReaL deletes it where the disk is shared."""
    written = Path(path)
    disk_sync.publishers.publish(written, environment.store_url())
    for previous in _written:
        if previous != written:
            shutil.rmtree(previous, ignore_errors=True)
    _written[:] = [written]


def fetch(path: str) -> None:
    """Make `path` a checkpoint of the newest version, unless it is the trainer's own folder.

    AReaL writes an update before any server reads it, so that the newest version is the right one.
    """
    disk_sync.fetch(Path(path))
