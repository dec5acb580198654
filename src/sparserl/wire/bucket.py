"""A bucket as bytes: header, entry table, directory, streams, checksum. See docs/reference/format.md."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

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
from ..weights.table import TensorSpec, TensorTable
from . import limits
from .cursor import CHECKSUM_BYTES, Cursor, checksum, sealed, varint, varints

MAGIC = b"SRLB"
Column = npt.NDArray[np.int64]
_FEW = 32  # boxes that are sooner made one by one
_NUMBERS = 1 << 18  # of boxes, read at a time
_Told = tuple[int, Coder, Column, int]  # a stream, its coder, the lengths of its chunks, and of all
LINK = 255  # stands for no profile: its estimate is the speed of the link that the writer chose for, in bits per second
Estimates = tuple[tuple[int, int], ...]  # (profile id, bytes), what the planner compared; empty if it was told


@dataclass(frozen=True)
class Entries:
    """The entry table of a bucket, column by column. A region of None is all of the tensor."""

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

    @cached_property
    def coded(self) -> tuple[int, tuple[Coder, list[Buffer]]]:
        """The table as a stream, and how many bytes it has before it is coded."""
        raw = encode_places(self.tensor, self.count << 1 | self.dense, self.region)
        return len(raw), encode_smallest([raw])


@dataclass(frozen=True)
class Head:
    """What a bucket says about itself before its streams."""

    profile: Profile
    dtype: DType
    tile_log: int
    chunk_log: int
    estimates: Estimates
    entries: Entries
    dense_bytes: int = 0  # of the streams that hold dense bits, as coded

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
    """Coded streams that lie one behind the other already, as they do in a bucket: behind all others.

    They are in a part of some memory. What stands before and behind them in a bucket is written to the rest of it, if
    there is room: memory is not used twice for that.
    """

    streams: int
    directory: Column  # of each stream id, coder, number of chunks, and their lengths
    memory: memoryview
    low: int
    high: int

    @property
    def without_margins(self) -> EncodedStreams:
        """The same without room."""
        return EncodedStreams(self.streams, self.directory, self.memory[self.low : self.high], 0, self.high - self.low)


def encode_bucket(head: Head, streams: Coded, hash: bytes, laid: EncodedStreams | None = None) -> bytes | memoryview:
    """The bytes of a bucket, checksum included."""
    return begin_bucket(head, streams, hash, laid)()


def begin_bucket(
    head: Head, streams: Coded, hash: bytes, laid: EncodedStreams | None = None
) -> Callable[[], bytes | memoryview]:
    """`encode_bucket` but for the checksum, which is found and added by what it returns: on any thread."""
    raw_bytes, entries = head.entries.coded
    streams = {Stream.ENTRIES: entries, **streams}
    out = bytearray(MAGIC)
    out += bytes((limits.FORMAT_VERSION, head.profile.id, head.dtype.code, 0)) + hash
    out += varint(len(head.entries)) + varint(raw_bytes) + bytes((head.tile_log, head.chunk_log))
    out += varint(len(head.estimates))
    for id, size in head.estimates:
        out += varint(id) + varint(size)
    out += varint(len(streams) + (0 if laid is None else laid.streams))
    directory: list[int] = []
    parts: list[Buffer | bytearray] = [out]
    for stream, (its_coder, chunks) in sorted(streams.items()):
        directory += (stream, its_coder.id, len(chunks), *map(len, chunks))  # the first two are below 128: a byte each
        parts += chunks
    told = np.array(directory, np.int64)
    out += varints(told if laid is None else np.concatenate((told, laid.directory)))
    if laid is None:
        return lambda: b"".join((*parts, checksum(*parts)))
    return _around(b"".join(parts), laid)


def _around(front: bytes, laid: EncodedStreams) -> Callable[[], bytes | memoryview]:
    """A bucket of what stands before its body, the body, and a checksum; in the body's memory, if there is room."""
    memory, begin, end = laid.memory, laid.low - len(front), laid.high + CHECKSUM_BYTES
    if begin < 0 or end > len(memory):
        body = memory[laid.low : laid.high]
        return lambda: b"".join((front, body, checksum(front, body)))
    memory[begin : laid.low] = front

    def sealed_there() -> memoryview:
        memory[laid.high : end] = checksum(memory[begin : laid.high])
        return memory[begin:end].toreadonly()

    return sealed_there


