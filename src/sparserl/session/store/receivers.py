"""What a publisher hears of its receivers: how fast they fetch, and which parts of the weights they have."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from ...errors import SparserlError, TensorMismatch
from ...patch.slicing import PROFILES
from ...plan import VaryingLink
from ...weights.holdings import MOST_HOLDINGS, MOST_PLACES, Holdings
from ...weights.shards import Place
from ...weights.table import TensorTable
from ...wire import encoded_table
from ..logs import log
from ..options import MEASURED, EncodingOptions
from .holding_records import holding_name, read_holding
from .leases import Lease
from .records import RouteStep
from .run_writer import RunWriter

_EVERY = 10.0  # seconds between looks at leases
_EVERY_AT_FIRST = 0.5  # as long as no receiver has told of its link, and there were few looks
_FEW_LOOKS = 60
_MOST_LEASES = 64  # the newest, that are looked at
_MOST_LISTED = 2 * MOST_HOLDINGS  # holdings that are looked at
_END_SECONDS = 1.0  # that the end of a publisher waits for a look
_FIRST_LOOKS = 3  # publishes that look at leases before they encode, as long as there are none
FOR_PARTS = "ulp"  # the smallest profile that a rank can take which has only parts of the weights


class _Heard(NamedTuple):
    """What leases and holdings of a run say of its receivers."""

    have_parts: bool  # whether one has parts of the weights, and does not say which
    need_anchor: bool  # whether there are patches that one cannot take
    holdings: Sequence[str] = ()  # hashes of the parts that they have


class Receivers:
    """The receivers of a run, as far as their leases and holdings tell.

    Args:
        writer: Reads these.
        encoding: How patches are encoded.
        lease_seconds: After which a lease is too old to count.
    """

    def __init__(self, writer: RunWriter, encoding: EncodingOptions, lease_seconds: float) -> None:
        self.need_anchor = False  # whether patches were written that one of them cannot take
        self._have_parts = False  # whether one of them has parts of the weights that patches cannot be cut along
        self._holdings: Holdings | None = None  # that all ranks have read
        self._agreed: object = None  # their hashes, and that of their table
        self._trouble = ""  # the last that was logged
        self._heard = _Heard(False, False)  # by this rank; what counts is what all ranks have heard
        self._writer = writer
        self._lease_seconds = lease_seconds
        self._thread: threading.Thread | None = None
        self._heard_at = -_EVERY
        self._first_looks = 0
        self._looks = 0
        self._asks_for_rates = encoding.profile == "auto" and encoding.link == MEASURED
        self._logged_link: VaryingLink | None = None

    def profile(self, name: str) -> str:
        """The profile that all receivers can take, where this one was asked for."""
        return FOR_PARTS if self._have_parts and name not in PROFILES else name

    def agree(self, ranks: Iterable[Sequence[Any]]) -> None:
        """On all ranks of a publish: go by what any of them has heard."""
        heard = [_Heard(*row) for row in ranks]
        self.need_anchor = any(row.need_anchor for row in heard)
        hashes = sorted({hash for row in heard for hash in row.holdings})
        committed = self._writer.committed
        table = None if committed is None else committed.run.layout
        key = (*hashes,), None if table is None else encoded_table(table).hash
        holdings = self._holdings if key == self._agreed else None
        if hashes:
            if holdings is None and table is not None:
                holdings = self._read_holdings(hashes, table)
            can_read = self._writer.writers.together("read holdings", lambda: b"" if holdings is None else b"+")
            if not all(can_read):
                holdings = None
        self._holdings = holdings
        self._agreed = None if holdings is None else key  # what could not be read is tried again
        self._writer.holdings = holdings if holdings is not None and holdings.names else None
        can_cut = not hashes or (holdings is not None and holdings.are_cut)
        self._have_parts = any(row.have_parts for row in heard) or not can_cut

    def anchor_written(self) -> None:
        """All can go on from an anchor."""
        self.need_anchor = False
        self._heard = self._heard._replace(need_anchor=False)

    def heard(self) -> _Heard:
        """What this rank has heard; the first patches wait for a look at leases, so that they can be taken."""
        if self._first_looks < _FIRST_LOOKS and self._writer.committed is not None:
            self._first_looks += 1
            self.look()
        return self._heard

    def hear(self) -> None:
        """After a publish: look at leases now and then, on a thread; the next publish goes by them."""
        is_looking = self._thread is not None and self._thread.is_alive()
        is_unknown = self._asks_for_rates and self._writer.measured_link.link is None
        every = _EVERY_AT_FIRST if is_unknown and self._looks < _FEW_LOOKS else _EVERY
        if is_looking or time.monotonic() - self._heard_at < every:
            return
        self._heard_at = time.monotonic()
        self._thread = threading.Thread(target=self.look, name="sparserl-receivers", daemon=True)
        self._thread.start()

    def look(self) -> None:
        """Read the leases, and which holdings there are."""
        now = self._writer.clock()
        try:
            leases = self._writer.leases(_MOST_LEASES)
            hashes = self._writer.holding_hashes(_MOST_LISTED)
        except SparserlError:
            return  # a later publish looks again
        self._looks += 1
        current = [lease for lease in leases if now - lease.time < self._lease_seconds]
        if current or hashes:
            self._first_looks = _FIRST_LOOKS
        self._hear_parts(current, hashes)
        if self._asks_for_rates:
            self._hear_rates(current)

    def close(self) -> None:
        """Wait a moment for a look that is under way."""
        if self._thread is not None:
            self._thread.join(_END_SECONDS)

    def _hear_parts(self, leases: Sequence[Lease], hashes: Iterable[str]) -> None:
        """Hear of receivers that have parts of the weights."""
        committed = self._writer.committed
        steps = () if committed is None else committed.index.steps
        named = {*hashes, *(lease.holding for lease in leases if lease.holding is not None)}
        unheard = sorted(named - {*self._heard.holdings})
        others = [lease.name for lease in leases if lease.profiles is not None and lease.holding is None]
        for hash in unheard:
            need_anchor = _are_some_for_others(steps, holding_name(hash))
            self._heard = _Heard(
                self._heard.have_parts, self._heard.need_anchor or need_anchor, (*self._heard.holdings, hash)
            )
            self._log("patches are cut along them", need_anchor)
        if others and not self._heard.have_parts:
            need_anchor = _are_some_for_others(steps, "")
            self._heard = _Heard(True, self._heard.need_anchor or need_anchor, self._heard.holdings)
            self._log(f"patches are in {FOR_PARTS}", need_anchor)

    def _log(self, how: str, need_anchor: bool) -> None:
        anchor = ", after an anchor" if need_anchor else ""
        log.info("%s: a receiver has parts of the weights: %s from now on%s", self._writer.store.url, how, anchor)

    def _read_holdings(self, hashes: Sequence[str], table: TensorTable) -> Holdings | None:
        """The parts of these tensors that receivers have; None if they are not known, or too many."""
        committed = self._writer.committed
        assert committed is not None
        places: dict[str, tuple[Place, ...]] = {}
        count = 0
        for hash in hashes:
            name = holding_name(hash)
            try:
                own = read_holding(self._writer.store, committed.run.run, hash, table)
            except TensorMismatch:
                continue  # it follows no more: the run goes on with other tensors
            except SparserlError as error:
                self._warn(f"the parts of a receiver cannot be used: {error}")
                return None
            count += len(own)
            if name in places or count > MOST_PLACES or len(places) == MOST_HOLDINGS:
                self._warn("receivers have too many different parts for patches to be cut along them")
                return None
            places[name] = own
        return Holdings(table, places)

    def _warn(self, trouble: str) -> None:
        if trouble != self._trouble:
            self._trouble = trouble
            log.warning("%s: %s; patches are in %s", self._writer.store.url, trouble, FOR_PARTS)

    def _hear_rates(self, leases: Iterable[Lease]) -> None:
        measured = self._writer.measured_link
        measured.hear(lease.rates for lease in leases)
        link = measured.link
        if link is not None and (self._logged_link is None or link.has_changed(self._logged_link)):
            self._logged_link = link
            log.info("%s: transfers take place at %s: profiles are chosen for that", self._writer.store.url, link)


def _are_some_for_others(steps: Iterable[RouteStep], holding: str) -> bool:
    """Whether there are patches that a receiver with this holding cannot take."""
    return any(not PROFILES.issuperset(step.profiles) and holding not in step.holdings for step in steps)
