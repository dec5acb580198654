"""Tensors whose positions do not fit 32 bits."""

from __future__ import annotations

import sys

import numpy as np
import pytest

import sparserl
from sparserl import Digest, Region, TensorSpec, TensorTable
from sparserl.errors import WrongBase
from sparserl.kernels import reference
from sparserl.patch.decode import flatten
from sparserl.weights.dtypes import BY_NAME, Bits
from tests.boxed_shards import diff_shards
from tests.class_choice import always


@pytest.fixture(autouse=True)
def classes(monkeypatch):
    """Small data, too, is told apart by magnitude where `ctx` is asked for."""
    monkeypatch.setattr("sparserl.plan.buckets.choose_classes", always)


# Tensors past 2^31 elements, of which only the touched pages exist.


@pytest.mark.parametrize("profile", ["auto", "raw"])
def test_a_tensor_past_two_to_the_31_elements(profile):
    """Compared in full: changes on both sides of 2^31, and in the last element, land where they belong."""
    shape = (5, 1 << 29)
    old, new = np.zeros(shape, np.uint8), np.zeros(shape, np.uint8)
    where = [0, 2**31 - 1, 2**31, 2**31 + 1, new.size - 1]
    new.reshape(-1)[where] = [1, 2, 3, 4, 5]
    patch = sparserl.diff({"w": old}, {"w": new}, profile=profile, base_digest=Digest(7, 7))
    assert patch.changed == 5
    patch.apply({"w": old}, digest=Digest(7, 7))
    assert old.reshape(-1)[where].tolist() == [1, 2, 3, 4, 5]
    assert [int(row[1:-1].any()) for row in (old[1], old[2])] == [0, 0]
    key = patch.table.keys[0]
    moved = Digest(7, 7)
    for at, value in zip(where, (1, 2, 3, 4, 5), strict=True):
        for bits, sign in ((value, 1), (0, -1)):
            one = Digest(*reference.digest(key, at, np.array([bits], np.uint8)))
            moved = moved + one if sign > 0 else moved - one
    assert patch.result == moved


@pytest.mark.parametrize("dtype", ["uint8", "bfloat16"])
def test_positions_past_two_to_the_32_on_disk(dtype, tmp_path):
    """A file of more than 2^32 elements, almost all of it holes: changes are found, applied, squashed, undone."""
    dtype = BY_NAME[dtype]
    size = (1 << 32) + 100_000
    where = np.array([1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**32 + 77_777, size - 1])

    def sparse_file(name, values):
        path = tmp_path / name
        with path.open("wb") as file:
            file.truncate(size * dtype.width)
        array = np.memmap(path, dtype.uint, "r+", shape=(2, size // 2))
        array.reshape(-1)[where] = values
        return path, array

    _, first = sparse_file("first", np.arange(7))
    _, second = sparse_file("second", np.arange(7) + 1)
    _, third = sparse_file("third", np.arange(7) * 5)
    target_path, target = sparse_file("target", np.arange(7))
    chain, base = [], Digest(3, 4)
    for old, new in ((first, second), (second, third)):
        known = {"w": np.concatenate([where, [5, 2**32 + 1]])}
        patch = sparserl.diff(
            {"w": Bits(old, dtype)}, {"w": Bits(new, dtype)}, positions=known, base_digest=base, profile="ulp"
        )
        chain.append(patch)
        base = patch.result
    weights = {"w": Bits(target, dtype)}
    chain[0].apply(weights, digest=chain[0].base)
    assert target.reshape(-1)[where].tolist() == list(range(1, 8))
    chain[0].invert().apply(weights, digest=chain[0].result)
    assert target.reshape(-1)[where].tolist() == list(range(7))
    sparserl.squash(*chain).apply(weights, digest=chain[0].base)
    assert target.reshape(-1)[where].tolist() == [5 * i for i in range(7)]
    assert target.reshape(-1)[[0, 2, 2**31 + 1, 2**32 + 1, size - 2]].tolist() == [0] * 5
    target.flush()
    assert target_path.stat().st_blocks * 512 < 1 << 20


def test_a_shard_of_a_tensor_of_two_to_the_44_elements():
    """Index arithmetic alone: a box far out in a tensor that no one holds is coded, decoded and summed right."""
    shape = (1 << 20, 1 << 24)
    table = TensorTable([TensorSpec("w", BY_NAME["uint16"], shape)])
    region = Region((1 << 19, (1 << 23) + 5), (3, 100))
    old, new = np.zeros(region.size, np.uint16), np.zeros(region.size, np.uint16)
    new[[0, 1, 2, 2], [0, 50, 3, 99]] = [1, 2, 3, 4]
    patch = diff_shards({"w": old}, {"w": new}, table=table, regions={"w": region}, profile="gap")
    assert [(e.region, e.changed) for e in patch] == [(region, 4)]
    decoded = patch.contents.decode(0)
    flat = flatten(table, decoded.sparse_places[0], decoded.positions)
    expected = [(region.start[0] + r) * shape[1] + region.start[1] + c for r, c in ((0, 0), (1, 50), (2, 3), (2, 99))]
    assert flat.tolist() == expected
    assert min(expected) > 2**42
    sums = Digest()
    for r, c in np.ndindex(*region.size):
        at = (region.start[0] + r) * shape[1] + region.start[1] + c
        sums += Digest(*reference.digest(table.keys[0], at, new[r : r + 1, c]))
    assert patch.result == sums


@pytest.mark.parametrize("profile", ["raw", "gap", "ulp", "ctx"])
@pytest.mark.parametrize("keep", [0, 3000, 1 << 30])
def test_what_is_not_kept_is_decoded_again(monkeypatch, profile, keep):
    """However few decoded changes may be held, the result is the same; a refused patch still touches nothing."""
    monkeypatch.setattr("sparserl.patch.apply.KEEP_BYTES", keep)
    for module in ("routing", "buckets"):
        monkeypatch.setattr(sys.modules[f"sparserl.plan.{module}"], "BUCKET_CHANGES", 100)
    rng = np.random.default_rng(11)
    old = {"a": rng.standard_normal(4000).astype(np.float32), "b": rng.standard_normal((30, 40)).astype(np.float16)}
    new = {name: np.where(rng.random(w.shape) < 0.2, w * w.dtype.type(1.25), w) for name, w in old.items()}
    patch = sparserl.diff(old, new, profile=profile)
    assert patch.buckets > 5
    weights = {name: w.copy() for name, w in old.items()}
    assert patch.apply(weights).changed == patch.changed
    for name, w in new.items():
        assert weights[name].tobytes() == w.tobytes()
    before = {name: w.copy() for name, w in old.items()}
    before["a"][0] += 1
    data = {name: w.tobytes() for name, w in before.items()}
    with pytest.raises(WrongBase):
        patch.apply(before)
    assert data == {name: w.tobytes() for name, w in before.items()}
