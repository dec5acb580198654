"""A folder with a checkpoint that any engine can load: a new one for each version, and a link to the newest.

    FOLDER/current            a link to the version that was committed last
    FOLDER/versions/RUN-000000000042/   model.safetensors, config.json, tokenizer.json …
    FOLDER/held.json          which version that is, so that no older one is taken for newer after a restart
    FOLDER/.sparserl/         what is being built; cleared when a process attaches

A version's folder is complete and on disk before it has its name, and the link is replaced in one step: a kill at any
moment leaves the old checkpoint or the new one. Older versions go when a newer one is committed, but for the last few.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import struct
import uuid
from collections.abc import Mapping
from pathlib import Path

from ..bits import Bits
from ..errors import CheckpointError, WeightsError
from ..files import sync
from ..memory import Weights, memories, require_like, table_of
from ..sources import open_checkpoint
from ..table import TensorTable
from .checkpoint import apply_to_checkpoint
from .target import Change, Undo

_VERSION = re.compile(r"[0-9a-f]{16}-\d{12,}(\.[0-9a-f]{8})?")
_SHARD_BYTES = 5 << 30


class FolderTarget:
    """A checkpoint folder that follows a run."""

    profiles: frozenset[str] | None = None
    keeps_files = True

    def __init__(self, folder: str | os.PathLike[str], keep: int = 2, threads: int | None = None) -> None:
        self.root = Path(folder).absolute()
        self.keep, self._threads = max(1, keep), threads
        self._lock: int | None = None

    @property
    def current(self) -> Path:
        """The link to the newest checkpoint."""
        return self.root / "current"

    @property
    def building(self) -> Path:
        return self.root / ".sparserl"

    def attach(self, table: TensorTable) -> Weights | None:
        self._hold()
        try:
            weights = open_checkpoint(self.current)
            require_like(table, memories(weights), "the run", str(self.current))
        except WeightsError:
            return None  # none yet, or one of another run: it will be written anew
        return weights

    def prepare(self, change: Change) -> PreparedFolder:
        """Build the checkpoint of a version, whole and on disk, under a name of its own."""
        draft = self.building / uuid.uuid4().hex
        try:
            if change.fresh is not None:
                write_checkpoint(draft, change.fresh, change.files or {})
                changed = table_of(memories(change.fresh)).elements
            else:
                apply_to_checkpoint(self.current.resolve(), change.patches, draft, threads=self._threads)
                changed = sum(patch.changed for patch in change.patches)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise
        return PreparedFolder(self, draft, change, changed)

    def held(self) -> tuple[str, float, int] | None:
        """What was committed here last."""
        try:
            found = json.loads((self.root / "held.json").read_bytes())
            return str(found["run"]), float(found["created"]), int(found["version"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def close(self) -> None:
        """Let another process follow into this folder."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def point(self, name: str | None) -> None:
        """Make `current` a link to a version, in one step; None for no link."""
        if name is None:
            self.current.unlink(missing_ok=True)
        else:
            link = self.building / f"link-{uuid.uuid4().hex}"
            link.symlink_to(Path("versions") / name)
            link.replace(self.current)
        sync(self.root)

    def prune(self) -> None:
        """Remove versions but for the last few and the current one."""
        folder = self.root / "versions"
        now = self.current.readlink().name if self.current.is_symlink() else ""
        found = sorted((p for p in folder.iterdir() if _VERSION.fullmatch(p.name)), key=lambda p: p.stat().st_mtime)
        for path in [p for p in found if p.name != now][: max(0, len(found) - self.keep)]:
            aside = self.building / f"old-{uuid.uuid4().hex}"
            path.replace(aside)
            shutil.rmtree(aside, ignore_errors=True)

    def _hold(self) -> None:
        """One process at a time; clears what a killed one left, versions too many among it."""
        if self._lock is not None:
            return
        if self.current.exists() and not self.current.is_symlink():
            raise CheckpointError(f"{self.current} is not a link; choose a folder that nothing else is in")
        (self.root / "versions").mkdir(parents=True, exist_ok=True)
        self.building.mkdir(exist_ok=True)
        handle = os.open(self.building, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(handle)
            raise CheckpointError(f"another process follows into {self.root}") from error
        self._lock = handle
        for path in self.building.iterdir():
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        self.prune()


class PreparedFolder:
    """A checkpoint that is whole and on disk, and not yet the current one."""

    def __init__(self, target: FolderTarget, draft: Path, change: Change, changed: int) -> None:
        self._target, self._draft, self._change = target, draft, change
        self._name = f"{change.run}-{change.version:012d}"
        self.changed = changed

    def commit(self) -> Undo:
        target, versions = self._target, self._target.root / "versions"
        before = target.current.readlink().name if target.current.is_symlink() else None
        name = self._name
        while (versions / name).exists():  # the same version once more: the one that is there may be in use
            name = f"{self._name}.{uuid.uuid4().hex[:8]}"
        self._draft.replace(versions / name)
        sync(versions)
        try:
            target.point(name)
        except BaseException:
            with contextlib.suppress(OSError):
                target.point(before)
            raise
        return lambda: target.point(before)

    def finish(self) -> None:
        change = self._change
        held = {"run": change.run, "created": change.created, "version": change.version, "digest": change.digest.hex}
        draft = self._target.building / "held.json"
        draft.write_text(json.dumps(held))
        sync(draft)
        draft.replace(self._target.root / "held.json")
        sync(self._target.root)
        self._target.prune()

    def discard(self) -> None:
        shutil.rmtree(self._draft, ignore_errors=True)


def folder(path: str | os.PathLike[str], *, keep: int = 2, threads: int | None = None) -> FolderTarget:
    """A folder in which `current` is always a whole Hugging Face checkpoint; the last `keep` versions stay."""
    return FolderTarget(path, keep, threads)


def write_checkpoint(out: Path, weights: Weights, files: Mapping[str, bytes]) -> None:
    """Weights as a Hugging Face checkpoint folder, on disk when this returns."""
    out.mkdir(parents=True)
    for name, data in files.items():
        path = out / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        sync(path)
    shards = _shards(weights)
    stem = "adapter_model" if "adapter_config.json" in files else "model"  # as peft and transformers name them
    names = [
        f"{stem}.safetensors" if len(shards) == 1 else f"{stem}-{i:05d}-of-{len(shards):05d}.safetensors"
        for i in range(1, len(shards) + 1)
    ]
    for name, shard in zip(names, shards, strict=True):
        _write_safetensors(out / name, shard)
    if len(shards) > 1:
        total = sum(bits.array.nbytes for shard in shards for bits in shard.values())
        places = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (out / f"{stem}.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True))
        sync(out / f"{stem}.safetensors.index.json")
    for where, _, _ in os.walk(out):
        sync(Path(where))


def _shards(weights: Weights) -> list[dict[str, Bits]]:
    shards: list[dict[str, Bits]] = [{}]
    room = _SHARD_BYTES
    for name, memory in sorted(memories(weights).items()):
        bits = Bits(memory.view(), memory.dtype)
        if shards[-1] and bits.array.nbytes > room:
            shards.append({})
            room = _SHARD_BYTES
        shards[-1][name] = bits
        room -= bits.array.nbytes
    return shards


def _write_safetensors(path: Path, tensors: dict[str, Bits]) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, bits in tensors.items():
        if bits.dtype.safetensors is None:
            raise CheckpointError(f"tensor {name!r}: safetensors has no {bits.dtype.name}")
        size = bits.array.nbytes
        header[name] = {
            "dtype": bits.dtype.safetensors,
            "shape": list(bits.array.shape),
            "data_offsets": [at, at + size],
        }
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for bits in tensors.values():
            file.write(bits.array.tobytes())
        file.flush()
        os.fsync(file.fileno())
