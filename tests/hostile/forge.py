"""Patches taken apart into their fields and put together again with any of them changed and every checksum right.

Written from docs/format.md alone: nothing of the reader or the writer under test is used to take a patch apart. A
number may be given as an int, which is written canonically, or as bytes, which are written as they are. Streams are
held decoded and written with the `stored` coder, unless `coder` says otherwise, so that a test sees what it edits.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass, field

import xxhash
import zstandard

Number = int | bytes

END = b"SRLPEND\n"


def number(value: Number) -> bytes:
    """Canonical LEB128 of an int; bytes as they are."""
    if isinstance(value, bytes):
        return value
    out = bytearray()
    while value >= 128:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes((*out, value))


def numbers(values: Iterable[Number]) -> bytes:
    return b"".join(map(number, values))


def seal(body: bytes) -> bytes:
    """The body and its checksum."""
    return body + xxhash.xxh3_128_digest(body)


def squeeze(raw: bytes, **parameters: object) -> bytes:
    """A zstd frame without magic number and content size."""
    given = {"write_content_size": False, "format": zstandard.FORMAT_ZSTD1_MAGICLESS, "window_log": 18, **parameters}
    compression = zstandard.ZstdCompressionParameters.from_level(3, **given)
    return zstandard.ZstdCompressor(compression_params=compression).compress(raw)


def unsqueeze(coded: bytes) -> bytes:
    return zstandard.ZstdDecompressor(format=zstandard.FORMAT_ZSTD1_MAGICLESS).decompressobj().decompress(coded)


class Scan:
    """Reads a valid patch; a test that breaks one builds on what it returns."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = bytes(data), 0

    def take(self, size: int) -> bytes:
        self.at += size
        assert self.at <= len(self.data)
        return self.data[self.at - size : self.at]

    def byte(self) -> int:
        return self.take(1)[0]

    def number(self) -> int:
        value = shift = 0
        while (byte := self.byte()) >= 128:
            value |= (byte & 127) << shift
            shift += 7
        return value | byte << shift

    def numbers(self, count: int) -> list[Number]:
        return [self.number() for _ in range(count)]

    @property
    def left(self) -> int:
        return len(self.data) - self.at


@dataclass
class Columns:
    """Places: steps from tensor to tensor, values with their flags, boxes."""

    steps: list[Number]
    values: list[Number]
    boxes: list[Number]

    @classmethod
    def parse(cls, scan: Scan, count: int) -> Columns:
        """The columns that end where the bytes end."""
        steps, values, boxes = scan.numbers(count), scan.numbers(count), []
        while scan.left:
            boxes.append(scan.number())
        return cls(steps, values, boxes)

    def encode(self) -> bytes:
        return numbers(self.steps) + numbers(self.values) + numbers(self.boxes)


@dataclass
class Stream:
    """One stream, decoded. `lengths` and `count` say what the directory claims, where that is not the truth."""

    id: int
    chunks: list[bytes]
    coder: int = 0
    count: Number | None = None
    lengths: list[Number] | None = None

    def directory(self) -> bytes:
        lengths = [len(c) for c in self.coded()] if self.lengths is None else self.lengths
        count = len(lengths) if self.count is None else self.count
        return bytes((self.id, self.coder)) + number(count) + numbers(lengths)

    def coded(self) -> list[bytes]:
        return [squeeze(c) for c in self.chunks] if self.coder == 1 else self.chunks


@dataclass
class Bucket:
    """A bucket, field by field."""

    profile: int
    dtype: int
    hash: bytes
    columns: Columns
    tile_log: int
    chunk_log: int
    estimates: list[tuple[Number, Number]]
    streams: list[Stream]  # without the entry table, which `columns` becomes
    magic: bytes = b"SRLB"
    version: int = 1
    features: int = 0
    entry_count: Number | None = None
    entry_bytes: Number | None = None
    entry_stream: Stream | None = None
    estimate_count: Number | None = None
    stream_count: Number | None = None
    after: bytes = b""

    @classmethod
    def parse(cls, data: bytes) -> Bucket:
        scan = Scan(data[:-16])
        assert seal(scan.data) == data
        magic, version, profile, dtype, features = scan.take(4), *scan.take(4)
        hash, count, entry_bytes = scan.take(16), scan.number(), scan.number()
        tile_log, chunk_log = scan.take(2)
        estimates: list[tuple[Number, Number]] = [(scan.number(), scan.number()) for _ in range(scan.number())]
        directory = []
        for _ in range(scan.number()):
            id, coder = scan.take(2)
            directory.append((id, coder, scan.numbers(scan.number())))
        streams = []
        for id, coder, lengths in directory:
            chunks = [scan.take(int(n)) for n in lengths]
            streams.append(Stream(id, [unsqueeze(c) for c in chunks] if coder else chunks))
        assert not scan.left
        entries = streams.pop(0)
        assert (entries.id, len(entries.chunks[0])) == (0, entry_bytes)
        columns = Columns.parse(Scan(entries.chunks[0]), count)
        return cls(profile, dtype, hash, columns, tile_log, chunk_log, estimates, streams, magic, version, features)

    def stream(self, id: int) -> Stream:
        return next(s for s in self.streams if s.id == id)

    def encode(self) -> bytes:
        """The bytes, with a checksum that holds."""
        raw = self.columns.encode()
        streams = [Stream(0, [raw]) if self.entry_stream is None else self.entry_stream, *self.streams]
        count = len(self.columns.steps) if self.entry_count is None else self.entry_count
        size = len(raw) if self.entry_bytes is None else self.entry_bytes
        out = self.magic + bytes((self.version, self.profile, self.dtype, self.features)) + self.hash
        out += number(count) + number(size) + bytes((self.tile_log, self.chunk_log))
        out += number(len(self.estimates) if self.estimate_count is None else self.estimate_count)
        out += b"".join(number(id) + number(cost) for id, cost in self.estimates)
        out += number(len(streams) if self.stream_count is None else self.stream_count)
        out += b"".join(s.directory() for s in streams) + b"".join(c for s in streams for c in s.coded())
        return seal(out + self.after)


