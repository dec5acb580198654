"""All weights replaced by others, with and without memory for the old ones."""

from __future__ import annotations

import numpy as np
import pytest

from sparserl.patch import Replacement, replacement
from sparserl.weights.local import LocalWeights

SHAPES = {"matrix": (300, 40), "vector": (17,), "number": (), "none": (0, 4)}


@pytest.fixture(params=[False, True], ids=["copy", "exchange"])
def exchange(request, monkeypatch):
    monkeypatch.setattr(replacement, "_PIECE_BYTES", 4096)  # so that the matrix is written in pieces
    return request.param


def some_weights(seed):
    rng = np.random.default_rng(seed)
    return {name: rng.random(shape).astype(np.float32).reshape(shape) for name, shape in SHAPES.items()}


def same(weights, others):
    return all((weights[name] == others[name]).all() for name in SHAPES)


def test_all_bits_are_written_and_taken_back(exchange):
    weights, before, fresh, after = some_weights(1), some_weights(1), some_weights(2), some_weights(2)
    staged = Replacement.of(LocalWeights.of(weights), LocalWeights.of(fresh), exchange=exchange)
    undo = staged.commit(threads=2)
    assert same(weights, after)
    assert same(fresh, before if exchange else after)
    undo()
    assert same(weights, before)
    undo()
    assert same(weights, before)


@pytest.mark.parametrize("failing", range(6))
def test_a_commit_that_fails_takes_back_what_it_wrote(exchange, monkeypatch, failing):
    """Whichever piece fails, on the way there or while old bits are put aside."""
    weights, before, fresh = some_weights(1), some_weights(1), some_weights(2)
    write_regions = replacement.write_regions
    written = 0

    def write(local, regions):
        nonlocal written
        written += 1
        if written == failing + 1:
            raise OSError("no more")
        write_regions(local, regions)

    staged = Replacement.of(LocalWeights.of(weights), LocalWeights.of(fresh), exchange=exchange)
    monkeypatch.setattr(replacement, "write_regions", write)
    with pytest.raises(OSError, match="no more"):
        staged.commit(threads=1)
    assert same(weights, before)
