"""Reading records: JSON in bounds, whose fields are taken one by one."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

from ...errors import InvalidField, LimitExceeded, SessionError, UnsupportedFormat
from ...weights.digest import Digest

FORMAT = 1
_PROFILE = re.compile(r"[a-z]{1,16}")
MOST_VERSION = 1 << 53
_MOST_SECONDS = 1e300  # since 1970: there are later times, whatever a clock has said
T = TypeVar("T")


class Bound(NamedTuple):
    """What a record may hold. Text becomes objects many times its size, so that these are counted before it does."""

    size: int  # bytes
    values: int  # in lists and objects: commas, and brackets that open
    names: int  # of fields: colons


SMALL = Bound(1 << 16, 1 << 16, 1 << 16)


def sha256(data: bytes | memoryview) -> str:
    return hashlib.sha256(data).hexdigest()


def canonical(record: Mapping[str, Any]) -> bytes:
    """The one way a record is written."""
    return json.dumps(record, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def written(record: Mapping[str, Any], label: str, bound: Bound) -> bytes:
    """A record as bytes, refused where nobody would read them."""
    data = canonical({"format": FORMAT, **record})
    _require_bound(data, label, bound)
    return data


def _require_bound(data: bytes, label: str, bound: Bound) -> None:
    if len(data) > bound.size:
        raise LimitExceeded(f"{label}: {len(data)} bytes, the limit is {bound.size}")
    values = data.count(b",") + data.count(b"[") + data.count(b"{")
    names = data.count(b":")
    if values > bound.values or names > bound.names:
        raise LimitExceeded(
            f"{label}: {values} values and {names} names, the limits are {bound.values} and {bound.names}"
        )


def parse(data: bytes, label: str, bound: Bound = SMALL) -> dict[str, Any]:
    """A JSON object in which no name stands twice."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        out = dict(pairs)
        if len(out) != len(pairs):
            raise ValueError("a name stands twice")
        return out

    _require_bound(data, label, bound)
    options: dict[str, Any] = {"object_pairs_hook": once, "parse_int": _number, "parse_constant": _number}
    try:
        record = json.loads(data.decode("ascii"), parse_float=_fraction, **options)
    except (ValueError, RecursionError) as error:
        raise InvalidField(f"{label} is not valid JSON: {str(error)[:200]}") from error
    if not isinstance(record, dict):
        raise InvalidField(f"{label} is not a JSON object")
    if record.get("format") != FORMAT:
        kind = UnsupportedFormat if isinstance(record.get("format"), int) else InvalidField
        raise kind(f"{label}: format {record.get('format')!r}; this release reads {FORMAT}")
    return record


def _number(text: str) -> int:
    if len(text) > 20:
        raise ValueError(f"a number of {len(text)} digits")
    return int(text)


def _fraction(text: str) -> float:
    if len(text) > 40:
        raise ValueError(f"a number of {len(text)} digits")
    return float(text)


class Fields:
    """Takes the fields of a record one by one; what is missing, of the wrong kind or too large is an error."""

    def __init__(self, record: dict[str, Any], label: str) -> None:
        self.left = dict(record)
        self.label = label
        self.left.pop("format", None)

    def take(self, name: str, read: Callable[[Any], T]) -> T:
        if name not in self.left:
            raise InvalidField(f"{self.label}: {name} is missing")
        value = self.left.pop(name)
        try:
            return read(value)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise InvalidField(f"{self.label}: {name} is {str(value)[:80]!r}") from error

    def optional(self, name: str, read: Callable[[Any], T], default: T) -> T:
        return self.take(name, read) if name in self.left else default

    def text(self, name: str, pattern: re.Pattern[str]) -> str:
        return self.take(name, lambda v: matched(pattern, v))

    def count(self, name: str, most: int = MOST_VERSION) -> int:
        return self.take(name, lambda v: counted(v, most))

    def finish(self) -> None:
        if self.left:
            raise InvalidField(f"{self.label}: unknown fields {sorted(self.left)[:5]}")


def matched(pattern: re.Pattern[str], value: Any) -> str:
    """Text of a pattern."""
    if not isinstance(value, str) or not pattern.fullmatch(value):
        raise ValueError(value)
    return value


def counted(value: Any, most: int) -> int:
    """An integer from 0 up to a bound."""
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError(value)
    return value


def checked_seconds(value: Any) -> float:
    """A time that can be written down."""
    if type(value) not in (int, float) or not abs(value) <= _MOST_SECONDS:
        raise ValueError(value)
    return float(value)


def checked_clock(clock: Callable[[], float]) -> Callable[[], float]:
    """A clock whose times can be written down."""
    if not callable(clock):
        raise SessionError(f"clock is {clock!r}; it must be a function that returns seconds since 1970")

    def seconds() -> float:
        now = clock()
        if not abs(now) <= _MOST_SECONDS:
            raise SessionError(f"the clock of this machine says {now}; set it first")
        return now

    return seconds


def read_digest(value: Any) -> Digest:
    """A digest in hexadecimal."""
    return Digest.from_hex(matched(re.compile(r"[0-9a-f]{32}"), value))


def read_list(read: Callable[[Any], T]) -> Callable[[Any], tuple[T, ...]]:
    """Reads a list, item by item."""

    def all_of(value: Any) -> tuple[T, ...]:
        if not isinstance(value, list):
            raise TypeError(value)
        return tuple(read(v) for v in value)

    return all_of


def read_profiles(value: Any) -> tuple[str, ...]:
    """Reads the names of profiles."""
    return read_list(lambda name: matched(_PROFILE, name))(value)


def require_few(count: int, most: int, things: str, label: str) -> None:
    """Refuse more of something than there may be."""
    if count > most:
        raise LimitExceeded(f"{label}: {count} {things}, the limit is {most}")
