"""`sparserl keygen`, and keys as options name them."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Annotated

import typer

from ..errors import SessionError
from . import show
from .options import SESSIONS, Json
from .reporting import reporting
from .stores import read_secret

commands = typer.Typer()


@commands.command(rich_help_panel=SESSIONS, epilog="Example:  sparserl keygen trainer.key > trainer.pub")
@reporting
def keygen(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="The file to write the secret key to; it must not exist.")
    ],
    json: Json = False,
) -> None:
    """Make a key pair for signing: the secret key goes to FILE, readable by its owner alone; the public key is printed.

    A publisher signs with the file (publish --signing-key FILE). Subscribers trust the public key (follow
    --trusted-key KEY).
    """
    from ..files import creating
    from ..session.store.signing import keygen as make_keys

    secret, public = make_keys()
    try:
        with creating(file, 0o600) as out:
            os.fchmod(out.fileno(), 0o600)
            out.write(f"{secret}\n".encode())
    except FileExistsError as error:
        raise FileExistsError(errno.EEXIST, "exists already; a key is never replaced", str(file)) from error
    show.result(json, {"path": str(file), "public_key": public}, public)


def read_signing_key(path: Path | None) -> str | None:
    """The secret key in the file that --signing-key names."""
    from ..session.store import signing

    if path is None:
        return None
    if str(path).startswith("sparserl-secret-"):
        raise SessionError("a secret key on the command line can be seen by others; give the file that holds it")
    text = read_secret(path)
    try:
        signing.public_key(text)
    except SessionError as error:
        raise SessionError(f"{path}: {error}") from error
    return text


def read_trusted_keys(keys: list[str] | None) -> list[str] | None:
    """The public keys that --trusted-key names; None where it is not given."""
    return [_public_key(key) for key in keys] if keys else None


def _public_key(key: str) -> str:
    """A public key: as it is, from a file with it, or from a file with its secret key."""
    from ..session.store import signing

    if key.startswith("sparserl-public-"):
        return key
    text = read_secret(Path(key))
    if text.startswith("sparserl-secret-"):
        return signing.public_key(text)
    if not text.startswith("sparserl-public-"):
        raise SessionError(f"{key} holds no key; a public key reads sparserl-public-… with 64 hexadecimal digits")
    return text
