"""An order-0 entropy coder for bytes on a CPU, in Numba: interleaved rANS with static tables.

    chunk = table, states, words        (docs/reference/format.md; `reference.py` has the coder itself in plain Python)

A decoder checks everything it reads: a table that does not add up is an error, as are states or words that do not end
as they should, and no index leaves its array.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .compiling import inline, kernel
from .llvm import (
    ARM,
    HAS_EXPAND,
    bytes_at,
    copy_bytes,
    highest,
    keep_alive,
    load,
    rans16_encode,
    rans_rows,
    store,
)

BITS = 12
_TOTAL = 1 << BITS
_LOW = np.uint64(1 << 16)
_SLOT = np.uint64(_TOTAL - 1)
_BITS = np.uint64(BITS)
_WORD = np.uint64(16)
_ONE = np.uint64(1)
_FIRST = 8  # the exponent that the first frequency's is coded against
_MANTISSA = 4  # bits of a frequency below its highest
MOST_TABLE = 1024  # bytes of the longest table
MOST_LANES = 32
SPARE = 32  # words behind the last one that a decoder may read
_BY_VECTORS = HAS_EXPAND or ARM  # how chunks are decoded
_ABREAST = 4  # chunks, at most, that are decoded in step: meanwhile each state waits for its own symbol only
_TWO_OF_32 = rans_rows(2, 2)
_ONE_OF_32 = rans_rows(1, 2)
_FOUR_OF_16 = rans_rows(4, 1)
_ONE_OF_16 = rans_rows(1, 1)


@inline
def lanes(size: Any) -> Any:
    """One for every 2048 symbols, a power of two, at most 32."""
    n = np.int64(1)
    while n < MOST_LANES and size >= 4096 * n:
        n *= 2
    return n


@inline
def _rounded(f: Any) -> Any:
    """The nearest frequency that a table can express, at least 1."""
    if f < np.uint64(1 << (_MANTISSA + 1)):
        return max(f, np.uint64(1))
    shift = np.uint64(highest(f) - _MANTISSA)
    return ((f + (np.uint64(1) << (shift - np.uint64(1)))) >> shift) << shift


@kernel
def frequencies(symbols: Any, freq: Any) -> Any:
    """Frequencies that add up to 4096, near the counts of the symbols. Returns the symbol that takes the rest."""
    # Four histograms: equal symbols often follow each other, and would wait for each other.
    counts = np.zeros((4, 256), np.uint32)
    quads = symbols.size // 4 * 4
    for i in range(0, quads, 4):
        for j in range(4):
            counts[j, symbols[i + j]] += np.uint32(1)
    for i in range(quads, symbols.size):
        counts[0, symbols[i]] += np.uint32(1)
    most = 0
    for s in range(256):
        counts[0, s] += counts[1, s] + counts[2, s] + counts[3, s]
        if counts[0, s] > counts[0, most]:
            most = s
    n = np.uint64(symbols.size)
    scale = np.uint64(_TOTAL)
    while True:
        left = np.int64(_TOTAL)
        for s in range(256):
            freq[s] = 0
            if s != most and counts[0, s]:
                freq[s] = _rounded((np.uint64(counts[0, s]) * scale + n // np.uint64(2)) // n)
                left -= np.int64(freq[s])
        if left >= 1:
            break
        scale -= np.uint64(64)
    freq[most] = left
    return most


@inline
def _append_bits(out: Any, at: Any, value: Any, width: Any) -> Any:
    for i in range(width):
        if (value >> i) & 1:
            out[at >> 3] |= np.uint8(1 << (at & 7))
        at += 1
    return at


@kernel
def write_table(freq: Any, most: Any, out: Any) -> Any:
    """The frequencies of a chunk as bytes. Returns how many."""
    low = 0
    high = 255
    while not freq[low]:
        low += 1
    while not freq[high]:
        high -= 1
    out[:] = 0
    out[0] = low
    out[1] = high - low
    out[2] = most - low
    at = np.int64(24)
    before = _FIRST
    for s in range(low, high + 1):
        if s == most:
            continue
        e = highest(np.uint64(freq[s])) + 1 if freq[s] else 0
        step = 2 * (e - before) if e >= before else 2 * (before - e) - 1
        at = _append_bits(out, at, (np.int64(1) << step) - 1, step) + 1
        if e > 1:
            width = min(e - 1, _MANTISSA)
            at = _append_bits(out, at, (np.int64(freq[s]) >> (e - 1 - width)) & ((1 << width) - 1), width)
        before = e
    return (at + 7) >> 3


@kernel
def read_table(data: Any, freq: Any) -> Any:
    """Frequencies from the start of a chunk. Returns the bytes they take, or -1 if they are not a table."""
    freq[:] = 0
    if data.size < 3 or np.int64(data[0]) + data[1] > 255 or data[2] > data[1]:
        return -1
    low = np.int64(data[0])
    high = np.int64(data[0]) + data[1]
    most = np.int64(data[0]) + data[2]
    at = 24
    end = 8 * min(data.size, MOST_TABLE)
    e = _FIRST
    left = np.int64(_TOTAL)
    for s in range(low, high + 1):
        if s == most:
            continue
        step = 0
        while True:
            if at >= end:
                return -1
            bit = (data[at >> 3] >> (at & 7)) & 1
            at += 1
            if not bit:
                break
            step += 1
        e += step >> 1 if step & 1 == 0 else -((step + 1) >> 1)
        if e < 0 or e > BITS:
            return -1
        if e:
            width = min(e - 1, _MANTISSA)
            if at + width > end:
                return -1
            f = np.int64(1) << width
            for i in range(width):
                f |= np.int64((data[at >> 3] >> (at & 7)) & 1) << i
                at += 1
            f <<= e - 1 - width
            freq[s] = f
            left -= f
    if left < 1 or (at & 7 and data[at >> 3] >> (at & 7)):
        return -1
    freq[most] = left
    return (at + 7) >> 3


@kernel
def encode(symbols: Any, freq: Any, states: Any, words: Any) -> Any:
    """Fill states, and words from the end. Returns where the words begin; there is room for one per symbol."""
    shares = np.empty(256, np.uint32)
    inverses = np.zeros(256, np.uint64)  # inverses times 2^44
    total = np.uint32(0)
    for s in range(256):
        shares[s] = freq[s] << np.uint32(16) | total
        if freq[s]:
            inverses[s] = (np.uint64(1 << 44) - _ONE) // np.uint64(freq[s]) + _ONE
        total += freq[s]
    n = states.size
    at = words.size
    i = symbols.size - 1
    states[:] = _LOW
    rows = symbols.size & -n if HAS_EXPAND and n >= 16 else np.int64(0)
    while i >= rows:
        lane = np.uint64(i & (n - 1))
        symbol = np.uint64(symbols[i])
        z = np.uint64(states[lane])
        share = np.uint64(shares[symbol])
        f = share >> _WORD
        begin = share & np.uint64(0xFFFF)
        words[np.uint64(at - 1)] = z & np.uint64(0xFFFF)
        full = z >= f << np.uint64(32 - BITS)
        z >>= np.uint64(full) << np.uint64(4)
        at -= np.int64(full)
        q = (z * inverses[symbol]) >> np.uint64(44)  # exact, and no overflow: z < f * 2^20 and f <= 2^12
        states[lane] = (q << _BITS) + begin + (z - q * f)
        i -= 1
    if rows:
        share_at = np.int64(shares.ctypes.data)
        inverse_at = np.int64(inverses.ctypes.data)
        state_at = np.int64(states.ctypes.data)
        word_at = np.int64(words.ctypes.data)
        first = np.int64(symbols.ctypes.data)
        for i in range(rows - 16, -16, -16):
            at -= rans16_encode(share_at, inverse_at, state_at + 4 * (i & (n - 1)), first + i, word_at + 2 * at)
    keep_alive(shares)
    keep_alive(inverses)
    return at


@inline
def _slots(freq: Any, table: Any) -> None:
    """The table of a state's lowest bits: symbol << 24 | (frequency - 1) << 12 | rest."""
    slot = 0
    for s in range(256):
        f = np.int64(freq[s])
        for rest in range(f):
            table[slot] = np.uint32((s << 24) | ((f - 1) << 12) | rest)
            slot += 1


