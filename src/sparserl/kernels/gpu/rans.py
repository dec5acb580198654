"""Numbers to bytes and back on a GPU, in Triton: tokens and low bits, frequency tables, interleaved rANS.

    encode: pack (tokens, low bits, histogram) ──► tables (frequencies: shares and bytes) ──► encode ──► lay out, copy
    decode: read_tables (shares) ──► slots ──► decode (tokens) ──► unpack

The bytes are those of the format, so either side may be a CPU. A program works on a chunk, for which a lane of the
format is a lane of a warp. A decoder checks what it reads: what is wrong sets `bad`, and no index leaves its array.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from .changes import _INTERPRETED, Blocks, lowest, popcount, store_word, unsigned

TABLE_BYTES = 1024
_PIECE = 4096  # bytes that a program copies
_CHUNKS = 32  # chunks of a stream that are laid out together
SHAPES = {"pack": (1024, 4), "unpack": (1024, 4)}  # numbers that a program handles together, and its warps
MOST_LANES = 32


def lanes(sizes: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """States of chunks of so many symbols: one for every 2048, a power of two, at most 32."""
    exponent = np.floor(np.log2(np.maximum(sizes >> 11, 1))).astype(np.int64)
    out: np.ndarray[Any, Any] = np.minimum(1 << exponent, MOST_LANES)
    return out


def chunk_spans(sizes: np.ndarray[Any, Any], chunk: int) -> tuple[np.ndarray[Any, Any], ...]:
    """Streams that follow each other, in chunks: where each begins, how many numbers it has, and its stream."""
    per = -(-sizes // chunk)
    stream = np.repeat(np.arange(sizes.size), per)
    inside = (np.arange(stream.size) - np.repeat(np.cumsum(per) - per, per)) * chunk
    return (np.cumsum(sizes) - sizes)[stream] + inside, np.minimum(chunk, sizes[stream] - inside), stream


@dataclass(frozen=True)
class NumberChunks:
    """Chunks of numbers: where each begins among all numbers, and how many it has; on the host and on the device."""

    host_begin: np.ndarray[Any, Any]
    host_size: np.ndarray[Any, Any]
    begin: torch.Tensor
    size: torch.Tensor
    blocks: Blocks

    @classmethod
    def of(cls, blocks: Blocks, begin: Any, size: Any) -> NumberChunks:
        host_begin, host_size = np.asarray(begin, np.int64), np.asarray(size, np.int64)
        there, sizes = blocks.upload_columns(host_begin, host_size)
        return cls(host_begin, host_size, there, sizes, blocks)

    @classmethod
    def of_streams(cls, blocks: Blocks, sizes: Any, chunk: int) -> tuple[NumberChunks, np.ndarray[Any, Any]]:
        """Streams that follow each other, chunk_spans into chunks; and the stream of each chunk."""
        begin, size, stream = chunk_spans(np.asarray(sizes, np.int64).ravel(), chunk)
        return cls.of(blocks, begin, size), stream

    @property
    def count(self) -> int:
        return int(self.host_size.size)


@triton.jit
def highest(v):
    """The index of the highest bit that is set, of an unsigned number that is not zero."""
    if _INTERPRETED:
        wide = v.to(tl.uint64)
        upper = wide >> 32
        half = tl.where(upper != 0, upper, wide).to(tl.float64)  # exact, and its exponent is the index
        index = (half.to(tl.int64, bitcast=True) >> 52).to(tl.int32) - 1023
        return tl.where(upper != 0, index + 32, index)
    elif v.dtype == tl.uint32:
        return tl.inline_asm_elementwise("bfind.u32 $0, $1;", "=r,r", [v], dtype=tl.int32, is_pure=True, pack=1)
    else:
        return tl.inline_asm_elementwise("bfind.u64 $0, $1;", "=r,l", [v], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def _lanes(size):
    """What `lanes` says of one chunk."""
    return 1 << tl.minimum(highest(tl.maximum(size >> 11, 1).to(tl.uint32)), 5)


@triton.jit
def _values(values, at, ok, first, RANKED: tl.constexpr, WIDE: tl.constexpr):
    """Numbers of a type. ClassRanks, flagged where a tile begins, become gaps."""
    v = unsigned(tl.load(values + at, mask=ok, other=0)).to(WIDE)
    if RANKED:
        before = unsigned(tl.load(values + at - 1, mask=ok & (at > first), other=0)).to(WIDE) & 0x7FFFFFFF
        v = tl.where(v >= 0x80000000, v & 0x7FFFFFFF, v - before - 1)
        v = tl.where(ok, v, v ^ v)
    return v


@triton.jit(do_not_specialize=["first", "skipped"])
def _pack_kernel(
    values,
    first,
    skipped,
    begins,
    sizes,
    low_at,
    tokens,
    lows,
    bits,
    counts,
    RANKED: tl.constexpr,
    BITS: tl.constexpr,
    P: tl.constexpr,
):
    WIDE: tl.constexpr = tl.uint64 if BITS > 32 else tl.uint32
    BINS: tl.constexpr = 4 * BITS  # tokens are below
    chunk = first + tl.program_id(0).to(tl.int64)
    begin, size = tl.load(begins + chunk), tl.load(sizes + chunk).to(tl.int32)
    values += begin - skipped
    least = tl.where(begin > skipped, -1, 0)  # before the very first number there is nothing to read
    tokens += begin
    out = lows + tl.load(low_at + chunk)
    seen = tl.zeros([BINS], tl.int32)
    used = size - size
    i = size - size
    while i < size:
        lane = i + tl.arange(0, P)
        ok = lane < size
        v = _values(values, lane, ok, least, RANKED, WIDE)
        large = (v >= 16) & ok
        e = highest(v | 16)
        width = tl.where(large, e - 2, 0)
        top = v >> width.to(WIDE)
        token = tl.where(large, 4 * e + (top.to(tl.int32) & 3), v.to(tl.int32))
        tl.store(tokens + lane, token.to(tl.uint8), mask=ok)
        seen += tl.histogram(tl.where(ok, token, 0), BINS)
        low = tl.where(large, v - (top << width.to(WIDE)), v ^ v).to(tl.uint64)
        at = used + tl.cumsum(width, 0) - width
        fill = (at & 31).to(tl.uint64)
        near = low << fill
        tl.atomic_or(out + (at >> 5), near.to(tl.uint32).to(tl.int32, bitcast=True), mask=large, sem="relaxed")
        tl.atomic_or(
            out + (at >> 5) + 1,
            (near >> 32).to(tl.uint32).to(tl.int32, bitcast=True),
            mask=large & ((near >> 32) != 0),
            sem="relaxed",
        )
        if BITS > 32:
            far = (low >> 1) >> (63 - fill)
            tl.atomic_or(
                out + (at >> 5) + 2,
                far.to(tl.uint32).to(tl.int32, bitcast=True),
                mask=large & (far != 0),
                sem="relaxed",
            )
        used += tl.sum(width, axis=0)
        i += P
    spare = (P - size % P) % P  # what stood behind the end was counted as zeros
    seen -= tl.where(tl.arange(0, BINS) == 0, spare, 0)
    tl.store(counts + chunk * 256 + tl.arange(0, BINS), seen)
    tl.store(bits + chunk, used.to(tl.int64))


@dataclass(frozen=True)
class PackedNumbers:
    """Chunks of numbers as tokens and low bits: `bits` of them in each chunk, from a word of its own on.

    numbers: three for each chunk: its low bits, the bytes of its table, and its words; `encode` adds the last two. Rows
        begin at 16-byte boundaries, for which kernels are compiled.
    """

    cuts: NumberChunks
    tokens: torch.Tensor
    lows: torch.Tensor
    low_at: torch.Tensor
    counts: torch.Tensor
    numbers: torch.Tensor

    @classmethod
    def of(cls, cuts: NumberChunks, bits: Any) -> PackedNumbers:
        """Room for numbers of so many bits, which may differ from chunk to chunk."""
        empty = cuts.blocks.empty
        room = (cuts.host_size * (np.asarray(bits) - 3) + 31) // 32 + 2
        return cls(
            cuts,
            empty(int(cuts.host_size.sum()), torch.uint8),
            torch.zeros(int(room.sum()), dtype=torch.int32, device=cuts.begin.device),
            cuts.blocks.upload(np.cumsum(room) - room),
            torch.zeros(cuts.count * 256, dtype=torch.int32, device=cuts.begin.device),
            empty(3 * (cuts.count + cuts.count % 2), torch.int64).view(3, -1),
        )

    def pack(self, first: int, end: int, values: torch.Tensor, ranked: bool = False) -> None:
        """Token bytes, low bits and a histogram of the tokens of some chunks, which follow each other."""
        together, warps = SHAPES["pack"]
        if end > first:
            _pack_kernel[(end - first,)](
                *(values, first, int(self.cuts.host_begin[first]), self.cuts.begin, self.cuts.size),
                *(self.low_at, self.tokens, self.lows, self.numbers[0], self.counts),
                *(ranked, 32 if ranked else 8 * values.element_size(), together),
                num_warps=warps,
            )


@triton.jit
def _exponent(f):
    """The number of bits of a frequency: the exponent of the float it is, which is exact."""
    return tl.maximum((f.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 126, 0)


@triton.jit
def _shared(count, size, scale, most, s):
    """Frequencies near the counts, as a table can say them; the most frequent symbol is left out."""
    f = ((count.to(tl.uint64) * scale.to(tl.uint64) + size.to(tl.uint64) // 2) // size.to(tl.uint64)).to(tl.int32)
    shift = tl.maximum(_exponent(f) - 5, 0)
    half = tl.where(shift > 0, 1 << tl.maximum(shift - 1, 0), 0)
    f = tl.maximum(((f + half) >> shift) << shift, 1)
    return tl.where((count > 0) & (s != most), f, 0)


@triton.jit
def _tables_kernel(counts, sizes, shares, inverses, tables, lengths, scratch):
    chunk = tl.program_id(0).to(tl.int64)
    s = tl.arange(0, 256)
    count = tl.load(counts + chunk * 256 + s)
    size = tl.load(sizes + chunk)
    most = tl.argmax(count, axis=0)
    scale = size - size + 4096
    f = _shared(count, size, scale, most, s)
    rest = 4096 - tl.sum(f, axis=0)
    while rest < 1:
        scale -= 64
        f = _shared(count, size, scale, most, s)
        rest = 4096 - tl.sum(f, axis=0)
    f = tl.where(s == most, rest, f)
    start = tl.cumsum(f, 0) - f
    tl.store(shares + chunk * 256 + s, (f << 16) | start)
    inverse = ((tl.zeros([256], tl.uint64) + 1) << 44) - 1
    inverse = inverse // tl.maximum(f, 1).to(tl.uint64) + 1  # exact: states are below f times 2^20
    tl.store(inverses + chunk * 256 + s, inverse.to(tl.int64, bitcast=True))
    low = tl.min(tl.where(f > 0, s, 255), axis=0)
    high = tl.max(tl.where(f > 0, s, 0), axis=0)
    e = _exponent(f)
    tl.store(scratch + chunk * 256 + s, e)
    tl.debug_barrier()
    told = (s >= low) & (s <= high) & (s != most)
    ahead = tl.where(s - 1 == most, s - 2, s - 1)
    before = tl.load(scratch + chunk * 256 + ahead, mask=told & (ahead >= low), other=8)
    step = tl.where(e >= before, 2 * (e - before), 2 * (before - e) - 1)
    mantissa = tl.minimum(tl.maximum(e - 1, 0), 4)
    tail = (f >> tl.maximum(e - 1 - mantissa, 0)) & ((1 << mantissa) - 1)
    one = tl.zeros_like(f).to(tl.uint64) + 1
    code = ((one << step.to(tl.uint64)) - 1) | (tail.to(tl.uint64) << (step + 1).to(tl.uint64))
    length = tl.where(told, step + 1 + mantissa, 0)
    at = 24 + tl.cumsum(length, 0) - length
    end = 24 + tl.sum(length, axis=0)
    code = code << (at & 31).to(tl.uint64)
    there = tables + chunk * 256 + (at >> 5)
    tl.atomic_or(there, code.to(tl.uint32).to(tl.int32, bitcast=True), mask=told)
    tl.atomic_or(there + 1, (code >> 32).to(tl.uint32).to(tl.int32, bitcast=True), mask=told & ((code >> 32) != 0))
    tl.atomic_or(tables + chunk * 256, low | ((high - low) << 8) | ((most - low) << 16))
    tl.store(lengths + chunk, (end + 7) >> 3)


@triton.jit
def _ballot(x, lane):
    """A word with the bits of all 32 lanes, in every lane. The kernel has one warp, and a lane an element."""
    if _INTERPRETED:
        return tl.zeros([32], tl.uint32) + tl.sum(x.to(tl.uint32) << lane.to(tl.uint32), axis=0).to(tl.uint32)
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $1, 0; vote.sync.ballot.b32 $0, p, 0xffffffff; }",
            "=r,r",
            [x.to(tl.int32)],
            dtype=tl.uint32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def _row(tokens, row, n, size, lane):
    """A row of tokens, and which lanes have one."""
    ok = (lane < n) & (row >= 0) & (row + lane < size)
    return tl.load(tokens + row + lane, mask=ok, other=0).to(tl.int32), ok


@triton.jit
def _share(shares, inverses, token, ok):
    return tl.load(shares + token, mask=ok, other=65536), tl.load(inverses + token, mask=ok, other=0)


@triton.jit
def _pushed(x, at, share, inverse, ok, words, lane, lower):
    """States and the place of the last word written, when a row of tokens has gone in."""
    f = (share >> 16).to(tl.uint32)
    full = ok & ((x >> 20) >= f)
    due = _ballot(full, lane)
    at -= popcount(due)
    word = (x & 0xFFFF).to(tl.uint16).to(tl.int16, bitcast=True)
    tl.store(words + at + popcount(due & lower), word, mask=full)
    x = tl.where(full, x >> 16, x)
    q = ((x.to(tl.uint64) * inverse.to(tl.uint64, bitcast=True)) >> 44).to(tl.uint32)
    return tl.where(ok, (q << 12) + (x - q * f) + (share & 0xFFFF).to(tl.uint32), x), at


@triton.jit
def _encode_kernel(tokens, begins, sizes, shares, inverses, states, words, made):
    chunk = tl.program_id(0).to(tl.int64)
    begin, size = tl.load(begins + chunk), tl.load(sizes + chunk).to(tl.int32)
    n = _lanes(size)
    lane = tl.arange(0, 32)
    lower = ((tl.zeros([32], tl.uint32) + 1) << lane.to(tl.uint32)) - 1
    x = tl.zeros([32], tl.uint32) + 65536
    at = tl.zeros([32], tl.int32) + size
    shares += chunk * 256
    inverses += chunk * 256
    tokens += begin
    words += begin
    row = (size - 1) // n * n
    # Four rows at a time. Their tokens were fetched while the four before went in: memory is slow, and a warp is alone.
    t0, ok0 = _row(tokens, row, n, size, lane)
    t1, ok1 = _row(tokens, row - n, n, size, lane)
    t2, ok2 = _row(tokens, row - 2 * n, n, size, lane)
    t3, ok3 = _row(tokens, row - 3 * n, n, size, lane)
    while row >= 0:
        share0, inverse0 = _share(shares, inverses, t0, ok0)
        share1, inverse1 = _share(shares, inverses, t1, ok1)
        share2, inverse2 = _share(shares, inverses, t2, ok2)
        share3, inverse3 = _share(shares, inverses, t3, ok3)
        row -= 4 * n
        t0, soon0 = _row(tokens, row, n, size, lane)
        t1, soon1 = _row(tokens, row - n, n, size, lane)
        t2, soon2 = _row(tokens, row - 2 * n, n, size, lane)
        t3, soon3 = _row(tokens, row - 3 * n, n, size, lane)
        x, at = _pushed(x, at, share0, inverse0, ok0, words, lane, lower)
        x, at = _pushed(x, at, share1, inverse1, ok1, words, lane, lower)
        x, at = _pushed(x, at, share2, inverse2, ok2, words, lane, lower)
        x, at = _pushed(x, at, share3, inverse3, ok3, words, lane, lower)
        ok0, ok1, ok2, ok3 = soon0, soon1, soon2, soon3
    tl.store(states + chunk * 32 + lane, x.to(tl.int32, bitcast=True))
    tl.store(made + chunk, (size - tl.min(at, axis=0)).to(tl.int64))


@dataclass(frozen=True)
class EncodedTokens:
    """Tokens through the entropy coder. The words of a chunk end where its room, one for each token, ends."""

    tables: torch.Tensor
    states: torch.Tensor
    words: torch.Tensor


def encode(packed: PackedNumbers) -> EncodedTokens:
    """All chunks of tokens, whose histograms are known, through the rans coder."""
    cuts, tokens = packed.cuts, packed.tokens
    n, empty = cuts.count, cuts.blocks.empty
    shares, scratch, inverses = empty(n * 256, torch.int32), empty(n * 256, torch.int32), empty(n * 256, torch.int64)
    out = EncodedTokens(
        torch.zeros(n * 256 + 1, dtype=torch.int32, device=tokens.device),
        empty(n * 32, torch.int32),
        empty(tokens.numel(), torch.int16),
    )
    if n:
        _tables_kernel[(n,)](
            packed.counts, cuts.size, shares, inverses, out.tables, packed.numbers[1], scratch, num_warps=4
        )
        _encode_kernel[(n,)](
            *(tokens, cuts.begin, cuts.size, shares, inverses, out.states, out.words, packed.numbers[2]),
            num_warps=1,
        )
    return out


@triton.jit(do_not_specialize=["N", "R", "tokens", "lows", "tables", "states", "words"])
def _lay_out_kernel(
    firsts,
    ends,
    places,
    begins,
    sizes,
    numbers,
    low_at,
    source,
    runs,
    N,
    R,
    tokens,
    lows,
    tables,
    states,
    words,
    P: tl.constexpr,
):
    """A program knows a stream: whether rans makes it shorter, and so what its chunks consist of."""
    stream = tl.program_id(0)
    first, end = tl.load(firsts + stream), tl.load(ends + stream)
    saved = tl.zeros([P], tl.int64)
    i = first
    while i < end:
        c = i + tl.arange(0, P)
        ok = c < end
        coded = tl.load(numbers + R + c, mask=ok, other=0) + 2 * tl.load(numbers + 2 * R + c, mask=ok, other=0)
        size = tl.load(sizes + c, mask=ok, other=0)
        saved += tl.where(ok, size - coded - 4 * _lanes(size), 0)
        i += P
    rans = tl.sum(saved, axis=0) > 0
    i = first
    while i < end:
        c = i + tl.arange(0, P)
        ok = c < end
        begin, size = tl.load(begins + c, mask=ok, other=0), tl.load(sizes + c, mask=ok, other=0)
        table, made = tl.load(numbers + R + c, mask=ok, other=0), 2 * tl.load(numbers + 2 * R + c, mask=ok, other=0)
        to = 3 * tl.load(places + c, mask=ok, other=0)
        tl.store(source + to, tl.where(rans, tables + 1024 * c, tokens + begin), mask=ok)
        tl.store(source + to + 1, states + 128 * c, mask=ok)
        tl.store(source + to + 2, words + 2 * (begin + size) - made, mask=ok)
        tl.store(runs + to, tl.where(rans, table, size), mask=ok)
        tl.store(runs + to + 1, tl.where(rans, 4 * _lanes(size), 0), mask=ok)
        tl.store(runs + to + 2, tl.where(rans, made, 0), mask=ok)
        to = 3 * tl.load(places + N + c, mask=ok, other=0)
        low = lows + 4 * tl.load(low_at + c, mask=ok, other=0)
        for k in tl.static_range(3):
            tl.store(source + to + k, low, mask=ok)
        tl.store(runs + to, (tl.load(numbers + c, mask=ok, other=0) + 7) >> 3, mask=ok)
        tl.store(runs + to + 1, c - c, mask=ok)
        tl.store(runs + to + 2, c - c, mask=ok)
        i += P


def lay_out(packed: PackedNumbers, code: EncodedTokens, stream: Any, place: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the bytes of all chunks lie, and how many they are: three runs for a chunk's tokens, and for its low bits.

    stream: of each chunk, rising; one that rans does not make shorter is stored.
    place: where the tokens of each chunk belong among all chunks, and then where their low bits do.
    """
    cuts, n = packed.cuts, packed.cuts.count
    ends = np.flatnonzero(np.append(np.diff(stream) != 0, True)) + 1 if n else np.empty(0, np.int64)
    first, end, there = cuts.blocks.upload_columns(np.append(0, ends[:-1]) if n else ends, ends, place)
    source, runs = cuts.blocks.empty(6 * n, torch.int64), cuts.blocks.empty(6 * n, torch.int64)
    if n:
        _lay_out_kernel[(ends.size,)](
            *(first, end, there, cuts.begin, cuts.size, packed.numbers),
            *(
                packed.low_at,
                source,
                runs,
                n,
                packed.numbers.shape[1],
                packed.tokens.data_ptr(),
                packed.lows.data_ptr(),
            ),
            *(code.tables.data_ptr(), code.states.data_ptr(), code.words.data_ptr(), _CHUNKS),
            num_warps=1,
        )
    return source, runs


