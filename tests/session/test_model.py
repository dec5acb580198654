"""The protocol, explored completely within bounds; and every known way to get it wrong, found."""

from __future__ import annotations

from dataclasses import fields
from typing import NamedTuple

from tests.effort import each
from tests.session import model_search
from tests.session.model_search import explore
from tests.session.model_state import Bounds, Protocol

STREAM = Bounds(changes=1, streams=True)
EXPLORED = {
    "killed twice": (Bounds(crashes=2), 60_000),
    "two targets": (Bounds(targets=("folder", "module")), 40_000),
    "two publishers, one killed": (Bounds(publishers=2, changes=1, faults=0), 20_000),
    "two publishers, lost and late replies": (Bounds(publishers=2, changes=1, crashes=0), 30_000),
    "anchors, lost and late replies": (Bounds(publishes=3, changes=1, anchors=1, crashes=0), 30_000),
    "outages": (Bounds(publishes=3, changes=1, crashes=0, faults=2), 30_000),
    "garbage, with two publishers": (Bounds(publishers=2, changes=1, crashes=0, faults=0, collects=1), 30_000),
    "garbage, with lost and late replies": (Bounds(changes=1, anchors=1, crashes=0, collects=1), 40_000),
    "garbage, with three versions": (
        Bounds(publishes=3, changes=1, anchors=1, crashes=0, faults=0, collects=1),
        30_000,
    ),
    "pins, with anchors and garbage": (
        Bounds(changes=0, anchors=1, crashes=0, faults=0, collects=1, pins=1, targets=()),
        2_000,
    ),
    "pins, one killed": (Bounds(changes=0, anchors=1, faults=0, collects=1, pins=1, targets=()), 2_000),
    "pins, with lost and late replies": (Bounds(changes=0, anchors=1, crashes=0, pins=1, targets=()), 1_500),
    "streams, with outages": (Bounds(changes=1, crashes=0, faults=2, streams=True), 8_000),
    "streams, one killed": (STREAM, 10_000),
    "streams, with garbage and outages": (
        Bounds(changes=1, anchors=1, crashes=0, collects=1, streams=True),
        50_000,
    ),
}
LONG = (
    "anchors, lost and late replies",
    "two targets",
    "outages",
    "streams, with outages",
    "streams, with garbage and outages",
    "killed twice",
    "garbage, with lost and late replies",
    "garbage, with three versions",
    "garbage, with two publishers",
    "two publishers, lost and late replies",
)


@each("name", EXPLORED, long=LONG)
def test_the_protocol_holds_in_every_state(name):
    bounds, least = EXPLORED[name]
    found = explore(Protocol(), bounds)
    print(f"{name}: {found}")
    assert found.wrong is None, str(found)
    assert found.states > least, "so few states that something cannot happen any more"


class Hole(NamedTuple):
    """A way to be wrong, where it shows, and how."""

    protocol: Protocol
    bounds: Bounds
    wrong: str
    steps: int  # of the shortest way there


ONE = Bounds(crashes=0, faults=0)
FAULT = Bounds(publishes=3, crashes=0)
CRASH = Bounds(faults=0)
TWO = Bounds(publishers=2, publishes=3, changes=1, crashes=0, faults=0)
PINS = Bounds(changes=0, anchors=1, crashes=0, faults=0, collects=1, pins=1, targets=())
HOLES = {
    "garbage that a pin needs": Hole(Protocol(pins_collected_for=False), PINS, model_search.PINNED, 21),
    "pins that retention does not look after": Hole(Protocol(pins_looked_after=False), PINS, model_search.INDEXED, 27),
    "pins of versions that went meanwhile": Hole(Protocol(pin_checked=False), PINS, model_search.INDEXED, 27),
    "baseline advances before the head": Hole(Protocol(baseline_after_head=False), FAULT, model_search.FOLLOWS, 17),
    "head before buckets": Hole(Protocol(head_last=False), ONE, model_search.WHOLE, 5),
    "unconditional put of the head": Hole(Protocol(conditional=False), TWO, model_search.FENCED, 20),
    "lost reply taken for a failure": Hole(Protocol(nonces=False), FAULT, model_search.MEANING, 21),
    "names by version, lost reply taken for a failure": Hole(
        Protocol(nonces=False, content_names=False), FAULT, model_search.WHOLE, 18
    ),
    "names by version": Hole(Protocol(content_names=False), TWO, model_search.WHOLE, 18),
    "restart at version 0 of the same run": Hole(Protocol(new_run=False), CRASH, model_search.MEANING, 14),
    "a new run that is older by the clock": Hole(Protocol(created_rises=False), CRASH, model_search.AGREE, 14),
    "stale baseline after the head moved": Hole(Protocol(baseline_forgotten=False), FAULT, model_search.MEANING, 21),
    "garbage collected by shared names": Hole(
        Protocol(places=False), Bounds(publishes=3, changes=1, crashes=0, collects=1), model_search.WHOLE, 20
    ),
    "garbage collected by a stale head": Hole(
        Protocol(list_then_head=False), Bounds(crashes=0, faults=0, collects=1), model_search.WHOLE, 18
    ),
    "capture after returning to the trainer": Hole(Protocol(capture_first=False), ONE, model_search.TRUE, 8),
    "version numbers compared alone": Hole(Protocol(whole_identity=False), CRASH, model_search.EXACT, 20),
    "patch on a base never seeded": Hole(Protocol(attached=False, verified=False), ONE, model_search.EXACT, 18),
    "patch on a base never seeded, but verified": Hole(Protocol(attached=False), ONE, model_search.AGREE, 14),
    "reported although refused": Hole(Protocol(attached=False, only_if_applied=False), ONE, model_search.EXACT, 17),
    "reported although the commit failed": Hole(Protocol(only_if_applied=False), FAULT, model_search.EXACT, 10),
    "reported apart from the bits": Hole(Protocol(held_with_bits=False), FAULT, model_search.EXACT, 25),
    "buckets of another patch go on after an outage": Hole(
        Protocol(same_buckets=False, verified=False), STREAM, model_search.EXACT, 25
    ),
    "buckets of another patch go on after an outage, but verified": Hole(
        Protocol(same_buckets=False), STREAM, model_search.AGREE, 20
    ),
    "no undo for two targets": Hole(
        Protocol(undo=False), Bounds(crashes=0, targets=("folder", "module")), model_search.EXACT, 25
    ),
}


LONG_HOLES = (
    "buckets of another patch go on after an outage",
    "buckets of another patch go on after an outage, but verified",
    "garbage collected by shared names",
    "lost reply taken for a failure",
    "names by version",
    "reported apart from the bits",
    "stale baseline after the head moved",
    "unconditional put of the head",
)


@each("name", HOLES, long=LONG_HOLES)
def test_a_hole_is_found(name):
    hole = HOLES[name]
    found = explore(hole.protocol, hole.bounds)
    print(f"{name}: {found}")
    assert found.wrong == hole.wrong, str(found)
    assert len(found.trace) == hole.steps, str(found)


def test_every_decision_matters():
    """Each switch of the protocol is turned by some hole."""
    right = Protocol()
    for switch in (field.name for field in fields(Protocol)):
        assert any(getattr(hole.protocol, switch) != getattr(right, switch) for hole in HOLES.values()), switch
