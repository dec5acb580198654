"""A bucket as bytes: header, entry table, directory, streams, checksum. See docs/reference/format.md."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..codec import (
    AdjacentChunks,
    BucketLayout,
    Coded,
    Coder,
    Profile,
    Reader,
    Stream,
    coder,
    ctx,
    index,
    profile_by_id,
)
from ..codec.coders import CODERS, Buffer, encode_smallest
from ..errors import InvalidField, LimitExceeded, UnsupportedFormat
from ..kernels import cpu
from ..weights.boxes import Boxes
from ..weights.dtypes import BY_CODE, DType
from ..weights.region import Region
from ..weights.shards import Place
from ..weights.table import TensorSpec, TensorTable
from . import limits
from .cursor import CHECKSUM_BYTES, Cursor, checksum, strip_checksum, varint, varints

MAGIC = b"SRLB"
Column = npt.NDArray[np.int64]
_FEW = 32  # up to so many boxes or numbers are read faster one by one
_NUMBERS_AT_ONCE = 1 << 18  # numbers of boxes that are read at a time
LINK = 255  # in place of a profile id: the estimate is the speed of the writer's link, in bits per second
Estimates = tuple[tuple[int, int], ...]  # (profile id, bytes) that the planner compared; empty if a profile was named


class DirectoryRow(NamedTuple):
    """What the directory says about a stream."""

    id: int
    coder: Coder
    sizes: Column  # bytes of each chunk
    nbytes: int  # of all chunks


@dataclass(frozen=True)
class Entries:
    """The entry table of a bucket, column by column. A region of None is the whole tensor."""

    tensor: Column
    count: Column
    dense: npt.NDArray[np.bool_]
    region: Sequence[Region | None]
    numel: Column

    def __len__(self) -> int:
        return int(self.tensor.size)

    @cached_property
    def sparse(self) -> npt.NDArray[np.bool_]:
        return ~self.dense

    def places(self) -> Iterator[Place]:
        """The place of every entry."""
        return zip(self.tensor.tolist(), self.region, strict=True)

    @cached_property
    def coded(self) -> tuple[int, tuple[Coder, list[Buffer]]]:
        """The bytes of the table before it is encoded, and its coder and chunks."""
        raw = encode_places(self.tensor, self.count << 1 | self.dense, self.region)
        return len(raw), encode_smallest([raw])


@dataclass(frozen=True)
class Head:
    """The fields of a bucket before its streams."""

    profile: Profile
    dtype: DType
    tile_log: int
    chunk_log: int
    estimates: Estimates
    entries: Entries
    dense_bytes: int = 0  # of the encoded streams of dense entries

    @cached_property
    def layout(self) -> BucketLayout:
        sparse = self.entries.sparse
        return BucketLayout(
            self.dtype, self.entries.numel[sparse], self.entries.count[sparse], self.tile_log, self.chunk_log
        )

    @cached_property
    def dense_elements(self) -> int:
        return int(self.entries.numel[self.entries.dense].sum())


@dataclass(frozen=True)
class EncodedStreams:
    """Encoded streams that lie one behind the other, as they will in a bucket, behind all its other streams.

    The memory may have free margins before and behind them. If these are large enough, the rest of the bucket is
    written there, and nothing is copied.
    """

    streams: int
    directory: Column  # of each stream: id, coder, number of chunks, and their lengths
    memory: memoryview
    begin: int
    end: int

    @property
    def without_margins(self) -> EncodedStreams:
        """The same streams, in memory without margins."""
        return EncodedStreams(self.streams, self.directory, self.body, 0, self.end - self.begin)

    @property
    def body(self) -> memoryview:
        """The bytes of the streams."""
        return self.memory[self.begin : self.end]


def encode_bucket(
    head: Head, streams: Coded, hash: bytes, more_streams: EncodedStreams | None = None
) -> bytes | memoryview:
    """The bytes of a bucket, with its checksum."""
    return begin_bucket(head, streams, hash, more_streams)()


def begin_bucket(
    head: Head, streams: Coded, hash: bytes, more_streams: EncodedStreams | None = None
) -> Callable[[], bytes | memoryview]:
    """`encode_bucket` without the checksum. The function it returns adds it and gives the bucket, on any thread."""
    raw_bytes, entries = head.entries.coded
    streams = {Stream.ENTRIES: entries, **streams}
    out = bytearray(MAGIC)
    out += bytes((limits.FORMAT_VERSION, head.profile.id, head.dtype.code, 0)) + hash
    out += varint(len(head.entries)) + varint(raw_bytes) + bytes((head.tile_log, head.chunk_log))
    out += varint(len(head.estimates))
    for id, size in head.estimates:
        out += varint(id) + varint(size)
    out += varint(len(streams) + (0 if more_streams is None else more_streams.streams))
    numbers: list[int] = []
    parts: list[Buffer | bytearray] = [out]
    for stream, (stream_coder, chunks) in sorted(streams.items()):
        numbers += (stream, stream_coder.id, len(chunks), *map(len, chunks))  # the first two are below 128: a byte each
        parts += chunks
    directory = np.array(numbers, np.int64)
    if more_streams is None:
        out += varints(directory)
        return lambda: b"".join((*parts, checksum(*parts)))
    out += varints(np.concatenate((directory, more_streams.directory)))
    return _add_around(b"".join(parts), more_streams)


def _add_around(front: bytes, streams: EncodedStreams) -> Callable[[], bytes | memoryview]:
    """A bucket of its front, the streams, and a checksum: in the streams' memory, if the margins are large enough."""
    memory = streams.memory
    begin = streams.begin - len(front)
    end = streams.end + CHECKSUM_BYTES
    if begin < 0 or end > len(memory):
        return lambda: b"".join((front, streams.body, checksum(front, streams.body)))
    memory[begin : streams.begin] = front

    def seal() -> memoryview:
        memory[streams.end : end] = checksum(memory[begin : streams.end])
        return memory[begin:end].toreadonly()

    return seal


