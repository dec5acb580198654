"""`sparserl squash`: one patch that replaces several, in a file or in a store."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from . import show
from .keys import read_signing_key
from .options import PATCH_FILES, Base, CertificateFile, Endpoint, Json, Profile, Region, Threads
from .patches import open_base, open_patch
from .pipes import patch_path
from .reporting import reporting
from .stores import StoreOptions, is_store, open_store

commands = typer.Typer()

_EPILOG = """Examples:

    sparserl squash 101.patch 102.patch 103.patch -o 101-103.patch --base step-100/

    sparserl squash s3://bucket/run --from 100 --to 200
"""


@commands.command(rich_help_panel=PATCH_FILES, epilog=_EPILOG)
@reporting
def squash(
    patches: Annotated[
        list[str],
        typer.Argument(metavar="PATCH|URL", help="Patch files that follow one another, or the URL of one store."),
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="PATCH", help="The patch file to write.")
    ] = None,
    base: Base = None,
    profile: Profile = "auto",
    first: Annotated[
        int | None, typer.Option("--from", metavar="VERSION", help="In a store: the version to start from.")
    ] = None,
    last: Annotated[
        int | None, typer.Option("--to", metavar="VERSION", help="In a store: the version to end at.")
    ] = None,
    signing_key: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="In a store with signed heads: the file with the secret key to sign with."),
    ] = None,
    endpoint: Endpoint = None,
    region: Region = None,
    ca: CertificateFile = None,
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Join patches that follow one another into one.

    Give --base, the weights that the first patch applies to: patches that diff makes by default cannot be joined
    without it. Patches of profile raw, gap or ulp can, if all hold new bits or all hold steps. With --base, changes
    that end where they began are left out as well.

    In a store the squashed patch is added to the run, and subscribers use it where it saves bytes. Publishers write
    such patches on their own, over 8 to 64 versions.
    """
    if is_store(patches[0]):
        if len(patches) != 1 or first is None or last is None:
            raise typer.BadParameter("in a store: squash URL --from VERSION --to VERSION")
        options = StoreOptions(patches[0], endpoint, region, ca=ca)
        _squash_store(options, (first, last), signing_key, threads, json)
        return
    if output is None:
        raise typer.BadParameter("say where to write the patch: --output")
    _squash_files([Path(path) for path in patches], output, base, profile, threads, json)


def _squash_files(
    paths: list[Path], output: Path, base: Path | None, profile: str, threads: int | None, json: bool
) -> None:
    from ..patch import squash as join

    chain = [open_patch(path) for path in paths]
    weights, digest = open_base(chain[0], base, threads)
    with patch_path(output) as path:
        patch = join(*chain, base=weights, digest=digest, profile=profile, to=path, threads=threads)
        show.written(json, output, patch)


def _squash_store(
    options: StoreOptions, versions: tuple[int, int], signing_key: Path | None, threads: int | None, json: bool
) -> None:
    from ..session.store.squashing import squash_versions

    first, last = versions
    with open_store(*options) as store:
        step = squash_versions(store, first, last, signing_key=read_signing_key(signing_key), threads=threads)
    values = {"url": options.url, "from": first, "to": last, "bytes": step.bytes, "changed": step.changed}
    show.result(json, values, f"{step.name}: {step.changed:,} changed, {show.size(step.bytes)}")
