"""Where a staged patch will change weights: the positions at which two versions differ, and no others."""

from __future__ import annotations

import numpy as np
import pytest

import sparserl
from sparserl.patch import stage_all

SHAPES = {"matrix": (40, 30), "row": (700,), "scalar": (), "other": (9, 9)}


def versions(share: float) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Weights, and the same after some elements have changed; one tensor stays what it is."""
    rng = np.random.default_rng(5)
    old = {name: np.asarray(rng.integers(0, 2**16, shape), np.uint16) for name, shape in SHAPES.items()}
    new = {name: array.copy() for name, array in old.items()}
    for name in ("matrix", "row", "scalar"):
        flat = new[name].reshape(-1)
        chosen = rng.random(flat.size) < share
        chosen[0] = True
        flat[chosen] ^= 1 + rng.integers(0, 100, chosen.sum()).astype(np.uint16)
    return old, new


@pytest.mark.parametrize("share", [0.02, 0.9])
@pytest.mark.parametrize("profile", ["raw", "gap", "ulp", "ctx"])
def test_positions_of_a_staged_patch(profile, share):
    """Sparse entries and dense ones, which also have elements that stay."""
    old, new = versions(share)
    patch = sparserl.diff(old, new, profile=profile)
    positions = stage_all(patch.contents, old).changed_positions()
    found = {name: np.sort(np.concatenate(parts)).tolist() for name, parts in positions.items()}
    wanted = {name: np.flatnonzero(old[name].reshape(-1) != new[name].reshape(-1)).tolist() for name in SHAPES}
    assert {name: at for name, at in wanted.items() if at} == found


def test_positions_in_shards():
    """They count in the whole tensor, not in the region that a rank has."""
    old, new = versions(0.1)
    table = sparserl.tensor_table(old)
    region = sparserl.Region((10, 5), (20, 11))

    def shards(weights):
        return sparserl.Shards(table, [sparserl.Part("matrix", region, weights["matrix"][region.slices].copy())])

    patch = sparserl.diff(shards(old), shards(new))
    positions = stage_all(patch.contents, shards(old)).changed_positions()
    inside = np.zeros((40, 30), bool)
    inside[region.slices] = True
    wanted = np.flatnonzero((old["matrix"] != new["matrix"]) & inside)
    assert wanted.tolist() == np.sort(np.concatenate(positions["matrix"])).tolist()
