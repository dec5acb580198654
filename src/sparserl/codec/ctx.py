"""`ctx`: gaps and steps, separated by the magnitude of the old bits. Needs all old bits of the regions it changes.

Small weights change often and large ones seldom, and both sides have the old bits. So elements are put into classes by
old magnitude, a gap counts only the elements of its own class, and every class has its own streams.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from ..errors import InvalidField, NeedsBase
from ..kernels import MOST_CLASSES, cpu
from ..kernels.cpu.arguments import ClassChanges, ClassEnds, ClassStreams, Landing, Magnitudes, Tiled
from ..weights.dtypes import DType, UIntArray
from . import numbers
from .profile import BucketLayout, Classes, DecodedChanges, Positions, empty
from .streams import Chunks, Reader, Stream

KEYS = 512  # thresholds are below this


def magnitude(dtype: DType) -> Magnitudes:
    """How kernels read the magnitudes of a dtype."""
    width = 8 * dtype.width
    if dtype.signed:
        return Magnitudes(np.empty(0, f"<i{dtype.width}"), np.uint64((1 << width) - 1))
    return Magnitudes(np.empty(0, dtype.uint), np.uint64((1 << (width - dtype.sign_magnitude)) - 1))


def _limits(classes: Classes) -> tuple[int, Any]:
    """Thresholds as magnitudes, padded in front with zeros, because kernels are compiled for 4 and for 7."""
    spare = (4 if len(classes.thresholds) <= 4 else 7) - len(classes.thresholds)
    return spare, (np.uint64(0),) * spare + tuple(np.uint64(t << classes.shift) for t in classes.thresholds)


def tiles(layout: BucketLayout) -> int:
    """The number of tiles of all regions."""
    return int((((layout.numel - 1) >> layout.tile_log) + 1).sum())


@dataclass(frozen=True)
class Ctx:
    name: ClassVar[str] = "ctx"
    id: ClassVar[int] = 3
    absolute: ClassVar[bool] = False
    tiled: ClassVar[bool] = True
    planar: ClassVar[bool] = True
    conditional: ClassVar[bool] = True

    def encode(self, layout: BucketLayout, positions: Sequence[Positions], words: Sequence[UIntArray]) -> Chunks:
        if layout.old_addresses is None or layout.classes is None:
            raise NeedsBase("profile ctx is written from the old bits: pass the base weights")
        spare, limits = _limits(layout.classes)
        rows = len(limits) + 1
        counts = empty(tiles(layout) * rows, np.uint32)
        # Each class gets space for all changes; pages that are not written to take no memory.
        gaps = [empty(layout.changes, np.uint32) for _ in range(rows)]
        class_words = [empty(layout.changes, layout.dtype.uint) for _ in range(rows)]
        gap_ends = np.array([row.ctypes.data for row in gaps], np.int64)
        word_ends = np.array([row.ctypes.data for row in class_words], np.int64)
        written = 0
        old_bits = [empty(0, layout.dtype.uint)] * len(positions) if layout.old_bits is None else layout.old_bits
        for part, steps, old, (entries, _) in zip(positions, words, old_bits, layout.spans(positions), strict=True):
            regions = Tiled(
                layout.old_addresses[entries], layout.numel[entries], layout.count[entries], layout.tile_log
            )
            ends = ClassEnds(counts[written:], gap_ends, word_ends)
            written += cpu.classes.class_gaps(magnitude(layout.dtype), regions, limits, part, steps, old, ends)
        counts = counts.reshape(-1, rows)[:, spare:]
        streams: Chunks = {Stream.CLASSES: [write_classes(layout.classes)]}
        streams |= numbers.write(layout, counts.ravel(), Stream.TILE_TOKENS, Stream.TILE_LOWS)
        for c, size in enumerate(counts.sum(0, np.int64).tolist()):
            stream = Stream.CLASS + 4 * c
            row = c + spare
            streams |= numbers.write(layout, gaps[row][:size], stream, stream + 1)
            streams |= numbers.write(layout, class_words[row][:size], stream + 2, stream + 3)
        return streams

    def decode(self, layout: BucketLayout, reader: Reader) -> DecodedChanges:
        if layout.old_addresses is None:
            raise NeedsBase(f"{reader.label} is in profile ctx, which cannot be read without the base weights")
        classes = read_classes(layout.dtype, reader)
        counts = _read_counts(layout, reader, len(classes.thresholds) + 1)
        totals = counts.sum(0, np.int64)
        if int(totals.sum()) != layout.changes:
            raise InvalidField(f"{reader.label}: the changes of all tiles do not add up to those of the entries")
        gaps, words = _read_classes_streams(layout, reader, totals)
        reader.finish()  # no error may come after the old bits were overwritten below
        spare, limits = _limits(classes)
        changes = DecodedChanges(
            positions=layout.allocate(layout.changes, np.uint32),
            words=np.empty_like(words),
            old=layout.allocate(layout.changes, words.dtype),
        )
        bad = cpu.classes.class_positions(
            np.empty(0, layout.dtype.uint),
            magnitude(layout.dtype),
            Tiled(layout.old_addresses, layout.numel, layout.count, layout.tile_log),
            limits,
            ClassStreams(
                tiles=np.pad(counts, ((0, 0), (spare, 0))).ravel(),
                begin=np.pad(np.cumsum(totals) - totals, (spare, 0)),
                gaps=gaps,
                words=words,
            ),
            Landing(layout.overwrite, layout.dtype.sign_magnitude),
            ClassChanges(*changes),
        )
        if bad >= 0:
            raise InvalidField(
                f"{reader.label}: sparse entry {bad}: tile counts do not add up, or a gap leaves its tile "
                "(the old bits may not be those of the base)"
            )
        return changes


def _read_counts(layout: BucketLayout, reader: Reader, classes: int) -> npt.NDArray[np.uint32]:
    """The number of changes of every class in every tile: tiles × classes."""
    tile = 1 << layout.tile_log
    counts = numbers.read(
        layout, reader, classes * tiles(layout), tile, np.uint32, Stream.TILE_TOKENS, Stream.TILE_LOWS
    )
    return counts.reshape(-1, classes)


def _read_classes_streams(
    layout: BucketLayout, reader: Reader, totals: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.uint32], UIntArray]:
    """Gaps and words, class by class; behind the gaps there is one zero more, which kernels may read."""
    reader.decode_ahead(
        {
            Stream.CLASS + 4 * c + tokens: layout.chunk_sizes(size)
            for c, size in enumerate(totals.tolist())
            for tokens in (0, 2)
        }
    )
    gaps = np.zeros(layout.changes + 1, np.uint32)
    words = empty(layout.changes, layout.dtype.uint)
    largest_gap = (1 << layout.tile_log) - 1
    largest_word = (1 << (8 * layout.dtype.width)) - 1
    start = 0
    for c, size in enumerate(totals.tolist()):
        stream = Stream.CLASS + 4 * c
        of_class = slice(start, start + size)
        numbers.read_into(layout, reader, gaps[of_class], largest_gap, stream, stream + 1)
        numbers.read_into(layout, reader, words[of_class], largest_word, stream + 2, stream + 3)
        start += size
    return gaps, words


def write_classes(classes: Classes) -> bytes:
    """Shift and thresholds as a stream."""
    return bytes((classes.shift,)) + np.array(classes.thresholds, "<u2").tobytes()


def read_classes(dtype: DType, reader: Reader) -> Classes:
    """Shift and thresholds, which rise strictly and stay where a magnitude of the dtype can reach them."""
    data = reader.take_stored(Stream.CLASSES, 1 + 2 * (MOST_CLASSES - 1))
    if len(data) < 3 or len(data) % 2 == 0:
        raise InvalidField(f"{reader.label}: {len(data)} bytes do not tell classes apart")
    classes = Classes(data[0], tuple(np.frombuffer(data[1:], "<u2").tolist()))
    thresholds = classes.thresholds
    rising = all(a < b for a, b in zip((0, *thresholds), thresholds, strict=False))
    if not rising or thresholds[-1] >= KEYS or thresholds[-1] << classes.shift >= 1 << (8 * dtype.width):
        raise InvalidField(f"{reader.label}: classes by {list(thresholds)} << {classes.shift} do not fit {dtype}")
    return classes
