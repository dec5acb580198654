"""What tests leave to the night: half of Hypothesis's examples, and alternatives that say nearly the same."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest
from hypothesis import settings

Names = str | tuple[str, ...]

AT_NIGHT = 40  # of a test that does not ask for a number
BY_DAY = AT_NIGHT // 2


def examples(at_night: int) -> int:
    """The number for a test that tries so many at night."""
    return max(1, at_night * settings.default.max_examples // AT_NIGHT)


def each(
    names: Names, values: Iterable[Any], *, long: Collection[Any] = (), by_day: Collection[Any] | None = None
) -> Any:
    """Parametrize a test with values; those in `long`, or all that are not `by_day`, are left to `make long`."""
    values = [*values]
    assert all(value in values for value in [*long, *(by_day or ())])  # else a slip would leave a test to the night

    def parameters(value: Any) -> Any:
        is_long = value in long if by_day is None else value not in by_day
        fields = (value,) if isinstance(names, str) else value
        return pytest.param(*fields, marks=[pytest.mark.long] if is_long else [])

    return pytest.mark.parametrize(names, [parameters(value) for value in values])
