"""From any version to any other: the cheapest way through the steps that a store has."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Sequence

from ...errors import NotRetained
from ...patch.slicing import PROFILES as SLICEABLE
from ...weights.digest import Digest
from ..profiles import refusal
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
    profiles: those that the receiver can take in a patch; None for all. Anchors are built before it gets them.
    holding: the name of the parts that it has, for which others may be made; None for all.
    """
    steps = tuple(steps)
    goal: _Node = want, versions(steps).get(want)
    ways: dict[int, list[RouteStep]] = {}
    for step in steps:
        if not can_take(step, profiles, holding):
            continue
        ways.setdefault(_NOTHING if step.base is None else step.base, []).append(step)
    starts: list[_Node] = ([] if have is None else [have]) + [(_NOTHING, None)]
    came = _search(ways, starts, goal)
    if goal in came:
        return _walked(came, goal)
    if profiles is not None:
        refused = [step for step in route(steps, have, want) if not can_take(step, profiles, holding)]
        used = {name for step in refused for name in step.profiles} - set(profiles)
        cut = "" if holding is None else " or cuts patches along the parts here"
        heard = f"A publisher that hears of this by a lease keeps to it{cut}, and writes an anchor first"
        error = NotRetained(f"{refusal(f'version {want}', used, profiles)}. {heard}")
        error.is_refused = True
        raise error
    raise NotRetained(f"version {want} cannot be reached with what the store has")


def can_take(step: RouteStep, profiles: Collection[str] | None, holding: str | None) -> bool:
    """Whether a receiver can take a step, which may be in any profile if it is made for the parts that it has."""
    if step.base is None or profiles is None or set(step.profiles) <= set(profiles):
        return True
    return holding in step.holdings and set(profiles) >= SLICEABLE


def _search(
    ways: dict[int, list[RouteStep]], starts: Sequence[_Node], goal: _Node | None = None
) -> dict[_Node, tuple[RouteStep | None, _Node]]:
    """How each version is reached with the fewest bytes: the last step, and where it starts. Ends at the goal."""
    queue: list[tuple[int, int, _Node, RouteStep | None, _Node]] = [(0, i, n, None, n) for i, n in enumerate(starts)]
    came: dict[_Node, tuple[RouteStep | None, _Node]] = {}
    pushed = len(queue)
    while queue:
        cost, _, node, led, before = heapq.heappop(queue)
        if node in came:
            continue
        came[node] = led, before
        if node == goal:
            break
        for way in ways.get(node[0], ()):
            if way.base_digest == node[1]:
                pushed += 1
                heapq.heappush(queue, (cost + way.bytes, pushed, (way.version, way.digest), way, node))
    return came


def from_anchors(steps: Iterable[RouteStep], wanted: Collection[int]) -> tuple[RouteStep, ...]:
    """The steps of the routes that lead to some versions from nothing; versions without such a route are left out."""
    ways: dict[int, list[RouteStep]] = {}
    for step in steps:
        ways.setdefault(_NOTHING if step.base is None else step.base, []).append(step)
    came = _search(ways, [(_NOTHING, None)])
    out: list[RouteStep] = []
    walked: set[_Node] = set()
    for node in [node for node in came if node[0] in wanted]:
        while node not in walked and (step_here := came[node][0]) is not None:
            walked.add(node)
            out.append(step_here)
            node = came[node][1]
    return tuple(sorted(out, key=lambda step: step.version))


def _walked(came: dict[_Node, tuple[RouteStep | None, _Node]], node: _Node) -> list[RouteStep]:
    """The steps that led to a node, from the first on."""
    out: list[RouteStep] = []
    while (step := came[node][0]) is not None:
        out.append(step)
        node = came[node][1]
    return out[::-1]


def next_multiples(steps: Iterable[RouteStep], held: tuple[int, Digest] | None, every: int) -> list[tuple[int, Digest]]:
    """The versions, with their digests, that a number divides and that are next: the first that can be had is taken.

    Who holds a version goes on with those after it, the oldest first. Who holds none begins with the newest.
    """
    multiples = [
        (version, digest)
        for version, digest in sorted(versions(steps).items(), key=lambda node: node[0])
        if version % every == 0
    ]
    return multiples[::-1] if held is None else [node for node in multiples if node[0] > held[0]]


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


def version_of_step(steps: Iterable[RouteStep], training_step: int) -> int | None:
    """The version that was published for a training step; None if it was not published yet.

    A trainer that resumes from an older step publishes that step again: versions before it do not count.
    """
    labels = {step.version: step.step for step in steps if step.step is not None}
    for version in sorted(labels, reverse=True):
        if labels[version] == training_step:
            return version
        if labels[version] < training_step:
            return None
    return None


def span(steps: Iterable[RouteStep]) -> str:
    """The versions that steps lead to, in words."""
    digests = versions(steps)
    return f"versions {min(digests)} to {max(digests)}" if digests else "none"


def retained(
    steps: Sequence[RouteStep],
    anchors: int,
    needed: Collection[int],
    most: int,
    pinned: Sequence[RouteStep] = (),
) -> tuple[RouteStep, ...]:
    """The steps worth keeping: the last anchors, what builds on the oldest of them, what leases and pins need.

    A lease is spared unless more than `most` patches were kept for it: whoever holds it takes an anchor instead.

    pinned: the steps that lead to pinned versions.
    """
    last_anchors = sorted(step.version for step in steps if step.base is None)[-anchors:]
    starts = sorted(min(step.base, step.version) for step in steps if step.base is not None)
    too_old = starts[-most - 1] if len(starts) > most else -1
    oldest = min([*last_anchors[:1], *(version for version in needed if version > too_old)], default=0)
    kept = tuple(
        step
        for step in steps
        if (step.version in last_anchors if step.base is None else min(step.base, step.version) >= oldest)
    )
    first = min((min(step.base, step.version) for step in kept if step.base is not None), default=oldest)
    if pinned and last_anchors and first < last_anchors[0]:  # between pinned anchors, everything can be reached
        pinned = (*pinned, *from_anchors(steps, {first}))
    return with_pinned(kept, pinned)


def with_pinned(steps: Sequence[RouteStep], pinned: Iterable[RouteStep]) -> tuple[RouteStep, ...]:
    """Steps of an index, and before them those that lead to pinned versions and are not among them."""
    known = {(step.base, step.version, step.manifest) for step in steps}
    missing = {(step.base, step.version, step.manifest): step for step in pinned}
    return (*(step for key, step in missing.items() if key not in known), *steps)
