"""`sparserl publish`: a checkpoint as the next version of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..errors import SessionError
from . import show
from .keys import read_signing_key, read_trusted_keys
from .options import (
    SESSIONS,
    CertificateFile,
    Endpoint,
    Json,
    LinkSpeed,
    Profile,
    Region,
    Threads,
    Url,
    duration_option,
    parse_seconds,
    tuning,
)
from .reporting import reporting
from .stores import open_store

commands = typer.Typer()

_EPILOG = """Examples:

    sparserl publish step-100/ s3://bucket/run

    sparserl publish step-101/ s3://bucket/run --state publisher/ --signing-key trainer.key
"""


@commands.command(rich_help_panel=SESSIONS, epilog=_EPILOG)
@reporting
def publish(
    checkpoint: Annotated[
        Path, typer.Argument(metavar="CHECKPOINT", help="A safetensors file or a checkpoint folder.")
    ],
    url: Url,
    signing_key: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The file with the secret key to sign with; keygen makes one.")
    ] = None,
    trusted_key: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY|FILE",
            help="Another public key that may have signed the run so far: the old one, when you replace a key.",
        ),
    ] = None,
    state: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="A folder where the publisher keeps an anchor, so that it need not fetch one to continue its run.",
        ),
    ] = None,
    new_run: Annotated[
        bool, typer.Option("--new-run", help="Leave the run that the store has, and begin a new one.")
    ] = False,
    step: Annotated[
        int | None, typer.Option(metavar="N", help="The training step of these weights, which log shows.")
    ] = None,
    note: Annotated[
        str | None, typer.Option(metavar="TEXT", help="A few words about this version, which log shows.")
    ] = None,
    profile: Profile = "auto",
    link: LinkSpeed = None,
    anchor_after: Annotated[
        float,
        tuning(min=0, metavar="TIMES", help="Write an anchor when the patches since the last add up to so many."),
    ] = 1.0,
    keep_anchors: Annotated[int, tuning(min=1, metavar="N", help="How many anchors stay in the store.")] = 2,
    keep_all: Annotated[bool, typer.Option("--keep-all", help="Keep every version in the store.")] = False,
    grace: Annotated[
        str, duration_option("How long objects stay in the store after nothing refers to them: 30s, 10m, 2h.", tuning)
    ] = "10m",
    lease: Annotated[
        str, duration_option("How long a silent subscriber keeps old versions from being removed: 30s, 10m.", tuning)
    ] = "2m",
    endpoint: Endpoint = None,
    region: Region = None,
    ca: CertificateFile = None,
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Publish CHECKPOINT as the next version of the run at URL.

    The first version of a run holds all weights; later versions hold only what changed. The config and tokenizer files
    of a folder are sent with the first version, and again when they change.

    If the store has a run, CHECKPOINT becomes its next version. The publisher then needs the weights of the last
    version: from the --state folder of its earlier calls and the patches since then, or else all of them from the
    store. With --new-run a new run begins, and subscribers fetch all weights again.
    """
    from ..session import Publisher
    from ..sources import open_checkpoint

    secret = read_signing_key(signing_key)
    weights = open_checkpoint(checkpoint)
    _require_apart(checkpoint, url)
    with (
        open_store(url, endpoint, region, ca=ca) as store,
        show.progress() as stage,
        Publisher(
            store,
            weights,
            signing_key=secret,
            trusted_keys=read_trusted_keys(trusted_key),
            files=checkpoint if checkpoint.is_dir() else None,
            state=state,
            new_run=new_run,
            profile=profile,
            link=link,
            anchor_after=anchor_after,
            keep_anchors=None if keep_all else keep_anchors,
            grace=parse_seconds(grace),
            lease=parse_seconds(lease),
            threads=threads,
            progress=stage("publish", weights.nbytes),
        ) as publisher,
    ):
        begins = publisher.run is None
        report = publisher.publish(step=step, note=note)
    values = show.report_values(report) | {"url": url, "new_run": begins}
    show.result(json, values, f"{'new run' if begins else 'run'} {report.run}, {report.summary}")


def _require_apart(checkpoint: Path, url: str) -> None:
    """Raise `SessionError` where the store would lie inside the checkpoint."""
    from ..files import path_of
    from ..transport.stores.opening import scheme_of

    if scheme_of(url) != "file":
        return
    store = path_of(url).absolute().resolve()
    folder = checkpoint.resolve()
    if checkpoint.is_dir() and (store == folder or folder in store.parents):
        raise SessionError(f"the store {url} would lie inside the checkpoint {checkpoint}; choose a folder beside it")
