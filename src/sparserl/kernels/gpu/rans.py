"""Numbers to bytes and back on a GPU, in Triton: tokens and low bits, frequency tables, interleaved rANS.

    encode: pack (tokens, low bits, histogram) ──► tables (frequencies) ──► encode ──► lay out, copy
    decode: read tables (frequencies) ──► slots ──► decode (tokens) ──► unpack

The bytes are those of the format, so either side may be a CPU. A program works on a chunk, and a lane of the format is
a lane of a warp. A decoder checks what it reads: whatever is wrong sets `bad`, and no index leaves its array.
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
_COPIED = 4096  # bytes that a program copies
_CHUNKS = 32  # chunks of a stream that are laid out at a time
SHAPES = {"pack": (1024, 4), "unpack": (1024, 4)}  # numbers that a program handles at a time, and its warps
MOST_LANES = 32


def lanes(sizes: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The states of chunks of such sizes: one for every 2048 symbols, a power of two, at most 32."""
    exponent = np.floor(np.log2(np.maximum(sizes >> 11, 1))).astype(np.int64)
    out: np.ndarray[Any, Any] = np.minimum(1 << exponent, MOST_LANES)
    return out


def chunk_spans(sizes: np.ndarray[Any, Any], chunk: int) -> tuple[np.ndarray[Any, Any], ...]:
    """Divide consecutive streams into chunks: where each begins, how many numbers it has, and its stream."""
    per_stream = -(-sizes // chunk)
    stream = np.repeat(np.arange(sizes.size), per_stream)
    inside = (np.arange(stream.size) - np.repeat(np.cumsum(per_stream) - per_stream, per_stream)) * chunk
    return (np.cumsum(sizes) - sizes)[stream] + inside, np.minimum(chunk, sizes[stream] - inside), stream


@dataclass(frozen=True)
class NumberChunks:
    """Chunks of numbers: where each begins among all numbers, and how many it has; on the host and on the GPU."""

    host_begin: np.ndarray[Any, Any]
    host_size: np.ndarray[Any, Any]
    begin: torch.Tensor
    size: torch.Tensor
    blocks: Blocks

    @classmethod
    def of(cls, blocks: Blocks, begin: Any, size: Any) -> NumberChunks:
        host_begin = np.asarray(begin, np.int64)
        host_size = np.asarray(size, np.int64)
        gpu_begin, gpu_size = blocks.upload_columns(host_begin, host_size)
        return cls(host_begin, host_size, gpu_begin, gpu_size, blocks)

    @classmethod
    def of_streams(cls, blocks: Blocks, sizes: Any, chunk: int) -> tuple[NumberChunks, np.ndarray[Any, Any]]:
        """The chunks of consecutive streams, and the stream of each chunk."""
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
    """`lanes` of one chunk."""
    return 1 << tl.minimum(highest(tl.maximum(size >> 11, 1).to(tl.uint32)), 5)


@triton.jit
def _load_numbers(values, at, ok, first, RANKED: tl.constexpr, WIDE: tl.constexpr):
    """Numbers as a wider type. Ranks, which are flagged where a tile begins, become gaps."""
    v = unsigned(tl.load(values + at, mask=ok, other=0)).to(WIDE)
    if RANKED:
        before = unsigned(tl.load(values + at - 1, mask=ok & (at > first), other=0)).to(WIDE) & 0x7FFFFFFF
        v = tl.where(v >= 0x80000000, v & 0x7FFFFFFF, v - before - 1)
        v = tl.where(ok, v, v ^ v)
    return v


@triton.jit
def _or_word(place, word, ok):
    """Set bits of words that other lanes set bits of, too."""
    tl.atomic_or(place, word.to(tl.uint32).to(tl.int32, bitcast=True), mask=ok, sem="relaxed")


@triton.jit
def _append_bits(out, at, low, ok, BITS: tl.constexpr):
    """Write low bits into a string of 32-bit words, from bit `at` on."""
    fill = (at & 31).to(tl.uint64)
    near = low << fill
    _or_word(out + (at >> 5), near, ok)
    _or_word(out + (at >> 5) + 1, near >> 32, ok & ((near >> 32) != 0))
    if BITS > 32:
        far = (low >> 1) >> (63 - fill)
        _or_word(out + (at >> 5) + 2, far, ok & (far != 0))


class _PackOutput(NamedTuple):
    """What `_pack_kernel` writes; `low_at` says where the low bits of each chunk go."""

    tokens: torch.Tensor
    lows: torch.Tensor
    low_at: torch.Tensor
    counts: torch.Tensor
    low_bits: torch.Tensor


@triton.jit(do_not_specialize=["first", "skipped"])
def _pack_kernel(
    values,
    first,
    skipped,
    begins,
    sizes,
    out,
    RANKED: tl.constexpr,
    BITS: tl.constexpr,
    P: tl.constexpr,
):
    WIDE: tl.constexpr = tl.uint64 if BITS > 32 else tl.uint32
    BINS: tl.constexpr = 4 * BITS  # more than any token
    chunk = first + tl.program_id(0).to(tl.int64)
    begin = tl.load(begins + chunk)
    size = tl.load(sizes + chunk).to(tl.int32)
    values += begin - skipped
    least = tl.where(begin > skipped, -1, 0)  # nothing lies before the very first number
    tokens = out.tokens + begin
    lows = out.lows + tl.load(out.low_at + chunk)
    histogram = tl.zeros([BINS], tl.int32)
    used = size - size
    i = size - size
    while i < size:
        lane = i + tl.arange(0, P)
        ok = lane < size
        v = _load_numbers(values, lane, ok, least, RANKED, WIDE)
        large = (v >= 16) & ok
        exponent = highest(v | 16)
        width = tl.where(large, exponent - 2, 0)
        top = v >> width.to(WIDE)
        token = tl.where(large, 4 * exponent + (top.to(tl.int32) & 3), v.to(tl.int32))
        tl.store(tokens + lane, token.to(tl.uint8), mask=ok)
        histogram += tl.histogram(tl.where(ok, token, 0), BINS)
        low = tl.where(large, v - (top << width.to(WIDE)), v ^ v).to(tl.uint64)
        _append_bits(lows, used + tl.cumsum(width, 0) - width, low, large, BITS)
        used += tl.sum(width, axis=0)
        i += P
    spare = (P - size % P) % P  # lanes behind the end were counted as zeros
    histogram -= tl.where(tl.arange(0, BINS) == 0, spare, 0)
    tl.store(out.counts + chunk * 256 + tl.arange(0, BINS), histogram)
    tl.store(out.low_bits + chunk, used.to(tl.int64))


@dataclass(frozen=True)
class PackedNumbers:
    """Chunks of numbers as tokens and low bits; the low bits of each chunk begin with a word of their own.

    numbers: three for each chunk: its low bits, the bytes of its table, and its words; `encode` adds the last two. Rows
        begin at 16-byte boundaries, for which kernels are compiled.
    """

    chunks: NumberChunks
    tokens: torch.Tensor
    lows: torch.Tensor
    low_at: torch.Tensor
    counts: torch.Tensor
    numbers: torch.Tensor

    @classmethod
    def of(cls, chunks: NumberChunks, bits: Any) -> PackedNumbers:
        """Memory for numbers of so many bits, which may differ from chunk to chunk."""
        empty = chunks.blocks.empty
        device = chunks.begin.device
        low_words = (chunks.host_size * (np.asarray(bits) - 3) + 31) // 32 + 2
        return cls(
            chunks,
            empty(int(chunks.host_size.sum()), torch.uint8),
            torch.zeros(int(low_words.sum()), dtype=torch.int32, device=device),
            chunks.blocks.upload(np.cumsum(low_words) - low_words),
            torch.zeros(chunks.count * 256, dtype=torch.int32, device=device),
            empty(3 * (chunks.count + chunks.count % 2), torch.int64).view(3, -1),
        )

    def pack(self, first: int, end: int, values: torch.Tensor, ranked: bool = False) -> None:
        """Token bytes, low bits and a histogram of the tokens of consecutive chunks."""
        at_a_time, warps = SHAPES["pack"]
        if end > first:
            out = _PackOutput(self.tokens, self.lows, self.low_at, self.counts, self.numbers[0])
            _pack_kernel[(end - first,)](
                *(values, first, int(self.chunks.host_begin[first]), self.chunks.begin, self.chunks.size, out),
                *(ranked, 32 if ranked else 8 * values.element_size(), at_a_time),
                num_warps=warps,
            )


@triton.jit
def _bit_length(f):
    """The number of bits of a frequency: the exponent of the float it is, which is exact."""
    return tl.maximum((f.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 126, 0)


@triton.jit
def _scaled_frequencies(count, size, scale, most, s):
    """Frequencies near the counts, rounded as tables need it; the most frequent symbol is left out."""
    f = ((count.to(tl.uint64) * scale.to(tl.uint64) + size.to(tl.uint64) // 2) // size.to(tl.uint64)).to(tl.int32)
    shift = tl.maximum(_bit_length(f) - 5, 0)
    half = tl.where(shift > 0, 1 << tl.maximum(shift - 1, 0), 0)
    f = tl.maximum(((f + half) >> shift) << shift, 1)
    return tl.where((count > 0) & (s != most), f, 0)


@triton.jit
def _frequencies(count, size, most, s):
    """Frequencies that add up to 4096; the most frequent symbol takes the rest."""
    scale = size - size + 4096
    f = _scaled_frequencies(count, size, scale, most, s)
    rest = 4096 - tl.sum(f, axis=0)
    while rest < 1:
        scale -= 64
        f = _scaled_frequencies(count, size, scale, most, s)
        rest = 4096 - tl.sum(f, axis=0)
    return tl.where(s == most, rest, f)


@triton.jit
def _write_table(f, most, s, table, exponents):
    """The bytes of a table of frequencies. Returns how many. `exponents` is scratch memory."""
    low = tl.min(tl.where(f > 0, s, 255), axis=0)
    high = tl.max(tl.where(f > 0, s, 0), axis=0)
    e = _bit_length(f)
    tl.store(exponents + s, e)
    tl.debug_barrier()
    written = (s >= low) & (s <= high) & (s != most)
    previous = tl.where(s - 1 == most, s - 2, s - 1)
    before = tl.load(exponents + previous, mask=written & (previous >= low), other=8)
    step = tl.where(e >= before, 2 * (e - before), 2 * (before - e) - 1)
    mantissa = tl.minimum(tl.maximum(e - 1, 0), 4)
    tail = (f >> tl.maximum(e - 1 - mantissa, 0)) & ((1 << mantissa) - 1)
    one = tl.zeros_like(f).to(tl.uint64) + 1
    code = ((one << step.to(tl.uint64)) - 1) | (tail.to(tl.uint64) << (step + 1).to(tl.uint64))
    length = tl.where(written, step + 1 + mantissa, 0)
    at = 24 + tl.cumsum(length, 0) - length
    code = code << (at & 31).to(tl.uint64)
    place = table + (at >> 5)
    tl.atomic_or(place, code.to(tl.uint32).to(tl.int32, bitcast=True), mask=written)
    tl.atomic_or(place + 1, (code >> 32).to(tl.uint32).to(tl.int32, bitcast=True), mask=written & ((code >> 32) != 0))
    tl.atomic_or(table, low | ((high - low) << 8) | ((most - low) << 16))
    return (24 + tl.sum(length, axis=0) + 7) >> 3


@triton.jit
def _tables_kernel(counts, sizes, shares, inverses, tables, lengths, scratch):
    chunk = tl.program_id(0).to(tl.int64)
    s = tl.arange(0, 256)
    row = chunk * 256
    count = tl.load(counts + row + s)
    most = tl.argmax(count, axis=0)
    f = _frequencies(count, tl.load(sizes + chunk), most, s)
    start = tl.cumsum(f, 0) - f
    tl.store(shares + row + s, (f << 16) | start)
    inverse = ((tl.zeros([256], tl.uint64) + 1) << 44) - 1
    inverse = inverse // tl.maximum(f, 1).to(tl.uint64) + 1  # exact: states are below f times 2^20
    tl.store(inverses + row + s, inverse.to(tl.int64, bitcast=True))
    tl.store(lengths + chunk, _write_table(f, most, s, tables + row, scratch + row))


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
def _load_row(tokens, row, n, size, lane):
    """A row of tokens, and which lanes have one."""
    ok = (lane < n) & (row >= 0) & (row + lane < size)
    return tl.load(tokens + row + lane, mask=ok, other=0).to(tl.int32), ok


@triton.jit
def _load_share(shares, inverses, token, ok):
    """Frequency and start of tokens, and the inverse of the frequency."""
    return tl.load(shares + token, mask=ok, other=65536), tl.load(inverses + token, mask=ok, other=0)


@triton.jit
def _push_row(x, at, share, inverse, ok, words, lane, lower):
    """Encode a row of tokens. Returns the states and the place of the last word written."""
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
def _encode_kernel(tokens, begins, sizes, shares, inverses, states, words, word_counts):
    chunk = tl.program_id(0).to(tl.int64)
    begin = tl.load(begins + chunk)
    size = tl.load(sizes + chunk).to(tl.int32)
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
    # Four rows at a time. Their tokens were loaded while the previous four were encoded: otherwise the only warp would
    # wait for memory.
    t0, ok0 = _load_row(tokens, row, n, size, lane)
    t1, ok1 = _load_row(tokens, row - n, n, size, lane)
    t2, ok2 = _load_row(tokens, row - 2 * n, n, size, lane)
    t3, ok3 = _load_row(tokens, row - 3 * n, n, size, lane)
    while row >= 0:
        share0, inverse0 = _load_share(shares, inverses, t0, ok0)
        share1, inverse1 = _load_share(shares, inverses, t1, ok1)
        share2, inverse2 = _load_share(shares, inverses, t2, ok2)
        share3, inverse3 = _load_share(shares, inverses, t3, ok3)
        row -= 4 * n
        t0, next0 = _load_row(tokens, row, n, size, lane)
        t1, next1 = _load_row(tokens, row - n, n, size, lane)
        t2, next2 = _load_row(tokens, row - 2 * n, n, size, lane)
        t3, next3 = _load_row(tokens, row - 3 * n, n, size, lane)
        x, at = _push_row(x, at, share0, inverse0, ok0, words, lane, lower)
        x, at = _push_row(x, at, share1, inverse1, ok1, words, lane, lower)
        x, at = _push_row(x, at, share2, inverse2, ok2, words, lane, lower)
        x, at = _push_row(x, at, share3, inverse3, ok3, words, lane, lower)
        ok0 = next0
        ok1 = next1
        ok2 = next2
        ok3 = next3
    tl.store(states + chunk * 32 + lane, x.to(tl.int32, bitcast=True))
    tl.store(word_counts + chunk, (size - tl.min(at, axis=0)).to(tl.int64))


@dataclass(frozen=True)
class EncodedTokens:
    """Tokens that went through the entropy coder. A chunk has room for a word per token, and its words end there."""

    tables: torch.Tensor
    states: torch.Tensor
    words: torch.Tensor


def encode(packed: PackedNumbers) -> EncodedTokens:
    """Encode all chunks of tokens, whose histograms are known, with rANS."""
    chunks = packed.chunks
    tokens = packed.tokens
    n = chunks.count
    empty = chunks.blocks.empty
    shares = empty(n * 256, torch.int32)
    scratch = empty(n * 256, torch.int32)
    inverses = empty(n * 256, torch.int64)
    out = EncodedTokens(
        torch.zeros(n * 256 + 1, dtype=torch.int32, device=tokens.device),
        empty(n * 32, torch.int32),
        empty(tokens.numel(), torch.int16),
    )
    if n:
        _tables_kernel[(n,)](
            packed.counts, chunks.size, shares, inverses, out.tables, packed.numbers[1], scratch, num_warps=4
        )
        _encode_kernel[(n,)](
            *(tokens, chunks.begin, chunks.size, shares, inverses, out.states, out.words, packed.numbers[2]),
            num_warps=1,
        )
    return out


class _ChunkTable(NamedTuple):
    """What `_lay_out_kernel` reads about chunks: see `NumberChunks`, `PackedNumbers` and `lay_out`.

    firsts, ends: the first chunk of each stream, and the one behind its last.
    """

    firsts: torch.Tensor
    ends: torch.Tensor
    places: torch.Tensor
    begins: torch.Tensor
    sizes: torch.Tensor
    numbers: torch.Tensor
    low_at: torch.Tensor


@triton.jit
def _coded_bytes(numbers, c, R, ok):
    """The bytes of a chunk's table and of its words."""
    table = tl.load(numbers + R + c, mask=ok, other=0)
    return table, 2 * tl.load(numbers + 2 * R + c, mask=ok, other=0)


@triton.jit
def _saved_bytes(chunks, first, end, R, P: tl.constexpr):
    """How many bytes rANS saves in the chunks of a stream."""
    saved = tl.zeros([P], tl.int64)
    i = first
    while i < end:
        c = i + tl.arange(0, P)
        ok = c < end
        table, words = _coded_bytes(chunks.numbers, c, R, ok)
        size = tl.load(chunks.sizes + c, mask=ok, other=0)
        saved += tl.where(ok, size - table - words - 4 * _lanes(size), 0)
        i += P
    return tl.sum(saved, axis=0)


@triton.jit
def _store_runs(source, runs, at, addresses, lengths, ok):
    """Three runs of bytes, one behind the other."""
    for k in tl.static_range(3):
        tl.store(source + at + k, addresses[k], mask=ok)
        tl.store(runs + at + k, lengths[k], mask=ok)


@triton.jit(do_not_specialize=["N", "R", "tokens", "lows", "tables", "states", "words"])
def _lay_out_kernel(
    chunks,
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
    """A program has a stream: if rANS makes it shorter, its chunks are table, states and words, else tokens."""
    stream = tl.program_id(0)
    first = tl.load(chunks.firsts + stream)
    end = tl.load(chunks.ends + stream)
    coded = _saved_bytes(chunks, first, end, R, P) > 0
    i = first
    while i < end:
        c = i + tl.arange(0, P)
        ok = c < end
        begin = tl.load(chunks.begins + c, mask=ok, other=0)
        size = tl.load(chunks.sizes + c, mask=ok, other=0)
        table_bytes, word_bytes = _coded_bytes(chunks.numbers, c, R, ok)
        addresses = (
            tl.where(coded, tables + 1024 * c, tokens + begin),
            states + 128 * c,
            words + 2 * (begin + size) - word_bytes,
        )
        lengths = (
            tl.where(coded, table_bytes, size),
            tl.where(coded, 4 * _lanes(size), 0),
            tl.where(coded, word_bytes, 0),
        )
        _store_runs(source, runs, 3 * tl.load(chunks.places + c, mask=ok, other=0), addresses, lengths, ok)
        low = lows + 4 * tl.load(chunks.low_at + c, mask=ok, other=0)
        low_bytes = (tl.load(chunks.numbers + c, mask=ok, other=0) + 7) >> 3
        at = 3 * tl.load(chunks.places + N + c, mask=ok, other=0)
        _store_runs(source, runs, at, (low, low, low), (low_bytes, c - c, c - c), ok)
        i += P


def lay_out(
    packed: PackedNumbers, encoded: EncodedTokens, stream: Any, place: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Addresses and lengths of the bytes of all chunks: three runs for a chunk's tokens, and three for its low bits.

    stream: of each chunk, rising; a stream that rANS does not make shorter is stored.
    place: where the tokens of each chunk belong among all chunks, and then where their low bits do.
    """
    chunks = packed.chunks
    n = chunks.count
    ends = np.flatnonzero(np.append(np.diff(stream) != 0, True)) + 1 if n else np.empty(0, np.int64)
    firsts, stream_ends, places = chunks.blocks.upload_columns(np.append(0, ends[:-1]) if n else ends, ends, place)
    source = chunks.blocks.empty(6 * n, torch.int64)
    runs = chunks.blocks.empty(6 * n, torch.int64)
    if n:
        table = _ChunkTable(firsts, stream_ends, places, chunks.begin, chunks.size, packed.numbers, packed.low_at)
        _lay_out_kernel[(ends.size,)](
            *(table, source, runs, n, packed.numbers.shape[1], packed.tokens.data_ptr(), packed.lows.data_ptr()),
            *(encoded.tables.data_ptr(), encoded.states.data_ptr(), encoded.words.data_ptr(), _CHUNKS),
            num_warps=1,
        )
    return source, runs


@triton.jit(do_not_specialize=["origin"])
def _copy_kernel(source, origin: tl.int64, target, source_at, target_at, sizes, P: tl.constexpr):
    segment = tl.program_id(0)
    i = tl.program_id(1) * P + tl.arange(0, P)
    ok = i < tl.load(sizes + segment)
    a = tl.load(source_at + segment) - origin
    b = tl.load(target_at + segment)
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
    """Copy runs of bytes, given by their offsets in two tensors.

    origin: what the source's offsets are counted from, if not from its beginning.
    """
    if sizes.numel() and longest:
        grid = (sizes.numel(), triton.cdiv(longest, _COPIED))
        _copy_kernel[grid](source, origin, target, source_at, target_at, sizes, _COPIED, num_warps=4)


@triton.jit
def _window(data, at, end):
    """40 bits from bit `at` on; bits behind `end` are zero."""
    byte = at >> 3
    v = tl.load(data + byte, mask=at < end, other=0).to(tl.uint64)
    for i in tl.static_range(1, 6):
        more = tl.load(data + byte + i, mask=at + 8 * i < end + 8, other=0).to(tl.uint64)
        v |= more << (8 * i)
    return v >> (at & 7).to(tl.uint64)


@triton.jit
def _read_table(source, length, frequencies):
    """Read a table into memory that holds zeros. Returns where it ends, in bits, and whether it is wrong."""
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
            # Up to 24 ones, a zero and four bits: nothing longer is in a table.
            window = _window(source, at, end).to(tl.uint32)
            step = lowest((window ^ 0xFFFFFFFF) | 0x80000000)
            e += tl.where((step & 1) == 0, step >> 1, -((step + 1) >> 1))
            width = tl.minimum(tl.maximum(e - 1, 0), 4)
            wrong = wrong | (e < 0) | (e > 12) | (step > 24) | (at + step + 1 + width > end)
            tail = (window >> tl.minimum(step + 1, 31).to(tl.uint32)).to(tl.int32) & ((1 << width) - 1)
            f = ((1 << width) | tail) << tl.minimum(tl.maximum(e - 1 - width, 0), 12)
            f = tl.where(e > 0, f, 0)
            tl.store(frequencies + symbol, f)
            left -= f
            at += step + 1 + width
        symbol += 1
    padding = _window(source, at, (at + 7) // 8 * 8) & ((1 << ((8 - (at & 7)) & 7).to(tl.uint64)) - 1)
    wrong = wrong | (left < 1) | (padding != 0)
    tl.store(frequencies + most, left, mask=wrong == 0)
    return at, wrong


@triton.jit
def _read_tables_kernel(data, offsets, lengths, sizes, shares, bodies, bad):
    chunk = tl.program_id(0).to(tl.int64)
    length = tl.load(lengths + chunk)
    s = tl.arange(0, 256)
    shares += chunk * 256
    tl.store(shares + s, tl.zeros([256], tl.int32))
    tl.debug_barrier()
    at, wrong = _read_table(data + tl.load(offsets + chunk), length, shares)
    tl.debug_barrier()
    f = tl.load(shares + s)
    tl.store(shares + s, (f << 16) | (tl.cumsum(f, 0) - f))
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
def _shuffle(x, lane):
    """The values of other lanes, whose numbers are modulo 32. The kernel has one warp, and a lane an element."""
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
def _load_word_bytes(source, at, words):
    """Low and high byte of some words; behind the last word there are zeros."""
    low = tl.load(source + 2 * at, mask=at < words, other=0)
    return low, tl.load(source + 2 * at + 1, mask=at < words, other=0)


@triton.jit
def _join_bytes(low, high):
    return low.to(tl.uint32) | (high.to(tl.uint32) << 8)


@triton.jit
def _load_states(source, n, lane):
    """The states that a chunk begins with, which are not aligned."""
    x = tl.zeros([32], tl.uint32)
    for i in tl.static_range(4):
        x |= tl.load(source + 4 * lane + i, mask=lane < n, other=0).to(tl.uint32) << (8 * i)
    return x


@triton.jit
def _decode_kernel(data, offsets, lengths, begins, sizes, bodies, slots, tokens, bad):
    chunk = tl.program_id(0).to(tl.int64)
    body = tl.load(bodies + chunk)
    if body >= 0:
        source = data + tl.load(offsets + chunk) + body
        size = tl.load(sizes + chunk).to(tl.int32)
        n = _lanes(size)
        lane = tl.arange(0, 32)
        x = _load_states(source, n, lane)
        source += 4 * n
        words = ((tl.load(lengths + chunk) - body - 4 * n) // 2).to(tl.int32)
        lower = ((tl.zeros([32], tl.uint32) + 1) << lane.to(tl.uint32)) - 1
        slots += chunk * 4096
        tokens += tl.load(begins + chunk)
        # Lanes hold the next 64 words while the 32 behind are loaded: otherwise the only warp would wait for memory.
        low, high = _load_word_bytes(source, lane, words)
        near = _join_bytes(low, high)
        low, high = _load_word_bytes(source, 32 + lane, words)
        far = _join_bytes(low, high)
        low, high = _load_word_bytes(source, 64 + lane, words)
        first_word = size - size  # of those that lanes hold
        at = tl.zeros([32], tl.int32)
        row = size - size
        while row < size:
            ok = (lane < n) & (row + lane < size)
            slot = tl.load(slots + (x & 4095).to(tl.int32), mask=ok, other=0).to(tl.uint32, bitcast=True)
            y = (((slot >> 12) & 4095) + 1) * (x >> 12) + (slot & 4095)
            short = ok & (y < 65536)
            due = _ballot(short, lane)
            place = at + popcount(due & lower)
            word = tl.where(place < 32, _shuffle(near, place), _shuffle(far, place))
            x = tl.where(ok, tl.where(short, (y << 16) | word, y), x)
            tl.store(tokens + row + lane, (slot >> 24).to(tl.uint8), mask=ok)
            at += popcount(due)
            if tl.max(at, axis=0) >= 32:
                near = far
                far = _join_bytes(low, high)
                at -= 32
                first_word += 32
                low, high = _load_word_bytes(source, first_word + 64 + lane, words)
            row += n
        wrong = (first_word + at != words) | ((lane < n) & (x != 65536))
        if tl.max(wrong.to(tl.int32), axis=0) > 0:
            tl.store(bad, 1)


class EncodedChunks(NamedTuple):
    """Chunks on the GPU: where the numbers of each begin, how many there are, and where its bytes lie in the data."""

    begin: torch.Tensor
    size: torch.Tensor
    offset: torch.Tensor
    length: torch.Tensor

    def some(self, which: Any) -> EncodedChunks:
        return EncodedChunks(*(column[which] for column in self))


def decode(blocks: Blocks, chunks: EncodedChunks, data: torch.Tensor, tokens: torch.Tensor, bad: torch.Tensor) -> None:
    """The tokens of chunks that were coded with rANS, from their bytes in `data`."""
    n = chunks.begin.numel()
    begin, size, offset, length = chunks
    if n:
        shares = blocks.empty(n * 256, torch.int32)
        bodies = blocks.empty(n, torch.int64)
        slots = blocks.empty(n * 4096, torch.int32)
        _read_tables_kernel[(n,)](data, offset, length, size, shares, bodies, bad, num_warps=1)
        _slots_kernel[(n,)](shares, bodies, slots, num_warps=4)
        _decode_kernel[(n,)](data, offset, length, begin, size, bodies, slots, tokens, bad, num_warps=1)


@triton.jit
def _shift_byte(byte, at, k: tl.constexpr):
    """Byte k of a string that begins at bit `at`, shifted to its place in a number."""
    into = (at & 7).to(tl.int32)
    wide = byte.to(tl.uint64)
    left = tl.maximum(8 * k - into, 0)
    right = tl.maximum(into - 8 * k, 0)
    return tl.where(left < 64, (wide << tl.minimum(left, 63).to(tl.uint64)) >> right.to(tl.uint64), wide ^ wide)


@triton.jit
def _load_low_bits(source, at, width, length, large, BYTES: tl.constexpr, P: tl.constexpr):
    """`width` bits each from a string of bytes, from bit `at` on."""
    byte = at >> 3
    low = tl.zeros([P], tl.uint64)
    for k in tl.static_range(BYTES):
        more = tl.load(source + byte + k, mask=large & (byte + k < length) & (width > 8 * k - 8), other=0)
        low |= _shift_byte(more, at, k)
    one = tl.zeros_like(low) + 1
    return low & ((one << width.to(tl.uint64)) - 1)


@triton.jit(do_not_specialize=["limit"])
def _unpack_kernel(
    tokens,
    chunks,
    data,
    values,
    bad,
    limit: tl.uint64,
    BITS: tl.constexpr,
    BYTES: tl.constexpr,
    P: tl.constexpr,
):
    chunk = tl.program_id(0)
    begin = tl.load(chunks.begin + chunk)
    size = tl.load(chunks.size + chunk).to(tl.int32)
    source = data + tl.load(chunks.offset + chunk)
    whole = tl.load(chunks.length + chunk)
    length = tl.minimum(whole, 1 << 27).to(tl.int32)  # no chunk is so long, and the check at the end fails if one is
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
        low = _load_low_bits(source, at, width, length, large, BYTES, P)
        head = (4 + (token & 3)).to(tl.uint64) << width.to(tl.uint64)
        v = tl.where(large, head | low, token.to(tl.uint64))
        above = v > limit.to(tl.uint64)
        wrong |= (ok & (above | (at + width > 8 * length))).to(tl.int32)
        store_word(values + lane, tl.where(above, v ^ v, v), ok, BITS)  # later kernels rely on the limit
        used += tl.sum(width, axis=0)
        i += P
    last = tl.load(source + (used >> 3), mask=((used & 7) != 0) & ((used >> 3) < length), other=0).to(tl.int32)
    even = ((used + 7) >> 3) == whole
    if (tl.max(wrong, axis=0) > 0) | (even == 0) | ((last >> (used & 7).to(tl.int32)) != 0):
        tl.store(bad, 1)


def unpack(
    chunks: EncodedChunks, tokens: torch.Tensor, data: torch.Tensor, values: torch.Tensor, limit: int, bad: torch.Tensor
) -> None:
    """Numbers, none above the limit, from tokens and the low bits in `data`."""
    bits = 8 * values.element_size()
    at_a_time, warps = SHAPES["unpack"]
    if chunks.begin.numel():
        _unpack_kernel[(chunks.begin.numel(),)](
            *(tokens, chunks, data, values, bad, limit, bits, (min(bits, 64) - 3 + 7 + 7) // 8, at_a_time),
            num_warps=warps,
        )