def decode_bucket(data: bytes | memoryview, table: TensorTable, hash: bytes, label: str) -> tuple[Head, Reader]:
    """The head of a bucket, checked against the tensor table, and a reader of its streams.

    Args:
        data: The bytes of the bucket.
        table: The tensor table of the patch.
        hash: The hash of that table.
        label: The name of the bucket in errors.

    Raises:
        FormatError: The bytes are not a valid bucket of this table.
    """
    return read_bucket(bucket_body(data, label), table, hash, label)


def bucket_body(data: bytes | memoryview, label: str) -> memoryview:
    """The bytes of a bucket before its checksum, which must match."""
    if len(data) > limits.BUCKET_BYTES:
        raise LimitExceeded(f"{label}: {len(data)} bytes, the limit is {limits.BUCKET_BYTES}")
    return strip_checksum(data, label)


def read_bucket(data: memoryview, table: TensorTable, hash: bytes, label: str) -> tuple[Head, Reader]:
    """`decode_bucket` of bytes whose checksum was checked and removed."""
    cursor = Cursor(data, label)
    profile, dtype = _identify(cursor, hash)
    entry_count = cursor.varint("entry count", limits.ENTRIES)
    if not entry_count:
        raise InvalidField(f"{label}: no entries; a bucket holds at least one")
    entry_bytes = cursor.varint("entry table length", limits.ENTRY_BYTES)
    tile_log = _between(cursor, "tile size", limits.MIN_TILE_LOG, limits.MAX_TILE_LOG)
    chunk_log = _between(cursor, "chunk size", limits.MIN_CHUNK_LOG, limits.MAX_CHUNK_LOG)
    estimates = tuple(
        (cursor.varint("estimate: profile", 255), cursor.varint("estimate: bytes", 1 << 62))
        for _ in range(cursor.varint("estimate count", 16))
    )
    streams, body = _streams(cursor)
    reader = Reader(streams, label, body)
    raw_entries = reader.take(Stream.ENTRIES, entry_bytes)
    entries = _decode_entries(raw_entries, entry_count, table, dtype, label)
    dense_bytes = sum(len(chunks.data) for id, (_, chunks) in streams.items() if Stream.is_dense(id))
    head = Head(profile, dtype, tile_log, chunk_log, estimates, entries, dense_bytes)
    _check_limits(head, label)
    return head, reader


