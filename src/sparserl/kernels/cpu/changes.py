"""Changes on a CPU, in Numba: find, digest, read, write, pack. `reference.py` specifies each under the same name.

Memory is given by int64 addresses, and every kernel takes a whole batch, so that many small tensors are one call.
The caller keeps the owners of the addresses alive and guarantees that sizes, counts and positions are in bounds:
numbers from the wire are checked by `unpack` and `tile_positions` (and `ascending`) before they reach the others.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .arguments import ChangeAddresses, InMemory, InTensor, WordKind
from .compiling import inline, kernel
from .llvm import (
    ARM,
    GOLDEN,
    ROTATE,
    advance16,
    copy16,
    copy_bytes,
    differ64,
    digest_blocks,
    digest_blocks_and_zeros,
    digest_delta16,
    digest_delta_blocks,
    digest_zero_blocks,
    falls16,
    highest,
    keep_alive,
    load,
    load32,
    lowest,
    number16,
    popcount,
    prefetch,
    prefetch_near,
    read16,
    store,
    sums16,
    tokenize16,
)
from .llvm import width as width_of

_GOLDEN = np.uint64(GOLDEN)
_TURN = np.uint64(ROTATE)
_BACK = np.uint64(64 - ROTATE)
_HALF = np.uint64(32)
_LOW = np.uint64(0xFFFFFFFF)
_ONE = np.uint64(1)
_WALKERS = 1 if ARM else 8  # places at which `diff` reads in turn; Arm processors follow one best
_STRIDE = 1 << 12  # bytes between them
_AHEAD = 64  # changes by which gather, scatter and exchange prefetch
_AHEAD_NEAR = 4  # the same, from the second cache to the first


@inline
def _tail_mask(tag: Any, a: Any, b: Any, i: Any, n: Any) -> Any:
    """Mask of the differences from element `i` to the end, in the block that ends there (or starts at 0)."""
    width = width_of(tag)
    if n >= 64:
        last = (n - 64) * width
        compared = np.uint64(i - (n - 64))
        return (differ64(tag, a + last, b + last) >> compared) << compared
    mask = np.uint64(0)
    for j in range(i, n):
        if load(tag, a + j * width) != load(tag, b + j * width):
            mask |= _ONE << np.uint64(j)
    return mask


@inline
def _write_changes(tag: Any, a: Any, b: Any, mask: Any, base: Any, k: Any, out: Any) -> Any:
    """Write down the changes of a block, from index `k` on. Returns the next index."""
    positions, before, after = out
    width = width_of(tag)
    while mask:
        p = base + lowest(mask)
        mask &= mask - _ONE
        positions[k] = p
        before[k] = load(tag, a + p * width)
        after[k] = load(tag, b + p * width)
        k += 1
    return k


@kernel
def diff(tag: Any, old: Any, new: Any, size: Any, positions: Any, before: Any, after: Any, counts: Any) -> Any:
    """Write down the changes of a batch of segments; positions count from the start of each.

    Returns how many there are, or -1 if there is not enough room for them.
    """
    width = width_of(tag)
    most = _STRIDE // width // 64  # blocks that a walker compares before its changes are written down
    masks = np.empty(_WALKERS * most + 1, np.uint64)
    bases = np.empty(_WALKERS * most + 1, np.int64)
    changed = np.empty(_WALKERS, np.int64)  # blocks with changes
    room = positions.size
    k = 0
    for s in range(size.size):
        a = old[s]
        b = new[s]
        n = size[s]
        first = k
        i = 0 if a != b else n
        while i < n:
            # Blocks with changes are listed without a branch, since which ones have any cannot be predicted.
            changed[:] = 0
            if n - i >= _WALKERS * most * 64:
                for j in range(i, i + most * 64, 64):
                    for w in range(_WALKERS):
                        base = j + w * most * 64
                        m = w * most + changed[w]
                        mask = differ64(tag, a + base * width, b + base * width)
                        masks[m] = mask
                        bases[m] = base
                        changed[w] += np.int64(mask != np.uint64(0))
                i += _WALKERS * most * 64
            else:
                m = np.int64(0)
                while i < n:
                    whole = i + 64 <= n
                    mask = differ64(tag, a + i * width, b + i * width) if whole else _tail_mask(tag, a, b, i, n)
                    masks[m] = mask
                    bases[m] = i if whole else max(n - 64, 0)
                    m += np.int64(mask != np.uint64(0))
                    i += 64
                changed[0] = m
            for w in range(_WALKERS):
                ahead = (i + w * most * 64) * width
                for m in range(w * most, w * most + changed[w]):
                    if not ARM:
                        prefetch(a + ahead)  # so that memory is not idle meanwhile
                        prefetch(b + ahead)
                        ahead += 64
                    mask = masks[m]
                    if k + popcount(mask) > room:
                        return -1
                    k = _write_changes(tag, a, b, mask, bases[m], k, (positions, before, after))
        counts[s] = k - first
    return k


@inline
def _turn(z: Any) -> Any:
    return (z & _LOW) * (z >> _HALF) + ((z << _TURN) | (z >> _BACK))


@inline
def _mix(weyl: Any, key: Any, bits: Any) -> Any:
    return _turn(_turn(_turn(weyl ^ bits) + key))


@inline
def _digest_run(tag: Any, address: Any, size: Any, weyl: Any, key: Any) -> Any:
    """Both sums over consecutive elements; `weyl` belongs to the first."""
    width = width_of(tag)
    first = np.uint64(0)
    second = np.uint64(0)
    blocks = size // 16
    if blocks:
        first, second = digest_blocks(tag, address, blocks, weyl, key)
    for i in range(blocks * 16, size):
        z = _mix(weyl + np.uint64(i) * _GOLDEN, key, np.uint64(load(tag, address + i * width)))
        first += z
        second += _turn(z)
    return first, second


@inline
def _count_set(tag: Any, address: Any, size: Any) -> Any:
    """How many of consecutive elements have a bit that is set."""
    width = width_of(tag)
    count = np.uint64(0)
    for i in range(size):
        count += np.uint64(load(tag, address + i * width) != 0)
    return count


@inline
def _digest_blocks_and_zeros(tag: Any, address: Any, blocks: Any, weyl: Any, key: Any) -> Any:
    """`digest_blocks_and_zeros`, in one loop only where there are registers enough for it."""
    if not ARM:
        return digest_blocks_and_zeros(tag, address, blocks, weyl, key)
    first, second = digest_blocks(tag, address, blocks, weyl, key)
    zero_first, zero_second = digest_zero_blocks(blocks, weyl, key)
    return first, second, zero_first, zero_second, _count_set(tag, address, blocks * 16)


@inline
def _digest_run_and_zeros(tag: Any, address: Any, size: Any, weyl: Any, key: Any) -> Any:
    """Both sums over consecutive elements, both over zeros in their place, and how many elements are not zero."""
    width = width_of(tag)
    first = np.uint64(0)
    second = np.uint64(0)
    zero_first = np.uint64(0)
    zero_second = np.uint64(0)
    count = np.uint64(0)
    blocks = size // 16
    if blocks:
        first, second, zero_first, zero_second, count = _digest_blocks_and_zeros(tag, address, blocks, weyl, key)
    for i in range(blocks * 16, size):
        bits = np.uint64(load(tag, address + i * width))
        place = weyl + np.uint64(i) * _GOLDEN
        z = _mix(place, key, bits)
        first += z
        second += _turn(z)
        z = _mix(place, key, np.uint64(0))
        zero_first += z
        zero_second += _turn(z)
        count += np.uint64(bits != np.uint64(0))
    return first, second, zero_first, zero_second, count


@kernel
def digest(tag: Any, address: Any, size: Any, start: Any, keys: Any) -> tuple[Any, Any]:
    """Both sums over a batch of runs: each is `size` consecutive elements of a tensor, the first at `start`."""
    first = np.uint64(0)
    second = np.uint64(0)
    for s in range(size.size):
        weyl = keys[s, 0] + np.uint64(start[s]) * _GOLDEN
        x, y = _digest_run(tag, address[s], size[s], weyl, keys[s, 1])
        first += x
        second += y
    return first, second


@inline
def _offset(p: Any, e: Any, regions: Any) -> Any:
    """The distance of position `p` of region `e` from the region's first element, by the strides."""
    if regions.dims[e] == 1:
        return p * regions.stride[e, 0]
    out = np.int64(0)
    for d in range(regions.dims[e] - 1, -1, -1):
        out += (p % regions.size[e, d]) * regions.stride[e, d]
        p //= regions.size[e, d]
    return out


