"""Files that travel with the weights: config, tokenizer and the like. Only those that are just sent are in memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ...errors import SessionError
from ...sources.checkpoint_files import files_left_behind, travelling_files
from ...sources.modules import files_of
from ...transport.stores.base import Store, fetch
from ...transport.stores.deadline import AT_ONCE, FLIGHT_BYTES, Transfers
from ..logs import log
from .fields import sha256
from .records import MOST_FILE, Blob, StoredFile, file_name, require_files, require_hash

Contents = Mapping[str, bytes | Path]
_CONFIG = "config.json"


def contents_of(files: Mapping[str, bytes] | str | Path | None, source: Any) -> Contents:
    """Names, and contents or where those are: of a folder, all but hidden files and the weights.

    source: the source of the weights. It may bring files along, of which `files` may have others; and it may adapt a
        `config.json` to the weights that it gives.

    Raises:
        SessionError: It is neither a folder nor contents by name, or there is too much of it.
    """
    contents: dict[str, bytes | Path] = dict(files_of(source))
    if isinstance(files, Mapping):
        for name, content in files.items():
            if not isinstance(content, bytes | bytearray | memoryview):
                raise SessionError(f"files[{name!r}] is a {type(content).__name__}; the contents of a file are bytes")
            contents[name] = bytes(content)
    elif files is not None:
        if not isinstance(files, str | os.PathLike):
            raise SessionError(f"files is a {type(files).__name__}; give a folder, or contents by name")
        root = Path(files)
        if not root.is_dir():
            raise SessionError(f"files is {str(files)!r}, which is no folder; give a folder, or contents by name")
        contents.update(travelling_files(root))
    if files is not None and _CONFIG in contents and (adapted := getattr(source, "adapted", None)) is not None:
        contents[_CONFIG] = adapted(_bytes(contents[_CONFIG]))
    sizes = {file_name(name): _size(content) for name, content in contents.items()}
    require_files(sizes, "the files that travel with the weights")
    return contents


def _bytes(content: bytes | Path) -> bytes:
    return _read(content) if isinstance(content, Path) else content


def _size(content: bytes | Path) -> int:
    return content.stat().st_size if isinstance(content, Path) else len(content)


class CapturedFile(NamedTuple):
    """A file as it was when it was looked at, and where its bytes are."""

    blob: Blob
    content: bytes | Path


Captured = Mapping[str, CapturedFile]


class SideFiles:
    """The files of a publisher, which are looked at again for every version.

    files: a folder, or contents by name; None for those that the source brings along, if any.
    """

    def __init__(self, files: Mapping[str, bytes] | str | Path | None, source: Any) -> None:
        self._files = files
        self._source = source
        self._hashed: dict[Path, tuple[tuple[int, ...], Blob]] = {}  # with size, times and inode when it was read
        self._is_gone = False  # whether the folder was removed
        contents_of(files, source)
        names = [] if files is None or isinstance(files, Mapping) else files_left_behind(Path(files))
        if names:
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            log.warning("%s: not sent with the weights: %s%s", files, ", ".join(map(repr, names[:5])), more)

    def capture(self) -> Captured | None:
        """The files as they are now; None where there are none, so that those of the last version stay."""
        if isinstance(self._files, str | Path) and not Path(self._files).is_dir():
            if not self._is_gone:
                log.warning("%s is gone: the files of the last version stay those of the next ones", self._files)
            self._is_gone = True
            return None
        self._is_gone = False
        contents = contents_of(self._files, self._source)
        if self._files is None and not contents:
            return None
        files: dict[str, CapturedFile] = {}
        memory = FLIGHT_BYTES  # for bytes that are kept until they are sent; larger files are read again
        for name, content in contents.items():
            file = self._captured(content)
            if isinstance(content, Path) and not isinstance(file.content, Path):
                if file.blob.size > memory:
                    file = file._replace(content=content)
                else:
                    memory -= file.blob.size
            files[name] = file
        require_files({name: file.blob.size for name, file in files.items()}, "the files that travel with the weights")
        return files

    def _captured(self, content: bytes | Path) -> CapturedFile:
        """A file with its hash; the bytes of one that has changed, which may be written to again from now on."""
        if isinstance(content, bytes):
            return CapturedFile(Blob(sha256(content), len(content)), content)
        status = content.stat()
        signature = (status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)
        known = self._hashed.get(content)
        if known is not None and known[0] == signature:
            return CapturedFile(known[1], content)
        data = _read(content)
        blob = Blob(sha256(data), len(data))
        self._hashed[content] = (signature, blob)
        return CapturedFile(blob, data)


def upload(store: Store, files: Captured, place: Callable[[CapturedFile], str]) -> None:
    """Write files, a few at a time, each as the object that `place` names."""

    def put(file: CapturedFile) -> None:
        data = _bytes(file.content)
        if sha256(data) != file.blob.hash:
            raise SessionError(f"{str(file.content)!r} was written to while it was published")
        store.put(place(file), data)

    with Transfers(AT_ONCE, f"{store.url}: the files that travel with the weights") as transfers:
        for _ in transfers.ahead(put, files.values(), lambda file: file.blob.size, FLIGHT_BYTES):
            pass


def _read(file: Path) -> bytes:
    """All of a file, but no more than may travel: it may have grown since it was looked at."""
    try:
        with file.open("rb") as stream:
            return stream.read(MOST_FILE + 1)
    except OSError as error:
        raise SessionError(f"{file} cannot travel with the weights: {error}") from error


class StoredFiles(Mapping[str, bytes]):
    """The files of a version, each fetched when it is asked for."""

    def __init__(self, store: Store, files: Mapping[str, StoredFile]) -> None:
        self._store = store
        self._files = files

    def __getitem__(self, name: str) -> bytes:
        blob, place = self._files[name]
        data = fetch(self._store, place, blob.size)
        require_hash(data, blob.hash, place)
        return data

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)