def _identify(cursor: Cursor, hash: bytes) -> tuple[Profile, DType]:
    if bytes(cursor.take(4, "magic")) != MAGIC:
        raise InvalidField(f"{cursor.label}: not a bucket")
    if (version := cursor.byte("version")) != limits.FORMAT_VERSION:
        raise UnsupportedFormat(f"{cursor.label}: format version {version}; this release reads {limits.FORMAT_VERSION}")
    profile = profile_by_id(cursor.byte("profile"))
    code = cursor.byte("dtype")
    if (dtype := BY_CODE.get(code)) is None:
        raise UnsupportedFormat(f"{cursor.label}: unknown dtype {code}")
    if features := cursor.byte("required features"):
        raise UnsupportedFormat(f"{cursor.label}: unknown required features {features:#010b}")
    if bytes(cursor.take(CHECKSUM_BYTES, "table hash")) != hash:
        raise InvalidField(f"{cursor.label}: belongs to another tensor table")
    return profile, dtype


def _between(cursor: Cursor, field: str, low: int, high: int) -> int:
    value = cursor.byte(field)
    if not low <= value <= high:
        raise LimitExceeded(f"{cursor.label}: {field} 2^{value} is not between 2^{low} and 2^{high}")
    return value


def _streams(cursor: Cursor) -> tuple[dict[int, tuple[Coder, AdjacentChunks]], memoryview]:
    """The chunks of every stream, and the bytes of all streams together."""
    count = cursor.varint("stream count", limits.STREAMS)
    directory = _read_directory(cursor, count) or _explain_directory(cursor, count)
    body = cursor.data[cursor.offset :]
    streams = {}
    for row in directory:
        chunks = AdjacentChunks(cursor.take(row.nbytes, f"a chunk of stream {row.id}"), row.sizes)
        streams[row.id] = (row.coder, chunks)
    cursor.finish()
    return streams, body


def _read_directory(cursor: Cursor, count: int) -> list[DirectoryRow]:
    """The directory, read by one kernel; empty if anything in it is wrong."""
    rows = np.empty((count, 4), np.uint64)
    lengths = np.empty(min(limits.CHUNKS, cursor.bytes_left), np.uint64)
    end = cpu.directory.read_directory(np.frombuffer(cursor.data, np.uint8), cursor.offset, rows, lengths)
    if end < 0 or not count:
        return []
    ids, coders, chunk_counts, totals = rows.T.tolist()
    rising = all(a < b for a, b in zip(ids, ids[1:], strict=False))
    if not rising or 0 in totals or not CODERS.keys() >= set(coders) or not all(map(Stream.is_known, ids)):
        return []
    cursor.offset = end
    ends = [*accumulate(chunk_counts)]
    sizes = lengths[: ends[-1]].astype(np.int64)
    return [
        DirectoryRow(id, CODERS[coder_id], sizes[stop - n : stop], total)
        for id, coder_id, n, stop, total in zip(ids, coders, chunk_counts, ends, totals, strict=True)
    ]


