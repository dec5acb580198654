"""The store at a URL."""

from __future__ import annotations

from typing import Any

from ...errors import StoreError
from .base import Retry, Store


def open_store(url: str, *, token: str | None = None, retry: Retry | None = None, **options: Any) -> Store:
    """Open the store at a URL.

    Args:
        url: `file:///path`, `s3://bucket/path`, `gs://bucket/path` or `az://container/path`, to read and to write;
            `http(s)://host/path`, as `sparserl serve` offers it, to read.
        token: sent as `Authorization: Bearer …` to an http(s) store.
        retry: how often transient failures of a network are retried.
        options: those of obstore's stores: `endpoint`, `region`, `client_options` and so on. An http(s) store knows
            some of the `client_options`; a folder has none.

    Returns:
        The store. Nothing is read yet.

    Raises:
        StoreError: the URL or an option cannot be used, or the package for this kind of store is not installed.

    >>> open_store("file:///tmp/run").url
    'file:///tmp/run'
    """
    scheme, _, rest = url.partition("://")
    if not rest:
        raise StoreError(f"{url!r} is not a URL; write file:///path, s3://bucket/path or https://host/path")
    if scheme == "file":
        from .folder import FolderStore

        return FolderStore(rest)
    if scheme in ("http", "https"):
        from .web import WebStore

        return WebStore(url, token=token, retry=retry or Retry(), options=options)
    from .objects import ObjectStore

    return ObjectStore(url, retry=retry or Retry(), options=options)
