"""Sizes and durations as people read and write them."""

from __future__ import annotations

import pytest

from sparserl.humanize import age, duration, parse_duration, short_size, size


@pytest.mark.parametrize(
    ("shown", "value", "expected"),
    [
        (size, 0, "0 B"),
        (size, 999, "999 B"),
        (size, 1000, "1.00 kB"),
        (size, 123_456_789, "123.46 MB"),
        (size, 5e12, "5.00 TB"),
        (short_size, 12, "12 B"),
        (short_size, 125_000, "125 kB"),
        (short_size, 999_700, "1 MB"),
        (short_size, 1.5e9, "1.5 GB"),
        (duration, 0.0005, "0.5 ms"),
        (duration, 12.345, "12.35 s"),
        (duration, 1234, "1,234 s"),
        (age, -1, "0 s"),
        (age, 119, "119 s"),
        (age, 120, "2 m"),
        (age, 86_400, "24 h"),
        (age, 2 * 86_400, "2 d"),
    ],
)
def test_numbers_for_people(shown, value, expected) -> None:
    """In the unit that leaves few digits."""
    assert shown(value) == expected


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("150 us", 150e-6),
        ("150µs", 150e-6),
        ("20ms", 0.02),
        (" .5s ", 0.5),
        ("1e-3", 0.001),
        ("2", 2.0),
        ("10m", 600.0),
        ("1.5h", 5400.0),
        ("3.d", 259_200.0),
    ],
)
def test_durations(text, seconds) -> None:
    """With a unit, or a bare number of seconds; around them there may be spaces."""
    assert parse_duration(text) == pytest.approx(seconds, rel=1e-12)


@pytest.mark.parametrize("text", ["", "ms", "-1s", "1 week", "20 minutes", "nan", "inf", "1s 2ms", "1M"])
def test_what_is_no_duration(text) -> None:
    """The error repeats the text and shows how to write one."""
    with pytest.raises(ValueError, match="is not a duration; write it as 20ms") as caught:
        parse_duration(text)
    assert repr(text) in str(caught.value)
