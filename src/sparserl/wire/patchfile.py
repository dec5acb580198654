"""A patch as bytes: header with the tensor table, buckets, footer. Written and read bucket by bucket."""

from __future__ import annotations

import os
import stat
import struct
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import BinaryIO, Protocol

import numpy as np

from ..errors import InvalidField, LimitExceeded, Truncated, UnsupportedFormat
from ..weights.boxes import Boxes, Places, columns
from ..weights.digest import Digest
from ..weights.shards import Place
from ..weights.table import TensorTable
from . import limits
from .bucket import decode_places, encode_places
from .check import place_columns, refuse_overlapping_places
from .cursor import CHECKSUM_BYTES, Cursor, checksum, strip_checksum, varint, varints
from .table import EncodedTable, decode_table, decompress_table, encoded_table, table_hash

MAGIC = b"SRLPATCH"
END = b"SRLPEND\n"
_TRAILER = struct.Struct("<Q8s")
_COMPLETE = 1


@dataclass(frozen=True)
class Footer:
    """The fields that follow the buckets. `covers` is None if the patch covers the whole table."""

    base: Digest
    result: Digest
    changed: int
    covers: Sequence[Place] | None
    sizes: Sequence[int] = ()
    checksums: bytes = b""  # of all buckets, joined


def encode_header(table: EncodedTable) -> bytes:
    """Magic, version, features, and the tensor table, compressed, with a checksum."""
    sizes = varint(len(table.raw)) + varint(len(table.compressed))
    head = MAGIC + bytes((limits.FORMAT_VERSION, 0)) + sizes + table.compressed
    return head + checksum(head)


def encode_footer(footer: Footer, header_checksum: bytes) -> bytes:
    """The footer, with the checksum of the header, and the length and checksum of every bucket."""
    complete = footer.covers is None
    out = header_checksum + footer.base.to_bytes() + footer.result.to_bytes()
    out += varint(_COMPLETE if complete else 0) + varint(footer.changed) + varint(len(footer.sizes))
    out += varints(np.array(footer.sizes, np.int64)) + footer.checksums
    if footer.covers is not None:
        tensor, regions = columns(footer.covers)
        out += varint(tensor.size) + encode_places(tensor, np.zeros(tensor.size, np.int64), regions)
    out += checksum(out)
    return out + _TRAILER.pack(len(out), END)


class Bytes(Protocol):
    """Random access to a patch, in memory or on disk."""

    @property
    def size(self) -> int: ...

    @property
    def in_memory(self) -> bool: ...

    def read(self, offset: int, size: int) -> bytes | memoryview: ...


class BytesInMemory:
    """A patch in memory."""

    in_memory = True

    def __init__(self, data: bytes | memoryview) -> None:
        self._data = memoryview(data).toreadonly()  # so that kernels are compiled for one kind of array
        self.size = len(self._data)

    def read(self, offset: int, size: int) -> memoryview:
        return self._data[offset : offset + size]


class BytesOnDisk:
    """A patch in a file, which stays open and may be unlinked. Takes a path, or a descriptor and closes it."""

    in_memory = False

    def __init__(self, path: str | os.PathLike[str] | int) -> None:
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # opening a pipe must not block
        self._file = path if isinstance(path, int) else os.open(path, flags)
        weakref.finalize(self, os.close, self._file)  # when the patch is no longer in use
        status = os.fstat(self._file)
        if not stat.S_ISREG(status.st_mode):
            raise InvalidField(f"{path} is not a regular file; give the path of a patch file")
        self.size = status.st_size

    def read(self, offset: int, size: int) -> bytes:
        return os.pread(self._file, size, offset)


class PatchWriter:
    """Writes a patch from front to back to a file object. Only the fields of the footer stay in memory."""

    def __init__(self, file: BinaryIO, table: TensorTable) -> None:
        encoded = encoded_table(table)
        self.hash = encoded.hash
        self._file = file
        header = encode_header(encoded)
        self._header_checksum = header[-CHECKSUM_BYTES:]
        self._sizes: list[int] = []
        self._checksums: list[bytes] = []
        self._file.write(header)

    def add(self, bucket: bytes | memoryview) -> None:
        self._file.write(bucket)
        self._sizes.append(len(bucket))
        self._checksums.append(bytes(bucket[-CHECKSUM_BYTES:]))

    def finish(self, base: Digest, result: Digest, changed: int, covers: Sequence[Place] | None) -> None:
        places = covers if covers is None or isinstance(covers, Places) else tuple(covers)
        footer = Footer(base, result, changed, places, tuple(self._sizes), b"".join(self._checksums))
        self._file.write(encode_footer(footer, self._header_checksum))


