"""Bitmaps against the specification."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from sparserl.kernels import reference
from sparserl.weights.marks import Bitmap


@given(st.data(), st.integers(1, 400))
def test_marks(data, numel):
    """What was marked, in any order and as often as you like, is what is found, from any element to any other."""
    positions = st.lists(st.integers(0, numel - 1), max_size=50)
    first, second = (np.array(data.draw(positions), np.uint32) for _ in range(2))
    bitmap, other = Bitmap(numel), Bitmap(numel)
    bitmap.add(first)
    assert (bitmap.words == reference.mark(np.zeros_like(bitmap.words), first)).all()
    offset = data.draw(st.integers(0, numel - 1))
    other.add(second[second < numel - offset], offset)
    bitmap.unite(other)
    wanted = sorted({*first.tolist(), *(second[second < numel - offset] + offset).tolist()})
    assert bitmap.count == len(wanted)
    low = data.draw(st.integers(0, numel))
    high = data.draw(st.integers(low, numel))
    found = bitmap.between(low, high)
    assert found.tolist() == reference.list_marks(bitmap.words, low, high).tolist()
    assert (found + low).tolist() == [p for p in wanted if low <= p < high]
    taken = bitmap.take()
    assert (taken.count, bitmap.count) == (len(wanted), 0)
    bitmap.fill()
    assert bitmap.between(0, numel).tolist() == list(range(numel))
