"""The formats that other systems send, written anew so that they can be measured in the same run as ours.

Only the formats are theirs. Every doubt is settled in the peer's favour: tensor names and shapes are known to
both sides and never sent, headers are a few bytes a tensor, changes are found by bits in one compiled pass,
and the streams of all tensors but slime's are compressed together, kind by kind.

A payload is a list of byte strings; its size is the sum of theirs. Tensors travel in the order of their names
and have at most 2^31 elements.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
import zstandard
from numba import njit
from numpy.typing import NDArray

from benchmarks.traces import Bits, Weights

Payload: TypeAlias = list[bytes]
Positions: TypeAlias = NDArray[np.int32]

_LEVEL = 1


class Peer(Protocol):
    """One system's format. `decode_apply(encode(old, new), w)` turns a `w` equal to `old` into `new`."""

    name: str

    def encode(self, old: Weights, new: Weights) -> Payload: ...

    def decode_apply(self, payload: Payload, weights: Weights) -> None: ...


class Dense:
    """All bits, always."""

    name = "dense bf16"

    def encode(self, old: Weights, new: Weights) -> Payload:
        return [new[name].tobytes() for name in sorted(new)]

    def decode_apply(self, payload: Payload, weights: Weights) -> None:
        for name, part in zip(sorted(weights), payload, strict=True):
            _flat(weights[name])[:] = np.frombuffer(part, np.uint16)


class SparseRLSyncRaw:
    """int32 positions and raw values: 48 bits a change."""

    name = "SparseRL-Sync raw"

    def encode(self, old: Weights, new: Weights) -> Payload:
        changes = [_changes(old[name], new[name]) for name in sorted(new)]
        positions, values = [at for at, _ in changes], [bits for _, bits in changes]
        return [_counts(positions), _joined(positions), _joined(values)]

    def decode_apply(self, payload: Payload, weights: Weights) -> None:
        counts = np.frombuffer(payload[0], np.uint32)
        positions = np.frombuffer(payload[1], np.int32)
        values = np.frombuffer(payload[2], np.uint16)
        for name, part in zip(sorted(weights), _slices(counts), strict=True):
            _flat(weights[name])[positions[part]] = values[part]


class SparseRLSyncCompressed:
    """16-bit gaps, uncompressed, and zstd values.

    The values go as two byte planes: only so does zstd come near the published ratio of 0.6 to 0.7.
    Embeddings get 32-bit gaps only where a gap needs them, which is kinder than the original's fixed rule.
    """

    name = "SparseRL-Sync compressed"

    def encode(self, old: Weights, new: Weights) -> Payload:
        changes = [_changes(old[name], new[name]) for name in sorted(new)]
        gaps = [_narrowed(_gaps(at), (np.uint16, np.uint32)) for at, _ in changes]
        values = np.concatenate([np.empty(0, np.uint16), *(bits for _, bits in changes)])
        planes = [_compressed((values >> 8).astype(np.uint8)), _compressed(values.astype(np.uint8))]
        return [_counts(gaps), _widths(gaps), _joined(gaps), *planes]

    def decode_apply(self, payload: Payload, weights: Weights) -> None:
        counts = np.frombuffer(payload[0], np.uint32)
        high, low = (np.frombuffer(_decompressed(plane), np.uint8) for plane in payload[3:])
        values = high.astype(np.uint16) << 8 | low
        streams = zip(sorted(weights), _split(payload[2], counts, payload[1]), _slices(counts), strict=True)
        for name, gaps, part in streams:
            _flat(weights[name])[_from_gaps(gaps)] = values[part]