@dataclass
class Table:
    """The tensor table, column by column."""

    names: list[bytes]
    dtypes: list[int]
    ranks: list[int]
    sizes: list[Number]
    count: Number | None = None
    lengths: list[Number] | None = None
    after: bytes = b""

    @classmethod
    def parse(cls, raw: bytes) -> Table:
        scan = Scan(raw)
        lengths = scan.numbers(scan.number())
        names = [scan.take(int(n)) for n in lengths]
        dtypes, ranks = list(scan.take(len(names))), list(scan.take(len(names)))
        table = cls(names, dtypes, ranks, scan.numbers(sum(ranks)))
        assert not scan.left
        return table

    def encode(self) -> bytes:
        out = number(len(self.names) if self.count is None else self.count)
        out += numbers([len(n) for n in self.names] if self.lengths is None else self.lengths)
        return out + b"".join(self.names) + bytes(self.dtypes) + bytes(self.ranks) + numbers(self.sizes) + self.after


@dataclass
class Header:
    """The start of a patch. `coded` stands for the compressed table where it is not simply that."""

    table: Table
    magic: bytes = b"SRLPATCH"
    version: int = 1
    features: int = 0
    size: Number | None = None
    coded_size: Number | None = None
    coded: bytes | None = None

    @classmethod
    def parse(cls, data: bytes) -> tuple[Header, int]:
        """The header, and where it ends."""
        scan = Scan(data)
        magic, version, features = scan.take(8), *scan.take(2)
        size, coded = scan.number(), scan.take(scan.number())
        raw = unsqueeze(coded)
        assert len(raw) == size
        assert seal(data[: scan.at]) == data[: scan.at + 16]
        return cls(Table.parse(raw), magic, version, features), scan.at + 16

    @property
    def hash(self) -> bytes:
        return xxhash.xxh3_128_digest(self.table.encode())

    def encode(self) -> bytes:
        raw = self.table.encode()
        coded = squeeze(raw) if self.coded is None else self.coded
        out = self.magic + bytes((self.version, self.features))
        out += number(len(raw) if self.size is None else self.size)
        out += number(len(coded) if self.coded_size is None else self.coded_size)
        return seal(out + coded)


@dataclass
class Footer:
    """The end of a patch. What is None is worked out from the header and the buckets."""

    base: bytes
    result: bytes
    flags: Number
    changed: Number
    covers: Columns | None = None
    covers_count: Number | None = None
    seal: bytes | None = None
    count: Number | None = None
    sizes: list[Number] | None = None
    checksums: list[bytes] | None = None
    after: bytes = b""
    length: int | None = None
    end: bytes = END

    @classmethod
    def parse(cls, body: bytes) -> Footer:
        scan = Scan(body)
        scan.take(16)
        footer = cls(scan.take(16), scan.take(16), scan.number(), scan.number())
        count = scan.number()
        scan.numbers(count)
        scan.take(16 * count)
        if not footer.flags:
            footer.covers = Columns.parse(scan, scan.number())
        assert not scan.left
        return footer

    def encode(self, header: bytes, buckets: list[bytes]) -> bytes:
        out = (header[-16:] if self.seal is None else self.seal) + self.base + self.result
        out += number(self.flags) + number(self.changed)
        out += number(len(buckets) if self.count is None else self.count)
        out += numbers([len(b) for b in buckets] if self.sizes is None else self.sizes)
        out += b"".join([b[-16:] for b in buckets] if self.checksums is None else self.checksums)
        if self.covers is not None:
            out += number(len(self.covers.steps) if self.covers_count is None else self.covers_count)
            out += self.covers.encode()
        out = seal(out + self.after)
        return out + struct.pack("<Q8s", len(out) if self.length is None else self.length, self.end)


@dataclass
class Patch:
    """A patch in its parts."""

    header: Header
    buckets: list[Bucket]
    footer: Footer
    sealed: list[bytes] = field(default_factory=list)  # more buckets, as they are

    @classmethod
    def parse(cls, data: bytes) -> Patch:
        header, at = Header.parse(data)
        length, end = struct.unpack("<Q8s", data[-16:])
        assert end == END
        start = len(data) - 16 - length
        body = data[start:-32]
        assert seal(body) == data[start:-16]
        assert body[:16] == data[at - 16 : at]
        scan = Scan(body)
        scan.take(48)
        scan.numbers(2)
        sizes = scan.numbers(scan.number())
        buckets = []
        for size in sizes:
            buckets.append(Bucket.parse(data[at : at + int(size)]))
            at += int(size)
        assert at == start
        return cls(header, buckets, Footer.parse(body))

    def encode(self) -> bytes:
        """The bytes of the whole patch."""
        header = self.header.encode()
        buckets = [b.encode() for b in self.buckets] + self.sealed
        return header + b"".join(buckets) + self.footer.encode(header, buckets)

    def rename(self) -> None:
        """Let the buckets name the table as it is now."""
        hash = self.header.hash
        for bucket in self.buckets:
            bucket.hash = hash
