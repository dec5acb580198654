"""What a profile is: a way to write the changes of one bucket as streams, and to read them back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from ..weights.dtypes import DType, UIntArray
from .coders import Buffer
from .streams import Chunks, Reader, empty

__all__ = ["Allocator", "BucketLayout", "Classes", "Counts", "DecodedChanges", "Positions", "Profile", "empty"]

Allocator = Callable[[int, Any], npt.NDArray[Any]]  # from a count and a dtype, an array to be filled
Positions = npt.NDArray[np.uint32]
Counts = npt.NDArray[np.int64]


class Classes(NamedTuple):
    """How elements are put into classes: by how many thresholds the magnitude of their old bits, shifted, reaches."""

    shift: int
    thresholds: tuple[int, ...]


class DecodedChanges(NamedTuple):
    """The changes that a profile decoded: positions, words, and the old bits if the profile read them.

    The positions of an entry rise, except in `conditional` profiles, which decode them class by class. If such a
    profile was told to `overwrite` the old bits, the words are the new bits, which are in place.
    """

    positions: Positions
    words: UIntArray
    old: UIntArray | None = None


@dataclass(frozen=True)
class BucketLayout:
    """What writer and reader know before the streams: the sparse entries of a bucket and how streams are cut."""

    dtype: DType
    numel: Counts  # elements of each entry's region
    count: Counts  # changes of each entry
    tile_log: int
    chunk_log: int
    old_addresses: Counts | None = None  # of the entries' old bits, in row-major order, if they are in memory
    classes: Classes | None = None  # for a writer; a reader decodes them from a stream
    overwrite: bool = False  # whether a reader that reads the old bits writes the new ones over them
    lend: bool = False  # whether decoded positions and words may lie in the bucket's own memory
    allocate: Allocator = empty  # makes arrays for positions, and for old bits or steps
    old_bits: Sequence[UIntArray] | None = None  # for a writer: of the changes, if the addresses have new bits

    @cached_property
    def changes(self) -> int:
        return int(self.count.sum())

    def spans(self, parts: Sequence[Positions]) -> Iterator[tuple[slice, slice]]:
        """For each part, the entries that its changes belong to, and which of all changes they are."""
        entry_ends = np.cumsum(self.count)
        entry = 0
        start = 0
        for end in accumulate(part.size for part in parts):
            last = int(np.searchsorted(entry_ends, end)) + 1
            yield slice(entry, last), slice(start, end)
            entry = last
            start = end

    def chunk_sizes(self, total: int) -> list[int]:
        """Lengths of the chunks that `total` items are cut into."""
        chunk = 1 << self.chunk_log
        return [min(chunk, total - i) for i in range(0, total, chunk)]

    def cut(self, items: npt.NDArray[Any]) -> list[Buffer]:
        """The bytes of contiguous items, cut into chunks."""
        view = items.view(np.uint8).data
        step = items.itemsize << self.chunk_log
        return [view[i : i + step] for i in range(0, len(view), step)]


class Profile(Protocol):
    """A way to encode a bucket.

    Attributes:
        name: The name that users give.
        id: The number in the format.
        absolute: Whether words are the new bits; otherwise they are zigzag steps from the old bits.
        tiled: Whether positions are encoded as gaps inside tiles.
        planar: Whether the bits of dense entries are encoded as byte planes.
        conditional: Whether encoding and decoding need the old bits of all regions.
    """

    name: ClassVar[str]
    id: ClassVar[int]
    absolute: ClassVar[bool]
    tiled: ClassVar[bool]
    planar: ClassVar[bool]
    conditional: ClassVar[bool]

    def encode(self, layout: BucketLayout, positions: Sequence[Positions], words: Sequence[UIntArray]) -> Chunks:
        """The streams of changes, given in parts of one or more entries each, so that they need not be joined."""
        ...

    def decode(self, layout: BucketLayout, reader: Reader) -> DecodedChanges:
        """The changes that `encode` wrote; a `FormatError` for anything that it would not have written."""
        ...