@inline
def _elements_and_run(e: Any, boxes: Any) -> Any:
    """How many elements a box has, and how many at a time are consecutive in the tensor."""
    dims = boxes.dims[e]
    inner = boxes.size[e, dims - 1]
    elements = inner
    for d in range(dims - 1):
        elements *= boxes.size[e, d]
    return elements, inner if boxes.stride[e, dims - 1] == 1 else np.int64(1)


@kernel
def digest_boxes_and_zeros(tag: Any, address: Any, boxes: InTensor, counts: Any) -> tuple[Any, Any, Any, Any]:
    """Both sums over a batch of boxes, and both over zeros in their place; the counts are of elements not zero.

    The bits of boxes lie in row-major order at addresses.
    """
    width = width_of(tag)
    keys = boxes.keys
    first = np.uint64(0)
    second = np.uint64(0)
    zero_first = np.uint64(0)
    zero_second = np.uint64(0)
    for e in range(boxes.start.size):
        elements, run = _elements_and_run(e, boxes)
        counts[e] = 0
        for p in range(0, elements, run):
            weyl = keys[e, 0] + np.uint64(boxes.start[e] + _offset(p, e, boxes)) * _GOLDEN
            x, y, zero_x, zero_y, count = _digest_run_and_zeros(tag, address[e] + p * width, run, weyl, keys[e, 1])
            first += x
            second += y
            zero_first += zero_x
            zero_second += zero_y
            counts[e] += np.int64(count)
    return first, second, zero_first, zero_second


