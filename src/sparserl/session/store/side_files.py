"""Files that travel with the weights: config, tokenizer and the like. Only those that are just sent are in memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from ...errors import SessionError
from ...transport.stores.base import Store, fetch
from ...transport.stores.deadline import Transfers
from .records import MOST_FILE, Blob, RunRecord, file_name, path, require_files, require_hash, sha256
from .transfer import AT_ONCE, FLIGHT_BYTES

Contents = Mapping[str, bytes | Path]

_WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth")


def contents_of(files: Mapping[str, bytes] | str | Path | None, source_files: Mapping[str, bytes]) -> Contents:
    """Names, and contents or where those are: of a folder, all but hidden files and the weights.

    source_files: those that the source of the weights brings along, unless `files` has others of these names.

    Raises:
        SessionError: It is neither a folder nor contents by name, or there is too much of it.
    """
    contents: dict[str, bytes | Path] = dict(source_files)
    if isinstance(files, Mapping):
        for name, content in files.items():
            if not isinstance(content, bytes | bytearray | memoryview):
                raise SessionError(f"files[{name!r}] is a {type(content).__name__}; the contents of a file are bytes")
            contents[name] = bytes(content)
    elif files is not None:
        root = Path(files)
        if not root.is_dir():
            raise SessionError(f"files is {str(files)!r}, which is no folder; give a folder, or contents by name")
        for file in sorted(root.rglob("*")):
            parts = file.relative_to(root).parts
            if file.is_file() and not file.name.endswith(_WEIGHTS) and not any(p.startswith(".") for p in parts):
                contents["/".join(parts)] = file
    sizes = {file_name(name): _size(content) for name, content in contents.items()}
    require_files(sizes, "the files that travel with the weights")
    return contents


def _size(content: bytes | Path) -> int:
    return content.stat().st_size if isinstance(content, Path) else len(content)


def upload(store: Store, run: str, contents: Contents) -> dict[str, Blob]:
    """Write the files of a run, a few at a time."""

    def put(content: bytes | Path) -> Blob:
        data = _read(content) if isinstance(content, Path) else content
        blob = Blob(sha256(data), len(data))
        store.put(path(run, "files", blob.hash), data)
        return blob

    with Transfers(AT_ONCE, f"{store.url}: the files of run {run}") as transfers:
        sent = transfers.ahead(put, contents.values(), _size, FLIGHT_BYTES)
        blobs = dict(zip(contents, sent, strict=True))
    require_files({name: blob.size for name, blob in blobs.items()}, "the files that travel with the weights")
    return blobs


def _read(file: Path) -> bytes:
    """All of a file, but no more than may travel: it may have grown since it was looked at."""
    try:
        with file.open("rb") as stream:
            return stream.read(MOST_FILE + 1)
    except OSError as error:
        raise SessionError(f"{file} cannot travel with the weights: {error}") from error


class StoredFiles(Mapping[str, bytes]):
    """The files of a run, each fetched when it is asked for."""

    def __init__(self, store: Store, run: RunRecord) -> None:
        self._store = store
        self._run = run

    def __getitem__(self, name: str) -> bytes:
        blob = self._run.files[name]
        place = path(self._run.run, "files", blob.hash)
        data = fetch(self._store, place, blob.size)
        require_hash(data, blob.hash, place)
        return data

    def __iter__(self) -> Iterator[str]:
        return iter(self._run.files)

    def __len__(self) -> int:
        return len(self._run.files)
