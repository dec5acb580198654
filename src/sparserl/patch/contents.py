"""What a patch consists of: a tensor table, two ends, and buckets, some of which may still be on their way.

A file image, with header and footer, exists only where a patch is saved or opened. Everything that reads patches
(`apply`, `compose`, `stats`) works on `Contents`; `Patch` is what users hold.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from tempfile import gettempdir
from typing import BinaryIO, NamedTuple, Protocol

from ..codec import Reader
from ..codec.profile import Allocator, empty
from ..errors import LimitExceeded, SessionError, Truncated
from ..files import unnamed
from ..parallel import ordered, thread_count
from ..weights.boxes import Places
from ..weights.digest import Digest
from ..weights.local import LocalWeights
from ..weights.shards import Place
from ..weights.table import TensorTable
from ..wire import (
    Footer,
    Head,
    HeadGatherer,
    PatchReader,
    PatchWriter,
    bucket_body,
    decode_bucket,
    encode_footer,
    encode_header,
    encoded_table,
    limits,
    read_bucket,
)
from ..wire.cursor import CHECKSUM_BYTES
from .decode import Decoded, decode

Bucket = bytes | memoryview

_LARGE_BUCKET = 1 << 20  # bytes on average, from which on checksums are worth several threads
_CHECKSUM_THREADS = 4
_LOOK = 0.2  # seconds of a wait after which its caller looks whether it should go on
_KEPT_ENTRIES = 1 << 20  # entries of buckets that stay parsed
_BUCKET_ENTRIES = 64  # a parsed bucket takes as much memory as so many entries


class Ends(NamedTuple):
    """Where a patch leads from and to, and how much it changes. `covers` is None where it covers the whole table."""

    base: Digest
    result: Digest
    changed: int
    covers: Sequence[Place] | None = None


class Buckets(Protocol):
    """Where the buckets of a patch are: in a file that was opened, or in a `BucketList`."""

    @property
    def sizes(self) -> Sequence[int]:
        """Bytes of each bucket that is here."""

    @property
    def in_memory(self) -> bool:
        """Whether the buckets are in memory that nobody writes to."""

    def __len__(self) -> int: ...

    def bucket(self, index: int) -> Bucket:
        """The bytes of a bucket; waits until it has arrived."""

    def arrivals(self) -> Iterable[int]:
        """The buckets by their numbers, each when it has arrived."""


class BucketList:
    """Buckets that are added one by one, by an encoder or by whoever receives them, while others may wait for them.

    Args:
        count: How many there will be, if that is known; else as many as have been added.
        source: Buckets that are encoded when they are needed, instead of being added.
        memory_bytes: Buckets beyond this many bytes go to a temporary file that has no name. None: all stay in memory.
        on_add: Called with every bucket that is added. It may wait, so that no more are encoded meanwhile.
        keep: False to keep no buckets at all, where they are only wanted by `on_add`.
        transient: Whether whoever reads buckets releases them: then none goes to a file, but `add` waits for room.
    """

    def __init__(
        self,
        count: int | None = None,
        *,
        source: Iterator[Bucket] | None = None,
        memory_bytes: int | None = None,
        on_add: Callable[[Bucket], None] | None = None,
        keep: bool = True,
        transient: bool = False,
    ) -> None:
        self.sizes: list[int] = []
        self._nbytes = 0
        self._count = count
        self._source = source
        self._encoding = threading.Lock()
        self._memory_bytes = memory_bytes
        self._on_add = on_add
        self._keeps = keep
        self.transient = transient
        self._waiting_bytes = 0  # of a transient list: added, and not released yet
        self._stored: list[memoryview | int | None] = []  # the bytes, or where they begin in the file; None if gone
        self._file: int | None = None
        self._arrived = threading.Condition()
        self._stopped = source is not None  # nobody else adds buckets

    @classmethod
    def of(cls, buckets: Iterable[Bucket]) -> BucketList:
        """Buckets that are all here, in memory."""
        bucket_list = cls()
        for bucket in buckets:
            bucket_list.add(bucket)
        return bucket_list

    def __len__(self) -> int:
        return len(self._stored) if self._count is None else self._count

    @property
    def in_memory(self) -> bool:
        return self._file is None

    def add(self, bucket: Bucket, look: Callable[[], None] = lambda: None) -> None:
        """Append a bucket that was encoded, or that has arrived.

        look: called now and then while a transient list has no room for it.
        """
        if self._on_add is not None:
            self._on_add(bucket)
        if self.transient and not self._wait_for_room(len(bucket), look):
            return  # nobody reads it
        stored = self._keep(bucket) if self._keeps else None
        with self._arrived:
            self._stored.append(stored)
            self.sizes.append(len(bucket))
            self._nbytes += len(bucket)
            self._arrived.notify_all()

    def stop(self) -> None:
        """Say that no more will arrive, for now: whoever waits for a bucket gets an error."""
        with self._arrived:
            self._stopped = True
            self._arrived.notify_all()

    def reopen(self) -> None:
        """Say that more will arrive after all."""
        self._stopped = False

    @property
    def arrived(self) -> int:
        """How many have been added."""
        return len(self._stored)

    def release(self, index: int) -> None:
        """Forget a bucket that was read, and will not be read again."""
        with self._arrived:
            self._waiting_bytes -= self.sizes[index]
            self._stored[index] = None
            self._arrived.notify_all()

    def arrivals(self) -> Iterator[int]:
        for index in range(len(self)):
            self._wait(index)
            yield index

    def bucket(self, index: int) -> Bucket:
        self._wait(index)
        stored = self._stored[index]
        if isinstance(stored, memoryview):
            return stored
        if stored is None:
            raise SessionError(f"bucket {index} is not kept any more")
        assert self._file is not None
        data = os.pread(self._file, self.sizes[index], stored)
        if len(data) != self.sizes[index]:
            raise Truncated(f"bucket {index}: {len(data)} of {self.sizes[index]} bytes")
        return data

    def _wait_for_room(self, nbytes: int, look: Callable[[], None]) -> bool:
        """Wait until the buckets in memory are few enough for one more; False if nobody reads them any more."""
        most = self._memory_bytes or 0

        def has_room() -> bool:
            return self._stopped or not self._waiting_bytes or self._waiting_bytes + nbytes <= most

        with self._arrived:
            while not self._arrived.wait_for(has_room, _LOOK):
                look()
            if not self._stopped:
                self._waiting_bytes += nbytes
            return not self._stopped

    def _keep(self, bucket: Bucket) -> memoryview | int:
        """Put a bucket where it stays: in memory, or behind the others in the file."""
        start = self._nbytes
        if self.transient or self._memory_bytes is None or start + len(bucket) <= self._memory_bytes:
            return memoryview(bucket).toreadonly()  # one kind of array for the kernels, wherever the bytes come from
        try:
            if self._file is None:
                self._file = self._open_file()
            rest = memoryview(bucket)
            while rest:
                rest = rest[os.pwrite(self._file, rest, start + len(bucket) - len(rest)) :]
        except OSError as error:
            folder = gettempdir()
            raise SessionError(
                f"a patch of {start + len(bucket)} bytes or more needs room in {folder}, or in TMPDIR: {error}"
            ) from error
        return start

    def _open_file(self) -> int:
        """A descriptor of a file without a name, which stays open as long as the buckets are in use."""
        with unnamed() as file:
            descriptor = os.dup(file.fileno())
        weakref.finalize(self, os.close, descriptor)
        return descriptor

    def _wait(self, index: int) -> None:
        """Return when a bucket is here."""
        if index < len(self._stored):
            return
        if self._source is not None:
            self._encode(index)
        with self._arrived:
            self._arrived.wait_for(lambda: self._stopped or index < len(self._stored))
            if index >= len(self._stored):
                raise SessionError(f"bucket {index} of {len(self)} never arrived")

    def _encode(self, index: int) -> None:
        """Take buckets from the source up to one of them."""
        assert self._source is not None
        with self._encoding:
            while index >= len(self._stored):
                bucket = next(self._source, None)
                if bucket is None:
                    return
                self.add(bucket)


class Contents:
    """The parts of a patch: a tensor table, its ends, and its buckets, which are parsed and checked when needed.

    Args:
        table: Names, dtypes and shapes of the weights.
        ends: What the patch leads from and to.
        buckets: Where the buckets are, or will be.
        table_hash: The hash of the table, if it is known; else it is computed once for all patches of the table.
        is_partial: Whether some buckets are left out: then there are fewer changes than the ends promise.
    """

    def __init__(
        self,
        table: TensorTable,
        ends: Ends,
        buckets: Buckets,
        table_hash: bytes | None = None,
        *,
        is_partial: bool = False,
    ) -> None:
        self.table = table
        self.ends = ends
        self.table_hash = encoded_table(table).hash if table_hash is None else table_hash
        self._buckets = buckets
        self._is_partial = is_partial
        self._opened: dict[int, tuple[Head, Reader]] = {}  # of buckets in memory, which are parsed once
        self._room = _KEPT_ENTRIES

    @classmethod
    def from_image(cls, image: PatchReader) -> Contents:
        """The contents of a patch file, which is read bucket by bucket."""
        footer = image.footer
        return cls(image.table, Ends(footer.base, footer.result, footer.changed, footer.covers), image, image.hash)

    @property
    def base(self) -> Digest:
        return self.ends.base

    @property
    def result(self) -> Digest:
        return self.ends.result

    @property
    def changed(self) -> int:
        return self.ends.changed

    @property
    def complete(self) -> bool:
        """Whether the whole tensor table is covered."""
        return self.ends.covers is None

    @property
    def covers(self) -> Sequence[Place]:
        """The regions that are covered."""
        covers = self.ends.covers
        if covers is None:
            return [(tensor, None) for tensor in range(len(self.table))]
        return covers if isinstance(covers, Places) else list(covers)

    def __len__(self) -> int:
        """The number of buckets."""
        return len(self._buckets)

    def bucket(self, index: int) -> Bucket:
        """The bytes of a bucket; waits until it has arrived."""
        return self._buckets.bucket(index)

    def arrivals(self) -> Iterable[int]:
        """The buckets by their numbers, each when it has arrived."""
        return self._buckets.arrivals()

    @cached_property
    def heads(self) -> Sequence[Head]:
        """The heads of all buckets.

        Reading them checks every checksum, that no entries overlap, and that they are what the ends promise.
        """
        return self._read_heads(1)

    def read_heads(self, threads: int | None) -> Sequence[Head]:
        """The heads of all buckets, read on so many threads if that is worth it."""
        if "heads" not in self.__dict__:
            self.__dict__["heads"] = self._read_heads(threads)
        return self.heads

    def accept_heads(self, gatherer: HeadGatherer) -> None:
        """Take over the heads of buckets that were read, and perhaps released, one by one; they are checked now."""
        self.require_limits()
        self.__dict__["heads"] = self._finish(gatherer)

    def release(self, index: int) -> None:
        """A bucket was read, and will not be read again: where buckets are transient, it is forgotten."""
        if isinstance(self._buckets, BucketList) and self._buckets.transient:
            self._opened.pop(index, None)
            self._buckets.release(index)

    def open_bucket(self, index: int) -> tuple[Head, Reader]:
        """The head of a bucket, and a reader of its streams."""
        head, reader = self._parsed(index)
        return head, reader.copy()

    def open_buckets(
        self, threads: int | None = None, which: Iterable[int] | None = None
    ) -> Iterator[tuple[int, Head, Reader]]:
        """All buckets in the order of their arrival, or those that are named, opened.

        Checksums are verified on a few threads where that takes longer than handing them over.
        """
        large = sum(self._buckets.sizes) > len(self) * _LARGE_BUCKET
        few = min(_CHECKSUM_THREADS, thread_count(threads)) if large else 1
        indices = self.arrivals() if which is None else which
        for index, body in ordered(lambda i: (i, None if i in self._opened else self._body(i)), indices, few):
            head, reader = self._parsed(index, body)
            yield index, head, reader.copy()

    def decode(
        self, index: int, base: LocalWeights | None = None, *, overwrite: bool = False, allocate: Allocator = empty
    ) -> Decoded:
        """Decode one bucket: positions and words of its sparse entries, bits of its dense ones.

        `ctx` buckets need the weights that the patch applies to. With `overwrite`, the new bits may be written to
        them at once: see `Decoded.overwritten`. Old bits then go into arrays that `allocate` makes.
        """
        lend = overwrite and self._buckets.in_memory
        return decode(*self.open_bucket(index), base, overwrite=overwrite, lend=lend, allocate=allocate)

    def decode_bytes(self, index: int, data: Bucket, base: LocalWeights | None = None) -> Decoded:
        """Decode a bucket from its bytes, which were read before."""
        return decode(*decode_bucket(data, self.table, self.table_hash, f"bucket {index}"), base)

    @property
    def nbytes(self) -> int:
        """Bytes of the patch as a file."""
        if isinstance(self._buckets, PatchReader):
            return self._buckets.size
        sizes = tuple(self._buckets.sizes)
        footer = Footer(*self.ends, sizes, bytes(CHECKSUM_BYTES * len(sizes)))
        return self.table_nbytes + sum(sizes) + len(encode_footer(footer, bytes(CHECKSUM_BYTES)))

    @property
    def table_nbytes(self) -> int:
        """Bytes of the file's header, with the tensor table."""
        if isinstance(self._buckets, PatchReader):
            return self._buckets.header_bytes
        return len(encode_header(encoded_table(self.table)))

    def write(self, file: BinaryIO) -> None:
        """Write the patch as a file: header, buckets, footer."""
        if isinstance(self._buckets, PatchReader):
            file.writelines(self._buckets.parts())
            return
        writer = PatchWriter(file, self.table)
        for index in range(len(self)):
            writer.add(self.bucket(index))
        writer.finish(*self.ends)

    def require_limits(self) -> None:
        """Refuse more changes or buckets than a patch of these weights may have."""
        bounds = [("changes", self.changed, self.table.elements), ("buckets", len(self), limits.BUCKETS)]
        for label, count, most in bounds:
            if count > most:
                raise LimitExceeded(f"the patch has {count} {label}, the limit is {most}")

    def _read_heads(self, threads: int | None) -> Sequence[Head]:
        self.require_limits()
        gatherer = HeadGatherer(self.table)
        for _, head, _ in self.open_buckets(threads):
            gatherer.add(head)
        return self._finish(gatherer)

    def _finish(self, gatherer: HeadGatherer) -> Sequence[Head]:
        changed = None if self._is_partial else self.changed
        return gatherer.finish(changed, self.ends.covers, self._checked_bytes(), lambda index: self._parsed(index)[0])

    def _checked_bytes(self) -> int:
        """Bytes that were read: they bound the work of checking that entries do not overlap."""
        return self._buckets.size if isinstance(self._buckets, PatchReader) else sum(self._buckets.sizes)

    def _body(self, index: int) -> memoryview:
        """The bytes of a bucket before its checksum."""
        data = self.bucket(index)
        if len(data) > limits.BUCKET_BYTES:
            raise LimitExceeded(f"bucket {index}: {len(data)} bytes, the limit is {limits.BUCKET_BYTES}")
        return bucket_body(data, f"bucket {index}")

    def _parsed(self, index: int, body: memoryview | None = None) -> tuple[Head, Reader]:
        """A bucket, opened; its reader is for copies."""
        opened = self._opened.get(index)
        if opened is None:
            body = self._body(index) if body is None else body
            opened = read_bucket(body, self.table, self.table_hash, f"bucket {index}")
            self._room -= len(opened[0].entries) + _BUCKET_ENTRIES
            if self._buckets.in_memory and self._room > 0:
                self._opened[index] = opened
        return opened
