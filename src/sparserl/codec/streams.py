"""The streams of a bucket: their ids, and how profiles write and read them chunk by chunk."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import IntEnum

from ..errors import FormatError, InvalidField, Truncated
from ..kernels.classes import MOST
from .coders import Buffer, Coder, Stored, by_entropy, squeeze


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
        return id in _NAMED or Stream.WORD_PLANE <= id < Stream.DENSE_PLANE + 8 or 0 <= id - Stream.CLASS < 4 * MOST

    @staticmethod
    def is_dense(id: int) -> bool:
        return id == Stream.DENSE or Stream.DENSE_PLANE <= id < Stream.DENSE_PLANE + 8


_NAMED = frozenset(int(s) for s in Stream)
_NOT_WORTH_CODING = frozenset(
    (
        *(Stream.POSITIONS, Stream.WORDS, Stream.CLASSES, Stream.DENSE),
        *(Stream.TILE_LOWS, Stream.GAP_LOWS, Stream.STEP_LOWS),
        *range(Stream.CLASS + 1, Stream.CLASS + 4 * MOST, 2),
    )
)
Chunks = dict[int, list[Buffer]]
Coded = dict[int, tuple[Coder, list[Buffer]]]


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
        self, coded: Mapping[int, tuple[Coder, list[Buffer]]], what: str = "bucket", body: Buffer = b""
    ) -> None:
        """body: all chunks, one behind the other, where they lie so."""
        self.what, self.body = what, body
        self._coded = coded
        self._taken = dict.fromkeys(coded, 0)

    def copy(self) -> Reader:
        """A reader of what is left."""
        other = Reader(self._coded, self.what, self.body)
        other._taken |= self._taken
        return other

    def take(self, stream: int, size: int) -> Buffer:
        """The next chunk of a stream, which must decode to exactly `size` bytes; absent streams are empty."""
        if size == 0 and stream not in self._coded:
            return b""
        coder, chunk = self._next(stream)
        try:
            return coder.decode(chunk, size)
        except FormatError as error:
            raise type(error)(f"{self.what}: stream {stream}: {error}") from error

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

    def places(self) -> Iterator[tuple[int, int, int, int]]:
        """Stream, coder, length and place in the body of every chunk."""
        at = 0
        for stream, (coder, chunks) in self._coded.items():
            for chunk in chunks:
                yield stream, coder.id, len(chunk), at
                at += len(chunk)

    def left(self) -> dict[int, tuple[Coder, list[Buffer]]]:
        """What nobody asked for yet, as it is coded, for whoever decodes it elsewhere."""
        rest = {stream: (coder, chunks[self._taken[stream] :]) for stream, (coder, chunks) in self._coded.items()}
        return {stream: (coder, chunks) for stream, (coder, chunks) in rest.items() if chunks}

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
