"""`sparserl record` and `sparserl report`: a recording of checkpoints, and the page that shows a recording."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..errors import SparserlError
from . import show
from .commands import Json, Threads, app, reporting

Recorded = Annotated[Path, typer.Argument(metavar="RECORDING", help="A file that a Recorder wrote.")]


@app.command(epilog="Example:  sparserl record step-100/ step-101/ step-102/ -o run.jsonl")
@reporting
def record(
    checkpoints: Annotated[
        list[Path], typer.Argument(metavar="OLD NEW…", help="Weights, each version after the one before.")
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="RECORDING", help="The file to write or to go on with.")
    ],
    precision: Annotated[str | None, typer.Option(help="What to call it; the most common dtype by default.")] = None,
    model: Annotated[str | None, typer.Option(help="What to call the model; the first checkpoint by default.")] = None,
    first: Annotated[int, typer.Option(help="The version of the second checkpoint.")] = 1,
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Compare checkpoints one after the other and record what each sync would be.

    All must have the same tensors, dtypes and shapes. `sparserl report` makes a page of the recording.
    """
    from ..record import Recorder
    from ..record.statistics import READS
    from ..sources import open_checkpoint

    if len(checkpoints) < 2:
        raise typer.BadParameter("give two checkpoints or more", param_hint="OLD NEW…")
    opened = [open_checkpoint(path) for path in checkpoints]
    recorder = Recorder(output, {"model": model or checkpoints[0].name})
    changed = []
    with show.progress() as stage:
        done = stage("record", READS * sum(one.nbytes for one in opened[1:]))
        for version, (old, new) in enumerate(zip(opened, opened[1:], strict=False), first):
            line = recorder.observe(old, new, version=version, precision=precision, threads=threads, progress=done)
            changed.append(sum(line["changed"]))
    text = f"{output}: {len(changed)} sync(s), {sum(changed):,} changes; sparserl report {output} -o report.html"
    show.result(json, {"path": str(output), "syncs": len(changed), "changed": changed}, text)


@app.command(epilog="Example:  sparserl report run.jsonl -o report.html")
@reporting
def report(
    recording: Recorded,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="PAGE", help="The HTML page to write.")
    ] = None,
    json: Json = False,
) -> None:
    """Make one HTML page of a recording: density, layers, magnitudes, profiles, timeline, other links and models.

    The page needs nothing but itself. With --json the figures are printed, with or without a page.
    """
    from ..record import Recording
    from ..record.page import page
    from ..record.summary import summary

    if output is None and not json:
        raise typer.BadParameter("say where the page goes: --output; or --json")
    found = Recording.read(recording)
    if not (found.syncs or found.sent or found.seconds):
        raise SparserlError(f"{recording} has no syncs in it yet")
    if output is not None:
        _refuse_to_replace(output)
        output.write_text(page(found), encoding="utf-8")
    text = f"{output}: {len({*found.sent, *(sync.version for sync in found.syncs), *found.seconds})} version(s)"
    show.result(json, summary(found) if json else {}, text)


def _refuse_to_replace(output: Path) -> None:
    """A page may take the name of another page, but of nothing else: the name may be a slip."""
    if output.is_file() and output.stat().st_size:
        with output.open("rb") as file:
            if not file.read(9).lower().startswith(b"<!doctype"):
                raise SparserlError(f"{output} exists and is not a page; choose another name")
