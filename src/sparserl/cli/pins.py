"""`sparserl pin`, `unpin` and `pins`: versions that stay in a store until they are unpinned."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import NotFound
from ..humanize import age
from ..transport.stores.versioned import split_version
from . import show
from .keys import read_trusted_keys
from .options import SESSIONS, CertificateFile, Endpoint, Json, Region, TrustedKeys, Url
from .reporting import reporting
from .stores import open_store

if TYPE_CHECKING:
    from ..session import Pin

commands = typer.Typer()

_Version = Annotated[
    str, typer.Argument(metavar="URL[@VERSION]", help="The store and the version; by default the newest one.")
]
_Name = Annotated[str | None, typer.Option(metavar="NAME", help="The name of the pin; by default v and the version.")]
_EPILOG = """Examples:

    sparserl pin s3://bucket/run@100

    sparserl pin s3://bucket/run@240 --name best --note 'reward 0.7' --move
"""


@commands.command(rich_help_panel=SESSIONS, epilog=_EPILOG)
@reporting
def pin(
    source: _Version,
    name: _Name = None,
    note: Annotated[str | None, typer.Option(metavar="TEXT", help="A few words about it.")] = None,
    move: Annotated[bool, typer.Option("--move", help="Move a pin of this name here from another version.")] = False,
    trusted_key: TrustedKeys = None,
    endpoint: Endpoint = None,
    region: Region = None,
    ca: CertificateFile = None,
    json: Json = False,
) -> None:
    """Keep a version in its store until it is unpinned.

    Retention and gc spare what leads to it, and so do new runs. It is in effect when the command ends with exit code 0;
    a version that is being removed is refused.
    """
    from ..session import pin as pin_version

    url, version = split_version(source)
    keys = read_trusted_keys(trusted_key)
    with open_store(url, endpoint, region, ca=ca) as store:
        made = pin_version(store, version, name=name, note=note, move=move, trusted_keys=keys)
    text = f"pin {made.name}: version {made.version} of run {made.run}, digest {made.digest}"
    show.result(json, {"url": url, **pin_values(made)}, text)


@commands.command(rich_help_panel=SESSIONS, epilog="Example:  sparserl unpin s3://bucket/run@100")
@reporting
def unpin(
    source: Annotated[
        str, typer.Argument(metavar="URL[@VERSION]", help="The store, and the version if the pin has no other name.")
    ],
    name: _Name = None,
    endpoint: Endpoint = None,
    region: Region = None,
    ca: CertificateFile = None,
    json: Json = False,
) -> None:
    """Remove a pin. Retention treats its version like any other from the next anchor on."""
    from ..session import unpin as remove_pin

    url, version = split_version(source)
    if (name is None) == (version is None):
        raise typer.BadParameter("say which pin: URL@VERSION, or URL --name NAME")
    with open_store(url, endpoint, region, ca=ca) as store:
        removed = f"v{version}" if name is None else name
        remove_pin(store, removed)
    show.result(json, {"url": url, "name": removed}, f"pin {removed} removed")


@commands.command(rich_help_panel=SESSIONS, epilog="Example:  sparserl pins s3://bucket/run")
@reporting
def pins(
    url: Url,
    endpoint: Endpoint = None,
    region: Region = None,
    ca: CertificateFile = None,
    json: Json = False,
) -> None:
    """List the pins of a store, those of earlier runs too."""
    from ..session import pins as stored_pins
    from ..session.store.retention import read_head

    with open_store(url, endpoint, region, ca=ca) as store:
        made = stored_pins(store)
        try:
            current = read_head(store)[0].run
        except NotFound:
            current = ""
    lines = [pin_line(pin, current) for pin in made]
    show.result(json, {"url": url, "pins": [pin_values(pin) for pin in made]}, *(lines or ["no pins"]))


def pin_values(pin: Pin) -> dict[str, Any]:
    """A pin for scripts."""
    return {
        "name": pin.name,
        "run": pin.run,
        "version": pin.version,
        "digest": pin.digest.hex,
        "time": pin.time,
        "note": pin.note,
    }


def pin_line(pin: Pin, run: str) -> str:
    """A pin for people; `run` is the run that the store has now."""
    place = "" if pin.run == run else f" of the earlier run {pin.run}"
    note = "" if pin.note is None else f": {pin.note}"
    return f"pin {pin.name}: version {pin.version}{place}, {age(time.time() - pin.time)} ago{note}"