def decode_bucket(data: bytes | memoryview, table: TensorTable, hash: bytes, what: str) -> tuple[Head, Reader]:
    """The head of a bucket, checked against the tensor table, and a reader of its streams."""
    return read_bucket(unsealed(data, what), table, hash, what)


def unsealed(data: bytes | memoryview, what: str) -> memoryview:
    """What stands before the checksum of a bucket, once that holds."""
    if len(data) > limits.BUCKET_BYTES:
        raise LimitExceeded(f"{what}: {len(data)} bytes, the limit is {limits.BUCKET_BYTES}")
    return sealed(data, what)


def read_bucket(data: memoryview, table: TensorTable, hash: bytes, what: str) -> tuple[Head, Reader]:
    """`decode_bucket` of what stands before a checksum that holds."""
    cursor = Cursor(data, what)
    profile, dtype = _identify(cursor, hash)
    entry_count = cursor.varint("entry count", limits.ENTRIES)
    if not entry_count:
        raise InvalidField(f"{what}: no entries; a bucket holds at least one")
    entry_bytes = cursor.varint("entry table length", limits.ENTRY_BYTES)
    tile_log = _between(cursor, "tile size", limits.MIN_TILE_LOG, limits.MAX_TILE_LOG)
    chunk_log = _between(cursor, "chunk size", limits.MIN_CHUNK_LOG, limits.MAX_CHUNK_LOG)
    estimates = tuple(
        (cursor.varint("estimate: profile", 255), cursor.varint("estimate: bytes", 1 << 62))
        for _ in range(cursor.varint("estimate count", 16))
    )
    streams, body = _streams(cursor)
    reader = Reader(streams, what, body)
    raw_entries = reader.take(Stream.ENTRIES, entry_bytes)
    entries = _decode_entries(raw_entries, entry_count, table, dtype, what)
    dense_bytes = sum(len(chunks.data) for id, (_, chunks) in streams.items() if Stream.is_dense(id))
    head = Head(profile, dtype, tile_log, chunk_log, estimates, entries, dense_bytes)
    _check_limits(head, what)
    return head, reader


def _identify(cursor: Cursor, hash: bytes) -> tuple[Profile, DType]:
    if bytes(cursor.take(4, "magic")) != MAGIC:
        raise InvalidField(f"{cursor.what}: not a bucket")
    if (version := cursor.byte("version")) != limits.FORMAT_VERSION:
        raise UnsupportedFormat(f"{cursor.what}: format version {version}; this release reads {limits.FORMAT_VERSION}")
    profile = profile_by_id(cursor.byte("profile"))
    code = cursor.byte("dtype")
    if (dtype := BY_CODE.get(code)) is None:
        raise UnsupportedFormat(f"{cursor.what}: unknown dtype {code}")
    if features := cursor.byte("required features"):
        raise UnsupportedFormat(f"{cursor.what}: unknown required features {features:#010b}")
    if bytes(cursor.take(CHECKSUM_BYTES, "table hash")) != hash:
        raise InvalidField(f"{cursor.what}: belongs to another tensor table")
    return profile, dtype


def _between(cursor: Cursor, field: str, low: int, high: int) -> int:
    value = cursor.byte(field)
    if not low <= value <= high:
        raise LimitExceeded(f"{cursor.what}: {field} 2^{value} is not between 2^{low} and 2^{high}")
    return value


def _streams(cursor: Cursor) -> tuple[dict[int, tuple[Coder, AdjacentChunks]], memoryview]:
    """The chunks of every stream, and all of them, one behind the other."""
    count = cursor.varint("stream count", limits.STREAMS)
    directory = _directory(cursor, count) or _directory_in_words(cursor, count)
    body, out = cursor.data[cursor.at :], {}
    for id, its_coder, sizes, total in directory:
        out[id] = its_coder, AdjacentChunks(cursor.take(total, f"a chunk of stream {id}"), sizes)
    cursor.finish()
    return out, body