@triton.jit(do_not_specialize=["origin"])
def _copy_kernel(source, origin, target, source_at, target_at, sizes, P: tl.constexpr):
    segment = tl.program_id(0)
    i = tl.program_id(1) * P + tl.arange(0, P)
    ok = i < tl.load(sizes + segment)
    a, b = tl.load(source_at + segment) - origin, tl.load(target_at + segment)
    tl.store(target + b + i, tl.load(source + a + i, mask=ok, other=0), mask=ok)


def copy(
    source: torch.Tensor,
    target: torch.Tensor,
    source_at: torch.Tensor,
    target_at: torch.Tensor,
    sizes: torch.Tensor,
    longest: int,
    origin: int = 0,
) -> None:
    """Copy runs of bytes from one place to another, given by their offsets from two tensors.

    origin: what the first tensor's offsets are counted from, where it is not the tensor itself.
    """
    if sizes.numel() and longest:
        grid = (sizes.numel(), triton.cdiv(longest, _PIECE))
        _copy_kernel[grid](source, origin, target, source_at, target_at, sizes, _PIECE, num_warps=4)


@triton.jit
def _window(data, at, end):
    """40 bits from bit `at` on; what lies behind bit `end` is zero."""
    byte = at >> 3
    v = tl.load(data + byte, mask=at < end, other=0).to(tl.uint64)
    for i in tl.static_range(1, 6):
        more = tl.load(data + byte + i, mask=at + 8 * i < end + 8, other=0).to(tl.uint64)
        v |= more << (8 * i)
    return v >> (at & 7).to(tl.uint64)


