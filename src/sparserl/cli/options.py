"""Options and arguments that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import SparserlError
from ..humanize import parse_duration

PATCH_FILES = "Patch files"  # headings of `sparserl --help`
SESSIONS = "Sessions through a store"
ADVICE = "Planning and diagnosis"
tuning = partial(typer.Option, rich_help_panel="Tuning")  # options that most calls do not need
_store = partial(typer.Option, rich_help_panel="Store")


def _require_profile(name: str) -> str:
    from ..codec import PROFILES

    if name != "auto" and name not in PROFILES:
        choices = ", ".join(("auto", *PROFILES))
        raise typer.BadParameter(f"{name!r} is not a profile; this release has {choices}")
    return name


def _require_link(text: str | None) -> str | None:
    from ..plan import Link

    if text is not None:
        try:
            Link.parse(text)
        except SparserlError as error:
            raise typer.BadParameter(str(error)) from error
    return text


def parse_seconds(text: str) -> float:
    """A duration as people write it, such as 30s or 2h; a number alone is in seconds."""
    try:
        return parse_duration(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def _require_duration(text: str | None) -> str | None:
    if text is not None:
        parse_seconds(text)
    return text


def duration_option(help: str, option: Callable[..., Any] = typer.Option) -> Any:
    """An option that takes a duration, as text that `parse_seconds` understands."""
    return option(callback=_require_duration, metavar="TIME", help=help)


Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Threads = Annotated[
    int | None, tuning(min=1, metavar="N", help="How many threads to use; by default one for each available core.")
]
Profile = Annotated[
    str,
    tuning(
        callback=_require_profile,
        metavar="auto|raw|gap|ulp|ctx",
        help="How changes are encoded. auto picks the smallest encoding for each part of the patch.",
    ),
]
LinkSpeed = Annotated[
    str | None,
    tuning(
        callback=_require_link,
        metavar="SPEED",
        help="Speed of the link to the receiver, such as 25Gbit or 3GB/s. With it, auto picks the encoding that "
        "takes the least time to encode, send and apply, instead of the smallest.",
    ),
]
PatchFile = Annotated[Path, typer.Argument(metavar="PATCH", help="A patch file; - for stdin.")]
PatchOutput = Annotated[
    Path, typer.Option("--output", "-o", metavar="PATCH", help="The patch file to write; - for stdout.")
]
Base = Annotated[
    Path | None,
    typer.Option(metavar="WEIGHTS", help="The weights that the (first) patch applies to, if they are needed."),
]
Url = Annotated[
    str,
    typer.Argument(
        metavar="URL",
        help="The store: a folder, s3://bucket/path, gs://… or az://…; to read from it, also http(s)://…",
    ),
]
Endpoint = Annotated[
    str | None,
    _store(metavar="URL", help="Address of an S3-compatible service, such as http://localhost:9000."),
]
Region = Annotated[str | None, _store(metavar="NAME", help="Region of the bucket, such as eu-central-1.")]
TokenFile = Annotated[Path | None, _store(metavar="FILE", help="A file with the access token of an http(s) store.")]
CertificateFile = Annotated[
    Path | None,
    _store(
        "--ca",
        metavar="FILE",
        help="Certificates, in PEM, of authorities that the store's server may be signed by; by default SSL_CERT_FILE.",
    ),
]
TrustedKeys = Annotated[
    list[str] | None,
    typer.Option(
        "--trusted-key",
        metavar="KEY|FILE",
        help="The publisher's public key, or a file that holds it; repeat it to trust several. Anything that none of "
        "them has signed is refused.",
    ),
]
