"""How many examples Hypothesis tries: by day half as many as at night."""

from __future__ import annotations

from hypothesis import settings

AT_NIGHT = 40  # of a test that does not ask for a number
BY_DAY = AT_NIGHT // 2


def examples(at_night: int) -> int:
    """The number for a test that tries so many at night."""
    return max(1, at_night * settings.default.max_examples // AT_NIGHT)
