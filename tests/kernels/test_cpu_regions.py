"""Kernels that read, write and sum regions, against their specification, at awkward sizes and addresses."""

from __future__ import annotations

import numpy as np
import pytest

from sparserl.kernels import cpu, reference
from sparserl.kernels.cpu.arguments import ChangeAddresses, InMemory, InTensor, WordKind
from tests.kernels.guarded_buffers import (
    POISON,
    SIZES,
    UINTS,
    each_width,
    int64,
    poisoned,
    random_bits,
    unaligned,
    untouched,
)

NO_KEYS = np.empty((0, 2), np.uint64)  # for kernels that do not read them


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
    regions = InTensor(start, dims, size, stride, NO_KEYS)
    cpu.changes.locate(int64(*counts), regions, np.array(positions, np.uint32), out)
    assert out[: len(positions)].tolist() == expected
    assert untouched(out, len(positions))


def test_locate_positions_past_two_to_the_31():
    """A position inside a region may use all of its 32 bits, and strides may carry it far beyond them."""
    size, strides = (3, 2**30, 1), (2**41, 2**3, 1)
    positions = [0, 1, 2**31 - 1, 2**31, 2**31 + 2**30 - 5, 3 * 2**30 - 1]
    out = poisoned(len(positions), np.int64)
    box, stride, where = np.array([size], np.int64), np.array([strides], np.int64), np.array(positions, np.uint32)
    region = InTensor(int64(9), int64(3), box, stride, NO_KEYS)
    cpu.changes.locate(int64(len(positions)), region, where, out)
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
    in_memory = InMemory(first, dims, size, stride)
    cpu.changes.gather(tag, counts, in_memory, where, out[: where.size])
    assert (out[: where.size] == np.concatenate(expected)).all()
    assert untouched(out, where.size)
    before, bits = np.concatenate(expected), np.concatenate([w[1] for w in wanted])
    if way == "scatter":
        cpu.changes.scatter(tag, counts, in_memory, where.ctypes.data, bits)
    else:
        words = bits.copy() if way == "words" else reference.steps(before, bits, way.startswith("floats"))
        out = poisoned(where.size, uint)
        if way.endswith("in place"):
            out[: where.size] = words
        same = words.copy()
        word_at = out.ctypes.data if way.endswith("in place") else words.ctypes.data
        odd, at = unaligned(where, 1)
        changes = ChangeAddresses(at, word_at, out.ctypes.data)
        kind = WordKind(way == "words", way.startswith("floats"))
        start, keys = rng.integers(0, 2**40, len(rows)), rng.integers(0, 2**64, (len(rows), 2), np.uint64)
        other = stride + rng.integers(0, 3, stride.shape)  # strides in the tensor, which need not be those in memory
        in_tensor = InTensor(start, dims, size, other, keys)
        moved = cpu.changes.exchange(tag, counts, in_memory, in_tensor, changes, kind)
        assert moved == cpu.changes.digest_delta(counts, in_tensor, where, before, bits)
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
    regions = InTensor(start, dims, size, stride, keys)
    moved = cpu.changes.digest_delta(int64(*counts), regions, where, np.concatenate(old), np.concatenate(new))
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
    addresses, alive, expected, of_zeros, set_elements = [], [], [], [], []
    for e, (_, box, strides, _) in enumerate(rows):
        bits = random_bits(rng, int(np.prod(box)), uint)
        bits[rng.random(bits.size) < 0.3] = 0
        set_elements.append(np.count_nonzero(bits))
        at = [reference.locate(p, int(start[e]), tuple(box), tuple(strides)) for p in range(bits.size)]
        first, second = reference.mix(keys[e], np.array(at, np.uint64), bits)
        expected.append((int(first.sum(dtype=np.uint64)), int(second.sum(dtype=np.uint64))))
        first, second = reference.mix(keys[e], np.array(at, np.uint64), np.zeros_like(bits))
        of_zeros.append((int(first.sum(dtype=np.uint64)), int(second.sum(dtype=np.uint64))))
        buffer, address = unaligned(bits, e % 9)
        alive.append(buffer)
        addresses.append(address)
    tag, where = np.empty(0, uint), int64(*addresses)
    in_tensor = InTensor(start, dims, size, stride, keys)
    assert tuple(map(int, cpu.changes.digest_boxes(tag, where, in_tensor))) == add(expected)
    counts = np.empty(len(rows), np.int64)
    both = cpu.changes.digest_boxes_and_zeros(tag, where, in_tensor, counts)
    assert tuple(map(int, both)) == (*add(expected), *add(of_zeros))
    assert counts.tolist() == set_elements
    for e, one in enumerate(expected[-5:], len(rows) - 5):
        it = slice(e, e + 1)
        box = InTensor(start[it], dims[it], size[it], stride[it], keys[it])
        alone = cpu.changes.digest_boxes(tag, where[it], box)
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
            cpu.changes.gather(tag, int64(size), InMemory(int64(address), one, flat, flat), everywhere, after)
            assert (after == other).all()