def _explain_directory(cursor: Cursor, count: int) -> list[DirectoryRow]:
    """The directory, read stream by stream, with an error that says what is wrong with it."""
    directory: list[DirectoryRow] = []
    chunks_left = limits.CHUNKS
    for _ in range(count):
        id = cursor.byte("stream id")
        if not Stream.is_known(id):
            raise UnsupportedFormat(f"{cursor.label}: unknown stream {id}")
        if directory and id <= directory[-1].id:
            raise InvalidField(f"{cursor.label}: stream {id} is out of order")
        stream_coder = coder(cursor.byte(f"coder of stream {id}"))
        chunks = cursor.varint(f"chunk count of stream {id}", chunks_left)
        lengths = cursor.numbers(chunks, f"chunk lengths of stream {id}", len(cursor.data))
        if not any(lengths):
            raise InvalidField(f"{cursor.label}: stream {id} is empty; empty streams are left out")
        directory.append(DirectoryRow(id, stream_coder, np.array(lengths, np.int64), sum(lengths)))
        chunks_left -= chunks
    return directory


def encode_places(tensor: Column, values: Column, regions: Sequence[Region | None]) -> bytes:
    """Three columns: steps from tensor to tensor, values with a flag for a box, and the boxes."""
    if isinstance(regions, Boxes):
        is_box = regions.first >= 0
        boxes = regions.numbers
    else:
        is_box = np.array([r is not None for r in regions], bool)
        boxes = np.array([n for r in regions if r is not None for n in (*r.start, *r.size)], np.int64)
    return varints(np.diff(tensor, prepend=0)) + varints(values << 1 | is_box) + varints(boxes)


def decode_places(
    cursor: Cursor, count: int, limit: int, table: TensorTable
) -> tuple[Column, Column, Sequence[Region | None], Column]:
    """Tensors, values up to `limit`, regions (a proper part of the tensor, or None for all of it) and their sizes."""
    tensor = np.cumsum(_column(cursor, count, "tensor steps", len(table)))
    if count and tensor[-1] >= len(table):
        raise LimitExceeded(f"{cursor.label}: tensor {tensor[-1]}, the table has {len(table)}")
    if count > limits.REGIONS_PER_TENSOR:
        _check_region_counts(tensor, cursor.label)
    values = _column(cursor, count, "values", limit << 1 | 1)
    boxed = np.flatnonzero(values & 1)
    numel = table.numel[tensor] if count else np.empty(0, np.int64)
    regions: Sequence[Region | None]
    if boxed.size > _FEW:
        first = np.full(count, -1, np.int64)
        span = np.zeros(count, np.int64)
        first[boxed], span[boxed], numel[boxed] = _boxes(cursor, table, tensor[boxed])
        regions = Boxes(table, tensor, first, span)
    else:
        region_list: list[Region | None] = [None] * count
        regions = region_list
        for e in boxed.tolist():
            region = _box(cursor, table[int(tensor[e])])
            region_list[e] = region
            numel[e] = region.numel
    return tensor, values >> 1, regions, numel


def _check_region_counts(tensor: Column, label: str) -> None:
    most = int(np.bincount(tensor).max())
    if most > limits.REGIONS_PER_TENSOR:
        raise LimitExceeded(f"{label}: {most} regions of one tensor, the limit is {limits.REGIONS_PER_TENSOR}")


def _column(cursor: Cursor, count: int, field: str, limit: int) -> Column:
    """A column of numbers, read in the way that is faster for so many."""
    if count <= _FEW:
        return np.array(cursor.numbers(count, field, limit), np.int64)
    return cursor.varints(count, field, limit)


def _box(cursor: Cursor, spec: TensorSpec) -> Region:
    """A box of a tensor, checked to be a proper part of it."""
    rank = len(spec.shape)
    numbers = cursor.numbers(2 * rank, "boxes", limits.TENSOR_ELEMENTS)
    region = Region(tuple(numbers[:rank]), tuple(numbers[rank:]))
    if not region.fits(spec.shape) or region.size == spec.shape:
        raise InvalidField(f"{cursor.label}: region {region} is not a proper part of {spec}")
    return region


