"""Cutting weights along the parts that receivers have."""

from __future__ import annotations

import itertools
import time
from hashlib import sha256

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparserl.weights import holdings as holdings_module
from sparserl.weights.holdings import MOST_HOLDINGS, MOST_NAMES, Holdings, Touched, number_of
from sparserl.weights.region import Region, intersection, whole
from sparserl.weights.tensors import memories, table_of
from tests.effort import examples

SHAPES = {"a": (4, 6), "b": (5,), "c": (2, 3, 4), "d": ()}


def table():
    return table_of(memories({name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}))


@st.composite
def holdings(draw):
    """Receivers with some boxes of some tensors."""
    lists = {}
    for name in "xyz"[: draw(st.integers(1, 3))]:
        places = []
        for tensor, shape in enumerate(SHAPES.values()):
            spans = [draw(st.tuples(st.integers(0, n - 1), st.integers(1, n))) for n in shape]
            size = tuple(min(size, n - start) for (start, size), n in zip(spans, shape, strict=True))
            kind = draw(st.sampled_from(["none", "whole", "box"]))
            if kind == "box" and shape:
                places.append((tensor, Region(tuple(start for start, _ in spans), size)))
            elif kind != "none":
                places.append((tensor, None))
        lists[name] = places
    return lists


@settings(max_examples=examples(100), deadline=None)
@given(holdings())
def test_cells(lists):
    """They are all of the weights, once; a receiver has all of a cell, or nothing; groups are for the same ones."""
    weights = table()
    cut = Holdings(weights, lists)
    groups = cut.cells(weights.places)
    for tensor, spec in enumerate(weights.specs):
        boxes = [region or whole(spec.shape) for cells in groups for number, region in cells if number == tensor]
        assert sum(box.numel for box in boxes) == spec.numel
        assert not any(intersection(a, b) for a, b in itertools.combinations(boxes, 2) if spec.shape)
    seen = set()
    for cells in groups:
        touched = {cut.touched([cell]) for cell in cells}
        assert len(touched) == 1
        (only,) = touched
        assert not only.partly
        assert only.holdings not in seen
        seen.add(only.holdings)
        for number, places in enumerate(lists.values()):
            for tensor, region in cells:
                box = region or whole(weights.specs[tensor].shape)
                owns = any(t == tensor and box.inside(r or whole(weights.specs[t].shape)) for t, r in places)
                assert owns == bool(only.holdings >> number & 1)


def test_whole_tensors_stay_whole():
    """What nobody has a part of is not cut."""
    weights = table()
    lists = {"x": [(0, None)], "y": [(1, None), (2, None)]}
    assert Holdings(weights, lists).cells(weights.places) == [[(3, None)], [(0, None)], [(1, None), (2, None)]]


def test_columns_and_what_a_place_touches():
    """A place that goes across a border is partly in the holdings on both sides."""
    weights = table()
    left, right = Region((0, 0), (4, 3)), Region((0, 3), (4, 3))
    cut = Holdings(weights, {"x": [(0, left)], "y": [(0, right)]})
    assert cut.cells([(0, None)]) == [[(0, left)], [(0, right)]]
    assert cut.touched([(0, None)]) == Touched(0b11, 0b11)
    assert cut.touched([(0, Region((1, 0), (1, 2)))]) == Touched(0b01, 0)
    assert cut.touched([(0, left), (0, right)]) == Touched(0b11, 0)
    assert cut.touched([(1, None)]) == Touched(0, 0)


@pytest.mark.parametrize("count", [1, 63, 64, 65, 100, 127, 128])
def test_many_receivers(count):
    """Each finds a name that stands for its cells, and for those of at most one other; a stranger finds none."""
    rows = table_of(memories({"w": np.zeros((MOST_HOLDINGS, 2), np.float32)}))
    every = [sha256(bytes([i])).hexdigest()[:16] for i in range(MOST_HOLDINGS)]
    lists = {name: [(0, Region((i, 0), (1, 2)))] for i, name in enumerate(sorted(every)[:count])}
    cut = Holdings(rows, lists)
    assert len(cut.names) == min(count, MOST_NAMES)
    assert cut.are_cut == (count <= MOST_NAMES)
    groups = cut.cells(rows.places)
    for name, places in lists.items():
        bit = 1 << number_of(name, cut.names)
        mine = [cells for cells in groups if cut.touched(cells).holdings & bit]
        assert places[0] in mine[0]
        assert len(mine) == 1
        assert len(mine[0]) == 1 + (count > MOST_NAMES and mine[0][-1] != mine[0][0])
    assert sum(map(len, groups)) == count + (count < MOST_HOLDINGS)
    assert {number_of(name, cut.names) for name in every[count:] if name not in lists} <= {None}
    assert number_of(None, cut.names) is None


def test_two_receivers_with_one_name():
    """A cell that one of them has all of, and the other a part, is partly in what the name stands for."""
    names = [f"{i:08x}" * 2 for i in range(MOST_NAMES + 1)]
    lists = dict.fromkeys(names, ()) | {names[0]: [(1, None)], names[MOST_NAMES]: [(1, Region((1,), (1,)))]}
    cut = Holdings(table(), lists)
    assert cut.touched([(1, None)]) == Touched(1, 1)
    assert cut.touched([(1, Region((1,), (1,)))]) == Touched(1, 0)


@pytest.mark.parametrize("most", [1, 4])
def test_too_many_cells(monkeypatch, most):
    """A place that would be cut into very many stays as it is: receivers slice it."""
    monkeypatch.setattr(holdings_module, "_MOST_CELLS", most)
    weights = table()
    lists = {str(i): [(1, Region((i,), (1,)))] for i in range(5)}
    cut = Holdings(weights, lists)
    assert cut.cells([(1, None)]) == [[(1, None)]]
    assert not cut.are_cut


def test_too_many_groups(monkeypatch):
    """Nor are buckets made for very many different receivers."""
    weights = table()
    lists = {str(i): [(1, Region((i,), (1,)))] for i in range(5)}
    assert len(Holdings(weights, lists).cells([(1, None)])) == 5
    monkeypatch.setattr(holdings_module, "_SPARE_GROUPS", -6)
    cut = Holdings(weights, lists)
    assert cut.cells([(1, None)]) == [[(1, None)]]
    assert not cut.are_cut


def test_many_boxes_take_little_time():
    """However many there are: a tensor of which receivers have very many boxes is not cut."""
    big = table_of(memories({"w": np.zeros((4096, 4), np.float32)}))
    lists = {"x": [(0, Region((i, 0), (1, 4))) for i in range(4096)]}
    begun = time.process_time()
    cut = Holdings(big, lists)
    assert cut.cells(big.places) == [[(0, None)]]
    assert time.process_time() - begun < 2