@kernel
def digest_boxes(tag: Any, address: Any, boxes: InTensor) -> tuple[Any, Any]:
    """Both sums over a batch of boxes, whose bits lie in row-major order at addresses."""
    width = width_of(tag)
    keys = boxes.keys
    first = np.uint64(0)
    second = np.uint64(0)
    for e in range(boxes.start.size):
        elements, run = _elements_and_run(e, boxes)
        for p in range(0, elements, run):
            at = boxes.start[e] + _offset(p, e, boxes)
            x, y = _digest_run(tag, address[e] + p * width, run, keys[e, 0] + np.uint64(at) * _GOLDEN, keys[e, 1])
            first += x
            second += y
    return first, second


@kernel
def locate(counts: Any, regions: InTensor, positions: Any, out: Any) -> None:
    """The position of each change in its tensor: int64, since tensors may be larger than regions."""
    k = 0
    for e in range(counts.size):
        for _ in range(counts[e]):
            out[k] = regions.start[e] + _offset(np.int64(positions[k]), e, regions)
            k += 1


@inline
def _element_address(tag: Any, base: Any, positions: Any, k: Any) -> Any:
    """The address of change `k` in contiguous elements."""
    return base + np.int64(positions[np.uint64(k)]) * width_of(tag)


@inline
def _prefetch_entry(tag: Any, counts: Any, regions: Any, position_at: Any, e: Any, k: Any) -> None:
    """Prefetch the first changes of entry `e`, which begin at change `k`: small entries have no others before them."""
    if e < counts.size and regions.dims[e] == 1 and regions.stride[e, 0] == 1:
        for i in range(k, k + min(counts[e], _AHEAD)):
            prefetch(regions.first[e] + width_of(tag) * load32(position_at + 4 * i))


@kernel
def gather(tag: Any, counts: Any, regions: InMemory, positions: Any, out: Any) -> None:
    """The bits at the changed positions."""
    first = regions.first
    position_at = np.int64(positions.ctypes.data)
    k = np.int64(0)
    for e in range(counts.size):
        end = k + counts[e]
        _prefetch_entry(tag, counts, regions, position_at, e + 1, end)
        if regions.dims[e] == 1 and regions.stride[e, 0] == 1:
            for i in range(k, end - _AHEAD):
                prefetch(_element_address(tag, first[e], positions, i + _AHEAD))
                out[np.uint64(i)] = load(tag, _element_address(tag, first[e], positions, i))
            for i in range(max(k, end - _AHEAD), end):
                out[i] = load(tag, _element_address(tag, first[e], positions, i))
        else:
            for i in range(k, end):
                offset = _offset(np.int64(positions[i]), e, regions)
                out[i] = load(tag, first[e] + offset * width_of(tag))
        k = end
    keep_alive(positions)


