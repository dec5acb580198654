"""Weights of a checkpoint on disk, mapped into memory: a safetensors file, or a Hugging Face folder.

A folder has an index (`*.safetensors.index.json`) that says which shard holds which tensor, or one safetensors file.
Index and shards must agree exactly: a shard or tensor that is missing, unnamed or there twice is an error that names
it. Pages are read when they are touched and belong to the operating system, so that a checkpoint may be larger than
memory. A file must not be cut short while it is mapped; replacing it by a rename is fine.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path, PurePosixPath

import numpy as np

from ..bits import Bits
from ..errors import CheckpointError
from .safetensors import HEADER_BYTES, parse_json, read_header

_SUFFIX = ".safetensors"
_INDEX = ".safetensors.index.json"


class Checkpoint(Mapping[str, Bits]):
    """The weights of a checkpoint by name; made by `open_checkpoint`."""

    def __init__(self, path: Path, shards: Mapping[Path, Mapping[str, Bits]]) -> None:
        self.path = path
        self.files = tuple(shards)
        self._tensors = {name: bits for held in shards.values() for name, bits in held.items()}

    def __getitem__(self, name: str) -> Bits:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(bits.array.nbytes for bits in self._tensors.values())

    def __repr__(self) -> str:
        return f"<Checkpoint {self.path}: {len(self)} tensors in {len(self.files)} file(s)>"


def open_checkpoint(path: str | os.PathLike[str], *, writable: bool = False) -> Checkpoint:
    """The weights of a safetensors file or of a checkpoint folder, without reading them.

    They are read-only unless `writable` is set: then what is written to a tensor goes to the file.
    """
    path = Path(path)
    if not path.exists():
        raise CheckpointError(f"{path}: no such file or folder")
    if not path.is_dir():
        return Checkpoint(path, {path: _open_shard(path, writable)})
    index = _find_index(path)
    if index is None:
        only = _find_file(path)
        return Checkpoint(path, {only: _open_shard(only, writable)})
    weight_map = _read_index(index)
    shards = {}
    for shard in dict.fromkeys(weight_map.values()):
        if not (path / shard).is_file():
            name = next(n for n, s in weight_map.items() if s == shard)
            raise CheckpointError(f"{path}: shard {shard!r} is missing; {index.name} says it holds {name!r}")
        shards[shard] = _open_shard(path / shard, writable)
    _require_agreement(index, weight_map, shards)
    return Checkpoint(path, {path / shard: held for shard, held in shards.items()})


def _open_shard(path: Path, writable: bool) -> dict[str, Bits]:
    """The tensors of one file as views of its pages."""
    if not path.is_file():
        raise CheckpointError(f"{path} is neither a file nor a folder")
    with path.open("r+b" if writable else "rb") as file:
        slots = read_header(file, str(path))
        pages = np.memmap(file, np.uint8, "r+" if writable else "r").view(np.ndarray)
    out = {}
    for slot in slots:
        try:
            array = pages[slot.start : slot.stop].view(slot.dtype.uint).reshape(slot.shape)
        except ValueError as error:
            raise CheckpointError(f"{path}: tensor {slot.name!r}: shape {list(slot.shape)}: {error}") from error
        out[slot.name] = Bits(array, slot.dtype)
    return out


def _find_index(folder: Path) -> Path | None:
    """The index that loaders would take, unless they would not agree on one."""
    found = sorted(p for p in folder.iterdir() if p.name.endswith(_INDEX))
    usual = folder / f"model{_INDEX}"
    if usual in found:
        alone = folder / f"model{_SUFFIX}"
        if alone.exists() and alone.name not in _read_index(usual).values():
            raise CheckpointError(
                f"{folder} holds both {alone.name} and {usual.name}, which does not name it: some loaders read the "
                "one, some the other. Remove what is out of date"
            )
        return usual
    if len(found) > 1:
        raise CheckpointError(f"{folder} has several indices and none is {usual.name}: {_names(found)}")
    return found[0] if found else None


def _find_file(folder: Path) -> Path:
    """The one safetensors file of a folder without an index."""
    found = sorted(p for p in folder.iterdir() if p.name.endswith(_SUFFIX))
    usual = folder / f"model{_SUFFIX}"
    if usual in found:
        return usual
    if not found:
        raise CheckpointError(f"{folder} is not a checkpoint: it has no {_SUFFIX} file")
    if len(found) > 1:
        raise CheckpointError(f"{folder} has several {_SUFFIX} files and no index says how they belong together")
    return found[0]


def _read_index(index: Path) -> dict[str, str]:
    """Which shard holds which tensor."""
    with index.open("rb") as file:
        raw = file.read(HEADER_BYTES + 1)
    if len(raw) > HEADER_BYTES:
        raise CheckpointError(f"{index} is larger than {HEADER_BYTES} bytes")
    weight_map = parse_json(raw, str(index)).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: no weight_map with at least one tensor")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not shard or "\0" in shard:
            raise CheckpointError(f"{index}: the shard of {name!r} is not a file name")
        inside = PurePosixPath(shard)
        if inside.is_absolute() or ".." in inside.parts:
            raise CheckpointError(f"{index}: the shard {shard!r} of {name!r} lies outside the folder")
    return weight_map


def _require_agreement(index: Path, weight_map: Mapping[str, str], shards: Mapping[str, Mapping[str, Bits]]) -> None:
    """Every tensor stands in exactly the shard that the index names."""
    home: dict[str, str] = {}
    for shard, held in shards.items():
        for name in held:
            if (other := home.setdefault(name, shard)) != shard:
                raise CheckpointError(f"{index.parent}: tensor {name!r} stands in two shards, {other} and {shard}")
    for name, shard in weight_map.items():
        if name not in shards[shard]:
            where = f"; it is in {home[name]}" if name in home else ""
            raise CheckpointError(f"{index}: tensor {name!r} is not in {shard}, where the index puts it{where}")
    for name, shard in home.items():
        if name not in weight_map:
            raise CheckpointError(f"{index}: tensor {name!r} is in {shard}, but the index does not name it")


def _names(paths: list[Path]) -> str:
    return ", ".join(p.name for p in paths)
