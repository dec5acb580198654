"""Byte coders: what squeezes the bytes of one stream. A stream names its coder by id, so new ones can join."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import zstandard

from ..errors import InvalidField, UnsupportedFormat
from ..kernels import cpu

Buffer = bytes | memoryview


def as_bytes(buffer: Buffer) -> npt.NDArray[np.uint8]:
    """A buffer as an array for kernels, read-only wherever it came from: each kind would be compiled on its own."""
    array = np.frombuffer(buffer, np.uint8)
    array.flags.writeable = False
    return array


class Coder(Protocol):
    """Encode a chunk; decode it into exactly `size` bytes or raise a `FormatError`."""

    name: ClassVar[str]
    id: ClassVar[int]

    def encode(self, raw: Buffer) -> Buffer: ...

    def decode(self, coded: Buffer, size: int) -> Buffer: ...


@dataclass(frozen=True)
class Stored:
    """The bytes as they are."""

    name: ClassVar[str] = "stored"
    id: ClassVar[int] = 0

    def encode(self, raw: Buffer) -> Buffer:
        return raw

    def decode(self, coded: Buffer, size: int) -> Buffer:
        if len(coded) != size:
            raise InvalidField(f"a stored chunk holds {len(coded)} bytes where {size} are due")
        return coded


class _PerThread(threading.local):
    """zstd contexts are not to be shared between threads."""

    def __init__(self) -> None:
        # Tokens repeat by chance, not by meaning: short matches cost more than their entropy code.
        parameters = zstandard.ZstdCompressionParameters.from_level(
            1, min_match=7, window_log=18, write_content_size=False, format=zstandard.FORMAT_ZSTD1_MAGICLESS
        )
        self.compress = zstandard.ZstdCompressor(compression_params=parameters).compress
        self.decompress = zstandard.ZstdDecompressor(
            max_window_size=1 << 18, format=zstandard.FORMAT_ZSTD1_MAGICLESS
        ).decompress


_contexts = _PerThread()


@dataclass(frozen=True)
class Zstd:
    """One zstd frame without magic number or content size: how much it must hold is known from the outside."""

    name: ClassVar[str] = "zstd"
    id: ClassVar[int] = 1

    def encode(self, raw: Buffer) -> Buffer:
        return _contexts.compress(raw)

    def decode(self, coded: Buffer, size: int) -> Buffer:
        if not len(coded) or coded[0]:  # a content size, a checksum or a dictionary is announced
            raise InvalidField("a zstd chunk carries fields that the format leaves out")
        try:
            # to zstandard a most of zero means "unknown"
            raw = _contexts.decompress(coded, max_output_size=max(1, size), allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise InvalidField(f"a zstd chunk does not decode to {size} bytes: {error}") from error
        if len(raw) != size:
            raise InvalidField(f"a zstd chunk holds {len(raw)} bytes where {size} are due")
        return raw


@dataclass(frozen=True)
class Rans:
    """Order-0 entropy coding: near the entropy for the small alphabets of tokens, also below a bit a symbol."""

    name: ClassVar[str] = "rans"
    id: ClassVar[int] = 2

    def encode(self, raw: Buffer) -> Buffer:
        return entropy_coded([raw])[0]

    def decode(self, coded: Buffer, size: int) -> Buffer:
        if (symbols := expand(where([coded]), [size])) is None:
            raise InvalidField("a rans chunk has no table that adds up, or does not come out even")
        return symbols.data


class Row(Sequence[Buffer]):
    """Chunks that lie one behind the other, cut out when they are asked for."""

    def __init__(self, data: Buffer, sizes: npt.NDArray[np.int64]) -> None:
        self.data, self.sizes = data, sizes

    def __len__(self) -> int:
        return self.sizes.size

    @cached_property
    def _cuts(self) -> list[int]:
        return [0, *np.cumsum(self.sizes).tolist()]

    def __getitem__(self, which: Any) -> Any:
        if isinstance(which, slice):
            return [self[i] for i in range(*which.indices(len(self)))]
        which = range(len(self))[which]
        return self.data[self._cuts[which] : self._cuts[which + 1]]


class Where(NamedTuple):
    """Where chunks lie, how long they are, and what must be kept alive meanwhile."""

    at: npt.NDArray[np.int64]
    length: npt.NDArray[np.int64]
    owner: object


def where(chunks: Sequence[Buffer]) -> Where:
    """Chunks for kernels that take many at once."""
    if isinstance(chunks, Row):
        base = np.frombuffer(chunks.data, np.uint8).ctypes.data
        return Where(base + np.cumsum(chunks.sizes) - chunks.sizes, chunks.sizes, chunks.data)
    arrays = [as_bytes(chunk) for chunk in chunks]
    at, length = [array.ctypes.data for array in arrays], [array.size for array in arrays]
    return Where(np.array(at, np.int64), np.array(length, np.int64), arrays)


def entropy_coded(chunks: Sequence[Buffer]) -> list[Buffer]:
    """Rans chunks, encoded in one go."""
    raw, ends = where(chunks), np.empty(len(chunks), np.int64)
    out = np.empty(int(cpu.rans.largest_encoding(raw.length).sum()), np.uint8)
    cpu.rans.encode_chunks(raw.at, raw.length, out, ends)
    return [out[a:b].data for a, b in pairwise((0, *ends.tolist()))]


def expand(coded: Where, sizes: Sequence[int]) -> npt.NDArray[np.uint8] | None:
    """Rans chunks decoded in one go, one behind the other; None where one of them is at fault."""
    size = np.array(sizes, np.int64)
    if (coded.length > cpu.rans.largest_encoding(size)).any():
        return None
    ends = np.cumsum(size)
    out = np.empty(ends[-1], np.uint8)
    return None if cpu.rans.decode_chunks(coded.at, coded.length, size, out.ctypes.data + ends - size) >= 0 else out


CODERS: dict[int, Coder] = {c.id: c for c in (Stored(), Zstd(), Rans())}
_TRIED = 1 << 11  # bytes of a stream on which coders are compared


def coder(id: int) -> Coder:
    """The coder of an id; `UnsupportedFormat` if this release does not know it."""
    if (found := CODERS.get(id)) is None:
        raise UnsupportedFormat(f"unknown coder {id}; a newer sparserl wrote this")
    return found


def squeeze(chunks: list[Buffer]) -> tuple[Coder, list[Buffer]]:
    """The coder that makes the chunks of a stream smallest, judged by its beginning, and what it makes of them."""
    first = chunks[0][:_TRIED]
    tried = {id: CODERS[id].encode(first) for id in (Rans.id, Zstd.id)} if len(first) else {Zstd.id: b""}
    best = CODERS[min(tried, key=lambda name: len(tried[name]))]
    alone = len(chunks) == 1 and len(chunks[0]) <= _TRIED
    if alone:
        return _smaller(best, chunks, [tried[best.id]])
    return by_entropy(chunks) if best.id == Rans.id else _smaller(best, chunks, [best.encode(c) for c in chunks])


def by_entropy(chunks: list[Buffer]) -> tuple[Coder, list[Buffer]]:
    """Chunks of a stream in which nothing repeats but by chance."""
    return _smaller(CODERS[Rans.id], chunks, entropy_coded(chunks))


def _smaller(coder: Coder, chunks: list[Buffer], coded: list[Buffer]) -> tuple[Coder, list[Buffer]]:
    """What a coder made of the chunks, or the chunks as they are."""
    return (coder, coded) if sum(map(len, coded)) < sum(map(len, chunks)) else (CODERS[Stored.id], chunks)