@kernel
def scatter(tag: Any, counts: Any, regions: InMemory, position_at: Any, bits: Any) -> None:
    """Write bits to the changed positions, in place. The positions are consecutive uint32 at an address."""
    first = regions.first
    k = np.int64(0)
    width = width_of(tag)
    for e in range(counts.size):
        end = k + counts[e]
        if regions.dims[e] == 1 and regions.stride[e, 0] == 1:
            for i in range(k, end - _AHEAD):
                prefetch(first[e] + width * load32(position_at + 4 * (i + _AHEAD)))
                store(tag, first[e] + width * load32(position_at + 4 * i), bits[np.uint64(i)])
            for i in range(max(k, end - _AHEAD), end):
                store(tag, first[e] + width * load32(position_at + 4 * i), bits[i])
        else:
            for i in range(k, end):
                offset = _offset(load32(position_at + 4 * i), e, regions)
                store(tag, first[e] + width * offset, bits[i])
        k = end


@inline
def advance_bits(tag: Any, bits: Any, step: Any, sign_magnitude: Any) -> Any:
    """The bits that lie a zigzag step further in the integer order of the format.

    Computed in the highest bits of a word, which gives them the word's sign. There are shifts instead of comparisons,
    of which compilers make branches, on signs that cannot be predicted.
    """
    zero = np.uint64(0)
    up = np.uint64(64 - 8 * width_of(tag))
    word = np.uint64(bits)
    mirrors = (
        zero - np.uint64(sign_magnitude)
    ) >> _ONE  # the bits to invert in negative numbers, whose order is reversed
    word <<= up
    word ^= np.uint64(np.int64(word) >> np.int64(63)) & mirrors
    word += ((np.uint64(step) >> _ONE) ^ (zero - (np.uint64(step) & _ONE))) << up
    word ^= np.uint64(np.int64(word) >> np.int64(63)) & mirrors
    return tag.dtype.type(word >> up)


@inline
def _swap(tag: Any, at: Any, absolute: Any, sign_magnitude: Any, word_at: Any, old_at: Any) -> Any:
    """Write a word, or apply it as a step, and keep the old bits. Returns the bits before and after."""
    before = load(tag, at)
    word = load(tag, word_at)
    after = word if absolute else advance_bits(tag, before, word, sign_magnitude)
    store(tag, old_at, before)
    store(tag, at, after)
    return before, after


@inline
def _change_delta(weyl: Any, key: Any, old: Any, new: Any) -> Any:
    """How the two digest sums change with one change."""
    before = _mix(weyl, key, np.uint64(old))
    after = _mix(weyl, key, np.uint64(new))
    return after - before, _turn(after) - _turn(before)


@inline
def _changes_delta(tag: Any, e: Any, k: Any, end: Any, regions: Any, changes: Any) -> Any:
    """How the two digest sums change with the changes from `k` to `end`, which are of entry `e`.

    `changes` are the addresses of positions, old bits and new bits.
    """
    position_at, old_at, new_at = changes
    width = width_of(tag)
    first = np.uint64(0)
    second = np.uint64(0)
    key = regions.keys[e, 1]
    line = regions.dims[e] == 1
    origin = regions.keys[e, 0] + np.uint64(regions.start[e]) * _GOLDEN
    step = np.uint64(regions.stride[e, 0]) * _GOLDEN
    blocks = (end - k) // 16 if line else 0
    if blocks:
        offset = width * k
        first, second = digest_delta_blocks(
            tag, position_at + 4 * k, old_at + offset, new_at + offset, blocks, origin, step, key
        )
    for i in range(k + 16 * blocks, end):
        weyl = origin + np.uint64(_offset(load32(position_at + 4 * i), e, regions)) * _GOLDEN
        x, y = _change_delta(weyl, key, load(tag, old_at + width * i), load(tag, new_at + width * i))
        first += x
        second += y
    return first, second


