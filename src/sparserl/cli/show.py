"""What the command line prints: results on stdout, progress and errors on stderr.

Names in patches, stores and checkpoints may come from an attacker. All text goes through `visible`, so that no control
character in a name reaches the terminal.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import json
import logging
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import typer

from .. import humanize
from .pipes import is_pipe

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from ..patch import Patch, Stats
    from ..plan import AnchorEstimate, Estimate, Link
    from ..session import SyncReport
    from .checks import Finding

duration = humanize.duration
size = humanize.size
_PIPE_WIDTH = 240  # columns of tables that go to a pipe: names must not be folded


def visible(text: str) -> str:
    """Text with invisible characters escaped: controls, marks of direction, ends of lines."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text)


def result(as_json: bool, values: dict[str, Any], *lines: str, err: bool = False) -> None:
    """Print the outcome of a command: as JSON for scripts, or line by line for people; `err` where stdout is taken."""
    if as_json:
        typer.echo(json.dumps(values).replace("\x7f", "\\u007f"), err=err)
    else:
        for line in lines:
            typer.echo(visible(line), err=err)


def note(text: str) -> None:
    """Print one line on stderr."""
    typer.echo(visible("sparserl: " + " ".join(text.splitlines())), err=True)


def note_open_server(url: str) -> None:
    """Say that a server without tokens can be read by anyone, unless it is for this machine alone."""
    if not ipaddress.ip_address(urlsplit(url).hostname or "").is_loopback:
        note("note: anyone who can reach this address can read the weights; see --token-file")


class _Notes(logging.Handler):
    """Prints what the library logs as notes."""

    def emit(self, record: logging.LogRecord) -> None:
        level = "" if record.levelno < logging.WARNING else f"{record.levelname.lower()}: "
        note(level + record.getMessage())


def log_to_stderr(verbose: bool) -> None:
    """Print warnings of sessions on stderr; with `verbose`, also what they do."""
    logger = logging.getLogger("sparserl.session")
    logger.handlers = [handler for handler in logger.handlers if not isinstance(handler, _Notes)]
    logger.addHandler(_Notes())
    logger.setLevel(logging.INFO if verbose else logging.WARNING)


@contextmanager
def progress() -> Iterator[Callable[[str, int], Callable[[int], None]]]:
    """Makes a named progress bar, in bytes, for each stage of the work; silent unless stderr is a terminal."""
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
    """Print a summary of a patch that was just written."""
    stats = patch.stats()
    values = {"path": str(path), **stats.as_dict()}
    del values["tensors"], values["buckets"]
    files = file_values(patch)
    names = [*files["files"], *files["removed_files"]]
    with_files = (
        f", and {size(patch.files.nbytes)} of other files: {', '.join(names)}" if patch.files is not None else ""
    )
    result(as_json, values | files, f"{path}: {summary(stats)}{with_files}", err=is_pipe(path))


def file_values(patch: Patch) -> dict[str, Any]:
    """The files that a patch changes beside the weights, for scripts."""
    files = patch.files
    return {
        "files": {} if files is None else files.sizes,
        "removed_files": [] if files is None else list(files.removed),
    }


def file_table(patch: Patch) -> None:
    """Print the files that a patch changes beside the weights."""
    if patch.files is None:
        return
    table = _table("file", ">bytes")
    for name, nbytes in patch.files.sizes.items():
        _add(table, name, f"{nbytes:,}")
    for name in patch.files.removed:
        _add(table, name, "removed")
    _console().print(table)


def summary(stats: Stats) -> str:
    """A patch in one line."""
    cost = f", {stats.bits_per_changed:.2f} bits per change" if stats.changed else ""
    return (
        f"{stats.changed:,} of {stats.elements:,} elements changed ({stats.density:.4%}), "
        f"{size(stats.bytes)}{cost}, {stats.ratio:,.1f}x smaller than the weights, profile {stats.profile}"
    )


