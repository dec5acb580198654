"""Profiles that receivers can take: which of them patches are in, and why a patch is refused."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from .. import codec, plan
from ..patch.slicing import PROFILES as SLICEABLE


class Takers(NamedTuple):
    """Receivers that take the same profiles."""

    profiles: tuple[str, ...]
    has_holding: bool  # whether they say which parts of the weights they have
    name: str  # of one of them
    total: int = 1

    def taken(self, *, can_cut: bool) -> frozenset[str]:
        """What they take; of patches that are cut along the parts of a rank, it takes all that could else be sliced."""
        is_cut = can_cut and self.has_holding and SLICEABLE.issubset(self.profiles)
        return frozenset(codec.PROFILES if is_cut else self.profiles)

    def __str__(self) -> str:
        return self.name if self.total == 1 else f"{self.name} (and {self.total - 1} more)"


PARTS = Takers(tuple(sorted(SLICEABLE)), has_holding=True, name="a rank with parts of the weights")


class ProfileChoice(NamedTuple):
    """What patches are in."""

    profile: str  # or `auto`
    profiles: frozenset[str] | None  # those to choose among; None for all
    trouble: str = ""  # why it is not what was asked for, or not what all receivers can take


def common(limits: Iterable[Collection[str] | None]) -> frozenset[str] | None:
    """The profiles that are in all of several limits; None for all, as a limit and as an answer."""
    known = [frozenset(limit) for limit in limits if limit is not None]
    return frozenset.intersection(*known) if known else None


def choose_profiles(asked: str, receivers: Sequence[Takers], *, can_cut: bool) -> ProfileChoice:
    """What all receivers can take: the profile that was asked for, or else the others that there are.

    Where they have none in common, it is the one that most of them take; the others can take anchors, whose cost does
    not depend on what a lease says. So it is with receivers that take nothing which patches can be in.
    """
    every = {receiver: receiver.taken(can_cut=can_cut) for receiver in receivers}
    taken = {receiver: names for receiver, names in every.items() if plan.candidates("auto", names)}
    profiles = common(taken.values())
    if plan.candidates(asked, profiles):
        without = {str(receiver): names for receiver, names in every.items() if receiver not in taken}
        trouble = f"{_each(without)}: that is for anchors alone; {_COMMON}" if without else ""
        return ProfileChoice(asked, profiles, trouble)
    if names := plan.candidates("auto", profiles):
        refusing = {str(receiver): own for receiver, own in taken.items() if not plan.candidates(asked, own)}
        trouble = f"profile={asked!r} is set, but {_each(refusing)}: patches are in {in_words(names)}"
        return ProfileChoice("auto", profiles, f"{trouble}; set profile={names[0]!r}, or 'auto'")
    most = _most_taken(asked, taken)
    trouble = none_in_common({str(receiver): names for receiver, names in taken.items()})
    return ProfileChoice(
        most, None, f"{trouble}. Until then patches are in {most}, and the others can take anchors only"
    )


def _most_taken(asked: str, taken: Mapping[Takers, Collection[str]]) -> str:
    """The profile that most receivers take; of several, the one that was asked for, or that needs no old bits."""

    def rank(name: str) -> tuple[int, bool]:
        return sum(r.total for r, names in taken.items() if plan.candidates(name, names)), name == asked

    return max(reversed(plan.candidates("auto")), key=rank)


def refusal(what: str, used: Iterable[str], taken: Collection[str]) -> str:
    """Why a patch is refused, and the option of the publisher with which it would not be.

    >>> refusal("version 7", ["ctx"], ["raw", "gap", "ulp"])
    "version 7 is in profile ctx, but only gap, raw, ulp can be taken: publish with profile='ulp'"

    Args:
        what: What is refused.
        used: The profiles that it is in.
        taken: Those that can be taken.
    """
    names = plan.candidates("auto", taken)
    advice = f"publish with profile={names[0]!r}" if names else _COMMON
    return f"{what} is in profile {in_words(used)}, but only {in_words(taken)} can be taken: {advice}"


_COMMON = "give all receivers targets whose `profiles` have one in common, such as 'raw'"


def none_in_common(receivers: Mapping[str, Collection[str]]) -> str:
    """That some receivers, by their names, have no profile in common, and what to do.

    >>> none_in_common({"rank 1": ["raw"], "rank 2": ["ulp"]})  # doctest: +ELLIPSIS
    "the receivers have no profile in common: rank 1 takes only raw, rank 2 takes only ulp: give all receivers ..."
    """
    return f"the receivers have no profile in common: {_each(receivers)}: {_COMMON}"


def _each(receivers: Mapping[str, Collection[str]]) -> str:
    return ", ".join(f"{name} takes only {in_words(profiles)}" for name, profiles in receivers.items())


def in_words(profiles: Iterable[str]) -> str:
    """Some profiles, in words."""
    return ", ".join(sorted(profiles)) or "none"
