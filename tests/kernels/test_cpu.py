"""Every compiled kernel against its specification, on integer views, at awkward sizes and addresses."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from sparserl.kernels import cpu, reference

UINTS = (np.uint8, np.uint16, np.uint32, np.uint64)
SIZES = (*range(301), 511, 512, 513, 1000, 4095, 4096, 4097, 10_007)
POISON = 0xA5
GUARD = 64  # elements behind every output that no kernel may touch

each_width = pytest.mark.parametrize("uint", UINTS, ids=lambda u: f"u{8 * np.dtype(u).itemsize}")


def poisoned(count, dtype):
    """An output buffer full of a pattern, with a guard behind it."""
    out = np.empty(count + GUARD, dtype)
    out.view(np.uint8)[:] = POISON
    return out


def untouched(buffer, used):
    """Whether everything behind the first `used` elements still holds the pattern."""
    return bool((buffer[used:].view(np.uint8) == POISON).all())


def random_bits(rng, size, uint):
    return rng.integers(0, 256, size * np.dtype(uint).itemsize, np.uint8).view(uint)


def unaligned(bits, offset):
    """A copy of the bits `offset` bytes into a buffer: the buffer, and the address of the copy."""
    buffer = np.full(bits.nbytes + offset + 16, POISON, np.uint8)
    buffer[offset : offset + bits.nbytes] = bits.view(np.uint8)
    return buffer, buffer.ctypes.data + offset


def int64(*values):
    return np.array(values, np.int64)


def altered(rng, old, kind):
    """New bits that differ from the old ones in a named way."""
    new = old.copy()
    if kind == 0 or not old.size:
        return new
    where = {
        1: [int(rng.integers(old.size))],
        2: [old.size - 1],
        3: np.arange(old.size),
        4: np.flatnonzero(rng.random(old.size) < 0.02),
        5: np.flatnonzero(rng.random(old.size) < 0.5),
        6: [0],
    }[kind]
    new[where] ^= old.dtype.type(1) << rng.integers(0, 8 * old.itemsize, len(where)).astype(old.dtype)
    return new


def run_diff(uint, pairs, offsets=(0,)):
    """The kernel on one batch of segments, and what stands in its poisoned outputs."""
    placed = [
        (unaligned(o, offsets[i % len(offsets)]), unaligned(n, offsets[(i // 2) % len(offsets)]))
        for i, (o, n) in enumerate(pairs)
    ]
    size = int64(*(o.size for o, _ in pairs))
    room = int(size.sum())
    positions, before, after = poisoned(room, np.uint32), poisoned(room, uint), poisoned(room, uint)
    counts = poisoned(size.size, np.int64)
    saved = [(o[0].copy(), n[0].copy()) for o, n in placed]
    old, new = int64(*(o[1] for o, _ in placed)), int64(*(n[1] for _, n in placed))
    found = cpu.changes.diff(np.empty(0, uint), old, new, size, positions, before, after, counts)
    for (o, n), (o_was, n_was) in zip(placed, saved, strict=True):
        assert (o[0] == o_was).all()
        assert (n[0] == n_was).all()
    assert untouched(positions, found)
    assert untouched(before, found)
    assert untouched(after, found)
    assert untouched(counts, size.size)
    return positions[:found], before[:found], after[:found], counts[: size.size]


def assert_diff(uint, pairs, offsets=(0,)):
    positions, before, after, counts = run_diff(uint, pairs, offsets)
    expected = [reference.diff(o, n) for o, n in pairs]
    assert counts.tolist() == [p.size for p, _, _ in expected]
    for got, column in ((positions, 0), (before, 1), (after, 2)):
        assert (got == np.concatenate([e[column] for e in expected])).all()


@each_width
def test_diff_of_every_size_in_one_batch(uint):
    """A batch of segments of all sizes gives, segment by segment, what the specification gives."""
    rng = np.random.default_rng(1)
    pairs = []
    for i, size in enumerate(SIZES):
        old = random_bits(rng, size, uint)
        pairs.append((old, altered(rng, old, i % 7)))
    assert_diff(uint, pairs)


@each_width
@pytest.mark.parametrize("kind", range(7))
def test_diff_of_every_size_alone(uint, kind):
    """Each size by itself, for each kind of change: none, one, the last, all, few, half, the first."""
    rng = np.random.default_rng(2)
    for size in SIZES[:301:7] + SIZES[300:]:
        old = random_bits(rng, size, uint)
        assert_diff(uint, [(old, altered(rng, old, kind))])


@each_width
def test_diff_at_any_address(uint):
    """Segments need not be aligned, nor alike on both sides."""
    rng = np.random.default_rng(3)
    pairs = []
    for i in range(400):
        old = random_bits(rng, int(rng.integers(0, 300)), uint)
        pairs.append((old, altered(rng, old, i % 7)))
    assert_diff(uint, pairs, offsets=(0, 1, 2, 3, 5, 7, 8, 11, 13))


@each_width
def test_diff_sees_each_single_element(uint):
    """No lane of any block, whole or partial, is blind: a change of one bit anywhere is found."""
    rng = np.random.default_rng(4)
    pairs = []
    for size in (1, 63, 64, 65, 127, 128, 129, 200):
        old = random_bits(rng, size, uint)
        for at in range(size):
            new = old.copy()
            new[at] ^= uint(1) << uint(rng.integers(8 * new.itemsize))
            pairs.append((old, new))
    assert_diff(uint, pairs)


@each_width
def test_diff_of_the_same_memory_is_empty(uint):
    """Equal addresses are equal bits."""
    bits = np.arange(200).astype(uint)
    counts, room = np.empty(1, np.int64), poisoned(0, uint)
    at = int64(bits.ctypes.data)
    found = cpu.changes.diff(np.empty(0, uint), at, at, int64(200), poisoned(0, np.uint32), room, room, counts)
    assert (found, counts.tolist()) == (0, [0])


def test_diff_is_of_bits_not_of_values():
    """A flipped zero sign and a NaN payload are changes; an unchanged NaN is none."""
    old = np.array([0x0000, 0x8000, 0x7FC0, 0x7FC1, 0x3F80], np.uint16)
    new = np.array([0x8000, 0x0000, 0x7FC0, 0x7FC2, 0x3F80], np.uint16)
    positions, _, _, _ = run_diff(np.uint16, [(old, new)])
    assert positions.tolist() == [0, 1, 3]


@pytest.mark.parametrize("room", [0, 1, 63, 64, 65, 130, 199, 200, 300])
def test_diff_without_room(room):
    """More changes than there is room for are told, and nothing is written behind the room."""
    old, new = np.zeros(200, np.uint16), np.ones(200, np.uint16)
    positions, before, after = poisoned(room, np.uint32), poisoned(room, np.uint16), poisoned(room, np.uint16)
    found = cpu.changes.diff(
        np.empty(0, np.uint16),
        int64(old.ctypes.data),
        int64(new.ctypes.data),
        int64(200),
        positions[:room],
        before[:room],
        after[:room],
        int64(0),
    )
    assert found == (200 if room >= 200 else -1)
    assert all(untouched(a, room) for a in (positions, before, after))


def sums(uint, runs):
    """The digest kernel over (bits address, size, start, keys) runs."""
    address, size, start = (int64(*(r[i] for r in runs)) for i in range(3))
    keys = np.array([r[3] for r in runs], np.uint64).reshape(-1, 2)
    return tuple(int(x) for x in cpu.changes.digest(np.empty(0, uint), address, size, start, keys))


def add(parts):
    return tuple(sum(column) & (2**64 - 1) for column in zip((0, 0), *parts, strict=True))


@each_width
def test_digest_of_every_size(uint):
    """Alone and in one batch, at any address and any start, the sums are those of the specification."""
    rng = np.random.default_rng(5)
    runs, alive, expected = [], [], []
    for i, size in enumerate(SIZES):
        bits = random_bits(rng, size, uint)
        keys = rng.integers(0, 2**64, 2, np.uint64)
        start = (0, 1, 2**31 - 3, 2**31 + 5, 2**40 + 7, 2**47)[i % 6]
        buffer, address = unaligned(bits, i % 9)
        alive.append(buffer)
        runs.append((address, size, start, keys))
        expected.append(reference.digest(keys, start, bits))
        assert sums(uint, runs[-1:]) == expected[-1]
    assert sums(uint, runs) == add(expected)


@each_width
def test_digest_adds_up_however_it_is_cut(uint):
    """The sums over the parts of a run are the sum of the run."""
    rng = np.random.default_rng(6)
    bits, keys = random_bits(rng, 3001, uint), rng.integers(0, 2**64, 2, np.uint64)
    whole = sums(uint, [(bits.ctypes.data, bits.size, 10, keys)])
    for parts in (1, 2, 3, 17, 500):
        cuts = np.sort(rng.integers(0, bits.size + 1, parts))
        cuts = [0, *cuts.tolist(), bits.size]
        runs = [
            (bits.ctypes.data + a * bits.itemsize, b - a, 10 + a, keys) for a, b in zip(cuts, cuts[1:], strict=False)
        ]
        assert sums(uint, runs) == whole
        assert add(sums(uint, [r]) for r in rng.permutation(np.array(runs, object)).tolist()) == whole


def test_digest_has_no_cheap_collisions():
    """Among a few hundred thousand (key, position, bits) no two elements add the same to either sum."""
    rng = np.random.default_rng(15)
    first, second = [], []
    for _ in range(4):
        position, bits = np.meshgrid(np.arange(300, dtype=np.uint64), np.arange(300, dtype=np.uint64))
        x, y = reference.mix(rng.integers(0, 2**64, 2, np.uint64), position.ravel(), bits.ravel())
        first.append(x)
        second.append(y)
    for column in (first, second):
        values = np.concatenate(column)
        assert np.unique(values).size == values.size


def boxes(rng, count):
    """Random regions of random tensors, as geometry: numel, start, size, strides inside, strides outside."""
    rows = []
    for _ in range(count):
        rank = int(rng.integers(1, 5))
        shape = rng.integers(1, 7, rank)
        low = [int(rng.integers(0, s)) for s in shape]
        size = [int(rng.integers(1, s - a + 1)) for s, a in zip(shape, low, strict=True)]
        strides = [int(np.prod(shape[d + 1 :])) for d in range(rank)]
        rows.append((low, size, strides, int(np.prod(shape))))
    return rows


def columns(rows, rank):
    size, stride = np.ones((len(rows), rank), np.int64), np.ones((len(rows), rank), np.int64)
    for e, (_, box, strides, _) in enumerate(rows):
        size[e, : len(box)], stride[e, : len(box)] = box, strides
    return int64(*(len(r[1]) for r in rows)), size, stride


@pytest.mark.parametrize("far", [0, 2**31 - 1, 2**31 + 11, 2**40, 2**47])
def test_locate(far):
    """Positions of boxes land where unravelling says, also far past 32 bits."""
    rng = np.random.default_rng(7)
    rows = boxes(rng, 200)
    dims, size, stride = columns(rows, 4)
    start = int64(*(far + int(np.dot(low, strides)) for low, _, strides, _ in rows))
    counts, positions, expected = [], [], []
    for e, (_, box, strides, _) in enumerate(rows):
        numel = int(np.prod(box))
        where = np.flatnonzero(rng.random(numel) < 0.6)
        counts.append(where.size)
        positions += where.tolist()
        expected += [reference.locate(int(p), int(start[e]), tuple(box), tuple(strides)) for p in where]
    out = poisoned(len(positions), np.int64)
    cpu.changes.locate(int64(*counts), start, dims, size, stride, np.array(positions, np.uint32), out)
    assert out[: len(positions)].tolist() == expected
    assert untouched(out, len(positions))


def test_locate_positions_past_two_to_the_31():
    """A position inside a region may use all of its 32 bits, and strides may carry it far beyond them."""
    size, strides = (3, 2**30, 1), (2**41, 2**3, 1)
    positions = [0, 1, 2**31 - 1, 2**31, 2**31 + 2**30 - 5, 3 * 2**30 - 1]
    out = poisoned(len(positions), np.int64)
    box, stride, where = np.array([size], np.int64), np.array([strides], np.int64), np.array(positions, np.uint32)
    cpu.changes.locate(int64(len(positions)), int64(9), int64(3), box, stride, where, out)
    expected = [9 + int(np.dot(np.unravel_index(p, size), strides)) for p in positions]
    assert out[: len(positions)].tolist() == expected
    assert expected[-1] > 2**42


@each_width
@pytest.mark.parametrize("way", ["scatter", "words", "integers", "floats", "floats in place"])
def test_gather_and_scatter(uint, way):
    """Bits are read from, and written to, exactly the positions of the boxes; nothing else changes.

    They are scattered, or exchanged for those that are there: as words, or as steps in either order. An exchange tells
    how the digest moves.
    """
    rng = np.random.default_rng(8)
    rows = [*boxes(rng, 300), ([3], [700], [1], 999), ([0], [4096], [1], 4096)]
    dims, size, stride = columns(rows, 4)
    placed = [unaligned(random_bits(rng, numel, uint), i % 5) for i, (*_, numel) in enumerate(rows)]
    width = np.dtype(uint).itemsize
    first = int64(*(address + width * int(np.dot(r[0], r[2])) for (_, address), r in zip(placed, rows, strict=True)))
    counts, positions, expected, wanted = [], [], [], []
    for (buffer, _), (low, box, strides, numel), i in zip(placed, rows, range(len(rows)), strict=True):
        where = np.flatnonzero(rng.random(int(np.prod(box))) < 0.5)
        tensor = buffer[i % 5 : i % 5 + numel * width].copy().view(uint)
        flat = [reference.locate(int(p), int(np.dot(low, strides)), tuple(box), tuple(strides)) for p in where]
        counts.append(where.size)
        positions.append(where)
        expected.append(tensor[flat])
        after = tensor.copy()
        after[flat] = random_bits(rng, where.size, uint)
        wanted.append((after, after[flat]))
    where = np.concatenate(positions).astype(np.uint32)
    out = poisoned(where.size, uint)
    tag, counts = np.empty(0, uint), int64(*counts)
    cpu.changes.gather(tag, counts, first, dims, size, stride, where, out[: where.size])
    assert (out[: where.size] == np.concatenate(expected)).all()
    assert untouched(out, where.size)
    before, bits = np.concatenate(expected), np.concatenate([w[1] for w in wanted])
    if way == "scatter":
        cpu.changes.scatter(tag, counts, first, dims, size, stride, where.ctypes.data, bits)
    else:
        words = bits.copy() if way == "words" else reference.steps(before, bits, way.startswith("floats"))
        out = poisoned(where.size, uint)
        if way.endswith("in place"):
            out[: where.size] = words
        same = words.copy()
        word_at = out.ctypes.data if way.endswith("in place") else words.ctypes.data
        given = word_at, way == "words", way.startswith("floats"), out.ctypes.data
        odd, at = unaligned(where, 1)
        start, keys = rng.integers(0, 2**40, len(rows)), rng.integers(0, 2**64, (len(rows), 2), np.uint64)
        other = stride + rng.integers(0, 3, stride.shape)  # strides in the tensor, which need not be those in memory
        moved = cpu.changes.exchange(tag, counts, first, start, dims, size, stride, other, keys, at, *given)
        assert moved == cpu.changes.digest_delta(counts, start, dims, size, other, keys, where, before, bits)
        assert (out[: where.size] == before).all()
        assert (words == same).all()
        assert untouched(out, where.size)
        assert (odd[1 : 1 + where.nbytes] == where.view(np.uint8)).all()
    for i, ((buffer, _), (after, _)) in enumerate(zip(placed, wanted, strict=True)):
        assert (buffer[i % 5 : i % 5 + after.nbytes] == after.view(np.uint8)).all()
        assert (buffer[: i % 5] == POISON).all()
        assert (buffer[i % 5 + after.nbytes :] == POISON).all()


@each_width
def test_digest_delta(uint):
    """The sums move by the new elements' mix minus the old ones', wherever the boxes lie in their tensors."""
    rng = np.random.default_rng(9)
    rows = boxes(rng, 100)
    dims, size, stride = columns(rows, 4)
    start = int64(*(2**40 * (i % 2) + int(np.dot(r[0], r[2])) for i, r in enumerate(rows)))
    keys = rng.integers(0, 2**64, (len(rows), 2), np.uint64)
    counts, positions, expected = [], [], [(0, 0)]
    old, new = [np.empty(0, uint)], [np.empty(0, uint)]
    for e, (_, box, strides, _) in enumerate(rows):
        where = np.flatnonzero(rng.random(int(np.prod(box))) < 0.5)
        a, b = random_bits(rng, where.size, uint), random_bits(rng, where.size, uint)
        flat = [reference.locate(int(p), int(start[e]), tuple(box), tuple(strides)) for p in where]
        at = np.array(flat, np.uint64)
        for bits, sign in ((a, -1), (b, 1)):
            first, second = reference.mix(keys[e], at, bits)
            expected.append((sign * int(first.sum(dtype=np.uint64)), sign * int(second.sum(dtype=np.uint64))))
        counts.append(where.size)
        positions.append(where)
        old.append(a)
        new.append(b)
    where = np.concatenate(positions).astype(np.uint32)
    moved = cpu.changes.digest_delta(
        int64(*counts), start, dims, size, stride, keys, where, np.concatenate(old), np.concatenate(new)
    )
    assert tuple(int(x) for x in moved) == add(expected)


@each_width
def test_digest_of_boxes(uint):
    """Boxes held in row-major order add what their elements add at their places in the tensor, rows long or short."""
    rng = np.random.default_rng(16)
    rows = [*boxes(rng, 200), ([0], [1], [1], 1), ([3], [700], [1], 999), ([1, 2], [5, 333], [400, 1], 4000)]
    rows += [([0, 0], [50, 1], [7, 1], 350), ([0, 0], [50, 3], [90, 30], 4500)]
    dims, size, stride = columns(rows, 4)
    start = int64(*((0, 2**31 + 1, 2**40)[i % 3] + int(np.dot(r[0], r[2])) for i, r in enumerate(rows)))
    keys = rng.integers(0, 2**64, (len(rows), 2), np.uint64)
    addresses, alive, expected = [], [], []
    for e, (_, box, strides, _) in enumerate(rows):
        bits = random_bits(rng, int(np.prod(box)), uint)
        at = [reference.locate(p, int(start[e]), tuple(box), tuple(strides)) for p in range(bits.size)]
        first, second = reference.mix(keys[e], np.array(at, np.uint64), bits)
        expected.append((int(first.sum(dtype=np.uint64)), int(second.sum(dtype=np.uint64))))
        buffer, address = unaligned(bits, e % 9)
        alive.append(buffer)
        addresses.append(address)
    tag, where = np.empty(0, uint), int64(*addresses)
    assert tuple(map(int, cpu.changes.digest_boxes(tag, where, start, dims, size, stride, keys))) == add(expected)
    for e, one in enumerate(expected[-5:], len(rows) - 5):
        it = slice(e, e + 1)
        alone = cpu.changes.digest_boxes(tag, where[it], start[it], dims[it], size[it], stride[it], keys[it])
        assert tuple(map(int, alone)) == one


def test_reads_stop_at_the_last_byte(last_page):
    """Weights may end where readable memory ends: comparing, summing and gathering touch nothing behind."""
    page = last_page.size
    for uint in UINTS:
        tag, width = np.empty(0, uint), np.dtype(uint).itemsize
        for size in (1, 15, 16, 17, 63, 64, 65, 100, 129, 300):
            address = last_page.ctypes.data + page - size * width
            other = np.frombuffer(bytes(last_page[page - size * width :]), uint).copy()
            other[-1] ^= uint(1)
            counts, positions = np.empty(1, np.int64), np.empty(size, np.uint32)
            before, after = np.empty(size, uint), np.empty(size, uint)
            args = int64(size), positions, before, after, counts
            assert cpu.changes.diff(tag, int64(address), int64(other.ctypes.data), *args) == 1
            assert positions[0] == size - 1
            other[-1] ^= uint(1)
            keys = np.array([3, 4], np.uint64)
            assert sums(uint, [(address, size, 0, keys)]) == reference.digest(keys, 0, other)
            one, flat = np.ones(1, np.int64), np.ones((1, 1), np.int64)
            everywhere = np.arange(size, dtype=np.uint32)
            cpu.changes.gather(tag, int64(size), int64(address), one, flat, flat, everywhere, after)
            assert (after == other).all()


def run_steps(old, new, sign_magnitude):
    step = poisoned(old.size, old.dtype)
    cpu.changes.steps(old, new, sign_magnitude, step[: old.size])
    back = poisoned(old.size, old.dtype)
    cpu.changes.advance(old, step[: old.size], sign_magnitude, back[: old.size])
    assert untouched(step, old.size)
    assert untouched(back, old.size)
    return step[: old.size], back[: old.size]


def assert_steps(old, new, sign_magnitude):
    """The kernel's steps are those of the specification, and both ways lead back to the new bits."""
    step, back = run_steps(old, new, sign_magnitude)
    assert (step == reference.steps(old, new, sign_magnitude)).all()
    assert (back == new).all()
    assert (reference.advance(old, step, sign_magnitude) == new).all()


