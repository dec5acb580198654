"""Checks of the options that sessions take: what cannot be used is refused by the constructor it is given to."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from ..codec import PROFILES
from ..errors import SessionError
from ..parallel import Progress, require_threads
from ..plan import Link

AUDIT_EVERY = 100  # commits, so that audits take less than 0.5% of a loop; see docs/explanation/decisions.md
BASELINES = ("auto", "host", "device", "none")


def require_number(name: str, value: Any, least: float, most: float = math.inf) -> None:
    """Refuse what is not a number between two bounds, both of which it may be."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not least <= value <= most:
        bounds = f"{least:g} or more" if most == math.inf else f"from {least:g} to {most:g}"
        raise SessionError(f"{name} is {value!r}; it must be a number, {bounds}")


def require_count(name: str, value: Any, least: int = 1) -> None:
    """Refuse what is not an integer of at least so much."""
    if not isinstance(value, Integral) or isinstance(value, bool) or int(value) < least:
        raise SessionError(f"{name} is {value!r}; it must be an integer, {least} or more")


def require_timeout(name: str, value: Any) -> None:
    """Refuse what is not a positive, finite number of seconds."""
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if not is_number or not 0 < value < math.inf:
        raise SessionError(f"{name} is {value!r}; it must be a positive number of seconds")


def require_choice(name: str, value: Any, allowed: Collection[str]) -> None:
    """Refuse what is not one of the allowed words."""
    if value not in allowed:
        raise SessionError(f"{name} is {value!r}; it must be one of {', '.join(map(repr, allowed))}")


def require_flag(name: str, value: Any) -> None:
    """Refuse what is neither True nor False, such as a word, which would count as True."""
    if not isinstance(value, bool):
        raise SessionError(f"{name} is {value!r}; it must be True or False")


def require_callable(name: str, value: Any) -> None:
    """Refuse what cannot be called; None is fine."""
    if value is not None and not callable(value):
        raise SessionError(f"{name} is {value!r}; it must be a function, or None")


def require_writers(writers: Sequence[int], size: int) -> None:
    """Refuse ranks that cannot be the writers of a process group."""
    ranks = list(writers)
    if not ranks or len(set(ranks)) != len(ranks) or any(rank not in range(size) for rank in ranks):
        raise SessionError(
            f"writers are {ranks}; they must be distinct ranks from 0 to {size - 1}, and at least one of them"
        )


@dataclass(frozen=True)
class EncodingOptions:
    """How a publisher encodes patches."""

    profile: str
    link: Link | str | None
    threads: int | None
    progress: Progress | None

    def __post_init__(self) -> None:
        require_choice("profile", self.profile, ("auto", *PROFILES))
        if not (self.link is None or isinstance(self.link, Link)):
            Link.parse(self.link)
        require_threads(self.threads)
        require_callable("progress", self.progress)


@dataclass(frozen=True)
class BaselineOptions:
    """Where a publisher keeps the bits of the last version, and how much memory they may take."""

    kind: str
    memory: int | None

    def __post_init__(self) -> None:
        require_choice("baseline", self.kind, BASELINES)
        if self.memory is not None:
            require_count("memory", self.memory, 0)


@dataclass(frozen=True)
class CommitHooks:
    """What is called around each commit, how often all bits are audited, and what they are compared with."""

    before: Callable[[], None] | None
    after: Callable[[], None] | None
    audit_every: int | None
    validate: Any = None

    def __post_init__(self) -> None:
        require_callable("before", self.before)
        require_callable("after", self.after)
        if self.audit_every is not None:
            require_count("audit_every", self.audit_every)
