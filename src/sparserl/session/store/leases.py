"""Leases: what each subscriber holds and can take, so that retention spares what it needs and patches are for it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from ...errors import SessionError
from .fields import MOST_VERSION, SMALL, Fields, checked_seconds, counted, matched, parse, read_profiles, written

_MOST_PROFILES = 16
_HASH = re.compile(r"[0-9a-f]{64}")
LEASE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True)
class Lease:
    """What a subscriber holds and can take; retention spares what it needs, and publishers wait for it."""

    name: str
    version: int | None  # None if it holds none, and says only what it can take
    time: float
    profiles: tuple[str, ...] | None = None  # that it can take; None for all
    holding: str | None = None  # the hash of the object that says which parts of the weights it has; None for all

    def to_bytes(self) -> bytes:
        record = vars(self) | {"profiles": self.profiles and [*self.profiles]}
        for name in ("version", "profiles", "holding"):
            if record[name] is None:
                del record[name]
        return written(record, f"the lease of {self.name}", SMALL)

    @classmethod
    def parse(cls, data: bytes, label: str) -> Lease:
        fields = Fields(parse(data, label), label)
        fields.left.pop("rates", None)  # earlier releases wrote how fast they fetched; nobody asks any more
        lease = cls(
            fields.text("name", LEASE_NAME),
            fields.optional("version", lambda v: counted(v, MOST_VERSION), None),
            fields.take("time", checked_seconds),
            fields.optional("profiles", _read_profiles, None),
            fields.optional("holding", lambda v: matched(_HASH, v), None),
        )
        fields.finish()
        return lease


def _read_profiles(value: Any) -> tuple[str, ...]:
    names = read_profiles(value)
    if len(names) > _MOST_PROFILES:
        raise ValueError(value)
    return names


def lease_name(name: str) -> str:
    """A name under which a subscriber can be known."""
    try:
        return matched(LEASE_NAME, name)
    except ValueError as error:
        raise SessionError(f"{name!r} cannot be a subscriber's name: letters, digits, '.', '_' and '-' can") from error