@inline
def _exchange_scalar(tag: Any, base: Any, k: Any, end: Any, ahead: Any, line: Any, changes: Any, words: Any) -> Any:
    """Exchange the changes from `k` to `end`, with `ahead` more behind them. Returns how the two sums change.

    An Arm processor has finished a change when the next cache line arrives. That line is prefetched twice: to the
    second cache, and from there to the first.
    """
    origin, step, key = line
    position_at, word_at, old_at = changes
    absolute, sign_magnitude = words
    width = width_of(tag)
    first = np.uint64(0)
    second = np.uint64(0)
    near = min(ahead, _AHEAD_NEAR)
    for i in range(k, end):
        prefetch(base + width * load32(position_at + 4 * (i + ahead)))
        prefetch_near(base + width * load32(position_at + 4 * (i + near)))
        p = load32(position_at + 4 * i)
        offset = width * i
        before, after = _swap(tag, base + width * p, absolute, sign_magnitude, word_at + offset, old_at + offset)
        x, y = _change_delta(origin + np.uint64(p) * step, key, before, after)
        first += x
        second += y
    return first, second


@inline
def _exchange_vectors(
    tag: Any, base: Any, k: Any, end: Any, ahead: Any, line: Any, changes: Any, words: Any, scratch: Any
) -> None:
    """The same for a multiple of 16 changes, by vectors. The sums change lane by lane; `exchange` owns the scratch."""
    position_at, word_at, old_at = changes
    absolute, sign_magnitude = words
    lane_at, read_at, new_at = scratch
    width = width_of(tag)
    if k < end:
        read16(tag, base, position_at + 4 * k, ahead, read_at)
    for low in range(k + 16, end + 16, 16):  # 16 changes are read while the 16 before them are written
        half = read_at + width * ((low - k) & 16)
        if low < end:
            read16(tag, base, position_at + 4 * low, ahead, half)
        positions = position_at + 4 * (low - 16)
        offset = width * (low - 16)
        before = 2 * read_at + 16 * width - half
        after = word_at + offset if absolute else new_at
        if not absolute:
            advance16(tag, before, word_at + offset, sign_magnitude, after)
        copy16(tag, before, old_at + offset)
        digest_delta16(tag, positions, before, after, *line, lane_at)
        for i in range(16):
            store(tag, base + width * load32(positions + 4 * i), load(tag, after + width * i))


@kernel
def exchange(
    tag: Any, counts: Any, in_memory: InMemory, in_tensor: InTensor, changes: ChangeAddresses, words: WordKind
) -> tuple[Any, Any]:
    """Write new bits to the changed positions, in place, and the old bits to where the steps may lie.

    Returns how the digest's two sums change. Every cache line is fetched once, and while some are fetched others are
    summed up. Once a bit is written, nothing can fail.
    """
    lanes = np.zeros((2, 16), np.uint64)
    old = np.empty((2, 16), tag.dtype)
    new = np.empty(16, tag.dtype)
    scratch = np.int64(lanes.ctypes.data), np.int64(old.ctypes.data), np.int64(new.ctypes.data)
    width = width_of(tag)
    first = in_memory.first
    keys = in_tensor.keys
    first_sum = np.uint64(0)
    second_sum = np.uint64(0)
    k = np.int64(0)
    for e in range(counts.size):
        end = k + counts[e]
        _prefetch_entry(tag, counts, in_memory, changes.position, e + 1, end)
        if in_memory.dims[e] == 1 and in_memory.stride[e, 0] == 1:
            origin = keys[e, 0] + np.uint64(in_tensor.start[e]) * _GOLDEN
            step = np.uint64(in_tensor.stride[e, 0]) * _GOLDEN
            line = (origin, step, keys[e, 1])
            for ahead in (_AHEAD, 0):  # the last changes of an entry have none behind them to prefetch
                stop = k + max(0, end - k - ahead) // 16 * 16
                if ARM:
                    a, b = _exchange_scalar(tag, first[e], k, stop, ahead, line, changes, words)
                    first_sum += a
                    second_sum += b
                else:
                    _exchange_vectors(tag, first[e], k, stop, ahead, line, changes, words, scratch)
                k = stop
        while k < end:
            stop = min(k + 16, end)
            for i in range(k, stop):
                at = first[e] + width * _offset(load32(changes.position + 4 * i), e, in_memory)
                new[i - k] = _swap(
                    tag, at, words.absolute, words.sign_magnitude, changes.word + width * i, changes.old + width * i
                )[1]
            written = changes.position, changes.old, scratch[2] - width * k
            a, b = _changes_delta(tag, e, k, stop, in_tensor, written)
            first_sum += a
            second_sum += b
            k = stop
    for lane in range(16):
        first_sum += lanes[0, lane]
        second_sum += lanes[1, lane]
    keep_alive(old)
    keep_alive(new)
    return first_sum, second_sum


