"""What a run shows: a live table on a terminal, plain lines anywhere else, JSON lines where that is asked for."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.panel import Panel
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from .trainer import Sync

COLUMNS = (  # heading, width
    ("version", 7),
    ("reward", 6),
    ("staleness", 9),
    ("density", 7),
    ("patch bytes", 11),
    ("dense bytes", 11),
    ("ratio", 6),
    ("pause ms", 8),
    ("verified", 8),
)
_STYLES = {"reward": "bold", "density": "cyan", "dense bytes": "dim", "ratio": "bold cyan"}
_BARS = "▁▂▃▄▅▆▇█"
_AROUND = 12  # lines of the live view that are not rows


def cells(sync: Sync) -> tuple[str, ...]:
    """A sync as text, in the order of COLUMNS."""
    seen = len({landed.worker for landed in sync.landed})
    return (
        str(sync.version),
        f"{sync.reward:.3f}" if sync.version else "",
        str(sync.staleness) if sync.version else "",
        f"{sync.density:.2%}",
        f"{sync.bytes:,}",
        f"{sync.dense_bytes:,}",
        f"{sync.ratio:.1f}×",
        f"{1000 * sync.pause:.2f}" if sync.landed else "",
        f"{seen} ✓" if sync.verified else "✗" if sync.digest and seen else "…" if sync.digest else "",
    )


class Lines:
    """For pipes and files: one line per version, when all workers have it or the next but three is published."""

    def __init__(self, workers: int) -> None:
        self._workers, self._shown, self._syncs = max(1, workers), 0, list[Sync]()

    def say(self, text: str) -> None:
        print(text, flush=True)

    def doing(self, text: str) -> None:
        """Nothing: a file need not know what goes on."""

    def add(self, sync: Sync) -> None:
        """Print the rows that are complete."""
        if not self._syncs:
            self.say("  ".join(heading.rjust(width) for heading, width in COLUMNS))
        self._syncs.append(sync)
        while self._shown < len(self._syncs) - 4 or (
            self._shown < len(self._syncs) and len(self._syncs[self._shown].landed) >= self._workers
        ):
            self._print()

    def summary(self, lines: Sequence[str], good: bool) -> None:  # noqa: ARG002  # the first line says it
        """Print what is left, and the lines."""
        while self._shown < len(self._syncs):
            self._print()
        for line in lines:
            self.say(line)

    def close(self) -> None:
        """Nothing is open."""

    def _print(self) -> None:
        row = cells(self._syncs[self._shown])
        self.say("  ".join(cell.rjust(width) for cell, (_, width) in zip(row, COLUMNS, strict=True)))
        self._shown += 1


class Json(Lines):
    """For programs: an object per version, and one at the end."""

    def say(self, text: str) -> None:
        """Nothing that is not JSON."""

    def summary(self, lines: Sequence[str], good: bool) -> None:
        super().summary((), good)
        print(json.dumps({"good": good, "summary": list(lines)}), flush=True)

    def _print(self) -> None:
        sync = self._syncs[self._shown]
        more: dict[str, Any] = {"density": sync.density, "ratio": sync.ratio, "verified": sync.verified}
        print(json.dumps(asdict(sync) | more), flush=True)
        self._shown += 1


class LiveTable:
    """For terminals: the reward as a line of bars, and the last rows of a table that grows."""

    def __init__(self) -> None:
        self._console = Console(highlight=False)
        self._syncs: list[Sync] = []
        self._spinner = Spinner("dots", style="cyan")
        self._running = True
        self._live = Live(get_renderable=self._picture, console=self._console, refresh_per_second=8)
        self._live.start()

    def say(self, text: str) -> None:
        """Print it above the table."""
        self._console.print(Text(text, style="dim"))

    def doing(self, text: str) -> None:
        """Show it beside the spinner."""
        self._spinner.update(text=Text(text))

    def add(self, sync: Sync) -> None:
        """Let the table grow by a row."""
        self._syncs.append(sync)

    def summary(self, lines: Sequence[str], good: bool) -> None:
        """Put the lines into a frame below the table."""
        self.close()
        text = Text("\n").join(Text(line, style="" if n else "bold") for n, line in enumerate(lines))
        self._console.print(Panel(text, border_style="green" if good else "red", expand=False, padding=(0, 2)))

    def close(self) -> None:
        """Draw the table a last time and give the terminal back."""
        if self._running:
            self._running = False
            self._live.stop()

    def _picture(self) -> RenderableType:
        room = max(1, self._console.height - _AROUND)
        parts: list[RenderableType] = []
        if len(self._syncs) > 1:
            rewards = [sync.reward for sync in self._syncs[1:]]
            bars = "".join(_BARS[min(7, int(8 * r))] for r in _fitted(rewards, self._console.width - 24))
            parts = [Text.assemble(" reward ", (bars, "green"), f" {rewards[-1]:.3f}"), _table(self._syncs[-room:])]
        if self._running:
            parts.append(Padding(self._spinner, (0, 1)))
        return Group(*parts)


def _fitted(values: Sequence[float], width: int) -> list[float]:
    """As many means of neighbours as there is room for."""
    step = -(-len(values) // max(1, width))
    cut = [values[i : i + step] for i in range(0, len(values), step)]
    return [sum(part) / len(part) for part in cut]


def _table(syncs: Sequence[Sync]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), show_edge=False)
    for heading, _ in COLUMNS:
        table.add_column(heading.replace(" ", "\n"), justify="right", style=_STYLES.get(heading, ""), no_wrap=True)
    for sync in syncs:
        *others, seen = cells(sync)
        style = "bold green" if sync.verified else "bold red" if sync.landed else "dim"
        table.add_row(*others, Text(seen, style))
    return table


def view(workers: int, as_json: bool) -> Lines | LiveTable:
    """The view that was asked for, or suits stdout."""
    if as_json:
        return Json(workers)
    if sys.stdout.isatty() and not Console().is_dumb_terminal:
        return LiveTable()
    return Lines(workers)
