"""Plots as SVG files of their own: curves over a linear or logarithmic axis, readable on light and dark pages."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 640, 340, 64, 168, 44, 48
COLOURS = (
    ("#0b6bcb", "#6cb6ff"),
    ("#c2410c", "#ff9d5c"),
    ("#16803c", "#4cc47a"),
    ("#8b2fc9", "#cf9bff"),
    ("#a16207", "#e3b341"),
    ("#0e7490", "#4fd1e0"),
    ("#57606a", "#9aa4b2"),
)
STYLE = (
    ".page{fill:#fff}text{fill:#424a57;font:12px system-ui,sans-serif}"
    ".title{font-weight:600;font-size:14px;fill:#1c2330}"
    ".grid{stroke:#d8dde6}polyline{fill:none;stroke-width:2}.dashed{stroke-dasharray:5 4}"
    + "".join(f".s{n}{{stroke:{light}}}.f{n}{{fill:{light}}}" for n, (light, _) in enumerate(COLOURS))
    + "@media(prefers-color-scheme:dark){.page{fill:#14181f}text{fill:#aab3c0}.title{fill:#e6e9ef}.grid{stroke:#353c49}"
    + "".join(f".s{n}{{stroke:{dark}}}.f{n}{{fill:{dark}}}" for n, (_, dark) in enumerate(COLOURS))
    + "}"
)


@dataclass(frozen=True)
class Axis:
    """One of the two axes: what it is called, how its numbers are written, and where it has marks."""

    name: str
    shown: Callable[[float], str]
    log: bool = False
    marks: tuple[float, ...] = ()  # by default powers of ten, or five from zero on

    def place(self, values: list[float]) -> tuple[Callable[[float], float], list[float]]:
        """From values to 0 … 1, and the marks."""
        values = [*values, *self.marks]
        if self.log:
            low, high = math.log10(min(values)), math.log10(max(values))
            low, high = (low, high) if self.marks else (math.floor(low + 1e-9), math.ceil(high - 1e-9))
            span = (high - low) or 1.0
            marks = list(self.marks) or [10.0**n for n in range(round(low), round(high) + 1)]
            return lambda value: (math.log10(value) - low) / span, marks
        low, high = (min(values), max(values)) if self.marks else (min(0.0, *values), max(values))
        span = (high - low) or 1.0
        return lambda value: (value - low) / span, list(self.marks) or [low + span * n / 4 for n in range(5)]


def plot(
    title: str,
    curves: Mapping[str, Mapping[float, float]],
    across: Axis,
    up: Axis,
    beside: Mapping[str, Mapping[float, float]] | None = None,
) -> str:
    """An SVG file. `beside`: what others have published, dashed; a single point is a dot."""
    every = {**curves, **(beside or {})}
    to_x, x_marks = across.place([x for values in every.values() for x in values])
    to_y, y_marks = up.place([y for values in every.values() for y in values.values()])

    def x(value: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * to_x(value)

    def y(value: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (1 - to_y(value))

    parts = [f'<rect class="page" width="{WIDTH}" height="{HEIGHT}" rx="8"/>']
    parts.append(f'<text class="title" x="{LEFT}" y="24">{escape(title)}</text>')
    for mark in y_marks:
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(mark):.1f}" y2="{y(mark):.1f}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y(mark) + 4:.1f}" text-anchor="end">{escape(up.shown(mark))}</text>')
    for mark in x_marks:
        label = f'x="{x(mark):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle"'
        parts.append(f"<text {label}>{escape(across.shown(mark))}</text>")
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text x="{middle:.1f}" y="{HEIGHT - 10}" text-anchor="middle">{escape(across.name)}</text>')
    for n, (name, values) in enumerate(every.items()):
        colour, dashed = n % len(COLOURS), " dashed" if name not in curves else ""
        line = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in values.items())
        parts.append(f'<polyline class="s{colour}{dashed}" points="{line}"/>')
        for a, b in values.items() if len(values) <= 12 else ():
            note = escape(f"{name}, {across.name} {across.shown(a)}: {up.shown(b)}")
            parts.append(
                f'<circle class="f{colour}" cx="{x(a):.1f}" cy="{y(b):.1f}" r="3"><title>{note}</title></circle>'
            )
        at = TOP + 6 + 20 * n
        key = f'x1="{WIDTH - RIGHT + 14}" x2="{WIDTH - RIGHT + 34}" y1="{at}" y2="{at}" stroke-width="2"'
        parts.append(f'<line class="s{colour}{dashed}" {key}/>')
        parts.append(f'<text x="{WIDTH - RIGHT + 40}" y="{at + 4}">{escape(name)}</text>')
    size = f'viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" role="img"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} aria-label="{escape(title)}">'
        f"<style>{STYLE}</style>\n" + "\n".join(parts) + "\n</svg>\n"
    )
