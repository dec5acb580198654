"""Regions as columns of numbers say the same as regions."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from sparserl.weights.boxes import Boxes, Places, boxes, corners, elements, ends, select
from sparserl.weights.dtypes import BY_NAME
from sparserl.weights.geometry import Geometry, tensor_geometry
from sparserl.weights.region import Region, whole
from sparserl.weights.table import TensorSpec, TensorTable
from tests.weights.test_region import boxes as boxes_inside
from tests.weights.test_region import shapes


@st.composite
def places(draw):
    """A table, and regions of its tensors, in order of the tensors."""
    every = draw(st.lists(shapes, min_size=1, max_size=4))
    table = TensorTable([TensorSpec(f"t{i}", BY_NAME["int8"], shape) for i, shape in enumerate(every)])
    tensor = sorted(draw(st.lists(st.integers(0, len(every) - 1), min_size=1, max_size=8)))
    regions = [draw(st.none() | boxes_inside(table[t].shape)) for t in tensor]
    proper = [None if r == whole(table[t].shape) else r for t, r in zip(tensor, regions, strict=True)]
    return table, np.array(tensor, np.int64), proper


@given(places())
def test_boxes_are_the_regions_they_are_made_of(made):
    """One by one, in a row, in part, and as numbers to be written down."""
    table, tensor, regions = made
    many = boxes(table, tensor, [regions[:2], regions[2:]])
    assert list(many) == regions
    assert [many[i] for i in range(len(many))] == regions
    assert list(many[1:]) == regions[1:]
    odd = np.arange(len(regions)) % 2 == 1
    assert list(select(many, odd)) == select(regions, odd) == regions[1::2]
    assert list(select(many, np.flatnonzero(odd))) == regions[1::2]
    assert many.numbers.tolist() == [n for r in regions if r is not None for n in (*r.start, *r.size)]
    assert list(Places(many)) == [*zip(tensor.tolist(), regions, strict=True)]


@given(places())
def test_positions_and_corners_are_those_of_the_regions(made):
    """The first and the last element, how many there are, and where they start and stop in dimensions that matter."""
    table, tensor, regions = made
    whole_ones = [r or whole(table[t].shape) for t, r in zip(tensor.tolist(), regions, strict=True)]
    first, last = ends(table, tensor, regions)
    for other in ends(table, tensor, boxes(table, tensor, [regions])), (first, last):
        assert np.array_equal(other, (first, last))
    assert elements(table, tensor, first, last).tolist() == [r.numel for r in whole_ones]
    for i, (t, region) in enumerate(zip(tensor.tolist(), whole_ones, strict=True)):
        flat = np.arange(table[t].numel).reshape(table[t].shape)[region.slices]
        assert (first[i], last[i]) == (flat.min(), flat.max())
        start, stop = corners(table, tensor[i : i + 1], first[i : i + 1], last[i : i + 1])
        kept = [d for d, size in enumerate(table[t].shape) if size != 1]
        assert start[:, 0].tolist() == [region.start[d] for d in kept]
        assert stop[:, 0].tolist() == [region.start[d] + region.size[d] for d in kept]


def located(g: Geometry, e: int, numel: int) -> list[int]:
    sizes, strides = g.size[e, : g.dims[e]].tolist(), g.tensor_strides[e, : g.dims[e]].tolist()
    return [g.start[e] + sum(i * s for i, s in zip(at, strides, strict=True)) for at in np.ndindex(*sizes)][:numel]


@given(places())
def test_elements_of_boxes_lie_where_those_of_regions_do(made):
    """The geometry of many boxes at once leads to the same elements in the same order."""
    table, tensor, regions = made
    one_by_one, together = (
        tensor_geometry(table, tensor, regions),
        tensor_geometry(table, tensor, boxes(table, tensor, [regions])),
    )
    for e, (t, region) in enumerate(zip(tensor.tolist(), regions, strict=True)):
        numel = (region or whole(table[t].shape)).numel
        assert located(one_by_one, e, numel) == located(together, e, numel)


def test_boxes_far_out():
    """Positions past 32 bits."""
    table = TensorTable([TensorSpec("w", BY_NAME["int8"], (1 << 20, 1 << 28))])
    region = Region(((1 << 20) - 3, (1 << 28) - 5), (2, 4))
    many = boxes(table, np.zeros(1, np.int64), [[region]])
    assert isinstance(many, Boxes)
    assert list(many) == [region]