def _directory(cursor: Cursor, count: int) -> list[_Told]:
    """The directory, read at once; empty where anything in it is wrong."""
    rows, lengths = np.empty((count, 4), np.uint64), np.empty(min(limits.CHUNKS, cursor.left), np.uint64)
    end = cpu.directory.read_directory(np.frombuffer(cursor.data, np.uint8), cursor.at, rows, lengths)
    if end < 0 or not count:
        return []
    ids, coders, many, totals = rows.T.tolist()
    rising = all(a < b for a, b in zip(ids, ids[1:], strict=False))
    if not rising or 0 in totals or not CODERS.keys() >= set(coders) or not all(map(Stream.is_known, ids)):
        return []
    cursor.at, ends = end, [*accumulate(many)]
    sizes = lengths[: ends[-1]].astype(np.int64)
    return [
        (id, CODERS[its_coder], sizes[high - n : high], total)
        for id, its_coder, n, high, total in zip(ids, coders, many, ends, totals, strict=True)
    ]


def _directory_in_words(cursor: Cursor, count: int) -> list[_Told]:
    """The directory, stream by stream: says what is wrong with it."""
    directory: list[_Told] = []
    room = limits.CHUNKS
    for _ in range(count):
        id = cursor.byte("stream id")
        if not Stream.is_known(id):
            raise UnsupportedFormat(f"{cursor.what}: unknown stream {id}")
        if directory and id <= directory[-1][0]:
            raise InvalidField(f"{cursor.what}: stream {id} is out of order")
        its_coder = coder(cursor.byte(f"coder of stream {id}"))
        chunks = cursor.varint(f"chunk count of stream {id}", room)
        lengths = cursor.numbers(chunks, f"chunk lengths of stream {id}", len(cursor.data))
        if not any(lengths):
            raise InvalidField(f"{cursor.what}: stream {id} is empty; empty streams are left out")
        directory.append((id, its_coder, np.array(lengths, np.int64), sum(lengths)))
        room -= chunks
    return directory


def encode_places(tensor: Column, values: Column, regions: Sequence[Region | None]) -> bytes:
    """Three columns: steps from tensor to tensor, values with a flag for a box, and the boxes."""
    if isinstance(regions, Boxes):
        boxed, boxes = regions.first >= 0, regions.numbers
    else:
        boxed = np.array([r is not None for r in regions], bool)
        boxes = np.array([n for r in regions if r is not None for n in (*r.start, *r.size)], np.int64)
    return varints(np.diff(tensor, prepend=0)) + varints(values << 1 | boxed) + varints(boxes)


def decode_places(
    cursor: Cursor, count: int, most: int, table: TensorTable
) -> tuple[Column, Column, Sequence[Region | None], Column]:
    """Tensors, values up to `most`, regions (a proper part of the tensor, or None for all of it) and their sizes."""
    tensor = np.cumsum(_column(cursor, count, "tensor steps", len(table)))
    if count and tensor[-1] >= len(table):
        raise LimitExceeded(f"{cursor.what}: tensor {tensor[-1]}, the table has {len(table)}")
    if count > limits.REGIONS_PER_TENSOR and (most_often := int(np.bincount(tensor).max())) > limits.REGIONS_PER_TENSOR:
        raise LimitExceeded(
            f"{cursor.what}: {most_often} regions of one tensor, the limit is {limits.REGIONS_PER_TENSOR}"
        )
    values = _column(cursor, count, "values", most << 1 | 1)
    boxed = np.flatnonzero(values & 1)
    numel = table.numel[tensor] if count else np.empty(0, np.int64)
    regions: Sequence[Region | None]
    if boxed.size > _FEW:
        first, span = np.full(count, -1, np.int64), np.zeros(count, np.int64)
        first[boxed], span[boxed], numel[boxed] = _boxes(cursor, table, tensor[boxed])
        regions = Boxes(table, tensor, first, span)
    else:
        made: list[Region | None] = [None] * count
        regions = made
        for e in boxed.tolist():
            made[e] = region = _box(cursor, table[int(tensor[e])])
            numel[e] = region.numel
    return tensor, values >> 1, regions, numel


def _column(cursor: Cursor, count: int, field: str, most: int) -> Column:
    """A column of numbers, of which there may be few."""
    few = count <= _FEW
    return np.array(cursor.numbers(count, field, most), np.int64) if few else cursor.varints(count, field, most)


