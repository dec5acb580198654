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
    old = old.ravel()
    new = new.ravel()
    where = np.flatnonzero(old != new)
    return where.astype(np.uint32), old[where], new[where]


def mark(words: U64, positions: UInts) -> U64:
    """A bitmap with the bits at some positions set as well."""
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")
    bits[positions] = 1
    return np.packbits(bits, bitorder="little").view(np.uint64)


def merge_old(first: dict[int, int], then: dict[int, int]) -> dict[int, int]:
    """The old bits of elements by position, where an element changed once and perhaps again: those that came first."""
    return dict(sorted((then | first).items()))


def collect(parts: list[UInts]) -> UInts:
    """The bytes of some parts, concatenated."""
    return np.concatenate([part.ravel().view(np.uint8) for part in parts])


def list_marks(words: U64, low: int, high: int) -> UInts:
    """The bits that are set from `low` to `high`, counted from `low`."""
    return np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")[low:high]).astype(np.uint32)


def mix(key: U64, position: U64, bits: UInts) -> tuple[U64, U64]:
    """What elements add to the two sums of the digest. `key` holds the two keys of their tensor."""

    def turn(z: U64) -> U64:
        product = (z & np.uint64(0xFFFFFFFF)) * (z >> np.uint64(32))
        return product + ((z << np.uint64(41)) | (z >> np.uint64(23)))

    z = (key[0] + position.astype(np.uint64) * GOLDEN) ^ bits.astype(np.uint64)
    z = turn(z) + key[1]
    z = turn(turn(z))
    return z, turn(z)


def digest(key: U64, start: int, bits: UInts) -> tuple[int, int]:
    """Sums over consecutive elements of a tensor, the first of which is at position `start`."""
    first, second = mix(key, np.uint64(start) + np.arange(bits.size, dtype=np.uint64), bits.ravel())
    return int(first.sum(dtype=np.uint64)), int(second.sum(dtype=np.uint64))


def digest_delta(key: U64, position: U64, old: UInts, new: UInts) -> tuple[int, int]:
    """How the sums of a part change when the bits at some positions of its tensor change."""
    before = mix(key, position, old)
    after = mix(key, position, new)
    return int((after[0] - before[0]).sum(dtype=np.uint64)), int((after[1] - before[1]).sum(dtype=np.uint64))


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


def to_bf16(bits: UInts, nan: int) -> UInts:
    """fp32 patterns as bf16: to the nearest, ties to even; every NaN becomes one pattern."""
    rounded = (bits.astype(np.uint64) + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where((bits & 0x7FFFFFFF) > 0x7F800000, nan, rounded).astype(np.uint16)


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
    tokens = bytearray()
    string = 0
    length = 0
    for value in values.tolist():
        t, low, width = token(value)
        tokens.append(t)
        string |= low << length
        length += width
    return bytes(tokens), string.to_bytes((length + 7) // 8, "little")


def tile_gaps(positions: UInts, numel: int, tile: int) -> tuple[list[int], list[int]]:
    """Changes per tile of one region, and each change's distance from the one before it in its tile."""
    counts = []
    gaps = []
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


RANS_BITS = 12  # frequencies add up to 2^12
RANS_LOW = 1 << 16  # states lie between this and 2^32


def lanes(size: int) -> int:
    """The number of states of a chunk: a power of two, one for every 2048 symbols, at most 32."""
    return min(32, 1 << max(0, (size >> 11).bit_length() - 1))


def rans_encode(symbols: bytes, freq: dict[int, int]) -> tuple[list[int], list[int]]:
    """Final states and 16-bit words. Symbol i belongs to lane i mod lanes; all lanes share one string of words."""
    start = {}
    total = 0
    for symbol, f in sorted(freq.items()):
        start[symbol] = total
        total += f
    states = [RANS_LOW] * lanes(len(symbols))
    words = []
    for i in range(len(symbols) - 1, -1, -1):
        f = freq[symbols[i]]
        lane = i % len(states)
        if states[lane] >= f << (32 - RANS_BITS):
            words.append(states[lane] & 0xFFFF)
            states[lane] >>= 16
        quotient, rest = divmod(states[lane], f)
        states[lane] = (quotient << RANS_BITS) + start[symbols[i]] + rest
    return states, words[::-1]


def rans_decode(states: list[int], words: list[int], size: int, freq: dict[int, int]) -> bytes:
    """The symbols, from the first on; at the end every state is as it began, and no word is left."""
    table = [(s, f, i) for s, f in sorted(freq.items()) for i in range(f)]
    states = list(states)
    out = bytearray()
    at = 0
    for i in range(size):
        x = states[i % len(states)]
        symbol, f, rest = table[x & ((1 << RANS_BITS) - 1)]
        x = f * (x >> RANS_BITS) + rest
        if x < RANS_LOW:
            x = x << 16 | words[at]
            at += 1
        states[i % len(states)] = x
        out.append(symbol)
    if at != len(words) or any(x != RANS_LOW for x in states):
        raise ValueError("the states do not end where they began")
    return bytes(out)


def magnitude(bits: UInts, kind: str) -> UInts:
    """The magnitude that decides classes: of floats and signed integers without the sign, of others the value."""
    top = bits.dtype.type(1 << (8 * bits.dtype.itemsize - 1))
    if kind == "float":
        return np.asarray(bits & ~top)
    if kind == "signed":
        return np.asarray(np.where(bits & top, ~bits + bits.dtype.type(1), bits))
    return bits


def class_gaps(
    sizes: UInts, positions: UInts, thresholds: UInts, tile: int
) -> tuple[list[list[int]], list[list[int]], list[int]]:
    """For magnitudes of one region: changes by tile and class, gaps by class, and the class of each change.

    The class of an element is the number of thresholds that its magnitude reaches. A gap counts the members of the
    same class, in the same tile, between a change and the one before it.
    """
    classes = np.searchsorted(thresholds, sizes, side="right")
    counts: list[list[int]] = []
    gaps: list[list[int]] = [[] for _ in range(len(thresholds) + 1)]
    changed = np.zeros(sizes.size, bool)
    changed[positions] = True
    for low in range(0, sizes.size, tile):
        inside = slice(low, low + tile)
        counts.append([int((changed[inside] & (classes[inside] == c)).sum()) for c in range(len(gaps))])
        for c in range(len(gaps)):
            ranks = np.flatnonzero(changed[inside][classes[inside] == c]).tolist()
            gaps[c] += [r - q - 1 for r, q in zip(ranks, [-1, *ranks], strict=False)]
    return counts, gaps, classes[positions].tolist()
