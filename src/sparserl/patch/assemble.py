"""Changes in, a patch out: buckets are cut, encoded and collected here, for every patch that is made."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from .. import plan
from ..errors import LimitExceeded, TensorMismatch
from ..files import replacing
from ..parallel import ordered, thread_count
from ..plan import Chooser, Draft, Link, Speeds
from ..plan.buckets import EncodedBucket
from ..weights.table import TensorTable
from ..wire import BytesOnDisk, PatchReader, PatchWriter, encoded_table, limits
from .contents import Bucket, BucketList, Contents, Ends

PatchPath = str | os.PathLike[str]


@dataclass(frozen=True)
class Encoding:
    """How buckets are encoded.

    Attributes:
        names: The profiles that may be used.
        chooser: Picks profiles for a link; None takes the smallest.
        threads: Threads that encode; None for as many as there are cores.
        ahead: How many buckets may wait to be taken; None for a few.
    """

    names: Sequence[str]
    chooser: Chooser | None = None
    threads: int | None = None
    ahead: int | None = None

    def buckets(self, table: TensorTable, drafts: Iterable[Draft]) -> Iterator[tuple[Bucket, int]]:
        """Encode drafts on threads: the bytes of each bucket and how many elements it changes, in order."""
        begun = (self._begin(draft, encoded_table(table).hash) for draft in drafts)
        for written in ordered(lambda finish: finish(), begun, self.threads, self.ahead, urgent=True):
            if written is not None:
                yield written

    def _begin(self, draft: Draft, table_hash: bytes) -> Callable[[], EncodedBucket]:
        """What is left to do for a bucket: of one that is coded already, only to find its checksum."""
        if self.chooser is None and draft.is_coded(self.names):
            return plan.begin(draft, self.names, table_hash)
        return partial(plan.write, draft, self.names, table_hash, self.chooser)


def profile_names(profile: str, profiles: Collection[str] | None = None) -> tuple[str, ...]:
    """The profiles to choose from for one that was asked for, of those that receivers can take; None for all."""
    names = plan.candidates(profile, profiles)
    if not names:
        raise TensorMismatch(f"profile {profile!r} cannot be written with {sorted(profiles or ())} alone")
    return names


def chooser_for(link: Link | str, threads: int | None) -> Chooser:
    """What picks profiles for a link, by what is known of this machine."""
    parsed = link if isinstance(link, Link) else Link.parse(link)
    return Chooser(parsed, Speeds.load_or_built_in(thread_count(threads)))


def collect(
    table: TensorTable,
    buckets: Iterable[tuple[Bucket, int]],
    ends: Callable[[int], Ends],
    to: PatchPath | BucketList | None = None,
) -> Contents:
    """Collect the buckets of a patch as they come: in memory, in a list that may spill to disk, or in a patch file.

    Args:
        table: The tensor table of the patch.
        buckets: The bytes of each bucket, and how many elements it changes.
        ends: Gives the ends of the patch for a number of changes. It is called when all buckets have come, since the
            digests may be known only then.
        to: A patch file, which takes its name when it is whole; a list for the buckets; or None for memory.
    """
    if to is None or isinstance(to, BucketList):
        bucket_list = BucketList() if to is None else to
        contents = Contents(table, ends(_take(buckets, bucket_list.add)), bucket_list)
        contents.require_limits()
        return contents
    with replacing(Path(to)) as file:
        writer = PatchWriter(file, table)
        writer.finish(*ends(_take(buckets, writer.add)))
    return Contents.from_image(PatchReader(BytesOnDisk(to), table))


def _take(buckets: Iterable[tuple[Bucket, int]], add: Callable[[Bucket], None]) -> int:
    """Add all buckets; how many elements they change."""
    changed = 0
    for bucket, count in buckets:
        if len(bucket) > limits.BUCKET_BYTES:
            raise LimitExceeded(f"a bucket takes {len(bucket)} bytes, the limit is {limits.BUCKET_BYTES}")
        add(bucket)
        changed += count
    return changed
