"""How fast transfers are: measured on both sides, so that `auto` chooses by what the link really carries."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from ...plan import Link
from ..options import MEASURED, EncodingOptions

_LEAST_BYTES = 1 << 16  # of a transfer that says something about the link, not about its delay
_REMEMBERED = 32  # transfers


class RateMeter:
    """Bits per second of one patch's transfers, some of which are on their way at the same time."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._in_flight = 0
        self._begun = 0.0
        self._bytes = 0
        self._seconds = 0.0  # in which at least one was on its way

    @contextmanager
    def transfer(self, nbytes: int) -> Iterator[None]:
        """Goes around a transfer. One that fails has taken its time, and brought nothing."""
        with self._guard:
            self._in_flight += 1
            if self._in_flight == 1:
                self._begun = time.perf_counter()
        is_done = False
        try:
            yield
            is_done = True
        finally:
            with self._guard:
                self._in_flight -= 1
                self._bytes += nbytes if is_done else 0
                if self._in_flight == 0:
                    self._seconds += time.perf_counter() - self._begun

    @property
    def rate(self) -> float | None:
        """Bits per second; None where too little was transferred to tell."""
        return 8 * self._bytes / self._seconds if self._bytes >= _LEAST_BYTES and self._seconds else None


class RecentRates:
    """The rates of the last transfers, of which the slowest counts: a link that was slow may be so again.

    What is chosen for too slow a link costs a little work; what is chosen for too fast a link costs the whole wait.
    """

    def __init__(self) -> None:
        self._rates: deque[float] = deque(maxlen=_REMEMBERED)

    def add(self, meter: RateMeter) -> None:
        """One more transfer."""
        if (rate := meter.rate) is not None:
            self._rates.append(rate)

    @property
    def slowest(self) -> float | None:
        """Bits per second; None where nothing was measured."""
        return min(self._rates, default=None)


class MeasuredLink:
    """The link between a publisher and its receivers, by the transfers that both have seen."""

    def __init__(self) -> None:
        self.uploads = RecentRates()
        self._receiver_rate: float | None = None

    def hear(self, rates: Iterable[float | None]) -> None:
        """What receivers say of their rates; those who say nothing do not count."""
        self._receiver_rate = min((rate for rate in rates if rate is not None), default=None)

    def resolve(self, encoding: EncodingOptions, *, is_coded: bool = False) -> EncodingOptions:
        """Options in which a measured link is replaced by what was measured.

        is_coded: whether a GPU encodes changes as it finds them: nothing is faster than the smallest, then.
        """
        if encoding.link != MEASURED:
            return encoding
        return replace(encoding, link=None if is_coded else self.link)

    @property
    def link(self) -> Link | None:
        """The slowest way from here to a receiver; None where no receiver has told of it yet."""
        if self._receiver_rate is None:
            return None
        own = self.uploads.slowest
        return Link(max(1.0, self._receiver_rate if own is None else min(own, self._receiver_rate)))
