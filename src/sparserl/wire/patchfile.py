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
from .check import place_columns, refuse_shared
from .cursor import CHECKSUM_BYTES, Cursor, checksum, sealed, varint, varints
from .table import EncodedTable, decode_table, decompress_table, encoded_table, table_hash

MAGIC = b"SRLPATCH"
END = b"SRLPEND\n"
_TRAILER = struct.Struct("<Q8s")
_COMPLETE = 1


@dataclass(frozen=True)
class Footer:
    """What is known only once every bucket was written. `covers` is None where the whole table is covered."""

    base: Digest
    result: Digest
    changed: int
    covers: Sequence[Place] | None
    sizes: Sequence[int] = ()
    checksums: bytes = b""  # one behind the other


def encode_header(table: EncodedTable) -> bytes:
    """Magic, version, features, and the tensor table, compressed and sealed."""
    sizes = varint(len(table.raw)) + varint(len(table.compressed))
    head = MAGIC + bytes((limits.FORMAT_VERSION, 0)) + sizes + table.compressed
    return head + checksum(head)


def encode_footer(footer: Footer, seal: bytes) -> bytes:
    """The footer, which names the header (by its checksum) and every bucket (by length and checksum)."""
    complete = footer.covers is None
    out = seal + footer.base.to_bytes() + footer.result.to_bytes()
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

    def read(self, at: int, size: int) -> bytes | memoryview: ...


class InMemory:
    """A patch held as bytes."""

    def __init__(self, data: bytes | memoryview) -> None:
        self._data = memoryview(data).toreadonly()  # one kind of array for the kernels, wherever the bytes come from
        self.size = len(self._data)

    def read(self, at: int, size: int) -> memoryview:
        return self._data[at : at + size]


class OnDisk:
    """A patch in a file, read piece by piece; the file may be unlinked meanwhile, or be a descriptor to be closed."""

    def __init__(self, path: str | os.PathLike[str] | int) -> None:
        waits = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # a pipe must not make us wait
        self._file = path if isinstance(path, int) else os.open(path, waits)
        weakref.finalize(self, os.close, self._file)  # it stays open as long as the patch is in use
        status = os.fstat(self._file)
        if not stat.S_ISREG(status.st_mode):
            raise InvalidField(f"{path} is not a regular file, and a patch is one")
        self.size = status.st_size

    def read(self, at: int, size: int) -> bytes:
        return os.pread(self._file, size, at)


class PatchWriter:
    """Writes a patch front to back into any file object; nothing but the footer's few fields is kept."""

    def __init__(self, file: BinaryIO, table: TensorTable) -> None:
        encoded = encoded_table(table)
        self.hash = encoded.hash
        self._file = file
        header = encode_header(encoded)
        self._seal = header[-CHECKSUM_BYTES:]
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
        self._file.write(encode_footer(footer, self._seal))


