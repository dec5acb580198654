"""Profiles, index coders, value coders and byte coders, and the registry that finds them by name or id.

    changes ──► index coder ──► streams ──► byte coder ──► bytes of a bucket
            └─► value coder ──►

A profile is one file: it picks an index coder and a value coder; `ctx` has its own index coder.
"""

from __future__ import annotations

from ..errors import UnsupportedFormat
from . import numbers, value
from .coders import AdjacentChunks, Coder, coder
from .ctx import Ctx
from .gap import Gap
from .profile import BucketLayout, Classes, DecodedChanges, Profile
from .raw import Raw
from .streams import Chunks, Coded, Reader, Stream, encode_streams
from .ulp import Ulp

PROFILES: dict[str, Profile] = {p.name: p for p in (Raw(), Gap(), Ulp(), Ctx())}
_BY_ID = {p.id: p for p in PROFILES.values()}


def profile_by_name(name: str) -> Profile:
    """The profile of a name."""
    if name not in PROFILES:
        raise UnsupportedFormat(f"unknown profile {name!r}; this release knows {', '.join(PROFILES)}")
    return PROFILES[name]


def profile_by_id(id: int) -> Profile:
    """The profile of an id on the wire."""
    if id not in _BY_ID:
        raise UnsupportedFormat(f"unknown profile id {id}; a newer sparserl wrote this")
    return _BY_ID[id]


__all__ = [
    "PROFILES",
    "AdjacentChunks",
    "BucketLayout",
    "Chunks",
    "Classes",
    "Coded",
    "Coder",
    "DecodedChanges",
    "Profile",
    "Reader",
    "Stream",
    "coder",
    "encode_streams",
    "numbers",
    "profile_by_id",
    "profile_by_name",
    "value",
]
