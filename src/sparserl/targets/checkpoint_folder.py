"""A folder with a checkpoint that any engine can load: a new one for each version, and a link to the newest.

    FOLDER/current            a link to the version that was committed last
    FOLDER/versions/RUN-000000000042/   model.safetensors, config.json, tokenizer.json …
    FOLDER/held.json          which version that is, so that no older one is taken for newer after a restart
    FOLDER/.sparserl/         what is being built; cleared when a process attaches

A version's folder is complete and on disk before it has its name, and the link is replaced in one step: a kill at any
moment leaves the old checkpoint or the new one. Older versions go when a newer one is committed, but for the last few.

Whatever takes room on the disk is written by `prepare`; a commit, and taking it back, only give names. `current` is the
one link that is made here, and it is read only where it says `versions/NAME`; any other link is an error.
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
from ..files import Folder
from ..sources.checkpoint import checkpoint_in
from ..sources.safetensors import HEADER_BYTES, encode_header, parse_json, require_savable
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
_CURRENT, _HELD, _BUILDING = "current", "held.json", ".sparserl"
_HELD_BYTES = 4096
_SHARD_BYTES = 5 << 30


class _Place(NamedTuple):
    """The folders of a target, open."""

    root: Folder
    versions: Folder
    building: Folder  # locked as long as it is open

    @property
    def current(self) -> str | None:
        """The name of the version that the link points to."""
        link = self.root.linked(_CURRENT)
        if link is None:
            return None
        above, _, name = link.rpartition("/")
        if above != "versions" or not _VERSION.fullmatch(name):
            raise CheckpointError(
                f"{self.root.path / _CURRENT} is a link to {link!r}, which is no version of this folder; remove it, "
                "or choose another folder"
            )
        return name

    def close(self) -> None:
        for folder in self:
            folder.close()


class FolderTarget:
    """A checkpoint folder that follows a run."""

    profiles: frozenset[str] | None = None
    keeps_files = True

    def __init__(self, folder: str | os.PathLike[str], keep: int = 2, threads: int | None = None) -> None:
        self.root = Path(folder).absolute()
        self.keep, self._threads = max(1, keep), threads
        self._place: _Place | None = None

    @property
    def current(self) -> Path:
        """The link to the newest checkpoint."""
        return self.root / _CURRENT

    @property
    def building(self) -> Path:
        return self.root / _BUILDING

    def attach(self, table: TensorTable) -> Weights | None:
        require_savable(table)
        with _errors(self.root, "used"):
            place = self._hold()
            name = place.current
            if name is None or place.versions.status(name) is None:
                return None
            try:
                with place.versions.folder(name) as folder:
                    weights = checkpoint_in(folder)
                require_like(table, memories(weights), "the run", str(self.current))
            except WeightsError:
                return None  # one of another run, or damaged: it will be written anew
            return weights

    def prepare(self, change: Change) -> PreparedFolder:
        """Build the checkpoint of a version, whole and on disk, under a name of its own."""
        with _errors(self.root, f"given version {change.version}"):
            place = self._hold()
            self.prune()  # which a commit without room may have left undone
            prepared = PreparedFolder(self, place, change)
            try:
                self._build(place, prepared.draft, change)
                prepared.write_held()
            except BaseException:
                prepared.discard()
                raise
            return prepared

    def _build(self, place: _Place, draft: str, change: Change) -> None:
        with place.building.folder(draft, make=True) as folder:
            if change.fresh is not None:
                _write(folder, change.fresh, change.files or {})
                return
            name = place.current
            if name is None:
                raise CheckpointError(f"{self.current} is not there any more; the next sync starts from an anchor")
            with place.versions.folder(name) as base:
                copy_patched(base, folder, change.patches, self._threads)

    def held(self) -> tuple[str, float, int] | None:
        """What was committed here last; None where nothing was, or nobody can tell."""
        try:
            with Folder.open(self.root) as root, os.fdopen(root.file(_HELD), "rb") as file:
                note = parse_json(file.read(_HELD_BYTES), _HELD)
        except (OSError, WeightsError):
            return None
        run, created, version = (note.get(key) for key in ("run", "created", "version"))
        if isinstance(run, str) and isinstance(created, int | float) and type(version) is int:
            return (run, float(created), version) if math.isfinite(created) else None
        return None

    def close(self) -> None:
        """Let another process follow into this folder."""
        if self._place is not None:
            self._place.close()
            self._place = None

    def prune(self) -> None:
        """Remove versions but for the last few and the current one."""
        place = self._hold()
        now = place.current
        versions = []
        for name in place.versions.names():
            status = place.versions.status(name) if _VERSION.fullmatch(name) else None
            if status is not None and stat.S_ISDIR(status.st_mode):
                versions.append((status.st_mtime, name))
        others = [name for _, name in sorted(versions) if name != now]
        for name in others[: max(0, len(versions) - self.keep)]:
            aside = f"old-{uuid.uuid4().hex}"
            with contextlib.suppress(OSError):
                place.versions.rename(name, place.building, aside)
                place.building.remove(aside)

    def _hold(self) -> _Place:
        """One process at a time; clears what a killed one left, versions too many among it."""
        if self._place is not None and not self._place.building.gone:
            return self._place
        with contextlib.ExitStack() as stack:
            root = stack.enter_context(Folder.open(self.root, make=True))
            status = root.status(_CURRENT)
            if status is not None and not stat.S_ISLNK(status.st_mode):
                raise CheckpointError(f"{self.current} is not a link; choose a folder that nothing else is in")
            versions = stack.enter_context(root.folder("versions", make=True))
            building = stack.enter_context(root.folder(_BUILDING, make=True))
            if not building.lock():
                raise CheckpointError(f"another process follows into {self.root}")
            for name in filter(_DRAFT.fullmatch, building.names()):
                building.remove(name)
            place = _Place(root, versions, building)
            place.current  # noqa: B018  # refuses a link that is not ours
            stack.pop_all()
        self._place = place
        self.prune()
        return place


class PreparedFolder:
    """A checkpoint that is whole and on disk, and not yet the current one."""

    def __init__(self, target: FolderTarget, place: _Place, change: Change) -> None:
        self._target = target
        self._place = place
        self._change = change
        self.draft = uuid.uuid4().hex
        self._held = f"held-{uuid.uuid4().hex}"
        self._link = f"link-{uuid.uuid4().hex}"  # to this version
        self._back = f"link-{uuid.uuid4().hex}"  # to the one before
        patched = sum(patch.changed for patch in change.patches)
        self.changed = patched if change.fresh is None else table_of(memories(change.fresh)).elements

    def write_held(self) -> None:
        """What is to be remembered, under a name of its own."""
        change = self._change
        held = {"run": change.run, "created": change.created, "version": change.version, "digest": change.digest.hex}
        with self._place.building.creating(self._held) as file:
            file.write(json.dumps(held).encode())

    def commit(self) -> Undo:
        root, versions, building = self._place
        name = own = f"{self._change.run}-{self._change.version:012d}"
        with _errors(self._target.root, f"given version {self._change.version}"):
            before = self._place.current
            while versions.status(name) is not None:  # the same version once more: the one that is there may be in use
                name = f"{own}.{uuid.uuid4().hex[:8]}"
            try:
                if before is not None:
                    building.link(self._back, f"versions/{before}")
                building.link(self._link, f"versions/{name}")
                building.rename(self.draft, versions, name)
                versions.sync()
                building.rename(self._link, root, _CURRENT)
                root.sync()
            except BaseException:
                with contextlib.suppress(OSError):
                    self._point_back(before)
                raise
        return lambda: self._undo(before)

    def _undo(self, before: str | None) -> None:
        with _errors(self._target.root, "taken back to the version before"):
            self._point_back(before)
        self.discard()

    def _point_back(self, before: str | None) -> None:
        """Make `current` what it was, which takes no room on the disk."""
        root, _, building = self._place
        if before is None:
            with contextlib.suppress(FileNotFoundError):
                root.unlink(_CURRENT)
        else:
            building.rename(self._back, root, _CURRENT)
        with contextlib.suppress(OSError):  # it can be seen
            root.sync()

    def finish(self) -> None:
        """Remember the version, and remove older ones; what cannot be done now, the next version or process does."""
        root, _, building = self._place
        with contextlib.suppress(OSError):
            building.rename(self._held, root, _HELD)
            root.sync()
        self.discard()
        with contextlib.suppress(OSError, CheckpointError):
            self._target.prune()

    def discard(self) -> None:
        for name in (self.draft, self._held, self._link, self._back):
            with contextlib.suppress(OSError):
                self._place.building.remove(name)


def folder(path: str | os.PathLike[str], *, keep: int = 2, threads: int | None = None) -> FolderTarget:
    """A folder in which `current` is always a whole Hugging Face checkpoint; the last `keep` versions stay."""
    return FolderTarget(path, keep, threads)


def write_checkpoint(out: Path, weights: Weights, files: Mapping[str, bytes]) -> None:
    """Weights as a Hugging Face checkpoint folder, on disk when this returns."""
    with Folder.open(out, make=True) as folder:
        _write(folder, weights, files)


def _write(out: Folder, weights: Weights, files: Mapping[str, bytes]) -> None:
    """Weights as a checkpoint in an empty folder."""
    require_savable(table_of(memories(weights)))
    for name, data in files.items():
        above, _, last = name.rpartition("/")
        with out.below(above, make=True) as folder, folder.creating(last) as file:
            file.write(data)
    for above in {name.rpartition("/")[0] for name in files}:
        with out.below(above) as folder:
            folder.sync()
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


def _write_index(out: Folder, name: str, shards: dict[str, dict[str, Bits]]) -> None:
    total = sum(bits.array.nbytes for shard in shards.values() for bits in shard.values())
    places = {tensor: shard for shard, tensors in shards.items() for tensor in tensors}
    index = {"metadata": {"total_size": total}, "weight_map": places}
    data = json.dumps(index, indent=2, sort_keys=True).encode()
    if len(data) > HEADER_BYTES:
        raise CheckpointError(f"{name}: {len(places)} tensors need an index of {len(data)} bytes, past the limit")
    with out.creating(name) as file:
        file.write(data)


@contextlib.contextmanager
def _errors(root: Path, done: str) -> Iterator[None]:
    """Trouble with the disk as an error of the target."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{root} cannot be {done}: {error}") from error


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
