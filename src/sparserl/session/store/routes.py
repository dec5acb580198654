"""From any version to any other: the cheapest way through the steps that a store has."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Sequence

from ...errors import NotRetained
from ...weights.digest import Digest
from .records import RouteStep

_NOTHING = -1  # where anchors start from
_Node = tuple[int, Digest | None]


def route(
    steps: Iterable[RouteStep],
    have: tuple[int, Digest] | None,
    want: int,
    profiles: Collection[str] | None = None,
    holding: str | None = None,
) -> list[RouteStep]:
    """The steps with the fewest bytes that lead to version `want`, in order.

    have: version and digest that are held already; None for neither. An anchor can always be started from.
    profiles: those that the receiver can take; None for all.
    holding: the name of the parts that it has, for which others may be made; None for all.
    """
    steps = tuple(steps)
    goal: _Node = want, versions(steps).get(want)
    ways: dict[int, list[RouteStep]] = {}
    for step in steps:
        if profiles is not None and not set(step.profiles) <= set(profiles) and holding not in step.holdings:
            continue
        ways.setdefault(_NOTHING if step.base is None else step.base, []).append(step)
    starts: list[_Node] = ([] if have is None else [have]) + [(_NOTHING, None)]
    queue: list[tuple[int, int, _Node, RouteStep | None, _Node]] = [(0, i, n, None, n) for i, n in enumerate(starts)]
    came: dict[_Node, tuple[RouteStep | None, _Node]] = {}
    pushed = len(queue)
    while queue:
        cost, _, node, led, before = heapq.heappop(queue)
        if node in came:
            continue
        came[node] = led, before
        if node == goal:
            return _walked(came, node)
        for way in ways.get(node[0], ()):
            if way.base_digest == node[1]:
                pushed += 1
                heapq.heappush(queue, (cost + way.bytes, pushed, (way.version, way.digest), way, node))
    if profiles is not None:
        refused = sorted({name for step in route(steps, have, want) for name in step.profiles} - set(profiles))
        raise NotRetained(
            f"version {want} is in profile {', '.join(refused)}, and this receiver, which has only parts of the "
            f"weights, takes {', '.join(sorted(profiles))}, or patches that are cut along its parts. The publisher "
            "hears of them by the receiver's lease; publish with profile='ulp' where there are no leases"
        )
    raise NotRetained(f"version {want} cannot be reached with what the store has")


def _walked(came: dict[_Node, tuple[RouteStep | None, _Node]], node: _Node) -> list[RouteStep]:
    """The steps that led to a node, from the first on."""
    out: list[RouteStep] = []
    while (step := came[node][0]) is not None:
        out.append(step)
        node = came[node][1]
    return out[::-1]


def reached(steps: Iterable[RouteStep]) -> set[_Node]:
    """Every version, with its digest, that some way leads to from nothing."""
    ways: dict[_Node, list[_Node]] = {}
    for step in steps:
        start = (_NOTHING, None) if step.base is None else (step.base, step.base_digest)
        ways.setdefault(start, []).append((step.version, step.digest))
    out: set[_Node] = set()
    ahead: list[_Node] = [(_NOTHING, None)]
    while ahead:
        for node in ways.pop(ahead.pop(), ()):
            if node not in out:
                out.add(node)
                ahead.append(node)
    return out


def versions(steps: Iterable[RouteStep]) -> dict[int, Digest]:
    """The digest of every version that some step leads to."""
    return {step.version: step.digest for step in steps}


def span(digests: Collection[int]) -> str:
    """Some versions, in words."""
    return f"versions {min(digests)} to {max(digests)}" if digests else "none"


def retained(steps: Sequence[RouteStep], anchors: int, needed: Collection[int], most: int) -> tuple[RouteStep, ...]:
    """The steps that are worth keeping: the last anchors, what builds on the oldest of them, and what leases need.

    A lease is spared unless more than `most` patches were kept for it: whoever holds it takes an anchor instead.
    """
    last_anchors = sorted(step.version for step in steps if step.base is None)[-anchors:]
    starts = sorted(min(step.base, step.version) for step in steps if step.base is not None)
    too_old = starts[-most - 1] if len(starts) > most else -1
    oldest = min([*last_anchors[:1], *(version for version in needed if version > too_old)], default=0)
    return tuple(
        step
        for step in steps
        if (step.version in last_anchors if step.base is None else min(step.base, step.version) >= oldest)
    )
