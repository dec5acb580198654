"""What a publisher hears of its receivers, by their leases: how fast they fetch, and which profiles they can take."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ...errors import SparserlError
from ...patch.slicing import PROFILES
from ...plan import VaryingLink
from ..logs import log
from ..options import MEASURED, EncodingOptions
from .leases import Lease
from .run_writer import RunWriter

_EVERY = 10.0  # seconds between looks at leases
_MOST_LEASES = 64  # the newest, that are looked at
_END_SECONDS = 1.0  # that the end of a publisher waits for a look
_FIRST_LOOKS = 3  # publishes that look at leases before they encode, as long as there are none
FOR_PARTS = "ulp"  # the smallest profile that a rank can take which has only parts of the weights


class _Heard(NamedTuple):
    """Whether a receiver has only parts of the weights, and whether there are patches that it cannot take."""

    have_parts: bool
    need_anchor: bool


class Receivers:
    """The receivers of a run, as far as their leases tell.

    Args:
        writer: Reads the leases.
        encoding: How patches are encoded.
        lease_seconds: After which a lease is too old to count.
    """

    def __init__(self, writer: RunWriter, encoding: EncodingOptions, lease_seconds: float) -> None:
        self.need_anchor = False  # whether patches were written that one of them cannot take
        self._have_parts = False  # whether one of them has only parts of the weights
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

    def agree(self, ranks: Iterable[Sequence[bool]]) -> None:
        """On all ranks of a publish: go by what any of them has heard."""
        heard = [_Heard(*row) for row in ranks]
        self._have_parts = any(row.have_parts for row in heard)
        self.need_anchor = any(row.need_anchor for row in heard)

    def anchor_written(self) -> None:
        """All can go on from an anchor."""
        self.need_anchor = False
        self._heard = self._heard._replace(need_anchor=False)

    @property
    def _count(self) -> bool:
        """Whether what receivers say makes a difference."""
        return self._encoding.profile not in PROFILES

    def heard(self) -> _Heard:
        """What this rank has heard; the first patches wait for a look at leases, so that they can be taken."""
        if self._count and self._first_looks < _FIRST_LOOKS and self._writer.committed is not None:
            self._first_looks += 1
            self.look()
        return self._heard

    def hear(self) -> None:
        """After a publish: look at leases now and then, on a thread; the next publish goes by them."""
        is_looking = self._thread is not None and self._thread.is_alive()
        if not self._count or is_looking or time.monotonic() - self._heard_at < _EVERY:
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
        limited = next((lease for lease in leases if lease.profiles is not None), None)
        if limited is None or self._heard.have_parts:
            return
        committed = self._writer.committed
        steps = () if committed is None else committed.index.steps
        self._heard = _Heard(True, any(not PROFILES.issuperset(step.profiles) for step in steps))
        log.info(
            "%s: %s has parts of the weights and takes %s alone: patches are in %s from now on%s",
            self._writer.store.url,
            limited.name,
            ", ".join(limited.profiles or ()),
            FOR_PARTS,
            ", after an anchor" if self._heard.need_anchor else "",
        )

    def _hear_rates(self, leases: Iterable[Lease]) -> None:
        measured = self._writer.measured_link
        measured.hear(lease.rates for lease in leases)
        link = measured.link
        if link is not None and (self._logged_link is None or link.has_changed(self._logged_link)):
            self._logged_link = link
            log.info("%s: transfers take place at %s: profiles are chosen for that", self._writer.store.url, link)
