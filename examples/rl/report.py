"""A run as one HTML page: figures, plots as inline SVG, and a table. No script, nothing from elsewhere."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence
from pathlib import Path

from .options import Options
from .trainer import Sync
from .view import COLUMNS, cells

WIDTH, HEIGHT, LEFT, BOTTOM = 460, 200, 58, 26

STYLE = """
:root { color-scheme: light dark; --ink: #1c2330; --soft: #667085; --line: #d8dde6; --page: #fff; --mark: #0b6bcb;
  --good: #16803c; --bad: #c62828; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ef; --soft: #98a2b3; --line: #353c49; --page: #14181f;
  --mark: #6cb6ff; --good: #4cc47a; --bad: #ff7b72; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page); max-width: 980px;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: .2rem; } h2 { font-size: 1rem; margin: 0 0 .3rem; }
p { color: var(--soft); margin: .2rem 0 1rem; } ul { padding-left: 1.2rem; }
.good { color: var(--good); } .bad { color: var(--bad); }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(340px, 1fr)); gap: 1.4rem; margin: 1.5rem 0; }
svg { width: 100%; height: auto; } svg text { fill: var(--soft); font-size: 11px; }
.grid { stroke: var(--line); } .curve { fill: none; stroke: var(--mark); stroke-width: 2; }
.other { fill: none; stroke: var(--soft); stroke-width: 1.5; stroke-dasharray: 4 3; } .dot { fill: var(--mark); }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; width: 100%; }
td, th { text-align: right; padding: .15rem .6rem; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { color: var(--soft); font-weight: 600; }
"""


def plot(title: str, curves: Sequence[Sequence[float]], shown: Callable[[float], str], log: bool = False) -> str:
    """One plot over versions; the second curve is what the first is held against. Points can be pointed at."""
    scale: Callable[[float], float] = (lambda v: math.log10(max(v, 1.0))) if log else float
    values = [scale(v) for curve in curves for v in curve]
    low, high = (min(values), max(values)) if log else (min(0.0, *values), max(values))
    low, high = (math.floor(low), math.ceil(high)) if log else (low, high)
    high = high if high > low else low + 1
    count = max(2, *map(len, curves))

    def at(n: int, value: float) -> tuple[float, float]:
        x = LEFT + (WIDTH - LEFT - 8) * n / (count - 1)
        return x, 8 + (HEIGHT - BOTTOM - 8) * (1 - (scale(value) - low) / (high - low))

    parts = []
    ticks = range(int(low), int(high) + 1) if log else [low + (high - low) * n / 4 for n in range(5)]
    for tick in ticks:
        real = 10.0**tick if log else tick
        y = at(0, real)[1]
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - 8}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{html.escape(shown(real))}</text>')
    for n, curve in enumerate(curves):
        line = " ".join("{:.1f},{:.1f}".format(*at(i, v)) for i, v in enumerate(curve))
        parts.append(f'<polyline class="{"other" if n else "curve"}" points="{line}"/>')
    for i, value in enumerate(curves[0]):
        x, y = at(i, value)
        note = html.escape(f"version {i + 1}: {shown(value)}")
        parts.append(f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="2.2"><title>{note}</title></circle>')
    parts.append(f'<text x="{LEFT}" y="{HEIGHT - 6}">version 1</text>')
    parts.append(f'<text x="{WIDTH - 8}" y="{HEIGHT - 6}" text-anchor="end">{count}</text>')
    picture = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(title)}">{"".join(parts)}</svg>'
    return f"<figure style='margin:0'><h2>{html.escape(title)}</h2>{picture}</figure>"


def size(count: float) -> str:
    """Bytes, in short."""
    return f"{count / 1e6:g} MB" if count >= 1e6 else f"{count / 1e3:g} kB" if count >= 1e3 else f"{count:g} B"


def page(syncs: Sequence[Sync], options: Options, lines: Sequence[str], good: bool) -> str:
    """The whole page."""
    later = syncs[1:]
    plots = (
        plot("Reward", [[s.reward for s in later]], lambda v: f"{v:.2f}"),
        plot("Density: elements that changed", [[s.density for s in later]], lambda v: f"{v:.2%}"),
        plot(
            "Bytes of a sync; dashed: all weights",
            [[s.bytes for s in later], [s.dense_bytes for s in later]],
            size,
            True,
        ),
        plot("Staleness of the rollouts", [[s.staleness for s in later]], lambda v: f"{v:g}"),
        plot("Pause of a worker", [[1000 * s.pause for s in later]], lambda v: f"{v:.1f} ms"),
    )
    rows = "".join("<tr>" + "".join(f"<td>{html.escape(c)}</td>" for c in cells(s)) + "</tr>" for s in syncs)
    heads = "".join(f"<th>{heading}</th>" for heading, _ in COLUMNS)
    how = (
        f"{options.model}, {options.algorithm}, {options.dtype} rollouts, {'LoRA' if options.lora else 'all weights'}, "
        f"learning rate {options.lr:g}, {options.steps} step(s) a sync, staleness up to {options.staleness}, "
        f"{options.workers} worker(s), modes {', '.join(options.modes)}, seed {options.seed}"
    )
    first, *others = (html.escape(line) for line in lines)
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>sparserl: an RL run</title>'
        '<meta name="viewport" content="width=device-width">'
        f"<style>{STYLE}</style><h1 class='{'good' if good else 'bad'}'>{first}</h1><p>{html.escape(how)}</p>"
        f"<ul>{''.join(f'<li>{line}</li>' for line in others)}</ul><div class='plots'>{''.join(plots)}</div>"
        f"<div class='scroll'><table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div></html>\n"
    )


def write(path: Path, syncs: Sequence[Sync], options: Options, lines: Sequence[str], good: bool) -> None:
    """Write the page."""
    path.write_text(page(syncs, options, lines, good), encoding="utf-8")
