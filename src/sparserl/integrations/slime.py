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

from pathlib import Path
from typing import Any

from . import disk_sync, environment


def publish(args: Any, version_dir: str, rollout_engines: Any) -> None:  # noqa: ARG001  # slime passes all three
    """Publish the checkpoint in `version_dir`; rank 0 does it, the other ranks do nothing."""
    if _rank() == 0:
        disk_sync.publishers.publish(Path(version_dir), environment.store_url())


def fetch(source_dir: str, target_version: int) -> None:
    """Fetch the newest version of the store into `source_dir`, under the name that slime expects; one rank per host.

    slime writes a version before any engine reads it, so that the newest version is the right one. If the trainer's
    own files are in `source_dir`, on one machine or on a shared disk, nothing is fetched.
    """
    disk_sync.fetch(Path(source_dir) / f"weight_v{target_version:06d}")


def _rank() -> int:
    import torch.distributed as dist

    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
