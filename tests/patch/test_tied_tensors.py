"""Tensors that share memory are patched once; tables that do not match are refused by name."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import sparserl
from sparserl import Region
from sparserl.errors import TensorMismatch, TiedConflict
from tests.boxed_shards import diff_shards
from tests.class_choice import always
from tests.patch.changed_weights import assert_same, each_profile, strided


@pytest.fixture(autouse=True)
def classes(monkeypatch):
    """Small data, too, is told apart by magnitude where `ctx` is asked for."""
    monkeypatch.setattr("sparserl.plan.buckets.choose_classes", always)


# Tied weights.


def tied(make, rows=40):
    """Two names for one memory, and a third tensor."""
    table = make((rows, 8))
    return {"embed": table, "head": table, "other": make((5,))}


makers = pytest.mark.parametrize(
    "make", [lambda shape: np.zeros(shape, np.float32), torch.zeros, strided], ids=["numpy", "torch", "torch strided"]
)


@makers
@each_profile
@pytest.mark.parametrize("density", [0.05, 1.0], ids=["sparse", "dense"])
def test_tied_tensors_are_patched_once(make, profile, density):
    """Names that share memory and change alike end at the new bits, not one step further."""
    weights = tied(make)
    rng = np.random.default_rng(8)
    old = {n: np.zeros(tuple(t.shape), np.float32) for n, t in weights.items()}
    new = {n: b.copy() for n, b in old.items()}
    new["embed"][rng.random((40, 8)) < density] = rng.random()
    if density == 1.0:
        new["embed"] = rng.random((40, 8)).astype(np.float32)
    new["head"] = new["embed"].copy()
    new["other"][2] = 1
    patch = sparserl.diff(old, new, profile=profile)
    assert patch.apply(weights).digest == patch.result
    assert_same({n: b.view(np.uint32) for n, b in new.items()}, weights)
    assert patch.apply(weights).already


@makers
@each_profile
@pytest.mark.parametrize("conflict", ["only one", "other bits", "other place"])
def test_tied_tensors_that_should_differ_are_refused(make, profile, conflict):
    """A patch that would have one memory hold two things raises `TiedConflict`, and nothing is touched."""
    weights = tied(make)
    old = {n: np.zeros(tuple(t.shape), np.float32) for n, t in weights.items()}
    new = {n: b.copy() for n, b in old.items()}
    new["other"][2] = 1
    new["embed"][3, 4] = 1
    if conflict == "other bits":
        new["head"][3, 4] = 2
    if conflict == "other place":
        new["head"][3, 5] = 1
    patch = sparserl.diff(old, new, profile=profile)
    with pytest.raises(TiedConflict, match=r"'embed'.*'head'|'head'.*'embed'"):
        patch.apply(weights)
    assert_same({n: b.view(np.uint32) for n, b in old.items()}, weights)


def test_tied_tensors_may_be_told_differently():
    """One name by a dense entry, the other by rows of which some are untouched: what counts is what changes."""
    rng = np.random.default_rng(9)
    old = {n: np.zeros((400, 16), np.uint8) for n in ("embed", "head")}
    new = {n: b.copy() for n, b in old.items()}
    new["embed"][:200] = rng.integers(1, 256, (200, 16), np.uint8)
    new["head"][:] = new["embed"]
    table = sparserl.tensor_table(old)
    top_half, low_half = Region((0, 0), (200, 16)), Region((200, 0), (200, 16))
    parts = [diff_shards({"embed": old["embed"]}, {"embed": new["embed"]}, table=table, profile="raw")]
    for region in (top_half, low_half):
        a, b = ({"head": w["head"][region.slices]} for w in (old, new))
        parts.append(diff_shards(a, b, table=table, regions={"head": region}, profile="raw"))
    patch = sparserl.merge(*parts)
    assert {e.tensor for e in patch if e.dense} == {"embed", "head"}
    assert sum(e.elements for e in patch if e.tensor == "embed") != sum(e.elements for e in patch if e.tensor == "head")
    shared = np.zeros((400, 16), np.uint8)
    patch.apply({"embed": shared, "head": shared})
    assert (shared == new["head"]).all()


# Tables that do not match.


def renamed(weights):
    return {("y" if n == "w" else n): t for n, t in weights.items()}


MISMATCHES = {
    "new": (lambda w: {**w, "extra": np.zeros(2, np.float32)}, ["extra"]),
    "missing": (lambda w: {n: t for n, t in w.items() if n != "w"}, ["'w'"]),
    "renamed": (renamed, ["'w'", "'y'"]),
    "reshaped": (lambda w: {**w, "w": w["w"].reshape(6, 4)}, ["'w'", "float32[4, 6]", "float32[6, 4]"]),
    "retyped": (lambda w: {**w, "w": w["w"].view(np.int32)}, ["'w'", "float32[4, 6]", "int32[4, 6]"]),
    "several": (
        lambda w: {"v": w["v"].reshape(1, 3), "x": w["w"]},
        ["'v'", "float32[3]", "float32[1, 3]", "'w'", "'x'"],
    ),
    "everything gone": (lambda w: {}, ["'v'", "'w'"]),
}


@pytest.mark.parametrize("kind", MISMATCHES)
def test_mismatched_tables_are_refused_by_name(kind):
    """Diff and apply name every tensor that is new, missing, reshaped or retyped; nothing is touched."""
    old = {"v": np.zeros(3, np.float32), "w": np.zeros((4, 6), np.float32)}
    new = {"v": np.ones(3, np.float32), "w": np.ones((4, 6), np.float32)}
    patch = sparserl.diff(old, new)
    alter, words = MISMATCHES[kind]
    for call in (
        lambda: sparserl.diff(old, alter(new)),
        lambda: sparserl.diff(alter(old), new),
        lambda: patch.apply(alter(old)),
        lambda: patch.invert(alter(old)),
        lambda: sparserl.squash(patch, base=alter(old)),
    ):
        with pytest.raises(TensorMismatch) as caught:
            call()
        assert all(word in str(caught.value) for word in words)
    assert all((t == 0).all() for t in old.values())


def test_a_long_list_of_mismatches_is_cut():
    """The first ten are named, the rest is counted."""
    old = {f"t{i:02}": np.zeros(1, np.float32) for i in range(15)}
    with pytest.raises(TensorMismatch, match=r"15 tensor\(s\) differ.*t09.*and 5 more"):
        sparserl.diff(old, {})
