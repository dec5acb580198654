"""`sparserl export`: a version of a run as a checkpoint, or the patch between two versions as a file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import CheckpointError
from ..transport.stores.versioned import split_version
from . import show
from .keys import read_trusted_keys
from .options import SESSIONS, CertificateFile, Endpoint, Json, Region, Threads, TokenFile, TrustedKeys
from .pipes import is_pipe, patch_path
from .reporting import reporting
from .stores import StoreOptions, open_store

if TYPE_CHECKING:
    from ..session.store.stored_run import StoredRun

commands = typer.Typer()

_EPILOG = """Examples:

    sparserl export s3://bucket/run@100 -o step-100/

    sparserl export s3://bucket/run@103 --from 100 -o 100-103.patch

    sparserl export s3://bucket/run --pin best -o best/

    sparserl export https://trainer:8000@7 --from 6 -o - | sparserl apply model/ - -o model/
"""


@commands.command(rich_help_panel=SESSIONS, epilog=_EPILOG)
@reporting
def export(
    source: Annotated[
        str, typer.Argument(metavar="URL[@VERSION]", help="The store and the version; by default the newest one.")
    ],
    output: Annotated[
        Path,
        typer.Option("--output", "-o", metavar="OUT", help="The checkpoint folder to write; with --from a patch file."),
    ],
    first: Annotated[
        int | None, typer.Option("--from", metavar="VERSION", min=0, help="Write the patch from this version on.")
    ] = None,
    pin: Annotated[
        str | None, typer.Option(metavar="NAME", help="The version of this pin, which may be one of an earlier run.")
    ] = None,
    trusted_key: TrustedKeys = None,
    token_file: TokenFile = None,
    endpoint: Endpoint = None,
    region: Region = None,
    ca: CertificateFile = None,
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Write a version that a store has as a checkpoint folder, or as the patch from another version to it.

    Nothing is written to the store, and no secret key is needed. The config and tokenizer of the version come with it.
    """
    if first is None and is_pipe(output):
        raise typer.BadParameter("a checkpoint is a folder; a patch, with --from, can go to stdout", param_hint="-o")
    url, version = split_version(source)
    if pin is not None and version is not None:
        raise typer.BadParameter("give a version or the name of a pin, not both")
    keys = read_trusted_keys(trusted_key)
    with stored_run(StoreOptions(url, endpoint, region, token_file, ca), keys, pin) as run:
        last = run.head.version if version is None else version
        run.require(last)
        if first is not None:
            _write_patch(run, first, last, output, threads, json)
            return
        _write_checkpoint(run, last, output, threads)
        values = {"url": url, "run": run.head.run, "version": last, "digest": run.digests[last].hex}
        text = f"{output}: version {last} of run {run.head.run}, digest {run.digests[last]}"
        show.result(json, values | {"path": str(output), "files": sorted(run.files(last))}, text)


@contextmanager
def stored_run(options: StoreOptions, keys: list[str] | None, pin: str | None = None) -> Iterator[StoredRun]:
    """The run of a store, or that of a pin up to its version, with a progress bar for what is fetched of it."""
    from ..session.store.stored_run import StoredRun

    with open_store(*options) as store, show.progress() as stage:
        run = StoredRun.read(store, keys) if pin is None else StoredRun.at_pin(store, pin, keys)
        yield replace(run, progress=stage("fetch", run.run_at(run.head.version).layout.dense_bytes))


def _write_patch(run: StoredRun, first: int, last: int, output: Path, threads: int | None, json: bool) -> None:
    with patch_path(output) as path:
        patch = run.with_files(run.patch(first, last, threads), run.file_hashes(first), last)
        patch.save(path)
        show.written(json, output, patch)


def _write_checkpoint(run: StoredRun, version: int, output: Path, threads: int | None) -> None:
    """Write a new folder, which takes its name when all of it is on disk."""
    from ..targets.checkpoint_folder import write_checkpoint
    from ..targets.swap import swapping

    out = output.absolute()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CheckpointError(
            f"{output} exists already; choose another name, or `sparserl follow` to keep it up to date"
        )
    with swapping(out) as swap:
        write_checkpoint(swap.draft, run.weights(version, threads), run.files(version))
        swap.commit()
