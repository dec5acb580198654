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
    """It is broken, and what it took is said below; the others fill the plot."""
    seconds = [171.0, *[10.0 + version % 3 for version in range(20)]]
    labels = [str(version) for version in range(21)]
    figure = drawn(plots.columns("Stages", labels, {"find": seconds}, "{:g}".format, cut_far=True))
    first, *others = heights(figure)
    assert first < 1.8 * min(others)
    assert min(others) > 0.35 * plots.HEIGHT
    assert len([line for line in figure.iter("line") if line.get("class") == "break"]) == 1
    assert "Higher than shown: 0 (171)." in "".join(figure.itertext())


def test_columns_that_differ_are_all_drawn() -> None:
    """Where many are high, none of them is an exception."""
    figure = drawn(plots.columns("Stages", list("abcd"), {"find": [1.0, 50.0, 60.0, 2.0]}, "{:g}".format, cut_far=True))
    assert not [line for line in figure.iter("line") if line.get("class") == "break"]
    a, b, c, d = heights(figure)
    assert b / c == pytest.approx(50 / 60, rel=0.05)
    assert a < d < b


def test_stacks_are_cut_off_at_the_same_height() -> None:
    stacks = {"find": [2.0] * 9, "encode": [500.0, *[3.0] * 8], "send": [100.0, *[1.0] * 8]}
    figure = drawn(plots.columns("Stages", [str(n) for n in range(9)], stacks, "{:g}".format, cut_far=True))
    tops = sorted({float(rect.get("y", "0")) for rect in figure.iter("rect")})
    assert tops[0] >= plots.TOP
    assert len(heights(figure)) == 3 * 9 - 1  # what lies beyond the axis is not drawn


@pytest.mark.parametrize(
    ("values", "from_zero", "lowest", "highest"),
    [
        ([0.70, 0.75, 0.79], False, 0.7, 0.8),  # close together
        ([0.26, 0.38], True, 0.0, 0.4),
        ([0.35], True, 0.0, 0.4),
        ([1.0, 4.0, 9.0], False, 0.0, 10.0),
        ([-1.0, 2.0], False, -1.0, 2.0),
        ([0.0, 0.0], True, 0.0, 1.0),
        ([3.0, 300.0], True, 2.0, 500.0),  # far apart: logarithmic, between round numbers
        ([0.011, 9e7], True, 0.01, 1e8),
    ],
)
def test_axes_fit_the_data(values: list[float], from_zero: bool, lowest: float, highest: float) -> None:
    series = {"a": dict(enumerate(values))}
    numbers = ticks(drawn(plots.lines("Curve", series, "{:g}".format, from_zero=from_zero)))
    assert min(numbers) == pytest.approx(lowest)
    assert lowest <= max(numbers) <= highest * (1 + 1e-9)
    assert 2 <= len(numbers) <= 8


def test_a_dominant_class_is_the_highest() -> None:
    """Shares of one whole are drawn in proportion: the small ones are small, and nothing is cut off."""
    shares = [0.0032, 0.0032, 0.0030, 0.0029, 0.9877]
    figure = drawn(plots.columns("Sizes", ["-1", "+1", "-2", "+2", "more"], {"all": shares}, plots.share))
    high = heights(figure)
    assert high[-1] > 0.9 * (plots.HEIGHT - plots.TOP - plots.BOTTOM)
    for height, value in zip(high, shares, strict=True):
        assert height == pytest.approx(max(0.5, high[-1] * value / shares[-1]), abs=0.1)
    assert not [line for line in figure.iter("line") if line.get("class") == "break"]


def test_columns_stand_on_zero() -> None:
    """Close values are told apart by little: half as much is half as high, even where the axis may be logarithmic."""
    figure = drawn(plots.columns("Chance", list("abc"), {"chance": [0.2, 0.3, 0.4]}, "{:g}".format, log=True))
    low, middle, high = heights(figure)
    assert (low, middle) == (pytest.approx(high / 2, rel=0.01), pytest.approx(high * 0.75, rel=0.01))
    far = drawn(plots.columns("Chance", list("abc"), {"chance": [0.0, 1e-5, 0.4]}, "{:g}".format, log=True))
    assert "The axis is logarithmic." in "".join(far.itertext())
    assert len(heights(far)) == 2


def test_no_peak_is_left_out() -> None:
    """Of thousands of versions a fraction is drawn, with the ends, every peak and every dip."""
    values = dict.fromkeys(range(1, 5001), 0.01) | {997: 0.3, 2500: 0.0, 4990: 0.2}
    figure = drawn(plots.lines("Pause", {"pause": values}, "{:g}".format))
    hover = {text.text for text in figure.iter("title")}
    assert {f"pause, version {v}: {values[v]:g}" for v in (1, 997, 2500, 4990, 5000)} <= hover
    assert len(hover) <= 2 * plots.STRETCHES + 2


def test_text_stays_in_the_picture() -> None:
    """Long names, long labels and many rows: no text begins or ends outside, at seven units a character."""
    names = ["w", "encoder.a_very_long_name_of_a_module.weight", *(f"{n}.weight" for n in range(30))]
    cells = {(name, "other"): (0.01, name) for name in names}
    versions = [str(10**6 + n) for n in range(40)]
    figures = [
        plots.heat("Density", ["other"], names, cells, plots.share),
        plots.heat("Density", ["other"], names, cells | {("w", "other"): (0.2, "w")}, plots.share),
        plots.columns("Stages", versions, {"find": [100.0, *[1.0] * 38, 100.0]}, "{:.2f} s".format, cut_far=True),
        plots.lines("Number", {"n": {10**6: -123456.0, 2 * 10**6: 123456.0}}, "{:.3g}".format),
        plots.lines("Bytes", {"n": {1: 1.0}}, "{:.2f} kB".format),
    ]
    for figure in map(drawn, figures):
        for text in figure.iter("text"):
            wide = 7.0 * len(text.text or "")
            begin = float(text.get("x", "nan")) - {"end": wide, "middle": wide / 2}.get(text.get("text-anchor", ""), 0)
            assert (begin >= 0, begin + wide <= plots.WIDTH) == (True, True), text.text
