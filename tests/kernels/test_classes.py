"""Magnitude classes against their specification: every width, kind, number of thresholds and size of region."""

from __future__ import annotations

import itertools

import numba
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparserl.kernels import cpu, reference
from sparserl.kernels.cpu.arguments import ClassChanges, ClassEnds, ClassStreams, Landing, Magnitudes, Tiled
from tests.effort import each

POISON = 0xA5
WIDTHS = (1, 2, 4, 8)
MAGNITUDES = ("float", "signed", "plain")
STRETCH = 8192

each_width = pytest.mark.parametrize("width", WIDTHS)
each_magnitude = pytest.mark.parametrize("magnitude", MAGNITUDES)
COMMON = {(1, "float"), (2, "float"), (2, "plain"), (4, "float")}  # each other kind is compiled anew
each_kind = each(("width", "magnitude"), itertools.product(WIDTHS, MAGNITUDES), by_day=COMMON)
each_number = each("number", (1, 3, 4, 5, 7), by_day=(3, 7))


def int64(*values):
    return np.array(values, np.int64)


def poisoned(count, dtype):
    out = np.empty(count + 64, dtype)
    out.view(np.uint8)[:] = POISON
    return out


def untouched(buffer, used):
    return bool((buffer[used:].view(np.uint8) == POISON).all())


def seen_as(width, magnitude):
    """The empty array and the bits to keep that tell kernels what a magnitude is."""
    if magnitude == "signed":
        return np.empty(0, f"i{width}"), np.uint64((1 << 8 * width) - 1)
    return np.empty(0, f"u{width}"), np.uint64((1 << (8 * width - (magnitude == "float"))) - 1)


def padded(thresholds):
    """Four or seven limits: zeros in front, as many as are missing."""
    spare = (4 if len(thresholds) <= 4 else 7) - len(thresholds)
    return spare, (np.uint64(0),) * spare + tuple(np.uint64(t) for t in thresholds)


