"""`Patch`: all changes from one version of the weights to another."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from ..codec import Reader
from ..codec.profile import Room, empty
from ..files import replacing
from ..parallel import Progress, ordered, thread_count
from ..weights.boxes import Places
from ..weights.digest import Digest
from ..weights.local import LocalWeights
from ..weights.memory import Weights
from ..weights.region import Region, whole
from ..weights.shards import Place, Shards
from ..weights.table import TensorTable
from ..wire import Head, InMemory, OnDisk, PatchReader, decode_bucket, gather_heads, read_bucket, unsealed
from .assemble import Target
from .decode import Decoded, decode

if TYPE_CHECKING:
    from .apply import Applied
    from .stats import Stats

_LARGE, _FEW = 1 << 20, 4  # bytes of a bucket; threads
_ROOM, _HEAD = 1 << 20, 64  # entries of buckets that stay parsed; a bucket takes as much memory as so many


@dataclass(frozen=True)
class Entry:
    """The changes of one region, as the entry table has them: nothing is decoded."""

    tensor: str
    region: Region
    elements: int
    changed: int
    dense: bool
    profile: str
    bucket: int


class Patch:
    """All changes from a base to a result, both known by their digests.

    Made by `diff`, `squash`, `merge` and `invert`, read by `open` and `from_bytes`. A patch is immutable; its
    buckets are read one at a time, from memory or from disk.
    """

    def __init__(self, reader: PatchReader) -> None:
        self._reader = reader
        self._opened: dict[int, tuple[Head, Reader]] = {}  # of a patch in memory, whose buckets are parsed once
        self._room = _ROOM

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Patch:
        """A patch file. Header and footer are read and checked now, buckets when they are needed."""
        return cls(PatchReader(OnDisk(path)))

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> Patch:
        """A patch from its bytes, which must not change as long as it is in use."""
        return cls(PatchReader(InMemory(data)))

    def to_bytes(self) -> bytes:
        """The whole patch, as it would stand in a file."""
        return b"".join(bytes(part) for part in self._reader.parts())

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the patch to a file, which takes its name when it is whole."""
        with replacing(Path(path)) as file:
            for part in self._reader.parts():
                file.write(part)

    @property
    def table(self) -> TensorTable:
        """Names, dtypes and shapes of the weights."""
        return self._reader.table

    @property
    def base(self) -> Digest:
        """The digest of the weights this patch applies to."""
        return self._reader.footer.base

    @property
    def result(self) -> Digest:
        """The digest of the weights it makes of them."""
        return self._reader.footer.result

    @property
    def changed(self) -> int:
        """How many elements change."""
        return self._reader.footer.changed

    @property
    def nbytes(self) -> int:
        """Size of the patch, tensor table included."""
        return self._reader.size

    @property
    def table_nbytes(self) -> int:
        """The part of it that is the header with the tensor table, which a run sends once."""
        return self._reader.header_bytes

    @property
    def complete(self) -> bool:
        """Whether the patch speaks for the whole tensor table, or only for some regions of it."""
        return self._reader.footer.covers is None

    @property
    def covers(self) -> Sequence[Place]:
        """The regions it speaks for."""
        covers = self._reader.footer.covers
        if covers is None:
            return [(i, None) for i in range(len(self.table))]
        return covers if isinstance(covers, Places) else list(covers)

    @property
    def buckets(self) -> int:
        """Number of buckets."""
        return len(self._reader)

    def ready(self) -> Iterable[int]:
        """The buckets by their numbers; of a patch that is still arriving, each when it has come."""
        return self._reader.ready()

    def bucket(self, index: int) -> bytes | memoryview:
        """The bytes of one bucket."""
        return self._reader.bucket(index)

    @cached_property
    def heads(self) -> Sequence[Head]:
        """What each bucket says about itself.

        Reading them checks every checksum, that no entries overlap, and that they are what the footer promises.
        """
        return self._heads(1)

    def read_heads(self, threads: int | None) -> Sequence[Head]:
        """The same, read on so many threads if that is worth it."""
        if "heads" not in self.__dict__:
            self.__dict__["heads"] = self._heads(threads)
        return self.heads

    def __iter__(self) -> Iterator[Entry]:
        """The entries, bucket by bucket, without decoding their changes."""
        for index, head in enumerate(self.heads):
            entries = head.entries
            for e, tensor in enumerate(entries.tensor.tolist()):
                spec = self.table[tensor]
                yield Entry(
                    spec.name,
                    entries.region[e] or whole(spec.shape),
                    int(entries.numel[e]),
                    int(entries.count[e]),
                    bool(entries.dense[e]),
                    head.profile.name,
                    index,
                )

    def decode(
        self, index: int, base: LocalWeights | None = None, *, land: bool = False, room: Room = empty
    ) -> Decoded:
        """One bucket, decoded: positions and words of its sparse entries, bits of its dense ones.

        `ctx` buckets need the weights that the patch applies to. With `land`, the new bits may be written to them at
        once: see `Decoded.landed`. What has to be remembered then goes where there is `room`.
        """
        return decode(*self.opened(index), base, land=land, lend=land and self._reader.in_memory, room=room)

    def opened(self, index: int) -> tuple[Head, Reader]:
        """What a bucket says about itself, and a reader of its streams."""
        head, reader = self._parsed(index)
        return head, reader.copy()

    def opening(
        self, threads: int | None = None, which: Iterable[int] | None = None
    ) -> Iterator[tuple[int, Head, Reader]]:
        """All buckets as they are ready, or those that are named, opened.

        Checksums are found on a few threads, where they take longer than these cost.
        """
        few = min(_FEW, thread_count(threads)) if self.nbytes > self.buckets * _LARGE else 1
        named = self.ready() if which is None else which
        for index, body in ordered(lambda i: (i, None if i in self._opened else self._body(i)), named, few):
            head, reader = self._parsed(index, body)
            yield index, head, reader.copy()

    def parse(self, index: int, data: bytes | memoryview, base: LocalWeights | None = None) -> Decoded:
        """The bytes of a bucket, decoded."""
        return decode(*self._open(index, data), base)

    def apply(
        self,
        weights: Weights | Shards,
        *,
        digest: Digest | None = None,
        threads: int | None = None,
        progress: Progress | None = None,
    ) -> Applied:
        """Turn the base into the result, in place. See `sparserl.patch.apply.apply`."""
        from .apply import apply

        return apply(self, weights, digest=digest, threads=threads, progress=progress)

    def invert(
        self,
        base: Weights | Shards | None = None,
        *,
        digest: Digest | None = None,
        profile: str = "auto",
        to: Target = None,
        threads: int | None = None,
    ) -> Patch:
        """The patch that undoes this one. See `sparserl.patch.compose.invert`."""
        from .compose import invert

        return invert(self, base, digest=digest, profile=profile, to=to, threads=threads)

    def stats(self) -> Stats:
        """Sizes and densities, per tensor, per bucket and in total."""
        from .stats import stats

        return stats(self)

    def __repr__(self) -> str:
        return f"<Patch {self.base.hex[:8]}→{self.result.hex[:8]}: {self.changed} changed, {self.nbytes} bytes>"

    def _open(self, index: int, data: bytes | memoryview) -> tuple[Head, Reader]:
        return decode_bucket(data, self.table, self._reader.hash, f"bucket {index}")

    def _body(self, index: int) -> memoryview:
        """What stands before the checksum of a bucket."""
        return unsealed(self.bucket(index), f"bucket {index}")

    def _parsed(self, index: int, body: memoryview | None = None) -> tuple[Head, Reader]:
        """A bucket, opened; its reader is for copies."""
        if (opened := self._opened.get(index)) is None:
            body = self._body(index) if body is None else body
            opened = read_bucket(body, self.table, self._reader.hash, f"bucket {index}")
            self._room -= len(opened[0].entries) + _HEAD
            if self._reader.in_memory and self._room > 0:
                self._opened[index] = opened
        return opened

    def _heads(self, threads: int | None) -> Sequence[Head]:
        footer = self._reader.footer
        heads = (head for _, head, _ in self.opening(threads, range(self.buckets)))
        return gather_heads(
            heads, self.table, footer.changed, footer.covers, self._reader.size, lambda index: self._parsed(index)[0]
        )