@triton.jit
def _read_tables_kernel(data, offsets, lengths, sizes, shares, bodies, bad):
    chunk = tl.program_id(0).to(tl.int64)
    source, length = data + tl.load(offsets + chunk), tl.load(lengths + chunk)
    s = tl.arange(0, 256)
    tl.store(shares + chunk * 256 + s, tl.zeros([256], tl.int32))
    tl.debug_barrier()
    wrong = length < 3
    low = tl.load(source, mask=length >= 3, other=0).to(tl.int32)
    high = low + tl.load(source + 1, mask=length >= 3, other=0).to(tl.int32)
    most = low + tl.load(source + 2, mask=length >= 3, other=0).to(tl.int32)
    wrong = wrong | (high > 255) | (most > high)
    end = 8 * tl.minimum(length, 1024)
    at = length - length + 24
    e = low - low + 8
    left = low - low + 4096
    symbol = low
    while (symbol <= high) & (wrong == 0):
        if symbol != most:
            # Up to 24 ones, a zero and four bits: what is longer is no table.
            window = _window(source, at, end).to(tl.uint32)
            step = lowest((window ^ 0xFFFFFFFF) | 0x80000000)
            e += tl.where((step & 1) == 0, step >> 1, -((step + 1) >> 1))
            width = tl.minimum(tl.maximum(e - 1, 0), 4)
            wrong = wrong | (e < 0) | (e > 12) | (step > 24) | (at + step + 1 + width > end)
            tail = (window >> tl.minimum(step + 1, 31).to(tl.uint32)).to(tl.int32) & ((1 << width) - 1)
            f = ((1 << width) | tail) << tl.minimum(tl.maximum(e - 1 - width, 0), 12)
            f = tl.where(e > 0, f, 0)
            tl.store(shares + chunk * 256 + symbol, f)
            left -= f
            at += step + 1 + width
        symbol += 1
    padding = _window(source, at, (at + 7) // 8 * 8) & ((1 << ((8 - (at & 7)) & 7).to(tl.uint64)) - 1)
    wrong = wrong | (left < 1) | (padding != 0)
    tl.store(shares + chunk * 256 + most, left, mask=wrong == 0)
    tl.debug_barrier()
    f = tl.load(shares + chunk * 256 + s)
    tl.store(shares + chunk * 256 + s, (f << 16) | (tl.cumsum(f, 0) - f))
    body = (at + 7) >> 3
    rest = length - body - 4 * _lanes(tl.load(sizes + chunk))
    wrong = wrong | (rest < 0) | ((rest & 1) != 0)
    tl.store(bodies + chunk, tl.where(wrong, -1, body))
    if wrong:
        tl.store(bad, 1)


@triton.jit
def _slots_kernel(shares, bodies, slots):
    """For each of 4096 values of a state's low bits: the symbol, its frequency minus 1, and the rest."""
    chunk = tl.program_id(0).to(tl.int64)
    if tl.load(bodies + chunk) >= 0:
        x = tl.arange(0, 4096)
        symbol = tl.zeros([4096], tl.int32)
        for i in tl.static_range(8):
            reach = symbol + (128 >> i)
            start = tl.load(shares + chunk * 256 + reach) & 0xFFFF
            symbol = tl.where(start <= x, reach, symbol)
        share = tl.load(shares + chunk * 256 + symbol)
        value = (symbol.to(tl.uint32) << 24) | (((share >> 16) - 1).to(tl.uint32) << 12)
        value |= (x - (share & 0xFFFF)).to(tl.uint32)
        tl.store(slots + chunk * 4096 + x, value.to(tl.int32, bitcast=True))


@triton.jit
def _of_lane(x, lane):
    """What other lanes have; their numbers are modulo 32. The kernel has one warp, and a lane an element."""
    if _INTERPRETED:
        return tl.gather(x, lane & 31, 0)
    else:
        return tl.inline_asm_elementwise(
            "shfl.sync.idx.b32 $0, $1, $2, 31, 0xffffffff;",
            "=r,r,r",
            [x, lane],
            dtype=tl.uint32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def _bytes(source, at, room):
    """Low and high byte of the words at some places; behind the last there are zeros."""
    low = tl.load(source + 2 * at, mask=at < room, other=0)
    return low, tl.load(source + 2 * at + 1, mask=at < room, other=0)


@triton.jit
def _word(low, high):
    return low.to(tl.uint32) | (high.to(tl.uint32) << 8)


@triton.jit
def _decode_kernel(data, offsets, lengths, begins, sizes, bodies, slots, tokens, bad):
    chunk = tl.program_id(0).to(tl.int64)
    body = tl.load(bodies + chunk)
    if body >= 0:
        source = data + tl.load(offsets + chunk) + body
        size = tl.load(sizes + chunk).to(tl.int32)
        n = _lanes(size)
        lane = tl.arange(0, 32)
        x = tl.zeros([32], tl.uint32)
        for i in tl.static_range(4):
            x |= tl.load(source + 4 * lane + i, mask=lane < n, other=0).to(tl.uint32) << (8 * i)
        source += 4 * n
        room = ((tl.load(lengths + chunk) - body - 4 * n) // 2).to(tl.int32)
        lower = ((tl.zeros([32], tl.uint32) + 1) << lane.to(tl.uint32)) - 1
        slots += chunk * 4096
        tokens += tl.load(begins + chunk)
        # Lanes hold the next 64 words, and the 32 behind are on their way: memory is slow, and a warp is alone.
        low, high = _bytes(source, lane, room)
        near = _word(low, high)
        low, high = _bytes(source, 32 + lane, room)
        far = _word(low, high)
        low, high = _bytes(source, 64 + lane, room)
        held = size - size  # the first word that lanes hold
        at = tl.zeros([32], tl.int32)
        row = size - size
        while row < size:
            ok = (lane < n) & (row + lane < size)
            slot = tl.load(slots + (x & 4095).to(tl.int32), mask=ok, other=0).to(tl.uint32, bitcast=True)
            y = (((slot >> 12) & 4095) + 1) * (x >> 12) + (slot & 4095)
            short = ok & (y < 65536)
            due = _ballot(short, lane)
            place = at + popcount(due & lower)
            word = tl.where(place < 32, _of_lane(near, place), _of_lane(far, place))
            x = tl.where(ok, tl.where(short, (y << 16) | word, y), x)
            tl.store(tokens + row + lane, (slot >> 24).to(tl.uint8), mask=ok)
            at += popcount(due)
            if tl.max(at, axis=0) >= 32:
                near, far = far, _word(low, high)
                at -= 32
                held += 32
                low, high = _bytes(source, held + 64 + lane, room)
            row += n
        wrong = (held + at != room) | ((lane < n) & (x != 65536))
        if tl.max(wrong.to(tl.int32), axis=0) > 0:
            tl.store(bad, 1)


class EncodedChunks(NamedTuple):
    """Chunks on the device: where the numbers of each begin, and how many they are; their bytes in some data."""

    begin: torch.Tensor
    size: torch.Tensor
    offset: torch.Tensor
    length: torch.Tensor

    def some(self, which: Any) -> EncodedChunks:
        return EncodedChunks(*(column[which] for column in self))


def decode(blocks: Blocks, chunks: EncodedChunks, data: torch.Tensor, tokens: torch.Tensor, bad: torch.Tensor) -> None:
    """The tokens of chunks that were coded with rans, from their bytes in `data`."""
    n, (begin, size, offset, length) = chunks.begin.numel(), chunks
    if n:
        shares, bodies = blocks.empty(n * 256, torch.int32), blocks.empty(n, torch.int64)
        slots = blocks.empty(n * 4096, torch.int32)
        _read_tables_kernel[(n,)](data, offset, length, size, shares, bodies, bad, num_warps=1)
        _slots_kernel[(n,)](shares, bodies, slots, num_warps=4)
        _decode_kernel[(n,)](data, offset, length, begin, size, bodies, slots, tokens, bad, num_warps=1)


@triton.jit
def _unpack_kernel(
    tokens,
    begins,
    sizes,
    data,
    offsets,
    lengths,
    values,
    bad,
    LIMIT: tl.constexpr,
    BITS: tl.constexpr,
    BYTES: tl.constexpr,
    P: tl.constexpr,
):
    chunk = tl.program_id(0)
    begin, size = tl.load(begins + chunk), tl.load(sizes + chunk).to(tl.int32)
    source, whole = data + tl.load(offsets + chunk), tl.load(lengths + chunk)
    length = tl.minimum(whole, 1 << 27).to(tl.int32)  # no chunk has so many, and then what is used does not match
    tokens += begin
    values += begin
    used = size - size
    i = size - size
    wrong = tl.zeros([P], tl.int32)
    while i < size:
        lane = i + tl.arange(0, P)
        ok = lane < size
        token = tl.load(tokens + lane, mask=ok, other=0).to(tl.int32)
        large = token >= 16
        width = tl.where(large, ((token - 16) >> 2) + 2, 0)
        at = used + tl.cumsum(width, 0) - width
        byte = at >> 3
        low = tl.zeros([P], tl.uint64)
        for k in tl.static_range(BYTES):
            more = tl.load(source + byte + k, mask=large & (byte + k < length) & (width > 8 * k - 8), other=0)
            low |= _shifted(more, at, k)
        one = tl.zeros_like(low) + 1
        low &= (one << width.to(tl.uint64)) - 1
        head = (4 + (token & 3)).to(tl.uint64) << width.to(tl.uint64)
        v = tl.where(large, head | low, token.to(tl.uint64))
        above = v > tl.full([1], LIMIT, tl.uint64)
        wrong |= (ok & (above | (at + width > 8 * length))).to(tl.int32)
        store_word(values + lane, tl.where(above, v ^ v, v), ok, BITS)  # what comes next counts on the limit
        used += tl.sum(width, axis=0)
        i += P
    last = tl.load(source + (used >> 3), mask=((used & 7) != 0) & ((used >> 3) < length), other=0).to(tl.int32)
    even = ((used + 7) >> 3) == whole
    if (tl.max(wrong, axis=0) > 0) | (even == 0) | ((last >> (used & 7).to(tl.int32)) != 0):
        tl.store(bad, 1)


@triton.jit
def _shifted(byte, at, k: tl.constexpr):
    """Byte k of a string that begins at bit `at`, where it belongs in a number."""
    into = (at & 7).to(tl.int32)
    wide = byte.to(tl.uint64)
    left = tl.maximum(8 * k - into, 0)
    right = tl.maximum(into - 8 * k, 0)
    return tl.where(left < 64, (wide << tl.minimum(left, 63).to(tl.uint64)) >> right.to(tl.uint64), wide ^ wide)


def unpack(
    chunks: EncodedChunks, tokens: torch.Tensor, data: torch.Tensor, values: torch.Tensor, limit: int, bad: torch.Tensor
) -> None:
    """Numbers, none above the limit, from tokens and the low bits in `data`."""
    bits = 8 * values.element_size()
    together, warps = SHAPES["unpack"]
    if chunks.begin.numel():
        _unpack_kernel[(chunks.begin.numel(),)](
            *(tokens, chunks.begin, chunks.size, data, chunks.offset, chunks.length, values, bad),
            *(limit, bits, (min(bits, 64) - 3 + 7 + 7) // 8, together),
            num_warps=warps,
        )