def _box(cursor: Cursor, spec: TensorSpec) -> Region:
    """Where a box of a tensor starts and how far it goes, checked to be a proper part."""
    rank = len(spec.shape)
    numbers = cursor.numbers(2 * rank, "boxes", limits.TENSOR_ELEMENTS)
    region = Region(tuple(numbers[:rank]), tuple(numbers[rank:]))
    if not region.fits(spec.shape) or region.size == spec.shape:
        raise InvalidField(f"{cursor.what}: region {region} is not a proper part of {spec}")
    return region


def _boxes(cursor: Cursor, table: TensorTable, tensor: Column) -> tuple[Column, Column, Column]:
    """A box for each tensor: the position of its first element, how far the last is from it, and how many it has."""
    rank = table.dimensions.rank
    first, span, numel = np.zeros((3, tensor.size), np.int64)
    upto = np.cumsum(2 * rank[tensor])
    low = 0
    while low < tensor.size:
        begin = int(upto[low - 1]) if low else 0
        high = max(low + 1, int(np.searchsorted(upto, begin + _NUMBERS, side="right")))
        numbers = cursor.varints(int(upto[high - 1]) - begin, "boxes", limits.TENSOR_ELEMENTS)
        ranks = rank[tensor[low:high]]
        ends = upto[low:high] - begin
        for r in np.unique(ranks).tolist():
            mine = np.flatnonzero(ranks == r)
            rows = numbers[(ends[mine] - 2 * r)[:, None] + np.arange(2 * r)]
            first[low + mine], span[low + mine], numel[low + mine] = _flat(
                cursor, table, tensor[low + mine], rows[:, :r], rows[:, r:]
            )
        low = high
    return first, span, numel


def _flat(
    cursor: Cursor, table: TensorTable, tensor: Column, start: Column, size: Column
) -> tuple[Column, Column, Column]:
    """`_boxes` of tensors of one rank, each checked to be a proper part."""
    shape = table.dimensions.sizes[table.dimensions.at[tensor][:, None] + np.arange(size.shape[1])]
    proper = ((size >= 1) & (start + size <= shape)).all(axis=1) & (size != shape).any(axis=1)
    if not proper.all():
        e = int(proper.argmin())
        region = Region(tuple(start[e].tolist()), tuple(size[e].tolist()))
        raise InvalidField(f"{cursor.what}: region {region} is not a proper part of {table[int(tensor[e])]}")
    first, span = np.zeros((2, tensor.size), np.int64)
    for d in range(size.shape[1]):
        first = first * shape[:, d] + start[:, d]
        span = span * shape[:, d] + size[:, d] - 1
    return first, span, size.prod(axis=1)


def _decode_entries(raw: Buffer, count: int, table: TensorTable, dtype: DType, what: str) -> Entries:
    cursor = Cursor(raw, f"{what}: entry table")
    tensor, values, regions, numel = decode_places(cursor, count, limits.REGION_ELEMENTS << 1 | 1, table)
    cursor.finish()
    entries = Entries(tensor, values >> 1, (values & 1).astype(bool), regions, numel)
    _check_entries(entries, table, dtype, what)
    return entries


def _check_entries(entries: Entries, table: TensorTable, dtype: DType, what: str) -> None:
    if (others := table.codes[entries.tensor] != dtype.code).any():
        raise InvalidField(f"{what}: an entry is for {table[entries.tensor[others].min()]}, the bucket holds {dtype}")
    wrong = (entries.count < 1) | (entries.count > entries.numel) | (entries.numel > limits.REGION_ELEMENTS)
    if wrong.any():
        e = int(wrong.argmax())
        raise LimitExceeded(f"{what}: entry {e} claims {entries.count[e]} changes in {entries.numel[e]} elements")


def _check_limits(head: Head, what: str) -> None:
    layout = head.layout
    tiles = ctx.tiles(layout) if head.profile.conditional else index.tiles(layout) if head.profile.tiled else 0
    if tiles > limits.TILES:
        raise LimitExceeded(f"{what}: {tiles} tiles, the limit is {limits.TILES}")
    if (changes := layout.changes) > limits.BUCKET_CHANGES:
        raise LimitExceeded(f"{what}: {changes} changes, the limit is {limits.BUCKET_CHANGES}")
    if (dense := head.dense_elements * head.dtype.width) > limits.BUCKET_DENSE_BYTES:
        raise LimitExceeded(f"{what}: {dense} dense bytes, the limit is {limits.BUCKET_DENSE_BYTES}")
