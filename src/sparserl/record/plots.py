"""Plots as inline SVG: lines, columns, rows and a heat map. Everything that is drawn can be pointed at.

They are 400 units wide, which is about a phone: text stays readable there, and two stand side by side on a desk.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape

WIDTH = 400
HEIGHT = 210
LEFT = 62
RIGHT = 8
TOP = 10
BOTTOM = 36
STRETCHES = 75  # of a longer series, the lowest and the highest point of so many stretches are drawn
_MOST_TICKS = 7  # of a logarithmic axis
_FAR = 5.0  # a column so many times as high as the middle one may be cut off
_CLOSE = 1.5  # curves whose highest value is at most so many times the lowest need no zero
_CHARACTER = 7.0  # the width of one, at most
_LONGEST = 24  # characters of a row's name
_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
Shown = Callable[[float], str]


def share(value: float) -> str:
    """A share as a percentage, with as many digits as it needs."""
    return f"{value:.0%}" if value in (0.0, 1.0) else f"{100 * value:.3g}%"


def power_of_two(exponent: int) -> str:
    """A power of two, as the label of a column."""
    return "2" + str(exponent).translate(_RAISED)


def figure(title: str, drawn: str, height: float, legend: Sequence[str] = (), note: str = "") -> str:
    """A titled picture with its legend."""
    keys = "".join(f'<span class="key"><i class="c{n % 8}"></i>{escape(name)}</span>' for n, name in enumerate(legend))
    below = f"<figcaption>{keys}{f' <span>{escape(note)}</span>' if note else ''}</figcaption>" if keys or note else ""
    box = f'viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{escape(title)}"'
    return f"<figure><h3>{escape(title)}</h3><svg {box}>{drawn}</svg>{below}</figure>"


def lines(
    title: str,
    series: Mapping[str, Mapping[int, float]],
    shown: Shown,
    *,
    beside: Sequence[Mapping[int, float]] = (),
    from_zero: bool = True,
    note: str = "",
) -> str:
    """Curves over versions; on a logarithmic axis where they spread over more than a factor of twenty.

    beside: what each of them is held against, dashed.
    from_zero: whether a linear axis begins at zero even where all values are close together.
    """
    curves = {name: _thinned(values) for name, values in series.items()}
    others = [_thinned(values) for values in beside]
    every = [*curves.values(), *others]
    axis = _Axis([value for values in every for value in values.values()], from_zero=from_zero)
    first = min(min(values) for values in every)
    last = max(max(values) for values in every)

    def x(version: int) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * ((version - first) / (last - first) if last > first else 0.5)

    parts = [axis.grid(shown), *_ticks_below(sorted({first, (first + last) // 2, last}), x, "version")]
    for kind, some in (("line", curves.values()), ("line dashed", others)):
        for n, values in enumerate(some):
            path = " ".join(f"{x(v):.1f},{axis.y(value):.1f}" for v, value in values.items())
            parts.append(f'<polyline class="{kind} s{n % 8}" points="{path}"/>')
    for n, (name, values) in enumerate(curves.items()):
        for version, value in values.items():
            hover = escape(f"{name}, version {version}: {shown(value)}")
            at = f'cx="{x(version):.1f}" cy="{axis.y(value):.1f}"'
            parts.append(f'<circle class="c{n % 8}" {at} r="2.4"><title>{hover}</title></circle>')
    return figure(title, "".join(parts), HEIGHT, list(series) if len(series) > 1 else (), axis.noted(note))


def columns(
    title: str,
    labels: Sequence[str],
    stacks: Mapping[str, Sequence[float]],
    shown: Shown,
    *,
    hover: Sequence[str] | None = None,
    log: bool = False,
    cut_far: bool = False,
    below: str = "",
    note: str = "",
) -> str:
    """Columns side by side, from zero up, stacked where there are several series.

    log: whether the axis of a single series may be logarithmic, if it spreads over more than a factor of twenty.
    cut_far: whether the axis is for the others where few columns are far above them. Those few are broken, and named
        below the plot. Only for columns that are not shares of one whole.
    """
    totals = [sum(column) for column in zip(*stacks.values(), strict=True)]
    cap = _cap(totals) if cut_far else math.inf
    axis = _Axis([min(total, cap) for total in totals if total > 0] or [0.0], log=log)
    step = (WIDTH - LEFT - RIGHT) / len(labels)
    parts = [axis.grid(shown)]
    cut = []
    for i, label in enumerate(labels):
        reached = 0.0
        for n, (name, values) in enumerate(stacks.items()):
            if values[i] <= 0 or reached >= cap:
                continue
            foot = axis.y(min(reached, cap))
            reached += values[i]
            top = axis.y(min(reached, cap))
            text = hover[i] if hover is not None else f"{label}, {name}: {shown(values[i])}"
            box = f'x="{LEFT + i * step + step * 0.1:.1f}" width="{step * 0.8:.1f}" y="{top:.1f}"'
            parts.append(
                f'<rect class="c{n % 8}" {box} height="{max(0.5, foot - top):.1f}"><title>{escape(text)}</title></rect>'
            )
        if totals[i] > cap:
            cut.append(f"{label} ({shown(totals[i])})")
            ends = f'x1="{LEFT + i * step:.1f}" x2="{LEFT + (i + 1) * step:.1f}"'
            parts.append(f'<line class="break" {ends} y1="{axis.y(cap) + 14:.1f}" y2="{axis.y(cap) + 8:.1f}"/>')
    if cut:
        note = f"{note} Higher than shown: {', '.join(cut)}.".strip()
    every = max(1, math.ceil(len(labels) * 44 / (WIDTH - LEFT - RIGHT)))
    parts += _ticks_below(range(0, len(labels), every), lambda i: LEFT + (i + 0.5) * step, below, labels.__getitem__)
    return figure(title, "".join(parts), HEIGHT, list(stacks) if len(stacks) > 1 else (), axis.noted(note))


def rows(title: str, stacks: Mapping[str, Mapping[str, float]], shown: Shown, note: str = "") -> str:
    """Horizontal bars, stacked: row → part → value, with the sum behind each."""
    names = list(next(iter(stacks.values())))
    most = max(sum(parts.values()) for parts in stacks.values()) or 1.0
    reach = WIDTH - LEFT - 64
    high = 26
    drawn = []
    for r, (row, parts) in enumerate(stacks.items()):
        y = TOP + r * high
        at = float(LEFT)
        drawn.append(f'<text x="{LEFT - 6}" y="{y + 14}" text-anchor="end">{escape(row)}</text>')
        for n, name in enumerate(names):
            wide = reach * parts[name] / most
            text = escape(f"{row}, {name}: {shown(parts[name])}")
            box = f'x="{at:.2f}" y="{y}" width="{wide:.2f}" height="{high - 8}"'
            drawn.append(f'<rect class="c{n % 8}" {box}><title>{text}</title></rect>')
            at += wide
        drawn.append(f'<text x="{at + 5:.1f}" y="{y + 14}">{escape(shown(sum(parts.values())))}</text>')
    return figure(title, "".join(drawn), TOP + high * len(stacks), names, note)


def heat(
    title: str,
    across: Sequence[str],
    down: Sequence[str],
    cells: Mapping[tuple[str, str], tuple[float, str]],
    shown: Shown,
    note: str = "",
) -> str:
    """A map of (row, column) → value and hover text. Colour follows the logarithm; a zero is an empty frame."""
    live = [value for value, _ in cells.values() if value > 0]
    low, high = (min(live), max(live)) if live else (1.0, 1.0)
    span = math.log(high / low) or 1.0
    names = {row: _short(row) for row in down}
    left = max(34.0, 10 + _CHARACTER * max(map(len, names.values()), default=0))
    tall = 13 if len(down) > 16 else 18
    wide = (WIDTH - left - RIGHT) / max(1, len(across))
    small = min(11.0, wide / (0.62 * max(map(len, across), default=1)))
    drawn = [
        f'<text x="{left + (i + 0.5) * wide:.1f}" y="11" text-anchor="middle" style="font-size:{small:.1f}px">'
        f"{escape(name)}</text>"
        for i, name in enumerate(across)
    ]
    for r, row in enumerate(down):
        y = 18 + r * tall
        if len(down) <= 20 or r % 5 == 0 or r == len(down) - 1:
            drawn.append(f'<text x="{left - 5:g}" y="{y + tall - 4}" text-anchor="end">{escape(names[row])}</text>')
        for i, column in enumerate(across):
            if (cell := cells.get((row, column))) is None:
                continue
            value, text = cell
            box = f'x="{left + i * wide + 0.75:.2f}" y="{y}" width="{wide - 1.5:.2f}" height="{tall - 1.5}"'
            look = f'class="heat" fill-opacity="{_shade(value, low, span):.3f}"' if value > 0 else 'class="none"'
            drawn.append(f"<rect {look} {box}><title>{escape(text)}</title></rect>")
    foot = 18 + len(down) * tall + 8
    for n in range(40 if high > low else 0):
        shade = _shade(low * math.exp(span * n / 39), low, span)
        drawn.append(
            f'<rect class="heat" fill-opacity="{shade:.3f}" x="{104 + 3 * n}" y="{foot}" width="3" height="9"/>'
        )
    ends = ((98, "end", low), (230, "start", high)) if high > low else ((left, "start", low),)
    for x, side, value in ends if live else ():
        drawn.append(f'<text x="{x:g}" y="{foot + 9}" text-anchor="{side}">{escape(shown(value))}</text>')
    return figure(title, "".join(drawn), foot + 16, note=note)


def _cap(totals: Sequence[float]) -> float:
    """Where an axis ends that is made for most columns, if a few are many times as high."""
    usual = _FAR * sorted(totals)[len(totals) // 2]
    others = [total for total in totals if total <= usual]
    is_few = usual > 0 and 0 < len(totals) - len(others) <= len(totals) // 4
    return 1.2 * max(others) if is_few else math.inf


class _Axis:
    """The vertical axis of some values: linear, or logarithmic where they spread too far.

    log: whether it may be logarithmic.
    from_zero: whether a linear axis begins at zero even where all values are close together.
    """

    def __init__(self, values: Sequence[float], *, log: bool = True, from_zero: bool = True) -> None:
        live = [value for value in values if value > 0]
        self._log = log and len(live) == len(values) and max(live) > 20 * min(live)
        if self._log:
            self._make_logarithmic(min(live), max(live))
            return
        low = min(values)
        high = max(values)
        if from_zero or low <= 0 or high <= 0 or high > _CLOSE * low:
            low = min(0.0, low)
            high = max(0.0, high)
        step = _nice((high - low) or abs(high) or 1.0)
        self._low = math.floor(low / step) * step
        self._high = math.ceil(high / step - 1e-9) * step
        if self._high <= self._low:
            self._high = self._low + step
        self.ticks = [self._low + step * n for n in range(round((self._high - self._low) / step) + 1)]

    def _make_logarithmic(self, low: float, high: float) -> None:
        """From the round number at or below the lowest value to that at or above the highest."""
        powers = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 2)
        few = [10.0**power for power in powers]
        many = [number * 10.0**power for power in powers for number in (1, 2, 5)]
        rounds = many if high < 1000 * low else few
        first = max(number for number in many if number <= low * (1 + 1e-9))
        last = min(number for number in many if number >= high * (1 - 1e-9) and number > first)
        ticks = [number for number in rounds if first * (1 - 1e-9) <= number <= last * (1 + 1e-9)]
        self.ticks = ticks[:: max(1, math.ceil(len(ticks) / _MOST_TICKS))]
        self._low = math.log10(first)
        self._high = math.log10(last)

    def y(self, value: float) -> float:
        if self._log:
            value = max(self._low, math.log10(value)) if value > 0 else self._low
        return TOP + (HEIGHT - TOP - BOTTOM) * (1 - (value - self._low) / (self._high - self._low))

    def noted(self, note: str) -> str:
        return f"{note} The axis is logarithmic.".strip() if self._log else note

    def grid(self, shown: Shown) -> str:
        parts = []
        for tick in self.ticks:
            y = self.y(tick)
            parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(f'<text x="{LEFT - 5}" y="{y + 4:.1f}" text-anchor="end">{escape(shown(tick))}</text>')
        return "".join(parts)


def _nice(span: float) -> float:
    """A step of 1, 2 or 5 times a power of ten, of which four or so make the span."""
    power = 10.0 ** math.floor(math.log10(span / 4))
    return next(power * n for n in (1, 2, 5, 10) if span / (power * n) <= 5)


def _short(name: str) -> str:
    """The end of a long name."""
    return name if len(name) <= _LONGEST else f"…{name[1 - _LONGEST :]}"


def _shade(value: float, low: float, span: float) -> float:
    return 0.1 + 0.9 * math.log(value / low) / span if span and value > low else 0.1


def _thinned(values: Mapping[int, float]) -> dict[int, float]:
    """Of a long series, the ends and of each stretch the lowest and the highest: no peak is left out."""
    versions = sorted(values)
    wide = math.ceil(len(versions) / STRETCHES)
    kept = {versions[0], versions[-1]}
    for start in range(0, len(versions), wide):
        stretch = versions[start : start + wide]
        kept |= {min(stretch, key=values.__getitem__), max(stretch, key=values.__getitem__)}
    return {version: values[version] for version in sorted(kept)}


def _ticks_below(
    at: Sequence[int], x: Callable[[int], float], name: str, label: Callable[[int], str] = str
) -> list[str]:
    ends = {i: "end" if x(i) > WIDTH - 24 else "middle" for i in at}
    places = [(x(i), HEIGHT - BOTTOM + 16, ends[i], label(i)) for i in at]
    places.append(((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 5, "middle", name))
    return [f'<text x="{x:.1f}" y="{y}" text-anchor="{end}">{escape(text)}</text>' for x, y, end, text in places]