def _boxes(cursor: Cursor, table: TensorTable, tensor: Column) -> tuple[Column, Column, Column]:
    """A box of each tensor: the position of its first element, the distance to its last, and its number of elements."""
    rank = table.dimensions.rank
    first, span, numel = np.zeros((3, tensor.size), np.int64)
    number_ends = np.cumsum(2 * rank[tensor])
    low = 0
    while low < tensor.size:
        begin = int(number_ends[low - 1]) if low else 0
        high = max(low + 1, int(np.searchsorted(number_ends, begin + _NUMBERS_AT_ONCE, side="right")))
        numbers = cursor.varints(int(number_ends[high - 1]) - begin, "boxes", limits.TENSOR_ELEMENTS)
        ranks = rank[tensor[low:high]]
        ends = number_ends[low:high] - begin
        for r in np.unique(ranks).tolist():
            rows = np.flatnonzero(ranks == r)
            boxes = numbers[(ends[rows] - 2 * r)[:, None] + np.arange(2 * r)]
            first[low + rows], span[low + rows], numel[low + rows] = _flatten_boxes(
                cursor, table, tensor[low + rows], boxes[:, :r], boxes[:, r:]
            )
        low = high
    return first, span, numel


def _flatten_boxes(
    cursor: Cursor, table: TensorTable, tensor: Column, start: Column, size: Column
) -> tuple[Column, Column, Column]:
    """`_boxes` of tensors of one rank, from start and size. Each is checked to be a proper part of its tensor."""
    shape = table.dimensions.sizes[table.dimensions.offset[tensor][:, None] + np.arange(size.shape[1])]
    proper = ((size >= 1) & (start + size <= shape)).all(axis=1) & (size != shape).any(axis=1)
    if not proper.all():
        e = int(proper.argmin())
        region = Region(tuple(start[e].tolist()), tuple(size[e].tolist()))
        raise InvalidField(f"{cursor.label}: region {region} is not a proper part of {table[int(tensor[e])]}")
    first, span = np.zeros((2, tensor.size), np.int64)
    for d in range(size.shape[1]):
        first = first * shape[:, d] + start[:, d]
        span = span * shape[:, d] + size[:, d] - 1
    return first, span, size.prod(axis=1)


def _decode_entries(raw: Buffer, count: int, table: TensorTable, dtype: DType, label: str) -> Entries:
    cursor = Cursor(raw, f"{label}: entry table")
    tensor, values, regions, numel = decode_places(cursor, count, limits.REGION_ELEMENTS << 1 | 1, table)
    cursor.finish()
    entries = Entries(tensor, values >> 1, (values & 1).astype(bool), regions, numel)
    _check_entries(entries, table, dtype, label)
    return entries


def _check_entries(entries: Entries, table: TensorTable, dtype: DType, label: str) -> None:
    if (is_other := table.codes[entries.tensor] != dtype.code).any():
        raise InvalidField(
            f"{label}: an entry is for {table[entries.tensor[is_other].min()]}, the bucket holds {dtype}"
        )
    wrong = (entries.count < 1) | (entries.count > entries.numel) | (entries.numel > limits.REGION_ELEMENTS)
    if wrong.any():
        e = int(wrong.argmax())
        raise LimitExceeded(f"{label}: entry {e} claims {entries.count[e]} changes in {entries.numel[e]} elements")


def _check_limits(head: Head, label: str) -> None:
    layout = head.layout
    tiles = ctx.tiles(layout) if head.profile.conditional else index.tiles(layout) if head.profile.tiled else 0
    if tiles > limits.TILES:
        raise LimitExceeded(f"{label}: {tiles} tiles, the limit is {limits.TILES}")
    if (changes := layout.changes) > limits.BUCKET_CHANGES:
        raise LimitExceeded(f"{label}: {changes} changes, the limit is {limits.BUCKET_CHANGES}")
    if (dense := head.dense_elements * head.dtype.width) > limits.BUCKET_DENSE_BYTES:
        raise LimitExceeded(f"{label}: {dense} dense bytes, the limit is {limits.BUCKET_DENSE_BYTES}")
