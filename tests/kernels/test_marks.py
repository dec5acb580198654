"""The kernels that handle many parts at once, against the specification."""

from __future__ import annotations

import numpy as np
import pytest

from sparserl.kernels import cpu, reference
from sparserl.kernels.cpu.arguments import InTensor


def test_mark_parts():
    """Every part's positions are set in its own words, beside what was set; parts without changes stay as they are."""
    rng = np.random.default_rng(0)
    for offset in (0, 1, 63, 64, 1000):
        numels = [1, 63, 64, 65, 5, 4096, 130]
        first = np.cumsum([0, *(-(-(n + offset) // 64) for n in numels)])
        words = rng.integers(0, 2**64, int(first[-1]) + 1, np.uint64)
        words &= rng.integers(0, 2**64, words.size, np.uint64)
        positions = [
            np.flatnonzero(rng.random(n) < share).astype(np.uint32)
            for n, share in zip(numels, [1, 0.3, 0.3, 1, 0, 0.1, 0.5], strict=True)
        ]
        wanted = reference.mark_parts(words, first[:-1].tolist(), offset, positions)
        counts = np.array([p.size for p in positions])
        cpu.marks.mark_parts(counts, np.concatenate(positions), offset, first[:-1], words)
        assert (words == wanted).all()


@pytest.mark.parametrize("uint", [np.uint8, np.uint16, np.uint32, np.uint64])
def test_digest_deltas(uint):
    """The sums of each entry move by its own changes; all together move as `digest_delta` says."""
    rng = np.random.default_rng(1)
    counts = np.array([1, 15, 16, 17, 0, 300])
    start = rng.integers(0, 2**40, counts.size)
    keys = rng.integers(0, 2**64, (counts.size, 2), np.uint64)
    positions = np.concatenate([np.sort(rng.choice(2**20, n, False)) for n in counts]).astype(np.uint32)
    old, new = (rng.integers(0, np.iinfo(uint).max, positions.size, uint, endpoint=True) for _ in range(2))
    ones, size = np.ones(counts.size, np.int64), np.full((counts.size, 1), 2**20)
    stride = rng.integers(1, 5, (counts.size, 1))
    out = np.full((counts.size, 2), 0xA5A5A5A5A5A5A5A5, np.uint64)
    where = counts, InTensor(start, ones, size, stride, keys), positions, old, new
    cpu.marks.digest_deltas(*where, out)
    ends = np.cumsum(counts)
    for e, (end, n) in enumerate(zip(ends, counts, strict=True)):
        some = slice(end - n, end)
        at = (start[e] + stride[e, 0] * positions[some].astype(np.int64)).astype(np.uint64)
        assert tuple(out[e].tolist()) == reference.digest_delta(keys[e], at, old[some], new[some])
    assert tuple(out.sum(axis=0, dtype=np.uint64)) == cpu.changes.digest_delta(*where)


def test_collect(last_page):
    """Parts of any size, from any address, even at the last byte of memory, and nothing beside them is written."""
    sizes = [1, 0, 7, 64, 1000, 3]
    starts = [0, 5, 9, 100, 2001, last_page.size - 3]
    parts = [last_page[a : a + n] for a, n in zip(starts, sizes, strict=True)]
    out = np.full(sum(sizes) + 20, 0xA5, np.uint8)
    source = np.array(starts) + last_page.ctypes.data
    cpu.marks.collect(source, np.array(sizes), out.ctypes.data + 10)
    assert (out[10:-10] == reference.collect(parts)).all()
    assert (out[:10] == 0xA5).all()
    assert (out[-10:] == 0xA5).all()
