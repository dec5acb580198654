"""Kernels that find changes, and positions in tiles, against their specification, at awkward sizes and addresses."""

from __future__ import annotations

import numpy as np
import pytest

from sparserl.kernels import cpu, reference
from tests.kernels.guarded_buffers import SIZES, each_width, int64, poisoned, random_bits, unaligned, untouched


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