class PatchReader:
    """Reads header and footer at once, and buckets when asked. Everything is checked before it is believed."""

    def __init__(self, source: Bytes, known: TensorTable | None = None) -> None:
        """`known` is the table the patch was written with a moment ago, which then is not parsed again."""
        self._source = source
        self._known = known
        self.size = source.size
        self.table, self.hash, seal, self.header_bytes = self._header()
        self.footer = self._footer(seal)
        self._starts = [self.header_bytes, *(self.header_bytes + np.cumsum(self.footer.sizes, dtype=np.int64)).tolist()]

    def __len__(self) -> int:
        return len(self.footer.sizes)

    @property
    def in_memory(self) -> bool:
        return not isinstance(self._source, OnDisk)

    @property
    def sizes(self) -> Sequence[int]:
        """Bytes of each bucket."""
        return self.footer.sizes

    def arrivals(self) -> Iterable[int]:
        """The buckets by their numbers: all of them are here."""
        return range(len(self))

    def bucket(self, index: int) -> bytes | memoryview:
        """The bytes of a bucket: those that the footer names."""
        data = self._read(self._starts[index], self.footer.sizes[index], f"bucket {index}")
        named = self.footer.checksums[index * CHECKSUM_BYTES : (index + 1) * CHECKSUM_BYTES]
        if bytes(data[-CHECKSUM_BYTES:]) != named:
            raise InvalidField(f"bucket {index} is not the one that the footer names")
        return data

    def parts(self) -> Iterator[bytes | memoryview]:
        """The bytes of the patch from front to back: header, buckets, footer."""
        yield self._read(0, self.header_bytes, "patch header")
        for index in range(len(self)):
            yield self.bucket(index)
        yield self._read(self._starts[-1], self.size - self._starts[-1], "patch footer")

    def _read(self, at: int, size: int, what: str) -> bytes | memoryview:
        """Bytes that were there a moment ago; a file may have been cut meanwhile."""
        data = self._source.read(at, size)
        if len(data) != size:
            raise Truncated(f"{what}: {len(data)} of {size} bytes")
        return data

    def _header(self) -> tuple[TensorTable, bytes, bytes, int]:
        most = len(MAGIC) + 2 + 20
        cursor = Cursor(self._read(0, min(most, self.size), "patch header"), "patch header")
        if bytes(cursor.take(len(MAGIC), "magic")) != MAGIC:
            raise InvalidField("patch header: not a sparserl patch")
        if (version := cursor.byte("version")) != limits.FORMAT_VERSION:
            raise UnsupportedFormat(f"patch: format version {version}; this release reads {limits.FORMAT_VERSION}")
        if features := cursor.byte("required features"):
            raise UnsupportedFormat(f"patch: unknown required features {features:#010b}")
        raw_size = cursor.varint("table length", limits.TABLE_BYTES)
        coded_size = cursor.varint("coded table length", limits.TABLE_BYTES)
        end = cursor.at + coded_size + CHECKSUM_BYTES
        if end > self.size:
            raise Truncated(f"patch header: needs {end} bytes, the patch has {self.size}")
        whole = self._read(0, end, "patch header")
        body = sealed(whole, "patch header")
        raw = decompress_table(body[cursor.at :], raw_size)
        table = decode_table(raw) if self._known is None else self._known
        return table, table_hash(raw), bytes(whole[-CHECKSUM_BYTES:]), end

    def _footer(self, seal: bytes) -> Footer:
        room = self.size - self.header_bytes - _TRAILER.size
        if room < 0:
            raise Truncated(f"patch: {self.size} bytes cannot hold a footer")
        length, end = _TRAILER.unpack(self._read(self.size - _TRAILER.size, _TRAILER.size, "patch trailer"))
        if end != END:
            raise Truncated("patch: the end mark is missing; the patch is cut short or was altered")
        if length > min(limits.FOOTER_BYTES, room):
            raise LimitExceeded(f"patch: a footer of {length} bytes cannot stand in {self.size}")
        body = sealed(self._read(self.header_bytes + room - length, length, "patch footer"), "patch footer")
        return self._decode_footer(body, seal, room - length)

    def _decode_footer(self, body: memoryview, seal: bytes, room: int) -> Footer:
        cursor = Cursor(body, "patch footer")
        if bytes(cursor.take(CHECKSUM_BYTES, "header seal")) != seal:
            raise InvalidField("patch footer: belongs to another header")
        base = Digest.from_bytes(cursor.take(16, "base digest"))
        result = Digest.from_bytes(cursor.take(16, "result digest"))
        flags = cursor.varint("flags", _COMPLETE)
        changed = cursor.varint("changed", self.table.elements)
        count = cursor.varint("bucket count", limits.BUCKETS)
        sizes = tuple(cursor.varints(count, "bucket lengths", limits.BUCKET_BYTES).tolist())
        if sum(sizes) != room:
            raise InvalidField(f"patch footer: {count} buckets of {sum(sizes)} bytes in all, {room} are there")
        checksums = bytes(cursor.take(CHECKSUM_BYTES * count, "bucket checksums"))
        covers: Sequence[Place] | None = None
        if not flags & _COMPLETE:
            n = cursor.varint("covered regions", limits.REGIONS_COVERED)
            tensor, _, regions, _ = decode_places(cursor, n, 0, self.table)
            if isinstance(regions, Boxes):
                covers = Places(regions)
            else:
                covers = tuple(zip(tensor.tolist(), regions, strict=True))
            refuse_shared(self.table, *place_columns(self.table, covers), len(body))
        cursor.finish()
        return Footer(base, result, changed, covers, sizes, checksums)
