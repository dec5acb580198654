"""`sparserl record` and `sparserl report`: a recording of checkpoints, and the page that shows a recording."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import typer

from ..errors import SparserlError
from . import show
from .options import ADVICE, Json, Threads
from .reporting import reporting

commands = typer.Typer()


@commands.command(rich_help_panel=ADVICE, epilog="Example:  sparserl record step-100/ step-101/ step-102/ -o run.jsonl")
@reporting
def record(
    checkpoints: Annotated[
        list[Path],
        typer.Argument(metavar="OLD NEW…", help="Two or more versions of the weights, oldest first; or recordings."),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="RECORDING", help="The file to write, or to append to.")
    ],
    precision: Annotated[
        str | None, typer.Option(help="A name for the precision; by default the most common dtype.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="A name for the model; by default that of the first checkpoint.")
    ] = None,
    first: Annotated[
        int | None,
        typer.Option(help="The version of the second checkpoint; by default the number that its name ends with, or 1."),
    ] = None,
    merge: Annotated[
        bool, typer.Option("--merge", help="Merge recordings of all ranks of a trainer into that of the whole.")
    ] = False,
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Compare each checkpoint with the next and record what a sync between them would send.

    All must have the same tensors, dtypes and shapes. Where names differ only in the number at their end, as those of
    checkpoint-*/ do, the numbers are the order and the versions. `sparserl report` turns the recording into a page.
    """
    from ..record import Recorder
    from ..record.statistics import READS
    from ..sources import open_checkpoint

    if merge:
        _merge(checkpoints, output, json)
        return
    if len(checkpoints) < 2:
        raise typer.BadParameter("give at least two checkpoints", param_hint="OLD NEW…")
    versions = _by_version(checkpoints, first)
    if checkpoints != [*versions.values()]:
        show.note("note: in the order of the numbers at the end of their names")
    opened = {version: open_checkpoint(path) for version, path in versions.items()}
    recorder = Recorder(output, {"model": model or next(iter(versions.values())).name})
    changed = []
    with show.progress() as stage:
        advance = stage("record", READS * sum(checkpoint.nbytes for checkpoint in [*opened.values()][1:]))
        for (_, old), (version, new) in pairwise(opened.items()):
            line = recorder.observe(old, new, version=version, precision=precision, threads=threads, progress=advance)
            changed.append(sum(line["changed"]))
    text = f"{output}: {len(changed)} sync(s), {sum(changed):,} changes; sparserl report {output} -o report.html"
    show.result(json, {"path": str(output), "syncs": len(changed), "changed": changed}, text)


def _by_version(checkpoints: list[Path], first: int | None) -> dict[int, Path]:
    """Checkpoints by version, oldest first: by the numbers at the end of names that are the same up to there."""
    names = [re.fullmatch(r"(.*?)(\d+)", str(path).removesuffix(".safetensors")) for path in checkpoints]
    numbered = {int(name[2]): path for name, path in zip(names, checkpoints, strict=True) if name is not None}
    if len(numbered) < len(checkpoints) or len({name[1] for name in names if name is not None}) > 1:
        return dict(enumerate(checkpoints, (1 if first is None else first) - 1))
    ordered = dict(sorted(numbered.items()))
    return ordered if first is None else dict(enumerate(ordered.values(), first - 1))


def _merge(recordings: list[Path], output: Path, json: bool) -> None:
    """Merge the recordings of ranks, and say which versions were left out."""
    from ..record import merge
    from ..record.merging import missing_versions

    merged = merge(recordings, output)
    left_out = missing_versions(recordings)
    text = f"{output}: {len(merged.syncs)} sync(s) of {len(recordings)} rank(s)"
    if left_out:
        text += f"; versions {', '.join(map(str, left_out))} are not in all recordings, and were left out"
    show.result(json, {"path": str(output), "syncs": len(merged.syncs), "left_out": left_out}, text)


@commands.command(rich_help_panel=ADVICE, epilog="Example:  sparserl report run.jsonl -o report.html")
@reporting
def report(
    recording: Annotated[Path, typer.Argument(metavar="RECORDING", help="A file that `record` or a Recorder wrote.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="PAGE", help="The HTML page to write.")
    ] = None,
    json: Json = False,
) -> None:
    """Turn a recording into an HTML page: density, layers, magnitudes, profiles, timeline, other links and models.

    The page is one file that needs no others. With --json the figures are printed, with or without a page.
    """
    from ..record import Recording
    from ..record.page import page
    from ..record.summary import summary

    if output is None and not json:
        raise typer.BadParameter("say where to write the page (--output), or use --json")
    recorded = Recording.read(recording)
    if not (recorded.syncs or recorded.sent or recorded.seconds):
        raise SparserlError(f"{recording} holds no syncs yet")
    if output is not None:
        _require_page_name(output)
        output.write_text(page(recorded), encoding="utf-8")
    versions = {*recorded.sent, *recorded.seconds, *(sync.version for sync in recorded.syncs)}
    show.result(json, summary(recorded) if json else {}, f"{output}: {len(versions)} version(s)")


def _require_page_name(output: Path) -> None:
    """Raise `SparserlError` where writing a page would replace anything but a page: the name may be a mistake."""
    if output.is_file() and output.stat().st_size:
        with output.open("rb") as file:
            if not file.read(9).lower().startswith(b"<!doctype"):
                raise SparserlError(f"{output} exists and is not a page; choose another name")
