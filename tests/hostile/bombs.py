"""Small files that ask for much: each is built here. See `watched_runs` for what is done with them."""

from __future__ import annotations

import struct
from collections.abc import Callable

import numpy as np

from sparserl.wire import limits
from tests.hostile.forged_patch import Bucket, Columns, Footer, Header, Stream, Table, number, numbers, seal, squeeze
from tests.hostile.forged_patch import Patch as Parts

BOMBS: dict[str, Callable[..., bytes]] = {}
RAW, GAP, ULP, CTX = 0, 1, 2, 3
I8, F64 = 2, 50


def bomb(build: Callable[..., bytes]) -> Callable[..., bytes]:
    BOMBS[build.__name__] = build
    return build


def varints(values: np.ndarray) -> bytes:
    """Many numbers below 2^21 at once."""
    v = values.astype(np.uint32)
    size = 1 + (v > 127) + (v > 16383)
    parts = np.stack([v & 127 | (size > 1) << 7, v >> 7 & 127 | (size > 2) << 7, v >> 14], axis=1).astype(np.uint8)
    return parts[np.arange(3) < size[:, None]].tobytes()


def table(*tensors: tuple[bytes, int, list[int]]) -> Table:
    names, dtypes, shapes = zip(*tensors, strict=True)
    return Table(list(names), list(dtypes), [len(s) for s in shapes], [n for s in shapes for n in s])


def patch(
    its_table: Table, *buckets: Bucket, changed: int = 1, covers: Columns | None = None, covered: int | None = None
) -> bytes:
    footer = Footer(bytes(16), bytes(16), int(covers is None), changed, covers, covered)
    parts = Parts(Header(its_table), list(buckets), footer)
    parts.rename()
    return parts.encode()


def bucket(
    profile: int, dtype: int, columns: Columns, *streams: Stream, chunk_log: int = 24, tile_log: int = 31
) -> Bucket:
    raw = columns.encode()
    return Bucket(
        profile, dtype, b"", columns, tile_log, chunk_log, [], list(streams), entry_stream=Stream(0, [raw], coder=1)
    )


def rows(count: int) -> bytes:
    """A counter in three characters: names that rise."""
    i = np.arange(count)
    return (np.stack([i >> 14, i >> 7, i], axis=1) & 127).astype(np.uint8).tobytes()


@bomb
def table_of_zeros() -> bytes:
    """A frame of two kilobytes becomes a table of the largest size."""
    return seal(b"SRLPATCH\1\0" + framed(number(limits.TENSORS) + bytes(limits.TABLE_BYTES - 3)))


@bomb
def table_longer_than_it_says() -> bytes:
    """A frame of 1 GiB where 100 bytes are due."""
    coded = repeated_frame(1 << 30)
    return seal(b"SRLPATCH\1\0" + number(100) + number(len(coded)) + coded)


@bomb
def table_shorter_than_it_says() -> bytes:
    coded = squeeze(b"\0")
    return seal(b"SRLPATCH\1\0" + number(limits.TABLE_BYTES) + number(len(coded)) + coded)


@bomb
def table_of_a_million_tensors() -> bytes:
    """As many tensors as there may be, with names as long as fit, of four dimensions each. This table is valid."""
    n = limits.TENSORS
    names = np.full((n, 54), ord("n"), np.uint8)
    names[:, 51:] = np.frombuffer(rows(n), np.uint8).reshape(n, 3)
    raw = number(n) + bytes((54,)) * n + names.tobytes() + b"\1" * n + b"\4" * n + numbers((1000, 1, 1, 1)) * n
    header = seal(b"SRLPATCH\1\0" + framed(raw))
    return header + Footer(bytes(16), bytes(16), 1, 0).encode(header, [])


