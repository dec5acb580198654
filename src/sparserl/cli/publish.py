"""`sparserl publish`: a checkpoint as the next version of a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import NotFound, SessionError
from . import show
from .keys import read_signing_key, read_trusted_keys
from .options import SESSIONS, Endpoint, Json, LinkSpeed, Profile, Region, Threads, Url
from .reporting import reporting
from .stores import open_store

if TYPE_CHECKING:
    from ..session import Publisher
    from ..transport.stores.base import Store

commands = typer.Typer()

_EPILOG = """Examples:

    sparserl publish step-100/ s3://bucket/run --state publisher/

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
        typer.Option(metavar="DIR", help="The folder where the publisher keeps what it needs to continue its run."),
    ] = None,
    new_run: Annotated[
        bool, typer.Option("--new-run", help="Begin a new run, even if the store already has one.")
    ] = False,
    profile: Profile = "auto",
    link: LinkSpeed = None,
    endpoint: Endpoint = None,
    region: Region = None,
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Publish CHECKPOINT as the next version of the run at URL.

    The first version of a run holds all weights; later versions hold only what changed. The config and tokenizer files
    of a folder are sent with the first version.

    To continue a run, give the --state folder of its earlier versions: it keeps the weights of one version, and the
    store has the patches since then. Without it a new run begins, and subscribers fetch all weights again. If the store
    already has a run, that needs --new-run.
    """
    from ..session import Publisher
    from ..sources import open_checkpoint

    secret = read_signing_key(signing_key)
    weights = open_checkpoint(checkpoint)
    with open_store(url, endpoint, region) as store, show.progress() as stage:
        publisher = Publisher(
            store,
            weights,
            signing_key=secret,
            trusted_keys=read_trusted_keys(trusted_key),
            files=checkpoint if checkpoint.is_dir() else None,
            state=state,
            profile=profile,
            link=link,
            threads=threads,
            progress=stage("publish", weights.nbytes),
        )
        _require_intent(publisher, store, state, new_run)
        begins = publisher.run is None
        report = publisher.publish()
    for line in report.notes:
        show.note(f"note: {line}")
    values = show.report_values(report) | {"url": url, "new_run": begins}
    show.result(json, values, f"{'new run' if begins else 'run'} {report.run}, {report}")


def _require_intent(publisher: Publisher, store: Store, state: Path | None, new_run: bool) -> None:
    """Raise `SessionError` where a run would be abandoned or continued by accident."""
    from ..session.store.retention import read_head

    if publisher.run is not None:
        if new_run:
            raise SessionError(
                f"--state {state} continues run {publisher.run}; give a new run (--new-run) a folder of its own"
            )
        return
    try:
        head, _ = read_head(store)
    except NotFound:
        return
    if not new_run:
        needs = "--state" if state is None else f"the state of its publisher, which {state} is not"
        raise SessionError(
            f"{store.url} has run {head.run} at version {head.version}; to continue it needs {needs}. "
            "With --new-run a new run begins, and subscribers fetch all weights again"
        )
