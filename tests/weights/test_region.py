"""Boxes of a tensor: splitting, merging of dimensions, overlap. Each against the obvious way to do it."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparserl.errors import LimitExceeded, RegionOverlap
from sparserl.weights.region import Region, collapse, first_overlap, refuse_overlap, row_major, whole
from tests.effort import examples

SETTINGS = settings(deadline=None, max_examples=examples(150))
shapes = st.lists(st.integers(1, 6), min_size=0, max_size=4).map(tuple)


@st.composite
def boxes(draw, shape):
    """A box inside a tensor of a shape."""
    start = tuple(draw(st.integers(0, d - 1)) for d in shape)
    size = tuple(draw(st.integers(1, d - a)) for a, d in zip(start, shape, strict=True))
    return Region(start, size)


@st.composite
def tensors_with_boxes(draw, most=1):
    shape = draw(shapes)
    return shape, [draw(boxes(shape)) for _ in range(draw(st.integers(1, most)))]


def positions(region, shape):
    """Flat positions of a box in its tensor, in order."""
    return np.arange(math.prod(shape), dtype=np.int64).reshape(shape)[region.slices].ravel().tolist()


@given(tensors_with_boxes(), st.integers(1, 40))
@SETTINGS
def test_split_is_an_exact_ordered_partition(made, limit):
    """The parts of a box, one after the other, are the box: nothing twice, nothing lost, none above the limit."""
    shape, (region,) = made
    parts = list(region.split(limit))
    assert [p for part in parts for p in positions(part, shape)] == positions(region, shape)
    assert all(1 <= part.numel <= limit for part in parts)
    assert all(part.fits(shape) for part in parts)


@given(tensors_with_boxes(), st.integers(1, 40))
@SETTINGS
def test_split_does_not_crumble(made, limit):
    """Parts are as large as the shape allows: two neighbours in one row of parts do not both fit the limit."""
    _, (region,) = made
    parts = list(region.split(limit))
    if len(parts) > 1:
        assert max(p.numel for p in parts) * 2 > limit or max(p.numel for p in parts) == max(
            math.prod(region.size[d:]) for d in range(1, len(region.size) + 1) if math.prod(region.size[d:]) <= limit
        )


@given(tensors_with_boxes(), st.integers(1, 40))
@SETTINGS
def test_a_piece_of_a_split_is_found_without_the_others(made, limit):
    """Its number, of a position; itself and where it starts, of its number."""
    _, (region,) = made
    at = 0
    for number, part in enumerate(region.split(limit)):
        assert region.piece(limit, number) == (part, at)
        assert set(region.pieces_of(limit, np.arange(at, at + part.numel)).tolist()) == {number}
        at += part.numel


def test_split_of_tensors_past_two_to_the_31():
    """Splitting is arithmetic on whole numbers: sizes past 32 bits cost nothing and lose nothing."""
    region = whole((3, 1 << 33))
    parts = list(region.split(1 << 31))
    assert sum(p.numel for p in parts) == region.numel == 3 << 33
    assert parts[-1] == Region((2, 3 << 31), (1, 1 << 31))
    odd = list(whole(((1 << 40) + 1,)).split(1 << 38))
    assert [p.start[0] for p in odd] == [i << 38 for i in range(5)]
    assert odd[-1].numel == 1


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 5), (2, 0, 3)])
def test_split_of_an_empty_tensor(shape):
    """Nothing to split: at most the empty box itself."""
    assert sum(p.numel for p in whole(shape).split(4)) == 0


@given(tensors_with_boxes(), st.randoms(use_true_random=False))
@SETTINGS
def test_collapse_keeps_every_address(made, random):
    """The merged dimensions name the same elements in the same order, in memory and in the tensor alike."""
    shape, (region,) = made
    order = list(range(len(shape)))
    random.shuffle(order)
    padded = tuple(d + random.randrange(3) for d in shape)
    strides = [0] * len(shape)
    step = 1
    for d in reversed(order):  # a permuted and padded layout
        strides[d] = step * random.choice((1, -1))
        step *= padded[d]
    layouts = (row_major(shape), tuple(strides))
    size, collapsed = collapse(region.size, *layouts)
    assert len(size) <= len(region.size)
    assert math.prod(size) == region.numel
    assert 1 not in size
    for before, after in zip(layouts, collapsed, strict=True):
        expected = [sum(i * s for i, s in zip(at, before, strict=True)) for at in np.ndindex(*region.size)]
        actual = [sum(i * s for i, s in zip(at, after, strict=True)) for at in np.ndindex(*size)]
        assert expected == actual


def test_collapse_makes_a_contiguous_box_one_run():
    """All of a tensor, or some of its rows, is one dimension."""
    assert collapse((4, 5, 6), row_major((4, 5, 6))) == ((120,), ((1,),))
    assert collapse((2, 5, 6), row_major((4, 5, 6))) == ((60,), ((1,),))
    assert collapse((4, 2, 6), row_major((4, 5, 6))) == ((4, 12), ((30, 1),))
    assert collapse((), row_major(())) == ((), ((),))
    assert collapse((1, 1), row_major((4, 5))) == ((), ((),))


@given(tensors_with_boxes(most=8))
@SETTINGS
def test_first_overlap_against_brute_force(made):
    """A pair is found exactly where two boxes share an element, and the pair it names does."""
    shape, regions = made
    sets = [set(positions(r, shape)) for r in regions]
    clash = {(i, j) for i in range(len(sets)) for j in range(len(sets)) if i != j and sets[i] & sets[j]}
    pair = first_overlap(regions)
    assert (pair in clash) if clash else (pair is None)


@given(shapes.filter(lambda s: math.prod(s) > 1), st.integers(1, 20))
@SETTINGS
def test_parts_of_a_split_do_not_overlap(shape, limit):
    """What splitting makes is disjoint; any part given twice is not."""
    parts = list(whole(shape).split(limit))
    assert first_overlap(parts) is None
    pair = first_overlap([*parts, parts[0]])
    assert pair is not None
    assert sorted(pair) == [0, len(parts)]


def test_first_overlap_far_out():
    """Coordinates past 32 bits are compared as they are."""
    far = 1 << 40
    assert first_overlap([Region((far,), (5,)), Region((far + 5,), (5,))]) is None
    assert first_overlap([Region((far,), (6,)), Region((far + 5,), (5,))]) == (0, 1)


def rods(many):
    """Rods along three axes that pass one another: no cut parts them, whatever the dimension."""
    out, length = [], 2 * many
    for a in range(0, length, 2):
        for b in range(0, length, 2):
            out.append(Region((0, a, b + 1), (length, 1, 1)))
            out.append(Region((a + 1, 0, b), (1, length, 1)))
            out.append(Region((a, b + 1, 0), (1, 1, length)))
    return out


def test_regions_that_no_cut_parts_are_compared():
    """Boxes around one another are told apart, and one that crosses another is found."""
    assert first_overlap(rods(5)) is None
    pair = first_overlap([*rods(5), Region((3, 3, 3), (1, 2, 1))])
    assert pair is not None
    assert 75 in pair


def test_regions_too_entangled_to_compare_are_refused():
    """The work is bounded: more pairs than that are an error, not an hour."""
    with pytest.raises(LimitExceeded, match="10800 regions"):
        first_overlap(rods(60))


def test_a_grid_is_never_too_entangled():
    """What sharding makes falls apart by straight cuts, as many as there are: nothing is refused."""
    grid = [Region((i, 0, j), (1, 4, 1)) for j in range(256) for i in range(256)]
    assert first_overlap(grid) is None
    assert first_overlap([*grid, grid[777]]) is not None


def test_refusal_names_the_tensor_and_both_regions():
    """The error says whose regions clash, and which."""
    regions = [Region((0, 0), (2, 4)), Region((2, 0), (2, 4)), Region((1, 3), (2, 1))]
    with pytest.raises(RegionOverlap, match=r"'layer\.w'.*\[0:2, 0:4\].*\[1:3, 3:4\]"):
        refuse_overlap("layer.w", regions)
    refuse_overlap("layer.w", regions[:2])


@pytest.mark.parametrize(
    ("region", "shape", "fits"),
    [
        (Region((), ()), (), True),
        (Region((0,), (4,)), (4,), True),
        (Region((1,), (4,)), (4,), False),
        (Region((-1,), (2,)), (4,), False),
        (Region((0,), (0,)), (4,), False),
        (Region((0, 0), (1, 4)), (4,), False),
        (Region((2, 1), (1, 3)), (3, 4), True),
        (Region((2, 1), (2, 3)), (3, 4), False),
    ],
)
def test_fits(region, shape, fits):
    """A region lies inside its tensor, has its rank, and is not empty."""
    assert region.fits(shape) is fits


def test_a_region_has_one_rank():
    """Start and size have as many dimensions as each other."""
    with pytest.raises(ValueError, match="dimensions"):
        Region((0, 0), (1,))