@kernel
def digest_delta(counts: Any, regions: InTensor, positions: Any, old: Any, new: Any) -> tuple[Any, Any]:
    """How the two sums change when the old bits at the changed positions become the new ones."""
    changes = np.int64(positions.ctypes.data), np.int64(old.ctypes.data), np.int64(new.ctypes.data)
    first = np.uint64(0)
    second = np.uint64(0)
    k = np.int64(0)
    for e in range(counts.size):
        x, y = _changes_delta(old, e, k, k + counts[e], regions, changes)
        first += x
        second += y
        k += counts[e]
    keep_alive(positions)
    keep_alive(old)
    keep_alive(new)
    return first, second


@kernel
def steps(old: Any, new: Any, sign_magnitude: Any, out: Any) -> None:
    """Zigzag steps from old to new."""
    zero = old.dtype.type(0)
    one = old.dtype.type(1)
    top = old.dtype.type(_ONE << np.uint64(8 * width_of(old) - 1))  # the sign
    for i in range(old.size):
        a = old[i]
        b = new[i]
        if sign_magnitude:
            a = ~a if a & top else a | top
            b = ~b if b & top else b | top
        delta = out.dtype.type(b - a)
        doubled = out.dtype.type(delta << one)
        out[i] = ~doubled if (delta & top) != zero else doubled


@kernel
def advance(old: Any, step: Any, sign_magnitude: Any, out: Any) -> None:
    """The new bits: `steps` undone."""
    for i in range(old.size):
        out[i] = advance_bits(old, old[i], step[i], sign_magnitude)


@inline
def tokenize(v: Any) -> Any:
    """Token, low bits and how many those are. No branch depends on the data, which cannot be predicted."""
    large = np.uint64(0) - np.uint64(v >= np.uint64(16))
    e = np.uint64(highest(v | np.uint64(16)))
    width = (e - np.uint64(2)) & large
    head = np.uint64(4) * e + ((v >> width) & np.uint64(3))
    return (head & large) | (v & ~large), v & ((_ONE << width) - _ONE), width


@inline
def _append_bits(low: Any, width: Any, lows: Any, state: Any) -> Any:
    """Append bits to a string; the state is the word being filled, its number of bits, and its index."""
    word, fill, at = state
    word |= low << fill
    lows[at] = word
    over = (low >> _ONE) >> (np.uint64(63) - fill)
    fill += width
    full = fill >> np.uint64(6)
    word = (over & (np.uint64(0) - full)) | (word & (full - _ONE))
    return word, fill & np.uint64(63), at + full


@kernel
def pack(values: Any, tokens: Any, lows: Any) -> Any:
    """Token bytes and low bits (uint64 words; there must be one per value and one more). Returns the number of bits."""
    state = np.uint64(0), np.uint64(0), np.uint64(0)
    whole = values.size & -16 if width_of(values) <= 4 else 0
    joined = np.empty(28, np.uint64)
    value_at = np.int64(values.ctypes.data)
    token_at = np.int64(tokens.ctypes.data)
    joined_at = np.int64(joined.ctypes.data)
    for i in range(0, whole, 16):
        words = tokenize16(values, value_at + i * width_of(values), token_at + i, joined_at)
        if words == 1:
            for j in range(24, 26):
                state = _append_bits(joined[j], joined[j + 2], lows, state)
        elif words == 2:
            for j in range(16, 20):
                state = _append_bits(joined[j], joined[j + 4], lows, state)
        elif words == 3:
            for j in range(8):
                state = _append_bits(joined[j], joined[j + 8], lows, state)
    keep_alive(joined)
    for i in range(whole, values.size):
        token, low, width = tokenize(np.uint64(values[i]))
        tokens[i] = token
        state = _append_bits(low, width, lows, state)
    word, fill, at = state
    lows[at] = word
    return at * np.uint64(64) + fill