both_orders = pytest.mark.parametrize("sign_magnitude", [True, False])


@both_orders
def test_steps_between_all_pairs_of_bytes(sign_magnitude):
    """Every 8-bit pattern to every other: exact, and the 256 steps from one pattern are all different."""
    old, new = (a.ravel() for a in np.meshgrid(np.arange(256, dtype=np.uint8), np.arange(256, dtype=np.uint8)))
    assert_steps(old, new, sign_magnitude)
    table = reference.steps(old, new, sign_magnitude).reshape(256, 256)
    assert (np.sort(table, axis=0) == np.arange(256)[:, None]).all()


@both_orders
def test_steps_from_all_bf16_patterns(sign_magnitude):
    """From each of the 65536 patterns by small, large and extreme steps, across zero, infinity and the wrap."""
    old = np.arange(1 << 16, dtype=np.uint16)
    for step in (0, 1, 2, 3, 4, 5, 100, 101, 0x7FFE, 0x7FFF, 0x8000, 0xFFFE, 0xFFFF):
        zigzag = np.full(old.size, step, np.uint16)
        new = reference.advance(old, zigzag, sign_magnitude)
        assert np.unique(new).size == old.size
        assert_steps(old, new, sign_magnitude)
        assert (run_steps(old, new, sign_magnitude)[0] == zigzag).all()