@bomb
def table_of_many_tensors() -> bytes:
    """As many as a model may have, of no elements. This table is valid."""
    n = 1 << 16
    raw = number(n) + b"\3" * n + rows(n) + b"\1" * n + b"\1" * n + bytes(n)
    header = seal(b"SRLPATCH\1\0" + framed(raw))
    return header + Footer(bytes(16), bytes(16), 1, 0).encode(header, [])


@bomb
def table_of_a_million_equal_names() -> bytes:
    n = limits.TENSORS
    raw = number(n) + numbers([60]) * n + b"n" * 60 * n
    return seal(b"SRLPATCH\1\0" + framed(raw))


@bomb
def table_frame_with_a_huge_window() -> bytes:
    coded = bytearray(squeeze(bytes(1000)))
    coded[1] = 0xF8  # 2^41 bytes
    return seal(b"SRLPATCH\1\0" + number(1000) + number(len(coded)) + bytes(coded))


@bomb
def table_frame_with_a_huge_content_size() -> bytes:
    coded = bytes((0b1110_0000,)) + struct.pack("<Q", 1 << 62) + b"\1\0\0"
    return seal(b"SRLPATCH\1\0" + number(1000) + number(len(coded)) + coded)


def framed(raw: bytes) -> bytes:
    """Lengths and a frame of a table."""
    coded = squeeze(raw)
    return number(len(raw)) + number(len(coded)) + coded


def repeated_frame(size: int) -> bytes:
    """A frame of blocks that each repeat one byte 128 KiB times."""
    blocks = size >> 17
    block = struct.pack("<I", (1 << 17) << 3 | 1 << 1)[:3] + b"\0"
    last = struct.pack("<I", (1 << 17) << 3 | 1 << 1 | 1)[:3] + b"\0"
    return b"\0\x40" + block * (blocks - 1) + last


@bomb
def entries_all_alike() -> bytes:
    """A million entries for one tensor, in a kilobyte."""
    n = limits.ENTRIES
    columns = Columns([bytes(n)], [b"\4" * n], [])
    return patch(table((b"w", I8, [n])), claims(bucket(RAW, I8, columns), n), changed=n)


@bomb
def entries_in_many_buckets() -> bytes:
    """A hundred times a million entries, a kilobyte each."""
    n = limits.ENTRIES
    one = claims(bucket(RAW, I8, Columns([bytes(n)], [b"\4" * n], [])), n)
    return patch(table((b"w", I8, [n])), *[one] * 100, changed=n)


@bomb
def entries_of_many_tensors_in_many_buckets() -> bytes:
    """The same entry for each of many tensors, in many buckets: refused before all of them are held."""
    n = limits.ENTRIES >> 4
    its_table = Table([rows(n)], [I8] * n, [1] * n, [b"\4" * n], n, [b"\3" * n])
    one = claims(bucket(RAW, I8, Columns([b"\0" + b"\1" * (n - 1)], [b"\4" * n], [])), n)
    return patch(its_table, *[one] * 100, changed=n)


@bomb
def entries_with_boxes() -> bytes:
    """As many boxes as fit into an entry table, none of which overlap, and no streams."""
    n = limits.ENTRIES
    boxes = varints(np.stack([np.arange(n), np.ones(n)], axis=1).ravel())
    columns = Columns([bytes(n)], [b"\5" * n], [boxes])
    return patch(table((b"w", I8, [1 << 21])), claims(bucket(RAW, I8, columns), n), changed=n)


@bomb
def entries_with_boxes_of_many_dimensions() -> bytes:
    n = limits.ENTRY_BYTES // 66
    columns = Columns([bytes(n)], [b"\5" * n], [(bytes(32) + b"\1" * 32) * n])
    return patch(table((b"w", I8, [1] * 31 + [1 << 20])), claims(bucket(RAW, I8, columns), n), changed=n)


@bomb
def entries_side_by_side() -> bytes:
    """Boxes that all share the first dimension; comparing each pair would take minutes."""
    n = limits.REGIONS_PER_TENSOR
    boxes = varints(np.stack([np.zeros(n), np.arange(n), np.ones(n), np.ones(n)], axis=1).ravel())
    columns = Columns([bytes(n)], [b"\5" * n], [boxes])
    return patch(table((b"w", I8, [2, n])), claims(bucket(RAW, I8, columns), n), changed=n)


