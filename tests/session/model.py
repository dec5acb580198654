"""The protocol of sessions as a machine of states, explored completely: every interleaving, every crash, within bounds.

One store, one or two publishers, one subscriber with one or two targets, a collector of garbage. Bits are numbers, a
patch is a pair of them, and a hash is what it names. What `Protocol` says is what sessions go by; each of its switches,
turned, is a known way to get it wrong. Exploration is breadth-first, so the trace to a violation is a shortest one.

A step is what another process can see happening at once: a put, a get, a swap, the write to one target. Crashes end a
process between any two steps. Faults do not: a reply is lost, a request arrives late, an exception ends a publish.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.session.model_pins import pinner_moves
from tests.session.model_state import (
    JUNK,
    OTHER,
    TORN,
    Bounds,
    Entry,
    Head,
    Held,
    Left,
    Missing,
    Move,
    Now,
    Protocol,
    Publisher,
    State,
    Step,
    Subscriber,
    Work,
    fetch,
    get,
    needed,
    needed_by_pin,
    old_objects,
    route,
    spend,
)


class Machine:
    """All moves of a protocol within bounds."""

    def __init__(self, protocol: Protocol, bounds: Bounds) -> None:
        self.protocol, self.bounds = protocol, bounds

    def start(self) -> State:
        b = self.bounds
        left = Left(b.changes, b.publishes, b.anchors, b.crashes, b.faults, b.collects)
        subscriber = Subscriber(bits=tuple(OTHER for _ in b.targets))
        return State(left, 0, frozenset(), None, None, None, (), 1, (Publisher(),) * b.publishers, subscriber)

    def moves(self, state: State) -> Iterator[Move]:
        yield from self._trainer(state)
        yield from self._late(state)
        yield from self._collector(state)
        if self.bounds.pins:
            yield from pinner_moves(state, self.protocol)
        for index, publisher in enumerate(state.publishers):
            name = "P" if len(state.publishers) == 1 else f"P{index + 1}"
            for label, after in self._publisher(state, publisher, index):
                yield f"{name}: {label}", after, False
        for label, after, free in self._subscriber(state) if self.bounds.targets else ():
            yield f"S: {label}", after, free

    # -- the trainer ---------------------------------------------------------------------------------------------------

    def _trainer(self, state: State) -> Iterator[Move]:
        if state.left.changes:
            for bits in {state.weights + 1, 0} - {state.weights}:
                yield f"trainer: weights become {bits}", spend(state, "changes")._replace(weights=bits), False

    # -- publishers ----------------------------------------------------------------------------------------------------

    def _publisher(self, state: State, p: Publisher, index: int) -> Iterator[tuple[str, State]]:
        def become(after: State, **fields: Any) -> State:
            publishers = list(after.publishers)
            publishers[index] = publishers[index]._replace(**fields)
            return after._replace(publishers=tuple(publishers))

        if p.at == "down":
            yield from self._starts(state, become)
            return
        if state.left.crashes:
            yield "killed", become(spend(state, "crashes"), **Publisher()._asdict())
        if p.work is not None and p.at not in ("saving", "saved") and state.left.faults:
            yield "publish fails", become(spend(state, "faults"), at="idle", work=None, **self._after_failure(p))
        if p.at == "idle":
            yield from self._begin(state, p, become)
        elif p.at in ("saving", "saved"):
            yield from self._save(state, p, become)
        elif p.at == "looking":
            yield from self._look(state, p, become)
        elif p.at != "fenced":
            yield from self._publish(state, p, become)

    def _after_failure(self, p: Publisher) -> dict[str, Any]:
        """What a publish that failed has changed: nothing, unless the head has moved. Then a new run is next."""
        assert p.work is not None
        if p.at == "unsure" and p.work.kind == "patch":
            return {"unsure": p.work}
        if p.at != "moved" or p.work.kind in ("anchor", "pins"):
            return {}
        known = {"now": None} if self.protocol.baseline_forgotten else {}
        return {"tag": p.work.serial, **known}

    def _starts(self, state: State, become: Any) -> Iterator[tuple[str, State]]:
        tag = None if state.head is None else state.head.nonce
        due = "start" if self.bounds.pins else ""
        yield "starts without state", become(state, at="idle", tag=tag, pins_due=due)
        if state.disk is not None and state.head is not None:
            now = None
            run, version, bits = state.disk
            if run == state.head.run:
                try:
                    steps = get(state, state.head.index)
                    way = route(steps, (version, bits), state.head.version)
                    at = bits
                    for step in way or ():
                        base, result = fetch(state, step)
                        at = result if base in (None, at) else JUNK
                except Missing:
                    return  # the start fails
                if way is not None and at == state.head.bits:
                    now = Now(run, state.head.created, state.head.version, at, steps)
            yield "starts with state", become(state, at="idle", tag=tag, now=now, pins_due=due)

    def _begin(self, state: State, p: Publisher, become: Any) -> Iterator[tuple[str, State]]:
        if p.unsure is not None and state.head is not None and state.head.nonce == p.unsure.serial:
            earlier = p.unsure
            now = Now(earlier.run, earlier.created, earlier.version, earlier.bits, self._steps(earlier))
            fields = {"now": now, "tag": earlier.serial, "unsure": None}
            yield "reads head: what it gave up had worked; baseline follows", become(state, **fields)
        elif state.left.publishes:
            after = spend(state, "publishes")
            after = after._replace(serial=state.serial + 1)
            work = self._work(state, p)
            fields: dict[str, Any] = {"work": work, "at": "captured" if self.protocol.capture_first else "half"}
            if not self.protocol.baseline_after_head and p.now is not None:
                fields["now"] = p.now._replace(bits=work.bits)
            yield f"publish: captures {work.bits} as run {work.run} version {work.version}", become(after, **fields)

    def _work(self, state: State, p: Publisher) -> Work:
        bits, serial = state.weights, state.serial
        if p.now is not None:
            now = p.now
            return Work("patch", now.run, now.created, now.version + 1, now.bits, bits, bits, serial, now.steps)
        known = 0
        if state.head is not None and state.head.nonce == p.tag:
            known = state.head.created
        created = known + 1 if self.protocol.created_rises else -serial
        run = serial if self.protocol.new_run else 1
        return Work("first", run, created, 0, None, bits, bits, serial, ())

    def _names(self, work: Work) -> tuple[tuple, tuple]:
        if not self.protocol.content_names:
            ends = work.run, "anchor" if work.base is None else "patch", work.version
            return ("bucket", *ends), ("manifest", *ends)
        if not self.protocol.places:
            ends = work.run, work.base, work.bits
            return ("bucket", *ends), ("manifest", *ends)
        return ("bucket", work.serial), ("manifest", work.serial)

    def _buckets(self, bucket: tuple) -> tuple[tuple, ...]:
        """The names of a patch's buckets, by that of the first."""
        return (bucket, (*bucket, "second")) if self.bounds.streams else (bucket,)

    def _index(self, work: Work) -> tuple:
        if not self.protocol.content_names:
            return "index", work.run, work.version
        return "index", self._steps(work)

    def _put(self, state: State, name: tuple, content: Any, serial: int) -> State:
        there = {o for o in state.objects if o[0] == name}
        if there and not self.protocol.places:
            return state  # it has been sent before
        return state._replace(objects=state.objects - there | {(name, content, serial)})

    def _publish(self, state: State, p: Publisher, become: Any) -> Iterator[tuple[str, State]]:
        work = p.work
        assert work is not None
        bucket, manifest = self._names(work)
        if p.at == "half":
            torn = work.bits if state.weights == work.bits else TORN + 10 * work.bits + state.weights
            yield "captures the other half", become(state, at="captured", work=work._replace(bits=torn))
            return
        order = ["captured", "bucket", "manifest", "index"]
        if self.bounds.streams:
            order.insert(2, "second bucket")
        if not self.protocol.head_last:
            order = ["captured", "manifest", "index"]
        if p.at == "unsure":
            yield from self._reread(state, p, become)
        elif p.at == "moved":
            yield from self._advance(state, p, become)
        elif p.at == order[-1]:
            yield from self._swap(state, p, become)
        else:
            what = order[order.index(p.at) + 1]
            if what == "index" and self.bounds.pins:
                pinned = self._pinned(state, work.run) if work.kind in ("anchor", "pins") else ()
                is_late = p.pins_due == "start" and not {*pinned} <= {*work.known}
                work = work._replace(pinned=() if is_late else pinned)
            puts = {
                "bucket": (bucket, (work.base, work.bits)),
                "second bucket": ((*bucket, "second"), (work.base, work.bits)),
                "manifest": (manifest, (self._buckets(bucket), work.base, work.bits)),
                "index": (self._index(work), self._steps(work)),
            }
            yield f"puts {what}", become(self._put(state, *puts[what], work.serial), at=what, work=work)

    def _pinned(self, state: State, run: int) -> tuple[Step, ...]:
        """The steps that a pin of a run needs, if what leads to them is there."""
        pinner = state.pinner
        try:
            return pinner.way if pinner.is_written and pinner.run == run and get(state, pinner.index) else ()
        except Missing:
            return ()

    def _steps(self, work: Work) -> tuple[Step, ...]:
        if work.kind == "pins":
            return (*(step for step in work.pinned if step not in work.known), *work.known)
        manifest = self._names(work)[1]
        base = None if work.base is None else work.version - 1
        step = Step(base, work.version, work.base, work.bits, manifest)
        return (*work.known, step) if work.kind == "patch" else (*work.pinned, step)

    def _swap(self, state: State, p: Publisher, become: Any) -> Iterator[tuple[str, State]]:
        work = p.work
        assert work is not None
        head = Head(work.run, work.version, work.bits, self._index(work), work.created, work.serial)
        entry = Entry(work.run, work.version, work.base, work.bits, work.meant)
        tag = p.tag if self.protocol.conditional else None if state.head is None else state.head.nonce
        done = _written(state, tag, head, entry)
        if done is None:
            yield "swap is refused", become(state, at="unsure")
        else:
            yield f"head moves to run {work.run} version {work.version}", become(done, at="moved")
        if not state.left.faults:
            return
        spent = spend(state, "faults")
        yield "swap is lost", become(spent, at="unsure")
        if done is not None:
            yield "head moves, the reply is lost", become(spend(done, "faults"), at="unsure")
        if state.late is None:
            yield "swap is delayed", become(spent._replace(late=(tag, head, entry)), at="unsure")

    def _late(self, state: State) -> Iterator[Move]:
        if state.late is not None:
            after = _written(state, *state.late)
            if after is not None:
                yield "store: a delayed swap arrives", after._replace(late=None), False
            else:
                yield "store: a delayed swap is refused", state._replace(late=None), False

    def _reread(self, state: State, p: Publisher, become: Any) -> Iterator[tuple[str, State]]:
        work = p.work
        assert work is not None
        there = None if state.head is None else state.head.nonce
        if there == p.tag:
            yield "reads head: the swap did not get through", become(state, at="index")
        elif not self.protocol.nonces:
            yield "takes the publish for failed", become(state, at="idle", work=None, tag=there)
        elif there == work.serial:
            yield "reads head: its own nonce", become(state, at="moved", unsure=None)
        elif p.unsure is not None and there == p.unsure.serial:
            yield "reads head: what it gave up earlier has worked, gives this up", become(state, at="idle", work=None)
        elif p.now is not None and state.head is not None and state.head[:3] == (p.now.run, p.now.version, p.now.bits):
            try:
                steps = get(state, state.head.index)
            except Missing:
                return
            fields = {"at": "manifest", "tag": there, "now": p.now._replace(steps=steps)}
            yield (
                "reads head: the same version, another index",
                become(state, work=work._replace(known=steps), **fields),
            )
        else:
            yield "reads head: another's nonce, fenced", become(state, at="fenced", work=None)

    def _advance(self, state: State, p: Publisher, become: Any) -> Iterator[tuple[str, State]]:
        work = p.work
        assert work is not None
        if not self.protocol.head_last:
            bucket = self._names(work)[0]
            if not any(o[0] == bucket for o in state.objects):
                yield "puts bucket", become(self._put(state, bucket, (work.base, work.bits), work.serial))
                return
        now = Now(work.run, work.created, work.version, work.bits, self._steps(work))
        fields: dict[str, Any] = {"now": now, "tag": work.serial, "unsure": None}
        if work.kind == "pins":
            yield "baseline follows", become(state, at="idle", work=None, **fields, pins_due="")
            return
        if work.kind != "patch":
            yield "baseline follows", become(state, at="saving", **fields)
            return
        yield "baseline follows", become(state, at="looking" if p.pins_due else "idle", work=None, **fields)
        if state.left.anchors:
            anchor = Work(
                "anchor", work.run, work.created, work.version, None, work.bits, work.bits, state.serial, now.steps
            )
            after = spend(state, "anchors")._replace(serial=state.serial + 1)
            fields["pins_due"] = "retention" if self.bounds.pins else ""
            yield "baseline follows; an anchor is due", become(after, at="captured", work=anchor, **fields)

    def _save(self, state: State, p: Publisher, become: Any) -> Iterator[tuple[str, State]]:
        work = p.work
        assert work is not None
        if p.at == "saving":
            yield "saves the anchor", become(state._replace(disk=None), at="saved")
        else:
            disk = (work.run, work.version, work.bits)
            at = "looking" if p.pins_due else "idle"
            yield "saves what it is the anchor of", become(state._replace(disk=disk), at=at, work=None)

    def _look(self, state: State, p: Publisher, become: Any) -> Iterator[tuple[str, State]]:
        """Look whether the index lacks what a pin needs."""
        now = p.now
        assert now is not None
        if state.left.faults:
            yield "cannot look at pins", become(spend(state, "faults"), at="idle")
        if set(self._pinned(state, now.run)) <= set(now.steps) or not self.protocol.pins_looked_after:
            yield "looks at pins: all is there", become(state, at="idle", pins_due="")
        elif p.pins_due == "start":
            yield "looks at pins: too late for one of them", become(state, at="idle")
        else:
            ends = now.version, None, now.bits, now.bits
            pinned = self._pinned(state, now.run)
            work = Work("pins", now.run, now.created, *ends, state.serial, now.steps, pinned)
            after = state._replace(serial=state.serial + 1)
            yield "looks at pins: one needs more", become(after, at="manifest", work=work)

    # -- the garbage collector -----------------------------------------------------------------------------------------

    def _collector(self, state: State) -> Iterator[Move]:
        """Three steps, between which anything may happen. Old is what no publish in progress has written."""
        at, names = state.collector
        if at == "idle":
            if state.left.collects and state.head is not None:
                state = spend(state, "collects")
                if self.protocol.list_then_head:
                    yield "collector: lists what is old", state._replace(collector=("begun", old_objects(state))), False
                else:
                    keep = frozenset(needed(state, state.head))
                    yield "collector: reads head and what it needs", state._replace(collector=("begun", keep)), False
        elif at == "deleting":
            objects = frozenset(o for o in state.objects if o[0] not in names)
            yield "collector: deletes", state._replace(objects=objects, collector=("idle", frozenset())), False
        elif self.protocol.list_then_head:
            assert state.head is not None
            gone = names - needed(state, state.head)
            if self.protocol.pins_collected_for:
                gone -= needed_by_pin(state)
            yield "collector: reads head and what it needs", state._replace(collector=("deleting", gone)), False
        else:
            gone = old_objects(state) - names
            yield "collector: lists what is old", state._replace(collector=("deleting", gone)), False

    # -- the subscriber ------------------------------------------------------------------------------------------------

    def _subscriber(self, state: State) -> Iterator[Move]:
        s = state.subscriber

        def become(after: State, **fields: Any) -> State:
            return after._replace(subscriber=after.subscriber._replace(**fields))

        if s.at == "down":
            yield "starts", become(state, at="idle"), True
            return
        if state.left.crashes:
            kept = tuple(b if t == "folder" else OTHER for b, t in zip(s.bits, self.bounds.targets, strict=True))
            dead = Subscriber(at="down", bits=kept)
            yield "killed", spend(state, "crashes")._replace(subscriber=dead), False
        if s.at == "idle":
            if state.head is not None and s.head != state.head:
                yield "reads head", become(state, at="looked", head=state.head), True
        elif s.at == "looked":
            label, fields = self._plan(state, s)
            yield label, become(state, **fields), True
        elif s.at == "planned":
            label, fields = self._stage(state, s)
            yield label, become(state, **fields), True
            if self.bounds.streams and state.left.faults:
                outage = {"at": "idle", "head": None, "route": (), "staged": None}
                yield "fetch fails", become(spend(state, "faults"), **outage), False
        else:
            for label, fields, fault in self._commit(s):
                if not fault:
                    yield label, become(state, **fields), True
                elif state.left.faults:
                    yield label, become(spend(state, "faults"), **fields), False

    def _plan(self, state: State, s: Subscriber) -> tuple[str, dict[str, Any]]:
        head = s.head
        assert head is not None
        again = {"at": "idle", "head": None, "route": (), "staged": None}
        if s.newest is not None:
            run, version, created = s.newest
            if head.version < version if head.run == run else head.created <= created:
                return "refuses a head that is older than one it has seen", {**again, "head": head}
        try:
            steps = get(state, head.index)
        except Missing:
            return "finds no index", again
        held = s.held
        if s.newest is None or s.newest[0] != head.run:
            held = self._attach(s, head, steps)
        newest = (head.run, head.version, head.created)
        wanted = Held(head.run, head.version, head.bits)
        if not self.protocol.whole_identity and s.held is not None and s.held.version == head.version:
            held = wanted
        known = {"held": held, "newest": newest}
        if held == wanted:
            return "holds that already", {**again, **known, "head": head}
        have = None if held is None or held.run != head.run else (held.version, held.bits)
        if not self.protocol.attached and have is None and steps[-1].base is not None:
            have = (steps[-1].base, steps[-1].base_bits)
        way = route(steps, have, head.version)
        if not way:
            return "finds no way", {**again, **known, "head": head}
        return "plans", {**known, "at": "planned", "route": way}

    def _attach(self, s: Subscriber, head: Head, steps: tuple[Step, ...]) -> Held | None:
        found = set(s.bits)
        at = [step.version for step in steps if {step.bits} == found]
        return Held(head.run, max(at), s.bits[0]) if at else None

    def _stage(self, state: State, s: Subscriber) -> tuple[str, dict[str, Any]]:
        head = s.head
        assert head is not None
        again = {"at": "idle", "head": None, "route": (), "staged": None}
        try:
            if self.bounds.streams:
                fetched = self._fetched(state, s)
                if fetched is not None:
                    return "fetches a bucket", {"fetched": fetched}
                patches = [content for _, content in s.fetched[::2]]
            else:
                patches = [fetch(state, step) for step in s.route]
        except Missing:
            return "finds objects gone, plans anew", again
        again["fetched"] = ()
        new = []
        for bits in s.bits:
            for base, result in patches:
                bits = result if base is None or base == bits else JUNK
            new.append(bits)
        wanted = Held(head.run, head.version, head.bits)
        if self.protocol.verified and any(bits != head.bits for bits in new):
            held = s.held if self.protocol.only_if_applied else wanted
            return "refuses bits that are not the promised ones", {**again, "head": head, "held": held}
        return "stages", {"at": "commit 0", "staged": (wanted, tuple(new), s.bits), "fetched": ()}

    def _fetched(self, state: State, s: Subscriber) -> tuple[tuple[tuple, Any], ...] | None:
        """What has arrived when one more bucket has; None if all have."""
        names = [bucket for step in s.route for bucket in get(state, step.manifest)[0]]
        kept = 0
        while kept < min(len(names), len(s.fetched)):
            if self.protocol.same_buckets and s.fetched[kept][0] != names[kept]:
                break
            kept += 1
        if kept == len(names) == len(s.fetched):
            return None
        if kept == len(names):
            return s.fetched[:kept]
        return (*s.fetched[:kept], (names[kept], get(state, names[kept])))

    def _commit(self, s: Subscriber) -> Iterator[tuple[str, dict[str, Any], bool]]:
        assert s.staged is not None
        wanted, new, before = s.staged
        done = {"at": "idle", "route": (), "staged": None}
        if s.at == "written":
            yield "reports the version", {**done, "held": wanted}, False
            yield "commit ends with an error", {**done, "head": None}, True
            return
        target = int(s.at.split()[1])
        bits = (*s.bits[:target], new[target], *s.bits[target + 1 :])
        if target + 1 < len(new):
            yield f"writes target {target + 1}", {"at": f"commit {target + 1}", "bits": bits}, False
        elif self.protocol.held_with_bits:
            yield f"writes target {target + 1}, and holds it", {**done, "bits": bits, "held": wanted}, False
        else:
            yield f"writes target {target + 1}", {"at": "written", "bits": bits}, False
        bits = before if self.protocol.undo else s.bits
        held = s.held if self.protocol.only_if_applied else wanted
        head = None if self.protocol.only_if_applied else s.head
        yield f"target {target + 1} fails", {**done, "head": head, "bits": bits, "held": held}, True


def _written(state: State, tag: int | None, head: Head, entry: Entry) -> State | None:
    """The store with a new head, or None if the condition does not hold."""
    if tag != (None if state.head is None else state.head.nonce):
        return None
    return state._replace(head=head, log=(*state.log, entry))