@inline
def _decode_scalar(slot: Any, table: Any, x: Any, n: Any, size: Any, tags: Any) -> Any:
    """Decode the last `size` symbols of a chunk with `n` states. Returns whether states and words end correctly."""
    symbol, word = tags
    at = slot[1]
    out = slot[2]
    left = slot[3]
    i = np.int64(0)
    while i < size and left >= 0:
        # No branch depends on the data: whether a word is due cannot be predicted.
        for lane in range(min(n, size - i)):
            z = np.uint64(x[np.uint64(lane)])
            e = np.uint64(table[z & _SLOT])
            z = ((e >> _BITS & _SLOT) + _ONE) * (z >> _BITS) + (e & _SLOT)
            longer = z << _WORD | np.uint64(load(word, at))
            due = z < _LOW
            x[np.uint64(lane)] = longer if due else z
            at += 2 * np.int64(due)
            left -= np.int64(due)
            store(symbol, out, np.uint8(e >> np.uint64(24)))
            out += 1
        i += n
    for lane in range(n):
        if np.uint64(x[lane]) != _LOW:
            return False
    return left == 0


@inline
def _decode_vectors(wide: Any, together: Any, slot_at: Any, state_at: Any, most: Any) -> Any:
    """Decode up to `most` symbols with every lane of some chunks, or of one, by vectors: see `rans_rows`."""
    if _BY_VECTORS:
        if together:
            return _TWO_OF_32(slot_at, state_at, most) if wide == 32 else _FOUR_OF_16(slot_at, state_at, most)
        return _ONE_OF_32(slot_at, state_at, most) if wide == 32 else _ONE_OF_16(slot_at, state_at, most)
    return np.int64(0)


