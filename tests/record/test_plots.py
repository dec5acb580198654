"""Axes fit what is drawn: an anchor does not flatten the syncs after it, and close values are told apart."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest

from sparserl.record import plots


def drawn(text: str) -> ET.Element:
    return ET.fromstring(text)


def heights(figure: ET.Element) -> list[float]:
    """The heights of all columns."""
    return [float(rect.get("height", "0")) for rect in figure.iter("rect")]


def ticks(figure: ET.Element) -> list[float]:
    """The numbers beside the vertical axis."""
    return [float(text.text or "") for text in figure.iter("text") if text.get("x") == str(plots.LEFT - 5)]


def test_an_anchor_does_not_flatten_the_stages() -> None:
    """It is cut off, and labelled with what it took; the others fill the plot."""
    seconds = [171.0, *[10.0 + version % 3 for version in range(20)]]
    labels = [str(version) for version in range(21)]
    figure = drawn(plots.columns("Stages", labels, {"find": seconds}, "{:g}".format))
    first, *others = heights(figure)
    assert first < 1.8 * min(others)
    assert min(others) > 0.35 * plots.HEIGHT
    assert [text.text for text in figure.iter("text") if text.get("class") == "cut"] == ["0: 171"]


def test_columns_that_differ_are_all_drawn() -> None:
    """Where many are high, none of them is an exception."""
    figure = drawn(plots.columns("Stages", list("abcd"), {"find": [1.0, 50.0, 60.0, 2.0]}, "{:g}".format))
    assert not [text for text in figure.iter("text") if text.get("class") == "cut"]
    a, b, c, d = heights(figure)
    assert b / c == pytest.approx(50 / 60, rel=0.05)
    assert a < d < b


def test_stacks_are_cut_off_at_the_same_height() -> None:
    stacks = {"find": [2.0] * 9, "encode": [500.0, *[3.0] * 8], "send": [100.0, *[1.0] * 8]}
    figure = drawn(plots.columns("Stages", [str(n) for n in range(9)], stacks, "{:g}".format))
    tops = sorted({float(rect.get("y", "0")) for rect in figure.iter("rect")})
    assert tops[0] >= plots.TOP
    assert len(heights(figure)) == 3 * 9 - 1  # what lies beyond the axis is not drawn


@pytest.mark.parametrize(
    ("values", "lowest", "highest"),
    [
        ([0.70, 0.75, 0.79], 0.7, 0.8),  # close together: no zero
        ([1.0, 4.0, 9.0], 0.0, 10.0),
        ([-1.0, 2.0], -1.0, 2.0),
        ([0.0, 0.0], 0.0, 1.0),
        ([3.0, 300.0], 2.0, 500.0),  # far apart: logarithmic, between round numbers
        ([0.011, 9e7], 0.01, 1e8),
    ],
)
def test_axes_fit_the_data(values: list[float], lowest: float, highest: float) -> None:
    series = {"a": dict(enumerate(values))}
    numbers = ticks(drawn(plots.lines("Curve", series, "{:g}".format)))
    assert min(numbers) == pytest.approx(lowest)
    assert lowest <= max(numbers) <= highest * (1 + 1e-9)
    assert 2 <= len(numbers) <= 8
