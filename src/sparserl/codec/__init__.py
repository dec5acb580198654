"""Profiles, index coders, value coders and byte coders, and the registry that finds them by name or id.

    changes ──► index coder ──► streams ──► byte coder ──► bytes of a bucket
            └─► value coder ──►

A profile is one file: it picks an index coder and a value coder; `ctx` has its own index coder.
"""

from __future__ import annotations

from ..errors import UnsupportedFormat
from . import numbers, value
from .coders import Coder, Row, coder
from .ctx import Ctx
from .gap import Gap
from .profile import Classes, Found, Layout, Profile
from .raw import Raw
from .streams import Chunks, Coded, Reader, Stream, code
from .ulp import Ulp

PROFILES: dict[str, Profile] = {p.name: p for p in (Raw(), Gap(), Ulp(), Ctx())}
_BY_ID = {p.id: p for p in PROFILES.values()}


def profile(name: str) -> Profile:
    """The profile of a name."""
    if (found := PROFILES.get(name)) is None:
        raise UnsupportedFormat(f"unknown profile {name!r}; this release knows {', '.join(PROFILES)}")
    return found


def profile_by_id(id: int) -> Profile:
    """The profile of an id on the wire."""
    if (found := _BY_ID.get(id)) is None:
        raise UnsupportedFormat(f"unknown profile id {id}; a newer sparserl wrote this")
    return found


__all__ = [
    "PROFILES",
    "Chunks",
    "Classes",
    "Coded",
    "Coder",
    "Found",
    "Layout",
    "Profile",
    "Reader",
    "Row",
    "Stream",
    "code",
    "coder",
    "numbers",
    "profile",
    "profile_by_id",
    "value",
]
