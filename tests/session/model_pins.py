"""Whoever pins a version, in the model of the protocol: reads the head, writes the pin, and reads the head again."""

from __future__ import annotations

from collections.abc import Iterator

from tests.session.model_state import Missing, Move, Pinner, Protocol, State, get, route, spend


def pinner_moves(state: State, protocol: Protocol) -> Iterator[Move]:
    """What can happen to a pin next."""
    pinner = state.pinner
    if pinner.at == "idle" and state.head is not None:
        try:
            steps = get(state, state.head.index)
        except Missing:
            return
        for version, bits in sorted({(step.version, step.bits) for step in steps}):
            if (way := route(steps, None, version)) is not None:
                looked = Pinner("looked", state.head.run, version, bits, state.head.index, way)
                yield f"pinner: reads head, chooses version {version}", state._replace(pinner=looked), False
    elif pinner.at == "looked":
        yield "pinner: writes the pin", state._replace(pinner=pinner._replace(at="put")), False
    elif pinner.at == "put":
        if state.left.crashes:
            yield "pinner: killed", spend(state, "crashes")._replace(pinner=pinner._replace(at="killed")), False
        if not protocol.pin_checked or is_led_to(state):
            yield "pinner: done", state._replace(pinner=pinner._replace(at="pinned")), False
        else:
            yield "pinner: finds the version gone, takes the pin back", state._replace(pinner=Pinner("refused")), False


def is_led_to(state: State) -> bool:
    """Whether the head leads to the version that is being pinned."""
    pinner, head = state.pinner, state.head
    if head is None or head.run != pinner.run:
        return False
    try:
        return route(get(state, head.index), None, pinner.version) is not None
    except Missing:
        return False
