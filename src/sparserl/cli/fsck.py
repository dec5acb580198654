"""`sparserl fsck` and `sparserl gc`: whether a store is intact, and removing what nothing refers to."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from ..errors import FormatError, SessionError, StoreError
from . import show
from .keys import read_trusted_keys
from .options import (
    SESSIONS,
    CertificateFile,
    Endpoint,
    Json,
    Region,
    TokenFile,
    TrustedKeys,
    Url,
    duration_option,
    parse_seconds,
)
from .reporting import reporting
from .stores import open_store

if TYPE_CHECKING:
    from ..parallel import Progress
    from ..transport.stores.base import Store

commands = typer.Typer()


@commands.command(rich_help_panel=SESSIONS, epilog="Example:  sparserl fsck s3://bucket/run --trusted-key trainer.pub")
@reporting
def fsck(
    url: Url,
    trusted_key: TrustedKeys = None,
    token_file: TokenFile = None,
    endpoint: Endpoint = None,
    region: Region = None,
    ca: CertificateFile = None,
    json: Json = False,
) -> None:
    """Read every object that a store's head leads to, and check that it is intact.

    Checks every object, every hash, and that every version can be reached. Prints one line for each fault, and exits
    with code 1 if there is any. Objects that nothing refers to are counted; they are not faults, and gc removes them.
    """
    from ..session.store.retention import faults

    keys = read_trusted_keys(trusted_key)
    with open_store(url, endpoint, region, token_file, ca) as store, show.progress() as stage:
        counted = _CountedStore(store, stage("read", _stored_bytes(store, keys)))
        problems: list[str] = []
        try:
            problems.extend(faults(cast("Store", counted), keys))
        except SessionError as error:  # a head that no trusted key has signed
            problems.append(str(error))
        unreferenced = None if problems else _unreferenced(store, keys)
    values = {
        "url": url,
        "faults": problems,
        "objects": counted.objects,
        "bytes": counted.bytes,
        "unreferenced": None if unreferenced is None else {"objects": len(unreferenced), "bytes": sum(unreferenced)},
    }
    summary = f"{counted.objects} object(s), {show.size(counted.bytes)} read: {len(problems) or 'no'} fault(s)"
    if unreferenced is not None:
        summary += f"; nothing refers to {len(unreferenced)} object(s), {show.size(sum(unreferenced))}"
    show.result(json, values, *problems, summary)
    if problems:
        raise typer.Exit(1)


class _CountedStore:
    """A store that counts what is read from it."""

    def __init__(self, store: Store, advance: Progress) -> None:
        self._store = store
        self._advance = advance
        self.objects = 0
        self.bytes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def get(self, name: str, most: int) -> Any:
        stored = self._store.get(name, most)
        self.objects += 1
        self.bytes += len(stored.data)
        self._advance(len(stored.data))
        return stored


def _stored_bytes(store: Store, keys: list[str] | None) -> int:
    """Bytes of all anchors and patches; 0 where the store is too broken to tell."""
    from ..session.store.retention import read_head, read_index

    with contextlib.suppress(StoreError, FormatError, SessionError):
        head, _ = read_head(store, keys)
        return sum(step.bytes for step in read_index(store, head).steps)
    return 0


def _unreferenced(store: Store, keys: list[str] | None) -> list[int] | None:
    """Sizes of the objects that nothing refers to, leases apart; None where the store cannot list its objects."""
    from ..session.store.retention import is_of_receiver, needed, read_head

    if not store.writable:
        return None
    listing = list(store.list("runs/"))  # before the head is read: what a publisher adds meanwhile must not count
    head, _ = read_head(store, keys)
    keep = needed(store, head)
    return [item.size for item in listing if item.name not in keep and not is_of_receiver(item.name)]


@commands.command(rich_help_panel=SESSIONS, epilog="Example:  sparserl gc s3://bucket/run --grace 2h --dry-run")
@reporting
def gc(
    url: Url,
    grace: Annotated[
        str,
        duration_option("Spare objects younger than this: 10m, 2h, 1d. It must be longer than a publish takes."),
    ] = "1d",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print what would be deleted.")] = False,
    trusted_key: TrustedKeys = None,
    endpoint: Endpoint = None,
    region: Region = None,
    ca: CertificateFile = None,
    json: Json = False,
) -> None:
    """Delete objects that nothing refers to: earlier runs, versions no longer kept, and remains of killed publishers.

    Publishers do this on their own when they write an anchor. Every version that can be reached stays. If gc cannot
    read all that the head leads to, it deletes nothing.
    """
    from ..session.store.retention import collect, read_head

    keys = read_trusted_keys(trusted_key)
    with open_store(url, endpoint, region, ca=ca) as store:
        if not store.writable:
            raise StoreError(f"{url} can only be read")
        read_head(store, keys)
        sizes = {item.name: item.size for item in store.list("runs/")}
        names = collect(store, parse_seconds(grace), dry=dry_run)
    freed = sum(sizes.get(name, 0) for name in names)
    values = {"url": url, "dry_run": dry_run, "objects": len(names), "bytes": freed, "names": names}
    lines = list(names) if dry_run else []
    lines.append(f"{len(names)} object(s), {show.size(freed)} {'would be ' if dry_run else ''}deleted")
    show.result(json, values, *lines)