@kernel
def pack_chunks(values: Any, log: Any, tokens: Any, lows: Any, spans: Any) -> None:
    """`pack` for chunks of 2^log numbers, the last of them shorter, and where the low bytes of each begin and end.

    They begin with a word. `lows` has as many bytes as the numbers, and a word per chunk and one more.
    """
    at = np.int64(0)
    for c in range(spans.shape[0]):
        begin = c << log
        end = min(begin + (np.int64(1) << log), values.size)
        bits = np.int64(pack(values[begin:end], tokens[begin:end], lows[at:]))
        spans[c, 0] = 8 * at
        spans[c, 1] = 8 * at + ((bits + 7) >> 3)
        at += (bits + 63) >> 6


@inline
def _read_number(token: Any, lows: Any, base: Any, at: Any) -> Any:
    """A number from its token and the low bits from bit `at` on, and how many these are.

    `base` is the address of the low bits, behind which two words must be readable; `lows` gives their dtype, uint64.
    """
    t = np.uint64(token)
    large = token >= 16
    width = (t >> np.uint64(2)) - np.uint64(2) if large else np.uint64(0)
    head = (np.uint64(4) | (t & np.uint64(3))) << width if large else t
    byte = base + np.int64(at >> np.uint64(3))
    shift = at & np.uint64(7)
    low = load(lows, byte) >> shift
    if width > np.uint64(56):  # only in numbers of 59 bits and more
        low |= (load(lows, byte + 8) << _ONE) << (np.uint64(63) - shift)
    return head | (low & ((_ONE << width) - _ONE)), width


@kernel
def unpack(tokens: Any, lows: Any, bits: Any, limit: Any, out: Any) -> Any:
    """Numbers from tokens and low bits (uint64 words, and two more). Returns -1, or the first wrong index."""
    base = np.int64(lows.ctypes.data)
    at = np.uint64(0)
    end = np.uint64(bits)
    i = np.int64(0)
    n = tokens.size
    token_at = np.int64(tokens.ctypes.data)
    out_at = np.int64(out.ctypes.data)
    while i < n:
        if width_of(out) <= 4 and i + 16 <= n:
            took = number16(out, token_at + i, base, np.int64(at), np.int64(end), limit, out_at + i * width_of(out))
            if took >= 0:
                at += np.uint64(took)
                i += 16
                continue
        stop = min(i + 16, n)
        while i < stop:
            v, width = _read_number(tokens[np.uint64(i)], lows, base, at)
            at += width
            if v > limit or at > end:
                return i
            out[np.uint64(i)] = v
            i += 1
    if (at + np.uint64(7)) >> np.uint64(3) != (end + np.uint64(7)) >> np.uint64(3):
        return tokens.size
    if at & np.uint64(63) and lows[at >> np.uint64(6)] >> (at & np.uint64(63)):
        return tokens.size
    return -1


