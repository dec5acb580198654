"""The store at a URL."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from ...errors import SessionError, StoreError
from ...files import path_of
from .base import Retry, Store

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")
OBJECT_STORAGE = ("s3", "gs", "az")


def scheme_of(url: object) -> str:
    """The scheme of a store's URL, in lower case; `file` for a path.

    Raises:
        StoreError: It is no URL of a store, but too much like one to be a path; or it is no text at all.
    """
    is_text = isinstance(url, str | os.PathLike)
    text = str(url)
    scheme, separator, rest = text.partition("://")
    if is_text and not separator and not _SCHEME.match(text):
        if not text:
            raise StoreError("the URL of a store is empty")
        return "file"
    scheme = scheme.lower()
    if not is_text or not rest or scheme not in ("file", "http", "https", *OBJECT_STORAGE):
        raise StoreError(
            f"{text if is_text else url!r} is not the URL of a store; write a path, file:///path, s3://bucket/path, "
            "gs://bucket/path, az://container/path or https://host/path"
        )
    return scheme


def open_store(
    url: str | Path,
    *,
    token: str | None = None,
    ca: str | Path | None = None,
    retry: Retry | None = None,
    **options: Any,
) -> Store:
    """Open the store at a URL.

    Args:
        url: The path of a folder, or its URL `file:///path`, in which `%20` is a space, `s3://bucket/path`,
            `gs://bucket/path` or `az://container/path`, to read and to write; `http(s)://host/path`, as `sparserl
            serve` offers it, to read.
        token: sent as `Authorization: Bearer …` to an http(s) store.
        ca: a file with certificates, in PEM, of authorities to trust besides those of the system; by default the one
            that the environment variable SSL_CERT_FILE names.
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
    scheme = scheme_of(url)
    if ca is not None:
        options = _trusting(options, Path(ca))
    if scheme == "file":
        from .folder import FolderStore

        return FolderStore(_expanded(path_of(url)))
    url = scheme + str(url)[len(scheme) :]
    if scheme in ("http", "https"):
        from .web import WebStore

        return WebStore(url, token=token, retry=retry or Retry(), options=options)
    from .objects import ObjectStore

    if ca is None and (bundle := os.environ.get("SSL_CERT_FILE")) and Path(bundle).is_file():
        options = _trusting(options, Path(bundle))  # as Python does on its own for http(s) stores

    return ObjectStore(url, retry=retry or Retry(), options=options)


def store_at(url: str | Path | Store, token: str | None = None) -> Store:
    """The store at a URL, or one that is open."""
    if isinstance(url, str | Path):
        return open_store(url, token=token)
    if not hasattr(url, "url"):
        scheme_of(url)  # refuses it
    return url


def open_writable(url: str | Path | Store) -> Store:
    """The store at a URL, or one that is open, which must be one that can be written to."""
    store = store_at(url)
    if not store.writable:
        raise SessionError(f"{store.url} can only be read; publish to a folder or an object store")
    return store


def _trusting(options: dict[str, Any], ca: Path) -> dict[str, Any]:
    """Options with the certificates of a file, unless they have others."""
    try:
        certificates = ca.read_bytes()
    except OSError as error:
        raise StoreError(f"the certificates in {ca} cannot be read: {error.strerror}") from error
    if b"BEGIN CERTIFICATE" not in certificates:
        raise StoreError(f"{ca} has no certificates in PEM")
    client = {"root_certificate": certificates, **(options.get("client_options") or {})}
    return {**options, "client_options": client}


def _expanded(path: Path) -> Path:
    try:
        if b"\0" in os.fsencode(path):
            raise StoreError(f"{str(path)!r}: no path can be so: it has a zero in it")
        return path.expanduser()
    except UnicodeEncodeError as error:
        raise StoreError(f"{str(path)!r}: no path can be so: {error.reason}") from None
    except RuntimeError as error:
        raise StoreError(f"{str(path)!r}: {error}") from error
