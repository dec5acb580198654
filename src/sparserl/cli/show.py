"""What the command line says: results on stdout, progress and errors on stderr.

Names come from patches, stores and checkpoints that others wrote. Whatever is printed goes through `visible`, so that
nothing in them speaks to the terminal.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from .. import humanize

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from ..patch import Patch, Stats
    from ..plan import Estimate, Link
    from .checks import Finding

duration, size = humanize.duration, humanize.size
_PIPE_WIDTH = 240  # of tables that no terminal bounds: names must not be folded


def visible(text: str) -> str:
    """Text with everything that does not show written out: controls, marks of direction, ends of lines."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def result(as_json: bool, values: dict[str, Any], *lines: str) -> None:
    """The outcome of a command: for a script, or line by line for a person."""
    if as_json:
        typer.echo(json.dumps(values).replace("\x7f", "\\u007f"))
    else:
        for line in lines:
            typer.echo(visible(line))


def note(text: str) -> None:
    """One line on stderr."""
    typer.echo(visible("sparserl: " + " ".join(text.splitlines())), err=True)


@contextmanager
def progress() -> Iterator[Callable[[str, int], Callable[[int], None]]]:
    """Makes a bar for each stage of the work, named and measured in bytes; silent where stderr is no terminal."""
    if not sys.stderr.isatty():
        yield lambda _name, _total: lambda _done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description:>8}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bars:

        def stage(name: str, total: int) -> Callable[[int], None]:
            task = bars.add_task(name, total=total)
            return lambda done: bars.advance(task, done)

        yield stage


def written(as_json: bool, path: Path, patch: Patch) -> None:
    """A patch that was just written."""
    stats = patch.stats()
    values = {"path": str(path), **stats.as_dict()}
    del values["tensors"], values["buckets"]
    result(as_json, values, f"{path}: {summary(stats)}")


def summary(stats: Stats) -> str:
    """A patch in one line."""
    cost = f", {stats.bits_per_changed:.2f} bits per change" if stats.changed else ""
    return (
        f"{stats.changed:,} of {stats.elements:,} elements changed ({stats.density:.4%}), "
        f"{size(stats.bytes)}{cost}, {stats.ratio:,.1f}x smaller than the weights, profile {stats.profile}"
    )


def patch_tables(path: Path, stats: Stats, with_tensors: bool) -> None:
    """A patch as tables: the whole, its buckets, and on demand its tensors."""
    console = _console()
    console.print(_overview(path, stats))
    console.print(_buckets(stats))
    if with_tensors:
        console.print(_tensors(stats))


def plan_table(link: Link, estimates: list[Estimate], humanize: list[str]) -> None:
    """Predicted syncs as a table, the fastest marked, and what its columns mean."""
    from ..plan import best

    dense, fastest = estimates[0], best(estimates)
    table = _table("", ">bits", ">X", ">find+encode", ">send", ">decode+apply", ">total", ">speedup", ">break-even")
    for e in estimates:
        stages = (duration(e.encode_s), duration(e.send_s), duration(e.decode_s), duration(e.total_s))
        ratio, even = f"{dense.total_s / e.total_s:,.1f}x", "" if e.break_even is None else _even(e.break_even)
        name = e.name + (" ◄" if e is fastest else "")
        _add(table, name, f"{e.bits_per_change:,.1f}", size(e.bytes), *stages, ratio, even)
    console = _console()
    console.print(table)
    console.print(f"Fastest at {link}: {fastest.name}\n", soft_wrap=True)
    for line in humanize:
        console.print(line, soft_wrap=True)


def findings(several: Sequence[Finding]) -> None:
    """What a doctor found, as a table."""
    table = _table("", "", "", "")
    table.show_header = False
    for found in several:
        _add(table, found.topic, found.name, found.state, found.words)
    _console().print(table)


def _even(bits_per_second: float) -> str:
    from ..plan.cost import bandwidth

    return "never" if bits_per_second == math.inf else bandwidth(bits_per_second)


def _console() -> Console:
    from rich.console import Console

    console = Console(highlight=False, markup=False)
    return console if console.is_terminal else Console(highlight=False, markup=False, width=_PIPE_WIDTH)


def _overview(path: Path, stats: Stats) -> Table:
    table = _table("", "")
    table.show_header = False
    covers = "all tensors" if stats.complete else "some regions only: one shard of several"
    share = f"{size(stats.bytes)}, of which {size(stats.table_bytes)} tensor table"
    for name, value in (
        ("patch", str(path)),
        ("base", stats.base_digest),
        ("result", stats.result_digest),
        ("covers", covers),
        ("tensors", f"{len(stats.tensors):,}, of which {stats.untouched_tensors:,} do not change"),
        ("changed", f"{stats.changed:,} of {stats.elements:,} elements ({stats.density:.4%})"),
        ("size", share),
        ("ratio", f"{stats.ratio:,.1f}x smaller than the {size(stats.dense_bytes)} of the weights"),
        ("cost", f"{stats.bits_per_changed:.3f} bits per change, without the tensor table"),
        ("profile", stats.profile),
    ):
        _add(table, name, value)
    return table


def _buckets(stats: Stats) -> Table:
    table = _table("bucket", "dtype", "profile", ">entries", ">dense", ">changed", ">bytes", ">bits/change", "reason")
    for i, b in enumerate(stats.buckets):
        cost = f"{8 * b.bytes / b.changed:.3f}" if b.changed else "-"
        counts = (f"{b.entries:,}", f"{b.dense_entries:,}", f"{b.changed:,}", f"{b.bytes:,}")
        _add(table, str(i), b.dtype, b.profile, *counts, cost, b.reason)
    return table


def _tensors(stats: Stats) -> Table:
    table = _table("tensor", "dtype", ">elements", ">changed", ">density", ">bytes", ">bits/change", ">dense entries")
    for t in stats.tensors:
        cost = f"{t.bits_per_changed:.3f}" if t.changed else "-"
        counts = (f"{t.elements:,}", f"{t.changed:,}", f"{t.density:.4%}", f"{t.bytes:,}")
        _add(table, t.name, t.dtype, *counts, cost, f"{t.dense_entries:,}")
    return table


def _table(*columns: str) -> Table:
    """An empty table; columns whose name begins with `>` hold numbers."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in columns:
        table.add_column(name.removeprefix(">"), justify="right" if name.startswith(">") else "left", overflow="fold")
    return table


def _add(table: Table, *cells: str) -> None:
    """A row of text in which brackets are brackets."""
    from rich.text import Text

    table.add_row(*(Text(visible(cell)) for cell in cells))