@kernel
def unpack_chunks(tokens: Any, low_at: Any, low_bytes: Any, log: Any, limit: Any, out: Any) -> Any:
    """`unpack` for chunks of 2^log numbers, the last of them shorter; the low bits of each are at an address."""
    most = np.int64(0)
    for size in low_bytes:
        most = max(most, size)
    lows = np.empty(most // 8 + 3, np.uint64)
    for c in range(low_at.size):
        begin = c << log
        size = low_bytes[c]
        end = min(begin + (np.int64(1) << log), out.size)
        lows[size // 8 : size // 8 + 3] = 0
        copy_bytes(low_at[c], size, np.int64(lows.ctypes.data))
        bad = unpack(tokens[begin:end], lows, 8 * size, limit, out[begin:end])
        if bad >= 0:
            return begin + bad
    return -1


@inline
def _lower_bound(positions: Any, low: Any, high: Any, stop: Any) -> Any:
    """The index of the first of rising positions, from `low` on, that is not below `stop`; or `high`."""
    while low < high:
        middle = (low + high) >> 1
        if np.int64(positions[np.uint64(middle)]) < stop:
            low = middle + 1
        else:
            high = middle
    return low


@kernel
def tile_gaps(counts: Any, numel: Any, log: Any, positions: Any, gaps: Any, tiles: Any) -> Any:
    """Gaps of all changes, and the changes per tile of every region of two tiles or more. Returns their number."""
    k = np.int64(0)
    t = np.int64(0)
    for e in range(counts.size):
        end = k + counts[e]
        for i in range(k + 1, end):  # as if there were no tiles: this loop is vectorised
            gaps[np.uint64(i)] = positions[np.uint64(i)] - positions[np.uint64(i - 1)] - np.uint32(1)
        n_tiles = ((numel[e] - 1) >> log) + 1
        for tile in range(n_tiles):
            first = k
            k = _lower_bound(positions, first, end, np.int64(tile + 1) << log)
            if k > first:
                gaps[first] = np.int64(positions[first]) - (np.int64(tile) << log)
            if n_tiles > 1:
                tiles[t] = k - first
                t += 1
    return t


@kernel
def tile_positions(counts: Any, numel: Any, log: Any, tiles: Any, gaps: Any, positions: Any) -> Any:
    """Positions from gaps and tile counts. Returns -1, or the first entry whose counts or gaps leave its tiles.

    `positions` may be `gaps`, which are below the size of a tile.
    """
    gap_at = np.int64(gaps.ctypes.data)
    position_at = np.int64(positions.ctypes.data)
    k = np.int64(0)
    t = np.int64(0)
    for e in range(counts.size):
        n_tiles = ((numel[e] - 1) >> log) + 1
        left = counts[e]
        for j in range(n_tiles):
            inside = np.int64(tiles[t + j]) if n_tiles > 1 else left
            if inside > left:
                return e
            left -= inside
            last = (np.int64(j) << log) - 1
            end = min(np.int64(j + 1) << log, numel[e])
            whole = k + (inside & -16 if log <= 27 else 0)  # sixteen smaller gaps do not overflow 31 bits
            i = k
            while i < whole and last < end:
                last = sums16(gap_at + 4 * i, last, position_at + 4 * i)
                i += 16
            while i < k + inside and last < end:
                last += np.int64(gaps[np.uint64(i)]) + 1
                positions[np.uint64(i)] = last
                i += 1
            k += inside
            if last >= end:  # positions rise, so checking the last is enough
                return e
        if left:
            return e
        if n_tiles > 1:
            t += n_tiles
    keep_alive(gaps)
    keep_alive(positions)
    return -1


@kernel
def ascending(counts: Any, numel: Any, position_at: Any) -> Any:
    """Returns -1, or the first entry whose positions, at an address, do not rise strictly or leave its region."""
    k = np.int64(0)
    for e in range(counts.size):
        falls = np.int64(0)
        i = k + 1
        end = k + counts[e]
        while i + 16 <= end:  # without a branch
            falls |= falls16(position_at + 4 * i)
            i += 16
        for j in range(i, end):
            falls |= np.int64(load32(position_at + 4 * j) <= load32(position_at + 4 * (j - 1)))
        k += counts[e]
        if falls or (counts[e] and load32(position_at + 4 * (k - 1)) >= numel[e]):
            return e
    return -1


@kernel
def varints(values: Any, out: Any) -> Any:
    """LEB128 of unsigned numbers. Returns the number of bytes."""
    at = 0
    for i in range(values.size):
        v = values[i]
        while v >= np.uint64(128):
            out[at] = np.uint8(v & np.uint64(127)) | np.uint8(128)
            v >>= np.uint64(7)
            at += 1
        out[at] = np.uint8(v)
        at += 1
    return at


@kernel
def read_varints(data: Any, at: Any, limit: Any, out: Any) -> Any:
    """Canonical LEB128 numbers up to `limit`, from offset `at`. Returns the offset behind them, or -1 on an error."""
    for i in range(out.size):
        v = np.uint64(0)
        shift = np.uint64(0)
        while True:
            if at >= data.size or shift > np.uint64(63):
                return -1
            byte = np.uint64(data[at])
            at += 1
            if shift == np.uint64(63) and byte > _ONE:
                return -1
            v |= (byte & np.uint64(127)) << shift
            shift += np.uint64(7)
            if byte < np.uint64(128):
                if byte == np.uint64(0) and shift > np.uint64(7):
                    return -1
                break
        if v > limit:
            return -1
        out[i] = v
    return at