def some_thresholds(rng, width, number):
    """Rising, from 1 to the largest magnitude there is."""
    top = 1 << 8 * width
    if number == 1:
        return [top // 4]
    logs = rng.choice(np.arange(1, 8 * width), number - 2, replace=False) if number - 2 < 8 * width else []
    return sorted({1, top // 2, *(1 << int(log) for log in logs)})[-number:]


def awkward(rng, size, width, thresholds):
    """Any bits, and often those next to a threshold, zeros of both signs, extremes and NaNs."""
    uint, top = np.dtype(f"u{width}"), 1 << (8 * width - 1)
    near = {v % (2 * top) for t in (0, top, 2 * top, *thresholds) for v in (t - 1, t, t + 1)}
    near |= {v ^ top for v in near} | {2 * top - v for v in near if v}
    near |= {0x7C01 << 8 * (width - 2), 0x7FC1 << 8 * (width - 2)} if width > 1 else {0x7F}
    edges = np.array(sorted(near), np.uint64).astype(uint)
    bits = rng.integers(0, 256, size * width, np.uint8).view(uint)
    small = bits & uint.type((1 << (4 * width)) - 1)
    return np.select([rng.random(size) < 0.3, rng.random(size) < 0.5], [rng.choice(edges, size), small], bits)


def some_positions(rng, size, how):
    if not size:
        return np.empty(0, np.uint32)
    share = {"few": 0.02, "half": 0.5, "all": 1.1}.get(how, 0.0)
    where = np.flatnonzero(rng.random(size) < share)
    ends = {"first": [0], "last": [size - 1]}.get(how, where.tolist())
    return np.array(ends, np.uint32)


def placed(bits, offset):
    """A copy that need not be aligned: its owner and its address."""
    buffer = np.full(bits.nbytes + offset + 16, POISON, np.uint8)
    buffer[offset : offset + bits.nbytes] = bits.view(np.uint8)
    return buffer, buffer.ctypes.data + offset


def specified(entries, thresholds, magnitude, tile):
    """Counts by tile and class of all entries, gaps by class, and the class of each change."""
    limits = np.array(thresholds, np.uint64)
    counts, gaps, owner = [], [[] for _ in range(limits.size + 1)], []
    for bits, where in entries:
        sizes = reference.magnitude(bits, magnitude).astype(np.uint64)
        more_counts, more_gaps, more_owner = reference.class_gaps(sizes, where, limits, tile)
        counts += more_counts
        owner += more_owner
        for mine, more in zip(gaps, more_gaps, strict=True):
            mine += more
    return counts, gaps, owner


def run_gaps(view, entries, addresses, limits, log, words):
    """Gaps and words class by class, and counts by tile and class: the same if the regions have new bits."""
    uint = entries[0][0].dtype
    mine = run_gaps_from(view, entries, addresses, limits, log, words, np.empty(0, uint))
    new = [bits.copy() for bits, _ in entries]
    for bits, (_, where) in zip(new, entries, strict=True):
        bits[where] ^= uint.type(0x55)
    old = np.concatenate([bits[where] for bits, where in entries])
    restored = run_gaps_from(view, entries, [bits.ctypes.data for bits in new], limits, log, words, old)
    assert all(np.array_equal(a, b) for a, b in zip(mine, restored, strict=True))
    return mine


def run_gaps_from(view, entries, addresses, limits, log, words, old):
    """Gaps and words class by class, and counts by tile and class; nothing behind them is written."""
    positions = np.concatenate([where for _, where in entries])
    numel, count = int64(*(b.size for b, _ in entries)), int64(*(w.size for _, w in entries))
    tiles, rows = sum(-(-b.size // (1 << log)) for b, _ in entries), len(limits) + 1
    counts = poisoned(tiles * rows, np.uint32)
    gaps, sorted_words = (poisoned(rows * positions.size, t) for t in (np.uint32, words.dtype))
    room = [column[: rows * positions.size].reshape(rows, -1) for column in (gaps, sorted_words)]
    regions = Tiled(int64(*addresses), numel, count, log)
    ends = ClassEnds(counts[: tiles * rows], *(int64(*(row.ctypes.data for row in column)) for column in room))
    cpu.classes.class_gaps(Magnitudes(*view), regions, limits, positions, words, old, ends)
    assert untouched(counts, tiles * rows)
    counts = counts[: tiles * rows].reshape(-1, rows)
    for column, used in ((gaps, room[0]), (sorted_words, room[1])):
        assert untouched(column, rows * positions.size)
        assert all(untouched(row, size) for row, size in zip(used, counts.sum(0), strict=True))
    mine = [[row[:size] for row, size in zip(column, counts.sum(0), strict=True)] for column in room]
    return np.concatenate(mine[0]), np.concatenate(mine[1]), counts


def run_positions(view, entries, addresses, limits, log, counts, gaps, words, land=False, mirrored=False):
    """What the kernel finds, sorted in each entry, or the entry it finds at fault."""
    uint = np.dtype(f"u{view[0].itemsize}")
    numel, count = int64(*(b.size for b, _ in entries)), int64(*(w.size for _, w in entries))
    total = int(count.sum())
    found = poisoned(total, np.uint32), poisoned(total, uint), poisoned(total, uint)
    tallies = counts.sum(0, np.int64)
    at = np.cumsum(tallies) - tallies
    regions = Tiled(int64(*addresses), numel, count, log)
    streams = ClassStreams(counts.astype(np.uint32).ravel(), at, np.append(gaps, np.uint32(0)), words)
    landing = Landing(land, mirrored)
    magnitudes = Magnitudes(*view)
    bad = cpu.classes.class_positions(
        np.empty(0, uint), magnitudes, regions, limits, streams, landing, ClassChanges(*found)
    )
    assert all(untouched(column, total) for column in found)
    if bad >= 0:
        return int(bad)
    order = np.lexsort((found[0][:total], np.repeat(np.arange(count.size), count)))
    return tuple(column[:total][order] for column in found)


def assert_classes(rng, width, magnitude, thresholds, entries, log):
    """Both ways, with old bits at any address."""
    view, (spare, limits) = seen_as(width, magnitude), padded(thresholds)
    held = [placed(bits, i % 5) for i, (bits, _) in enumerate(entries)]
    addresses = [address for _, address in held]
    saved = [buffer.copy() for buffer, _ in held]
    positions = np.concatenate([where for _, where in entries])
    words = rng.integers(0, 256, positions.size * width, np.uint8).view(f"u{width}")
    gaps, sorted_words, counts = run_gaps(view, entries, addresses, limits, log, words)
    expected_counts, expected_gaps, owner = specified(entries, thresholds, magnitude, 1 << log)
    assert not counts[:, :spare].any()
    assert counts[:, spare:].tolist() == expected_counts
    assert gaps.tolist() == [g for mine in expected_gaps for g in mine]
    assert (sorted_words == words[np.argsort(owner, kind="stable")]).all()
    found = run_positions(view, entries, addresses, limits, log, counts, gaps, sorted_words)
    assert (found[0] == positions).all()
    assert (found[1] == words).all()
    assert (found[2] == np.concatenate([bits[where] for bits, where in entries])).all()
    assert all((buffer == was).all() for (buffer, _), was in zip(held, saved, strict=True))
    mirrored = magnitude == "float"
    landed = run_positions(view, entries, addresses, limits, log, counts, gaps, sorted_words, True, mirrored)
    new = reference.advance(found[2], words, mirrored)
    assert all((a == b).all() for a, b in zip(landed, (positions, new, found[2]), strict=True))
    at = 0
    for i, ((buffer, _), was, (bits, where)) in enumerate(zip(held, saved, entries, strict=True)):
        after = bits.copy()
        after[where] = new[at : at + where.size]
        was[i % 5 : i % 5 + after.nbytes] = after.view(np.uint8)
        assert (buffer == was).all()
        at += where.size


HOW = ("none", "few", "half", "all", "first", "last")


@each_number
@each_kind
def test_regions_of_every_size_in_one_call(width, magnitude, number):
    """All sizes up to 300, with few, many, all, no, the first or the last element changed."""
    rng = np.random.default_rng(number)
    thresholds = some_thresholds(rng, width, number)
    entries = []
    for size in range(301):
        bits = awkward(rng, size, width, thresholds)
        entries.append((bits, some_positions(rng, size, HOW[int(rng.integers(6))])))
    assert_classes(rng, width, magnitude, thresholds, entries, 10)


@pytest.mark.parametrize(
    "thresholds", [[0x80], [0x80, 0x3A00, 0x3F80, 0x7F80], [0x100, 0x4000], [0x80, 0x81], [0x80, 0x8000]]
)
@each("magnitude", ["float", "signed", "plain"], long=["signed"])
def test_thresholds_that_a_byte_tells(magnitude, thresholds):
    """Two-byte elements held against thresholds of which only the highest eight bits are set, or not only those."""
    rng = np.random.default_rng(len(thresholds))
    sizes = (0, 1, 63, 64, 65, 1000, STRETCH - 1, STRETCH, STRETCH + 64)
    entries = [(awkward(rng, n, 2, thresholds), some_positions(rng, n, HOW[i % 6])) for i, n in enumerate(sizes)]
    assert_classes(rng, 2, magnitude, thresholds, entries, 12)


@each_kind
def test_regions_around_stretches_and_tiles(width, magnitude):
    """Sizes next to 8192 and its multiples, next to tiles, in tiles from a stretch's eighth to all of it."""
    rng = np.random.default_rng(width)
    sizes = (1023, 1024, 1025, 4096, *(n * STRETCH + d for n in (1, 2) for d in (-64, -1, 0, 1, 65)), 30_001)
    for log, number in ((10, 4), (12, 7), (13, 4), (14, 7), (20, 4), (31, 7)):
        thresholds = some_thresholds(rng, width, number)
        entries = [
            (awkward(rng, size, width, thresholds), some_positions(rng, size, HOW[(i + log) % 6]))
            for i, size in enumerate(sizes)
        ]
        assert_classes(rng, width, magnitude, thresholds, entries, log)


@pytest.mark.long
@each_width
def test_full_stretches_behind_partial_ones(width):
    """What a region that ends early leaves in the grid does not show in the next, nor the other way round."""
    rng = np.random.default_rng(3)
    thresholds = [1, 8, 1 << (4 * width)]
    for first in (1, 63, 64, 65, STRETCH - 65, STRETCH - 64, STRETCH - 63, STRETCH - 1):
        sizes = (first, STRETCH, first, 2 * STRETCH + first)
        entries = [(awkward(rng, n, width, thresholds), some_positions(rng, n, "half")) for n in sizes]
        assert_classes(rng, width, "plain", thresholds, entries, 31)


@pytest.mark.long
@given(
    st.sampled_from(WIDTHS),
    st.sampled_from(MAGNITUDES),
    st.integers(1, 7),
    st.lists(st.integers(0, 9000), min_size=1, max_size=4),
    st.integers(10, 14),
    st.integers(0, 2**32),
)
def test_any_regions(width, magnitude, number, sizes, log, seed):
    """Any sizes and tiles, with thresholds at any magnitudes."""
    rng = np.random.default_rng(seed)
    most = (1 << 8 * width) - 1
    thresholds = sorted({int(x) for x in rng.integers(1, most, number, np.uint64, endpoint=True)})
    entries = [(awkward(rng, n, width, thresholds), some_positions(rng, n, HOW[int(rng.integers(6))])) for n in sizes]
    assert_classes(rng, width, magnitude, thresholds, entries, log)


def test_one_element_of_a_class_anywhere():
    """No lane is blind: a single member, at any place of a stretch, is found from its gap of zero."""
    for size in (1, 64, 65, 200, STRETCH):
        for at in sorted({*range(0, size, 61), *range(min(size, 70)), size - 1}):
            bits = np.full(size, 3, np.uint16)
            bits[at] = 0x8000 | 5
            entries = [(bits, np.array([at], np.uint32))]
            words, args = (
                np.array([9], np.uint16),
                (seen_as(2, "float"), entries, [bits.ctypes.data], padded([5])[1], 13),
            )
            gaps, same, counts = run_gaps(*args, words)
            assert (gaps.tolist(), same.tolist(), counts.tolist()) == ([0], [9], [[0, 0, 0, 0, 1]])
            found = run_positions(*args, counts, gaps, words)
            assert [column.tolist() for column in found] == [[at], [9], [0x8005]]


LIES = {
    "a gap to the end of the tile": ([[2, 1]], [0, 98, 0], 0),
    "a gap past the members of a class": ([[2, 1]], [0, 49, 0], 0),
    "a first gap past the members of a class": ([[2, 1]], [50, 0, 0], 0),
    "the largest gap": ([[2, 1]], [0, 0, 2**32 - 1], 0),
    "a class without members": ([[0, 3]], [48, 0, 0], 0),
    "counts above the entry's": ([[3, 1]], [0, 0, 0, 0], 0),
    "counts below the entry's": ([[1, 1]], [0, 0], 0),
    "no counts": ([[0, 0]], [], 0),
    "counts past any number": ([[2**32 - 1, 2**32 - 1]], [0, 0, 0], 0),
}


@pytest.mark.parametrize("lie", LIES)
def test_what_does_not_fit_its_tile_is_refused(lie):
    """Gaps that leave the members of their class in the tile, and counts that are not the entry's, name the entry."""
    counts, gaps, bad = LIES[lie]
    bits = np.tile(np.array([1, 9], np.uint16), 50)
    counts = np.pad(np.array(counts, np.uint32), ((0, 0), (3, 0)))
    at = np.array([0, 0, 0, 0, min(3, int(counts[0, 3]))], np.int64)
    magnitudes = Magnitudes(*seen_as(2, "plain"))
    found = ClassChanges(poisoned(3, np.uint32), poisoned(3, np.uint16), poisoned(3, np.uint16))
    room = np.zeros(5, np.uint32)
    room[: len(gaps)] = gaps
    regions = Tiled(int64(bits.ctypes.data), int64(100), int64(3), 10)
    limits = padded([5])[1]
    words = np.full(5, 2, np.uint16)
    for land in (False, True):
        streams = ClassStreams(counts.ravel(), at.copy(), room, words)
        landing = Landing(land, True)
        tag = np.empty(0, np.uint16)
        assert cpu.classes.class_positions(tag, magnitudes, regions, limits, streams, landing, found) == bad
        assert all(untouched(column, 3) for column in found)
        assert (bits == np.tile(np.array([1, 9], np.uint16), 50)).all()


def test_a_gap_does_not_reach_into_the_next_tile():
    """Ranks start anew in every tile: members of the next one do not count, though the region has enough of them."""
    bits = np.ones(3000, np.uint8)
    entries = [(bits, np.array([1023, 1024], np.uint32))]
    view, limits, words = seen_as(1, "plain"), padded([5])[1], np.zeros(2, np.uint8)
    counts = np.zeros((3, 5), np.uint32)
    counts[:2, 3] = 1
    args = view, entries, [bits.ctypes.data], limits, 10
    assert run_positions(*args, counts, np.array([1023, 0], np.uint32), words)[0].tolist() == [1023, 1024]
    assert run_positions(*args, counts, np.array([1024, 0], np.uint32), words) == 0
    assert run_positions(*args, counts, np.array([1023, 1024], np.uint32), words) == 0
    assert run_positions(*args, counts[::-1].copy(), np.array([0, 951], np.uint32), words)[0].tolist() == [1024, 2999]
    assert run_positions(*args, counts[::-1].copy(), np.array([0, 952], np.uint32), words) == 0


def test_the_entry_at_fault_is_named():
    """The second entry's counts are wrong, or the third's gap: not the first is blamed."""
    bits = [np.ones(100, np.uint8) for _ in range(3)]
    entries = [(b, np.array([0, 1], np.uint32)) for b in bits]
    view, limits, words = seen_as(1, "plain"), padded([5])[1], np.zeros(6, np.uint8)
    args = view, entries, [b.ctypes.data for b in bits], limits, 10
    counts = np.zeros((3, 5), np.uint32)
    counts[:, 3] = 2
    good = np.zeros(6, np.uint32)
    assert run_positions(*args, counts, good, words)[0].tolist() == [0, 1] * 3
    wrong = counts.copy()
    wrong[1:, 3] = 1, 3
    assert run_positions(*args, wrong, good, words) == 1
    late = good.copy()
    late[5] = 98
    assert run_positions(*args, counts, late, words)[0].tolist()[-1] == 99
    late[5] = 99
    assert run_positions(*args, counts, late, words) == 2


def test_reads_stop_at_the_last_byte(last_page):
    """Old bits may end where readable memory ends."""
    page = last_page.size
    for width in WIDTHS:
        for size in (1, 63, 64, 65, 127, 129, 300, page // width):
            address = last_page.ctypes.data + page - size * width
            bits = np.frombuffer(bytes(last_page[page - size * width :]), f"u{width}")
            view, entries = seen_as(width, "plain"), [(bits, np.array([size - 1], np.uint32))]
            words = np.zeros(1, f"u{width}")
            for number in (4, 7):
                thresholds = [1 << k for k in range(number)]
                args = view, entries, [address], padded(thresholds)[1], 31
                gaps, _, counts = run_gaps(*args, words)
                expected = specified(entries, thresholds, "plain", 1 << 31)
                assert gaps.tolist() == expected[1][expected[2][0]]
                found = run_positions(*args, counts, gaps, words)
                assert (found[0].tolist(), found[2].tolist()) == ([size - 1], [bits[-1]])
            keys = np.zeros(512, np.int64)
            shift = np.uint64(8 * width - 8)
            assert cpu.classes.key_histogram(view[0], int64(address), int64(size), view[1], shift, 1, keys) == size


def keys_of(bits, magnitude, shift):
    return np.minimum(reference.magnitude(bits, magnitude).astype(np.uint64) >> np.uint64(shift), np.uint64(511))


@each_kind
def test_histograms(width, magnitude):
    """Keys are magnitudes without their low bits, at most 511; every block of 64, or one in so many, is counted."""
    rng = np.random.default_rng(5)
    kind, keep = seen_as(width, magnitude)
    regions = [awkward(rng, n, width, [7, 100]) for n in (1, 63, 64, 65, 1000, 0, 4099)]
    numel, address = int64(*(b.size for b in regions)), int64(*(b.ctypes.data for b in regions))
    for shift in (1, 4, 8 * width - 5):
        sizes = [keys_of(bits, magnitude, shift) for bits in regions]
        for every in (1, 2, 7):
            keys = np.zeros(512, np.int64)
            seen = cpu.classes.key_histogram(kind, address, numel, keep, np.uint64(shift), every, keys)
            sampled = [s[np.arange(s.size) // 64 % every == 0] for s in sizes]
            expected = np.bincount(np.concatenate(sampled).astype(np.int64), minlength=512)
            assert (keys == expected).all()
            assert seen == expected.sum()
            where = [np.flatnonzero(rng.random(b.size) < 0.1).astype(np.uint32) for b in regions]
            new = [b[w] ^ b.dtype.type(0x51) for b, w in zip(regions, where, strict=True)]
            for bits, w, others in zip(regions, where, new, strict=True):
                changed = keys_of(others, magnitude, shift)[w // 64 % every == 0].astype(np.int64)
                np.add.at(keys, changed, 1)
                of_old = keys_of(bits[w], magnitude, shift)[w // 64 % every == 0].astype(np.int64)
                np.add.at(keys, of_old, -1)
            old = np.concatenate([b[w] for b, w in zip(regions, where, strict=True)])
            both = np.concatenate(where), np.concatenate(new), old
            cpu.classes.restore_keys(Magnitudes(kind, keep), np.uint64(shift), every, *both, keys)
            assert (keys == expected).all()


def test_the_histogram_of_magnitudes_past_63_bits():
    """They are the largest of all, not negative ones, though no low bit is left out."""
    kind, keep = seen_as(8, "plain")
    bits = np.array([0, 510, 511, 512, 2**63 - 1, 2**64 - 300, 2**64 - 1], np.uint64)
    keys = np.zeros(512, np.int64)
    assert cpu.classes.key_histogram(kind, int64(bits.ctypes.data), int64(7), keep, np.uint64(0), 1, keys) == 7
    assert {int(k): int(keys[k]) for k in np.flatnonzero(keys)} == {0: 1, 510: 1, 511: 5}


@each_kind
def test_the_histogram_of_changes(width, magnitude):
    """Keys of changed elements, told apart by step: one up, one down, one or two more, any other."""
    rng = np.random.default_rng(8)
    kind, keep = seen_as(width, magnitude)
    old = awkward(rng, 500, width, [7, 100])
    steps = rng.integers(0, 12, 500).astype(old.dtype)
    columns = [0 if s == 2 else 1 if s == 1 else 2 if s < 7 else 3 for s in steps.tolist()]
    for shift in (1, 8 * width - 5):
        for every in (1, 3):
            keys, expected = np.zeros((512, 4), np.int64), np.zeros((512, 4), np.int64)
            cpu.classes.change_histogram(kind, keep, np.uint64(shift), every, old, steps, keys)
            np.add.at(expected, (keys_of(old, magnitude, shift)[::every].astype(np.int64), columns[::every]), 1)
            assert (keys == expected).all()


@each_kind
def test_the_largest_magnitude(width, magnitude):
    """Of any elements; of none it is zero."""
    rng = np.random.default_rng(6)
    kind, keep = seen_as(width, magnitude)
    for size in (0, 1, 2, 50):
        for _ in range(20):
            bits = awkward(rng, size, width, [7])
            expected = max(reference.magnitude(bits, magnitude).tolist(), default=0)
            assert int(cpu.classes.largest(kind, keep, bits)) == expected


def test_signed_magnitudes_at_the_edge():
    """The smallest integer has the largest magnitude, which does not fit the signed type but the unsigned one."""
    for width in WIDTHS:
        kind, keep = seen_as(width, "signed")
        bits = np.array([1 << (8 * width - 1)], f"u{width}")
        assert int(cpu.classes.largest(kind, keep, bits)) == 1 << (8 * width - 1)


def test_select_without_the_instruction(monkeypatch):
    """Where the machine cannot deposit bits, a table finds the same bit; so it does where the machine can."""
    rng = np.random.default_rng(7)
    masks = [1, 1 << 63, (1 << 64) - 1, *(int(x) for x in rng.integers(1, 2**64, 60, np.uint64))]
    masks += [m & int(rng.integers(1, 2**64, dtype=np.uint64)) or 1 for m in masks]
    for has in {False, cpu.llvm._HAS_PDEP}:
        monkeypatch.setattr(cpu.llvm, "_HAS_PDEP", has)
        select = cpu.llvm.intrinsic(cpu.llvm.select._defn)
        function = numba.njit(lambda mask, rank, select=select: select(mask, rank))
        for mask in masks:
            places = [i for i in range(64) if mask >> i & 1]
            assert [function(np.uint64(mask), rank) for rank in range(len(places))] == places


def test_a_bit_that_is_not_there_is_still_looked_for_in_the_table(monkeypatch):
    """Weights that someone writes to while a patch is read have other bits than were counted: no place is past 63."""
    monkeypatch.setattr(cpu.llvm, "_HAS_PDEP", False)
    select = cpu.llvm.intrinsic(cpu.llvm.select._defn)
    function = numba.njit(lambda mask, rank, select=select: select(mask, rank))
    places = [function(np.uint64(mask), rank) for mask in range(256) for rank in range(mask.bit_count(), 64)]
    assert min(places) >= 0
    assert max(places) < 64
