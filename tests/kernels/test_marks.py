"""The kernels that handle many parts at once, against the specification."""

from __future__ import annotations

import numpy as np
import pytest

from sparserl.kernels import cpu, reference
from sparserl.kernels.cpu.arguments import InTensor


def test_merge_old():
    """Lists of positions become one, in order; of an element in both, the old bits of the first count."""
    rng = np.random.default_rng(0)
    for sizes in ((0, 0), (0, 9), (9, 0), (50, 60), (1, 300)):
        lists = []
        for size in sizes:
            positions = np.sort(rng.choice(400, size, replace=False)).astype(np.uint32)
            lists.append((positions, rng.integers(0, 2**16, size, np.uint16)))
        first, then = (dict(zip(positions.tolist(), bits.tolist(), strict=True)) for positions, bits in lists)
        positions = np.full(sum(sizes), 0xA5A5, np.uint32)
        bits = np.full(sum(sizes), 0xA5A5, np.uint16)
        count = cpu.marks.merge_old(*lists[0], *lists[1], positions, bits)
        merged = dict(zip(positions[:count].tolist(), bits[:count].tolist(), strict=True))
        assert [*merged.items()] == [*reference.merge_old(first, then).items()]


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
