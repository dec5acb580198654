"""From any version to any other: the cheapest way through the steps that a store has."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Sequence

from ..digest import Digest
from ..errors import NotRetained
from .records import Step

_NOTHING = -1  # where anchors start from


def route(
    steps: Iterable[Step], have: tuple[int, Digest] | None, want: int, profiles: Collection[str] | None = None
) -> list[Step]:
    """The steps with the fewest bytes that lead to version `want`, in order.

    have: version and digest that are held already; None for neither. An anchor can always be started from.
    profiles: those that the receiver can take; None for all.
    """
    ways: dict[int, list[Step]] = {}
    for step in steps:
        if profiles is not None and not set(step.profiles) <= set(profiles):
            continue
        ways.setdefault(_NOTHING if step.base is None else step.base, []).append(step)
    start = [(0, _NOTHING, None)] if have is None else [(0, have[0], have[1]), (0, _NOTHING, None)]
    queue: list[tuple[int, int, int, Digest | None, tuple[Step, ...]]] = []
    for order, (cost, version, digest) in enumerate(start):
        heapq.heappush(queue, (cost, order, version, digest, ()))
    seen: set[tuple[int, Digest | None]] = set()
    order = len(start)
    while queue:
        cost, _, version, digest, path = heapq.heappop(queue)
        if version == want:
            return list(path)
        if (version, digest) in seen:
            continue
        seen.add((version, digest))
        for step in ways.get(version, ()):
            if step.base_digest == digest:
                order += 1
                heapq.heappush(queue, (cost + step.bytes, order, step.version, step.digest, (*path, step)))
    raise NotRetained(f"version {want} cannot be reached with what the store has")


def versions(steps: Iterable[Step]) -> dict[int, Digest]:
    """The digest of every version that some step leads to."""
    return {step.version: step.digest for step in steps}


def retained(steps: Sequence[Step], anchors: int, needed: Collection[int]) -> tuple[Step, ...]:
    """The steps that are worth keeping: the last anchors, what builds on the oldest of them, and what leases need."""
    kept = sorted(step.version for step in steps if step.base is None)[-anchors:]
    oldest = min([*kept[:1], *needed], default=0)
    return tuple(
        step
        for step in steps
        if (step.version in kept if step.base is None else min(step.base, step.version) >= oldest)
    )
