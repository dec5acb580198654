"""What a publisher hears of its receivers, by their leases: how fast they fetch, and which profiles they can take."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from ...errors import SparserlError
from ...patch.slicing import PROFILES
from ...plan import VaryingLink
from ...weights.holdings import MOST_HOLDINGS, Holdings
from ...weights.shards import Place
from ...wire import encoded_table
from ..logs import log
from ..options import MEASURED, EncodingOptions
from .holding_records import holding_name, read_holding
from .leases import Lease
from .run_writer import RunWriter

_EVERY = 10.0  # seconds between looks at leases
_MOST_LEASES = 64  # the newest, that are looked at
_END_SECONDS = 1.0  # that the end of a publisher waits for a look
_FIRST_LOOKS = 3  # publishes that look at leases before they encode, as long as there are none
FOR_PARTS = "ulp"  # the smallest profile that a rank can take which has only parts of the weights


class _Heard(NamedTuple):
    """What the leases of a run say of its receivers."""

    have_parts: bool  # whether one has parts of the weights that patches cannot be cut along
    need_anchor: bool  # whether there are patches that one cannot take
    holdings: Sequence[str] = ()  # hashes of the parts that patches are cut along


class Receivers:
    """The receivers of a run, as far as their leases tell.

    Args:
        writer: Reads the leases.
        encoding: How patches are encoded.
        lease_seconds: After which a lease is too old to count.
    """

    def __init__(self, writer: RunWriter, encoding: EncodingOptions, lease_seconds: float) -> None:
        self.need_anchor = False  # whether patches were written that one of them cannot take
        self._have_parts = False  # whether one of them has parts of the weights that patches cannot be cut along
        self._places: dict[tuple[str, bytes], tuple[Place, ...]] = {}  # of holdings, by hash and that of the table
        self._heard = _Heard(False, False)  # by this rank; what counts is what all ranks have heard
        self._writer = writer
        self._encoding = encoding
        self._lease_seconds = lease_seconds
        self._thread: threading.Thread | None = None
        self._heard_at = -_EVERY
        self._first_looks = 0
        self._logged_link: VaryingLink | None = None

    def profile(self, name: str) -> str:
        """The profile that all receivers can take, where this one was asked for."""
        return FOR_PARTS if self._have_parts and name not in PROFILES else name

    def agree(self, ranks: Iterable[Sequence[Any]]) -> None:
        """On all ranks of a publish: go by what any of them has heard."""
        heard = [_Heard(*row) for row in ranks]
        self._have_parts = any(row.have_parts for row in heard)
        self.need_anchor = any(row.need_anchor for row in heard)
        hashes = sorted({hash for row in heard for hash in row.holdings})[:MOST_HOLDINGS]
        unknown = {hash for hash in hashes if not self._read_holding(hash)}
        committed = self._writer.committed
        if unknown:  # such as those of other tensors, which the run had before
            self._have_parts = True
            self._heard = self._heard._replace(
                have_parts=True, holdings=[hash for hash in self._heard.holdings if hash not in unknown]
            )
        if committed is None or not hashes or unknown:
            self._writer.holdings = None
            return
        table = committed.run.layout
        places = {holding_name(hash): self._places[hash, encoded_table(table).hash] for hash in hashes}
        last = self._writer.holdings
        if last is None or last.table is not table or last.names != tuple(places):
            self._writer.holdings = Holdings(table, places)

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
        if is_looking or time.monotonic() - self._heard_at < _EVERY:
            return
        self._heard_at = time.monotonic()
        self._thread = threading.Thread(target=self.look, name="sparserl-receivers", daemon=True)
        self._thread.start()

    def look(self) -> None:
        """Read the leases."""
        now = self._writer.clock()
        try:
            leases = self._writer.leases(_MOST_LEASES)
        except SparserlError:
            return  # a later publish looks again
        current = [lease for lease in leases if now - lease.time < self._lease_seconds]
        if current:
            self._first_looks = _FIRST_LOOKS
        self._hear_profiles(current)
        if self._encoding.profile == "auto" and self._encoding.link == MEASURED:
            self._hear_rates(current)

    def close(self) -> None:
        """Wait a moment for a look that is under way."""
        if self._thread is not None:
            self._thread.join(_END_SECONDS)

    def _hear_profiles(self, leases: Iterable[Lease]) -> None:
        committed = self._writer.committed
        for lease in leases:
            if committed is None or lease.profiles is None or lease.holding in self._heard.holdings:
                continue
            can_cut = (
                lease.holding is not None
                and len(self._heard.holdings) < MOST_HOLDINGS
                and self._read_holding(lease.holding)
            )
            if not can_cut and self._heard.have_parts:
                continue
            name = holding_name(lease.holding or "")
            need_anchor = any(
                not PROFILES.issuperset(step.profiles) and name not in step.holdings for step in committed.index.steps
            )
            self._heard = _Heard(
                self._heard.have_parts or not can_cut,
                self._heard.need_anchor or need_anchor,
                (*self._heard.holdings, lease.holding or "") if can_cut else self._heard.holdings,
            )
            how = "are cut along them" if can_cut else f"are in {FOR_PARTS}"
            log.info(
                "%s: %s has parts of the weights: patches %s from now on%s",
                self._writer.store.url,
                lease.name,
                how,
                ", after an anchor" if need_anchor else "",
            )

    def _read_holding(self, hash: str) -> bool:
        """Read which parts of the current tensors a receiver has; whether they are known then."""
        committed = self._writer.committed
        if committed is None:
            return False
        table = committed.run.layout
        key = hash, encoded_table(table).hash
        if key not in self._places:
            try:
                self._places[key] = read_holding(self._writer.store, committed.run.run, hash, table)
            except SparserlError as error:
                log.warning("%s: the parts of a receiver cannot be used: %s", self._writer.store.url, error)
        return key in self._places

    def _hear_rates(self, leases: Iterable[Lease]) -> None:
        measured = self._writer.measured_link
        measured.hear(lease.rates for lease in leases)
        link = measured.link
        if link is not None and (self._logged_link is None or link.has_changed(self._logged_link)):
            self._logged_link = link
            log.info("%s: transfers take place at %s: profiles are chosen for that", self._writer.store.url, link)