def patch_tables(path: Path, stats: Stats, with_tensors: bool) -> None:
    """Print a patch as tables: an overview, its buckets, and on demand its tensors."""
    console = _console()
    console.print(_overview(path, stats))
    console.print(_buckets(stats))
    if with_tensors:
        console.print(_tensors(stats))


def plan_table(link: Link, estimates: list[Estimate], anchors: list[AnchorEstimate], legend: list[str]) -> None:
    """Print predicted syncs and anchors as a table, the fastest marked, and what its columns mean."""
    from ..plan import best

    dense = estimates[0]
    fastest = best(estimates)
    table = _table("", ">bits", ">X", ">find+encode", ">send", ">decode+apply", ">total", ">speedup", ">break-even")
    for estimate in estimates:
        _add(
            table,
            estimate.name + (" ◄" if estimate is fastest else ""),
            f"{estimate.bits_per_change:,.1f}",
            size(estimate.bytes),
            duration(estimate.encode_s),
            duration(estimate.send_s),
            duration(estimate.decode_s),
            duration(estimate.total_s),
            f"{dense.total_s / estimate.total_s:,.1f}x",
            _break_even(estimate.break_even),
        )
    fastest_anchor = best(anchors)
    for anchor in anchors:
        _add(
            table,
            f"anchor, {anchor.name}" + (" ◄" if anchor is fastest_anchor else ""),
            "",
            size(anchor.bytes),
            duration(anchor.encode_s),
            duration(anchor.send_s),
            duration(anchor.decode_s),
            duration(anchor.total_s),
            "",
            "",
        )
    console = _console()
    console.print(table)
    console.print(f"Fastest at {link}: {fastest.name}; anchors: {fastest_anchor.name}\n", soft_wrap=True)
    for line in legend:
        console.print(line, soft_wrap=True)


def findings(rows: Sequence[Finding]) -> None:
    """Print the findings of `sparserl doctor` as a table."""
    table = _table("", "", "", "")
    table.show_header = False
    for finding in rows:
        _add(table, finding.topic, finding.name, finding.state, finding.text)
    _console().print(table)


def report_values(report: SyncReport) -> dict[str, Any]:
    """What a publish or a commit did, for scripts."""
    return dataclasses.asdict(report) | {"density": report.density}


def _break_even(bits_per_second: float | None) -> str:
    from ..plan.cost import bandwidth

    if bits_per_second is None:
        return ""
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
    for number, bucket in enumerate(stats.buckets):
        _add(
            table,
            str(number),
            bucket.dtype,
            bucket.profile,
            f"{bucket.entries:,}",
            f"{bucket.dense_entries:,}",
            f"{bucket.changed:,}",
            f"{bucket.bytes:,}",
            f"{8 * bucket.bytes / bucket.changed:.3f}" if bucket.changed else "-",
            bucket.reason,
        )
    return table


def _tensors(stats: Stats) -> Table:
    table = _table("tensor", "dtype", ">elements", ">changed", ">density", ">bytes", ">bits/change", ">dense entries")
    for tensor in stats.tensors:
        _add(
            table,
            tensor.name,
            tensor.dtype,
            f"{tensor.elements:,}",
            f"{tensor.changed:,}",
            f"{tensor.density:.4%}",
            f"{tensor.bytes:,}",
            f"{tensor.bits_per_changed:.3f}" if tensor.changed else "-",
            f"{tensor.dense_entries:,}",
        )
    return table


def _table(*columns: str) -> Table:
    """An empty table; columns whose names begin with `>` are aligned to the right."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in columns:
        table.add_column(name.removeprefix(">"), justify="right" if name.startswith(">") else "left", overflow="fold")
    return table


def _add(table: Table, *cells: str) -> None:
    """Add a row of plain text, in which brackets are not markup."""
    from rich.text import Text

    table.add_row(*(Text(visible(cell)) for cell in cells))
