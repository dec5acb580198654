"""Squashed patches on a doubling ladder: over 8 versions, 16, 32 … for subscribers that are far behind.

What the ladder keeps are ways back, the inverse of each of the last patches, on disk. When a rung is complete, they
lead a copy of the newest weights back to where it starts, and what lies between the two is encoded as any patch is.
"""

from __future__ import annotations

from collections.abc import Iterator

from ...patch import Captured, Patch, diff
from ...weights.dtypes import Bits
from ..anchors import copy_weights


class Ladder:
    """Keeps the ways back from the last versions, and makes a squashed patch for every rung that is complete."""

    def __init__(self, first: int, last: int) -> None:
        self._spans = [first]
        while self._spans[-1] * 2 <= last:
            self._spans.append(self._spans[-1] * 2)
        self._back: dict[int, Patch] = {}  # from each version to the one before it

    def clear(self) -> None:
        """Forget the versions of another run."""
        self._back.clear()

    def add(self, version: int, changes: Captured, threads: int | None = None) -> None:
        """The changes that lead to a version, before the weights they start from are written to."""
        self._back[version] = changes.back(threads=threads)
        self._back.pop(version - self._spans[-1], None)

    def rungs(
        self, version: int, weights: dict[str, Bits], profile: str = "auto", threads: int | None = None
    ) -> Iterator[tuple[int, Patch]]:
        """Squashed patches to a version, whose weights these are, and where each of them starts; the shortest first."""
        due = [span for span in self._spans if version % span == 0 and version - span + 1 in self._back]
        if not due:
            return
        old = copy_weights(weights)
        reached = version
        for span in due:
            while reached > version - span:
                back = self._back.get(reached)
                if back is None:
                    return
                back.apply(old, digest=back.base, threads=threads)
                reached -= 1
            start = self._back[reached + 1].result
            yield reached, diff(old, weights, profile=profile, base_digest=start, threads=threads)
