"""Squashed patches on a doubling ladder: 8 versions in one, 16, 32 …, each made of two of the size below.

What the ladder holds leads back: the inverse of every patch, which can be squashed without weights. One of each size
waits for its neighbour, as the digits of a binary counter do. When a rung is complete, it leads a copy of the newest
weights back to where the rung starts, and what lies between the two is encoded as any patch is, in the best profile.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from ..bits import Bits
from ..errors import SessionError
from ..patch import Patch, diff, squash


class _Rung(NamedTuple):
    base: int
    version: int
    back: Patch


class Ladder:
    """Takes the way back from every version, and gives a squashed patch whenever a rung is complete."""

    def __init__(self, first: int, last: int) -> None:
        if not 2 <= first <= last:
            raise SessionError(f"a ladder from {first} to {last} versions makes no sense")
        self._first, self._last = first, last
        self._waiting: dict[int, _Rung] = {}  # by the number of versions
        self._complete: list[_Rung] = []

    def add(self, version: int, patch: Patch, base: dict[str, Bits], threads: int | None = None) -> None:
        """The patch that leads to a version, and the weights that it starts from."""
        self._complete = []
        back = patch.invert(base, digest=patch.base, profile="gap", threads=threads)  # bits, which need no base
        rung = _Rung(version - 1, version, back)
        while (span := rung.version - rung.base) < self._last:
            below = self._waiting.pop(span, None)
            if below is None or below.version != rung.base:
                self._waiting[span] = rung
                return
            rung = _Rung(below.base, version, squash(rung.back, below.back, profile="gap", threads=threads))
            if rung.version - rung.base >= self._first:
                self._complete.append(rung)

    def rungs(self, weights: dict[str, Bits], threads: int | None = None) -> Iterator[tuple[int, Patch]]:
        """Squashed patches that end at the version added last, whose weights these are, and where each starts."""
        rungs, self._complete = self._complete, []
        for rung in rungs:
            old = {name: Bits(np.array(bits.array, copy=True), bits.dtype) for name, bits in weights.items()}
            rung.back.apply(old, digest=rung.back.base, threads=threads)
            yield rung.base, diff(old, weights, base_digest=rung.back.result, threads=threads)
