"""Weights of a checkpoint on disk, mapped into memory: a safetensors file, or a Hugging Face folder.

A folder has either an index (`*.safetensors.index.json`) that says which file has which tensor, or one safetensors
file. Index and files must agree exactly. Pages are read when they are used, so that a checkpoint may be larger than
memory. A file must not be truncated while it is mapped; it may be replaced by a rename.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any
from unicodedata import category

import numpy as np

from ..errors import CheckpointError
from ..files import Folder, open_regular
from ..weights.dtypes import Bits
from .safetensors import HEADER_BYTES, parse_json, read_header

_SUFFIX = ".safetensors"
_OTHER_FORMATS = {
    ".bin": "a pickle of PyTorch",
    ".pt": "a pickle of PyTorch",
    ".pth": "a pickle of PyTorch",
    ".gguf": "a GGUF file of llama.cpp",
}
_INDEX = ".safetensors.index.json"


class Checkpoint(Mapping[str, Bits]):
    """The weights of a checkpoint by name; made by `open_checkpoint`."""

    def __init__(self, path: Path, shards: Mapping[Path, Mapping[str, Bits]]) -> None:
        self.path = path
        self.files = tuple(shards)
        self._tensors = {name: bits for tensors in shards.values() for name, bits in tensors.items()}

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
    """Map the weights of a safetensors file or of a checkpoint folder into memory, without reading them.

    Args:
        path: the file or the folder.
        writable: whether tensors can be written to; then what is written goes to the file.

    Returns:
        The weights by name, as a mapping from names to `Bits`.

    Raises:
        CheckpointError: the path cannot be read, or is not a valid checkpoint; the message says what is wrong.

    >>> weights = sparserl.sources.open_checkpoint("checkpoints/step-100")                         # doctest: +SKIP
    >>> patch = sparserl.diff(weights, sparserl.sources.open_checkpoint("checkpoints/step-101"))   # doctest: +SKIP
    """
    path = Path(path)
    try:
        if path.is_dir():
            with Folder.open(path, links=True) as folder:
                return checkpoint_in(folder, writable=writable)
        if path.suffix in _OTHER_FORMATS and path.is_file():
            raise CheckpointError(f"{path}: {_describe(path.name)}")
        handle = open_regular(path, _flags(writable))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: no such file or folder") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is neither a file nor a folder that can be read: {error}") from error
    return Checkpoint(path, {path: _shard(handle, path, writable)})


def checkpoint_in(folder: Folder, *, writable: bool = False) -> Checkpoint:
    """The weights of an open checkpoint folder."""
    try:
        return Checkpoint(folder.path, _shards(folder, writable))
    except OSError as error:
        raise CheckpointError(f"{folder.path} cannot be read: {error}") from error


def checkpoint_file(folder: Folder, name: str, *, writable: bool = False) -> Checkpoint:
    """The weights of one safetensors file in an open folder."""
    path = folder.path / name
    try:
        return Checkpoint(path, {path: _shard(folder.file(name, _flags(writable)), path, writable)})
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def _shards(folder: Folder, writable: bool) -> dict[Path, dict[str, Bits]]:
    """The tensors of each file. The index of the folder and the files must agree."""
    index = _find_index(folder)
    if index is None:
        only = _find_file(folder)
        return {folder.path / only: _shard(folder.file(only, _flags(writable)), folder.path / only, writable)}
    weight_map = _read_index(folder, index)
    shards = {}
    for shard in dict.fromkeys(weight_map.values()):
        above, _, last = shard.rpartition("/")
        try:
            with folder.below(above) as parent:
                handle = parent.file(last, _flags(writable))
        except FileNotFoundError as error:
            name = next(n for n, s in weight_map.items() if s == shard)
            raise CheckpointError(
                f"{folder.path}: shard {shard!r} is missing; {index} says that it has {name!r}"
            ) from error
        shards[shard] = _shard(handle, folder.path / shard, writable)
    _require_agreement(folder.path / index, weight_map, shards)
    return {folder.path / shard: tensors for shard, tensors in shards.items()}


def _flags(writable: bool) -> int:
    return os.O_RDWR if writable else os.O_RDONLY


def _shard(handle: int, path: Path, writable: bool) -> dict[str, Bits]:
    """The tensors of an open file as views of its pages."""
    with os.fdopen(handle, "r+b" if writable else "rb") as file:
        slots = read_header(file, str(path))
        pages = np.memmap(file, np.uint8, "r+" if writable else "r").view(np.ndarray)
    tensors = {}
    for slot in slots:
        try:
            array = pages[slot.start : slot.stop].view(slot.dtype.uint).reshape(slot.shape)
        except ValueError as error:
            raise CheckpointError(f"{path}: tensor {slot.name!r}: shape {list(slot.shape)}: {error}") from error
        tensors[slot.name] = Bits(array, slot.dtype)
    return tensors


def _find_index(folder: Folder) -> str | None:
    """The index that loaders use; an error if different loaders would use different files."""
    indices = [name for name in folder.names() if name.endswith(_INDEX)]
    usual = f"model{_INDEX}"
    single_file = f"model{_SUFFIX}"
    if usual in indices:
        if folder.status(single_file) is not None and single_file not in _read_index(folder, usual).values():
            raise CheckpointError(
                f"{folder.path} has both {single_file} and {usual}, which does not name it: some loaders read "
                "the file, others the index. Remove the one that is out of date"
            )
        return usual
    if len(indices) > 1:
        raise CheckpointError(f"{folder.path} has several indices and none is {usual}: {', '.join(indices)}")
    return indices[0] if indices else None


def _describe(name: str) -> str:
    kind = _OTHER_FORMATS[Path(name).suffix]
    return f"{name!r} is {kind}; save the weights as safetensors first (save_pretrained does)"


def _find_file(folder: Folder) -> str:
    """The one safetensors file of a folder without an index."""
    files = [name for name in folder.names() if name.endswith(_SUFFIX)]
    usual = f"model{_SUFFIX}"
    if usual in files:
        return usual
    if not files:
        others = [name for name in folder.names() if name.endswith(tuple(_OTHER_FORMATS))]
        if others:
            raise CheckpointError(f"{folder.path} has no {_SUFFIX} file; {_describe(others[0])}")
        if folder.status("current") is not None:
            raise CheckpointError(f"{folder.path} is not a checkpoint; {folder.path / 'current'} may be one")
        raise CheckpointError(f"{folder.path} is not a checkpoint: it has no {_SUFFIX} file")
    if len(files) > 1:
        raise CheckpointError(f"{folder.path} has several {_SUFFIX} files and no index says how they belong together")
    return files[0]


def _read_index(folder: Folder, name: str) -> dict[str, str]:
    """The file of each tensor."""
    index = folder.path / name
    with os.fdopen(folder.file(name), "rb") as file:
        raw = file.read(HEADER_BYTES + 1)
    if len(raw) > HEADER_BYTES:
        raise CheckpointError(f"{index} is larger than {HEADER_BYTES} bytes")
    weight_map = parse_json(raw, str(index)).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: no weight_map with at least one tensor")
    return {tensor: _inside(shard, tensor, index) for tensor, shard in weight_map.items()}


def _inside(shard: Any, tensor: str, index: Path) -> str:
    """The path of a file inside a checkpoint folder."""
    if not isinstance(shard, str) or not shard or any(category(letter) in ("Cc", "Cs") for letter in shard):
        raise CheckpointError(f"{index}: the shard of {tensor!r} is not a file name")
    path = PurePosixPath(shard)
    if path.is_absolute() or ".." in path.parts:
        raise CheckpointError(f"{index}: the shard {shard!r} of {tensor!r} lies outside the folder")
    return str(path)


def _require_agreement(index: Path, weight_map: Mapping[str, str], shards: Mapping[str, Mapping[str, Bits]]) -> None:
    """Check that every tensor is in exactly the shard that the index names."""
    home: dict[str, str] = {}
    for shard, tensors in shards.items():
        for name in tensors:
            if (other := home.setdefault(name, shard)) != shard:
                raise CheckpointError(f"{index.parent}: tensor {name!r} is in two shards, {other} and {shard}")
    for name, shard in weight_map.items():
        if name not in shards[shard]:
            hint = f"; it is in {home[name]}" if name in home else ""
            raise CheckpointError(f"{index}: tensor {name!r} is not in {shard}, where the index puts it{hint}")
    for name, shard in home.items():
        if name not in weight_map:
            raise CheckpointError(f"{index}: tensor {name!r} is in {shard}, but the index does not name it")
