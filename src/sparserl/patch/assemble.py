"""Changes in, a patch out: the one way every patch is written."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import BinaryIO

from .. import plan
from ..files import replacing
from ..parallel import ordered
from ..plan import Changes, Chooser, Draft
from ..weights.digest import Digest
from ..weights.shards import Place
from ..weights.table import TensorTable
from ..wire import InParts, OnDisk, PatchReader, PatchWriter

Target = str | os.PathLike[str] | BinaryIO | None  # where a patch is written; an open file may have no name


def assemble(
    table: TensorTable,
    parts: Iterable[Changes | Draft],
    profile: str,
    digests: Callable[[], tuple[Digest, Digest]],
    covers: Sequence[Place] | None,
    to: Target = None,
    threads: int | None = None,
    chooser: Chooser | None = None,
    ahead: int | None = None,
) -> PatchReader:
    """Cut routed changes into buckets, encode them on threads, and write them in order as they come.

    `digests` is called when all changes went through: only then are base and result known. Without `to` the patch
    stays in memory; with a path, the file gets its name when it is whole; an open file is written to as it is.
    `chooser` picks profiles for a link. `ahead` is how many buckets may wait to be written.
    """
    names = plan.candidates(profile)

    def write(writer: PatchWriter) -> None:
        changed = 0

        def begun(draft: Draft) -> Callable[[], plan.Written]:
            """What is left to do for a bucket: of one that is coded already, only to find its checksum."""
            if draft.light and chooser is None:  # else another profile may be wanted
                return plan.begin(draft, names, writer.hash)
            return partial(plan.write, draft, names, writer.hash, chooser)

        for written in ordered(lambda rest: rest(), map(begun, plan.cut(parts)), threads, ahead, urgent=True):
            if written is not None:
                bucket, count = written
                writer.add(bucket)
                changed += count
        writer.finish(*digests(), changed, covers)

    return _written(table, write, to)


def rewrite(
    table: TensorTable,
    buckets: Iterable[bytes | memoryview],
    base: Digest,
    result: Digest,
    changed: int,
    covers: Sequence[Place] | None,
    to: Target = None,
) -> PatchReader:
    """A patch of buckets that are written already."""

    def write(writer: PatchWriter) -> None:
        for bucket in buckets:
            writer.add(bytes(bucket))
        writer.finish(base, result, changed, covers)

    return _written(table, write, to)


def _written(table: TensorTable, write: Callable[[PatchWriter], None], to: Target) -> PatchReader:
    if to is None:
        parts = InParts()
        write(PatchWriter(parts, table))
        return PatchReader(parts, table)
    if isinstance(to, str | os.PathLike):
        with replacing(Path(to)) as file:
            write(PatchWriter(file, table))
        return PatchReader(OnDisk(to), table)
    write(PatchWriter(to, table))
    to.flush()
    return PatchReader(OnDisk(os.dup(to.fileno())), table)
