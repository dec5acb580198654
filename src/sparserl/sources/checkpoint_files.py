"""The files of a checkpoint folder beside its weights: which of them travel, and what differs between two folders."""

from __future__ import annotations

from pathlib import Path

WEIGHT_FILES = (".safetensors", ".safetensors.index.json")
_OTHER_STATE = (".bin", ".bin.index.json", ".pt", ".pth")


def travelling_files(folder: Path) -> dict[str, Path]:
    """The files that travel with the weights, by their names below the folder: all but hidden files and weights."""
    return {name: file for name, file in _files(folder).items() if _travels(name)}


def files_left_behind(folder: Path) -> list[str]:
    """The files that do not travel: hidden ones, and weights other than those that are published."""
    return [name for name in _files(folder) if not _travels(name) and not name.endswith(WEIGHT_FILES)]


def is_other_state(name: str) -> bool:
    """Whether a file has training state, or weights in another format: it belongs to the weights of one version."""
    return name.endswith(_OTHER_STATE)


def changed_files(old: Path, new: Path) -> tuple[dict[str, bytes], list[str]]:
    """The files that travel and are only in the new folder or differ there, and the names of those that are gone."""
    before = travelling_files(old)
    after = travelling_files(new)
    written = {}
    for name, file in after.items():
        data = file.read_bytes()
        if name not in before or before[name].read_bytes() != data:
            written[name] = data
    return written, sorted(before.keys() - after.keys())


def _files(folder: Path) -> dict[str, Path]:
    return {"/".join(file.relative_to(folder).parts): file for file in sorted(folder.rglob("*")) if file.is_file()}


def _travels(name: str) -> bool:
    is_hidden = any(part.startswith(".") for part in name.split("/"))
    return not (is_hidden or is_other_state(name) or name.endswith(WEIGHT_FILES))
