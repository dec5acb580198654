"""Patches and anchors that are cut along the parts of receivers: every bucket is for the same ones, and decodable."""

from __future__ import annotations

import numpy as np
import pytest

import sparserl
from sparserl import Part, Region, Shards
from sparserl.patch import Patch, capture
from sparserl.patch.snapshot import restore, snapshot
from sparserl.plan import buckets
from sparserl.session.anchors import zeros
from sparserl.weights.dtypes import BY_NAME, Bits
from sparserl.weights.holdings import Holdings
from sparserl.weights.tensors import memories, table_of
from tests.class_choice import always

BF16 = BY_NAME["bfloat16"]
SHAPES = {"rows": (40, 30), "columns": (30, 40), "both": (64, 64), "norm": (50,), "scale": ()}


def two_versions(seed=0):
    rng = np.random.default_rng(seed)
    old = {name: rng.integers(0, 2**15, shape, np.uint16) for name, shape in SHAPES.items()}
    new = {name: bits + (rng.random(bits.shape) < 0.2).astype(np.uint16) for name, bits in old.items()}
    return [{name: Bits(np.array(bits, np.uint16), BF16) for name, bits in weights.items()} for weights in (old, new)]


def two_ranks(weights):
    """Each has half of the rows of one tensor, half of the columns of another, a quarter of a third, and the rest."""
    table = table_of(memories(weights))
    number = table.index
    places = {}
    for rank, name in enumerate("xy"):
        places[name] = [
            (number["rows"], Region((20 * rank, 0), (20, 30))),
            (number["columns"], Region((0, 20 * rank), (30, 20))),
            (number["both"], Region((32 * rank, 32 * rank), (32, 32))),
            (number["norm"], None),
            (number["scale"], None),
        ]
    return Holdings(table, places)


def require_cut(patch, holdings):
    """Every bucket is in the same holdings as each of its entries, and in none of them partly."""
    masks = set()
    for head in patch.contents.heads:
        touched = {holdings.touched([place]) for place in head.entries.places()}
        assert len(touched) == 1
        (only,) = touched
        assert not only.partly
        masks.add(only.holdings)
    assert masks == {0b00, 0b01, 0b10, 0b11}


@pytest.mark.parametrize("profile", ["ctx", "ulp", "gap", "raw", "auto"])
@pytest.mark.parametrize("timed", [False, True])
def test_patches(profile, timed, monkeypatch):
    """They say the same as those that are not cut."""
    monkeypatch.setattr(buckets, "choose_classes", always)
    old, new = two_versions()
    holdings = two_ranks(old)
    captured = capture(old, new, profile=profile, holdings=holdings, timed=iter if timed else None)
    patch = captured.encode()
    require_cut(patch, holdings)
    plain = sparserl.diff(old, new, profile=profile)
    assert (patch.base, patch.result, patch.changed) == (plain.base, plain.result, plain.changed)
    assert Patch.from_bytes(patch.to_bytes()).apply(old).changed == plain.changed
    assert sparserl.digest(old) == sparserl.digest(new)
    back = captured.back()()
    assert (back.base, back.result) == (patch.result, patch.base)


def test_patches_of_shards():
    """A writer cuts its own shards, whatever their borders are."""
    old, new = two_versions()
    holdings = two_ranks(old)
    table = table_of(memories(old))
    regions = {name: Region((0,) * len(shape), (shape[0] // 3, *shape[1:])) for name, shape in SHAPES.items() if shape}
    sides = [
        Shards(table, [Part(name, box, Bits(w[name].array[box.slices], BF16)) for name, box in regions.items()])
        for w in (old, new)
    ]
    patch = capture(*sides, profile="ctx", holdings=holdings).encode()
    plain = sparserl.diff(*sides)
    assert (patch.base, patch.result, patch.changed) == (plain.base, plain.result, plain.changed)
    for head in patch.contents.heads:
        touched = holdings.touched(head.entries.places())
        assert not touched.partly


@pytest.mark.parametrize("coded", [True, False])
def test_anchors(coded):
    _, new = two_versions()
    holdings = two_ranks(new)
    anchor = snapshot(new, coded=coded, holdings=holdings)
    require_cut(Patch(anchor), holdings)
    weights = zeros(anchor.table)
    restore(anchor, weights)
    assert sparserl.digest(weights) == sparserl.digest(new)
