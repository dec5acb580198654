"""Sizes, durations and words of environment variables as people read and write them."""

from __future__ import annotations

import os
import re

from .errors import SparserlError

_DURATION = re.compile(r"\s*(\d+\.?\d*(?:[eE][+-]?\d+)?|\.\d+)\s*(us|µs|ms|s|m|h|d)?\s*")
_SECONDS = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def size(nbytes: float) -> str:
    """A number of bytes, with two decimals.

    >>> size(999), size(1_234_567)
    ('999 B', '1.23 MB')
    """
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.2f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.2f} TB"


def short_size(nbytes: float) -> str:
    """A number of bytes, with three significant digits and no trailing zeros.

    >>> short_size(2_000_000), short_size(123_456)
    ('2 MB', '123 kB')
    """
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 999.5:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.3g} TB"


def duration(seconds: float) -> str:
    """A duration, in milliseconds or seconds.

    >>> duration(0.0123), duration(12.3)
    ('12.3 ms', '12.30 s')
    """
    if seconds < 1:
        return f"{1000 * seconds:,.3g} ms"
    return f"{seconds:,.2f} s" if seconds < 100 else f"{seconds:,.0f} s"


def age(seconds: float) -> str:
    """How long ago something was, in the largest unit of which at least two have passed.

    >>> age(7000), age(8000)
    ('117 m', '2 h')
    """
    for unit in ("d", "h", "m"):
        if seconds >= 2 * _SECONDS[unit]:
            return f"{seconds / _SECONDS[unit]:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


_NUMBER = re.compile(r"\s*(\d+\.?\d*(?:[eE][+-]?\d+)?|\.\d+)\s*([kKMBT]|%)?\s*")
_FACTORS = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12, "%": 0.01}


def parse_number(text: str) -> float:
    """A number such as "671e9", "7B", "135M" or "0.6%".

    Raises:
        ValueError: The text is not a number.

    >>> parse_number("7B"), parse_number("1%"), parse_number("0.006")
    (7000000000.0, 0.01, 0.006)
    """
    match = _NUMBER.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a number; write it as 671e9, 7B, 0.006 or 0.6%")
    return float(match[1]) * _FACTORS[match[2] or ""]


def parse_duration(text: str) -> float:
    """The seconds of a duration such as "150us", "20ms", "0.5s", "10m", "2h" or "1d"; a bare number is seconds.

    Raises:
        ValueError: The text is not a duration.

    >>> parse_duration("20ms"), parse_duration("2h"), parse_duration("3")
    (0.02, 7200.0, 3.0)
    """
    match = _DURATION.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a duration; write it as 20ms, 30s, 10m, 2h or 1d")
    return float(match[1]) * _SECONDS[match[2] or "s"]


def switch(name: str, *words: str) -> str | None:
    """The word that an environment variable is set to, in lower case; None if it is not set, or empty.

    Raises:
        SparserlError: It is none of `words`.
    """
    word = os.environ.get(name, "").lower()
    if word and word not in words:
        known = " or ".join(words)
        raise SparserlError(f"{name} is {os.environ[name]!r}; set it to {known}, or do not set it")
    return word or None
