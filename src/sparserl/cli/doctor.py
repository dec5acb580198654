"""`sparserl doctor`: what works on this machine, and what to install for what does not."""

from __future__ import annotations

import functools
from dataclasses import asdict
from typing import Annotated

import typer

from . import show
from .commands import Json, app, reporting
from .session import Endpoint, Region, TokenFile, opened

_EPILOG = """Examples:

    sparserl doctor

    sparserl doctor s3://bucket/run --endpoint http://localhost:9000 --region us-east-1

    sparserl doctor --need torch --need ray && echo ready

What works was tried; what is installed was only looked for. With a URL an object is written below `doctor/` in that
store, under a name of its own, and removed again.
"""


@app.command(epilog=_EPILOG)
@reporting
def doctor(
    url: Annotated[
        str | None, typer.Argument(metavar="URL", help="A store to try: does it honour conditional puts?")
    ] = None,
    need: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Something that must work: the name of a line.")
    ] = None,
    token_file: TokenFile = None,
    endpoint: Endpoint = None,
    region: Region = None,
    json: Json = False,
) -> None:
    """Tell what works here: packages, kernels, devices, transports, the speed of memory, and a store.

    What is missing comes with the command that installs it. The exit code is 0, unless the store at URL or something
    that --need names does not work.
    """
    from .checks import examine, unmet

    opening = None if url is None else functools.partial(opened, url, endpoint, region, token_file)
    findings = examine(url, opening)
    names = [finding.name for finding in findings]
    if strangers := [name for name in need or () if name not in names]:
        raise typer.BadParameter(f"{strangers[0]!r} is not among {', '.join(names)}", param_hint="--need")
    wrong = unmet(findings, need or ())
    if json:
        show.result(True, {"ok": not wrong, "findings": [asdict(finding) for finding in findings]})
    else:
        show.findings(findings)
    for finding in wrong:
        show.note(f"error: {finding.name} is {finding.state}: {finding.words or 'not installed'}")
    if wrong:
        raise typer.Exit(1)
