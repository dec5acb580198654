"""Index coders: positions as they are, or as gaps inside tiles."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..errors import InvalidField
from ..kernels import cpu
from . import numbers
from .profile import BucketLayout, Positions, empty
from .streams import Chunks, Reader, Stream


def write_positions(layout: BucketLayout, positions: Positions) -> Chunks:
    """Each position as four bytes."""
    return {Stream.POSITIONS: layout.cut(positions.astype("<u4", copy=False))}


def read_positions(layout: BucketLayout, reader: Reader) -> Positions:
    """Positions, checked to rise strictly and to stay inside each region."""
    positions = reader.take_items(Stream.POSITIONS, np.dtype("<u4"), layout.chunk_sizes(layout.changes), layout.lend)
    if (bad := cpu.changes.ascending(layout.count, layout.numel, positions.ctypes.data)) >= 0:
        raise InvalidField(f"{reader.label}: sparse entry {bad}: positions are out of range or do not rise")
    return positions


def tiles(layout: BucketLayout) -> int:
    """How many tile counts the layout needs: none for a region of one tile, whose entry has the count."""
    per_entry = ((layout.numel - 1) >> layout.tile_log) + 1
    return int(per_entry[per_entry > 1].sum())


def write_gaps(layout: BucketLayout, positions: Sequence[Positions]) -> Chunks:
    """Distances between changes, restarting in every tile, and the number of changes per tile."""
    gaps = empty(layout.changes, np.uint32)
    counts = empty(tiles(layout), np.uint32)
    tile = 0
    for part, (entries, changes) in zip(positions, layout.spans(positions), strict=True):
        regions = (layout.count[entries], layout.numel[entries], layout.tile_log)
        tile += cpu.changes.tile_gaps(*regions, part, gaps[changes], counts[tile:])
    return {
        **numbers.write(layout, counts, Stream.TILE_TOKENS, Stream.TILE_LOWS),
        **numbers.write(layout, gaps, Stream.GAP_TOKENS, Stream.GAP_LOWS),
    }


def read_gaps(layout: BucketLayout, reader: Reader) -> Positions:
    """Positions from gaps; they rise by construction and are checked to stay inside tile and region."""
    largest = 1 << layout.tile_log
    counts = numbers.read(layout, reader, tiles(layout), largest, np.uint32, Stream.TILE_TOKENS, Stream.TILE_LOWS)
    gaps = layout.allocate(layout.changes, np.uint32)
    numbers.read_into(layout, reader, gaps, largest - 1, Stream.GAP_TOKENS, Stream.GAP_LOWS)
    positions = gaps  # in the same memory
    bad = cpu.changes.tile_positions(layout.count, layout.numel, layout.tile_log, counts, gaps, positions)
    if bad >= 0:
        raise InvalidField(f"{reader.label}: sparse entry {bad}: tile counts do not add up, or a gap leaves its tile")
    return positions
