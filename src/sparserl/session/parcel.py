"""Patches in a store: writing one as buckets and a manifest, and reading it back, checked."""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ..bits import Bits
from ..digest import Digest, digest
from ..errors import ChecksumMismatch, InvalidField, LimitExceeded
from ..memory import Weights, memories
from ..parallel import Progress
from ..patch import Patch, diff
from ..patch.assemble import rewrite
from ..table import TensorTable
from ..transport.store import Store, fetch
from .records import Blob, Manifest, Step, get_named, path, require_hash, sha256

AT_ONCE = 8  # transfers
SPOOL_BYTES = 256 << 20  # patches that may be larger than this lie on disk


def zeros(table: TensorTable) -> dict[str, Bits]:
    """Weights in which every bit is zero: what an anchor is a patch of. Pages not written to take no memory."""
    try:
        return {spec.name: Bits(np.zeros(spec.shape, spec.dtype.uint), spec.dtype) for spec in table.specs}
    except (MemoryError, ValueError) as error:
        raise LimitExceeded(f"there is no room for {table.dense_bytes} bytes of weights: {error}") from error


def copied(weights: Weights) -> dict[str, Bits]:
    """Bits of our own, which nobody else writes to."""
    held = memories(weights).items()
    return {name: Bits(np.array(memory.view(), copy=True, order="C"), memory.dtype) for name, memory in held}


def built(
    table: TensorTable,
    patches: Iterable[Patch],
    wanted: Digest,
    threads: int | None = None,
    start: tuple[dict[str, Bits], Digest] | None = None,
) -> dict[str, Bits]:
    """Weights that patches lead to, which must have a digest: from a start that is written to, or from nothing."""
    weights, at = start or ((blank := zeros(table)), digest(blank, threads=threads))
    for patch in patches:
        patch.apply(weights, digest=at, threads=threads)
        at = patch.result
    if at != wanted:
        raise ChecksumMismatch(f"the patches lead to {at}, not to {wanted}")
    return weights


def anchor_of(weights: Weights, table: TensorTable, threads: int | None = None) -> Patch:
    """All weights, as the patch that makes them of nothing."""
    with spool(table.dense_bytes) as to:
        return diff(zeros(table), weights, to=to, threads=threads)


@contextmanager
def spool(size: int) -> Iterator[Path | None]:
    """A file for a patch of that size, which is gone when nobody has it open any more; None where memory will do."""
    if size <= SPOOL_BYTES:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="sparserl-") as folder:
        yield Path(folder) / "patch"


def send(store: Store, run: str, patch: Patch, progress: Progress | None = None) -> tuple[str, int]:
    """Write buckets, then the manifest. Returns its hash, and the bytes written."""
    manifest = Manifest(run, secrets.token_hex(8), patch.base, patch.result, patch.changed, ())

    def put(index: int) -> Blob:
        data = patch.bucket(index)
        blob = Blob(sha256(data), len(data))
        store.put(manifest.bucket(blob), data)
        return blob

    blobs = []
    for blob in _ahead(put, range(patch.buckets)):
        blobs.append(blob)
        if progress is not None:
            progress(blob.size)
    record = replace(manifest, buckets=tuple(blobs)).to_bytes()
    hash = sha256(record)
    store.put(path(run, "manifests", hash), record)
    return hash, len(record) + sum(blob.size for blob in blobs)


def receive(
    store: Store,
    run: str,
    table: TensorTable,
    step: Step,
    progress: Progress | None = None,
) -> Patch:
    """The patch of a step: every byte is the one that manifest and index promise."""
    what = path(run, "manifests", step.manifest)
    manifest = Manifest.parse(get_named(store, run, "manifests", step.manifest), what)
    starts = manifest.base if step.base_digest is None else step.base_digest
    if manifest.run != run or manifest.base != starts or manifest.result != step.digest:
        raise InvalidField(f"{what} is not the manifest of {step.name} in run {run}")

    def get(blob: Blob) -> bytes:
        name = manifest.bucket(blob)
        data = fetch(store, name, blob.size, ranges)
        require_hash(data, blob.hash, name)
        if progress is not None:
            progress(blob.size)
        return data

    size = sum(blob.size for blob in manifest.buckets)
    if size != step.bytes:
        raise InvalidField(f"{what}: buckets of {size} bytes, the index promises {step.bytes}")
    with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="sparserl-range") as ranges, spool(size) as to:
        buckets = _ahead(get, manifest.buckets)
        patch = Patch(rewrite(table, buckets, manifest.base, manifest.result, manifest.changed, None, to))
    patch.heads  # noqa: B018  # reading them checks every bucket
    return patch


def _ahead(work: Any, items: Iterable[Any]) -> Iterator[Any]:
    """`map` on a few threads of its own, in order, with a bounded number in flight."""
    pool = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="sparserl-transfer")
    flight: list[Any] = []
    try:
        for item in items:
            flight.append(pool.submit(work, item))
            while len(flight) > 2 * AT_ONCE:
                yield flight.pop(0).result()
        while flight:
            yield flight.pop(0).result()
    finally:
        pool.shutdown(cancel_futures=True)