@bomb
def entries_in_pairs() -> bytes:
    """Two boxes for each of many tensors. No two overlap, but there are no streams."""
    n = limits.ENTRIES >> 4
    names = rows(n)
    its_table = Table([names], [I8] * n, [1] * n, [b"\4" * n], n, [b"\3" * n])
    columns = Columns([bytes(2) + b"\1\0" * (n - 1)], [b"\5" * 2 * n], [b"\0\2\2\2" * n])
    return patch(its_table, claims(bucket(RAW, I8, columns), 2 * n), changed=2 * n)


@bomb
def entries_at_corners() -> bytes:
    """Boxes of one element each in sixteen dimensions, of which each tells apart only two halves."""
    corner = np.arange(1 << 16)[:, None] >> np.arange(16) & 1
    boxes = np.concatenate([corner, np.ones_like(corner)], axis=1).astype(np.uint8).tobytes()
    columns = Columns([bytes(1 << 16)], [b"\5" * (1 << 16)], [boxes])
    return patch(table((b"w", I8, [2] * 16)), claims(bucket(RAW, I8, columns), 1 << 16), changed=1 << 16)


def rods(many: int) -> np.ndarray:
    """Starts and sizes of boxes along three axes that pass one another: no cut parts them."""
    a, b = (2 * n.ravel() for n in np.meshgrid(np.arange(many), np.arange(many)))
    zero, one, long = np.zeros_like(a), np.ones_like(a), np.full_like(a, 2 * many)
    ways = [(zero, a, b + 1, long, one, one), (a + 1, zero, b, one, long, one), (a, b + 1, zero, one, one, long)]
    return np.concatenate([np.stack(way, axis=1) for way in ways])


@bomb
def entries_entangled() -> bytes:
    """Boxes that no dimension tells apart."""
    boxes = rods(147)
    n = len(boxes)
    columns = Columns([bytes(n)], [b"\5" * n], [varints(boxes.ravel())])
    return patch(table((b"w", I8, [294] * 3)), claims(bucket(RAW, I8, columns), n), changed=n)


@bomb
def entries_entangled_in_many_tensors() -> bytes:
    """Each of many tensors has as much of that as would be looked at."""
    boxes, tensors = rods(30), 24
    n = len(boxes)
    its_table = table(*((b"t%02d" % t, I8, [60] * 3) for t in range(tensors)))
    one = varints(boxes.ravel())
    steps = [bytes(n), *(b"\1" + bytes(n - 1) for _ in range(tensors - 1))]
    columns = Columns([b"".join(steps)], [b"\5" * n * tensors], [one * tensors])
    return patch(its_table, claims(bucket(RAW, I8, columns), n * tensors), changed=n * tensors)


@bomb
def boxes_of_many_dimensions_in_many_buckets() -> bytes:
    """As boxes these would be objects a hundred times the size of the file. This patch is valid."""
    tensors, n, rank = 4, 1 << 16, 32
    shape = [2] * 5 + [1] * (rank - 6) + [n]
    start = np.zeros((n, rank), np.int64)
    start[:, -1] = np.arange(n)
    start[:, :5] = 1
    one = varints(np.concatenate([start, np.ones_like(start)], axis=1).ravel())
    buckets = []
    for t in range(tensors):
        columns = Columns([number(t) + bytes(n - 1)], [b"\5" * n], [one])
        streams = Stream(1, [bytes(4 * n)], 1), Stream(2, [bytes(n)], 1)
        buckets.append(claims(bucket(RAW, I8, columns, *streams), n))
    return patch(table(*((b"t%d" % t, I8, shape) for t in range(tensors))), *buckets, changed=n * tensors)


