"""ROLL: an uploader that publishes the checkpoints that its workers save, and a download that takes a run for a model.

ROLL registers both with docs/how-to/integrations/diffs/roll.diff. See docs/how-to/integrations/roll.md.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from urllib.parse import quote

from . import disk_sync

try:
    from roll.utils.upload_utils import FileSystemUploader
except ImportError as missing:
    raise ImportError(f"ROLL cannot be imported: {missing}") from missing


class StoreUploader(FileSystemUploader):  # type: ignore[misc]
    """Publishes the weights in the folders that workers save, and copies the folders as ROLL's own uploader does.

    Args:
        url: The store.
        output_dir: Where folders are copied to: ROLL deletes its own afterwards, and a run has weights only.
        options: Further fields of ROLL's `checkpoint_config`.
    """

    def __init__(self, url: str, output_dir: str, **options: Any) -> None:
        super().__init__(output_dir, **options)
        self._url = url

    def upload(self, ckpt_id: str, local_state_path: str, **options: Any) -> None:
        """Publish a checkpoint if there is one: that of the actor's first rank, and of no other worker."""
        super().upload(ckpt_id, local_state_path, **options)
        folder = Path(local_state_path)
        if any(folder.glob("*.safetensors")):
            disk_sync.publishers.publish(folder, self._url)


def download(model_name_or_path: str, local_dir: str | None = None) -> str:
    """A folder with the newest version of a run.

    Args:
        model_name_or_path: The URL of the store.
        local_dir: Where to keep it; by default in the cache of the user.

    >>> download("s3://bucket/run", "/scratch/run")                                                 # doctest: +SKIP
    '/scratch/run/sparserl/…'
    """
    if local_dir is None:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        root = cache / "sparserl" / "roll" / quote(model_name_or_path, safe="")
    else:
        root = Path(local_dir)
    model = root / "model"
    disk_sync.fetch(model, model_name_or_path)
    return str(model.resolve())
