"""`sparserl doctor`: what works on this machine, and what to install where something is missing."""

from __future__ import annotations

import functools
from dataclasses import asdict
from typing import Annotated

import typer

from . import show
from .options import ADVICE, CertificateFile, Endpoint, Json, Region, TokenFile
from .reporting import reporting
from .stores import open_store

commands = typer.Typer()

_EPILOG = """Examples:

    sparserl doctor

    sparserl doctor s3://bucket/run --endpoint http://localhost:9000 --region us-east-1

    sparserl doctor --need torch --need ray && echo ready

Lines that say `works` were tried; lines that say `installed` were only looked for. With a URL, an object with a random
name is written below `doctor/` in that store and removed again.
"""


@commands.command(rich_help_panel=ADVICE, epilog=_EPILOG)
@reporting
def doctor(
    url: Annotated[
        str | None,
        typer.Argument(metavar="URL", help="A store to test: can it be written, and does it honour conditional puts?"),
    ] = None,
    need: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Fail unless this works: the name of a line. May be given several times."),
    ] = None,
    token_file: TokenFile = None,
    endpoint: Endpoint = None,
    region: Region = None,
    ca: CertificateFile = None,
    json: Json = False,
) -> None:
    """Check what works on this machine: packages, kernels, GPUs, transports, memory speed, and a store.

    For everything that is missing, the command that installs it is printed. The exit code is 1 if the store at URL, or
    anything named by --need, does not work.
    """
    from .checks import examine, unmet

    connect = None if url is None else functools.partial(open_store, url, endpoint, region, token_file, ca)
    findings = examine(url, connect)
    names = [finding.name for finding in findings]
    for name in need or ():
        if name not in names:
            raise typer.BadParameter(f"{name!r} is not among {', '.join(names)}", param_hint="--need")
    failures = unmet(findings, need or ())
    if json:
        show.result(True, {"ok": not failures, "findings": [asdict(finding) for finding in findings]})
    else:
        show.findings(findings)
    for finding in failures:
        show.note(f"error: {finding.name} is {finding.state}: {finding.text or 'not installed'}")
    if failures:
        raise typer.Exit(1)