@inline
def _fewest(rows: Any, abreast: Any) -> Any:
    few = rows[0]
    for k in range(1, abreast):
        few = min(few, rows[k])
    return few


@kernel
def decode(freq: Any, states: Any, words: Any, left: Any, sizes: Any, outs: Any) -> Any:
    """Symbols of several chunks. Returns -1, or a chunk whose states or words do not end as they should.

    For each there is a row of frequencies and one of 32 states; `words` and `outs` are the addresses of its words,
    behind which 32 more must be readable, and of its symbols. Chunks with 32 lanes are decoded by vectors two at a
    time, those with 16 four at a time; when one ends, the next takes its place.
    """
    tables = np.empty((_ABREAST, _TOTAL), np.uint32)
    slots = np.empty((_ABREAST, 4), np.int64)
    x = np.empty((_ABREAST, MOST_LANES), np.uint32)
    rows = np.empty(_ABREAST, np.int64)
    chunk = np.empty(_ABREAST, np.int64)
    slot_at = np.int64(slots.ctypes.data)
    state_at = np.int64(x.ctypes.data)
    tags = np.empty(0, np.uint8), np.empty(0, np.uint16)
    for wide in (32, 16, 0):  # lanes that vectors take care of
        abreast = 2 if wide == 32 else _ABREAST
        c = np.int64(0)
        full = True
        chunk[:] = -1
        while full:
            for k in range(abreast):
                while chunk[k] < 0 and c < sizes.size:
                    n = lanes(sizes[c])
                    if (n if _BY_VECTORS and n >= 16 else 0) == wide:
                        _slots(freq[c], tables[k])
                        slots[k, 0] = np.int64(tables.ctypes.data) + 4 * _TOTAL * k
                        slots[k, 1] = words[c]
                        slots[k, 2] = outs[c]
                        slots[k, 3] = left[c]
                        for lane in range(MOST_LANES):
                            x[k, lane] = states[c, lane]
                        chunk[k] = c
                        rows[k] = sizes[c] // n if wide else 0
                    c += 1
                full &= chunk[k] >= 0
            done = (
                _decode_vectors(wide, True, slot_at, state_at, _fewest(rows, abreast)) if wide and full else np.int64(0)
            )
            for k in range(abreast):
                rows[k] -= done
                more = rows[k] and slots[k, 3] >= 0
                if chunk[k] < 0 or (full and more):
                    continue
                if more:
                    _decode_vectors(wide, False, slot_at + 32 * k, state_at + 128 * k, rows[k])
                n = lanes(sizes[chunk[k]])
                size = sizes[chunk[k]]
                if not _decode_scalar(slots[k], tables[k], x[k], n, size % n if wide else size, tags):
                    return chunk[k]
                chunk[k] = -1
    keep_alive(tables)
    keep_alive(slots)
    keep_alive(x)
    return -1


