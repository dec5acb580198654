"""The streams of a bucket: their ids, and how profiles write and read them chunk by chunk."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import FormatError, InvalidField, Truncated
from ..kernels import MOST_CLASSES
from .coders import (
    AdjacentChunks,
    Buffer,
    ChunkAddresses,
    Coder,
    Rans,
    Stored,
    chunk_addresses,
    decode_chunks,
    encode_by_entropy,
    encode_smallest,
)


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
    def is_known(id: int) -> bool:
        return id in _KNOWN

    @staticmethod
    def is_dense(id: int) -> bool:
        return id in _DENSE


_DENSE = frozenset((int(Stream.DENSE), *range(Stream.DENSE_PLANE, Stream.DENSE_PLANE + 8)))
_PLANES = range(Stream.WORD_PLANE, Stream.WORD_PLANE + 8)
_OF_CLASSES = range(Stream.CLASS, Stream.CLASS + 4 * MOST_CLASSES)
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
    """An array to be filled. All of them are made here, so that tests can poison every buffer."""
    return np.empty(count, dtype)


def encode_streams(streams: Chunks) -> Coded:
    """Encode every stream with the coder that suits it; empty streams are left out."""
    return {id: _encode(id, chunks) for id, chunks in streams.items() if any(map(len, chunks))}


def _encode(id: int, chunks: list[Buffer]) -> tuple[Coder, list[Buffer]]:
    if id in _NOT_WORTH_CODING:
        return Stored(), chunks
    return encode_by_entropy(chunks) if id >= Stream.CLASS else encode_smallest(chunks)


class Reader:
    """Decodes the chunks of a bucket in order, and checks at the end that every chunk was read."""

    def __init__(
        self, coded: Mapping[int, tuple[Coder, Sequence[Buffer]]], label: str = "bucket", body: Buffer = b""
    ) -> None:
        """`body` has all chunks, one behind the other, if they lie so in memory. `what` names the bucket in errors."""
        self.label = label
        self.body = body
        self._coded = coded
        self._taken = dict.fromkeys(coded, 0)
        self._decoded: dict[int, tuple[list[int], npt.NDArray[np.uint8]]] = {}

    def copy(self) -> Reader:
        """A reader that continues where this one is."""
        other = Reader(self._coded, self.label, self.body)
        other._taken |= self._taken
        return other

    def decode_ahead(self, chunk_sizes: Mapping[int, list[int]]) -> None:
        """Decode streams that will be taken in one call, given the sizes of all chunks of each.

        If something is wrong with them, nothing is decoded here, and `take` raises the error.
        """
        streams = {s: sizes for s, sizes in chunk_sizes.items() if self._is_untouched(s, Rans.id, len(sizes))}
        if not streams:
            return
        coded = [chunk_addresses(self._coded[stream][1]) for stream in streams]
        address = np.concatenate([c.address for c in coded])
        length = np.concatenate([c.length for c in coded])
        all_sizes = [n for sizes in streams.values() for n in sizes]
        symbols = decode_chunks(ChunkAddresses(address, length, coded), all_sizes)
        if symbols is not None:
            ends = np.cumsum([sum(sizes) for sizes in streams.values()])
            for (stream, sizes), decoded in zip(streams.items(), np.split(symbols, ends[:-1]), strict=True):
                self._decoded[stream] = (sizes, decoded)

    def _is_untouched(self, stream: int, coder_id: int, count: int) -> bool:
        """Whether a stream has this coder and this many chunks, and none of them was taken yet."""
        coder, chunks = self._coded.get(stream, (None, ()))
        return coder is not None and coder.id == coder_id and not self._taken[stream] and len(chunks) == count

    def take(self, stream: int, size: int) -> Buffer:
        """The next chunk of a stream, which must decode to exactly `size` bytes; absent streams are empty."""
        if size == 0 and stream not in self._coded:
            return b""
        coder, chunk = self._next(stream)
        try:
            return coder.decode(chunk, size)
        except FormatError as error:
            raise type(error)(f"{self.label}: stream {stream}: {error}") from error

    def take_all(self, stream: int, sizes: list[int]) -> npt.NDArray[np.uint8]:
        """The next chunks of a stream, one behind the other; they must decode to exactly these sizes in bytes."""
        decoded_sizes, decoded = self._decoded.pop(stream, (None, None))
        if decoded is not None and decoded_sizes == sizes and not self._taken[stream]:
            self._taken[stream] = len(sizes)
            return decoded
        if (stored := self._stored_bytes(stream, sizes)) is not None:
            self._taken[stream] = len(sizes)
            return stored.copy()
        out = empty(sum(sizes), np.uint8)
        start = 0
        for size in sizes:
            out[start : start + size] = np.frombuffer(self.take(stream, size), np.uint8)
            start += size
        return out

    def take_items(self, stream: int, dtype: Any, sizes: list[int], lend: bool = False) -> npt.NDArray[Any]:
        """Items of a dtype, from chunks of these numbers of items.

        With `lend`, they may lie in the bucket itself, at any address, if nobody can write to it meanwhile.
        """
        lengths = [dtype.itemsize * size for size in sizes]
        stored = self._stored_bytes(stream, lengths) if lend else None
        if stored is not None and self._is_safe(stream):
            self._taken[stream] = len(sizes)
            return np.frombuffer(stored, dtype, sum(sizes))
        return self.take_all(stream, lengths).view(dtype)

    def _stored_bytes(self, stream: int, lengths: list[int]) -> npt.NDArray[np.uint8] | None:
        """A stream in the bucket's memory, if its first chunks are stored there in exactly these lengths."""
        coder, chunks = self._coded.get(stream, (None, None))
        if not isinstance(coder, Stored) or not isinstance(chunks, AdjacentChunks) or self._taken[stream]:
            return None
        is_same = chunks.sizes[: len(lengths)].tolist() == lengths
        return np.frombuffer(chunks.data, np.uint8, sum(lengths)) if is_same else None

    def _is_safe(self, stream: int) -> bool:
        """Whether nobody can write to the memory of a stream."""
        data = getattr(self._coded[stream][1], "data", None)
        return isinstance(getattr(data, "obj", data), bytes)

    def take_stored(self, stream: int, most: int) -> Buffer:
        """The next chunk of a stream that is stored, of any length up to `most` bytes."""
        if stream not in self._coded:
            return b""
        coder, chunk = self._next(stream)
        if coder.id != Stored.id or len(chunk) > most:
            raise InvalidField(
                f"{self.label}: stream {stream}: a chunk of low bits is coded or longer than {most} bytes"
            )
        return chunk

    def take_all_stored(self, stream: int, most: list[int]) -> ChunkAddresses:
        """The addresses of the next chunks of a stream that is stored, each of up to so many bytes."""
        if self._is_untouched(stream, Stored.id, len(most)):
            chunks = chunk_addresses(self._coded[stream][1])
            if (chunks.length <= np.array(most, np.int64)).all():
                self._taken[stream] = len(most)
                return chunks
        return chunk_addresses([self.take_stored(stream, size) for size in most])

    def rows(self) -> Iterator[tuple[int, int, int, npt.NDArray[np.int64]]]:
        """For every stream: its id, its coder's id, its offset in the body, and the lengths of its chunks."""
        offset = 0
        for stream, (coder, chunks) in self._coded.items():
            sizes = chunks.sizes if isinstance(chunks, AdjacentChunks) else np.array([*map(len, chunks)], np.int64)
            yield stream, coder.id, offset, sizes
            offset += int(sizes.sum())

    def left(self) -> dict[int, tuple[Coder, Sequence[Buffer]]]:
        """The coded chunks that were not taken yet."""
        out: dict[int, tuple[Coder, Sequence[Buffer]]] = {}
        for stream, (coder, chunks) in self._coded.items():
            taken = self._taken[stream]
            if taken < len(chunks):
                out[stream] = (coder, chunks[taken:] if taken else chunks)
        return out

    def finish(self) -> None:
        """Raise unless every chunk of every stream was taken."""
        for stream, (_, chunks) in self._coded.items():
            if self._taken[stream] != len(chunks):
                left = len(chunks) - self._taken[stream]
                raise InvalidField(f"{self.label}: stream {stream} holds {left} chunk(s) too many")

    def _next(self, stream: int) -> tuple[Coder, Buffer]:
        if stream not in self._coded or self._taken[stream] >= len(self._coded[stream][1]):
            raise Truncated(f"{self.label}: stream {stream} ends before its last chunk")
        coder, chunks = self._coded[stream]
        self._taken[stream] += 1
        return coder, chunks[self._taken[stream] - 1]