class Pulse:
    """Row and column deltas of the sorted coordinates, as narrow as the tensor allows, and raw values, all
    through zstd. A column counts from the last change of its row, or from the row's start.
    """

    name = "PULSE"

    def encode(self, old: Weights, new: Weights) -> Payload:
        changes = [_changes(old[name], new[name]) for name in sorted(new)]
        deltas = [
            _coordinate_deltas(at, _columns(new[name])) for name, (at, _) in zip(sorted(new), changes, strict=True)
        ]
        widths = (np.uint8, np.uint16, np.uint32)
        rows = [_narrowed(row, widths) for row, _ in deltas]
        columns = [_narrowed(column, widths) for _, column in deltas]
        streams = [_compressed(_joined(kind)) for kind in (rows, columns, [bits for _, bits in changes])]
        return [_counts(rows), _widths(rows), _widths(columns), *streams]

    def decode_apply(self, payload: Payload, weights: Weights) -> None:
        counts = np.frombuffer(payload[0], np.uint32)
        rows = _split(_decompressed(payload[3]), counts, payload[1])
        columns = _split(_decompressed(payload[4]), counts, payload[2])
        values = np.frombuffer(_decompressed(payload[5]), np.uint16)
        for name, row, column, part in zip(sorted(weights), rows, columns, _slices(counts), strict=True):
            at = _from_coordinate_deltas(row, column, _columns(weights[name]))
            _flat(weights[name])[at] = values[part]


class Slime:
    """The XOR of old and new at full length, zstd tensor by tensor; nothing for an unchanged tensor."""

    name = "slime"

    def encode(self, old: Weights, new: Weights) -> Payload:
        return [self._frame(_flat(old[name]) ^ _flat(new[name])) for name in sorted(new)]

    def decode_apply(self, payload: Payload, weights: Weights) -> None:
        for name, frame in zip(sorted(weights), payload, strict=True):
            if frame:
                _flat(weights[name])[:] ^= np.frombuffer(_decompressed(frame), np.uint16)

    @staticmethod
    def _frame(difference: Bits) -> bytes:
        return _compressed(difference) if difference.any() else b""


class NemoRL:
    """16-bit gaps (32 bits where a tensor needs them) and the XOR of old and new values, all through zstd."""

    name = "NeMo-RL"

    def encode(self, old: Weights, new: Weights) -> Payload:
        changes = [_changes(old[name], new[name]) for name in sorted(new)]
        gaps = [_narrowed(_gaps(at), (np.uint16, np.uint32)) for at, _ in changes]
        flips = [bits ^ _flat(old[name])[at] for name, (at, bits) in zip(sorted(new), changes, strict=True)]
        return [_counts(gaps), _widths(gaps), _compressed(_joined(gaps)), _compressed(_joined(flips))]

    def decode_apply(self, payload: Payload, weights: Weights) -> None:
        counts = np.frombuffer(payload[0], np.uint32)
        gaps = _split(_decompressed(payload[2]), counts, payload[1])
        flips = np.frombuffer(_decompressed(payload[3]), np.uint16)
        for name, gap, part in zip(sorted(weights), gaps, _slices(counts), strict=True):
            _flat(weights[name])[_from_gaps(gap)] ^= flips[part]


PEERS: tuple[Peer, ...] = (Dense(), SparseRLSyncRaw(), SparseRLSyncCompressed(), Pulse(), Slime(), NemoRL())


def size(payload: Payload) -> int:
    """Bytes on the wire."""
    return sum(map(len, payload))


def _flat(bits: Bits) -> Bits:
    """A flat view; never a copy, since decoding writes through it."""
    if not bits.flags.c_contiguous:
        raise ValueError(f"tensor of shape {bits.shape} is not contiguous; pass a contiguous copy")
    return bits.reshape(-1)


def _changes(old: Bits, new: Bits) -> tuple[Positions, Bits]:
    """Sorted flat positions whose bits differ, and the new bits there."""
    old, new = _flat(old), _flat(new)
    if new.size > 1 << 31:
        raise ValueError(f"tensor has {new.size} elements; positions are int32")
    whole = new.size // 4 * 4
    positions, values = np.empty(new.size, np.int32), np.empty_like(new)  # pages never written cost nothing
    count = _find(old[:whole].view(np.uint64), new[:whole].view(np.uint64), old, new, positions, values)
    return positions[:count].copy(), values[:count].copy()


