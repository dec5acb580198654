"""Opens the store that a command's options describe."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from ..errors import SessionError
from ..transport.stores.versioned import split_version

if TYPE_CHECKING:
    from ..transport.stores.base import Store

_MOST_SECRET = 4096  # bytes of a file with a key or a token


class StoreOptions(NamedTuple):
    """What says which store is meant, and how to reach it."""

    url: str
    endpoint: str | None = None
    region: str | None = None
    token_file: Path | None = None
    ca: Path | None = None


def is_store(text: str) -> bool:
    """Whether a store is meant, not a file: a URL, a folder, or either with a version."""
    url, _ = split_version(text)
    return "://" in url or (url != "-" and Path(url).is_dir())


@contextlib.contextmanager
def open_store(
    url: str,
    endpoint: str | None = None,
    region: str | None = None,
    token_file: Path | None = None,
    ca: Path | None = None,
) -> Iterator[Store]:
    """The store at a URL, with the options that were given for it; it is closed at the end."""
    from ..transport.stores import opening

    scheme = opening.scheme_of(url)
    token = None
    if token_file is not None:
        if scheme not in ("http", "https"):
            raise typer.BadParameter(f"is for http(s) stores, not for {scheme}://", param_hint="--token-file")
        token = read_secret(token_file)
    if ca is not None and scheme == "file":
        raise typer.BadParameter("is for stores on a network, not for a folder", param_hint="--ca")
    store: Any = opening.open_store(url, token=token, ca=ca, **_object_storage_options(scheme, endpoint, region))
    with contextlib.closing(store):
        yield store


def _object_storage_options(scheme: str, endpoint: str | None, region: str | None) -> dict[str, Any]:
    """Options that obstore understands."""
    options: dict[str, Any] = {}
    for name, value in (("endpoint", endpoint), ("region", region)):
        if value is not None:
            if scheme in ("file", "http", "https"):
                raise typer.BadParameter(f"is for object storage, not for {scheme}://", param_hint=f"--{name}")
            options[name] = value
    return options


def read_secret(path: Path) -> str:
    """The one line of text in a file with a key or a token."""
    with path.open("rb") as file:
        data = file.read(_MOST_SECRET + 1)
    try:
        text = data.decode().strip()
    except UnicodeDecodeError:
        text = ""
    if not text or len(data) > _MOST_SECRET or not text.isprintable():
        raise SessionError(f"{path} does not hold one line of text")
    return text
