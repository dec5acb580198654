"""The lease that a subscriber writes: which version it holds, and what it can take."""

from __future__ import annotations

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
from .records import path

_RENEW = 30.0  # seconds after which a lease is written again
_RENEW_HOLDING = 3600.0
_RETRY = 3.0  # after which what could not be written is tried again


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
        self._lease = _Renewed(_RENEW)
        self._holding = _Renewed(_RENEW_HOLDING)

    def renew(
        self,
        run: str,
        version: int | None,
        profiles: Collection[str] | None = None,
        holding: HoldingRecord | None = None,
    ) -> None:
        """Write down in the store what is held and can be taken; that it could not be written is no reason to fail.

        version: of the run; without one, there is no lease of who can take everything.
        profiles: those that can be taken; None for all.
        holding: the parts of the weights that are here; None for all.
        """
        self._put_holding(run, holding)
        if self._name is None or (version is None and profiles is None):
            return
        name = self._name
        known = None if profiles is None else tuple(sorted(PROFILES.keys() & set(profiles)))
        parts = None if holding is None else holding.hash

        def put() -> None:
            lease = Lease(name, version, self._clock(), known, parts)
            self._store.put(path(run, "leases", name), lease.to_bytes())

        self._lease.write((run, version, known, parts), put)

    def _put_holding(self, run: str, holding: HoldingRecord | None) -> None:
        """Write down the parts that are here, whatever version they are, so that publishers cut patches along them.

        It is done again now and then: the record goes when that has not been done for two days.
        """
        if self._name is not None and holding is not None:
            self._holding.write((run, holding.hash), lambda: holding.put(self._store, run))


class _Renewed:
    """Something in a store that is written again after so many seconds, and at once if it says something else."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._said: object = None
        self.due = 0.0  # on the clock of `time.monotonic`

    def write(self, said: object, put: Callable[[], None]) -> None:
        """Write it if it is due. If that fails, it is tried again soon, but most of the time is left to other work."""
        began = time.monotonic()
        if said == self._said and began < self.due:
            return
        self._said = said
        try:
            put()
            self.due = began + self._seconds
        except (StoreError, SessionError):
            now = time.monotonic()
            self.due = now + min(self._seconds, _RETRY + 10 * (now - began))


def _host() -> str:
    """The name of this machine, with nothing in it that the name of a lease cannot have."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())[:60].lstrip("._-") or "host"
