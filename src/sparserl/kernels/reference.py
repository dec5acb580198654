"""The specification of every kernel, in NumPy: short, slow, obviously right. Nothing here runs in production."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

U64 = npt.NDArray[np.uint64]
UInts = npt.NDArray[Any]

GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def diff(old: UInts, new: UInts) -> tuple[UInts, UInts, UInts]:
    """Positions where the bit patterns differ, with the old and the new bits there."""
    old, new = old.ravel(), new.ravel()
    where = np.flatnonzero(old != new)
    return where.astype(np.uint32), old[where], new[where]


def mix(key: U64, position: U64, bits: UInts) -> tuple[U64, U64]:
    """What one element adds to the two sums of the digest. `key` holds its tensor's two keys."""

    def turn(z: U64) -> U64:
        product = (z & np.uint64(0xFFFFFFFF)) * (z >> np.uint64(32))
        return product + ((z << np.uint64(41)) | (z >> np.uint64(23)))

    z = (key[0] + position.astype(np.uint64) * GOLDEN) ^ bits.astype(np.uint64)
    z = turn(z) + key[1]
    z = turn(turn(z))
    return z, turn(z)


def digest(key: U64, start: int, bits: UInts) -> tuple[int, int]:
    """Sums over consecutive elements of a tensor, the first of which stands at `start`."""
    first, second = mix(key, np.uint64(start) + np.arange(bits.size, dtype=np.uint64), bits.ravel())
    return int(first.sum(dtype=np.uint64)), int(second.sum(dtype=np.uint64))


def order(bits: UInts, sign_magnitude: bool) -> UInts:
    """The monotonic integer of a pattern: neighbours in value are neighbours here, and -0.0 lies below +0.0."""
    if not sign_magnitude:
        return bits
    top = bits.dtype.type(1 << (8 * bits.dtype.itemsize - 1))
    return np.asarray(np.where(bits & top, ~bits, bits | top))


def unorder(rank: UInts, sign_magnitude: bool) -> UInts:
    """The pattern of a monotonic integer."""
    if not sign_magnitude:
        return rank
    top = rank.dtype.type(1 << (8 * rank.dtype.itemsize - 1))
    return np.asarray(np.where(rank & top, rank ^ top, ~rank))


def steps(old: UInts, new: UInts, sign_magnitude: bool) -> UInts:
    """The step from old to new, wrapped to the width and zigzag-folded: 0, -1, +1, -2 … become 0, 1, 2, 3 …"""
    delta = order(new, sign_magnitude) - order(old, sign_magnitude)
    negative = (delta >> delta.dtype.type(8 * delta.dtype.itemsize - 1)).astype(bool)
    doubled = delta << delta.dtype.type(1)
    return np.asarray(np.where(negative, ~doubled, doubled))


def advance(old: UInts, step: UInts, sign_magnitude: bool) -> UInts:
    """The new bits: `steps` undone."""
    one = step.dtype.type(1)
    delta = np.where((step & one).astype(bool), ~(step >> one), step >> one)
    return unorder(order(old, sign_magnitude) + delta, sign_magnitude)


def token(value: int) -> tuple[int, int, int]:
    """A number as (token, low bits, how many): below 16 itself, else exponent and two mantissa bits."""
    if value < 16:
        return value, 0, 0
    exponent = value.bit_length() - 1
    width = exponent - 2
    return 16 + 4 * (exponent - 4) + ((value >> width) & 3), value & ((1 << width) - 1), width


def untoken(token: int, low: int) -> int:
    """The number of a token and its low bits."""
    if token < 16:
        return token
    exponent, mantissa = divmod(token - 16, 4)
    return ((4 + mantissa) << (exponent + 2)) | low


def pack(values: UInts) -> tuple[bytes, bytes]:
    """Numbers as one token byte each, and their low bits strung together from the lowest bit up."""
    tokens, string, length = bytearray(), 0, 0
    for value in values.tolist():
        t, low, width = token(value)
        tokens.append(t)
        string |= low << length
        length += width
    return bytes(tokens), string.to_bytes((length + 7) // 8, "little")


def tile_gaps(positions: UInts, numel: int, tile: int) -> tuple[list[int], list[int]]:
    """Changes per tile of one region, and each change's distance from the one before it in its tile."""
    counts, gaps = [], []
    for low in range(0, numel, tile):
        inside = [p - low for p in positions.tolist() if low <= p < low + tile]
        counts.append(len(inside))
        gaps += [p - q - 1 for p, q in zip(inside, [-1, *inside], strict=False)]
    return counts, gaps


def locate(position: int, start: int, size: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Where a position of a region lies in its tensor."""
    coordinates = np.unravel_index(position, size)
    return start + sum(int(c) * s for c, s in zip(coordinates, strides, strict=True))


def planes(words: UInts) -> UInts:
    """Bytes of the words, plane by plane: all lowest bytes first."""
    return words.view(np.uint8).reshape(-1, words.dtype.itemsize).T.copy()
