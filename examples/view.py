"""What the demo shows: a live table on a terminal, plain lines anywhere else."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.panel import Panel
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

import sparserl

COLUMNS = (  # heading, width
    ("version", 7),
    ("loss", 6),
    ("changed", 9),
    ("density", 7),
    ("profile", 7),
    ("patch bytes", 11),
    ("dense bytes", 11),
    ("ratio", 6),
    ("bits/change", 11),
    ("apply ms", 8),
    ("verified", 8),
)
_STYLES = {"density": "cyan", "dense bytes": "dim", "ratio": "bold cyan"}
_AIRY, _WIDE = 112, 90  # columns of a terminal that hold the table with air, and all of it
_AROUND = 9  # lines of the live view that are not rows


@dataclass(frozen=True)
class Row:
    """One version: what it cost, how long it took to land, and whether it landed bit for bit."""

    version: int
    loss: float
    stats: sparserl.Stats
    seconds: float
    verified: bool

    @property
    def cells(self) -> tuple[str, ...]:
        """The row as text, in the order of COLUMNS."""
        return (
            str(self.version),
            f"{self.loss:.4f}",
            f"{self.stats.changed:,}",
            f"{self.stats.density:.2%}",
            self.stats.profile,
            f"{self.stats.bytes:,}",
            f"{self.stats.dense_bytes:,}",
            f"{self.stats.ratio:.1f}×",
            f"{self.stats.bits_per_changed:.2f}",
            f"{1000 * self.seconds:.1f}",
            "✓" if self.verified else "✗",
        )


class View(Protocol):
    """Where the demo tells what it does."""

    def say(self, text: str) -> None:
        """A line that stays."""

    def doing(self, text: str) -> None:
        """What goes on right now."""

    def add(self, row: Row) -> None:
        """A version that has landed."""

    def summary(self, lines: Sequence[str]) -> None:
        """How it ended."""

    def close(self) -> None:
        """Leave the terminal as it was."""


class Lines:
    """For pipes and files: one line per version, as it happens."""

    def __init__(self) -> None:
        self._headed = False

    def say(self, text: str) -> None:
        """Print it."""
        print(text, flush=True)

    def doing(self, text: str) -> None:
        """Nothing: a file need not know what goes on."""

    def add(self, row: Row) -> None:
        """Print the row, below the headings if it is the first."""
        if not self._headed:
            self._headed = True
            self.say("  ".join(heading.rjust(width) for heading, width in COLUMNS))
        self.say("  ".join(cell.rjust(width) for cell, (_, width) in zip(row.cells, COLUMNS, strict=True)))

    def summary(self, lines: Sequence[str]) -> None:
        """Print the lines."""
        for line in lines:
            self.say(line)

    def close(self) -> None:
        """Nothing is open."""


class LiveTable:
    """For terminals: a table that grows; while it does, only as many rows as fit."""

    def __init__(self) -> None:
        self._console = Console(highlight=False)
        self._rows: list[Row] = []
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

    def add(self, row: Row) -> None:
        """Let the table grow by a row."""
        self._rows.append(row)

    def summary(self, lines: Sequence[str]) -> None:
        """Put the lines into a frame below the finished table."""
        self.close()
        good = all(row.verified for row in self._rows)
        text = Text("\n").join(Text(line, style="" if n else "bold") for n, line in enumerate(lines))
        self._console.print(Panel(text, border_style="green" if good else "red", expand=False, padding=(0, 2)))

    def close(self) -> None:
        """Draw the whole table a last time and give the terminal back."""
        if self._running:
            self._running = False
            self._live.stop()

    def _picture(self) -> RenderableType:
        room = max(1, self._console.height - _AROUND) if self._running else len(self._rows)
        parts: list[RenderableType] = [_table(self._rows[-room:], self._console.width)] if self._rows else []
        if self._running:
            parts.append(Padding(self._spinner, (0, 1)))
        return Group(*parts)


def _table(rows: Sequence[Row], width: int) -> Table:
    """The rows as a table: with less air, then without the bytes that are the same in each, where room is scarce."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1 if width >= _AIRY else 0), show_edge=False)
    shown = [n for n, (heading, _) in enumerate(COLUMNS) if width >= _WIDE or heading != "dense bytes"]
    for n in shown:
        heading = COLUMNS[n][0]
        table.add_column(
            heading.replace(" ", "\n").replace("/", "/\n"),
            justify="center" if heading in ("profile", "verified") else "right",
            style=_STYLES.get(heading, ""),
            no_wrap=True,
        )
    for row in rows:
        cells = [Text(cell) for cell in row.cells]
        cells[-1].stylize("bold green" if row.verified else "bold red")
        table.add_row(*(cells[n] for n in shown))
    return table


def view() -> View:
    """The view that suits stdout."""
    if sys.stdout.isatty() and not Console().is_dumb_terminal:
        return LiveTable()
    return Lines()
