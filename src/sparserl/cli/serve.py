"""`sparserl serve`: the folder of a session, to be followed over HTTP."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import typer

from ..errors import StoreError
from . import show
from .commands import app, reporting

_EPILOG = """Examples:

    sparserl serve /data/run --listen 127.0.0.1:8000

    sparserl serve /data/run --listen 0.0.0.0:8443 --token-file tokens --tls-cert cert.pem --tls-key key.pem

Subscribers then follow http://127.0.0.1:8000 with token=…, as they would follow file:///data/run.
"""


@app.command(epilog=_EPILOG)
@reporting
def serve(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder that a publisher writes to.")],
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where to listen; port 0 is one that is free.")
    ] = "127.0.0.1:8000",
    token_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Tokens, one per line; who has none of them is refused.")
    ] = None,
    tls_cert: Annotated[Path | None, typer.Option(metavar="FILE", help="A certificate chain, in PEM.")] = None,
    tls_key: Annotated[Path | None, typer.Option(metavar="FILE", help="The key of the certificate, in PEM.")] = None,
    access_log: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Gets one line per request: method, path, status, bytes."),
    ] = None,
) -> None:
    """Serve DIR over HTTP, to read, until Ctrl-C or SIGTERM.

    Everything in it is served but what is hidden and the subscribers' leases. Objects may be cached for ever by
    whatever stands in between; a subscriber that waits for a new version is answered when it is there.
    """
    try:
        from ..transport import server
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in ("starlette", "uvicorn", "h11"):
            raise
        raise StoreError("serving needs starlette and uvicorn: pip install 'sparserl[serve]'") from error
    if (tls_cert is None) != (tls_key is None):
        raise typer.BadParameter("--tls-cert and --tls-key go together")
    tokens = () if token_file is None else server.read_tokens(token_file)

    def started(url: str) -> None:
        show.note(f"serving {folder} at {url}")
        if not tokens and not ipaddress.ip_address(urlsplit(url).hostname or "").is_loopback:
            show.note("note: whoever reaches this address can read the weights; see --token-file")

    tls = None if tls_cert is None or tls_key is None else (tls_cert, tls_key)
    server.serve(folder, listen, tokens=tokens, tls=tls, access_log=access_log, started=started)