@both_orders
def test_steps_of_random_16_bit_pairs(sign_magnitude):
    """Half a million random pairs of 16-bit patterns."""
    rng = np.random.default_rng(10)
    assert_steps(random_bits(rng, 1 << 19, np.uint16), random_bits(rng, 1 << 19, np.uint16), sign_magnitude)


@both_orders
@each_width
def test_steps_wrap_all_the_way(uint, sign_magnitude):
    """The extremes of every width, each to each, and random pairs."""
    rng = np.random.default_rng(11)
    bits = 8 * np.dtype(uint).itemsize
    edges = {v % 2**bits for e in range(bits + 1) for v in (2**e - 1, 2**e, 2**e + 1, -(2**e))}
    edges = np.array(sorted(edges), uint)
    old, new = (a.ravel() for a in np.meshgrid(edges, edges))
    assert_steps(old, new, sign_magnitude)
    assert_steps(random_bits(rng, 5000, uint), random_bits(rng, 5000, uint), sign_magnitude)
    assert_steps(old[:0], new[:0], sign_magnitude)


def test_the_neighbour_in_value_is_one_step_away():
    """In the order of floats a step of one goes to the next value; -0.0 and +0.0 are neighbours too."""
    for uint, real in ((np.uint16, np.float16), (np.uint32, np.float32), (np.uint64, np.float64)):
        values = np.array([1.0, -1.0, 0.5, -0.5, 3e-8, -3e-8, 60000.0], real)
        above = np.nextafter(values, real(np.inf))
        assert reference.steps(values.view(uint), above.view(uint), True).tolist() == [2] * values.size
        assert reference.steps(above.view(uint), values.view(uint), True).tolist() == [1] * values.size
        zeros = np.array([-0.0, 0.0], real).view(uint)
        assert reference.steps(zeros[:1], zeros[1:], True).tolist() == [2]