@bomb
def boxes_and_changes_in_one_bucket(n: int = limits.REGIONS_PER_TENSOR) -> bytes:
    """As many entries, and as many changes, as a bucket may have, in rows of their tensors. This patch is valid."""
    tensors = 16
    i = np.arange(n)
    start, size = np.stack([i >> 9, i >> 2 & 127, 16 * (i & 3)], 1), np.tile([1, 1, 16], (n, 1))
    boxes = varints(np.concatenate([start, size], 1).ravel()) * tensors
    steps = b"".join(number(int(t > 0)) + bytes(n - 1) for t in range(tensors))
    columns = Columns([steps], [number(16 << 2 | 1) * n * tensors], [boxes])
    positions = np.tile(np.arange(16, dtype="<u4"), n * tensors).tobytes()
    streams = Stream(1, [positions], 1), Stream(2, [bytes(8 * 16 * n * tensors)], 1)
    its_table = table(*((b"t%02d" % t, F64, [128, 128, 65]) for t in range(tensors)))
    its_bucket = claims(bucket(RAW, F64, columns, *streams), n * tensors)
    return patch(its_table, its_bucket, changed=16 * n * tensors)


@bomb
def buckets_of_one_change() -> bytes:
    """Many of the smallest buckets there are. This patch is valid."""
    n = 1 << 11
    its_table = table((b"w", I8, [1 << 20]))
    hash = Header(its_table).hash
    sealed = []
    for i in range(n):
        columns = Columns([0], [5], [i, 1])
        streams = [Stream(1, [bytes(4)]), Stream(2, [b"\7"])]
        sealed.append(Bucket(RAW, I8, hash, columns, 31, 24, [], streams).encode())
    return Parts(Header(its_table), [], Footer(bytes(16), bytes(16), 1, n), sealed).encode()


@bomb
def dense_entries_of_one_element(n: int = limits.REGIONS_PER_TENSOR) -> bytes:
    """As many dense entries as a bucket may have, an element each. This patch is valid."""
    tensors = 16
    boxes = varints(np.stack([2 * np.arange(n), np.ones(n)], axis=1).ravel()) * tensors
    steps = b"".join(number(int(t > 0)) + bytes(n - 1) for t in range(tensors))
    columns = Columns([steps], [b"\7" * n * tensors], [boxes])
    its_bucket = claims(bucket(GAP, I8, columns, Stream(24, [bytes(n * tensors)], 1)), n * tensors)
    return patch(table(*((b"t%02d" % t, I8, [2 * n]) for t in range(tensors))), its_bucket, changed=n * tensors)


@bomb
def windows_of_nothing() -> bytes:
    """A change in each of some tensors that are said to be terabytes. This patch is valid."""
    n = 4
    columns = Columns([0] + [1] * (n - 1), [5] * n, [5, 1] * n)
    its_bucket = bucket(RAW, I8, columns, Stream(1, [bytes(4 * n)]), Stream(2, [b"\7" * n]))
    return patch(table(*((b"t%d" % t, I8, [1 << 42]) for t in range(n))), its_bucket, changed=n)


def claims(its_bucket: Bucket, entries: int) -> Bucket:
    its_bucket.entry_count = entries
    return its_bucket


@bomb
def changes_in_no_bytes(n: int = limits.BUCKET_CHANGES) -> bytes:
    """Sixteen million changes in some kilobytes. This bucket is valid."""
    zeros = bytes(n)
    streams = [Stream(6, [zeros], 1), *(Stream(16 + plane, [zeros], 1) for plane in range(8))]
    columns = Columns([0], [n << 2], [])
    return patch(table((b"w", F64, [n])), bucket(GAP, F64, columns, *streams), changed=n)


@bomb
def changes_without_streams() -> bytes:
    n = limits.BUCKET_CHANGES
    return patch(table((b"w", F64, [n])), bucket(ULP, F64, Columns([0], [n << 2], [])), changed=n)


