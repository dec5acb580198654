"""The lease that a subscriber writes: which version it holds, and what it can take."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import time
from collections.abc import Callable, Collection

from ...codec import PROFILES
from ...errors import SessionError, StoreError
from ...transport.stores.base import Store
from .holding_records import HoldingRecord
from .leases import Lease, lease_name
from .rates import Rates
from .records import path

_RENEW = 30.0  # seconds after which a lease is written again
_RETRY = 3.0  # seconds after which that is tried again if it failed
_RENEW_HOLDING = 3600.0


class OwnLease:
    """The lease of one subscriber.

    Args:
        store: Where it is written.
        name: The name of the subscriber; True for one made of host, process and `owner`, False for no lease.
        clock: Gives the time in seconds since 1970.
        owner: The subscriber.

    Raises:
        SessionError: The name cannot be used.
    """

    def __init__(self, store: Store, name: str | bool, clock: Callable[[], float], owner: object) -> None:
        own_name = f"{_host()}-{os.getpid()}-{id(owner):x}" if name is True else name
        lease = None if own_name is False else lease_name(str(own_name))
        self._store = store
        self._name = lease if store.writable else None
        self._clock = clock
        self._written: object = None  # run and version in the lease, and what can be taken
        self._written_at = 0.0
        self._holding: tuple[str, str] | None = None  # run and hash of the one that was written
        self._holding_at = 0.0

    def renew(
        self,
        run: str,
        version: int | None,
        profiles: Collection[str] | None = None,
        holding: HoldingRecord | None = None,
        rates: Rates | None = None,
    ) -> None:
        """Write down in the store what is held and can be taken; that it could not be written is no reason to fail.

        version: of the run; without one, there is no lease of who can take everything.
        profiles: those that can be taken; None for all.
        holding: the parts of the weights that are here; None for all.
        rates: how fast versions are fetched, where that is known.
        """
        self._put_holding(run, holding)
        if self._name is None or (version is None and profiles is None):
            return
        told = run, version, profiles, holding
        if self._written == told and time.monotonic() - self._written_at < _RENEW:
            return
        self._written = told
        self._written_at = time.monotonic()
        try:
            lease = Lease(
                self._name,
                version,
                self._clock(),
                rates,
                None if profiles is None else tuple(sorted(PROFILES.keys() & set(profiles))),
                None if holding is None else holding.hash,
            )
            self._store.put(path(run, "leases", self._name), lease.to_bytes())
        except (StoreError, SessionError):
            self._written_at -= _RENEW - _RETRY

    def _put_holding(self, run: str, holding: HoldingRecord | None) -> None:
        """Write down the parts that are here, whatever version they are, so that publishers cut patches along them.

        It is done again now and then: the record goes when that has not been done for two days.
        """
        if self._name is None or holding is None:
            return
        key = run, holding.hash
        if self._holding == key and time.monotonic() - self._holding_at < _RENEW_HOLDING:
            return
        with contextlib.suppress(StoreError, SessionError):
            holding.put(self._store, run)
            self._holding = key
            self._holding_at = time.monotonic()


def _host() -> str:
    """The name of this machine, with nothing in it that the name of a lease cannot have."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())[:60].lstrip("._-") or "host"
