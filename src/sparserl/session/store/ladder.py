"""Squashed patches on a doubling ladder: over 8 versions, 16, 32 … for subscribers that are far behind.

What the ladder keeps are ways back, the inverse of each of the last patches, on disk. When a rung is complete, they
lead a copy of the newest weights back to where it starts, and what lies between the two is encoded as any patch is.

    publishes          add ──► add ──► add ──► add          in the trainer's thread: old bits are kept, no more
    behind them             take ─► frozen ─► rungs         on a thread of its own: encode, copy, walk back, compare
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from ...errors import ChecksumMismatch, LimitExceeded
from ...patch import Captured, Patch, diff
from ...patch.compose import squash
from ...patch.snapshot import restore
from ...weights.digest import Digest, digest
from ...weights.dtypes import Bits
from ...weights.local import LocalWeights
from ...weights.memory import Weights
from ...weights.shards import Shards
from ..anchors import copy_weights
from ..memory_limit import available_memory

_MOST_WAITING = 8  # versions whose old bits wait in memory to be written to disk


class Ladder:
    """Keeps the ways back from the last versions, and makes a squashed patch for every rung that is complete.

    `add` is called by the trainer's thread, all else by the one thread that looks after the store.

    Args:
        first: How many versions the first rung is over; 0 for no rungs, where ways back serve copies under way alone.
        last: How many the last rung is over at most.
    """

    def __init__(self, first: int = 0, last: int = 0) -> None:
        self.spans = [first] if first else []
        while self.spans and self.spans[-1] * 2 <= last:
            self.spans.append(self.spans[-1] * 2)
        self._waiting: deque[tuple[int, Callable[[], Patch]]] = deque()
        self._back: dict[int, Patch] = {}  # from each version to the one before it
        self.newest = 0  # the last version that rungs were made to

    def add(self, version: int, changes: Captured, threads: int | None = None) -> bool:
        """The changes that lead to a version, before the weights they start from are written to.

        Returns:
            Whether there was room: the ways back of earlier versions are given up where too many wait.
        """
        has_room = len(self._waiting) < _MOST_WAITING
        if not has_room:
            self._waiting.clear()
        self._waiting.append((version, changes.back(threads=threads)))
        return has_room

    def take(self) -> None:
        """Write to disk what waits, and let go of what no rung needs any more."""
        while True:
            try:
                version, make = self._waiting.popleft()
            except IndexError:  # none is left, or all were given up just now
                return
            self._back[version] = make()
            self.forget(0)

    def forget(self, version: int) -> None:
        """Let go of the ways back from versions up to this one, as far as no rung needs them."""
        last = version if not self.spans else max(self._back, default=0) - self.spans[-1]
        for old in [old for old in self._back if old <= last]:
            del self._back[old]

    def due(self, version: int) -> int | None:
        """The newest version, up to this one, that rungs end at and were not made to yet."""
        newest = version - version % self.spans[0] if self.spans else 0
        return newest if newest > self.newest and newest - self.spans[0] + 1 in self._back else None

    def frozen(self, weights: Weights | Shards, version: int, expected: Digest, threads: int | None = None) -> Any:
        """A copy of the weights as they were at a version, though publishes write later versions to them meanwhile.

        An element is copied before such a write or after it. Either way its old bits are in the way back of that
        write, which was added before it began; and they are put in their place here.
        """
        self.forget(version)
        copy = _copy(weights)
        self.take()
        newer = sorted((newer for newer in self._back if newer > version), reverse=True)
        if newer:
            restore(squash([self._back[version].contents for version in newer]), copy, threads)
        found = digest(copy, threads=threads)
        if found != expected:
            raise ChecksumMismatch(f"the bits of version {version} are not at hand any more: they give {found}")
        return copy

    def rungs(
        self, version: int, weights: dict[str, Bits], profile: str = "auto", threads: int | None = None
    ) -> Iterator[tuple[int, Patch]]:
        """Squashed patches to a version, whose weights these are, and where each of them starts; the shortest first."""
        due = [span for span in self.spans if version % span == 0 and version - span + 1 in self._back]
        old = _copy(weights)
        reached = version
        for span in due:
            while reached > version - span:
                back = self._back.get(reached)
                if back is None:
                    self.newest = version
                    return
                back.apply(old, digest=back.base, threads=threads)
                reached -= 1
            start = self._back[reached + 1].result
            yield reached, diff(old, weights, profile=profile, base_digest=start, threads=threads)
        self.newest = version


def _copy(weights: Weights | Shards) -> Any:
    """A copy beside the weights, where they are on GPUs with room for it; or else in host memory."""
    local = LocalWeights.of(weights)
    if local.gpu_streams:
        import torch

        from ...weights.gpu_zeros import copies_like

        devices = [device for device in local.gpu_streams if device.type == "cuda"]
        for device in devices:
            torch.cuda.synchronize(device)  # the last version may still be written, by another stream
        copy = copies_like(weights)
        for device in devices:
            torch.cuda.synchronize(device)
        if copy is not None:
            return copy
    available = available_memory()
    if available is not None and local.nbytes > available:
        raise LimitExceeded(f"a copy of the weights takes {local.nbytes} bytes of memory, and {available} can be had")
    return copy_weights(weights, threads=1)
