"""Byte coders, which compress the chunks of one stream. A stream names its coder by id, so that more can be added."""

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
    """A buffer as a read-only array for kernels, which are compiled anew for every kind of array."""
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
    """The bytes, unchanged."""

    name: ClassVar[str] = "stored"
    id: ClassVar[int] = 0

    def encode(self, raw: Buffer) -> Buffer:
        return raw

    def decode(self, coded: Buffer, size: int) -> Buffer:
        if len(coded) != size:
            raise InvalidField(f"a stored chunk holds {len(coded)} bytes instead of {size}")
        return coded


class _PerThread(threading.local):
    """zstd contexts, one per thread, because threads must not share them."""

    def __init__(self) -> None:
        # Tokens repeat only by chance: short matches cost more than their entropy code.
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
    """One zstd frame without magic number or content size: the reader knows the size already."""

    name: ClassVar[str] = "zstd"
    id: ClassVar[int] = 1

    def encode(self, raw: Buffer) -> Buffer:
        return _contexts.compress(raw)

    def decode(self, coded: Buffer, size: int) -> Buffer:
        if not len(coded) or coded[0]:  # a content size, a checksum or a dictionary is announced
            raise InvalidField("a zstd chunk carries fields that the format leaves out")
        try:
            # for zstandard a maximum of zero means "unknown"
            raw = _contexts.decompress(coded, max_output_size=max(1, size), allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise InvalidField(f"a zstd chunk does not decode to {size} bytes: {error}") from error
        if len(raw) != size:
            raise InvalidField(f"a zstd chunk holds {len(raw)} bytes instead of {size}")
        return raw


@dataclass(frozen=True)
class Rans:
    """Order-0 entropy coding: close to the entropy for the small alphabets of tokens, even below a bit per symbol."""

    name: ClassVar[str] = "rans"
    id: ClassVar[int] = 2

    def encode(self, raw: Buffer) -> Buffer:
        return encode_chunks([raw])[0]

    def decode(self, coded: Buffer, size: int) -> Buffer:
        symbols = decode_chunks(chunk_addresses([coded]), [size])
        if symbols is None:
            raise InvalidField("a rans chunk has no valid table, or does not end where it should")
        return symbols.data


class AdjacentChunks(Sequence[Buffer]):
    """Chunks that lie one behind the other in memory, sliced when they are read."""

    def __init__(self, data: Buffer, sizes: npt.NDArray[np.int64]) -> None:
        self.data = data
        self.sizes = sizes

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


class ChunkAddresses(NamedTuple):
    """Addresses and lengths of chunks, and the object that keeps them valid."""

    address: npt.NDArray[np.int64]
    length: npt.NDArray[np.int64]
    owner: object


def chunk_addresses(chunks: Sequence[Buffer]) -> ChunkAddresses:
    """Addresses of chunks, for kernels that take many at once."""
    if isinstance(chunks, AdjacentChunks):
        base = np.frombuffer(chunks.data, np.uint8).ctypes.data
        return ChunkAddresses(base + np.cumsum(chunks.sizes) - chunks.sizes, chunks.sizes, chunks.data)
    arrays = [as_bytes(chunk) for chunk in chunks]
    address = np.array([array.ctypes.data for array in arrays], np.int64)
    length = np.array([array.size for array in arrays], np.int64)
    return ChunkAddresses(address, length, arrays)


def encode_chunks(chunks: Sequence[Buffer]) -> list[Buffer]:
    """Chunks encoded by rans in one call."""
    raw = chunk_addresses(chunks)
    ends = np.empty(len(chunks), np.int64)
    out = np.empty(int(cpu.rans.largest_encoding(raw.length).sum()), np.uint8)
    cpu.rans.encode_chunks(raw.address, raw.length, out, ends)
    return [out[a:b].data for a, b in pairwise((0, *ends.tolist()))]


def decode_chunks(coded: ChunkAddresses, sizes: Sequence[int]) -> npt.NDArray[np.uint8] | None:
    """Chunks decoded by rans in one call, one behind the other; None if one of them is invalid."""
    size = np.array(sizes, np.int64)
    if (coded.length > cpu.rans.largest_encoding(size)).any():
        return None
    ends = np.cumsum(size)
    out = np.empty(ends[-1], np.uint8)
    bad = cpu.rans.decode_chunks(coded.address, coded.length, size, out.ctypes.data + ends - size)
    return None if bad >= 0 else out


CODERS: dict[int, Coder] = {c.id: c for c in (Stored(), Zstd(), Rans())}
_SAMPLE_BYTES = 1 << 11  # of a stream, on which coders are compared


def coder(id: int) -> Coder:
    """The coder of an id; `UnsupportedFormat` if this release does not know it."""
    if id not in CODERS:
        raise UnsupportedFormat(f"unknown coder {id}; a newer sparserl wrote this")
    return CODERS[id]


def encode_smallest(chunks: list[Buffer]) -> tuple[Coder, list[Buffer]]:
    """The coder that makes the beginning of a stream smallest, and all its chunks encoded by it."""
    sample = chunks[0][:_SAMPLE_BYTES]
    encoded = {id: CODERS[id].encode(sample) for id in (Rans.id, Zstd.id)} if len(sample) else {Zstd.id: b""}
    best = CODERS[min(encoded, key=lambda coder_id: len(encoded[coder_id]))]
    if len(chunks) == 1 and len(chunks[0]) <= _SAMPLE_BYTES:
        return _smaller(best, chunks, [encoded[best.id]])
    if best.id == Rans.id:
        return encode_by_entropy(chunks)
    return _smaller(best, chunks, [best.encode(chunk) for chunk in chunks])


def encode_by_entropy(chunks: list[Buffer]) -> tuple[Coder, list[Buffer]]:
    """Chunks of a stream in which sequences repeat only by chance."""
    return _smaller(CODERS[Rans.id], chunks, encode_chunks(chunks))


def _smaller(coder: Coder, chunks: list[Buffer], coded: list[Buffer]) -> tuple[Coder, list[Buffer]]:
    """The coded chunks, or the chunks as they are if that is not longer."""
    return (coder, coded) if sum(map(len, coded)) < sum(map(len, chunks)) else (CODERS[Stored.id], chunks)