@bomb
def changes_past_the_limit() -> bytes:
    n = limits.BUCKET_CHANGES + 1
    return patch(table((b"w", F64, [n])), bucket(ULP, F64, Columns([0], [n << 2], [])), changed=n)


@bomb
def raw_words_in_a_frame() -> bytes:
    """Positions and words may be coded; these positions do not rise."""
    n = limits.BUCKET_CHANGES
    streams = [Stream(1, [bytes(4 * n)], 1), Stream(2, [bytes(8 * n)], 1)]
    return patch(table((b"w", F64, [n])), bucket(RAW, F64, Columns([0], [n << 2], []), *streams), changed=n)


@bomb
def tokens_longer_than_due() -> bytes:
    """A frame of 1 GiB where 256 tokens are due."""
    stream = Stream(6, [b""], 1)
    stream.coded = lambda: [repeated_frame(1 << 30)]
    return patch(table((b"w", I8, [256])), bucket(GAP, I8, Columns([0], [256 << 2], []), stream), changed=256)


@bomb
def tiles_in_no_bytes() -> bytes:
    """A million tiles with no change in any but the first."""
    n = limits.TILES << 10
    columns = Columns([0], [1 << 2], [])
    streams = [Stream(4, [b"\1" + bytes(limits.TILES - 1)], 1), Stream(6, [b"\0"]), Stream(8, [b"\2"])]
    return patch(table((b"w", I8, [n])), bucket(ULP, I8, columns, *streams, tile_log=10))


def zeros_in_rans(count: int) -> bytes:
    """A chunk in which zero is the only symbol: any number of them in a few bytes."""
    lanes = min(32, 1 << max(0, (count >> 11).bit_length() - 1))
    return bytes(3) + struct.pack("<I", 1 << 16) * lanes


def coded(id: int, *chunks: bytes) -> Stream:
    return Stream(id, list(chunks), coder=2, as_it_is=True)


CLASSES = Stream(3, [struct.pack("<B7H", 0, *range(1, 8))])  # eight classes; all the old bits are in the first


@bomb
def classes_in_no_bytes() -> bytes:
    """Sixteen million changes in some hundred bytes. This bucket is valid."""
    n = limits.BUCKET_CHANGES
    tiles = [Stream(4, [bytes((16 + 4 * 20,)) + bytes(7)]), Stream(5, [bytes(3)])]  # 2^24, then zeros
    streams = [CLASSES, *tiles, coded(64, zeros_in_rans(n)), coded(66, zeros_in_rans(n))]
    return patch(table((b"w", F64, [n])), bucket(CTX, F64, Columns([0], [n << 2], []), *streams), changed=n)


@bomb
def classes_in_many_tiles() -> bytes:
    """As many tiles as there may be, of eight classes each, with one change in the first."""
    n = limits.TILES
    counts = Stream(4, [b"\1" + bytes(8 * n - 1)], 1)
    streams = [CLASSES, counts, Stream(64, [b"\0"]), Stream(66, [b"\2"])]
    return patch(table((b"w", I8, [n << 10])), bucket(CTX, I8, Columns([0], [4], []), *streams, tile_log=10))


@bomb
def classes_past_the_tiles() -> bytes:
    n = limits.TILES + 1
    streams = [CLASSES, Stream(64, [b"\0"]), Stream(66, [b"\2"])]
    return patch(table((b"w", I8, [n << 10])), bucket(CTX, I8, Columns([0], [4], []), *streams, tile_log=10))


@bomb
def classes_without_streams() -> bytes:
    n = limits.BUCKET_CHANGES
    return patch(table((b"w", F64, [n])), bucket(CTX, F64, Columns([0], [n << 2], []), CLASSES), changed=n)


