"""The state of the model of the session protocol: what is stored, and what each process remembers."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any, NamedTuple

JUNK = -1  # bits that nobody meant
OTHER = 50  # what a subscriber holds that was never seeded
TORN = 100  # bits from here on are halves of two versions


@dataclass(frozen=True)
class Protocol:
    """The decisions. As they stand here they are the right ones."""

    baseline_after_head: bool = True  # the baseline follows the head, not the other way round
    head_last: bool = True  # buckets, manifest and index are there before the head moves
    conditional: bool = True  # the head is swapped under a condition
    nonces: bool = True  # after a lost reply, the nonce in the head tells whose swap worked
    content_names: bool = True  # objects are named by content, not by version
    new_run: bool = True  # a start that knows no baseline begins a run with an id of its own
    created_rises: bool = True  # a new run is newer than the one it takes over from, whatever the clock says
    baseline_forgotten: bool = True  # once the head has moved, a baseline that could not follow is not believed
    places: bool = True  # every patch that is sent has a place of its own
    list_then_head: bool = True  # garbage is listed first; the head that is there then says what stays
    capture_first: bool = True  # publish returns to the trainer when everything is captured
    whole_identity: bool = True  # a version is known by run, number and digest
    verified: bool = True  # the bits that come out are compared with the digest before anything is written
    attached: bool = True  # what targets hold is found out by their bits
    held_with_bits: bool = True  # what is reported changes with the bits
    only_if_applied: bool = True  # a version that could not be applied is not reported
    undo: bool = True  # a target that has committed is taken back when a later one fails
    pins_collected_for: bool = True  # what a pin needs is no garbage
    pins_looked_after: bool = True  # when retention has moved the head, it looks at pins, and puts back what they need
    pin_checked: bool = True  # whoever has written a pin looks whether the version is still there
    same_buckets: bool = True  # what was fetched before an outage is used for the same buckets, and no others


@dataclass(frozen=True)
class Bounds:
    """How far to go: numbers of things that happen at most, and what takes part."""

    publishers: int = 1
    targets: tuple[str, ...] = (
        "module",
    )  # a module forgets its bits with the process, a folder keeps them; () for none
    changes: int = 2
    publishes: int = 2
    anchors: int = 0
    crashes: int = 1
    faults: int = 1
    collects: int = 0
    pins: int = 0  # 1: somebody pins a version
    streams: bool = False  # a patch has two buckets, which are put and fetched one by one; a fetch that failed goes on


class Step(NamedTuple):
    base: int | None
    version: int
    base_bits: int | None
    bits: int
    manifest: tuple


class Head(NamedTuple):
    run: int
    version: int
    bits: int
    index: tuple
    created: int
    nonce: int


class Entry(NamedTuple):
    """A head that was written: what its writer meant by it."""

    run: int
    version: int
    base: int | None
    bits: int
    meant: int


class Now(NamedTuple):
    """What a publisher takes for committed."""

    run: int
    created: int
    version: int
    bits: int
    steps: tuple[Step, ...]


class Work(NamedTuple):
    """A publish in progress; its serial stands for place, nonce and, in the first of a run, the run's id."""

    kind: str
    run: int
    created: int
    version: int
    base: int | None
    bits: int
    meant: int
    serial: int
    known: tuple[Step, ...]
    pinned: tuple[Step, ...] = ()  # that the index must have because of a pin


class Publisher(NamedTuple):
    at: str = "down"
    tag: int | None = None
    now: Now | None = None
    work: Work | None = None
    unsure: Work | None = None  # a publish that was given up while it was open whether the head had moved
    pins_due: str = ""  # why to look at pins: "retention" may have removed what was being pinned; a "start"


class Held(NamedTuple):
    run: int
    version: int
    bits: int


class Subscriber(NamedTuple):
    at: str = "idle"
    bits: tuple[int, ...] = ()
    held: Held | None = None
    newest: tuple[int, int, int] | None = None  # run, version, created
    head: Head | None = None
    route: tuple[Step, ...] = ()
    staged: tuple[Held, tuple[int, ...], tuple[int, ...]] | None = None  # what, new bits, bits before
    fetched: tuple[tuple[tuple, Any], ...] = ()  # names and contents of buckets that have arrived


class Pinner(NamedTuple):
    """Who pins a version, and the pin: it is in the store when `at` is put, pinned or killed."""

    at: str = "idle"
    run: int = 0
    version: int = 0
    bits: int = 0
    index: tuple = ()
    way: tuple[Step, ...] = ()  # from an anchor to the version

    @property
    def is_written(self) -> bool:
        return self.at in ("put", "pinned", "killed")


class Left(NamedTuple):
    changes: int
    publishes: int
    anchors: int
    crashes: int
    faults: int
    collects: int


class State(NamedTuple):
    left: Left
    weights: int
    objects: frozenset  # of (name, content, serial of the publish that wrote it)
    head: Head | None
    late: tuple[int | None, Head, Entry] | None  # a swap that is still on its way
    disk: tuple[int, int, int] | None  # run, version and bits of the anchor that the trainer's machine keeps
    log: tuple[Entry, ...]  # what has become visible, in order
    serial: int
    publishers: tuple[Publisher, ...]
    subscriber: Subscriber
    collector: tuple[str, frozenset] = ("idle", frozenset())  # where it is, and the names it knows so far
    pinner: Pinner = Pinner()


Move = tuple[str, State, bool]  # what happened, what came of it, whether the subscriber did it unforced


class Missing(Exception):
    """An object that is not there."""


def spend(state: State, what: str) -> State:
    return state._replace(left=state.left._replace(**{what: getattr(state.left, what) - 1}))


def get(state: State, name: tuple) -> Any:
    for other, content, _ in state.objects:
        if other == name:
            return content
    raise Missing(name)


def route(steps: tuple[Step, ...], have: tuple[int, int] | None, want: int) -> tuple[Step, ...] | None:
    """The shortest way to a version, from what is held or from an anchor."""
    queue: deque = deque([(have, ())] if have is not None else [])
    queue.append((None, ()))
    seen = set()
    while queue:
        at, path = queue.popleft()
        if at is not None and at[0] == want:
            return path
        if at in seen:
            continue
        seen.add(at)
        for step in steps:
            if (None if step.base is None else (step.base, step.base_bits)) == at:
                queue.append(((step.version, step.bits), (*path, step)))
    return None


def fetch(state: State, step: Step) -> tuple[int | None, int]:
    """The patch of a step: what it starts from and leads to."""
    buckets, _, _ = get(state, step.manifest)
    return get(state, buckets[0])


def needed(state: State, head: Head) -> set[tuple]:
    names = {head.index}
    for step in get(state, head.index):
        names |= {step.manifest, *get(state, step.manifest)[0]}
    return names


def needed_by_pin(state: State) -> set[tuple]:
    """What a pin needs, or one that is being made or put back: the grace is longer than that takes."""
    pinner = state.pinner
    steps = {step for p in state.publishers if p.work is not None for step in p.work.pinned}
    names = set()
    if pinner.is_written or pinner.at == "looked":
        names = {pinner.index}
        steps |= {*pinner.way}
    for step in steps:
        try:
            names |= {step.manifest, *get(state, step.manifest)[0]}
        except Missing:
            continue
    return names


def old_objects(state: State) -> frozenset:
    busy = {p.work.serial for p in state.publishers if p.work is not None}
    return frozenset(name for name, _, serial in state.objects if serial not in busy)