def run_pack(values):
    tokens, lows = poisoned(values.size, np.uint8), poisoned(values.size + 1, np.uint64)
    bits = cpu.changes.pack(values, tokens[: values.size], lows[: values.size + 1])
    assert untouched(tokens, values.size)
    assert untouched(lows, bits // 64 + 1)
    return tokens[: values.size].tobytes(), lows.tobytes()[: (bits + 7) // 8], int(bits)


def run_unpack(tokens, lows, limit, dtype, bits=None):
    words = np.zeros(len(lows) // 8 + 2, np.uint64)
    words.view(np.uint8)[: len(lows)] = np.frombuffer(lows, np.uint8)
    out = poisoned(len(tokens), dtype)
    heads = np.frombuffer(tokens, np.uint8)
    limit_bits = 8 * len(lows) if bits is None else bits
    bad = cpu.changes.unpack(heads, words, limit_bits, np.uint64(limit), out[: len(tokens)])
    assert untouched(out, len(tokens))
    return int(bad), out[: len(tokens)]


@pytest.mark.parametrize("behind", ["tokens", "lows"])
@pytest.mark.parametrize("uint", [np.uint16, np.uint32, np.uint64])
def test_unpack_chunks(uint, behind, last_page):
    """Chunks one after the other, with nothing to read behind the last one; the number at fault is named."""
    rng = np.random.default_rng(int(np.dtype(uint).itemsize))
    values = rng.integers(0, 1 << rng.integers(1, 16, 4000)).astype(uint)
    chunks = [reference.pack(values[i : i + 256]) for i in range(0, values.size, 256)]
    tokens, lows = ([np.frombuffer(part, np.uint8) for part in parts] for parts in zip(*chunks, strict=True))
    tokens = np.concatenate(tokens)
    end = tokens if behind == "tokens" else lows[-1]
    last_page[-end.size :] = end
    if behind == "tokens":
        tokens = last_page[-end.size :]
    else:
        lows[-1] = last_page[-end.size :]
    at = tokens, int64(*(w.ctypes.data for w in lows)), int64(*(w.size for w in lows))
    out = poisoned(values.size, uint)
    assert cpu.changes.unpack_chunks(*at, 8, np.uint64(1 << 16), out[: values.size]) == -1
    assert (out[: values.size] == values).all()
    assert untouched(out, values.size)
    limit = int(values[3000:].max()) - 1
    assert cpu.changes.unpack_chunks(*at, 8, np.uint64(limit), out[: values.size]) == int(np.argmax(values > limit))
    at[2][7] -= 1
    assert 7 * 256 <= cpu.changes.unpack_chunks(*at, 8, np.uint64(1 << 16), out[: values.size]) <= 8 * 256


NUMBERS = [0, 1, 2, 14, 15, 16, 17, 31, 32, 2**16 - 1, 2**31, 2**32 - 1, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 1]


@pytest.mark.parametrize("seed", range(4))
def test_pack_and_unpack_64_bit_numbers(seed):
    """Numbers of every magnitude: the bytes of the specification, and the numbers back again."""
    rng = np.random.default_rng(seed)
    spread = [int(rng.integers(0, 2**64, dtype=np.uint64)) >> int(rng.integers(64)) for _ in range(2000)]
    edges = [v % 2**64 for e in range(65) for v in (2**e - 1, 2**e, 2**e + 1)]
    values = np.array([*NUMBERS, *edges, *spread], np.uint64)
    values = rng.permutation(values)
    tokens, lows, bits = run_pack(values)
    assert (tokens, lows) == reference.pack(values)
    assert bits == sum(reference.token(int(v))[2] for v in values)
    bad, back = run_unpack(tokens, lows, 2**64 - 1, np.uint64)
    assert bad == -1
    assert (back == values).all()


@each_width
def test_pack_in_every_width(uint):
    """Every length up to 300 of numbers of a width, also all of them small, a bit larger, or largest."""
    rng = np.random.default_rng(12)
    most = 2 ** (8 * np.dtype(uint).itemsize) - 1
    for size in range(0, 301, 3):
        any_size = random_bits(rng, size, uint) >> rng.integers(0, 8 * np.dtype(uint).itemsize, size).astype(uint)
        small, larger = rng.integers(0, 16, size).astype(uint), rng.integers(0, 256, size).astype(uint)
        for values in (random_bits(rng, size, uint), np.full(size, most, uint), small, larger, any_size):
            tokens, lows, _ = run_pack(values)
            assert (tokens, lows) == reference.pack(values)
            bad, back = run_unpack(tokens, lows, most, uint)
            assert bad == -1
            assert (back == values).all()


def test_untoken_undoes_token():
    """The specification itself: a token and its low bits are the number, and tokens fit a byte."""
    for value in [*range(5000), *NUMBERS, *(2**e + d for e in range(5, 64) for d in (-1, 0, 1))]:
        token, low, width = reference.token(value)
        assert token < 256
        assert low < 2**width
        assert reference.untoken(token, low) == value


@pytest.mark.parametrize("at", [0, 1, 57, 99])
def test_unpack_names_the_first_number_past_its_limit(at):
    """A number above the limit is found where it stands."""
    values = np.full(100, 1000, np.uint32)
    values[at] = 1001
    tokens, lows, _ = run_pack(values)
    assert run_unpack(tokens, lows, 1001, np.uint32)[0] == -1
    assert run_unpack(tokens, lows, 1000, np.uint32)[0] == at


def test_unpack_refuses_low_bits_that_do_not_match():
    """Too few low bits, a byte too many, and set bits in the padding are all errors."""
    values = np.array([5, 1000, 3, 70_000, 17], np.uint32)
    tokens, lows, _ = run_pack(values)
    assert run_unpack(tokens, lows, 2**32 - 1, np.uint32)[0] == -1
    assert run_unpack(tokens, lows[:-1], 2**32 - 1, np.uint32)[0] >= 0
    assert run_unpack(tokens, lows + b"\0", 2**32 - 1, np.uint32)[0] == values.size
    spare = bytes([lows[-1] | 0x80])
    assert run_unpack(tokens, lows[:-1] + spare, 2**32 - 1, np.uint32)[0] == values.size
    assert run_unpack(b"\x03", b"", 2**32 - 1, np.uint32)[0] == -1
    assert run_unpack(b"\x03", b"\0", 2**32 - 1, np.uint32)[0] == 1


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32, np.uint64])
def test_unpack_names_the_first_number_without_its_low_bits(dtype):
    """However many low bits are missing, the first number that lacks some is named, and none behind the end is read."""
    values = (np.random.default_rng(3).geometric(0.006, 70) & 0xFFFF).astype(dtype)
    tokens, lows, _ = run_pack(values)
    upto = np.cumsum([reference.token(int(v))[2] for v in values])
    for cut in range(len(lows)):
        assert run_unpack(tokens, lows[:cut], 0xFFFF, dtype)[0] == int(np.argmax(upto > 8 * cut))


def regions_of(rng, log):
    """Regions of awkward sizes around a tile, each with some changes in it."""
    tile = 1 << log
    sizes = [1, 2, tile - 1, tile, tile + 1, 2 * tile - 1, 2 * tile, 2 * tile + 1, 5 * tile + 3, 7]
    rows = []
    for numel in sizes:
        for density in (0.0, 0.01, 0.3, 1.0):
            where = np.flatnonzero(rng.random(numel) < density)
            rows.append((numel, where))
        rows.append((numel, np.array([numel - 1])))
        rows.append((numel, np.array(sorted({0, numel - 1}))))
    return rows


def run_gaps(rows, log):
    positions = np.concatenate([w for _, w in rows]).astype(np.uint32)
    numel, counts = int64(*(n for n, _ in rows)), int64(*(w.size for _, w in rows))
    per_entry = (numel - 1 >> log) + 1
    n_tiles = int(per_entry[per_entry > 1].sum())
    gaps, tiles = poisoned(positions.size, np.uint32), poisoned(n_tiles, np.uint32)
    assert cpu.changes.tile_gaps(counts, numel, log, positions, gaps, tiles) == n_tiles
    assert untouched(gaps, positions.size)
    assert untouched(tiles, n_tiles)
    return counts, numel, tiles[:n_tiles], gaps[: positions.size], positions


@pytest.mark.parametrize("log", [4, 6, 10])
def test_tile_gaps_and_back(log):
    """Gaps and tile counts are those of the specification, region by region, and lead back to the positions."""
    rows = regions_of(np.random.default_rng(13), log)
    counts, numel, tiles, gaps, positions = run_gaps(rows, log)
    expected_gaps, expected_tiles = [], []
    for n, where in rows:
        its_tiles, its_gaps = reference.tile_gaps(where, n, 1 << log)
        expected_gaps += its_gaps
        expected_tiles += its_tiles if len(its_tiles) > 1 else []
    assert gaps.tolist() == expected_gaps
    assert tiles.tolist() == expected_tiles
    back = poisoned(positions.size, np.uint32)
    assert cpu.changes.tile_positions(counts, numel, log, tiles, gaps, back) == -1
    assert (back[: positions.size] == positions).all()
    assert untouched(back, positions.size)


def test_tile_positions_at_the_end_of_32_bits():
    """Regions of 2^31 elements and tiles of 2^31 keep their last position."""
    rows = [(2**31, np.array([0, 2**30, 2**31 - 1])), (2**31 - 1, np.array([2**31 - 2]))]
    for log in (22, 30, 31):
        counts, numel, tiles, gaps, positions = run_gaps(rows, log)
        back = poisoned(positions.size, np.uint32)
        assert cpu.changes.tile_positions(counts, numel, log, tiles, gaps, back) == -1
        assert back[: positions.size].tolist() == [0, 2**30, 2**31 - 1, 2**31 - 2]


@pytest.mark.parametrize(
    ("counts", "numel", "tiles", "gaps", "bad"),
    [
        ([1], [16], [], [15], -1),
        ([1], [16], [], [16], 0),
        ([1], [15], [], [15], 0),
        ([2], [16], [], [15, 0], 0),
        ([2], [20], [1, 1], [15, 3], -1),
        ([2], [20], [1, 1], [15, 4], 0),
        ([2], [20], [1, 1], [16, 3], 0),
        ([2], [20], [1, 0], [15, 3], 0),
        ([2], [20], [1, 2], [15, 1, 1], 0),
        ([2], [20], [3, 0], [1, 1, 1], 0),
        ([1, 1], [16, 16], [], [3, 16], 1),
        ([1, 2], [16, 40], [1, 0, 1], [3, 4, 7], -1),
        ([1, 2], [16, 40], [1, 0, 1], [3, 4, 8], 1),
        ([1, 2], [16, 40], [1, 0, 0], [3, 4, 7], 1),
    ],
)
def test_tile_positions_refuses_what_leaves_its_tile(counts, numel, tiles, gaps, bad):
    """Gaps past a tile's or a region's end, and counts that do not add up, name the entry at fault."""
    room = poisoned(len(gaps), np.uint32)
    tiles, gaps = np.array(tiles, np.uint32), np.array(gaps, np.uint32)
    assert cpu.changes.tile_positions(int64(*counts), int64(*numel), 4, tiles, gaps, room) == bad
    assert untouched(room, len(gaps))


@pytest.mark.parametrize(
    ("counts", "numel", "positions", "bad"),
    [
        ([3], [10], [0, 5, 9], -1),
        ([3], [10], [0, 5, 10], 0),
        ([3], [10], [0, 5, 5], 0),
        ([3], [10], [0, 5, 4], 0),
        ([1, 2], [1, 2**31], [0, 0, 2**31 - 1], -1),
        ([1, 2], [1, 2**31], [0, 0, 2**31], 1),
        ([1, 0, 1], [3, 3, 3], [2, 0], -1),
        ([1, 0, 1], [3, 3, 3], [2, 3], 2),
        ([1], [5], [2**32 - 1], 0),
    ],
)
def test_ascending(counts, numel, positions, bad):
    """Positions must rise strictly and stay inside their region; the entry at fault is named."""
    where = np.array(positions, np.uint32)
    assert cpu.changes.ascending(int64(*counts), int64(*numel), where.ctypes.data) == bad


@pytest.mark.parametrize("size", [2, 16, 17, 18, 33, 70])
def test_ascending_looks_at_all_neighbours(size):
    """Wherever in an entry two positions do not rise; those of two entries are no neighbours."""

    def bad(positions):
        odd, address = unaligned(positions, 1)
        entry = cpu.changes.ascending(int64(3, size, 2), int64(9, 3 * size, 9), address)
        del odd  # not before
        return entry

    good = np.concatenate(([1, 2, 8], 3 * np.arange(size), [0, 8])).astype(np.uint32)
    assert bad(good) == -1
    for at in range(4, 3 + size):
        for lower in (0, 1):
            falls = good.copy()
            falls[at] = max(int(falls[at - 1]) - lower, 0)
            assert bad(falls) == 1


def leb128(value):
    out = bytearray()
    while value >= 128:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def test_varints_and_back():
    """Numbers of every length, written as LEB128 says, read back from any offset."""
    rng = np.random.default_rng(14)
    spread = [int(rng.integers(0, 2**64, dtype=np.uint64)) >> int(rng.integers(64)) for _ in range(3000)]
    values = np.array([*NUMBERS, *(2**e - 1 for e in range(65)), *(2**e for e in range(64)), *spread], np.uint64)
    out = poisoned(10 * values.size, np.uint8)
    size = cpu.changes.varints(values, out)
    expected = b"".join(leb128(int(v)) for v in values)
    assert out[:size].tobytes() == expected
    assert untouched(out, size)
    back = poisoned(values.size, np.uint64)
    data = np.frombuffer(b"\xff\xff\xff" + expected + b"\x80", np.uint8)
    assert cpu.changes.read_varints(data, 3, np.uint64(2**64 - 1), back[: values.size]) == 3 + size
    assert (back[: values.size] == values).all()
    assert untouched(back, values.size)


@pytest.mark.parametrize(
    ("data", "limit", "end"),
    [
        (b"\x05", 5, 1),
        (b"\x05", 4, -1),
        (b"", 9, -1),
        (b"\x80", 9, -1),
        (b"\x80\x00", 9, -1),
        (b"\x85\x80\x00", 9, -1),
        (b"\xff" * 9 + b"\x01", 2**64 - 1, 10),
        (b"\xff" * 9 + b"\x02", 2**64 - 1, -1),
        (b"\xff" * 9 + b"\x81", 2**64 - 1, -1),
        (b"\xff" * 10 + b"\x01", 2**64 - 1, -1),
        (b"\x80" * 9 + b"\x01", 2**63, 10),
        (b"\x80" * 9 + b"\x01", 2**63 - 1, -1),
    ],
)
def test_read_varints_takes_only_canonical_numbers(data, limit, end):
    """Cut short, padded, too long or above the limit: refused, and never read past the end."""
    out = poisoned(1, np.uint64)
    assert cpu.changes.read_varints(np.frombuffer(data, np.uint8), 0, np.uint64(limit), out[:1]) == end
    assert untouched(out, 1)


COMPILES_ONE = """
import sys
{log}
import numpy as np
from sparserl.kernels import cpu
where = np.array([3], np.uint32)
cpu.ascending(np.array([1]), np.array([9]), where.ctypes.data)
"""


@pytest.mark.parametrize(("log", "says"), [("import logging; logging.basicConfig()", "compiles its kernels"), ("", "")])
def test_compiling_is_announced_to_people_and_stays_out_of_pipes(log, says, tmp_path):
    env = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    code = COMPILES_ONE.format(log=log)
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert says in done.stderr
    assert bool(says) == bool(done.stderr)


@pytest.mark.long
def test_kernels_run_on_the_plainest_processor(tmp_path):
    """Without AVX, BMI2 and all that: Numba is told to compile for a generic one, and patches come out the same."""
    code = """
import numpy as np, sparserl, hashlib
rng = np.random.default_rng(0)
bf16 = sparserl.weights.dtypes.BY_NAME["bfloat16"]
old = (rng.normal(0, 0.02, 200_000).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
new = old.copy()
new[rng.random(old.size) < np.where((old & 0x7FFF) < 0x3B00, 0.3, 0.002)] += 1
weights = {"w": sparserl.Bits(old.copy(), bf16)}
patch = sparserl.diff(weights, {"w": sparserl.Bits(new, bf16)}, profile="ctx", threads=1)
patch.apply(weights, threads=1)
assert (weights["w"].array == new).all()
print(patch.stats().profile, hashlib.sha256(patch.to_bytes()).hexdigest())
"""
    out = []
    for there in ({}, {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": "", "NUMBA_CACHE_DIR": str(tmp_path)}):
        env = {**os.environ, **there, "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        out.append(done.stdout)
    assert out[0] == out[1]
    assert out[0].startswith("ctx ")