@bomb
def classes_of_many_entries() -> bytes:
    """A tile for each of many entries, none of which has its counts."""
    n = limits.REGIONS_PER_TENSOR
    boxes = varints(np.stack([2 * np.arange(n), np.ones(n)], axis=1).ravel())
    streams = [CLASSES, coded(4, zeros_in_rans(8 * n))]
    columns = Columns([bytes(n)], [b"\5" * n], [boxes])
    return patch(table((b"w", I8, [1 << 21])), claims(bucket(CTX, I8, columns, *streams), n), changed=n)


@bomb
def symbols_that_end_too_early() -> bytes:
    """Sixteen million symbols are due; their chunk has a table, states, and no words."""
    n = limits.BUCKET_CHANGES
    chunk = b"\0\1\0\x3f\0" + struct.pack("<I", (1 << 32) - 1) * 32
    return patch(table((b"w", I8, [n])), bucket(GAP, I8, Columns([0], [n << 2], []), coded(6, chunk)), changed=n)


@bomb
def symbols_of_a_table_without_end() -> bytes:
    chunk = b"\0\xff\0" + b"\xff" * (1 << 20)
    return patch(table((b"w", I8, [256])), bucket(GAP, I8, Columns([0], [256 << 2], []), coded(6, chunk)), changed=256)


@bomb
def dense_of_zeros(n: int = limits.BUCKET_DENSE_BYTES) -> bytes:
    columns = Columns([0], [1 << 2 | 2], [])
    return patch(table((b"w", I8, [n])), bucket(GAP, I8, columns, Stream(24, [bytes(n)], 1)))


@bomb
def chunks_of_nothing() -> bytes:
    """As many chunks as there may be, all but one of them empty."""
    n = limits.CHUNKS - 1
    streams = [Stream(6, [b"x"] + [b""] * (n - 1))]
    return patch(table((b"w", I8, [256])), bucket(GAP, I8, Columns([0], [256 << 2], []), *streams), changed=256)


@bomb
def chunks_of_nothing_in_every_stream() -> bytes:
    """More chunks than there may be, a byte each."""
    streams = [Stream(id, [b"x"] + [b""] * 65_000) for id in range(16, 32)]
    return patch(table((b"w", I8, [256])), bucket(GAP, I8, Columns([0], [256 << 2], []), *streams))


@bomb
def covers_all_alike() -> bytes:
    """A million times the same tensor, which would be read a million times."""
    n = limits.REGIONS_COVERED
    return patch(table((b"w", I8, [1 << 30])), changed=0, covers=Columns([bytes(n)], [bytes(n)], []), covered=n)


@bomb
def covers_side_by_side() -> bytes:
    n = limits.REGIONS_COVERED
    boxes = varints(np.stack([np.arange(n), np.ones(n)], axis=1).ravel())
    columns = Columns([bytes(n)], [b"\1" * n], [boxes])
    return patch(table((b"w", I8, [1 << 30])), changed=0, covers=columns, covered=n)


@bomb
def covers_of_many_dimensions() -> bytes:
    """Covered regions that are a hundred times their size as objects. This patch is valid."""
    n, rank = limits.REGIONS_PER_TENSOR, 32
    start = np.zeros((n, rank), np.int64)
    start[:, :4] = np.arange(n)[:, None] >> np.array([12, 8, 4, 0]) & 15
    one = varints(np.concatenate([start, np.ones_like(start)], axis=1).ravel())
    shape = [16] * 4 + [1] * (rank - 5) + [2]
    columns = Columns([bytes(n) + b"\1" + bytes(n - 1)], [b"\1" * 2 * n], [one * 2])
    return patch(table((b"v", I8, shape), (b"w", I8, shape)), changed=0, covers=columns, covered=2 * n)


@bomb
def footer_of_a_million_buckets() -> bytes:
    """A million buckets of no bytes."""
    n = limits.BUCKETS
    header = Header(table((b"w", I8, [4]))).encode()
    footer = Footer(bytes(16), bytes(16), 1, 0, count=n, sizes=[bytes(n)], checksums=[bytes(16 * n)])
    return header + footer.encode(header, [])