@inline
def _encode_chunk(symbols: Any, out: Any) -> Any:
    """Encode a chunk: table, states and words. Returns how many bytes."""
    freq = np.empty(256, np.uint32)
    size = write_table(freq, frequencies(symbols, freq), out[:MOST_TABLE])
    states = np.empty(lanes(symbols.size), np.uint32)
    words = np.empty(symbols.size + 1, np.uint16)
    start = encode(symbols, freq, states, words)
    to = np.int64(out.ctypes.data)
    copy_bytes(np.int64(states.ctypes.data), 4 * states.size, to + size)
    size += 4 * states.size
    copy_bytes(np.int64(words.ctypes.data) + 2 * start, 2 * (words.size - start), to + size)
    keep_alive(states)
    keep_alive(words)
    return size + 2 * (words.size - start)


@kernel
def encode_chunks(data: Any, sizes: Any, out: Any, ends: Any) -> None:
    """Encode chunks of symbols, which lie at addresses, one behind the other; `ends` says where in `out` each ends.

    `largest_encoding` says how large `out` must be.
    """
    at = np.int64(0)
    for c in range(sizes.size):
        at += _encode_chunk(bytes_at(data[c], sizes[c]), out[at:])
        ends[c] = at


def largest_encoding(size: Any) -> Any:
    """The most bytes that a chunk of such a size can take; for one size, or an array of sizes."""
    return MOST_TABLE + 4 * MOST_LANES + 2 * (size + 1)


@kernel
def decode_chunks(data: Any, lengths: Any, sizes: Any, outs: Any) -> Any:
    """Decode chunks of `lengths` bytes into `sizes` symbols; `data` and `outs` are addresses.

    Returns -1, or a chunk that `encode_chunks` cannot have made.
    """
    n = sizes.size
    freq = np.empty((n, 256), np.uint32)
    states = np.empty((n, MOST_LANES), np.uint32)
    places = np.empty(n, np.int64)
    left = np.empty(n, np.int64)
    at = np.int64(0)
    for length in lengths:
        at += length + 2 * SPARE
    words = np.zeros(at, np.uint8)
    word_at = np.int64(words.ctypes.data)
    state_at = np.int64(states.ctypes.data)
    for c in range(n):
        chunk = bytes_at(data[c], lengths[c])
        begin = read_table(chunk, freq[c])
        end = begin + 4 * lanes(sizes[c])
        if begin < 0 or end > chunk.size or (chunk.size - end) % 2:
            return c
        copy_bytes(data[c] + begin, end - begin, state_at + 4 * MOST_LANES * c)
        places[c] = word_at
        left[c] = (chunk.size - end) // 2
        copy_bytes(data[c] + end, chunk.size - end, word_at)
        word_at += chunk.size - end + 2 * SPARE
    bad = decode(freq, states, places, left, sizes, outs)
    keep_alive(words)
    return bad
