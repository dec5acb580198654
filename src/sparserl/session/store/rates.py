"""How fast transfers are: measured on both sides, so that `auto` chooses by what the link really carries."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

from ...plan import VaryingLink
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


class Rates(NamedTuple):
    """The slowest and the fastest of some transfers, in bits per second."""

    slowest: float
    fastest: float


class RecentRates:
    """The rates of the last transfers: a link that was slow, or fast, may be so again."""

    def __init__(self) -> None:
        self._rates: deque[float] = deque(maxlen=_REMEMBERED)

    def add(self, *meters: RateMeter) -> None:
        """Some more transfers."""
        self._rates += [meter.rate for meter in meters if meter.rate is not None]

    @property
    def extremes(self) -> Rates | None:
        """The slowest and the fastest; None where nothing was measured."""
        return Rates(min(self._rates), max(self._rates)) if self._rates else None


class MeasuredLink:
    """The link between a publisher and its receivers, by the transfers that both have seen."""

    def __init__(self) -> None:
        self.uploads = RecentRates()
        self._receivers: list[Rates] = []

    def hear(self, rates: Iterable[Rates | None]) -> None:
        """What receivers say of their rates; those who say nothing do not count."""
        self._receivers = [rate for rate in rates if rate is not None]

    def resolve(self, encoding: EncodingOptions, *, is_coded: bool = False) -> EncodingOptions:
        """Options in which a measured link is replaced by what was measured.

        is_coded: whether a GPU encodes changes as it finds them: nothing is faster than the smallest, then.
        """
        if encoding.link != MEASURED:
            return encoding
        return replace(encoding, link=None if is_coded else self.link)

    @property
    def link(self) -> VaryingLink | None:
        """From the slowest way from here to a receiver to the fastest; None where no receiver has told of it yet."""
        receivers = self._receivers
        if not receivers:
            return None
        own = self.uploads.extremes or Rates(math.inf, math.inf)
        slowest = min(own.slowest, *(rates.slowest for rates in receivers))
        fastest = min(own.fastest, max(rates.fastest for rates in receivers))
        return VaryingLink(max(1.0, slowest), most_bits_per_second=max(1.0, slowest, fastest))
