"""Parts of several ranks: together they are the whole, once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import sparserl
from sparserl.errors import RegionOverlap, TensorMismatch
from sparserl.weights.region import Region, whole
from sparserl.weights.shards import require_whole

SHAPES = {"a": (7, 5), "b": (), "c": (0, 3), "d": (4,)}
TABLE = sparserl.tensor_table({name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()})


def ranks(cut):
    """Three ranks: the first two share rows of one tensor, the last has everything else."""
    a = TABLE.index["a"]
    rest = [(i, None) for i in range(len(TABLE)) if i != a]
    return [[(a, Region((0, 0), (cut, 5)))], [(a, Region((cut, 0), (7 - cut, 5)))], rest]


@given(st.integers(1, 6), st.data())
def test_every_element_just_once(cut, data):
    """What all have between them passes; one part too many, or one missing, is refused with the tensor's name."""
    every = ranks(cut)
    require_whole(TABLE, every)
    rank = data.draw(st.integers(0, 2))
    part = data.draw(st.integers(0, len(every[rank]) - 1))
    tensor, region = every[rank][part]
    spec = TABLE.specs[tensor]
    fewer = [[p for j, p in enumerate(places) if (i, j) != (rank, part)] for i, places in enumerate(every)]
    with pytest.raises(TensorMismatch, match=f"no rank has .* of {spec.name!r}"):
        require_whole(TABLE, fewer)
    if spec.numel:
        more = [*every, [(tensor, region or whole(spec.shape))]]
        with pytest.raises(RegionOverlap, match=repr(spec.name)):
            require_whole(TABLE, more)
