"""The old bits of what optimizer steps have changed: the first that each element had since the last version.

Of every cut of the tracked rows there is one list of positions and old bits, which a step's changes are merged into.
Where such a list would take more than the weights themselves, all old bits of the cut are kept instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..weights.dtypes import UIntArray
from ..weights.old_bits import POSITION_BYTES, OldBits, OldPiece, merge_old
from .tracked_rows import Plan, RowChanges


class _CutBits(NamedTuple):
    """The old bits of a cut: positions counted from its first row; None for all elements."""

    positions: npt.NDArray[np.uint32] | None
    bits: UIntArray


class PublishedBits(NamedTuple):
    """What is known of the changes of a part since the last committed version."""

    old: OldBits
    unknown: bool

    @property
    def nbytes(self) -> int:
        """Bytes that the old bits take."""
        arrays = [array for piece in self.old.pieces for array in (piece.positions, piece.bits) if array is not None]
        return sum(array.nbytes for array in arrays)


class KeptBits:
    """The old bits of all rows of a plan since some moment.

    Attributes:
        plan: The plan.
        unknown: Of which rows not all changes are known.
    """

    def __init__(self, plan: Plan, unknown: bool = False) -> None:
        self.plan = plan
        self._cuts: dict[int, _CutBits] = {}
        self._carried: dict[int, OldBits] = {}  # of rows, from earlier plans
        self.unknown = np.full(len(plan.rows), unknown)

    @property
    def nbytes(self) -> int:
        """Bytes that the old bits take."""
        cuts = [array.nbytes for cut in self._cuts.values() for array in cut if array is not None]
        return sum(cuts) + sum(PublishedBits(old, False).nbytes for old in self._carried.values())

    def add(self, number: int, changes: RowChanges, all_bits: Callable[[], UIntArray]) -> None:
        """Add what a step changed in a cut. Several threads may add to different cuts.

        all_bits: copies the bits of the whole cut, of which those that changed may be old or new.
        """
        kept = self._cuts.get(number)
        if not changes.positions.size or (kept is not None and kept.positions is None):
            return
        starts = self.plan.starts[number][changes.some]
        positions = changes.positions + np.repeat(starts, changes.counts).astype(np.uint32)
        old_bits = changes.old_bits
        if kept is not None and kept.positions is not None:
            positions, old_bits = merge_old(kept.positions, kept.bits, positions, old_bits)
        batch = changes.cut.batch
        width = batch.dtype.width
        if positions.size * (POSITION_BYTES + width) > batch.elements * width:
            bits = all_bits()
            bits[positions] = old_bits
            self._cuts[number] = _CutBits(None, bits)
        else:
            self._cuts[number] = _CutBits(positions, old_bits)

    def publish(self, r: int, earlier: PublishedBits | None) -> PublishedBits:
        """What is known of a row, together with what was known earlier."""
        old: OldBits | None = self._row(r)
        unknown = bool(self.unknown[r])
        for before in (self._carried.get(r), None if earlier is None else earlier.old):
            if before is not None and old is not None:
                old = before.under(old)
        if earlier is not None:
            unknown |= earlier.unknown
        if old is None:
            return PublishedBits(OldBits(self.plan.rows[r].key[1].numel, ()), True)
        return PublishedBits(old, unknown)

    def take_over(self, r: int, kept: KeptBits, old: int) -> None:
        """Take over what is known of a row from an earlier plan. If it has moved since, its changes are unknown."""
        published = kept.publish(old, None)
        self._carried[r] = published.old
        moved = self.plan.signatures[r] != kept.plan.signatures[old]
        self.unknown[r] = published.unknown or moved

    def _row(self, r: int) -> OldBits:
        """The old bits of a row, as views of what is kept for its cuts."""
        pieces = []
        for piece in self.plan.pieces[r]:
            kept = self._cuts.get(piece.number)
            end = piece.first + piece.numel
            positions: npt.NDArray[np.uint32] | None = np.empty(0, np.uint32)
            bits = np.empty(0, self.plan.cuts[piece.number].batch.dtype.uint)
            if kept is not None and kept.positions is None:
                positions = None
                bits = kept.bits[piece.first : end]
            elif kept is not None and kept.positions is not None:
                some = slice(*np.searchsorted(kept.positions, np.array([piece.first, end], np.uint32)))
                positions = kept.positions[some]
                if piece.first:
                    positions = positions - np.uint32(piece.first)
                bits = kept.bits[some]
            pieces.append(OldPiece(piece.begin, piece.begin + piece.numel, positions, bits))
        return OldBits(self.plan.rows[r].key[1].numel, pieces)