@njit(nogil=True)
def _find(
    old_words: NDArray[np.uint64],
    new_words: NDArray[np.uint64],
    old: Bits,
    new: Bits,
    positions: Positions,
    values: Bits,
) -> int:
    """Four elements at a time, since most words are equal; inside a word no branch, it would mispredict."""
    count = 0
    for word in range(old_words.size):
        if old_words[word] != new_words[word]:
            for i in range(4 * word, 4 * word + 4):
                positions[count] = i
                values[count] = new[i]
                count += old[i] != new[i]
    for i in range(4 * old_words.size, old.size):
        positions[count] = i
        values[count] = new[i]
        count += old[i] != new[i]
    return count


def _counts(streams: Sequence[NDArray[Any]]) -> bytes:
    return struct.pack(f"<{len(streams)}I", *(stream.size for stream in streams))


def _widths(streams: Sequence[NDArray[Any]]) -> bytes:
    return bytes(stream.itemsize for stream in streams)


def _joined(streams: Iterable[NDArray[Any]]) -> bytes:
    return b"".join(stream.tobytes() for stream in streams)


def _slices(counts: NDArray[np.uint32]) -> list[slice]:
    ends = np.cumsum(counts, dtype=np.int64)
    return [slice(int(end - count), int(end)) for end, count in zip(ends, counts, strict=True)]


def _split(stream: bytes, counts: NDArray[np.uint32], widths: bytes) -> list[NDArray[Any]]:
    """The arrays that `_joined` joined, given how many elements each has and how wide they are in bytes."""
    arrays, offset = [], 0
    for count, width in zip(counts.tolist(), widths, strict=True):
        arrays.append(np.frombuffer(stream, f"<u{width}", count, offset))
        offset += count * width
    return arrays


def _narrowed(numbers: NDArray[Any], widths: Sequence[type[np.unsignedinteger[Any]]]) -> NDArray[Any]:
    """`numbers` in the first of `widths` that holds them all."""
    largest = int(numbers.max(initial=0))
    return numbers.astype(next(width for width in widths if largest <= np.iinfo(width).max))


def _gaps(positions: Positions) -> Positions:
    """How many elements lie between each change and the one before it."""
    return np.diff(positions, prepend=np.int32(-1)) - 1


def _from_gaps(gaps: NDArray[Any]) -> NDArray[np.int64]:
    positions = np.cumsum(gaps, dtype=np.int64)
    positions += np.arange(gaps.size)
    return positions


def _columns(bits: Bits) -> int:
    """Row length; a tensor of less than two dimensions is one row."""
    return max(bits.shape[-1], 1) if bits.ndim > 1 else max(bits.size, 1)


def _coordinate_deltas(positions: Positions, columns: int) -> tuple[Positions, Positions]:
    row, column = np.divmod(positions, np.int32(columns))
    row_delta = np.diff(row, prepend=np.int32(0))
    column_delta = np.diff(column, prepend=np.int32(0))
    return row_delta, np.where(row_delta > 0, column, column_delta)


def _from_coordinate_deltas(row_delta: NDArray[Any], column_delta: NDArray[Any], columns: int) -> NDArray[np.int64]:
    """Positions from deltas: a running sum of columns, less the sum reached before the row began."""
    total = np.cumsum(column_delta, dtype=np.int64)
    before_row = np.where(row_delta > 0, total - column_delta, 0)
    column = total - np.maximum.accumulate(before_row)
    return np.cumsum(row_delta, dtype=np.int64) * columns + column


def _compressed(data: bytes | NDArray[Any]) -> bytes:
    return zstandard.ZstdCompressor(level=_LEVEL).compress(data if isinstance(data, bytes) else data.data)


def _decompressed(frame: bytes) -> bytes:
    return zstandard.ZstdDecompressor().decompress(frame)
