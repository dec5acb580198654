"""Goes through all states that the model of the session protocol can reach, and checks what must hold in each."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from tests.session.model import Machine
from tests.session.model_pins import is_led_to
from tests.session.model_state import Bounds, Entry, Missing, Protocol, State, get, route

EXACT = "a subscriber reports a version and holds other bits"
WHOLE = "the head leads to objects that are not there, or not those"
MEANING = "a version has changed its meaning"
TRUE = "a version is not what the trainer had when it published"
FOLLOWS = "a version does not follow from the committed one"
FENCED = "a publisher that was fenced off has moved the head"
PINNED = "a pinned version is gone"
INDEXED = "a pinned version is not in the index of its run, and nobody will put it there"
AGREE = "the subscriber never comes to agree with the head"


def violation(state: State) -> str | None:
    """What is wrong with a state."""
    return _wrong_log(state.log) or _wrong_head(state) or _wrong_report(state) or _wrong_pin(state)


def _wrong_log(log: tuple[Entry, ...]) -> str | None:
    if not log:
        return None
    *before, last = log
    if last.bits != last.meant:
        return TRUE
    if any((e.run, e.version) == (last.run, last.version) and e.bits != last.bits for e in before):
        return MEANING
    if not before:
        return None
    prior = before[-1]
    if prior.run != last.run:
        return FENCED if any(e.run == last.run for e in before) or last.version else None
    if last.version == prior.version:
        return None  # another index
    return None if (last.version, last.base) == (prior.version + 1, prior.bits) else FOLLOWS


def _wrong_head(state: State) -> str | None:
    head = state.head
    if head is None:
        return None
    try:
        steps = get(state, head.index)
        for step in steps:
            buckets, base, bits = get(state, step.manifest)
            if (base, bits) != (step.base_bits, step.bits):
                return WHOLE
            if any(get(state, bucket) != (base, bits) for bucket in buckets):
                return WHOLE
    except Missing:
        return WHOLE
    way = route(steps, None, head.version)
    return None if way and way[-1].bits == head.bits else FOLLOWS


def _wrong_report(state: State) -> str | None:
    s = state.subscriber
    if s.held is None or s.at == "down" or (s.at.startswith("commit ") and s.at != "commit 0"):
        return None
    if s.at == "written":
        return None  # inside the commit
    meant = [e.bits for e in state.log if (e.run, e.version) == (s.held.run, s.held.version)]
    return None if meant and all(bits == meant[0] for bits in s.bits) else EXACT


def _wrong_pin(state: State) -> str | None:
    """What was pinned can be read, by its pin; and by the head, unless a publisher still has to look at pins."""
    pinner = state.pinner
    if pinner.at != "pinned":
        return None
    try:
        get(state, pinner.index)
        for step in pinner.way:
            buckets, base, bits = get(state, step.manifest)
            if any(get(state, bucket) != (base, bits) for bucket in buckets):
                return PINNED
    except Missing:
        return PINNED
    has_looked = all(p.at == "idle" and not p.pins_due for p in state.publishers)
    if has_looked and state.head is not None and state.head.run == pinner.run and not is_led_to(state):
        return INDEXED
    return None


def agrees(state: State) -> bool:
    s, head = state.subscriber, state.head
    if not s.bits:
        return True
    if s.at != "idle":
        return False
    if head is None:
        return s.held is None
    return s.held == (head.run, head.version, head.bits) and set(s.bits) == {head.bits}


@dataclass(frozen=True)
class Explored:
    """What came of an exploration: how many states there are, and the first that is wrong, with the way to it."""

    states: int
    moves: int
    wrong: str | None
    trace: tuple[str, ...]

    def __str__(self) -> str:
        if self.wrong is None:
            return f"{self.states:,} states, {self.moves:,} moves, nothing wrong"
        steps = "\n".join(f"  {i:2}. {label}" for i, label in enumerate(self.trace, 1))
        return f"{self.wrong}, after {len(self.trace)} steps:\n{steps}"


def explore(protocol: Protocol, bounds: Bounds) -> Explored:
    """Go everywhere; stop at the first state in which something is wrong.

    That subscriber and head come to agree is asked of every state: the steps of the subscriber alone, without crash or
    fault and with everything else at rest, must lead there.
    """
    machine = Machine(protocol, bounds)
    start = machine.start()
    number = {start: 0}
    parents: list[tuple[int, str]] = [(-1, "")]
    back: list[list[int]] = [[]]  # by whose unforced steps of the subscriber a state is reached
    goals, moves = [], 0
    queue = deque([start])
    while queue:
        state = queue.popleft()
        here = number[state]
        if (wrong := violation(state)) is not None:
            return Explored(len(number), moves, wrong, _trace(parents, here))
        if agrees(state):
            goals.append(here)
        for label, after, free in machine.moves(state):
            moves += 1
            there = number.get(after)
            if there is None:
                there = number[after] = len(parents)
                parents.append((here, label))
                back.append([])
                queue.append(after)
            if free:
                back[there].append(here)
    fine = bytearray(len(parents))
    todo = goals
    while todo:
        here = todo.pop()
        if not fine[here]:
            fine[here] = 1
            todo.extend(back[here])
    stuck = fine.find(0)
    if stuck >= 0:
        return Explored(len(number), moves, AGREE, _trace(parents, stuck))
    return Explored(len(number), moves, None, ())


def _trace(parents: list[tuple[int, str]], at: int) -> tuple[str, ...]:
    labels = []
    while parents[at][0] >= 0:
        at, label = parents[at]
        labels.append(label)
    return tuple(reversed(labels))
