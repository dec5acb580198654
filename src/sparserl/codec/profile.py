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

__all__ = ["Classes", "Counts", "Found", "Layout", "Positions", "Profile", "Room", "empty"]

Room = Callable[[int, Any], npt.NDArray[Any]]  # a count and a dtype; an array to be filled
Positions = npt.NDArray[np.uint32]
Counts = npt.NDArray[np.int64]


class Classes(NamedTuple):
    """How elements are told apart by the magnitude of their old bits, shifted right: by the thresholds it reaches."""

    shift: int
    thresholds: tuple[int, ...]


class Found(NamedTuple):
    """What a profile read: positions, words, and the old bits where it saw them.

    The positions of an entry rise, but for `conditional` profiles, which find them class by class, stretch by stretch.
    Where such a profile was told to `land` the changes, the words are the new bits, which are in place.
    """

    positions: Positions
    words: UIntArray
    old: UIntArray | None = None


@dataclass(frozen=True)
class Layout:
    """What both sides know before the streams: the sparse entries of a bucket and how the streams are cut."""

    dtype: DType
    numel: Counts  # elements of each entry's region
    count: Counts  # changes of each entry
    tile_log: int
    chunk_log: int
    old: Counts | None = None  # addresses of the entries' old bits, in row-major order, where they are at hand
    classes: Classes | None = None  # of a writer; a reader finds them in a stream
    land: bool = False  # whether a reader that sees the old bits writes the new ones over them
    lend: bool = False  # whether what a reader finds may lie in the bucket's own memory
    room: Room = empty  # where a reader puts positions, and the old bits or what they can take the place of

    @cached_property
    def changes(self) -> int:
        return int(self.count.sum())

    def spans(self, parts: Sequence[Positions]) -> Iterator[tuple[slice, slice]]:
        """The entries that each of some parts has the changes of, and which of all changes these are."""
        upto, entry, at = np.cumsum(self.count), 0, 0
        for end in accumulate(part.size for part in parts):
            last = int(np.searchsorted(upto, end)) + 1
            yield slice(entry, last), slice(at, end)
            entry, at = last, end

    def chunk_sizes(self, total: int) -> list[int]:
        """Lengths of the chunks that `total` things are cut into."""
        chunk = 1 << self.chunk_log
        return [min(chunk, total - i) for i in range(0, total, chunk)]

    def cut(self, items: npt.NDArray[Any]) -> list[Buffer]:
        """The bytes of contiguous items, cut into chunks."""
        view = items.view(np.uint8).data
        step = items.itemsize << self.chunk_log
        return [view[i : i + step] for i in range(0, len(view), step)]


class Profile(Protocol):
    """How a bucket is encoded. `words` are the new bits where `absolute`, else zigzag steps from the old ones.

    `conditional` profiles look at the old bits, and cannot do without. A writer is given positions and words in parts,
    each of one entry or of several, so that none has to join them that can do without.
    """

    name: ClassVar[str]
    id: ClassVar[int]
    absolute: ClassVar[bool]
    tiled: ClassVar[bool]
    planar: ClassVar[bool]
    conditional: ClassVar[bool]

    def encode(self, layout: Layout, positions: Sequence[Positions], words: Sequence[UIntArray]) -> Chunks: ...

    def decode(self, layout: Layout, reader: Reader) -> Found: ...
