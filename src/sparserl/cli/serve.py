"""`sparserl serve`: the folder of a run, for subscribers that follow it over HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from . import show
from .options import SESSIONS, Json
from .reporting import reporting

commands = typer.Typer()

_EPILOG = """Examples:

    sparserl serve /data/run --listen 127.0.0.1:8000

    sparserl serve /data/run --listen 0.0.0.0:8443 --token-file tokens --tls-cert cert.pem --tls-key key.pem

Subscribers then follow http://127.0.0.1:8000 (with token=… where tokens are required) as they would follow
file:///data/run.
"""


@commands.command(rich_help_panel=SESSIONS, epilog=_EPILOG)
@reporting
def serve(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder that a publisher writes to.")],
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="The address to listen on; port 0 picks a free port.")
    ] = "127.0.0.1:8000",
    token_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Accepted tokens, one per line, each perhaps with a name: TOKEN # NAME. Read again at SIGHUP.",
        ),
    ] = None,
    tls_cert: Annotated[Path | None, typer.Option(metavar="FILE", help="The certificate chain, in PEM.")] = None,
    tls_key: Annotated[Path | None, typer.Option(metavar="FILE", help="The certificate's private key, in PEM.")] = None,
    access_log: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Log one line for each request: method, path, status, bytes, name of the token."
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Serve DIR over HTTP, read-only, until Ctrl-C or SIGTERM.

    All files are served except hidden ones and the subscribers' leases. Proxies may cache objects for ever. A
    subscriber that waits for a new version gets its answer as soon as there is one.
    """
    from ..transport.stores.serving import needs_serving_packages

    with needs_serving_packages():
        from ..transport import server
    if (tls_cert is None) != (tls_key is None):
        raise typer.BadParameter("--tls-cert and --tls-key go together")

    def started(url: str, tokens: int) -> None:
        if json:
            show.result(True, {"folder": str(folder), "url": url, "tokens": tokens})
        waiting = "" if folder.is_dir() else ", which a publisher still has to make,"
        show.note(f"serving {folder}{waiting} at {url}")
        if not tokens:
            show.note_open_server(url)

    tls = None if tls_cert is None or tls_key is None else (tls_cert, tls_key)
    server.serve(folder, listen, token_file=token_file, tls=tls, access_log=access_log, started=started)