class PatchReader:
    """Reads header and footer at once, and each bucket on request. All bytes are checked before they are used."""

    def __init__(self, source: Bytes, table: TensorTable | None = None) -> None:
        """`table` is the table of the patch, if the caller has it; then it is not parsed again."""
        self._source = source
        self._caller_table = table
        self.size = source.size
        self.table, self.hash, header_checksum, self.header_bytes = self._header()
        self.footer = self._footer(header_checksum)
        self._starts = [self.header_bytes, *(self.header_bytes + np.cumsum(self.footer.sizes, dtype=np.int64)).tolist()]

    def __len__(self) -> int:
        return len(self.footer.sizes)

    @property
    def in_memory(self) -> bool:
        return self._source.in_memory

    @property
    def sizes(self) -> Sequence[int]:
        """Bytes of each bucket."""
        return self.footer.sizes

    def arrivals(self) -> Iterable[int]:
        """The numbers of the buckets in the order of arrival: all have arrived."""
        return range(len(self))

    def bucket(self, index: int) -> bytes | memoryview:
        """The bytes of a bucket, whose checksum must be the one in the footer."""
        data = self._read(self._starts[index], self.footer.sizes[index], f"bucket {index}")
        expected = self.footer.checksums[index * CHECKSUM_BYTES : (index + 1) * CHECKSUM_BYTES]
        if bytes(data[-CHECKSUM_BYTES:]) != expected:
            raise InvalidField(f"bucket {index} is not the bucket that the footer lists; the bytes were altered")
        return data

    def parts(self) -> Iterator[bytes | memoryview]:
        """The bytes of the patch from front to back: header, buckets, footer."""
        yield self._read(0, self.header_bytes, "patch header")
        for index in range(len(self)):
            yield self.bucket(index)
        yield self._read(self._starts[-1], self.size - self._starts[-1], "patch footer")

    def _read(self, offset: int, size: int, label: str) -> bytes | memoryview:
        """Bytes of the patch. A file may have become shorter since it was opened."""
        data = self._source.read(offset, size)
        if len(data) != size:
            raise Truncated(f"{label}: {size} bytes are expected, only {len(data)} could be read")
        return data

    def _header(self) -> tuple[TensorTable, bytes, bytes, int]:
        limit = len(MAGIC) + 2 + 20
        cursor = Cursor(self._read(0, min(limit, self.size), "patch header"), "patch header")
        if bytes(cursor.take(len(MAGIC), "magic")) != MAGIC:
            raise InvalidField("patch header: not a sparserl patch")
        if (version := cursor.byte("version")) != limits.FORMAT_VERSION:
            raise UnsupportedFormat(f"patch: format version {version}; this release reads {limits.FORMAT_VERSION}")
        if features := cursor.byte("required features"):
            raise UnsupportedFormat(f"patch: unknown required features {features:#010b}")
        raw_size = cursor.varint("table length", limits.TABLE_BYTES)
        coded_size = cursor.varint("coded table length", limits.TABLE_BYTES)
        end = cursor.offset + coded_size + CHECKSUM_BYTES
        if end > self.size:
            raise Truncated(f"patch header: needs {end} bytes, the patch has {self.size}")
        header = self._read(0, end, "patch header")
        body = strip_checksum(header, "patch header")
        raw = decompress_table(body[cursor.offset :], raw_size)
        table = decode_table(raw) if self._caller_table is None else self._caller_table
        return table, table_hash(raw), bytes(header[-CHECKSUM_BYTES:]), end

    def _footer(self, header_checksum: bytes) -> Footer:
        space = self.size - self.header_bytes - _TRAILER.size
        if space < 0:
            raise Truncated(f"patch: {self.size} bytes are too few for a footer")
        length, end = _TRAILER.unpack(self._read(self.size - _TRAILER.size, _TRAILER.size, "patch trailer"))
        if end != END:
            raise Truncated("patch: the end mark is missing; the patch is cut short or was altered")
        if length > min(limits.FOOTER_BYTES, space):
            raise LimitExceeded(f"patch: a footer of {length} bytes does not fit in a patch of {self.size}")
        body = strip_checksum(self._read(self.header_bytes + space - length, length, "patch footer"), "patch footer")
        return self._decode_footer(body, header_checksum, space - length)

    def _decode_footer(self, body: memoryview, header_checksum: bytes, space: int) -> Footer:
        cursor = Cursor(body, "patch footer")
        if bytes(cursor.take(CHECKSUM_BYTES, "header checksum")) != header_checksum:
            raise InvalidField("patch footer: belongs to another header")
        base = Digest.from_bytes(cursor.take(16, "base digest"))
        result = Digest.from_bytes(cursor.take(16, "result digest"))
        flags = cursor.varint("flags", _COMPLETE)
        changed = cursor.varint("changed", self.table.elements)
        count = cursor.varint("bucket count", limits.BUCKETS)
        sizes = tuple(cursor.varints(count, "bucket lengths", limits.BUCKET_BYTES).tolist())
        if sum(sizes) != space:
            raise InvalidField(f"patch footer: {count} buckets of {sum(sizes)} bytes in all, the patch has {space}")
        checksums = bytes(cursor.take(CHECKSUM_BYTES * count, "bucket checksums"))
        covers: Sequence[Place] | None = None
        if not flags & _COMPLETE:
            n = cursor.varint("covered regions", limits.REGIONS_COVERED)
            tensor, _, regions, _ = decode_places(cursor, n, 0, self.table)
            if isinstance(regions, Boxes):
                covers = Places(regions)
            else:
                covers = tuple(zip(tensor.tolist(), regions, strict=True))
            refuse_overlapping_places(self.table, *place_columns(self.table, covers), len(body))
        cursor.finish()
        return Footer(base, result, changed, covers, sizes, checksums)
