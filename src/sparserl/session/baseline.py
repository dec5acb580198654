"""What a publisher keeps of the last committed version, to find the next changes: all its bits, or only its sums.

| baseline | memory | finding changes |
| --- | --- | --- |
| host | all bits at hand | a comparison of all bits; any profile |
| device | all bits at hand, where the weights are | the same, there |
| none | 16 bytes a part | one full digest read; needs marks from the source; profiles `raw` and `gap` |

With a baseline in host memory weights on a device are compared there: pieces are copied to staging buffers that are
used again, on threads, so that some pieces are on their way while others are compared.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from ..errors import SessionError
from ..humanize import short_size
from ..parallel import Progress
from ..patch import Captured, Patch, TrackedChanges, capture, capture_tracked
from ..patch.tracked import part_sums
from ..plan import Link
from ..weights.digest import Digest, digest, table_digest
from ..weights.local import LocalWeights
from ..weights.memory import Memory, Weights
from ..weights.shards import Shards
from .store.transfer import copied


class Found(Protocol):
    """Changes that were captured: the weights they come from are not looked at any more."""

    def encode(self, *, link: Link | str | None = None, to: Any = None, threads: int | None = None) -> Patch:
        """The patch."""
        ...


class Baseline(Protocol):
    """What is known here of the last committed version."""

    @property
    def digest(self) -> Digest:
        """Of the parts at hand; with the terms of the tensor table, if these are all."""
        ...

    @property
    def weights(self) -> Any:
        """The bits, which nobody else may write to; None where they are not kept."""
        ...

    def capture(
        self,
        weights: Weights | Shards,
        *,
        profile: str = "auto",
        threads: int | None = None,
        progress: Progress | None = None,
    ) -> Found:
        """What changed since the last committed version."""
        ...

    def advance(self, patch: Patch, found: Found, threads: int | None = None) -> None:
        """A patch is committed; `found` is what it was made of."""
        ...


class HostBaseline:
    """A copy of all bits in host memory; or, of those on a device, there."""

    def __init__(
        self,
        weights: Weights | Shards,
        known: Digest | None = None,
        *,
        own: bool = False,
        there: bool = False,
        threads: int | None = None,
    ) -> None:
        """A copy of the weights, whose digest may be known; `own` says that they are nobody else's already.

        there: whether the copy of a tensor on a device lies on that device.
        """
        self.weights = weights if own else copied(weights, threads, there=there)
        self._digest, self._threads = known, threads

    @property
    def digest(self) -> Digest:
        if self._digest is None:
            self._digest = digest(self.weights, threads=self._threads)
        return self._digest

    def know(self, digest: Digest) -> None:
        """What the digest is, where somebody had to read all bits anyway."""
        self._digest = digest

    def capture(
        self,
        weights: Weights | Shards,
        *,
        profile: str = "auto",
        threads: int | None = None,
        progress: Progress | None = None,
    ) -> Captured:
        """What changed. All bits are compared: looking at marked elements alone is hardly faster, and trusts marks."""
        if isinstance(weights, Shards):
            weights = weights.map(lambda part: part.data)
        return capture(
            self.weights, weights, profile=profile, base_digest=self.digest, threads=threads, progress=progress
        )

    def advance(self, patch: Patch, found: Found, threads: int | None = None) -> None:  # noqa: ARG002
        """Apply the patch."""
        patch.apply(self.weights, digest=self.digest, threads=threads)
        self.know(patch.result)


class NoBaseline:
    """The sums of every part, and nothing else."""

    weights = None

    def __init__(self, weights: Weights | Shards, threads: int | None = None) -> None:
        held = LocalWeights.of(weights)
        self._table, self.sums = held.table, part_sums(held, threads)
        self.digest = sum(self.sums.values(), table_digest(held.table) if held.complete else Digest())

    def capture(
        self,
        weights: Weights | Shards,
        *,
        profile: str = "auto",
        threads: int | None = None,
        progress: Progress | None = None,
    ) -> TrackedChanges:
        """What changed, by marks; one full digest read."""
        options: Any = {"profile": profile, "threads": threads, "progress": progress}
        return capture_tracked(weights, self.sums, table=self._table, **options)

    def advance(self, patch: Patch, found: Found, threads: int | None = None) -> None:  # noqa: ARG002  # takes no work
        """Take the sums over that were read when the patch was captured."""
        if not isinstance(found, TrackedChanges) or found.result != patch.result:
            raise SessionError("the patch was not made of what was captured")
        self.sums, self.digest = found.sums, found.result


def choose(
    weights: Weights | Shards,
    memory: int | None = None,
    kind: str = "auto",
    *,
    tracked: bool = False,
    threads: int | None = None,
    own: Digest | None = None,
) -> tuple[HostBaseline | NoBaseline, str]:
    """A baseline of the weights, and where it is, in words.

    memory: bytes that the baseline and marks may take; None for as many as it needs.
    kind: `host`; `device`, which is where the weights are; `none`; or `auto`, which is `host`, but takes none where the
        copy does not fit the budget.
    tracked: whether the source marks changes, and is told of every commit.
    own: the digest of weights that are nobody else's already: they need not be copied.
    """
    if kind not in ("auto", "host", "device", "none"):
        raise SessionError(f"there is no baseline {kind!r}; take 'auto', 'host', 'device' or 'none'")
    held = LocalWeights.of(weights)
    dense = sum(_nbytes(m) for _, m in held.parts)
    marks = sum(_numel(m) for _, m in held.parts) // 4 if tracked else 0  # two bits an element
    fits = memory is None or dense + marks <= memory
    aside = f", and up to {short_size(marks)} of marks" if tracked else ""
    if kind != "none" and fits:
        there = kind == "device" and own is None
        kept = HostBaseline(weights, own, own=own is not None, there=there, threads=threads)
        where = "where the weights are" if there and held.gpu_streams else "in host memory"
        return kept, f"baseline: {short_size(dense)} {where}{aside}"
    if kind in ("host", "device"):
        raise SessionError(f"a baseline takes {short_size(dense + marks)}, the budget is {short_size(memory or 0)}")
    why = "" if kind == "none" else f": {short_size(dense)} would not fit {short_size(memory or 0)}"
    if not tracked:
        raise SessionError(f"baseline: none{why}; that takes a source that tracks changes (sparserl.sources.track)")
    return NoBaseline(weights, threads), f"baseline: none{why}; one full digest read per publish{aside}"


def _numel(memory: Memory) -> int:
    return int(np.prod(memory.shape, dtype=np.int64))


def _nbytes(memory: Memory) -> int:
    return _numel(memory) * memory.dtype.width
