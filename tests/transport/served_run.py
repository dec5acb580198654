"""A small run in a folder, and servers of it that tests begin."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from sparserl.transport.stores.folder import FolderStore

DATA = os.urandom(1_000_000)
HASH = hashlib.sha256(DATA).hexdigest()
BUCKET = f"/runs/0123456789abcdef/buckets/0123456789abcdef/{HASH}"


def fill(folder: Path) -> FolderStore:
    """A store with a head, a bucket, a lease, a pin, and things that nobody shall see."""
    store = FolderStore(folder)
    store.put(BUCKET[1:], DATA)
    store.put("runs/0123456789abcdef/run.json", b"{}")
    store.put("runs/0123456789abcdef/leases/someone", b"{}")
    store.put("pins/best", b"{}")
    store.put("empty", b"")
    store.swap("head.json", b"first", None)
    secret = folder.parent / "secret"
    secret.write_text("secret")
    (folder / "link").symlink_to(secret)
    (folder / "way").symlink_to(folder.parent)
    (folder / ".hidden").write_text("secret")
    os.mkfifo(folder / "pipe")
    return store


def begun(folder: Path) -> tuple[FolderStore, str]:
    """A store with an object and a first head, and the head's tag."""
    store = FolderStore(folder)
    store.put("object", b"")
    return store, store.swap("head.json", b"0", None)
