"""Old bits: what the elements of a part that have changed had before, from a source that tracks changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..kernels import cpu
from .dtypes import UIntArray
from .region import Region, row_major, run_start

Positions = npt.NDArray[np.uint32]
POSITION_BYTES = 4  # of a change, beside its old bits


class OldPiece(NamedTuple):
    """The old bits of consecutive elements of a part.

    Attributes:
        begin: The first of these elements.
        end: The one behind the last.
        positions: Which of them have changed, counted from `begin`, in rising order; None for all.
        bits: The old bits of those.
    """

    begin: int
    end: int
    positions: Positions | None
    bits: UIntArray

    def under(self, later: OldPiece) -> OldPiece:
        """The old bits of changes of two times, of which these are the earlier."""
        if self.positions is None:
            return self
        if later.positions is not None:
            return self._replace(**merge_old(self.positions, self.bits, later.positions, later.bits)._asdict())
        bits = later.bits.copy()
        bits[self.positions] = self.bits
        return later._replace(bits=bits)


class OldBits:
    """The bits that elements of a part had, wherever they may have changed: at sorted positions, or everywhere.

    Args:
        numel: The elements of the part.
        pieces: Their old bits, in order.

    >>> piece = OldPiece(0, 1000, np.array([3, 700], np.uint32), np.array([17, 18], np.uint16))
    >>> old = OldBits(1000, [piece])
    >>> old.between(0, 1000).tolist()
    [3, 700]
    >>> old.run(500, 1000)[1].tolist()
    [18]
    """

    def __init__(self, numel: int, pieces: Sequence[OldPiece]) -> None:
        self.numel = numel
        self.pieces = tuple(pieces)

    @property
    def count(self) -> int:
        """Of how many elements the old bits are known."""
        return sum(piece.bits.size for piece in self.pieces)

    def between(self, low: int, high: int) -> Positions:
        """The positions from `low` to `high` that may have changed, counted from `low`, in rising order."""
        return self.run(low, high)[0]

    def run(self, low: int, high: int) -> tuple[Positions, UIntArray]:
        """Those positions, and the old bits there."""
        positions = []
        bits = []
        for piece in self.pieces:
            first = max(low, piece.begin)
            last = min(high, piece.end)
            if first >= last:
                continue
            inside = slice(first - piece.begin, last - piece.begin)
            if piece.positions is None:
                positions.append(np.arange(first - low, last - low, dtype=np.uint32))
            else:
                some = slice(*np.searchsorted(piece.positions, np.array([inside.start, inside.stop], np.uint32)))
                positions.append(_shifted(piece.positions[some], piece.begin - low))
                inside = some
            bits.append(piece.bits[inside])
        if len(bits) == 1:
            return positions[0], bits[0]
        if not bits:
            return np.empty(0, np.uint32), self.pieces[0].bits[:0] if self.pieces else np.empty(0, np.uint8)
        return np.concatenate(positions), np.concatenate(bits)

    def box(self, shape: tuple[int, ...], box: Region) -> tuple[Positions, UIntArray]:
        """The positions in a box of the part, whose shape is given, and the old bits there."""
        start = run_start(box, shape)
        if start is not None:
            return self.run(start, start + box.numel)
        strides = row_major(shape)
        low = sum(first * stride for first, stride in zip(box.start, strides, strict=True))
        high = low + sum((n - 1) * stride for n, stride in zip(box.size, strides, strict=True)) + 1
        positions, bits = self.run(low, high)
        where = np.unravel_index(positions.astype(np.int64) + low, shape)
        inside = np.ones(positions.size, bool)
        for axis, first, size in zip(where, box.start, box.size, strict=True):
            inside &= (axis >= first) & (axis < first + size)
        corner = tuple(axis[inside] - first for axis, first in zip(where, box.start, strict=True))
        return np.ravel_multi_index(corner, box.size).astype(np.uint32), bits[inside]

    def under(self, later: OldBits) -> OldBits | None:
        """The old bits of changes of two times, of which these are the earlier; None if they are cut otherwise."""
        if [piece[:2] for piece in self.pieces] != [piece[:2] for piece in later.pieces]:
            return None
        return OldBits(self.numel, [a.under(b) for a, b in zip(self.pieces, later.pieces, strict=True)])


class _Merged(NamedTuple):
    positions: Positions
    bits: UIntArray


def merge_old(first: Positions, first_bits: UIntArray, then: Positions, then_bits: UIntArray) -> _Merged:
    """Positions of changes of two times, with the old bits that came first."""
    if not first.size or not then.size:
        return _Merged(first, first_bits) if first.size else _Merged(then, then_bits)
    positions = np.empty(first.size + then.size, np.uint32)
    bits = np.empty(positions.size, first_bits.dtype)
    count = cpu.marks.merge_old(first, first_bits, then, then_bits, positions, bits)
    positions.resize(count, refcheck=False)  # gives back what was not needed, without a copy
    bits.resize(count, refcheck=False)
    return _Merged(positions, bits)


def _shifted(positions: Positions, by: int) -> Positions:
    """Positions counted from elsewhere; a view if that is the same place."""
    return positions if not by else (positions.astype(np.int64) + by).astype(np.uint32)
