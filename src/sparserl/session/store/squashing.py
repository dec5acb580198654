"""Squashed patches after the fact: one more way between two versions that a store has."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import replace

from ...errors import NotRetained, Refused, SessionError, Unavailable
from ...transport.stores.base import Store
from . import routes, signing, transfer
from .fields import parse, sha256
from .records import HEAD, MOST_HEAD, HeadRecord, RouteStep, path
from .retention import read_index, read_run
from .stored_run import StoredRun

_SWAPS = 8  # attempts at a head that others move meanwhile


def squash_versions(
    store: Store,
    base: int,
    version: int,
    *,
    signing_key: str | None = None,
    threads: int | None = None,
    clock: Callable[[], float] = time.time,
) -> RouteStep:
    """Write the patch from one version straight to a later one, and put it into the index.

    Weights of both versions are built from what the store has. A publisher that is at work takes the new index over
    with its next version. Where heads are signed, `signing_key` is the publisher's secret key.
    """
    head, _ = _head(store, signing_key)
    run = read_run(store, head)
    index = read_index(store, head)
    digests = routes.versions(index.steps)
    if base not in digests or version not in digests or not base < version:
        raise NotRetained(f"there is no way from version {base} to {version}: the store has {sorted(digests)[:20]}")
    if any((step.base, step.version) == (base, version) for step in index.steps):
        raise SessionError(f"there is a patch from version {base} to {version} already")
    if index.layout_of(base) != index.layout_of(version):
        raise SessionError(f"versions {base} and {version} have other tensors: no patch can stand between them")
    patch = StoredRun(store, head, run, index).patch(base, version, threads)
    step = transfer.send(store, run.run, patch).step(base, version, clock())
    for _ in range(_SWAPS):
        head, tag = _head(store, signing_key)
        if head.run != run.run:
            raise SessionError(f"run {run.run} has ended meanwhile; the store has run {head.run}")
        index = read_index(store, head)
        data = replace(index, steps=(*index.steps, step)).to_bytes()
        store.put(path(run.run, "index", sha256(data)), data)
        moved = replace(head, index=sha256(data), time=clock(), nonce=secrets.token_hex(8))
        try:
            store.swap(HEAD, signing.seal(moved.body(), signing_key), tag)
        except Refused:
            continue
        return step
    raise Unavailable(f"{store.url}: the head moves all the time; try again")


def _head(store: Store, signing_key: str | None) -> tuple[HeadRecord, str]:
    """The head, which must be one that we can sign again."""
    data, tag = store.get(HEAD, MOST_HEAD)
    if signing_key is None and parse(data, HEAD).get("key") is not None:
        raise SessionError("the heads of this store are signed: the publisher's secret key is needed")
    trusted_keys = None if signing_key is None else signing.public_key(signing_key)
    return HeadRecord.parse(signing.unseal(data, trusted_keys, HEAD)), tag
