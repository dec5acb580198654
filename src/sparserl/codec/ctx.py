"""`ctx`: gaps and steps told apart by the magnitude of the old bits. Needs all the old bits of the regions it changes.

Small weights change often and large ones seldom, and both sides hold the old bits. So elements are put into classes by
old magnitude, a gap counts only the elements of its own class, and every class has its own streams.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ..errors import InvalidField, NeedsBase
from ..kernels import MOST_CLASSES, cpu
from ..weights.dtypes import DType, UIntArray
from . import numbers
from .profile import Classes, Found, Layout, Positions, empty
from .streams import Chunks, Reader, Stream

KEYS = 512  # thresholds are below this


def magnitude(dtype: DType) -> tuple[Any, Any]:
    """How kernels see the magnitudes of a dtype: an empty array that tells the kind, and the bits to keep."""
    width = 8 * dtype.width
    if dtype.signed:
        return np.empty(0, f"<i{dtype.width}"), np.uint64((1 << width) - 1)
    return np.empty(0, dtype.uint), np.uint64((1 << (width - dtype.sign_magnitude)) - 1)


def _limits(classes: Classes) -> tuple[int, Any]:
    """Thresholds as magnitudes, behind zeros that fill them up: kernels are compiled for 4 and for 7."""
    spare = (4 if len(classes.thresholds) <= 4 else 7) - len(classes.thresholds)
    return spare, (np.uint64(0),) * spare + tuple(np.uint64(t << classes.shift) for t in classes.thresholds)


def tiles(layout: Layout) -> int:
    """Tiles of all regions."""
    return int((((layout.numel - 1) >> layout.tile_log) + 1).sum())


@dataclass(frozen=True)
class Ctx:
    name: ClassVar[str] = "ctx"
    id: ClassVar[int] = 3
    absolute: ClassVar[bool] = False
    tiled: ClassVar[bool] = True
    planar: ClassVar[bool] = True
    conditional: ClassVar[bool] = True

    def encode(self, layout: Layout, positions: Sequence[Positions], words: Sequence[UIntArray]) -> Chunks:
        if layout.old is None or layout.classes is None:
            raise NeedsBase("ctx is written with the old bits at hand")
        kind, keep = magnitude(layout.dtype)
        spare, limits = _limits(layout.classes)
        counts, told = empty(tiles(layout) * (len(limits) + 1), np.uint32), 0
        # Each class has room for all changes; what is not written to takes no memory.
        gaps = [empty(layout.changes, np.uint32) for _ in range(len(limits) + 1)]
        sorted_words = [empty(layout.changes, layout.dtype.uint) for _ in gaps]
        ends = [np.array([a.ctypes.data for a in arrays], np.int64) for arrays in (gaps, sorted_words)]
        for part, steps, (entries, _) in zip(positions, words, layout.spans(positions), strict=True):
            of = layout.old[entries], layout.numel[entries], layout.count[entries], layout.tile_log
            told += cpu.classes.class_gaps(kind, keep, *of, limits, part, steps, counts[told:], *ends)
        counts = counts.reshape(-1, len(limits) + 1)[:, spare:]
        streams: Chunks = {Stream.CLASSES: [write_classes(layout.classes)]}
        streams |= numbers.write(layout, counts.ravel(), Stream.TILE_TOKENS, Stream.TILE_LOWS)
        for c, size in enumerate(counts.sum(0, np.int64).tolist()):
            stream, row = Stream.CLASS + 4 * c, c + spare
            streams |= numbers.write(layout, gaps[row][:size], stream, stream + 1)
            streams |= numbers.write(layout, sorted_words[row][:size], stream + 2, stream + 3)
        return streams

    def decode(self, layout: Layout, reader: Reader) -> Found:
        if layout.old is None:
            raise NeedsBase(f"{reader.what} is in profile ctx: hand over the base weights, it cannot be read without")
        classes = read_classes(layout.dtype, reader)
        kind, keep = magnitude(layout.dtype)
        spare, limits = _limits(classes)
        due, most = len(classes.thresholds) + 1, 1 << layout.tile_log
        counts = numbers.read(
            layout, reader, due * tiles(layout), most, np.uint32, Stream.TILE_TOKENS, Stream.TILE_LOWS
        ).reshape(-1, due)
        totals = counts.sum(0, np.int64)
        if int(totals.sum()) != layout.changes:
            raise InvalidField(f"{reader.what}: the changes of all tiles do not add up to those of the entries")
        gaps, words = np.zeros(layout.changes + 1, np.uint32), empty(layout.changes, layout.dtype.uint)
        at = np.cumsum(totals) - totals
        widest = (1 << (8 * layout.dtype.width)) - 1
        reader.decode_ahead(
            {
                Stream.CLASS + 4 * c + tokens: layout.chunk_sizes(size)
                for c, size in enumerate(totals.tolist())
                for tokens in (0, 2)
            }
        )
        for c, (low, size) in enumerate(zip(at.tolist(), totals.tolist(), strict=True)):
            stream, mine = Stream.CLASS + 4 * c, slice(low, low + size)
            numbers.read_into(layout, reader, gaps[mine], most - 1, stream, stream + 1)
            numbers.read_into(layout, reader, words[mine], widest, stream + 2, stream + 3)
        reader.finish()  # for what is landed below must not be followed by an error
        padded = np.pad(counts, ((0, 0), (spare, 0)))
        found = Found(
            layout.room(layout.changes, np.uint32), np.empty_like(words), layout.room(layout.changes, words.dtype)
        )
        args = kind, keep, layout.old, layout.numel, layout.count, layout.tile_log, limits
        at, tag = np.pad(at, (spare, 0)), np.empty(0, layout.dtype.uint)
        order = layout.land, layout.dtype.sign_magnitude
        bad = cpu.classes.class_positions(tag, *args, padded.ravel(), at, gaps, words, *order, *found)
        if bad >= 0:
            raise InvalidField(
                f"{reader.what}: sparse entry {bad}: tile counts do not add up, or a gap leaves its tile "
                "(the old bits may not be those of the base)"
            )
        return found


def write_classes(classes: Classes) -> bytes:
    """Shift and thresholds as a stream."""
    return bytes((classes.shift,)) + np.array(classes.thresholds, "<u2").tobytes()


def read_classes(dtype: DType, reader: Reader) -> Classes:
    """Shift and thresholds, which rise strictly and stay where a magnitude of the dtype can reach them."""
    data = reader.take_stored(Stream.CLASSES, 1 + 2 * (MOST_CLASSES - 1))
    if len(data) < 3 or len(data) % 2 == 0:
        raise InvalidField(f"{reader.what}: {len(data)} bytes do not tell classes apart")
    classes = Classes(data[0], tuple(np.frombuffer(data[1:], "<u2").tolist()))
    thresholds = classes.thresholds
    rising = all(a < b for a, b in zip((0, *thresholds), thresholds, strict=False))
    if not rising or thresholds[-1] >= KEYS or thresholds[-1] << classes.shift >= 1 << (8 * dtype.width):
        raise InvalidField(f"{reader.what}: classes by {list(thresholds)} << {classes.shift} do not fit {dtype}")
    return classes
