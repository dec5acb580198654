"""What a publisher hears of its receivers: which profiles they take, and which parts of the weights they have."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ... import plan
from ...codec import PROFILES
from ...errors import SparserlError, StoreError, TensorMismatch
from ...patch.slicing import PROFILES as SLICEABLE
from ...plan import Link
from ...weights.holdings import MOST_HOLDINGS, MOST_PLACES, SHARED_DIGITS, Holdings
from ...weights.shards import Place
from ...weights.table import TensorTable
from ..logs import log
from ..options import EncodingOptions
from ..profiles import PARTS, Takers, choose_profiles, in_words
from .holding_records import holding_name, read_holding
from .leases import Lease
from .records import RunRecord
from .routes import can_take
from .run_writer import RunWriter

_EVERY = 10.0  # seconds between looks at leases
_MOST_LEASES = 64  # the newest, that are looked at
_MOST_LISTED = 2 * MOST_HOLDINGS  # holdings that are looked at
_END_SECONDS = 1.0  # that the end of a publisher waits for a look
_FIRST_LOOKS = 3  # publishes that look at leases before they encode, as long as there are none
_LOOKS_TO_FORGET = 10  # that miss a holding: after a break of more than a day, no receiver is heard at first
_MOST_REMEMBERED = 1024  # leases, the newest
_REMEMBERED = 86_400.0  # seconds that a receiver counts which is silent: an engine may be busy until its next commit


class _Heard(NamedTuple):
    """What leases and holdings of a run say of its receivers."""

    anchor: tuple[str, int] | None = None  # the run and version from which on one can take patches
    holdings: Sequence[str] = ()  # hashes of the parts that they have
    takers: Sequence[Takers] = ()  # those that do not take all profiles

    @classmethod
    def of_row(cls, row: Sequence[Any]) -> _Heard:
        """What another rank has heard, as it was sent."""
        anchor, holdings, takers = row
        return cls(anchor and tuple(anchor), holdings, [Takers(tuple(profiles), *rest) for profiles, *rest in takers])


class Receivers:
    """The receivers of a run, as far as their leases and holdings tell.

    Args:
        writer: Reads these.
        encoding: How patches are encoded.
        lease_seconds: After which a lease is too old to be heard.

    Attributes:
        profile: What patches are in; `auto` for the best of `profiles`.
        profiles: Those that all receivers can take; None for all.
        squashed_profile: What squashed patches are in, which are not cut along the parts of ranks.
    """

    def __init__(self, writer: RunWriter, encoding: EncodingOptions, lease_seconds: float) -> None:
        self.profile = encoding.profile
        self.profiles: frozenset[str] | None = None
        self.squashed_profile = "auto"
        self._anchors: list[tuple[str, int]] = []  # that some of them need
        self._asked = encoding.profile
        self._holdings: Holdings | None = None  # that all ranks have read
        self._read: dict[tuple[str, TensorTable], Sequence[Place] | SparserlError | None] = {}  # what records say
        self._cut: tuple[object, Holdings] | None = None  # the last, and what was read for it
        self._trouble = ""  # the last that was logged
        self._told: set[object] = set()  # the receivers whose profiles were logged last
        self._heard = _Heard()  # by this rank; what counts is what all ranks have heard
        self._lock = threading.Lock()  # two looks may be under way
        self._run: str | None = None  # that leases and holdings are of
        self._leases: dict[str, Lease] = {}  # by name, of receivers that do not take all profiles
        self._hashes: dict[str, int] = {}  # of holdings, each with the looks since it was last fresh
        self._writer = writer
        self._lease_seconds = lease_seconds
        self._remembered = max(lease_seconds, _REMEMBERED)
        self._thread: threading.Thread | None = None
        self._heard_at = -_EVERY
        self._first_looks = 0

    def agree(self, ranks: Iterable[Sequence[Any]]) -> None:
        """On all ranks of a publish: go by what any of them has heard."""
        heard = [_Heard.of_row(row) for row in ranks]
        self._anchors = [row.anchor for row in heard if row.anchor is not None]
        hashes = sorted({hash for row in heard for hash in row.holdings})
        holdings = self._read_holdings(hashes) if hashes else None
        if hashes:
            own = b"" if holdings is None else repr((holdings.names, holdings.are_cut)).encode()
            if any(other != own for other in self._writer.writers.together("read holdings", lambda: own)):
                holdings = None
        self._holdings = holdings
        self._writer.holdings = holdings if holdings is not None and holdings.names else None
        can_cut = not hashes or (holdings is not None and holdings.are_cut)
        self._choose([taker for row in heard for taker in row.takers], can_cut=can_cut)

    def need_anchor(self, run: str, newest: int) -> bool:
        """Whether patches were written since the newest anchor of the run that one of them cannot take."""
        return any(of_run == run and newest < version for of_run, version in self._anchors)

    def heard(self) -> _Heard:
        """What this rank has heard; the first patches wait for a look at leases, so that they can be taken.

        Whether what is new of receivers needs an anchor is found out here, when all patches before are committed.
        """
        if self._first_looks < _FIRST_LOOKS and self._writer.committed is not None:
            self._first_looks += 1
            self.look()
        before = self._heard
        with self._lock:
            holdings = sorted(self._hashes)
            takers = self._takers()
        anchor = before.anchor
        for hash in holdings:
            if hash not in before.holdings:
                how = "has parts of the weights: patches are cut along them"
                anchor = self._begin(SLICEABLE, holding_name(hash), how) or anchor
        known = {taker[:2] for taker in before.takers}
        for taker in takers:
            if taker[:2] not in known and not taker.taken(can_cut=True).issuperset(PROFILES):
                only = f"takes only {in_words(taker.profiles)}: patches keep to that"
                anchor = self._begin(taker.profiles, None, only) or anchor
        self._heard = _Heard(anchor, holdings, takers)
        return self._heard

    def _begin(self, profiles: Collection[str], holding: str | None, how: str) -> tuple[str, int] | None:
        """Log that patches are for a receiver, too, from now on; the anchor it needs if it cannot take all."""
        committed = self._writer.committed
        steps = () if committed is None else committed.index.steps
        newest_anchor = max((step.version for step in steps if step.base is None), default=0)
        can_go_on = all(can_take(step, profiles, holding) for step in steps if step.version > newest_anchor)
        after = "" if can_go_on else ", after an anchor"
        log.info("%s: a receiver %s from now on%s", self._writer.store.url, how, after)
        return None if committed is None or can_go_on else (committed.run.run, committed.head.version)

    def hear(self) -> None:
        """After a publish: look at leases now and then, on a thread; the next publish goes by them."""
        is_looking = self._thread is not None and self._thread.is_alive()
        if is_looking or time.monotonic() - self._heard_at < _EVERY:
            return
        self._heard_at = time.monotonic()
        self._thread = threading.Thread(target=self.look, name="sparserl-receivers", daemon=True)
        self._thread.start()

    def look(self) -> None:
        """Read the leases, and which holdings there are."""
        now = self._writer.clock()
        committed = self._writer.committed
        if committed is None:
            return
        run = committed.run.run
        try:
            leases = self._writer.leases(_MOST_LEASES)
            hashes = self._writer.holding_hashes(run, _MOST_LISTED, now - self._remembered)
        except SparserlError:
            return  # a later publish looks again
        current = [lease for lease in leases if now - lease.time < self._lease_seconds]
        if current or hashes:
            self._first_looks = _FIRST_LOOKS
        remembered = [lease for lease in leases if now - lease.time < self._remembered]
        self._hear_takers(run, remembered, hashes)

    def close(self) -> None:
        """Wait a moment for a look that is under way."""
        if self._thread is not None:
            self._thread.join(_END_SECONDS)

    def _hear_takers(self, run: str, leases: Sequence[Lease], hashes: Iterable[str]) -> None:
        """Hear of receivers of a run that do not take everything, or have parts of the weights.

        A lease is no younger than its hearing, whatever it says.
        """
        now = self._writer.clock()
        fresh = {*hashes, *(lease.holding for lease in leases if lease.holding is not None)}
        with self._lock:
            if run != self._run:
                self._leases.clear()
                self._hashes.clear()
                self._run = run
            kept = {hash: looks + 1 for hash, looks in self._hashes.items() if looks + 1 < _LOOKS_TO_FORGET}
            self._hashes = kept | dict.fromkeys(fresh, 0)
            for lease in leases:
                self._leases.pop(lease.name, None)
                if lease.profiles is not None:
                    self._leases[lease.name] = replace(lease, time=min(lease.time, now))

    def _takers(self) -> list[Takers]:
        """The receivers that do not take all profiles, by what they take; those that are long silent are forgotten."""
        oldest = self._writer.clock() - self._remembered
        newest = sorted(self._leases.values(), key=lambda lease: -lease.time)[:_MOST_REMEMBERED]
        self._leases = {lease.name: lease for lease in newest if lease.time > oldest}
        takers: dict[tuple[Any, ...], Takers] = {}
        for name, lease in sorted(self._leases.items()):
            profiles = tuple(sorted(PROFILES.keys() & {*(lease.profiles or ())}))
            taker = Takers(profiles, lease.holding is not None, name)
            same = takers.get(taker[:2])
            is_another = lease.version is not None  # else it may be one that starts again and again
            takers[taker[:2]] = taker if same is None else same._replace(total=same.total + is_another)
        return [*takers.values()]

    def reason(self, link: Link | str | None) -> str:
        """Why patches are in the profile that they are in."""
        if self.profile != "auto":
            return "as asked" if self.profile == self._asked else "what most receivers take"
        choice = f"quickest over {link}" if link is not None else "smallest"
        limited = "" if self.profiles is None else f", of {in_words(self.profiles)}"
        return f"{choice}{limited}"

    def _choose(self, takers: Iterable[Takers], *, can_cut: bool) -> None:
        """Choose what patches are in, by what any rank has heard; say once if it is not what was asked for."""
        by_kind: dict[tuple[Any, ...], Takers] = {}
        for taker in takers:  # ranks count the same receivers
            by_kind[taker[:2]] = max(taker, by_kind.get(taker[:2], taker), key=lambda taker: (taker.total, taker.name))
        if self._holdings is not None or not can_cut:
            by_kind.setdefault((PARTS.profiles, True), PARTS)
        every = [by_kind[kind] for kind in sorted(by_kind)]
        choice = choose_profiles(self._asked, every, can_cut=can_cut)
        squashed = choose_profiles("auto", every, can_cut=False)
        all_take = squashed.profiles is None
        self.squashed_profile = squashed.profile if all_take else plan.candidates("auto", squashed.profiles)[0]
        self.profile = choice.profile
        self.profiles = choice.profiles
        kinds: set[object] = {*by_kind} if choice.trouble else set()
        if choice.trouble and self._told != kinds:
            log.warning("%s: %s", self._writer.store.url, choice.trouble)
        self._told = kinds

    def _read_holdings(self, hashes: Sequence[str]) -> Holdings | None:
        """The parts of the newest tensors that receivers have. Those that cannot be used are left out."""
        committed = self._writer.committed
        if committed is None:
            return None
        table = committed.run.layout
        keys = {(hash, table) for hash in hashes}
        if not self._read.keys() <= keys:  # some have left: there may be room for others
            self._read = {key: own for key, own in self._read.items() if key in keys and own is not None}
        places: dict[str, Sequence[Place]] = {}
        digits: set[str] = set()
        room = MOST_PLACES
        trouble = ""
        for hash in hashes:
            name = holding_name(hash)
            own = self._read_holding(committed.run, hash)
            if isinstance(own, TensorMismatch):
                continue  # it follows no more: the run goes on with other tensors
            if isinstance(own, SparserlError):
                trouble = f"the parts of a receiver cannot be used: {own}"
                continue
            room -= 0 if own is None else len(own)
            if own is None or room < 0 or len(places) == MOST_HOLDINGS:
                trouble = "receivers have too many different parts"
                self._read[hash, table] = None  # they are not kept in memory
                break
            if name[:SHARED_DIGITS] in digits:
                trouble = f"two receivers have parts whose names begin with {name[:SHARED_DIGITS]}"
                continue
            digits.add(name[:SHARED_DIGITS])
            places[name] = own
        if trouble not in ("", self._trouble):
            log.warning("%s: %s; patches are not cut along these", self._writer.store.url, trouble)
        self._trouble = trouble
        key = (*places,), not trouble, table
        if self._cut is None or self._cut[0] != key:
            self._cut = key, Holdings(table, places, is_every=not trouble)
        return self._cut[1]

    def _read_holding(self, run: RunRecord, hash: str) -> Sequence[Place] | SparserlError | None:
        """The places that a receiver has, or why they cannot be used; None if there was no room for them.

        A record is read once: it never changes.
        """
        key = hash, run.layout
        if key not in self._read:
            try:
                self._read[key] = read_holding(self._writer.store, run.run, *key)
            except StoreError as error:
                return error  # the next publish tries again
            except SparserlError as error:
                self._read[key] = error
        return self._read[key]
