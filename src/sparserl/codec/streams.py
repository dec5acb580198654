"""The streams of a bucket: their ids, and how profiles write and read them chunk by chunk."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import FormatError, InvalidField, Truncated
from ..kernels import MOST_CLASSES
from .coders import Buffer, Coder, Rans, Row, Stored, Where, by_entropy, expand, squeeze, where


class Stream(IntEnum):
    """What a stream holds. Ids are part of the format."""

    ENTRIES = 0
    POSITIONS = 1
    WORDS = 2
    CLASSES = 3
    TILE_TOKENS = 4
    TILE_LOWS = 5
    GAP_TOKENS = 6
    GAP_LOWS = 7
    STEP_TOKENS = 8
    STEP_LOWS = 9
    DENSE = 10
    WORD_PLANE = 16  # to 23: one stream per byte of a word
    DENSE_PLANE = 24  # to 31
    CLASS = 64  # to 95: gap tokens, gap lows, step tokens and step lows of each class

    @staticmethod
    def known(id: int) -> bool:
        return id in _KNOWN

    @staticmethod
    def is_dense(id: int) -> bool:
        return id in _DENSE


_DENSE = frozenset((int(Stream.DENSE), *range(Stream.DENSE_PLANE, Stream.DENSE_PLANE + 8)))
_PLANES, _OF_CLASSES = (
    range(Stream.WORD_PLANE, Stream.WORD_PLANE + 8),
    range(Stream.CLASS, Stream.CLASS + 4 * MOST_CLASSES),
)
_KNOWN = frozenset((*map(int, Stream), *_PLANES, *_DENSE, *_OF_CLASSES))
_NOT_WORTH_CODING = frozenset(
    (
        *(Stream.POSITIONS, Stream.WORDS, Stream.CLASSES, Stream.DENSE),
        *(Stream.TILE_LOWS, Stream.GAP_LOWS, Stream.STEP_LOWS),
        *range(Stream.CLASS + 1, Stream.CLASS + 4 * MOST_CLASSES, 2),
    )
)
Chunks = dict[int, list[Buffer]]
Coded = dict[int, tuple[Coder, list[Buffer]]]


def empty(count: int, dtype: Any) -> npt.NDArray[Any]:
    """An array to be filled; one name for it, so that tests can poison every buffer."""
    return np.empty(count, dtype)


def code(streams: Chunks) -> Coded:
    """Every stream through the coder that suits it; empty streams are left out."""
    return {
        id: (Stored(), chunks) if id in _NOT_WORTH_CODING else (by_entropy if id >= Stream.CLASS else squeeze)(chunks)
        for id, chunks in streams.items()
        if any(map(len, chunks))
    }


class Reader:
    """Hands out decoded chunks and keeps the books: at the end every chunk must have been asked for."""

    def __init__(
        self, coded: Mapping[int, tuple[Coder, Sequence[Buffer]]], what: str = "bucket", body: Buffer = b""
    ) -> None:
        """body: all chunks, one behind the other, where they lie so."""
        self.what, self.body = what, body
        self._coded = coded
        self._taken = dict.fromkeys(coded, 0)
        self._decoded: dict[int, tuple[list[int], npt.NDArray[np.uint8]]] = {}

    def copy(self) -> Reader:
        """A reader of what is left."""
        other = Reader(self._coded, self.what, self.body)
        other._taken |= self._taken
        return other

    def decode_ahead(self, wanted: Mapping[int, list[int]]) -> None:
        """Decode what will be taken, streams and the sizes of all their chunks, in one go.

        Where something is wrong nothing happens, and whoever takes it will see what.
        """
        found = {s: sizes for s, sizes in wanted.items() if self._whole(s, Rans.id, len(sizes))}
        if not found:
            return
        places = [where(self._coded[stream][1]) for stream in found]
        at, length = np.concatenate([p.at for p in places]), np.concatenate([p.length for p in places])
        symbols = expand(Where(at, length, places), [n for sizes in found.values() for n in sizes])
        if symbols is not None:
            cuts = np.cumsum([sum(sizes) for sizes in found.values()])[:-1]
            for (stream, sizes), ready in zip(found.items(), np.split(symbols, cuts), strict=True):
                self._decoded[stream] = sizes, ready

    def _whole(self, stream: int, coder: int, count: int) -> bool:
        """Whether a stream is coded like this, in so many chunks, and nobody has taken any."""
        its_coder, chunks = self._coded.get(stream, (None, ()))
        return its_coder is not None and its_coder.id == coder and not self._taken[stream] and len(chunks) == count

    def take(self, stream: int, size: int) -> Buffer:
        """The next chunk of a stream, which must decode to exactly `size` bytes; absent streams are empty."""
        if size == 0 and stream not in self._coded:
            return b""
        coder, chunk = self._next(stream)
        try:
            return coder.decode(chunk, size)
        except FormatError as error:
            raise type(error)(f"{self.what}: stream {stream}: {error}") from error

    def take_all(self, stream: int, sizes: list[int]) -> npt.NDArray[np.uint8]:
        """The next chunks of a stream, of exactly so many bytes each when decoded, one behind the other."""
        known, ready = self._decoded.pop(stream, (None, None))
        if ready is not None and known == sizes and not self._taken[stream]:
            self._taken[stream] = len(sizes)
            return ready
        out, at = empty(sum(sizes), np.uint8), 0
        for size in sizes:
            out[at : at + size] = np.frombuffer(self.take(stream, size), np.uint8)
            at += size
        return out

    def take_items(self, stream: int, dtype: Any, sizes: list[int], lend: bool = False) -> npt.NDArray[Any]:
        """Items as they are, from chunks of so many.

        They may be lent: then they lie in the bucket itself, at any address, if nobody can write to it meanwhile.
        """
        lengths = [dtype.itemsize * size for size in sizes]
        if lend and (there := self._lent(stream, lengths)) is not None:
            self._taken[stream] = len(sizes)
            return np.frombuffer(there, dtype, sum(sizes))
        return self.take_all(stream, lengths).view(dtype)

    def _lent(self, stream: int, lengths: list[int]) -> Buffer | None:
        """A stream in the bucket, if its first chunks, of just these lengths, can be read there as they are."""
        coder, chunks = self._coded.get(stream, (None, None))
        if not isinstance(coder, Stored) or not isinstance(chunks, Row) or self._taken[stream]:
            return None
        safe = isinstance(getattr(chunks.data, "obj", chunks.data), bytes)
        return chunks.data if safe and chunks.sizes[: len(lengths)].tolist() == lengths else None

    def take_stored(self, stream: int, most: int) -> Buffer:
        """The next chunk of a stream whose length speaks for itself, up to `most` bytes."""
        if stream not in self._coded:
            return b""
        coder, chunk = self._next(stream)
        if coder.id != Stored.id or len(chunk) > most:
            raise InvalidField(
                f"{self.what}: stream {stream}: a chunk of low bits is coded or longer than {most} bytes"
            )
        return chunk

    def take_all_stored(self, stream: int, most: list[int]) -> Where:
        """Where the next chunks of such a stream are, of up to so many bytes each."""
        if self._whole(stream, Stored.id, len(most)):
            found = where(self._coded[stream][1])
            if (found.length <= np.array(most, np.int64)).all():
                self._taken[stream] = len(most)
                return found
        return where([self.take_stored(stream, size) for size in most])

    def rows(self) -> Iterator[tuple[int, int, int, npt.NDArray[np.int64]]]:
        """Stream, coder, place in the body, and the lengths of its chunks, of every stream."""
        at = 0
        for stream, (coder, chunks) in self._coded.items():
            sizes = chunks.sizes if isinstance(chunks, Row) else np.array([*map(len, chunks)], np.int64)
            yield stream, coder.id, at, sizes
            at += int(sizes.sum())

    def left(self) -> dict[int, tuple[Coder, Sequence[Buffer]]]:
        """What nobody asked for yet, as it is coded, for whoever decodes it elsewhere."""
        rest = ((stream, coder, chunks, self._taken[stream]) for stream, (coder, chunks) in self._coded.items())
        return {
            stream: (coder, chunks[taken:] if taken else chunks)
            for stream, coder, chunks, taken in rest
            if taken < len(chunks)
        }

    def finish(self) -> None:
        """Raise unless every chunk of every stream was used."""
        for stream, (_, chunks) in self._coded.items():
            if self._taken[stream] != len(chunks):
                left = len(chunks) - self._taken[stream]
                raise InvalidField(f"{self.what}: stream {stream} holds {left} chunk(s) too many")

    def _next(self, stream: int) -> tuple[Coder, Buffer]:
        if stream not in self._coded or self._taken[stream] >= len(self._coded[stream][1]):
            raise Truncated(f"{self.what}: stream {stream} ends before its last chunk")
        coder, chunks = self._coded[stream]
        self._taken[stream] += 1
        return coder, chunks[self._taken[stream] - 1]
