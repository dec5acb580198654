"""Small files behind a patch: those that changed beside the weights, such as a config or a tokenizer.

    patch  contents  directory  trailer

A patch without such files ends with its own trailer, as ever.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Mapping, Sequence

from ..errors import ChecksumMismatch, InvalidField, LimitExceeded, Truncated
from . import limits
from .cursor import CHECKSUM_BYTES, Cursor, checksum, strip_checksum, varint
from .file_names import checked_file_name, require_files
from .patchfile import Bytes
from .table import compress_table, decompress_table

END = b"SRLFEND\n"
_TRAILER = struct.Struct("<QQ8s")  # bytes of the directory, bytes of all that follows the patch, the end mark
_HASH_BYTES = 32
_LABEL = "the files of a patch"


def section_bytes(source: Bytes) -> int:
    """How many bytes of a file follow its patch: 0 if it ends with the patch."""
    if source.size < _TRAILER.size:
        return 0
    _, size, end = _TRAILER.unpack(source.read(source.size - _TRAILER.size, _TRAILER.size))
    if end != END:
        return 0
    if not _TRAILER.size + CHECKSUM_BYTES <= size <= source.size:
        raise LimitExceeded(f"{_LABEL}: a section of {size} bytes does not fit in a file of {source.size}")
    return int(size)


class SourceSlice:
    """A range of bytes, as a source of its own."""

    def __init__(self, source: Bytes, start: int, size: int) -> None:
        self._source = source
        self._start = start
        self.size = size

    @property
    def in_memory(self) -> bool:
        return self._source.in_memory

    def read(self, offset: int, size: int) -> bytes | memoryview:
        return self._source.read(self._start + offset, min(size, self.size - offset))


def encode_files(written: Mapping[str, bytes], removed: Sequence[str] = ()) -> bytes:
    """The section with files that were written, and the names of those that were removed."""
    names = sorted(written)
    _require({name: len(written[name]) for name in names}, removed)
    coded = {name: _encode(written[name]) for name in names}
    directory = _encode_names(names)
    directory += b"".join(varint(len(written[name])) + varint(len(coded[name])) for name in names)
    directory += b"".join(hashlib.sha256(written[name]).digest() for name in names)
    directory += _encode_names(sorted(removed))
    directory += checksum(directory)
    contents = b"".join(coded[name] for name in names)
    size = len(contents) + len(directory) + _TRAILER.size
    return contents + directory + _TRAILER.pack(len(directory), size, END)


def _encode(data: bytes) -> bytes:
    coded = compress_table(data)
    return coded if len(coded) < len(data) else data


def _encode_names(names: Sequence[str]) -> bytes:
    encoded = [name.encode() for name in names]
    return varint(len(names)) + b"".join(map(varint, map(len, encoded))) + b"".join(encoded)


def _require(sizes: Mapping[str, int], removed: Sequence[str]) -> None:
    for name in (*sizes, *removed):
        try:
            checked_file_name(name)
        except ValueError as error:
            raise InvalidField(f"{_LABEL}: {name!r} is not the name of a file below a checkpoint") from error
    require_files(sizes, _LABEL, limits.PATCH_FILES, limits.PATCH_FILE_BYTES)
    if len(removed) > limits.PATCH_FILES or set(removed) & sizes.keys():
        raise InvalidField(f"{_LABEL}: too many are removed, or one is both written and removed")


class FileSection(Mapping[str, bytes]):
    """The files that a patch writes, each read and checked when it is asked for, and the names of those it removes."""

    def __init__(self, source: Bytes) -> None:
        self._source = source
        length, size, _ = _TRAILER.unpack(self._read(source.size - _TRAILER.size, _TRAILER.size))
        contents = size - length - _TRAILER.size
        if contents < 0 or length > limits.FILE_DIRECTORY_BYTES:
            raise LimitExceeded(f"{_LABEL}: a directory of {length} bytes in a section of {size}")
        body = strip_checksum(self._read(contents, length), "the directory of files")
        cursor = Cursor(body, "the directory of files")
        names = _decode_names(cursor)
        numbers = cursor.numbers(2 * len(names), "lengths", limits.PATCH_FILE_BYTES)
        hashes = bytes(cursor.take(_HASH_BYTES * len(names), "hashes"))
        self.removed = tuple(_decode_names(cursor))
        cursor.finish()
        self.sizes = dict(zip(names, numbers[::2], strict=True))
        _require(self.sizes, self.removed)
        if sum(numbers[1::2]) != contents:
            raise InvalidField(f"{_LABEL}: {sum(numbers[1::2])} bytes in the directory, {contents} in the section")
        self._places: dict[str, tuple[int, int, bytes]] = {}
        offset = 0
        for i, name in enumerate(names):
            self._places[name] = (offset, numbers[2 * i + 1], hashes[_HASH_BYTES * i : _HASH_BYTES * (i + 1)])
            offset += numbers[2 * i + 1]

    @property
    def nbytes(self) -> int:
        """Bytes of the section in a file."""
        return self._source.size

    def image(self) -> bytes:
        """The section as it is in a file."""
        return bytes(self._read(0, self._source.size))

    def __getitem__(self, name: str) -> bytes:
        offset, coded_size, hash = self._places[name]
        coded = self._read(offset, coded_size)
        size = self.sizes[name]
        data = bytes(coded) if coded_size == size else decompress_table(coded, size)
        if hashlib.sha256(data).digest() != hash:
            raise ChecksumMismatch(f"file {name!r} of the patch: the bytes are not those that its hash promises")
        return data

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def _read(self, offset: int, size: int) -> bytes | memoryview:
        data = self._source.read(offset, size)
        if len(data) != size:
            raise Truncated(f"{_LABEL}: {size} bytes are expected, only {len(data)} could be read")
        return data


def _decode_names(cursor: Cursor) -> list[str]:
    count = cursor.varint("count of files", limits.PATCH_FILES)
    lengths = cursor.numbers(count, "lengths of names", 1000)
    names = []
    for length in lengths:
        try:
            names.append(bytes(cursor.take(length, "names")).decode())
        except UnicodeDecodeError as error:
            raise InvalidField(f"{_LABEL}: the name {error.object!r} is not UTF-8") from error
    if any(a >= b for a, b in zip(names, names[1:], strict=False)):
        raise InvalidField(f"{_LABEL}: names are not in strictly rising order")
    return names
