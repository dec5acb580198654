"""A folder with a checkpoint for each version, which any engine can load, and a link to the newest.

    FOLDER/current            a link to the version that was committed last
    FOLDER/versions/RUN-000000000042/   model.safetensors, config.json, tokenizer.json …
    FOLDER/held.json          which version that is, so that no older one is taken for newer after a restart
    FOLDER/.sparserl/         drafts; cleared when a process attaches

The folder of a version is complete and on disk before it gets its name, and the link is replaced in one step: a process
that is killed at any moment leaves the old checkpoint or the new one. A commit removes older versions but for a few.

Everything that needs disk space is written by `prepare`; a commit, and undoing it, only rename. `current` is the only
link that is made here, and it must point to `versions/NAME`; any other link is an error.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import stat
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from ..errors import CheckpointError, WeightsError
from ..files import Folder, path_of
from ..sources.checkpoint import checkpoint_in
from ..sources.safetensors import HEADER_BYTES, encode_header, parse_json, require_savable
from ..weights.digest import digest
from ..weights.dtypes import Bits
from ..weights.memory import Weights
from ..weights.table import TensorTable
from ..weights.tensors import memories, require_like, table_of
from .checkpoint import copy_patched
from .target import Change, Undo

_VERSION = re.compile(r"[0-9a-f]{16}-\d{12,}(\.[0-9a-f]{8})?")
_DRAFT = re.compile(  # what is being built, by this release or an earlier one
    r"((link-|old-|held-)?[0-9a-f]{32}|held\.json|\.[0-9a-f]{32}\.sparserl-(new|old|lock))"
)
_CURRENT = "current"
_OWN_NAMES = (_CURRENT, "versions", ".sparserl", "held.json")
_HELD = "held.json"
_BUILDING = ".sparserl"
_HELD_BYTES = 4096
_SHARD_BYTES = 5 << 30


class _OpenFolders(NamedTuple):
    """The open folders of a target."""

    root: Folder
    versions: Folder
    building: Folder  # locked while it is open

    @property
    def current(self) -> str | None:
        """The name of the version that the link points to."""
        link = self.root.linked(_CURRENT)
        if link is None:
            return None
        above, _, name = link.rpartition("/")
        if above != "versions" or not _VERSION.fullmatch(name):
            raise CheckpointError(
                f"{self.root.path / _CURRENT} is a link to {link!r}, which is not a version of this folder; remove it, "
                "or choose another folder"
            )
        return name

    def close(self) -> None:
        for folder in self:
            folder.close()


class FolderTarget:
    """A folder with the checkpoints of a run. Made by `folder`."""

    profiles: frozenset[str] | None = None
    keeps_files = True

    def __init__(self, folder: str | os.PathLike[str], keep: int = 2, threads: int | None = None) -> None:
        self.root = path_of(folder).absolute()
        self.keep = max(1, keep)
        self._threads = threads
        self._folders: _OpenFolders | None = None

    @property
    def current(self) -> Path:
        """The link to the newest checkpoint."""
        return self.root / _CURRENT

    @property
    def building(self) -> Path:
        """The folder for drafts."""
        return self.root / _BUILDING

    def attach(self, table: TensorTable) -> Weights | None:
        require_savable(table)
        with _errors(self.root, "used"):
            folders = self._open()
            name = folders.current
            if name is None or folders.versions.status(name) is None:
                return None
            try:
                with folders.versions.folder(name) as folder:
                    weights = checkpoint_in(folder)
                require_like(table, memories(weights), "the run", str(self.current))
            except WeightsError:
                return None  # of another run, or damaged: it will be replaced
            return weights

    def prepare(self, change: Change) -> PreparedFolder:
        """Write the checkpoint of a version to disk, under a temporary name."""
        with _errors(self.root, f"given version {change.version}"):
            folders = self._open()
            self.prune()  # in case a commit on a full disk could not
            prepared = PreparedFolder(self, folders, change)
            try:
                self._build(folders, prepared.draft, change)
                prepared.write_record()
            except BaseException:
                prepared.discard()
                raise
            return prepared

    def _build(self, folders: _OpenFolders, draft: str, change: Change) -> None:
        with folders.building.folder(draft, make=True) as folder:
            if change.fresh is not None:
                _write(folder, change.fresh, change.files or {})
                return
            name = folders.current
            if name is None:
                raise CheckpointError(f"{self.current} was removed; the next sync starts from an anchor")
            with folders.versions.folder(name) as base:
                copy_patched(base, folder, change.patches, self._threads, weights_only=change.files is not None)
            if change.files is not None:
                _write_files(folder, change.files)
                folder.sync()
            if not change.patches and digest(checkpoint_in(folder), threads=self._threads) != change.digest:
                raise CheckpointError(f"{self.current} does not hold the bits of version {change.version} any more")

    def remembered_version(self) -> tuple[str, float, int] | None:
        """The run, when it began, and the version that was committed last; None if that is not known."""
        try:
            with Folder.open(self.root) as root, os.fdopen(root.file(_HELD), "rb") as file:
                record = parse_json(file.read(_HELD_BYTES), _HELD)
        except (OSError, WeightsError):
            return None
        run, created, version = (record.get(key) for key in ("run", "created", "version"))
        if isinstance(run, str) and isinstance(created, int | float) and type(version) is int:
            return (run, float(created), version) if math.isfinite(created) else None
        return None

    def close(self) -> None:
        """Release the folder for other processes."""
        if self._folders is not None:
            self._folders.close()
            self._folders = None

    def prune(self) -> None:
        """Remove versions but for the current one and the last few."""
        folders = self._open()
        current = folders.current
        versions = []
        for name in folders.versions.names():
            status = folders.versions.status(name) if _VERSION.fullmatch(name) else None
            if status is not None and stat.S_ISDIR(status.st_mode):
                versions.append((status.st_mtime, name))
        others = [name for _, name in sorted(versions) if name != current]
        for name in others[: max(0, len(versions) - self.keep)]:
            removed = f"old-{uuid.uuid4().hex}"
            with contextlib.suppress(OSError):
                folders.versions.rename(name, folders.building, removed)
                folders.building.remove(removed)

    def _open(self) -> _OpenFolders:
        """Open and lock the folders, and remove what a killed process has left."""
        if self._folders is not None and not self._folders.building.gone:
            return self._folders
        with contextlib.ExitStack() as stack:
            root = stack.enter_context(Folder.open(self.root, make=True))
            status = root.status(_CURRENT)
            if status is not None and not stat.S_ISLNK(status.st_mode):
                raise CheckpointError(f"{self.current} is not a link; choose an empty folder")
            others = [name for name in root.names() if name not in _OWN_NAMES]
            if others and root.status("versions") is None:
                raise CheckpointError(f"{self.root} holds other files, such as {others[0]!r}; choose an empty folder")
            versions = stack.enter_context(root.folder("versions", make=True))
            building = stack.enter_context(root.folder(_BUILDING, make=True))
            if not building.lock():
                raise CheckpointError(f"another process writes to {self.root}")
            for name in filter(_DRAFT.fullmatch, building.names()):
                with contextlib.suppress(OSError):  # what cannot be removed harms nobody
                    building.remove(name)
            folders = _OpenFolders(root, versions, building)
            folders.current  # noqa: B018  # refuses a link that is not ours
            stack.pop_all()
        self._folders = folders
        self.prune()
        return folders


class PreparedFolder:
    """A checkpoint that is complete and on disk, but not the current one yet."""

    def __init__(self, target: FolderTarget, folders: _OpenFolders, change: Change) -> None:
        self._target = target
        self._folders = folders
        self._change = change
        self.draft = uuid.uuid4().hex
        self._record = f"held-{uuid.uuid4().hex}"
        self._link = f"link-{uuid.uuid4().hex}"  # to this version
        self._back = f"link-{uuid.uuid4().hex}"  # to the version before
        patched = sum(patch.changed for patch in change.patches)
        self.changed = patched if change.fresh is None else table_of(memories(change.fresh)).elements

    def write_record(self) -> None:
        """Write what `held` will read, under a temporary name."""
        change = self._change
        record = {"run": change.run, "created": change.created, "version": change.version, "digest": change.digest.hex}
        with self._folders.building.creating(self._record) as file:
            file.write(json.dumps(record).encode() + b"\n")

    def commit(self) -> Undo:
        """Give the checkpoint its name, and let `current` point to it."""
        root, versions, building = self._folders
        version_name = f"{self._change.run}-{self._change.version:012d}"
        name = version_name
        with _errors(self._target.root, f"given version {self._change.version}"):
            previous = self._folders.current
            while versions.status(name) is not None:  # the same version again: the older copy may be in use
                name = f"{version_name}.{uuid.uuid4().hex[:8]}"
            try:
                if previous is not None:
                    building.link(self._back, f"versions/{previous}")
                building.link(self._link, f"versions/{name}")
                building.rename(self.draft, versions, name)
                versions.sync()
                building.rename(self._link, root, _CURRENT)
                root.sync()
            except BaseException:
                with contextlib.suppress(OSError):
                    self._restore(previous)
                raise
        return lambda: self._undo(previous)

    def _undo(self, previous: str | None) -> None:
        with _errors(self._target.root, "set back to the version before"):
            self._restore(previous)
        self.discard()

    def _restore(self, previous: str | None) -> None:
        """Let `current` point to the version before, which needs no disk space."""
        root, _, building = self._folders
        if previous is None:
            with contextlib.suppress(FileNotFoundError):
                root.unlink(_CURRENT)
        else:
            building.rename(self._back, root, _CURRENT)
        with contextlib.suppress(OSError):  # it is visible already
            root.sync()

    def finish(self) -> None:
        """Record the version, and remove older ones. What fails now is done by the next version or process."""
        root, _, building = self._folders
        with contextlib.suppress(OSError):
            building.rename(self._record, root, _HELD)
            root.sync()
        self.discard()
        with contextlib.suppress(OSError, CheckpointError):
            self._target.prune()

    def discard(self) -> None:
        """Remove the draft."""
        for name in (self.draft, self._record, self._link, self._back):
            with contextlib.suppress(OSError):
                self._folders.building.remove(name)


def folder(path: str | os.PathLike[str], *, keep: int = 2, threads: int | None = None) -> FolderTarget:
    """A folder in which `current` always is a complete Hugging Face checkpoint.

    Args:
        path: the folder, which is created if it is missing. Nothing else may be in it.
        keep: how many versions stay in the folder, the current one among them.
        threads: how many threads verify and write; by default as many as there are cores, up to 16.

    Returns:
        A target for a `Subscriber`. One process at a time may use the folder.

    >>> subscriber = sparserl.Subscriber(url, sparserl.targets.folder("/models/policy"))           # doctest: +SKIP
    >>> subscriber.follow()                         # load /models/policy/current                  # doctest: +SKIP
    """
    return FolderTarget(path, keep, threads)


def write_checkpoint(out: Path, weights: Weights, files: Mapping[str, bytes]) -> None:
    """Write weights as a Hugging Face checkpoint folder. All of it is on disk when this returns."""
    with Folder.open(out, make=True) as folder:
        _write(folder, weights, files)


def _write(out: Folder, weights: Weights, files: Mapping[str, bytes]) -> None:
    """Write weights as a checkpoint to an empty folder."""
    require_savable(table_of(memories(weights)))
    _write_files(out, files)
    shards = _shards(weights)
    stem = "adapter_model" if "adapter_config.json" in files else "model"  # as peft and transformers name them
    names = [
        f"{stem}.safetensors" if len(shards) == 1 else f"{stem}-{i:05d}-of-{len(shards):05d}.safetensors"
        for i in range(1, len(shards) + 1)
    ]
    for name, shard in zip(names, shards, strict=True):
        with out.creating(name) as file:
            file.write(encode_header(shard, name))
            for bits in shard.values():
                file.write(bits.array.tobytes())
    if len(shards) > 1:
        _write_index(out, f"{stem}.safetensors.index.json", dict(zip(names, shards, strict=True)))
    out.sync()


def _write_files(out: Folder, files: Mapping[str, bytes]) -> None:
    """Write the files that lie beside the weights."""
    for name, data in files.items():
        above, _, last = name.rpartition("/")
        with out.below(above, make=True) as folder, folder.creating(last) as file:
            file.write(data)
    for above in {name.rpartition("/")[0] for name in files}:
        with out.below(above) as folder:
            folder.sync()


def _write_index(out: Folder, name: str, shards: dict[str, dict[str, Bits]]) -> None:
    total = sum(bits.array.nbytes for shard in shards.values() for bits in shard.values())
    weight_map = {tensor: shard for shard, tensors in shards.items() for tensor in tensors}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    data = json.dumps(index, indent=2, sort_keys=True).encode()
    if len(data) > HEADER_BYTES:
        raise CheckpointError(f"{name}: {len(weight_map)} tensors need an index of {len(data)} bytes, past the limit")
    with out.creating(name) as file:
        file.write(data)


@contextlib.contextmanager
def _errors(root: Path, action: str) -> Iterator[None]:
    """Turn errors of the disk into errors of the target."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{root} cannot be {action}: {error}") from error


def _shards(weights: Weights) -> list[dict[str, Bits]]:
    shards: list[dict[str, Bits]] = [{}]
    bytes_left = _SHARD_BYTES
    for name, memory in sorted(memories(weights).items()):
        bits = Bits(memory.view(), memory.dtype)
        if shards[-1] and bits.array.nbytes > bytes_left:
            shards.append({})
            bytes_left = _SHARD_BYTES
        shards[-1][name] = bits
        bytes_left -= bits.array.nbytes
    return shards
